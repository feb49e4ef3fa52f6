"""Small models, random batches and whole training runs of the reference, with which the framework is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatron_lab.verification.reference.model import (
    Batch,
    EodRules,
    OutputHook,
    RouterLossHook,
    compute_packed_losses,
    compute_token_losses,
    no_hook,
    split_documents,
)
from megatron_lab.verification.reference.qk_clip import QkClip
from megatron_lab.verification.reference.shape import LatentShape, ReferenceShape, Weights, is_trained
from megatron_lab.verification.reference.training import ReferenceUpdateRule, State, update_weights
from megatron_lab.verification.reference.update_rules import RuleOptions


def gpt2_like(**changes: object) -> ReferenceShape:
    """A small GPT-2: learned positions, LayerNorm, GELU, biases, tied output."""
    sizes = {"num_layers": 2, "hidden": 32, "ffn": 64, "heads": 4, "kv_heads": 4, "head_size": 8, "vocab": 64, "seq": 16}
    return ReferenceShape(**{**sizes, **changes})  # type: ignore[arg-type]


def llama_like(**changes: object) -> ReferenceShape:
    """A small Llama: rotary positions, RMSNorm, SwiGLU, grouped queries, no biases, untied output."""
    parts = {"positions": "rope", "norm": "RMSNorm", "activation": "swiglu", "bias": False, "tied": False}
    sizes = {"num_layers": 2, "hidden": 32, "ffn": 48, "heads": 4, "kv_heads": 2, "head_size": 8, "vocab": 64, "seq": 16}
    return ReferenceShape(**{**sizes, **parts, **changes})  # type: ignore[arg-type]


def deepseek_like(**changes: object) -> ReferenceShape:
    """A small dense DeepSeek: the same with latent attention. No two sizes are equal."""
    latent = LatentShape(q_lora_rank=10, kv_lora_rank=6, qk_head_dim=5, qk_pos_emb_head_dim=4, v_head_dim=3)
    return llama_like(**{"kv_heads": 4, "qk_norm": True, "rotary_interleaved": True, "latent": latent, **changes})


def random_batches(shape: ReferenceShape, steps: int, batch: int, microbatch: int, seed: int) -> list[Batch]:
    """Global batches of random tokens whose loss masks differ much between microbatches.

    Each run of `microbatch` sequences keeps all tokens, half of them, a single one, or none at all, in turn and in an order that
    changes with the step; a batch of few microbatches takes the fuller ones.
    """
    generator = torch.Generator().manual_seed(seed)
    count = batch // microbatch
    assert count * microbatch == batch, "the batch must divide into microbatches"
    batches = []
    for _ in range(steps):
        window = torch.randint(shape.vocab, (batch, shape.seq + 1), generator=generator)
        mask = torch.zeros(count, microbatch * shape.seq, dtype=torch.float64)
        for place, part in enumerate(torch.randperm(count, generator=generator).tolist()):
            kept = (mask.shape[1], mask.shape[1] // 2, 1, 0)[place % 4]
            mask[part, torch.randperm(mask.shape[1], generator=generator)[:kept]] = 1.0
        batches.append((window[:, :-1], window[:, 1:], mask.view(batch, shape.seq)))
    return batches


@dataclass(frozen=True)
class ReferenceRun:
    """What a run gave; the framework's runs are put into the same form to be compared."""

    losses: list[float]
    """The loss of each step, before its update."""
    grad_norms: list[float]
    """The norm of each step, before clipping."""
    first_gradients: dict[str, Tensor]
    """Those of the first step, before clipping."""
    weights_after: dict[str, Tensor]
    """After the last step."""
    averages_after: dict[str, Tensor] = field(default_factory=dict, kw_only=True)
    """Averages of the weights after the last step, if they were kept."""


def mean_loss(shape: ReferenceShape, weights: Weights, batch: Batch, seen: OutputHook = no_hook) -> Tensor:
    """Mean cross entropy over the tokens of the batch that the mask keeps."""
    tokens, labels, mask = batch
    mask = mask.to(torch.float64)
    added = RouterLossHook(seen)
    return (
        compute_token_losses(shape, weights, tokens, labels, hook=added, mask=mask) * mask
    ).sum() / mask.sum() + added.gradient_only


Loss = Callable[[ReferenceShape, Weights, Batch], Tensor]


def train(
    shape: ReferenceShape,
    weights: Weights,
    batches: Sequence[Batch],
    *,
    loss: Loss = mean_loss,
    lr: float | Sequence[float],
    weight_decay: float = 0.0,
    clip: float | None = None,
    optimizer: str = "adam",
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    numbers: RuleOptions = RuleOptions(),  # noqa: B008 (frozen)
    ema: float | None = None,
    clips_scores: QkClip | None = None,
) -> ReferenceRun:
    """One step on every batch.

    Args:
        weights: float64 start values; not changed.
        loss: what is made small, a scalar.
        lr: learning rate, of every step or one a step.
        weight_decay: of matrices and embeddings, not of norms and biases.
        clip: greatest norm of the whole gradient; None for no clipping.
        optimizer: the name of a function in the reference's `update_rules.py`.
        numbers: what rules other than adam have of their own.
        clips_scores: what is done to heads with large scores; with `mean_loss` alone.
    """
    assert all(w.dtype == torch.float64 for w in weights.values()), "the reference is float64 throughout"
    rates = [lr] * len(batches) if isinstance(lr, int | float) else list(lr)
    assert len(rates) == len(batches)
    bias_step = 0.0 if shape.experts is None else shape.experts.bias_update_rate or 0.0
    rule = ReferenceUpdateRule(optimizer, clip, betas, eps, numbers, ema, clips_scores, bias_step)
    largest: dict[str, Tensor] = {}

    def watch(name: str, values: Tensor) -> None:
        if name.endswith(".scores"):
            largest[name.removesuffix(".scores")] = values.detach().amax(dim=(0, 2))

    if clips_scores is not None:
        assert loss is mean_loss
        loss = partial(mean_loss, seen=watch)
    state = State(weights)
    losses: list[float] = []
    grad_norms: list[float] = []
    first_gradients: dict[str, Tensor] = {}

    for batch, rate in zip(batches, rates, strict=True):
        value, gradients = loss_and_gradients(shape, state.weights, batch, loss)
        losses.append(value)
        first_gradients = first_gradients or gradients
        grad_norms.append(update_weights(state, gradients, rule, rate, weight_decay, max_logits=largest))
    return ReferenceRun(losses, grad_norms, first_gradients, state.weights, averages_after=state.averages)


def loss_and_gradients(
    shape: ReferenceShape, weights: Weights, batch: Batch, loss: Loss = mean_loss
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a batch and its gradient with respect to every weight that is trained."""
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items() if is_trained(shape, name)}
    value = loss(shape, {name: leaves.get(name, w) for name, w in weights.items()}, batch)
    gradients = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)  # experts that have only padding
    return value.item(), dict(zip(leaves, gradients, strict=True))


def loss_of_documents_apart(shape: ReferenceShape, weights: Weights, batch: Batch, eod: int) -> Tensor:
    """Mean loss of a batch in which every document is a sample of its own; after an `eod` nothing is predicted."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for tokens, labels, mask in zip(*batch, strict=True):
        for start, end in split_documents(tokens.tolist(), eod):
            part = slice(start, end)
            kept = mask[part] * (tokens[part] != eod)
            total = total + (compute_token_losses(shape, weights, tokens[None, part], labels[None, part])[0] * kept).sum()
            count += kept.sum().item()
    return total / count


def count_data(batch: Batch) -> list[int]:
    """The number of tokens of each sample before its padding, which has the labels that the mask leaves out."""
    return [int(kept) + 1 for kept in batch[2].sum(1).tolist()]


def loss_with_rules(
    shape: ReferenceShape, weights: Weights, batch: Batch, rules: EodRules, *, has_padding: bool = False, seen: OutputHook = no_hook
) -> Tensor:
    """Mean loss of a batch of packed samples, each rule by itself; with padding where the mask leaves out labels."""
    added = RouterLossHook(seen)
    losses, kept = compute_packed_losses(shape, weights, batch, rules, added, count_data(batch) if has_padding else None)
    return (losses * kept).sum() / kept.sum() + added.gradient_only
