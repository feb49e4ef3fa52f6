"""Training run of the reference model with the settings and samples of a parallel run. It uses one process, and shares only the
settings and samples with the framework."""

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
from megatron.spec.activations import ActivationName, get_activation
from megatron_lab.verification.observation import EVALUATED_BATCHES, EVALUATED_STEPS, ProofTask, ReferenceRun, ReferenceStep
from megatron_lab.verification.random_samples import RandomSamples
from megatron_lab.verification.reference.eight_bits import Fp8Spec
from megatron_lab.verification.reference.experts import ExpertsShape
from megatron_lab.verification.reference.model import Batch, EodRules, OutputHook, RouterLossHook, compute_packed_losses, no_hook
from megatron_lab.verification.reference.muon import MuonRule
from megatron_lab.verification.reference.qk_clip import QkClip
from megatron_lab.verification.reference.rotary import RotaryScaling
from megatron_lab.verification.reference.shape import LatentShape, ReferenceShape, Weights, is_trained
from megatron_lab.verification.reference.training import (
    ReferenceUpdateRule,
    Rewarm,
    ScalarSchedule,
    State,
    compute_batch_size,
    parse_batch_size_schedule,
    update_weights,
)
from megatron_lab.verification.reference.update_rules import RuleOptions
from megatron_lab.verification.reference_param_groups import build_param_updates


def run_reference(task: ProofTask) -> ReferenceRun:
    """Train the reference model in this process, and return the recorded values. The model is evaluated before the first step and
    after each of the first `EVALUATED_STEPS` steps."""
    return _ReferenceRunner(task).run()


class _ReferenceRunner:
    def __init__(self, task: ProofTask) -> None:
        self.task, self.config = task, task.config
        self.shape = build_reference_shape(self.config.model, task.vocab_size, self.config.training, self.config.precision)
        self.state = State(task.start)
        training = task.config.training
        self._max_logits: dict[str, Tensor] = {}
        """Largest attention score of each head in the batch [n], by layer."""
        self.batch_size_schedule = parse_batch_size_schedule(" ".join(training.step_batch_size_schedule))
        full = training.global_batch_size or training.micro_batch_size * task.dp_size
        self.final_batch_size = max(self.batch_size_schedule.values(), default=full)  # after the ramp-up

    def run(self) -> ReferenceRun:
        task, training = self.task, self.config.training
        total = training.train_samples or sum(self._iter_batch_sizes())
        lr_schedule, wd_schedule = (
            build_lr_schedule(self.config, self._count_samples, total),
            build_decay_schedule(self.config.optimizer, total),
        )
        rule = build_update_rule(self.config.optimizer, self.config.model)
        if self.config.optimizer.qk_clip:
            clip = QkClip(self.shape, self.config.optimizer.qk_clip_threshold, self.config.optimizer.qk_clip_alpha)
            rule = replace(rule, qk_clip=clip)
        updates = build_param_updates(
            self.state.weights, self.config.optimizer, rule, lr_schedule, wd_schedule, self.shape.width_multiplier
        )
        reference_run = ReferenceRun([], [self._evaluate()], {}, [], [], {})
        consumed = updated = 0
        for iteration, size in enumerate(self._iter_batch_sizes(), start=1):
            if task.max_steps is not None and iteration > task.max_steps:
                break
            first_sample, consumed = consumed, consumed + size
            if iteration in training.iterations_to_skip:
                continue
            losses, tokens, contributions, outputs = self._run_microbatches(first_sample, size)
            if not reference_run.steps:
                reference_run.microbatches.extend((index % task.dp_size, index // task.dp_size) for index in range(len(tokens)))
                reference_run.microbatch_tokens.extend(tokens)
                reference_run.contributions.update(contributions)
                reference_run.activations.update(outputs)
            gradients = {name: grads.sum(dim=0) for name, grads in contributions.items()}
            rate, decay = lr_schedule.get_value_at(updated), wd_schedule.get_value_at(updated)
            grad_norm = update_weights(
                self.state, gradients, rule, rate, decay, {name: fn(updated) for name, fn in updates.items()}, self._max_logits
            )
            updated += size
            weights, (loss_sum, count) = dict(self.state.weights), (sum(losses), sum(tokens))
            reference_run.steps.append(
                ReferenceStep(iteration, size, loss_sum / count, grad_norm, rate, decay, loss_sum, count, gradients, weights)
            )
            if len(reference_run.steps) <= EVALUATED_STEPS:
                reference_run.evaluations.append(self._evaluate())
        return reference_run

    def _iter_batch_sizes(self) -> Iterator[int]:
        """Yield the global batch size, in samples, of each step of the run."""
        training, consumed, num_steps = self.config.training, 0, 0
        while training.train_iters is None or num_steps < training.train_iters:
            size = self._compute_batch_size(consumed)
            consumed, num_steps = consumed + size, num_steps + 1
            if training.train_samples is not None and consumed > training.train_samples:
                return
            yield size

    def _count_samples(self, steps: int) -> int:
        """Return the number of samples in the first `steps` steps. `steps` may exceed the number of steps of the run."""
        consumed = 0
        while steps and (size := self._compute_batch_size(consumed)) < self.final_batch_size:
            consumed, steps = consumed + size, steps - 1
        return consumed + steps * self.final_batch_size

    def _compute_batch_size(self, consumed: int) -> int:
        ramp, length = self.config.training.rampup_batch_size, self.config.model.seq_length
        return compute_batch_size(consumed, self.final_batch_size, ramp, self.batch_size_schedule, length)

    def _evaluate(self) -> float:
        micro, size = self.config.training.micro_batch_size, EVALUATED_BATCHES * self.final_batch_size
        with torch.no_grad():
            results = [self._compute_losses(self.state.weights, self.task.eval_samples, first) for first in range(0, size, micro)]
        losses, tokens, _ = zip(*results, strict=True)
        return (sum(losses) / sum(tokens)).item()

    def _run_microbatches(self, first: int, size: int) -> tuple[list[float], list[float], Weights, dict[str, Tensor]]:
        """Run forward and backward of the microbatches of a global batch one after another.

        Args:
            first: index of the first sample of the batch.
            size: global batch size, in samples.

        Returns:
            For each microbatch, the sum of its losses; for each microbatch, its number of tokens that count in the loss; the
            contributions of the M microbatches to the gradients of the mean loss [M, ...shape], by parameter; and the outputs of
            modules [B, s, h], by name.
        """
        frozen = {name: w for name, w in self.state.weights.items() if not is_trained(self.shape, name)}
        trained = {name: w.detach().requires_grad_() for name, w in self.state.weights.items() if name not in frozen}
        outputs: dict[str, list[Tensor]] = {}

        self._max_logits = {}

        def record_output(name: str, values: Tensor) -> None:
            layer, _, output_name = name.rpartition(".")
            if output_name == "scores":
                values = values.detach().amax(dim=(0, 2))
                self._max_logits[layer] = torch.maximum(values, self._max_logits.get(layer, values))
                return
            outputs.setdefault(name, []).append(values.detach())

        micro = self.config.training.micro_batch_size
        weights = {**frozen, **trained}
        results = [
            self._compute_losses(weights, self.task.samples, start, record_output) for start in range(first, first + size, micro)
        ]
        tokens = torch.stack([count for _, count, _ in results]).sum()
        objectives = [loss_sum / tokens + router_losses.total / len(results) for loss_sum, _, router_losses in results]
        for name in results[0][2].count_terms:
            count_terms = [router_losses.count_terms[name] for _, _, router_losses in results]
            num_assignments = max(1.0, sum(count.item() for _, count in count_terms))
            objectives = [objective + term / num_assignments for objective, (term, _) in zip(objectives, count_terms, strict=True)]
        # A layer of multi-token prediction that reads only padding uses none of its experts.
        gradients = [torch.autograd.grad(loss, list(trained.values()), materialize_grads=True) for loss in objectives]
        contributions = {name: torch.stack(grads) for name, grads in zip(trained, zip(*gradients, strict=True), strict=True)}
        losses, counts = [loss_sum.item() for loss_sum, _, _ in results], [count.item() for _, count, _ in results]
        return losses, counts, contributions, {name: torch.cat(values) for name, values in outputs.items()}

    def _compute_losses(
        self, weights: Weights, samples: RandomSamples, first: int, hook: OutputHook = no_hook
    ) -> tuple[Tensor, Tensor, RouterLossHook]:
        """Compute the losses of a microbatch.

        Args:
            first: index of the first sample of the microbatch in `samples`.

        Returns:
            The sum of (mask x loss), the sum of the mask, and the auxiliary losses of the routers, which training also minimizes.
        """
        micro = self.config.training.micro_batch_size
        data = self.config.data
        eod_rules = EodRules(self.task.samples.eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
        router_loss_hook = RouterLossHook(hook)
        token_losses, mask = compute_packed_losses(
            self.shape,
            weights,
            _build_batch(samples, first, micro),
            eod_rules,
            router_loss_hook,
            samples.get_data_lengths(first, micro) if samples.has_padding else None,
        )
        return (token_losses * mask).sum(), mask.sum(), router_loss_hook


def _build_batch(samples: RandomSamples, first: int, size: int) -> Batch:
    windows = torch.from_numpy(samples.get_samples(first, size))
    return windows[:, :-1], windows[:, 1:], torch.from_numpy(samples.get_masks(first, size)).double()


def build_reference_shape(
    model: ModelConfig,
    vocab_size: int,
    training: TrainingConfig = TrainingConfig(),  # noqa: B008 (frozen)
    precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 (frozen)
) -> ReferenceShape:
    """Translate the settings of the framework to the sizes and options of the reference model."""
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
        rope_scaling=build_rotary_scaling(model),
        norm=model.normalization,
        epsilon=model.norm_epsilon,
        norms=model.norm_placement,
        norm_weight=model.norm_weight,
        norm_bias=model.norm_bias,
        zero_centred=model.apply_layernorm_1p,
        parallel=model.parallel_residual,
        residual_multiplier=model.residual_multiplier,
        activation=cast("ActivationName", get_activation(model).name),
        offset=model.glu_linear_offset,
        clamp=model.activation_func_clamp_value,
        bias=not model.disable_bias_linear,
        qkv_bias=model.add_qkv_bias,
        output_bias=model.add_attn_output_bias,
        mlp_bias=model.add_mlp_bias,
        qk_norm=model.qk_layernorm,
        qk_norm_all_heads=model.qk_layernorm_all_heads,
        windows=build_windows(model),
        unrotated=tuple(_parse_layer_flags(model.no_rope_freq, model.num_layers)) if model.no_rope_freq else (),
        local_base=model.rotary_base_local,
        score_scale=compute_score_scale(model),
        score_cap=model.attn_logit_softcapping,
        sink=_SINK_TYPES[model.softmax_type],
        latent=build_latent_shape(model) if model.multi_latent_attention else None,
        embedding_multiplier=model.embedding_multiplier,
        embedding_norm=model.embedding_layernorm,
        output_multiplier=model.output_multiplier,
        logit_cap=model.final_logit_softcapping,
        tied=not model.untie_embeddings_and_output_weights,
        z_loss=training.z_loss_coeff,
        smoothing=training.label_smoothing,
        mtp_depths=model.mtp_num_layers,
        mtp_factor=training.mtp_loss_scaling_factor,
        experts=build_experts_shape(model, training.micro_batch_size) if model.num_experts else None,
        width_multiplier=model.hidden_size / model.mup_base_width if model.mup_base_width else 1.0,
        fp8=Fp8Spec(precision.fp8_recipe, precision.fp8_format == "hybrid") if precision.fp8_format else None,
        num_unquantized_layers=ends if precision.first_last_layers_bf16 else (0, 0),
        lora_rank=model.lora_rank,
        lora_scale=(model.lora_alpha or model.lora_rank) / model.lora_rank if model.lora_rank else 1.0,
        lora_targets=model.lora_targets,
    )


_SINK_TYPES: dict[SoftmaxType, Literal["none", "one", "learned"]] = {"vanilla": "none", "off-by-one": "one", "learnable": "learned"}


def build_windows(model: ModelConfig) -> tuple[int | None, ...]:
    """Return the attention window of each layer: the number of preceding tokens to which a token attends, or None for all. Return
    an empty tuple if no layer has a window."""
    if model.window_size is None:
        return ()
    size, skip_freq = int(model.window_size.strip("()").split(",")[0]), model.window_attn_skip_freq
    if skip_freq is None:
        return (size,) * model.num_layers
    is_windowed = _parse_layer_flags(skip_freq, model.num_layers)
    return tuple(size if mark is ("[" in skip_freq) else None for mark in is_windowed)


def _parse_layer_flags(pattern: str, num_layers: int) -> list[bool]:
    """Parse a flag that selects layers, and return for each layer whether it is selected.

    Args:
        pattern: a number N, which selects every N-th layer, or a list such as `[0]*2+[1]*2` with an entry for each layer.
        num_layers: number of layers of the model.
    """
    if "[" not in pattern:
        return [layer % int(pattern) == 0 for layer in range(1, num_layers + 1)]

    def evaluate(node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp):
            left, right = evaluate(node.left), evaluate(node.right)
            return left + right if isinstance(node.op, ast.Add) else left * right
        return ast.literal_eval(node)

    return [bool(entry) for entry in evaluate(ast.parse(pattern.strip(), mode="eval").body)]


def build_experts_shape(model: ModelConfig, micro_batch_size: int) -> ExpertsShape:
    """Translate the settings of the framework to the sizes and options of the experts in the reference model.

    They say which layers have experts. If --moe-layer-freq is a number N, layers 0, N, 2N, ... have experts. If it is a list, it
    has an entry for each layer.
    """
    assert model.num_experts is not None
    freq, num_layers = model.moe_layer_freq, model.num_layers
    layers = _parse_layer_flags(freq, num_layers) if "[" in freq else [layer % int(freq) == 0 for layer in range(num_layers)]
    softmax: Literal["softmax", "softmax first"] = "softmax first" if model.moe_router_pre_softmax else "softmax"
    aux_loss_scopes: dict[Balancing, Literal["none", "microbatch", "sequence", "update before"]] = {
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
        aux_loss_scopes[model.moe_router_load_balancing_type],
        model.moe_aux_loss_coeff,
        model.moe_z_loss_coeff or 0.0,
        micro_batch_size,
        model.moe_router_bias_update_rate if model.moe_router_enable_expert_bias else None,
        model.moe_expert_capacity_factor,
        model.moe_token_drop_policy == "position",
    )


def build_latent_shape(model: ModelConfig) -> LatentShape:
    """Translate the settings of the framework to the sizes of latent attention in the reference model."""
    sizes = model.q_lora_rank, model.kv_lora_rank, model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
    return LatentShape(*sizes)


def compute_score_scale(model: ModelConfig) -> float | None:
    """Return the factor by which attention scores q k^T are multiplied, or None for the default 1 / sqrt(head size). With YaRN,
    latent attention has a larger factor."""
    if model.mup_base_kv_channels is not None:
        return math.sqrt(model.mup_base_kv_channels) / model.head_size
    if model.softmax_scale is not None or not model.multi_latent_attention:
        return model.softmax_scale
    growth = math.log(max(model.rotary_scaling_factor, 1.0)) if model.rope_type == "yarn" else 0.0
    return (1 + 0.1 * model.mscale_all_dim * growth) ** 2 / math.sqrt(model.qk_head_dim + model.qk_pos_emb_head_dim)


def build_rotary_scaling(model: ModelConfig) -> RotaryScaling | None:
    """Translate the settings of the framework to the method that scales the rotary frequencies, with its options. Return None if
    the frequencies are not scaled."""
    factor, context = model.rotary_scaling_factor, model.original_max_position_embeddings
    if model.use_rope_scaling:
        turn_bounds = model.rope_low_freq_factor, model.rope_high_freq_factor
        return RotaryScaling("llama3", model.rope_scaling_factor, context or 8192, *turn_bounds)
    if model.rope_type == "rope":
        factor = model.rotary_seq_len_interpolation_factor
        return None if factor == 1.0 else RotaryScaling("linear", factor)
    context = context or 4096
    growth = math.log(factor) if factor > 1 else 0.0
    attention_factor = model.rope_attention_factor
    if model.rope_type == "yarn":
        default_attention_factor = (1 + 0.1 * model.mscale * growth) / (1 + 0.1 * model.mscale_all_dim * growth)
        turn_bounds = model.beta_slow, model.beta_fast
        return RotaryScaling(
            "yarn",
            factor,
            context,
            *turn_bounds,
            model.yarn_correction_range_round_to_int,
            attention_factor or default_attention_factor,
        )
    if model.rope_type == "longrope":
        default_attention_factor = math.sqrt(1 + growth / math.log(context))
        factor_lists = model.rope_short_factors, model.rope_long_factors
        return RotaryScaling(
            "longrope",
            factor,
            context,
            attention_factor=attention_factor or default_attention_factor,
            short_factors=factor_lists[0],
            long_factors=factor_lists[1],
        )
    return RotaryScaling("dynamic", factor, context)


def build_update_rule(optimizer: OptimizerConfig, model: ModelConfig) -> ReferenceUpdateRule:
    """Translate the settings of the framework to the optimizer's update rule in the reference model."""
    betas = optimizer.adam_beta1, optimizer.adam_beta2
    options = build_rule_options(optimizer, (model.num_attention_heads // model.num_key_value_heads, model.head_size))
    rule = ReferenceUpdateRule(
        optimizer.optimizer, optimizer.clip_grad or None, betas, optimizer.adam_eps, options, optimizer.ema_decay
    )
    return replace(rule, bias_update_rate=model.moe_router_bias_update_rate)


def build_rule_options(optimizer: OptimizerConfig, head_sizes: tuple[int, int] = (1, 1)) -> RuleOptions:
    """Translate the settings of the framework to the options of all update rules except Adam's betas and epsilon.

    Args:
        head_sizes: query heads per key-value head, and head size; used by Muon.
    """
    return RuleOptions(
        momentum=optimizer.sgd_momentum,
        lion_betas=(optimizer.lion_beta1, optimizer.lion_beta2),
        block_size=optimizer.adam_8bit_block_size,
        beta3=optimizer.ademamix_beta3,
        alpha=optimizer.ademamix_alpha,
        slow_warmup=optimizer.ademamix_warmup_iters or 0,
        beta2_decay=optimizer.adafactor_decay_rate,
        clip_threshold=optimizer.adafactor_clip_threshold,
        factored_eps=optimizer.adafactor_eps,
        adafactor_beta1=optimizer.adafactor_beta1,
        min_scale=optimizer.adafactor_least_scale if optimizer.adafactor_relative_step else None,
        muon=MuonRule(
            *head_sizes,
            qkv_split="heads" if optimizer.muon_split_heads else "one" if optimizer.muon_no_split_qkv else "three",
            momentum=optimizer.muon_momentum,
            nesterov=optimizer.muon_use_nesterov,
            steps=optimizer.muon_num_ns_steps,
            scale_mode=optimizer.muon_scale_mode,
            extra_scale_factor=optimizer.muon_extra_scale_factor,
        ),
    )


def build_lr_schedule(config: Config, count_samples: Callable[[int], int], total_samples: int) -> ScalarSchedule:
    """Translate the settings of the framework to the learning-rate schedule of the reference model.

    Args:
        count_samples: returns the number of samples in the first n steps; n may exceed the number of steps of the run.
        total_samples: number of samples in the run.
    """
    optimizer = config.optimizer
    assert optimizer.lr is not None, "required"
    if config.training.train_samples is None:
        steps = config.training.train_iters if optimizer.lr_decay_iters is None else optimizer.lr_decay_iters
        assert steps is not None, "required"
        warmup: float = count_samples(optimizer.lr_warmup_iters)
        end: int | None = count_samples(steps)
        final_decay = count_samples(steps) - count_samples(steps - (optimizer.lr_wsd_decay_iters or 0))
    else:
        warmup, end, final_decay = optimizer.lr_warmup_samples, optimizer.lr_decay_samples, optimizer.lr_wsd_decay_samples or 0
    end = total_samples if end is None else end
    if optimizer.lr_warmup_fraction is not None:
        warmup = optimizer.lr_warmup_fraction * end
    levels = optimizer.lr, optimizer.min_lr, optimizer.lr_warmup_init
    rewarm = None
    if optimizer.lr_rewarm_start_iters is not None:
        rewarm_start = count_samples(optimizer.lr_rewarm_start_iters)
        rewarm_length = count_samples(optimizer.lr_rewarm_start_iters + optimizer.lr_rewarm_iters) - rewarm_start
        rewarm = Rewarm(rewarm_start, rewarm_length, optimizer.lr_rewarm_factor, total_samples)
    elif optimizer.lr_rewarm_start_samples is not None:
        rewarm = Rewarm(optimizer.lr_rewarm_start_samples, optimizer.lr_rewarm_samples, optimizer.lr_rewarm_factor, total_samples)
    return ScalarSchedule(*levels, warmup, optimizer.lr_decay_style, end, final_decay, optimizer.lr_wsd_decay_style, rewarm)


def build_decay_schedule(optimizer: OptimizerConfig, total_samples: int) -> ScalarSchedule:
    """Translate the settings of the framework to the schedule of the weight decay, which may change from start to end of the run.

    Args:
        total_samples: number of samples in the run.
    """
    if optimizer.weight_decay_incr_style == "constant":
        return ScalarSchedule(optimizer.weight_decay, style="constant")
    assert optimizer.start_weight_decay is not None and optimizer.end_weight_decay is not None, "required"
    first, last = optimizer.start_weight_decay, optimizer.end_weight_decay
    return ScalarSchedule(first, last, style=optimizer.weight_decay_incr_style, end=total_samples)
