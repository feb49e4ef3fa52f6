"""What a microbatch brings to the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.model.document_attention import Documents
from megatron.model.key_value_cache import KeyValueCache
from megatron.parallel.random import DropoutKey


@dataclass(frozen=True)
class ModelInputs:
    """Tensors of one microbatch on one rank, all [s, b]. Tokens are there on the first stage, labels and mask on the last."""

    positions: torch.Tensor
    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    dropout_key: DropoutKey | None = None
    """None switches dropout off (evaluation)."""
    documents: Documents | None = None
    """Bounds that attention does not cross; None where a token attends to its whole sample."""
    cache: KeyValueCache | None = None
    """Keys and values of the tokens before these, when text is generated; None for whole samples."""
