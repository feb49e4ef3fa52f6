"""Reader of Megatron-Core checkpoints in the format `torch_dist`: names and layouts of the stored tensors.

The tensors are unsharded and have names. The layers are stacked along a leading dimension, or each layer has its own tensors. The
weight of a gated MLP is one tensor [2f, h], gate first, or two tensors [f, h] (f: FFN hidden size, h: hidden size).

The optimizer state of a parameter is named `optimizer.state.<type>.<parameter>`. Two other ways to save the optimizer state
(sharding types) exist. With `fully_sharded_model_space` each tensor is divided along a grid into cells of equal shape, and each
cell is flattened. With `dp_reshardable` the checkpoint contains flat buffers without parameter names (see `dist_buffers.py`).
"""

from __future__ import annotations

import functools
import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, format_list
from megatron.checkpoint.global_tensor import WEIGHT
from megatron.config.regular_file import parse_json, read_regular
from megatron.parallel.params import ParamRecord
from megatron.parallel.tensor_slice import TensorSlice
from megatron.spec.weights import split_layer_name
from megatron_lab.foreign.dist_buffers import FlatOptimizerState, find_flat_state
from megatron_lab.foreign.distcp_files import METADATA, DistcpReader
from megatron_lab.foreign.legacy_files import LATEST, find_iteration_folder
from megatron_lab.foreign.megatron_source import (
    EMBEDDING_KEY,
    MOMENTS,
    NON_PARAM_SUFFIXES,
    WEIGHTS_ONLY_HINT,
    MegatronSource,
    SavedRun,
    get_megatron_keys,
    get_megatron_shape,
    parse_saved_run,
)
from megatron_lab.foreign.source import TensorInfo
from megatron_lab.foreign.torch_file import TorchFile

FORMAT_FILE, COMMON_FILE = "metadata.json", "common.pt"
_STATE_PREFIX = "optimizer.state."
_MAIN_PARAM_NAMES = ("param", "fp32_param")
"""Names of the main parameters in the optimizer state of newer and of older versions."""
_NAMED_SHARDING_TYPES = (None, "fully_reshardable", "fully_sharded_model_space")
"""Sharding types whose state tensors have parameter names. None: the optimizer is not sharded."""
_HALF_SUFFIXES = ("_w", "_v")
"""Suffixes of the two tensors of a gated MLP weight: gate and up projection."""


def find_dist_folder(path: Path) -> Path | None:
    """Return the folder with the files of a `torch_dist` checkpoint; None if there is no such checkpoint.

    Args:
        path: a --save folder, of which the latest iteration is selected, or the folder of one iteration.
    """
    return find_iteration_folder(path, lambda folder: (folder / FORMAT_FILE).is_file())


class _ParamLocation(NamedTuple):
    """Location of a parameter in the checkpoint: the names of its stored tensors, and its position in these tensors.

    Args:
        keys: names of the stored tensors that hold the weight. Two names if the halves of a gated MLP weight are stored separately.
            The names of the parameter's optimizer state are the same after a prefix.
        layer_row: index of the parameter's layer along the leading dimension if the layers are stacked in one tensor; otherwise
            None.
    """

    keys: tuple[str, ...]
    layer_row: int | None


class DistCheckpoint(MegatronSource):
    """A `WeightSource` that reads Megatron-Core's checkpoint format `torch_dist`.

    Reading a parameter needs memory for the parameter and for one stored chunk (region) of its tensor.

    Args:
        path: a --save folder (its latest checkpoint is read), or one of its iter_ or release folders.
        vocab_size: vocabulary size without padding. None: the size that the checkpoint records, which it does only for
            NullTokenizer. If it records none, the padding rows count as part of the vocabulary, and a note says so.

    Raises:
        CheckpointError: there is no checkpoint, its format or model is not supported, it has missing or unexpected tensors, or a
            file contains an unsafe type.
        DamagedCheckpointError: files are missing or cannot be read.
    """

    def __init__(self, path: Path | str, vocab_size: int | None = None) -> None:
        if "://" in str(path):
            raise CheckpointError(
                f"{path}: checkpoints of Megatron-Core can be read only from a local disk. Copy the checkpoint to a local disk."
            )
        folder = find_dist_folder(Path(path))
        if folder is None:
            raise CheckpointError(
                f"{path} holds no torch_dist checkpoint: it has neither {FORMAT_FILE} nor a {LATEST} that names an iteration.\n"
                "  Choose a --save folder of Megatron-Core, or one of the iter_ folders in it."
            )
        self.folder = folder
        _check_format(folder / FORMAT_FILE)
        self._common = TorchFile(folder / COMMON_FILE).content
        args = self._common.get("args") if isinstance(self._common, dict) else None
        if not isinstance(args, Namespace):
            raise CheckpointError(
                f"{folder / COMMON_FILE} holds no args (the arguments of the run), so the sizes of the model are not known. "
                "Load the checkpoint with Megatron-LM and save it again to store them."
            )
        super().__init__(str(path), args, str(folder / COMMON_FILE))
        self._reader = DistcpReader(folder)
        if EMBEDDING_KEY not in self._reader.tensors:
            raise CheckpointError(
                f"{folder / METADATA} lists no word embedding ({EMBEDDING_KEY}), so this is not a checkpoint of a supported model. "
                f"Choose a checkpoint of a GPT model. The file lists: {format_list(sorted(self._reader.tensors))}"
            )
        tp_size = vars(args).get("tensor_model_parallel_size")
        self._set_vocab_size(
            self._reader.tensors[EMBEDDING_KEY].shape[0],
            tp_size if isinstance(tp_size, int) and tp_size > 0 else 1,
            vocab_size,
        )
        self._locations = {name: self._locate(record) for name, record in self._records.items()}
        self._check_all_tensors_read()
        self.notes += self._describe_ignored()

    @functools.cached_property
    def weights(self) -> Mapping[str, TensorInfo]:
        return {name: self._get_tensor_info("", name) for name in self._records}

    def read(self, name: str, tensor_slice: TensorSlice | None = None) -> torch.Tensor:
        """Read a parameter, or a slice of it, into a new contiguous CPU tensor in its stored dtype.

        Raises:
            DamagedCheckpointError: a file is damaged.
        """
        return self._read_tensor("", name, tensor_slice or TensorSlice.full(self._records[name].shape))

    # Training state

    @functools.cached_property
    def _sharding_type(self) -> str | None:
        """Name of the format in which Megatron-Core divided the saved optimizer state among tensors, for example `dp_reshardable`;
        None if the optimizer was not distributed over the data-parallel ranks."""
        optimizer, content = self._common.get("optimizer"), self._common.get("content_metadata")
        sharding_type = optimizer.get("param_state_sharding_type") if isinstance(optimizer, dict) else None
        return sharding_type or (content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None)

    @functools.cached_property
    def saved_run(self) -> SavedRun | None:
        common, path = self._common, str(self.folder / COMMON_FILE)
        if common.get("optimizer") is None and not any(name.startswith("optimizer.") for name in self._reader.tensors):
            return None
        if self._sharding_type == "dp_reshardable":
            run = parse_saved_run(common, self._flat_state.optimizer, path)
        elif self._sharding_type in _NAMED_SHARDING_TYPES:
            run = parse_saved_run(common, common.get("optimizer"), path)
            self._check_state_complete()
        else:
            raise CheckpointError(
                f"{self.folder}: the optimizer state of the checkpoint was saved in the form {self._sharding_type}, which is not "
                "supported. Load the checkpoint with Megatron-LM and save it again with --dist-ckpt-optim-fully-reshardable, "
                f"which stores the state of every parameter by name. {WEIGHTS_ONLY_HINT}"
            )
        return run

    @functools.cached_property
    def _flat_state(self) -> FlatOptimizerState:
        return find_flat_state(self._reader, self.args, self._records, self.read, self._padded_vocab_size)

    def _get_state_info(self, state_type: str, name: str) -> TensorInfo | None:
        if self._sharding_type == "dp_reshardable":
            return TensorInfo(self._records[name].shape, self._flat_state.get_dtype(state_type))
        prefix = self._find_state_prefix(state_type)
        return None if prefix is None else self._get_tensor_info(prefix, name)

    def _read_state(self, state_type: str, name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        if self._sharding_type == "dp_reshardable":
            return self._flat_state.read(state_type, self._records[name], tensor_slice)
        prefix = self._find_state_prefix(state_type)
        assert prefix is not None, "the checkpoint has this state"
        return self._read_tensor(prefix, name, tensor_slice)

    def _find_state_prefix(self, state_type: str) -> str | None:
        """Return the start of the stored tensor names of main parameters or of a moment, such as `optimizer.state.exp_avg.`; None
        if the checkpoint has no tensors of this type.

        Args:
            state_type: `WEIGHT` for the main parameters, or the name of a moment.
        """
        prefixes = [f"{_STATE_PREFIX}{name}." for name in (_MAIN_PARAM_NAMES if state_type == WEIGHT else (state_type,))]
        return next((prefix for prefix in prefixes if f"{prefix}{EMBEDDING_KEY}" in self._reader.tensors), None)

    def _check_state_complete(self) -> None:
        """Check that the checkpoint has optimizer state for every parameter, and no other optimizer state.

        Raises:
            CheckpointError: tensors of optimizer state are missing or unexpected.
        """
        prefixes = [prefix for state_type in (WEIGHT, *MOMENTS) if (prefix := self._find_state_prefix(state_type)) is not None]
        expected = {f"{prefix}{key}" for prefix in prefixes for location in self._locations.values() for key in location.keys}
        actual = {name for name in self._reader.tensors if name.startswith("optimizer.")}
        if len(prefixes) < len(MOMENTS) or expected != actual:
            differences = sorted(expected ^ actual) or [f"{_STATE_PREFIX}{'* and '.join(MOMENTS)}*"]
            raise CheckpointError(
                f"{self.folder}: the optimizer state of the checkpoint is not that of Adam for the parameters of this model. "
                f"Missing or unexpected tensors: {format_list(differences)}. {WEIGHTS_ONLY_HINT}"
            )

    # Locations of parameters

    def _locate(self, record: ParamRecord) -> _ParamLocation:
        """Find the stored tensors that hold a parameter. The layers may be stacked in one tensor, and the halves of a gated MLP
        weight may be separate tensors.

        Raises:
            CheckpointError: the checkpoint has no tensor for the parameter, or the tensor has the wrong shape.
        """
        layer, _ = split_layer_name(record.name)
        tensors = self._reader.tensors
        for unstacked in get_megatron_keys(record.name, 0):
            stacked = unstacked if layer is None else unstacked.replace(f"decoder.layers.{layer}.", "decoder.layers.", 1)
            for key, layer_row in ((unstacked, None), (stacked, layer)):
                if key in tensors:
                    return self._check_shape(record, _ParamLocation((key,), layer_row))
                halves = tuple(f"{key}{suffix}" for suffix in _HALF_SUFFIXES)
                if all(half in tensors for half in halves):
                    return self._check_shape(record, _ParamLocation(halves, layer_row))
        raise CheckpointError(
            f"{self.folder} lacks the parameter {record.name}: no tensor has the name "
            f"{' or '.join(get_megatron_keys(record.name, 0))}. The checkpoint is incomplete (copy it again), or has a model that "
            "is not supported (choose a checkpoint of another model)"
        )

    def _check_shape(self, record: ParamRecord, location: _ParamLocation) -> _ParamLocation:
        """Check that the stored tensors that hold a parameter have the shapes that the model requires. Return `location` unchanged.

        Args:
            record: properties of the parameter.
            location: names of the stored tensors, and the position of the parameter in them.

        Raises:
            CheckpointError: a shape does not match the model.
        """
        expected = self._get_stored_shape(record, location)
        for key in location.keys:
            if (shape := self._reader.tensors[key].shape) != expected:
                raise CheckpointError(
                    f"{self.folder}: the tensor {key} has the shape {list(shape)}, but according to the arguments of the run (args "
                    f"in {COMMON_FILE}) the shape should be {list(expected)}. The checkpoint was altered (copy it again), or its "
                    "model is not supported (choose another checkpoint)"
                )
        return location

    def _get_stored_shape(self, record: ParamRecord, location: _ParamLocation) -> tuple[int, ...]:
        """Return the shape that each stored tensor of a parameter must have. Stacked layers add a leading dimension."""
        shape = list(record.shape)
        for split in record.splits:
            if split.padded_size is not None:
                shape[split.dim] = self._padded_vocab_size
        stored_shape = get_megatron_shape(record, shape)
        stored_shape[0] //= len(location.keys)
        return (*(() if location.layer_row is None else (self.model.num_layers,)), *stored_shape)

    def _get_tensor_info(self, prefix: str, name: str) -> TensorInfo:
        return TensorInfo(self._records[name].shape, self._reader.tensors[prefix + self._locations[name].keys[0]].dtype)

    def _read_tensor(self, prefix: str, name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        """Read a slice of a parameter, or of its main parameter or moment.

        Args:
            prefix: start of the stored tensor name: empty for the weight, `optimizer.state.<type>.` for optimizer state.
            name: name of the parameter.
            tensor_slice: region of the parameter.
        """
        record, location = self._records[name], self._locations[name]
        shape, full_shape = record.shape, self._get_stored_shape(record, location)
        is_gated = len(shape) > len(get_megatron_shape(record, [*shape]))
        result = torch.empty(tensor_slice.sizes, dtype=self._reader.tensors[prefix + location.keys[0]].dtype)
        for target, half, stored_slice in _split_halves(result, tensor_slice) if is_gated else [(result, 0, tensor_slice)]:
            key = location.keys[half if len(location.keys) > 1 else 0]
            row_offset = half * shape[1] if is_gated and len(location.keys) == 1 else 0
            stored_slice = TensorSlice((stored_slice.offsets[0] + row_offset, *stored_slice.offsets[1:]), stored_slice.sizes)
            if location.layer_row is not None:
                stored_slice = TensorSlice((location.layer_row, *stored_slice.offsets), (1, *stored_slice.sizes))
            target.copy_(self._read_grid(prefix + key, full_shape, stored_slice).view(target.shape))
        return result

    def _read_grid(self, key: str, shape: tuple[int, ...], tensor_slice: TensorSlice) -> torch.Tensor:
        """Read a slice of a stored tensor, which may be divided along a grid into cells: blocks of equal shape, each stored
        flattened.

        A tensor that is stored as a grid has the shape [number of cells along dimension 0, number of cells along dimension 1, ...,
        elements of a cell].

        Args:
            key: name of the stored tensor.
            shape: shape of the tensor without the grid.
            tensor_slice: region to read, in the tensor without the grid.

        Raises:
            CheckpointError: the stored shape is neither `shape` nor a grid of cells that divide `shape`.
        """
        stored_shape = self._reader.tensors[key].shape
        if stored_shape == shape:
            return self._reader.read(key, tensor_slice)
        grid, numel = stored_shape[:-1], stored_shape[-1] if stored_shape else 0
        is_divisible = len(grid) == len(shape) and all(count and size % count == 0 for size, count in zip(shape, grid, strict=True))
        cell_shape = tuple(size // count for size, count in zip(shape, grid, strict=True)) if is_divisible else ()
        if not is_divisible or math.prod(cell_shape) != numel:
            raise CheckpointError(
                f"{self.folder}: the stored tensor {key} has the shape {list(stored_shape)}. It must have the shape {list(shape)} "
                "of its parameter, or be divided into a grid of cells: the number of cells along each dimension, then the "
                "elements per cell. The checkpoint was altered (copy it again), or written by an unsupported version of "
                "Megatron-Core (save it again with another version)"
            )
        result = torch.empty(tensor_slice.sizes, dtype=self._reader.tensors[key].dtype)
        for cell in _iter_cells(tensor_slice, cell_shape):
            cell_slice = TensorSlice(tuple(index * size for index, size in zip(cell, cell_shape, strict=True)), cell_shape)
            overlap = cell_slice.intersect(tensor_slice)
            assert overlap is not None, "the cell overlaps the slice"
            flat = self._reader.read(key, TensorSlice((*cell, 0), (*(1 for _ in cell), numel)))
            result[overlap.relative_to(tensor_slice).index] = flat.view(cell_shape)[overlap.relative_to(cell_slice).index]
        return result

    # Other content

    def _check_all_tensors_read(self) -> None:
        """Check that the checkpoint contains no tensor that the model does not have.

        Raises:
            CheckpointError: there are such tensors.
        """
        used = {key for location in self._locations.values() for key in location.keys}
        unread = [
            name
            for name in self._reader.tensors
            if name not in used and not name.startswith("optimizer.") and not name.endswith(NON_PARAM_SUFFIXES)
        ]
        if unread:
            raise CheckpointError(
                f"{self.folder} holds tensors that the model does not have, according to the arguments of the run (args in "
                f"{COMMON_FILE}): {format_list(sorted(unread))}. Models with these tensors are not supported: choose a checkpoint "
                "of another model"
            )

    def _describe_ignored(self) -> Iterator[str]:
        """Yield notes for the user about content of the checkpoint that is not read."""
        read_keys = {"args", "checkpoint_version", "iteration", "optimizer", "opt_param_scheduler", "content_metadata"}
        objects = {name.partition("/")[0] for name in self._reader.objects if not name.startswith("optimizer.")}
        non_params = {name for name in objects if name.endswith(NON_PARAM_SUFFIXES)}
        if ignored_keys := sorted({*map(str, self._common), *objects} - read_keys - non_params):
            yield f"Left out: {', '.join(ignored_keys)}."
        if non_params:
            yield f"Left out, since they are not parameters: {len(non_params)} entries {' or '.join(NON_PARAM_SUFFIXES)}."


def _split_halves(tensor: torch.Tensor, tensor_slice: TensorSlice) -> Iterator[tuple[torch.Tensor, int, TensorSlice]]:
    """Split a tensor that holds a slice of a gated MLP weight [2, f, ...] (f: FFN hidden size) into the halves that the slice
    overlaps.

    Args:
        tensor: tensor with the shape of the slice.
        tensor_slice: region of the parameter that the tensor holds.

    Yields:
        (view of the tensor, index of the half, slice within the half [f, ...]).
    """
    for i in range(tensor_slice.sizes[0]):
        yield tensor[i], tensor_slice.offsets[0] + i, TensorSlice(tensor_slice.offsets[1:], tensor_slice.sizes[1:])


def _iter_cells(tensor_slice: TensorSlice, cell_shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the grid index, one number per dimension, of every cell that a slice of a tensor overlaps. The cells divide the tensor
    into blocks of equal shape.

    Args:
        tensor_slice: region of the tensor.
        cell_shape: shape of a cell.
    """
    if not cell_shape:
        yield ()
        return
    for index in range(
        tensor_slice.offsets[0] // cell_shape[0], -(-(tensor_slice.offsets[0] + tensor_slice.sizes[0]) // cell_shape[0])
    ):
        for inner_indices in _iter_cells(TensorSlice(tensor_slice.offsets[1:], tensor_slice.sizes[1:]), cell_shape[1:]):
            yield index, *inner_indices


def _check_format(path: Path) -> None:
    """Check that metadata.json names the format `torch_dist`, version 1.

    Raises:
        CheckpointError: the file names another format or version.
        DamagedCheckpointError: the file cannot be read.
    """
    try:
        content: Any = parse_json(read_regular(path, 1_000_000))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{path} cannot be read: {error}. Check the permissions of the file. If it is damaged, copy the checkpoint again."
        ) from error
    backend = content.get("sharded_backend") if isinstance(content, dict) else None
    if backend != "torch_dist" or content.get("sharded_backend_version", 1) != 1:
        raise CheckpointError(
            f"{path} names the format {str(backend)[:40]!r}; of Megatron-Core's formats only torch_dist, version 1, is supported.\n"
            "  Load the checkpoint with Megatron-LM, and save it again with --ckpt-format torch_dist."
        )
