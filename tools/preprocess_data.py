"""Build an indexed dataset (.bin and .idx) from JSON lines (.jsonl, also .gz and .zst), parquet, tables or folders of plain text.

The program is megatron_lab/commands/preprocess_data.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.preprocess_data import main

if __name__ == "__main__":
    sys.exit(main())
