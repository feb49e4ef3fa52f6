"""The plan of a job in a fresh process, where this one had used CUDA before (see `rehearsal`): started with two ends of pipes."""

from __future__ import annotations

import sys

from megatron_lab.monitoring.rehearsal import serve

if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
