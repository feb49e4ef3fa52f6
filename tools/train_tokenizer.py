"""Train the vocabulary of a tokenizer on a sample of texts.

The program is megatron_lab/commands/train_tokenizer.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.commands.train_tokenizer import main

if __name__ == "__main__":
    sys.exit(main())
