"""Report how evenly the routers of a model distribute tokens over experts: the most and least used experts of each layer, and a
picture.

The program is megatron_lab/commands/inspect_routing.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.inspect_routing import main

if __name__ == "__main__":
    sys.exit(main())
