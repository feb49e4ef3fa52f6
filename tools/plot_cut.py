"""Draw which context-parallel rank has which tokens of a sequence, and how much attention each rank computes.

The program is megatron_lab/commands/plot_cut.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.plot_cut import main

if __name__ == "__main__":
    sys.exit(main())
