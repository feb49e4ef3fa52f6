"""What a constant factor says: which whole-number fact of the layout it is, and what kind of mistake gives it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.verification.diagnosis.tolerance import short

_CLOSE = 1e-6
"""Relative: a factor is a fact of the layout if they agree so far."""


@dataclass(frozen=True)
class Facts:
    """The numbers of a run from which wrong factors are made."""

    tensor: int = 1
    data: int = 1
    stages: int = 1
    microbatches: int = 1
    """Of one data rank in the step that is looked at."""
    kept: float = 1.0
    """Tokens of the global batch that the loss mask keeps."""
    tokens: int = 1
    """All of its tokens."""
    loss_scale: float = 1.0


def ratio_words(ratio: float, facts: Facts) -> str:
    """`2.0x, the tensor size: a sum over the tensor group is counted twice`; just the factor where it is no fact of the layout.

    Facts of the same size are all told: running with one of the axes alone tells them apart.
    """
    meant = _meant(ratio, facts)
    text = f"{short(ratio)}x"
    if not meant:
        return f"{text} what it should be" if ratio else "zero"
    names, reasons = (list(dict.fromkeys(column)) for column in zip(*meant, strict=True))
    return f"{text}, {' or '.join(names)}: {'; or '.join(reasons)}"


def ratio_group(ratio: float, facts: Facts) -> str:
    """The group (tensor, data, pipeline) whose size the factor is, or 1 / it; empty where it is that of none or of several."""
    sizes = {"tensor": facts.tensor, "data": facts.data, "pipeline": facts.stages}
    found = [group for group, size in sizes.items() if size > 1 and any(_close(ratio, value) for value in (size, 1 / size))]
    return found[0] if len(found) == 1 else ""


def _meant(ratio: float, facts: Facts) -> list[tuple[str, str]]:
    return [(name, words) for value, name, words in _known(facts) if _close(ratio, value)]


def _close(ratio: float, value: float) -> bool:
    return math.isclose(ratio, value, rel_tol=_CLOSE)


def _known(facts: Facts) -> Iterator[tuple[float, str, str]]:
    """Factors that a mistake can give: value, name, what went wrong."""
    groups: Sequence[tuple[int, str, str]] = (
        (facts.tensor, "the tensor size", "tensor"),
        (facts.data, "the data size", "data"),
        (facts.stages, "the pipeline size", "pipeline"),
    )
    for size, name, group in groups:
        if size > 1:
            times = "twice" if size == 2 else f"{size} times"
            yield size, name, f"a sum over the {group} group is counted {times}"
            yield (
                1 / size,
                f"1 / {name}",
                f"divided by it once too often, or one rank's share of the {group} group instead of the sum",
            )
    if facts.microbatches > 1:
        yield facts.microbatches, "the number of microbatches", "microbatches are summed where their mean is meant"
        yield 1 / facts.microbatches, "1 / the number of microbatches", "divided by it once too often"
    if facts.tensor > 1 and facts.data > 1:
        both = facts.tensor * facts.data
        yield both, "tensor x data size", "a sum over both groups is made where the values are whole already"
        yield 1 / both, "1 / (tensor x data size)", "divided by both sizes once too often"
    if facts.data > 1 and facts.microbatches > 1:
        all_microbatches = facts.data * facts.microbatches
        yield all_microbatches, "the microbatches of all data ranks", "microbatches are summed where their mean is meant"
        yield 1 / all_microbatches, "1 / the microbatches of all data ranks", "divided by their number once too often"
    if facts.stages > 1:
        yield 2, "the two ends of the pipeline", "both the first and the last stage count it"
        yield 0.5, "1 / the two ends of the pipeline", "the mean of the first and the last stage instead of the sum"
    if 0 < facts.kept < facts.tokens:
        yield facts.kept / facts.tokens, "kept tokens / all tokens", "the count of tokens ignores the loss mask"
        yield facts.tokens / facts.kept, "all tokens / kept tokens", "the loss mask is counted twice"
    if facts.kept > 1:
        yield facts.kept, "the tokens that count", "the sum over tokens is not divided by their number"
        yield 1 / facts.kept, "1 / the tokens that count", "divided by their number twice"
    if facts.loss_scale != 1:
        yield facts.loss_scale, "the loss scale", "the loss scale is not taken out"
        yield 1 / facts.loss_scale, "1 / the loss scale", "the loss scale is taken out twice"
