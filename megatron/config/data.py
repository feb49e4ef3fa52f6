"""Where the tokens come from."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.config.regular_file import read_text
from megatron.config.setting import GIVEN, Beside, acts_with, idle_with, setting, typed

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
USUAL_ROWS = {
    "GPT2BPETokenizer": 50_257,  # GPT-2
    "HuggingFaceTokenizer": 128_256,  # Llama 3
    "TikTokenizer": 131_072,  # Mistral's Tekken, to which Megatron-LM cuts
    "SentencePieceTokenizer": 32_000,  # Llama 2
    "GPTSentencePieceTokenizer": 32_000,
    "Llama2Tokenizer": 32_000,
}
"""Rows of the word embedding that a plan takes where neither --vocab-size nor the tokenizer's files say how many there are."""
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


_READ_FROM_FILES = acts_with("without --mock-data, in which every token counts", mock_data=False)
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
    data_loss_mask: bool = setting(False, acts=_READ_FROM_FILES)
    """Count in the loss only tokens that the data marks as to be learned, such as the answers of a conversation: by the loss mask
    PREFIX_loss_mask of each dataset PREFIX that has one (tools/preprocess_data.py --chat-template writes it). It also says where
    documents end."""
    whole_documents: bool = setting(False, acts=acts_with(reset_attention_mask=True, strict=True))
    """Fill each sample with whole documents, such as conversations, as many as fit; only those that are longer than a sample are
    cut. What is left of a sample does not count in the loss."""
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


SPLIT_FIELDS = ("train_data_path", "valid_data_path", "test_data_path")
PATH_FIELDS = ("data_path", "data_args_path", *SPLIT_FIELDS, "per_split_data_args_path")
"""Settings that say where the datasets lie."""
_SPLIT_KEYS = ("train", "valid", "test")
SPLIT_NAMES = ("training", "validation", "test")


@dataclass(frozen=True)
class WeightedPrefix:
    """A dataset of a blend."""

    weight: float | None
    """As given; None for a blend that follows the sizes of its datasets."""
    prefix: str


def parse_data_words(words: Sequence[str], flag: str = "--data-path") -> list[WeightedPrefix]:
    """Datasets and weights: one prefix, several prefixes, or weights and prefixes in turn.

    Raises:
        ValueError: weights and prefixes do not alternate, a weight is negative or not finite, or all of them are 0.
    """
    form = f"{flag} takes PREFIX, or PREFIX PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ... (a prefix that is a number: ./{{}})"
    if not words:
        raise ValueError(f"{flag} has no value.\n  {form.format('7')}")
    if not any(map(is_number, words)):
        return [WeightedPrefix(None, word) for word in words]
    for at, word in enumerate(words):
        expected = "a prefix" if at % 2 else "a weight"
        if is_number(word) == bool(at % 2):
            raise ValueError(
                f"{flag} {' '.join(words)}: word {at + 1}, {word!r}, stands where {expected} belongs.\n  {form.format(word)}"
            )
    if len(words) % 2:
        raise ValueError(f"{flag} {' '.join(words)}: the last weight, {words[-1]}, has no prefix.\n  {form.format(words[-1])}")
    found = [WeightedPrefix(float(weight), prefix) for weight, prefix in zip(words[::2], words[1::2], strict=True)]
    for each in found:
        assert each.weight is not None
        if not (math.isfinite(each.weight) and each.weight >= 0):
            raise ValueError(f"{flag}: the weight of {each.prefix} is {each.weight}.\n  Weights are numbers of 0 or more.")
    if not any(each.weight for each in found):
        raise ValueError(f"{flag} {' '.join(words)}: all weights are 0.\n  Give at least one dataset a weight above 0.")
    return found


def split_words(data: DataConfig) -> tuple[bool, list[list[WeightedPrefix]]]:
    """Datasets and weights of training, validation and test, files of words read.

    Returns:
        whether the splits have datasets of their own (otherwise all three are the same, to be divided by --split), and the three
        lists (all empty for made-up data).

    Raises:
        ValueError: a file is missing or not what it should be, or words are no blend.
    """
    if data.mock_data:
        return False, [[], [], []]
    if has_own_splits(data):
        given = (data.train_data_path, data.valid_data_path, data.test_data_path)
        if data.per_split_data_args_path:
            given = _words_per_split(Path(data.per_split_data_args_path))
        return True, [
            parse_data_words(words, typed(field)) if words else [] for words, field in zip(given, SPLIT_FIELDS, strict=True)
        ]
    flag, words = "--data-path", data.data_path
    if data.data_args_path:
        flag = f"--data-args-path {data.data_args_path}"
        words = tuple(_read_text(Path(data.data_args_path), "--data-args-path").split())
    return False, [parse_data_words(words, flag)] * 3


def _words_per_split(path: Path) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    flag = "--per-split-data-args-path"
    form = f'{flag} takes a JSON file {{"train": ["WEIGHT", "PREFIX", ...], "valid": [...], "test": [...]}}; train must be there.'
    try:
        found = json.loads(_read_text(path, flag))
    except ValueError as error:
        raise ValueError(f"{flag} {path}: {error}\n  {form}") from error
    if not isinstance(found, dict) or not found.get("train") or not set(found) <= set(_SPLIT_KEYS):
        raise ValueError(f"{flag} {path} has other entries than train, valid and test, or no train.\n  {form}")
    if not all(isinstance(words, list) and all(isinstance(word, str | int | float) for word in words) for words in found.values()):
        raise ValueError(f"{flag} {path}: an entry is not a list of words.\n  {form}")
    train, valid, test = (tuple(map(str, found.get(name, ()))) for name in _SPLIT_KEYS)
    return train, valid, test


def _read_text(path: Path, flag: str) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"{flag} {path} cannot be read: {reason}.\n  Check the path.") from error


def path_flags(data: DataConfig) -> list[str]:
    """Fields that say where the datasets lie, as far as they are given."""
    return [field for field in PATH_FIELDS if getattr(data, field)]


def has_own_splits(data: DataConfig) -> bool:
    """Whether training, validation and test have datasets of their own."""
    return any(getattr(data, field) for field in (*SPLIT_FIELDS, "per_split_data_args_path"))


def is_number(text: str) -> bool:
    """Whether a word is a number, infinities and nan included."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def parse_split(text: str) -> tuple[float, float, float]:
    """Shares of the three splits, summing to 1, from ``--split``; missing entries are 0.

    Raises:
        ValueError: not one to three numbers, a negative one, or none above 0.
    """
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    total = sum(shares)
    if not 1 <= len(shares) <= 3 or any(share < 0 for share in shares) or not 0 < total < float("inf"):
        raise ValueError(
            f"--split {text!r} must be one to three numbers that are not negative and not all 0 (training, validation, test), "
            "separated by commas.\n  For example: --split 969,30,1"
        )
    first, second, third = (share / total for share in [*shares, 0.0, 0.0][:3])
    return first, second, third
