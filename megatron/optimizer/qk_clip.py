"""QK-clip: after an update, the query and key weights of heads whose scores grew too large are scaled down (MuonClip; Kimi K2,
arXiv 2507.20534, section 2.1).

With S the largest score of a head in the step (`megatron.attention.largest`) and gamma = min(1, threshold / S), its queries are
multiplied by gamma^alpha and its keys by gamma^(1 - alpha): the same inputs would then have given the threshold. Query heads
that share a key head share its gamma, the smallest of theirs, as in Megatron-LM. In latent attention the rotated channels of
queries take all of gamma, since the rotated key belongs to all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron.optimizer.matrices import parts_of
from megatron.optimizer.rule import Target
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord
from megatron.spec.weights import score_row


class QKClip:
    """Scales the main parameters before they are averaged and published, so that all that is made of them agrees.

    Args:
        largest: the largest scores of the step over the whole batch, [layers, query heads]; filled anew in each step.
    """

    def __init__(self, largest: torch.Tensor, threshold: float, alpha: float, context: ParallelContext) -> None:
        self._largest, self._threshold, self._context = largest, threshold, context
        self._exponents = {"query": alpha, "key": 1.0 - alpha, "both": 1.0}
        self._gammas: dict[torch.device, torch.Tensor] = {}

    def begin(self) -> None:
        """Take the scores of a step. Offloaded parameters get the factors in host memory."""
        gammas = torch.where(self._largest > self._threshold, self._threshold / self._largest, 1.0)
        self._gammas = {gammas.device: gammas}

    def clipper(self, targets: Sequence[Target]) -> Callable[[], None]:
        """A function that scales the targets, just updated."""
        parts = [
            (part.of(target.main), target.record, part.placed.box.index[0])
            for target in targets
            if target.record.scores is not None
            for part in parts_of(target, self._context)
        ]

        def clip() -> None:
            for view, record, rows in parts:
                factors = self._factors(record, view.device)[rows].to(view.dtype)
                view.mul_(factors.view(-1, *[1] * (view.dim() - 1)))

        return clip

    def _factors(self, record: ParamRecord, device: torch.device) -> torch.Tensor:
        """The factor of each row of a parameter."""
        if device not in self._gammas:
            self._gammas[device] = next(iter(self._gammas.values())).to(device)
        scores = record.scores
        assert scores is not None
        gammas = self._gammas[device][score_row(record.name)].view(-1, scores.queries).amin(-1, keepdim=True)  # [units, 1]
        runs = [
            gammas.pow(self._exponents[side]).expand(-1, rows)
            if side in self._exponents
            else torch.ones_like(gammas).expand(-1, rows)
            for rows, side in scores.runs
        ]
        return torch.cat(runs, 1).flatten()
