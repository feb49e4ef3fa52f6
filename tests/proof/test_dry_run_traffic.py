"""What every rank of real jobs sends in a step, over every group, is what the dry run says of its kind."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config.cli import LoadedConfig
from megatron.data.samples import DocumentRules
from megatron.model.gpt import ModelInputs
from megatron.parallel.context import ParallelContext
from megatron.parallel.topology import GRADIENT_AXES
from megatron.training.inputs import BatchMaker, reads_samples
from megatron.training.step import TrainStep
from megatron.verification.local_ranks import run_ranks
from tests.support.planned import kind_of, plans_of, real_context, real_step, settings, topology_of
from tests.support.windows import Windows


class Counting(TorchDispatchMode):
    """Counts the bytes that this rank sends in every collective, as in a ring, and in messages."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[tuple[int, ...]] = Counter()
        """By the ranks of the group."""
        self.messages = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        match name:
            case "allreduce_":
                tensor, group, times = args[0][0], args[1], 2
            case "_reduce_scatter_base_":
                tensor, group, times = args[1], args[2], 1
            case "_allgather_base_":
                tensor, group, times = args[0], args[2], 1
            case "send":
                self.messages += args[0][0].nbytes
                return
            case "recv_" | "recv_any_source_":
                return
            case _:
                raise AssertionError(f"nobody counts {name}")
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
        self.collectives[ranks] += times * Fraction(len(ranks) - 1, len(ranks)) * tensor.nbytes  # type: ignore[assignment]


def counted(context: ParallelContext, one: LoadedConfig) -> tuple[dict[tuple[int, ...], int], int]:
    """In a step behind the first: by the ranks of collectives, and in messages."""
    step = real_step(one.config, context)
    batch = random_batch(step, context, one)
    step.run(batch, iteration=1, learning_rate=0.1, weight_decay=0.1)
    with Counting() as counting:
        step.run(batch, iteration=2, learning_rate=0.1, weight_decay=0.1)
    step.finish_publishing()
    dist.barrier()
    return dict(counting.collectives), counting.messages


def random_batch(step: TrainStep, context: ParallelContext, one: LoadedConfig) -> list[ModelInputs]:
    """This rank's part of a global batch, as the loader gives it."""
    training, length, rules = one.config.training, step.model.config.seq_length, DocumentRules(0, False, False, False)
    size = training.global_batch_size or 0
    tokens = torch.randint(1, step.model.vocab_size, (size, length + 1), generator=torch.Generator().manual_seed(1))
    reads = reads_samples(context, [chunk.stage for chunk in step.model.layer_table], rules)
    maker = BatchMaker(context, 1, length, training.micro_batch_size, rules)
    return next(maker.evaluation(Windows(tokens.numpy()) if reads else None, global_batch_size=size, num_batches=1))


def groups_of(context: ParallelContext) -> dict[str, tuple[int, ...]]:
    """Ranks of the groups, by the words of the plan."""
    data, shard, replica = context.gradient_group, context.fsdp_shard, context.fsdp_replica
    return {
        "dp": data.ranks,
        "tp": context.group("tp").ranks,
        "tp x dp": context.group("tp", *GRADIENT_AXES).ranks,
        "pipeline ends": context.pipeline_ends.ranks,
        "world": context.world.ranks,
        f"{shard.size} ranks of dp": shard.ranks,
        f"{replica.size} replicas in dp": replica.ranks,
    }


GRID: dict[str, Any] = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "bf16": True}
CASES: dict[str, dict[str, Any]] = {
    "no_shard": {**GRID, "sequence_parallel": True},
    "optim, tp-pp-dp": {**GRID, "data_parallel_sharding_strategy": "optim", "use_tp_pp_dp_mapping": True},
    "optim_grads, virtual stages": {
        **GRID,
        "num_layers": 4,
        "sequence_parallel": True,
        "num_virtual_stages_per_pipeline_rank": 2,
        "data_parallel_sharding_strategy": "optim_grads",
        "overlap_grad_reduce": True,
    },
    "zb-v": {**GRID, "num_layers": 4, "pipeline_schedule": "zb-v", "data_parallel_sharding_strategy": "optim"},
    "replicas": {
        "tensor_model_parallel_size": 2,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "fsdp_shard_size": 2,
        "untie_embeddings_and_output_weights": True,
        "make_vocab_size_divisible_by": 4,
        "log_num_zeros_in_grad": True,
    },
}


def test_every_rank_sends_what_is_planned() -> None:
    """By the ranks that take part: gradients, parameters, activations over tensor groups and between stages, scalars."""
    cases = [settings(8, **case) for case in CASES.values()]

    def rank_run(rank: int) -> list[tuple[dict[tuple[int, ...], int], int, dict[str, tuple[int, ...]]]]:
        found = []
        for one in cases:
            context = real_context(one.config, rank, 8)
            found.append((*counted(context, one), groups_of(context)))
        return found

    plans = plans_of(cases)
    ranks = run_ranks(8, rank_run)
    for number, (name, plan) in enumerate(zip(CASES, plans, strict=True)):
        for rank in range(8):
            collectives, messages, groups = ranks[rank][number]
            planned: Counter[tuple[int, ...]] = Counter()
            sent = kind_of(plan, topology_of(cases[number].config, 8), rank).sent
            for one in sent:
                if one.over != "pipeline":
                    planned[groups[one.over]] += one.bytes
                    assert one.group_size == len(groups[one.over])
            assert collectives == dict(planned), (name, rank)
            assert messages == sum(one.bytes for one in sent if one.over == "pipeline"), (name, rank)
            assert {"world"} < {one.over for one in sent}, "there is something to compare"
