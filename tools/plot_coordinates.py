"""Check that learning rates transfer to other model widths (muP). A table and a plot show how much activations change in the first
updates, by width.

The program is megatron_lab/commands/plot_coordinates.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.plot_coordinates import main

if __name__ == "__main__":
    sys.exit(main())
