"""Draw the data flow of a training step: samples, pipeline stages, a layer on tensor ranks, gradients, update.

The program is megatron_lab/commands/draw_step.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.draw_step import main

if __name__ == "__main__":
    sys.exit(main())
