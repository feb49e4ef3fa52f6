"""Which libraries a group speaks: decided without CUDA, and made by a torch that has no NCCL through a stand-in for its options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.config.parallel import ParallelConfig
from megatron.parallel import context, rendezvous
from megatron.parallel.context import (
    MESSAGE_CHANNELS,
    CommunicatorOptions,
    build_nccl_options,
    get_communicator_options,
    get_world_backend,
    make_context,
)
from megatron.parallel.topology import Topology
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.lone_rank import CPU

BOTH = "cpu:gloo,cuda:nccl"


class Options:
    """Stands for ProcessGroupNCCL.Options of a torch with NCCL."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None)


def test_where_tensors_go_over_nccl_the_hosts_speak_gloo() -> None:
    assert get_world_backend("nccl") == BOTH
    assert get_world_backend("gloo") == "gloo"
    assert (
        get_communicator_options(("tp",), BOTH) == CommunicatorOptions(high_priority=True)
        and get_communicator_options(("tp",), "gloo") == CommunicatorOptions()
    )
    for name in (("pp",), ("dp",), ("tp", "cp", "dp"), ("tp", "cp", "dp", "pp"), ("ends",)):
        assert get_communicator_options(name, BOTH) == CommunicatorOptions(), f"{name} is made as the world is"
    for name in (("fsdp_shard",), ("fsdp_replica",)):
        assert get_communicator_options(name, BOTH) == CommunicatorOptions("nccl")
    for name in (("pp_up",), ("pp_down",)):
        assert get_communicator_options(name, BOTH) == CommunicatorOptions(
            "nccl", high_priority=True, max_channels=MESSAGE_CHANNELS
        )
        assert (
            get_communicator_options(name, "gloo")
            == get_communicator_options(name, "fake")
            == get_communicator_options(name, None)
            == CommunicatorOptions()
        )


def test_options_are_what_was_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_nccl_options(CommunicatorOptions()) is None and build_nccl_options(CommunicatorOptions("nccl")) is None
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    found = build_nccl_options(get_communicator_options(("pp_up",), BOTH))
    assert found.is_high_priority_stream and found.config.max_ctas == MESSAGE_CHANNELS


def test_options_of_a_torch_whose_nccl_has_no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(Options=lambda is_high_priority_stream: SimpleNamespace(high=is_high_priority_stream))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", old, raising=False)
    assert vars(build_nccl_options(CommunicatorOptions("nccl", high_priority=True, max_channels=2))) == {"high": True}


def test_every_group_of_a_job_on_cuda_but_those_of_tensors_alone_speaks_gloo_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch is asked for them, for all ranks' groups."""
    made: list[tuple[str, Any, Any]] = []

    def new_group(ranks: list[int], *, timeout: Any, backend: str | None, pg_options: Any, group_desc: str) -> object:
        made.append((group_desc, backend, pg_options))
        return object()

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: BOTH)
    monkeypatch.setattr(dist, "new_group", new_group)
    make_context(Topology(tp=2, pp=3, dp=4), 0, CPU, fsdp_shard_size=2)
    backends = {name: {backend for desc, backend, _ in made if desc == name} for name, _, _ in made}
    only = {"pp_up", "pp_down", "fsdp_shard", "fsdp_replica"}
    assert backends == {name: {"nccl"} if name in only else {None} for name in backends} and only < backends.keys()
    assert {name for name, _, given in made if given is not None} == {"pp_up", "pp_down", "tp"}
    assert all(given.is_high_priority_stream for _, _, given in made if given is not None)


@pytest.mark.parametrize("cp", [1, 2])
def test_keys_and_values_and_their_gradients_go_round_on_communicators_of_their_own(
    monkeypatch: pytest.MonkeyPatch, cp: int
) -> None:
    """So neither waits for the other, nor for what else the context ranks send. A rank that shares with nobody needs none."""
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: object())
    context = make_context(Topology(tp=2, cp=cp, dp=2), 1, CPU)
    groups = [context.context_group, *context.context_rings]
    assert {group.ranks for group in groups} == {(1, 3) if cp == 2 else (1,)}
    communicators = {group.process_group for group in groups}
    assert len(communicators) == 3 if cp == 2 else communicators == {None}


def said(rank: int) -> tuple[str, str, list[str]]:
    """In a world of two libraries, as on CUDA: which one torch takes for objects and barriers."""
    store = dist.distributed_c10d._get_default_store()  # a new one at the same port could meet the end of this one
    dist.barrier()  # the other rank may still be connecting
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    context = make_context(Topology(pp=2), rank, CPU)
    chosen = [
        dist.distributed_c10d._get_object_coll_device(group) for group in (dist.group.WORLD, context.group("pp").process_group)
    ]
    dist.barrier()
    return dist.get_backend(), str(context.backend), chosen


def test_objects_go_over_the_library_of_the_cpu_where_a_group_has_two() -> None:
    for backend, known, chosen in run_ranks(2, said, timeout=60.0):
        assert backend == known == "cpu:gloo,cuda:gloo" and chosen == ["cpu", "cpu"]


def test_a_job_on_cuda_makes_no_communicator_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the device, torch would make one for every new group. Without it, each is made where its group first sends a tensor."""
    joined: dict[str, Any] = {}
    monkeypatch.setattr(context, "read_process_info", lambda: SimpleNamespace(rank=1, local_rank=1, world_size=2))
    monkeypatch.setattr(context, "choose_device", lambda wanted, local_rank: torch.device("cuda", local_rank))
    monkeypatch.setattr(rendezvous, "rendezvous", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **settings: joined.update(settings, backend=backend))
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **settings: made.append(settings))
    context.connect(ParallelConfig(pipeline_model_parallel_size=2))
    assert joined["backend"] == BOTH and "device_id" not in joined
    assert made and not any("device_id" in settings for settings in made)
