"""Show the memory of a rank over a step, as a table in the terminal and as a plot.

The program is megatron_lab/commands/plot_memory.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.plot_memory import main

if __name__ == "__main__":
    sys.exit(main())
