"""Random models whose sizes divide among the ranks, and what their layers attend to."""

from __future__ import annotations

from typing import Any

from megatron.spec.activations import BUILT_IN_FIELDS, GATED_FIELDS
from tests.support.random_draws import Draw, chance, number, one_of, options, sometimes, switches

_FEW = 2
"""A LayerNorm of two channels tells which is the larger, and little else: rounding would decide."""


def draw_model(draw: Draw, tp: int, sequence_parallel: bool) -> dict[str, Any]:
    """Shape and parts of a small model.

    Args:
        tp: tensor ranks.
        sequence_parallel: whether tensor ranks divide the sequence.
    """
    settings = _draw_attention(draw, tp)
    settings |= _draw_mlp(draw, tp, settings["hidden_size"])
    latent = "multi_latent_attention" in settings
    settings |= _draw_positions(draw, tp, settings.pop("head"), sequence_parallel, latent=latent)
    settings |= _draw_vocabulary(draw)
    if chance(draw, 2) or settings["hidden_size"] == _FEW:
        settings["normalization"] = "RMSNorm"
    settings |= sometimes(draw, 4, norm_epsilon=1e-2)
    settings |= _draw_norms(draw, settings)
    if "qk_layernorm" in settings and not latent and settings.get("normalization") == "RMSNorm":
        settings |= switches(draw, "qk_layernorm_all_heads")
    settings |= switches(draw, "disable_bias_linear")
    if "disable_bias_linear" in settings or chance(draw, 8):
        settings |= switches(draw, "add_qkv_bias", "add_attn_output_bias", "add_mlp_bias")
    settings |= switches(draw, "fp32_residual_connection", one_in=4)
    rates = [0.0, 0.0, 0.0, 0.2, None]
    settings |= options(draw, attention_dropout=rates, hidden_dropout=rates)
    settings |= sometimes(draw, 4, init_method_std=0.1)
    if not latent and chance(draw, 6):
        settings["mup_base_width"] = one_of(draw, 2, 8, 24)
    elif not latent and chance(draw, 6):
        targets = [None, ("attention.qkv", "mlp.down"), ("attention.output",)]
        settings |= {"lora_rank": number(draw, 1, 3), **options(draw, lora_alpha=[None, 0.5, 4.0], lora_targets=targets)}
    return settings


_WITHOUT_ADAPTERS = ("num_experts", "mtp_num_layers", "fp8_format", "qk_clip", "decoupled_lr", "fsdp_shard_size")


def without_adapters_beside(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without adapters, if they have some and something that these are refused beside."""
    refused = settings.get("data_parallel_sharding_strategy") == "optim_grads_params" or settings.get("optimizer") == "muon"
    if not refused and not any(settings.get(name) for name in _WITHOUT_ADAPTERS):
        return settings
    return {name: value for name, value in settings.items() if not name.startswith("lora_")}


def _draw_attention(draw: Draw, tp: int) -> dict[str, Any]:
    """Heads and their size (`head`, which is no setting), and the hidden size."""
    heads = tp * number(draw, 1, 3)
    head = 2 * number(draw, 1, 3)
    settings: dict[str, Any] = {"hidden_size": heads * head, "num_attention_heads": heads, "head": head}
    if chance(draw, 7):
        return settings | _draw_latents(draw)
    if chance(draw, 4):
        settings |= {"hidden_size": number(draw, 2, 12), "kv_channels": head}
    if chance(draw, 2):
        settings["group_query_attention"] = True
        own = [tp * n for n in range(1, heads // tp + 1) if heads % (tp * n) == 0]
        shared = [n for n in range(1, tp) if tp % n == 0 and 2 * head * n % tp == 0]
        settings["num_query_groups"] = one_of(draw, *own, *shared)
    return settings | (switches(draw, "qk_layernorm", one_in=3) if head > _FEW else {})


def _draw_latents(draw: Draw) -> dict[str, Any]:
    """Latent attention; `head` are the channels that are rotated."""
    rotated = 2 * number(draw, 1, 3)
    return {
        "multi_latent_attention": True,
        "q_lora_rank": one_of(draw, None, number(draw, 3, 9)),
        "kv_lora_rank": number(draw, 3, 9),
        "qk_head_dim": number(draw, 1, 5),
        "qk_pos_emb_head_dim": rotated,
        "v_head_dim": number(draw, 1, 6),
        "head": rotated,
        **switches(draw, "qk_layernorm"),
    }


def _draw_mlp(draw: Draw, tp: int, hidden: int) -> dict[str, Any]:
    activation = one_of(draw, None, "swiglu", *BUILT_IN_FIELDS)
    settings: dict[str, Any] = {activation: True} if activation else {}
    if activation == "quick_geglu":
        settings |= options(draw, glu_linear_offset=[None, 1.0], activation_func_clamp_value=[None, 0.05])
    fits_by_default = activation not in GATED_FIELDS and 4 * hidden % tp == 0
    if not fits_by_default or chance(draw, 2):
        settings["ffn_hidden_size"] = tp * number(draw, 1, 6)
    return settings


def _draw_positions(draw: Draw, tp: int, head: int, sequence_parallel: bool, *, latent: bool) -> dict[str, Any]:
    kind = one_of(draw, None, "rope", "rope", "none")
    kind = "rope" if latent else kind
    unit = tp if sequence_parallel else 1
    settings: dict[str, Any] = {"seq_length": unit * number(draw, max(1, 4 // unit), max(2, 16 // unit))}
    settings["position_embedding_type"] = kind
    if kind is None and chance(draw, 3):
        settings["max_position_embeddings"] = settings["seq_length"] + number(draw, 1, 3)
    if kind == "rope":
        shares = [share for share in (1.0, 0.75, 0.5, 0.25) if int(share * head) in range(2, head + 1, 2)]
        settings |= options(draw, rotary_percent=[None, *(shares[:1] if latent else shares)], rotary_base=[None, 50.0])
        settings |= switches(draw, "rotary_interleaved", one_in=4)
        settings |= _draw_stretch(draw, int(head * (settings["rotary_percent"] or 1.0)) // 2)
    return settings


def _draw_stretch(draw: Draw, pairs: int) -> dict[str, Any]:
    """How rotary frequencies are stretched; contexts lie among the lengths of sequences that are drawn.

    Args:
        pairs: how many pairs of channels are rotated.
    """
    kind = one_of(draw, None, None, "llama", "linear", "yarn", "longrope", *(["dynamic"] if pairs > 1 else []))
    context = options(draw, original_max_position_embeddings=[None, 4, 8])
    if kind is None or kind == "linear":
        return {} if kind is None else {"rotary_seq_len_interpolation_factor": 2.0}
    if kind == "llama":
        bounds = one_of(draw, {}, {"rope_low_freq_factor": 0.1, "rope_high_freq_factor": 1.0})
        return {"use_rope_scaling": True, "rope_scaling_factor": one_of(draw, None, 2.0)} | context | bounds
    settings = {"rope_type": kind, "rotary_scaling_factor": one_of(draw, 1.5, 4.0), **context}
    if kind == "yarn":
        settings |= one_of(draw, {}, {"beta_fast": 1.0, "beta_slow": 0.1, "yarn_correction_range_round_to_int": False})
        settings |= one_of(draw, {}, {"mscale": 0.7, "mscale_all_dim": 1.5}, {"rope_attention_factor": 1.2})
    if kind == "longrope":
        for name in ("rope_short_factors", "rope_long_factors"):
            settings[name] = tuple(float(number(draw, 1, 4)) for _ in range(pairs))
    return settings


def _draw_norms(draw: Draw, settings: dict[str, Any]) -> dict[str, Any]:
    """Where norms stand and what they have, and how layers add to the residual stream."""
    found = options(draw, norm_placement=[None, None, "post", "sandwich"])
    if not (weightless := sometimes(draw, 6, norm_weight=False)):
        found |= switches(draw, "apply_layernorm_1p", one_in=4)
        if settings.get("normalization") != "RMSNorm":
            found |= sometimes(draw, 6, norm_bias=False)
    found |= weightless | switches(draw, "parallel_residual", one_in=5)
    return found | sometimes(draw, 6, residual_multiplier=0.4)


def _draw_vocabulary(draw: Draw) -> dict[str, Any]:
    """Rows of the embedding (one more than --vocab-size), their padding, and whether the output layer shares them."""
    settings: dict[str, Any] = {"tokenizer_type": "NullTokenizer", "vocab_size": number(draw, 2, 70)}
    settings |= switches(draw, "untie_embeddings_and_output_weights")
    settings |= switches(draw, "embedding_layernorm", one_in=6)
    for field, value in (("embedding_multiplier", 3.0), ("output_multiplier", 0.5), ("final_logit_softcapping", 0.4)):
        settings |= sometimes(draw, 6, **{field: value})
    return settings | sometimes(draw, 2, make_vocab_size_divisible_by=[1, 2, 5])


def draw_attention(draw: Draw, settings: dict[str, Any]) -> dict[str, Any]:
    """What layers attend to and how, for settings that have a model and its layers."""
    rope, layers = settings.get("position_embedding_type") == "rope", settings["num_layers"]
    found: dict[str, Any] = {}
    if chance(draw, 3):
        found["window_size"] = f"{number(draw, 1, settings['seq_length'])},0"
        found["window_attn_skip_freq"] = one_of(draw, None, str(number(draw, 1, 3)), _pattern(draw, layers))
        if rope:
            found |= options(draw, rotary_base_local=[None, 20.0])
    if rope and chance(draw, 4):
        found["no_rope_freq"] = one_of(draw, str(number(draw, 2, 3)), _pattern(draw, layers))
    found |= sometimes(draw, 6, softmax_scale=0.3)
    found |= sometimes(draw, 6, attn_logit_softcapping=[0.5, 5.0])
    return found | sometimes(draw, 4, softmax_type=["learnable", "learnable", "off-by-one"])


def _pattern(draw: Draw, layers: int) -> str:
    """A list with 0 or 1 for each layer."""
    return "+".join(f"[{int(chance(draw, 2))}]" for _ in range(layers))
