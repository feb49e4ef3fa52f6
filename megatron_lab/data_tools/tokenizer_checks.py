"""Checks that the datasets and the initial weights of a run belong to its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.checkpoint.errors import DamagedCheckpointError, MismatchError, format_list
from megatron.config.config import Config
from megatron.config.data import DataConfig
from megatron.data.datasets import Component, SplitData
from megatron.data.splits import Datasets
from megatron.data.tokenizer import Tokenizer
from megatron_lab.tokenizers.fingerprint import (
    TokenizerFingerprint,
    get_fingerprint,
    read_config_entry,
    read_dataset_fingerprint,
)

_DOCUMENT_FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Settings that act at the ends of documents."""
ALLOW_FLAG = "--allow-tokenizer-mismatch"


class TokenizerMismatchError(MismatchError):
    """Error for datasets or weights of another tokenizer. A restart does not help."""


def check_run_datasets(data: DataConfig, datasets: Datasets, tokenizer: Tokenizer) -> list[str]:
    """Check that the indexed datasets of a run were written with its tokenizer. Called on one rank.

    Another end-of-document id is a problem only if the run finds the ends of documents by this id.

    Args:
        tokenizer: tokenizer of the run.

    Returns:
        warnings for the start-up log.

    Raises:
        TokenizerMismatchError: as in `check_datasets`.
        ValueError: the fingerprint of a dataset is damaged.
    """
    splits = (datasets.train, *datasets.valid.values(), *datasets.test.values())
    # Texts that are tokenized during the run (--hf-dataset) are no `SplitData`.
    components = [component for split in splits if isinstance(split, SplitData) for component in split.components]
    return check_datasets(
        {component.dataset.prefix: _uses_eod(data, component) for component in components},
        lambda: get_fingerprint(data, tokenizer),
        has_texts=data.tokenizer_type != "NullTokenizer",
        allows_mismatch=data.allow_tokenizer_mismatch,
    )


def _uses_eod(data: DataConfig, component: Component) -> bool:
    """Return whether the run finds the ends of a dataset's documents by the end-of-document id, not by the index or a loss mask."""
    has_marks = data.whole_documents or component.marks is not None
    return not has_marks and any(getattr(data, name) for name in _DOCUMENT_FLAGS)


def check_datasets(
    uses_eod: Mapping[str, bool],
    get_current: Callable[[], TokenizerFingerprint | None],
    *,
    has_texts: bool = True,
    allows_mismatch: bool = False,
) -> list[str]:
    """Check that datasets were written with a tokenizer.

    Args:
        uses_eod: whether the ends of a dataset's documents are found by the end-of-document id, by the prefix of the dataset.
        get_current: returns the fingerprint of the tokenizer, or None if it is unknown. Called only if a dataset has a fingerprint.
        has_texts: whether the tokenizer encodes texts. The ids of NullTokenizer come from elsewhere, so a dataset without a
            fingerprint is no reason for a warning.
        allows_mismatch: give a warning instead of an error.

    Returns:
        warnings for the user.

    Raises:
        TokenizerMismatchError: ids or document ends of datasets differ. The message lists all such datasets.
        ValueError: the fingerprint of a dataset is damaged.
    """
    stored = {prefix: read_dataset_fingerprint(prefix) for prefix in uses_eod}
    known = {prefix: fingerprint for prefix, fingerprint in stored.items() if fingerprint is not None}
    warnings, problems = [], []
    unknown = [prefix for prefix in stored if prefix not in known]
    if unknown and has_texts:
        subject = f"{unknown[0]} and {len(unknown) - 1} other datasets have" if len(unknown) > 1 else f"{unknown[0]} has"
        warnings.append(
            f"{subject} no fingerprint of a tokenizer, so nothing checks that their ids are those of this tokenizer. If they are, "
            "add it: tools/inspect_data.py PREFIX --write-fingerprint, with the tokenizer's flags"
        )
    if not known:
        return warnings
    try:
        current = get_current()
    except ValueError as error:  # a library that encodes is not installed
        return [*warnings, f"the tokenizer is not compared with those of the datasets: {error}"]
    if current is None:
        return [*warnings, "the tokenizer is unknown, so it is not compared with those of the datasets"]
    for prefix, fingerprint in known.items():
        problem, warning = compare_dataset(fingerprint, current, uses_eod=uses_eod[prefix])
        problems += [] if problem is None else [f"{prefix}: {problem}"]
        warnings += [] if warning is None else [f"{prefix}: {warning}"]
    if problems:
        subject = "a dataset was" if len(problems) == 1 else f"{len(problems)} datasets were"
        message = f"{subject} written with another tokenizer than {current}:\n  " + format_list(problems, "\n  ")
        if not allows_mismatch:
            raise TokenizerMismatchError(
                f"{message}\n  Use the tokenizer of the datasets, or write them again with this one (tools/preprocess_data.py). "
                f"{ALLOW_FLAG} reads their ids as they are."
            )
        warnings.append(f"{message} ({ALLOW_FLAG})")
    return warnings


def compare_dataset(
    stored: TokenizerFingerprint, current: TokenizerFingerprint, *, uses_eod: bool
) -> tuple[str | None, str | None]:
    """Compare the tokenizer of a dataset with that of a run or model.

    Args:
        stored: fingerprint of the dataset.
        current: fingerprint of the tokenizer of the run or model.
        uses_eod: whether the ends of documents are found by the end-of-document id.

    Returns:
        a problem, or None if the tokenizers fit; and a warning, or None.
    """
    if not stored.is_comparable(current):
        is_equal = stored.probes == current.probes and (stored.num_ids, stored.eod) == (current.num_ids, current.eod)
        reason = "of another version" if stored.version != current.version else "without ids of texts"
        return None, None if is_equal else f"written with {stored}, which is not compared with {current}, {reason}"
    if (difference := stored.find_difference(current)) is not None:
        return f"{stored}, with {difference}", None
    if stored.eod != current.eod:
        text = f"{stored}, but documents end with the id {current.eod:,} here"
        return (text, None) if uses_eod else (None, text)
    if (unlike := stored.find_renamed(current) or stored.find_other_prefix(current)) is not None:
        return None, f"{stored}, in which {unlike} as here"
    if stored.num_ids > current.num_ids:
        return None, f"{stored}; the {current.num_ids:,} ids here lack tokens that the dataset may contain"
    return None, None


def check_weights(config: Config, config_json: Mapping[str, Any], source: str) -> list[str]:
    """Check that the weights of a checkpoint were trained with the tokenizer of the run. Called on one rank.

    Args:
        config_json: content of the checkpoint's config.json.
        source: path of the checkpoint.

    Returns:
        notes for the start-up log.

    Raises:
        TokenizerMismatchError: the tokenizer has other ids, and --allow-tokenizer-mismatch is not set.
        DamagedCheckpointError: the fingerprint in the checkpoint is invalid.
    """
    data = config.data
    try:
        stored = read_config_entry(config_json, f"{source}/config.json")
    except ValueError as error:
        raise DamagedCheckpointError(str(error)) from error
    if data.tokenizer_type is None:  # a plan
        return []
    if stored is None:
        if data.tokenizer_type == "NullTokenizer":
            return []
        return [f"{source} has no fingerprint of a tokenizer, so it is not compared with that of the run"]
    try:
        current = get_fingerprint(data)
    except (ValueError, OSError) as error:
        return [f"the tokenizer is not compared with that of the checkpoint: {error}"]
    if not stored.is_comparable(current):
        if stored.num_ids == current.num_ids and stored.probes == current.probes:
            return []
        return [f"weights of the tokenizer {stored}, which is not compared with {current}"]
    if (difference := stored.find_difference(current)) is not None:
        message = f"{source} was trained with the tokenizer {stored}, but that of this run, {current}, has {difference}."
        if not data.allow_tokenizer_mismatch:
            raise TokenizerMismatchError(
                f"{message}\n  Use the tokenizer of the checkpoint (--use-checkpoint-args takes it), or the checkpoint of this "
                f"tokenizer. {ALLOW_FLAG} trains these weights with other ids."
            )
        return [f"WARNING: {message} ({ALLOW_FLAG})"]
    if stored.eod != current.eod:
        return [f"WARNING: the checkpoint's tokenizer is {stored}, but documents end with the id {current.eod:,} in this run"]
    if (unlike := stored.find_renamed(current) or stored.find_other_prefix(current)) is not None:
        return [f"WARNING: the checkpoint's tokenizer is {stored}, in which {unlike} as in this run"]
    return []
