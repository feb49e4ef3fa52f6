"""Mixtures of experts of the reference model, as loops over tokens. The definitions are in docs/moe.md, "What is computed" and
"Balance".

Shapes: B sequences of s tokens, h hidden size, E experts, k experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertsShape:
    """Sizes and options of the experts and routers in the reference model."""

    layers: tuple[bool, ...]
    """Whether each layer has experts (True) or a dense MLP (False)."""
    num_experts: int
    top_k: int
    ffn_size: int
    shared_ffn_size: int | None = None
    """FFN size of the shared expert, which processes all tokens; None if there is no shared expert."""
    has_shared_gate: bool = False
    """Whether the output of the shared expert is multiplied by a sigmoid gate."""
    score_function: Literal["softmax", "softmax first", "sigmoid"] = "softmax"
    """Function that computes router weights from the logits. "softmax": softmax over the selected experts. "softmax first":
    softmax over all experts, of which the entries of the selected experts are used. "sigmoid": sigmoids of the selected
    experts, divided by their sum if several experts are selected."""
    scaling_factor: float = 1.0
    num_groups: int = 1
    group_top_k: int = 1
    aux_loss_scope: Literal["none", "microbatch", "sequence", "update before"] = "none"
    """Tokens over which the load-balancing loss is computed. "update before": the mean router scores are those of a microbatch, but
    the experts' shares of the token assignments are those at the previous update."""
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    micro_batch_size: int = 1
    """Sequences in a microbatch."""
    bias_update_rate: float | None = None
    """Amount by which an update raises or lowers the bias that balances an expert's load; None if the router has no such
    bias."""
    capacity_factor: float | None = None
    """Maximum number of assignments of an expert in each sequence, as a multiple of the mean number of assignments per expert;
    None for no limit."""
    drops_by_position: bool = False
    """Whether an expert with too many assignments drops the last assignments in the sequence (True) or the assignments with the
    smallest router weights (False)."""


def select_experts(shape: ExpertsShape, logits: list[float], bias: list[float] | None = None) -> list[int]:
    """Return the indices of the experts selected for one token, best first. Of experts with equal scores, the expert with the lower
    index is selected first.

    Args:
        logits: router logits of the token, one for each expert.
        bias: added to the scores of the experts for the selection only.
    """
    scores = logits
    if shape.score_function == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    elif shape.score_function == "softmax first":
        total = sum(math.exp(logit) for logit in logits)
        scores = [math.exp(logit) / total for logit in logits]
    if bias is not None:
        scores = [score + score_bias for score, score_bias in zip(scores, bias, strict=True)]
    candidates = list(range(shape.num_experts))
    if shape.num_groups > 1:
        size, best = shape.num_experts // shape.num_groups, shape.top_k // shape.group_top_k
        groups = [sorted(scores[g * size : (g + 1) * size], reverse=True)[:best] for g in range(shape.num_groups)]
        order = sorted(range(shape.num_groups), key=lambda g: (-sum(groups[g]), g))
        candidates = [expert for expert in candidates if expert // size in order[: shape.group_top_k]]
    return sorted(candidates, key=lambda expert: (-scores[expert], expert))[: shape.top_k]


def mark_data(data_lengths: list[int], seq: int, num_ahead: int = 0) -> Tensor:
    """Return which positions of a layer are data and not padding, bool [B, s]. A position is padding if the layer reads a padding
    token there.

    Args:
        data_lengths: number of tokens of each sample before its padding, of s + 1 tokens with the last label.
        seq: tokens s of a sample.
        num_ahead: in multi-token prediction, number of positions between a token and the last token that the layer reads at its
            position. Beyond the last label it reads no padding.
    """
    is_data = [[min(position + num_ahead, seq) < length for position in range(seq)] for length in data_lengths]
    return torch.tensor(is_data)


def compute_router_weights(shape: ExpertsShape, logits: Tensor, expert_ids: list[int]) -> Tensor:
    """Compute the router weights [k]: factors by which the outputs of a token's k experts are multiplied.

    Args:
        logits: router logits of the token [E].
        expert_ids: indices of the k selected experts.
    """
    if shape.score_function == "softmax":
        scores = torch.exp(logits[expert_ids] - logits.max())
        return shape.scaling_factor * scores / scores.sum()
    if shape.score_function == "softmax first":
        scores = torch.exp(logits - logits.max())
        return shape.scaling_factor * scores[expert_ids] / scores.sum()
    scores = 1 / (1 + torch.exp(-logits[expert_ids]))
    return shape.scaling_factor * (scores / scores.sum() if shape.top_k > 1 else scores)


def find_dropped(shape: ExpertsShape, expert_ids: list[list[int]], weights: list[list[float]]) -> set[tuple[int, int]]:
    """Find the assignments of a sequence that are dropped because they exceed the capacity of the expert. Return (token, expert) of
    each.

    An expert drops its last assignments, or those with the smallest router weights. Weights are compared in steps of 1/4096; of
    equal weights the later assignment is dropped.

    Args:
        expert_ids: indices of the selected experts of each token; none for padding, from which no capacity is computed.
        weights: router weights of these experts.
    """
    if shape.capacity_factor is None:
        return set()
    num_tokens = sum(bool(experts) for experts in expert_ids)
    capacity = math.ceil(shape.capacity_factor * num_tokens * shape.top_k / shape.num_experts)
    dropped: set[tuple[int, int]] = set()
    for expert in range(shape.num_experts):
        assignments = [
            (0 if shape.drops_by_position else -round(4096 * weight), token)
            for token, (token_experts, token_weights) in enumerate(zip(expert_ids, weights, strict=True))
            for expert_id, weight in zip(token_experts, token_weights, strict=True)
            if expert_id == expert
        ]
        dropped |= {(token, expert) for _, token in sorted(assignments)[capacity:]}
    return dropped


def combine_experts(
    shape: ExpertsShape,
    weights: Mapping[str, Tensor],
    x: Tensor,
    apply_expert: Callable[[int, Tensor], Tensor],
    is_data: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[list[list[int]]]]:
    """Apply the selected experts to each token and sum their outputs, multiplied by the router weights. Padding has no experts, and
    its sum is zero.

    Args:
        weights: weights of the layer. Used are "mlp.router.weight" [E, h], and if they exist "mlp.router.bias" [E] (for balance)
            and "mlp.router.shares" [E] (share of the assignments at the previous update, as a multiple of the mean).
        x: [B, s, h].
        apply_expert: applies the expert with a given index to a token [h].
        is_data: whether each token is data, not padding, bool [B, s]; None for no padding.

    Returns:
        The weighted sums [B, s, h]; the router losses, multiplied by their coefficients, as a mean over the microbatches; and the
        indices of the experts of each token.
    """
    is_data = torch.ones(x.shape[:2], dtype=torch.bool) if is_data is None else is_data
    logits = x @ weights["mlp.router.weight"].T
    bias = weights["mlp.router.bias"].tolist() if "mlp.router.bias" in weights else None
    expert_ids = [
        [select_experts(shape, token, bias) if counts else [] for token, counts in zip(sequence, sequence_counts, strict=True)]
        for sequence, sequence_counts in zip(logits.tolist(), is_data.tolist(), strict=True)
    ]
    rows = []
    for sequence, sequence_logits, sequence_experts in zip(x, logits, expert_ids, strict=True):
        router_weights = [
            compute_router_weights(shape, token_logits, experts)
            for token_logits, experts in zip(sequence_logits, sequence_experts, strict=True)
        ]
        dropped = find_dropped(shape, sequence_experts, [token_weights.tolist() for token_weights in router_weights])
        for token_index, (token, experts) in enumerate(zip(sequence, sequence_experts, strict=True)):
            assignments = [
                (w, expert_id)
                for w, expert_id in zip(router_weights[token_index], experts, strict=True)
                if (token_index, expert_id) not in dropped
            ]
            rows.append(sum((w * apply_expert(expert_id, token) for w, expert_id in assignments), torch.zeros_like(token)))
    return torch.stack(rows).view_as(x), compute_router_losses(shape, weights, logits, expert_ids), expert_ids


def compute_router_losses(
    shape: ExpertsShape, weights: Mapping[str, Tensor], logits: Tensor, expert_ids: list[list[list[int]]]
) -> Tensor:
    """Compute the sum of load-balancing loss and z-loss, multiplied by their coefficients, as a mean over the microbatches. Padding
    does not count. The z-loss, and the load-balancing loss except that of a microbatch, are means over the sequences of the means
    over their tokens.

    Args:
        weights: weights of the layer.
        logits: router logits [B, s, E].
        expert_ids: indices of the selected experts of each token; none for padding.
    """
    scope_size = shape.micro_batch_size if shape.aux_loss_scope == "microbatch" else 1
    previous_shares = weights["mlp.router.shares"].detach() / shape.num_experts if shape.aux_loss_scope == "update before" else None
    losses = [
        compute_aux_loss(shape, logits[i : i + scope_size], expert_ids[i : i + scope_size], previous_shares)
        for i in range(0, len(logits), scope_size)
    ]
    z_terms = logits.exp().sum(-1).log().square()
    z_losses = [
        torch.stack([*(term for term, experts in zip(terms, sequence, strict=True) if experts), 0 * terms[0]]).sum()
        / max(1, sum(bool(experts) for experts in sequence))
        for terms, sequence in zip(z_terms, expert_ids, strict=True)
    ]
    aux_loss = shape.aux_loss_coeff * torch.stack(losses).mean() if shape.aux_loss_scope != "none" else 0.0
    return aux_loss + shape.z_loss_coeff * torch.stack(z_losses).mean()


def compute_count_term(shape: ExpertsShape, weights: Mapping[str, Tensor], expert_ids: list[list[list[int]]]) -> Tensor | None:
    """Compute a term with the value zero that gives "mlp.router.bias" and "mlp.router.shares" [E] a gradient: for each expert, its
    number of assignments times E, minus the number of all assignments. Return the term and the number of all assignments, [2].
    Return None if the layer has no such weights.

    Divided by the number of all assignments of the global batch, the gradient is the number that the update rule of these two
    weights uses instead of a true gradient.

    Args:
        weights: weights of the layer.
        expert_ids: indices of the selected experts of each token; none for padding.
    """
    counted_weights = [weights[name] for name in ("mlp.router.bias", "mlp.router.shares") if name in weights]
    if not counted_weights:
        return None
    flat_ids = [expert for sequence in expert_ids for token in sequence for expert in token]
    excess = [flat_ids.count(expert) * shape.num_experts - len(flat_ids) for expert in range(shape.num_experts)]
    terms = [(weight * torch.tensor(excess, dtype=torch.float64)).sum() for weight in counted_weights]
    return torch.stack(
        [sum((term - term.detach() for term in terms), torch.zeros_like(terms[0])), torch.tensor(len(flat_ids)).double()]
    )


def compute_expert_shares(shape: ExpertsShape, expert_ids: list[list[list[int]]]) -> Tensor:
    """Compute the share of all assignments that each expert gets, [E]. `expert_ids` lists the selected experts of each token."""
    flat_ids = [expert for sequence in expert_ids for token in sequence for expert in token]
    return torch.tensor([flat_ids.count(expert) / len(flat_ids) for expert in range(shape.num_experts)], dtype=torch.float64)


def compute_aux_loss(
    shape: ExpertsShape, logits: Tensor, expert_ids: list[list[list[int]]], shares: Tensor | None = None
) -> Tensor:
    """Compute the load-balancing loss: E x the sum over the experts of (share of the assignments x mean score). The source is
    Switch Transformer, equation 4.

    Args:
        logits: router logits [B, s, E].
        expert_ids: indices of the selected experts of each token; none for padding. Without any tokens the loss is zero.
        shares: share of the assignments of each expert [E]; by default computed from `expert_ids`.
    """
    logits = logits[torch.tensor([[bool(token) for token in sequence] for sequence in expert_ids])]  # [tokens, E]
    if not len(logits):
        return logits.sum()
    scores = 1 / (1 + torch.exp(-logits)) if shape.score_function == "sigmoid" else logits.exp()
    scores = scores / scores.sum(-1, keepdim=True)
    shares = compute_expert_shares(shape, expert_ids) if shares is None else shares
    return shape.num_experts * (shares * scores.mean(0)).sum()
