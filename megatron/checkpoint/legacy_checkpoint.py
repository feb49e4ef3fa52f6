"""Reads weights from a checkpoint of Megatron-LM, whatever its tensor, pipeline and virtual sizes: names and how they are split."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, listed
from megatron.checkpoint.global_tensor import within
from megatron.checkpoint.legacy_files import FILE, LATEST, FilePart, LegacyChunk, chunk_keys, find_chunks, legacy_folder, open_ranks
from megatron.checkpoint.legacy_settings import model_of, notes_on, tokenizer_of, vocabulary_of
from megatron.checkpoint.source import TensorInfo
from megatron.parallel.boxes import Box
from megatron.parallel.params import ParamRecord, global_records
from megatron.spec.activations import activation_of
from megatron.spec.weights import padded_vocab_size

_PARTS = {
    "attention_norm": ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    "attention.qkv": ("self_attention.linear_qkv.",),
    "attention.q_norm": ("self_attention.q_layernorm.",),
    "attention.k_norm": ("self_attention.k_layernorm.",),
    "attention.output": ("self_attention.linear_proj.",),
    "mlp_norm": ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    "mlp.up": ("mlp.linear_fc1.",),
    "mlp.down": ("mlp.linear_fc2.",),
}
"""Their names for parts of a layer: the own module and, where Transformer Engine joins a norm to the product after it, that one."""
WORD = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_OUTSIDE = {
    "embedding.word.weight": (WORD,),
    "embedding.position.weight": ("embedding.position_embeddings.weight",),
    "final_norm.weight": ("decoder.final_layernorm.weight",),
    "final_norm.bias": ("decoder.final_layernorm.bias",),
    "output.weight": (OUTPUT,),
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
LEFT_OUT = ("_extra_state", "rotary_pos_emb.inv_freq")
"""Ends of names that hold no parameter: states of 8-bit products, and a table that follows from the settings."""


@dataclass(frozen=True)
class LegacyPlace:
    """The places where a parameter may be stored."""

    layer: int | None
    """Its layer; None for a parameter outside the layers."""
    names: tuple[str, ...]
    """Possible names in the state of a chunk, without the layer's number; one of them is there."""

    def stored_names(self, first_layer: int) -> list[str]:
        """The possible names in the state of a chunk whose first layer is `first_layer`."""
        before = "" if self.layer is None else f"decoder.layers.{self.layer - first_layer}."
        return [before + name for name in self.names]


def place_of(name: str) -> LegacyPlace:
    """Where one of our parameters is stored there."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return LegacyPlace(None, _OUTSIDE[name])
    layer, part, attribute = found.groups()
    return LegacyPlace(int(layer), tuple(start + attribute for start in _PARTS[part]))


def local_shape(record: ParamRecord, ranks: int, padded_vocabulary: int) -> tuple[int, ...]:
    """Shape of one tensor rank's part, as it is here: where a gated up projection there is [2f/ranks, h], the gate above, it is [2,
    f/ranks, h]."""
    shape = list(record.shape)
    for split in record.splits:
        whole = padded_vocabulary if split.padded_size is not None else shape[split.dim]
        shape[split.dim] = whole // ranks
    return tuple(shape)


class LegacyCheckpoint:
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
        self.folder, self.name = folder, str(path)
        self.notes: list[str] = []
        self._files, args = open_ranks(folder)
        self.model, self.tokenizer = model_of(args, str(self._files[0, 0].path)), tokenizer_of(args)
        self._chunks = find_chunks(self._files, self.model.num_layers)
        self._tensor_ranks = len(self._chunks[0].states)
        self._padded = sum(len(part) for _, part in self._chunks[0].parts(WORD))
        self.vocab_size = self._vocabulary(args, vocab_size)
        self._records = global_records(self.model, self.vocab_size)
        self._parts = {name: list(self._find(record)) for name, record in self._records.items()}
        self._tied_copy = self._chunks[-1].parts(OUTPUT) if self.model.tied else []
        self._refuse_unread()
        self.weights: Mapping[str, TensorInfo] = {
            name: TensorInfo(record.shape, self._parts[name][0][1].dtype) for name, record in self._records.items()
        }
        self.notes += [*self._left_out(), *notes_on(args)]

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A parameter, or a box of it, on the CPU in its stored dtype; a new contiguous tensor.

        Raises:
            DamagedCheckpointError: its file is damaged, or copies of it that must be the same differ.
        """
        record, parts = self._records[name], self._parts[name]
        box = box or Box((0,) * len(record.shape), record.shape)
        if not record.splits:
            self._check_replicas(name, parts)
            parts = parts[:1]
        if name == "embedding.word.weight" and self._tied_copy:
            self._check_tied(parts)
        return self._join(record, parts, box)

    def _join(self, record: ParamRecord, parts: Sequence[FilePart], box: Box) -> torch.Tensor:
        """A box of a parameter from the parts of all tensor ranks, or from one replica."""
        out = torch.empty(box.sizes, dtype=parts[0][1].dtype)
        shape = local_shape(record, self._tensor_ranks, self._padded)
        for rank, (file, part) in enumerate(parts):
            offsets = [0] * len(shape)
            for split in record.splits:
                offsets[split.dim] = rank * shape[split.dim]
            part_box = Box(tuple(offsets), shape)
            common = box.intersect(part_box)
            if common is not None:
                values = file.check(part, record.name).reshape(shape)
                out[within(common, box)] = values[within(common, part_box)]
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

    def _vocabulary(self, args: Namespace, asked: int | None) -> int:
        size = vocabulary_of(args) if asked is None else asked
        if size is None:
            self.notes.append(
                f"The vocabulary's size without padding is not known: all {self._padded} rows of the word embedding are kept, "
                "until its tokenizer is named or how many rows are no padding."
            )
            return self._padded
        if not 0 < size <= self._padded:
            raise CheckpointError(f"{self.name}: a vocabulary of {size} does not fit its word embedding of {self._padded} rows")
        if size < self._padded:
            self.notes.append(
                f"The last {self._padded - size} of {self._padded} rows of the word embedding are padding and were cut off."
            )
        return size

    def pads_to_this(self, vocab_size: int) -> bool:
        """Whether a vocabulary of this size is padded to the stored number of rows, so that only padding is cut off."""
        return padded_vocab_size(vocab_size, self.model.make_vocab_size_divisible_by, self._tensor_ranks) == self._padded

    def _chunk_of(self, name: str) -> LegacyChunk:
        layer = place_of(name).layer
        if layer is None:
            return self._chunks[-1] if name.startswith(("final_norm.", "output.")) else self._chunks[0]
        return next(chunk for chunk in self._chunks if chunk.first_layer <= layer < chunk.first_layer + chunk.num_layers)

    def _find(self, record: ParamRecord) -> Iterator[FilePart]:
        """The parts of a parameter by tensor rank."""
        shape = local_shape(record, self._tensor_ranks, self._padded)
        if activation_of(self.model).gated and ".mlp.up." in record.name:
            shape = (shape[0] * shape[1], *shape[2:])
        chunk = self._chunk_of(record.name)
        names = place_of(record.name).stored_names(chunk.first_layer)
        for file, state in chunk.states:
            found = [name for name in names if name in state]
            if len(found) != 1:
                raise CheckpointError(f"{file.path} has {f'both {names[0]} and {names[1]}' if found else f'no {names[0]}'}")
            part = state[found[0]]
            if not isinstance(part, torch.Tensor) or tuple(part.shape) != shape:
                what = f"of shape {list(part.shape)}" if isinstance(part, torch.Tensor) else f"a {type(part).__name__}"
                raise CheckpointError(f"{file.path}: {found[0]} is {what}, where its args make it {list(shape)}")
            yield file, part

    def _refuse_unread(self) -> None:
        """Check that every tensor of the model is read."""
        known: dict[LegacyChunk, set[str]] = {chunk: set() for chunk in self._chunks}
        for name in self._records:
            chunk = self._chunk_of(name)
            known[chunk].update(place_of(name).stored_names(chunk.first_layer))
        if self._tied_copy:
            known[self._chunks[-1]].add(OUTPUT)
        unread = [
            f"{name} ({file.path.parent.name})"
            for chunk in self._chunks
            for file, state in chunk.states
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and not name.endswith(LEFT_OUT) and name not in known[chunk]
        ]
        if unread:
            raise CheckpointError(f"{self.folder} holds tensors that the model of its args has not: {listed(unread)}")

    def _left_out(self) -> Iterator[str]:
        """What the files hold beside weights."""
        kept = {"args", "checkpoint_version", "iteration", *chunk_keys(self._files[0, 0])}
        others = sorted({key for file in self._files.values() for key in file.content} - kept)
        if any(self.folder.glob("mp_rank_*/distrib_optim.pt")):
            others.append("distrib_optim.pt")
        if others:
            yield f"Left out, since only weights are read: {', '.join(others)}."
        names = [name for chunk in self._chunks for _, state in chunk.states for name in state]
        if extra := sum(name.endswith(LEFT_OUT) for name in names):
            yield f"Left out, since they are no parameters: {extra} entries {' or '.join(LEFT_OUT)}."
