"""GPT-2's byte-level BPE from vocab.json and merges.txt."""

from __future__ import annotations

from pathlib import Path

from megatron.data.tokenizers.bpe_files import read_bpe_files
from megatron.data.tokenizers.byte_bpe import ByteBPETokenizer


class GPT2BPETokenizer(ByteBPETokenizer):
    """Byte-level BPE with GPT-2's splitting into pieces; the end of a document is ``<|endoftext|>``.

    Args:
        vocab_file: vocab.json (or encoder.json).
        merge_file: merges.txt (or vocab.bpe).

    Raises:
        ValueError: a file is not what it should be, or the two do not belong together.
    """

    def __init__(self, vocab_file: Path, merge_file: Path) -> None:
        super().__init__(read_bpe_files(vocab_file, merge_file))
