"""Rules about context ranks, which share each sequence."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import Finding, change, divisors, multiples_near, rule, shown, try_values
from megatron.config.config import Config

_CP, _TP = "context_parallel_size", "tensor_model_parallel_size"


@rule("seq_length", _CP, reads=(_TP, "sequence_parallel"))
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
            + (f" and by both sizes with {shown(config, _TP)}." if shared > 1 else "."),
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
    _TP,
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
        f"{shown(config, 'cp_comm_type')}: the {heads} key-value heads do not divide by {shown(config, _TP)} "
        f"x {shown(config, _CP)}.",
        [
            change(cp_comm_type=other),
            try_values(_CP, cp, [size for size in divisors(heads) if heads % (tp * size) == 0]),
            try_values(_TP, tp, [size for size in divisors(heads) if heads % (cp * size) == 0]),
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
