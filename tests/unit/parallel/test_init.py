"""Initial values: the same at every layout, in any blocks, and what the settings ask for."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.model import ModelConfig
from megatron.model import init
from megatron.model.build import Model, build_model
from megatron.model.init import block_values, initialize
from megatron.parallel.params import ParamRecord, Split
from megatron.parallel.random import DropoutKey, stable_seed
from megatron.parallel.topology import Topology
from megatron.spec.weights import Init
from tests.support.lone_rank import lone_rank

VOCAB = 61
SEED = 1234

GPT2 = ModelConfig(num_layers=3, hidden_size=32, num_attention_heads=4, seq_length=16, make_vocab_size_divisible_by=8)
LLAMA = ModelConfig(
    num_layers=3,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=8,
    group_query_attention=True,
    num_query_groups=4,
    seq_length=16,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    untie_embeddings_and_output_weights=True,
    disable_bias_linear=True,
    make_vocab_size_divisible_by=8,
)


def build(config: ModelConfig, topology: Topology, rank: int, dtype: torch.dtype = torch.float32, seed: int = SEED) -> Model:
    return build_model(config, lone_rank(topology, rank), dtype=dtype, vocab_size=VOCAB, sequence_parallel=False, seed=seed)


@functools.cache
def whole(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Every parameter as one process has it, without padding."""
    return {e.record.name: e.param.detach()[: e.record.shape[0]] for e in build(config, Topology(), 0).params}


# ---- the layout


@pytest.mark.parametrize(
    "topology",
    [
        Topology(tp=2),
        Topology(tp=4),
        Topology(pp=3),
        Topology(dp=2),
        Topology(tp=2, pp=2, dp=2),
        Topology(tp=4, pp=2, pp_before_dp=True),
    ],
    ids=lambda t: f"tp{t.tp}-pp{t.pp}-dp{t.dp}",
)
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_every_rank_holds_its_slice_of_the_same_values(config: ModelConfig, topology: Topology) -> None:
    covered = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in whole(config).items()}
    for rank in range(topology.world_size):
        context = lone_rank(topology, rank)
        for entry in build(config, topology, rank).params:
            box = entry.record.held_box(context.axis_sizes, context.coordinates)
            place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            assert torch.equal(entry.param.detach()[: box.sizes[0]], whole(config)[entry.record.name][place]), entry.record.name
            assert not entry.param.detach()[box.sizes[0] :].any(), "padding is zero"
            covered[entry.record.name][place] += 1
    for entry in build(config, Topology(), 0).params:
        name, tied = entry.record.name, len(entry.holders) > 1 and topology.pp > 1
        copies = topology.dp * (1 if entry.record.splits else topology.tp) * (2 if tied else 1)
        assert (covered[name] == copies).all(), name


def test_a_rank_with_only_padding_holds_zeros() -> None:
    record = ParamRecord("word", (3, 4), (Split(0, "tp", padded_size=16),), init=Init(1.0))
    for rank in range(4):
        param = torch.full((4, 4), torch.nan)
        initialize(param, record, lone_rank(Topology(tp=4), rank), SEED)
        assert param[: max(0, min(4, 3 - 4 * rank))].all() and not param[max(0, min(4, 3 - 4 * rank)) :].any()


@st.composite
def records(draw: st.DrawFn) -> tuple[ParamRecord, int, int]:
    """A record with one split dimension (or none), its tensor size, and elements in a block."""
    ranks = draw(st.sampled_from([1, 2, 3]))
    kind = draw(st.sampled_from(["rows", "columns", "halves", "none", "vector"]))
    rows, columns = draw(st.integers(1, 6)) * ranks, draw(st.integers(1, 4)) * ranks
    shape, splits = {
        "rows": ((rows, columns), (Split(0, "tp"),)),
        "columns": ((rows, columns), (Split(1, "tp"),)),
        "halves": ((2, rows, columns), (Split(1, "tp"),)),
        "none": ((rows, columns), ()),
        "vector": ((columns,), (Split(0, "tp"),)),
    }[kind]
    return ParamRecord(draw(st.sampled_from("ab")), shape, splits, init=Init(1.0)), ranks, draw(st.integers(1, 40))


@given(records())
def test_slices_fit_together_whatever_the_blocks(case: tuple[ParamRecord, int, int]) -> None:
    """Blocks smaller than a row, of several rows, across the halves of a gated weight, larger than the parameter."""
    record, ranks, block_elements = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "_BLOCK_ELEMENTS", block_elements)
        full = torch.full(record.shape, torch.nan)
        initialize(full, record, lone_rank(), SEED)
        rows = max(1, block_elements // record.shape[-1])
        flat = full.reshape(-1, record.shape[-1]).numpy()
        for block in range(-(-len(flat) // rows)):
            assert np.array_equal(flat[block * rows : (block + 1) * rows], block_values(record, SEED, block, rows))
        for rank in range(ranks):
            context = lone_rank(Topology(tp=ranks), rank)
            box = record.held_box(context.axis_sizes, context.coordinates)
            part = torch.full(box.sizes, torch.nan)
            initialize(part, record, context, SEED)
            assert torch.equal(part, full[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))])


def test_a_rank_draws_only_the_blocks_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def noted(record: ParamRecord, seed: int, block: int, rows: int) -> np.ndarray:
        drawn.append(block)
        return block_values(record, seed, block, rows)

    monkeypatch.setattr(init, "_BLOCK_ELEMENTS", 16)
    monkeypatch.setattr(init, "block_values", noted)
    record = ParamRecord("w", (2, 16, 8), (Split(1, "tp"),), init=Init(1.0))  # blocks of 2 rows, 8 a half
    initialize(torch.empty(2, 4, 8), record, lone_rank(Topology(tp=4), 1), SEED)
    assert drawn == [2, 3, 10, 11]


# ---- the values


def test_standard_deviations_are_what_the_settings_say() -> None:
    """Output projections std / sqrt(2 x layers); biases 0; norm weights 1. Means and deviations within 5 sigma."""
    for config in (GPT2, LLAMA):
        for name, tensor in whole(config).items():
            if name.endswith("bias"):
                assert not tensor.any(), name
            elif "norm" in name:
                assert (tensor == 1).all(), name
            else:
                std = config.init_method_std
                if name.endswith(("attention.output.weight", "mlp.down.weight")):
                    std /= math.sqrt(2 * config.num_layers)
                count = tensor.numel()
                assert abs(tensor.double().mean().item()) < 5 * std / math.sqrt(count), name
                assert abs(tensor.double().std().item() / std - 1) < 5 / math.sqrt(2 * count), name


def test_values_are_normal() -> None:
    """Shares within one, two and three deviations, over many blocks."""
    param = torch.empty(500, 600)
    initialize(param, ParamRecord("w", (500, 600), init=Init(0.5)), lone_rank(), SEED)
    for deviations, share in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
        assert (param.abs() < 0.5 * deviations).double().mean().item() == pytest.approx(share, abs=0.003)


def test_no_two_parameters_and_no_two_blocks_are_alike() -> None:
    matrices = {name: tensor.flatten() for name, tensor in whole(GPT2).items() if tensor.unique().numel() > 1}
    starts = {tuple((tensor[:8] / tensor[:64].std()).tolist()) for tensor in matrices.values()}
    assert len(starts) == len(matrices) > 12
    record = ParamRecord("w", (64, 8), init=Init(1.0))
    firsts = {tuple(block_values(record, seed, block, 4)[0]) for seed in (1, 2) for block in range(16)}
    assert len(firsts) == 32


def test_another_seed_gives_other_values() -> None:
    other = build(GPT2, Topology(), 0, seed=SEED + 1).params["embedding.word.weight"].param.detach()[:VOCAB]
    mine = whole(GPT2)["embedding.word.weight"]
    assert not torch.equal(other, mine)
    assert abs(torch.corrcoef(torch.stack([other.flatten(), mine.flatten()]))[0, 1].item()) < 0.15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_hold_the_same_float32_draws(dtype: torch.dtype) -> None:
    for entry in build(GPT2, Topology(), 0, dtype=dtype).params:
        assert entry.param.dtype == dtype
        assert torch.equal(entry.param.detach()[: entry.record.shape[0]], whole(GPT2)[entry.record.name].to(dtype))


def test_building_leaves_the_default_generator_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    build(LLAMA, Topology(), 0)
    assert torch.equal(torch.get_rng_state(), state)


# ---- what must never change, or every run would start elsewhere


@pytest.mark.parametrize(
    ("parts", "seed"),
    [
        ((), 6510301506637419378),
        ((1234,), 3685921849944222978),
        ((1234, "layers.0.mlp.up.weight", 0), 6038425691861340708),
        (("a", "b"), 7071653081998898808),
        ((1, "1"), 2636376176741464513),
    ],
)
def test_seeds_are_what_they_always_were(parts: tuple[Any, ...], seed: int) -> None:
    assert stable_seed(*parts) == seed


def test_a_dropout_site_has_the_seed_it_always_had() -> None:
    assert DropoutKey(1234, step=64, first_sample=72).site(3, "mlp_output", 1) == 8752832656396060063


def test_initial_values_are_what_they_always_were() -> None:
    """Also guards against a numpy that draws other numbers."""
    record = ParamRecord("layers.0.mlp.up.weight", (8, 4), init=Init(0.02))
    expected = [
        [0.018017765134572983, -0.007275556679815054, 0.013379544951021671, -0.027123460546135902],
        [-0.01199684850871563, -0.013434262946248055, -0.03459707275032997, -0.017625682055950165],
    ]
    assert block_values(record, 1234, 0, 8)[:2].tolist() == expected


@given(st.lists(st.integers() | st.text(max_size=3), max_size=3), st.lists(st.integers() | st.text(max_size=3), max_size=3))
def test_other_parts_give_other_seeds(a: list[Any], b: list[Any]) -> None:
    assert 0 <= stable_seed(*a) < 2**63
    if a != b and not any("\x1f" in part for part in a + b if isinstance(part, str)):
        assert stable_seed(*a) != stable_seed(*b)
