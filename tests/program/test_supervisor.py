"""Runs under the supervisor that lose ranks and nodes: they go on by themselves, with the same samples, to the same weights."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.indexed_writer import write_dataset
from tests.support.equality import tensor_differences
from tests.support.runs import arguments, digest, run, saved_tensors
from tests.support.supervised import Job, check_samples
from tests.trials.kills import lose_some

STEPS = 24
SETTINGS: dict[str, Any] = {"num_layers": 1, "save_interval": 4, "fp64": True, "micro_batch_size": 1, "global_batch_size": 4}
SETTINGS |= {"lr_decay_style": "constant", "lr": 1e-3}
STEP_S = 0.1
ENDLESS = {**SETTINGS, "train_iters": 100_000}


def assert_same_run(job: Job, whole: Path) -> None:
    """The run, at whatever layouts, is that on two data ranks that nobody disturbed, up to rounding in float64."""
    last = job.saved()
    run(arguments(**SETTINGS, train_iters=last, save=whole, log_interval=last), 2)
    check_samples(job.folder / "metrics", 4, last, SETTINGS["save_interval"])
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        assert not tensor_differences(kind, saved_tensors(job.save, last, kind), saved_tensors(whole, last, kind), 1e-10)


@pytest.mark.full("test_a_broken_place_is_left_out_and_tried_again kills three")
def test_killed_ranks_are_started_again(tmp_path: Path) -> None:
    """At the same layout: bit for bit the run that nobody disturbed."""
    run(arguments(**SETTINGS, train_iters=STEPS, save=tmp_path / "whole"), 2)
    with Job(tmp_path, STEP_S) as job:
        node = job.node("--nproc-per-node", "2", **SETTINGS, train_iters=STEPS)
        for rank, after in ((1, 4), (0, 12)):
            node.wait_for(lambda after=after: job.saved() >= after)  # type: ignore[misc]
            node.kill_rank(rank)
        assert node.ended() == 0, node.said()
        job.assert_nothing_left()
        said = node.said()
        assert said.count("was ended by SIGKILL") == 2 == said.count("supervisor: back after"), said
        assert digest(job.save, STEPS) == digest(tmp_path / "whole", STEPS)
        check_samples(tmp_path / "metrics", 4, STEPS, 4)


def test_a_broken_place_is_left_out_and_tried_again(tmp_path: Path) -> None:
    """Four data ranks; one fails twice without a step, and two go on with the same global batch (three do not divide it). When
    one of them fails, there are four again."""
    with Job(tmp_path, STEP_S) as job:
        node = job.node("--nproc-per-node", "4", "--elastic", "2:4", **ENDLESS)
        node.wait_for(lambda: job.saved() >= 4)
        node.kill_rank(3, node.kill_rank(3))
        node.wait_for("slot 3 is excluded")
        node.wait_for("2 ranks instead of 4: 2 data ranks with 2 microbatches each of the unchanged global batch of 4 samples")
        node.wait_for(lambda: node.said().count("back after") == 1)
        node.kill_rank(0)
        node.wait_for(lambda: node.said().count("back after") == 2)
        node.tell(signal.SIGTERM)
        assert node.ended() == 85, node.said()
        job.assert_nothing_left()
        worlds = [line.split()[0] for line in node.said().splitlines() if " on cpu (gloo)" in line]
        assert (worlds[0], worlds[-2:]) == ("4", ["2", "4"]), node.said()
        assert_same_run(job, tmp_path / "whole")


def test_nodes_are_lost_and_join(tmp_path: Path) -> None:
    """The store is apart. Of two nodes the first is lost, and the other goes on; a third joins at once; then the other leaves."""
    with Job(tmp_path, STEP_S) as job:
        job.serve()
        own = ("--nnodes", "1:2", *job.meet, "--last-call-s", "60", "--join-at-once", "--leave-on-signal")
        nodes = [job.node(*own, **ENDLESS) for _ in range(2)]
        nodes[0].wait_for(lambda: job.saved() >= 4)
        first, second = sorted(nodes, key=lambda node: min(node.ranks()))
        first.tell(signal.SIGKILL)
        second.wait_for("is lost")
        second.wait_for("1 rank instead of 2: 1 data rank with 4 microbatches of the unchanged global batch of 4 samples")
        second.wait_for("back after")
        third = job.node(*own, **ENDLESS, exit_signal="SIGCONT")
        second.wait_for("joins")
        second.wait_for(lambda: second.said().count("back after") == 2)
        assert (set(second.ranks()), set(third.ranks())) == ({0}, {1})
        second.tell(signal.SIGUSR2)
        assert second.ended() == 85, second.said()
        third.wait_for("leaves")
        third.wait_for("back after")
        assert set(third.ranks()) == {0}
        third.tell(signal.SIGCONT)
        assert third.ended() == 85 and "exiting on SIGCONT" in third.said(), third.said()
        job.assert_nothing_left(40.0)
        assert_same_run(job, tmp_path / "whole")


def test_what_is_not_started_again(tmp_path: Path) -> None:
    """A job that was asked to stop; one with wrong settings, or such that do not go with its checkpoint, which starts no ranks; and
    one whose numbers are no longer finite."""
    with Job(tmp_path, STEP_S) as job:
        node = job.node("--nproc-per-node", "2", **ENDLESS)
        node.wait_for(lambda: job.saved() >= 4)
        for _ in range(2):  # a terminal and a launch script both send Ctrl-C
            node.tell(signal.SIGINT)
        assert node.ended() == 85, node.said()
        assert node.said().count("exiting on SIGINT") == 1 == node.said().count("on cpu (gloo)")
        wrong = job.node("--nproc-per-node", "2", **ENDLESS, num_attention_heads=3)
        assert wrong.ended() == 2 and wrong.said().count("num-attention-heads") and "back after" not in wrong.said()
        for settings, words in (
            ({"lr": 2e-3}, "--lr 0.001 in the checkpoint, 0.002 here\n"),
            ({"hidden_size": 64}, "--hidden-size 32 there, 64 here"),
        ):
            unfit = job.node("--nproc-per-node", "2", **{**ENDLESS, **settings})
            assert unfit.ended() == 2 and words in unfit.said() and "on cpu (gloo)" not in unfit.said(), unfit.said()
        apart = {"save": tmp_path / "apart", "load": tmp_path / "apart", "save_interval": 1}
        diverged = job.node("--nproc-per-node", "2", **{**ENDLESS, **apart, "lr": 1e300})
        assert diverged.ended() == 88, diverged.said()
        assert diverged.said().count("on cpu (gloo)") == 1 and "the ranks are not restarted (exit code 88)" in diverged.said()
        job.assert_nothing_left()


def test_a_run_that_always_fails_is_given_up(tmp_path: Path, broken: int) -> None:
    """One rank reads a token that is not in the vocabulary, whenever it comes there; nothing was saved."""
    with write_dataset(str(tmp_path / "ids"), np.uint16) as writer:
        for document in range(60):
            writer.add_documents(np.full(17, 99 if document == broken else 7))
    data = {"mock_data": None, "data_path": tmp_path / "ids", "split": "1,0,0", "train_iters": 20}
    with Job(tmp_path, STEP_S) as job:
        node = job.node("--nproc-per-node", "2", "--max-restarts", "1", **{**SETTINGS, **data, "save_interval": 100})
        assert node.ended() == 1, node.said()
        said = node.said()
        assert (
            said.count("on cpu (gloo)") == 2 and "restarted 1 times without a newer checkpoint (--max-restarts). Giving up" in said
        )
        job.assert_nothing_left()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, values in (("seed", range(100)), ("broken", [57])):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values if metafunc.config.getoption("--full") else ())


def test_any_loss_at_any_layout(tmp_path: Path, seed: int) -> None:
    lose_some(seed, tmp_path)
