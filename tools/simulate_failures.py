"""Simulate how much of its time a job spends on training if devices fail, and find the best interval between saves.

The program is megatron_lab/commands/simulate_failures.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.simulate_failures import main

if __name__ == "__main__":
    sys.exit(main())
