"""The proof of stop and go: five steps at one layout, a checkpoint, five steps at another layout are ten steps in one process.

In float64, so that a true error cannot hide behind rounding. The normal run takes a subset in which every pair of settings of the
two layouts occurs; --full takes every pair of sizes, with strategies and sequence parallelism drawn for each.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.format.manifest import read_manifest
from megatron.checkpoint.loading.find import read_state
from megatron.checkpoint.loading.load import load_tensors
from megatron.checkpoint.saving.save import save_checkpoint
from megatron.training.checkpointing import global_tensors
from megatron.training.step import TrainStep
from tests.covering import Case, covering
from tests.distributed import run_ranks
from tests.equality import assert_equal_tensors, number_differences
from tests.layout import Layout, Recipe, build_step, context_of, microbatches
from tests.reference.random_inputs import random_batches, random_weights
from tests.reference.shape import gpt2_like
from tests.reference.training import train
from tests.runs import checkpoint, saved_tensors

HALF = 5
KINDS = ("model", "exp_avg", "exp_avg_sq")
DEPTHS: dict[str, dict[str, Any]] = {
    "one stage": {},
    "two stages": {"pp": 2},
    "two chunks each": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "uneven": {"pp": 2, "first_stage_layers": 3},
}
SIZES: dict[str, tuple[Any, ...]] = {"tp": (1, 2, 4), "depth": tuple(DEPTHS), "dp": (1, 2)}
REST: dict[str, tuple[Any, ...]] = {
    "sharding": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "sequence_parallel": (False, True),
}
MOST_RANKS, MOST_RANKS_IN_FULL = 4, 8


@functools.cache
def recipe() -> Recipe:
    # The vocabulary divides by nothing and its table is tied, so with two stages it is on both.
    shape = gpt2_like(num_layers=4, hidden=16, ffn=24, heads=4, kv_heads=4, head_size=4, vocab=61, seq=8, tied=True)
    return Recipe(shape, random_weights(shape, seed=1), random_batches(shape, 2 * HALF, 4, 1, seed=2))


def layout_of(case: Case, end: str) -> Layout:
    """The layout of one end of a case."""
    own: dict[str, Any] = {name.removesuffix(end): value for name, value in case.items() if name.endswith(end)}
    return Layout(micro_batch_size=1, bucket_size=1500, **DEPTHS[own.pop("depth")], **own)


def makes_sense(case: Case, most_ranks: int = MOST_RANKS) -> bool:
    """Sequence parallelism is of tensor ranks; and a test may not take too many processes."""
    ends = [layout_of(case, end) for end in ("_a", "_b")]
    return all((end.tp > 1 or not end.sequence_parallel) and end.world_size <= most_ranks for end in ends)


def cases(full: bool) -> list[tuple[Layout, Layout]]:
    """Pairs of layouts."""
    axes = {f"{name}{end}": values for end in ("_a", "_b") for name, values in (SIZES | REST).items()}
    found = covering(axes, seed=6, valid=makes_sense)
    if full:
        draw = random.Random(7)
        for sizes in itertools.product(*SIZES.values(), *SIZES.values()):
            case = dict(zip([f"{name}{end}" for end in ("_a", "_b") for name in SIZES], sizes, strict=True))
            case |= {f"{name}{end}": draw.choice(values) for end in ("_a", "_b") for name, values in REST.items()}
            case |= {f"sequence_parallel{end}": case[f"sequence_parallel{end}"] and case[f"tp{end}"] > 1 for end in ("_a", "_b")}
            found += [case] if makes_sense(case, MOST_RANKS_IN_FULL) else []
    return [(layout_of(case, "_a"), layout_of(case, "_b")) for case in found]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = bool(metafunc.config.getoption("--full"))
    if "ends" in metafunc.fixturenames:
        metafunc.parametrize("ends", cases(full), ids=lambda ends: " to ".join(map(_name, ends)))
    if "precision" in metafunc.fixturenames:
        # Each once on either side, never on both.
        chosen = list(itertools.product(MAINS, MAINS)) if full else list(zip(MAINS, [*MAINS][1:] + [*MAINS][:1], strict=True))
        metafunc.parametrize("precision", chosen, ids=lambda pair: " to ".join(str(d).removeprefix("torch.") for d in pair))


def _name(layout: Layout) -> str:
    chunks = (
        f"x{layout.virtual_stages}"
        if layout.virtual_stages
        else f" ({layout.first_stage_layers})" * bool(layout.first_stage_layers)
    )
    sequence = " sp" * layout.sequence_parallel
    return f"tp{layout.tp}{sequence} pp{layout.pp}{chunks} dp{layout.dp} {layout.sharding}"


def half(rank: int, layout: Layout, done: int, source: Path | None, folder: Path) -> list[float]:
    """Five steps after `done`, from a checkpoint if there is one. Saves what was loaded, and what came out. Returns the losses."""
    context, r = context_of(layout, rank), recipe()
    # Other weights than those of the checkpoint, so that what is not filled shows.
    step = build_step(context, r if source is None else replace(r, weights={k: w + 1 for k, w in r.weights.items()}), layout)
    if source is not None:
        load(step, source)
        save(step, folder / "loaded", done)
    losses = []
    for at in range(done, done + HALF):
        inputs = microbatches(r.batches[at], context, 1)
        losses.append(step.run(inputs, iteration=at + 1, learning_rate=r.lr, weight_decay=r.weight_decay).loss)
    save(step, folder, done + HALF)
    if dist.is_initialized():
        dist.barrier()
    return losses


def save(step: TrainStep, folder: Path, iteration: int) -> None:
    """As a run does."""
    step.finish_publishing()
    tensors = global_tensors(step.optimizer, step.context)
    save_checkpoint(folder, iteration, tensors, {}, {"optimizer_updates": step.optimizer.num_updates})


def load(step: TrainStep, path: Path) -> None:
    """As a run does."""
    load_tensors(path, global_tensors(step.optimizer, step.context))
    step.optimizer.publish()
    step.optimizer.set_num_updates(read_state(path)["optimizer_updates"])
    step.finish_publishing()


class FirstHalves:
    """Checkpoints after five steps, one for each layout that was asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Layout, Path] = {}

    def at(self, layout: Layout) -> Path:
        if layout not in self._made:
            place = self._folder / str(len(self._made))
            run_ranks(layout.world_size, half, layout, 0, None, place)
            self._made[layout] = checkpoint(place, HALF)
        return self._made[layout]


@pytest.fixture(scope="module")
def first_halves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FirstHalves]:
    yield FirstHalves(tmp_path_factory.mktemp("halves"))


@pytest.fixture(scope="module")
def one_process(first_halves: FirstHalves, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Ten steps without a stop, at one rank: losses as the reference has them, and the last checkpoint."""
    folder, r = tmp_path_factory.mktemp("whole"), recipe()

    def ten(rank: int) -> list[float]:
        step = build_step(context_of(Layout(), rank), r, Layout(micro_batch_size=1, bucket_size=1500))
        losses = []
        for at, batch in enumerate(r.batches):
            inputs = microbatches(batch, step.context, 1)
            losses.append(step.run(inputs, iteration=at + 1, learning_rate=r.lr, weight_decay=r.weight_decay).loss)
        save(step, folder, 2 * HALF)
        return losses

    (losses,) = run_ranks(1, ten)
    expected = train(r.shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)
    assert not number_differences("losses", losses, expected.losses, 1e-10)
    assert_equal_tensors(saved_tensors(folder, 2 * HALF), expected.weights_after, what="weights")
    return losses, folder


def test_five_steps_there_and_five_here_are_ten_in_one_process(
    ends: tuple[Layout, Layout], first_halves: FirstHalves, one_process: tuple[list[float], Path], tmp_path: Path
) -> None:
    """Losses, weights and moments. And what was loaded is what was saved, bit for bit: its content digest knows no layout."""
    there, here = ends
    source = first_halves.at(there)
    ranks = run_ranks(here.world_size, half, here, HALF, source, tmp_path)
    losses, folder = one_process
    assert all(rank == ranks[0] for rank in ranks)
    assert not number_differences("losses", ranks[0], losses[HALF:], 1e-10)
    digest = read_manifest(source).content_digest
    assert digest is not None and read_manifest(checkpoint(tmp_path / "loaded", HALF)).content_digest == digest
    for kind in KINDS:
        found, wanted = (saved_tensors(place, 2 * HALF, kind) for place in (tmp_path, folder))
        assert_equal_tensors(found, wanted, what=kind)


MAINS = {torch.float64: torch.float64, torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""What is trained, by the dtype of the model's parameters."""


def test_the_precision_of_the_parameters_may_change(precision: tuple[torch.dtype, torch.dtype], tmp_path: Path) -> None:
    """And the layout with it. Mains and moments are rounded to their dtype here, or taken exactly where that has room."""
    there, here = precision
    saved = Layout(tp=2, sequence_parallel=True, sharding="optim", micro_batch_size=1, bucket_size=1500, dtype=there, dp=2)
    loaded = Layout(pp=2, sharding="optim_grads", micro_batch_size=1, bucket_size=1500, dtype=here, dp=2)
    run_ranks(saved.world_size, half, saved, 0, None, tmp_path / "there")
    run_ranks(loaded.world_size, half, loaded, HALF, checkpoint(tmp_path / "there", HALF), tmp_path / "here")
    for kind in KINDS:
        before, after = saved_tensors(tmp_path / "there", HALF, kind), saved_tensors(tmp_path / "here" / "loaded", HALF, kind)
        assert {tensor.dtype for tensor in before.values()} == {MAINS[there]}
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor.to(MAINS[here])) and tensor.any(), f"{kind}.{name}"
