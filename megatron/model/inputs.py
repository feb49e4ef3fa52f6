"""What the model is given of one microbatch."""

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
    """The tensors of one microbatch on one rank, all [s, b]. The first stage has tokens, the last has labels and mask."""

    positions: torch.Tensor
    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    dropout_key: DropoutKey | None = None
    """Key of the dropout masks; None switches dropout off (evaluation)."""
    documents: Documents | None = None
    """Bounds that attention does not cross; None where a token attends to its whole sample."""
    cache: KeyValueCache | None = None
    """Keys and values of the tokens before these, when text is generated; None for whole samples."""

    ahead: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    """Labels and loss mask of 1, 2, ... places further on, for multi-token prediction, where another context rank may hold them."""

    @property
    def length(self) -> int:
        """Tokens of the longest sequence as a whole: also those that other context ranks hold, and those that are still to be
        generated."""
        if self.cache is not None:
            return self.cache.capacity
        return len(self.positions) if self.documents is None else self.documents.length
