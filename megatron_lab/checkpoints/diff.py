"""Compare the weights of two folders, and their moments if both have them: the first and the largest differences.

Any two folders that hold weights: a training checkpoint at any layout, a Hugging Face folder, a checkpoint of Megatron-LM. As with
diff(1), the exit status is 0 if they are the same, 1 if they differ, and 2 if they cannot be compared. Peak memory: one tensor of
each.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from megatron_lab.checkpoints.text import columns, in_order

if TYPE_CHECKING:
    import torch

    from megatron_lab.checkpoints.compare import Element
    from megatron_lab.foreign.source import TensorInfo, WeightSource


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("first", metavar="A", help="a --save folder, one checkpoint in it, or a folder of another program")
    parser.add_argument("second", metavar="B", help="the folder to compare it with")
    parser.add_argument("--step", type=int, nargs=2, metavar=("N", "M"), default=(None, None), help="iterations of A and of B")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="tensors are the same if the norm of their difference is at most X times the norm of A's (0)",
    )
    parser.add_argument("--largest", type=int, default=10, metavar="N", help="how many of the largest differences to show (10)")
    parser.add_argument("--json", action="store_true", help="everything as JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Compare and print."""
    from megatron_lab.foreign.opening import open_source

    if not args.tolerance >= 0:
        raise ValueError(f"--tolerance {args.tolerance}: it must not be negative")
    first, second = open_source(args.first, args.step[0]), open_source(args.second, args.step[1])
    found = compare(first, second, args.tolerance)
    print(json.dumps(found, indent=1) if args.json else "\n".join(lines(found, args.largest)))
    return 0 if found["same"] else 1


def compare(first: WeightSource, second: WeightSource, tolerance: float = 0.0) -> dict[str, Any]:
    """Every difference, in JSON types."""
    from megatron_lab.checkpoints.compare import difference

    mine, theirs, kinds = _tensors(first, second)
    only_a = [name for name in mine if name not in theirs]
    only_b = [name for name in theirs if name not in mine]
    shapes, dtypes, differing, same = {}, {}, {}, 0
    for name in mine:
        if name not in theirs:
            continue
        one, other = mine[name], theirs[name]
        if one.shape != other.shape:
            shapes[name] = [list(one.shape), list(other.shape)]
            continue
        if one.dtype != other.dtype:
            dtypes[name] = [str(tensor.dtype).removeprefix("torch.") for tensor in (one, other)]
        gap = difference(_read(first, name), _read(second, name))
        if gap is None or gap.relative <= tolerance:
            same += 1
            continue
        differing[name] = {
            "elements": gap.differing,
            "of": math.prod(one.shape),
            "first": _element(gap.first),
            "largest": _element(gap.largest),
            "absolute": gap.absolute,
            "relative": gap.relative,
        }
    return {
        "a": first.name,
        "b": second.name,
        "kinds": kinds,
        "same": not (only_a or only_b or shapes or differing),
        "equal_tensors": same,
        "only_in_a": only_a,
        "only_in_b": only_b,
        "other_shape": shapes,
        "other_dtype": dtypes,
        "different": differing,
    }


def lines(found: dict[str, Any], largest: int) -> list[str]:
    """The comparison as text."""
    told = [f"a: {found['a']}", f"b: {found['b']}", f"compared: {', '.join(found['kinds'])}"]
    told += [f"only in a: {name}" for name in found["only_in_a"]]
    told += [f"only in b: {name}" for name in found["only_in_b"]]
    told += [f"other shape: {name} {a} in a, {b} in b" for name, (a, b) in found["other_shape"].items()]
    if pairs := sorted({tuple(pair) for pair in found["other_dtype"].values()}):
        text = ", ".join(f"{a} in a and {b} in b" for a, b in pairs)
        told.append(f"other type, compared by value: {len(found['other_dtype'])} tensors ({text})")
    different = found["different"]
    told.append(f"{found['equal_tensors']} tensors are the same, {len(different)} differ")
    if different:
        name, gap = next(iter(different.items()))
        told.append(f"first difference: {name} {gap['first']['index']}: {gap['first']['a']!r} in a, {gap['first']['b']!r} in b")
        rows = [("largest differences", "relative", "absolute", "elements", "at", "a", "b")]
        for name, gap in sorted(different.items(), key=lambda item: -item[1]["relative"])[:largest]:
            at = gap["largest"]
            counts = f"{gap['elements']:,} of {gap['of']:,}"
            values = (str(at["index"]), f"{at['a']:.9g}", f"{at['b']:.9g}")
            rows.append((name, f"{gap['relative']:.3g}", f"{gap['absolute']:.3g}", counts, *values))
        told += columns(rows, right=(1, 2, 3, 5, 6))
    return told


def _tensors(first: WeightSource, second: WeightSource) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo], list[str]]:
    """What is compared of each, by full name (`model.<parameter>`, `exp_avg.<parameter>`), and its kinds."""
    from megatron.parallel.params import global_records
    from megatron_lab.foreign.source import StoredCheckpoint

    both = [dict(source.tensors) if isinstance(source, StoredCheckpoint) else _weights(source) for source in (first, second)]
    kinds = [{name.partition(".")[0] for name in tensors} for tensors in both]
    common = kinds[0] & kinds[1]
    order = global_records(first.model, first.vocab_size)
    mine, theirs = ({name: one[name] for name in in_order(one, order) if name.partition(".")[0] in common} for one in both)
    return mine, theirs, sorted(common, key=lambda kind: (kind != "model", kind))


def _weights(source: WeightSource) -> dict[str, TensorInfo]:
    return {f"model.{name}": tensor for name, tensor in source.weights.items()}


def _read(source: WeightSource, full_name: str) -> torch.Tensor:
    from megatron_lab.foreign.source import StoredCheckpoint

    if isinstance(source, StoredCheckpoint):
        return source.read_stored(full_name)
    return source.read(full_name.removeprefix("model."))


def _element(element: Element) -> dict[str, Any]:
    return {"index": list(element.index), "a": element.first, "b": element.second}
