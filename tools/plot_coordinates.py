"""Check that learning rates hold at other widths (muP): a table of how much activations change in the first updates, and a
picture.

The program is megatron_lab/commands/plot_coordinates.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.plot_coordinates import main

if __name__ == "__main__":
    sys.exit(main())
