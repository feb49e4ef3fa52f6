"""The parameters of the model, part by part. The modules are built from these, and all counts are derived from them.

Shapes: `h` hidden size, `v` vocabulary, `f` width of the MLP.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from megatron.config.model import ModelConfig
from megatron.spec.layers import AttentionSpec, LatentAttentionSpec, LayerSpec, NormSpec, depths, layers, norm_of
from megatron.spec.mlps import ExpertsSpec, MLPSpec

WORD_EMBEDDING = "embedding.word.weight"
OUTPUT = "output.weight"
"""The output layer's weight where it has one of its own."""
LORA_A, LORA_B = "lora_a.weight", "lora_b.weight"
"""The matrices of an adapter, behind the name of its linear layer."""
_IN_LAYER = re.compile(r"layers\.(\d+)(?:\.(.+))?")
_IN_DEPTH = re.compile(r"mtp\.(\d+)(?:\.(.+))?")


def in_layer(name: str) -> tuple[int | None, str]:
    """The layer of a parameter, counted over the whole model, and its name there: (17, "mlp.up.weight"). Outside the layers: (None,
    its whole name). The name of a layer itself ("layers.17") is ""."""
    found = _IN_LAYER.fullmatch(name)
    return (int(found[1]), found[2] or "") if found else (None, name)


def depth_of(name: str) -> int | None:
    """The depth of multi-token prediction that a parameter is of, counted from 0; None for a parameter of the model itself."""
    found = _IN_DEPTH.fullmatch(name)
    return int(found[1]) if found else None


def score_row(name: str) -> int:
    """The row of a layer, or of one of its parameters, in a table of scores by layer: those of the model from the front, those of
    depths from the back."""
    layer, depth = in_layer(name)[0], depth_of(name)
    assert layer is not None or depth is not None, "attention lies in layers"
    return layer if depth is None else -1 - depth  # type: ignore[return-value]


@dataclass(frozen=True)
class Init:
    """Initial values: drawn from a normal distribution with a standard deviation, or a constant."""

    std: float = 0.0
    constant: float = 0.0


Role = Literal["input", "hidden", "output"]
ParamKind = Literal["matrix", "table", "vector"]


@dataclass(frozen=True)
class FusedHeads:
    """Heads whose rows are fused into one matrix, in groups, one for each key-value head: its query heads, its key, its value."""

    queries: int
    """Query heads of a group."""
    size: int
    """Rows of a head."""


@dataclass(frozen=True)
class ScoreRows:
    """How rows make the scores of heads, unit after unit: that of a query head, or of a key-value head with its query heads."""

    queries: int
    """Query heads of a unit."""
    runs: tuple[tuple[int, Literal["query", "key", "both", "none"]], ...]
    """(rows, what they are) within a unit. Both: rotated channels of queries, whose key is not the head's own."""


@dataclass(frozen=True)
class ByCounts:
    """What moves a vector with a number for each expert: no gradient, but how often the routers of a global batch chose each."""

    step: float | None = None
    """An update adds so much for an expert that was chosen less often than the mean, and subtracts it for one chosen more often
    (DeepSeek-V3, section 2.1.2). None: it becomes what share of the choices each expert got, over the mean share."""


@dataclass(frozen=True)
class ParamFacts:
    """What is true of one parameter of the whole model, whoever holds it."""

    name: str
    """Global name; the layer number counts over the whole model."""
    shape: tuple[int, ...]
    """Global shape without padding."""
    kind: ParamKind = field(default="matrix", kw_only=True)
    """A matrix multiplies activations: [..., outputs, inputs]. A table's rows are looked up. For optimizers that need a matrix, it
    is the last two dimensions of both. Vectors are biases and the weights of norms; several may lie in one tensor."""
    init: Init = field(default=Init(), kw_only=True)
    tied: bool = field(default=False, kw_only=True)
    """Whether the first and the last chunk use it: the embedding and, if not the output layer, multi-token prediction."""
    width: float = field(default=1.0, kw_only=True)
    """How many times as wide as the base of muP the model is; 1 without muP."""
    heads: FusedHeads | None = field(default=None, kw_only=True)
    """The heads that its rows are, where it projects to queries, keys and values at once."""
    scores: ScoreRows | None = field(default=None, kw_only=True)
    """What its rows, or the elements of a bias, are in the scores of heads, where they are of heads and no norm comes after."""
    by_counts: ByCounts | None = field(default=None, kw_only=True)
    """How the choices of routers move it; None: a gradient does."""
    frozen: bool = field(default=False, kw_only=True)
    """Whether nothing moves it: it has neither gradient nor state of an optimizer (all but the adapters of LoRA)."""

    @property
    def role(self) -> Role:
        """Which of its dimensions grow with the model's width: hidden, both; input (also embeddings, biases and norms), the outputs
        alone; output, the inputs alone (Yang et al. 2022, table 8)."""
        if self.name == OUTPUT:
            return "output"
        return "hidden" if self.kind == "matrix" else "input"

    @property
    def decay(self) -> bool:
        """Whether weight decay applies."""
        return self.kind != "vector"


@dataclass(frozen=True)
class Weight(ParamFacts):
    """What is true of one parameter under every layout."""

    splits: tuple[tuple[int, str], ...] = ()
    """(dimension, axis): the ranks of the axis divide the dimension."""
    padded_to: int | None = None
    """The first dimension is padded to a multiple of this number x the ranks that divide it. None: no padding."""
    on_own_heads: bool = False
    """Every tensor rank holds the whole weight and applies it to its own heads only."""
    used: int | None = None
    """With how many of its entries, along the first dimension, a token is multiplied; None for all (experts are chosen)."""

    @property
    def active(self) -> int:
        """Number of elements that a token is multiplied with."""
        return self.numel if self.used is None else self.numel // self.shape[0] * self.used

    @property
    def of_experts(self) -> bool:
        """Whether the ranks divide it as the experts' grid says."""
        return any(axis in ("etp", "ep") for _, axis in self.splits)

    @property
    def part(self) -> str:
        """The parameter's name within its layer; the whole name for one outside the layers."""
        return self.name.split(".", 2)[2] if self.name.startswith("layers.") else self.name

    @property
    def numel(self) -> int:
        """Number of elements, without padding."""
        return math.prod(self.shape)

    def partial_over_tp(self, sequence_parallel: bool) -> bool:
        """Whether a tensor rank's gradient is a partial sum. It is where all ranks hold the weight, but each applies it only to its
        part of the sequence or its own heads."""
        return not self.splits and (sequence_parallel or self.on_own_heads)

    def padded_size(self, ranks: int) -> int | None:
        """The first dimension with padding, if it is padded, when this many ranks divide it."""
        return None if self.padded_to is None else padded_vocab_size(self.shape[0], self.padded_to, ranks)


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_size: int) -> int:
    """The vocabulary rounded up to a multiple of `divisible_by` x tensor ranks."""
    multiple = divisible_by * tensor_size
    return -(-vocab_size // multiple) * multiple


def model_weights(model: ModelConfig, vocab_size: int) -> Iterator[Weight]:
    """Every parameter once, in the order of the forward.

    Args:
        vocab_size: rows of the word embedding, without padding.
    """
    for weight in _in_order(model, vocab_size):
        yield weight if model.mup_width == 1.0 else replace(weight, width=model.mup_width)


def _in_order(model: ModelConfig, vocab_size: int) -> Iterator[Weight]:
    outside = list(outside_layers(model, vocab_size))
    yield from (weight for weight in outside if weight.part.startswith("embedding."))
    for number, layer in enumerate(layers(model)):
        yield from layer_weights(model, layer, number)
    yield from (weight for weight in outside if not weight.part.startswith("embedding."))
    for k, layer in enumerate(depths(model)):
        yield from depth_weights(model, layer, k)


def depth_weights(model: ModelConfig, layer: LayerSpec, k: int) -> Iterator[Weight]:
    """The parameters of one depth of multi-token prediction, counted from 0: two norms, a projection [h, 2h] and a layer."""
    hidden, std = model.hidden_size, model.init_method_std / model.mup_width**0.5
    yield from norm(f"mtp.{k}.hidden_norm", norm_of(model), hidden)
    yield from norm(f"mtp.{k}.embedding_norm", norm_of(model), hidden)
    yield Weight(f"mtp.{k}.projection.weight", (hidden, 2 * hidden), init=Init(std))
    yield from layer_weights(model, layer, model.num_layers + k, f"mtp.{k}.layer")


def outside_layers(model: ModelConfig, vocab_size: int) -> Iterator[Weight]:
    """The parameters outside the layers; beside LoRA's adapters they are frozen."""
    for weight in _outside_layers(model, vocab_size):
        yield weight if model.lora_rank is None else replace(weight, frozen=True)


def _outside_layers(model: ModelConfig, vocab_size: int) -> Iterator[Weight]:
    """The word embedding [v, h], perhaps tied; learned positions [positions, h] and a norm of both, if there are any; the final
    norm; the output layer [v, h] where it has a weight of its own."""
    yield vocabulary(WORD_EMBEDDING, model, vocab_size, "table")
    if model.position_embedding_type == "learned_absolute":
        shape = (model.num_positions, model.hidden_size)
        yield Weight("embedding.position.weight", shape, kind="table", init=Init(model.init_method_std))
    if model.embedding_layernorm:
        yield from norm("embedding.norm", norm_of(model), model.hidden_size)
    yield from norm("final_norm", norm_of(model), model.hidden_size)
    if not model.tied:
        yield output_matrix(model, vocab_size)


def output_matrix(model: ModelConfig, vocab_size: int) -> Weight:
    """The matrix [v, h] of the output layer: a weight of its own, or the word embedding."""
    return vocabulary(WORD_EMBEDDING if model.tied else OUTPUT, model, vocab_size, "table" if model.tied else "matrix")


def vocabulary(name: str, model: ModelConfig, vocab_size: int, kind: ParamKind) -> Weight:
    """A weight with one row for each token, [v, h], padded and split over the tensor ranks."""
    return Weight(
        name,
        (vocab_size, model.hidden_size),
        ((0, "tp"),),
        kind=kind,
        init=Init(model.init_method_std),
        padded_to=model.make_vocab_size_divisible_by,
        tied=name == WORD_EMBEDDING and (model.tied or model.mtp_num_layers > 0),
    )


def layer_weights(model: ModelConfig, layer: LayerSpec, number: int, name: str | None = None) -> Iterator[Weight]:
    """The parameters of one layer; with LoRA they are frozen, and each of its targets has an adapter behind it."""
    name = name or f"layers.{number}"
    for weight in _layer_weights(model, layer, name):
        if model.lora_rank is None:
            yield weight
            continue
        yield replace(weight, frozen=True)
        if weight.name in {f"{name}.{target}.weight" for target in model.lora_targets}:
            yield from _adapter(weight, model.lora_rank)


def _adapter(weight: Weight, rank: int) -> Iterator[Weight]:
    """The two matrices beside a linear layer's weight [..., out, in]: `lora_a` [rank, in], with the variance of PEFT's initial
    values (Kaiming's for a uniform distribution with a = sqrt(5)), and `lora_b` [..., out, rank], which begins at zero. They are
    split as inputs and outputs of the weight are."""
    *outputs, inputs = weight.shape
    layer, last = weight.name.removesuffix(".weight"), len(outputs)
    of_inputs = tuple((1, axis) for dim, axis in weight.splits if dim == last)
    of_outputs = tuple((dim, axis) for dim, axis in weight.splits if dim != last)
    yield Weight(f"{layer}.{LORA_A}", (rank, inputs), of_inputs, init=Init((3 * inputs) ** -0.5))
    yield Weight(f"{layer}.{LORA_B}", (*outputs, rank), of_outputs)


def _layer_weights(model: ModelConfig, layer: LayerSpec, name: str) -> Iterator[Weight]:
    """The layer itself. Output projections have initial standard deviation std / sqrt(2 x layers) (GPT-2). With muP the
    standard deviation of all matrices falls as 1 / sqrt(width), that of tables and of the output layer stays (Yang et al. 2022)."""
    hidden, attention, mlp = model.hidden_size, layer.attention, layer.mlp
    std = model.init_method_std / model.mup_width**0.5
    output_std = std / (2 * model.num_layers) ** 0.5
    norms = {which: list(norm(f"{name}.{which}", layer.norm, hidden)) for which in layer.norms}
    yield from norms.get("attention_norm", ())
    if isinstance(attention, LatentAttentionSpec):
        yield from _latent_attention(f"{name}.attention", attention, layer.norm, hidden, std)
        inputs = attention.heads * attention.value_size
    else:
        yield from _attention(f"{name}.attention", attention, layer.norm, hidden, std)
        inputs = attention.heads * attention.head_size
    if attention.scores.softmax == "learnable":
        yield Weight(f"{name}.attention.sinks", (attention.heads,), ((0, "tp"),), kind="vector")
    yield from row(f"{name}.attention.output", inputs, hidden, bias=attention.output_bias, std=output_std)
    yield from (*norms.get("attention_post_norm", ()), *norms.get("mlp_norm", ()))
    if isinstance(mlp, MLPSpec):
        yield from _mlp(f"{name}.mlp", mlp, hidden, std, output_std)
    else:
        yield from _experts(f"{name}.mlp", mlp, hidden, std, output_std)
    yield from norms.get("mlp_post_norm", ())


def _attention(name: str, attention: AttentionSpec, kind: NormSpec, hidden: int, std: float) -> Iterator[Weight]:
    """What comes before attention."""
    heads = FusedHeads(attention.heads // attention.kv_heads, attention.head_size)
    scores = ScoreRows(heads.queries, ((heads.queries * heads.size, "query"), (heads.size, "key"), (heads.size, "none")))
    yield from column(f"{name}.qkv", hidden, attention.qkv_rows, bias=attention.qkv_bias, std=std, heads=heads, scores=scores)
    for which, count in (("q_norm", attention.heads), ("k_norm", attention.kv_heads)):
        if attention.qk_norm == "each_head":
            yield from norm(f"{name}.{which}", kind, attention.head_size, on_own_heads=True)
        elif attention.qk_norm == "all_heads":
            yield from norm(f"{name}.{which}", kind, count * attention.head_size, splits=((0, "tp"),))


def _mlp(name: str, mlp: MLPSpec, hidden: int, std: float, output_std: float) -> Iterator[Weight]:
    """An MLP."""
    yield from column(f"{name}.up", hidden, mlp.width, bias=mlp.bias, std=std, halves=2 if mlp.activation.gated else 1)
    yield from row(f"{name}.down", mlp.width, hidden, bias=mlp.bias, std=output_std)


def _experts(name: str, mlp: ExpertsSpec, hidden: int, std: float, output_std: float) -> Iterator[Weight]:
    """A router [E, h], perhaps with a bias of its choices [E], or the shares of the experts [E] in the update before; the matrices
    of all experts, with the expert as first dimension: `up` [E, f, h], or [E, 2, f, h] of gated MLPs, and `down` [E, h, f]; and the
    shared expert, an MLP with perhaps a gate [1, h]."""
    experts, chosen, width = mlp.router.experts, mlp.router.chosen, mlp.expert.width
    yield whole(f"{name}.router", hidden, experts, std=std)
    if mlp.router.bias_step is not None:
        yield Weight(f"{name}.router.bias", (experts,), kind="vector", by_counts=ByCounts(mlp.router.bias_step))
    if mlp.router.balancing == "global_aux_loss":
        yield Weight(f"{name}.router.shares", (experts,), kind="vector", init=Init(constant=1.0), by_counts=ByCounts())
    up = (experts, *((2,) if mlp.expert.activation.gated else ()), width, hidden)
    splits = ((0, "ep"), (len(up) - 2, "etp"))
    yield Weight(f"{name}.experts.up.weight", up, splits, init=Init(std), used=chosen)
    yield Weight(
        f"{name}.experts.down.weight", (experts, hidden, width), ((0, "ep"), (2, "etp")), init=Init(output_std), used=chosen
    )
    if mlp.shared is not None:
        yield from _mlp(f"{name}.shared", mlp.shared, hidden, std, output_std)
        if mlp.shared_gate:
            yield whole(f"{name}.shared_gate", hidden, 1, std=std)


def _latent_attention(name: str, attention: LatentAttentionSpec, kind: NormSpec, hidden: int, std: float) -> Iterator[Weight]:
    """What comes before latent attention: queries of the hidden state, or of a latent of it; the latent of keys and values; the
    rotated channels that all keys share. Rows of a head are in `q` and `q_up` its plain channels, then its rotated ones, in `kv_up`
    the plain channels of its key, then its value."""
    queries = ScoreRows(1, ((attention.plain_size, "query"), (attention.rotary_size, "both")))
    keys = ScoreRows(1, ((attention.plain_size, "key"), (attention.value_size, "none")))
    if attention.query_rank is None:
        yield from column(f"{name}.q", hidden, attention.heads * attention.head_size, bias=False, std=std, scores=queries)
    else:
        yield whole(f"{name}.q_down", hidden, attention.query_rank, std=std)
        if attention.latent_norm:
            yield from norm(f"{name}.q_latent_norm", kind, attention.query_rank)
        size = attention.heads * attention.head_size
        yield from column(f"{name}.q_up", attention.query_rank, size, bias=False, std=std, scores=queries)
    yield whole(f"{name}.kv_down", hidden, attention.rank, std=std)
    yield whole(f"{name}.k_rotary", hidden, attention.rotary_size, std=std)
    if attention.latent_norm:
        yield from norm(f"{name}.kv_latent_norm", kind, attention.rank)
    rows = attention.heads * (attention.plain_size + attention.value_size)
    yield from column(f"{name}.kv_up", attention.rank, rows, bias=False, std=std, scores=keys)


def whole(name: str, inputs: int, outputs: int, *, std: float) -> Weight:
    """A linear layer without bias that every tensor rank holds as a whole: [out, in]."""
    return Weight(f"{name}.weight", (outputs, inputs), init=Init(std))


def column(
    name: str,
    inputs: int,
    outputs: int,
    *,
    bias: bool,
    std: float,
    halves: int = 1,
    heads: FusedHeads | None = None,
    scores: ScoreRows | None = None,
) -> Iterator[Weight]:
    """A column-parallel linear layer, whose outputs are split: [out, in]. For the two halves of a gated MLP it is [halves, out,
    in], each half split by itself, so that a tensor rank's part is one slice of one dimension."""
    lead = (halves,) if halves > 1 else ()
    splits = ((len(lead), "tp"),)
    yield Weight(f"{name}.weight", (*lead, outputs, inputs), splits, init=Init(std), heads=heads, scores=scores)
    if bias:
        yield Weight(f"{name}.bias", (*lead, outputs), splits, kind="vector", scores=scores)


def row(name: str, inputs: int, outputs: int, *, bias: bool, std: float) -> Iterator[Weight]:
    """A row-parallel linear layer, whose inputs are split: [out, in]. Its bias [out] is whole on every rank."""
    yield Weight(f"{name}.weight", (outputs, inputs), ((1, "tp"),), init=Init(std))
    if bias:
        yield Weight(f"{name}.bias", (outputs,), kind="vector")


def norm(
    name: str, spec: NormSpec, size: int, *, on_own_heads: bool = False, splits: tuple[tuple[int, str], ...] = ()
) -> Iterator[Weight]:
    """A norm over `size` channels, which may have a weight, and beside it a bias."""
    if spec.weighted:
        init = Init(constant=0.0 if spec.zero_centred else 1.0)
        yield Weight(f"{name}.weight", (size,), splits, kind="vector", init=init, on_own_heads=on_own_heads)
    if spec.biased:
        yield Weight(f"{name}.bias", (size,), splits, kind="vector", on_own_heads=on_own_heads)
