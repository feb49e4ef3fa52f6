"""Where the tokens come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TokenizerType = Literal[
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "NullTokenizer",
    "ByteTokenizer",
]
DataOrder = Literal["epoch", "megatron"]
TiktokenPattern = Literal["v1", "v2"]


@dataclass(frozen=True)
class DataConfig:
    """The indexed datasets, their blend, split and order, documents in a sample, the tokenizer and the loader."""

    data_path: tuple[str, ...] = ()
    """Prefix of an indexed dataset (PREFIX.bin and PREFIX.idx); or a blend: WEIGHT PREFIX WEIGHT PREFIX ..., or several prefixes,
    weighed by their size. --split divides each into training, validation and test."""
    train_data_path: tuple[str, ...] = ()
    """As --data-path, for training alone: all documents of these datasets."""
    valid_data_path: tuple[str, ...] = ()
    """As --data-path, for validation alone."""
    test_data_path: tuple[str, ...] = ()
    """As --data-path, for the test at the end alone."""
    data_args_path: str | None = None
    """File that holds the words of --data-path, for blends too long for a command line."""
    per_split_data_args_path: str | None = None
    """JSON file {"train": [...], "valid": [...], "test": [...]} with the words of the three paths above."""
    data_cache_path: str | None = None
    """Folder for the indexes of large datasets (by default a folder `cache` beside each dataset)."""
    split: str = "969, 30, 1"
    """Shares of the documents for training, validation and test."""
    data_order: DataOrder = "epoch"
    """Order of the samples: epoch shuffles each epoch apart, so a longer run only appends; megatron is Megatron-LM's, in which the
    length of the run changes the order."""
    mock_data: bool = False
    """Train on made-up, learnable tokens instead of a dataset."""
    num_workers: int = 2
    """Threads that read samples ahead; 0 reads in the training loop."""
    reset_position_ids: bool = False
    """Count positions from 0 in each document of a sample."""
    reset_attention_mask: bool = False
    """No attention from one document of a sample to another."""
    eod_mask_loss: bool = False
    """Leave out of the loss what follows an end-of-document token."""
    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer. Required."""
    tokenizer_model: str | None = None
    """File of a sentencepiece or tiktoken tokenizer; tokenizer.json, or its folder, of HuggingFaceTokenizer."""
    vocab_file: str | None = None
    """vocab.json (or encoder.json) of a GPT-2 BPE tokenizer."""
    merge_file: str | None = None
    """merges.txt (or vocab.bpe) of a GPT-2 BPE tokenizer."""
    vocab_size: int | None = None
    """Size of the vocabulary of NullTokenizer (its end-of-document id comes on top), or to which TikTokenizer cuts its file; with
    the other files, rows of the word embedding, for models that have more than their tokenizer has ids."""
    tiktoken_pattern: TiktokenPattern = "v2"
    """How TikTokenizer splits text into pieces: v1 (digits and words as GPT-4) or v2 (letters by case)."""
    tiktoken_num_special_tokens: int = 1000
    """Ids below this one are special tokens of TikTokenizer."""
    tiktoken_special_tokens: tuple[str, ...] = ("<unk>", "<s>", "</s>")
    """Names of TikTokenizer's first special tokens."""
