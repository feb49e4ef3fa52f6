"""Reads weights and optimizer state from a checkpoint of Megatron-LM in its format `torch`, whatever its layout: how they are
split."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, listed
from megatron.checkpoint.global_tensor import WEIGHT
from megatron.parallel.boxes import Box
from megatron.parallel.params import ParamRecord
from megatron.spec.weights import WORD_EMBEDDING, in_layer
from megatron_lab.foreign.legacy_files import (
    FILE,
    LATEST,
    FilePart,
    LegacyChunk,
    chunk_keys,
    find_chunks,
    legacy_folder,
    open_ranks,
)
from megatron_lab.foreign.legacy_optimizer import optimizer_chunks
from megatron_lab.foreign.megatron_source import (
    LEFT_OUT,
    OUTPUT,
    WORD,
    MegatronSource,
    SavedRun,
    saved_run,
    stored_names,
    their_shape,
)
from megatron_lab.foreign.source import TensorInfo


class LegacyCheckpoint(MegatronSource):
    """A `WeightSource` over Megatron-LM's files. Tensors are mapped from them; a read takes the memory of one tensor.

    Args:
        path: a --save folder (its newest checkpoint), or one of its iter_ or release folders.
        vocab_size: size of the vocabulary without padding. By default what the checkpoint says, which it does for NullTokenizer
            alone; else padding is kept as part of the vocabulary, and a note says so.

    Raises:
        CheckpointError: no such checkpoint, of another version, of another kind of model, with tensors too many or too few, or with
            a type in it that is not safe.
        DamagedCheckpointError: files are missing or cannot be read.
    """

    def __init__(self, path: Path | str, vocab_size: int | None = None) -> None:
        if "://" in str(path):
            raise CheckpointError(f"{path}: checkpoints of Megatron-LM are mapped from a disk: copy it to one")
        folder = legacy_folder(Path(path))
        if folder is None:
            raise CheckpointError(f"{path} holds no legacy checkpoint: no mp_rank_00/{FILE}, and no {LATEST} that leads to one")
        self.folder = folder
        self._files, args = open_ranks(folder)
        super().__init__(str(path), args, str(self._files[0, 0].path))
        self._chunks = find_chunks(self._files, self.model.num_layers)
        padded = sum(len(part) for _, part in self._chunks[0].parts(WORD))
        self._decide_vocabulary(padded, len(self._chunks[0].states), vocab_size)
        self._parts = self._all_parts(self._chunks)
        self._tied_copy = self._chunks[-1].parts(OUTPUT) if self.model.tied else []
        self._refuse_unread()
        self.notes += self._left_out()

    @functools.cached_property
    def weights(self) -> Mapping[str, TensorInfo]:
        return self._infos(self._parts)

    @functools.cached_property
    def saved(self) -> SavedRun | None:
        first = self._files[0, 0]
        optimizers = {key: file.content.get("optimizer") for key, file in self._files.items()}
        if all(optimizer is None for optimizer in optimizers.values()):
            return None
        runs = {key: saved_run(first.content, optimizers[key], str(file.path)) for key, file in self._files.items()}
        if others := [str(self._files[key].path) for key, run in runs.items() if run.updates != runs[0, 0].updates]:
            raise DamagedCheckpointError(f"the optimizer has made other numbers of updates in {first.path} and in {listed(others)}")
        return runs[0, 0]

    @functools.cached_property
    def _state(self) -> dict[str, dict[str, list[FilePart]]]:
        """The parts of main parameters and moments by tensor rank, as those of the parameters."""
        chunks = optimizer_chunks(self.args, self._files, self._chunks)
        return {kind: self._all_parts(some) for kind, some in chunks.items()}

    def _all_parts(self, chunks: Sequence[LegacyChunk]) -> dict[str, list[FilePart]]:
        return {name: list(self._find(record, chunks)) for name, record in self._records.items()}

    def _infos(self, parts: Mapping[str, list[FilePart]]) -> dict[str, TensorInfo]:
        return {name: TensorInfo(record.shape, parts[name][0][1].dtype) for name, record in self._records.items()}

    def _state_info(self, kind: str, name: str) -> TensorInfo | None:
        if kind == WEIGHT and kind not in self._state:
            return None
        return TensorInfo(self._records[name].shape, self._state[kind][name][0][1].dtype)

    def _read_state(self, kind: str, name: str, box: Box) -> torch.Tensor:
        return self._gather(f"{kind} of {name}", self._records[name], self._state[kind][name], box)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A parameter, or a box of it, on the CPU in its stored dtype; a new contiguous tensor.

        Raises:
            DamagedCheckpointError: its file is damaged, or copies of it that must be the same differ.
        """
        record, parts = self._records[name], self._parts[name]
        if name == WORD_EMBEDDING and self._tied_copy:
            self._check_tied(parts)
        return self._gather(name, record, parts, box or Box.whole(record.shape))

    def _gather(self, name: str, record: ParamRecord, parts: Sequence[FilePart], box: Box) -> torch.Tensor:
        if not record.splits:
            self._check_replicas(name, parts)
            parts = parts[:1]
        out = torch.empty(box.sizes, dtype=parts[0][1].dtype)
        for rank, (file, part) in enumerate(parts):
            offsets = [0] * part.dim()
            for split in record.splits:
                offsets[split.dim] = rank * part.shape[split.dim]
            held = Box(tuple(offsets), tuple(part.shape))
            common = box.intersect(held)
            if common is not None:
                out[common.relative_to(box).index] = file.check(part, name)[common.relative_to(held).index]
        return out

    @staticmethod
    def _check_replicas(name: str, parts: Sequence[FilePart]) -> None:
        first_file, first = parts[0]
        first_file.check(first, name)
        for file, part in parts[1:]:
            if not torch.equal(first, file.check(part, name)):
                raise DamagedCheckpointError(
                    f"{name} is one tensor of all tensor ranks, but {first_file.path} and {file.path} hold different ones"
                )

    def _check_tied(self, parts: Sequence[FilePart]) -> None:
        """Check once that the last stage has the embedding's weights."""
        left = self.vocab_size  # rows beyond are padding
        for (file, part), (last_file, copy) in zip(parts, self._tied_copy, strict=True):
            rows = slice(max(0, min(left, len(part))))
            if not torch.equal(file.check(part, WORD)[rows], last_file.check(copy, OUTPUT)[rows]):
                raise DamagedCheckpointError(
                    f"{self.name}: the output layer is to share the word embedding, but {OUTPUT} in {last_file.path} is not "
                    f"{WORD} in {file.path}: the run that saved them had let them drift apart"
                )
            left -= len(part)
        self._tied_copy = []

    @staticmethod
    def _chunk_of(name: str, chunks: Sequence[LegacyChunk]) -> LegacyChunk:
        layer, _ = in_layer(name)
        if layer is None:
            return chunks[-1] if name.startswith(("final_norm.", "output.")) else chunks[0]
        return next(chunk for chunk in chunks if layer in chunk.layers)

    def _find(self, record: ParamRecord, chunks: Sequence[LegacyChunk]) -> Iterator[FilePart]:
        """The parts of a parameter by tensor rank, in our shape: a gated up projection is [2f/ranks, h] there, the gate above, and
        here [2, f/ranks, h]."""
        shape = list(record.shape)
        for split in record.splits:
            whole = self._padded if split.padded_size is not None else shape[split.dim]
            shape[split.dim] = whole // self._tensor_ranks
        theirs = their_shape(record, shape)
        chunk = self._chunk_of(record.name, chunks)
        names = stored_names(record.name, chunk.layers.start)
        chunk.expected.update(names)
        for file, state in chunk.states:
            found = [name for name in names if name in state]
            if len(found) != 1:
                raise CheckpointError(f"{file.path} has {f'both {names[0]} and {names[1]}' if found else f'no {names[0]}'}")
            part = state[found[0]]
            if not isinstance(part, torch.Tensor) or list(part.shape) != theirs:
                what = f"of shape {list(part.shape)}" if isinstance(part, torch.Tensor) else f"a {type(part).__name__}"
                raise CheckpointError(f"{file.path}: {found[0]} is {what}, where its args make it {theirs}")
            yield file, part.view(shape)

    def _refuse_unread(self) -> None:
        """Check that every tensor of the model is read."""
        if self._tied_copy:
            self._chunks[-1].expected.add(OUTPUT)
        unread = [
            f"{name} ({file.path.parent.name})"
            for chunk in self._chunks
            for file, state in chunk.states
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and not name.endswith(LEFT_OUT) and name not in chunk.expected
        ]
        if unread:
            raise CheckpointError(f"{self.folder} holds tensors that the model of its args has not: {listed(unread)}")

    def _left_out(self) -> Iterator[str]:
        """What the files hold beside weights."""
        kept = {"args", "checkpoint_version", "iteration", "optimizer", "opt_param_scheduler", *chunk_keys(self._files[0, 0])}
        if others := sorted({key for file in self._files.values() for key in file.content} - kept):
            yield f"Left out: {', '.join(others)}."
        names = [name for chunk in self._chunks for _, state in chunk.states for name in state]
        if extra := sum(name.endswith(LEFT_OUT) for name in names):
            yield f"Left out, since they are no parameters: {extra} entries {' or '.join(LEFT_OUT)}."
