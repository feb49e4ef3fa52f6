"""Rules about sharding over the data ranks: which dimensions optim_grads_params divides, and what it leaves to buckets."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megatron.config.checks.finding import (
    RANKS,
    Change,
    Finding,
    change,
    data_size,
    divisors,
    multiples_near,
    rule,
    try_values,
    without,
)
from megatron.config.checks.pipeline import COUNT, LAYERS_EACH, LAYOUT, PP
from megatron.config.config import Config
from megatron.config.model import ModelConfig
from megatron.spec.activations import FLAGS, GATED_FLAGS
from megatron.spec.layers import alike, layers
from megatron.spec.schedules import SCHEDULES, default_schedule
from megatron.spec.weights import Weight, layer_weights, outside_layers

_TP, VOCABULARY = "tensor_model_parallel_size", "make_vocab_size_divisible_by"
_SHAPE = (
    *("hidden_size", "ffn_hidden_size", *FLAGS, "num_attention_heads", "group_query_attention", "num_query_groups"),
    *("num_layers", "kv_channels", "seq_length", "max_position_embeddings", "position_embedding_type"),
    *("untie_embeddings_and_output_weights", VOCABULARY),
)
DIMENSIONS = (*_SHAPE, "sequence_parallel")
"""The settings from which the dimensions follow."""
_WIDTH = "hidden size", ("hidden_size",)
_VOCABULARY = "vocabulary, a multiple of", (VOCABULARY,)
_PARTS = {
    "embedding.position.": ("learned positions", ("max_position_embeddings", "seq_length")),
    "embedding.word.": _VOCABULARY,
    "output.": _VOCABULARY,
    "mlp.up.": ("width of the MLP", ("ffn_hidden_size", "hidden_size", *GATED_FLAGS)),
    "attention.qkv.": ("queries, keys and values", ("num_attention_heads", "num_query_groups", "kv_channels", "hidden_size")),
}
"""By the beginning of a parameter's name after the layer: the dimension that is divided, and the settings that it follows from. For
all other parameters it is the width of the residual stream."""


@dataclass(frozen=True)
class Dimension:
    """A dimension of some parameters that the ranks of an FSDP group divide."""

    what: str
    fields: tuple[str, ...]
    """Settings that it follows from, except the tensor size."""
    size: int
    """Its size on one tensor rank. For the vocabulary, which only the tokenizer knows, the number that always divides it."""


def split_dimensions(config: Config) -> list[Dimension]:
    """Every dimension of a tensor rank's parameters that is divided, on any stage; empty if heads or MLP have no width."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    if min(model.head_size, model.ffn_size) < 1:
        return []
    found = set()
    for weight in _weights(ModelConfig(**{field: getattr(model, field) for field in _SHAPE})):
        if weight.tied or weight.partial_over_tp(_splits_sequence(config)):
            continue  # these are left to buckets
        what, fields = next((_PARTS[start] for start in _PARTS if weight.part.startswith(start)), _WIDTH)
        size = weight.padded_to or weight.shape[weight.fsdp_dim]
        if weight.padded_to is None and (weight.fsdp_dim, "tp") in weight.splits:
            if size % tp:
                continue  # refused by another rule
            size, fields = size // tp, (*fields, _TP)
            what = f"{what} / TP" if tp > 1 else what
        found.add(Dimension(what, fields, size))
    order = [what for what, _ in (_WIDTH, *_PARTS.values())]
    return sorted(found, key=lambda one: (order.index(one.what.removesuffix(" / TP")), one.size))


def left_to_buckets(config: Config) -> list[str]:
    """What optim_grads_params leaves to buckets, in words: what is tied, and what tensor ranks sum their gradients of."""
    weights = list(_weights(config.model))
    left = {
        "the tied word embedding": any(weight.tied for weight in weights),
        "the norms of queries and keys": any(weight.partial_over_tp(False) for weight in weights),
        "what sequence parallelism leaves whole on each tensor rank": _splits_sequence(config),
    }
    return [what for what, is_left in left.items() if is_left]


def _weights(model: ModelConfig) -> Iterator[Weight]:
    """Parameters outside the layers, and those of one layer of each kind."""
    yield from outside_layers(model, vocab_size=1)
    for kind in alike(layers(model)):
        yield from layer_weights(model, kind, 0)


def _splits_sequence(config: Config) -> bool:
    return config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size > 1


STRATEGY, SHARD_SIZE, RESHARD = "data_parallel_sharding_strategy", "fsdp_shard_size", "fsdp_reshard_after_forward"

_SHARDING = (STRATEGY, "use_distributed_optimizer")
_ALL = "--data-parallel-sharding-strategy optim_grads_params"


@rule(SHARD_SIZE, "tensor_model_parallel_size", PP, reads=(*_SHARDING, *RANKS))
def shard_size_divides_data(config: Config, world_size: int) -> Iterator[Finding]:
    """Each group of --fsdp-shard-size data ranks shares one copy of the parameters. Without it, all data ranks do."""
    size, ranks = config.parallel.fsdp_shard_size, data_size(config, world_size)
    if config.parallel.sharding == "optim_grads_params" and size is not None and ranks is not None and ranks % size:
        yield Finding(
            f"--fsdp-shard-size {size} does not divide the {ranks} data rank{'s' * (ranks > 1)} "
            f"(world size {world_size} / (TP x CP x PP)).",
            [try_values(SHARD_SIZE, size, divisors(ranks))],
        )


@rule(reads=(*_SHARDING, SHARD_SIZE, RESHARD, *RANKS, *DIMENSIONS))
def dimensions_divide_by_shards(config: Config, world_size: int) -> Iterator[Finding]:
    """Each rank of an FSDP group holds an equal part of every parameter."""
    given, ranks = config.parallel.fsdp_shard_size, data_size(config, world_size)
    if config.parallel.sharding != "optim_grads_params" or ranks is None or ranks % (given or 1):
        return
    size = given or ranks
    uneven = [part for part in split_dimensions(config) if part.size % size]
    if not uneven:
        return
    fields = {field for part in uneven for field in part.fields}
    width, digits = max(len(part.what) for part in uneven), len(str(max(part.size for part in uneven)))
    yield Finding(
        f"{_ALL} cannot divide every parameter evenly over {size} data ranks{' (--fsdp-shard-size)' if given else ''}.",
        [
            try_values(SHARD_SIZE, size, [part for part in divisors(ranks) if 1 < part < size]),
            _even_sizes(config, fields, size),
            _other_strategy(config),
        ],
        "Each holds an equal part of every parameter, cut along one dimension."
        + (" (A vocabulary is padded to a multiple of --make-vocab-size-divisible-by x TP.)" if VOCABULARY in fields else ""),
        (STRATEGY, SHARD_SIZE, *sorted(fields)),
        tuple(f"{part.what:{width}}  {part.size:{digits}} = {part.size // size} x {size} + {part.size % size}" for part in uneven),
    )


def _even_sizes(config: Config, fields: Collection[str], size: int) -> tuple[Change, ...]:
    """Other sizes of the uneven dimensions that are settings of their own: both ways for one, upwards for several together."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    sizes = {
        VOCABULARY: (model.make_vocab_size_divisible_by, size),
        "max_position_embeddings": (model.num_positions, size),
        "ffn_hidden_size": (model.ffn_size, size * tp),
    }
    uneven = {field: found for field, found in sizes.items() if field in fields}
    if len(uneven) == 1:
        ((field, (current, unit)),) = uneven.items()
        return try_values(field, current, multiples_near(current, unit))
    return (change(**{field: -(-current // unit) * unit for field, (current, unit) in uneven.items()}),) if uneven else ()


@rule("pipeline_schedule", STRATEGY, reads=("use_distributed_optimizer", SHARD_SIZE, RESHARD, PP, LAYOUT, LAYERS_EACH, COUNT))
def late_gradients_find_their_block(config: Config, world_size: int) -> Iterator[Finding]:
    """It puts weight gradients off, but those of a block are reduced, and its parameters freed, when backward leaves the block."""
    schedule = config.parallel.schedule
    if config.parallel.sharding == "optim_grads_params" and SCHEDULES[schedule].splits_backward:
        interleaved = default_schedule(several_chunks=True)
        other_schedules = [
            change(pipeline_schedule=interleaved),
            without(config, COUNT, LAYERS_EACH, pipeline_schedule=default_schedule(several_chunks=False)),
            change(pipeline_schedule=interleaved, num_virtual_stages_per_pipeline_rank=2),
        ]
        message = f"--pipeline-schedule {schedule} cannot be used with {_ALL}."
        yield Finding(message, [other_schedules, _other_strategy(config)])


def _other_strategy(config: Config) -> Change:
    """The strongest strategy that leaves parameters whole."""
    return without(config, SHARD_SIZE, RESHARD, **{STRATEGY: "optim_grads"})
