"""Initial values: the same at every layout, in any tiles, and what the settings ask for."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.model import ModelConfig
from megatron.model import build as building
from megatron.model.build import Model, build_model, compute_tile_size, draw_tile_values, initialize
from megatron.parallel.params import ParamRecord, Split
from megatron.parallel.random import DropoutKey, compute_stable_seed
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
            box = entry.record.get_local_slice(context.axis_sizes, context.coordinates)
            place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            assert torch.equal(entry.param.detach()[: box.sizes[0]], whole(config)[entry.record.name][place]), entry.record.name
            assert not entry.param.detach()[box.sizes[0] :].any(), "padding is zero"
            covered[entry.record.name][place] += 1
    for entry in build(config, Topology(), 0).params:
        name, tied = entry.record.name, len(entry.owners) > 1 and topology.pp > 1
        copies = topology.dp * (1 if entry.record.splits else topology.tp) * (2 if tied else 1)
        assert (covered[name] == copies).all(), name


def test_a_rank_with_only_padding_holds_zeros() -> None:
    record = ParamRecord("word", (3, 4), (Split(0, "tp", padded_size=16),), init=Init(1.0))
    for rank in range(4):
        param = torch.full((4, 4), torch.nan)
        initialize(param, record, lone_rank(Topology(tp=4), rank), SEED)
        assert param[: max(0, min(4, 3 - 4 * rank))].all() and not param[max(0, min(4, 3 - 4 * rank)) :].any()


@st.composite
def records(draw: st.DrawFn) -> tuple[ParamRecord, int, int, int]:
    """A record with one split dimension (or none), its tensor size, and elements and columns of a tile."""
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
    record = ParamRecord(draw(st.sampled_from("ab")), shape, splits, init=Init(1.0))
    return record, ranks, draw(st.integers(1, 40)), draw(st.integers(1, 14))


def whole_parameter(record: ParamRecord) -> torch.Tensor:
    """What one process has, put together from tiles."""
    rows, columns = compute_tile_size(record)
    lines = []
    for down in range(-(-math.prod(record.shape[:-1]) // rows)):
        lines.append(
            np.concatenate([draw_tile_values(record, SEED, down, n) for n in range(-(-record.shape[-1] // columns))], axis=1)
        )
    return torch.from_numpy(np.concatenate(lines)).reshape(record.shape)


def rank_part(record: ParamRecord, ranks: int, rank: int) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """What a rank fills its part with, and where that lies in the whole."""
    context = lone_rank(Topology(tp=ranks), rank)
    box = record.get_local_slice(context.axis_sizes, context.coordinates)
    part = torch.full(box.sizes, torch.nan)
    initialize(part, record, context, SEED)
    return part, tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


@given(records())
def test_slices_fit_together_whatever_the_tiles(case: tuple[ParamRecord, int, int, int]) -> None:
    """Tiles smaller than a row, of several rows, across the halves of a gated weight, larger than the parameter."""
    record, ranks, elements, columns = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "_TILE_ELEMENTS", elements)
        patch.setattr(building, "_MAX_TILE_COLUMNS", columns)
        full = whole_parameter(record)
        for rank in range(ranks):
            part, place = rank_part(record, ranks, rank)
            assert torch.equal(part, full[place])


CUT = {
    "columns": ParamRecord("down", (10, 48), (Split(1, "tp"),), init=Init(1.0)),
    "rows": ParamRecord("qkv", (48, 20), (Split(0, "tp"),), init=Init(1.0)),
    "halves": ParamRecord("up", (2, 24, 20), (Split(1, "tp"),), init=Init(1.0)),
}


def differing(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Cuts, tensor sizes and ranks at which a part is not that of the whole."""
    monkeypatch.setattr(building, "_TILE_ELEMENTS", 21)
    monkeypatch.setattr(building, "_MAX_TILE_COLUMNS", 7)  # divides no part
    return [
        (name, ranks, rank)
        for name, record in CUT.items()
        for ranks in (1, 2, 3, 8)
        for rank in range(ranks)
        for part, place in [rank_part(record, ranks, rank)]
        if not torch.equal(part, whole_parameter(record)[place])
    ]


def test_tensor_sizes_1_2_3_and_8_have_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not differing(monkeypatch)


@pytest.mark.parametrize(
    ("right", "wrong", "found"),
    [
        ("low - first_column : high - first_column", "0 : high - low", "columns"),
        (
            "draw_tile_values(record, seed, tile_row, tile_column)",
            "draw_tile_values(record, seed, tile_row, tile_column - left // columns)",
            "columns",
        ),
        ("target_rows[start:end] - tile_row * rows", "target_rows[start:end] - target_rows[start]", "rows"),
    ],
)
def test_a_planted_wrong_tile_offset_is_found(right: str, wrong: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(building._fill_slice)
    assert source.count(right) == 1
    faulty: dict[str, Any] = dict(vars(building))
    exec(source.replace(right, wrong), faulty)
    monkeypatch.setattr(building, "_fill_slice", faulty["_fill_slice"])
    assert found in {name for name, _, _ in differing(monkeypatch)}


def test_a_rank_draws_only_the_tiles_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, int]] = []

    def noted(record: ParamRecord, seed: int, down: int, across: int) -> np.ndarray:
        drawn.append((down, across))
        return draw_tile_values(record, seed, down, across)

    monkeypatch.setattr(building, "_TILE_ELEMENTS", 16)
    monkeypatch.setattr(building, "_MAX_TILE_COLUMNS", 8)
    monkeypatch.setattr(building, "draw_tile_values", noted)
    record = ParamRecord("w", (2, 16, 8), (Split(1, "tp"),), init=Init(1.0))  # tiles of 2 rows, 8 a half
    initialize(torch.empty(2, 4, 8), record, lone_rank(Topology(tp=4), 1), SEED)
    assert drawn == [(2, 0), (3, 0), (10, 0), (11, 0)]
    drawn.clear()
    record = ParamRecord("w", (4, 64), (Split(1, "tp"),), init=Init(1.0))  # 2 x 8 tiles, of which each of 4 ranks has 2 x 2
    initialize(torch.empty(4, 16), record, lone_rank(Topology(tp=4), 1), SEED)
    assert drawn == [(0, 2), (0, 3), (1, 2), (1, 3)]


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


def test_no_two_parameters_and_no_two_tiles_are_alike() -> None:
    matrices = {name: tensor.flatten() for name, tensor in whole(GPT2).items() if tensor.unique().numel() > 1}
    starts = {tuple((tensor[:8] / tensor[:64].std()).tolist()) for tensor in matrices.values()}
    assert len(starts) == len(matrices) > 12
    record = ParamRecord("w", (256, 2048), init=Init(1.0))  # 4 x 2 tiles
    firsts = {tuple(draw_tile_values(record, seed, down, across)[0]) for seed in (1, 2) for down in range(4) for across in range(2)}
    assert len(firsts) == 16


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
    assert compute_stable_seed(*parts) == seed


def test_a_dropout_site_has_the_seed_it_always_had() -> None:
    assert DropoutKey(1234, step=64, first_sample=72).get_site_seed(3, "mlp_output", 1) == 8752832656396060063


def test_initial_values_are_what_they_always_were() -> None:
    """Also guards against a numpy that draws other numbers."""
    record = ParamRecord("layers.0.mlp.up.weight", (8, 4), init=Init(0.02))
    expected = [
        [0.018017765134572983, -0.007275556679815054, 0.013379544951021671, -0.027123460546135902],
        [-0.01199684850871563, -0.013434262946248055, -0.03459707275032997, -0.017625682055950165],
    ]
    assert draw_tile_values(record, 1234, 0, 0)[:2].tolist() == expected


@given(st.lists(st.integers() | st.text(max_size=3), max_size=3), st.lists(st.integers() | st.text(max_size=3), max_size=3))
def test_other_parts_give_other_seeds(a: list[Any], b: list[Any]) -> None:
    assert 0 <= compute_stable_seed(*a) < 2**63
    if a != b and not any("\x1f" in part for part in a + b if isinstance(part, str)):
        assert compute_stable_seed(*a) != compute_stable_seed(*b)
