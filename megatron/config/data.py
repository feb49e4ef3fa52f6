"""Settings of the data: datasets and their blend, tokenizer and loader; and parsers for the values of these flags."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.config.regular_file import find_path_problem, parse_json, read_text, shorten_path
from megatron.config.setting import IS_SET, Condition, condition, get_flag_name, idle_condition, setting

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

TOKENIZER_REQUIRED: dict[str, tuple[str, ...]] = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
    "ByteTokenizer": (),
}
"""Settings that each tokenizer type requires."""
TOKENIZER_OPTIONAL: dict[str, tuple[str, ...]] = {
    "TikTokenizer": ("vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens"),
}
"""Further settings that have an effect on a tokenizer type."""
TOKENIZER_FILE_SETTINGS = ("tokenizer_model", "vocab_file", "merge_file")
"""Tokenizer settings whose value is a file."""
DEFAULT_VOCAB_SIZES = {
    "GPT2BPETokenizer": 50_257,  # GPT-2
    "HuggingFaceTokenizer": 128_256,  # Llama 3
    "TikTokenizer": 131_072,  # Mistral's Tekken, as truncated by Megatron-LM
    "SentencePieceTokenizer": 32_000,  # Llama 2
    "GPTSentencePieceTokenizer": 32_000,
    "Llama2Tokenizer": 32_000,
}
"""Rows of the word embedding that a plan assumes if neither --vocab-size nor the tokenizer's files determine them."""
TOKENIZER_SETTINGS = tuple(
    dict.fromkeys(field for table in (TOKENIZER_REQUIRED, TOKENIZER_OPTIONAL) for kind in table.values() for field in kind)
)
"""All settings of tokenizers except --tokenizer-type."""


def get_tokenizer_settings(tokenizer_type: str) -> tuple[str, ...]:
    """Return the names of the settings that a tokenizer of this type reads, such as `vocab_file`."""
    return TOKENIZER_REQUIRED[tokenizer_type] + TOKENIZER_OPTIONAL.get(tokenizer_type, ())


def get_run_tokenizer_settings(tokenizer_type: str) -> tuple[str, ...]:
    """Return the names of the settings that have an effect on a run with a tokenizer of this type.

    For tokenizers read from files they include `vocab_size`, which sets the rows of the word embedding.
    """
    settings = get_tokenizer_settings(tokenizer_type)
    return settings if "vocab_size" in settings or tokenizer_type == "ByteTokenizer" else (*settings, "vocab_size")


def _build_tokenizer_condition(field: str) -> Condition:
    """Build the condition under which a tokenizer setting has an effect: a tokenizer type that uses the setting.

    A missing tokenizer type also meets the condition, because the type may still be read from a checkpoint.

    Args:
        field: name of the tokenizer setting, such as `vocab_file`.
    """
    types = [type_name for type_name in TOKENIZER_REQUIRED if field in get_run_tokenizer_settings(type_name)]
    return condition(f"with --tokenizer-type {' or '.join(types)}", fix={}, tokenizer_type=(None, *types))


_USES_LOSS_MASK = condition("without --mock-data, whose tokens all count in the loss", mock_data=False)
_USES_DATASET = condition("without --mock-data, whose samples are generated", mock_data=False)


@dataclass(frozen=True)
class DataConfig:
    """Settings of the data: indexed datasets, their blend, split and sample order, documents in a sample, the tokenizer and the
    loader."""

    data_path: tuple[str, ...] = setting((), is_path=True)
    """Prefix of an indexed dataset (PREFIX.bin and PREFIX.idx), or a blend: WEIGHT PREFIX WEIGHT PREFIX ..., or several prefixes,
    weighted by their size. --split divides each dataset into training, validation and test."""
    train_data_path: tuple[str, ...] = setting((), is_path=True)
    """Prefix or blend, as in --data-path, for training only: all documents of these datasets are used."""
    valid_data_path: tuple[str, ...] = setting((), is_path=True)
    """Prefix or blend, as in --data-path, for validation only."""
    test_data_path: tuple[str, ...] = setting((), is_path=True)
    """Prefix or blend, as in --data-path, for the test at the end only."""
    data_args_path: str | None = setting(None, is_path=True)
    """File that contains the value of --data-path, for blends that are too long for a command line."""
    per_split_data_args_path: str | None = setting(None, is_path=True)
    """JSON file {"train": [...], "valid": [...], "test": [...]} with the values of --train-data-path, --valid-data-path and
    --test-data-path."""
    data_cache_path: str | None = setting(None, active_if=_USES_DATASET, is_path=True)
    """Folder for the indexes of large datasets; by default a folder `cache` next to each dataset."""
    split: str = setting(
        "969, 30, 1",
        idle_if=(
            idle_condition("--mock-data generates tokens for each split", mock_data=True),
            idle_condition(
                "each split has its own datasets",
                train_data_path=IS_SET,
                valid_data_path=IS_SET,
                test_data_path=IS_SET,
                per_split_data_args_path=IS_SET,
            ),
        ),
    )
    """Relative sizes of training, validation and test, by which the documents are divided. Their sum may be any number."""
    data_order: DataOrder = setting("epoch", active_if=_USES_DATASET)
    """Order of the samples: epoch shuffles each epoch separately, so a longer run starts with the same samples; megatron is
    Megatron-LM's order, which changes with the length of the run."""
    mock_data: bool = False
    """Train on generated, learnable tokens instead of a dataset."""
    num_workers: int = setting(2, min_value=0, max_value=1024, unit="threads")
    """Number of threads that prefetch samples; 0 reads them in the training loop."""
    reset_position_ids: bool = setting(
        False, idle_if=idle_condition("--position-embedding-type none uses no positions", position_embedding_type="none")
    )
    """Restart the positions at 0 in each document of a sample."""
    reset_attention_mask: bool = False
    """Mask attention between different documents of a sample."""
    eod_mask_loss: bool = False
    """Exclude from the loss the token that follows each end-of-document token."""
    data_loss_mask: bool = setting(False, active_if=_USES_LOSS_MASK)
    """Count in the loss only the tokens that the data marks for training, such as the answers of a conversation. The marks are in
    the loss mask PREFIX_loss_mask of each dataset PREFIX that has one (written by tools/preprocess_data.py --chat-template), which
    also marks the ends of documents."""
    whole_documents: bool = setting(False, active_if=condition(reset_attention_mask=True, strict=True))
    """Fill each sample with as many complete documents, such as conversations, as fit; only documents longer than a sample are cut.
    The padding at the end of a sample does not count in the loss."""
    tokenizer_type: TokenizerType | None = setting(None, required=True)
    """Type of the tokenizer. Required, unless other tokenizer flags determine it."""
    tokenizer_model: str | None = setting(None, active_if=_build_tokenizer_condition("tokenizer_model"), is_path=True)
    """File of a sentencepiece or tiktoken tokenizer, or tokenizer.json (or its folder) for HuggingFaceTokenizer."""
    vocab_file: str | None = setting(None, active_if=_build_tokenizer_condition("vocab_file"), is_path=True)
    """Vocabulary file vocab.json (or encoder.json) of a GPT-2 BPE tokenizer."""
    merge_file: str | None = setting(None, active_if=_build_tokenizer_condition("merge_file"), is_path=True)
    """Merges file merges.txt (or vocab.bpe) of a GPT-2 BPE tokenizer."""
    vocab_size: int | None = setting(None, min_value=1, unit="rows", active_if=_build_tokenizer_condition("vocab_size"))
    """Vocabulary size of NullTokenizer (without its end-of-document id), or the size to which TikTokenizer truncates its file. For
    other tokenizers with files: number of rows of the word embedding, if it exceeds the number of token ids."""
    tiktoken_pattern: TiktokenPattern = setting("v2", active_if=_build_tokenizer_condition("tiktoken_pattern"))
    """Pattern by which TikTokenizer splits text before BPE. v1 keeps words together; v2 also splits a word where a capital
    letter follows a small one. Both split numbers into single digits."""
    tiktoken_num_special_tokens: int = setting(
        1000, min_value=0, unit="tokens", active_if=_build_tokenizer_condition("tiktoken_num_special_tokens")
    )
    """Number of special tokens of TikTokenizer, which have the first ids."""
    tiktoken_special_tokens: tuple[str, ...] = setting(
        ("<unk>", "<s>", "</s>"), active_if=_build_tokenizer_condition("tiktoken_special_tokens")
    )
    """Names of TikTokenizer's first special tokens."""


SPLIT_FIELDS = ("train_data_path", "valid_data_path", "test_data_path")
PATH_FIELDS = ("data_path", "data_args_path", *SPLIT_FIELDS, "per_split_data_args_path")
"""Settings that name datasets."""
_SPLIT_KEYS = ("train", "valid", "test")
SPLIT_NAMES = ("training", "validation", "test")


@dataclass(frozen=True)
class WeightedPrefix:
    """Dataset of a blend (a weighted mixture of datasets): the path prefix of its files, and its weight."""

    weight: float | None
    """Weight of the dataset as given in the blend; None in a blend that is weighted by the sizes of its datasets."""
    prefix: str


def parse_blend(texts: Sequence[str], flag: str = "--data-path") -> list[WeightedPrefix]:
    """Parse the value of a flag into the datasets of a blend. The value is one path prefix, several prefixes, or alternating
    weights and prefixes.

    Args:
        texts: the words of the value.
        flag: the flag, for error messages.

    Raises:
        ValueError: weights and prefixes do not alternate, a weight is negative or not finite, or all weights are 0.
    """
    usage = (
        f"{flag} takes PREFIX, or PREFIX PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ... (write a prefix that is a number as ./{{}})"
    )
    if not texts:
        raise ValueError(f"{flag} has no value.\n  {usage.format('7')}")
    if not any(map(is_number, texts)):
        return [WeightedPrefix(None, text) for text in texts]
    for i, text in enumerate(texts):
        expected = "a prefix" if i % 2 else "a weight"
        if is_number(text) == bool(i % 2):
            raise ValueError(f"{flag} {' '.join(texts)}: value {i + 1}, {text!r}, should be {expected}.\n  {usage.format(text)}")
    if len(texts) % 2:
        raise ValueError(f"{flag} {' '.join(texts)}: the last weight, {texts[-1]}, has no prefix.\n  {usage.format(texts[-1])}")
    blend = [WeightedPrefix(float(weight), prefix) for weight, prefix in zip(texts[::2], texts[1::2], strict=True)]
    for dataset in blend:
        assert dataset.weight is not None
        if not (math.isfinite(dataset.weight) and dataset.weight >= 0):
            raise ValueError(
                f"{flag}: the weight of {dataset.prefix} is {dataset.weight}.\n  A weight must be a finite number of 0 or more."
            )
    if not any(dataset.weight for dataset in blend):
        raise ValueError(f"{flag} {' '.join(texts)}: all weights are 0.\n  Give at least one dataset a weight above 0.")
    return blend


def read_split_blends(data: DataConfig) -> tuple[bool, list[list[WeightedPrefix]]]:
    """Return the datasets and weights (blends) of training, validation and test, from the flags or from the files that the flags
    name.

    Returns:
        whether each split has its own datasets (otherwise the three blends are equal and --split divides them), and the three
        blends (all empty for mock data).

    Raises:
        ValueError: a file is missing or has another format, or a value is not a blend.
    """
    if data.mock_data:
        return False, [[], [], []]
    if has_split_datasets(data):
        paths_per_split = (data.train_data_path, data.valid_data_path, data.test_data_path)
        sources = [get_flag_name(field) for field in SPLIT_FIELDS]
        if path := data.per_split_data_args_path:
            paths_per_split = _read_paths_per_split(Path(path))
            sources = [f"the entry {name} of --per-split-data-args-path {path}" for name in _SPLIT_KEYS]
            for source, texts in zip(sources, paths_per_split, strict=True):
                _check_prefixes(source, texts)
        return True, [parse_blend(texts, source) if texts else [] for texts, source in zip(paths_per_split, sources, strict=True)]
    flag, texts = "--data-path", data.data_path
    if data.data_args_path:
        flag = f"--data-args-path {data.data_args_path}"
        texts = tuple(_read_text(Path(data.data_args_path), "--data-args-path").split())
        _check_prefixes(flag, texts)
    return False, [parse_blend(texts, flag)] * 3


def _check_prefixes(source: str, texts: Sequence[str]) -> None:
    """Check that the prefixes that a file names can be paths. (The rules check those of the command line.)

    Args:
        source: flag and file, for the error message.
    """
    for text in texts:
        if problem := find_path_problem(text):
            raise ValueError(f"{source} contains {shorten_path(text)}, which is not a valid path: {problem}.\n  Correct the file.")


def _read_paths_per_split(path: Path) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    flag = "--per-split-data-args-path"
    usage = f'{flag} takes a JSON file {{"train": ["WEIGHT", "PREFIX", ...], "valid": [...], "test": [...]}}; train is required.'
    try:
        content = parse_json(_read_text(path, flag))
    except ValueError as error:
        raise ValueError(f"{flag} {path}: {error}\n  {usage}") from error
    if not isinstance(content, dict) or not content.get("train") or not set(content) <= set(_SPLIT_KEYS):
        raise ValueError(f"{flag} {path} must have the entry train, and no entries other than train, valid and test.\n  {usage}")
    invalid = [
        name
        for name, paths in content.items()
        if not isinstance(paths, list) or not all(isinstance(path_or_weight, str | int | float) for path_or_weight in paths)
    ]
    if invalid:
        raise ValueError(f"{flag} {path}: the entry {invalid[0]} is not a list of weights and prefixes.\n  {usage}")
    train, valid, test = (tuple(map(str, content.get(name, ()))) for name in _SPLIT_KEYS)
    return train, valid, test


def _read_text(path: Path, flag: str) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"{flag} {path} cannot be read: {reason}.\n  Check the path.") from error


def list_path_settings(data: DataConfig) -> list[str]:
    """Return the names of the settings that name datasets and are not empty, such as `data_path`."""
    return [field for field in PATH_FIELDS if getattr(data, field)]


def has_split_datasets(data: DataConfig) -> bool:
    """Return whether training, validation and test have their own datasets."""
    return any(getattr(data, field) for field in (*SPLIT_FIELDS, "per_split_data_args_path"))


def is_number(text: str) -> bool:
    """Return whether a text is a number, infinities and nan included."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def parse_split(text: str) -> tuple[float, float, float]:
    """Parse ``--split`` into the fractions of training, validation and test, which sum to 1. Missing fractions are 0.

    Raises:
        ValueError: the text is not one to three numbers, or one is negative, or none is above 0.
    """
    try:
        fractions = [float(item) for item in text.split(",")]
    except ValueError:
        fractions = []
    total = sum(fractions)
    if not 1 <= len(fractions) <= 3 or any(fraction < 0 for fraction in fractions) or not 0 < total < float("inf"):
        raise ValueError(
            f"--split {text!r} must be one to three numbers that are not negative and not all 0 (training, validation, test), "
            "separated by commas.\n  For example: --split 969,30,1"
        )
    first, second, third = (fraction / total for fraction in [*fractions, 0.0, 0.0][:3])
    return first, second, third
