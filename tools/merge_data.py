"""Merge indexed datasets into one. Documents keep their order, tokens are copied unchanged, and loss masks are merged too.

The program is megatron_lab/commands/merge_data.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.merge_data import main

if __name__ == "__main__":
    sys.exit(main())
