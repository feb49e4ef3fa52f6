"""Reader of Megatron-LM checkpoints in the format `torch`, saved at any tensor- and pipeline-parallel size: weights and optimizer
state."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, format_list
from megatron.checkpoint.global_tensor import WEIGHT
from megatron.parallel.params import ParamRecord
from megatron.parallel.tensor_slice import TensorSlice
from megatron.spec.weights import WORD_EMBEDDING, split_layer_name
from megatron_lab.foreign.legacy_files import (
    LATEST,
    MODEL_FILE,
    LegacyChunk,
    TensorShard,
    find_chunks,
    find_legacy_folder,
    list_chunk_keys,
    open_rank_files,
)
from megatron_lab.foreign.legacy_optimizer import build_optimizer_chunks
from megatron_lab.foreign.megatron_source import (
    EMBEDDING_KEY,
    NON_PARAM_SUFFIXES,
    OUTPUT_KEY,
    MegatronSource,
    SavedRun,
    get_megatron_keys,
    get_megatron_shape,
    parse_saved_run,
)
from megatron_lab.foreign.source import TensorInfo


class LegacyCheckpoint(MegatronSource):
    """A `WeightSource` that reads Megatron-LM's checkpoint format `torch`.

    The files are memory-mapped. Reading a parameter needs memory only for this parameter.

    Args:
        path: a --save folder (its latest checkpoint is read), or one of its iter_ or release folders.
        vocab_size: vocabulary size without padding. None: the size that the checkpoint records, which it does only for
            NullTokenizer. If it records none, the padding rows count as part of the vocabulary, and a note says so.

    Raises:
        CheckpointError: there is no checkpoint, its version or model is not supported, it has missing or unexpected tensors, or a
            file contains an unsafe type.
        DamagedCheckpointError: files are missing or cannot be read.
    """

    def __init__(self, path: Path | str, vocab_size: int | None = None) -> None:
        if "://" in str(path):
            raise CheckpointError(
                f"{path}: checkpoints of Megatron-LM can be read only from a local disk. Copy the checkpoint to a local disk."
            )
        folder = find_legacy_folder(Path(path))
        if folder is None:
            raise CheckpointError(
                f"{path} holds no legacy checkpoint (format torch of Megatron-LM): it has neither mp_rank_00/{MODEL_FILE} nor a "
                f"{LATEST} that names an iteration.\n  Choose a --save folder of Megatron-LM, or one of the iter_ folders in it."
            )
        self.folder = folder
        self._rank_files, args = open_rank_files(folder)
        super().__init__(str(path), args, str(self._rank_files[0, 0].path))
        self._chunks = find_chunks(self._rank_files, self.model.num_layers)
        padded_vocab_size = sum(len(tensor) for _, tensor in self._chunks[0].get_shards(EMBEDDING_KEY))
        self._set_vocab_size(padded_vocab_size, len(self._chunks[0].states), vocab_size)
        self._shards = self._find_all_shards(self._chunks)
        self._tied_copy = self._chunks[-1].get_shards(OUTPUT_KEY) if self.model.has_tied_embeddings else []
        self._check_all_tensors_read()
        self.notes += self._describe_ignored()

    @functools.cached_property
    def weights(self) -> Mapping[str, TensorInfo]:
        return self._build_tensor_infos(self._shards)

    @functools.cached_property
    def saved_run(self) -> SavedRun | None:
        first_file = self._rank_files[0, 0]
        optimizers = {key: file.content.get("optimizer") for key, file in self._rank_files.items()}
        if all(optimizer is None for optimizer in optimizers.values()):
            return None
        saved_runs = {
            key: parse_saved_run(first_file.content, optimizers[key], str(file.path)) for key, file in self._rank_files.items()
        }
        if differing_paths := [
            str(self._rank_files[key].path) for key, run in saved_runs.items() if run.updates != saved_runs[0, 0].updates
        ]:
            raise DamagedCheckpointError(
                f"the number of optimizer updates in {first_file.path} differs from that in {format_list(differing_paths)}. "
                "The files are from different iterations: copy the checkpoint again"
            )
        return saved_runs[0, 0]

    @functools.cached_property
    def _state_shards(self) -> dict[str, dict[str, list[TensorShard]]]:
        """Shards of the main parameters and moments, by state type (`WEIGHT` or a moment) and parameter name. Each list has the
        shards in the order of the tensor-parallel ranks."""
        chunks = build_optimizer_chunks(self.args, self._rank_files, self._chunks)
        return {state_type: self._find_all_shards(state_chunks) for state_type, state_chunks in chunks.items()}

    def _find_all_shards(self, chunks: Sequence[LegacyChunk]) -> dict[str, list[TensorShard]]:
        return {name: list(self._find_shards(record, chunks)) for name, record in self._records.items()}

    def _build_tensor_infos(self, shards: Mapping[str, list[TensorShard]]) -> dict[str, TensorInfo]:
        return {name: TensorInfo(record.shape, shards[name][0][1].dtype) for name, record in self._records.items()}

    def _get_state_info(self, state_type: str, name: str) -> TensorInfo | None:
        if state_type == WEIGHT and state_type not in self._state_shards:
            return None
        return TensorInfo(self._records[name].shape, self._state_shards[state_type][name][0][1].dtype)

    def _read_state(self, state_type: str, name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        return self._gather(f"{state_type} of {name}", self._records[name], self._state_shards[state_type][name], tensor_slice)

    def read(self, name: str, tensor_slice: TensorSlice | None = None) -> torch.Tensor:
        """Read a parameter, or a slice of it, into a new contiguous CPU tensor in its stored dtype.

        Raises:
            DamagedCheckpointError: the file is damaged, or replicas of the parameter differ.
        """
        record, shards = self._records[name], self._shards[name]
        if name == WORD_EMBEDDING and self._tied_copy:
            self._check_tied(shards)
        return self._gather(name, record, shards, tensor_slice or TensorSlice.full(record.shape))

    def _gather(self, name: str, record: ParamRecord, shards: Sequence[TensorShard], tensor_slice: TensorSlice) -> torch.Tensor:
        """Assemble a slice of a tensor from the shards of the tensor-parallel ranks. If the tensor is not sharded, check that the
        copies of all ranks are equal.

        Args:
            name: name of the tensor, for error messages.
            record: properties of the parameter, with its tensor-parallel split.
            shards: shard and file of each tensor-parallel rank.
            tensor_slice: region of the unsharded tensor.
        """
        if not record.splits:
            self._check_replicas(name, shards)
            shards = shards[:1]
        out = torch.empty(tensor_slice.sizes, dtype=shards[0][1].dtype)
        for rank, (file, tensor) in enumerate(shards):
            offsets = [0] * tensor.dim()
            for split in record.splits:
                offsets[split.dim] = rank * tensor.shape[split.dim]
            shard_slice = TensorSlice(tuple(offsets), tuple(tensor.shape))
            overlap = tensor_slice.intersect(shard_slice)
            if overlap is not None:
                out[overlap.relative_to(tensor_slice).index] = file.check(tensor, name)[overlap.relative_to(shard_slice).index]
        return out

    @staticmethod
    def _check_replicas(name: str, shards: Sequence[TensorShard]) -> None:
        first_file, first = shards[0]
        first_file.check(first, name)
        for file, tensor in shards[1:]:
            if not torch.equal(first, file.check(tensor, name)):
                raise DamagedCheckpointError(
                    f"{name} must be equal on all tensor-parallel ranks, but differs between {first_file.path} and {file.path}. "
                    "The copies of the ranks diverged in the run, or the files are from different iterations. Copy the checkpoint "
                    "again, or use an earlier one"
                )

    def _check_tied(self, shards: Sequence[TensorShard]) -> None:
        """Check that the output layer on the last stage equals the word embedding, because the model ties the two weights. The
        check runs only once, and ignores padding rows.

        Args:
            shards: shards of the word embedding.
        """
        remaining_rows = self.vocab_size  # later rows are padding
        for (file, tensor), (last_file, copy) in zip(shards, self._tied_copy, strict=True):
            rows = slice(max(0, min(remaining_rows, len(tensor))))
            if not torch.equal(file.check(tensor, EMBEDDING_KEY)[rows], last_file.check(copy, OUTPUT_KEY)[rows]):
                raise DamagedCheckpointError(
                    f"{self.name}: the model ties the output layer to the word embedding, but {OUTPUT_KEY} in {last_file.path} "
                    f"differs from {EMBEDDING_KEY} in {file.path}: the two copies diverged in the run that saved them, so it is "
                    "not known which one is right. Use an earlier checkpoint"
                )
            remaining_rows -= len(tensor)
        self._tied_copy = []

    @staticmethod
    def _get_chunk(name: str, chunks: Sequence[LegacyChunk]) -> LegacyChunk:
        layer, _ = split_layer_name(name)
        if layer is None:
            return chunks[-1] if name.startswith(("final_norm.", "output.")) else chunks[0]
        return next(chunk for chunk in chunks if layer in chunk.layers)

    def _find_shards(self, record: ParamRecord, chunks: Sequence[LegacyChunk]) -> Iterator[TensorShard]:
        """Yield the shard of a parameter on each tensor-parallel rank, in the shape that this framework uses.

        The shard of a gated MLP weight is [2f/n, h] in Megatron-LM, gate first, and [2, f/n, h] in this framework (f: FFN hidden
        size, h: hidden size, n: tensor-parallel size).

        Args:
            record: properties of the parameter.
            chunks: model chunks of the files, with weights or with one type of optimizer state.
        """
        shape = list(record.shape)
        for split in record.splits:
            global_size = self._padded_vocab_size if split.padded_size is not None else shape[split.dim]
            shape[split.dim] = global_size // self._tp_size
        expected_shape = get_megatron_shape(record, shape)
        chunk = self._get_chunk(record.name, chunks)
        keys = get_megatron_keys(record.name, chunk.layers.start)
        chunk.expected.update(keys)
        for file, state in chunk.states:
            stored_keys = [key for key in keys if key in state]
            if len(stored_keys) != 1:
                problem = f"has both {keys[0]} and {keys[1]}" if stored_keys else f"has no {' and no '.join(keys)}"
                raise CheckpointError(
                    f"{file.path} {problem}, but must have exactly one tensor for the parameter {record.name}. The checkpoint is "
                    "damaged (copy it again), or its model is not supported (choose a checkpoint of another model)"
                )
            tensor = state[stored_keys[0]]
            if not isinstance(tensor, torch.Tensor) or list(tensor.shape) != expected_shape:
                description = f"of shape {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
                raise CheckpointError(
                    f"{file.path}: the tensor {stored_keys[0]} is {description}, but according to the arguments of the run (args) "
                    f"it should be of shape {expected_shape}. The checkpoint was altered (copy it again), or its model is not "
                    "supported (choose another checkpoint)"
                )
            yield file, tensor.view(shape)

    def _check_all_tensors_read(self) -> None:
        """Check that the files contain no tensor that the model does not have.

        Raises:
            CheckpointError: there are such tensors.
        """
        if self._tied_copy:
            self._chunks[-1].expected.add(OUTPUT_KEY)
        unread = [
            f"{name} ({file.path.parent.name})"
            for chunk in self._chunks
            for file, state in chunk.states
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and not name.endswith(NON_PARAM_SUFFIXES) and name not in chunk.expected
        ]
        if unread:
            raise CheckpointError(
                f"{self.folder} holds tensors that the model does not have, according to the arguments of the run (args): "
                f"{format_list(unread)}. Models with these tensors are not supported: choose a checkpoint of another model"
            )

    def _describe_ignored(self) -> Iterator[str]:
        """Yield notes for the user about content of the files that is not read."""
        read_keys = {
            "args",
            "checkpoint_version",
            "iteration",
            "optimizer",
            "opt_param_scheduler",
            *list_chunk_keys(self._rank_files[0, 0]),
        }
        if ignored_keys := sorted({key for file in self._rank_files.values() for key in file.content} - read_keys):
            yield f"Left out: {', '.join(ignored_keys)}."
        names = [name for chunk in self._chunks for _, state in chunk.states for name in state]
        if num_non_params := sum(name.endswith(NON_PARAM_SUFFIXES) for name in names):
            yield f"Left out, since they are not parameters: {num_non_params} entries {' or '.join(NON_PARAM_SUFFIXES)}."
