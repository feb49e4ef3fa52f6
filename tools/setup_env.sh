# Make the project's own Python environment, .venv in the repository root; sourced by bash, also put it on PATH.
#
#   source tools/setup_env.sh [EXTRA ...]     extras of pyproject.toml to install as well, such as: dev
#   bash tools/setup_env.sh [EXTRA ...]       only make it, and say how to use it
#
# The first call installs; later calls see that nothing has changed and return at once. tools/constraints.txt bounds the versions.
#
#   PYTHON=python3.12    the Python to make .venv with (the first python3 on PATH that was built with optimization; else the first)
#   NO_SETUP=1           use the environment that is active now, as it is, for example a container's with its own torch

_setup_fail() {
    echo "setup: $1" >&2
    exit 1
}

_setup_check_python() {
    command -v "$1" > /dev/null 2>&1 || _setup_fail "there is no '$1'. Install Python 3.11 or newer, or name one: PYTHON=/path/to/python3"
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        _setup_fail "$1 is $("$1" -V 2>&1), but Python 3.11 or newer is needed. Name one: PYTHON=/path/to/python3"
}

# Print the first python3 on PATH that was built with optimization: a distribution's, or one that says so. pyenv builds without, unless told
# to, and the same code then takes a third more time. It must be able to make environments, and to compile what torch generates.
_setup_fast_python() {
    local python found
    mapfile -t found < <(type -aP python3)
    for python in "${found[@]}"; do
        "$python" -c 'if True:
            import ensurepip, os, sys, sysconfig, venv
            optimized = sys.base_prefix == "/usr" or "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
            headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
            sys.exit(not (optimized and headers and sys.version_info >= (3, 11)))' 2> /dev/null && echo "$python" && return
    done
    echo python3
}

_setup_make_venv() {
    if [[ -z $1 ]]; then
        set -- "$(_setup_fast_python)" "$2"
        [[ $1 == python3 || $1 == "$(type -P python3)" ]] ||
            echo "setup: taking $1, since $(type -P python3) was built without optimization (PYTHON=python3 takes it nevertheless)"
    fi
    _setup_check_python "$1"
    "$1" -c 'import ensurepip, venv' 2> /dev/null ||
        _setup_fail "$1 cannot make environments, because its venv module is missing. Debian and Ubuntu have it in the package python3-venv."
    echo "setup: making .venv with $("$1" -V 2>&1)"
    "$1" -m venv --clear "$2" || _setup_fail "could not make $2"
}

_setup() {
    local root venv wanted extras stamp group
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    if [[ -n ${NO_SETUP:-} ]]; then
        command -v python > /dev/null 2>&1 ||
            _setup_fail "NO_SETUP=1 takes the active environment, but there is no 'python': activate one, or leave NO_SETUP out"
        _setup_check_python python
        export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
        return
    fi
    venv=$root/.venv
    extras=$(IFS=, && echo "$*")
    # What an installation depends on: the requirements, and where the repository lies.
    wanted=$(cd "$root" && { cat pyproject.toml setup.py requirements.txt tools/constraints.txt && pwd; } | cksum)
    if [[ ! -x $venv/bin/python ]]; then
        _setup_make_venv "${PYTHON:-}" "$venv"
    elif [[ -n ${PYTHON:-} && "$("$PYTHON" -V 2>&1)" != "$("$venv/bin/python" -V 2>&1)" ]]; then
        echo "setup: .venv has $("$venv/bin/python" -V 2>&1), but PYTHON=$PYTHON asks for another"
        _setup_make_venv "$PYTHON" "$venv"
    elif ! "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
        _setup_make_venv "${PYTHON:-}" "$venv" # half made, moved, or of an older Python
    fi
    export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
    unset PYTHONHOME
    for stamp in "$venv"/installed "$venv"/installed-*; do
        [[ -f $stamp && $(cat "$stamp") == "$wanted" ]] || continue
        group=${stamp##*/installed}
        [[ -z $extras || $group == "-$extras" ]] && return
    done
    echo "setup: installing the project${extras:+ with $extras} into .venv (the first time this takes minutes: torch is large)"
    # --no-compile: compiling all modules takes as long as installing them. Python compiles those that are imported, the first time.
    python -m pip install --disable-pip-version-check --no-compile $([[ -t 1 ]] || echo --quiet) \
        --constraint "$root/tools/constraints.txt" --editable "$root${extras:+[$extras]}" ||
        _setup_fail "pip could not install the project; its messages are above"
    rm -f "$venv"/installed "$venv"/installed-*
    echo "$wanted" > "$venv/installed${extras:+-$extras}"
}

_setup "$@"
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    echo "setup: ready. For this shell: source $(cd "$(dirname "$0")/.." && pwd)/.venv/bin/activate"
fi
