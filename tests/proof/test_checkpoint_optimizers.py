"""Stop and go with states that lie over rows, columns and blocks: any layout loads what any other has saved, exactly.

In float64. A run goes from layout to layout, whose slices cut matrices in other places; and resumes at its own bit for bit.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.config.training import OptimizerConfig
from megatron.parallel.context import ParallelContext
from megatron.training.step import TrainStep
from megatron_lab.verification.reference.shape import build_random_weights
from megatron_lab.verification.reference_run import build_rule_options
from tests.support.checkpoint_worlds import read_manifest
from tests.support.covering import full_but
from tests.support.equality import assert_equal_tensors, number_differences
from tests.support.layout import Layout, Recipe, build_step, context_of, microbatches
from tests.support.reference_runs import ReferenceRun, deepseek_like, llama_like, random_batches, train
from tests.support.runs import checkpoint, saved_tensors
from tests.support.step_checkpoints import load, save
from tests.support.warm import run_warm_ranks

RULES: dict[str, dict[str, Any]] = {
    "adafactor": {"adafactor_beta1": 0.9, "adafactor_relative_step": True},
    "adam8bit": {"adam_8bit_block_size": 5},
    "muon": {"muon_use_nesterov": True, "muon_split_heads": True},
}
SHAPES = {
    "adafactor": {"exp_avg_sq_row": [2, 24], "exp_avg_sq_col": [2, 16], "exp_avg": [2, 24, 16]},
    "adam8bit": {
        "exp_avg_code": [2, 24, 16],
        "exp_avg_scale": [2, 24, 4],
        "exp_avg_sq_code": [2, 24, 16],
        "exp_avg_sq_scale": [2, 24, 4],
    },
    "muon": {"momentum_buffer": [2, 24, 16]},
}
"""The states of the gated MLP's first weight, [2, 24, 16]."""
STEPS = 1
WALK = (
    Layout(tp=2, dp=2, sharding="optim", sequence_parallel=True),
    Layout(dp=3, sharding="optim_grads"),
    Layout(pp=2, dp=2, sharding="optim_grads_params"),
    Layout(tp=4, sharding="no_shard", offload=0.5),
    Layout(pp=2, dp=2, sharding="optim", bucket_size=400),
)


@functools.cache
def recipe(rule: str) -> Recipe:
    like = (
        deepseek_like if rule == "adafactor" else llama_like
    )  # matrices that are whole on tensor ranks, beside those that are cut
    shape = like(num_layers=2, hidden=16, ffn=24, heads=4, kv_heads=4, head_size=4, vocab=61, seq=8, tied=True)
    batches = random_batches(shape, STEPS * len(WALK), 6, 1, seed=2)
    return Recipe(shape, build_random_weights(shape, seed=1), batches, optimizer=rule, update=RULES[rule])


@functools.cache
def reference(rule: str, steps: int) -> ReferenceRun:
    r, numbers = recipe(rule), build_rule_options(OptimizerConfig(**RULES[rule]), (1, 4))
    batches = r.batches[:steps]
    return train(r.shape, r.weights, batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip, optimizer=rule, numbers=numbers)


def stretch(
    rank: int, rule: str, layout: Layout, done: int, steps: int, source: Path | None, folder: Path, again: bool
) -> list[float]:
    """Take steps after `done`, from the checkpoint in `source` if given. Save the state after every step, and `again` what was
    loaded; return the losses."""
    context = context_of(layout, rank)
    step = step_of(context, rule, layout, source, done)
    if again:
        save(step, folder / "loaded", done)
    losses = [step_and_save(step, rule, layout, at, folder) for at in range(done, done + steps)]
    if dist.is_initialized():
        dist.barrier()
    return losses


def whole_and_resumed(rank: int, rule: str, layout: Layout, folder: Path) -> None:
    """Take two steps, and the second once more from the checkpoint of the first. Save the state after every step."""
    context = context_of(layout, rank)
    step = step_of(context, rule, layout, None, 0)
    for at in range(2):
        step_and_save(step, rule, layout, at, folder / "whole")
    dist.barrier()
    step_and_save(step_of(context, rule, layout, folder / "whole", 1), rule, layout, 1, folder / "resumed")
    dist.barrier()


def step_of(context: ParallelContext, rule: str, layout: Layout, source: Path | None, done: int) -> TrainStep:
    """The training step, from the checkpoint in `source` after `done` steps if given."""
    r = recipe(rule)
    # Other weights than those of the checkpoint, so that what is not filled shows.
    step = build_step(context, r if source is None else replace(r, weights={k: w + 1 for k, w in r.weights.items()}), layout)
    if source is not None:
        load(step, source, done)
    return step


def step_and_save(step: TrainStep, rule: str, layout: Layout, at: int, folder: Path) -> float:
    """Take a step, and save the state after it; return the loss."""
    r = recipe(rule)
    inputs = microbatches(r.batches[at], step.context, layout.micro_batch_size)
    loss = step.run(inputs, iteration=at + 1, learning_rate=r.lr, weight_decay=r.weight_decay).loss
    save(step, folder, at + 1)
    return loss


def content(folder: Path, iteration: int) -> str:
    found = read_manifest(checkpoint(folder, iteration)).content_digest
    assert found is not None
    return found


@pytest.mark.parametrize("rule", RULES)
def test_a_run_goes_on_at_any_other_layout(rule: str, tmp_path: Path, full: bool) -> None:
    """As one plain process trains. What is loaded is what was saved, bit for bit, and each state has its own shape.

    The normal run makes fewer stops, and looks at bits at the third, where parameters are sharded.
    """
    walk = WALK if full else WALK[:4]
    expected = reference(rule, len(walk) * STEPS)
    for hop, layout in enumerate(replace(one, micro_batch_size=1 if one.dp > 1 else 3) for one in walk):  # two or three of them
        done = hop * STEPS
        source = tmp_path if hop else None
        again = hop > 0 if full else hop == 2
        ranks = run_warm_ranks(layout.world_size, stretch, rule, layout, done, STEPS, source, tmp_path, again)
        assert not number_differences("losses", ranks[0], expected.losses[done : done + STEPS], 1e-10)
        if again:
            assert content(tmp_path, done) == content(tmp_path / "loaded", done)
        stored = read_manifest(checkpoint(tmp_path, done + STEPS)).tensors
        found = {kind: list(stored[f"{kind}.layers.0.mlp.up.weight"].shape) for kind in SHAPES[rule]}
        assert found == SHAPES[rule] and stored["model.layers.0.mlp.up.weight"].shape == (2, 24, 16)
        codes = {name: tensor.dtype for name, tensor in stored.items() if "_code." in name}
        assert set(codes.values()) == ({"uint8"} if rule == "adam8bit" else set())
    assert_equal_tensors(saved_tensors(tmp_path, len(walk) * STEPS), expected.weights_after, what="weights")


RESUMES = dict(zip(("tp2-dp2-optim", "dp3-optim_grads", "pp2-dp2-fsdp"), WALK, strict=False))
EACH = [(rule, where) for rule in RULES for where in RESUMES]


@pytest.mark.parametrize(
    ("rule", "where"),
    full_but(
        [("adafactor", "tp2-dp2-optim"), ("adam8bit", "dp3-optim_grads"), ("muon", "pp2-dp2-fsdp")],
        EACH,
        "each rule and each strategy at another pair of them",
    ),
)
def test_a_resume_at_the_same_layout_changes_no_bit(rule: str, where: str, tmp_path: Path) -> None:
    """In float32, where every other order of a sum would show."""
    layout = replace(RESUMES[where], micro_batch_size=1, dtype=torch.float32)
    run_warm_ranks(layout.world_size, whole_and_resumed, rule, layout, tmp_path)
    assert content(tmp_path / "whole", 2) == content(tmp_path / "resumed", 2) != content(tmp_path / "whole", 1)
