"""Small settings in the place of large ones: always valid, and with what matters as it was."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from itertools import product

import pytest

from megatron.config.cli import load
from megatron.config.config import Config
from megatron.config.model import ModelConfig
from megatron.config.rules import find_violations
from megatron.spec.layers import LayerSpec, NormSpec, build_layer_specs
from megatron_lab.proofs.shrink import ReducedRun, shrink
from megatron_lab.proofs.small_layout import (
    AxisSizes,
    LayerSplit,
    get_axis_sizes,
    get_layer_split,
    reduce_axis_sizes,
    reduce_layer_split,
)
from megatron_lab.proofs.small_model import Divisors, compute_padded_rows, compute_padding, reduce_vocab
from megatron_lab.verification.diagnosis import diagnose
from tests.support.verify_observations import prove_warm

COMMON = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --micro-batch-size 4 --global-batch-size 1536 "
    "--train-iters 100000 --lr 6e-5 --min-lr 6e-6 --lr-warmup-iters 2000 --lr-decay-style cosine"
)
"""Of a model of 175 billion parameters."""


@functools.cache
def config_of(world_size: int, flags: str, common: str = COMMON) -> Config:
    """Common settings, with those of `flags` in the place of the same ones."""
    own = shlex.split(flags)
    rest: list[str] = []
    keeps = True
    for word in shlex.split(common):
        if word.startswith("--"):
            keeps = word not in own and not (word == "--train-iters" and "--train-samples" in own)
        rest += [word] * keeps
    return load([*rest, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "50256", *own], world_size).config


@functools.cache
def shrunk(world_size: int, flags: str, vocab_size: int = 50257, **limits: int) -> list[ReducedRun]:
    """Of `COMMON` with some flags."""
    found = shrink(config_of(world_size, flags), world_size, vocab_size, **limits)
    assert all(find_violations(each.config, each.world_size) == [] for each in found)
    return found


CASES = {
    "3D": (3072, "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --sequence-parallel --global-batch-size 3072"),
    "interleaved": (
        1024,
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 6 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16 --global-batch-size 1024",
    ),
    "V": (64, "--pipeline-model-parallel-size 8 --pipeline-schedule zb-v --account-for-loss-in-pipeline-split --fp16"),
    "layers a virtual stage": (64, "--pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 3"),
    "ends": (
        64,
        "--pipeline-model-parallel-size 16 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2 "
        "--num-layers 97 --global-batch-size 64",
    ),
    "balanced": (128, "--pipeline-model-parallel-size 16 --pipeline-split balanced --tensor-model-parallel-size 2"),
    "by hand": (
        64,
        "--pipeline-model-parallel-size 16 --pipeline-model-parallel-layout E|t|(t*7|)*13t*4L --tensor-model-parallel-size 4",
    ),
    "sharded in copies": (
        96,
        "--data-parallel-sharding-strategy optim_grads_params --fsdp-shard-size 16 --swiglu "
        "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --max-position-embeddings 3072",
    ),
    "sharded unevenly": (
        384,
        "--data-parallel-sharding-strategy optim_grads_params --swiglu --normalization RMSNorm --disable-bias-linear "
        "--untie-embeddings-and-output-weights --hidden-size 4096 --num-attention-heads 32",
    ),
    "Llama in samples": (
        64,
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --group-query-attention --num-query-groups 8 --swiglu "
        "--ffn-hidden-size 11008 --position-embedding-type rope --rotary-percent 0.25 --kv-channels 160 --train-samples 100000 "
        "--lr-warmup-iters 0 --lr-warmup-samples 1000 --lr-decay-samples 90000 --rampup-batch-size 64 64 50000 "
        "--micro-batch-size 1",
    ),
    "latents in 8 bits": (
        64,
        "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 --position-embedding-type rope --bf16 "
        "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-layernorm --rope-type yarn --fp8-format e4m3",
    ),
    "latents, sharded": (
        48,
        "--data-parallel-sharding-strategy optim_grads_params --fsdp-shard-size 16 --position-embedding-type rope "
        "--multi-latent-attention --v-head-dim 192 --rope-type dynamic",
    ),
    "WSD": (
        16,
        "--lr-decay-style WSD --lr-wsd-decay-iters 10000 --lr-warmup-iters 0 --lr-warmup-fraction 0.8 --optimizer sgd "
        "--iterations-to-skip 77 --weight-decay-incr-style cosine --start-weight-decay 0.1 --end-weight-decay 0.2 --eod-mask-loss",
    ),
    "WSD in samples": (
        16,
        "--lr-decay-style WSD --lr-wsd-decay-samples 20000 --lr-warmup-iters 0 --lr-warmup-samples 3000 --train-samples 300000 "
        "--rampup-batch-size 128 704 10000",
    ),
    "a scheduled batch": (
        64,
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --train-samples 400000 --lr-warmup-iters 0 "
        "--lr-warmup-samples 2000 --data-parallel-sharding-strategy optim_grads "
        "--step-batch-size-schedule 0:16,0.01B:48,0.1B:96,1B:1536",
    ),
    "LongRoPE": (
        2,
        "--num-attention-heads 768 --position-embedding-type rope --rope-type longrope --original-max-position-embeddings 1024 "
        "--rope-short-factors 1 1.5 1.5 2 2.5 2.5 3 4 --rope-long-factors 1 2 3 4 5 6 7 8 --rotary-scaling-factor 2",
    ),
    "odd": (
        210,
        "--tensor-model-parallel-size 3 --pipeline-model-parallel-size 5 --num-attention-heads 9 --hidden-size 1152 "
        "--ffn-hidden-size 4611 --global-batch-size 392 --use-tp-pp-dp-mapping --optimizer-cpu-offload --reset-attention-mask",
    ),
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("max_ranks", [2, 8, *(pytest.param(most, marks=pytest.mark.full("2 and 8")) for most in (4, 6))])
def test_small_settings_are_valid_and_small(case: str, max_ranks: int) -> None:
    world_size, flags = CASES[case]
    for each in shrunk(world_size, flags, max_ranks=max_ranks):
        model, training = each.config.model, each.config.training
        assert each.world_size <= max_ranks and get_axis_sizes(each.config, each.world_size).world_size == each.world_size
        assert model.num_layers <= 24 and model.hidden_size <= 512 and model.ffn_size <= 4 * 512 and model.seq_length <= 32
        assert training.micro_batch_size <= 2 and (training.global_batch_size or 0) <= 64
        assert each.preserved and each.reduced


def test_a_kernel_of_a_gpu_stays_though_small_heads_are_not_for_it() -> None:
    flags = "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --attention-dropout 0 --bf16 --attention-backend "
    for backend in ("cudnn", "efficient", "flash"):
        (each,) = shrink(config_of(1, flags + backend), 1, 50257)
        assert each.config.speed.attention_backend == backend and each.config.model.head_size % 8


def test_a_sequence_beyond_the_original_context_stays_beyond_it() -> None:
    (each, *_) = shrunk(*CASES["LongRoPE"])
    model = each.config.model
    assert (model.rope_type, model.seq_length, model.original_max_position_embeddings) == ("longrope", 16, 8)
    assert (model.head_size, model.rope_short_factors, model.rope_long_factors) == (8, (1, 1.5, 2.5, 3), (1, 3, 5, 7))


def test_settings_that_choose_stay() -> None:
    """All that are no numbers of a size, and are not asked to go with an axis that has one rank."""
    (first, *_) = shrunk(*CASES["interleaved"])
    parallel = first.config.parallel
    assert parallel.schedule == "interleaved" and parallel.use_distributed_optimizer
    assert parallel.overlap_grad_reduce and parallel.overlap_param_gather and first.config.precision.bf16
    (first, *_) = shrunk(*CASES["WSD"])
    assert first.config.optimizer.lr_decay_style == "WSD" and first.config.optimizer.optimizer == "sgd"
    assert first.config.training.iterations_to_skip == (2,) and first.config.data.eod_mask_loss
    assert "--optimizer sgd" in first.preserved and "--iterations-to-skip 77 -> 2" in first.reduced
    (first, *_) = shrunk(*CASES["odd"])
    assert first.config.parallel.use_tp_pp_dp_mapping and first.config.optimizer.optimizer_cpu_offload
    assert first.config.data.reset_attention_mask and not first.config.data.reset_position_ids


@pytest.mark.parametrize(
    ("flags", "chunks"),
    [
        ("", None),  # 8,192 tokens of 50,304 columns over two ranks: more than 2^27 logits, in two chunks
        ("--tensor-model-parallel-size 4", 1),
        ("--loss-chunk-tokens 0", 1),
        ("--loss-chunk-tokens 100", 3),
        ("--loss-chunk-tokens 10000 --z-loss-coeff 1e-4", 1),
    ],
)
def test_a_loss_in_chunks_stays_one(flags: str, chunks: int | None) -> None:
    """Also one that is in chunks by default."""
    (first, *_) = shrunk(8, f"--tensor-model-parallel-size 2 {flags}")
    memory, training = first.config.memory, first.config.training
    tokens, size = training.micro_batch_size * first.config.model.seq_length, memory.loss_chunk_tokens
    if chunks is None:
        assert size == tokens // 2
    elif "chunk" not in flags:
        assert size is None
    else:
        assert (-(-tokens // size) if size else 1) == chunks and bool(size) == (" 0" not in flags)
    assert training.z_loss_coeff == (1e-4 if "z-loss" in flags else 0.0)


@pytest.mark.parametrize(
    ("whole", "max_ranks", "expected"),
    [
        ((2, 2, 2), 8, [(2, 2, 2)]),
        ((1, 3, 2), 8, [(1, 3, 2)]),
        ((8, 64, 6), 8, [(2, 2, 2), (2, 4, 1)]),
        ((8, 64, 6), 16, [(2, 4, 2)]),
        ((8, 2, 6), 8, [(2, 2, 2)]),
        ((8, 64, 6), 4, [(2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)]),
        ((8, 64, 6), 2, [(2, 1, 1), (1, 2, 1), (1, 1, 2)]),
        ((1, 64, 6), 8, [(1, 4, 2)]),
        ((1, 1, 60), 8, [(1, 1, 2)]),
    ],
)
def test_layouts_of_few_ranks(whole: tuple[int, int, int], max_ranks: int, expected: list[tuple[int, int, int]]) -> None:
    assert reduce_axis_sizes(AxisSizes(*whole), max_ranks, is_hybrid=False) == [AxisSizes(*sizes) for sizes in expected]


def test_copies_of_a_sharded_model_take_four_data_ranks() -> None:
    assert reduce_axis_sizes(AxisSizes(1, 1, 96), 8, is_hybrid=True) == [AxisSizes(1, 1, 4)]
    assert reduce_axis_sizes(AxisSizes(4, 1, 96), 2, is_hybrid=True) == [AxisSizes(2, 1, 1), AxisSizes(1, 1, 2)]
    (each,) = shrunk(*CASES["sharded in copies"])
    assert each.world_size == 4 and each.config.parallel.fsdp_shard_size == 2
    (each,) = shrunk(*CASES["sharded in copies"], max_ranks=2)
    assert each.world_size == 2 and each.config.parallel.fsdp_shard_size is None


def test_ranks_keep_several_experts_and_tokens_their_choice_in_groups() -> None:
    """Copies of the rest of the model hold them as often, or a part of them."""
    experts = "--num-experts 64 --disable-bias-linear --moe-ffn-hidden-size 256 --expert-model-parallel-size"
    for flags, chosen, groups in (
        ("8 --moe-router-topk 6", 4, None),
        ("16 --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4", 4, 4),
        ("8 --data-parallel-sharding-strategy optim_grads_params --fsdp-shard-size 4", 2, None),
        ("8 --data-parallel-sharding-strategy optim_grads_params --fsdp-shard-size 16", 2, None),
    ):
        (small,) = shrunk(64, f"{experts} {flags} --global-batch-size 256")
        model, ranks = small.config.model, small.config.parallel.expert_model_parallel_size
        assert ranks > 1 and model.num_experts is not None and model.num_experts >= 2 * ranks
        assert (model.moe_router_topk, model.moe_router_num_groups) == (chosen, groups)


def test_every_pair_of_axes_is_in_some_run() -> None:
    for tp, pp, dp, max_ranks in product((1, 2, 8), (1, 2, 3, 64), (1, 2, 6), (4, 6, 8, 16)):
        found = reduce_axis_sizes(AxisSizes(tp, pp, dp), max_ranks, is_hybrid=False)
        for one, other in ((0, 1), (0, 2), (1, 2)):
            wanted = (tp, pp, dp)[one] > 1 and (tp, pp, dp)[other] > 1
            sizes = [(each.tp, each.pp, each.dp) for each in found]
            assert any(size[one] > 1 and size[other] > 1 for size in sizes) == wanted
        assert (pp < 3) or any(each.pp >= 3 for each in found), "a stage in the middle"


@pytest.mark.parametrize(
    ("sizes", "stages", "expected"),
    [
        ([24] * 4, 4, [2, 2, 2, 2]),
        ([1] * 64, 4, [1, 1, 1, 1]),
        ([10, 12, 12, 12, 12, 12, 12, 11], 4, [2, 4, 4, 3]),
        ([0, 1, 4, 4, 4, 4, 4, 3], 4, [0, 1, 3, 2]),
        ([5, 5, 5, 9, 5, 5, 5, 5], 3, [2, 3, 2]),
        ([0, 8, 8, 8], 4, [0, 2, 2, 2]),
        ([0, 8, 8, 0], 2, [0, 1]),
        ([3, 1], 2, [2, 1]),
    ],
)
def test_chunks_that_differ_in_length_still_do(sizes: list[int], stages: int, expected: list[int]) -> None:
    assert reduce_layer_split(LayerSplit(sizes, tuple(range(len(sizes)))), "1f1b", stages).chunk_sizes == expected


def test_chunks_of_a_stage_keep_their_pattern() -> None:
    interleaved = LayerSplit([0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1], (0, 1, 2, 3) * 3)
    assert str(reduce_layer_split(interleaved, "interleaved", 2)) == "0+2+2 2+2+1"
    many = LayerSplit([1] * 48, (0, 1, 2, 3, 4, 5, 6, 7) * 6)
    assert str(reduce_layer_split(many, "interleaved", 4)) == "1+1+1 1+1+1 1+1+1 1+1+1"
    v = LayerSplit([3, 4, 4, 4, 4, 4, 4, 2], (0, 1, 2, 3, 3, 2, 1, 0))
    assert reduce_layer_split(v, "zb-v", 2) == LayerSplit([3, 4, 4, 2], (0, 1, 1, 0))


def test_layers_of_every_kind_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose every sixth layer is another, at any pipeline size."""

    def every_sixth(model: ModelConfig) -> tuple[LayerSpec, ...]:
        found = build_layer_specs(model)
        other = dataclasses.replace(found[0], norm=NormSpec("RMSNorm", 0.5))
        return tuple(other if number % 6 == 5 else each for number, each in enumerate(found))

    monkeypatch.setattr("megatron_lab.proofs.small_layout.build_layer_specs", every_sixth)
    for case in ("3D", "interleaved", "balanced", "by hand", "sharded in copies"):
        for each in shrunk.__wrapped__(*CASES[case]):
            assert len(set(every_sixth(each.config.model))) == 2, (case, each.reduced)
            assert each.config.model.num_layers <= 12, (case, each.reduced)


@pytest.mark.parametrize(
    ("flags", "window", "windowed", "rotated"),
    [
        ("--window-size 511,0 --window-attn-skip-freq 6", "7,0", "111110", "111111"),
        ("--window-size 1,0 --window-attn-skip-freq ([0]*2+[1])*8", "1,0", "001001", "111111"),
        ("--window-size 1022,0 --window-attn-skip-freq [1]+[0]*23 --no-rope-freq 4", "14,0", "100000", "111011"),
        ("--window-size 1023,0 --no-rope-freq [1]+[0]*23", "1023,0", "111111", "011111"),
    ],
)
def test_layers_attend_to_as_much_of_the_sequence(flags: str, window: str, windowed: str, rotated: str) -> None:
    """And all kinds of layers are left, in the same order."""
    text = f"--num-layers 24 --seq-length 1024 --position-embedding-type rope {flags}"
    for world_size, layout in ((1, ""), (8, "--pipeline-model-parallel-size 8")):
        for each in shrunk(world_size, f"{text} {layout}"):
            model = each.config.model
            assert model.window_size == window and model.seq_length == 16
            kinds = [(spec.attention.scores.get_effective_window(16), spec.attention.rotary) for spec in build_layer_specs(model)]
            assert len(set(kinds)) == len(set(zip(windowed, rotated, strict=True)))
            for (reach, rotary), has_window, has_rotary in zip(kinds, windowed, rotated, strict=False):
                assert (reach is not None) == (has_window == "1" and window != "1023,0")
                assert (rotary is not None) == (has_rotary == "1")


@pytest.mark.parametrize("case", [case for case, (_, flags) in CASES.items() if "pipeline-model" in flags])
def test_small_settings_make_the_pattern_in_the_given_way(case: str) -> None:
    world_size, flags = CASES[case]
    config = config_of(world_size, flags)
    for each in shrunk(world_size, flags):
        small = each.config
        before = get_layer_split(config.model, config.parallel, 50257)
        after = get_layer_split(small.model, small.parallel, 64)
        assert after == reduce_layer_split(before, config.parallel.schedule, small.parallel.pipeline_model_parallel_size)
        assert small.parallel.schedule == config.parallel.schedule
        told = "the way in which layers are spread over stages" in each.preserved
        assert told == (small.parallel.pipeline_model_parallel_layout is None) or "layout" in flags


def test_a_split_that_small_numbers_do_not_make_is_written_by_hand() -> None:
    """Of virtual stages that differ in length; by the settings alone the last would be the short one."""
    config = config_of(64, "--pipeline-model-parallel-size 8 --pipeline-split balanced --num-virtual-stages-per-pipeline-rank 3")
    found = shrink(config, 64, 2_000_000)
    before = get_layer_split(config.model, config.parallel, 2_000_000)
    for each in found:
        stages = each.config.parallel.pipeline_model_parallel_size
        assert get_layer_split(each.config.model, each.config.parallel, 64) == reduce_layer_split(before, "interleaved", stages)
    assert any(each.config.parallel.pipeline_model_parallel_layout is not None for each in found)


@pytest.mark.parametrize("tp", [1, 2, 3, 8])
@pytest.mark.parametrize("multiple", [1, 2, 7, 128])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_padding_of_the_vocabulary_is_of_the_same_kind(tp: int, multiple: int, parts: int) -> None:
    cuts = Divisors(min(tp, 3), parts, sequence_parallel=False)
    for rows in (*range(250, 300), 31999, 32000, 50257, 128256):
        small, unit = reduce_vocab(rows, multiple, tp, cuts)
        padding, after = compute_padding(rows, multiple, tp), compute_padding(small, unit, cuts.tp)
        assert 1 < small <= 160 and unit % parts == 0
        alone, alone_after = (
            padding // (compute_padded_rows(rows, multiple, tp) // tp),
            after // (compute_padded_rows(small, unit, cuts.tp) // cuts.tp),
        )
        assert alone_after == (min(alone, cuts.tp - 1) if cuts.tp > 1 else 0)
        if (cuts.tp, unit) != (1, 1):  # there nothing is padded
            assert (after > 0) == (padding > 0), (rows, small)


@pytest.mark.parametrize(
    ("flags", "heads", "groups"),
    [
        ("--num-attention-heads 96", 4, 4),
        ("--num-attention-heads 8", 2, 2),
        ("--num-attention-heads 64 --group-query-attention --num-query-groups 8", 8, 2),
        ("--num-attention-heads 64 --group-query-attention --num-query-groups 32", 8, 4),
        ("--num-attention-heads 48 --group-query-attention --num-query-groups 16", 12, 4),
    ],
)
def test_heads_keep_their_groups(flags: str, heads: int, groups: int) -> None:
    (each,) = shrunk(16, f"--tensor-model-parallel-size 8 {flags}")
    model = each.config.model
    assert (model.num_attention_heads, model.num_key_value_heads) == (heads, groups)
    assert model.group_query_attention == ("group" in flags)


@pytest.mark.parametrize(
    ("batch", "stages", "expected"), [(2, 8, 2), (3, 8, 3), (8, 8, 4), (9, 8, 9), (64, 8, 8), (65, 8, 9), (12, 1, 4), (13, 1, 3)]
)
def test_microbatches_are_as_few_or_as_many_for_the_stages(batch: int, stages: int, expected: int) -> None:
    flags = f"--pipeline-model-parallel-size {stages} --micro-batch-size 1 --global-batch-size {batch}"
    found = shrunk(stages, flags, max_ranks=4)
    assert {each.config.training.global_batch_size for each in found} == {expected}


def test_the_width_of_the_mlp_on_a_rank_is_as_odd() -> None:
    for flags, odd in (("--ffn-hidden-size 4611", True), ("--ffn-hidden-size 4608", False)):
        for each in shrunk(3, f"--tensor-model-parallel-size 3 {flags}"):
            width = each.config.model.ffn_size
            assert width % 3 == 0 and width // 3 % 2 == odd


def test_a_short_run_has_all_phases() -> None:
    (*_, each) = shrunk(*CASES["Llama in samples"], steps=5)
    training, optimizer = each.config.training, each.config.optimizer
    assert training.rampup_batch_size == (1, 1, 4) and training.global_batch_size == 3
    assert training.train_samples == 1 + 1 + 2 + 3 + 3 + 1, "and an incomplete step, as before"
    assert optimizer.lr_warmup_samples == 2 and optimizer.lr_decay_samples == 8
    assert optimizer.lr == pytest.approx(1e-3) and optimizer.min_lr == pytest.approx(1e-4)
    each = shrunk(*CASES["a scheduled batch"], steps=5)[-1]
    assert each.config.training.step_batch_size_schedule == ("0:2 48:4 112:6",), "of 16 tokens each; the second is passed by a step"
    assert each.config.training.global_batch_size == 6 and each.config.training.train_samples == 2 + 2 + 4 + 6 + 6 + 1
    (each,) = shrunk(*CASES["WSD"])
    assert each.config.training.train_iters == 4 and each.config.optimizer.lr_wsd_decay_iters == 1
    assert each.config.optimizer.lr_warmup_fraction == 0.5


@pytest.mark.parametrize("case", ["3D", "WSD", "WSD in samples", "Llama in samples", "a scheduled batch", "odd"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_of_any_length_is_valid(case: str, steps: int) -> None:
    for each in shrunk(*CASES[case], steps=steps):
        assert each.config.training.train_iters in (None, steps)


def test_a_small_world_keeps_its_layout_and_rates() -> None:
    (each,) = shrunk(6, "--tensor-model-parallel-size 3 --pipeline-model-parallel-size 2 --lr 0.01 --min-lr 0 --num-layers 9")
    assert get_axis_sizes(each.config, 6) == AxisSizes(3, 2, 1) and each.config.optimizer.lr == 0.01
    assert {"tensor size 3", "pipeline size 2", "--lr 0.01"} <= set(each.preserved)
    assert "layers by stage 5 4 -> 3 2" in each.reduced


def test_several_buckets_stay_several() -> None:
    (each,) = shrunk(8, "--use-distributed-optimizer --overlap-grad-reduce")
    assert each.config.parallel.ddp_bucket_size is not None
    (each,) = shrunk(8, "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --use-distributed-optimizer")
    assert each.config.parallel.ddp_bucket_size is None


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        ("balanced", 1),
        *(
            pytest.param(*case, marks=pytest.mark.full("balanced, and test_verification_run.py with such settings"))
            for case in (("sharded in copies", 1), ("a scheduled batch", 4))
        ),
    ],
)
def test_small_settings_run(case: str, steps: int) -> None:
    world_size, flags = CASES[case]
    for each in shrunk(world_size, flags, max_ranks=4, steps=steps)[:1]:
        found = diagnose(prove_warm(each.config, each.world_size))
        assert found.equal, found.findings


def test_a_layout_of_which_nothing_would_run_is_refused() -> None:
    for whole in ((2, 1, 1), (1, 4, 1), (8, 64, 6)):
        with pytest.raises(ValueError, match="--max-ranks 1 is too small to test any axis of this layout"):
            reduce_axis_sizes(AxisSizes(*whole), 1, is_hybrid=False)
    assert reduce_axis_sizes(AxisSizes(1, 1, 1), 1, is_hybrid=False) == [AxisSizes(1, 1, 1)]
