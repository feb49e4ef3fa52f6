"""Convert a launch script or a configuration of another framework to the command line of this project.

The program is megatron_lab/commands/migrate.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.migrate import main

if __name__ == "__main__":
    sys.exit(main())
