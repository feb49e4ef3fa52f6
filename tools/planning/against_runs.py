"""Compare predicted step times with those of small runs at different layouts on this machine.

The program is megatron_lab/commands/against_runs.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started from any folder

from megatron_lab.commands.against_runs import main

if __name__ == "__main__":
    sys.exit(main())
