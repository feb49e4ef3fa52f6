#!/usr/bin/env bash
# All tests, on the CPU: bash tests/run.sh [OPTION ...] [pytest arguments, with paths from the repository root]
#
#   --full         every case of the large products of settings, instead of a subset in which every pair of settings occurs
#   --piece K/N    every N-th test, beginning with the K-th: a whole run in N pieces
#   --durations    at the end the 20 slowest tests, and the processor time of all processes together
#   -n WORKERS     processes that run tests (three for two cores, 8 at most); -n 0 runs them in this one, for a debugger
#
# A run that fails ends with the command that repeats each test alone, and with its seed or example. tests/README.md says more.
#
# Random command lines, instead of the tests:
#
#   bash tests/run.sh --fuzz MINUTES [--fuzz-seed N]    draw, and run or see refused, until the time is over; tells the seed
#   bash tests/run.sh --fuzz-repeat WORLD_SIZE ARG...   one command line alone, as a failure tells it
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/tools/setup_env.sh" dev
cd "$root"
case "${1:-}" in
--fuzz*) exec python -m tests.trials.fuzz "$@" ;;
esac

words=() timed=
for word in "$@"; do
    [[ $word != --durations ]] || timed=yes word=--durations=20
    words+=("$word")
done
run=(python -m pytest -n auto --maxprocesses 8 --dist worksteal "${words[@]}")
[[ -n $timed ]] || exec "${run[@]}"

status=0
exec 3>&1 4>&2
TIMEFORMAT='%U %S %R'
spent=$({ time "${run[@]}" >&3 2>&4; } 2>&1) || status=$?
awk '{printf "processor time of all processes: %.1f s (user %.1f s, system %.1f s), elapsed %.1f s\n", $1 + $2, $1, $2, $3}' <<< "$spent"
exit "$status"
