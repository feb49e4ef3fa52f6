"""Builds the model of one rank: its chunks, and the table of their parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron.config.config import Config
from megatron.config.imports import named
from megatron.config.model import ModelConfig
from megatron.config.parallel import ContextWay, ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.model.gpt import GPTChunk, residual_dtype
from megatron.parallel.boxes import Box, FlatPiece, PlacedBox
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord, ParamTable, Scope, materialize
from megatron.parallel.random import stable_seed
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.p2p import Boundary, TensorSpec
from megatron.pipeline_parallel.partition import Chunk, layer_table, table_of, with_depths
from megatron.spec.layers import context_ways
from megatron.spec.operations import loop
from megatron.spec.schedules import SCHEDULES
from megatron.spec.weights import model_weights
from megatron.tensor_parallel.cross_entropy import LossForm

if TYPE_CHECKING:
    from megatron.attention.largest import LargestScores
    from megatron.model.compiled import BlockCompiler
    from megatron.moe.balance import Balance
    from megatron.parallel.overlap import Overlap


# ---- Initial values as a function of (seed, global name, tile), so that they do not depend on the layout.
#
# A parameter is seen as a matrix, whose columns are its last dimension, and cut into tiles of rows x columns. Tiles are drawn one
# by one on CPU in float32, each from its own generator. A rank draws the tiles that it needs and keeps its slice, of rows or of
# columns. So one rank and a thousand ranks start from the same weights.

_TILE_ELEMENTS = 1 << 16
_TILE_COLUMNS = 1 << 10


def tile_size(record: ParamRecord) -> tuple[int, int]:
    """(rows, columns) of a parameter's tiles; those at its lower and right edge may be smaller."""
    columns = min(record.shape[-1], _TILE_COLUMNS)
    return max(1, _TILE_ELEMENTS // columns), columns


def tile_values(record: ParamRecord, seed: int, down: int, across: int) -> np.ndarray:
    """The values of one tile of the whole parameter, float32 [rows, columns]. `down` and `across` are its indices."""
    rows, columns = tile_size(record)
    height = min(rows, math.prod(record.shape[:-1]) - down * rows)
    width = min(columns, record.shape[-1] - across * columns)
    number = down * -(-record.shape[-1] // columns) + across
    generator = np.random.Generator(np.random.Philox(stable_seed(seed, record.name, number)))
    values = generator.standard_normal((height, width), dtype=np.float32)
    values *= np.float32(record.init.std)
    return values


def fill(flat: torch.Tensor, record: ParamRecord, boxes: Sequence[PlacedBox], seed: int) -> None:
    """Give a rank's part of a parameter its initial values; padding becomes 0.

    Args:
        flat: the part's elements, of any dtype (values are rounded to it).
        boxes: which boxes of the whole parameter they are, and where each begins in `flat`; the rest is padding.
    """
    with torch.no_grad():
        if record.init.std == 0.0:
            flat.fill_(record.init.constant)
            return
        if sum(placed.box.numel for placed in boxes) < flat.numel():
            flat.zero_()
        for placed in boxes:
            _fill_box(flat[placed.start : placed.start + placed.box.numel], record, placed.box, seed)


def _fill_box(flat: torch.Tensor, record: ParamRecord, box: Box, seed: int) -> None:
    rows, columns = tile_size(record)
    # The box as ranges of rows: all leading dimensions but the last of them are walked one index at a time.
    wanted = np.arange(math.prod(record.shape[:-1])).reshape(record.shape[:-1])
    wanted = wanted[box.index[:-1]].ravel()
    target = flat.view(-1, box.sizes[-1])
    left, right = box.offsets[-1], box.offsets[-1] + box.sizes[-1]
    tiles = wanted // rows
    ends = [*np.flatnonzero(np.diff(tiles)) + 1, len(wanted)]
    for start, end in zip([0, *ends], ends, strict=False):  # rows of one tile are consecutive in the box too
        down = int(tiles[start])
        inside = wanted[start:end] - down * rows
        for across in range(left // columns, -(-right // columns)):
            origin = across * columns
            low, high = max(left, origin), min(right, origin + columns)
            values = tile_values(record, seed, down, across)[inside, low - origin : high - origin]
            target[start:end, low - left : high - left].copy_(torch.from_numpy(np.ascontiguousarray(values)))


def initialize(param: torch.Tensor, record: ParamRecord, context: ParallelContext, seed: int) -> None:
    """Fill this rank's part of a parameter; padding becomes 0."""
    fill(param.detach().view(-1), record, record.boxes(FlatPiece(0, param.numel()), context), seed)


@dataclass
class Model:
    """What one rank holds of the model."""

    config: ModelConfig
    dtype: torch.dtype
    vocab_size: int
    layer_table: list[Chunk]
    """Every chunk of every stage."""
    chunks: dict[int, GPTChunk]
    """The chunks that this rank holds, by index."""
    params: ParamTable
    sequence_parallel: bool
    seed: int
    """Seed of the initial values."""
    loss: LossForm
    """How the last chunk computes its loss."""
    overlap: Overlap | None = None
    """How products overlap with the tensor ranks' communication, if they do."""
    precision: PrecisionConfig = PrecisionConfig()  # noqa: RUF009 (frozen)
    """Which layers compute in 8 bits."""
    context_ways: tuple[ContextWay, ...] = ()
    """How context ranks share keys and values in each layer, where there are several."""
    balance: Balance | None = None
    """What takes the choices of routers, where there are experts."""
    gathers_tokens: bool = False
    """Whether experts get their tokens by allgather."""
    largest: LargestScores | None = None
    """What takes the largest scores of attention, where a run asks for them."""

    @property
    def computes_loss(self) -> bool:
        """Whether this rank holds the last chunk."""
        return len(self.layer_table) - 1 in self.chunks

    def boundary(self, micro_batch_size: int, topology: Topology) -> Boundary:
        """The tensors that travel between stages."""
        length = self.config.seq_length // topology.cp // (topology.tp if self.sequence_parallel else 1)
        shape = (length, micro_batch_size, self.config.hidden_size)
        return {"hidden": TensorSpec(shape, residual_dtype(self.config, self.dtype))}


def overlaps(parallel: ParallelConfig) -> bool:
    """Whether products overlap with communication of tensor ranks."""
    return parallel.tp_comm_overlap and parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1


def model_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Dtype of parameters and activations."""
    if precision.fp16:
        return torch.float16
    if precision.bf16:
        return torch.bfloat16
    return torch.float64 if precision.fp64 else torch.float32


def model_of(
    config: Config,
    context: ParallelContext,
    vocab_size: int,
    dtype: torch.dtype | None = None,
    overlap: Overlap | None = None,
) -> Model:
    """The model of a run on this rank, on the meta device: a training step gives each rank its part of the parameters.

    Args:
        vocab_size: rows of the word embedding, without padding.
        dtype: in place of the one that the settings ask for.
        overlap: the way that --tp-comm-overlap takes, in place of the one that these ranks can take.

    Raises:
        ValueError: the layers cannot be placed on the stages.
    """
    return build_model(
        config.model,
        context,
        dtype=model_dtype(config.precision) if dtype is None else dtype,
        vocab_size=vocab_size,
        sequence_parallel=config.parallel.sequence_parallel,
        overlap=(overlap or named("megatron.parallel.overlap:choose")(context.group("tp"), context.device))
        if overlaps(config.parallel)
        else None,
        seed=config.training.seed,
        table=table_of(config.model, config.parallel, vocab_size, config.memory),
        materialized=False,
        loss=LossForm.of(config.memory, config.training),
        precision=config.precision,
        compiler=_compiler_of(config) if config.speed.compile else None,
        ways=context_ways(config.model, config.parallel.cp_comm_type),
        gathers_tokens=config.parallel.moe_token_dispatcher_type == "allgather",
        watches_scores=config.logging.log_max_attention_logit or config.optimizer.qk_clip,
    )


def _compiler_of(config: Config) -> BlockCompiler | None:
    defers = SCHEDULES[config.parallel.schedule].splits_backward
    found: BlockCompiler | None = named("megatron.model.compiled:BlockCompiler").of(config.speed, defers=defers)
    return found


def build_model(
    config: ModelConfig,
    context: ParallelContext,
    *,
    dtype: torch.dtype,
    vocab_size: int,
    sequence_parallel: bool,
    seed: int,
    overlap: Overlap | None = None,
    table: list[Chunk] | None = None,
    materialized: bool = True,
    loss: LossForm = LossForm(),  # noqa: B008 (frozen)
    precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 (frozen)
    compiler: BlockCompiler | None = None,
    ways: Sequence[ContextWay] = (),
    gathers_tokens: bool = False,
    watches_scores: bool = False,
) -> Model:
    """Build this rank's chunks on the meta device, then give them memory and initial values.

    Args:
        overlap: how products overlap with the collectives of sequence parallelism; None: they take turns.
        table: which stage holds which layers; by default as many layers in each pipeline stage, one chunk a stage.
        materialized: False leaves the parameters on the meta device: a training step then gives each rank its part of them.
        loss: how the last chunk computes its loss.
        precision: which layers compute in 8 bits. (The dtype is that given here.)
        ways: how context ranks share keys and values in each layer, where there are several.
        gathers_tokens: experts get their tokens by allgather, and not by alltoall.
        compiler: compiles the layers, if they are; not on the meta device, on which a plan looks at their operations.
        watches_scores: the largest scores of attention are asked for.
    """
    table = with_depths(table or layer_table(config.num_layers, loop(context.topology.pp)), config)
    params = ParamTable()
    sequence_parallel = sequence_parallel and context.topology.tp > 1
    weights = {weight.name: weight for weight in model_weights(config, vocab_size)}
    scope = Scope(
        *(context, params, weights, dtype, sequence_parallel, overlap),
        context_ways=tuple(ways),
        gathers_tokens=gathers_tokens,
        lora_scale=config.lora_scale,
        num_chunks=len(table),
    )
    chunks = {
        chunk.index: GPTChunk(replace(scope, chunk=chunk.index), config, chunk, loss=loss, precision=precision)
        for chunk in table
        if chunk.stage == context.group("pp").index
    }
    if compiler is not None and context.device.type != "meta":
        compiler.compile([block for module in chunks.values() for block in module.all_blocks], context.device)
    if materialized and context.device.type != "meta":
        for module in chunks.values():
            materialize(module, params, context.device)
        for entry in params:
            initialize(entry.param, entry.record, context, seed)
    largest: LargestScores | None = None
    if watches_scores:
        largest = named("megatron.attention.largest:LargestScores").of(config, dtype, context.device)
        for module in chunks.values():
            module.watch_scores(largest)
    balance: Balance | None = None
    if config.num_experts is not None:
        balance = named("megatron.moe.balance:Balance")(config, context.sequence_group, context.device)
        for module in chunks.values():
            module.watch_routers(balance)
    return Model(
        *(config, dtype, vocab_size, table, chunks, params, sequence_parallel, seed, loss, overlap, precision, tuple(ways)),
        balance=balance,
        gathers_tokens=gathers_tokens,
        largest=largest,
    )
