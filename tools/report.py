"""Write an HTML report about a run from its record, in a single file that needs no network. For several runs the report compares
them.

The program is megatron_lab/commands/report.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.report import main

if __name__ == "__main__":
    sys.exit(main())
