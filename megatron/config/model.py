"""Settings of the model: its shape, attention, positions, norms, MLPs and experts. None of them depends on the parallel layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.setting import IS_SET, NotEqual, condition, idle_condition, setting
from megatron.spec.activations import get_activation

# ---- Settings of mixture-of-experts layers. docs/moe.md explains the computation.

ScoreFunction = Literal["softmax", "sigmoid"]
Balancing = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"]
RouterDtype = Literal["fp32", "fp64"]
DropPolicy = Literal["probs", "position"]

_EXPERTS = condition(num_experts=IS_SET, strict=True)
_GROUPS = condition(moe_router_num_groups=IS_SET, strict=True)
_CAPACITY = condition(moe_expert_capacity_factor=IS_SET, strict=True)


@dataclass(frozen=True)
class ExpertFields:
    """Mixture-of-experts layers: the router, the experts and the load-balancing losses."""

    num_experts: int | None = setting(None, min_value=2, unit="experts")
    """Number of experts in each mixture-of-experts layer, of which a router selects a few for each token."""
    moe_layer_freq: str = setting("1", active_if=_EXPERTS)
    """Layers with experts: N for the first layer and every N-th layer after it, or a list with 1 for each layer with experts and 0
    for the others, such as ([0]*3+[1]*58)."""
    moe_ffn_hidden_size: int | None = setting(None, min_value=1, unit="channels", active_if=_EXPERTS)
    """Hidden size of each expert's MLP; by default --ffn-hidden-size."""
    moe_router_topk: int = setting(2, min_value=1, unit="experts", active_if=_EXPERTS)
    """Number of experts that the router selects for each token."""
    moe_shared_expert_intermediate_size: int | None = setting(None, min_value=1, unit="channels", active_if=_EXPERTS)
    """Hidden size of the shared expert, which processes every token in addition to the selected experts. By default there is no
    shared expert."""
    moe_shared_expert_gate: bool = setting(False, active_if=condition(moe_shared_expert_intermediate_size=IS_SET, strict=True))
    """Multiply the output of the shared expert by a sigmoid gate, computed from the token by a linear layer (Qwen2-MoE)."""
    moe_router_score_function: ScoreFunction = setting("softmax", active_if=_EXPERTS)
    """Function that turns the router's logits into scores: softmax over the experts, or sigmoid of each logit."""
    moe_router_pre_softmax: bool = setting(
        False,
        active_if=_EXPERTS,
        idle_if=idle_condition(
            "the sigmoid of an expert does not depend on the other experts", moe_router_score_function="sigmoid"
        ),
    )
    """Apply the softmax to the logits of all experts before the top-k selection, so that the selected scores do not sum to 1. By
    default the softmax is applied to the selected logits only."""
    moe_router_topk_scaling_factor: float | None = setting(None, above=0, unit="factor", active_if=_EXPERTS)
    """Factor by which the probabilities of the selected experts are multiplied."""
    moe_router_num_groups: int | None = setting(None, min_value=1, unit="groups of experts", active_if=_EXPERTS)
    """Number of groups into which the experts are divided for group-limited routing. Each token selects its experts from the best
    --moe-router-group-topk groups."""
    moe_router_group_topk: int = setting(1, min_value=1, unit="groups of experts", active_if=_GROUPS)
    """Number of groups from which a token selects experts: the groups with the largest sums of their best scores (DeepSeek-V3)."""
    moe_router_dtype: RouterDtype | None = setting(None, active_if=_EXPERTS)
    """Dtype of the router's matrix product; by default the model's dtype. The operations after it run in at least float32."""
    moe_router_load_balancing_type: Balancing = setting("aux_loss", active_if=_EXPERTS)
    """Load-balancing loss: aux_loss balances the tokens of each microbatch, seq_aux_loss those of each sequence,
    global_aux_loss those of the global batch (with each expert's share of the tokens in the previous update), none adds no
    loss."""
    moe_aux_loss_coeff: float = setting(
        0.0,
        min_value=0,
        unit="coefficient",
        active_if=condition(
            require_all=True, num_experts=IS_SET, moe_router_load_balancing_type=NotEqual("none"), fix={}, strict=True
        ),
    )
    """Coefficient of the load-balancing loss of each layer."""
    moe_z_loss_coeff: float | None = setting(None, above=0, unit="coefficient", active_if=_EXPERTS)
    """Coefficient of the router's z-loss in each layer: the mean square of the log-sum-exp of its logits (ST-MoE)."""
    moe_router_enable_expert_bias: bool = setting(
        False, active_if=condition(require_all=True, num_experts=IS_SET, moe_router_score_function="sigmoid", strict=True)
    )
    """Add a bias to the scores for the selection of experts. After each update, the bias of an expert that was selected less often
    than the mean increases and the other biases decrease, which balances the load without a loss (DeepSeek-V3)."""
    moe_router_bias_update_rate: float = setting(
        1e-3, above=0, unit="score", active_if=condition(moe_router_enable_expert_bias=True)
    )
    """Amount by which one update increases or decreases the biases of --moe-router-enable-expert-bias."""
    moe_expert_capacity_factor: float | None = setting(None, min_value=1, unit="multiple of the mean", active_if=_EXPERTS)
    """Capacity of an expert: the maximum number of tokens of a sequence that it processes, as a multiple of the mean over the
    experts. Further tokens that the router assigns to the expert are dropped there. By default the capacity is unlimited."""
    moe_token_drop_policy: DropPolicy = setting("probs", active_if=_CAPACITY)
    """Tokens that an expert drops if the router assigns more to it than its capacity: those with the smallest probabilities
    (probs), or the last ones (position)."""
    moe_pad_expert_input_to_capacity: bool = setting(False, active_if=_CAPACITY)
    """Pad the input of each expert with zeros to the capacity, so that its matrix products always have the same shape."""
    moe_input_jitter_eps: float | None = setting(None, above=0, below=1, unit="fraction", active_if=_EXPERTS)
    """Multiply the router's input in training by random numbers between 1 - eps and 1 + eps (Switch Transformer)."""


# ---- Settings of LoRA (Hu et al. 2021). docs/fine_tuning.md shows its use.

LoraTarget = Literal["attention.qkv", "attention.output", "mlp.up", "mlp.down"]
"""Linear layers that can have adapters, in the order of the forward pass."""

_LORA = condition(lora_rank=IS_SET, strict=True)


@dataclass(frozen=True)
class LoraFields:
    """Low-rank adapters of linear layers, whose weights are then frozen."""

    lora_rank: int | None = setting(None, min_value=1, unit="channels")
    """Rank of the LoRA adapters (Hu et al. 2021). Only the adapters are trained: a linear layer multiplies by weight + (alpha /
    rank) B A, with A [rank, inputs] and B [outputs, rank], which is initialized to zero."""
    lora_alpha: float | None = setting(None, above=0, unit="dimensionless", active_if=_LORA)
    """Numerator of the adapters' scale, --lora-alpha / --lora-rank; by default equal to the rank."""
    lora_targets: tuple[LoraTarget, ...] = setting(("attention.qkv", "attention.output", "mlp.up", "mlp.down"), active_if=_LORA)
    """Linear layers of each transformer layer that have adapters; by default all of them."""

    @property
    def lora_scale(self) -> float:
        """Factor of an adapter's output, alpha / rank; 1 without adapters."""
        return 1.0 if self.lora_rank is None or self.lora_alpha is None else self.lora_alpha / self.lora_rank


PositionEmbedding = Literal["learned_absolute", "rope", "none"]
Normalization = Literal["LayerNorm", "RMSNorm"]
NormPlacement = Literal["pre", "post", "sandwich"]
RopeType = Literal["rope", "yarn", "dynamic", "longrope"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]


CHANGEABLE_FIELDS = frozenset(
    {
        *("seq_length", "attention_dropout", "hidden_dropout", "make_vocab_size_divisible_by", "fp32_residual_connection"),
        "init_method_std",
        *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type", "moe_router_dtype"),
        *("moe_router_bias_update_rate", "moe_expert_capacity_factor", "moe_token_drop_policy", "moe_pad_expert_input_to_capacity"),
        "moe_input_jitter_eps",
    }
)
"""Fields that may differ between a checkpoint and the run that continues it. They change no parameter. They do not change what the
model computes with dropout off, except for rounding and for tokens that experts drop."""
DECREASABLE_FIELDS = frozenset({"mtp_num_layers"})
"""Fields that may be smaller than in the checkpoint: the superfluous layers are not loaded, and the remaining model computes the
same."""
INCREASABLE_FIELDS = frozenset({"moe_router_enable_expert_bias"})
"""Fields that may be switched on although they are off in the checkpoint: the state that they add is initialized to zero and then
has no effect."""
CHANGEABLE_FROM_WEIGHTS = frozenset(
    {
        *("window_size", "rotary_base_local"),
        *("rotary_base", "rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor", "rope_low_freq_factor"),
        *("rope_high_freq_factor", "rope_type", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast"),
        *("beta_slow", "mscale", "mscale_all_dim", "yarn_correction_range_round_to_int", "rope_attention_factor"),
        *("rope_short_factors", "rope_long_factors"),
    }
)
"""Further fields that may differ when a run starts from the weights of another run, for example to extend the context length."""

_ROPE = condition(position_embedding_type="rope")
_SCALED_ROPE = condition(rope_type=("yarn", "dynamic", "longrope"), strict=True)
_YARN, _LONGROPE = condition(rope_type="yarn", strict=True), condition(rope_type="longrope", strict=True)
_LLAMA3 = condition(use_rope_scaling=True, strict=True)
_QUICK_GEGLU = condition(quick_geglu=True, strict=True)
_WINDOW = condition(window_size=IS_SET, strict=True)
_GQA = condition(
    "with --group-query-attention, without which each query head has its own key-value head",
    fix={},
    group_query_attention=True,
)
_ALL_BIASED = idle_condition("all linear layers have biases", disable_bias_linear=False)
_LATENT = condition(
    multi_latent_attention=True, fix={"multi_latent_attention": True, "position_embedding_type": "rope"}, strict=True
)

_MAX_LAYERS = 100_000  # each layer takes a spec and an entry of the layer table


@dataclass(frozen=True)
class ShapeFields:
    """Settings of all layers, of the embedding and of the output layer."""

    num_layers: int = setting(0, min_value=1, max_value=_MAX_LAYERS, unit="layers", required=True)
    """Number of transformer layers. Required."""
    hidden_size: int = setting(0, min_value=1, unit="channels", required=True)
    """Hidden size: channels of the residual stream. Required."""
    ffn_hidden_size: int | None = setting(None, min_value=1, unit="channels")
    """Hidden size of the MLP; by default 4 x hidden size, and for a gated MLP floor(8 x hidden size / 3) rounded down to a multiple
    of 64."""
    num_attention_heads: int = setting(0, min_value=1, unit="heads", required=True)
    """Number of query heads. Required."""
    kv_channels: int | None = setting(
        None,
        min_value=1,
        unit="channels",
        idle_if=idle_condition("--qk-head-dim sets the head size of latent attention", multi_latent_attention=True),
    )
    """Channels of one attention head; by default hidden size / number of heads."""
    group_query_attention: bool = False
    """Use grouped-query attention: groups of query heads share one key-value head (see --num-query-groups)."""
    num_query_groups: int = setting(1, min_value=1, unit="heads", active_if=_GQA)
    """Number of key-value heads; acts with --group-query-attention."""
    multi_latent_attention: bool = False
    """Use multi-head latent attention: keys and values of all heads are computed from a low-rank latent of each token
    (DeepSeek-V2)."""
    q_lora_rank: int | None = setting(None, min_value=1, unit="channels", active_if=_LATENT)
    """Rank of the latent from which queries are computed; by default queries are computed from the hidden state."""
    kv_lora_rank: int = setting(32, min_value=1, unit="channels", active_if=_LATENT)
    """Rank of the latent from which keys and values are computed."""
    qk_head_dim: int = setting(128, min_value=1, unit="channels", active_if=_LATENT)
    """Channels of a query or key head without rotary positions."""
    qk_pos_emb_head_dim: int = setting(64, min_value=2, unit="channels", active_if=_LATENT)
    """Channels of a query or key head with rotary positions, in addition to --qk-head-dim. All key heads share them."""
    v_head_dim: int = setting(128, min_value=1, unit="channels", active_if=_LATENT)
    """Channels of a value head."""
    seq_length: int = setting(0, min_value=1, unit="tokens", required=True)
    """Tokens in a training sequence. Required."""
    max_position_embeddings: int | None = setting(
        None,
        min_value=1,
        unit="rows",
        idle_if=idle_condition("there is no learned position table", position_embedding_type=NotEqual("learned_absolute")),
    )
    """Rows of the learned position table; by default the sequence length."""
    position_embedding_type: PositionEmbedding = "learned_absolute"
    """Position embedding: a learned table, rotary embeddings, or none."""
    rotary_base: float = setting(10000.0, above=0, unit="dimensionless", active_if=_ROPE)
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = setting(
        1.0,
        above=0,
        max_value=1,
        unit="fraction, 1 for all",
        active_if=_ROPE,
        idle_if=idle_condition("latent attention rotates the channels of --qk-pos-emb-head-dim", multi_latent_attention=True),
    )
    """Fraction of each head's channels that has rotary positions."""
    rotary_seq_len_interpolation_factor: float = setting(1.0, above=0, unit="factor", active_if=_ROPE)
    """Divide rotary positions by this factor (linear scaling, Chen et al. 2023), to extend a model to longer sequences."""
    rotary_interleaved: bool = setting(False, active_if=_ROPE)
    """Rotate adjacent channels as pairs, as DeepSeek does, instead of channels that are half a head apart."""
    use_rope_scaling: bool = setting(False, active_if=_ROPE)
    """Scale low rotary frequencies as Llama 3.1 does."""
    rope_scaling_factor: float = setting(8.0, above=0, unit="factor", active_if=_LLAMA3)
    """Scaling factor of --use-rope-scaling."""
    rope_low_freq_factor: float = setting(1.0, above=0, unit="turns", active_if=_LLAMA3)
    """Channel pairs whose rotation makes fewer turns than this within the original context are scaled by the full
    --rope-scaling-factor."""
    rope_high_freq_factor: float = setting(4.0, above=0, unit="turns", active_if=_LLAMA3)
    """Channel pairs whose rotation makes more turns than this within the original context are not scaled."""
    rope_type: RopeType = setting("rope", active_if=_ROPE)
    """Scaling of rotary frequencies for longer sequences: rope for none (but see --use-rope-scaling and
    --rotary-seq-len-interpolation-factor), yarn for YaRN, dynamic for a base that grows with the sequence length, or longrope for
    lists of factors (LongRoPE)."""
    rotary_scaling_factor: float = setting(1.0, above=0, unit="factor", active_if=_SCALED_ROPE)
    """Scaling factor of --rope-type yarn and dynamic. With longrope, the default of --rope-attention-factor is computed from it."""
    original_max_position_embeddings: int | None = setting(
        None,
        min_value=2,
        unit="tokens",
        active_if=condition(rope_type=("yarn", "dynamic", "longrope"), use_rope_scaling=True, strict=True),
    )
    """Context length for which the rotary frequencies were chosen before scaling; by default 8192 with --use-rope-scaling, else
    4096."""
    beta_fast: float = setting(32.0, above=0, unit="turns", active_if=_YARN)
    """Channel pairs whose rotation makes more turns than this within the original context are not scaled by YaRN."""
    beta_slow: float = setting(1.0, above=0, unit="turns", active_if=_YARN)
    """Channel pairs whose rotation makes fewer turns than this within the original context are scaled by YaRN's full factor."""
    yarn_correction_range_round_to_int: bool = setting(True, active_if=_YARN)
    """Round the indices of the channel pairs at which --beta-fast and --beta-slow are reached to integers."""
    mscale: float = setting(1.0, min_value=0, unit="dimensionless", active_if=_YARN)
    """Weight m in YaRN's factor on rotated queries and keys, (0.1 x m x ln(factor) + 1) / (0.1 x n x ln(factor) + 1), with n =
    --mscale-all-dim and factor = --rotary-scaling-factor."""
    mscale_all_dim: float = setting(0.0, min_value=0, unit="dimensionless", active_if=_YARN)
    """Weight n in the denominator of YaRN's factor on rotated queries and keys, 0.1 x n x ln(--rotary-scaling-factor) + 1; see
    --mscale."""
    rope_attention_factor: float | None = setting(
        None, above=0, unit="factor", active_if=condition(rope_type=("yarn", "longrope"), strict=True)
    )
    """Factor on rotated queries and keys. By default yarn computes it from --mscale, and longrope as sqrt(1 +
    ln(--rotary-scaling-factor) / ln(--original-max-position-embeddings))."""
    rope_short_factors: tuple[float, ...] = setting((), above=0, unit="factors", active_if=_LONGROPE)
    """Divisors of the rotary frequencies for sequences within the original context, one for each pair of channels."""
    rope_long_factors: tuple[float, ...] = setting((), above=0, unit="factors", active_if=_LONGROPE)
    """Divisors of the rotary frequencies for sequences longer than the original context, one for each pair of channels."""
    no_rope_freq: str | None = setting(None, active_if=_ROPE)
    """Layers without rotary positions: N for every N-th layer, or a list with 1 for each such layer and 0 for the others, such
    as [0,0,0,1] or ([0]*3+[1])*4."""
    rotary_base_local: float | None = setting(
        None,
        above=0,
        unit="dimensionless",
        active_if=condition(require_all=True, window_size=IS_SET, position_embedding_type="rope", strict=True),
    )
    """Base of the rotary frequencies in layers with an attention window, whose frequencies are then not scaled (Gemma 3); by
    default the base of all layers."""
    window_size: str | None = None
    """Attention window, as tokens before and after the current token: 127,0 attends to the 127 previous tokens and to no later
    ones."""
    window_attn_skip_freq: str | None = setting(None, active_if=_WINDOW)
    """Layers with the attention window: N for all layers but every N-th, or a list with 1 for each layer with the window and 0 for
    the others, such as [1,1,1,0] or ([1]*5+[0])*4; by default all layers have it."""
    softmax_scale: float | None = setting(None, above=0, unit="factor")
    """Factor on the attention scores; by default 1 / sqrt(head size)."""
    attn_logit_softcapping: float | None = setting(None, above=0, unit="dimensionless")
    """Soft cap on the attention scores: cap x tanh(score / cap), as in Gemma 2."""
    softmax_type: SoftmaxType = "vanilla"
    """Attention sink, an extra term in the denominator of attention's softmax: no term (vanilla), exp(0) = 1 (off-by-one), or
    the exponential of a trained weight of each head (learnable, GPT-OSS)."""
    normalization: Normalization = "LayerNorm"
    """Type of all norms of the model."""
    norm_epsilon: float = setting(1e-5, above=0, max_value=1, unit="dimensionless")
    """Constant added to the variance (or mean square) in every norm."""
    norm_placement: NormPlacement = "pre"
    """Placement of the norms: pre, on the inputs of attention and MLP; post, on their outputs before the residual addition (OLMo
    2); sandwich, both (Gemma 2)."""
    norm_weight: bool = True
    """Give norms a weight. With --no-norm-weight they have neither weights nor biases (OLMo 1)."""
    norm_bias: bool = setting(True, active_if=condition(require_all=True, normalization="LayerNorm", norm_weight=True))
    """Give LayerNorms a bias. With --no-norm-bias they have weights only."""
    apply_layernorm_1p: bool = setting(False, active_if=condition(norm_weight=True))
    """Store the weights of norms as their difference from 1 (zero-centered, as in Gemma)."""
    parallel_residual: bool = False
    """Compute attention and MLP from the same input and add both outputs to it (GPT-NeoX)."""
    residual_multiplier: float = setting(1.0, above=0, unit="factor")
    """Multiply the outputs of attention and MLP by this factor before the residual addition (Granite)."""
    gelu_exact: bool = False
    """Activate the MLP with the exact GELU (x times the normal distribution function) instead of its approximation by tanh."""
    relu: bool = False
    """Activate the MLP with max(x, 0) instead of GELU."""
    squared_relu: bool = False
    """Activate the MLP with relu(x)^2 instead of GELU."""
    activation: str | None = setting(None, is_extensible=True)
    """Name of an MLP activation that a module of --imports registers. The built-in activations have their own flags."""
    swiglu: bool = False
    """Use a gated MLP: silu(gate) x up."""
    geglu: bool = False
    """Use a gated MLP: gelu(gate) x up, with the approximation of GELU by tanh (Gemma)."""
    geglu_exact: bool = False
    """Use a gated MLP: gelu(gate) x up, with the exact GELU."""
    quick_geglu: bool = False
    """Use a gated MLP: gate x sigmoid(1.702 gate) x (up + --glu-linear-offset) (GPT-OSS)."""
    glu_linear_offset: float = setting(0.0, min_value=0, unit="dimensionless", active_if=_QUICK_GEGLU)
    """Constant that --quick-geglu adds to the up projection."""
    activation_func_clamp_value: float | None = setting(None, above=0, unit="dimensionless", active_if=_QUICK_GEGLU)
    """Limit of --quick-geglu: gate values are clamped to at most this limit, and values of the up projection to between minus
    this limit and this limit."""
    embedding_multiplier: float = setting(1.0, above=0, unit="factor")
    """Multiply the word embeddings by this factor, as Gemma does by sqrt(hidden size)."""
    embedding_layernorm: bool = False
    """Apply a norm to the output of the embedding."""
    output_multiplier: float = setting(1.0, above=0, unit="factor")
    """Multiply the logits by this factor (the reciprocal of Granite's logits_scaling)."""
    final_logit_softcapping: float | None = setting(None, above=0, unit="dimensionless")
    """Soft cap on the logits: cap x tanh(logit / cap), as in Gemma 2."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer its own weight instead of the word embedding's."""
    disable_bias_linear: bool = False
    """Build all linear layers without biases."""
    add_qkv_bias: bool = setting(
        False,
        idle_if=(_ALL_BIASED, idle_condition("the projections of latent attention have no biases", multi_latent_attention=True)),
    )
    """Keep a bias on the query-key-value projection even with --disable-bias-linear."""
    add_attn_output_bias: bool = setting(False, idle_if=_ALL_BIASED)
    """Keep a bias on attention's output projection even with --disable-bias-linear."""
    add_mlp_bias: bool = setting(False, idle_if=_ALL_BIASED)
    """Keep biases on the MLP's projections even with --disable-bias-linear."""
    qk_layernorm: bool = False
    """Apply a norm to each query and key head before attention; in latent attention, to the latents."""
    qk_layernorm_all_heads: bool = setting(False, active_if=condition(qk_layernorm=True, strict=True))
    """Apply one norm to all query heads together, and one to all key heads together, as OLMo 2 does."""
    attention_dropout: float = setting(0.1, min_value=0, below=1, unit="probability")
    """Dropout probability of the attention weights."""
    hidden_dropout: float = setting(0.1, min_value=0, below=1, unit="probability")
    """Dropout probability of the embedding and of each sublayer's output."""
    init_method_std: float = setting(0.02, above=0, unit="standard deviation")
    """Standard deviation of the initial weights; output projections use std / sqrt(2 x number of layers)."""
    mup_base_width: int | None = setting(None, min_value=1, unit="channels")
    """Base --hidden-size of muP: initial values, learning rates and logits are scaled with the width (Yang et al. 2022, table 8),
    so that learning rates tuned at this width hold for the model."""
    mtp_num_layers: int = setting(0, min_value=0, unit="depths")
    """Number of further tokens to predict after the next one (multi-token prediction). Each is predicted by an extra layer
    after the last one (DeepSeek-V3). The extra layers are on the last pipeline stage and use the settings of the last layer:
    its modules, FP8, recompute and offload."""
    mup_base_kv_channels: int | None = setting(
        None, min_value=1, unit="channels", active_if=condition(mup_base_width=IS_SET, strict=True)
    )
    """Head size of the muP base model, for heads that grow with the width. The attention scores are then multiplied by sqrt(this
    value) / head size instead of 1 / sqrt(head size)."""
    make_vocab_size_divisible_by: int = setting(128, min_value=1, unit="rows")
    """Pad the rows of the word embedding to a multiple of this number x TP, for speed. The padding has no effect on the loss."""
    fp32_residual_connection: bool = setting(
        False, idle_if=idle_condition("the model does not compute in 16 bits", require_all=True, fp16=False, bf16=False)
    )
    """Keep the residual stream in float32 when the model computes in 16 bits."""

    @property
    def head_size(self) -> int:
        """Channels of one query or key head."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_size(self) -> int:
        """Channels of one value head."""
        return self.v_head_dim if self.multi_latent_attention else self.head_size

    @property
    def num_key_value_heads(self) -> int:
        """Number of key-value heads: --num-query-groups with grouped-query attention, otherwise one for each query head."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def width_multiplier(self) -> float:
        """Hidden size as a multiple of the muP base width; 1 without muP."""
        return 1.0 if self.mup_base_width is None else self.hidden_size / self.mup_base_width

    @property
    def ffn_size(self) -> int:
        """Hidden size of the MLP: --ffn-hidden-size, or its default."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return 8 * self.hidden_size // 3 // 64 * 64 if get_activation(self).is_gated else 4 * self.hidden_size

    @property
    def num_positions(self) -> int:
        """Rows of the learned position table: --max-position-embeddings, or its default. Without a table, the length of the longest
        sequence that the model is known for: that of an imported model or, if it is longer, the sequence length."""
        return max(self.max_position_embeddings or 0, self.seq_length)

    @property
    def has_tied_embeddings(self) -> bool:
        """Whether the output layer shares the word embedding's weight."""
        return not self.untie_embeddings_and_output_weights


@dataclass(frozen=True)
class ModelConfig(LoraFields, ExpertFields, ShapeFields):
    """Shape and components of a GPT- or Llama-style decoder."""


def get_changeable_from_weights(saved: ModelConfig) -> frozenset[str]:
    """Return the names of the model settings that a run may change when it starts from the weights of a saved model.

    They include the settings of LoRA if the saved model has no adapters, because adapters can be added to it.

    Args:
        saved: model settings that are stored with the weights.
    """
    return CHANGEABLE_FIELDS | CHANGEABLE_FROM_WEIGHTS | (frozenset(vars(LoraFields())) if saved.lora_rank is None else frozenset())
