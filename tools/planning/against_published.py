"""Compare predicted step times with published ones. The errors are listed by publication, by device and by software, and for the
choice between layouts of one group.

The program is megatron_lab/commands/against_published.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started from any folder

from megatron_lab.commands.against_published import main

if __name__ == "__main__":
    sys.exit(main())
