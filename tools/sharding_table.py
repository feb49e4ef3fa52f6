"""Print, in markdown, the memory and communication per rank of published models under each sharding strategy.

The program is megatron_lab/commands/sharding_table.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.sharding_table import main

if __name__ == "__main__":
    sys.exit(main())
