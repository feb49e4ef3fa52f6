#!/usr/bin/env bash
# All tests, on the CPU: bash tests/run.sh [OPTION ...] [pytest arguments, with paths from the repository root]
#
#   --full         run all combinations of settings, instead of a subset in which every pair of settings occurs
#   --piece K/N    run every N-th test, starting with the K-th; N such runs cover all tests
#   --durations    print the 20 slowest tests and the CPU time of all processes at the end
#   -n WORKERS     number of processes that run tests (three for two cores, at most 8); -n 0 runs them in this process, for a debugger
#
# A run with failures ends with the command that repeats each failed test, and with its random seed or example. See tests/README.md.
#
# Random command lines, instead of the tests:
#
#   bash tests/run.sh --fuzz MINUTES [--fuzz-seed N]    start random command lines for this time; prints the seed
#   bash tests/run.sh --fuzz-repeat WORLD_SIZE ARG...   repeat one command line that a failure printed
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/tools/setup_env.sh" dev
cd "$root"
case "${1:-}" in
--fuzz*) exec python -m tests.trials.fuzz "$@" ;;
esac

args=() timed=
for arg in "$@"; do
    [[ $arg != --durations ]] || timed=yes arg=--durations=20
    args+=("$arg")
done
run=(python -m pytest -n auto --maxprocesses 8 --dist worksteal "${args[@]}")
[[ -n $timed ]] || exec "${run[@]}"

status=0
exec 3>&1 4>&2
TIMEFORMAT='%U %S %R'
spent=$({ time "${run[@]}" >&3 2>&4; } 2>&1) || status=$?
awk '{printf "CPU time of all processes: %.1f s (user %.1f s, system %.1f s), elapsed %.1f s\n", $1 + $2, $1, $2, $3}' <<< "$spent"
exit "$status"
