#!/usr/bin/env bash
# All tests, on the CPU: bash tests/run.sh [--full] [pytest arguments, with paths from the repository root]
#
#   --full    every case of the large products of settings, instead of a subset in which every pair of settings occurs
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/tools/setup_env.sh" dev
cd "$root"
exec python -m pytest "$@"
