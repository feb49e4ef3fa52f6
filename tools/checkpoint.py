"""Inspect, check, compare, reshard, import and export checkpoints. Tensors are read one at a time.

The program is megatron_lab/commands/checkpoint.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
