"""Folders are told apart by the files in them, and each is opened as what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.folder_types import FolderType, detect_folder_type
from megatron.checkpoint.storage_url import open_storage
from megatron.parallel.tensor_slice import TensorSlice
from megatron_lab.foreign.open_source import open_source
from megatron_lab.foreign.source import StoredCheckpoint
from tests.support.checkpoint_worlds import save_checkpoint, whole

LEGACY_FILE = "mp_rank_00/model_optim_rng.pt"


def put(path: Path, text: str = "x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def save(folder: Path, iteration: int) -> None:
    value = torch.arange(12.0).view(3, 4) + iteration
    save_checkpoint(folder, iteration, [whole("model.a", value), whole("exp_avg.a", -value)], {"vocab_size": 5}, {})


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ((), None),
        (("notes.txt", "run.json"), None),
        (("iter_0000001/notes.txt",), FolderType.RUN),
        ((f"iter_0000001/{LEGACY_FILE}", "latest_checkpointed_iteration.txt"), FolderType.LEGACY),
        ((f"release/{LEGACY_FILE}",), FolderType.LEGACY),
        ((LEGACY_FILE,), FolderType.LEGACY),
        (("iter_0000001/metadata.json", "iter_0000001/common.pt", "latest_checkpointed_iteration.txt"), FolderType.DIST),
        (("metadata.json", "common.pt"), FolderType.DIST),
        (("metadata.json",), None),
        (("config.json",), None),
    ],
)
def test_what_a_folder_is(tmp_path: Path, files: tuple[str, ...], kind: FolderType | None) -> None:
    for name in files:
        put(tmp_path / name)
    assert detect_folder_type(open_storage(tmp_path)) is kind


def test_what_a_config_makes_of_it(tmp_path: Path) -> None:
    put(tmp_path / "config.json", '{"model_type": "gpt2"}')
    assert detect_folder_type(open_storage(tmp_path)) is FolderType.HUGGING_FACE
    for text in ('{"config": {}}', '["model_type"]', "{", "[" * 100_000):
        put(tmp_path / "config.json", text)
        assert detect_folder_type(open_storage(tmp_path)) is None


def test_a_save_folder_in_which_another_program_left_something(tmp_path: Path) -> None:
    put(tmp_path / "iter_0000001" / LEGACY_FILE)
    save(tmp_path, 2)
    assert detect_folder_type(open_storage(tmp_path)) is FolderType.RUN
    assert open_source(tmp_path).name == str(tmp_path / "iter_0000002")


def test_a_run_and_one_checkpoint_of_it(tmp_path: Path) -> None:
    for iteration in (1, 2):
        save(tmp_path, iteration)
    for path, step, found in ((tmp_path, None, 2), (tmp_path, 1, 1), (tmp_path / "iter_0000001", None, 1), (str(tmp_path), 2, 2)):
        source = open_source(path, step)
        assert isinstance(source, StoredCheckpoint)
        assert source.weights.keys() == {"a"} and source.tensors.keys() == {"model.a", "exp_avg.a"} and source.vocab_size == 5
        assert torch.equal(source.read("a"), torch.arange(12.0).view(3, 4) + found)
        assert torch.equal(
            source.read_stored("exp_avg.a", TensorSlice((1, 1), (2, 2))), -(torch.tensor([[5.0, 6], [9, 10]]) + found)
        )
    (tmp_path / "iter_0000002" / "manifest.json").unlink()
    source = open_source(tmp_path)
    assert source.name == str(tmp_path / "iter_0000001") and "iter_0000002 is not a complete checkpoint" in source.notes[0]


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    put(tmp_path / "other" / "notes.txt")
    put(tmp_path / "legacy" / "iter_0000005" / LEGACY_FILE)
    put(tmp_path / "face" / "config.json", '{"model_type": "gpt2"}')
    for path, step, words in (
        ("none", None, "no such folder, or it is empty"),
        ("other", None, r"holds no weights in a supported format \(notes.txt\)"),
        ("run", 7, "--ckpt-step 7|has no checkpoint of this iteration"),
        ("run/iter_0000001", 1, "one checkpoint, so no iteration .1. can be selected"),
        ("face", 1, "a Hugging Face folder, so no iteration .1. can be selected"),
        ("legacy", 6, "has no iteration 6"),
    ):
        with pytest.raises(CheckpointError, match=words):
            open_source(tmp_path / path, step)
