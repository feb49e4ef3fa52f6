"""Stop and go under every sharding strategy: bit for bit at one layout, and from any strategy and layout to any other."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_lab.verification.reference.shape import build_random_weights
from tests.support.covering import full_but
from tests.support.equality import assert_equal_tensors, number_differences
from tests.support.layout import Layout, Recipe, build_step, context_of, microbatches
from tests.support.reference_runs import gpt2_like, random_batches, train
from tests.support.runs import arguments, digest, run, saved_tensors, timeless
from tests.support.step_checkpoints import load, save
from tests.support.warm import run_warm_ranks

STEPS, STOP = 2, 1
BASE: dict[str, Any] = {
    "bf16": True,
    "train_iters": STEPS,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "lr_decay_style": "cosine",
    "eval_iters": 1,
    "eval_interval": 1,
    "overlap_grad_reduce": True,
    "ddp_bucket_size": 5000,
    "ema_decay": 0.8,
}
SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
STAGED = {"num_layers": 4, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"}
UNTIED = {"untie_embeddings_and_output_weights": True}
HOST = {"fsdp_params_cpu": True, "fsdp_reduce_once": True}
OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}

RUNS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "optim": (2, "optim", {"overlap_param_gather": True}),
    "optim, three ranks": (3, "optim", {"global_batch_size": 6}),
    "optim, offload": (2, "optim", OFFLOAD),
    "optim_grads": (4, "optim_grads", {**STAGED, "overlap_param_gather": True}),
    "optim_grads, offload": (2, "optim_grads", OFFLOAD),
    "optim_grads_params": (4, "optim_grads_params", {**SPLIT, **UNTIED}),
    "optim_grads_params, never": (2, "optim_grads_params", {"fsdp_reshard_after_forward": "never"}),
    "optim_grads_params, replicas": (4, "optim_grads_params", {"fsdp_shard_size": 2}),
    "optim_grads_params, offload": (2, "optim_grads_params", OFFLOAD),
    "optim_grads_params, host, uneven": (3, "optim_grads_params", {**HOST, "global_batch_size": 6}),
}


QUICK = ("optim, offload", "optim_grads", "optim_grads_params, host, uneven")


@pytest.mark.parametrize(
    "name",
    full_but(
        QUICK, RUNS, "the cases that are kept, and the resumes in test_checkpoint_optimizers.py and test_checkpoint_matrix.py"
    ),
)
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path, name: str) -> None:
    """Weights and moments by the checkpoint's digest, losses, norms and evaluations by the metrics file."""
    world_size, strategy, flags = RUNS[name]
    settings = {**BASE, "num_layers": 2, "data_parallel_sharding_strategy": strategy, **flags}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run(arguments(**settings, save=whole, save_interval=STOP, metrics_file=tmp_path / "whole.jsonl"), world_size)
    run(arguments(**settings, load=whole, ckpt_step=STOP, save=resumed, metrics_file=tmp_path / "resumed.jsonl"), world_size)
    assert timeless(tmp_path / "resumed.jsonl") == [line for line in timeless(tmp_path / "whole.jsonl") if line["iteration"] > STOP]
    assert digest(resumed, STEPS) == digest(whole, STEPS) != digest(whole, STOP)


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
WALK = (0, 1, 0, 2, 0, 3, 1, 2, 1, 3, 2, 3, 0)
"""Through the strategies: from each to each other one."""
PLACES: tuple[dict[str, Any], ...] = (
    {"dp": 4},
    {"tp": 2, "dp": 2, "sequence_parallel": True},
    {"pp": 2, "dp": 2, "schedule": "interleaved", "virtual_stages": 2},
    {"dp": 4, "offload": 0.5},
    {"tp": 2, "pp": 2},
    {"dp": 3},
)
KINDS = ("model", "ema", "exp_avg", "exp_avg_sq")


@functools.cache
def recipe() -> Recipe:
    # Every dimension divides by two, three and four, but for the vocabulary, whose table is tied.
    shape = gpt2_like(num_layers=4, hidden=24, ffn=48, heads=6, kv_heads=6, head_size=4, vocab=61, seq=12, tied=True)
    places = itertools.islice(itertools.cycle(PLACES), len(WALK))
    batches = [random_batches(shape, 1, 3 * place.get("dp", 1), 1, seed=number)[0] for number, place in enumerate(places)]
    return Recipe(shape, build_random_weights(shape, seed=1), batches, ema=0.7)


def move(rank: int, layout: Layout, number: int, folder: Path) -> float:
    """Load what the move before has saved, save it again as it is, make a step, and save. Returns the loss."""
    context, r = context_of(layout, rank), recipe()
    step = build_step(context, r if number == 0 else replace(r, weights={k: w + 1 for k, w in r.weights.items()}), layout)
    if number:
        load(step, folder / "moved", number)
    save(step, folder / "loaded", number)
    inputs = microbatches(r.batches[number], context, 1)
    loss = step.run(inputs, iteration=number + 1, learning_rate=r.lr, weight_decay=r.weight_decay).loss
    save(step, folder / "moved", number + 1)
    dist.barrier()
    return loss


@pytest.mark.full("tests/proof/test_checkpoint_matrix.py, whose walks go from each strategy to each other")
def test_any_strategy_goes_on_from_any_other(tmp_path: Path) -> None:
    """In float64, a step at each of them: as one process trains. What is loaded is what was saved, bit for bit, moments too."""
    assert len(set(itertools.pairwise(WALK))) == 12
    losses = []
    for number, strategy in enumerate(WALK):
        settings: dict[str, Any] = {"sharding": STRATEGIES[strategy], **PLACES[number % len(PLACES)]}
        layout = Layout(micro_batch_size=1, bucket_size=1500, **settings)
        ranks = run_warm_ranks(layout.world_size, move, layout, number, tmp_path)
        assert len(set(ranks)) == 1
        losses.append(ranks[0])
        for kind in KINDS if number else ():
            before, after = saved_tensors(tmp_path / "moved", number, kind), saved_tensors(tmp_path / "loaded", number, kind)
            assert_equal_tensors(after, before, tolerance=0.0, what=f"{kind} of move {number}")
            assert all(tensor.any() for tensor in before.values())
    r = recipe()
    expected = train(r.shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip, ema=r.ema)
    assert not number_differences("losses", losses, expected.losses, 1e-10)
    assert_equal_tensors(saved_tensors(tmp_path / "moved", len(WALK)), expected.weights_after, what="weights")
    assert_equal_tensors(saved_tensors(tmp_path / "moved", len(WALK), "ema"), expected.averages_after, what="averages")
