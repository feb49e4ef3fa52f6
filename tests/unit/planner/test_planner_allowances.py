"""What CUDA takes beside the job's own memory: apart from what is exact, by its sources' own arithmetic, and only on CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lab.planner.allowances import estimate_allowances
from megatron_lab.planner.plan import Plan, plan_to_json
from megatron_lab.planner.plan_text import format_plan
from tests.support.planned import plans_of, settings

MIB = 2**20


def nccl(rings: dict[str, int], num_peers: int) -> int:
    return sum(one.bytes for one in estimate_allowances(rings, num_peers) if one.name == "NCCL buffers")


def test_nccl_takes_what_its_sources_say() -> None:
    """7 peers with 32 channels took 3.28 GB (NVIDIA/nccl issue 1685): so much for each channel."""
    channel = 3.28e9 / (7 * 32)
    assert nccl({}, 0) == 0 and nccl({"dp": 1}, 0) == 0, "one rank has no communicator"
    assert nccl({"tp": 4}, 0) == pytest.approx(16 * channel, rel=0.01)
    assert nccl({}, 2) == 2 * nccl({}, 1) == pytest.approx(4 * channel, rel=0.01), "one way each way, of two channels"


EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 2, "disable_bias_linear": True}
CP: dict[str, Any] = {"context_parallel_size": 2, "data_parallel_sharding_strategy": "optim"}


@pytest.mark.parametrize(
    ("changes", "groups", "peers"),
    [
        ({}, ["world"], 0),
        ({"tensor_model_parallel_size": 4}, ["world", "tp", "dp"], 0),
        ({**CP}, ["world", "cp_ring", "cp_ring_grad"], 0),
        ({**CP, "cp_comm_type": ("a2a",)}, ["world", "cp"], 0),
        ({"expert_model_parallel_size": 4, **EXPERTS}, ["world", "ep", "edp"], 0),
        ({"expert_model_parallel_size": 8, **EXPERTS, "num_experts": 8}, ["world"], 0),
        ({"pipeline_model_parallel_size": 2}, ["world", "dp", "pipeline ends"], 1),
        ({"pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": True}, ["world", "dp"], 1),
    ],
)
def test_a_group_that_sends_no_tensors_has_no_communicator(changes: dict[str, Any], groups: list[str], peers: int) -> None:
    """Groups of the same ranks have one; the ring of context ranks has two of its own, and a pair of stages has two."""
    (plan,) = plans_of([settings(8, **{**changes, "global_batch_size": 16}, device=None)])
    counts = {one.communicators for kind in plan.profiles for one in kind.allowances if one.name == "NCCL buffers"}
    assert counts == {len(groups) + 2 * peers}


def test_they_are_a_part_of_their_own_of_a_rank_on_cuda() -> None:
    """The end stages have one neighbour, those between two; on CPU nothing is taken, and nothing else differs."""
    grid: dict[str, Any] = {"pipeline_model_parallel_size": 4, "num_layers": 4, "global_batch_size": 16}
    jobs = [settings(8, **grid, device=device) for device in ("cpu", None)]
    on_cpu, on_cuda = plans_of(jobs)
    assert all(kind.memory.cuda.total == 0 and not kind.allowances for kind in on_cpu.profiles)

    def taken(plan: Plan, stage: int) -> int:
        (kind,) = {kind.memory.cuda.device: kind for kind in plan.profiles if stage in kind.stages}.values()
        assert kind.memory.cuda.device == sum(one.bytes for one in kind.allowances) > 500 * MIB
        assert kind.memory.total.device - kind.memory.cuda.device == sum(
            part.device for name, part in kind.memory.by_purpose.items() if name != "cuda"
        )
        return kind.memory.cuda.device

    link, ends = 2 * 14 * MIB, 16 * 14 * MIB
    first, second, last = (taken(on_cuda, stage) for stage in (0, 1, 3))
    assert first == last and second - first == link - ends, "the ends share the embedding's gradient"


def test_products_that_overlap_take_more() -> None:
    """Inside a node memory that peers read: two parts of the hidden states; across nodes connections to the neighbours."""
    grid: dict[str, Any] = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "bf16": True, "device": None}
    jobs = [
        settings(8, **grid),
        settings(8, **grid, tp_comm_overlap=True),
        settings(8, gpus_per_node=2, **grid, tp_comm_overlap=True),
    ]
    plans = plans_of(jobs)
    turns, inside, across = ({one.name: one.bytes for one in plan.profiles[0].allowances} for plan in plans)
    config = jobs[0].config
    part = config.training.micro_batch_size * config.model.hidden_size * config.model.seq_length * torch.bfloat16.itemsize // 4
    assert inside == {**turns, "symmetric memory": 2 * part}
    assert across == {**turns, "NCCL buffers of a tensor ring": 32 * 14 * MIB}
    way = "tensor communication is assumed to overlap by "
    assert [[note.removeprefix(way) for note in plan.notes if note.startswith(way)] for plan in plans] == [
        [],
        ["reads of the peers' memory (torch's symmetric memory)"],
        ["a ring of sends and receives: tensor groups cross nodes"],
    ]


def test_what_is_estimated_is_told_apart() -> None:
    on_cpu, on_cuda = plans_of([settings(2, device="cpu"), settings(2, device=None)])
    (note,) = [line for line in format_plan(on_cuda) if "an estimate" in line]
    assert note.startswith("note: cuda is an estimate (CUDA context 537 MB, cuBLAS workspaces 67.1 MB, ")
    assert ", NCCL buffers of 1 communicator 235 MB, " in note
    assert note.endswith("all other memory is exact to the byte") and ", cuda 862 MB" in format_plan(on_cuda)[1]
    assert not any("estimate" in line for line in format_plan(on_cpu))
    said = plan_to_json(on_cuda)
    listed = said["kinds"][0]["allowances"]
    assert sum(one["bytes"] for one in listed) == said["kinds"][0]["memory"]["cuda"]["device"]
    assert all("github.com" in one["source"] or "torch," in one["source"] for one in listed)
