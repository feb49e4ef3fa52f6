"""Draw the order in which an indexed dataset is read: its documents, and the samples of each epoch.

The program is megatron_lab/commands/plot_data_order.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.plot_data_order import main

if __name__ == "__main__":
    sys.exit(main())
