"""Logits of whole sequences: those of the plain model, at every layout, on every rank, without padding."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.checkpoint.errors import CheckpointError
from megatron.model.build import build_model
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.partition import partition_layers
from megatron.spec.operations import assign_chunks_round_robin, assign_chunks_v_shape
from megatron_lab.inference.forward import compute_sequence_logits
from megatron_lab.inference.model_from_source import load_model, load_weights
from megatron_lab.verification.reference.experts import ExpertsShape
from megatron_lab.verification.reference.model import compute_logits as reference_logits
from megatron_lab.verification.reference.shape import ReferenceShape, build_random_weights
from tests.support.layout import Layout, context_of
from tests.support.lone_rank import lone_rank
from tests.support.memory_source import MemorySource, reference_source
from tests.support.reference_runs import gpt2_like, llama_like
from tests.support.warm import run_warm_ranks

VOCAB = 61  # with TP=2 and rows padded to a multiple of 8 x TP, the last tensor rank holds padding
SHAPES = {
    "gpt2": gpt2_like(num_layers=3, vocab=VOCAB),
    "llama": llama_like(num_layers=4, vocab=VOCAB, kv_heads=2),
    "experts": llama_like(
        num_layers=2, vocab=VOCAB, experts=ExpertsShape((False, True), 4, 2, 8, 6, True, score_function="sigmoid")
    ),
    "llama-tied-qk-norm": llama_like(num_layers=2, vocab=VOCAB, kv_heads=2, tied=True, qk_norm=True),
}


def expected(shape: ReferenceShape, tokens: torch.Tensor) -> torch.Tensor:
    return reference_logits(shape, build_random_weights(shape, seed=1), tokens)


def some_tokens(batch: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("style", SHAPES)
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2)], ids=["one", "tp2", "pp2", "tp2-pp2"])
def test_logits_equal_the_reference(style: str, layout: Layout) -> None:
    tokens = some_tokens()
    wanted = expected(SHAPES[style], tokens)
    for logits in run_warm_ranks(layout.world_size, rank_logits, style, layout, tokens):
        assert logits.shape == (*tokens.shape, VOCAB)
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-12)


def rank_logits(rank: int, style: str, layout: Layout, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits that a rank has."""
    context, shape = context_of(layout, rank), SHAPES[style]
    source = reference_source(shape, build_random_weights(shape, seed=1), vocabulary_multiple=8)
    return compute_sequence_logits(load_model(source, context, torch.float64), context, tokens)


@pytest.mark.parametrize("places", [assign_chunks_round_robin(2, 2), assign_chunks_v_shape(2)], ids=["loop", "v"])
def test_chunks_in_any_place_and_sequence_parallel(places: tuple[int, ...]) -> None:
    """A model as it is trained: several chunks on a stage, its sequence split."""
    tokens = some_tokens()
    wanted = expected(SHAPES["llama"], tokens)
    for logits in run_warm_ranks(4, logits_of_chunks, places, tokens):
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-12)


def logits_of_chunks(rank: int, places: tuple[int, ...], tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits that one of two tensor ranks of two stages has.

    Args:
        places: the stage of each chunk.
    """
    context, shape = context_of(Layout(tp=2, pp=2), rank), SHAPES["llama"]
    source = reference_source(shape, build_random_weights(shape, seed=1))
    model = build_model(
        dataclasses.replace(source.model, make_vocab_size_divisible_by=2),
        context,
        dtype=torch.float64,
        vocab_size=VOCAB,
        sequence_parallel=True,
        seed=1,
        table=partition_layers(shape.num_layers, places),
    )
    load_weights(model, context, source)
    return compute_sequence_logits(model, context, tokens)


@pytest.mark.parametrize(
    ("style", "topology", "message"),
    [
        ("llama", Topology(tp=3), "--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 3"),
        ("llama", Topology(pp=8), "8"),
        ("experts", Topology(tp=4), "--moe-shared-expert-intermediate-size 6 is not divisible by --tensor-model-parallel-size 4"),
        ("experts", Topology(expert_tensor=16, dp=16), "width of an expert 8 is not divisible by the 16 ranks"),
    ],
    ids=["heads", "layers", "shared expert", "experts"],
)
def test_a_layout_that_the_model_has_not(style: str, topology: Topology, message: str) -> None:
    shape = SHAPES[style]
    with pytest.raises(ValueError, match=message):
        load_model(reference_source(shape, build_random_weights(shape, seed=1)), lone_rank(topology), torch.float32)


def test_a_source_without_all_of_the_model() -> None:
    shape = SHAPES["gpt2"]
    whole = reference_source(shape, build_random_weights(shape, seed=1))
    context = make_context(Topology(), 0, torch.device("cpu"))
    lacking = MemorySource(whole.model, {name: w for name, w in whole.tensors.items() if name != "layers.1.mlp.up.bias"})
    with pytest.raises(CheckpointError, match="layers.1.mlp.up.bias"):
        load_model(lacking, context, torch.float32)
