"""Specifications of the model's parameters. The modules are built from these specifications, and all counts are derived from them.

Shapes: `h` hidden size, `v` vocabulary size, `f` intermediate size of the MLP, `E` number of experts; `in` inputs and `out` outputs
of a linear layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from megatron.config.model import ModelConfig
from megatron.spec.layers import (
    AttentionSpec,
    LatentAttentionSpec,
    LayerSpec,
    NormSpec,
    build_layer_specs,
    build_mtp_layer_specs,
    build_norm_spec,
)
from megatron.spec.mlps import ExpertsSpec, MLPSpec

WORD_EMBEDDING = "embedding.word.weight"
OUTPUT_WEIGHT = "output.weight"
"""Weight of an untied output layer."""
LORA_A, LORA_B = "lora_a.weight", "lora_b.weight"
"""Names of the two matrices of a LoRA adapter, appended to the name of its linear layer."""
_IN_LAYER = re.compile(r"layers\.(\d+)(?:\.(.+))?")
_IN_DEPTH = re.compile(r"mtp\.(\d+)(?:\.(.+))?")


def split_layer_name(name: str) -> tuple[int | None, str]:
    """Split a global parameter name into the layer index and the name within the layer.

    "layers.17.mlp.up.weight" gives (17, "mlp.up.weight"). The name of a layer itself, "layers.17", gives (17, ""). A parameter
    outside the layers gives (None, its full name). Layers are counted over the whole model.
    """
    match = _IN_LAYER.fullmatch(name)
    return (int(match[1]), match[2] or "") if match else (None, name)


def parse_mtp_depth(name: str) -> int | None:
    """Return the depth of multi-token prediction to which a parameter belongs, counted from 0; None for a parameter of the main
    model.

    Args:
        name: global parameter name, such as "mtp.0.projection.weight".
    """
    match = _IN_DEPTH.fullmatch(name)
    return int(match[1]) if match else None


def get_score_row(name: str) -> int:
    """Return the row of a layer in a table of maximum attention scores, which has one row per layer.

    Layers of the main model are rows 0, 1, ...; depths of multi-token prediction are rows -1, -2, ...

    Args:
        name: name of the layer, or of one of its parameters.
    """
    layer_index, mtp_depth = split_layer_name(name)[0], parse_mtp_depth(name)
    assert layer_index is not None or mtp_depth is not None, "attention scores belong to layers"
    return layer_index if mtp_depth is None else -1 - mtp_depth  # type: ignore[return-value]


@dataclass(frozen=True)
class Init:
    """Distribution of the initial values of a parameter: normal with standard deviation `std`, or `constant` if `std` is 0."""

    std: float = 0.0
    constant: float = 0.0


Role = Literal["input", "hidden", "output"]
ParamType = Literal["matrix", "table", "vector"]


@dataclass(frozen=True)
class FusedHeads:
    """Layout of the rows of a fused query-key-value matrix.

    The matrix has one group of rows per key-value head: its query heads, its key head and its value head.
    """

    queries_per_group: int
    """Number of query heads in a group."""
    head_size: int
    """Number of rows per query, key or value head."""


@dataclass(frozen=True)
class ScoreRows:
    """Layout of the rows of a matrix that produces queries or keys, by attention head. The rows consist of equal units, one after
    another.

    A unit has the rows of one query head, or of one key-value head with its query heads.
    """

    queries_per_unit: int
    """Number of query heads to which the rows of a unit belong. (A unit has the rows of one query head, or of one key-value
    head with its query heads.)"""
    sections: tuple[tuple[int, Literal["query", "key", "both", "none"]], ...]
    """Sections into which the rows of each unit are divided, in order: (number of rows, what the rows produce).

    "query" and "key" rows produce queries and keys, and "none" rows (values) neither. "both" rows produce rotary query
    channels, whose key is shared by all heads.
    """


@dataclass(frozen=True)
class CountUpdate:
    """Update of a vector from the number of tokens that each expert processed, such as the expert bias of DeepSeek-V3.

    The vector has one element per expert and no gradient. The numbers of tokens are those of a global batch.
    """

    update_rate: float | None = None
    """Amount by which a step changes an element of the expert bias (DeepSeek-V3, section 2.1.2).

    The amount is added for an expert with fewer tokens than the mean over experts, and subtracted for an expert with more.
    None: the element becomes the expert's number of tokens, divided by the mean.
    """


@dataclass(frozen=True)
class ParamInfo:
    """Properties of one parameter of the unsharded model, such as shape and type, which do not depend on the parallel layout."""

    name: str
    """Name of the parameter in the full model: layer indices are counted over the whole model, not over a stage."""
    shape: tuple[int, ...]
    """Shape of the full parameter over all ranks, without padding."""
    param_type: ParamType = field(default="matrix", kw_only=True)
    """Type of the parameter.

    A matrix [..., out, in] multiplies activations. The rows of a table are looked up by token or position. Vectors are biases
    and weights of norms; one tensor may contain several. Optimizers of matrices use the last two dimensions of a matrix or
    table.
    """
    init: Init = field(default=Init(), kw_only=True)
    tied: bool = field(default=False, kw_only=True)
    """Whether the first and the last model chunk of the pipeline share the parameter.

    This is the word embedding, if the output layer or multi-token prediction also uses it.
    """
    mup_width: float = field(default=1.0, kw_only=True)
    """Width of the model divided by the width of the muP base model; 1 without muP."""
    fused_heads: FusedHeads | None = field(default=None, kw_only=True)
    """Layout of the rows of a fused query-key-value projection; None for other parameters."""
    score_rows: ScoreRows | None = field(default=None, kw_only=True)
    """Layout of the rows of a matrix, or of the elements of a bias, that produce queries or keys.

    None if the parameter produces no queries or keys.
    """
    count_update: CountUpdate | None = field(default=None, kw_only=True)
    """Update of the parameter from the number of tokens per expert; None if the parameter is updated from its gradient."""
    frozen: bool = field(default=False, kw_only=True)
    """Whether the parameter is never updated. It has no gradient and no optimizer state.

    With LoRA, all parameters except the adapters are frozen.
    """

    @property
    def role(self) -> Role:
        """Role of the parameter in muP (Yang et al. 2022, table 8): which of its dimensions grow with the model's width.

        "hidden": both inputs and outputs. "input" (also embeddings, biases and norms): only the outputs. "output": only the inputs.
        """
        if self.name == OUTPUT_WEIGHT:
            return "output"
        return "hidden" if self.param_type == "matrix" else "input"

    @property
    def has_weight_decay(self) -> bool:
        """Whether weight decay can apply to the parameter: to all parameters except vectors."""
        return self.param_type != "vector"


@dataclass(frozen=True)
class WeightSpec(ParamInfo):
    """Specification of a parameter: its properties, and how ranks shard it. It is valid for every parallel layout."""

    splits: tuple[tuple[int, str], ...] = ()
    """Pairs (dimension, axis): the ranks along the parallel axis ("tp", "ep" or "etp") split the dimension."""
    padding_multiple: int | None = None
    """The first dimension is padded to a multiple of this value times the number of ranks that split it. None for no padding."""
    applies_to_local_heads: bool = False
    """Whether every tensor-parallel rank stores the full weight but applies it to its local heads only."""
    num_active_experts: int | None = None
    """Number of experts (entries along the first dimension) that process a token; None if the weight has no expert dimension."""

    @property
    def active_numel(self) -> int:
        """Number of elements that are multiplied with a token. Of experts, only those count to which a token is routed."""
        return self.numel if self.num_active_experts is None else self.numel // self.shape[0] * self.num_active_experts

    @property
    def is_expert(self) -> bool:
        """Whether the weight is sharded over the expert or expert-tensor axis."""
        return any(axis in ("etp", "ep") for _, axis in self.splits)

    @property
    def name_in_layer(self) -> str:
        """Name of the parameter within its layer, such as "mlp.up.weight". For a parameter outside the layers, its full name."""
        return self.name.split(".", 2)[2] if self.name.startswith("layers.") else self.name

    @property
    def numel(self) -> int:
        """Number of elements, without padding."""
        return math.prod(self.shape)

    def has_partial_tp_grad(self, sequence_parallel: bool) -> bool:
        """Return whether the gradient on a tensor-parallel rank is a partial sum, which must be summed over these ranks.

        This is the case if every rank stores the full weight but applies it only to its part of the sequence or to its local heads.
        """
        return not self.splits and (sequence_parallel or self.applies_to_local_heads)

    def get_padded_size(self, num_ranks: int) -> int | None:
        """Return the padded size of the first dimension if `num_ranks` ranks split it; None if the weight is not padded."""
        return None if self.padding_multiple is None else pad_vocab_size(self.shape[0], self.padding_multiple, num_ranks)


def pad_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """Round the vocabulary size up to a multiple of `divisible_by` x `tp`."""
    multiple = divisible_by * tp
    return -(-vocab_size // multiple) * multiple


def iter_weights(model: ModelConfig, vocab_size: int) -> Iterator[WeightSpec]:
    """Yield the specification of every parameter once, in forward order.

    Args:
        vocab_size: rows of the word embedding, without padding.
    """
    for weight in _iter_forward_order(model, vocab_size):
        yield weight if model.width_multiplier == 1.0 else replace(weight, mup_width=model.width_multiplier)


def _iter_forward_order(model: ModelConfig, vocab_size: int) -> Iterator[WeightSpec]:
    non_layer_weights = list(iter_non_layer_weights(model, vocab_size))
    yield from (weight for weight in non_layer_weights if weight.name_in_layer.startswith("embedding."))
    for layer_index, layer_spec in enumerate(build_layer_specs(model)):
        yield from iter_layer_weights(model, layer_spec, layer_index)
    yield from (weight for weight in non_layer_weights if not weight.name_in_layer.startswith("embedding."))
    for mtp_depth, layer_spec in enumerate(build_mtp_layer_specs(model)):
        yield from iter_mtp_weights(model, layer_spec, mtp_depth)


def iter_mtp_weights(model: ModelConfig, layer_spec: LayerSpec, mtp_depth: int) -> Iterator[WeightSpec]:
    """Yield the parameters of one depth of multi-token prediction: two norms, a projection [h, 2h] and a transformer layer.

    Args:
        layer_spec: specification of the transformer layer.
        mtp_depth: index of the depth, counted from 0.
    """
    hidden, std = model.hidden_size, model.init_method_std / model.width_multiplier**0.5
    yield from build_norm(f"mtp.{mtp_depth}.hidden_norm", build_norm_spec(model), hidden)
    yield from build_norm(f"mtp.{mtp_depth}.embedding_norm", build_norm_spec(model), hidden)
    yield WeightSpec(f"mtp.{mtp_depth}.projection.weight", (hidden, 2 * hidden), init=Init(std))
    yield from iter_layer_weights(model, layer_spec, model.num_layers + mtp_depth, f"mtp.{mtp_depth}.layer")


def iter_non_layer_weights(model: ModelConfig, vocab_size: int) -> Iterator[WeightSpec]:
    """Yield the parameters outside the transformer layers. With LoRA they are frozen."""
    for weight in _iter_non_layer_weights(model, vocab_size):
        yield weight if model.lora_rank is None else replace(weight, frozen=True)


def _iter_non_layer_weights(model: ModelConfig, vocab_size: int) -> Iterator[WeightSpec]:
    """Yield the parameters outside the transformer layers, in forward order.

    They are the word embedding [v, h] (`v` vocabulary size, `h` hidden size); learned position embeddings [positions, h] and the
    embedding norm, if the model has them; the final norm; and the output layer [v, h], unless it is tied.
    """
    yield build_vocab_weight(WORD_EMBEDDING, model, vocab_size, "table")
    if model.position_embedding_type == "learned_absolute":
        shape = (model.num_positions, model.hidden_size)
        yield WeightSpec("embedding.position.weight", shape, param_type="table", init=Init(model.init_method_std))
    if model.embedding_layernorm:
        yield from build_norm("embedding.norm", build_norm_spec(model), model.hidden_size)
    yield from build_norm("final_norm", build_norm_spec(model), model.hidden_size)
    if not model.has_tied_embeddings:
        yield build_output_weight(model, vocab_size)


def build_output_weight(model: ModelConfig, vocab_size: int) -> WeightSpec:
    """Build the specification of the output layer's matrix [v, h]: the word embedding if tied, otherwise a separate weight."""
    return build_vocab_weight(
        WORD_EMBEDDING if model.has_tied_embeddings else OUTPUT_WEIGHT,
        model,
        vocab_size,
        "table" if model.has_tied_embeddings else "matrix",
    )


def build_vocab_weight(name: str, model: ModelConfig, vocab_size: int, param_type: ParamType) -> WeightSpec:
    """Build the specification of a matrix [v, h] with one row per token id, padded and split over the tensor-parallel ranks."""
    return WeightSpec(
        name,
        (vocab_size, model.hidden_size),
        ((0, "tp"),),
        param_type=param_type,
        init=Init(model.init_method_std),
        padding_multiple=model.make_vocab_size_divisible_by,
        tied=name == WORD_EMBEDDING and (model.has_tied_embeddings or model.mtp_num_layers > 0),
    )


def iter_layer_weights(
    model: ModelConfig, layer_spec: LayerSpec, layer_index: int, name: str | None = None
) -> Iterator[WeightSpec]:
    """Yield the parameters of one layer. With LoRA they are frozen, and each adapted linear layer is followed by its adapter.

    Args:
        name: prefix of the parameter names; by default "layers.{layer_index}".
    """
    name = name or f"layers.{layer_index}"
    for weight in _iter_layer_weights(model, layer_spec, name):
        if model.lora_rank is None:
            yield weight
            continue
        yield replace(weight, frozen=True)
        if weight.name in {f"{name}.{target}.weight" for target in model.lora_targets}:
            yield from _build_lora_adapter(weight, model.lora_rank)


def _build_lora_adapter(weight: WeightSpec, rank: int) -> Iterator[WeightSpec]:
    """Yield the two LoRA matrices of a linear layer whose weight is [..., out, in].

    `lora_a` is [rank, in], initialized with the variance of PEFT's default (Kaiming uniform with a = sqrt(5)). `lora_b` is [...,
    out, rank] and starts at zero. Their inputs and outputs are sharded as those of the weight.

    Args:
        rank: rank of the low-rank update.
    """
    *outputs, inputs = weight.shape
    layer, input_dim = weight.name.removesuffix(".weight"), len(outputs)
    input_splits = tuple((1, axis) for dim, axis in weight.splits if dim == input_dim)
    output_splits = tuple((dim, axis) for dim, axis in weight.splits if dim != input_dim)
    yield WeightSpec(f"{layer}.{LORA_A}", (rank, inputs), input_splits, init=Init((3 * inputs) ** -0.5))
    yield WeightSpec(f"{layer}.{LORA_B}", (*outputs, rank), output_splits)


def _iter_layer_weights(model: ModelConfig, layer_spec: LayerSpec, name: str) -> Iterator[WeightSpec]:
    """Yield the parameters of one layer, without LoRA adapters.

    Output projections of attention and MLP are initialized with standard deviation std / sqrt(2 x number of layers) (GPT-2). With
    muP, the standard deviation of matrices is divided by sqrt(width / base width). Tables and the output layer keep theirs (Yang et
    al. 2022).

    Args:
        name: prefix of the parameter names.
    """
    hidden, attention, mlp = model.hidden_size, layer_spec.attention, layer_spec.mlp
    std = model.init_method_std / model.width_multiplier**0.5
    output_std = std / (2 * model.num_layers) ** 0.5
    norms = {norm_name: list(build_norm(f"{name}.{norm_name}", layer_spec.norm, hidden)) for norm_name in layer_spec.norm_names}
    yield from norms.get("attention_norm", ())
    if isinstance(attention, LatentAttentionSpec):
        yield from _build_latent_attention(f"{name}.attention", attention, layer_spec.norm, hidden, std)
        num_inputs = attention.num_heads * attention.v_head_dim
    else:
        yield from _build_attention(f"{name}.attention", attention, layer_spec.norm, hidden, std)
        num_inputs = attention.num_heads * attention.head_size
    if attention.scores.softmax == "learnable":
        yield WeightSpec(f"{name}.attention.sinks", (attention.num_heads,), ((0, "tp"),), param_type="vector")
    yield from build_row_parallel_linear(f"{name}.attention.output", num_inputs, hidden, bias=attention.output_bias, std=output_std)
    yield from (*norms.get("attention_post_norm", ()), *norms.get("mlp_norm", ()))
    if isinstance(mlp, MLPSpec):
        yield from _build_mlp(f"{name}.mlp", mlp, hidden, std, output_std)
    else:
        yield from _build_experts(f"{name}.mlp", mlp, hidden, std, output_std)
    yield from norms.get("mlp_post_norm", ())


def _build_attention(name: str, attention: AttentionSpec, norm_spec: NormSpec, hidden: int, std: float) -> Iterator[WeightSpec]:
    """Yield the fused query-key-value projection and the norms of queries and keys."""
    fused_heads = FusedHeads(attention.num_heads // attention.num_kv_heads, attention.head_size)
    score_rows = ScoreRows(
        fused_heads.queries_per_group,
        (
            (fused_heads.queries_per_group * fused_heads.head_size, "query"),
            (fused_heads.head_size, "key"),
            (fused_heads.head_size, "none"),
        ),
    )
    yield from build_column_parallel_linear(
        f"{name}.qkv", hidden, attention.qkv_size, bias=attention.qkv_bias, std=std, fused_heads=fused_heads, score_rows=score_rows
    )
    for norm_name, num_heads in (("q_norm", attention.num_heads), ("k_norm", attention.num_kv_heads)):
        if attention.qk_norm == "each_head":
            yield from build_norm(f"{name}.{norm_name}", norm_spec, attention.head_size, applies_to_local_heads=True)
        elif attention.qk_norm == "all_heads":
            yield from build_norm(f"{name}.{norm_name}", norm_spec, num_heads * attention.head_size, splits=((0, "tp"),))


def _build_mlp(name: str, mlp: MLPSpec, hidden: int, std: float, output_std: float) -> Iterator[WeightSpec]:
    yield from build_column_parallel_linear(
        f"{name}.up", hidden, mlp.ffn_size, bias=mlp.bias, std=std, num_halves=2 if mlp.activation.is_gated else 1
    )
    yield from build_row_parallel_linear(f"{name}.down", mlp.ffn_size, hidden, bias=mlp.bias, std=output_std)


def _build_experts(name: str, mlp: ExpertsSpec, hidden: int, std: float, output_std: float) -> Iterator[WeightSpec]:
    """Yield the parameters of a mixture-of-experts layer with `E` experts, intermediate size `f` and hidden size `h`.

    They are the router [E, h]; the expert bias [E] or the load of each expert in the last step [E], if the router has them; the
    matrices of all experts: `up` [E, f, h] (gated: [E, 2, f, h]) and `down` [E, h, f]; and the shared expert, an MLP with an
    optional gate [1, h].
    """
    num_experts, top_k, ffn_size = mlp.router.num_experts, mlp.router.top_k, mlp.expert.ffn_size
    yield build_replicated_linear(f"{name}.router", hidden, num_experts, std=std)
    if mlp.router.bias_update_rate is not None:
        yield WeightSpec(
            f"{name}.router.bias", (num_experts,), param_type="vector", count_update=CountUpdate(mlp.router.bias_update_rate)
        )
    if mlp.router.balancing == "global_aux_loss":
        yield WeightSpec(
            f"{name}.router.shares", (num_experts,), param_type="vector", init=Init(constant=1.0), count_update=CountUpdate()
        )
    up_shape = (num_experts, *((2,) if mlp.expert.activation.is_gated else ()), ffn_size, hidden)
    up_splits = ((0, "ep"), (len(up_shape) - 2, "etp"))
    yield WeightSpec(f"{name}.experts.up.weight", up_shape, up_splits, init=Init(std), num_active_experts=top_k)
    yield WeightSpec(
        f"{name}.experts.down.weight",
        (num_experts, hidden, ffn_size),
        ((0, "ep"), (2, "etp")),
        init=Init(output_std),
        num_active_experts=top_k,
    )
    if mlp.shared_expert is not None:
        yield from _build_mlp(f"{name}.shared", mlp.shared_expert, hidden, std, output_std)
        if mlp.has_shared_gate:
            yield build_replicated_linear(f"{name}.shared_gate", hidden, 1, std=std)


def _build_latent_attention(
    name: str, attention: LatentAttentionSpec, norm_spec: NormSpec, hidden: int, std: float
) -> Iterator[WeightSpec]:
    """Yield the projections of multi-head latent attention.

    They are the projection to queries, directly or through a latent; the projections to and from the key-value latent; and the
    projection to the rotary key channels that all heads share. The rows of a head are ordered: in `q` and `q_up`, first channels
    without rotary embedding, then rotary channels; in `kv_up`, first key channels without rotary embedding, then value channels.
    """
    query_rows = ScoreRows(1, ((attention.qk_head_dim, "query"), (attention.qk_pos_emb_head_dim, "both")))
    key_rows = ScoreRows(1, ((attention.qk_head_dim, "key"), (attention.v_head_dim, "none")))
    if attention.q_lora_rank is None:
        yield from build_column_parallel_linear(
            f"{name}.q", hidden, attention.num_heads * attention.head_size, bias=False, std=std, score_rows=query_rows
        )
    else:
        yield build_replicated_linear(f"{name}.q_down", hidden, attention.q_lora_rank, std=std)
        if attention.has_latent_norm:
            yield from build_norm(f"{name}.q_latent_norm", norm_spec, attention.q_lora_rank)
        q_size = attention.num_heads * attention.head_size
        yield from build_column_parallel_linear(
            f"{name}.q_up", attention.q_lora_rank, q_size, bias=False, std=std, score_rows=query_rows
        )
    yield build_replicated_linear(f"{name}.kv_down", hidden, attention.kv_lora_rank, std=std)
    yield build_replicated_linear(f"{name}.k_rotary", hidden, attention.qk_pos_emb_head_dim, std=std)
    if attention.has_latent_norm:
        yield from build_norm(f"{name}.kv_latent_norm", norm_spec, attention.kv_lora_rank)
    kv_up_size = attention.num_heads * (attention.qk_head_dim + attention.v_head_dim)
    yield from build_column_parallel_linear(
        f"{name}.kv_up", attention.kv_lora_rank, kv_up_size, bias=False, std=std, score_rows=key_rows
    )


def build_replicated_linear(name: str, inputs: int, outputs: int, *, std: float) -> WeightSpec:
    """Build the weight [out, in] of a linear layer without bias that is replicated on every tensor-parallel rank."""
    return WeightSpec(f"{name}.weight", (outputs, inputs), init=Init(std))


def build_column_parallel_linear(
    name: str,
    inputs: int,
    outputs: int,
    *,
    bias: bool,
    std: float,
    num_halves: int = 1,
    fused_heads: FusedHeads | None = None,
    score_rows: ScoreRows | None = None,
) -> Iterator[WeightSpec]:
    """Yield the weight [out, in] and bias [out] of a column-parallel linear layer, whose outputs are split over tensor-parallel
    ranks.

    For the two halves of a gated MLP (num_halves = 2) the shapes are [2, out, in] and [2, out]. Each half is split separately, so
    that the shard of a tensor-parallel rank is a slice of one dimension.
    """
    leading_dims = (num_halves,) if num_halves > 1 else ()
    splits = ((len(leading_dims), "tp"),)
    yield WeightSpec(
        f"{name}.weight", (*leading_dims, outputs, inputs), splits, init=Init(std), fused_heads=fused_heads, score_rows=score_rows
    )
    if bias:
        yield WeightSpec(f"{name}.bias", (*leading_dims, outputs), splits, param_type="vector", score_rows=score_rows)


def build_row_parallel_linear(name: str, inputs: int, outputs: int, *, bias: bool, std: float) -> Iterator[WeightSpec]:
    """Yield the weight [out, in] and bias of a row-parallel linear layer, whose inputs are split over tensor-parallel ranks. The
    bias [out] is replicated."""
    yield WeightSpec(f"{name}.weight", (outputs, inputs), ((1, "tp"),), init=Init(std))
    if bias:
        yield WeightSpec(f"{name}.bias", (outputs,), param_type="vector")


def build_norm(
    name: str, norm_spec: NormSpec, size: int, *, applies_to_local_heads: bool = False, splits: tuple[tuple[int, str], ...] = ()
) -> Iterator[WeightSpec]:
    """Yield the weight and the bias of a norm over `size` channels, as far as the norm has them.

    Args:
        applies_to_local_heads: whether a tensor-parallel rank applies the norm only to its local attention heads.
        splits: pairs (dimension, axis) of dimensions that ranks split.
    """
    if norm_spec.has_weight:
        init = Init(constant=0.0 if norm_spec.zero_centered else 1.0)
        yield WeightSpec(
            f"{name}.weight", (size,), splits, param_type="vector", init=init, applies_to_local_heads=applies_to_local_heads
        )
    if norm_spec.has_bias:
        yield WeightSpec(f"{name}.bias", (size,), splits, param_type="vector", applies_to_local_heads=applies_to_local_heads)
