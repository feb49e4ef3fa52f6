"""Files of torch_dist from a stranger: nothing in them is run, nothing reaches outside, and what is not whole is an error."""

from __future__ import annotations

import collections
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.parallel.tensor_slice import TensorSlice
from megatron_lab.foreign.dist_checkpoint import DistCheckpoint
from megatron_lab.foreign.distcp_files import METADATA, DistcpReader
from megatron_lab.foreign.inert_pickle import CallRecord, read_pickle
from tests.support.dist_checkpoints import write_dist
from tests.support.legacy_checkpoints import LegacyLayout
from tests.support.megatron_states import made_up
from tests.support.reference_runs import gpt2_like

WORD = "embedding.word_embeddings.weight"


class Calls:
    """Pickled, it is a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_dist(tmp_path, made_up(gpt2_like(vocab=61)).rounded(), LegacyLayout(tp=2))


def change(folder: Path, edit: Callable[[Any], None]) -> None:
    """Change what `.metadata` says."""
    path = folder / METADATA
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def place_of(metadata: Any, name: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def test_a_pickle_is_read_as_data() -> None:
    value = {"a": [1, 2.5, None, True, (3, "b"), {"c": -(2**70)}], "d": b"e"}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        data = {**value, "d": None} if protocol == 2 else value  # which makes bytes by a call
        assert read_pickle(pickle.dumps(data, protocol), "here", ()) == data
    made = read_pickle(pickle.dumps(torch.Size([2, 3])), "here", ("torch.Size",))
    assert isinstance(made, CallRecord) and (made.name, made.args) == ("torch.Size", ((2, 3),))
    ordered = read_pickle(pickle.dumps(collections.OrderedDict(a=1)), "here", ("collections.OrderedDict",))
    assert ordered.state == {"a": 1}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_call_in_the_metadata_is_not_made(folder: Path, tmp_path: Path, protocol: int) -> None:
    proof = tmp_path / "proof"
    for call in (Calls(os.mkdir, str(proof)), Calls(eval, f"__import__('os').mkdir({str(proof)!r})")):
        (folder / METADATA).write_bytes(pickle.dumps({"state_dict_metadata": call}, protocol))
        with pytest.raises(CheckpointError, match="asks for .*(mkdir|eval).*nothing in it was run"):
            DistCheckpoint(folder)
    assert not proof.exists()


def test_a_call_in_other_files_is_not_made(folder: Path, tmp_path: Path) -> None:
    """In a tensor's place, and beside the settings."""
    proof, data = tmp_path / "proof", io.BytesIO()
    torch.save(Calls(os.mkdir, str(proof)), data)

    def into_the_file(metadata: Any) -> None:
        info = place_of(metadata, WORD)
        info.offset, info.length = (folder / info.relative_path).stat().st_size, len(data.getvalue())
        with (folder / info.relative_path).open("ab") as file:
            file.write(data.getvalue())

    change(folder, into_the_file)
    with pytest.raises(CheckpointError, match="nothing in it was run"):
        DistCheckpoint(folder).read("embedding.word.weight")
    torch.save({"args": Calls(os.mkdir, str(proof))}, folder / "common.pt")
    with pytest.raises(CheckpointError, match="asks for posix.mkdir"):
        DistCheckpoint(folder)
    assert not proof.exists()


def test_pickles_that_would_take_for_ever_or_all_memory(folder: Path) -> None:
    """Tuples in tuples as a key (its hash takes 2^60 steps), places far out to put things aside, lengths beyond the file."""
    nested = b"\x80\x04)" + b"".join(b"\x94h" + bytes([at]) + b"\x86" for at in range(60))
    programs = {
        "a key has an unexpected type": b"\x80\x04}" + nested[2:] + b"Ns.",
        "truncated": b"\x80\x04\x8e" + (2**60).to_bytes(8, "little") + b"x.",
        "not a pickle": b"\x80\x04Nr\xff\xff\xff\x7f.",  # a memo of 16 GiB, were it a list; then None is no metadata
        "STOP is missing|truncated": b"\x80\x04]" * 5,
        "altered": b"",
    }
    for program in programs.values():
        (folder / METADATA).write_bytes(program)
        with pytest.raises(DamagedCheckpointError, match="cannot be read as a pickle|not readable as the metadata"):
            DistcpReader(folder)
    with (folder / METADATA).open("wb") as file:
        file.truncate(3 << 30)  # takes no place on the disk
    with pytest.raises(CheckpointError, match="more than the metadata of any checkpoint needs"):
        DistcpReader(folder)
    (folder / METADATA).write_bytes(pickle.dumps([1], 0))
    with pytest.raises(CheckpointError, match="opcode|truncated"):
        DistcpReader(folder)


def test_what_lies_outside(folder: Path) -> None:
    """Of the folder, of a file, of the tensor."""
    intact = (folder / METADATA).read_bytes()
    size = (folder / "__0_0.distcp").stat().st_size
    whole = TensorSlice.full((64, 32))
    cases: list[tuple[str, Callable[[Any], None]]] = [
        ("outside of its folder", lambda m: setattr(place_of(m, WORD), "relative_path", "../../elsewhere")),
        ("outside of its folder", lambda m: setattr(place_of(m, WORD), "relative_path", "/etc/passwd")),
        ("is missing", lambda m: setattr(place_of(m, WORD), "relative_path", "__9_0.distcp")),
        (f"which has {size:,}", lambda m: setattr(place_of(m, WORD), "offset", size)),
        ("not a number of bytes", lambda m: setattr(place_of(m, WORD), "offset", -1)),
        ("not a number of bytes", lambda m: setattr(place_of(m, WORD), "length", 2**70)),
        ("truncated, altered", lambda m: setattr(place_of(m, WORD), "length", 100)),
        ("needs at most", lambda m: vars(place_of(m, WORD)).update(offset=0, length=size)),
        ("does not have exactly one chunk", lambda m: m.state_dict_metadata[WORD].chunks.pop()),
        ("do not cover every element", lambda m: setattr(m.state_dict_metadata[WORD], "size", torch.Size([2**50, 32]))),
        ("says", lambda m: setattr(m.state_dict_metadata[WORD].properties, "dtype", torch.float16)),
        ("compressed or encrypted", lambda m: setattr(place_of(m, WORD), "transform_descriptors", ["zstd"])),
        ("not a valid torch.Size", lambda m: setattr(m.state_dict_metadata[WORD], "size", torch.Size([2**40, 2**40]))),
    ]
    for message, edit in cases:
        (folder / METADATA).write_bytes(intact)
        change(folder, edit)
        with pytest.raises(CheckpointError, match=message):
            DistcpReader(folder).read(WORD, whole)


def test_damage_is_found(folder: Path) -> None:
    """A flipped byte in a tensor; a compressed record, which may become larger than any memory; a file that ends early."""
    path = folder / "__0_0.distcp"
    intact = path.read_bytes()
    files = DistcpReader(folder)
    found = files.read(WORD, TensorSlice((0, 0), (32, 32)))
    place = intact.index(found.view(torch.uint8).numpy().tobytes()) + 7
    path.write_bytes(intact[:place] + bytes([intact[place] ^ 1]) + intact[place + 1 :])
    with pytest.raises(DamagedCheckpointError, match="checksum"):
        files.read(WORD, TensorSlice((0, 0), (32, 32)))
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(intact[: len(intact)])) as archive, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as other:
        for name in archive.namelist():
            other.writestr(name, archive.read(name))
    chunk = next(chunk for chunk in files.tensors[WORD].chunks if chunk.file == path.name)
    data = packed.getvalue()
    path.write_bytes(intact[: chunk.offset] + data + intact[chunk.offset + len(data) :])

    change(folder, lambda metadata: setattr(place_of(metadata, WORD), "length", len(data)))
    with pytest.raises(DamagedCheckpointError, match="its entries are compressed, which torch.save never does"):
        DistcpReader(folder).read(WORD, TensorSlice((0, 0), (32, 32)))
    path.write_bytes(intact[:-500])
    with pytest.raises(DamagedCheckpointError, match="truncated or altered: the files lack"):
        DistcpReader(folder)
