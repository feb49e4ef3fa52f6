"""Draw the split of a sequence over the context ranks: the tokens of each rank, and its attention work.

The program is megatron_lab/commands/plot_cut.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.plot_cut import main

if __name__ == "__main__":
    sys.exit(main())
