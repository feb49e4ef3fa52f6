"""Inspect an indexed dataset, or the samples that a training run reads.

The program is megatron_lab/commands/inspect_data.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.inspect_data import main

if __name__ == "__main__":
    sys.exit(main())
