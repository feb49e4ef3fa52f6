# Find the Python that runs the project, from any shell and any folder. bash scripts source this file.

# find_python ROOT: print the Python to use: PYTHON if it is set, otherwise the first of `python`, the Python of ROOT/.venv and `python3` that
# has the required packages. If there is none, print in one line how to create an environment, and return 1.
find_python() {
    local candidate check_packages="import sys; from importlib.util import find_spec as has
sys.exit(not all(map(has, ('torch', 'numpy', 'yaml', 'tyro', 'safetensors'))))"
    for candidate in "${PYTHON:-}" python "$1/.venv/bin/python" python3; do
        [[ -n $candidate ]] && command -v "$candidate" > /dev/null 2>&1 || continue
        if [[ $candidate == "${PYTHON:-}" ]] || "$candidate" -c "$check_packages" 2> /dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "${0##*/}: no Python on this machine has the required packages. Create an environment: bash $1/tools/setup_env.sh (or select a Python: PYTHON=/path/to/python)" >&2
    return 1
}
