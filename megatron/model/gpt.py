"""A GPT, whole or one pipeline chunk of it. It reads like a model for one process; parallelism enters by the layer classes.

Shapes: `s` sequence, `b` microbatch, `h` hidden, `v` vocabulary, `n` tensor ranks. Hidden states between layers are [s, b, h],
under sequence parallelism [s/n, b, h].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron.config.imports import named
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.model.block import Block, Treatment, dropout, treatments
from megatron.model.inputs import ModelInputs
from megatron.model.rope import rotary_table
from megatron.parallel.collectives import own_part
from megatron.parallel.params import Scope
from megatron.pipeline_parallel.partition import Chunk
from megatron.spec.layers import layers, norm_of
from megatron.spec.rotary import RotarySpec
from megatron.spec.segments import Segment
from megatron.spec.weights import score_row
from megatron.tensor_parallel.cross_entropy import LossForm, OutputLayer
from megatron.tensor_parallel.layers import Norm, VocabParallelEmbedding, lookup

if TYPE_CHECKING:
    from megatron.attention.largest import LargestScores
    from megatron.model.multi_token import MultiTokenPrediction
    from megatron.moe.balance import Balance


class Embedding(nn.Module):
    """Maps tokens to vectors, scaled, with learned positions added, and normalised where the model says so."""

    def __init__(self, scope: Scope, config: ModelConfig) -> None:
        super().__init__()
        self.group, self.split, self.probability = scope.tp, scope.sequence_parallel, config.hidden_dropout
        self.word = VocabParallelEmbedding(scope.child("word"))
        learned = config.position_embedding_type == "learned_absolute"
        self.position = PositionTable(scope.child("position")) if learned else None
        self.multiplier = config.embedding_multiplier
        self.norm = Norm(scope.child("norm"), norm_of(config), config.hidden_size) if config.embedding_layernorm else None

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Map tokens and positions [s, b] to hidden states [s, b, h] (or [s/n, b, h])."""
        assert inputs.tokens is not None
        x = self.word(inputs.tokens)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        if self.position is not None:
            x = x + self.position(own_part(inputs.positions, self.group) if self.split else inputs.positions)
        if self.norm is not None:
            x = self.norm(x)
        key, rank = inputs.dropout_key, self.group.index if self.split else 0
        seeds = None if key is None or self.probability == 0.0 else [key.site(0, "embedding", rank)]
        return dropout(x, self.probability, seeds)


class PositionTable(nn.Module):
    """Learned absolute positions."""

    weight: nn.Parameter

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        scope.parameter(self, "weight")

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Look up positions [s, b]: [s, b, h]."""
        return lookup(positions, self.weight)


@dataclass(frozen=True)
class _Run:
    """The layers of one segment."""

    blocks: list[nn.Module]
    rotaries: list[RotarySpec | None]
    treatment: Treatment

    def __call__(
        self, tables: Mapping[RotarySpec | None, torch.Tensor | None], inputs: ModelInputs, x: torch.Tensor, *, again: bool = False
    ) -> torch.Tensor:
        """Run the layers; `again` past their hooks, which acted in the first forward."""
        for block, rotary in zip(self.blocks, self.rotaries, strict=True):
            run = block.forward if again else block
            x = run(x, tables[rotary], inputs.dropout_key, inputs.documents, inputs.cache)
        return x


class GPTChunk(nn.Module):
    """The layers of one pipeline chunk; the first has the embedding before them, the last norm, output layer and loss after
    them."""

    def __init__(
        self,
        scope: Scope,
        config: ModelConfig,
        chunk: Chunk,
        only: Sequence[Segment] | None = None,
        *,
        loss: LossForm = LossForm(),  # noqa: B008 (frozen)
        precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 (frozen)
    ) -> None:
        """Build the chunk on the meta device.

        Args:
            precision: which layers compute in 8 bits.
            loss: how the last chunk computes its loss.
            only: the chunk's segments that are built; by default all. (A plan builds one for several equal ones, and all depths.)
        """
        super().__init__()
        specs = layers(config)
        every = chunk.segments if only is None else only
        treated = treatments(every)
        segments = [segment for segment in every if segment.layers.start < config.num_layers]
        numbers = [layer for segment in segments for layer in segment.layers]
        self.residual_dtype = residual_dtype(config, scope.dtype)
        self.embedding = Embedding(scope.child("embedding"), config) if chunk.first else None
        self.blocks = [
            Block(
                replace(scope.child(f"layers.{layer}"), fp8=precision.fp8_of(layer, config.num_layers)),
                config,
                specs[layer],
                layer,
                segment.selective,
            )
            for segment in segments
            for layer in segment.layers
        ]
        self.layers = nn.ModuleList(self.blocks)
        blocks = dict(zip(numbers, self.layers, strict=True))
        self._runs = [
            _Run(
                [blocks[layer] for layer in segment.layers],
                [specs[layer].attention.rotary for layer in segment.layers],
                treatment,
            )
            for segment, treatment in zip(segments, treated, strict=False)
        ]
        self._rotaries = dict.fromkeys(rotary for run in self._runs for rotary in run.rotaries)
        self.final_norm = Norm(scope.child("final_norm"), norm_of(config), config.hidden_size) if chunk.last else None
        self.output = OutputLayer(scope.child("output"), config, loss) if chunk.last else None
        self.mtp: MultiTokenPrediction | None = None
        if self.final_norm is not None and self.output is not None and chunk.depths:
            scope = replace(scope, fp8=precision.fp8_of(config.num_layers - 1, config.num_layers))
            of_depths = [*zip(every, treated, strict=True)][len(segments) :]
            prediction = named("megatron.model.multi_token:MultiTokenPrediction")
            self.mtp = prediction(scope, config, self.final_norm, self.output, of_depths)

    @property
    def recomputed(self) -> list[list[nn.Module]]:
        """Layers that run again together in backward, in the order of the forward; the last of these groups ahead of it."""
        depths = [] if self.mtp is None else [[depth] for depth in self.mtp.recomputed]
        return [*(run.blocks for run in self._runs if run.treatment.recomputed), *depths]

    @property
    def all_blocks(self) -> list[Block]:
        """The layers, those of multi-token prediction too."""
        return [*self.blocks, *([] if self.mtp is None else self.mtp.blocks)]

    def units(self) -> list[nn.Module]:
        """The modules that hold parameters, in the order of the forward. Sharded, each is gathered and freed as a whole.

        Multi-token prediction, with final norm and output layer, encloses its depths: what they all use is gathered once. A layer
        encloses its experts, which other ranks share.
        """
        found: list[nn.Module | None] = [self.embedding, *_with_experts(self.layers)]
        found += [self.final_norm, self.output] if self.mtp is None else [self.mtp, *_with_experts(self.mtp.depths)]
        return [module for module in found if module is not None]

    def watch_routers(self, balance: Balance) -> None:
        """Let the routers of its layers give their choices."""
        for block in self.all_blocks:
            if block.has_experts:
                block.mlp.router.balance = balance  # type: ignore[union-attr]

    def watch_scores(self, largest: LargestScores) -> None:
        """Let the attention of each layer give its largest scores."""
        from megatron.attention.largest import LayerScores

        for block in self.blocks:
            block.attention.largest = LayerScores(largest, score_row(f"layers.{block.layer}"))
        for k, block in enumerate([] if self.mtp is None else self.mtp.blocks):
            block.attention.largest = LayerScores(largest, score_row(f"mtp.{k}.layer"), beyond=k)

    def forward(self, inputs: ModelInputs, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Run the chunk.

        Args:
            inputs: the microbatch.
            hidden: output of the chunk before; None on the first.

        Returns:
            hidden states, or on the last chunk the sum over tokens of mask x loss, a scalar in float32 or wider (with a z-loss two
            sums, with multi-token prediction three, whose sum is what is minimised).
        """
        x = self.hidden_states(inputs, hidden)
        if self.final_norm is None or self.output is None:
            return x
        if self.mtp is not None:
            sums: torch.Tensor = self.mtp(x, inputs)
            return sums
        assert inputs.labels is not None and inputs.loss_mask is not None
        return self.output(self.final_norm(x), inputs.labels, inputs.loss_mask)

    def hidden_states(self, inputs: ModelInputs, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states after the chunk's last layer: what `forward` returns where the chunk is not the last."""
        x = hidden if self.embedding is None else self.embedding(inputs).to(self.residual_dtype)
        assert x is not None, "a chunk that is not the first needs hidden states"
        if torch.is_grad_enabled() and not x.requires_grad:
            x.requires_grad_()  # of a frozen embedding: backward goes through all layers, as without LoRA
        dtype = self.residual_dtype
        tables = {
            rotary: None if rotary is None else rotary_table(inputs.positions, rotary, dtype, inputs.length)
            for rotary in self._rotaries
        }
        shared = [table for table in tables.values() if table is not None]
        for run in self._runs:
            x = run.treatment.run(partial(run, tables, inputs), x, modules=run.blocks, shared=shared)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """On the last chunk, map hidden states [s, b, h] (or [s/n, b, h]) to logits [s, b, v], without padding."""
        assert self.final_norm is not None and self.output is not None
        return self.output.logits(self.final_norm(x))


def _with_experts(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Each of these, and behind it the experts in it."""
    for module in modules:
        yield module
        yield from (inside for inside in module.modules() if getattr(inside, "holds_experts", False))


def residual_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Dtype of the residual stream, and so of the activations sent between pipeline stages."""
    return torch.promote_types(dtype, torch.float32) if config.fp32_residual_connection else dtype
