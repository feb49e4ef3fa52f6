"""Rules about the parallel layout: divisibility of model, sequence and world size by the parallel sizes."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import (
    MODEL_PARALLEL_SIZES,
    Change,
    Finding,
    create_change,
    find_divisors,
    find_multiples_near,
    format_setting,
    require_divisible,
    rule,
    try_values,
)
from megatron.config.config import Config
from megatron.config.launcher import parse_init_method
from megatron.config.setting import condition
from megatron.spec.activations import ACTIVATION_FIELDS
from megatron.spec.mlps import has_dense_layers

_TP = "tensor_model_parallel_size"


@rule("init_method")
def check_init_method(config: Config, world_size: int) -> Iterator[Finding]:
    """--init-method must be env://, tcp://HOST:PORT with a port from 1 to 65535, or file:///PATH with an absolute path."""
    if parse_init_method(config.parallel.init_method) is None:
        yield Finding(f"{format_setting(config, 'init_method')} is not a valid rendezvous.", [create_change(init_method="env://")])


@rule(*MODEL_PARALLEL_SIZES)
def check_world_size_divisible(config: Config, world_size: int) -> Iterator[Finding]:
    """The world size must be a multiple of TP x CP x PP (the tensor-, context- and pipeline-parallel sizes), because this number of
    ranks holds one copy of the model."""
    parallel = config.parallel
    tp, cp, pp = parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.pipeline_model_parallel_size
    if world_size < 1 or world_size % (tp * cp * pp) == 0:
        return
    world_sizes = sorted(find_multiples_near(world_size, tp * cp * pp), key=lambda size: abs(size - world_size))
    yield Finding(
        f"The world size {world_size} is not divisible by TP x CP x PP = {tp} x {cp} x {pp} = {tp * cp * pp} "
        f"(--tensor-model-parallel-size, --context-parallel-size, --pipeline-model-parallel-size).",
        [
            [Change(world_size=size) for size in world_sizes],
            try_values(_TP, tp, find_divisors(world_size)),
            try_values("pipeline_model_parallel_size", pp, find_divisors(world_size)),
        ],
    )


check_heads_divisible_by_tp = require_divisible("num_attention_heads", _TP, "Each tensor rank holds whole heads.")


@rule(
    "num_query_groups",
    _TP,
    depends_on=("group_query_attention", "num_attention_heads", "kv_channels", "hidden_size", "multi_latent_attention"),
)
def check_query_groups_fit_tp(config: Config, world_size: int) -> Iterator[Finding]:
    """--num-query-groups must be a multiple of --tensor-model-parallel-size, so that each tensor rank holds the same number of
    key-value heads, or a divisor of it, so that the same number of ranks shares each key-value head. Ranks that share a key-value
    head must be able to divide the rows of its queries, key and value evenly."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    num_groups = model.num_query_groups
    if (
        not model.group_query_attention
        or num_groups < 1
        or model.num_attention_heads % tp
        or model.num_attention_heads % num_groups
    ):
        return
    if num_groups % tp == 0 or (tp % num_groups == 0 and 2 * model.head_size * num_groups % tp == 0):
        return
    valid_tp_sizes = [size for size in find_divisors(model.num_attention_heads) if num_groups % size == 0 or size % num_groups == 0]
    yield Finding(
        f"{format_setting(config, 'num_query_groups')} does not fit {format_setting(config, _TP)}: "
        + (
            f"{tp // num_groups} ranks cannot divide the rows of a key-value head of {model.head_size} channels and its "
            "query heads."
            if tp % num_groups == 0
            else "neither divides the other."
        ),
        [
            try_values(_TP, tp, valid_tp_sizes),
            try_values(
                "num_query_groups", num_groups, [size for size in find_divisors(model.num_attention_heads) if size % tp == 0]
            ),
        ],
    )


@rule(
    "qk_layernorm_all_heads", _TP, depends_on=("qk_layernorm", "num_query_groups", "group_query_attention", "num_attention_heads")
)
def check_all_heads_norm_with_tp(config: Config, world_size: int) -> Iterator[Finding]:
    """--qk-layernorm-all-heads cannot be used if tensor ranks share key-value heads, because the norm over all key heads would
    count the shared heads several times."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    if model.qk_layernorm and model.qk_layernorm_all_heads and model.num_key_value_heads < tp:
        yield Finding(
            f"{format_setting(config, 'qk_layernorm_all_heads')} cannot be used with {format_setting(config, _TP)}, at which "
            f"tensor ranks share the "
            f"{model.num_key_value_heads} key-value heads.",
            [try_values(_TP, tp, find_divisors(model.num_key_value_heads)), create_change(qk_layernorm_all_heads=False)],
        )


@rule("ffn_hidden_size", _TP, "hidden_size", depends_on=(*ACTIVATION_FIELDS, "num_experts", "moe_layer_freq", "num_layers"))
def check_mlp_width_divisible_by_tp(config: Config, world_size: int) -> Iterator[Finding]:
    """--ffn-hidden-size must be divisible by --tensor-model-parallel-size, so that each tensor rank holds an equal slice of the
    MLP."""
    width, tp = config.model.ffn_size, config.parallel.tensor_model_parallel_size
    if width > 0 and width % tp and has_dense_layers(config.model):
        yield Finding(
            f"The width of the MLP {width} (--ffn-hidden-size) is not divisible by --tensor-model-parallel-size {tp}.",
            [try_values("ffn_hidden_size", width, find_multiples_near(width, tp)), try_values(_TP, tp, find_divisors(width))],
        )


check_seq_length_divisible_by_tp = require_divisible(
    "seq_length",
    _TP,
    "With --sequence-parallel each tensor rank holds the same number of tokens of a sequence.",
    condition=condition(sequence_parallel=True),
)


@rule("device", "distributed_backend")
def check_distributed_backend(config: Config, world_size: int) -> Iterator[Finding]:
    """--distributed-backend nccl cannot be used with --device cpu, because NCCL communicates only tensors on CUDA devices."""
    if config.parallel.device == "cpu" and config.parallel.distributed_backend == "nccl":
        message = "--distributed-backend nccl cannot be used with --device cpu."
        yield Finding(message, [create_change(distributed_backend="gloo"), create_change(device="cuda")])


@rule("profile_ranks", "profile")
def check_profile_ranks(config: Config, world_size: int) -> Iterator[Finding]:
    """Ranks in --profile-ranks must be below the world size, because ranks are counted from 0."""
    ranks = config.logging.profile_ranks
    invalid = sorted({rank for rank in ranks if rank >= world_size})
    if config.logging.profile and world_size > 0 and invalid:
        valid = tuple(sorted({min(rank, world_size - 1) for rank in ranks}))
        yield Finding(
            f"--profile-ranks names {', '.join(map(str, invalid))}, but the world size is {world_size}.",
            [create_change(profile_ranks=valid), Change(world_size=invalid[-1] + 1)],
            f"Ranks are 0 to {world_size - 1}.",
        )


# ---- Rules about context parallelism.

_CP, _TENSOR = "context_parallel_size", "tensor_model_parallel_size"


@rule("seq_length", _CP, depends_on=(_TENSOR, "sequence_parallel"))
def check_seq_length_divisible_by_cp(config: Config, world_size: int) -> Iterator[Finding]:
    """--seq-length must be divisible by 2 x --context-parallel-size. Each context rank holds two segments of equal length, one from
    the front and one from the back of the sequence, so that all ranks have the same attention FLOPs. With --sequence-parallel,
    tensor ranks must also divide these tokens evenly."""
    seq_length, cp, tp = config.model.seq_length, config.parallel.context_parallel_size, config.parallel.tensor_model_parallel_size
    if cp == 1 or seq_length < 1:
        return
    sequence_parallel_size = tp if config.parallel.sequence_parallel else 1
    unit = cp * max(2, sequence_parallel_size if sequence_parallel_size % 2 == 0 else 2 * sequence_parallel_size)
    if seq_length % unit:
        valid_cp_sizes = [
            size
            for size in find_divisors(seq_length)
            if size == 1 or (seq_length % (2 * size) == 0 and seq_length // size % sequence_parallel_size == 0)
        ]
        yield Finding(
            f"{format_setting(config, 'seq_length')} is not divisible by 2 x {format_setting(config, _CP)}"
            + (
                f" and by {format_setting(config, _CP)} x {format_setting(config, _TENSOR)}." if sequence_parallel_size > 1 else "."
            ),
            [try_values("seq_length", seq_length, find_multiples_near(seq_length, unit)), try_values(_CP, cp, valid_cp_sizes)],
        )


@rule("cp_comm_type", "num_layers")
def check_cp_comm_type_length(config: Config, world_size: int) -> Iterator[Finding]:
    """--cp-comm-type must have one value for all layers, or one for each layer."""
    comm_types, num_layers = config.parallel.cp_comm_type, config.model.num_layers
    if len(comm_types) > 1 and len(comm_types) != num_layers:
        yield Finding(
            f"--cp-comm-type has {len(comm_types)} values, but there are {num_layers} layers (--num-layers).",
            [
                create_change(cp_comm_type=(comm_types[0],)),
                create_change(cp_comm_type=(*comm_types, *comm_types[-1:] * (num_layers - len(comm_types)))[:num_layers]),
            ],
        )


@rule(
    "cp_comm_type",
    _CP,
    _TENSOR,
    depends_on=("num_attention_heads", "num_query_groups", "group_query_attention", "multi_latent_attention"),
)
def check_heads_divisible_by_cp(config: Config, world_size: int) -> Iterator[Finding]:
    """--cp-comm-type a2a needs a number of key-value heads that is divisible by --tensor-model-parallel-size x
    --context-parallel-size. The context ranks divide the key-value heads of a tensor rank, and each computes its heads for all
    tokens."""
    parallel, model = config.parallel, config.model
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    num_heads = model.num_attention_heads if model.multi_latent_attention else model.num_key_value_heads
    if cp == 1 or "a2a" not in parallel.cp_comm_type or num_heads < 1 or (num_heads % tp == 0 and num_heads // tp % cp == 0):
        return
    without_a2a = tuple("all_gather" if comm_type == "a2a" else comm_type for comm_type in parallel.cp_comm_type)
    yield Finding(
        f"{format_setting(config, 'cp_comm_type')}: the {num_heads} key-value heads are not divisible by "
        f"{format_setting(config, _TENSOR)} x {format_setting(config, _CP)}.",
        [
            create_change(cp_comm_type=without_a2a),
            try_values(_CP, cp, [size for size in find_divisors(num_heads) if num_heads % (tp * size) == 0]),
            try_values(_TENSOR, tp, [size for size in find_divisors(num_heads) if num_heads % (cp * size) == 0]),
        ],
    )


@rule("fp8_recipe", _CP, depends_on=("fp8_format",))
def check_no_blockwise_fp8_with_cp(config: Config, world_size: int) -> Iterator[Finding]:
    """--fp8-recipe blockwise is not supported with --context-parallel-size above 1. Context ranks split the sequence, but in this
    recipe blocks of 128 consecutive tokens share a scale."""
    precision = config.precision
    if precision.fp8_format and precision.fp8_recipe == "blockwise" and config.parallel.context_parallel_size > 1:
        yield Finding(
            f"{format_setting(config, 'fp8_recipe')} is not supported with {format_setting(config, _CP)}.",
            [create_change(fp8_recipe="rowwise"), create_change(context_parallel_size=1)],
        )
