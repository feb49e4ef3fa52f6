"""Entry point of a new process that plans a job if the parent had already used CUDA (`rehearsal`). Its arguments are the file
descriptors of two pipes."""

from __future__ import annotations

import sys

from megatron_lab.monitoring.rehearsal import serve_request

if __name__ == "__main__":
    serve_request(*map(int, sys.argv[1:]))
