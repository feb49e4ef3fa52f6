"""The loss in chunks against torch's in float64: loss, both gradients, what it keeps and sends, over one to three tensor ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron.config.model import ModelConfig
from megatron.parallel.accumulate import deferring
from megatron.parallel.context import ParallelContext, make_context
from megatron.parallel.params import ParamTable, Scope, materialize
from megatron.parallel.topology import Topology
from megatron.spec.weights import build_vocab_weight
from megatron.tensor_parallel import cross_entropy
from megatron.tensor_parallel.cross_entropy import LossOptions, OutputLayer, compute_total_loss
from megatron_lab.planner.storages import StorageLedger
from tests.support.lone_rank import CPU, lone_rank
from tests.support.sinks import sink_over, summed
from tests.support.warm import run_forked_ranks

HIDDEN, SEQ, BATCH, VOCAB = 4, 6, 3, 61
TOKENS = SEQ * BATCH
SCALE = 0.37
"""What backward starts from."""
SIZES = [0, 1, 4, 6, TOKENS, 1000]
"""Whole; one token; does not divide the tokens; does; all; more than all."""
Z_COEFF = 0.1
SMOOTHING = 0.3


def example(vocab: int = VOCAB) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [s, b, h], weight [v, h], labels and mask [s, b]. Some tokens do not count."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SEQ, BATCH, HIDDEN, dtype=torch.float64, generator=generator)
    weight = torch.randn(vocab, HIDDEN, dtype=torch.float64, generator=generator)
    labels = torch.randint(vocab, (SEQ, BATCH), generator=generator)
    labels[0, 0], labels[0, 1] = 0, vocab - 1
    mask = torch.rand(SEQ, BATCH, dtype=torch.float64, generator=generator)
    mask[1] = 0.0
    return x, weight, labels, mask


@functools.cache
def plain(z_coeff: float, smoothing: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross entropy, z-loss, and the gradients of x and weight of SCALE x both, that one with smoothed labels, by torch."""
    x, weight, labels, mask = example()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    logits = x @ weight.t()
    losses, smoothed = (
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=share).view(mask.shape)
        for share in (0.0, smoothing)
    )
    sums = (losses * mask).sum(), z_coeff * (logits.exp().sum(-1).log() ** 2 * mask).sum()
    grad_x, grad_weight = torch.autograd.grad(SCALE * ((smoothed * mask).sum() + sums[1]), (x, weight))
    return sums[0].detach(), sums[1].detach(), grad_x, grad_weight


def layer_of(
    context: ParallelContext, form: LossOptions, *, sequence_parallel: bool = False, dtype: torch.dtype = torch.float64
) -> tuple[OutputLayer, list[int]]:
    """The layer with its part of the weight, 9 in the padding, a sink full of NaN, and the list that grows with each write."""
    table = ParamTable()
    config = ModelConfig(hidden_size=HIDDEN, make_vocab_size_divisible_by=7, untie_embeddings_and_output_weights=True)
    weight = build_vocab_weight("output.weight", config, VOCAB, "matrix")
    layer = OutputLayer(Scope(context, table, {weight.name: weight}, dtype, sequence_parallel).get_child("output"), config, form)
    materialize(layer, table, CPU)
    box = table["output.weight"].record.get_local_slice(context.axis_sizes, context.coordinates)
    with torch.no_grad():
        layer.weight.fill_(9.0)[: box.sizes[0]] = example()[1][box.offsets[0] :][: box.sizes[0]]
    writes: list[int] = []
    wide = torch.promote_types(dtype, torch.float32)
    main_grad = torch.full(layer.weight.shape, torch.nan, dtype=wide)
    layer.weight.grad_sink = sink_over(main_grad, lambda: writes.append(1))  # type: ignore[attr-defined]
    return layer, writes


def run(layer: OutputLayer, x: torch.Tensor, scale: float = SCALE) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums of the loss, and the gradients of x and of this rank's part of the weight."""
    _, _, labels, mask = example()
    x = x.detach().requires_grad_()
    sums = layer(x, labels, mask)
    compute_total_loss(sums).backward(torch.tensor(scale, dtype=sums.dtype))
    assert x.grad is not None
    return sums.detach(), x.grad, summed(layer.weight.grad_sink)  # type: ignore[attr-defined]


def check(sums: torch.Tensor, grad_x: torch.Tensor, grad_weight: torch.Tensor, z_coeff: float, smoothing: float = 0.0) -> None:
    cross_entropy, z_loss, exact_x, exact_weight = plain(z_coeff, smoothing)
    expected = torch.stack([cross_entropy, z_loss]) if z_coeff else cross_entropy
    torch.testing.assert_close(sums, expected, rtol=1e-13, atol=0.0)
    torch.testing.assert_close(grad_x, exact_x, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad_weight[:VOCAB], exact_weight, rtol=1e-12, atol=1e-14)
    assert not grad_weight[VOCAB:].any(), "padding has no gradient"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("beside", [(0.0, 0.0), (Z_COEFF, 0.0), (0.0, SMOOTHING), (Z_COEFF, SMOOTHING)])
def test_one_rank_equals_torch(size: int, beside: tuple[float, float]) -> None:
    layer, writes = layer_of(lone_rank(), LossOptions(size, *beside))
    check(*run(layer, example()[0]), *beside)
    assert len(writes) == 1, "one write, however many chunks"
    *_, twice = run(layer, example()[0])
    torch.testing.assert_close(twice[:VOCAB], 2 * plain(*beside)[3], rtol=1e-12, atol=1e-14)


CASES = [(size, beside, split) for size in SIZES for beside in ((0.0, SMOOTHING), (Z_COEFF, 0.0)) for split in (False, True)]


def in_group(rank: int, size: int) -> list[Any]:
    """Of each case: the results, and the collectives of forward and backward."""
    context = make_context(Topology(tp=size), rank, CPU)
    called: list[str] = []
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single"):
        if hasattr(dist, name):
            _count(name, called)
    found = []
    for chunk, beside, split in CASES:
        layer, writes = layer_of(context, LossOptions(chunk, *beside), sequence_parallel=split)
        called.clear()
        x = example()[0]
        result = run(layer, x.chunk(size)[rank].contiguous() if split else x)
        found.append((*result, sorted(called), len(writes)))
    dist.barrier()
    return found


def _count(name: str, called: list[str]) -> None:
    from megatron.parallel import collectives

    real = getattr(dist, name)

    def counted(*args: Any, **named: Any) -> Any:
        called.append(name.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single"))
        return real(*args, **named)

    for module, attribute in ((dist, name), (collectives, "_all_gather"), (collectives, "_reduce_scatter")):
        if getattr(module, attribute) is real:
            setattr(module, attribute, counted)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_together_equal_torch(size: int) -> None:
    """With padding on the last rank; and what is sent does not depend on the number of chunks."""
    ranks = run_forked_ranks(size, in_group, size, timeout=60.0)
    for number, (chunk, beside, split) in enumerate(CASES):
        sums, grad_x, grad_weight, called, writes = zip(*(rank[number] for rank in ranks), strict=True)
        assert all(torch.equal(sums[0], other) for other in sums), "the same loss on every rank"
        assert split or all(torch.equal(grad_x[0], other) for other in grad_x)
        check(sums[0], torch.cat(grad_x) if split else grad_x[0], torch.cat(grad_weight), *beside)
        assert set(writes) == {1}
        moved = ["all_gather", "all_gather", "all_reduce", "all_reduce", "reduce_scatter"] if split else ["all_reduce"] * 3
        assert all(each == moved for each in called), (chunk, called)


def test_the_gradient_is_written_with_the_input_gradient_whatever_is_deferred() -> None:
    for size in (0, 4):
        layer, writes = layer_of(lone_rank(), LossOptions(size))
        with deferring() as deferred:
            check(*run(layer, example()[0]), 0.0)
        assert len(writes) == 1 and not len(deferred) and not deferred.num_bytes


def test_without_gradients_nothing_is_kept_and_the_loss_is_the_same() -> None:
    x, _, labels, mask = example()
    for size in SIZES:
        layer, writes = layer_of(lone_rank(), LossOptions(size, Z_COEFF))
        with torch.no_grad():
            sums = layer(x, labels, mask)
        assert torch.equal(sums, run(layer, x)[0]) and not sums.requires_grad and len(writes) == 1


def test_without_a_sink_the_gradient_is_in_grad() -> None:
    layer, _ = layer_of(lone_rank(), LossOptions(4))
    del layer.weight.grad_sink  # type: ignore[attr-defined]
    x, _, labels, mask = example()
    for _ in range(2):
        layer(x.requires_grad_(), labels, mask).backward(torch.tensor(SCALE, dtype=torch.float64))
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad[:VOCAB], 2 * plain(0.0)[3], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2.0**-22), (torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_chunks_and_whole_are_within_rounding_in_fewer_bits(dtype: torch.dtype, rounding: float) -> None:
    """With a loss scale, as float16 has one: both forms are as far from float64 as the dtype's rounding makes them."""
    scale = 256.0
    for size in (0, 4):
        layer, _ = layer_of(lone_rank(), LossOptions(size, Z_COEFF), dtype=dtype)
        sums, grad_x, grad_weight = run(layer, example()[0].to(dtype), scale)
        cross_entropy, z_loss, exact_x, exact_weight = plain(Z_COEFF)
        assert sums.dtype == grad_weight.dtype == torch.float32 and grad_x.dtype == dtype
        torch.testing.assert_close(sums.double(), torch.stack([cross_entropy, z_loss]), rtol=8 * rounding, atol=0.0)
        for found, exact in ((grad_x, exact_x), (grad_weight[:VOCAB], exact_weight)):
            error = (found.double() / scale - exact / SCALE).norm() / (exact / SCALE).norm()
            assert error < 8 * rounding, (size, error)


def test_the_chunk_that_is_chosen() -> None:
    """Whole as long as the logits are few; else few at a time, in a round number of tokens."""
    most = cross_entropy._MAX_LOGITS
    assert cross_entropy.get_default_chunk_tokens(4096, most // 4096) == 0
    assert cross_entropy.get_default_chunk_tokens(4097, most // 4096) == 4096
    assert cross_entropy.get_default_chunk_tokens(8192, 128_256) == 1024  # Llama 3
    assert cross_entropy.get_default_chunk_tokens(8, most) == cross_entropy.get_default_chunk_tokens(8, 2 * most) == 1
    for tokens, columns in ((10_000, 50_304), (32_768, 151_936), (2048, 256_000)):
        assert 0 < cross_entropy.get_default_chunk_tokens(tokens, columns) * columns <= most


def test_by_default_memory_does_not_grow_with_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the weight and its gradient: forward and backward take as much for 8,192 columns as for 65,536, in 16 bits too; the
    whole loss by all logits more."""
    monkeypatch.setattr(cross_entropy, "_MAX_LOGITS", 1 << 16)
    monkeypatch.setattr(cross_entropy, "_CHUNK_MULTIPLE", 1)
    monkeypatch.setattr("megatron.tensor_parallel.cross_entropy._BLOCK_ELEMENTS", 1 << 16)
    monkeypatch.setattr("megatron.parallel.matmul._BLOCK_ELEMENTS", 1 << 14)

    def peak(vocab: int, form: LossOptions, dtype: torch.dtype) -> int:
        table, config = ParamTable(), ModelConfig(hidden_size=HIDDEN, untie_embeddings_and_output_weights=True)
        weight = build_vocab_weight("output.weight", config, vocab, "matrix")
        layer = OutputLayer(Scope(lone_rank(), table, {weight.name: weight}, dtype, False).get_child("output"), config, form)
        with StorageLedger() as ledger:
            layer.weight = nn.Parameter(torch.zeros(vocab, HIDDEN, dtype=dtype))
            layer.weight.grad_sink = sink_over(torch.zeros(vocab, HIDDEN))  # type: ignore[attr-defined]
            x = torch.zeros(4, 8, HIDDEN, dtype=dtype, requires_grad=True)
            labels, mask = torch.zeros(4, 8, dtype=torch.int64), torch.ones(4, 8)
            ledger.take_span()
            layer(x, labels, mask).backward()
            return ledger.take_span().peak_bytes

    for dtype in (torch.float32, torch.bfloat16):
        few, many = (peak(vocab, LossOptions(), dtype) for vocab in (1 << 13, 1 << 16))
        assert many < 1.01 * few
        more = peak(1 << 16, LossOptions(0), dtype) - peak(1 << 13, LossOptions(0), dtype)
        assert more >= 4 * 8 * ((1 << 16) - (1 << 13)) * dtype.itemsize
