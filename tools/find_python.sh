# To be sourced by bash: which Python runs the project, from any shell and any folder.

# find_python ROOT: print it. PYTHON counts, then the `python` of this shell if it has what the project needs, then that of ROOT/.venv.
# Where there is none, say in one line how to make one, and return 1.
find_python() {
    local found needed="import sys; from importlib.util import find_spec as has
sys.exit(not all(map(has, ('torch', 'numpy', 'yaml', 'tyro', 'safetensors'))))"
    for found in "${PYTHON:-}" python "$1/.venv/bin/python" python3; do
        [[ -n $found ]] && command -v "$found" > /dev/null 2>&1 || continue
        if [[ $found == "${PYTHON:-}" ]] || "$found" -c "$needed" 2> /dev/null; then
            echo "$found"
            return
        fi
    done
    echo "${0##*/}: no Python here has what the project needs. Make one: bash $1/tools/setup_env.sh (or name one: PYTHON=/path/to/python)" >&2
    return 1
}
