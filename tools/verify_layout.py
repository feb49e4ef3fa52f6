"""Prove that a layout trains like a single process, for the flags of a launch command.

The program is megatron_lab/commands/verify_layout.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.verify_layout import main

if __name__ == "__main__":
    sys.exit(main())
