"""Where the tokens come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TokenizerType = Literal[
    "GPT2BPETokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "NullTokenizer", "ByteTokenizer"
]


@dataclass(frozen=True)
class DataConfig:
    """The indexed dataset, its split, the tokenizer and the loader."""

    data_path: tuple[str, ...] = ()
    """Prefix of an indexed dataset (PREFIX.bin and PREFIX.idx)."""
    split: str = "969, 30, 1"
    """Shares of the documents for training, validation and test."""
    mock_data: bool = False
    """Train on made-up, learnable tokens instead of a dataset."""
    num_workers: int = 2
    """Threads that read samples ahead; 0 reads in the training loop."""
    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer. Required."""
    tokenizer_model: str | None = None
    """File of a sentencepiece tokenizer."""
    vocab_file: str | None = None
    """vocab.json (or encoder.json) of a GPT-2 BPE tokenizer."""
    merge_file: str | None = None
    """merges.txt (or vocab.bpe) of a GPT-2 BPE tokenizer."""
    vocab_size: int | None = None
    """Size of the vocabulary of NullTokenizer (its end-of-document id comes on top)."""
    eod_mask_loss: bool = False
    """Leave end-of-document tokens out of the loss."""
