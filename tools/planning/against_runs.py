"""Compare predicted step times with times that are measured on this machine. The measurements are small runs at different layouts,
which take turns.

The program is megatron_lab/commands/against_runs.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started from any folder

from megatron_lab.commands.against_runs import main

if __name__ == "__main__":
    sys.exit(main())
