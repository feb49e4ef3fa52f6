"""The vocabulary-parallel cross entropy against torch's in float64: loss and gradient, over one to three tensor ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.parallel.context import SELF_GROUP, Group, make_context
from megatron.parallel.topology import Topology
from megatron.tensor_parallel import cross_entropy
from megatron.tensor_parallel.cross_entropy import VocabShard, compute_total_loss, vocab_parallel_cross_entropy
from tests.support.lone_rank import CPU
from tests.support.warm import run_forked_ranks

SEQ, BATCH = 5, 3
SCALE = 0.37
"""What backward starts from."""
Z_COEFF = 0.1
SMOOTHING = 0.3


def example(vocab: int, key: int = 0, spread: float = 3.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [s, b, v], labels and mask [s, b]. The ends of the vocabulary are among the labels; some tokens do not count."""
    generator = torch.Generator().manual_seed(key)
    logits = torch.randn(SEQ, BATCH, vocab, dtype=torch.float64, generator=generator) * spread
    labels = torch.randint(vocab, (SEQ, BATCH), generator=generator)
    labels[0, 0], labels[0, 1] = 0, vocab - 1
    mask = torch.rand(SEQ, BATCH, dtype=torch.float64, generator=generator)
    mask[1] = 0.0
    mask[2, 0] = 1.0
    return logits, labels, mask


def plain(
    logits: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.Tensor,
    scale: float = SCALE,
    z_coeff: float = 0.0,
    smoothing: float = 0.0,
    cap: float | None = None,
) -> tuple[float, torch.Tensor]:
    """Loss (with the z-loss, without smoothing) and gradient (with both) by torch in float64."""
    leaf = logits.double().detach().requires_grad_()
    rows, weights = leaf.flatten(0, 1), mask.flatten().double()
    rows = rows if cap is None else cap * torch.tanh(rows / cap)
    z_losses = z_coeff * rows.exp().sum(-1).log() ** 2 if z_coeff else torch.zeros_like(weights)

    def loss(smoothing: float) -> torch.Tensor:
        losses = F.cross_entropy(rows, labels.flatten(), reduction="none", label_smoothing=smoothing)
        return ((losses + z_losses) * weights).sum()

    loss(smoothing).backward(torch.tensor(scale, dtype=torch.float64), retain_graph=True)
    assert leaf.grad is not None
    return loss(0.0).item(), leaf.grad


def ours(
    logits: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.Tensor,
    group: Group = SELF_GROUP,
    scale: float = SCALE,
    *,
    first: int = 0,
    num_valid: int | None = None,
    z_coeff: float = 0.0,
    smoothing: float = 0.0,
    vocab: int | None = None,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss (with the z-loss) and gradient of this rank's columns; `vocab` has those of all ranks, by default this one's."""
    leaf = logits.detach().clone().requires_grad_()
    num_valid = logits.shape[-1] if num_valid is None else num_valid
    columns = VocabShard(group, first, num_valid, z_coeff, smoothing, num_valid if vocab is None else vocab, cap)
    loss = compute_total_loss(vocab_parallel_cross_entropy(leaf.clone(), labels, mask, columns))
    loss.backward(torch.tensor(scale, dtype=loss.dtype))
    assert leaf.grad is not None and leaf.grad.dtype == logits.dtype
    return loss.detach(), leaf.grad


# ---- several ranks

VOCABS = [61, 2, 12]
"""Divides by neither 2 nor 3; fewer tokens than rows on each rank, so that some hold only padding; divides."""
PADDING = 7
"""Rows beyond the vocabulary are rounded up to a multiple of this x ranks: a rank's share may be all padding."""


def in_group(rank: int, size: int) -> dict[int, Any]:
    group = make_context(Topology(tp=size), rank, CPU).group("tp")
    found: dict[int, Any] = {}
    for vocab in VOCABS:
        columns = -(-vocab // (PADDING * size)) * PADDING
        logits, labels, mask = example(vocab)
        padded = torch.full((SEQ, BATCH, columns * size), 50.0, dtype=torch.float64)  # what padding holds must not matter
        padded[..., :vocab] = logits
        first = rank * columns
        valid = max(0, min(columns, vocab - first))
        part = padded[..., first : first + columns].contiguous()
        for block in (1 << 21, 2 * columns, 1):
            cross_entropy._BLOCK_ELEMENTS = block
            z_coeff = Z_COEFF if block == 2 * columns else 0.0
            smoothing = SMOOTHING if block < 1 << 21 else 0.0
            found[vocab, z_coeff, smoothing, block // columns] = ours(  # type: ignore[index]
                part, labels, mask, group, first=first, num_valid=valid, z_coeff=z_coeff, smoothing=smoothing, vocab=vocab
            )
    dist.barrier()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_together_equal_torch(size: int) -> None:
    ranks = run_forked_ranks(size, in_group, size, timeout=60.0)
    for vocab, z_coeff, smoothing, rows in ranks[0]:
        logits, labels, mask = example(vocab)
        loss, gradient = plain(logits, labels, mask, z_coeff=z_coeff, smoothing=smoothing)
        found = [rank[vocab, z_coeff, smoothing, rows] for rank in ranks]
        joined = torch.cat([part for _, part in found], dim=-1)
        assert all(torch.equal(found[0][0], other) for other, _ in found), "the same loss on every rank"
        assert found[0][0].item() == pytest.approx(loss, rel=1e-13)
        torch.testing.assert_close(joined[..., :vocab], gradient, rtol=1e-12, atol=1e-15)
        assert not joined[..., vocab:].any(), "padding has no gradient"
    assert len(ranks[0]) == 3 * len(VOCABS)


# ---- one rank


@pytest.mark.parametrize("rows_in_a_block", [1, 4, SEQ * BATCH, 1000])
def test_one_rank_equals_torch(rows_in_a_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with blocks that do not divide the rows, and padding on one rank."""
    logits, labels, mask = example(61)
    padded = torch.cat([logits, torch.full((SEQ, BATCH, 3), 1e3, dtype=torch.float64)], -1)
    monkeypatch.setattr(cross_entropy, "_BLOCK_ELEMENTS", rows_in_a_block * 64)
    for z_coeff, smoothing, cap in itertools.product((0.0, Z_COEFF), (0.0, SMOOTHING), (None, 1.5)):
        loss, gradient = ours(padded, labels, mask, num_valid=61, z_coeff=z_coeff, smoothing=smoothing, cap=cap)
        exact, exact_gradient = plain(logits, labels, mask, z_coeff=z_coeff, smoothing=smoothing, cap=cap)
        assert loss.item() == pytest.approx(exact, rel=1e-13)
        torch.testing.assert_close(gradient[..., :61], exact_gradient, rtol=1e-12, atol=1e-15)
        assert not gradient[..., 61:].any()


def test_tokens_that_do_not_count_have_no_gradient() -> None:
    logits, labels, mask = example(61)
    _, gradient = ours(logits, labels, mask)
    assert not gradient[mask == 0.0].any() and gradient[mask > 0.0].abs().sum(-1).all()
    loss, gradient = ours(logits, labels, torch.zeros_like(mask))
    assert loss.item() == 0.0 and not gradient.any()


def test_labels_that_do_not_count_may_be_anything() -> None:
    """Also ids beyond the vocabulary, within the padding, and negative ones."""
    logits, labels, mask = example(61)
    wild = labels.masked_fill(mask == 0.0, -100)
    wild[1, 1], wild[1, 2] = 62, 10**9
    padded = torch.cat([logits, torch.zeros(SEQ, BATCH, 3, dtype=torch.float64)], -1)
    loss, gradient = ours(padded, wild, mask, num_valid=61)
    same, same_gradient = ours(padded, labels, mask, num_valid=61)
    assert torch.equal(loss, same) and torch.equal(gradient, same_gradient)


def test_without_gradients_the_loss_is_the_same() -> None:
    logits, labels, mask = example(61)
    for dtype in (torch.float64, torch.float16):
        with torch.no_grad():
            loss = vocab_parallel_cross_entropy(logits.to(dtype, copy=True), labels, mask, VocabShard(SELF_GROUP, 0, 61))
        assert torch.equal(loss, ours(logits.to(dtype), labels, mask)[0]) and not loss.requires_grad


def test_a_mask_in_float32_weighs_a_float64_loss() -> None:
    logits, labels, mask = example(61)
    loss, gradient = ours(logits, labels, mask.float())
    exact, exact_gradient = plain(logits, labels, mask.float())
    assert loss.item() == pytest.approx(exact, rel=1e-13)
    torch.testing.assert_close(gradient, exact_gradient, rtol=1e-12, atol=1e-15)


def test_a_second_backward_is_refused() -> None:
    """The gradient is scaled where it lies: doing so twice would be wrong."""
    logits, labels, mask = example(8)
    loss = vocab_parallel_cross_entropy(logits.requires_grad_().clone(), labels, mask, VocabShard(SELF_GROUP, 0, 8))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- fewer bits


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2.0**-22), (torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_loss_and_gradient_in_fewer_bits(dtype: torch.dtype, rounding: float) -> None:
    """Of the same rounded logits: the loss is a float32 one, each element of the gradient is within rounding of its dtype."""
    logits, labels, mask = example(3000, key=1)
    logits = logits.to(dtype)
    for smoothing, smallest in ((0.0, 2.0**-24), (SMOOTHING, 1024 * SMOOTHING / 3000 * 4 * rounding)):
        loss, gradient = ours(logits, labels, mask, scale=1024.0, smoothing=smoothing)
        exact, exact_gradient = plain(logits, labels, mask, scale=1024.0, smoothing=smoothing)
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact, rel=1e-6)
        # What is spread is subtracted from the softmax, so the difference may be smaller than what rounding made of the two.
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=4 * rounding, atol=smallest)


def test_devices_that_mix_dtypes_compute_the_same() -> None:
    """The one launch that a GPU takes, in each dtype of the logits: on the CPU, where it is only slower."""
    rows, factor, spread = torch.rand(5, 7), torch.rand(5), torch.rand(5)
    local = torch.zeros(5, dtype=torch.int64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for each in (None, spread):
            of_rows = cross_entropy.LogitGradTerms(factor, local, factor, each)
            expected, rounded = torch.empty(5, 7, dtype=dtype), rows.to(dtype)
            cross_entropy._scale_and_smooth(rounded.clone(), of_rows, expected)
            found = torch.empty_like(expected, device="meta")
            cross_entropy._scale_and_smooth(rounded.to("meta"), _on_meta(of_rows), found)
            assert found.dtype == dtype
            if each is not None:
                torch.addcmul(each.neg().unsqueeze(-1), rounded, factor.unsqueeze(-1), out=(mixed := torch.empty_like(expected)))
                torch.testing.assert_close(mixed, expected)


def _on_meta(of_rows: cross_entropy.LogitGradTerms) -> cross_entropy.LogitGradTerms:
    factor, local, at_local = (each.to("meta") for each in of_rows[:3])
    return cross_entropy.LogitGradTerms(
        factor, local, at_local, None if of_rows.smoothing_grad is None else of_rows.smoothing_grad.to("meta")
    )


def test_the_tail_of_a_float16_softmax_is_kept() -> None:
    """Probabilities of 1e-9, far below the smallest float16, times a loss scale of 2^18: within a percent."""
    logits = torch.zeros(1, 1, 1000, dtype=torch.float64)
    logits[..., 0] = 20.0
    labels, mask = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    _, gradient = ours(logits.half(), labels, mask, scale=2.0**18)
    _, exact = plain(logits, labels, mask, scale=2.0**18)
    assert exact[0, 0, 1].item() / 2.0**18 == pytest.approx(2e-9, rel=0.1)
    torch.testing.assert_close(gradient[..., 1:].double(), exact[..., 1:], rtol=0.02, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_extreme_logits(dtype: torch.dtype) -> None:
    """Very sure and right, very sure and wrong, all equal and huge, with padding beside them."""
    logits = torch.zeros(4, 1, 6, dtype=torch.float64)
    logits[0, 0, 1], logits[1, 0, 2] = 1e4, 1e4
    logits[2], logits[3] = 1e4, -1e4
    logits = logits.to(dtype)
    labels, mask = torch.ones(4, 1, dtype=torch.int64), torch.ones(4, 1)
    loss, gradient = ours(logits, labels, mask, scale=1.0, num_valid=5)
    exact, exact_gradient = plain(logits[..., :5], labels, mask, scale=1.0)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all() and not gradient[..., 5].any()
    assert loss.item() == pytest.approx(exact, rel=1e-6)
    torch.testing.assert_close(gradient[..., :5].double(), exact_gradient, rtol=4e-3, atol=1e-7)


def test_the_logits_memory_is_the_only_memory_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of four rows, no operation makes a tensor as large as the logits, and the gradient lies where they lay."""
    monkeypatch.setattr(cross_entropy, "_BLOCK_ELEMENTS", 4 * 600)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != memory:
                largest = max(largest, out.numel())
            return out

    for dtype in (torch.float32, torch.bfloat16):
        logits, labels, mask = example(600)
        given = logits.to(dtype).requires_grad_().clone()
        memory = given.untyped_storage().data_ptr()
        with Watch():
            loss = vocab_parallel_cross_entropy(given, labels, mask, VocabShard(SELF_GROUP, 0, 600))
            (gradient,) = torch.autograd.grad(loss, given)
        assert gradient.untyped_storage().data_ptr() == memory
    assert 0 < largest <= 4 * 600


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cap_in_few_bits(dtype: torch.dtype) -> None:
    """Only what is stored is rounded: the capped logits, then the gradient."""
    logits, labels, mask = example(61)
    rounded = logits.to(dtype)
    loss, gradient = ours(rounded, labels, mask, cap=1.5)
    exact, exact_gradient = plain(rounded, labels, mask, cap=1.5)
    rounding = 4 * torch.finfo(dtype).eps
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact, rel=rounding)
    assert (gradient.double() - exact_gradient).norm() <= rounding * exact_gradient.norm()
