"""Reader of optimizer state that Megatron-Core saved with sharding type `dp_reshardable`: the buckets of the flat buffers in which
the distributed optimizer keeps its state.

The buckets contain no parameter names. The parallel sizes of the run determine which parameters a buffer holds, and the model
determines their order. The reader verifies the assumed order: the main parameters must equal the weights after rounding. If no
known order fits, the reader refuses the state.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.global_tensor import WEIGHT
from megatron.parallel.params import ParamRecord
from megatron.parallel.tensor_slice import TensorSlice
from megatron.spec.weights import OUTPUT_WEIGHT, WORD_EMBEDDING, split_layer_name
from megatron_lab.foreign.distcp_files import DistcpReader
from megatron_lab.foreign.flat_buffers import MAIN_PARAM, FlatParam, fill_buckets
from megatron_lab.foreign.megatron_source import MOMENTS, get_megatron_shape

_BUFFER_PREFIX = "optimizer.distributed.dp_group_idx_{rank}."
_BUCKET_KEY = _BUFFER_PREFIX + "gbuf_idx_{chunk}.dtype_{dtype}.bucket_idx_{bucket}.{kind}"
_ATTENTION_MODULES = ("attention.output", "attention.qkv", "attention.q_norm", "attention.k_norm")
_MODULE_ORDERS = (
    ("attention_norm", *_ATTENTION_MODULES, "mlp_norm", "mlp.up", "mlp.down"),
    ("attention.output", "attention_norm", *_ATTENTION_MODULES[1:], "mlp_norm", "mlp.up", "mlp.down"),
)
"""Orders in which a layer of Megatron-Core declares its modules: with separate norms, and with the fused norms of Transformer
Engine."""
_FIRST_MODULES, _LAST_MODULES = ("embedding.word", "embedding.position"), ("final_norm", "output")


@dataclass(frozen=True)
class _BucketShard:
    """Location of a parameter's shard on one tensor-parallel rank: a bucket, and the position in the bucket.

    Args:
        bucket_key: start of the names of the bucket's tensors in the checkpoint. The name of a buffer (`param`, `exp_avg` or
            `exp_avg_sq`) follows.
        offset: offset of the shard in the bucket, in elements.
    """

    bucket_key: str
    offset: int


class FlatOptimizerState:
    """Main parameters and moments of a Megatron-Core checkpoint with sharding type `dp_reshardable`, read from the buckets of its
    flat buffers.

    Args:
        reader: reader of the checkpoint.
        shards: positions of the shards of each parameter, by parameter name. The list of a parameter has one position per
            tensor-parallel rank.
        padded_vocab_size: number of rows of the word embedding, including padding rows.
        optimizer: saved state of the optimizer without its tensors, such as parameter groups and loss scaler.
    """

    def __init__(
        self, reader: DistcpReader, shards: Mapping[str, Sequence[_BucketShard]], padded_vocab_size: int, optimizer: dict[str, Any]
    ) -> None:
        self._reader, self._shards, self._padded_vocab_size, self.optimizer = reader, shards, padded_vocab_size, optimizer

    def get_dtype(self, state_type: str) -> torch.dtype:
        """Return the dtype of the stored main parameters or of a stored moment.

        Args:
            state_type: `WEIGHT` for the main parameters, or the name of a moment, such as `exp_avg`.
        """
        return self._reader.tensors[f"{self._shards[WORD_EMBEDDING][0].bucket_key}{_get_buffer_name(state_type)}"].dtype

    def read(self, state_type: str, record: ParamRecord, tensor_slice: TensorSlice) -> torch.Tensor:
        """Read a slice of a main parameter (`WEIGHT`) or of a moment into a new contiguous tensor.

        Args:
            state_type: `WEIGHT` or the name of the moment, such as `exp_avg`.
            record: parameter to read.
            tensor_slice: region of the parameter.
        """
        result = torch.empty(tensor_slice.sizes, dtype=self.get_dtype(state_type))
        shards = self._shards[record.name] if record.splits else self._shards[record.name][:1]
        shard_shape = compute_local_shape(record, len(shards), self._padded_vocab_size)
        for rank, shard in enumerate(shards):
            offsets = [0] * len(shard_shape)
            for split in record.splits:
                offsets[split.dim] = rank * shard_shape[split.dim]
            shard_slice = TensorSlice(tuple(offsets), tuple(shard_shape))
            if (overlap := shard_slice.intersect(tensor_slice)) is not None:
                flat = self._reader.read(
                    f"{shard.bucket_key}{_get_buffer_name(state_type)}", TensorSlice((shard.offset,), (shard_slice.numel,))
                )
                result[overlap.relative_to(tensor_slice).index] = flat.view(shard_shape)[overlap.relative_to(shard_slice).index]
        return result


def find_flat_state(
    reader: DistcpReader,
    args: Namespace,
    records: Mapping[str, ParamRecord],
    read_weight: Callable[[str], torch.Tensor],
    padded_vocab_size: int,
) -> FlatOptimizerState:
    """Find the position of every parameter's optimizer state in the buckets of the flat buffers.

    The positions follow from the order in which Megatron-Core declares the modules of a layer. The function tries each known order.
    It verifies an order by comparing main parameters with weights, for the first layer and the parameters outside of layers.

    Args:
        reader: reader of the checkpoint.
        args: arguments of the run that saved the checkpoint.
        records: properties of each parameter (shape, tensor-parallel split), by name.
        read_weight: reads a weight by name.
        padded_vocab_size: number of rows of the word embedding, including padding rows.

    Raises:
        CheckpointError: no known order of the parameters fits the buckets.
    """
    problem = "the main parameters differ from the weights. Import only the weights (--weights-only)"
    for module_order in _MODULE_ORDERS:
        try:
            state = FlatOptimizerState(
                reader,
                _locate_shards(reader, args, records, module_order, padded_vocab_size),
                padded_vocab_size,
                _read_optimizer_objects(reader),
            )
        except ValueError as error:
            problem = str(error)
            continue
        sample_records = [record for record in records.values() if split_layer_name(record.name)[0] in (None, 0)]
        if all(_matches_weight(state, record, read_weight(record.name)) for record in sample_records):
            return state
    raise CheckpointError(
        f"{reader.folder}: the optimizer state of the checkpoint is stored in flat buffers without parameter names "
        f"(dp_reshardable), and the position of each parameter cannot be determined: {problem}. To keep the optimizer state, load "
        "the checkpoint with Megatron-LM and save it again with --dist-ckpt-optim-fully-reshardable, which stores the state of "
        "every parameter by name."
    )


def _matches_weight(state: FlatOptimizerState, record: ParamRecord, weight: torch.Tensor) -> bool:
    """Return whether a main parameter, read at its assumed position in the flat buffers and rounded to the dtype of the weight,
    equals the weight. If so, the assumed position is right."""
    return torch.equal(state.read(WEIGHT, record, TensorSlice.full(record.shape)).to(weight.dtype), weight)


def _get_buffer_name(state_type: str) -> str:
    """Return Megatron-Core's name of a buffer: `param` for main parameters (state type `WEIGHT`), otherwise the name of the
    moment."""
    return MAIN_PARAM if state_type == WEIGHT else state_type


def compute_local_shape(record: ParamRecord, tp_size: int, padded_vocab_size: int) -> list[int]:
    """Return the shape of a parameter's shard on each of `tp_size` tensor-parallel ranks. The rows of the vocabulary include
    padding rows.

    Args:
        record: properties of the parameter.
        tp_size: tensor-parallel size.
        padded_vocab_size: number of rows of the word embedding, including padding rows.
    """
    shape = list(record.shape)
    for split in record.splits:
        shape[split.dim] = (padded_vocab_size if split.padded_size is not None else shape[split.dim]) // tp_size
    return shape


def _read_optimizer_objects(reader: DistcpReader) -> dict[str, Any]:
    """Return the optimizer state of the first rank without its tensors, by the keys `optimizer` (parameter groups, step counts) and
    `grad_scaler` (loss scaler). A key that the checkpoint does not have is absent."""
    objects = {}
    for name in reader.objects:
        text_before, _, object_key = name.partition(_BUFFER_PREFIX.format(rank=0))
        if not text_before and object_key and (key := object_key.partition("/")[0]) in ("optimizer", "grad_scaler"):
            content = reader.read_object(name)
            objects[key] = content[0] if isinstance(content, list) and content else content
    return objects


def _locate_shards(
    reader: DistcpReader, args: Namespace, records: Mapping[str, ParamRecord], module_order: Sequence[str], padded_vocab_size: int
) -> dict[str, list[_BucketShard]]:
    """Return where the shards of each parameter are stored in the buckets, by parameter name. The list of a parameter has one
    position per tensor-parallel rank.

    Args:
        reader: reader of the checkpoint.
        args: arguments of the run, with its parallel sizes.
        records: properties of each parameter, by name.
        module_order: names of the modules of a layer, in the order in which Megatron-Core is assumed to declare them.
        padded_vocab_size: number of rows of the word embedding, including padding rows.

    Raises:
        ValueError: parameters in this order do not exactly fill the buckets, or the checkpoint has other buckets than the run
            saves.
    """
    tp_size, pp_size, num_chunks = (
        vars(args).get(f"{axis}_model_parallel_size") or 1 for axis in ("tensor", "pipeline", "virtual_pipeline")
    )
    shards: dict[str, list[_BucketShard]] = {}
    used_keys = set()
    for virtual_stage, names in enumerate(_iter_chunk_params(records, module_order, pp_size * num_chunks)):
        chunk, stage = divmod(virtual_stage, pp_size)
        is_shared = OUTPUT_WEIGHT not in records and pp_size > 1
        params = [
            FlatParam(
                name,
                tuple(get_megatron_shape(records[name], compute_local_shape(records[name], tp_size, padded_vocab_size))),
                has_separate_bucket=is_shared and name == WORD_EMBEDDING,
            )
            for name in names
        ]
        if is_shared and virtual_stage == pp_size * num_chunks - 1:  # replica of the embedding that the output layer uses
            embedding_shape = compute_local_shape(records[WORD_EMBEDDING], tp_size, padded_vocab_size)
            params.append(replace(FlatParam(OUTPUT_WEIGHT, tuple(embedding_shape)), has_separate_bucket=True))
        for tp_rank in range(tp_size):
            bucket_keys = list(_iter_bucket_keys(reader, stage * tp_size + tp_rank, chunk))
            used_keys |= {f"{bucket_key}{buffer_name}" for bucket_key in bucket_keys for buffer_name in (MAIN_PARAM, *MOMENTS)}
            numels = [reader.tensors[f"{key}{MAIN_PARAM}"].shape[0] for key in bucket_keys]
            for key, filled_bucket in zip(bucket_keys, fill_buckets(params, numels), strict=True):
                for name, offset in filled_bucket.offsets.items():
                    shards.setdefault(name, []).append(_BucketShard(key, offset))
    if unexpected := {name for name in reader.tensors if name.startswith("optimizer.")} ^ used_keys:
        raise ValueError(
            f"{len(unexpected)} tensors of optimizer state are missing or unexpected for the parallel sizes of the run, such as "
            f"{sorted(unexpected)[0]}: the checkpoint is incomplete, or was written with other parallel sizes. Copy it again, or "
            "import only the weights (--weights-only)"
        )
    return shards


def _iter_bucket_keys(reader: DistcpReader, mp_rank: int, chunk: int) -> Iterator[str]:
    """Yield the key prefix of each bucket of a rank's flat buffer for one model chunk. The prefix followed by `param`, `exp_avg` or
    `exp_avg_sq` is the name of a tensor in the checkpoint.

    Args:
        reader: reader of the checkpoint.
        mp_rank: model-parallel rank: pipeline stage * tensor-parallel size + tensor-parallel rank.
        chunk: index of the model chunk on the stage.

    Raises:
        ValueError: the rank does not have exactly one buffer for the chunk.
    """
    prefix = _BUFFER_PREFIX.format(rank=mp_rank) + f"gbuf_idx_{chunk}.dtype_"
    dtypes = {name[len(prefix) :].partition(".bucket_idx_")[0] for name in reader.tensors if name.startswith(prefix)}
    if len(dtypes) != 1:
        raise ValueError(
            f"the optimizer state of model-parallel rank {mp_rank} has {len(dtypes)} flat buffers for model chunk {chunk}, but "
            "exactly one must exist (one dtype for all parameters). Import only the weights (--weights-only)"
        )
    (dtype,) = dtypes
    bucket_index = 0
    while True:
        name = _BUCKET_KEY.format(rank=mp_rank, chunk=chunk, dtype=dtype, bucket=bucket_index, kind="")
        if f"{name}{MAIN_PARAM}" not in reader.tensors:
            return
        yield name
        bucket_index += 1


def _iter_chunk_params(records: Mapping[str, ParamRecord], module_order: Sequence[str], num_chunks: int) -> Iterator[list[str]]:
    """Yield the parameter names of each model chunk, in the order in which Megatron-Core declares them. All chunks have the same
    number of layers.

    Args:
        records: properties of each parameter, by name.
        module_order: names of the modules of a layer, in declaration order.
        num_chunks: number of model chunks of all pipeline stages together.

    Raises:
        ValueError: the number of layers is not a multiple of the number of chunks.
    """
    num_layers = 1 + max(layer for name in records if (layer := split_layer_name(name)[0]) is not None)
    if num_layers % num_chunks:
        raise ValueError(
            f"the number of layers ({num_layers}) is not a multiple of the number of model chunks ({num_chunks}), so the model "
            "chunks have different numbers of layers, which is not supported. Import only the weights (--weights-only)"
        )
    layers_per_chunk = num_layers // num_chunks

    def select_params(modules: Sequence[str], prefix: str = "") -> list[str]:
        candidates = (f"{prefix}{module}.{suffix}" for module in modules for suffix in ("weight", "bias"))
        return [name for name in candidates if name in records]

    for chunk_index in range(num_chunks):
        layer_params = [
            name
            for layer in range(chunk_index * layers_per_chunk, (chunk_index + 1) * layers_per_chunk)
            for name in select_params(module_order, f"layers.{layer}.")
        ]
        yield [
            *(select_params(_FIRST_MODULES) if chunk_index == 0 else []),
            *layer_params,
            *(select_params(_LAST_MODULES) if chunk_index == num_chunks - 1 else []),
        ]
