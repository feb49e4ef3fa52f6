"""Where the tokens come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.setting import GIVEN, Beside, acts_with, idle_with, setting

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

TOKENIZER_NEEDS: dict[str, tuple[str, ...]] = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
    "ByteTokenizer": (),
}
"""The settings that each kind of tokenizer is made from."""
TOKENIZER_TAKES: dict[str, tuple[str, ...]] = {
    "TikTokenizer": ("vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens"),
}
"""Further settings that act on a kind of tokenizer."""
TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")
"""Those that name a file."""
TOKENIZER_SETTINGS = tuple(
    dict.fromkeys(field for table in (TOKENIZER_NEEDS, TOKENIZER_TAKES) for kind in table.values() for field in kind)
)
"""All settings of tokenizers beside their type."""


def tokenizer_settings(kind: str) -> tuple[str, ...]:
    """Settings that act on a kind of tokenizer."""
    return TOKENIZER_NEEDS[kind] + TOKENIZER_TAKES.get(kind, ())


def run_settings(kind: str) -> tuple[str, ...]:
    """Settings that act on a run with a kind of tokenizer: with files also the rows of the word embedding."""
    own = tokenizer_settings(kind)
    return own if "vocab_size" in own or kind == "ByteTokenizer" else (*own, "vocab_size")


def _tokenizers(field: str) -> Beside:
    """The kinds that a setting acts on; none is known yet where the tokenizer comes from a checkpoint."""
    kinds = [kind for kind in TOKENIZER_NEEDS if field in run_settings(kind)]
    return acts_with(f"with --tokenizer-type {' or '.join(kinds)}", fix={}, tokenizer_type=(None, *kinds))


_READ = acts_with("without --mock-data, whose samples are computed one by one", mock_data=False)


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
    data_cache_path: str | None = setting(None, acts=_READ)
    """Folder for the indexes of large datasets (by default a folder `cache` beside each dataset)."""
    split: str = setting(
        "969, 30, 1",
        idle=(
            idle_with("--mock-data makes up tokens for each split", mock_data=True),
            idle_with(
                "each split has datasets of its own",
                train_data_path=GIVEN,
                valid_data_path=GIVEN,
                test_data_path=GIVEN,
                per_split_data_args_path=GIVEN,
            ),
        ),
    )
    """Shares of the documents for training, validation and test."""
    data_order: DataOrder = setting("epoch", acts=_READ)
    """Order of the samples: epoch shuffles each epoch apart, so a longer run only appends; megatron is Megatron-LM's, in which the
    length of the run changes the order."""
    mock_data: bool = False
    """Train on made-up, learnable tokens instead of a dataset."""
    num_workers: int = setting(2, at_least=0, unit="threads")
    """Threads that read samples ahead; 0 reads in the training loop."""
    reset_position_ids: bool = setting(
        False, idle=idle_with("--position-embedding-type none uses no positions", position_embedding_type="none")
    )
    """Count positions from 0 in each document of a sample."""
    reset_attention_mask: bool = False
    """No attention from one document of a sample to another."""
    eod_mask_loss: bool = False
    """Leave out of the loss what follows an end-of-document token."""
    tokenizer_type: TokenizerType | None = setting(None, required=True)
    """Kind of tokenizer. Required."""
    tokenizer_model: str | None = setting(None, acts=_tokenizers("tokenizer_model"))
    """File of a sentencepiece or tiktoken tokenizer; tokenizer.json, or its folder, of HuggingFaceTokenizer."""
    vocab_file: str | None = setting(None, acts=_tokenizers("vocab_file"))
    """vocab.json (or encoder.json) of a GPT-2 BPE tokenizer."""
    merge_file: str | None = setting(None, acts=_tokenizers("merge_file"))
    """merges.txt (or vocab.bpe) of a GPT-2 BPE tokenizer."""
    vocab_size: int | None = setting(None, at_least=1, unit="rows of a table", acts=_tokenizers("vocab_size"))
    """Size of the vocabulary of NullTokenizer (its end-of-document id comes on top), or to which TikTokenizer cuts its file; with
    the other files, rows of the word embedding, for models that have more than their tokenizer has ids."""
    tiktoken_pattern: TiktokenPattern = setting("v2", acts=_tokenizers("tiktoken_pattern"))
    """How TikTokenizer splits text into pieces: v1 (digits and words as GPT-4) or v2 (letters by case)."""
    tiktoken_num_special_tokens: int = setting(1000, at_least=0, unit="tokens", acts=_tokenizers("tiktoken_num_special_tokens"))
    """Ids below this one are special tokens of TikTokenizer."""
    tiktoken_special_tokens: tuple[str, ...] = setting(("<unk>", "<s>", "</s>"), acts=_tokenizers("tiktoken_special_tokens"))
    """Names of TikTokenizer's first special tokens."""
