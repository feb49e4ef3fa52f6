# Create the Python environment of the project, .venv in the repository root. If bash sources this file, also put it on PATH.
#
#   source tools/setup_env.sh [EXTRA ...]     also install these extras of pyproject.toml, for example dev
#   bash tools/setup_env.sh [EXTRA ...]       only create the environment, and print how to activate it
#
# The first call installs the packages. Later calls return at once if nothing has changed. tools/constraints.txt limits the versions.
#
#   PYTHON=python3.12    the Python for .venv (the first python3 on PATH that was built with optimization, otherwise the first python3)
#   NO_SETUP=1           use the active environment without changes, for example that of a container with its own torch

_setup_fail() {
    echo "setup: $1" >&2
    exit 1
}

_setup_check_python() {
    command -v "$1" > /dev/null 2>&1 || _setup_fail "there is no '$1'. Install Python 3.11 or newer, or name one: PYTHON=/path/to/python3"
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        _setup_fail "$1 is $("$1" -V 2>&1), but Python 3.11 or newer is needed. Name one: PYTHON=/path/to/python3"
}

# Print the first python3 on PATH that was built with optimization (the python3 of the distribution, or a build that reports
# --enable-optimizations). By default pyenv builds without optimization, and Python code then takes a third more time. The python3 must also
# have the modules for environments and the headers that torch.compile needs.
_setup_fast_python() {
    local python candidates
    mapfile -t candidates < <(type -aP python3)
    for python in "${candidates[@]}"; do
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
            echo "setup: using $1, because $(type -P python3) was built without optimization (PYTHON=python3 uses it nevertheless)"
    fi
    _setup_check_python "$1"
    "$1" -c 'import ensurepip, venv' 2> /dev/null ||
        _setup_fail "$1 cannot create environments, because its venv module is missing. Debian and Ubuntu have it in the package python3-venv."
    echo "setup: creating .venv with $("$1" -V 2>&1)"
    "$1" -m venv --clear "$2" || _setup_fail "could not create $2"
}

_setup() {
    local root venv fingerprint extras stamp group
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    if [[ -n ${NO_SETUP:-} ]]; then
        command -v python > /dev/null 2>&1 ||
            _setup_fail "NO_SETUP=1 uses the active environment, but there is no 'python': activate one, or leave NO_SETUP out"
        _setup_check_python python
        export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
        return
    fi
    venv=$root/.venv
    extras=$(IFS=, && echo "$*")
    # An installation depends on the requirements and on the path of the repository.
    fingerprint=$(cd "$root" && { cat pyproject.toml setup.py requirements.txt tools/constraints.txt && pwd; } | cksum)
    if [[ ! -x $venv/bin/python ]]; then
        _setup_make_venv "${PYTHON:-}" "$venv"
    elif [[ -n ${PYTHON:-} && "$("$PYTHON" -V 2>&1)" != "$("$venv/bin/python" -V 2>&1)" ]]; then
        echo "setup: .venv has $("$venv/bin/python" -V 2>&1), but PYTHON=$PYTHON is another version"
        _setup_make_venv "$PYTHON" "$venv"
    elif ! "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
        _setup_make_venv "${PYTHON:-}" "$venv" # incomplete, moved, or of an older Python
    fi
    export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
    unset PYTHONHOME
    for stamp in "$venv"/installed "$venv"/installed-*; do
        [[ -f $stamp && $(cat "$stamp") == "$fingerprint" ]] || continue
        group=${stamp##*/installed}
        [[ -z $extras || $group == "-$extras" ]] && return
    done
    echo "setup: installing the project${extras:+ with $extras} into .venv"
    echo "setup: the first time this takes minutes, because torch is large"
    # --no-compile: compiling all modules takes as long as installing them. Python compiles a module when it is first imported.
    python -m pip install --disable-pip-version-check --no-compile $([[ -t 1 ]] || echo --quiet) \
        --constraint "$root/tools/constraints.txt" --editable "$root${extras:+[$extras]}" ||
        _setup_fail "pip could not install the project; its messages are above"
    rm -f "$venv"/installed "$venv"/installed-*
    echo "$fingerprint" > "$venv/installed${extras:+-$extras}"
}

_setup "$@"
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    echo "setup: ready. For this shell: source $(cd "$(dirname "$0")/.." && pwd)/.venv/bin/activate"
fi
