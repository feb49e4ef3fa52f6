"""Simulate device failures: the fraction of time in which a job trains, and the best interval between saves.

The program is megatron_lab/commands/simulate_failures.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.simulate_failures import main

if __name__ == "__main__":
    sys.exit(main())
