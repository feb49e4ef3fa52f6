"""Rules about datasets and tokenizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.config.checks.finding import Finding, create_change, format_setting, reset, rule
from megatron.config.config import Config
from megatron.config.data import (
    PATH_FIELDS,
    SPLIT_FIELDS,
    TOKENIZER_REQUIRED,
    list_path_settings,
    parse_blend,
    parse_split,
    parse_validation_sets,
)
from megatron.config.setting import get_flag_name

_SINGLE_SOURCE = "Each of these flags sets the source of the tokens."


@rule(depends_on=("mock_data", *PATH_FIELDS))
def check_single_data_source(config: Config, world_size: int) -> Iterator[Finding]:
    """The tokens must come from exactly one source: either generated tokens (--mock-data), or indexed datasets that are named by
    one kind of flag: --data-path, --data-args-path, the paths of the splits (--train-data-path and so on) or
    --per-split-data-args-path, or a Hugging Face dataset (--hf-dataset)."""
    data = config.data
    # With --hf-dataset, indexed datasets may be the validation and test data.
    fields = [field for field in list_path_settings(data) if data.hf_dataset is None or field not in SPLIT_FIELDS[1:]]
    source_fields = list(dict.fromkeys("train_data_path" if field in SPLIT_FIELDS else field for field in fields))
    if data.mock_data and fields:
        message = f"--mock-data and {get_flag_name(fields[0])} exclude each other."
        yield Finding(message, [create_change(mock_data=False)], _SINGLE_SOURCE, (*fields, "mock_data"))
    elif not data.mock_data and not fields:
        reason = (
            "It takes the prefix of an indexed dataset (PREFIX.bin and PREFIX.idx). --hf-dataset reads a Hugging Face dataset; "
            "--mock-data trains on generated tokens."
        )
        yield Finding(
            "--data-path is missing.", [create_change(mock_data=True)], reason, ("data_path", "mock_data"), is_missing=True
        )
    elif len(source_fields) > 1:
        candidates = [
            reset(config, *(field for field in fields if field != source))
            for source in source_fields
            if source != "train_data_path"
        ]
        yield Finding(
            f"{' and '.join(map(get_flag_name, source_fields))} exclude each other.", [candidates], _SINGLE_SOURCE, tuple(fields)
        )


@rule(depends_on=("mock_data", "hf_dataset", *SPLIT_FIELDS, "eval_iters", "skip_train"))
def check_split_datasets(config: Config, world_size: int) -> Iterator[Finding]:
    """If the splits have their own datasets, --train-data-path must be set, because training needs data (not with --skip-train).
    --valid-data-path must be set too, unless --eval-iters 0 switches evaluations off."""
    data, eval_iters = config.data, config.training.eval_iters
    fields = tuple(field for field in SPLIT_FIELDS if getattr(data, field))
    if not fields or data.mock_data or data.hf_dataset is not None:
        return
    if not data.train_data_path and not config.training.skip_train:
        message = f"{get_flag_name(fields[0])} is given, but --train-data-path is not."
        yield Finding(message, reason="Training needs data.", fields=(*fields, "train_data_path"))
    elif eval_iters > 0 and not data.valid_data_path:
        yield Finding(
            f"{get_flag_name(fields[0])} is given without --valid-data-path, but --eval-iters is {eval_iters}.",
            [create_change(eval_iters=0)],
            "An evaluation reads validation data; --eval-iters 0 switches it off.",
            (fields[0], "valid_data_path", "eval_iters"),
        )


@rule("full_validation", "mock_data", depends_on=("hf_dataset", "valid_data_path"))
def check_full_validation(config: Config, world_size: int) -> Iterator[Finding]:
    """--full-validation reads all samples of each validation set, but the generated samples of --mock-data have no end, and the
    number of samples of texts that are tokenized during the run (--hf-dataset) is not known. With --hf-dataset, it needs
    --valid-data-path."""
    training, data, changes = config.training, config.data, [create_change(full_validation=False)]
    if training.full_validation and data.mock_data:
        yield Finding("--full-validation cannot be used with --mock-data.", changes)
    elif training.full_validation and data.hf_dataset is not None and not data.valid_data_path:
        message = "--full-validation cannot be used with validation texts of --hf-dataset."
        yield Finding(message, changes, fields=("full_validation", "hf_dataset"))


@rule("skip_train", "eval_iters", depends_on=("split", *PATH_FIELDS, "mock_data"))
def check_skip_train(config: Config, world_size: int) -> Iterator[Finding]:
    """--skip-train only evaluates. It needs validation data, and --eval-iters above 0 (or --full-validation)."""
    if config.training.skip_train and config.training.eval_iters == 0:
        yield Finding("--skip-train has nothing to evaluate.", [create_change(skip_train=False)])


@rule("whole_documents", "data_loss_mask", "data_order", depends_on=("hf_dataset",))
def check_streamed_order(config: Config, world_size: int) -> Iterator[Finding]:
    """A Hugging Face dataset (--hf-dataset) has its own order of samples: the concatenated documents are cut into windows. It has
    no loss mask."""
    data = config.data
    defaults: dict[str, Any] = {"whole_documents": False, "data_loss_mask": False, "data_order": "epoch"}
    for field, default in defaults.items():
        if data.hf_dataset is not None and getattr(data, field) != default:
            reason = "Use tools/preprocess_data.py and --data-path for such data."
            changes = [create_change(**{field: default})]
            yield Finding(
                f"{format_setting(config, field)} cannot be used with --hf-dataset.", changes, reason, (field, "hf_dataset")
            )


@rule(depends_on=("hf_dataset", "hf_valid_split", "hf_valid_documents", "valid_data_path", "eval_iters"))
def check_streamed_validation(config: Config, world_size: int) -> Iterator[Finding]:
    """A run with --hf-dataset that evaluates must name its validation data: a split of the dataset, a number of reserved documents,
    or indexed datasets."""
    data, eval_iters = config.data, config.training.eval_iters
    if data.hf_dataset is None or eval_iters <= 0 or data.hf_valid_split or data.hf_valid_documents or data.valid_data_path:
        return
    yield Finding(
        f"--hf-dataset is given without validation data, but --eval-iters is {eval_iters}.",
        [create_change(hf_valid_documents=1000), create_change(eval_iters=0)],
        "--hf-valid-split names a split of the dataset, --hf-valid-documents reserves documents, --valid-data-path reads an "
        "indexed dataset, and --eval-iters 0 switches evaluation off.",
        ("hf_dataset", "hf_valid_documents", "eval_iters"),
    )


@rule("whole_documents", "data_order", depends_on=("mock_data",))
def check_whole_documents(config: Config, world_size: int) -> Iterator[Finding]:
    """--whole-documents needs --data-order epoch, because --data-order megatron cuts the concatenated documents into windows. It
    cannot be used with --mock-data, because samples of mock data have no documents."""
    data = config.data
    if data.whole_documents and data.data_order != "epoch":
        yield Finding("--whole-documents cannot be used with --data-order megatron.", [create_change(data_order="epoch")])
    elif data.whole_documents and data.mock_data:
        yield Finding(
            "--whole-documents cannot be used with --mock-data.",
            [create_change(whole_documents=False)],
            fields=("whole_documents", "mock_data"),
        )


@rule(depends_on=("data_path", *SPLIT_FIELDS, "multiple_validation_sets"))
def check_blend_syntax(config: Config, world_size: int) -> Iterator[Finding]:
    """--data-path and the paths of the splits (--train-data-path and so on) must list either prefixes of datasets, or weights and
    prefixes in alternation. --valid-data-path may contain several such lists, each after the name of its set: NAME=PREFIX."""
    for field in ("data_path", *SPLIT_FIELDS):
        entries, each = getattr(config.data, field), config.data.multiple_validation_sets
        try:
            if entries and field == "valid_data_path":
                parse_validation_sets(entries, get_flag_name(field), one_per_dataset=each)
            elif entries:
                parse_blend(entries, get_flag_name(field))
        except ValueError as error:
            message, reason = str(error).split("\n  ")
            yield Finding(message, reason=reason, fields=(field,))


@rule("split")
def check_split(config: Config, world_size: int) -> Iterator[Finding]:
    """--split must be one to three fractions, those of training, validation and test, and the fraction of training must be
    above 0."""
    text = config.data.split
    try:
        fractions = parse_split(text)
    except ValueError:
        yield Finding(
            f"--split {text!r} is not a list of fractions.",
            [create_change(split="969,30,1")],
            "It takes the fractions of training, validation and test: up to three numbers of 0 or more, separated by commas.",
        )
        return
    if fractions[0] == 0:
        yield Finding(f"--split {text!r} leaves no documents for training.", reason="The first fraction is that of training.")


@rule(depends_on=("tokenizer_type", *dict.fromkeys(field for needs in TOKENIZER_REQUIRED.values() for field in needs)))
def check_tokenizer_settings(config: Config, world_size: int) -> Iterator[Finding]:
    """--tokenizer-type must be set together with the flags of the files from which this type of tokenizer is read. NullTokenizer
    has no file and needs --vocab-size."""
    tokenizer_type = config.data.tokenizer_type
    missing = [field for field in TOKENIZER_REQUIRED.get(tokenizer_type or "", ()) if getattr(config.data, field) is None]
    if missing:
        missing_flags = " and ".join(map(get_flag_name, missing))
        reason = "It is the number of token ids." if missing == ["vocab_size"] else "The tokenizer is read from these files."
        yield Finding(
            f"--tokenizer-type {tokenizer_type} needs {missing_flags}.", reason=reason, fields=("tokenizer_type", *missing)
        )
