"""GPT model, as several chunks of a pipeline or as a single chunk. The code reads like a model for one process; parallelism is
inside the layer classes.

Shapes: `s` sequence, `b` microbatch, `h` hidden size, `v` vocabulary, `tp` tensor ranks. Hidden states between layers are
[s, b, h], or [s/tp, b, h] under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron.config.imports import import_object
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.model.block import ActivationPolicy, Block, build_activation_policies, dropout
from megatron.model.inputs import ModelInputs
from megatron.model.rope import build_rotary_table
from megatron.parallel.collectives import split_along_first_dim
from megatron.parallel.params import Scope
from megatron.pipeline_parallel.partition import Chunk
from megatron.spec.layers import build_layer_specs, build_norm_spec
from megatron.spec.rotary import RotarySpec
from megatron.spec.segments import Segment
from megatron.spec.weights import get_score_row
from megatron.tensor_parallel.cross_entropy import LossOptions, OutputLayer
from megatron.tensor_parallel.layers import Norm, VocabParallelEmbedding, lookup_rows

if TYPE_CHECKING:
    from megatron.attention.max_logits import MaxLogitTracker
    from megatron.model.multi_token import MultiTokenPrediction
    from megatron.moe.balance import RouterTracker


class Embedding(nn.Module):
    """Embedding of tokens, with optional scaling, learned positions, norm and dropout."""

    def __init__(self, scope: Scope, config: ModelConfig) -> None:
        super().__init__()
        self.group, self.split, self.probability = scope.tp, scope.sequence_parallel, config.hidden_dropout
        self.word = VocabParallelEmbedding(scope.get_child("word"))
        learned = config.position_embedding_type == "learned_absolute"
        self.position = PositionTable(scope.get_child("position")) if learned else None
        self.multiplier = config.embedding_multiplier
        self.norm = (
            Norm(scope.get_child("norm"), build_norm_spec(config), config.hidden_size) if config.embedding_layernorm else None
        )

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Map tokens and positions [s, b] to hidden states [s, b, h], or [s/tp, b, h] under sequence parallelism."""
        assert inputs.tokens is not None
        x = self.word(inputs.tokens)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        if self.position is not None:
            x = x + self.position(split_along_first_dim(inputs.positions, self.group) if self.split else inputs.positions)
        if self.norm is not None:
            x = self.norm(x)
        key, rank = inputs.dropout_key, self.group.rank if self.split else 0
        seeds = None if key is None or self.probability == 0.0 else [key.get_site_seed(0, "embedding", rank)]
        return dropout(x, self.probability, seeds)


class PositionTable(nn.Module):
    """Table of learned embeddings of absolute positions."""

    weight: nn.Parameter

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        scope.register_param(self, "weight")

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Look up the embeddings of positions [s, b]: [s, b, h]."""
        return lookup_rows(positions, self.weight)


@dataclass(frozen=True)
class _LayerGroup:
    """Consecutive layers of a model chunk whose activations are kept, recomputed or offloaded together."""

    blocks: list[nn.Module]
    rotaries: list[RotarySpec | None]
    policy: ActivationPolicy

    def __call__(
        self,
        tables: Mapping[RotarySpec | None, torch.Tensor | None],
        inputs: ModelInputs,
        x: torch.Tensor,
        *,
        is_recompute: bool = False,
    ) -> torch.Tensor:
        """Run the layers of the segment.

        Args:
            tables: rotation matrices of the tokens' positions for each rotary embedding of the layers; None for layers without it.
            is_recompute: call the layers without their hooks, because the hooks ran in the first forward.
        """
        for block, rotary in zip(self.blocks, self.rotaries, strict=True):
            forward = block.forward if is_recompute else block
            x = forward(x, tables[rotary], inputs.dropout_key, inputs.documents, inputs.cache)
        return x


class GPTChunk(nn.Module):
    """Model chunk: consecutive layers that a pipeline stage runs in one operation. The first chunk also has the embedding; the last
    has the final norm, the output layer and the loss."""

    def __init__(
        self,
        scope: Scope,
        config: ModelConfig,
        chunk: Chunk,
        selected_segments: Sequence[Segment] | None = None,
        *,
        loss: LossOptions = LossOptions(),  # noqa: B008 (frozen)
        precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 (frozen)
    ) -> None:
        """Build the chunk on the meta device.

        Args:
            selected_segments: segments (groups of consecutive layers) of the chunk to build, including those of multi-token
                prediction; by default all. A dry run passes only one of several equal segments, because all of them have the same
                memory and work.
            loss: how the last chunk computes its loss.
            precision: which layers compute in 8 bits.
        """
        super().__init__()
        specs = build_layer_specs(config)
        all_segments = chunk.segments if selected_segments is None else selected_segments
        policies = build_activation_policies(all_segments)
        segments = [segment for segment in all_segments if segment.layers.start < config.num_layers]
        layer_indices = [layer for segment in segments for layer in segment.layers]
        self.residual_dtype = get_residual_dtype(config, scope.dtype)
        self.embedding = Embedding(scope.get_child("embedding"), config) if chunk.is_first else None
        self.blocks = [
            Block(
                replace(scope.get_child(f"layers.{layer}"), fp8=precision.get_fp8(layer, config.num_layers)),
                config,
                specs[layer],
                layer,
                segment.recomputed_modules,
            )
            for segment in segments
            for layer in segment.layers
        ]
        self.layers = nn.ModuleList(self.blocks)
        blocks = dict(zip(layer_indices, self.layers, strict=True))
        self._layer_groups = [
            _LayerGroup(
                [blocks[layer] for layer in segment.layers],
                [specs[layer].attention.rotary for layer in segment.layers],
                policy,
            )
            for segment, policy in zip(segments, policies, strict=False)
        ]
        self._rotaries = dict.fromkeys(rotary for group in self._layer_groups for rotary in group.rotaries)
        self.final_norm = (
            Norm(scope.get_child("final_norm"), build_norm_spec(config), config.hidden_size) if chunk.is_last else None
        )
        self.output = OutputLayer(scope.get_child("output"), config, loss) if chunk.is_last else None
        self.mtp: MultiTokenPrediction | None = None
        if self.final_norm is not None and self.output is not None and chunk.depths:
            scope = replace(scope, fp8=precision.get_fp8(config.num_layers - 1, config.num_layers))
            mtp_segments = [*zip(all_segments, policies, strict=True)][len(segments) :]
            prediction = import_object("megatron.model.multi_token:MultiTokenPrediction")
            self.mtp = prediction(scope, config, self.final_norm, self.output, mtp_segments)

    @property
    def recomputed_modules(self) -> list[list[nn.Module]]:
        """Groups of modules that backward recomputes together, in the order of the forward. The schedule may recompute the last
        group before backward."""
        depths = [] if self.mtp is None else [[depth] for depth in self.mtp.recomputed_modules]
        return [*(group.blocks for group in self._layer_groups if group.policy.recomputes), *depths]

    @property
    def all_blocks(self) -> list[Block]:
        """Layers of the chunk, including those of multi-token prediction."""
        return [*self.blocks, *([] if self.mtp is None else self.mtp.blocks)]

    def get_units(self) -> list[nn.Module]:
        """Return the modules that hold parameters, in the order of the forward. With fully sharded parameters, each module is
        all-gathered and freed as a unit.

        Units may be nested; a parameter belongs to the innermost unit that contains it. The unit of multi-token prediction contains
        the units of its depths, so the final norm and the output layer, which all depths use, are gathered once. The unit of a
        layer contains the units of its experts, because experts are sharded over other ranks.
        """
        units: list[nn.Module | None] = [self.embedding, *_iter_modules_and_experts(self.layers)]
        units += [self.final_norm, self.output] if self.mtp is None else [self.mtp, *_iter_modules_and_experts(self.mtp.depths)]
        return [module for module in units if module is not None]

    def track_routers(self, tracker: RouterTracker) -> None:
        """Make the routers of the chunk's layers report their losses and expert loads to `tracker`."""
        for block in self.all_blocks:
            if block.has_experts:
                block.mlp.router.tracker = tracker  # type: ignore[union-attr]

    def track_max_logits(self, tracker: MaxLogitTracker) -> None:
        """Make the attention layers of the chunk report their largest logits to `tracker`."""
        from megatron.attention.max_logits import LayerLogitTracker

        for block in self.blocks:
            block.attention.logit_tracker = LayerLogitTracker(tracker, get_score_row(f"layers.{block.layer}"))
        for k, block in enumerate([] if self.mtp is None else self.mtp.blocks):
            block.attention.logit_tracker = LayerLogitTracker(tracker, get_score_row(f"mtp.{k}.layer"), k + 1)

    def forward(self, inputs: ModelInputs, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Run the chunk on one microbatch.

        Args:
            inputs: the microbatch.
            hidden: output of the previous chunk; None on the first chunk.

        Returns:
            hidden states; or, on the last chunk, the sum over tokens of mask x loss in float32 or wider. It is a scalar, or a
                vector of two sums with a z-loss and of three sums with multi-token prediction. The training loss is the sum of the
                vector.
        """
        x = self.compute_hidden_states(inputs, hidden)
        if self.final_norm is None or self.output is None:
            return x
        if self.mtp is not None:
            losses: torch.Tensor = self.mtp(x, inputs)
            return losses
        assert inputs.labels is not None and inputs.loss_mask is not None
        return self.output(self.final_norm(x), inputs.labels, inputs.loss_mask)

    def compute_hidden_states(self, inputs: ModelInputs, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the hidden states after the last layer of the chunk. `forward` returns them, except on the last chunk."""
        x = hidden if self.embedding is None else self.embedding(inputs).to(self.residual_dtype)
        assert x is not None, "a chunk that is not the first needs hidden states"
        if torch.is_grad_enabled() and not x.requires_grad:
            x.requires_grad_()  # output of a frozen embedding: make backward run through all layers, as without LoRA
        dtype = self.residual_dtype
        tables = {
            rotary: None if rotary is None else build_rotary_table(inputs.positions, rotary, dtype, inputs.sequence_length)
            for rotary in self._rotaries
        }
        shared = [table for table in tables.values() if table is not None]
        for group in self._layer_groups:
            x = group.policy.run(partial(group, tables, inputs), x, modules=group.blocks, shared=shared)
        return x

    def compute_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Map the hidden states of the last chunk's last layer, [s, b, h] (or [s/tp, b, h] under sequence parallelism), to logits
        [s, b, v] without padding of the vocabulary."""
        assert self.final_norm is not None and self.output is not None
        return self.output.compute_logits(self.final_norm(x))


def _iter_modules_and_experts(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield each module, followed by the modules inside it that hold the weights of experts. With fully sharded parameters, the
    experts are gathered and freed separately from the rest of the module."""
    for module in modules:
        yield module
        yield from (child for child in module.modules() if getattr(child, "holds_experts", False))


def get_residual_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the residual stream, which is also the dtype of the activations that pipeline stages exchange."""
    return torch.promote_types(dtype, torch.float32) if config.fp32_residual_connection else dtype
