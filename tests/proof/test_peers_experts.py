"""What users of other systems reported of mixtures of experts, where it takes more than one step of one layout to see it.

Faults that `tools/verify_layout.py` finds are in tests/program/test_verify_peers.py. Each report is named with its address.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.memory import MemoryConfig
from megatron.config.model import ModelConfig
from megatron.moe.balance import RouterMetrics
from megatron.spec.counts import count_active_parameters, count_attention_flops, count_flops_per_token, count_parameters
from megatron.training.step import TrainStep
from megatron_lab.verification.observation import LocalTensor
from megatron_lab.verification.recording import record_shards
from megatron_lab.verification.reference.experts import ExpertsShape
from megatron_lab.verification.reference.shape import build_random_weights
from tests.support.equality import assert_equal_runs, assert_equal_tensors
from tests.support.layout import Layout, Recipe, build_step, context_of, join, microbatches, run_layout
from tests.support.reference_runs import llama_like, random_batches, train
from tests.support.step_checkpoints import load, save
from tests.support.warm import run_warm_ranks

SIZES = {"num_layers": 2, "hidden": 12, "ffn": 20, "heads": 4, "kv_heads": 4, "head_size": 4, "vocab": 32, "seq": 4}
TWO = ExpertsShape(
    (True, True),
    4,
    2,
    8,
    score_function="sigmoid",
    aux_loss_scope="sequence",
    aux_loss_coeff=0.3,
    z_loss_coeff=0.1,
    bias_update_rate=1e-3,
)
SHARED = Layout(dp=2, ep=2, micro_batch_size=1)


def recipe(shape: ExpertsShape = TWO, *, steps: int = 1, idle: bool = False) -> Recipe:
    """Random weights and batches.

    Args:
        idle: routers without weights, whose scores are all equal.
    """
    whole = llama_like(**SIZES, experts=shape)
    weights = build_random_weights(whole, seed=5, std=0.3)
    if idle:
        weights |= {name: torch.zeros_like(weights[name]) for name in weights if name.endswith("router.weight")}
    return Recipe(whole, weights, random_batches(whole, steps, 4, 1, seed=6))


def assert_as_one_process(r: Recipe, *layouts: Layout) -> None:
    expected = train(r.shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)
    for layout in layouts:
        assert_equal_runs(run_layout(r, layout), expected)


def test_a_stage_without_experts() -> None:
    """Megatron-LM 1444, "reduce_aux_losses_tracker_across_ranks hangs if first pipeline stage has no moe layers": a sum over stages
    that some do not join."""
    shape = dataclasses.replace(TWO, layers=(False, True))
    assert_as_one_process(recipe(shape), dataclasses.replace(SHARED, pp=2, sharding="optim"))


def test_a_rank_without_tokens() -> None:
    """Megatron-LM 4851 ("Avoid hang in TEGroupedMLP when a rank has zero local tokens") and 1877 ("shape is invalid for input of
    size 0"), Automodel 935: what has no rows is left out, with its communication. Of equal scores the first expert is chosen, so
    that all go to rank 0, also where layers run again (Automodel 3140)."""
    shape = ExpertsShape(
        (True, True), 4, 1, 8, score_function="softmax first", aux_loss_scope="microbatch", aux_loss_coeff=0.3, capacity_factor=4.0
    )
    full = dataclasses.replace(SHARED, memory=MemoryConfig("full"))
    assert_as_one_process(recipe(shape, idle=True), full, dataclasses.replace(SHARED, dispatcher="allgather"))


def test_experts_with_their_state_in_host_memory() -> None:
    """DeepSpeed 2058, "Wrong partition_id while copying fp32_params -> fp16 params in Z2 for MoE": slices of experts are those of
    another group of ranks."""
    layout = Layout(dp=4, ep=2, micro_batch_size=1, sharding="optim", offload=0.5, bucket_size=700)
    assert_as_one_process(recipe(steps=2), layout)


def _balance(rank: int, r: Recipe, layout: Layout, evaluates: bool) -> tuple[float, RouterMetrics, list[LocalTensor]]:
    context = context_of(layout, rank)
    step = build_step(context, r, layout)
    batch = microbatches(r.batches[0], context, layout.micro_batch_size)
    for iteration in (1, 2):
        if evaluates:
            step.evaluate(batch)
        result = step.run(batch, iteration=iteration, learning_rate=0.0, weight_decay=0.0)
    assert result.expert_balance is not None
    biases = [part for part in record_shards(step, lambda shard: shard.main_param) if part.name.endswith("router.bias")]
    return result.loss, result.expert_balance, biases


def test_choices_are_counted_once() -> None:
    """torchtitan 1593 and Automodel 3247 ("tokens per expert are counted twice during full recompute"), torchtitan 4148 ("Do not
    count MoE tokens during evaluation"), maxtext 1483 (the logged loss is summed over accumulated microbatches), megablocks 85
    ("different load_balancing_loss with different pipeline_parallel_size")."""
    r = recipe(dataclasses.replace(TWO, bias_update_rate=0.05))
    full = MemoryConfig("full")
    layouts = {
        "one process": (Layout(), False),
        "more microbatches on fewer tokens": (Layout(tp=2, sequence_parallel=True, micro_batch_size=1, memory=full), False),
        "stages": (Layout(pp=2, schedule="zb-h1", micro_batch_size=1), True),
    }
    found = {name: run_warm_ranks(layout.world_size, _balance, r, layout, on) for name, (layout, on) in layouts.items()}
    loss, balance, _ = found["one process"][0]
    biases = join([parts for _, _, parts in found["one process"]])
    assert 1.0 < balance.load_balancing_loss < 2.0 and len({value for values in biases.values() for value in values.tolist()}) > 1
    for name, ranks in found.items():
        for own_loss, own, _ in ranks:
            assert own_loss == pytest.approx(loss, rel=1e-12), name
            assert (own.load_balancing_loss, own.z_loss) == pytest.approx(
                (balance.load_balancing_loss, balance.z_loss), rel=1e-12
            ), name
            assert own.busiest_expert == pytest.approx(balance.busiest_expert), name
        assert_equal_tensors(join([parts for _, _, parts in ranks]), biases, what=name)


def test_the_loss_that_is_told_is_the_cross_entropy() -> None:
    """open_lm 255: "the load balancing loss was not removed from the train loss"."""
    plain = dataclasses.replace(TWO, aux_loss_coeff=0.0, z_loss_coeff=0.0)
    first, second = (run_warm_ranks(2, _balance, recipe(shape), SHARED, False)[0] for shape in (TWO, plain))
    assert first[0] == second[0]


def _narrow(rank: int, r: Recipe) -> tuple[bool, list[float], list[torch.dtype]]:
    """Whether a step is skipped in which an expert of the last rank overflows, and by how much the next one moves a large bias."""
    layout = dataclasses.replace(SHARED, dtype=torch.float16)
    context = context_of(layout, rank)
    step = build_step(context, r, layout)
    batch = microbatches(r.batches[0], context, layout.micro_batch_size)
    biases = [shard.main_param for shard in step.optimizer.shards if shard.record.count_update is not None]
    for bias in biases:
        bias.fill_(8.0)
    step.optimizer.copy_main_to_model_params()
    step.finish_param_gather()
    first = _with_gradients(step, _spoil_experts if rank == 1 else _leave, batch, 1)
    moved = max(float((bias - 8.0).abs().max()) for bias in biases)
    step.run(batch, iteration=2, learning_rate=0.0, weight_decay=0.0)
    entries = [entry.param for entry in step.model.params if entry.record.count_update is not None]
    return first, [moved, *(float((bias - 8.0).abs().max()) for bias in entries)], [bias.dtype for bias in entries]


def _with_gradients(step: TrainStep, change: Callable[[TrainStep], None], batch: Any, iteration: int) -> bool:
    """Run a step whose gradients are changed before their norm is taken. Whether it is skipped."""
    found = step.compute_gradients

    def changed(*args: Any, **named: Any) -> Any:
        result = found(*args, **named)
        change(step)
        return result

    step.compute_gradients = changed  # type: ignore[method-assign]
    try:
        return step.run(batch, iteration=iteration, learning_rate=0.0, weight_decay=0.0).skipped
    finally:
        step.compute_gradients = found  # type: ignore[method-assign]


def _spoil_experts(step: TrainStep) -> None:
    experts = next(shard for shard in step.optimizer.shards if shard.record.is_expert)
    experts.grad.view(-1)[0] = math.inf


def _leave(step: TrainStep) -> None:
    pass


def test_sixteen_bits() -> None:
    """DeepSpeed 8613 ("Include the expert gradients in the unfused fp16 clip norm"): what overflows on one rank skips the step on
    all, and moves no bias. Megatron-LM 1482 ("expert_bias get wrong dtype when updated"): a bias of 8 moves by 0.001."""
    for skipped, moved, dtypes in run_warm_ranks(2, _narrow, recipe()):
        assert skipped and moved[0] == 0.0
        assert set(dtypes) == {torch.float32} and moved[1:] == pytest.approx([1e-3] * len(moved[1:]), rel=1e-3)


def _leg(rank: int, r: Recipe, layout: Layout, folder: Path, iteration: int) -> list[LocalTensor]:
    context = context_of(layout, rank)
    step = build_step(context, dataclasses.replace(r, weights={name: 0 * value for name, value in r.weights.items()}), layout)
    if iteration == 1:
        step = build_step(context, r, layout)
    else:
        load(step, folder, iteration - 1)
    batch = microbatches(r.batches[iteration - 1], context, layout.micro_batch_size)
    step.run(batch, iteration=iteration, learning_rate=r.lr, weight_decay=r.weight_decay)
    save(step, folder, iteration)
    return record_shards(step, lambda shard: shard.main_param)


def test_every_expert_is_saved_with_its_state(tmp_path: Path) -> None:
    """Megatron-LM 1836 ("Incorrectly saved checkpoints when ETP is enabled"), 4200 (ranks are skipped where TP > EP x ETP), 761 and
    1517 (the optimizer's state of experts at another EP); KempnerForge 202 ("Expert-parallel checkpoints save only one rank's
    experts"), DeepSpeed 6589 (both ranks load the first experts). A run that changes its layout after each step is the run of one
    process."""
    legs = (
        Layout(tp=4, ep=2, etp=1, sequence_parallel=True),
        Layout(dp=4, ep=4, micro_batch_size=1),
        Layout(tp=2, dp=2, ep=1, etp=4, sequence_parallel=True, sharding="optim_grads"),
    )
    r = recipe(steps=len(legs))
    expected = train(r.shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)
    for iteration, layout in enumerate(legs, start=1):
        parts = run_warm_ranks(layout.world_size, _leg, r, layout, tmp_path, iteration)
    assert_equal_tensors(join(parts), expected.weights_after)


def test_what_is_counted_are_the_experts_that_a_token_passes() -> None:
    """prime-rl 778 ("MFU is based on the total parameters, not the active"), maxtext 678 and 4017, Megatron-DeepSpeed 398. In
    billions, as published (Jiang et al. 2024, section 1; DeepSeek-V3, section 4.2)."""
    plain: dict[str, Any] = {"disable_bias_linear": True, "swiglu": True, "untie_embeddings_and_output_weights": True}
    plain |= {"normalization": "RMSNorm", "position_embedding_type": "rope", "seq_length": 4096}
    mixtral = ModelConfig(
        **plain, **_sizes(32, 4096, 32, 14336), group_query_attention=True, num_query_groups=8, num_experts=8, moe_router_topk=2
    )
    deepseek = ModelConfig(
        **plain,
        **_sizes(61, 7168, 128, 18432),
        multi_latent_attention=True,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_head_dim=128,
        v_head_dim=128,
        qk_pos_emb_head_dim=64,
        num_experts=256,
        moe_router_topk=8,
        moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048,
        moe_layer_freq="([0]*3+[1]*58)",
    )
    for model, vocab_size, total, active in ((mixtral, 32000, 46.7, 12.9), (deepseek, 129280, 671, 37)):
        assert count_parameters(model, vocab_size) == pytest.approx(total * 1e9, rel=2e-3)
        assert count_active_parameters(model, vocab_size) == pytest.approx(active * 1e9, rel=2e-2)
        products = count_flops_per_token(model, vocab_size) - 3 * sum(count_attention_flops(model))
        assert products == pytest.approx(6 * (active * 1e9 - vocab_size * model.hidden_size), rel=2e-2)


def _sizes(layers: int, hidden: int, heads: int, ffn: int) -> dict[str, Any]:
    return {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "ffn_hidden_size": ffn}
