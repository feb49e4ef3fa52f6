"""Opening a pickle from outside: nothing in it is run, and damage is found."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron_lab.foreign.legacy_checkpoint import LegacyCheckpoint
from megatron_lab.foreign.legacy_files import open_file
from megatron_lab.foreign.torch_file import IgnoredObject
from megatron_lab.verification.reference.shape import build_random_weights
from tests.support.legacy_checkpoints import LegacyLayout, write_legacy
from tests.support.reference_runs import gpt2_like


class Calls:
    """Pickled, it is a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Unknown:
    """A class that is on no list."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model_optim_rng.pt"


@pytest.mark.parametrize(
    ("function", "name"),
    [(os.mkdir, "posix.mkdir"), (eval, "eval"), (Path.mkdir, "pathlib.*Path"), (torch.hub.load, "torch.hub.load")],
)
def test_a_call_is_not_made(path: Path, tmp_path: Path, function: Any, name: str) -> None:
    proof = tmp_path / "proof"
    call = Calls(eval, f"__import__('os').mkdir({str(proof)!r})") if function is eval else Calls(function, proof)
    torch.save({"args": Namespace(innocent=call), "checkpoint_version": 3.0}, path)
    with pytest.raises(CheckpointError, match=name) as error:
        open_file(path)
    assert str(path) in str(error.value) and "nothing in it was run" in str(error.value)
    assert not proof.exists()
    # The same file would have done it, opened trustingly.
    if function is os.mkdir:
        torch.load(path, weights_only=False)
        assert proof.is_dir()


def test_a_name_put_together_while_reading_is_not_looked_up(path: Path, tmp_path: Path) -> None:
    """STACK_GLOBAL takes its name from the stack, where no list of names finds it beforehand."""
    proof = tmp_path / "proof"
    program = pickle.dumps({"args": Calls(os.mkdir, str(proof))}, protocol=4)
    torch.save({}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, program if name.endswith("data.pkl") else content)
    with pytest.raises(CheckpointError, match="nothing in it was run"):
        open_file(path)
    assert not proof.exists()


def test_an_unknown_type_is_named(path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "other": Unknown()}, path)
    with pytest.raises(CheckpointError, match=r"asks for tests.*test_legacy_files.Unknown[\s\S]*save only the required entries"):
        open_file(path)


def test_stand_ins_do_nothing(path: Path) -> None:
    """A type of the list, with whatever arguments, becomes an empty object; afterwards torch knows no more names than before."""
    torch.save({"state": io.BytesIO(b"scales"), "where": Path("/somewhere")}, path)
    before = torch.serialization.get_safe_globals()
    content = open_file(path).content
    assert all(isinstance(value, IgnoredObject) and vars(value) == {} for value in content.values())
    assert set(torch.serialization.get_safe_globals()) == set(before)


def test_no_file_of_torch(path: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match="is missing"):
        open_file(path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(DamagedCheckpointError, match="truncated, altered"):
        open_file(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b", "c")
    with pytest.raises(DamagedCheckpointError, match="no data.pkl"):
        open_file(path)
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="holds a list"):
        open_file(path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    shape = gpt2_like(vocab=61)
    return write_legacy(tmp_path, shape, build_random_weights(shape, seed=1), LegacyLayout(tp=2))


def test_truncated(checkpoint: Path) -> None:
    path = checkpoint / "mp_rank_01" / "model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(DamagedCheckpointError, match="mp_rank_01"):
        LegacyCheckpoint(checkpoint)


def test_a_flipped_byte_is_found(checkpoint: Path) -> None:
    """In each tensor that is read, and in the program around them."""
    path = checkpoint / "mp_rank_01" / "model_optim_rng.pt"
    intact = path.read_bytes()
    source = LegacyCheckpoint(checkpoint)
    for name in source.weights:
        source.read(name)
    wanted = source._shards["layers.1.mlp.down.weight"][1][1].contiguous().numpy().tobytes()
    for place in (intact.index(wanted) + 7, intact.index(b"checkpoint_version")):
        path.write_bytes(intact[:place] + bytes([intact[place] ^ 1]) + intact[place + 1 :])
        with pytest.raises(DamagedCheckpointError, match="mp_rank_01"):
            LegacyCheckpoint(checkpoint).read("layers.1.mlp.down.weight")


def test_tensors_that_share_memory_and_files_without_checksums(path: Path) -> None:
    """Parameters may be views of one buffer; a writer may have been told to compute no checksums."""
    buffer = torch.arange(12.0)
    torch.save({"model": {"a": buffer[:4], "b": buffer[4:].view(2, 4)}}, path)
    file = open_file(path)
    assert torch.equal(file.check(file.content["model"]["b"], "b"), buffer[4:].view(2, 4))
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"model": {"a": buffer}}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    file = open_file(path)
    assert torch.equal(file.check(file.content["model"]["a"], "a"), buffer)
