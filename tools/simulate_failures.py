"""What share of its time a job trains, where devices fail, and how often it should save.

The program is megatron_lab/commands/simulate_failures.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.simulate_failures import main

if __name__ == "__main__":
    sys.exit(main())
