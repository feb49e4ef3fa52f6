"""What the model is: its shape and its parts. Nothing here depends on the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.setting import GIVEN, OtherThan, acts_with, idle_with, setting
from megatron.spec.activations import activation_of

# ---- Mixtures of experts: the settings of the model about them. What each of them computes is in docs/moe.md.

ScoreFunction = Literal["softmax", "sigmoid"]
Balancing = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"]
RouterDtype = Literal["fp32", "fp64"]
DropPolicy = Literal["probs", "position"]

_EXPERTS = acts_with(num_experts=GIVEN, strict=True)
_GROUPS = acts_with(moe_router_num_groups=GIVEN, strict=True)
_CAPACITY = acts_with(moe_expert_capacity_factor=GIVEN, strict=True)


@dataclass(frozen=True)
class ExpertFields:
    """Layers with experts: the router, the experts, and the losses that balance them."""

    num_experts: int | None = setting(None, at_least=2, unit="experts")
    """Give layers so many MLPs, of which a router chooses a few for each token (mixture of experts)."""
    moe_layer_freq: str = setting("1", acts=_EXPERTS)
    """Which layers have experts: the first and every N-th after it, or a list with 1 for each of them, such as ([0]*3+[1]*58)."""
    moe_ffn_hidden_size: int | None = setting(None, at_least=1, unit="channels", acts=_EXPERTS)
    """Width of an expert; by default --ffn-hidden-size."""
    moe_router_topk: int = setting(2, at_least=1, unit="experts", acts=_EXPERTS)
    """Experts that a token passes."""
    moe_shared_expert_intermediate_size: int | None = setting(None, at_least=1, unit="channels", acts=_EXPERTS)
    """Width of an expert that every token passes besides; by default there is none."""
    moe_shared_expert_gate: bool = setting(False, acts=acts_with(moe_shared_expert_intermediate_size=GIVEN, strict=True))
    """Multiply what the shared expert gives by the sigmoid of a product of the token (Qwen2-MoE)."""
    moe_router_score_function: ScoreFunction = setting("softmax", acts=_EXPERTS)
    """How the router's logits become scores."""
    moe_router_pre_softmax: bool = setting(
        False, acts=_EXPERTS, idle=idle_with("sigmoids are taken of each expert by itself", moe_router_score_function="sigmoid")
    )
    """Softmax over all experts before some are chosen, whose scores then do not sum to 1; by default it is over the chosen ones."""
    moe_router_topk_scaling_factor: float | None = setting(None, above=0, unit="factor", acts=_EXPERTS)
    """Multiply the probabilities of the chosen experts by this."""
    moe_router_num_groups: int | None = setting(None, at_least=1, unit="groups of experts", acts=_EXPERTS)
    """Divide the experts into so many groups, of which --moe-router-group-topk are open to a token."""
    moe_router_group_topk: int = setting(1, at_least=1, unit="groups of experts", acts=_GROUPS)
    """Groups of experts that are open to a token: those with the largest sums of their best scores (DeepSeek-V3)."""
    moe_router_dtype: RouterDtype | None = setting(None, acts=_EXPERTS)
    """Dtype of the router's product; by default the model's. (What follows is computed in at least float32.)"""
    moe_router_load_balancing_type: Balancing = setting("aux_loss", acts=_EXPERTS)
    """Tokens of which the balance is judged that a loss rewards: those of each microbatch, of each sequence, or of the global batch
    (whose experts' shares are those of the update before)."""
    moe_aux_loss_coeff: float = setting(
        0.0,
        at_least=0,
        unit="coefficient",
        acts=acts_with(every=True, num_experts=GIVEN, moe_router_load_balancing_type=OtherThan("none"), fix={}, strict=True),
    )
    """Coefficient of the load-balancing loss of each layer."""
    moe_z_loss_coeff: float | None = setting(None, above=0, unit="coefficient", acts=_EXPERTS)
    """Coefficient of the mean square of the log-sum-exp of the router's logits in each layer (ST-MoE)."""
    moe_router_enable_expert_bias: bool = setting(
        False, acts=acts_with(every=True, num_experts=GIVEN, moe_router_score_function="sigmoid", strict=True)
    )
    """Choose experts by their scores plus a bias, which each update raises for experts that were chosen less often than the mean,
    and lowers for others (balance without a loss, DeepSeek-V3)."""
    moe_router_bias_update_rate: float = setting(1e-3, above=0, unit="score", acts=acts_with(moe_router_enable_expert_bias=True))
    """By how much an update raises or lowers these biases."""
    moe_expert_capacity_factor: float | None = setting(None, at_least=1, unit="x the mean", acts=_EXPERTS)
    """An expert takes at most so many times its mean share of the choices in a sequence; it drops the others. By default none."""
    moe_token_drop_policy: DropPolicy = setting("probs", acts=_CAPACITY)
    """Which choices beyond that are dropped: those with the smallest probabilities, or those of the last tokens."""
    moe_pad_expert_input_to_capacity: bool = setting(False, acts=_CAPACITY)
    """Fill the input of each expert up with zeros to the most that it takes, so that its products always have the same shape."""
    moe_input_jitter_eps: float | None = setting(None, above=0, below=1, unit="share", acts=_EXPERTS)
    """Multiply the input of routers in training by random numbers between 1 - eps and 1 + eps (Switch Transformer)."""


# ---- LoRA (Hu et al. 2021): the settings of the model about it. docs/fine_tuning.md shows its use.

LoraTarget = Literal["attention.qkv", "attention.output", "mlp.up", "mlp.down"]
"""Linear layers, in the order of the forward."""

_LORA = acts_with(lora_rank=GIVEN, strict=True)


@dataclass(frozen=True)
class LoraFields:
    """Low-rank adapters beside linear layers, whose own weights are then fixed."""

    lora_rank: int | None = setting(None, at_least=1, unit="channels")
    """Train adapters of so many channels beside linear layers, and nothing else (LoRA, Hu et al. 2021): a layer multiplies with
    weight + alpha / rank x B A, with A [rank, inputs] and B [outputs, rank], which begins at zero."""
    lora_alpha: float | None = setting(None, above=0, unit="plain number", acts=_LORA)
    """What the adapters give is multiplied by this / --lora-rank; by default the rank."""
    lora_targets: tuple[LoraTarget, ...] = setting(("attention.qkv", "attention.output", "mlp.up", "mlp.down"), acts=_LORA)
    """Linear layers of each layer that have adapters; by default all of them."""

    @property
    def lora_scale(self) -> float:
        """Factor of what an adapter gives; 1 without adapters."""
        return 1.0 if self.lora_rank is None or self.lora_alpha is None else self.lora_alpha / self.lora_rank


PositionEmbedding = Literal["learned_absolute", "rope", "none"]
Normalization = Literal["LayerNorm", "RMSNorm"]
NormPlacement = Literal["pre", "post", "sandwich"]
RopeType = Literal["rope", "yarn", "dynamic", "longrope"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]


FREE_FIELDS = frozenset(
    {
        *("seq_length", "attention_dropout", "hidden_dropout", "make_vocab_size_divisible_by", "fp32_residual_connection"),
        "init_method_std",
        *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type", "moe_router_dtype"),
        *("moe_router_bias_update_rate", "moe_expert_capacity_factor", "moe_token_drop_policy", "moe_pad_expert_input_to_capacity"),
        "moe_input_jitter_eps",
    }
)
"""Fields that may differ between a checkpoint and the run that continues it: they change no parameter, and not what the model
computes with dropout off, but for rounding and for tokens that experts drop."""
FREE_DOWNWARD = frozenset({"mtp_num_layers"})
"""Fields that may be less than in the checkpoint: what is beyond is left out, and the rest computes what it did."""
FREE_UPWARD = frozenset({"moe_router_enable_expert_bias"})
"""Fields that may be more than in the checkpoint: what they add begins at zero, and computes nothing then."""
FREE_AT_BEGINNING = frozenset(
    {
        *("window_size", "rotary_base_local"),
        *("rotary_base", "rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor", "rope_low_freq_factor"),
        *("rope_high_freq_factor", "rope_type", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast"),
        *("beta_slow", "mscale", "mscale_all_dim", "yarn_correction_range_round_to_int", "rope_attention_factor"),
        *("rope_short_factors", "rope_long_factors"),
    }
)
"""Fields that may also differ where a run begins with the weights of another, as when a model is taught longer sequences."""

_ROPE = acts_with(position_embedding_type="rope")
_STRETCHED = acts_with(rope_type=("yarn", "dynamic", "longrope"), strict=True)
_YARN, _LONGROPE = acts_with(rope_type="yarn", strict=True), acts_with(rope_type="longrope", strict=True)
_LLAMA3 = acts_with(use_rope_scaling=True, strict=True)
_QUICK_GEGLU = acts_with(quick_geglu=True, strict=True)
_WINDOW = acts_with(window_size=GIVEN, strict=True)
_GROUPED = acts_with(
    "with --group-query-attention, without which each query head has a key-value head of its own",
    fix={},
    group_query_attention=True,
)
_WITH_BIASES = idle_with("all linear layers have biases", disable_bias_linear=False)
_LATENT = acts_with(
    multi_latent_attention=True, fix={"multi_latent_attention": True, "position_embedding_type": "rope"}, strict=True
)

_MOST_LAYERS = 100_000  # more are refused, because each is a spec, and an entry of the layer table


@dataclass(frozen=True)
class ShapeFields:
    """What all layers have in common, and what is outside of them."""

    num_layers: int = setting(0, at_least=1, at_most=_MOST_LAYERS, unit="layers", required=True)
    """Number of transformer layers. Required."""
    hidden_size: int = setting(0, at_least=1, unit="channels", required=True)
    """Width of the residual stream. Required."""
    ffn_hidden_size: int | None = setting(None, at_least=1, unit="channels")
    """Width of the MLP; by default 4 x hidden, of a gated MLP floor(8 x hidden / 3) rounded down to a multiple of 64."""
    num_attention_heads: int = setting(0, at_least=1, unit="heads", required=True)
    """Number of query heads. Required."""
    kv_channels: int | None = setting(
        None,
        at_least=1,
        unit="channels",
        idle=idle_with("heads of latent attention have sizes of their own (--qk-head-dim)", multi_latent_attention=True),
    )
    """Size of one attention head; by default hidden / heads."""
    group_query_attention: bool = False
    """Share key and value heads between groups of query heads (see --num-query-groups)."""
    num_query_groups: int = setting(1, at_least=1, unit="heads", acts=_GROUPED)
    """Number of key-value heads; acts with --group-query-attention."""
    multi_latent_attention: bool = False
    """Make keys and values of a latent, a few channels for each token that all heads share (DeepSeek-V2)."""
    q_lora_rank: int | None = setting(None, at_least=1, unit="channels", acts=_LATENT)
    """Size of the latent that queries are made of; by default they are made of the hidden state."""
    kv_lora_rank: int = setting(32, at_least=1, unit="channels", acts=_LATENT)
    """Size of the latent that keys and values are made of."""
    qk_head_dim: int = setting(128, at_least=1, unit="channels", acts=_LATENT)
    """Channels of a query or key head that are not rotated."""
    qk_pos_emb_head_dim: int = setting(64, at_least=2, unit="channels", acts=_LATENT)
    """Rotated channels of a query or key head, beside those; all key heads share them."""
    v_head_dim: int = setting(128, at_least=1, unit="channels", acts=_LATENT)
    """Size of a value head."""
    seq_length: int = setting(0, at_least=1, unit="tokens", required=True)
    """Tokens in a training sequence. Required."""
    max_position_embeddings: int | None = setting(
        None,
        at_least=1,
        unit="rows of a table",
        idle=idle_with("there is no learned position table", position_embedding_type=OtherThan("learned_absolute")),
    )
    """Rows of the learned position table; by default the sequence length."""
    position_embedding_type: PositionEmbedding = "learned_absolute"
    """How positions enter: a learned table, rotary embeddings, or not at all."""
    rotary_base: float = setting(10000.0, above=0, unit="plain number", acts=_ROPE)
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = setting(
        1.0,
        above=0,
        at_most=1,
        unit="share, 1 for all",
        acts=_ROPE,
        idle=idle_with("latent attention rotates the channels of --qk-pos-emb-head-dim", multi_latent_attention=True),
    )
    """Share of each head that is rotated."""
    rotary_seq_len_interpolation_factor: float = setting(1.0, above=0, unit="factor", acts=_ROPE)
    """Divide rotary positions by this (linear scaling, Chen et al. 2023), to stretch a model to longer sequences."""
    rotary_interleaved: bool = setting(False, acts=_ROPE)
    """Rotate neighbouring channels as pairs, as DeepSeek does, instead of channels half a head apart."""
    use_rope_scaling: bool = setting(False, acts=_ROPE)
    """Stretch low rotary frequencies as Llama 3.1 does."""
    rope_scaling_factor: float = setting(8.0, above=0, unit="factor", acts=_LLAMA3)
    """Factor of --use-rope-scaling."""
    rope_low_freq_factor: float = setting(1.0, above=0, unit="turns", acts=_LLAMA3)
    """Pairs of channels that turn less often than this in the original context are stretched by the whole factor."""
    rope_high_freq_factor: float = setting(4.0, above=0, unit="turns", acts=_LLAMA3)
    """Pairs of channels that turn more often than this in the original context are not stretched."""
    rope_type: RopeType = setting("rope", acts=_ROPE)
    """How rotary frequencies are stretched for longer sequences: not at all (but see --use-rope-scaling and
    --rotary-seq-len-interpolation-factor), by YaRN, by a base that grows with the length of the sequence, or by lists of factors
    (LongRoPE)."""
    rotary_scaling_factor: float = setting(1.0, above=0, unit="factor", acts=_STRETCHED)
    """Factor of --rope-type yarn and dynamic; with longrope the default of --rope-attention-factor follows from it."""
    original_max_position_embeddings: int | None = setting(
        None,
        at_least=2,
        unit="tokens",
        acts=acts_with(rope_type=("yarn", "dynamic", "longrope"), use_rope_scaling=True, strict=True),
    )
    """Length of sequences for which the rotary frequencies were chosen before they were stretched; by default 8192 with
    --use-rope-scaling, else 4096."""
    beta_fast: float = setting(32.0, above=0, unit="turns", acts=_YARN)
    """Pairs of channels that turn more often than this in the original context are not stretched."""
    beta_slow: float = setting(1.0, above=0, unit="turns", acts=_YARN)
    """Pairs of channels that turn less often than this in the original context are stretched by the whole factor."""
    yarn_correction_range_round_to_int: bool = setting(True, acts=_YARN)
    """Round the pairs at which --beta-fast and --beta-slow are reached to whole ones."""
    mscale: float = setting(1.0, at_least=0, unit="plain number", acts=_YARN)
    """Weight of ln(factor) in the numerator of YaRN's factor for rotated queries and keys, 0.1 x weight x ln(factor) + 1."""
    mscale_all_dim: float = setting(0.0, at_least=0, unit="plain number", acts=_YARN)
    """The same weight in its denominator."""
    rope_attention_factor: float | None = setting(
        None, above=0, unit="factor", acts=acts_with(rope_type=("yarn", "longrope"), strict=True)
    )
    """What rotated queries and keys are multiplied by; by default with yarn as --mscale says, with longrope
    sqrt(1 + ln(--rotary-scaling-factor) / ln(--original-max-position-embeddings))."""
    rope_short_factors: tuple[float, ...] = setting((), above=0, unit="factors", acts=_LONGROPE)
    """What each rotary frequency is divided by in sequences within the original context: one factor for each pair of channels."""
    rope_long_factors: tuple[float, ...] = setting((), above=0, unit="factors", acts=_LONGROPE)
    """The same in longer sequences."""
    no_rope_freq: str | None = setting(None, acts=_ROPE)
    """Layers without rotary positions: every N-th, or a list with 1 for each such layer, such as [0,0,0,1] or ([0]*3+[1])*4."""
    rotary_base_local: float | None = setting(
        None,
        above=0,
        unit="plain number",
        acts=acts_with(every=True, window_size=GIVEN, position_embedding_type="rope", strict=True),
    )
    """Base of the rotary frequencies in layers with a window, which then have no scaling (Gemma 3); by default as in all layers."""
    window_size: str | None = None
    """How far layers with a window attend: 127,0 is to 127 tokens before the own, and none after."""
    window_attn_skip_freq: str | None = setting(None, acts=_WINDOW)
    """Which layers have the window: all but every N-th, or a list with 1 for each of them and 0 for each of the others, such as
    [1,1,1,0] or ([1]*5+[0])*4; by default all have it."""
    softmax_scale: float | None = setting(None, above=0, unit="factor")
    """Factor of attention's scores; by default 1 / sqrt(size of a head)."""
    attn_logit_softcapping: float | None = setting(None, above=0, unit="plain number")
    """Cap attention's scores softly: cap x tanh(score / cap), as Gemma 2 does."""
    softmax_type: SoftmaxType = "vanilla"
    """What stands in the denominator of attention's softmax beside the scores (an attention sink): nothing, exp(0) = 1, or exp of a
    weight for each head (GPT-OSS)."""
    normalization: Normalization = "LayerNorm"
    """Kind of every norm."""
    norm_epsilon: float = setting(1e-5, above=0, at_most=1, unit="plain number")
    """Added to the variance (or mean square) in every norm."""
    norm_placement: NormPlacement = "pre"
    """Where norms stand: pre, before attention and MLP; post, on what these give, before it is added (OLMo 2); sandwich, both
    (Gemma 2)."""
    norm_weight: bool = True
    """Norms have weights. With --no-norm-weight they have none, and no biases (OLMo 1)."""
    norm_bias: bool = setting(True, acts=acts_with(every=True, normalization="LayerNorm", norm_weight=True))
    """LayerNorms have biases. With --no-norm-bias they have weights alone."""
    apply_layernorm_1p: bool = setting(False, acts=acts_with(norm_weight=True))
    """Keep the weights of norms as their distance from 1 (zero-centred, as in Gemma)."""
    parallel_residual: bool = False
    """Give attention and MLP the same input, and add what both give to it at once (GPT-NeoX)."""
    residual_multiplier: float = setting(1.0, above=0, unit="factor")
    """Multiply what attention and MLP give by this before it is added (Granite)."""
    gelu_exact: bool = False
    """MLP activation x times the normal distribution function, instead of its approximation by tanh."""
    relu: bool = False
    """MLP activation max(x, 0) instead of GELU."""
    squared_relu: bool = False
    """MLP activation relu(x)^2 instead of GELU."""
    activation: str | None = setting(None, opens=True)
    """Activation of the MLP that a module of --imports registers, by its name; those built in have flags of their own."""
    swiglu: bool = False
    """Gated MLP: silu(gate) x up."""
    geglu: bool = False
    """Gated MLP: gelu(gate) x up, with the approximation of GELU by tanh (Gemma)."""
    geglu_exact: bool = False
    """Gated MLP: gelu(gate) x up, with the exact GELU."""
    quick_geglu: bool = False
    """Gated MLP: gate x sigmoid(1.702 gate) x (up + --glu-linear-offset) (GPT-OSS)."""
    glu_linear_offset: float = setting(0.0, at_least=0, unit="plain number", acts=_QUICK_GEGLU)
    """What --quick-geglu adds to up."""
    activation_func_clamp_value: float | None = setting(None, above=0, unit="plain number", acts=_QUICK_GEGLU)
    """Clamp the gate of --quick-geglu from above to this, and up to this and minus this."""
    embedding_multiplier: float = setting(1.0, above=0, unit="factor")
    """Multiply the word embedding's rows by this, as Gemma does by sqrt(hidden size)."""
    embedding_layernorm: bool = False
    """Normalise what the embedding gives."""
    output_multiplier: float = setting(1.0, above=0, unit="factor")
    """Multiply the logits by this (Granite's logits_scaling is its reciprocal)."""
    final_logit_softcapping: float | None = setting(None, above=0, unit="plain number")
    """Cap the logits softly: cap x tanh(logit / cap), as Gemma 2 does."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer a weight of its own instead of the word embedding's."""
    disable_bias_linear: bool = False
    """Leave out the biases of all linear layers."""
    add_qkv_bias: bool = setting(
        False, idle=(_WITH_BIASES, idle_with("products before latent attention have no biases", multi_latent_attention=True))
    )
    """Keep a bias on the query-key-value projection even with --disable-bias-linear."""
    add_attn_output_bias: bool = setting(False, idle=_WITH_BIASES)
    """Keep a bias on attention's output projection even with --disable-bias-linear."""
    add_mlp_bias: bool = setting(False, idle=_WITH_BIASES)
    """Keep biases on the MLP's projections even with --disable-bias-linear."""
    qk_layernorm: bool = False
    """Normalise each query and key head before attention; in latent attention the latents."""
    qk_layernorm_all_heads: bool = setting(False, acts=acts_with(qk_layernorm=True, strict=True))
    """Normalise all query heads together, and all key heads, as OLMo 2 does."""
    attention_dropout: float = setting(0.1, at_least=0, below=1, unit="probability")
    """Dropout probability of the attention weights."""
    hidden_dropout: float = setting(0.1, at_least=0, below=1, unit="probability")
    """Dropout probability of the embedding and of each sublayer's output."""
    init_method_std: float = setting(0.02, above=0, unit="standard deviation")
    """Standard deviation of the initial weights; output projections use std / sqrt(2 x layers)."""
    mup_base_width: int | None = setting(None, at_least=1, unit="channels")
    """Scale initial values, learning rates and logits with the width as muP does (Yang et al. 2022, table 8), so that rates found
    at this --hidden-size hold here too."""
    mtp_num_layers: int = setting(0, at_least=0, unit="depths")
    """Predict so many tokens beyond the next one too, each by a layer behind the last one (multi-token prediction, DeepSeek-V3).
    These layers lie on the last stage and are as the last one: in their parts, in 8 bits or not, in what becomes of activations."""
    mup_base_kv_channels: int | None = setting(None, at_least=1, unit="channels", acts=acts_with(mup_base_width=GIVEN, strict=True))
    """Head size of the base of muP, where heads grow with the width: scores are then multiplied by sqrt(this) / size of a head, and
    not by 1 / sqrt(size of a head)."""
    make_vocab_size_divisible_by: int = setting(128, at_least=1, unit="rows of a table")
    """Rows of the word embedding are padded to a multiple of this x TP, for speed; padding never reaches the loss."""
    fp32_residual_connection: bool = setting(
        False, idle=idle_with("the model does not compute in 16 bits", every=True, fp16=False, bf16=False)
    )
    """Keep the residual stream in float32 when the model computes in 16 bits."""

    @property
    def head_size(self) -> int:
        """Channels of one query and key head."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_size(self) -> int:
        """Channels of one value head."""
        return self.v_head_dim if self.multi_latent_attention else self.head_size

    @property
    def num_key_value_heads(self) -> int:
        """Key-value heads: the query groups, or one for each query head."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def mup_width(self) -> float:
        """How many times as wide as the base of muP the model is; 1 without muP."""
        return 1.0 if self.mup_base_width is None else self.hidden_size / self.mup_base_width

    @property
    def ffn_size(self) -> int:
        """Width of the MLP after defaults."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return 8 * self.hidden_size // 3 // 64 * 64 if activation_of(self).gated else 4 * self.hidden_size

    @property
    def num_positions(self) -> int:
        """Rows of the learned position table after defaults."""
        return self.max_position_embeddings or self.seq_length

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the word embedding's weight."""
        return not self.untie_embeddings_and_output_weights


@dataclass(frozen=True)
class ModelConfig(LoraFields, ExpertFields, ShapeFields):
    """Shape and parts of a GPT- or Llama-style decoder."""


def free_at_beginning(saved: ModelConfig) -> frozenset[str]:
    """Fields that may differ where a run begins with the weights of a saved model: adapters may come to one that has none."""
    return FREE_FIELDS | FREE_AT_BEGINNING | (frozenset(vars(LoraFields())) if saved.lora_rank is None else frozenset())
