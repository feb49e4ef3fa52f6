"""Which dimensions optim_grads_params divides, and what it leaves to buckets: what the records say, before there are any."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.checks.finding import positive
from megatron.config.config import Config
from megatron.spec.activations import FLAGS, GATED_FLAGS

_TP, VOCABULARY = "tensor_model_parallel_size", "make_vocab_size_divisible_by"
_MODEL = ("hidden_size", "ffn_hidden_size", *FLAGS, "num_attention_heads", "group_query_attention", "num_query_groups")
_POSITIONS = ("seq_length", "max_position_embeddings", "position_embedding_type", "sequence_parallel")
DIMENSIONS = (*_MODEL, "kv_channels", *_POSITIONS, "untie_embeddings_and_output_weights", VOCABULARY)
"""The settings from which they follow."""


@dataclass(frozen=True)
class Dimension:
    """A dimension of some parameters that the ranks of an FSDP group divide."""

    what: str
    fields: tuple[str, ...]
    """Settings that it follows from, the tensor size left out."""
    size: int
    """On one tensor rank. Of the vocabulary, which is known only with the tokenizer, the number that always divides it."""


def split_dimensions(config: Config) -> list[Dimension]:
    """Every dimension of a tensor rank's parameters that is divided, of any stage; those that are not known are left out."""
    model, parallel = config.model, config.parallel
    tp = parallel.tensor_model_parallel_size
    if not positive(tp, model.hidden_size):
        return []
    whole = [Dimension("hidden size", ("hidden_size",), model.hidden_size)]
    if model.position_embedding_type == "learned_absolute" and not _splits_sequence(config):
        whole.append(Dimension("learned positions", ("max_position_embeddings", "seq_length"), model.num_positions))
    if not model.tied:
        whole.append(Dimension("vocabulary, a multiple of", (VOCABULARY,), model.make_vocab_size_divisible_by))
    over_tensor = [Dimension("width of the MLP", ("ffn_hidden_size", "hidden_size", *GATED_FLAGS), model.ffn_size)]
    if positive(model.num_attention_heads, model.num_key_value_heads) and model.head_size > 0:
        rows = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_size
        fields = ("num_attention_heads", "num_query_groups", "kv_channels", "hidden_size")
        over_tensor.append(Dimension("queries, keys and values", fields, rows))
    return [
        *(part for part in whole if positive(part.size)),
        *(
            Dimension(f"{part.what} / TP" if tp > 1 else part.what, (*part.fields, _TP), part.size // tp)
            for part in over_tensor
            if positive(part.size) and part.size % tp == 0
        ),
    ]


def left_to_buckets(config: Config) -> list[str]:
    """What optim_grads_params leaves to buckets, in words: what is tied, and what tensor ranks sum their gradients of."""
    left = ["the tied word embedding"] if config.model.tied else []
    if config.model.qk_layernorm:
        left.append("the norms of queries and keys")
    if _splits_sequence(config):
        left.append("what sequence parallelism leaves whole on each tensor rank")
    return left


def _splits_sequence(config: Config) -> bool:
    return config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size > 1
