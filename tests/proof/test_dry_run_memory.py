"""Every rank of real jobs keeps what the dry run says of its kind, to the byte: parameters, gradients, main parameters, moments."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch.distributed as dist

from megatron.config.cli import LoadedConfig
from megatron.config.model import LoraTarget
from megatron.data.tokenizer import predict_embedding_rows
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.parallel.context import ParallelContext
from megatron.parallel.topology import Topology
from megatron.spec.counts import count_parameters
from megatron.spec.weights import iter_weights
from megatron.training.providers import make_providers
from megatron_lab.planner.plan import RankProfile
from megatron_lab.planner.state_report import build_stage_layout
from megatron_lab.planner.state_size import compute_stage_update_size
from tests.support.covering import Case, covering
from tests.support.held import held_by, num_bytes, state_held_by
from tests.support.planned import (
    kind_of,
    kinds_of,
    plans_of,
    real_context,
    real_model,
    real_step,
    settings,
)
from tests.support.warm import run_warm_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
PARTS = ("parameters", "gradients", "main_params", "moments", "averages")
GROUPS: dict[str, dict[str, Any]] = {
    "dp": {},
    "tp": {"tensor_model_parallel_size": 2},
    "tp, sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "experts": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "disable_bias_linear": True,
        "num_experts": 4,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_layer_freq": "2",
        "moe_ffn_hidden_size": 6,
        "moe_shared_expert_intermediate_size": 10,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "pp": {"pipeline_model_parallel_size": 2},
    "pp, virtual": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    "pp, V": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"},
    "pp, uneven": {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1},
}
NUM_LAYERS = {group: 4 if "pp" in group or group == "experts" else 2 for group in GROUPS}
"""Two on each stage, or of each kind."""
STYLES: dict[str, dict[str, Any]] = {
    "tied": {"vocab_size": 77, "make_vocab_size_divisible_by": 4, "max_position_embeddings": 33},
    "untied": {
        "untie_embeddings_and_output_weights": True,
        "vocab_size": 58,
        "make_vocab_size_divisible_by": 1,
        "swiglu": True,
        "ffn_hidden_size": 48,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
    },
}
"""Two tensor ranks pad the vocabulary: to 80 and to 60 rows. Data ranks divide neither 33 positions nor the 59 rows without."""
AXES = {
    "groups": tuple(GROUPS),
    "style": tuple(STYLES),
    "data_parallel_sharding_strategy": STRATEGIES,
    "dtype": ("bf16", "fp64", None),
    "optimizer": ("adam", "sgd", "adafactor", "adam8bit", "muon"),
    "offload": (None, 0.4, 1.0),
    "ema_decay": (None, 0.9),
    "ddp_bucket_size": (None, 1500),
    "fsdp_shard_size": (None, 2),
    "fsdp_params_cpu": (False, True),
    "fsdp_reduce_once": (False, True),
    "use_tp_pp_dp_mapping": (False, True),
}


def possible(case: Case) -> bool:
    """What the rules between settings accept."""
    fsdp = case["data_parallel_sharding_strategy"] == "optim_grads_params"
    plain = case["fsdp_shard_size"] is None and not case["fsdp_params_cpu"] and not case["fsdp_reduce_once"]
    knows_experts = case["groups"] != "experts" or case["optimizer"] in ("adam", "sgd")
    return knows_experts and not (fsdp and case["groups"] == "pp, V") and (fsdp or plain)


def loaded(case: Case, world_size: int, **changes: Any) -> LoadedConfig:
    """The settings of a case."""
    group = case["groups"]
    chosen: dict[str, Any] = {"num_layers": NUM_LAYERS[group], **GROUPS[group], **STYLES[case["style"]]}
    chosen |= {name: case[name] for name in AXES if name not in ("groups", "style", "dtype", "offload")}
    if case["optimizer"] == "adam8bit":
        chosen["adam_8bit_block_size"] = 5
    if case["dtype"]:
        chosen[case["dtype"]] = True
    if case["offload"]:
        chosen |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": case["offload"]}
    if not GROUPS[group]:
        chosen["use_tp_pp_dp_mapping"] = False
    return settings(world_size, **chosen, **changes)


def kept(context: ParallelContext, one: LoadedConfig, *, staged: bool) -> dict[str, tuple[int, int]]:
    """Bytes that a rank keeps on its device and in host memory.

    Args:
        staged: offloaded state lies apart, as it does where the device is no CPU.
    """
    if staged:
        model, optimizer = real_model(one.config, context), one.config.optimizer
        providers = make_providers(model, context, one.config.parallel)
        made = ShardedOptimizer([group for p in providers for group in p.groups], optimizer, context, uses_staging=True)
    else:
        step = real_step(one.config, context)
        model, providers, made = step.model, step.providers, step.optimizer
    layout = build_stage_layout(model, context, one.config.parallel, one.config.optimizer, [], 1)
    size = compute_stage_update_size(layout.get_param_partitions(), one.config.optimizer, context)
    assert sum(buffer.nbytes for buffer in made.buffers) == size.buffer_bytes, "numbers of whole parameters, and matrices"
    device, host = state_held_by(made, one.config.optimizer)
    held = [held_by(provider) for provider in providers]
    places = (False, True)
    parameters = {place: num_bytes(t for one in held if one.on_host == place for t in one.parameters) for place in places}
    gradients = {place: num_bytes(t for one in held if one.on_host == place for t in one.gradients) for place in places}
    return {
        "parameters": (parameters[False], parameters[True]),
        "gradients": (gradients[False], gradients[True]),
        "main_params": (sum(device.main_params), sum(host.main_params)),
        "moments": (sum(device.moments), sum(host.moments)),
        "averages": (sum(device.averages), sum(host.averages)),
    }


def kept_of_each(rank: int, cases: list[LoadedConfig], world_size: int, staged: bool) -> list[dict[str, tuple[int, int]]]:
    """Return the bytes that this rank keeps in each case."""
    found = [kept(real_context(one.config, rank, world_size), one, staged=staged) for one in cases]
    dist.barrier()
    return found


def compare(cases: list[LoadedConfig], world_size: int, full: bool, *, staged: bool = False) -> list[tuple[RankProfile, ...]]:
    """Return the planned kinds of ranks of all cases, each right for every rank of its world.

    Args:
        full: trace chunks as a plan does. What a trace finds is no state, and takes most of the time.
    """
    planned_kinds = [plan.profiles for plan in plans_of(cases)] if full else kinds_of(cases, traced=False)
    ranks = run_warm_ranks(world_size, kept_of_each, cases, world_size, staged, timeout=300.0)
    for number, (one, kinds) in enumerate(zip(cases, planned_kinds, strict=True)):
        topology = Topology.of(one.config.parallel, world_size)
        assert sum(kind.num_ranks for kind in kinds) == world_size
        for rank in range(world_size):
            memory = kind_of(kinds, topology, rank).memory
            planned = {name: (getattr(memory, name).device, getattr(memory, name).host) for name in PARTS}
            assert ranks[rank][number] == planned, (one.config.parallel, rank)
    return planned_kinds


def test_every_rank_of_four_keeps_what_is_planned(full: bool) -> None:
    """Pairs of layouts, strategies, dtypes, offloading, ties and remainders of the vocabulary."""
    cases = covering(AXES, seed=1, valid=possible)
    assert len(cases) > 20
    # Shards of equally many elements whose states have unequal lengths: it matters which of them is in host memory.
    alike: Case = {**cases[0], "style": "tied", "optimizer": "adam8bit", "offload": 0.3, "ddp_bucket_size": 1500, "dtype": "fp64"}
    whole = {"fsdp_shard_size": None, "fsdp_params_cpu": False, "fsdp_reduce_once": False}
    cases += [{**alike, **whole, "groups": "pp, uneven", "data_parallel_sharding_strategy": one} for one in STRATEGIES[:2]]
    kinds_of_cases = compare([loaded(case, 4) for case in cases], 4, full)
    assert max(map(len, kinds_of_cases)) == 4, "of four ranks"


def test_every_rank_of_eight_keeps_what_is_planned(full: bool) -> None:
    """All three axes at once, with both numberings of the ranks."""
    grid: dict[str, Any] = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
        "bf16": True,
    }
    cases = [
        settings(8, **STYLES[style], **grid, data_parallel_sharding_strategy=strategy, use_tp_pp_dp_mapping=strategy == "optim")
        for at_style, style in enumerate(STYLES)
        for at_strategy, strategy in enumerate(STRATEGIES)
        if full or (at_style + at_strategy) % 2
    ]
    compare(cases, 8, full)


def test_the_last_stage_keeps_depths_and_an_embedding(full: bool) -> None:
    """Multi-token prediction, tied and untied, with experts and without, at each place of the last chunk.

    The normal run takes one of two styles with each group.
    """
    depths = {"mtp_num_layers": 2, "bf16": True, "ddp_bucket_size": 1500}
    cases = [
        settings(
            4,
            **{**STYLES[style], **GROUPS[group], **depths, **({"moe_layer_freq": "[0,1]*2"} if group == "experts" else {})},
            num_layers=NUM_LAYERS[group],
            data_parallel_sharding_strategy=strategy,
        )
        for number, group in enumerate(GROUPS)
        for place, (style, strategy) in enumerate(
            zip(STYLES, (STRATEGIES[number % 3], "optim_grads" if "V" in group else "optim_grads_params"), strict=True)
        )
        if full or (place + number + number // 4) % 2
    ]
    compare(cases, 4, full)


def test_beside_adapters_a_model_keeps_its_weights_alone(full: bool) -> None:
    """No gradients, main parameters or moments of what LoRA leaves as it is: at each place of four ranks."""
    adapters = {"num_layers": 4, "lora_rank": 3, "bf16": True, "ddp_bucket_size": 400}
    places = ("dp", "tp, sequence", "pp, virtual", "pp, V", "pp, uneven")
    targets = [get_args(LoraTarget), ("attention.qkv", "mlp.down")]
    cases = [
        settings(4, **{**STYLES[style], **GROUPS[group], **adapters}, data_parallel_sharding_strategy=strategy, lora_targets=some)
        for group, style, strategy, some in zip(
            places, itertools.cycle(STYLES), itertools.cycle(STRATEGIES[:3]), itertools.cycle(targets), strict=False
        )
    ]
    for one, kinds in zip(cases, compare(cases, 4, full), strict=True):
        trained = sum(w.numel for w in iter_weights(one.config.model, predict_embedding_rows(one.config.data)) if not w.frozen)
        for kind in kinds:
            assert kind.memory.gradients.total < min(8 * trained + 1024, kind.memory.parameters.total / 2)


def test_host_memory_of_a_device_is_apart(full: bool) -> None:
    """Where the device is no CPU, offloaded main parameters lie in host memory though they have the parameters' dtype."""
    layouts: list[dict[str, Any]] = [{"data_parallel_sharding_strategy": "optim"}, {"pipeline_model_parallel_size": 2}]
    cases = [
        settings(2, device=None, bf16=bf16, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction, **changes)
        for bf16 in (False, True)
        for fraction in (0.4, 1.0)
        for changes in layouts
    ]
    for kinds in compare(cases, 2, full, staged=True):
        assert all(kind.memory.main_params.host > 0 for kind in kinds)


def elements(rank: int, one: LoadedConfig) -> int:
    """Return how many elements a rank of four has, without padding."""
    context = real_context(one.config, rank, 4)
    params = real_model(one.config, context).params
    return sum(entry.record.get_local_slice(context.axis_sizes, context.coordinates).numel for entry in params)


@pytest.mark.parametrize("style", STYLES)
def test_parameters_of_stages_add_up_to_the_model(style: str) -> None:
    """And those of each kind are the ones that its ranks hold; the padding of the vocabulary makes the last tensor rank's fewer."""
    grid: dict[str, Any] = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    one = settings(4, **STYLES[style], **grid, num_layers=3, decoder_first_pipeline_num_layers=1)
    (plan,) = plans_of([one], traced=False)
    topology = Topology.of(one.config.parallel, 4)
    assert run_warm_ranks(4, elements, one) == [kind_of(plan.profiles, topology, rank).parameters for rank in range(4)]
    assert sum(plan.parameters_by_stage) == plan.parameters == count_parameters(one.config.model, plan.job.vocab_size)
    first, second = (kind_of(plan.profiles, topology, topology.find_rank(tp=tp)).parameters for tp in (0, 1))
    assert first > second
