"""Inputs of the model for one microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.parallel.random import DropoutKey

if TYPE_CHECKING:
    from megatron.attention.documents import Documents
    from megatron.model.key_value_cache import KeyValueCache


@dataclass(frozen=True)
class ModelInputs:
    """Inputs of a forward: the tensors of one microbatch on one rank, [s, b] each. The first stage has tokens; the last has labels
    and the loss mask."""

    positions: torch.Tensor
    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    dropout_key: DropoutKey | None = None
    """Key of the dropout masks; None switches dropout off (evaluation)."""
    documents: Documents | None = None
    """Document bounds that attention does not cross; None if a token attends to its whole sample."""
    cache: KeyValueCache | None = None
    """Cached keys and values of earlier tokens, for text generation; None in training and evaluation."""

    mtp_targets: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    """Labels and loss mask of each depth of multi-token prediction, shifted by 1, 2, ... positions. Empty if this rank can
    shift `labels` itself; a context-parallel rank cannot, because another rank may hold the next tokens."""

    @property
    def sequence_length(self) -> int:
        """Number of tokens of the longest sequence, including tokens of other context ranks and tokens still to be generated."""
        if self.cache is not None:
            return self.cache.capacity
        return len(self.positions) if self.documents is None else self.documents.sample_length
