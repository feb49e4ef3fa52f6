"""Show a pipeline schedule, as a timeline and a table in the terminal and as plots in files.

The program is megatron_lab/commands/plot_schedule.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.plot_schedule import main

if __name__ == "__main__":
    sys.exit(main())
