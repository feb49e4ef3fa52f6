"""Check all nodes of a job before it starts, and report what is wrong on which node.

The program is megatron_lab/commands/check_cluster.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.check_cluster import main

if __name__ == "__main__":
    sys.exit(main())
