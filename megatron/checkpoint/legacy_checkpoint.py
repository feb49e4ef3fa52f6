"""Reads weights from a checkpoint of Megatron-LM, whatever its tensor, pipeline and virtual sizes: names and how they are split."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, listed
from megatron.checkpoint.legacy_files import FILE, LATEST, FilePart, LegacyChunk, chunk_keys, find_chunks, legacy_folder, open_ranks
from megatron.checkpoint.legacy_settings import model_of, notes_on, tokenizer_of, vocabulary_of
from megatron.checkpoint.source import TensorInfo
from megatron.parallel.boxes import Box
from megatron.parallel.params import ParamRecord, global_records
from megatron.spec.weights import WORD_EMBEDDING, in_layer, padded_vocab_size

WORD, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_THEIRS = {
    "embedding.word": ("embedding.word_embeddings.",),
    "embedding.position": ("embedding.position_embeddings.",),
    "attention_norm": ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    "attention.qkv": ("self_attention.linear_qkv.",),
    "attention.q_norm": ("self_attention.q_layernorm.",),
    "attention.k_norm": ("self_attention.k_layernorm.",),
    "attention.output": ("self_attention.linear_proj.",),
    "mlp_norm": ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    "mlp.up": ("mlp.linear_fc1.",),
    "mlp.down": ("mlp.linear_fc2.",),
    "final_norm": ("decoder.final_layernorm.",),
    "output": ("output_layer.",),
}
"""Their names by ours: the own module and, where Transformer Engine joins a norm to the product after it, that one."""
LEFT_OUT = ("_extra_state", "rotary_pos_emb.inv_freq")
"""Ends of names that hold no parameter: states of 8-bit products, and a table that follows from the settings."""


def stored_names(name: str, first_layer: int) -> list[str]:
    """Possible names of one of our parameters in the state of a chunk that begins with `first_layer`; one of them is there."""
    layer, part = in_layer(name)
    module, _, attribute = part.rpartition(".")
    before = "" if layer is None else f"decoder.layers.{layer - first_layer}."
    return [f"{before}{start}{attribute}" for start in _THEIRS[module]]


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
        box = box or Box.whole(record.shape)
        if not record.splits:
            self._check_replicas(name, parts)
            parts = parts[:1]
        if name == WORD_EMBEDDING and self._tied_copy:
            self._check_tied(parts)
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
        layer, _ = in_layer(name)
        if layer is None:
            return self._chunks[-1] if name.startswith(("final_norm.", "output.")) else self._chunks[0]
        return next(chunk for chunk in self._chunks if layer in chunk.layers)

    def _find(self, record: ParamRecord) -> Iterator[FilePart]:
        """The parts of a parameter by tensor rank, in our shape: a gated up projection is [2f/ranks, h] there, the gate above, and
        here [2, f/ranks, h]."""
        shape = list(record.shape)
        for split in record.splits:
            whole = self._padded if split.padded_size is not None else shape[split.dim]
            shape[split.dim] = whole // self._tensor_ranks
        theirs = [math.prod(shape[:-1]), shape[-1]] if record.kind != "vector" else [math.prod(shape)]
        chunk = self._chunk_of(record.name)
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
        kept = {"args", "checkpoint_version", "iteration", *chunk_keys(self._files[0, 0])}
        others = sorted({key for file in self._files.values() for key in file.content} - kept)
        if any(self.folder.glob("mp_rank_*/distrib_optim.pt")):
            others.append("distrib_optim.pt")
        if others:
            yield f"Left out, since only weights are read: {', '.join(others)}."
        names = [name for chunk in self._chunks for _, state in chunk.states for name in state]
        if extra := sum(name.endswith(LEFT_OUT) for name in names):
            yield f"Left out, since they are no parameters: {extra} entries {' or '.join(LEFT_OUT)}."
