"""The output layer and its loss: the last part of the last chunk."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from megatron.config.memory import MemoryConfig
from megatron.config.model import ModelConfig
from megatron.config.training import TrainingConfig
from megatron.parallel.collectives import all_gather
from megatron.parallel.params import Scope
from megatron.spec.weights import WORD_EMBEDDING
from megatron.tensor_parallel.cross_entropy import Columns, capped, vocab_parallel_cross_entropy
from megatron.tensor_parallel.linear import InputMode, parallel_linear

_MOST_LOGITS = 1 << 27
_MULTIPLE = 128


def chosen_chunk(tokens: int, columns: int) -> int:
    """Tokens of a chunk where the user leaves it to us; 0 for the whole loss.

    Logits of up to 2^27 elements (256 MiB in 16 bits) are made at once. Where a microbatch has more on a rank, chunks are as large
    as that allows: so large that a product with the weight takes the device longer than reading it. The size is a multiple of 128,
    which products like, unless the vocabulary is huge.

    Args:
        tokens: of a microbatch.
        columns: of the vocabulary on this rank.
    """
    if tokens * columns <= _MOST_LOGITS:
        return 0
    most = max(1, _MOST_LOGITS // columns)
    return most - most % _MULTIPLE if most > _MULTIPLE else most


@dataclass(frozen=True)
class LossForm:
    """How the loss is computed, and what stands beside the cross entropy."""

    chunk_tokens: int | None = None
    """Tokens whose logits are there at once; 0: all of a microbatch; None: as `chosen_chunk` says."""
    z_coeff: float = 0.0
    """Coefficient of the z-loss."""
    smoothing: float = 0.0
    """Share of each target that is spread over the vocabulary."""
    mtp_factor: float = 0.0
    """Weight of the loss of multi-token prediction, a mean over its depths."""

    @classmethod
    def of(cls, memory: MemoryConfig, training: TrainingConfig) -> LossForm:
        """As the settings say."""
        return cls(memory.loss_chunk_tokens, training.z_loss_coeff, training.label_smoothing, training.mtp_loss_scaling_factor)

    def chunk(self, tokens: int, columns: int) -> int:
        """Tokens of a chunk, 0 for the whole loss.

        Args:
            tokens: of a microbatch.
            columns: of the vocabulary on a rank, padding included.
        """
        return chosen_chunk(tokens, columns) if self.chunk_tokens is None else self.chunk_tokens


class OutputLayer(nn.Module):
    """Computes the sum of the loss. The vocabulary is split over the tensor group; the weight may be the word embedding's.

    The weight's gradient is never deferred. It would keep the gradient of the logits, which may be larger than all that a
    zero-bubble schedule keeps of a stage's layers.
    """

    weight: nn.Parameter

    def __init__(self, scope: Scope, config: ModelConfig, form: LossForm) -> None:
        super().__init__()
        weight = scope.weights[WORD_EMBEDDING] if config.tied else scope.weight("weight")
        self.weight_name = weight.name
        if weight.name in scope.table:
            self.weight = scope.table.share(weight.name, self, "weight", scope.chunk)
        else:
            scope.parameter(self, "weight", weight)
        self.overlap = scope.overlap
        self.input_factor = config.output_multiplier / config.mup_width
        """Factor on the hidden states: that of the logits, and muP's multiplier of the output (Yang et al. 2022, table 8)."""
        self.gather, self.vocab_size, self.form = scope.sequence_parallel, weight.shape[0], form
        self.rows = len(self.weight)
        first = scope.tp.index * self.rows
        valid = max(0, min(self.rows, self.vocab_size - first))
        cap = config.final_logit_softcapping
        self.columns = Columns(scope.tp, first, valid, form.z_coeff, form.smoothing, self.vocab_size, cap)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, *, z_loss: bool = True) -> torch.Tensor:
        """Map hidden states [s, b, h] (or [s/n, b, h]), labels and mask [s, b] to the sum over tokens of mask x loss.

        With a z-loss there are two sums, [2]: that of the cross entropy and that of the z-loss.

        Args:
            z_loss: False leaves the z-loss out.
        """
        x, columns = self._scaled(x), self.columns if z_loss else replace(self.columns, z_coeff=0.0)
        if size := self.form.chunk(labels.numel(), self.rows):
            from megatron.tensor_parallel.chunked_loss import chunked_loss

            return chunked_loss(x, self.weight, labels, mask, columns, gathers=self.gather, size=size)
        return vocab_parallel_cross_entropy(self._logits(x), labels, mask, columns)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Map hidden states [s, b, h] (or [s/n, b, h]) to logits [s, b, v], without padding, whole on every tensor rank."""
        columns = capped(self._logits(self._scaled(x)), self.columns.cap).permute(2, 0, 1)  # the gather joins dimension 0
        return all_gather(columns, self.columns.group)[: self.vocab_size].permute(1, 2, 0)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.input_factor == 1.0 else x * self.input_factor

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's columns of the logits, padding included: [s, b, v/n]."""
        mode: InputMode = "gather" if self.gather else "copy"
        return parallel_linear(x, self.weight, None, self.columns.group, input_mode=mode, defers=False, overlap=self.overlap)
