"""Words for a difference: how large it is beside what is allowed, which factor of the layout it is, and where. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
class Factor:
    """A number of the run by which a mistake can multiply or divide."""

    value: float
    name: str
    multiplied: str
    """What went wrong where something is that many times too large."""
    divided: str
    group: str = ""
    """The group of ranks whose size it is."""


def layout_factors(groups: Mapping[str, int], microbatches: int, kept: float, tokens: int, loss_scale: float) -> list[Factor]:
    """The numbers of one step.

    Args:
        groups: size of each group, by the field's name for it.
        microbatches: those of one data rank.
        kept: tokens of the global batch that the loss mask keeps.
        tokens: all tokens of the global batch.
    """
    once_more = "divided by it once too often"
    found = [
        Factor(
            size,
            f"the {group} size",
            f"a sum over the {group} group is counted {'twice' if size == 2 else f'{size} times'}",
            f"{once_more}, or one rank's share of the {group} group instead of the sum",
            group,
        )
        for group, size in groups.items()
    ]
    ignored, twice = "the count of tokens ignores the loss mask", "the loss mask is counted twice"
    return [
        *found,
        Factor(microbatches, "the number of microbatches", "microbatches are summed where their mean is meant", once_more),
        Factor(kept / tokens, "the share of tokens that count", ignored, twice),
        Factor(kept, "the tokens that count", "the sum over tokens is not divided by their number", once_more),
        Factor(loss_scale, "the loss scale", "the loss scale is not taken out", "the loss scale is taken out twice"),
    ]


def factor_words(ratio: float, factors: Iterable[Factor] = ()) -> tuple[str, str]:
    """What a wrong factor is, and the group whose size it is; only the factor if it is no number of the run.

    So of 2: `2.0x, the tensor size: a sum over the tensor group is counted twice`, and `tensor`.

    All numbers of the same size are named, and then no group: a run with one of the axes alone tells them apart.
    """
    meant = []
    for factor in factors:
        if factor.value not in (0, 1) and math.isclose(ratio, factor.value, rel_tol=_CLOSE):
            meant.append((factor.name, factor.multiplied, factor.group))
        elif factor.value not in (0, 1) and math.isclose(ratio * factor.value, 1, rel_tol=_CLOSE):
            meant.append((f"1 / {factor.name}", factor.divided, factor.group))
    if not meant:
        return f"{short(ratio)}x what it should be" if ratio else "zero: nothing reaches it", ""
    names, reasons, groups = (list(dict.fromkeys(filter(None, column))) for column in zip(*meant, strict=True))
    return f"{short(ratio)}x, {' or '.join(names)}: {'; or '.join(reasons)}", groups[0] if len(groups) == 1 else ""


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


def forward_order(num_layers: int, *, depths: int = 0, compiled: bool = False) -> list[str]:
    """Names of activations in the order in which the forward makes them; within compiled layers none is seen."""
    parts = ("",) if compiled else (".attention", ".mlp", "")
    layers = (f"layers.{number}{part}" for number in range(num_layers) for part in parts)
    of_depth = (".projection", *(f".layer{part}" for part in parts))
    return ["embedding", *layers, *(f"mtp.{k}{part}" for k in range(depths) for part in of_depth)]


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
