"""Find layouts for a job on a cluster: their speed, duration and cost, and the reasons against other layouts.

The program is megatron_lab/commands/plan.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
