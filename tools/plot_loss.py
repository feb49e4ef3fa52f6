"""Draw the losses of a run from its history file: training and validation loss by iteration and tokens, and the learning rate.

The program is megatron_lab/commands/plot_loss.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.plot_loss import main

if __name__ == "__main__":
    sys.exit(main())
