"""Make a page of how a run went, from its record: one HTML file that opens without a network. Of several runs they are compared.

The program is megatron_lab/commands/report.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.report import main

if __name__ == "__main__":
    sys.exit(main())
