#!/usr/bin/env bash
# All tests, on the CPU: bash tests/run.sh [--full] [pytest arguments, with paths from the repository root]
#
#   --full         every case of the large products of settings, instead of a subset in which every pair of settings occurs
#   --piece K/N    every N-th test, beginning with the K-th: a whole run in N pieces
#   -n WORKERS     processes that run tests (one for each core, 8 at most); -n 0 runs them in this one, for a debugger
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
--fuzz*) exec python -m tests.support.fuzz "$@" ;;
*) exec python -m pytest -n auto --maxprocesses 8 --dist worksteal "$@" ;;
esac
