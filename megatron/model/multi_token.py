"""Multi-token prediction: the last chunk learns to predict tokens beyond the next one too (DeepSeek-V3 report, section 2.2).

Depth k = 1, 2, ... maps the hidden state of depth k - 1 (of depth 0: what the last layer gives) and the embedding of the token k
places on to its own hidden state, by two norms, a product [h, 2h] and one layer. Final norm, output layer and word embedding are
the model's. From position i it predicts token i + 1 + k. That counts where the labels of all tokens on the way count: so not beyond
the sample, and not beyond a document where the end of one ends prediction.

All sums are divided by the same number of tokens, that of the labels which count for the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from megatron.config.model import ModelConfig
from megatron.model.block import Block, Treatment
from megatron.model.inputs import ModelInputs
from megatron.model.rope import rotary_table
from megatron.parallel.context import SELF_GROUP
from megatron.parallel.params import Scope
from megatron.spec.layers import LayerSpec, depths, norm_of
from megatron.spec.segments import Segment
from megatron.spec.weights import WORD_EMBEDDING, outside_layers
from megatron.tensor_parallel.cross_entropy import OutputLayer
from megatron.tensor_parallel.layers import Norm, VocabParallelEmbedding
from megatron.tensor_parallel.linear import parallel_linear


class Depth(nn.Module):
    """One depth, up to its hidden state."""

    projection: nn.Parameter
    """[h, 2h]. Each tensor rank has the whole of it, so that the sequence can stay divided."""

    def __init__(self, scope: Scope, config: ModelConfig, spec: LayerSpec, segment: Segment) -> None:
        super().__init__()
        self.hidden_norm = Norm(scope.child("hidden_norm"), norm_of(config), config.hidden_size)
        self.embedding_norm = Norm(scope.child("embedding_norm"), norm_of(config), config.hidden_size)
        scope.parameter(self, "projection", scope.weight("projection.weight"))
        self.layer = Block(scope.child("layer"), config, spec, segment.layers.start, segment.selective)

    def forward(self, inputs: ModelInputs, rotary: torch.Tensor | None, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Map hidden states and embeddings [s, b, h] (or [s/n, b, h]) to hidden states of the same shape and dtype."""
        both = torch.cat([self.hidden_norm(x), self.embedding_norm(embedded)], -1)
        hidden = parallel_linear(both, self.projection, None, SELF_GROUP).to(x.dtype)
        return self.layer(hidden, rotary, inputs.dropout_key, inputs.documents)


class MultiTokenPrediction(nn.Module):
    """All depths, and the loss of the chunk that has them. Final norm and output layer are the chunk's, which uses them by itself
    where it computes no loss.

    Args:
        treated: the segment of each depth, with what happens to its tensors between forward and backward.
    """

    def __init__(
        self,
        scope: Scope,
        config: ModelConfig,
        final_norm: Norm,
        output: OutputLayer,
        treated: Sequence[tuple[Segment, Treatment]],
    ) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(scope.child("embedding.word"))
        specs = depths(config)
        self._each = [
            Depth(scope.child(f"mtp.{k}"), config, spec, segment)
            for k, (spec, (segment, _)) in enumerate(zip(specs, treated, strict=True))
        ]
        self.depths = nn.ModuleList(self._each)
        self._treatments, self._rotary = [treatment for _, treatment in treated], specs[0].attention.rotary
        self.factor = output.form.mtp_factor / len(specs)
        self.final_norm, self.output = final_norm, output
        scope.table.used_again(WORD_EMBEDDING, len(specs) - 1)
        again = [
            output.weight_name,
            *(weight.name for weight in outside_layers(config, 1) if weight.part.startswith("final_norm.")),
        ]
        for name in again:
            scope.table.used_again(name, len(specs))

    @property
    def blocks(self) -> list[Block]:
        """The layer of each depth."""
        return [depth.layer for depth in self._each]

    @property
    def recomputed(self) -> list[nn.Module]:
        """Depths that run again in backward, each by itself."""
        return [depth for depth, treatment in zip(self._each, self._treatments, strict=True) if treatment.recomputed]

    def forward(self, x: torch.Tensor, inputs: ModelInputs) -> torch.Tensor:
        """Map the hidden states of the last layer [s, b, h] (or [s/n, b, h]) to three sums whose sum is minimised: those of the
        model itself (cross entropy, z-loss), and factor / depths x the sum over depths and tokens of mask x cross entropy."""
        assert inputs.labels is not None and inputs.loss_mask is not None
        own = self.output(self.final_norm(x), inputs.labels, inputs.loss_mask)
        own = own if own.dim() else torch.stack([own, torch.zeros_like(own)])
        table = None if self._rotary is None else rotary_table(inputs.positions, self._rotary, x.dtype, inputs.length)
        shared = [] if table is None else [table]
        each, sums = zip(self._each, self._treatments, shifted(inputs, len(self.depths)), strict=True), []
        for depth, treatment, (tokens, labels, mask) in each:
            forward = partial(_run, depth, inputs, table)
            # The final norm keeps what comes from the layer or the depth before, whatever this one does with it.
            x = treatment.run(forward, x, self.word(tokens), modules=[depth], shared=[x, *shared])
            sums.append(self.output(self.final_norm(x), labels, mask, z_loss=False))
        return torch.cat([own, self.factor * torch.stack(sums).sum(0, keepdim=True)])


def _run(
    depth: Depth, inputs: ModelInputs, rotary: torch.Tensor | None, x: torch.Tensor, embedded: torch.Tensor, *, again: bool = False
) -> torch.Tensor:
    """Run a depth; `again` past its hooks, which acted in the first forward."""
    run = depth.forward if again else depth
    return run(inputs, rotary, x, embedded)


def shifted(inputs: ModelInputs, num_depths: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Tokens to look up, labels and mask [s, b] of each depth.

    Beyond the sample stands token 0, which does not count, and to which no position of it attends. (But scales of 8 bits may depend
    on it.)
    """
    labels, counted = inputs.labels, inputs.loss_mask
    assert labels is not None and counted is not None
    for k in range(1, num_depths + 1):
        tokens = labels
        if inputs.ahead:
            labels, ahead = inputs.ahead[k - 1]
        else:
            labels, ahead = functional.pad(labels[1:], (0, 0, 0, 1)), torch.zeros_like(counted)
            ahead[:-k] = inputs.loss_mask[k:]  # type: ignore[index]
        counted = counted * ahead
        yield tokens, labels, counted
