"""Reads weights and optimizer state from a checkpoint of Megatron-Core in its format `torch_dist`: the names and forms of tensors.

Tensors are those of the whole model, by name. Layers are stacked in a leading dimension, or have names of their own; a gated up
projection is [2f, h], gate above, or two tensors; the optimizer state has the name of its parameter behind
`optimizer.state.<kind>.`. Where it was saved as the ranks hold it, there are two forms more: cut in a grid and flattened
(`fully_sharded_model_space`), or the flat buffers themselves (`dp_reshardable`, see `dist_buffers.py`).
"""

from __future__ import annotations

import functools
import json
import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, listed
from megatron.checkpoint.global_tensor import WEIGHT
from megatron.parallel.boxes import Box
from megatron.parallel.params import ParamRecord
from megatron.spec.weights import in_layer
from megatron_lab.foreign.dist_buffers import FlatState, find_buffers
from megatron_lab.foreign.distcp_files import METADATA, DistcpFiles
from megatron_lab.foreign.legacy_files import LATEST, newest_folder
from megatron_lab.foreign.megatron_source import (
    LEFT_OUT,
    MOMENTS,
    WEIGHTS_ALONE,
    WORD,
    MegatronSource,
    SavedRun,
    saved_run,
    stored_names,
    their_shape,
)
from megatron_lab.foreign.source import TensorInfo
from megatron_lab.foreign.torch_file import TorchFile

ABOUT, COMMON = "metadata.json", "common.pt"
_STATE = "optimizer.state."
_MAINS = ("param", "fp32_param")
"""Names of main parameters, of newer and of older programs."""
_BY_NAME = (None, "fully_reshardable", "fully_sharded_model_space")
"""Forms in which state stands under the name of its parameter; None: an optimizer that is not sharded."""
_HALVES = ("_w", "_v")
"""Ends of the names of gate and up projection where they are two tensors."""


def dist_folder(path: Path) -> Path | None:
    """The folder with the files that a --save folder or an iteration's folder means; None if it is neither."""
    return newest_folder(path, lambda folder: (folder / ABOUT).is_file())


class _ParamPlace(NamedTuple):
    """Where a parameter lies: the names without kind (two for halves), and its row of stacked layers."""

    keys: tuple[str, ...]
    row: int | None


class DistCheckpoint(MegatronSource):
    """A `WeightSource` over the files. A read takes the memory of one tensor and of one chunk.

    Args:
        path: a --save folder (its newest checkpoint), or one of its iter_ or release folders.
        vocab_size: as of `LegacyCheckpoint`.

    Raises:
        CheckpointError: no such checkpoint, of another format or kind of model, with tensors too many or too few, or with a type in
            it that is not safe.
        DamagedCheckpointError: files are missing or cannot be read.
    """

    def __init__(self, path: Path | str, vocab_size: int | None = None) -> None:
        if "://" in str(path):
            raise CheckpointError(f"{path}: checkpoints of Megatron-Core are read from a disk: copy it to one")
        folder = dist_folder(Path(path))
        if folder is None:
            raise CheckpointError(f"{path} holds no torch_dist checkpoint: no {ABOUT}, and no {LATEST} that leads to one")
        self.folder = folder
        _check_format(folder / ABOUT)
        self._common = TorchFile(folder / COMMON).content
        args = self._common.get("args") if isinstance(self._common, dict) else None
        if not isinstance(args, Namespace):
            raise CheckpointError(f"{folder / COMMON} holds no args, so its model is not known")
        super().__init__(str(path), args, str(folder / COMMON))
        self._files = DistcpFiles(folder)
        if WORD not in self._files.tensors:
            raise CheckpointError(f"{folder / METADATA} lists no {WORD}: {listed(sorted(self._files.tensors))}")
        tensor_ranks = vars(args).get("tensor_model_parallel_size")
        self._decide_vocabulary(
            self._files.tensors[WORD].shape[0],
            tensor_ranks if isinstance(tensor_ranks, int) and tensor_ranks > 0 else 1,
            vocab_size,
        )
        self._places = {name: self._find(record) for name, record in self._records.items()}
        self._refuse_unread()
        self.notes += self._left_out()

    @functools.cached_property
    def weights(self) -> Mapping[str, TensorInfo]:
        return {name: self._info("", name) for name in self._records}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A parameter, or a box of it, on the CPU in its stored dtype; a new contiguous tensor.

        Raises:
            DamagedCheckpointError: a file is damaged.
        """
        return self._read("", name, box or Box.whole(self._records[name].shape))

    # ---- the state of the run

    @functools.cached_property
    def _sharding(self) -> str | None:
        """The form in which the state of a sharded optimizer was saved; None: it is not sharded."""
        optimizer, content = self._common.get("optimizer"), self._common.get("content_metadata")
        found = optimizer.get("param_state_sharding_type") if isinstance(optimizer, dict) else None
        return found or (content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None)

    @functools.cached_property
    def saved(self) -> SavedRun | None:
        common, where = self._common, str(self.folder / COMMON)
        if common.get("optimizer") is None and not any(name.startswith("optimizer.") for name in self._files.tensors):
            return None
        if self._sharding == "dp_reshardable":
            found = saved_run(common, self._buffers.optimizer, where)
        elif self._sharding in _BY_NAME:
            found = saved_run(common, common.get("optimizer"), where)
            self._refuse_unread_state()
        else:
            raise CheckpointError(
                f"{self.folder}: its optimizer state is of the form {self._sharding}, which is not read. Load and save it with "
                f"Megatron-LM's --dist-ckpt-optim-fully-reshardable, which gives every parameter its state by name. {WEIGHTS_ALONE}"
            )
        return found

    @functools.cached_property
    def _buffers(self) -> FlatState:
        return find_buffers(self._files, self.args, self._records, self.read, self._padded)

    def _state_info(self, kind: str, name: str) -> TensorInfo | None:
        if self._sharding == "dp_reshardable":
            return TensorInfo(self._records[name].shape, self._buffers.dtype(kind))
        start = self._start(kind)
        return None if start is None else self._info(start, name)

    def _read_state(self, kind: str, name: str, box: Box) -> torch.Tensor:
        if self._sharding == "dp_reshardable":
            return self._buffers.read(kind, self._records[name], box)
        start = self._start(kind)
        assert start is not None, "asked only for what is there"
        return self._read(start, name, box)

    def _start(self, kind: str) -> str | None:
        """What stands before the name of a parameter in that of its state; None: there is no such state."""
        starts = [f"{_STATE}{theirs}." for theirs in (_MAINS if kind == WEIGHT else (kind,))]
        return next((start for start in starts if f"{start}{WORD}" in self._files.tensors), None)

    def _refuse_unread_state(self) -> None:
        """Check that there is state of every parameter, and none beside."""
        starts = [start for kind in (WEIGHT, *MOMENTS) if (start := self._start(kind)) is not None]
        wanted = {f"{start}{key}" for start in starts for place in self._places.values() for key in place.keys}
        held = {name for name in self._files.tensors if name.startswith("optimizer.")}
        if len(starts) < len(MOMENTS) or wanted != held:
            odd = sorted(wanted ^ held) or [f"no {_STATE}{'* and '.join(MOMENTS)}*"]
            raise CheckpointError(
                f"{self.folder}: its optimizer state is not Adam's of this model's parameters: {listed(odd)}. {WEIGHTS_ALONE}"
            )

    # ---- where a parameter lies

    def _find(self, record: ParamRecord) -> _ParamPlace:
        layer, _ = in_layer(record.name)
        held = self._files.tensors
        for own in stored_names(record.name, 0):
            stacked = own if layer is None else own.replace(f"decoder.layers.{layer}.", "decoder.layers.", 1)
            for key, row in ((own, None), (stacked, layer)):
                if key in held:
                    return self._checked(record, _ParamPlace((key,), row))
                halves = tuple(f"{key}{end}" for end in _HALVES)
                if all(half in held for half in halves):
                    return self._checked(record, _ParamPlace(halves, row))
        raise CheckpointError(f"{self.folder} has no {' nor '.join(stored_names(record.name, 0))}")

    def _checked(self, record: ParamRecord, place: _ParamPlace) -> _ParamPlace:
        theirs = self._whole_shape(record, place)
        for key in place.keys:
            if (shape := self._files.tensors[key].shape) != theirs:
                raise CheckpointError(f"{self.folder}: {key} is of shape {list(shape)}, where its args make it {list(theirs)}")
        return place

    def _whole_shape(self, record: ParamRecord, place: _ParamPlace) -> tuple[int, ...]:
        """The shape of a tensor there, of all layers where they are stacked."""
        shape = list(record.shape)
        for split in record.splits:
            if split.padded_size is not None:
                shape[split.dim] = self._padded
        theirs = their_shape(record, shape)
        theirs[0] //= len(place.keys)
        return (*(() if place.row is None else (self.model.num_layers,)), *theirs)

    def _info(self, start: str, name: str) -> TensorInfo:
        return TensorInfo(self._records[name].shape, self._files.tensors[start + self._places[name].keys[0]].dtype)

    def _read(self, start: str, name: str, box: Box) -> torch.Tensor:
        record, place = self._records[name], self._places[name]
        shape, whole = record.shape, self._whole_shape(record, place)
        gated = len(shape) > len(their_shape(record, [*shape]))
        found = torch.empty(box.sizes, dtype=self._files.tensors[start + place.keys[0]].dtype)
        for target, half, inner in _halves(found, box) if gated else [(found, 0, box)]:
            key = place.keys[half if len(place.keys) > 1 else 0]
            down = half * shape[1] if gated and len(place.keys) == 1 else 0
            inner = Box((inner.offsets[0] + down, *inner.offsets[1:]), inner.sizes)
            if place.row is not None:
                inner = Box((place.row, *inner.offsets), (1, *inner.sizes))
            target.copy_(self._read_grid(start + key, whole, inner).view(target.shape))
        return found

    def _read_grid(self, key: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
        """A box of a tensor of a shape, whether it is stored so or as a grid of flattened parts.

        Raises:
            CheckpointError: it is stored in another shape.
        """
        stored = self._files.tensors[key].shape
        if stored == shape:
            return self._files.read(key, box)
        grid, numel = stored[:-1], stored[-1] if stored else 0
        fits = len(grid) == len(shape) and all(cuts and size % cuts == 0 for size, cuts in zip(shape, grid, strict=True))
        part = tuple(size // cuts for size, cuts in zip(shape, grid, strict=True)) if fits else ()
        if not fits or math.prod(part) != numel:
            raise CheckpointError(f"{self.folder}: {key} is of shape {list(stored)}, which is no form of {list(shape)}")
        found = torch.empty(box.sizes, dtype=self._files.tensors[key].dtype)
        for place in _cells(box, part):
            held = Box(tuple(at * size for at, size in zip(place, part, strict=True)), part)
            common = held.intersect(box)
            assert common is not None, "a cell that overlaps"
            flat = self._files.read(key, Box((*place, 0), (*(1 for _ in place), numel)))
            found[common.relative_to(box).index] = flat.view(part)[common.relative_to(held).index]
        return found

    # ---- what else is there

    def _refuse_unread(self) -> None:
        used = {key for place in self._places.values() for key in place.keys}
        unread = [
            name
            for name in self._files.tensors
            if name not in used and not name.startswith("optimizer.") and not name.endswith(LEFT_OUT)
        ]
        if unread:
            raise CheckpointError(f"{self.folder} holds tensors that the model of its args has not: {listed(sorted(unread))}")

    def _left_out(self) -> Iterator[str]:
        kept = {"args", "checkpoint_version", "iteration", "optimizer", "opt_param_scheduler", "content_metadata"}
        objects = {name.partition("/")[0] for name in self._files.objects if not name.startswith("optimizer.")}
        extra = {name for name in objects if name.endswith(LEFT_OUT)}
        if others := sorted({*map(str, self._common), *objects} - kept - extra):
            yield f"Left out: {', '.join(others)}."
        if extra:
            yield f"Left out, since they are no parameters: {len(extra)} entries {' or '.join(LEFT_OUT)}."


def _halves(found: torch.Tensor, box: Box) -> Iterator[tuple[torch.Tensor, int, Box]]:
    """(The part of a box of [2, f, ...] in a half, which half, the box of that part in [f, ...]) for each half that it overlaps."""
    for at in range(box.sizes[0]):
        yield found[at], box.offsets[0] + at, Box(box.offsets[1:], box.sizes[1:])


def _cells(box: Box, part: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The cells of a grid of parts that overlap a box."""
    if not part:
        yield ()
        return
    for first in range(box.offsets[0] // part[0], -(-(box.offsets[0] + box.sizes[0]) // part[0])):
        for rest in _cells(Box(box.offsets[1:], box.sizes[1:]), part[1:]):
            yield first, *rest


def _check_format(path: Path) -> None:
    try:
        about: Any = json.loads(path.read_bytes()[:1_000_000])
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
    kind = about.get("sharded_backend") if isinstance(about, dict) else None
    if kind != "torch_dist" or about.get("sharded_backend_version", 1) != 1:
        raise CheckpointError(
            f"{path} names the format {str(kind)[:40]!r}; of Megatron-Core's only torch_dist, version 1, is read here.\n"
            "  Load it with Megatron-LM, and save it with --ckpt-format torch_dist."
        )
