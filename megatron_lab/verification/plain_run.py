"""Runs the plain reference on a run's settings and samples: one process, one model, nothing of the framework but the settings."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from megatron.config.config import Config
from megatron.config.model import Balancing, ModelConfig, SoftmaxType
from megatron.config.precision import PrecisionConfig
from megatron.config.training import OptimizerConfig, TrainingConfig
from megatron.spec.activations import ActivationName, activation_of
from megatron_lab.verification.observation import EVALUATED_BATCHES, EVALUATED_STEPS, PlainRun, PlainStep, ProofTask
from megatron_lab.verification.plain_groups import own_updates
from megatron_lab.verification.random_samples import RandomSamples
from megatron_lab.verification.reference.eight_bits import EightBits
from megatron_lab.verification.reference.experts import ExpertsShape
from megatron_lab.verification.reference.model import Added, Batch, Rules, Seen, by_nobody, losses_with_rules
from megatron_lab.verification.reference.muon import MuonUpdate
from megatron_lab.verification.reference.qk_clip import ScoreClip
from megatron_lab.verification.reference.rotary import RotaryStretch
from megatron_lab.verification.reference.shape import LatentShape, ReferenceShape, Weights, is_trained
from megatron_lab.verification.reference.training import Again, Course, Rule, State, batch_size, scheduled_sizes, update
from megatron_lab.verification.reference.update_rules import Numbers


def run_plain(task: ProofTask) -> PlainRun:
    """Train; evaluate before the first step and after each of the first ones."""
    return _Reference(task).run()


class _Reference:
    def __init__(self, task: ProofTask) -> None:
        self.task, self.config = task, task.config
        self.shape = reference_shape(self.config.model, task.vocab_size, self.config.training, self.config.precision)
        self.state = State(task.start)
        training = task.config.training
        self._largest: dict[str, Tensor] = {}
        """The largest scores of the heads of each layer in the batch."""
        self.scheduled = scheduled_sizes(" ".join(training.step_batch_size_schedule))
        full = training.global_batch_size or training.micro_batch_size * task.data_size
        self.full_batch = max(self.scheduled.values(), default=full)  # after any growth

    def run(self) -> PlainRun:
        task, training = self.task, self.config.training
        total = training.train_samples or sum(self._batch_sizes())
        rates, decays = learning_rate_course(self.config, self._samples_of, total), decay_course(self.config.optimizer, total)
        rule = update_rule(self.config.optimizer, self.config.model)
        if self.config.optimizer.qk_clip:
            clip = ScoreClip(self.shape, self.config.optimizer.qk_clip_threshold, self.config.optimizer.qk_clip_alpha)
            rule = replace(rule, clips_scores=clip)
        own = own_updates(self.state.weights, self.config.optimizer, rule, rates, decays, self.shape.width)
        found = PlainRun([], [self._evaluate()], {}, [], [], {})
        consumed = updated = 0
        for iteration, size in enumerate(self._batch_sizes(), start=1):
            if task.most_steps is not None and iteration > task.most_steps:
                break
            first, consumed = consumed, consumed + size
            if iteration in training.iterations_to_skip:
                continue
            losses, tokens, contributions, outputs = self._microbatches(first, size)
            if not found.steps:
                found.microbatches.extend((number % task.data_size, number // task.data_size) for number in range(len(tokens)))
                found.microbatch_tokens.extend(tokens)
                found.contributions.update(contributions)
                found.activations.update(outputs)
            gradients = {name: each.sum(dim=0) for name, each in contributions.items()}
            rate, decay = rates.at(updated), decays.at(updated)
            norm = update(self.state, gradients, rule, rate, decay, {name: at(updated) for name, at in own.items()}, self._largest)
            updated += size
            weights, (loss_sum, count) = dict(self.state.weights), (sum(losses), sum(tokens))
            found.steps.append(PlainStep(iteration, size, loss_sum / count, norm, rate, decay, loss_sum, count, gradients, weights))
            if len(found.steps) <= EVALUATED_STEPS:
                found.evaluations.append(self._evaluate())
        return found

    def _batch_sizes(self) -> Iterator[int]:
        """Number of samples in each step of the run."""
        training, consumed, made = self.config.training, 0, 0
        while training.train_iters is None or made < training.train_iters:
            size = self._batch_size(consumed)
            consumed, made = consumed + size, made + 1
            if training.train_samples is not None and consumed > training.train_samples:
                return
            yield size

    def _samples_of(self, steps: int) -> int:
        """Number of samples in the first `steps` steps, which may be more steps than the run makes."""
        consumed = 0
        while steps and (size := self._batch_size(consumed)) < self.full_batch:
            consumed, steps = consumed + size, steps - 1
        return consumed + steps * self.full_batch

    def _batch_size(self, consumed: int) -> int:
        ramp, length = self.config.training.rampup_batch_size, self.config.model.seq_length
        return batch_size(consumed, self.full_batch, ramp, self.scheduled, length)

    def _evaluate(self) -> float:
        micro, size = self.config.training.micro_batch_size, EVALUATED_BATCHES * self.full_batch
        with torch.no_grad():
            parts = [self._losses(self.state.weights, _batch(self.task.held_out, first, micro)) for first in range(0, size, micro)]
        losses, tokens, _ = zip(*parts, strict=True)
        return (sum(losses) / sum(tokens)).item()

    def _microbatches(self, first: int, size: int) -> tuple[list[float], list[float], Weights, dict[str, Tensor]]:
        """Run a batch, microbatch after microbatch.

        Returns:
            of each, the sum of the loss, the tokens that count, and what it adds to each gradient of the mean loss [M, ...]; and
            the outputs of modules [B, s, h].
        """
        fixed = {name: w for name, w in self.state.weights.items() if not is_trained(self.shape, name)}
        leaves = {name: w.detach().requires_grad_() for name, w in self.state.weights.items() if name not in fixed}
        seen: dict[str, list[Tensor]] = {}

        self._largest = {}

        def keep(name: str, values: Tensor) -> None:
            layer, _, what = name.rpartition(".")
            if what == "scores":
                values = values.detach().amax(dim=(0, 2))
                self._largest[layer] = torch.maximum(values, self._largest.get(layer, values))
                return
            seen.setdefault(name, []).append(values.detach())

        micro = self.config.training.micro_batch_size
        weights = {**fixed, **leaves}
        parts = [
            self._losses(weights, _batch(self.task.samples, start, micro), keep) for start in range(first, first + size, micro)
        ]
        tokens = torch.stack([count for _, count, _ in parts]).sum()
        minimised = [loss_sum / tokens + added / len(parts) for loss_sum, _, added in parts]
        apart = [torch.autograd.grad(each, list(leaves.values())) for each in minimised]
        contributions = {name: torch.stack(each) for name, each in zip(leaves, zip(*apart, strict=True), strict=True)}
        losses, counts, _ = ([number.item() for number in numbers] for numbers in zip(*parts, strict=True))
        return losses, counts, contributions, {name: torch.cat(values) for name, values in seen.items()}

    def _losses(self, weights: Weights, batch: Batch, seen: Seen = by_nobody) -> tuple[Tensor, Tensor, Tensor]:
        """(sum of mask x loss, sum of the mask, what experts add to what is minimised)."""
        data = self.config.data
        rules = Rules(self.task.samples.eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
        added = Added(seen)
        each, kept = losses_with_rules(self.shape, weights, batch, rules, added)
        return (each * kept).sum(), kept.sum(), added.total


def _batch(samples: RandomSamples, first: int, size: int) -> Batch:
    windows = torch.from_numpy(samples.samples(first, size))
    return windows[:, :-1], windows[:, 1:], torch.from_numpy(samples.masks(first, size)).double()


def reference_shape(
    model: ModelConfig,
    vocab_size: int,
    training: TrainingConfig = TrainingConfig(),  # noqa: B008 (frozen)
    precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 (frozen)
) -> ReferenceShape:
    """The reference model's shape for these settings."""
    ends = (precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16)
    return ReferenceShape(
        num_layers=model.num_layers,
        hidden=model.hidden_size,
        ffn=model.ffn_size,
        heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads,
        head_size=model.head_size,
        vocab=vocab_size,
        seq=model.seq_length,
        positions="learned" if model.position_embedding_type == "learned_absolute" else model.position_embedding_type,
        num_positions=model.num_positions,
        rotary_base=model.rotary_base,
        rotary_percent=model.rotary_percent,
        rotary_interleaved=model.rotary_interleaved,
        stretch=rotary_stretch(model),
        norm=model.normalization,
        epsilon=model.norm_epsilon,
        norms=model.norm_placement,
        norm_weight=model.norm_weight,
        norm_bias=model.norm_bias,
        zero_centred=model.apply_layernorm_1p,
        parallel=model.parallel_residual,
        residual_multiplier=model.residual_multiplier,
        activation=cast("ActivationName", activation_of(model).name),
        offset=model.glu_linear_offset,
        clamp=model.activation_func_clamp_value,
        bias=not model.disable_bias_linear,
        qkv_bias=model.add_qkv_bias,
        output_bias=model.add_attn_output_bias,
        mlp_bias=model.add_mlp_bias,
        qk_norm=model.qk_layernorm,
        qk_norm_all_heads=model.qk_layernorm_all_heads,
        windows=windows(model),
        unrotated=tuple(_marks(model.no_rope_freq, model.num_layers)) if model.no_rope_freq else (),
        local_base=model.rotary_base_local,
        score_scale=score_scale(model),
        score_cap=model.attn_logit_softcapping,
        sink=_SINKS[model.softmax_type],
        latent=latent_shape(model) if model.multi_latent_attention else None,
        embedding_multiplier=model.embedding_multiplier,
        embedding_norm=model.embedding_layernorm,
        output_multiplier=model.output_multiplier,
        logit_cap=model.final_logit_softcapping,
        tied=not model.untie_embeddings_and_output_weights,
        z_loss=training.z_loss_coeff,
        smoothing=training.label_smoothing,
        mtp_depths=model.mtp_num_layers,
        mtp_factor=training.mtp_loss_scaling_factor,
        experts=experts_shape(model, training.micro_batch_size) if model.num_experts else None,
        width=model.hidden_size / model.mup_base_width if model.mup_base_width else 1.0,
        eight_bits=EightBits(precision.fp8_recipe, precision.fp8_format == "hybrid") if precision.fp8_format else None,
        in_64_bits=ends if precision.first_last_layers_bf16 else (0, 0),
        lora_rank=model.lora_rank,
        lora_scale=(model.lora_alpha or model.lora_rank) / model.lora_rank if model.lora_rank else 1.0,
        lora_targets=model.lora_targets,
    )


_SINKS: dict[SoftmaxType, Literal["none", "one", "learned"]] = {"vanilla": "none", "off-by-one": "one", "learnable": "learned"}


def windows(model: ModelConfig) -> tuple[int | None, ...]:
    """The window of each layer, in tokens before the own."""
    if model.window_size is None:
        return ()
    size, which = int(model.window_size.strip("()").split(",")[0]), model.window_attn_skip_freq
    if which is None:
        return (size,) * model.num_layers
    marks = _marks(which, model.num_layers)
    return tuple(size if mark is ("[" in which) else None for mark in marks)


def _marks(text: str, count: int) -> list[bool]:
    """Whether each of so many layers is marked, by every N-th or by a list."""
    if "[" not in text:
        return [number % int(text) == 0 for number in range(1, count + 1)]

    def values(node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp):
            left, right = values(node.left), values(node.right)
            return left + right if isinstance(node.op, ast.Add) else left * right
        return ast.literal_eval(node)

    return [bool(entry) for entry in values(ast.parse(text.strip(), mode="eval").body)]


def experts_shape(model: ModelConfig, micro_batch_size: int) -> ExpertsShape:
    """The experts of these settings. A number N marks the first layer and every N-th after it."""
    assert model.num_experts is not None
    freq, count = model.moe_layer_freq, model.num_layers
    layers = _marks(freq, count) if "[" in freq else [layer % int(freq) == 0 for layer in range(count)]
    softmax: Literal["softmax", "softmax first"] = "softmax first" if model.moe_router_pre_softmax else "softmax"
    tokens: dict[Balancing, Literal["none", "microbatch", "sequence", "update before"]] = {
        "none": "none",
        "aux_loss": "microbatch",
        "seq_aux_loss": "sequence",
        "global_aux_loss": "update before",
    }
    return ExpertsShape(
        tuple(layers),
        model.num_experts,
        model.moe_router_topk,
        model.moe_ffn_hidden_size or model.ffn_size,
        model.moe_shared_expert_intermediate_size,
        model.moe_shared_expert_gate,
        "sigmoid" if model.moe_router_score_function == "sigmoid" else softmax,
        model.moe_router_topk_scaling_factor or 1.0,
        model.moe_router_num_groups or 1,
        model.moe_router_group_topk,
        tokens[model.moe_router_load_balancing_type],
        model.moe_aux_loss_coeff,
        model.moe_z_loss_coeff or 0.0,
        micro_batch_size,
        model.moe_router_bias_update_rate if model.moe_router_enable_expert_bias else None,
        model.moe_expert_capacity_factor,
        model.moe_token_drop_policy == "position",
    )


def latent_shape(model: ModelConfig) -> LatentShape:
    """The sizes of latent attention."""
    sizes = model.q_lora_rank, model.kv_lora_rank, model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
    return LatentShape(*sizes)


def score_scale(model: ModelConfig) -> float | None:
    """Factor of the scores; None for 1 / sqrt(channels of a head). In latent attention YaRN enlarges it."""
    if model.mup_base_kv_channels is not None:
        return math.sqrt(model.mup_base_kv_channels) / model.head_size
    if model.softmax_scale is not None or not model.multi_latent_attention:
        return model.softmax_scale
    growth = math.log(max(model.rotary_scaling_factor, 1.0)) if model.rope_type == "yarn" else 0.0
    return (1 + 0.1 * model.mscale_all_dim * growth) ** 2 / math.sqrt(model.qk_head_dim + model.qk_pos_emb_head_dim)


def rotary_stretch(model: ModelConfig) -> RotaryStretch | None:
    """How these settings stretch rotary frequencies."""
    factor, context = model.rotary_scaling_factor, model.original_max_position_embeddings
    if model.use_rope_scaling:
        turns = model.rope_low_freq_factor, model.rope_high_freq_factor
        return RotaryStretch("llama3", model.rope_scaling_factor, context or 8192, *turns)
    if model.rope_type == "rope":
        factor = model.rotary_seq_len_interpolation_factor
        return None if factor == 1.0 else RotaryStretch("linear", factor)
    context = context or 4096
    growth = math.log(factor) if factor > 1 else 0.0
    enlarged = model.rope_attention_factor
    if model.rope_type == "yarn":
        usual = (1 + 0.1 * model.mscale * growth) / (1 + 0.1 * model.mscale_all_dim * growth)
        turns = model.beta_slow, model.beta_fast
        return RotaryStretch("yarn", factor, context, *turns, model.yarn_correction_range_round_to_int, enlarged or usual)
    if model.rope_type == "longrope":
        usual = math.sqrt(1 + growth / math.log(context))
        lists = model.rope_short_factors, model.rope_long_factors
        return RotaryStretch("longrope", factor, context, enlarged=enlarged or usual, short=lists[0], long=lists[1])
    return RotaryStretch("dynamic", factor, context)


def update_rule(optimizer: OptimizerConfig, model: ModelConfig) -> Rule:
    """The reference's update rule for these settings."""
    betas = optimizer.adam_beta1, optimizer.adam_beta2
    numbers = rule_numbers(optimizer, (model.num_attention_heads // model.num_key_value_heads, model.head_size))
    rule = Rule(optimizer.optimizer, optimizer.clip_grad or None, betas, optimizer.adam_eps, numbers, optimizer.ema_decay)
    return replace(rule, bias_step=model.moe_router_bias_update_rate)


def rule_numbers(optimizer: OptimizerConfig, heads: tuple[int, int] = (1, 1)) -> Numbers:
    """What the settings give to single rules.

    Args:
        heads: query heads to each key head, and the size of a head.
    """
    return Numbers(
        momentum=optimizer.sgd_momentum,
        lion_betas=(optimizer.lion_beta1, optimizer.lion_beta2),
        block_size=optimizer.adam_8bit_block_size,
        beta3=optimizer.ademamix_beta3,
        alpha=optimizer.ademamix_alpha,
        slow_warmup=optimizer.ademamix_warmup_iters or 0,
        decay_rate=optimizer.adafactor_decay_rate,
        clip_threshold=optimizer.adafactor_clip_threshold,
        factor_eps=optimizer.adafactor_eps,
        factor_beta1=optimizer.adafactor_beta1,
        least_scale=optimizer.adafactor_least_scale if optimizer.adafactor_relative_step else None,
        muon=MuonUpdate(
            *heads,
            fused="heads" if optimizer.muon_split_heads else "one" if optimizer.muon_no_split_qkv else "three",
            momentum=optimizer.muon_momentum,
            nesterov=optimizer.muon_use_nesterov,
            steps=optimizer.muon_num_ns_steps,
            scale=optimizer.muon_scale_mode,
            extra=optimizer.muon_extra_scale_factor,
        ),
    )


def learning_rate_course(config: Config, samples_of: Callable[[int], int], total_samples: int) -> Course:
    """The learning rate over the run.

    Args:
        samples_of: number of samples in the first n steps, which may be more steps than the run has.
        total_samples: number of samples in the run.
    """
    settings = config.optimizer
    assert settings.lr is not None, "required"
    if config.training.train_samples is None:
        steps = config.training.train_iters if settings.lr_decay_iters is None else settings.lr_decay_iters
        assert steps is not None, "required"
        warmup: float = samples_of(settings.lr_warmup_iters)
        end: int | None = samples_of(steps)
        final = samples_of(steps) - samples_of(steps - (settings.lr_wsd_decay_iters or 0))
    else:
        warmup, end, final = settings.lr_warmup_samples, settings.lr_decay_samples, settings.lr_wsd_decay_samples or 0
    end = total_samples if end is None else end
    if settings.lr_warmup_fraction is not None:
        warmup = settings.lr_warmup_fraction * end
    rates = settings.lr, settings.min_lr, settings.lr_warmup_init
    again = None
    if settings.lr_rewarm_start_iters is not None:
        begin = samples_of(settings.lr_rewarm_start_iters)
        rise = samples_of(settings.lr_rewarm_start_iters + settings.lr_rewarm_iters) - begin
        again = Again(begin, rise, settings.lr_rewarm_factor, total_samples)
    elif settings.lr_rewarm_start_samples is not None:
        again = Again(settings.lr_rewarm_start_samples, settings.lr_rewarm_samples, settings.lr_rewarm_factor, total_samples)
    return Course(*rates, warmup, settings.lr_decay_style, end, final, settings.lr_wsd_decay_style, again)


def decay_course(settings: OptimizerConfig, total_samples: int) -> Course:
    """Weight decay, which may change over the whole run."""
    if settings.weight_decay_incr_style == "constant":
        return Course(settings.weight_decay, style="constant")
    assert settings.start_weight_decay is not None and settings.end_weight_decay is not None, "required"
    first, last = settings.start_weight_decay, settings.end_weight_decay
    return Course(first, last, style=settings.weight_decay_incr_style, end=total_samples)
