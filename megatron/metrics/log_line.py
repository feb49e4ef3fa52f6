"""The lines that training prints, byte for byte as Megatron-LM does: people parse them."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Literal


def perplexity(loss: float) -> float:
    """exp(loss), cut off at exp(20) so that a bad loss does not overflow."""
    return math.exp(min(20.0, loss))


def training_log_line(
    *,
    time: datetime,
    iteration: int,
    train_iterations: int,
    consumed_samples: int,
    elapsed_ms: float,
    learning_rate: float,
    global_batch_size: int,
    lm_loss: float | None,
    z_loss: float | None = None,
    mtp_loss: float | None = None,
    load_balancing_loss: float | None = None,
    moe_z_loss: float | None = None,
    busiest_expert: float | None = None,
    dropped_share: float | None = None,
    loss_scale: float,
    skipped: int,
    nans: int,
    tflops_per_device: float | None = None,
    grad_norm: float | None = None,
    num_zeros: float | None = None,
    params_norm: float | None = None,
    gradient_noise: float | None = None,
    context_imbalance: float | None = None,
    max_attention_logit: float | None = None,
) -> str:
    """One line of progress, without a newline.

    Args:
        time: When the line is printed.
        iteration: The step just made; the first is 1.
        train_iterations: Steps of the whole run.
        consumed_samples: Sequences read so far.
        elapsed_ms: Milliseconds for one iteration, mean over the interval.
        learning_rate: Learning rate of the last update.
        global_batch_size: Sequences of the last step.
        lm_loss: Mean over the interval; None when no step of it had a loss.
        z_loss: Mean over the interval of what --z-loss-coeff adds to what is minimised; None without it.
        mtp_loss: Mean over the interval of the loss of --mtp-num-layers, without its factor; None without them.
        load_balancing_loss: Mean over the interval and the layers with experts, without its coefficient; None without experts.
        moe_z_loss: Such a mean of the routers' z-loss.
        dropped_share: Share of the experts' choices that were dropped.
        busiest_expert: What the busiest expert gets, as a multiple of the mean of its layer; the largest of the interval.
        loss_scale: Scale of the loss.
        skipped: Steps of the interval without an update.
        nans: Steps of the interval with a NaN.
        tflops_per_device: Throughput, with --log-throughput.
        grad_norm: Global gradient norm of the last update; None when there was none.
        num_zeros: Zeros in the gradient, with --log-num-zeros-in-grad.
        params_norm: Norm of all parameters, with --log-params-norm.
        context_imbalance: What the busiest context rank attends to, as a multiple of the mean; shown where documents make it
            uneven.
        gradient_noise: Noise scale of the gradient over the interval in sequences, with --log-gradient-noise.
        max_attention_logit: Largest score of attention over the interval, with --log-max-attention-logit.
    """
    fields = [
        f" [{time:%Y-%m-%d %H:%M:%S.%f}] iteration {iteration:8d}/{train_iterations:8d}",
        f"consumed samples: {consumed_samples:12d}",
        f"elapsed time per iteration (ms): {elapsed_ms:.1f}",
    ]
    if tflops_per_device is not None:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {tflops_per_device:.1f}")
    fields += [f"learning rate: {learning_rate:.6E}", f"global batch size: {global_batch_size:5d}"]
    if lm_loss is not None:
        fields.append(f"lm loss: {lm_loss:.6E}")
    if z_loss is not None:
        fields.append(f"z loss: {z_loss:.6E}")
    if mtp_loss is not None:
        fields.append(f"mtp loss: {mtp_loss:.6E}")
    if load_balancing_loss is not None:
        fields.append(f"load_balancing_loss: {load_balancing_loss:.6E}")
    if moe_z_loss is not None:
        fields.append(f"router z loss: {moe_z_loss:.6E}")
    if busiest_expert is not None:
        fields.append(f"busiest expert: {busiest_expert:.3f}")
    if dropped_share is not None:
        fields.append(f"dropped: {dropped_share:.1%}")
    fields.append(f"loss scale: {loss_scale:.1f}")
    if grad_norm is not None:
        fields.append(f"grad norm: {grad_norm:.3f}")
    if num_zeros is not None:
        fields.append(f"num zeros: {num_zeros:.1f}")
    if params_norm is not None:
        fields.append(f"params norm: {params_norm:.3f}")
    if gradient_noise is not None:
        fields.append(f"gradient noise scale: {gradient_noise:.1f}")
    if context_imbalance is not None and context_imbalance > 1.0:
        fields.append(f"context imbalance: {context_imbalance:.3f}")
    if max_attention_logit is not None:
        fields.append(f"max attention logit: {max_attention_logit:.3f}")
    fields += [f"number of skipped iterations: {skipped:3d}", f"number of nan iterations: {nans:3d}"]
    return " | ".join(fields) + " |"


def validation_lines(
    iteration: int, loss: float, split: Literal["validation", "test"] = "validation", *, mtp_loss: float | None = None
) -> list[str]:
    """A rule of dashes, the loss with its perplexity, a rule.

    Args:
        iteration: The last step before the evaluation.
        loss: Mean over the tokens of the evaluation.
        split: Which part of the data it is; the test split is named in the line.
        mtp_loss: The loss of --mtp-num-layers, without its factor; None without them.
    """
    place = f"iteration {iteration}" if split == "validation" else f"iteration {iteration} on test set"
    line = f" validation loss at {place} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    if mtp_loss is not None:
        line += f"mtp loss value: {mtp_loss:.6E} | "
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]
