"""Which ranks have something else than they must, in words; and what is compared with what."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.parallel.context import make_context
from megatron.parallel.params import ParamRecord, Split
from megatron.parallel.tensor_slice import TensorSlice
from megatron.parallel.topology import GRADIENT_AXES, Topology
from megatron_lab.audit.reductions import _describe_miscount, _explain_factor, _find_norm_error, get_replicated_axes
from megatron_lab.audit.replicas import AuditError, Replicas, ReplicatedTensor, _describe_minority, format_rank_list, raise_audit
from tests.support.warm import run_forked_ranks

CPU = torch.device("cpu")


def test_the_odd_ones_are_those_that_differ_from_most() -> None:
    topology = Topology(tp=2, dp=4)
    digests = dict.fromkeys(range(8), 5)
    assert _describe_minority(digests | {3: 6}, topology) == (
        "the values of rank 3 differ from those of ranks 0, 1, 2, 4, 5, 6 and 7 (tensor group [2, 3], data group [1, 3, 5, 7])"
    )
    assert _describe_minority(digests | {0: 6, 1: 7}, topology) == (
        "the values of ranks 0 and 1 differ from those of ranks 2, 3, 4, 5, 6 and 7 "
        "(tensor group [0, 1], data group [0, 2, 4, 6], data group [1, 3, 5, 7])"
    )


def test_two_halves_are_not_judged() -> None:
    """A whole replica that has gone its own way; where each tensor rank has its own part, the data groups differ alone."""
    found = _describe_minority({0: 1, 2: 2}, Topology(tp=2, dp=2))
    assert found == "rank 0 and rank 2 have different values, and it cannot be decided which are wrong (data group [0, 2])"
    found = _describe_minority({0: 1, 1: 1, 2: 2, 3: 2}, Topology(dp=2, pp=2, pp_before_dp=True))
    assert found.startswith("ranks 0 and 1 and ranks 2 and 3 have different values")
    assert "(data group [0, 2], data group [1, 3])" in found
    found = _describe_minority(dict.fromkeys(range(8), 5) | {3: 6}, Topology(tp=2, cp=2, dp=2))
    assert found.endswith("(tensor group [2, 3], context and data group [1, 3, 5, 7])")


def test_many_ranks_are_not_all_named() -> None:
    assert format_rank_list([4]) == "rank 4"
    assert format_rank_list(range(100)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"
    found = _describe_minority(dict.fromkeys(range(64), 5) | dict.fromkeys(range(20), 6), Topology(tp=2, dp=32))
    assert (
        found.startswith("the values of ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more differ from those of ranks 20, ")
        and len(found) < 600
    )


def test_findings_beyond_the_first_ones_are_counted() -> None:
    raise_audit("head", [], "advice")
    with pytest.raises(AuditError) as caught:
        raise_audit("head", [f"finding {number}" for number in range(11)], "advice")
    assert str(caught.value).splitlines() == ["head", *(f"  finding {n}" for n in range(8)), "  and 3 more", "  advice"]


def copies(context: Any, changed: dict[str, int]) -> list[ReplicatedTensor]:
    """A parameter that all hold, one that is split over tensor ranks, one that the first stage has alone, one of both ends."""
    at = context.coordinates

    def copy(name: str, rows: int) -> ReplicatedTensor:
        values = torch.arange(100.0) + (changed.get(name) == context.rank)
        return ReplicatedTensor(name, "weights", (TensorSlice((rows, 0), (2, 50)),), lambda: values)

    found = [
        copy("norm" if at["pp"] == 0 else "other", 0),
        copy("split" if at["pp"] == 0 else "else", 2 * at["tp"]),
        copy("tied", 0),
    ]
    return found[::-1] if context.rank % 2 else found  # an order of its own on each rank


def compared(rank: int, topology: Topology, changed: dict[str, int]) -> tuple[str, str]:
    context = make_context(topology, rank, CPU)
    replicas = Replicas(copies(context, changed), context)
    message = ""
    try:
        replicas.compare(7, 3)
    except AuditError as error:
        message = str(error)
    dist.barrier()
    return replicas.describe(), message


@pytest.mark.parametrize(
    ("topology", "changed", "words"),
    [
        (Topology(tp=2, pp=2, dp=2), {}, []),
        (
            Topology(tp=2, pp=2, dp=2),
            {"split": 2},
            ["split: rank 0 and rank 2 have different values, .* \\(data group \\[0, 2\\]\\)"],
        ),
        (
            Topology(tp=2, pp=2, dp=2),
            {"tied": 5, "norm": 1},
            [
                "norm: the values of rank 1 differ from those of ranks 0, 2 and 3 "
                "\\(tensor group \\[0, 1\\], data group \\[1, 3\\]\\)",
                "tied: the values of rank 5 differ from those of ranks 0, 1, 2, 3, 4, 6 and 7 "
                "\\(tensor group \\[4, 5\\], data group \\[5, 7\\], first and last stage \\[1, 5\\]\\)",
            ],
        ),
    ],
)
def test_groups_are_compared_and_all_ranks_raise_the_same(topology: Topology, changed: dict[str, int], words: list[str]) -> None:
    found = run_forked_ranks(topology.world_size, compared, topology, changed, timeout=60.0)
    assert {described for described, _ in found} == {"2 over tensor ranks, 3 over data ranks, 1 over the first and the last stage"}
    (message,) = {message for _, message in found}
    lines = message.splitlines()
    if not changed:
        assert not lines
        return
    assert lines[0].startswith(
        "iteration 7: copies of weights that must be equal differ between ranks (at iteration 3 they were equal), so"
    )
    for line, pattern in zip(lines[1:], words, strict=False):
        assert re.fullmatch(f"  {pattern}", line), line
    assert len(lines) == len(words) + 3


# ---- words of the audit of a step


def test_who_has_the_whole_gradient() -> None:
    split = ParamRecord("w", (8, 8), splits=(Split(0, "tp"),))
    assert get_replicated_axes(split) == ()
    assert get_replicated_axes(ParamRecord("w", (8,))) == ("tp",)
    assert get_replicated_axes(ParamRecord("w", (8,), partial_axes=("tp", *GRADIENT_AXES))) == ()


def test_a_factor_is_explained_by_the_layout() -> None:
    topology = Topology(tp=2, pp=3, dp=4)
    assert _explain_factor(4.0, topology) == " (the data size)" and _explain_factor(0.5, topology) == " (one over the tensor size)"
    assert _explain_factor(5.0, topology) == _explain_factor(1.0, topology) == _explain_factor(0.0, topology) == ""
    assert _explain_factor(2.0, Topology(tp=2, dp=2)) == " (the tensor size or the data size)"


def test_what_is_counted_wrongly_is_named() -> None:
    counted = {"a": 1.0, "b": 4.0}
    assert _find_norm_error(5.0, counted, 1e-6) is None
    assert _find_norm_error(9.0, counted, 1e-6) == "b is counted twice"
    assert _find_norm_error(4.0, counted, 1e-6) == "a is counted not at all"
    assert _find_norm_error(12.0, counted, 1e-6) == "the sum of squares is too large"


def test_boxes_that_overlap_or_leave_a_gap() -> None:
    record = ParamRecord("w", (4, 3))
    rows = [(rank, TensorSlice((rank, 0), (2, 3))) for rank in (0, 1)]
    assert _describe_miscount(record, rows) == "counted twice in the norm by ranks 0 and 1: 3 elements from (1, 0) on"
    assert _describe_miscount(record, [rows[0], rows[0]]) == "counted twice in the norm by rank 0: 6 elements from (0, 0) on"
    assert _describe_miscount(record, rows[:1]) == "6 of 12 elements are counted in the norm by no rank"
