"""What every rank of real jobs sends in a step, over every group, is what the dry run says of its kind."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from megatron.config.cli import LoadedConfig
from megatron.data.samples import DocumentRules
from megatron.data_parallel.traffic import format_axes, format_fsdp_groups
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import ParallelContext
from megatron.parallel.topology import GRADIENT_AXES, Topology
from megatron.training.inputs import BatchBuilder, needs_samples
from megatron.training.step import TrainStep
from tests.support.planned import kind_of, kinds_of, real_context, real_step, settings
from tests.support.shared_memory import recorded_calls
from tests.support.warm import run_warm_ranks
from tests.support.windows import Windows


def counted(context: ParallelContext, one: LoadedConfig) -> tuple[dict[tuple[int, ...], int], int, int]:
    """In a step behind the first: by the ranks of collectives, in messages, and of matrices."""
    step = real_step(one.config, context)
    batch = random_batch(step, context, one)
    step.run(batch, iteration=1, learning_rate=0.1, weight_decay=0.1)
    with recorded_calls() as calls:
        step.run(batch, iteration=2, learning_rate=0.1, weight_decay=0.1)
    step.finish_param_gather()
    dist.barrier()
    collectives: Counter[tuple[int, ...]] = Counter()
    for call in calls:
        to_a_stage = call.what == "send" and call.ranks == context.group("pp").ranks
        of_matrices = call.what == "all-to-all" and call.ranks not in (context.context_group.ranks, context.expert_group.ranks)
        key = () if to_a_stage else (-1,) if of_matrices else call.ranks
        collectives[key] += call.sent * call.itemsize  # type: ignore[assignment]
    messages, matrices = collectives.pop((), 0), collectives.pop((-1,), 0)
    return dict(collectives), messages, matrices


def random_batch(step: TrainStep, context: ParallelContext, one: LoadedConfig) -> list[ModelInputs]:
    """This rank's part of a global batch, as the loader gives it."""
    training, length, rules = one.config.training, step.model.config.seq_length, DocumentRules(0, False, False, False)
    size = training.global_batch_size or 0
    tokens = torch.randint(1, step.model.vocab_size, (size, length + 1), generator=torch.Generator().manual_seed(1))
    reads = needs_samples(context, [chunk.stage for chunk in step.model.layer_table], rules)
    maker = BatchBuilder.for_model(step.model.config, context, 1, training.micro_batch_size, rules)
    return next(maker.iter_evaluation_batches(Windows(tokens.numpy()) if reads else None, global_batch_size=size, num_batches=1))


def groups_of(context: ParallelContext) -> dict[str, tuple[int, ...]]:
    """Ranks of the groups, by the words of the plan."""
    of_parts: dict[str, tuple[int, ...]] = {}
    for axes in (GRADIENT_AXES, ("edp",)):
        within, across = format_fsdp_groups(axes, context)
        of_parts |= {within: context.get_fsdp_shard_group(axes).ranks, across: context.get_fsdp_replica_group(axes).ranks}
    several = (("edp",), ("etp", "ep"), ("tp", "cp"), GRADIENT_AXES, ("cp",), ("tp",), ("tp", *GRADIENT_AXES))
    return {
        **{format_axes(axes, context): context.group(*axes).ranks for axes in several},
        "pipeline ends": context.pipeline_ends.ranks,
        "world": context.world.ranks,
        **of_parts,
    }


GRID: dict[str, Any] = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "bf16": True}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 6,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
    "disable_bias_linear": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_expert_capacity_factor": 1.0,
}
"""A token passes all experts, so that as much is sent as a plan takes it to be."""
CASES: dict[str, dict[str, Any]] = {
    "no_shard, two depths": {**GRID, "sequence_parallel": True, "log_max_attention_logit": True, "mtp_num_layers": 2},
    "no_shard, overlapping tensor ranks": {**GRID, "sequence_parallel": True, "tp_comm_overlap": True},
    "optim_grads, virtual stages": {
        **GRID,
        "num_layers": 4,
        "sequence_parallel": True,
        "num_virtual_stages_per_pipeline_rank": 2,
        "data_parallel_sharding_strategy": "optim_grads",
        "overlap_grad_reduce": True,
    },
    "zb-v": {**GRID, "num_layers": 4, "pipeline_schedule": "zb-v", "data_parallel_sharding_strategy": "optim"},
    "replicas, a depth": {
        "mtp_num_layers": 1,
        "tensor_model_parallel_size": 2,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "fsdp_shard_size": 2,
        "untie_embeddings_and_output_weights": True,
        "make_vocab_size_divisible_by": 3,
        "fsdp_reduce_once": True,
        "fsdp_params_cpu": True,
        "log_num_zeros_in_grad": True,
    },
    "context ranks that gather, noise": {
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
        "cp_comm_type": ("all_gather",),
        "sequence_parallel": True,
        "log_gradient_noise": True,
        "data_parallel_sharding_strategy": "optim",
    },
    "context ranks in a ring": {**GRID, "context_parallel_size": 2, "cp_comm_type": ("p2p",), "log_max_attention_logit": True},
    "context ranks by heads and in a ring": {
        "context_parallel_size": 4,
        "global_batch_size": 4,
        "cp_comm_type": ("a2a", "p2p"),
        "data_parallel_sharding_strategy": "optim_grads_params",
        "recompute_granularity": "full",
        "log_max_attention_logit": True,
    },
    "experts on ranks that exchange tokens, a depth": {
        **GRID,
        **EXPERTS,
        "mtp_num_layers": 1,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
        "data_parallel_sharding_strategy": "optim",
    },
    "experts on ranks that gather tokens": {
        **EXPERTS,
        "context_parallel_size": 2,
        "cp_comm_type": ("all_gather",),
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "moe_token_dispatcher_type": "allgather",
        "recompute_granularity": "full",
        "data_parallel_sharding_strategy": "optim_grads",
    },
    "experts fully sharded, a depth": {
        **EXPERTS,
        "context_parallel_size": 2,
        "cp_comm_type": ("all_gather",),
        "expert_model_parallel_size": 2,
        "mtp_num_layers": 1,
        "recompute_granularity": "full",
        "data_parallel_sharding_strategy": "optim_grads_params",
    },
    "experts fully sharded, replicas": {
        **EXPERTS,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "fsdp_shard_size": 2,
        "bf16": True,
    },
    "adafactor": {**GRID, "sequence_parallel": True, "data_parallel_sharding_strategy": "optim", "optimizer": "adafactor"},
    "moments in 8 bits, tp-pp-dp": {
        **GRID,
        "data_parallel_sharding_strategy": "optim",
        "use_tp_pp_dp_mapping": True,
        "optimizer": "adam8bit",
        "adam_8bit_block_size": 5,
    },
    "muon, optim": {**GRID, "sequence_parallel": True, "data_parallel_sharding_strategy": "optim", "optimizer": "muon"},
    "muon, no_shard": {**GRID, "num_layers": 4, "optimizer": "muon", "swiglu": True},
    "muon, replicas": {
        "tensor_model_parallel_size": 2,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "fsdp_shard_size": 2,
        "optimizer": "muon",
        "muon_dtype": "fp32",
    },
}
QUICK = (
    "no_shard, two depths",
    "optim_grads, virtual stages",
    "replicas, a depth",
    "context ranks that gather, noise",
    "context ranks by heads and in a ring",
    "experts on ranks that exchange tokens, a depth",
    "experts on ranks that gather tokens",
    "experts fully sharded, replicas",
    "adafactor",
    "moments in 8 bits, tp-pp-dp",
    "muon, optim",
)
"""Each kind of group, and each rule whose state is sent otherwise."""


Sent = tuple[dict[tuple[int, ...], int], int, int, dict[str, tuple[int, ...]]]
"""What `counted` gives, and the groups."""


def sent_in_each_case(rank: int, cases: list[LoadedConfig]) -> list[Sent]:
    found = []
    for one in cases:
        context = real_context(one.config, rank, 8)
        found.append((*counted(context, one), groups_of(context)))
    return found


def test_every_rank_sends_what_is_planned(full: bool) -> None:
    """By the ranks that take part: gradients, parameters, activations over tensor groups and between stages, scalars. Of matrices
    the plan says what the rank of a stage sends that sends most, of noise what the first data rank sends."""
    names = [*CASES] if full else QUICK
    cases = [settings(8, **CASES[name]) for name in names]
    planned_kinds = kinds_of(cases)
    ranks: list[list[Sent]] = run_warm_ranks(8, sent_in_each_case, cases)
    for number, (name, kinds) in enumerate(zip(names, planned_kinds, strict=True)):
        most: dict[int, list[tuple[int, int]]] = {}
        for rank in range(8):
            collectives, messages, matrices, groups = ranks[rank][number]
            planned: Counter[tuple[int, ...]] = Counter()
            topology = Topology.of(cases[number].config.parallel, 8)
            at, sent = topology.get_coordinates(rank), kind_of(kinds, topology, rank).traffic
            for one in sent:
                if one.what == "matrices":
                    most.setdefault(at["pp"], []).append((matrices, one.bytes))
                elif one.over != "pipeline" and (one.what != "noise" or at["dp"] == 0):
                    planned[groups[one.over]] += one.bytes
                    assert one.group_size == len(groups[one.over])
            assert collectives == dict(planned), (name, rank)
            assert messages == sum(one.bytes for one in sent if one.over == "pipeline"), (name, rank)
            assert bool(matrices) <= ("muon" in name)
            assert {"world"} < {one.over for one in sent}, "there is something to compare"
            assert any(one.what == "numbers" for one in sent) == (name in ("adafactor", "moments in 8 bits, tp-pp-dp"))
            assert any(one.what == "noise" for one in sent) == ("gather, noise" in name)
        assert bool(most) == ("muon" in name)
        for of_stage in most.values():
            (planned_most,) = {planned for _, planned in of_stage}
            assert max(sent for sent, _ in of_stage) == planned_most > 0, name
