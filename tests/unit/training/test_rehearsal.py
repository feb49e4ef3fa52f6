"""The plan of a run on a machine with GPUs: the process that makes it calls no CUDA, which does not survive a fork."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config.cli import load
from megatron.config.config import Config
from megatron.config.parsed_flags import DryRun
from megatron_lab.monitoring.rehearsal import PlanProcess, build_full_plan, resolve_device_facts
from megatron_lab.planner.cluster import load_cluster
from megatron_lab.planner.plan import Plan
from megatron_lab.planner.step_time import load_plan_cluster
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.lone_rank import lone_rank
from tests.support.runs import arguments
from tests.support.warm_python import warm_python

H200_BYTES = 150_754_820_099  # an odd number, which a sloppy conversion to GB and back would change
LONGER_THAN_A_PIPE = 1 << 20
DEVICE_CALLS = ("is_available", "device_count", "get_device_properties", "get_device_name", "_lazy_init", "current_device")


@pytest.fixture
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 whose runtime works in this process only."""
    owner = os.getpid()

    def answers(result: object) -> Callable[..., object]:
        def call(*_: object) -> object:
            if os.getpid() != owner:
                raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
            return result

        return call

    for name in DEVICE_CALLS:
        monkeypatch.setattr(torch.cuda, name, answers(None))
    monkeypatch.setattr(torch.cuda, "is_available", answers(True))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # it asks the driver's library, which survives a fork
    monkeypatch.setattr(torch.cuda, "get_device_properties", answers(SimpleNamespace(total_memory=H200_BYTES)))
    monkeypatch.setattr(torch.cuda, "get_device_name", answers("NVIDIA H200"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def settings(**changes: Any) -> Config:
    return load(arguments(train_iters=1, **changes), 1).config


def plan_of(config: Config) -> Plan | str:
    rehearsal = PlanProcess(build_full_plan)
    rehearsal.send_config(config)
    return rehearsal.receive_plan(lone_rank())


def cluster_name(config: Config, job: DryRun, vocab_size: int) -> tuple[str, str | None]:
    """What a plan would take its times from, and the devices that its process sees."""
    cluster = load_plan_cluster(config)
    assert cluster is not None
    return cluster.name, os.environ.get("CUDA_VISIBLE_DEVICES")


def program(config: Config, job: DryRun, vocab_size: int) -> str:
    return sys.argv[0]


def plan_and_program(config: Config, job: DryRun, vocab_size: int) -> tuple[Plan, str]:
    return build_full_plan(config, job, vocab_size), program(config, job, vocab_size)


def long_answer(config: Config, job: DryRun, vocab_size: int) -> str:
    return "x" * LONGER_THAN_A_PIPE


@pytest.mark.usefixtures("_one_gpu")
def test_the_plan_is_of_the_device_that_the_run_has() -> None:
    plan = plan_of(settings())
    assert isinstance(plan, Plan), plan
    assert (plan.device_memory, plan.job.device) == (H200_BYTES, "cuda")


@pytest.mark.usefixtures("_one_gpu")
def test_a_plan_that_does_not_fit_says_what_to_change() -> None:
    """That compares times of steps, which depend on the kind of GPU."""
    plan = plan_of(settings(device_memory_gb=0.0004, micro_batch_size=8))
    assert isinstance(plan, Plan), plan
    assert plan.device_memory == 400_000 and plan.advice[0].startswith("the fullest rank needs")


@pytest.mark.usefixtures("_one_gpu")
def test_the_plan_takes_times_of_the_kind_of_gpu_and_sees_no_device() -> None:
    rehearsal = PlanProcess(cluster_name)
    rehearsal.send_config(settings())
    assert rehearsal.receive_plan(lone_rank()) == (load_cluster("h200").name, "")


@pytest.mark.usefixtures("_one_gpu")
def test_each_of_two_plans_is_made() -> None:
    """As with --log-memory and --plan-report: both are forked before CUDA is asked."""
    both: list[PlanProcess[Any]] = [PlanProcess(build_full_plan), PlanProcess(cluster_name)]
    for rehearsal in both:
        rehearsal.send_config(settings())
    first, second = (rehearsal.receive_plan(lone_rank()) for rehearsal in both)
    assert isinstance(first, Plan) and isinstance(second, tuple)


def test_a_plan_does_not_wait_for_a_later_one() -> None:
    """The later process holds the pipe of the earlier one's request. An answer longer than a pipe would make all three wait."""
    config = settings(device="cpu")
    both: list[PlanProcess[Any]] = [PlanProcess(program), PlanProcess(long_answer)]
    for rehearsal in both:
        rehearsal.send_config(config)
    assert [rehearsal.receive_plan(lone_rank()) for rehearsal in both] == [sys.argv[0], "x" * LONGER_THAN_A_PIPE]


@pytest.mark.usefixtures("_one_gpu")
def test_facts_that_cannot_be_had_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: no driver")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fails)
    assert plan_of(settings()) == "RuntimeError: CUDA error: no driver"


def test_on_cpus_there_is_nothing_to_write_out() -> None:
    config = resolve_device_facts(settings(device="cpu"))
    assert config == settings(device="cpu")


def test_where_cuda_was_used_before_a_fresh_process_plans(full: bool) -> None:
    """As in a program that trains twice, or counts its GPUs first. With --full in an interpreter that imports torch."""
    config = settings(device="cpu")
    python = sys.executable if full else warm_python()

    def rank(_: int) -> object:
        sys.executable = python
        owner = os.getpid()
        torch.cuda._is_in_bad_fork = lambda: os.getpid() != owner
        torch.cuda.device_count = lambda: 1
        rehearsal = PlanProcess(plan_and_program)
        rehearsal.send_config(config)
        return rehearsal.receive_plan(lone_rank())

    answer = run_ranks(1, rank, init=False)[0]
    assert isinstance(answer, tuple), answer
    plan, argv0 = answer
    assert isinstance(plan, Plan), plan
    assert argv0.endswith("rehearsal_child.py"), argv0


def test_counting_gpus_leaves_a_plan() -> None:
    """In torch's CUDA builds this is what makes forks useless, with a GPU and without one."""

    def rank(_: int) -> object:
        torch.cuda.is_available()
        return plan_of(settings(device="cpu"))

    plan = run_ranks(1, rank, init=False)[0]
    assert isinstance(plan, Plan), plan
