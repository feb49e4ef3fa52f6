"""Check the GPU of this machine in a few minutes: limits, kernels against float64, speed in comparison with plain torch, memory,
and complete runs.

The program is megatron_lab/commands/check_gpu.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.check_gpu import main

if __name__ == "__main__":
    sys.exit(main())
