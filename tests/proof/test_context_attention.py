"""Attention over context ranks by itself: equal to plain attention over whole samples, forward and backward, in every form.

In float64, against products that share no code, and in fewer digits with what these lose. Every pair of settings occurs; `--full`
takes every case.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch

from megatron.attention import flash_range_pairs, range_pairs
from megatron.attention.documents import Documents
from megatron.attention.range_pairs import RangePair
from megatron.config.parallel import CpCommType
from megatron.context_parallel import attention
from megatron.context_parallel.attention import ContextRanks, _AttentionCall, context_attention
from megatron.parallel.context import Group, ParallelContext, connect_fake, disconnect, make_context
from megatron.parallel.sequence_split import SequenceSplit, compute_token_costs, split_balanced, split_zigzag
from megatron.parallel.topology import Topology
from megatron.spec.layers import ScoreSpec
from megatron_lab.planner.context_cost import ContextAttention
from megatron_lab.planner.storages import StorageLedger
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.covering import covering, product
from tests.support.flash_attention import plain_backward, plain_forward
from tests.support.shared_memory import recorded_calls
from tests.support.warm import run_warm_ranks

S, B, G = 32, 2, 4
ENDS: dict[str, list[list[int]]] = {
    "whole": [[], []],
    "at cuts": [[8, 16, 24], [4, 8, 12, 16, 20, 24, 28]],
    "beside cuts": [[7, 9, 15, 17], [3, 5, 23, 25]],
    "of one token": [list(range(1, S)), [1, 2, 3, 30, 31]],
    "one over all": [[], [1]],
}
"""Where documents end in each of two samples."""
ROUNDED = 1e-5
"""What many terms of about 1 lose in float32, where their sum should be 0."""
SCORES = {
    "plain": ScoreSpec(),
    "window": ScoreSpec(window=5),
    "no reach": ScoreSpec(window=0),
    "capped": ScoreSpec(scale=0.7, softcap=0.5),
    "sinks": ScoreSpec(softmax="learnable"),
    "window, one": ScoreSpec(window=9, softmax="off-by-one"),
}
AXES: dict[str, list[Any]] = {
    "ranks": [2, 4],
    "way": list(get_args(CpCommType)),
    "ends": [*ENDS],
    "scores": [*SCORES],
    "sizes": [(1, 6, 6), (2, 6, 6), (1, 5, 3)],
    "cut": ["mirrored", "balanced", "scattered"],
    "kernel": ["blocks", "flash"],
}


def fits(case: dict[str, Any]) -> bool:
    """Heads that flash attention could take."""
    return case["kernel"] == "blocks" or case["sizes"][1] == case["sizes"][2]


def documents_of(ends: str, cut: SequenceSplit | None) -> Documents:
    """Two samples whose documents end there."""
    bounds = [S * sample + place for sample, places in enumerate(ENDS[ends]) for place in (0, *places)]
    array = np.array([*bounds, S * B], dtype=np.int32)
    return Documents(array, torch.from_numpy(array), B, cut)


def cut_of(kind: str, ends: str, ranks: int) -> SequenceSplit:
    """A cut; a scattered one has no order that helps."""
    if kind == "mirrored":
        return split_zigzag(S, ranks)
    if kind == "balanced":
        return split_balanced(compute_token_costs(S, {None: 1.0}, documents_of(ends, None).cu_seqlens), ranks)
    pieces = np.random.default_rng(3).permutation(S // 2).reshape(ranks, -1)
    return SequenceSplit(2, tuple(tuple(sorted(numbers)) for numbers in pieces.tolist()))


def tensors(sizes: tuple[int, int, int], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Queries, keys, values and sinks, and the gradient of the result."""
    r, d, e = sizes
    random = torch.Generator().manual_seed(1)
    shapes = [(S, B, G, r, d), (S, B, G, d), (S, B, G, e), (G * r,), (S, B, G * r * e)]
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


@functools.cache
def plain(ends: str, scores: str, sizes: tuple[int, int, int], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Result and gradients of the whole, by a mask of [s, s]: in float64, of numbers of a dtype."""
    q, k, v, sinks, grad = (x.double() for x in tensors(sizes, dtype))
    inputs = [x.requires_grad_() for x in (q, k, v, sinks)]
    spec = SCORES[scores]
    found = torch.einsum("qbgrd,kbgd->bgrqk", q, k) * (spec.scale or sizes[1] ** -0.5)
    if spec.softcap is not None:
        found = spec.softcap * torch.tanh(found / spec.softcap)
    numbers = [[sum(end <= place for end in places) for place in range(S)] for places in ENDS[ends]]
    same = torch.tensor(numbers)[:, :, None] == torch.tensor(numbers)[:, None, :]
    distance = torch.arange(S)[:, None] - torch.arange(S)
    seen = same & (distance >= 0) & (distance <= (S if spec.window is None else spec.window))
    found = found.masked_fill(~seen[:, None, None], -torch.inf)
    beside = {"vanilla": -torch.inf * torch.ones(G, sizes[0]), "off-by-one": torch.zeros(G, sizes[0])}
    column = sinks.view(G, sizes[0]) if spec.softmax == "learnable" else beside[spec.softmax]
    joined = torch.cat([found, column.double()[None, :, :, None, None].expand(B, -1, -1, S, 1)], -1)
    out = torch.einsum("bgrqk,kbge->qbgre", joined.softmax(-1)[..., :-1], v).flatten(2)
    out.backward(grad)
    return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)]


def sharers(context: ParallelContext, way: CpCommType) -> ContextRanks:
    return ContextRanks(way, context.context_group, context.context_rings)


def on_a_rank(rank: int, cases: Sequence[dict[str, Any]]) -> list[list[torch.Tensor]]:
    """Result and gradients of a rank's tokens in each case; of the sinks its share. All cases are of as many ranks."""
    context, found = make_context(Topology(cp=cases[0]["ranks"]), rank, torch.device("cpu")), []
    for case in cases:
        with pytest.MonkeyPatch.context() as patch:
            if case["kernel"] == "flash":
                patch.setattr(flash_range_pairs, "flash_supports", lambda q, v, dropout: True)
                patch.setattr(flash_range_pairs, "varlen_forward", plain_forward)
                patch.setattr(flash_range_pairs, "varlen_backward", plain_backward)
            found.append(of_a_case(context, rank, case))
    return found


def of_a_case(context: ParallelContext, rank: int, case: dict[str, Any]) -> list[torch.Tensor]:
    cut = cut_of(case["cut"], case["ends"], case["ranks"])
    *inputs, sinks, grad = tensors(case["sizes"], case.get("dtype", torch.float64))
    places = torch.from_numpy(cut.get_positions(rank))
    own = [x[places].requires_grad_() for x in inputs]
    learnt = sinks.requires_grad_() if SCORES[case["scores"]].softmax == "learnable" else None
    documents = documents_of(case["ends"], cut)
    q, k, v = own
    out = context_attention(sharers(context, case["way"]), q, k, v, documents, SCORES[case["scores"]], learnt)
    out.backward(grad[places])
    of_sinks = torch.zeros_like(sinks) if learnt is None or learnt.grad is None else learnt.grad
    return [out.detach(), *(x.grad for x in own if x.grad is not None), of_sinks]


def joined(cases: Sequence[dict[str, Any]]) -> Iterator[list[torch.Tensor]]:
    """Result and gradients of all ranks together, in each case. All cases are of as many ranks."""
    ranks = run_warm_ranks(cases[0]["ranks"], on_a_rank, cases, timeout=60.0)
    for case, found in zip(cases, zip(*ranks, strict=True), strict=True):
        order = torch.from_numpy(np.argsort(cut_of(case["cut"], case["ends"], case["ranks"]).order))
        *divided, sinks = zip(*found, strict=True)
        yield [*(torch.cat(parts)[order] for parts in divided), torch.stack(sinks).sum(0)]


def covered(**axes: list[Any]) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
    """Cases in which each pair of settings occurs, with results and gradients."""
    cases = covering({**AXES, **axes}, 2, fits)
    for ranks in AXES["ranks"]:
        alike = [case for case in cases if case["ranks"] == ranks]
        yield from zip(alike, joined(alike), strict=True)


def error(case: dict[str, Any]) -> float:
    """The largest difference to plain attention."""
    wanted = plain(case["ends"], case["scores"], case["sizes"])
    return max((mine - other).abs().max().item() for mine, other in zip(next(joined([case])), wanted, strict=True))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = product(AXES, fits) if metafunc.config.getoption("--full") else covering(AXES, 3, fits)
        metafunc.parametrize("case", cases, ids=lambda case: "-".join(map(str, case.values())))


def test_shared_attention_equals_plain_attention(case: dict[str, Any]) -> None:
    assert error(case) < 1e-13


def test_in_16_bits_no_more_is_lost_than_by_one_rounding() -> None:
    """Against attention in float64 of the same numbers, as a multiple of what rounding its result would lose, in the mean square.
    However many parts there are, what is merged and summed of blocks is rounded once. Flash attention rounds each part, and torch's
    kernels compute whole samples for a2a; gradients of queries and keys follow from a result that is rounded already."""
    for case, results in covered(dtype=[torch.bfloat16, torch.float16]):
        wanted = plain(case["ends"], case["scores"], case["sizes"], case["dtype"])
        once, twice = (1.05, 1.7) if case["kernel"] == "blocks" and case["way"] != "a2a" else (1.5, 2.5)
        most = {"result": once, "queries": twice, "keys": twice, "values": once, "sinks": 5.0}  # of sinks there are only a few
        for (name, times), found, other in zip(most.items(), results, wanted, strict=True):
            rounding = norm(other.to(case["dtype"]) - other)
            assert found.dtype == case["dtype"] and norm(found - other) <= times * rounding + ROUNDED, (name, case)


def test_in_32_bits_sums_are_as_good_as_they_can_be() -> None:
    """Beside the largest number, what is lost is a few units in its last place."""
    for case, results in covered(dtype=[torch.float32]):
        wanted = plain(case["ends"], case["scores"], case["sizes"], case["dtype"])
        for found, other in zip(results, wanted, strict=True):
            assert found.dtype == torch.float32
            assert (found - other).abs().max() <= 10 * torch.finfo(torch.float32).eps * other.abs().max() + ROUNDED, case


def norm(x: torch.Tensor) -> float:
    return torch.linalg.vector_norm(x).item()


def test_more_documents_than_a_call_of_flash_attention_takes_go_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_range_pairs, "flash_supports", lambda q, v, dropout: True)
    documents, head = documents_of("of one token", split_zigzag(S, 2)), torch.empty(1, 1, 1, 1, 8)
    part = RangePair((0, 8), (0, 8), 0, 0, ScoreSpec(), documents, 0.0, 0)
    assert part.uses_flash(head, head[..., 0, :])
    monkeypatch.setattr(range_pairs, "MAX_SEQUENCES_PER_CALL", len(documents.cu_seqlens) - 2)
    assert not part.uses_flash(head, head[..., 0, :])


# ---- dropout


def loss_with_dropout(rank: int, way: CpCommType, seed: int, moved: float) -> tuple[float, float]:
    """A rank's part of a sum over the result, and of its derivative along a direction."""
    context = make_context(Topology(cp=2), rank, torch.device("cpu"))
    cut = split_zigzag(S, 2)
    places = torch.from_numpy(cut.get_positions(rank))
    *inputs, _, weights = tensors((2, 6, 6))
    random = torch.Generator().manual_seed(9)
    directions = [torch.randn(x.shape, generator=random, dtype=x.dtype)[places] for x in inputs]
    own = [(x[places] + moved * along).requires_grad_() for x, along in zip(inputs, directions, strict=True)]
    documents = documents_of("beside cuts", cut)
    q, k, v = own
    out = context_attention(sharers(context, way), q, k, v, documents, ScoreSpec(window=11), dropout=0.4, seed=seed + rank)
    total = (out * weights[places]).sum()
    total.backward()
    return total.item(), sum((x.grad * along).sum().item() for x, along in zip(own, directions, strict=True) if x.grad is not None)


@pytest.mark.parametrize("way", get_args(CpCommType))
def test_dropout_has_one_mask_forward_and_backward(way: CpCommType) -> None:
    """The derivative along a direction is that of the difference quotient, which holds only if both draw the same masks."""

    def both(seed: int, moved: float) -> tuple[float, float]:
        first, second = run_warm_ranks(2, loss_with_dropout, way, seed, moved, timeout=60.0)
        return first[0] + second[0], first[1] + second[1]

    step = 1e-5
    slope = (both(5, step)[0] - both(5, -step)[0]) / (2 * step)
    assert both(5, 0.0)[1] == pytest.approx(slope, rel=1e-7)
    assert abs(both(5, 0.0)[0] - both(77, 0.0)[0]) > 1e-3, "another seed, other masks"


def test_parts_draw_different_masks() -> None:
    for rank in range(2):
        group = Group("cp", (0, 1), rank)
        call = _AttentionCall(
            ContextRanks("p2p", group, (group, group)), documents_of("whole", split_zigzag(S, 2)), ScoreSpec(), 0.5, 3
        )
        seeds = [part.dropout_seed for holder in range(2) for part in call.iter_range_pairs(holder)]
        assert len(set(seeds)) == len(seeds) > 1


# ---- memory


def held_in_backward(_: int, ways: list[tuple[CpCommType, int, tuple[int, int, int]]]) -> list[tuple[int, int]]:
    """For each way, ranks and sizes: bytes of others (keys, values, sums) that are held at once, and those of the formula."""
    found = []
    for way, ranks, (r, d, e) in ways:
        context, tokens = connect_fake(Topology(cp=ranks), 1), 64
        cut, bounds = split_zigzag(tokens * ranks, ranks), np.array([0, tokens * ranks], dtype=np.int32)
        shapes = [(tokens, 1, G, r, d), (tokens, 1, G, d), (tokens, 1, G, e)]
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for shape in shapes)
        shared = ContextAttention(ranks, tokens, G * r * d, G * (d + e), G * r * e, q.itemsize)
        with (
            pytest.MonkeyPatch.context() as patch,
            StorageLedger([(g.process_group, "cp") for g in (context.context_group, *context.context_rings)]) as ledger,
        ):
            # Without products there is nothing else but the gradients of queries and of the result.
            for product in ("attend_pair", "attend_pair_backward", "_merge_pair"):
                patch.setattr(attention, product, lambda *_: (None, None))
            documents = Documents(bounds, torch.from_numpy(bounds), 1, cut)
            out = context_attention(sharers(context, way), q, k, v, documents, ScoreSpec())
            grad = torch.empty_like(out)
            ledger.take_span()
            torch.autograd.grad(out, (q, k, v), grad)
            found.append((ledger.take_span().peak_bytes - 4 * q.numel(), shared.count_buffer_bytes(way)))
        disconnect()
    return found


def test_a_rank_holds_of_others_what_the_formula_says() -> None:
    """Two ranks of a ring hold a message less: none comes behind the first."""
    cases = [(way, ranks, sizes) for way in ("all_gather", "p2p") for ranks in (2, 4, 8) for sizes in ((2, 16, 16), (1, 24, 8))]
    (found,) = run_ranks(1, held_in_backward, cases, init=False, timeout=60.0)
    for (way, ranks, _), (held, named) in zip(cases, found, strict=True):
        assert held < named if (way, ranks) == ("p2p", 2) else held == named, (way, ranks)


def messages(rank: int) -> list[tuple[str, int]]:
    """What a rank of a ring sends forward and backward, and how much of it: kinds of calls and numbers of elements."""
    context = make_context(Topology(cp=4), rank, torch.device("cpu"))
    case = {"cut": "mirrored", "ends": "whole", "ranks": 4, "sizes": (1, 6, 6), "scores": "plain", "way": "p2p"}
    with recorded_calls() as calls:
        of_a_case(context, rank, case)
    return [(call.what, call.elements) for call in calls]


def test_a_ring_sends_keys_and_values_to_all_others_and_gradients_around() -> None:
    """Keys and values stop at the last rank that needs them, in the forward and again in the backward; sums of gradients return."""
    held = S // 4 * B * G * (6 + 6)
    assert run_warm_ranks(4, messages) == [[("send", held)] * (3 + 3 + 4)] * 4
