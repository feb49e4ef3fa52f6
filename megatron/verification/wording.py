"""Words for a difference: how large it is beside what is allowed, which factor of the layout it is, and where. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron.pipeline_parallel.partition import Chunk
from megatron.spec.weights import in_layer

TOLERANCE = 1e-10
"""Relative tolerance of tensors, losses and norms."""
ROUNDING = 1e-14
"""Error of a number that is a sum of others as large as the global norm, as a share of that norm. A much smaller result has lost
the digits below it, and agrees to no better."""
NEGLIGIBLE = 1e-12
"""A tensor whose reference is below this share of the global norm is rounding error (the true gradient of a key bias is zero). It
is compared absolutely at that scale."""


def relative(difference: float, scale: float) -> float:
    """A difference as a share of a scale: infinite if that is zero, or if anything is not finite."""
    if not math.isfinite(difference):
        return math.inf
    if not scale:
        return math.inf if difference else 0.0
    return abs(difference) / abs(scale)


def relative_words(difference: float, size: float) -> str:
    """A difference as a share of a reference of this norm, in words."""
    if not math.isfinite(difference):
        return "not finite"
    return f"relative difference {difference / size:.2e}" if size else f"difference {difference:.2e} from zero"


def short(ratio: float) -> str:
    """A factor in few digits, but enough to tell it from 1."""
    if 0 < abs(ratio - 1) < 1e-5:
        return f"{ratio:.12g}"
    return f"{ratio:.1f}" if math.isclose(ratio, round(ratio, 1), rel_tol=1e-5) else f"{ratio:.6g}"


_CLOSE = 1e-6
"""A factor is taken for a number of the layout if they agree to this relative difference."""


@dataclass(frozen=True)
class Facts:
    """The numbers of a run that a wrong factor may be made of."""

    tensor: int = 1
    data: int = 1
    stages: int = 1
    microbatches: int = 1
    """Microbatches of one data rank in the step in question."""
    kept: float = 1.0
    """Tokens of the global batch that the loss mask keeps."""
    tokens: int = 1
    """All tokens of the global batch."""
    loss_scale: float = 1.0


def ratio_words(ratio: float, facts: Facts) -> str:
    """`2.0x, the tensor size: a sum over the tensor group is counted twice`; only the factor if it is no number of the layout.

    All numbers of the same size are named: a run with one of the axes alone tells them apart.
    """
    meant = [(name, words) for value, name, words in _factors(facts) if math.isclose(ratio, value, rel_tol=_CLOSE)]
    if not meant:
        return f"{short(ratio)}x what it should be" if ratio else "zero: nothing reaches it"
    names, reasons = (list(dict.fromkeys(column)) for column in zip(*meant, strict=True))
    return f"{short(ratio)}x, {' or '.join(names)}: {'; or '.join(reasons)}"


def ratio_group(ratio: float, facts: Facts) -> str:
    """The group (tensor, data, pipeline) whose size is the factor, or 1 / the factor; empty if none is, or several are."""
    sizes = {"tensor": facts.tensor, "data": facts.data, "pipeline": facts.stages}
    factor = ratio if ratio > 1 else 1 / ratio if ratio else 0.0
    found = [group for group, size in sizes.items() if size > 1 and math.isclose(factor, size, rel_tol=_CLOSE)]
    return found[0] if len(found) == 1 else ""


def _factors(facts: Facts) -> Iterator[tuple[float, str, str]]:
    """The factors that a mistake can multiply or divide by: (factor, its name, what went wrong)."""
    once_more = "divided by it once too often"
    known: list[tuple[float, str, str, str]] = []
    for size, group in ((facts.tensor, "tensor"), (facts.data, "data"), (facts.stages, "pipeline")):
        twice = f"a sum over the {group} group is counted {'twice' if size == 2 else f'{size} times'}"
        known.append(
            (size, f"the {group} size", twice, f"{once_more}, or one rank's share of the {group} group instead of the sum")
        )
    mean = "microbatches are summed where their mean is meant"
    known.append((facts.microbatches, "the number of microbatches", mean, once_more))
    if facts.kept:
        ignored = "the count of tokens ignores the loss mask"
        known.append((facts.tokens / facts.kept, "all tokens / kept tokens", "the loss mask is counted twice", ignored))
        undivided = "the sum over tokens is not divided by their number"
        known.append((facts.kept, "the tokens that count", undivided, "divided by their number twice"))
    known.append((facts.loss_scale, "the loss scale", "the loss scale is not taken out", "the loss scale is taken out twice"))
    for value, name, multiplied, divided in known:
        if value != 1:
            yield value, name, multiplied
            yield 1 / value, " / ".join(reversed(name.split(" / "))) if " / " in name else f"1 / {name}", divided


def layer_of(name: str) -> int | None:
    """Number of a parameter's layer, counted over the whole model; None outside the layers."""
    return in_layer(name)[0]


def chunks_of(name: str, table: Sequence[Chunk]) -> list[Chunk]:
    """The pipeline chunks that hold it; for a tied embedding, only the first is known by its name."""
    layer = layer_of(name)
    if layer is not None:
        return [chunk for chunk in table if layer in chunk.layers]
    return [table[0] if name.startswith("embedding") else table[-1]]


def stages_of(name: str, table: Sequence[Chunk]) -> list[int]:
    """The pipeline stages of these chunks; empty for a layer that no chunk holds."""
    return sorted({chunk.stage for chunk in chunks_of(name, table)})


def place_words(name: str, table: Sequence[Chunk], *, stages: Iterable[int] | None = None) -> str:
    """`layers.3.attention.qkv.weight (layer 3, stage 1)`.

    Args:
        stages: the stages to name; by default those of the table.
    """
    layer = layer_of(name)
    held = sorted(set(stages_of(name, table) if stages is None else stages))
    notes = [] if layer is None else [f"layer {layer}"]
    if table and max(chunk.stage for chunk in table) > 0:
        notes += [f"stage{'s' if len(held) > 1 else ''} {listing(held)}"] if held else ["on no stage"]
        chunks = chunks_of(name, table)
        if len(chunks) == 1 and len({chunk.stage for chunk in table}) < len(table):
            notes.append(f"chunk {chunks[0].index}")
    return f"{name} ({', '.join(notes)})" if notes else name


def forward_order(num_layers: int) -> list[str]:
    """Names of activations in the order in which the forward makes them."""
    layers = (f"layers.{number}{part}" for number in range(num_layers) for part in (".attention", ".mlp", ""))
    return ["embedding", *layers]


def listing(numbers: Iterable[int], most: int = 8) -> str:
    """`0, 1 and 3`; runs of three and more as `2 to 5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts: list[str] = []
    for run in runs:
        texts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    if len(texts) > most:
        texts = [*texts[: most - 1], "others"]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
