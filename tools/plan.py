"""Find the best layout for a job on a cluster: its speed, duration and price, and why other layouts are worse.

The program is megatron_lab/commands/plan.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
