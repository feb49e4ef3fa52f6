"""Print the first and the largest differences between the weights of two folders, and between their moments if both have them.

Each folder may be a training checkpoint of any layout, a Hugging Face folder, or a checkpoint of Megatron-LM. As with diff(1), the
exit status is 0 if they are equal, 1 if they differ, and 2 if they cannot be compared. Peak memory: one tensor of each folder.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING, Any

from megatron_lab.checkpoints.text import parse_step, sort_tensor_names
from megatron_lab.terminal import format_table, get_terminal_width

if TYPE_CHECKING:
    import torch

    from megatron_lab.checkpoints.compare import Element
    from megatron_lab.foreign.source import TensorInfo, WeightSource


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand `diff` to its parser."""
    parser.add_argument("first", metavar="A", help="a --save folder, one checkpoint in it, or a folder of another program")
    parser.add_argument("second", metavar="B", help="the folder to compare it with")
    parser.add_argument(
        "--step",
        type=parse_step,
        nargs=2,
        metavar=("N", "M"),
        default=(None, None),
        help="iterations of A and of B, each a number or best",
    )
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
    """Run the subcommand `diff`: compare two folders and print the result. Returns the exit status: 0 if they are equal, otherwise
    1."""
    from megatron_lab.foreign.open_source import open_source

    if not args.tolerance >= 0:
        raise ValueError(f"--tolerance {args.tolerance} must not be negative: set a tolerance of 0 or more")
    first, second = open_source(args.first, args.step[0]), open_source(args.second, args.step[1])
    for note in (*first.notes, *second.notes):  # such as: an older checkpoint is taken, because the newest is damaged
        print(f"note: {note}", file=sys.stderr)
    result = compare(first, second, args.tolerance)
    print(json.dumps(result, indent=1) if args.json else "\n".join(format_lines(result, args.largest)))
    return 0 if result["same"] else 1


def compare(first: WeightSource, second: WeightSource, tolerance: float = 0.0) -> dict[str, Any]:
    """Compare the weights of two sources, and their moments if both sources have them.

    Args:
        tolerance: two tensors count as equal if the norm of their difference, divided by the norm of the first tensor, is at most
            this.

    Returns:
        A JSON object with the two folders, whether everything is equal (key `same`), and the tensors that only one source has or
        that have another shape or dtype. For each tensor that differs it has the first and the largest difference.
    """
    from megatron_lab.checkpoints.compare import compare_tensors

    tensors_a, tensors_b, prefixes = _select_common_tensors(first, second)
    only_a = [name for name in tensors_a if name not in tensors_b]
    only_b = [name for name in tensors_b if name not in tensors_a]
    shapes, dtypes, differing, num_equal = {}, {}, {}, 0
    for name in tensors_a:
        if name not in tensors_b:
            continue
        info_a, info_b = tensors_a[name], tensors_b[name]
        if info_a.shape != info_b.shape:
            shapes[name] = [list(info_a.shape), list(info_b.shape)]
            continue
        if info_a.dtype != info_b.dtype:
            dtypes[name] = [str(tensor.dtype).removeprefix("torch.") for tensor in (info_a, info_b)]
        tensor_difference = compare_tensors(_read_tensor(first, name), _read_tensor(second, name))
        if tensor_difference is None or tensor_difference.relative_norm <= tolerance:
            num_equal += 1
            continue
        differing[name] = {
            "elements": tensor_difference.num_different,
            "of": math.prod(info_a.shape),
            "first": _element_to_json(tensor_difference.first_difference),
            "largest": _element_to_json(tensor_difference.max_difference),
            "absolute": tensor_difference.max_abs_difference,
            "relative": tensor_difference.relative_norm,
        }
    return {
        "a": first.name,
        "b": second.name,
        "kinds": prefixes,
        "same": not (only_a or only_b or shapes or differing),
        "equal_tensors": num_equal,
        "only_in_a": only_a,
        "only_in_b": only_b,
        "other_shape": shapes,
        "other_dtype": dtypes,
        "different": differing,
    }


def format_lines(result: dict[str, Any], num_shown: int) -> list[str]:
    """Format the result of `compare` as lines of text.

    Args:
        result: return value of `compare`.
        num_shown: maximum number of differing tensors to list. Those with the largest relative differences come first.
    """
    text_rows = [f"a: {result['a']}", f"b: {result['b']}", f"compared: {', '.join(result['kinds'])}"]
    text_rows += [f"only in a: {name}" for name in result["only_in_a"]]
    text_rows += [f"only in b: {name}" for name in result["only_in_b"]]
    text_rows += [f"other shape: {name} {a} in a, {b} in b" for name, (a, b) in result["other_shape"].items()]
    if pairs := sorted({tuple(pair) for pair in result["other_dtype"].values()}):
        text = ", ".join(f"{a} in a and {b} in b" for a, b in pairs)
        text_rows.append(f"other type, compared by value: {len(result['other_dtype'])} tensors ({text})")
    different = result["different"]
    text_rows.append(f"{result['equal_tensors']} tensors are the same, {len(different)} differ")
    if different:
        name, difference = next(iter(different.items()))
        text_rows.append(
            f"first difference: {name} {difference['first']['index']}: "
            f"{difference['first']['a']!r} in a, {difference['first']['b']!r} in b"
        )
        rows = [("largest differences", "relative", "absolute", "elements", "at", "a", "b")]
        for name, difference in sorted(different.items(), key=lambda item: -item[1]["relative"])[:num_shown]:
            element = difference["largest"]
            counts = f"{difference['elements']:,} of {difference['of']:,}"
            values = (str(element["index"]), f"{element['a']:.9g}", f"{element['b']:.9g}")
            rows.append((name, f"{difference['relative']:.3g}", f"{difference['absolute']:.3g}", counts, *values))
        text_rows += format_table(rows, (1, 2, 3, 5, 6), width=get_terminal_width())
    return text_rows


def _select_common_tensors(
    first: WeightSource, second: WeightSource
) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo], list[str]]:
    """Select the tensors to compare: weights (prefix `model`), and each moment (`exp_avg` and so on) that both sources have.

    Returns:
        Shape and dtype of these tensors in the first source, and in the second source, by full name such as `exp_avg.<parameter>`.
        Then the prefixes that both sources have.
    """
    from megatron.parallel.params import build_global_records
    from megatron_lab.foreign.source import StoredCheckpoint

    tensor_maps = [
        dict(source.tensors) if isinstance(source, StoredCheckpoint) else _get_weights_by_full_name(source)
        for source in (first, second)
    ]
    prefixes = [{name.partition(".")[0] for name in tensors} for tensors in tensor_maps]
    common = prefixes[0] & prefixes[1]
    order = build_global_records(first.model, first.vocab_size)
    tensors_a, tensors_b = (
        {name: infos[name] for name in sort_tensor_names(infos, order) if name.partition(".")[0] in common} for infos in tensor_maps
    )
    return tensors_a, tensors_b, sorted(common, key=lambda prefix: (prefix != "model", prefix))


def _get_weights_by_full_name(source: WeightSource) -> dict[str, TensorInfo]:
    return {f"model.{name}": tensor for name, tensor in source.weights.items()}


def _read_tensor(source: WeightSource, full_name: str) -> torch.Tensor:
    from megatron_lab.foreign.source import StoredCheckpoint

    if isinstance(source, StoredCheckpoint):
        return source.read_stored(full_name)
    return source.read(full_name.removeprefix("model."))


def _element_to_json(element: Element) -> dict[str, Any]:
    return {"index": list(element.index), "a": element.first, "b": element.second}
