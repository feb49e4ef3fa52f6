"""Random batches, lengths, updates, number formats and documents of short runs on made-up data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tests.support.random_draws import Draw, chance, number, one_of, switches

_MOST_SAMPLES = 60
"""Of a run, about."""


def draw_training(draw: Draw, dp: int) -> dict[str, Any]:
    """Everything about the steps of a run with `dp` data ranks."""
    settings = _draw_batch(draw, dp)
    scheduled = settings.get("step_batch_size_schedule", ":").split(":")[-1]
    batch = int(scheduled or settings.get("global_batch_size") or settings["micro_batch_size"] * dp)
    settings |= _draw_length(draw, batch)
    settings |= _draw_update(draw)
    if batch > settings["micro_batch_size"] and chance(draw, 6):
        settings["log_gradient_noise"] = True
    settings |= _draw_rates(draw, settings, batch)
    settings |= _draw_precision(draw)
    if settings.get("bf16") and chance(draw, 3):
        settings["grad_reduce_in_bf16"] = True
    settings |= {"mock_data": True, "num_workers": one_of(draw, 0, 0, 2)}
    settings |= switches(draw, "reset_position_ids", "reset_attention_mask", "eod_mask_loss", one_in=3)
    settings["seed"] = one_of(draw, None, 1, 2)
    if chance(draw, 3):
        settings["z_loss_coeff"] = one_of(draw, 1e-4, 0.1)
    if chance(draw, 4):
        settings["label_smoothing"] = one_of(draw, 0.1, 0.6)
    if chance(draw, 6):
        settings["iterations_to_skip"] = (1,)
    return settings


def draw_rule(draw: Draw, settings: dict[str, Any]) -> None:
    """Another update rule than Adam and SGD, one time in three."""
    if not chance(draw, 3):
        return
    rule = one_of(draw, "lion", "ademamix", "adafactor", "lamb", "adam8bit", "muon", "muon")
    for field in ("sgd_momentum", *(("adam_beta1", "adam_beta2", "adam_eps") if rule in ("lion", "adafactor") else ())):
        settings.pop(field, None)
    settings |= {"optimizer": rule, "lr": 0.01}
    if rule in ("adafactor", "lamb", "muon"):
        settings.pop("mup_base_width", None)
    if rule in ("lion", "adafactor"):  # they make noise of gradients whose true value is zero, such as that of a key's bias
        settings |= {"disable_bias_linear": True, "add_qkv_bias": None, "normalization": "RMSNorm"}
    if not settings.get("qk_layernorm") and chance(draw, 3):
        settings |= {"qk_clip": True, "qk_clip_threshold": one_of(draw, 1e-3, 0.02), "qk_clip_alpha": one_of(draw, None, 0.3)}
    if rule == "lion":
        settings |= {"lion_beta1": one_of(draw, None, 0.5), "lion_beta2": one_of(draw, None, 0.9)}
    elif rule == "muon":
        settings |= {"muon_momentum": one_of(draw, None, 0.5), "muon_num_ns_steps": one_of(draw, None, 2)}
        settings |= {"muon_scale_mode": one_of(draw, None, "unit_rms_norm", "shape_scaling")}
        settings["muon_extra_scale_factor"] = one_of(draw, None, 0.2)
        settings |= switches(draw, "muon_use_nesterov", one_in=2) | switches(
            draw, "muon_no_split_qkv", "muon_split_heads", one_in=3
        )
    elif rule == "adam8bit":
        settings["adam_8bit_block_size"] = one_of(draw, None, 1, 2, 3, 7)
    elif rule == "ademamix":
        settings |= {"ademamix_warmup_iters": number(draw, 0, 4), "ademamix_beta3": one_of(draw, None, 0.9)}
        settings["ademamix_alpha"] = one_of(draw, None, 1.0)
    elif rule == "adafactor":
        settings |= {"adafactor_decay_rate": one_of(draw, None, 0.5), "adafactor_clip_threshold": one_of(draw, None, 0.3)}
        settings |= {"adafactor_beta1": one_of(draw, None, 0.9), "adafactor_eps": one_of(draw, None, 1e-20)}
        if chance(draw, 2):
            settings |= {"adafactor_relative_step": True, "adafactor_least_scale": one_of(draw, None, 0.05)}


def draw_eight_bits(draw: Draw, settings: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """Products in 8 bits, one time in three, in a model whose sizes are grown to multiples of 16. (Of 128 it would be slow.)"""
    if not chance(draw, 3) or settings.get("tp_comm_overlap"):
        return {}
    found: dict[str, Any] = {"fp8_format": one_of(draw, "e4m3", "hybrid"), "fp8_recipe": one_of(draw, None, "rowwise")}
    if settings["num_layers"] > 1 and chance(draw, 2):
        found |= {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0}
    width = -(-settings.get("ffn_hidden_size", 1) // (16 * tp)) * 16 * tp
    sizes = {"hidden_size": 16 * number(draw, 1, 2), "kv_channels": 16, "ffn_hidden_size": width}
    unit = 16
    if "multi_latent_attention" in settings:
        del sizes["kv_channels"]
        sizes |= dict.fromkeys(("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), 16)
        sizes["q_lora_rank"] = settings["q_lora_rank"] and 16
        unit = 16 * tp  # tensor ranks may divide the tokens of latents
    length = settings["seq_length"] * unit // math.gcd(settings["seq_length"], unit)
    positions = settings.get("max_position_embeddings")
    return found | sizes | {"seq_length": length, "max_position_embeddings": positions and length}


def draw_logging(draw: Draw) -> dict[str, Any]:
    """What a run tells and checks beside its work."""
    settings: dict[str, Any] = {"eval_iters": one_of(draw, 0, 0, 1, 2), "log_interval": 1}
    if settings["eval_iters"] and chance(draw, 2):
        settings["eval_interval"] = 1
    logged = ("log_params_norm", "log_num_zeros_in_grad", "log_throughput", "log_max_attention_logit", "deterministic_mode")
    settings |= switches(draw, *logged, one_in=6)
    if chance(draw, 6):
        settings["timing_log_level"] = number(draw, 1, 2)
        settings["timing_log_option"] = one_of(draw, None, "max", "all")
    if chance(draw, 6):
        settings["manual_gc"] = True
        settings["manual_gc_interval"] = one_of(draw, None, 1)
    if chance(draw, 4):
        settings["check_replicas_every"] = 1
    if chance(draw, 4):
        settings["sentinel_interval"] = number(draw, 1, 2)
        settings["sentinel_action"] = one_of(draw, None, "stop")  # it finds nothing
    settings["device"] = one_of(draw, None, None, "cpu")
    if chance(draw, 4):
        settings |= {"attention_backend": one_of(draw, "math", "unfused", "flash", "cudnn"), "device": "cpu"}
    settings |= switches(draw, "log_memory", one_in=10)
    if chance(draw, 6):
        settings |= {"spike_policy": one_of(draw, "warn", "skip"), "spike_window": number(draw, 4, 5)}
        settings["spike_threshold"] = one_of(draw, None, 0.1)
    return settings


def _draw_batch(draw: Draw, dp: int) -> dict[str, Any]:
    """Micro-batch, global batch and ramp-up."""
    micro = number(draw, 1, 3)
    unit = micro * dp
    settings: dict[str, Any] = {"micro_batch_size": micro}
    if chance(draw, 4):
        start, increment = unit * number(draw, 1, 2), unit * number(draw, 1, 2)
        settings["global_batch_size"] = start + increment * number(draw, 1, 3)
        if chance(draw, 2):
            settings["rampup_batch_size"] = (start, increment, number(draw, 1, 3 * start))
        else:  # in tokens, which are at least those of a sample, mostly
            settings["step_batch_size_schedule"] = f"0:{start} {number(draw, 40, 400)}:{settings.pop('global_batch_size')}"
    elif not chance(draw, 8):
        settings["global_batch_size"] = unit * number(draw, 1, 6 if dp < 4 else 3)
    return settings


def _draw_length(draw: Draw, batch: int) -> dict[str, Any]:
    """Two to four steps, counted in steps or in samples."""
    steps = number(draw, 2, 4 if 4 * batch < _MOST_SAMPLES else 3)
    return {"train_samples": batch * steps - one_of(draw, 0, 1)} if chance(draw, 4) else {"train_iters": steps}


def _draw_update(draw: Draw) -> dict[str, Any]:
    """The update rule and clipping."""
    settings: dict[str, Any] = {"clip_grad": one_of(draw, None, None, 0.0, 0.3, 100.0)}
    if chance(draw, 3):
        settings |= {"optimizer": "sgd", "lr": one_of(draw, 0.01, 0.1), "sgd_momentum": one_of(draw, None, 0.0, 0.5)}
    else:
        settings |= {"lr": one_of(draw, 0.01, 1e-3), "adam_beta1": one_of(draw, None, 0.5, 0.0)}
        settings |= {"adam_beta2": one_of(draw, None, 0.95), "adam_eps": one_of(draw, None, 1e-5)}
    if chance(draw, 4):
        settings |= {"decoupled_lr": one_of(draw, 0.02, 3e-3), "decoupled_min_lr": one_of(draw, None, 2e-3)}
    if chance(draw, 4):
        settings["param_groups"] = _draw_groups(draw)
    if chance(draw, 5):
        settings["ema_decay"] = one_of(draw, 0.5, 0.999)
    return settings | switches(draw, "no_decay_embeddings", one_in=6)


def _draw_groups(draw: Draw) -> tuple[str, ...]:
    """One to three entries; patterns may meet. Whatever the model, they match."""
    found = []
    for _ in range(number(draw, 1, 3)):
        pattern = one_of(draw, "*", "embedding.*", "layers.*.mlp.*", "*.weight", "layers.0.attention.*", "final_norm.weight")
        said = one_of(
            draw,
            "lr-mult=0.5",
            "lr=0.02 min-lr=1e-3",
            "wd-mult=2",
            "wd-mult=0",
            "optimizer=sgd",
            "optimizer=adam",
            "optimizer=lamb",
        )
        found.append(f"{pattern} {said}")
    return tuple(found)


def _draw_rates(draw: Draw, settings: dict[str, Any], batch: int) -> dict[str, Any]:
    """How learning rate and weight decay change over the run."""
    unit = "iters" if "train_iters" in settings else "samples"
    length = settings[f"train_{unit}"]
    each = 1 if unit == "iters" else batch
    style = one_of(draw, None, "constant", "linear", "cosine", "inverse-square-root", "WSD")
    found: dict[str, Any] = {"lr_decay_style": style}
    if chance(draw, 3):
        found |= one_of(draw, {f"lr_warmup_{unit}": each}, {"lr_warmup_fraction": 0.25})
        found["lr_warmup_init"] = one_of(draw, None, 1e-4)
    if style == "WSD":
        found[f"lr_wsd_decay_{unit}"] = each
        found["lr_wsd_decay_style"] = one_of(draw, None, "linear", "cosine", "minus_sqrt")
    if style != "constant":
        found["min_lr"] = one_of(draw, None, 1e-4)
        found[f"lr_decay_{unit}"] = one_of(draw, None, length, 2 * length)
    if length > each + each and chance(draw, 5):
        found |= {f"lr_rewarm_start_{unit}": each, f"lr_rewarm_{unit}": one_of(draw, None, each)}
        found["lr_rewarm_factor"] = one_of(draw, None, 0.5, 2.0)
    change = one_of(draw, None, None, "linear", "cosine")
    if change:
        return found | {"weight_decay_incr_style": change, "start_weight_decay": 0.0, "end_weight_decay": 0.2}
    return found | {"weight_decay": one_of(draw, None, 0.0, 0.1)}


def _draw_precision(draw: Draw) -> dict[str, Any]:
    """The number format, and the scale of the loss in float16."""
    kind = one_of(draw, None, "bf16", "fp16", "fp64")
    settings: dict[str, Any] = {kind: True} if kind else one_of(draw, {}, {"fp32_matmul_precision": "high"})
    if kind == "fp16":
        settings |= one_of(draw, {"loss_scale": 1024.0}, {"initial_loss_scale": 256.0}, {"initial_loss_scale": 2.0**20})
        if "loss_scale" not in settings:
            settings |= one_of(draw, {}, {"hysteresis": 1}, {"loss_scale_window": 2}, {"min_loss_scale": 2.0})
    return settings
