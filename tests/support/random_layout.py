"""Random layouts: how the ranks divide the work, and how layers lie on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.random_draws import Draw, chance, number, one_of, options, sometimes, switches

_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def draw_layout(draw: Draw, tp: int, pp: int, dp: int) -> dict[str, Any]:
    """Settings of the layout, and the number of layers, for these sizes."""
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    settings: dict[str, Any] = {field: size for field, size in sizes.items() if size > 1}
    settings |= switches(draw, "sequence_parallel", one_in=2 if tp > 1 else 8)
    if settings.get("sequence_parallel"):
        settings |= switches(draw, "tp_comm_overlap")
    settings |= switches(draw, "use_tp_pp_dp_mapping", one_in=3)
    settings |= draw_sharding(draw, dp)
    settings |= draw_pipeline(draw, pp, whole=settings.get("data_parallel_sharding_strategy") != "optim_grads_params")
    settings |= sometimes(draw, 3, overlap_p2p_communication=False)
    settings |= draw_memory(draw, pp, settings["num_layers"])
    return settings | sometimes(draw, 4, compile=True, compile_backend="aot_eager")


def draw_context(draw: Draw, settings: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """How context ranks share sequences, which are grown so that they can.

    Args:
        ranks: context and data ranks together.
    """
    if ranks % 2 or chance(draw, 3):
        return {}
    cp = one_of(draw, *(size for size in (2, 4) if ranks % size == 0))
    tp = settings.get("tensor_model_parallel_size", 1) if settings.get("sequence_parallel") else 1
    unit = cp * math.lcm(2, tp * (16 if "fp8_format" in settings else 1))
    length = -(-settings["seq_length"] // unit) * unit
    found: dict[str, Any] = {"context_parallel_size": cp, "seq_length": length}
    if (settings.get("global_batch_size") or 0) <= settings["micro_batch_size"]:
        found["log_gradient_noise"] = None  # with fewer data ranks the batch may be one microbatch
    if settings.get("max_position_embeddings"):
        found["max_position_embeddings"] = length + 1
    heads = settings["num_attention_heads"]
    heads = settings.get("num_query_groups") or heads if settings.get("group_query_attention") else heads
    fits = heads % (settings.get("tensor_model_parallel_size", 1) * cp) == 0
    ways = ("all_gather", "p2p", *(["a2a"] if fits else []))
    each = tuple(one_of(draw, *ways) for _ in range(settings["num_layers"]))
    return found | {"cp_comm_type": one_of(draw, None, *((way,) for way in ways), each)}


def draw_experts(draw: Draw, settings: Mapping[str, Any], tp: int, ranks: int) -> dict[str, Any]:
    """Experts in some layers, where the other settings go with them.

    Args:
        ranks: of a pipeline stage.
    """
    beside = any(settings.get(name) for name in ("fp8_format", "mup_base_width", "log_gradient_noise"))
    alone = tp > 1 and not settings.get("sequence_parallel")
    if alone or beside or settings.get("optimizer") in ("muon", "adafactor", "lamb", "adam8bit"):
        return {}
    etp = one_of(draw, None, 1, *(size for size in range(1, ranks + 1) if ranks % size == 0))
    parts = tp if etp is None else etp
    experts = one_of(draw, 2, 4, 6, 8)
    chosen = one_of(draw, 1, 2, 2, experts)
    fit = [n for n in range(1, experts + 1) if experts % n == 0 == ranks % (n * parts)]
    sharers = (settings.get("fsdp_shard_size") or ranks) * tp
    fit = [n for n in fit if sharers <= n * parts or sharers % (n * parts) == 0]
    if not fit:
        return {}
    found: dict[str, Any] = {
        "num_experts": experts,
        "moe_router_topk": chosen,
        "expert_tensor_parallel_size": etp,
        "expert_model_parallel_size": one_of(draw, *fit),
        "moe_ffn_hidden_size": parts * number(draw, 1, 5),
        "moe_token_dispatcher_type": one_of(draw, None, "alltoall", "allgather"),
        "disable_bias_linear": True,
        "add_mlp_bias": None,
    }
    layers = str([number(draw, 0, 1) for _ in range(settings["num_layers"])]).replace(" ", "")
    found |= options(draw, moe_layer_freq=[None, "2", layers], **_OF_EXPERTS)
    found |= {"moe_router_pre_softmax": True} if chosen == 1 else switches(draw, "moe_router_pre_softmax")
    if found["moe_router_score_function"] == "sigmoid" and number(draw, 0, 1):
        found |= options(draw, moe_router_enable_expert_bias=True, moe_router_bias_update_rate=[None, 0.05])
    if number(draw, 0, 1):
        found |= options(draw, moe_expert_capacity_factor=[1.0, 1.5], moe_token_drop_policy=[None, "probs", "position"])
        found |= switches(draw, "moe_pad_expert_input_to_capacity")
    if chosen == 2 and experts % 4 == 0 and chance(draw, 2):
        found |= {"moe_router_num_groups": experts // 2, "moe_router_group_topk": one_of(draw, 1, 2)}
    if chance(draw, 3):
        found["moe_shared_expert_intermediate_size"] = tp * number(draw, 1, 4)
        found |= switches(draw, "moe_shared_expert_gate")
    return found


_OF_EXPERTS: dict[str, list[Any]] = dict(
    moe_aux_loss_coeff=[None, 0.2],
    moe_z_loss_coeff=[None, 0.1],
    moe_router_load_balancing_type=[None, "aux_loss", "seq_aux_loss", "global_aux_loss"],
    moe_router_score_function=[None, "softmax", "sigmoid"],
    moe_router_topk_scaling_factor=[None, 2.5],
    moe_router_dtype=[None, "fp32", "fp64"],
)


def draw_sharding(draw: Draw, dp: int) -> dict[str, Any]:
    """Buckets, what data ranks share, and what lies in host memory."""
    settings: dict[str, Any] = {}
    strategy = one_of(draw, "no_shard", "optim", "optim_grads", "optim_grads_params", "optim_grads_params")
    if strategy == "optim" and chance(draw, 2):
        settings["use_distributed_optimizer"] = True
    elif strategy != "no_shard":
        settings["data_parallel_sharding_strategy"] = strategy
    if strategy != "no_shard":
        settings |= switches(draw, "overlap_param_gather")
    if strategy == "optim_grads_params":
        if chance(draw, 2):
            settings["fsdp_shard_size"] = one_of(draw, *(size for size in range(1, dp + 1) if dp % size == 0))
        settings |= sometimes(draw, 2, fsdp_reshard_after_forward="never")
        settings |= switches(draw, "fsdp_reduce_once", "fsdp_params_cpu")
    settings |= switches(draw, "overlap_grad_reduce")
    settings |= options(draw, ddp_bucket_size=[None, 1, 300, 700, 3000])
    return settings | sometimes(draw, 4, optimizer_cpu_offload=True, optimizer_offload_fraction=[None, 0.4, 0.01])


def draw_memory(draw: Draw, pp: int, num_layers: int) -> dict[str, Any]:
    """What is done with activations."""
    settings: dict[str, Any] = {}
    if chance(draw, 3):
        settings |= {"recompute_granularity": "full", "recompute_num_layers": number(draw, 1, min(3, num_layers))}
        if chance(draw, 2):
            settings["recompute_method"] = "block"
            if chance(draw, 2):
                numbers = [number(draw, 0, min(2, num_layers)) for _ in range(pp)]
                settings["recompute_layers_per_stage"] = ",".join(map(str, numbers))
    elif chance(draw, 3):
        settings |= one_of(draw, {"recompute_activations": True}, {"recompute_granularity": "selective"})
        several = [("layernorm",), ("layernorm", "mlp_act"), ("core_attn", "layernorm", "mlp")]
        settings |= options(draw, recompute_modules=[None, *several])
    settings |= options(draw, loss_chunk_tokens=[None, None, 0, 1, 5, 16, 1000])
    if chance(draw, 3):
        flag = one_of(draw, "cpu_offload_activations", "cpu_offloading")
        settings |= one_of(draw, {flag: True}, {"cpu_offloading_num_layers": number(draw, 1, min(3, num_layers))})
    return settings


def draw_pipeline(draw: Draw, pp: int, whole: bool) -> dict[str, Any]:
    """Schedule, virtual stages and split, with a number of layers that they can hold.

    Args:
        whole: data ranks hold whole parameters, so that weight gradients may come late.
    """
    schedule = one_of(draw, None, "1f1b", "gpipe", "interleaved", *(["zb-h1", "zb-v", "zb-v"] if whole else []))
    several = schedule == "interleaved" or (schedule is None and chance(draw, 2))
    chunks = number(draw, 2, 3 if pp <= 3 else 2) if several else 2 if schedule == "zb-v" else 1
    settings: dict[str, Any] = {"pipeline_schedule": schedule}
    way = one_of(draw, "even", "even", "ends", "ends", "counted", "balanced", "layout", "layout", "each")
    if way == "each" and chunks > 1:
        return settings | _in_equal_chunks(draw, pp, chunks)
    if way == "layout":
        sizes = [number(draw, 0, 2) for _ in range(pp * chunks)]
        sizes[one_of(draw, *range(len(sizes)))] += not any(sizes)
        return settings | {"num_layers": sum(sizes), "pipeline_model_parallel_layout": layout_text(draw, sizes)}
    if chunks > 1 and (schedule != "zb-v" or chance(draw, 2)):
        settings["num_virtual_stages_per_pipeline_rank"] = chunks
    if way == "ends" and pp > 1:
        return settings | _with_ends(draw, pp, chunks)
    least = pp * chunks
    if way == "counted":
        settings |= switches(draw, *_COUNTED)
        least -= sum(field in settings for field in _COUNTED)
    elif way == "balanced":
        settings["pipeline_split"] = "balanced"
        least -= chance(draw, 2)
    return settings | {"num_layers": max(1, least) + number(draw, 0, 3)}


def _in_equal_chunks(draw: Draw, pp: int, chunks: int) -> dict[str, Any]:
    """Virtual stages asked for by their number of layers."""
    counted = switches(draw, *_COUNTED, one_in=3)
    each = 1 if pp * chunks > 6 else number(draw, 1, 2)
    layers = pp * chunks * each - len(counted)
    return counted | {"num_layers": max(1, layers), "num_layers_per_virtual_pipeline_stage": each}


def _with_ends(draw: Draw, pp: int, chunks: int) -> dict[str, Any]:
    """The first or the last rank, or both, hold a number of layers of their own."""
    first, last = one_of(draw, (True, False), (False, True), (True, True))
    settings: dict[str, Any] = {}
    layers = (pp - first - last) * chunks
    layers += number(draw, 0, 2) if layers else 0
    for field, given in (("decoder_first_pipeline_num_layers", first), ("decoder_last_pipeline_num_layers", last)):
        if given:
            settings[field] = chunks * number(draw, 1, 2)
            layers += settings[field]
    return settings | {"num_layers": layers}


def layout_text(draw: Draw, sizes: Sequence[int]) -> str:
    """Chunks of so many layers as --pipeline-model-parallel-layout, in one of the ways in which it may be written."""
    layers = [one_of(draw, "t" * size, f"t*{size}") if size else "" for size in sizes]
    if len(set(layers[:-1])) == 1 and chance(draw, 2):
        return f"E({layers[0]}|)*{len(sizes) - 1}{layers[-1]}L"
    return f"E{one_of(draw, '|', ' | ').join(layers)}{one_of(draw, 'L', ',L')}"
