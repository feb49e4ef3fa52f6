"""Write a report of a run, or a comparison of several runs, from their history: one HTML file that opens without network access.

The program is megatron_lab/commands/report.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.report import main

if __name__ == "__main__":
    sys.exit(main())
