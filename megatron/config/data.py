"""Settings of the data: datasets and their blend, tokenizer and loader; and parsers for the values of these flags."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron.config.imports import import_object
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
    "HuggingFaceTokenizer": ("add_bos",),
    "TikTokenizer": ("vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens", "add_bos"),
    "SentencePieceTokenizer": ("add_bos",),
    "GPTSentencePieceTokenizer": ("add_bos",),
    "Llama2Tokenizer": ("add_bos",),
}
"""Further settings that have an effect on a tokenizer type."""
TOKENIZER_FILE_SETTINGS = ("tokenizer_model", "vocab_file", "merge_file")
"""Tokenizer settings whose value is a file."""
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


def sets_embedding_rows(tokenizer_type: str | None) -> bool:
    """Return whether --vocab-size is the number of rows of the word embedding with a tokenizer of this type, which does not read
    it as the size of its vocabulary."""
    if tokenizer_type is None or "vocab_size" in get_tokenizer_settings(tokenizer_type):
        return False
    return "vocab_size" in get_run_tokenizer_settings(tokenizer_type)


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
_USES_HF = condition(hf_dataset=IS_SET)
_COMPARES_TOKENIZERS = condition(
    "with datasets or a checkpoint to load", fix={}, mock_data=False, load=IS_SET, pretrained_checkpoint=IS_SET
)


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
    """Prefix or blend, as in --data-path, for validation only. A word NAME=PREFIX starts a validation set, which has its own blend
    and loss: books=b1 code=0.3 c1 0.7 c2. (Write a prefix that contains = as ./PREFIX.)"""
    test_data_path: tuple[str, ...] = setting((), is_path=True)
    """Prefix or blend, as in --data-path, for the test at the end only."""
    data_args_path: str | None = setting(None, is_path=True)
    """File that contains the value of --data-path, for blends that are too long for a command line."""
    per_split_data_args_path: str | None = setting(None, is_path=True)
    """JSON file {"train": [...], "valid": [...], "test": [...]} with the values of --train-data-path, --valid-data-path and
    --test-data-path; {"valid": {NAME: [...], ...}} for several validation sets."""
    multiple_validation_sets: bool = setting(
        False,
        active_if=_USES_DATASET,
        idle_if=(
            idle_condition("--eval-iters 0 switches evaluation off", eval_iters=0),
            idle_condition(
                "the validation texts of --hf-dataset are one set", require_all=True, hf_dataset=IS_SET, valid_data_path=((),)
            ),
        ),
    )
    """Make a validation set, with its own loss, of each dataset of --valid-data-path (or of the validation part of each dataset of
    --data-path). Its name is the end of its path that differs from the others. Weights have no effect on the sets."""
    hf_dataset: str | None = setting(None, is_path=True)
    """Hugging Face dataset whose texts are tokenized while the run trains: a name on the Hub, a folder, or data files (x.jsonl,
    'texts/*.parquet'). Any --load continues with the same samples at any layout. Needs the datasets extra."""
    hf_subset: str | None = setting(None, active_if=_USES_HF)
    """Subset (configuration) of --hf-dataset, such as sample-10BT."""
    hf_revision: str | None = setting(None, active_if=_USES_HF)
    """Commit, tag or branch of --hf-dataset on the Hub; by default its newest commit. If the commit changes, a resumed run reads
    the dataset from its start."""
    hf_split: str = setting("train", active_if=_USES_HF)
    """Split of --hf-dataset to train on."""
    hf_text_column: str = setting("text", active_if=_USES_HF)
    """Column of --hf-dataset that contains the texts, one document per row. Documents without text are left out."""
    hf_shuffle_buffer: int = setting(
        10_000,
        min_value=0,
        unit="documents",
        active_if=_USES_HF,
        idle_if=idle_condition("a dataset with random access is shuffled completely", hf_streaming=False),
    )
    """Documents of --hf-dataset in memory that are shuffled together; 0 to read each file in its order. The shards are always
    shuffled. --seed determines the order."""
    hf_streaming: bool = setting(True, active_if=_USES_HF)
    """Stream --hf-dataset, without storing it. --no-hf-streaming downloads it into the cache of `datasets` (HF_HOME) and reads it
    with random access: all documents are shuffled, and few files suffice for many ranks."""
    hf_valid_split: str | None = setting(None, active_if=_USES_HF)
    """Split of --hf-dataset to validate on."""
    hf_valid_documents: int = setting(
        0,
        min_value=0,
        unit="documents",
        active_if=_USES_HF,
        idle_if=(
            idle_condition("--hf-valid-split names the validation data", hf_valid_split=IS_SET),
            idle_condition("--valid-data-path names the validation data", valid_data_path=IS_SET),
        ),
    )
    """Documents of --hf-split that are reserved for validation, instead of --hf-valid-split. Training never reads them. If a
    streamed dataset has many shards with few documents, fewer are reserved."""
    data_cache_path: str | None = setting(None, active_if=_USES_DATASET, is_path=True)
    """Folder for the indexes of large datasets; by default a folder `cache` next to each dataset. For --hf-dataset: folder for the
    positions of the reading, by default a folder `stream` in --save. It may be deleted."""
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
            idle_condition("--hf-dataset has its own splits", hf_dataset=IS_SET),
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
    The padding at the end of a sample does not count in the loss, and is not sent to experts."""
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
    other tokenizers with files: number of rows of the word embedding, if it differs from the number of token ids. With fewer rows
    than ids, only special tokens of HuggingFaceTokenizer may have no row."""
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
    allow_tokenizer_mismatch: bool = setting(False, active_if=_COMPARES_TOKENIZERS)
    """Train even if a dataset was written, or the loaded weights were trained, with a tokenizer that has other ids than that of the
    run. Also read documents whose end-of-document id differs, although a flag acts at the ends of documents."""
    add_bos: bool | None = setting(None, active_if=_build_tokenizer_condition("add_bos"))
    """Put the bos token before each text, or not (--no-add-bos). By default the tokenizer's files decide: the post-processor of
    tokenizer.json; Llama2Tokenizer puts it. Datasets contain the token already."""


SPLIT_FIELDS = ("train_data_path", "valid_data_path", "test_data_path")
PATH_FIELDS = ("data_path", "data_args_path", *SPLIT_FIELDS, "per_split_data_args_path", "hf_dataset")
"""Settings that name datasets."""
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


Blends = dict[str, list[WeightedPrefix]]
"""Datasets and weights (blend) of each set of a split, by the name of the set. A set without a name has the key ""."""


def parse_validation_sets(
    texts: Sequence[str] | Mapping[str, Sequence[str]], flag: str, *, one_per_dataset: bool = False
) -> Blends:
    """Parse the value of --valid-data-path into the blend of each validation set.

    Args:
        texts: the words of the value, or the words of each set by its name.
        flag: the flag, for error messages.
        one_per_dataset: whether each dataset is a set (--multiple-validation-sets).

    Raises:
        ValueError: the words of a set are not a blend, or the sets have no distinct names.
    """
    if one_per_dataset or isinstance(texts, Mapping) or any("=" in text for text in texts):
        blends: Blends = import_object("megatron_lab.data_tools.validation_sets:parse_sets")(texts, flag, one_per_dataset)
        return blends
    return {"": parse_blend(texts, flag)}


def read_split_blends(data: DataConfig) -> tuple[bool, list[Blends]]:
    """Return the datasets and weights (blends) of training, validation and test, from the flags or from the files that the flags
    name.

    Returns:
        whether each split has its own datasets (otherwise --split divides the datasets), and the blends of the three splits by the
        name of the set. Only validation has named sets. A split without data has no set. The blends of mock data and of
        --hf-dataset are empty.

    Raises:
        ValueError: a file is missing or has another format, or a value is not a blend.
    """
    if data.mock_data or (data.hf_dataset is not None and not has_split_datasets(data)):
        return False, [{"": []}] * 3
    each = data.multiple_validation_sets
    if has_split_datasets(data):
        paths_per_split: Sequence[Any] = (data.train_data_path, data.valid_data_path, data.test_data_path)
        sources = [get_flag_name(field) for field in SPLIT_FIELDS]
        if path := data.per_split_data_args_path:
            paths_per_split, sources = import_object("megatron_lab.data_tools.path_files:read_paths_per_split")(path)
        train, valid, test = zip(paths_per_split, sources, strict=True)
        return True, [
            {"": parse_blend(*train)} if train[0] else {},
            parse_validation_sets(*valid, one_per_dataset=each) if valid[0] else {},
            {"": parse_blend(*test)} if test[0] else {},
        ]
    flag, texts = "--data-path", data.data_path
    if data.data_args_path:
        flag, texts = import_object("megatron_lab.data_tools.path_files:read_paths")(data.data_args_path)
    valid_blends = blends = {"": parse_blend(texts, flag)}
    if each:
        valid_blends = import_object("megatron_lab.data_tools.validation_sets:separate_datasets")(blends[""], flag)
    return False, [blends, valid_blends, blends]


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
