"""Rules about the shape of the model."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron.config.checks.finding import (
    Finding,
    SettingsRule,
    create_change,
    find_multiples_near,
    format_setting,
    get_value,
    require_divisible,
    require_exclusive,
    require_not_above,
    reset,
    rule,
    try_values,
)
from megatron.config.config import Config
from megatron.config.setting import condition
from megatron.spec.activations import ACTIVATION_FIELDS, get_activation
from megatron.spec.layer_pattern import find_pattern_problem, parse_pattern, parse_window
from megatron.spec.mlps import has_dense_layers
from megatron.spec.rotary import get_rotary_dim

_EXPERT_LAYER_SETTINGS = ("num_experts", "moe_layer_freq", "num_layers")
"""Fields that determine which layers have experts instead of an MLP."""
_LATENT_HEAD_SETTINGS = ("multi_latent_attention", "qk_head_dim", "qk_pos_emb_head_dim")
"""Fields that determine the head size of latent attention."""

check_hidden_divisible_by_heads = require_divisible(
    "hidden_size",
    "num_attention_heads",
    "The heads divide the hidden size evenly, unless --kv-channels sets the head size.",
    condition=condition(kv_channels=None, multi_latent_attention=False, require_all=True),
)


@rule(
    "hidden_size",
    "ffn_hidden_size",
    depends_on=(*ACTIVATION_FIELDS, *_EXPERT_LAYER_SETTINGS, "moe_ffn_hidden_size", "tensor_model_parallel_size"),
)
def check_mlp_width(config: Config, world_size: int) -> Iterator[Finding]:
    """A small model with a gated MLP needs --ffn-hidden-size. The default is 8/3 of --hidden-size, rounded down to a multiple of
    64, which is 0 for a small model."""
    model = config.model
    if model.ffn_size < 1 and (has_dense_layers(model) or model.moe_ffn_hidden_size is None):
        flag = get_activation(model).config_field
        assert flag is not None, "an MLP that is not gated is wider than the model"
        yield Finding(
            f"The MLP has no width: {format_setting(config, flag)} with --hidden-size {model.hidden_size} gives "
            f"8 x {model.hidden_size} / 3 rounded down to a multiple of 64, which is 0.",
            [create_change(ffn_hidden_size=8 * config.parallel.tensor_model_parallel_size)],
            fields=("hidden_size", "ffn_hidden_size", flag),
        )


@rule("multi_latent_attention", "position_embedding_type")
def check_latent_attention_uses_rope(config: Config, world_size: int) -> Iterator[Finding]:
    """--multi-latent-attention needs --position-embedding-type rope, because some channels of each head are reserved for rotary
    positions (--qk-pos-emb-head-dim)."""
    if config.model.multi_latent_attention and config.model.position_embedding_type != "rope":
        yield Finding(
            f"--multi-latent-attention cannot be used with {format_setting(config, 'position_embedding_type')}.",
            [create_change(position_embedding_type="rope")],
        )


check_no_gqa_with_latent_attention = require_exclusive(
    "multi_latent_attention",
    "group_query_attention",
    reason="Both reduce the memory of keys and values; in latent attention every query head has its own keys and values.",
)
check_no_mup_with_latent_attention = require_exclusive(
    "multi_latent_attention",
    "mup_base_width",
    reason="muP scales by the width relative to a base model, and the sizes of latents do not depend on the width.",
)
check_no_all_heads_norm_with_latent_attention = require_exclusive(
    "multi_latent_attention", "qk_layernorm_all_heads", reason="Latent attention applies norms to latents, not to heads."
)


@rule("mtp_num_layers", "seq_length")
def check_mtp_num_layers(config: Config, world_size: int) -> Iterator[Finding]:
    """--mtp-num-layers must be below --seq-length. Depth k of multi-token prediction predicts the token k positions after the next
    one, so a sample of k tokens has no label for depth k."""
    num_depths, seq_length = config.model.mtp_num_layers, config.model.seq_length
    if 0 < seq_length <= num_depths:
        yield Finding(
            f"--mtp-num-layers {num_depths} leaves the last depth without a label in samples of --seq-length {seq_length} tokens.",
            [try_values("mtp_num_layers", num_depths, [seq_length - 1]), try_values("seq_length", seq_length, [num_depths + 1])],
        )


check_heads_divisible_by_query_groups = require_divisible(
    "num_attention_heads",
    "num_query_groups",
    "Each key-value head serves the same number of query heads.",
    condition=condition(group_query_attention=True),
)
check_single_activation = require_exclusive(*ACTIVATION_FIELDS, reason="Each of them sets the MLP's activation.")


@rule(
    *("rotary_percent", "kv_channels", "position_embedding_type", "hidden_size", "num_attention_heads", "qk_pos_emb_head_dim"),
    depends_on=_LATENT_HEAD_SETTINGS,
)
def check_rotated_channels(config: Config, world_size: int) -> Iterator[Finding]:
    """Rotary embeddings rotate pairs of channels, so the number of rotated channels of a head must be even and at least 2. It is
    --rotary-percent of the head size, or --qk-pos-emb-head-dim in latent attention."""
    model = config.model
    if model.position_embedding_type != "rope" or model.head_size < 1:
        return
    num_rotated = get_rotary_dim(model)
    if model.multi_latent_attention:
        if num_rotated % 2:
            nearest = try_values("qk_pos_emb_head_dim", num_rotated, find_multiples_near(num_rotated, 2))
            yield Finding(f"{format_setting(config, 'qk_pos_emb_head_dim')} is odd.", [nearest], fields=("qk_pos_emb_head_dim",))
    elif num_rotated < 2 or num_rotated % 2:
        yield Finding(
            f"{format_setting(config, 'rotary_percent')} of a head of {model.head_size} channels rotates {num_rotated} of them.",
            [
                try_values("rotary_percent", model.rotary_percent, (1.0, 0.75, 0.5, 0.25)),
                try_values("kv_channels", model.head_size, find_multiples_near(model.head_size, 2)),
            ],
        )


check_single_rope_scaling = require_exclusive(
    "use_rope_scaling",
    "rotary_seq_len_interpolation_factor",
    "rope_type",
    reason="Each of them scales rotary frequencies, and a model uses only one of them.",
)


@rule("rope_low_freq_factor", "rope_high_freq_factor")
def check_llama3_rope_bounds(config: Config, world_size: int) -> Iterator[Finding]:
    """--rope-low-freq-factor must be below --rope-high-freq-factor. Llama 3's RoPE scaling interpolates between scaled and unscaled
    frequencies for channel pairs whose number of rotations over the original context lies between these two values."""
    low, high = config.model.rope_low_freq_factor, config.model.rope_high_freq_factor
    if low >= high:
        yield Finding(
            f"{format_setting(config, 'rope_low_freq_factor')} is not below {format_setting(config, 'rope_high_freq_factor')}.",
            [create_change(rope_high_freq_factor=4 * low), create_change(rope_low_freq_factor=high / 4)],
        )


@rule("beta_slow", "beta_fast")
def check_yarn_bounds(config: Config, world_size: int) -> Iterator[Finding]:
    """--beta-slow must be below --beta-fast. YaRN interpolates between scaled and unscaled frequencies for channel pairs whose
    number of rotations over the original context lies between these two values."""
    slow, fast = config.model.beta_slow, config.model.beta_fast
    if slow >= fast:
        yield Finding(
            f"{format_setting(config, 'beta_slow')} is not below {format_setting(config, 'beta_fast')}.",
            [create_change(beta_fast=32 * slow), create_change(beta_slow=fast / 32)],
        )


@rule("rope_type", "rotary_base")
def check_yarn_rotary_base(config: Config, world_size: int) -> Iterator[Finding]:
    """--rope-type yarn needs a --rotary-base above 1. YaRN computes which pair of channels makes a given number of rotations, so
    frequencies must decrease from pair to pair."""
    if config.model.rope_type == "yarn" and config.model.rotary_base <= 1:
        yield Finding(
            f"{format_setting(config, 'rope_type')} cannot be used with {format_setting(config, 'rotary_base')}: "
            "frequencies do not decrease.",
            [reset(config, "rotary_base"), reset(config, "rope_type")],
        )


@rule("rope_type", "kv_channels", depends_on=("rotary_percent", "hidden_size", "num_attention_heads", *_LATENT_HEAD_SETTINGS))
def check_dynamic_rope_channels(config: Config, world_size: int) -> Iterator[Finding]:
    """--rope-type dynamic needs at least two rotated pairs of channels per head. It increases the frequency base so that the
    frequency of the slowest pair is divided by a factor that grows with the sequence length, and that of the fastest pair is
    unchanged."""
    model = config.model
    if model.rope_type == "dynamic" and model.head_size >= 1 and get_rotary_dim(model) == 2:
        yield Finding(
            f"{format_setting(config, 'rope_type')} needs more than one rotated pair of channels.", [reset(config, "rope_type")]
        )


@rule(
    "rope_short_factors",
    "rope_long_factors",
    "rope_type",
    depends_on=("kv_channels", "rotary_percent", "hidden_size", "num_attention_heads", *_LATENT_HEAD_SETTINGS),
)
def check_longrope_factors(config: Config, world_size: int) -> Iterator[Finding]:
    """--rope-type longrope needs one factor for each rotated pair of channels in both --rope-short-factors and --rope-long-factors,
    because each pair's frequency has its own divisor."""
    model = config.model
    if model.rope_type != "longrope" or model.head_size < 1:
        return
    num_pairs = get_rotary_dim(model) // 2
    for name in ("rope_short_factors", "rope_long_factors"):
        num_factors = len(getattr(model, name))
        if num_factors != num_pairs:
            yield Finding(
                f"--{name.replace('_', '-')} has {num_factors} factors, but {num_pairs} pairs of channels are rotated.",
                [reset(config, "rope_type", "rope_short_factors", "rope_long_factors")],
                fields=(name, "rope_type"),
            )


check_position_table_size = require_not_above(
    "seq_length",
    "max_position_embeddings",
    "The learned position table needs a row for every token of a sequence.",
    condition=condition(position_embedding_type="learned_absolute"),
)


_WINDOW, _WINDOWED, _UNROTATED = "window_size", "window_attn_skip_freq", "no_rope_freq"


@rule(_WINDOW)
def check_window_size(config: Config, world_size: int) -> Iterator[Finding]:
    """--window-size must be N,0: a token attends to the N tokens before it and, because attention is causal, to none after it.
    Models of transformers also count the token itself, so their window N is N-1,0 here."""
    text = config.model.window_size
    if text is not None and parse_window(text) is None:
        sizes = [int(size) for size in re.findall(r"\d{1,15}", text)]
        yield Finding(
            f"{format_setting(config, _WINDOW)} cannot be read.",
            [[create_change(window_size=f"{size},0") for size in sizes[:1]], reset(config, _WINDOW)],
        )


def _build_layer_pattern_rule(field: str) -> SettingsRule:
    """Build the rule that the value of a flag which selects layers (--window-attn-skip-freq or --no-rope-freq) is a valid layer
    pattern."""

    @rule(field, "num_layers")
    def check(config: Config, world_size: int) -> Iterator[Finding]:
        """The flag selects layers. Its value must be a number N, for every N-th layer, or a list with 0 or 1 for each layer."""
        text = get_value(config, field)
        problem = None if text is None else find_pattern_problem(text, config.model.num_layers)
        if problem is not None:
            pattern = parse_pattern(text)
            num_layers_candidates = [create_change(num_layers=len(pattern))] if isinstance(pattern, tuple) and pattern else []
            yield Finding(
                f"{format_setting(config, field)} does not select layers. {problem}",
                [num_layers_candidates, reset(config, field)],
            )

    return check


check_window_layers = _build_layer_pattern_rule(_WINDOWED)
check_no_rope_layers = _build_layer_pattern_rule(_UNROTATED)


@rule("qk_layernorm_all_heads", "normalization", depends_on=("qk_layernorm",))
def check_all_heads_norm(config: Config, world_size: int) -> Iterator[Finding]:
    """--qk-layernorm-all-heads needs --normalization RMSNorm, because the models that normalize all heads of a token together use
    RMSNorm."""
    if config.model.qk_layernorm_all_heads and config.model.qk_layernorm and config.model.normalization != "RMSNorm":
        yield Finding(
            f"{format_setting(config, 'qk_layernorm_all_heads')} cannot be used with {format_setting(config, 'normalization')}.",
            [create_change(normalization="RMSNorm"), reset(config, "qk_layernorm_all_heads")],
        )
