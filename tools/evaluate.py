"""Evaluate a model: its perplexity on files, or tasks of lm-evaluation-harness.

The program is megatron_lab/commands/evaluate.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
