"""Texts that describe a difference from the reference run: its size, its location, and the size or count of the run (such as the
tensor-parallel size) that explains a constant factor. The module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron.pipeline_parallel.partition import Chunk
from megatron.spec.weights import split_layer_name

TOLERANCE = 1e-10
"""Relative tolerance of tensors, losses and norms."""
ROUNDING = 1e-14
"""Rounding error, as a share of the global norm, of a sum whose summands are as large as the global norm. A much smaller result
has lost the digits below this error, so two runs agree no better."""
NEGLIGIBLE = 1e-12
"""Share of the global norm below which a reference tensor counts as pure rounding error (the true gradient of a key bias is
zero). The difference of such a tensor is compared with this share of the global norm, not with the tensor's own norm."""


def compute_relative(difference: float, scale: float) -> float:
    """Return |difference| / |scale|.

    The result is infinite if the difference is not finite, or if only the scale is zero. It is 0 if both are zero.
    """
    if not math.isfinite(difference):
        return math.inf
    if not scale:
        return math.inf if difference else 0.0
    return abs(difference) / abs(scale)


def format_relative_difference(difference: float, size: float) -> str:
    """Format the norm of a difference as a share of `size`, the norm of the reference."""
    if not math.isfinite(difference):
        return "not finite"
    return f"relative difference {difference / size:.2e}" if size else f"difference {difference:.2e} from zero"


def format_factor(ratio: float) -> str:
    """Format the constant factor between a value and its reference with few digits, but with enough digits to distinguish it from
    1."""
    if 0 < abs(ratio - 1) < 1e-5:
        return f"{ratio:.12g}"
    return f"{ratio:.1f}" if math.isclose(ratio, round(ratio, 1), rel_tol=1e-5) else f"{ratio:.6g}"


_CLOSE = 1e-6
"""Relative difference below which a factor counts as equal to a number of the layout."""


@dataclass(frozen=True)
class Factor:
    """Size or count of the run, such as the tensor-parallel size, by which a mistake may multiply or divide a value."""

    value: float
    name: str
    multiplied: str
    """Description of the mistake that multiplies a value by this number."""
    divided: str
    """Description of the mistake that divides a value by this number."""
    group: str = ""
    """Axis whose size is this number ("tensor", "context", "data", "pipeline"); empty if the number is not the size of an
    axis."""


def build_factors(
    groups: Mapping[str, int], num_microbatches: int, num_counted: float, num_tokens: int, loss_scale: float
) -> list[Factor]:
    """List the sizes and counts of one step by which a value may be wrongly multiplied or divided.

    Args:
        groups: number of ranks along each axis, by the name of the axis ("tensor", "context", "data", "pipeline").
        num_microbatches: microbatches of one data-parallel rank.
        num_counted: tokens of the global batch that count in the loss.
        num_tokens: all tokens of the global batch.
        loss_scale: number by which the loss is multiplied before the backward.
    """
    divided_twice = "divided by it once too often"
    group_factors = [
        Factor(
            size,
            f"the {group} size",
            f"a sum over the {group} group is counted {'twice' if size == 2 else f'{size} times'}",
            f"{divided_twice}, or one rank's share of the {group} group instead of the sum",
            group,
        )
        for group, size in groups.items()
    ]
    ignored, twice = "the count of tokens ignores the loss mask", "the loss mask is counted twice"
    return [
        *group_factors,
        Factor(num_microbatches, "the number of microbatches", "microbatches are summed where their mean is meant", divided_twice),
        Factor(num_counted / num_tokens, "the share of tokens that count", ignored, twice),
        Factor(num_counted, "the tokens that count", "the sum over tokens is not divided by their number", divided_twice),
        Factor(loss_scale, "the loss scale", "the loss scale is not taken out", "the loss scale is taken out twice"),
    ]


def explain_factor(ratio: float, factors: Iterable[Factor] = ()) -> tuple[str, str]:
    """Explain why a value is a constant multiple of its reference: by a size or count of the run, such as the tensor-parallel size.

    For a ratio of 2 in a run with two tensor-parallel ranks, the function returns `2.0x, the tensor size: a sum over the tensor
    group is counted twice` and `tensor`.

    Args:
        ratio: value divided by its reference.
        factors: sizes and counts that may explain the ratio, or its inverse.

    Returns:
        The explanation, and the axis to which it belongs. If several sizes or counts equal the ratio, the explanation names all of
        them. The axis is empty if they belong to several axes or to none. If no size or count equals the ratio, the explanation
        only states the ratio.
    """
    matches = []
    for factor in factors:
        if factor.value not in (0, 1) and math.isclose(ratio, factor.value, rel_tol=_CLOSE):
            matches.append((factor.name, factor.multiplied, factor.group))
        elif factor.value not in (0, 1) and math.isclose(ratio * factor.value, 1, rel_tol=_CLOSE):
            matches.append((f"1 / {factor.name}", factor.divided, factor.group))
    if not matches:
        return f"{format_factor(ratio)}x what it should be" if ratio else "zero: nothing reaches it", ""
    names, reasons, groups = (list(dict.fromkeys(filter(None, column))) for column in zip(*matches, strict=True))
    return f"{format_factor(ratio)}x, {' or '.join(names)}: {'; or '.join(reasons)}", groups[0] if len(groups) == 1 else ""


def get_layer_index(name: str) -> int | None:
    """Return the index of the layer to which a parameter belongs, counted over all stages; None if the parameter is not in a
    layer."""
    return split_layer_name(name)[0]


def find_chunks(name: str, table: Sequence[Chunk]) -> list[Chunk]:
    """Return the model chunks (consecutive layers of a pipeline stage) that hold a parameter. For a tied embedding, only the first
    chunk is returned.

    Args:
        name: name of the parameter.
        table: all model chunks of all stages, with their layers.
    """
    layer = get_layer_index(name)
    if layer is not None:
        return [chunk for chunk in table if layer in chunk.layers]
    return [table[0] if name.startswith("embedding") else table[-1]]


def find_stages(name: str, table: Sequence[Chunk]) -> list[int]:
    """Return the pipeline stages that hold a parameter; empty if its layer is assigned to no stage.

    Args:
        name: name of the parameter.
        table: all model chunks of all stages, with their layers.
    """
    return sorted({chunk.stage for chunk in find_chunks(name, table)})


def format_location(name: str, table: Sequence[Chunk], *, stages: Iterable[int] | None = None) -> str:
    """Format the name of a parameter with its layer and pipeline stage: `layers.3.attention.qkv.weight (layer 3, stage 1)`.

    Args:
        name: name of the parameter.
        table: all model chunks of all stages, with their layers.
        stages: stages to mention; by default those that have the layer according to `table`.
    """
    layer = get_layer_index(name)
    location_stages = sorted(set(find_stages(name, table) if stages is None else stages))
    details = [] if layer is None else [f"layer {layer}"]
    if table and max(chunk.stage for chunk in table) > 0:
        details += (
            [f"stage{'s' if len(location_stages) > 1 else ''} {format_integers(location_stages)}"]
            if location_stages
            else ["on no stage"]
        )
        chunks = find_chunks(name, table)
        if len(chunks) == 1 and len({chunk.stage for chunk in table}) < len(table):
            details.append(f"chunk {chunks[0].index}")
    return f"{name} ({', '.join(details)})" if details else name


def list_activations(num_layers: int, *, num_mtp_layers: int = 0, compiled: bool = False) -> list[str]:
    """List the names of the modules whose outputs a comparison records, in the order of the forward.

    Args:
        num_layers: number of layers of the model.
        num_mtp_layers: number of multi-token-prediction layers.
        compiled: whether layers are compiled. Then only the outputs of whole layers are recorded, not those of attention and MLP.
    """
    suffixes = ("",) if compiled else (".attention", ".mlp", "")
    layers = (f"layers.{layer}{suffix}" for layer in range(num_layers) for suffix in suffixes)
    mtp_suffixes = (".projection", *(f".layer{suffix}" for suffix in suffixes))
    return ["embedding", *layers, *(f"mtp.{k}{suffix}" for k in range(num_mtp_layers) for suffix in mtp_suffixes)]


def format_integers(values: Iterable[int], max_items: int = 8) -> str:
    """Format integers as a list, such as `0, 1 and 3`. Three or more consecutive integers become a range, such as `2 to 5`. A list
    of more than `max_items` items ends with "others"."""
    ranges: list[list[int]] = []
    for value in sorted(set(values)):
        if ranges and ranges[-1][-1] == value - 1:
            ranges[-1].append(value)
        else:
            ranges.append([value])
    texts: list[str] = []
    for bounds in ranges:
        texts += [f"{bounds[0]} to {bounds[-1]}"] if len(bounds) > 2 else map(str, bounds)
    if len(texts) > max_items:
        texts = [*texts[: max_items - 1], "others"]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
