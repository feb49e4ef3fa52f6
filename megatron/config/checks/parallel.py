"""Rules about the layout: how model and ranks divide."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import (
    RANKS,
    Change,
    Finding,
    change,
    divides,
    divisors,
    multiples_near,
    rule,
    shown,
    try_values,
)
from megatron.config.config import Config
from megatron.config.launcher import read_place
from megatron.config.setting import acts_with
from megatron.spec.activations import SETTINGS
from megatron.spec.mlps import has_dense_layers

_TP = "tensor_model_parallel_size"


@rule("init_method")
def ranks_have_a_place_to_meet(config: Config, world_size: int) -> Iterator[Finding]:
    """It is env://, tcp://HOST:PORT with a port from 1 to 65535, or file:///PATH with a whole path."""
    if read_place(config.parallel.init_method) is None:
        yield Finding(f"{shown(config, 'init_method')} is no place where ranks can meet.", [change(init_method="env://")])


@rule(*RANKS)
def world_divides(config: Config, world_size: int) -> Iterator[Finding]:
    """TP x CP x PP ranks hold the model once, and the world holds it a whole number of times."""
    parallel = config.parallel
    tp, cp, pp = parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.pipeline_model_parallel_size
    if world_size < 1 or world_size % (tp * cp * pp) == 0:
        return
    worlds = sorted(multiples_near(world_size, tp * cp * pp), key=lambda size: abs(size - world_size))
    yield Finding(
        f"The world size {world_size} does not divide by TP x CP x PP = {tp} x {cp} x {pp} = {tp * cp * pp} "
        f"(--tensor-model-parallel-size, --context-parallel-size, --pipeline-model-parallel-size).",
        [
            [Change(world_size=size) for size in worlds],
            try_values(_TP, tp, divisors(world_size)),
            try_values("pipeline_model_parallel_size", pp, divisors(world_size)),
        ],
    )


heads_divide_by_tensor = divides("num_attention_heads", _TP, "Each tensor rank holds whole heads.")


@rule(
    "num_query_groups",
    _TP,
    reads=("group_query_attention", "num_attention_heads", "kv_channels", "hidden_size", "multi_latent_attention"),
)
def query_groups_fit_tensor(config: Config, world_size: int) -> Iterator[Finding]:
    """Each tensor rank holds the same number of key-value heads; or the same number of ranks share each of them, and divide the
    rows of its queries, key and value evenly."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    groups = model.num_query_groups
    if not model.group_query_attention or groups < 1 or model.num_attention_heads % tp or model.num_attention_heads % groups:
        return
    if groups % tp == 0 or (tp % groups == 0 and 2 * model.head_size * groups % tp == 0):
        return
    whole = [size for size in divisors(model.num_attention_heads) if groups % size == 0 or size % groups == 0]
    yield Finding(
        f"{shown(config, 'num_query_groups')} fits no {shown(config, _TP)}: "
        + (
            f"{tp // groups} ranks cannot divide the rows of a key-value head of {model.head_size} channels and its query heads."
            if tp % groups == 0
            else "neither divides the other."
        ),
        [
            try_values(_TP, tp, whole),
            try_values("num_query_groups", groups, [size for size in divisors(model.num_attention_heads) if size % tp == 0]),
        ],
    )


@rule("qk_layernorm_all_heads", _TP, reads=("qk_layernorm", "num_query_groups", "group_query_attention", "num_attention_heads"))
def shared_heads_are_normalised_apart(config: Config, world_size: int) -> Iterator[Finding]:
    """Where tensor ranks share key-value heads, all key heads are not normalised together: each rank would count them again."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    if model.qk_layernorm and model.qk_layernorm_all_heads and model.num_key_value_heads < tp:
        yield Finding(
            f"{shown(config, 'qk_layernorm_all_heads')} contradicts {shown(config, _TP)}, at which ranks share the "
            f"{model.num_key_value_heads} key-value heads.",
            [try_values(_TP, tp, divisors(model.num_key_value_heads)), change(qk_layernorm_all_heads=False)],
        )


@rule("ffn_hidden_size", _TP, "hidden_size", reads=(*SETTINGS, "num_experts", "moe_layer_freq", "num_layers"))
def mlp_divides_by_tensor(config: Config, world_size: int) -> Iterator[Finding]:
    """Each tensor rank holds the same part of the MLP's width."""
    width, tp = config.model.ffn_size, config.parallel.tensor_model_parallel_size
    if width > 0 and width % tp and has_dense_layers(config.model):
        yield Finding(
            f"The width of the MLP {width} (--ffn-hidden-size) does not divide by --tensor-model-parallel-size {tp}.",
            [try_values("ffn_hidden_size", width, multiples_near(width, tp)), try_values(_TP, tp, divisors(width))],
        )


sequence_divides_by_tensor = divides(
    "seq_length",
    _TP,
    "With --sequence-parallel each tensor rank holds the same number of tokens of a sequence.",
    where=acts_with(sequence_parallel=True),
)


@rule("device", "distributed_backend")
def backend_fits_device(config: Config, world_size: int) -> Iterator[Finding]:
    """NCCL moves only what lies on CUDA devices."""
    if config.parallel.device == "cpu" and config.parallel.distributed_backend == "nccl":
        message = "--distributed-backend nccl cannot be used with --device cpu."
        yield Finding(message, [change(distributed_backend="gloo"), change(device="cuda")])


@rule("profile_ranks", "profile")
def profiled_ranks_exist(config: Config, world_size: int) -> Iterator[Finding]:
    """Ranks to profile are ranks of the world, counted from 0."""
    ranks = config.logging.profile_ranks
    outside = sorted({rank for rank in ranks if rank >= world_size})
    if config.logging.profile and world_size > 0 and outside:
        inside = tuple(sorted({min(rank, world_size - 1) for rank in ranks}))
        yield Finding(
            f"--profile-ranks names {', '.join(map(str, outside))}, but the world size is {world_size}.",
            [change(profile_ranks=inside), Change(world_size=outside[-1] + 1)],
            f"Ranks are 0 to {world_size - 1}.",
        )


# ---- Rules about context ranks, which share each sequence.

_CP, _TENSOR = "context_parallel_size", "tensor_model_parallel_size"


@rule("seq_length", _CP, reads=(_TENSOR, "sequence_parallel"))
def sequence_divides_by_context(config: Config, world_size: int) -> Iterator[Finding]:
    """Each context rank holds two equal pieces of a sequence, one from the front and one from the back, so that all have as much
    attention to compute; with --sequence-parallel its tensor ranks share these tokens evenly."""
    length, cp, tp = config.model.seq_length, config.parallel.context_parallel_size, config.parallel.tensor_model_parallel_size
    if cp == 1 or length < 1:
        return
    shared = tp if config.parallel.sequence_parallel else 1
    unit = cp * max(2, shared if shared % 2 == 0 else 2 * shared)
    if length % unit:
        whole = [size for size in divisors(length) if size == 1 or (length % (2 * size) == 0 and length // size % shared == 0)]
        yield Finding(
            f"{shown(config, 'seq_length')} does not divide by 2 x {shown(config, _CP)}"
            + (f" and by both sizes with {shown(config, _TENSOR)}." if shared > 1 else "."),
            [try_values("seq_length", length, multiples_near(length, unit)), try_values(_CP, cp, whole)],
        )


@rule("cp_comm_type", "num_layers")
def every_layer_has_a_way(config: Config, world_size: int) -> Iterator[Finding]:
    """--cp-comm-type is one word for all layers, or one for each."""
    ways, layers = config.parallel.cp_comm_type, config.model.num_layers
    if len(ways) > 1 and len(ways) != layers:
        yield Finding(
            f"--cp-comm-type has {len(ways)} words, but there are {layers} layers (--num-layers).",
            [change(cp_comm_type=(ways[0],)), change(cp_comm_type=(*ways, *ways[-1:] * (layers - len(ways)))[:layers])],
        )


@rule(
    "cp_comm_type",
    _CP,
    _TENSOR,
    reads=("num_attention_heads", "num_query_groups", "group_query_attention", "multi_latent_attention"),
)
def heads_divide_among_context_ranks(config: Config, world_size: int) -> Iterator[Finding]:
    """With a2a each context rank computes some heads of all tokens: it takes as many key-value heads of its tensor rank as any
    other."""
    parallel, model = config.parallel, config.model
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads = model.num_attention_heads if model.multi_latent_attention else model.num_key_value_heads
    if cp == 1 or "a2a" not in parallel.cp_comm_type or heads < 1 or (heads % tp == 0 and heads // tp % cp == 0):
        return
    other = tuple("all_gather" if way == "a2a" else way for way in parallel.cp_comm_type)
    yield Finding(
        f"{shown(config, 'cp_comm_type')}: the {heads} key-value heads do not divide by {shown(config, _TENSOR)} "
        f"x {shown(config, _CP)}.",
        [
            change(cp_comm_type=other),
            try_values(_CP, cp, [size for size in divisors(heads) if heads % (tp * size) == 0]),
            try_values(_TENSOR, tp, [size for size in divisors(heads) if heads % (cp * size) == 0]),
        ],
    )


@rule("fp8_recipe", _CP, reads=("fp8_format",))
def strips_of_tokens_stay_whole(config: Config, world_size: int) -> Iterator[Finding]:
    """Context ranks divide the tokens, of which 128 neighbours have a scale in common."""
    precision = config.precision
    if precision.fp8_format and precision.fp8_recipe == "blockwise" and config.parallel.context_parallel_size > 1:
        yield Finding(
            f"{shown(config, 'fp8_recipe')} is not built with {shown(config, _CP)}.",
            [change(fp8_recipe="rowwise"), change(context_parallel_size=1)],
        )
