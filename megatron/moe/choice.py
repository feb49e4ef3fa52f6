"""Which experts a token passes, and with what probabilities (docs/moe.md, "What is computed").

Shapes: `t` tokens (any leading dimensions), `E` experts, `k` chosen ones, `G` groups of experts.
"""

from __future__ import annotations

import torch

from megatron.spec.mlps import RouterSpec


def scores_of(logits: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """What experts are chosen by [t, E], of the logits."""
    if spec.score_function == "sigmoid":
        return logits.sigmoid()
    return logits.softmax(-1) if spec.pre_softmax else logits


def choose(scores: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """The numbers of the experts with the best scores, int64 [t, k], the best first; of equal ones the lower number first."""
    if spec.groups > 1:
        scores = scores.masked_fill(~_open(scores, spec), -torch.inf)
    return _best(scores, spec.chosen)


def _open(scores: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Which experts are in a group that is open to the token: bool [t, E]."""
    groups = scores.unflatten(-1, (spec.groups, -1))  # [t, G, E/G]
    of_groups = groups.topk(spec.chosen // spec.open_groups, sorted=False).values.sum(-1)
    is_open = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(-1, _best(of_groups, spec.open_groups), True)
    return is_open.unsqueeze(-1).expand_as(groups).flatten(-2)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the best of the last dimension. (torch.topk says nothing of ties.)"""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def probabilities(logits: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """The probabilities [t, k] of the chosen experts."""
    if spec.score_function == "softmax" and not spec.pre_softmax:
        found = logits.gather(-1, chosen).softmax(-1)
    else:
        found = scores.gather(-1, chosen)
        if spec.score_function == "sigmoid" and spec.chosen > 1:
            found = found / (found.sum(-1, keepdim=True) + _LITTLE)
    return found if spec.scaling == 1.0 else found * spec.scaling


_LITTLE = 1e-20
"""Added to sums of sigmoids, as DeepSeek-V3 and Megatron-LM do."""


def balance_scores(logits: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """The scores [t, E] of which the load-balancing loss is made: they sum to 1."""
    if spec.score_function == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + _LITTLE)
