"""Random batches, lengths, updates, number formats and documents of short runs on made-up data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tests.support.random_draws import Draw, chance, number, one_of, options, sometimes, switches

_MOST_SAMPLES = 60
"""Of a run, about."""


def draw_training(draw: Draw, dp: int) -> dict[str, Any]:
    """Everything about the steps of a run with `dp` data ranks."""
    settings = _draw_batch(draw, dp)
    scheduled = settings.get("step_batch_size_schedule", ":").split(":")[-1]
    batch = int(scheduled or settings.get("global_batch_size") or settings["micro_batch_size"] * dp)
    settings |= _draw_length(draw, batch)
    settings |= _draw_update(draw)
    if batch > settings["micro_batch_size"]:
        settings |= switches(draw, "log_gradient_noise", one_in=6)
    settings |= _draw_rates(draw, settings, batch)
    settings |= _draw_precision(draw)
    if settings.get("bf16"):
        settings |= switches(draw, "grad_reduce_in_bf16", one_in=3)
    settings |= options(draw, mock_data=True, num_workers=[0, 0, 2])
    settings |= switches(draw, "reset_position_ids", "reset_attention_mask", "eod_mask_loss", one_in=3)
    settings |= options(draw, seed=[None, 1, 2])
    settings |= sometimes(draw, 3, z_loss_coeff=[1e-4, 0.1])
    settings |= sometimes(draw, 4, label_smoothing=[0.1, 0.6])
    return settings | sometimes(draw, 6, iterations_to_skip=(1,))


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
    if not settings.get("qk_layernorm"):
        settings |= sometimes(draw, 3, qk_clip=True, qk_clip_threshold=[1e-3, 0.02], qk_clip_alpha=[None, 0.3])
    if rule == "ademamix":
        settings["ademamix_warmup_iters"] = number(draw, 0, 4)
    settings |= options(draw, **_OF_RULES.get(rule, {}))
    if rule == "muon":
        settings |= switches(draw, "muon_use_nesterov") | switches(draw, "muon_no_split_qkv", "muon_split_heads", one_in=3)
    if rule == "adafactor":
        settings |= sometimes(draw, 2, adafactor_relative_step=True, adafactor_least_scale=[None, 0.05])


_OF_RULES: dict[str, dict[str, list[Any]]] = {
    "lion": dict(lion_beta1=[None, 0.5], lion_beta2=[None, 0.9]),
    "muon": dict(
        muon_momentum=[None, 0.5],
        muon_num_ns_steps=[None, 2],
        muon_scale_mode=[None, "unit_rms_norm", "shape_scaling"],
        muon_extra_scale_factor=[None, 0.2],
    ),
    "adam8bit": dict(adam_8bit_block_size=[None, 1, 2, 3, 7]),
    "ademamix": dict(ademamix_beta3=[None, 0.9], ademamix_alpha=[None, 1.0]),
    "adafactor": dict(
        adafactor_decay_rate=[None, 0.5],
        adafactor_clip_threshold=[None, 0.3],
        adafactor_beta1=[None, 0.9],
        adafactor_eps=[None, 1e-20],
    ),
}
"""What update rules have of their own."""


def draw_eight_bits(draw: Draw, settings: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """Products in 8 bits, one time in three, in a model whose sizes are grown to multiples of 16. (Of 128 it would be slow.)"""
    if not chance(draw, 3) or settings.get("tp_comm_overlap"):
        return {}
    found = options(draw, fp8_format=["e4m3", "hybrid"], fp8_recipe=[None, "rowwise"])
    if settings["num_layers"] > 1:
        found |= sometimes(draw, 2, first_last_layers_bf16=True, num_layers_at_end_in_bf16=0)
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
    settings = options(draw, eval_iters=[0, 0, 1, 2], log_interval=1)
    if settings["eval_iters"]:
        settings |= sometimes(draw, 2, eval_interval=1)
        if settings.get("eval_interval"):  # more evaluations than a run has: it is compared with one that ends at the last step
            settings |= sometimes(draw, 2, early_stopping_patience=9, early_stopping_min_delta=[None, 0.5])
    logged = ("log_params_norm", "log_num_zeros_in_grad", "log_throughput", "log_max_attention_logit", "deterministic_mode")
    settings |= switches(draw, *logged, one_in=6)
    if chance(draw, 6):
        settings["timing_log_level"] = number(draw, 1, 2)
        settings |= options(draw, timing_log_option=[None, "max", "all"])
    settings |= sometimes(draw, 6, manual_gc=True, manual_gc_interval=[None, 1])
    settings |= sometimes(draw, 4, check_replicas_every=1)
    if chance(draw, 4):
        settings["sentinel_interval"] = number(draw, 1, 2)
        settings |= options(draw, sentinel_action=[None, "stop"])  # it finds nothing
    if chance(draw, 6):
        settings |= options(draw, sample_interval=[1, 2], sample_tokens=[1, 3], sample_temperature=[None, 0.0])
    settings |= options(draw, device=[None, None, "cpu"])
    settings |= sometimes(draw, 4, attention_backend=["math", "unfused", "flash", "cudnn"], device="cpu")
    settings |= switches(draw, "log_memory", one_in=10)
    if chance(draw, 6):
        settings |= {"spike_policy": one_of(draw, "warn", "skip"), "spike_window": number(draw, 4, 5)}
        settings |= options(draw, spike_threshold=[None, 0.1])
    return settings


def _draw_batch(draw: Draw, dp: int) -> dict[str, Any]:
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
    adam = dict(lr=[0.01, 1e-3], adam_beta1=[None, 0.5, 0.0], adam_beta2=[None, 0.95], adam_eps=[None, 1e-5])
    settings = options(draw, clip_grad=[None, None, 0.0, 0.3, 100.0])
    settings |= sometimes(draw, 3, optimizer="sgd", lr=[0.01, 0.1], sgd_momentum=[None, 0.0, 0.5]) or options(draw, **adam)
    settings |= sometimes(draw, 4, decoupled_lr=[0.02, 3e-3], decoupled_min_lr=[None, 2e-3])
    if chance(draw, 4):
        settings["param_groups"] = _draw_groups(draw)
    settings |= sometimes(draw, 5, ema_decay=[0.5, 0.999])
    return settings | switches(draw, "no_decay_embeddings", one_in=6)


def _draw_groups(draw: Draw) -> tuple[str, ...]:
    """One to three entries; patterns may meet. Whatever the model, they match."""
    found = []
    for _ in range(number(draw, 1, 3)):
        pattern = one_of(draw, "*", "embedding.*", "layers.*.mlp.*", "*.weight", "layers.0.attention.*", "final_norm.weight")
        rates = ("lr-mult=0.5", "lr=0.02 min-lr=1e-3", "wd-mult=2", "wd-mult=0")
        found.append(f"{pattern} {one_of(draw, *rates, 'optimizer=sgd', 'optimizer=adam', 'optimizer=lamb')}")
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
        found |= options(draw, lr_warmup_init=[None, 1e-4])
    if style == "WSD":
        found[f"lr_wsd_decay_{unit}"] = each
        found |= options(draw, lr_wsd_decay_style=[None, "linear", "cosine", "minus_sqrt"])
    if style != "constant":
        found |= options(draw, min_lr=[None, 1e-4], **{f"lr_decay_{unit}": [None, length, 2 * length]})
    if length > each + each:
        again = {f"lr_rewarm_start_{unit}": each, f"lr_rewarm_{unit}": [None, each]}
        found |= sometimes(draw, 5, **again, lr_rewarm_factor=[None, 0.5, 2.0])
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
