"""Rules about the layout: how model and ranks divide."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import (
    RANKS,
    Change,
    Finding,
    change,
    divisors,
    multiples_near,
    positive,
    rule,
    try_values,
    uneven,
)
from megatron.config.config import Config
from megatron.spec.activations import FLAGS

_TP = "tensor_model_parallel_size"


@rule(*RANKS)
def world_divides(config: Config, world_size: int) -> Iterator[Finding]:
    """TP x CP x PP ranks hold the model once; the world holds it a whole number of times."""
    parallel = config.parallel
    tp, cp, pp = parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.pipeline_model_parallel_size
    if not positive(world_size, tp, cp, pp) or world_size % (tp * cp * pp) == 0:
        return
    worlds = sorted(multiples_near(world_size, tp * cp * pp), key=lambda size: abs(size - world_size))
    yield Finding(
        (_TP, "context_parallel_size", "pipeline_model_parallel_size"),
        f"The world size {world_size} does not divide by TP x CP x PP = {tp} x {cp} x {pp} = {tp * cp * pp} "
        f"(--tensor-model-parallel-size, --context-parallel-size, --pipeline-model-parallel-size).",
        "So many ranks hold the model once, and the world holds it a whole number of times.",
        (
            tuple(Change(world_size=size) for size in worlds),
            try_values(_TP, tp, divisors(world_size)),
            try_values("pipeline_model_parallel_size", pp, divisors(world_size)),
        ),
    )


@rule("num_attention_heads", _TP)
def heads_divide_by_tensor(config: Config, world_size: int) -> Iterator[Finding]:
    """Each tensor rank holds whole query heads."""
    heads, tp = config.model.num_attention_heads, config.parallel.tensor_model_parallel_size
    if positive(heads, tp) and heads % tp:
        yield uneven(config, "num_attention_heads", _TP, "Each tensor rank holds whole heads.")


@rule("group_query_attention", "num_query_groups", _TP)
def query_groups_divide_by_tensor(config: Config, world_size: int) -> Iterator[Finding]:
    """Each tensor rank holds whole key-value heads, of its own."""
    groups, tp = config.model.num_query_groups, config.parallel.tensor_model_parallel_size
    if not config.model.group_query_attention or not positive(groups, tp) or groups % tp == 0:
        return
    if groups < tp:
        why = "Copying a key-value head to several tensor ranks is not built yet; each needs one of its own."
        yield uneven(config, "num_query_groups", _TP, why, said="is less than")
    else:
        yield uneven(config, "num_query_groups", _TP, "Each tensor rank holds whole key-value heads.")


@rule("ffn_hidden_size", "hidden_size", *FLAGS, _TP)
def mlp_divides_by_tensor(config: Config, world_size: int) -> Iterator[Finding]:
    """Each tensor rank holds the same width of the MLP."""
    width, tp = config.model.ffn_size, config.parallel.tensor_model_parallel_size
    if positive(width, tp) and width % tp:
        yield Finding(
            ("ffn_hidden_size", _TP, "hidden_size"),
            f"The width of the MLP {width} (--ffn-hidden-size) does not divide by --tensor-model-parallel-size {tp}.",
            "Each tensor rank holds the same part of it.",
            (try_values("ffn_hidden_size", width, multiples_near(width, tp)), try_values(_TP, tp, divisors(width))),
        )


@rule("seq_length", "sequence_parallel", _TP)
def sequence_divides_by_tensor(config: Config, world_size: int) -> Iterator[Finding]:
    """Under sequence parallelism each tensor rank holds the same number of tokens."""
    length, tp = config.model.seq_length, config.parallel.tensor_model_parallel_size
    if config.parallel.sequence_parallel and positive(length, tp) and length % tp:
        yield Finding(
            ("seq_length", _TP, "sequence_parallel"),
            f"--seq-length {length} does not divide by --tensor-model-parallel-size {tp}, as --sequence-parallel needs.",
            "Each tensor rank holds the same number of tokens of a sequence.",
            (
                try_values("seq_length", length, multiples_near(length, tp)),
                try_values(_TP, tp, divisors(length)),
                (change(sequence_parallel=False),),
            ),
        )


@rule("context_parallel_size", "expert_model_parallel_size")
def only_built_axes(config: Config, world_size: int) -> Iterator[Finding]:
    """Context and expert parallelism are not built yet."""
    parallel = config.parallel
    for field, size, what in (
        ("context_parallel_size", parallel.context_parallel_size, "Splitting the sequence over context ranks"),
        ("expert_model_parallel_size", parallel.expert_model_parallel_size, "A mixture of experts"),
    ):
        if size > 1:
            yield Finding(
                (field,),
                f"--{field.replace('_', '-')} {size} is refused.",
                f"{what} is not built yet; the size must be 1.",
                ((change(**{field: 1}),),),
            )


@rule("device", "distributed_backend")
def backend_fits_device(config: Config, world_size: int) -> Iterator[Finding]:
    """NCCL moves only what lies on CUDA devices."""
    if config.parallel.device == "cpu" and config.parallel.distributed_backend == "nccl":
        yield Finding(
            ("device", "distributed_backend"),
            "--distributed-backend nccl cannot be used with --device cpu.",
            "NCCL moves only what lies on CUDA devices.",
            ((change(distributed_backend="gloo"),), (change(device="cuda"),)),
        )


@rule("profile", "profile_ranks")
def profiled_ranks_exist(config: Config, world_size: int) -> Iterator[Finding]:
    """Ranks to profile are ranks of the world."""
    outside = sorted({rank for rank in config.logging.profile_ranks if rank >= world_size})
    if config.logging.profile and world_size > 0 and outside:
        inside = tuple(sorted({min(rank, world_size - 1) for rank in config.logging.profile_ranks}))
        yield Finding(
            ("profile_ranks", "profile"),
            f"--profile-ranks names {', '.join(map(str, outside))}, but the world size is {world_size}.",
            f"Ranks are 0 to {world_size - 1}.",
            ((change(profile_ranks=inside),), (Change(world_size=outside[-1] + 1),)),
        )
