"""The vocabulary-parallel embedding: rows on the ranks that hold them, padding without a gradient, sums in enough bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config.model import ModelConfig
from megatron.parallel.context import ParallelContext, make_context
from megatron.parallel.matmul import add_rows
from megatron.parallel.params import ParamTable, Scope, materialize
from megatron.parallel.topology import Topology
from megatron.spec.weights import WORD_EMBEDDING, Init, build_vocab_weight, pad_vocab_size
from megatron.tensor_parallel.layers import VocabParallelEmbedding, lookup_rows
from megatron_lab.planner.kernel_memory import CudaKernels
from megatron_lab.planner.storages import StorageLedger
from tests.support.lone_rank import CPU, lone_rank
from tests.support.sinks import sink_over, summed
from tests.support.warm import run_forked_ranks

HIDDEN, SEQ, BATCH = 4, 6, 2


def values(*shape: int, key: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(key))


def tokens_of(vocab: int) -> torch.Tensor:
    """Ids [s, b], some of them repeated; the first and the last are among them."""
    tokens = torch.randint(vocab, (SEQ, BATCH), generator=torch.Generator().manual_seed(7))
    tokens[0, 0], tokens[0, 1], tokens[1, 0] = 0, vocab - 1, vocab - 1
    return tokens


@given(st.integers(1, 300_000), st.sampled_from([1, 8, 64, 128]), st.integers(1, 64))
def test_the_padded_vocabulary_is_the_next_multiple(vocab: int, divisible_by: int, ranks: int) -> None:
    padded = pad_vocab_size(vocab, divisible_by, ranks)
    assert padded % (divisible_by * ranks) == 0 and vocab <= padded < vocab + divisible_by * ranks


def test_padded_sizes_of_gpt2() -> None:
    assert [pad_vocab_size(50257, 128, ranks) for ranks in (1, 2, 8)] == [50304, 50432, 51200]


def shape_of(divisible_by: int) -> ModelConfig:
    return ModelConfig(hidden_size=HIDDEN, make_vocab_size_divisible_by=divisible_by)


def embedding_of(context: ParallelContext, vocab: int, divisible_by: int, sequence_parallel: bool) -> tuple[nn.Module, ParamTable]:
    """The layer, its part of the weights filled, 9 in the padding, and a sink."""
    table = ParamTable()
    weight = build_vocab_weight("word.weight", shape_of(divisible_by), vocab, "table")
    scope = Scope(context, table, {weight.name: weight}, torch.float64, sequence_parallel)
    layer = VocabParallelEmbedding(scope.get_child("word"))
    materialize(layer, table, CPU)
    entry = table["word.weight"]
    box = entry.record.get_local_slice(context.axis_sizes, context.coordinates)
    with torch.no_grad():
        entry.param.fill_(9.0)[: box.sizes[0]] = values(vocab, HIDDEN, key=1)[box.offsets[0] :][: box.sizes[0]]
    entry.param.grad_sink = sink_over(torch.full_like(entry.param, torch.nan))  # type: ignore[attr-defined]
    return layer, table


CASES = list(itertools.product((23, 2), (1, 4), (False, True)))
"""Vocabulary, what its padding divides by, sequence parallel. Of 2 tokens, padded to 8, the second rank holds only padding."""


def on_two_ranks(rank: int) -> list[Any]:
    context = make_context(Topology(tp=2), rank, CPU)
    found = []
    for vocab, divisible_by, sequence_parallel in CASES:
        layer, table = embedding_of(context, vocab, divisible_by, sequence_parallel)
        y = layer(tokens_of(vocab))
        dy = values(SEQ, BATCH, HIDDEN, key=2)
        y.backward(dy.chunk(2)[rank] if sequence_parallel else dy)
        found.append((y.detach(), table["word.weight"].param.grad_sink.main_grad))  # type: ignore[attr-defined]
    dist.barrier()
    return found


def test_two_ranks_equal_one_plain_embedding() -> None:
    ranks = run_forked_ranks(2, on_two_ranks, timeout=60.0)
    for number, (vocab, _, sequence_parallel) in enumerate(CASES):
        weight = values(vocab, HIDDEN, key=1).requires_grad_()
        whole = F.embedding(tokens_of(vocab), weight)
        whole.backward(values(SEQ, BATCH, HIDDEN, key=2))
        assert weight.grad is not None
        outputs = [rank[number][0] for rank in ranks]
        if sequence_parallel:
            assert torch.equal(torch.cat(outputs), whole.detach())
        else:
            assert all(torch.equal(output, whole.detach()) for output in outputs)
        gradient = torch.cat([rank[number][1] for rank in ranks])
        torch.testing.assert_close(gradient[:vocab], weight.grad, rtol=1e-14, atol=1e-14)
        assert not gradient[vocab:].any(), "padding rows have no gradient"


def test_a_tensor_group_of_one_with_padding() -> None:
    layer, table = embedding_of(lone_rank(), 23, 8, False)
    tokens = tokens_of(23)
    layer(tokens).backward(values(SEQ, BATCH, HIDDEN, key=2))
    gradient = table["word.weight"].param.grad_sink.main_grad  # type: ignore[attr-defined]
    assert gradient.shape == (24, HIDDEN) and not gradient[23:].any()
    weight = values(23, HIDDEN, key=1).requires_grad_()
    F.embedding(tokens, weight).backward(values(SEQ, BATCH, HIDDEN, key=2))
    torch.testing.assert_close(gradient[:23], weight.grad, rtol=1e-14, atol=1e-14)


def test_the_record_names_the_unpadded_shape_and_the_holders() -> None:
    table = ParamTable()
    weight = build_vocab_weight(WORD_EMBEDDING, shape_of(16), 23, "table")
    context = lone_rank(Topology(tp=2), 1)
    scope = Scope(context, table, {weight.name: weight}, torch.float32, num_chunks=4)
    VocabParallelEmbedding(scope.get_child("embedding").get_child("word"))
    record = table[WORD_EMBEDDING].record
    assert (record.shape, record.chunks, record.has_weight_decay, record.init) == ((23, HIDDEN), (0, 3), True, Init(0.02))
    assert table[WORD_EMBEDDING].param.shape == (16, HIDDEN)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_a_frequent_token_are_summed_in_float32(dtype: torch.dtype) -> None:
    """Ten thousand times 1/64 to one row: in bfloat16 the sum would stand still at 4, far from 156.25."""
    weight = nn.Parameter(torch.zeros(3, 2, dtype=dtype))
    weight.grad_sink = sink_over(torch.empty(3, 2))  # type: ignore[attr-defined]
    ids = torch.ones(10_000, dtype=torch.int64)
    ids[0] = 2
    for _ in range(2):
        lookup_rows(ids, weight).backward(torch.full((10_000, 2), 1 / 64, dtype=dtype))
    expected = torch.tensor([[0.0] * 2, [2 * 9999 / 64] * 2, [2 / 64] * 2])
    torch.testing.assert_close(weight.grad_sink.main_grad, expected, rtol=1e-5, atol=0.0)  # type: ignore[attr-defined]
    assert weight.grad is None


def test_without_a_sink_the_gradient_is_in_grad() -> None:
    weight = nn.Parameter(values(5, 3, key=1))
    ids = torch.tensor([[1, 1], [4, 0]])
    for _ in range(2):
        lookup_rows(ids, weight).sum().backward()
    assert weight.grad is not None and weight.grad[:, 0].tolist() == [2.0, 4.0, 0.0, 0.0, 2.0]


def test_rows_are_looked_up_in_any_shape() -> None:
    weight = nn.Parameter(values(5, 3, key=1))
    assert torch.equal(lookup_rows(torch.tensor(3), weight), weight[3])
    assert torch.equal(lookup_rows(torch.tensor([[1], [2]]), weight), weight[1:3].unsqueeze(1))
    with pytest.raises(IndexError):
        lookup_rows(torch.tensor([5]), weight)


def test_no_tensor_of_the_tables_size_is_made() -> None:
    """Backward adds rows into the gradient, and writes the same bits each time."""
    found = []
    for _ in range(2):
        with StorageLedger() as ledger:
            weight = nn.Parameter(torch.zeros(10_000, 16, dtype=torch.bfloat16))
            weight.grad_sink = sink_over(torch.zeros(10_000, 16))  # type: ignore[attr-defined]
            ids = torch.randint(10_000, (64, 2), generator=torch.Generator().manual_seed(1)).clamp(max=200)
            rows = lookup_rows(ids, weight)
            gradient = torch.linspace(-1, 1, rows.numel()).view(rows.shape).bfloat16()
            ledger.take_span()
            rows.backward(gradient)
            assert ledger.take_span().peak_bytes <= 2 * rows.numel() * 4
        found.append(summed(weight.grad_sink))  # type: ignore[attr-defined]
    assert torch.equal(*found) and found[0].any()


def test_on_cuda_rows_are_added_in_order_and_nothing_waits() -> None:
    """By the operation that sorts the ids, without its check, for which the host would wait. (It also runs on CPU.)"""
    called: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(function.name())
            return function(*args, **(kwargs or {}))

    into, ids, rows = values(5, 3, key=1), torch.tensor([4, 1, 4]), values(3, 3, key=2)
    expected = into.index_add(0, ids, rows)
    with Watch(), CudaKernels():
        add_rows(into, ids, rows)
    assert called == ["aten::_index_put_impl_"]
    torch.testing.assert_close(into, expected, rtol=1e-14, atol=1e-14)
