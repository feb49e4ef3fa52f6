"""Random losses: runs under the supervisor at random layouts, of which ranks or nodes are killed at random moments, replaced, left
out and taken back. The weights at the end must be those of a run that nobody disturbed.

    python -m tests.trials.kills --seeds 0:500
    python -m tests.trials.kills --time 11

The first reports every failure with its seed. The second kills ranks of a run of eight, and tells how long it took to come back,
part by part, in seconds from when the supervisor saw it.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import signal
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.support.equality import tensor_differences
from tests.support.runs import arguments, run, saved_tensors
from tests.support.supervised import Job, Node, check_samples

SETTINGS: dict[str, Any] = {
    "save_interval": 3,
    "fp64": True,
    "micro_batch_size": 1,
    "lr_decay_style": "constant",
    "hang_warn_s": 30,
    "lr": 1e-3,
    "keep_last": 2,
}
TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2}
STAGES: dict[str, Any] = {"pipeline_model_parallel_size": 2}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, TENSOR),
    (2, STAGES),
    (2, {"context_parallel_size": 2}),
    (4, {**TENSOR, **STAGES}),
    (4, {**TENSOR, "use_distributed_optimizer": True}),
    (4, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    (4, {**STAGES, "data_parallel_sharding_strategy": "optim_grads", "async_save": True}),
]
"""Ranks, and the settings that divide the work among them."""


def lose_some(seed: int, folder: Path) -> tuple[int, list[float]]:
    """A run with random losses; returns how many kills and stops it went through, and the seconds that each return took.

    Raises:
        AssertionError: it did not come back, or its result is another.
    """
    draw = random.Random(seed)
    ranks, flags = draw.choice(LAYOUTS)
    with Job(folder) as job:
        disturb = draw.choice((_ranks_are_replaced, _a_place_is_left_out, _nodes_are_lost))
        node = disturb(job, draw, ranks, flags)
        node.tell(signal.SIGTERM)
        for other in job.nodes:
            if other is not job.store:
                assert other.ended() in (85, -signal.SIGKILL), f"{other.ended()}\n{other.said()[-4000:]}"
        job.assert_nothing_left(40.0)
        _check(job, ranks, flags, same_layout=disturb is _ranks_are_replaced)
        said = "".join(node.said() for node in job.nodes)
        return sum(node.signals for node in job.nodes), [float(took) for took in re.findall(r"back after ([\d.]+) s", said)]


def _ranks_are_replaced(job: Job, draw: random.Random, ranks: int, flags: dict[str, Any]) -> Node:
    """One to three ranks are killed, wherever they are, also while they start."""
    node = job.node("--nproc-per-node", str(ranks), "--max-restarts", "9", **SETTINGS, **flags, train_iters=100_000)
    node.wait_for(lambda: job.saved() >= 3)
    for _ in range(draw.randint(1, 3)):
        time.sleep(draw.uniform(0, 1.5))
        with contextlib.suppress(ProcessLookupError):
            node.kill_rank(draw.randrange(ranks))
    return _on_its_feet(job, node)


def _a_place_is_left_out(job: Job, draw: random.Random, ranks: int, flags: dict[str, Any]) -> Node:
    """A rank is killed again before it makes a step, so the run goes on with fewer; the next kill brings the place back."""
    limits = ("--nproc-per-node", str(ranks), "--elastic", f"1:{ranks}", "--max-restarts", "9")
    node = job.node(*limits, **SETTINGS, **flags, train_iters=100_000)
    node.wait_for(lambda: job.saved() >= 3)
    time.sleep(draw.uniform(0, 0.5))
    place = draw.randrange(ranks)
    node.kill_rank(place, node.kill_rank(place))
    node.wait_for(f"slot {place} is excluded")
    node.wait_for("back after")
    if draw.random() < 0.7:
        time.sleep(draw.uniform(0, 0.5))
        node.kill_rank(0)
    return _on_its_feet(job, node)


def _nodes_are_lost(job: Job, draw: random.Random, ranks: int, flags: dict[str, Any]) -> Node:
    """Two nodes of half the ranks each, with a store apart; one is killed, and a spare takes its place, or one that comes later."""
    job.serve()
    own = ("--nproc-per-node", str(ranks // 2), "--nnodes", "1:2", *job.meet, "--lost-after-s", "3", "--max-restarts", "9")
    settings = {**SETTINGS, **flags, "train_iters": 100_000}
    nodes = [job.node(*own, "--join-at-once", **settings) for _ in range(2)]
    nodes[0].wait_for(lambda: job.saved() >= 3)
    if draw.random() < 0.4:
        node = draw.choice(nodes)
        node.kill_rank(draw.choice(sorted(node.ranks())))
        _on_its_feet(job, nodes[0])
    spare = draw.random() < 0.5
    if spare:
        nodes.append(job.node(*own, "--join-at-once", **settings))
        time.sleep(1.0)
    time.sleep(draw.uniform(0, 1))
    lost = nodes.pop(draw.randrange(2))
    lost.tell(signal.SIGKILL)
    nodes[0].wait_for("is lost")
    if not spare and draw.random() < 0.7:
        nodes.append(job.node(*own, "--join-at-once", **settings))
        nodes[0].wait_for("joins")
    return _on_its_feet(job, nodes[0])


def _on_its_feet(job: Job, node: Node) -> Node:
    """Once two newer checkpoints are there, and all ranks run: a writer may finish one of ranks that are no more."""
    until = time.monotonic() + 1.0
    node.wait_for(lambda: time.monotonic() > until)
    for _ in range(2):
        last = job.saved()
        node.wait_for(lambda last=last: job.saved() > last)  # type: ignore[misc]
    return node


def _check(job: Job, ranks: int, flags: dict[str, Any], *, same_layout: bool) -> None:
    last, whole = job.saved(), job.folder / "whole"
    run(
        arguments(**{**SETTINGS, **flags, "save_interval": None}, train_iters=last, save=whole, log_interval=last), ranks, gloo=True
    )
    in_flight = 2 if flags.get("async_save") else 1  # a save in the background may be cut off, up to the next one
    check_samples(job.folder / "metrics", 8, last, in_flight * SETTINGS["save_interval"])
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        found, wanted = saved_tensors(job.save, last, kind), saved_tensors(whole, last, kind)
        if same_layout:
            assert all(bool((found[name] == wanted[name]).all()) for name in wanted), f"{kind} differs"
        assert not (lines := tensor_differences(kind, found, wanted, 1e-10)), "\n".join(lines)


def time_restarts(count: int, folder: Path) -> dict[str, float]:
    """Medians over so many losses of a rank of eight."""
    draw = random.Random(1)
    with Job(folder) as job:
        flags = {**TENSOR, **STAGES, "save_interval": 5, "keep_last": 2, "hang_warn_s": 30, "train_iters": 100_000}
        node = job.node("--nproc-per-node", "8", **flags)
        for number in range(1, count + 1):
            last = job.saved()
            node.wait_for(lambda last=last: job.saved() > last)  # type: ignore[misc]
            time.sleep(draw.uniform(0, 1))
            node.kill_rank(draw.randrange(8))
            node.wait_for(lambda number=number: node.said().count("back after") == number)  # type: ignore[misc]
        parts = re.findall(r"(others ended|met|forked|loaded|first step) after ([\d.]+)", node.said())
    names = dict.fromkeys(name for name, _ in parts)
    return {name: statistics.median(float(took) for other, took in parts if other == name) for name in names}


def main() -> None:
    """Run a range of seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", default="0:500", metavar="FROM:TO")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further run after this time")
    parser.add_argument("--time", type=int, metavar="LOSSES", help="only measure")
    given = parser.parse_args()
    torch.set_num_threads(1)  # the ranks are forked from here
    if given.time:
        with tempfile.TemporaryDirectory(prefix="kills-") as name:
            print(time_restarts(given.time, Path(name)))
        return
    first, last = map(int, given.seeds.split(":"))
    until = time.monotonic() + 60 * given.minutes
    took: list[float] = []
    signals = 0
    failed: list[int] = []
    for done, seed in enumerate(range(first, last), start=1):
        if time.monotonic() > until:
            break
        with tempfile.TemporaryDirectory(prefix="kills-") as name:
            try:
                sent, found = lose_some(seed, Path(name))
            except Exception:  # noqa: BLE001 - reported with its seed
                failed.append(seed)
                print(f"seed {seed} failed\n{traceback.format_exc()}", flush=True)
            else:
                took += found
                signals += sent
        print(f"seed {seed}: {done - len(failed)} of {done} runs are right; {signals} kills and stops", flush=True)
    if took:
        print(f"back after {statistics.median(took):.1f} s (median of {len(took)}; at most {max(took):.1f} s); failed: {failed}")


if __name__ == "__main__":
    main()
