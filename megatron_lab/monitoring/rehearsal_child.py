"""Entry point of the process that replaces a planning child process if CUDA was used before the fork (`rehearsal`).

Its arguments are the file descriptors of two pipes: the first receives the settings, the second sends the result.
"""

from __future__ import annotations

import sys

from megatron_lab.monitoring.rehearsal import serve_request

if __name__ == "__main__":
    serve_request(*map(int, sys.argv[1:]))
