"""Attention in blocks: windows, caps, sinks, scales and documents, against a dense mask, at any size of blocks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.attention import blocks
from megatron.attention.blocks import BlockAttentionOptions, CausalMask
from megatron.attention.core import core_attention
from megatron.attention.documents import Documents, varlen_attention
from megatron.attention.max_logits import MaxLogitTracker
from megatron.parallel.context import SELF_GROUP
from megatron.spec.layers import DEFAULT_SCORES, ScoreSpec
from tests.support.covering import covering, product
from tests.unit.attention.test_documents import CASES, Largest, documents_of, plain_varlen

AXES: dict[str, list[Any]] = {
    "window": [None, 0, 1, 4, 11],
    "cap": [None, 0.7],
    "softmax": ["vanilla", "off-by-one", "learnable"],
    "scale": [None, 0.3],
    "documents": [None, documents_of(CASES["several in a row"])],
    "r": [1, 3],
}
"""At every size of blocks each pair of these occurs, and with --full each case."""
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
ROWS = CASES["several in a row"]
S, B, G, D, E = len(ROWS[0]), len(ROWS), 2, 4, 6


def heads(r: int, seed: int = 1, dtype: torch.dtype = torch.float64, s: int = S) -> Heads:
    """Random queries, keys and values; values have a size of their own."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(s, B, G, *more, generator=generator, dtype=torch.float64) for more in ((r, D), (D,), (E,)))
    return tuple(x.to(dtype).requires_grad_() for x in (q, k, v))  # type: ignore[return-value]


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: ScoreSpec, documents: Documents | None, sinks: Any
) -> torch.Tensor:
    """The same with a mask [b, s, s] and a column for the sink."""
    s, b, g, r, d = q.shape
    k, v = (x.repeat_interleave(r, 2) for x in (k, v))
    scores = torch.einsum("ibnd,jbnd->bnij", q.flatten(2, 3), k) * (1 / math.sqrt(d) if spec.scale is None else spec.scale)
    scores = scores if spec.softcap is None else spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(out_of_reach(s, b, spec.window, documents)[:, None], -math.inf)
    if spec.softmax != "vanilla":
        column = torch.zeros(g * r, dtype=q.dtype) if sinks is None else sinks
        scores = torch.cat([scores, column.view(1, -1, 1, 1).expand(b, -1, s, 1)], -1)
    return torch.einsum("bnij,jbnd->ibnd", scores.softmax(-1)[..., :s], v).flatten(2)


def out_of_reach(s: int, b: int, window: int | None, documents: Documents | None) -> torch.Tensor:
    """Which keys a query does not see, [b, s, s]."""
    i, j = torch.arange(s)[:, None], torch.arange(s)
    hidden = (j > i).expand(b, s, s)
    if window is not None:
        hidden = hidden | (i - j > window)
    if documents is not None:
        numbers = torch.bucketize(torch.arange(b * s).view(b, s), documents.cu_seqlens_device[1:], right=True)
        hidden = hidden | (numbers[:, :, None] != numbers[:, None, :])
    return hidden


@pytest.mark.parametrize("size", [1, 3, 5, 128])
def test_it_equals_a_dense_mask(size: int, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and every gradient; the last block is shorter than the others, or the only one."""
    monkeypatch.setattr(blocks, "_MAX_QUERIES_PER_BLOCK", size)
    for case in product(AXES) if full else covering(AXES, size):
        spec = ScoreSpec(case["scale"], case["cap"], case["window"], case["softmax"])
        softmax, documents, r = spec.softmax, case["documents"], case["r"]
        sinks = torch.randn(G * r, dtype=torch.float64, requires_grad=True) if softmax == "learnable" else None
        q, k, v = heads(r)
        inputs = [q, k, v, *([] if sinks is None else [sinks])]
        found = core_attention(q, k, v, documents, score_spec=spec, sinks=sinks)
        expected = dense(q, k, v, spec, documents, sinks)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, msg=str(spec))
        weights = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        gradients = (torch.autograd.grad((out * weights).sum(), inputs) for out in (found, expected))
        for gradient, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12, msg=str(spec))


def test_the_largest_scores_are_those_of_a_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each head, over pairs in reach alone, however the queries are cut; a cap does not change them."""
    for size, window, documents, r, scale in itertools.product(
        (3, 128), (None, 2), (None, documents_of(ROWS)), (1, 3), (None, 0.3)
    ):
        monkeypatch.setattr(blocks, "_MAX_QUERIES_PER_BLOCK", size)
        q, k, _ = heads(r)
        largest = MaxLogitTracker(2, G * r + 1, torch.float64, q.device)
        with largest.recording():
            largest.record(1, 1, q, k, ScoreSpec(scale, 0.1, window), documents, SELF_GROUP)
            largest.record(1, 1, 0.5 * q, k, ScoreSpec(scale, None, window), documents, SELF_GROUP)
        largest.record(0, 1, q, k, DEFAULT_SCORES, documents, SELF_GROUP)  # nobody watches
        scores = torch.einsum("ibnd,jbnd->nbij", q.flatten(2, 3), k.repeat_interleave(r, 2)) * (D**-0.5 if scale is None else scale)
        scores = scores.masked_fill(out_of_reach(S, B, window, documents), -math.inf)
        expected = torch.full((2, G * r + 1), -math.inf, dtype=torch.float64)
        expected[1, 1:] = torch.maximum(scores.amax((1, 2, 3)), 0.5 * scores.amax((1, 2, 3)))
        torch.testing.assert_close(largest.max_logits, expected, rtol=0, atol=1e-12)


def test_a_window_over_the_whole_sequence_is_none() -> None:
    """The same kernel, so the same bits; nor does one matter that is as long as every document. One token less does."""
    inputs = heads(2)
    plain = core_attention(*inputs)
    assert torch.equal(core_attention(*inputs, score_spec=ScoreSpec(window=S - 1)), plain)
    assert not torch.allclose(core_attention(*inputs, score_spec=ScoreSpec(window=S - 2)), plain)
    documents = documents_of(ROWS)
    within = core_attention(*inputs, documents)
    assert torch.equal(core_attention(*inputs, documents, score_spec=ScoreSpec(window=documents.max_seqlen - 1)), within)
    assert not torch.allclose(core_attention(*inputs, documents, score_spec=ScoreSpec(window=documents.max_seqlen - 2)), within)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_numbers_are_summed_in_wide_ones(dtype: torch.dtype) -> None:
    """The result is that of float64, but for rounding of the inputs' own dtype."""
    spec, sinks = ScoreSpec(0.2, 3.0, 5, "learnable"), torch.randn(G * 2, generator=torch.Generator().manual_seed(2)).to(dtype)
    inputs = heads(2, dtype=dtype)
    q, k, v = exact = [x.detach().double().requires_grad_() for x in inputs]
    found = core_attention(*inputs, score_spec=spec, sinks=sinks)
    expected = core_attention(q, k, v, score_spec=spec, sinks=sinks.double())
    assert found.dtype == dtype
    close = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=close, atol=close)
    gradients = (torch.autograd.grad(out.double().square().sum(), xs) for out, xs in ((found, inputs), (expected, exact)))
    for gradient, wanted in zip(*gradients, strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), wanted, rtol=4 * close, atol=4 * close)


def test_queries_of_a_later_part_of_the_sequence_meet_all_keys() -> None:
    """As where the sequence is cut: queries that begin at a place among the keys."""
    q, k, v = heads(2)
    spec = ScoreSpec(window=3, softcap=2.0)
    whole = core_attention(q, k, v, documents_of(ROWS), score_spec=spec)
    for first in (0, 4, 7):
        reach = CausalMask(3, documents_of(ROWS), first)
        part = blocks.block_attention(q[first:], k, v, None, BlockAttentionOptions(spec, reach))
        torch.testing.assert_close(part, whole[first:], rtol=0, atol=1e-14)


def test_dropout_has_one_mask_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is linear in the values, so its gradient gives it back; another seed has another mask."""
    monkeypatch.setattr(blocks, "_MAX_QUERIES_PER_BLOCK", 5)
    q, k, v = heads(2)
    spec = ScoreSpec(window=4)

    def drawn(seed: int) -> torch.Tensor:
        return core_attention(q, k, v, None, 0.5, score_spec=spec, seed=seed)

    out = drawn(3)
    assert torch.equal(drawn(3), out) and not torch.equal(drawn(4), out)
    weights = torch.randn(out.shape, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((out * weights).sum(), [v])
    torch.testing.assert_close((gradient * v).sum(), (out * weights).sum())
    torch.autograd.gradcheck(lambda q, k, v: core_attention(q, k, v, None, 0.5, score_spec=spec, seed=3), heads(1, s=4))


def test_no_score_outside_of_the_window_is_computed() -> None:
    """The largest tensor holds the scores of one block, in forward and backward."""
    s, window = 2048, 100
    q, k, v = heads(1, dtype=torch.float32, s=s)
    with Largest() as largest:
        core_attention(q, k, v, score_spec=ScoreSpec(window=window)).sum().backward()
    scores = B * G * blocks._MAX_QUERIES_PER_BLOCK * (blocks._MAX_QUERIES_PER_BLOCK + window)
    assert s * B * G * E <= largest.elements <= scores < s * s // 16


def test_blocks_begin_where_their_documents_do() -> None:
    """Keys of earlier documents are not even multiplied."""
    reach = CausalMask(None, documents_of([[1, 1, 1, 0, 1, 1, 1, 1]] * 2))
    found = list(reach.iterate_blocks(8, 8, 1))
    assert found == [(slice(0, 8), slice(0, 8))]
    assert [list(CausalMask(2, None).iterate_blocks(8, 8, blocks._MAX_SCORES_PER_BLOCK // 8))[-1]] == [(slice(7, 8), slice(5, 8))]


def test_a_long_reach_has_fewer_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_MAX_SCORES_PER_BLOCK", 64)
    assert [some for some, _ in CausalMask(None, None).iterate_blocks(8, 8, 4)] == [slice(at, at + 2) for at in (0, 2, 4, 6)]


def test_the_scores_of_a_block_are_bounded_over_all_heads_and_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where several query heads share a key-value head: no tensor is larger than a block may be."""
    s, r = 64, 3
    monkeypatch.setattr(blocks, "_MAX_SCORES_PER_BLOCK", 12 * s * B * G * r)
    monkeypatch.setattr(blocks, "_MAX_QUERIES_PER_BLOCK", s)
    q, k, v = heads(r, s=s)
    with Largest() as forward:
        out = core_attention(q, k, v, score_spec=ScoreSpec(softcap=1.0))
    with Largest() as backward:
        out.sum().backward()
    with Largest() as scores:
        blocks.compute_max_logits(q.detach(), k.detach(), BlockAttentionOptions(DEFAULT_SCORES, CausalMask(None, None)))
    for largest in (forward, backward, scores):
        assert s * B * G * r * E < largest.elements <= blocks._MAX_SCORES_PER_BLOCK


@pytest.mark.parametrize("groups", [True, False])
def test_flash_attention_takes_windows(groups: bool) -> None:
    """What torch's function is given is the window of this module: as many tokens before its own."""
    q, k, _ = heads(2)
    spec, documents = ScoreSpec(0.3, window=3), documents_of(ROWS)
    bounds, longest = documents.cu_seqlens_device, documents.max_seqlen
    found = varlen_attention(q.flatten(2, 3), k, k, bounds, longest, plain_varlen, groups, window=3, scale=0.3)
    torch.testing.assert_close(found, dense(q, k, k, spec, documents, None), rtol=0, atol=1e-12)


def test_the_scale_of_plain_attention_is_given() -> None:
    q, k, v = heads(2)
    expected = dense(q, k, v, ScoreSpec(0.7), None, None)
    torch.testing.assert_close(core_attention(q, k, v, score_spec=ScoreSpec(0.7)), expected, rtol=0, atol=1e-12)
    documents = documents_of(ROWS)
    within = dense(q, k, v, ScoreSpec(0.7), documents, None)
    torch.testing.assert_close(core_attention(q, k, v, documents, score_spec=ScoreSpec(0.7)), within, rtol=0, atol=1e-12)
    assert DEFAULT_SCORES.get_effective_window(10**9) is None


def test_a_token_after_all_others_sees_what_the_last_query_sees() -> None:
    q, k, v = heads(3)
    sinks = torch.randn(3 * G, dtype=torch.float64)
    for spec in (ScoreSpec(0.3, 0.8, None, "learnable"), ScoreSpec(softmax="off-by-one"), ScoreSpec(softcap=0.5)):
        own = sinks if spec.softmax == "learnable" else None
        expected = dense(q, k, v, spec, None, own)[-1]
        keys, values = (x.permute(1, 2, 0, 3) for x in (k, v))
        found = blocks.single_token_attention(q[-1], keys, values, None, spec, own)
        torch.testing.assert_close(found.flatten(1), expected, rtol=0, atol=1e-12)
        keys, values = (F.pad(x, (0, 0, 0, 2), value=7.0) for x in (keys, values))
        visible = (torch.arange(S + 2) < S).expand(B, 1, 1, -1)
        found = blocks.single_token_attention(q[-1], keys, values, visible, spec, own)
        torch.testing.assert_close(found.flatten(1), expected, rtol=0, atol=1e-12)
