"""Multi-token prediction: the last chunk also learns to predict tokens after the next one (DeepSeek-V3 report, section 2.2).

Depth k = 1, 2, ... computes its hidden state from two inputs: the hidden state of depth k - 1 (for k = 1, the output of the last
layer) and the embedding of the token k positions later. It applies a norm to each input, a projection [h, 2h] and one layer. The
final norm, the output layer and the word embedding are those of the model. At position i, depth k predicts token i + 1 + k. The
prediction counts only if the labels of all tokens up to that one count. So it does not count beyond the end of the sample, nor
beyond the end of a document if documents mask the loss there.

The sums of all depths are divided by the same number of tokens: the number of labels that count for the model itself.

Shapes: `s` sequence, `b` microbatch, `h` hidden size. Under sequence parallelism hidden states are [s/tp, b, h], where `tp` is
the number of tensor ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from megatron.config.model import ModelConfig
from megatron.model.block import ActivationPolicy, Block
from megatron.model.inputs import ModelInputs
from megatron.model.rope import build_rotary_table
from megatron.parallel.context import SELF_GROUP
from megatron.parallel.params import Scope
from megatron.spec.layers import LayerSpec, build_mtp_layer_specs, build_norm_spec
from megatron.spec.segments import Segment
from megatron.spec.weights import WORD_EMBEDDING, iter_non_layer_weights
from megatron.tensor_parallel.cross_entropy import OutputLayer
from megatron.tensor_parallel.layers import Norm, VocabParallelEmbedding
from megatron.tensor_parallel.linear import parallel_linear


class MTPDepth(nn.Module):
    """One depth of multi-token prediction: two norms, a projection and a transformer layer, which compute the depth's hidden
    states. The output layer is shared by all depths and outside."""

    projection: nn.Parameter
    """Weight [h, 2h] that combines hidden state and embedding. Every tensor rank has the full weight, so that under sequence
    parallelism the sequence can stay split."""

    def __init__(self, scope: Scope, config: ModelConfig, spec: LayerSpec, segment: Segment) -> None:
        super().__init__()
        self.hidden_norm = Norm(scope.get_child("hidden_norm"), build_norm_spec(config), config.hidden_size)
        self.embedding_norm = Norm(scope.get_child("embedding_norm"), build_norm_spec(config), config.hidden_size)
        scope.register_param(self, "projection", scope.get_weight("projection.weight"))
        self.layer = Block(scope.get_child("layer"), config, spec, segment.layers.start, segment.recomputed_modules)

    def forward(self, inputs: ModelInputs, rotary: torch.Tensor | None, x: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Compute the hidden states of this depth.

        Args:
            x: hidden states of the previous depth, [s, b, h] (or [s/tp, b, h] under sequence parallelism).
            embeddings: embeddings of the tokens that the depth reads, of the shape of x.

        Returns:
            hidden states of the shape and dtype of x.
        """
        combined = torch.cat([self.hidden_norm(x), self.embedding_norm(embeddings)], -1)
        hidden = parallel_linear(combined, self.projection, None, SELF_GROUP).to(x.dtype)
        return self.layer(hidden, rotary, inputs.dropout_key, inputs.documents)


class MultiTokenPrediction(nn.Module):
    """All depths of multi-token prediction, and the loss of the last model chunk.

    The final norm and the output layer belong to the chunk, which uses them directly when it computes logits without a loss.

    Args:
        segment_policies: for each depth, its segment of the layer list, and whether the segment's activations are kept, recomputed
            or offloaded.
    """

    def __init__(
        self,
        scope: Scope,
        config: ModelConfig,
        final_norm: Norm,
        output: OutputLayer,
        segment_policies: Sequence[tuple[Segment, ActivationPolicy]],
    ) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(scope.get_child("embedding.word"))
        specs = build_mtp_layer_specs(config)
        self._depths = [
            MTPDepth(scope.get_child(f"mtp.{k}"), config, spec, segment)
            for k, (spec, (segment, _)) in enumerate(zip(specs, segment_policies, strict=True))
        ]
        self.depths = nn.ModuleList(self._depths)
        for num_ahead, block in enumerate(self.blocks, start=1):
            if block.has_experts:
                block.mlp.router.num_ahead = num_ahead  # type: ignore[union-attr]
        self._policies, self._rotary = [policy for _, policy in segment_policies], specs[0].attention.rotary
        self.loss_scale = output.options.mtp_factor / len(specs)
        self.final_norm, self.output = final_norm, output
        scope.table.add_uses(WORD_EMBEDDING, len(specs) - 1)
        shared_weights = [
            output.weight_name,
            *(weight.name for weight in iter_non_layer_weights(config, 1) if weight.name_in_layer.startswith("final_norm.")),
        ]
        for name in shared_weights:
            scope.table.add_uses(name, len(specs))

    @property
    def blocks(self) -> list[Block]:
        """Transformer layer of each depth."""
        return [depth.layer for depth in self._depths]

    @property
    def recomputed_modules(self) -> list[nn.Module]:
        """Depths that backward recomputes, each separately."""
        return [depth for depth, policy in zip(self._depths, self._policies, strict=True) if policy.recomputes]

    def forward(self, x: torch.Tensor, inputs: ModelInputs) -> torch.Tensor:
        """Compute the losses from the hidden states of the last layer, [s, b, h] (or [s/tp, b, h]).

        Returns:
            three sums, whose sum is the training loss: cross entropy and z-loss of the model itself, and (scaling factor / number
            of depths) x the sum over depths and tokens of mask x cross entropy.
        """
        assert inputs.labels is not None and inputs.loss_mask is not None
        main_losses = self.output(self.final_norm(x), inputs.labels, inputs.loss_mask)
        main_losses = main_losses if main_losses.dim() else torch.stack([main_losses, torch.zeros_like(main_losses)])
        table = (
            None if self._rotary is None else build_rotary_table(inputs.positions, self._rotary, x.dtype, inputs.sequence_length)
        )
        shared = [] if table is None else [table]
        depths, depth_losses = zip(self._depths, self._policies, shift_inputs(inputs, len(self.depths)), strict=True), []
        for depth, policy, (tokens, labels, mask) in depths:
            forward = partial(_run_depth, depth, inputs, table)
            # x is shared: the final norm saves the hidden state of the previous depth in any case.
            x = policy.run(forward, x, self.word(tokens), modules=[depth], shared=[x, *shared])
            depth_losses.append(self.output(self.final_norm(x), labels, mask, z_loss=False))
        return torch.cat([main_losses, self.loss_scale * torch.stack(depth_losses).sum(0, keepdim=True)])


def _run_depth(
    depth: MTPDepth,
    inputs: ModelInputs,
    rotary: torch.Tensor | None,
    x: torch.Tensor,
    embeddings: torch.Tensor,
    *,
    is_recompute: bool = False,
) -> torch.Tensor:
    """Compute the hidden states of one depth of multi-token prediction, from those of the previous depth (x) and token embeddings.

    Args:
        is_recompute: call the depth without its hooks, because the hooks ran in the first forward.
    """
    forward = depth.forward if is_recompute else depth
    return forward(inputs, rotary, x, embeddings)


def shift_inputs(inputs: ModelInputs, num_depths: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield for each depth of multi-token prediction the tokens to embed, the labels and the loss mask, [s, b] each: those of the
    model, shifted by one more position per depth.

    Beyond the end of the sample the token is 0. It has no loss, and no position of the sample attends to it. (In 8 bits it can
    still influence the scaling factors.)
    """
    labels, mask = inputs.labels, inputs.loss_mask
    assert labels is not None and mask is not None
    for k in range(1, num_depths + 1):
        tokens = labels
        if inputs.mtp_targets:
            labels, next_mask = inputs.mtp_targets[k - 1]
        else:
            labels, next_mask = functional.pad(labels[1:], (0, 0, 0, 1)), torch.zeros_like(mask)
            next_mask[:-k] = inputs.loss_mask[k:]  # type: ignore[index]
        mask = mask * next_mask
        yield tokens, labels, mask
