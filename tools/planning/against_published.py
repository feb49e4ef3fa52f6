"""Compare predicted with published step times: errors by publication, device and software, and the ranking of each job's layouts.

The program is megatron_lab/commands/against_published.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started from any folder

from megatron_lab.commands.against_published import main

if __name__ == "__main__":
    sys.exit(main())
