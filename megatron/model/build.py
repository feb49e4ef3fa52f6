"""Model of one rank: builds its model chunks and a table of all their parameters, and draws initial values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron.config.config import Config
from megatron.config.imports import import_object
from megatron.config.model import ModelConfig
from megatron.config.parallel import CpCommType, ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.model.gpt import GPTChunk, get_residual_dtype
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord, ParamTable, Scope, materialize
from megatron.parallel.random import compute_stable_seed
from megatron.parallel.tensor_slice import BufferSlice, FlatRange, TensorSlice
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.p2p import Boundary, TensorSpec
from megatron.pipeline_parallel.partition import Chunk, add_mtp_depths, build_layer_table, partition_layers
from megatron.spec.layers import resolve_cp_comm_types
from megatron.spec.operations import assign_chunks_round_robin
from megatron.spec.schedules import SCHEDULES
from megatron.spec.weights import iter_weights
from megatron.tensor_parallel.cross_entropy import LossOptions

if TYPE_CHECKING:
    from megatron.attention.max_logits import MaxLogitTracker
    from megatron.model.compiled import BlockCompiler
    from megatron.moe.balance import RouterTracker
    from megatron.parallel.overlap import Overlap


# ---- Initial values as a function of (seed, global parameter name, tile), so that they do not depend on the layout.
#
# A parameter is viewed as a matrix, whose columns are its last dimension, and divided into tiles of rows x columns. The values of
# each tile are drawn on the CPU in float32 from a generator of the tile's own. A rank draws the tiles that overlap its slice of the
# parameter and keeps the rows and columns of the slice. So one rank and a thousand ranks start from the same weights.

_TILE_ELEMENTS = 1 << 16
_MAX_TILE_COLUMNS = 1 << 10


def compute_tile_size(record: ParamRecord) -> tuple[int, int]:
    """Return (rows, columns) of the tiles into which a parameter is divided to draw initial values. Tiles at the lower and right
    edge may be smaller."""
    columns = min(record.shape[-1], _MAX_TILE_COLUMNS)
    return max(1, _TILE_ELEMENTS // columns), columns


def draw_tile_values(record: ParamRecord, seed: int, tile_row: int, tile_column: int) -> np.ndarray:
    """Draw the initial values of one tile of the full parameter: float32 [rows, columns].

    Args:
        tile_row, tile_column: index of the tile in the grid of tiles.
    """
    rows, columns = compute_tile_size(record)
    height = min(rows, math.prod(record.shape[:-1]) - tile_row * rows)
    width = min(columns, record.shape[-1] - tile_column * columns)
    tile_index = tile_row * -(-record.shape[-1] // columns) + tile_column
    generator = np.random.Generator(np.random.Philox(compute_stable_seed(seed, record.name, tile_index)))
    values = generator.standard_normal((height, width), dtype=np.float32)
    values *= np.float32(record.init.std)
    return values


def fill(flat: torch.Tensor, record: ParamRecord, slices: Sequence[BufferSlice], seed: int) -> None:
    """Fill a flat buffer that holds slices of a parameter with the parameter's initial values. Elements outside of the slices
    become 0.

    Args:
        flat: the buffer, of any dtype (values are rounded to it).
        slices: slices of the full parameter and their offsets in `flat`; all other elements are padding.
    """
    with torch.no_grad():
        if record.init.std == 0.0:
            flat.fill_(record.init.constant)
            return
        if sum(buffer_slice.slice.numel for buffer_slice in slices) < flat.numel():
            flat.zero_()
        for buffer_slice in slices:
            _fill_slice(
                flat[buffer_slice.offset : buffer_slice.offset + buffer_slice.slice.numel], record, buffer_slice.slice, seed
            )


def _fill_slice(flat: torch.Tensor, record: ParamRecord, tensor_slice: TensorSlice, seed: int) -> None:
    """Fill the elements of one slice of a parameter with initial values: draw the tiles that overlap the slice, and copy the
    overlap.

    Args:
        flat: memory of the slice.
        tensor_slice: offsets and sizes of the slice in the full parameter.
    """
    rows, columns = compute_tile_size(record)
    # Row indices of the slice in the full matrix. Its rows may have gaps, since a slice can divide any leading dimension.
    target_rows = np.arange(math.prod(record.shape[:-1])).reshape(record.shape[:-1])
    target_rows = target_rows[tensor_slice.index[:-1]].ravel()
    matrix = flat.view(-1, tensor_slice.sizes[-1])
    left, right = tensor_slice.offsets[-1], tensor_slice.offsets[-1] + tensor_slice.sizes[-1]
    tile_rows = target_rows // rows
    ends = [*np.flatnonzero(np.diff(tile_rows)) + 1, len(target_rows)]
    for start, end in zip([0, *ends], ends, strict=False):  # the rows of one tile are consecutive in the slice
        tile_row = int(tile_rows[start])
        rows_in_tile = target_rows[start:end] - tile_row * rows
        for tile_column in range(left // columns, -(-right // columns)):
            first_column = tile_column * columns
            low, high = max(left, first_column), min(right, first_column + columns)
            values = draw_tile_values(record, seed, tile_row, tile_column)[rows_in_tile, low - first_column : high - first_column]
            matrix[start:end, low - left : high - left].copy_(torch.from_numpy(np.ascontiguousarray(values)))


def initialize(param: torch.Tensor, record: ParamRecord, context: ParallelContext, seed: int) -> None:
    """Fill the local slice of a parameter with initial values. Padding becomes 0."""
    fill(param.detach().view(-1), record, record.get_slices(FlatRange(0, param.numel()), context), seed)


@dataclass
class Model:
    """Model chunks of one rank, with their parameters and the settings from which they were built."""

    config: ModelConfig
    dtype: torch.dtype
    vocab_size: int
    layer_table: list[Chunk]
    """All model chunks of all stages, in the order of the forward."""
    chunks: dict[int, GPTChunk]
    """Model chunks of this rank, by chunk index."""
    params: ParamTable
    sequence_parallel: bool
    seed: int
    """Seed of the initial values."""
    loss: LossOptions
    """Options of the loss that the last chunk computes."""
    overlap: Overlap | None = None
    """Overlap of matrix products with the communication of the tensor group; None for no overlap."""
    precision: PrecisionConfig = PrecisionConfig()  # noqa: RUF009 (frozen)
    """Settings that say which layers compute in 8 bits."""
    cp_comm_types: tuple[CpCommType, ...] = ()
    """Context-parallel communication type of each layer; empty without context parallelism."""
    router_tracker: RouterTracker | None = None
    """Collects losses and the number of tokens per expert from the routers in each step; None for a model without experts."""
    uses_allgather_dispatch: bool = False
    """Whether experts receive their tokens by an all-gather of all tokens instead of an all-to-all."""
    logit_tracker: MaxLogitTracker | None = None
    """Collects the largest attention logits of each step; None unless --log-max-attention-logit or --qk-clip requests them."""

    @property
    def computes_loss(self) -> bool:
        """Whether this rank computes the loss, because it holds the last model chunk."""
        return len(self.layer_table) - 1 in self.chunks

    def get_stage_boundary(self, micro_batch_size: int, topology: Topology) -> Boundary:
        """Return the shape and dtype of each tensor that pipeline stages exchange, by name."""
        length = self.config.seq_length // topology.cp // (topology.tp if self.sequence_parallel else 1)
        shape = (length, micro_batch_size, self.config.hidden_size)
        return {"hidden": TensorSpec(shape, get_residual_dtype(self.config, self.dtype))}


def overlaps_tp_communication(parallel: ParallelConfig) -> bool:
    """Return whether matrix products overlap with the collectives of the tensor group (--tp-comm-overlap)."""
    return parallel.tp_comm_overlap and parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1


def get_model_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Return the dtype of parameters and activations from the settings --fp16, --bf16 and --fp64; float32 without them."""
    if precision.fp16:
        return torch.float16
    if precision.bf16:
        return torch.bfloat16
    return torch.float64 if precision.fp64 else torch.float32


def build_model_from_config(
    config: Config,
    context: ParallelContext,
    vocab_size: int,
    dtype: torch.dtype | None = None,
    overlap: Overlap | None = None,
) -> Model:
    """Build this rank's model chunks from the settings of a run, on the meta device. A training step later allocates each rank's
    shards.

    Args:
        vocab_size: rows of the word embedding, without padding.
        dtype: replaces the dtype of the settings.
        overlap: replaces the overlap that --tp-comm-overlap would choose for these ranks.

    Raises:
        ValueError: the layers cannot be divided among the stages.
    """
    return build_model(
        config.model,
        context,
        dtype=get_model_dtype(config.precision) if dtype is None else dtype,
        vocab_size=vocab_size,
        sequence_parallel=config.parallel.sequence_parallel,
        overlap=(overlap or import_object("megatron.parallel.overlap:choose_overlap")(context.group("tp"), context.device))
        if overlaps_tp_communication(config.parallel)
        else None,
        seed=config.training.seed,
        table=build_layer_table(config.model, config.parallel, vocab_size, config.memory),
        should_materialize=False,
        loss=LossOptions.from_config(config.memory, config.training),
        precision=config.precision,
        compiler=_build_compiler(config) if config.speed.compile else None,
        cp_comm_types=resolve_cp_comm_types(config.model, config.parallel.cp_comm_type),
        uses_allgather_dispatch=config.parallel.moe_token_dispatcher_type == "allgather",
        tracks_max_logits=config.logging.log_max_attention_logit or config.optimizer.qk_clip,
    )


def _build_compiler(config: Config) -> BlockCompiler | None:
    defers_weight_grads = SCHEDULES[config.parallel.schedule].splits_backward
    compiler: BlockCompiler | None = import_object("megatron.model.compiled:BlockCompiler").of(
        config.speed, defers_weight_grads=defers_weight_grads
    )
    return compiler


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
    should_materialize: bool = True,
    loss: LossOptions = LossOptions(),  # noqa: B008 (frozen)
    precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 (frozen)
    compiler: BlockCompiler | None = None,
    cp_comm_types: Sequence[CpCommType] = (),
    uses_allgather_dispatch: bool = False,
    tracks_max_logits: bool = False,
) -> Model:
    """Build this rank's model chunks on the meta device, then allocate and initialize their parameters.

    Args:
        vocab_size: rows of the word embedding, without padding.
        seed: seed of the initial values.
        overlap: how matrix products overlap with the collectives of sequence parallelism; None for no overlap.
        table: which stage holds which layers; by default equal numbers of layers per pipeline stage, in one chunk per stage.
        should_materialize: False leaves the parameters on the meta device, for a training step that allocates only shards.
        loss: how the last chunk computes its loss.
        precision: which layers compute in 8 bits. (The argument `dtype` determines the dtype.)
        cp_comm_types: context-parallel communication type of each layer.
        uses_allgather_dispatch: send tokens to experts by all-gather instead of all-to-all.
        compiler: compiles the layers; None to run them eagerly. Layers on the meta device are not compiled, because a dry run
            records their operations.
        tracks_max_logits: record the largest attention logits.
    """
    table = add_mtp_depths(table or partition_layers(config.num_layers, assign_chunks_round_robin(context.topology.pp)), config)
    params = ParamTable()
    sequence_parallel = sequence_parallel and context.topology.tp > 1
    weights = {weight.name: weight for weight in iter_weights(config, vocab_size)}
    scope = Scope(
        *(context, params, weights, dtype, sequence_parallel, overlap),
        cp_comm_types=tuple(cp_comm_types),
        uses_allgather_dispatch=uses_allgather_dispatch,
        lora_scale=config.lora_scale,
        num_chunks=len(table),
    )
    chunks = {
        chunk.index: GPTChunk(replace(scope, chunk=chunk.index), config, chunk, loss=loss, precision=precision)
        for chunk in table
        if chunk.stage == context.group("pp").rank
    }
    if compiler is not None and context.device.type != "meta":
        compiler.compile_blocks([block for module in chunks.values() for block in module.all_blocks], context.device)
    if should_materialize and context.device.type != "meta":
        for module in chunks.values():
            materialize(module, params, context.device)
        for entry in params:
            initialize(entry.param, entry.record, context, seed)
    logit_tracker: MaxLogitTracker | None = None
    if tracks_max_logits:
        logit_tracker = import_object("megatron.attention.max_logits:MaxLogitTracker").of(config, dtype, context.device)
        for module in chunks.values():
            module.track_max_logits(logit_tracker)
    router_tracker: RouterTracker | None = None
    if config.num_experts is not None:
        router_tracker = import_object("megatron.moe.balance:RouterTracker")(config, context.sequence_group, context.device)
        for module in chunks.values():
            module.track_routers(router_tracker)
    return Model(
        *(
            config,
            dtype,
            vocab_size,
            table,
            chunks,
            params,
            sequence_parallel,
            seed,
            loss,
            overlap,
            precision,
            tuple(cp_comm_types),
        ),
        router_tracker=router_tracker,
        uses_allgather_dispatch=uses_allgather_dispatch,
        logit_tracker=logit_tracker,
    )
