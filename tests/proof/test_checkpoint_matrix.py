"""The proof of stop and go: steps at one layout, a checkpoint, steps at another layout are as many steps in one process.

In float64, so that a true error cannot hide behind rounding. A run goes from layout to layout, a step at each. The normal run
takes layouts among which every pair of settings occurs; --full also goes from every combination of sizes to every other one, with
strategies and sequence parallelism drawn for each.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.training.step import TrainStep
from megatron_lab.verification.local_ranks import run_ranks
from megatron_lab.verification.reference.shape import build_random_weights
from tests.support.checkpoint_worlds import read_manifest
from tests.support.covering import Case, covering
from tests.support.equality import assert_equal_tensors, number_differences
from tests.support.layout import Layout, Recipe, build_step, context_of, microbatches
from tests.support.reference_runs import gpt2_like, random_batches, train
from tests.support.runs import checkpoint, saved_tensors
from tests.support.step_checkpoints import load, save
from tests.support.warm import run_warm_ranks

STEPS, HOPS = 1, 4
KINDS = ("model", "ema", "exp_avg", "exp_avg_sq")
DEPTHS: dict[str, dict[str, Any]] = {
    "one stage": {},
    "two stages": {"pp": 2},
    "two chunks each": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "uneven": {"pp": 2, "first_stage_layers": 3},
}
SIZES: dict[str, tuple[Any, ...]] = {"tp": (1, 2, 4), "depth": tuple(DEPTHS), "dp": (1, 2)}
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ON_HOST = "optim_grads_params on the host"
REST: dict[str, tuple[Any, ...]] = {
    "sharding": (*STRATEGIES, ON_HOST),
    "sequence_parallel": (False, True),
    "cp": (1, 2),
}
MOST_RANKS, MOST_RANKS_IN_FULL = 4, 8


@functools.cache
def recipe() -> Recipe:
    # The vocabulary divides by nothing and its table is tied, so with two stages it is on both. Nor do 9 positions divide.
    sizes = {"num_layers": 4, "hidden": 16, "ffn": 24, "heads": 4, "kv_heads": 4, "head_size": 4, "vocab": 61, "seq": 8}
    shape = gpt2_like(**sizes, num_positions=9, tied=True, norm="RMSNorm")
    return Recipe(shape, build_random_weights(shape, seed=1), random_batches(shape, STEPS * (HOPS + 1), 4, 1, seed=2), ema=0.7)


def layout_of(case: Case) -> Layout:
    """The layout that a case describes."""
    own = dict(case)
    if own["sharding"] == ON_HOST:
        own |= {"sharding": "optim_grads_params", "params_cpu": True, "reduce_once": True}
    # Of four sequences each rank has two microbatches.
    return Layout(micro_batch_size=2 // own["dp"], bucket_size=1500, **DEPTHS[own.pop("depth")], **own)


def makes_sense(case: Case, most_ranks: int = MOST_RANKS) -> bool:
    """Sequence parallelism is of tensor ranks; and a test may not take too many processes."""
    return (case["tp"] > 1 or not case["sequence_parallel"]) and layout_of(case).world_size <= most_ranks


def walks(full: bool) -> list[tuple[Layout, ...]]:
    """Layouts one after another."""
    found = [layout_of(case) for case in covering(SIZES | REST, seed=44, valid=makes_sense)]
    # Each walk begins where the one before has ended.
    taken = [tuple(found[start : start + HOPS + 1]) for start in range(0, len(found) - 1, HOPS)]
    if full:
        draw = random.Random(7)
        for sizes in itertools.product(itertools.product(*SIZES.values()), repeat=2):
            pair = [dict(zip(SIZES, size, strict=True)) | {n: draw.choice(values) for n, values in REST.items()} for size in sizes]
            for case in pair:
                case["sequence_parallel"] &= case["tp"] > 1
            if all(makes_sense(case, MOST_RANKS_IN_FULL) for case in pair):
                taken.append((layout_of(pair[0]), layout_of(pair[1])))
    return taken


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = bool(metafunc.config.getoption("--full"))
    if "walk" in metafunc.fixturenames:
        metafunc.parametrize("walk", walks(full), ids=lambda walk: ", ".join(map(_name, walk)))
    if "precision" in metafunc.fixturenames:
        # Down, where mains are rounded, and up, where they are taken exactly.
        few = [(torch.float64, torch.bfloat16), (torch.float16, torch.float64)]
        chosen = list(itertools.product(MAINS, MAINS)) if full else few
        metafunc.parametrize("precision", chosen, ids=lambda pair: " to ".join(str(d).removeprefix("torch.") for d in pair))


def _name(layout: Layout) -> str:
    chunks = (
        f"x{layout.virtual_stages}"
        if layout.virtual_stages
        else f" ({layout.first_stage_layers})" * bool(layout.first_stage_layers)
    )
    sequence = " sp" * bool(layout.sequence_parallel)
    context = f" cp{layout.cp}" * (layout.cp > 1)
    return f"tp{layout.tp}{sequence}{context} pp{layout.pp}{chunks} dp{layout.dp} {layout.sharding}{' host' * layout.params_cpu}"


def stretch(rank: int, layout: Layout, done: int, steps: int, source: Path | None, folder: Path, again: bool) -> list[float]:
    """Steps after `done`, from the checkpoint in `source` if given. Saves what came out, and `again` what was loaded; returns the
    losses."""
    context, r = context_of(layout, rank), recipe()
    # Other weights than those of the checkpoint, so that what is not filled shows.
    step = build_step(context, r if source is None else replace(r, weights={k: w + 1 for k, w in r.weights.items()}), layout)
    if source is not None:
        load(step, source, done)
        if again:
            save(step, folder / "loaded", done)
    losses = train_on(step, layout, done, steps)
    save(step, folder, done + steps)
    if dist.is_initialized():
        dist.barrier()
    return losses


def train_on(step: TrainStep, layout: Layout, done: int, steps: int) -> list[float]:
    """The steps after `done`; returns their losses."""
    r, losses = recipe(), []
    for at in range(done, done + steps):
        inputs = microbatches(r.batches[at], step.context, layout.micro_batch_size)
        losses.append(step.run(inputs, iteration=at + 1, learning_rate=r.lr, weight_decay=r.weight_decay).loss)
    return losses


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[int, dict[str, torch.Tensor]]]:
    """All steps without a stop, at one rank: losses as the reference has them, and what a checkpoint holds after each stretch."""
    folder, r = tmp_path_factory.mktemp("whole"), recipe()

    def whole(rank: int) -> list[float]:
        layout = Layout(micro_batch_size=1, bucket_size=1500)
        step = build_step(context_of(layout, rank), r, layout)
        losses = []
        for at in range(0, len(r.batches), STEPS):
            losses += train_on(step, layout, at, STEPS)
            save(step, folder, at + STEPS)
        return losses

    (losses,) = run_ranks(1, whole)
    expected = train(r.shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip, ema=r.ema)
    assert not number_differences("losses", losses, expected.losses, 1e-10)
    assert_equal_tensors(saved_tensors(folder, len(r.batches)), expected.weights_after, what="weights")
    assert_equal_tensors(saved_tensors(folder, len(r.batches), "ema"), expected.averages_after, what="averages")
    return losses, {done: saved_tensors(folder, done, "") for done in range(STEPS, len(r.batches) + 1, STEPS)}


def test_steps_there_and_steps_here_are_those_of_one_process(
    walk: tuple[Layout, ...], one_process: tuple[list[float], dict[int, dict[str, torch.Tensor]]], tmp_path: Path, full: bool
) -> None:
    """Losses, weights and moments. And what was loaded is what was saved, bit for bit: its content digest knows no layout.

    The normal run looks at bits at each walk's second stop.
    """
    losses, whole = one_process
    for hop, layout in enumerate(walk):
        done = hop * STEPS
        source = tmp_path if hop else None
        again = full or hop == 1
        ranks = run_warm_ranks(layout.world_size, stretch, layout, done, STEPS, source, tmp_path, again)
        assert all(rank == ranks[0] for rank in ranks)
        assert not number_differences("losses", ranks[0], losses[done : done + STEPS], 1e-10)
        if again and source is not None:
            digest = read_manifest(checkpoint(source, done)).content_digest
            assert digest is not None and read_manifest(checkpoint(tmp_path / "loaded", done)).content_digest == digest
        found = saved_tensors(tmp_path, done + STEPS, "")
        assert {name.partition(".")[0] for name in found} == {*KINDS}
        assert_equal_tensors(found, whole[done + STEPS], what=f"state after {_name(layout)}")


MAINS = {torch.float64: torch.float64, torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""What is trained, by the dtype of the model's parameters."""


def test_walks_go_from_each_strategy_to_each_other() -> None:
    hops = {(there.sharding, here.sharding) for walk in walks(False) for there, here in itertools.pairwise(walk)}
    assert hops >= {*itertools.permutations(STRATEGIES, 2)}


def test_the_precision_of_the_parameters_may_change(precision: tuple[torch.dtype, torch.dtype], tmp_path: Path) -> None:
    """And the layout with it. Mains and moments are rounded to their dtype here, or taken exactly where that has room."""
    there, here = precision
    saved = Layout(tp=2, sequence_parallel=True, sharding="optim", micro_batch_size=1, bucket_size=1500, dtype=there, dp=2)
    loaded = Layout(pp=2, sharding="optim_grads", micro_batch_size=1, bucket_size=1500, dtype=here, dp=2)
    run_warm_ranks(saved.world_size, stretch, saved, 0, 1, None, tmp_path / "there", False)
    run_warm_ranks(loaded.world_size, stretch, loaded, 1, 1, tmp_path / "there", tmp_path / "here", True)
    before, after = saved_tensors(tmp_path / "there", 1, ""), saved_tensors(tmp_path / "here" / "loaded", 1, "")
    assert {name.partition(".")[0] for name in before} == {*KINDS}
    assert {tensor.dtype for tensor in before.values()} == {MAINS[there]}
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor.to(MAINS[here])) and tensor.any(), name
