"""Generate text that continues a prompt.

The program is megatron_lab/commands/generate_text.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.generate_text import main

if __name__ == "__main__":
    sys.exit(main())
