"""Compare predicted with published memory of runs of other frameworks. The prediction uses the bytes per parameter and per
activation of their software.

The program is megatron_lab/commands/published_memory.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started from any folder

from megatron_lab.commands.published_memory import main

if __name__ == "__main__":
    sys.exit(main())
