"""Which run of a logger a start continues: the file loggers.json of the save folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

from megatron.config.cli import load
from megatron_lab.monitoring.curve_sinks.run_links import LOGGERS_FILE, RunLinks, RunStart, call_with_timeout, open_run_start
from tests.support.runs import arguments

TARGET = {"project": "p", "entity": None}


def begin(
    save: Path | str | None, iteration: int, target: dict[str, Any] | None = None, **flags: Any
) -> tuple[dict[str, Any], bool]:
    """The entry of a start, which is then stored; and whether it continues a run."""
    start = open_start(save, iteration, **flags)
    entry, is_continued = start.links.get_entry("wandb", target or TARGET)
    start.links.store("wandb", entry)
    return entry, is_continued


def open_start(save: Path | str | None, iteration: int, **flags: Any) -> RunStart:
    return open_run_start(load(arguments(train_iters=8, save=save, wandb_project="p", **flags), 1).config, iteration, {})


@pytest.fixture(params=["local", "object store"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "checkpoints")
    fsspec.filesystem("memory").store.clear()
    return "memory://bucket/checkpoints"


def test_a_restart_continues_the_run_of_its_save_folder(save: str) -> None:
    entry, is_continued = begin(save, 0, load=save)
    assert not is_continued and len(entry["id"]) == 8
    assert begin(save, 4, load=save) == (entry, True)
    assert begin(save, 0, load=save) == (entry, True), "killed before the first checkpoint"
    new, is_continued = begin(save, 0)
    assert not is_continued and new["id"] != entry["id"] and "parent" not in new, "a new run in the same folder"


def test_another_target_or_folder_begins_a_new_run_with_a_link(save: str) -> None:
    entry, _ = begin(save, 0)
    branch, is_continued = begin(f"{save}-branch", 4, load=save)
    assert not is_continued and branch["parent"] == entry != branch
    assert begin(f"{save}-branch", 6, load=f"{save}-branch") == (branch, True)
    moved, is_continued = begin(save, 4, {"project": "other", "entity": None}, load=save)
    assert not is_continued and moved["project"] == "other" and moved["parent"]["id"] == entry["id"]


def test_a_copied_folder_is_a_new_run_and_a_moved_one_is_not(tmp_path: Path) -> None:
    entry, _ = begin(tmp_path / "a", 0)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    copied, is_continued = begin(tmp_path / "copy", 4, load=tmp_path / "copy")
    assert not is_continued and copied["parent"]["id"] == entry["id"] != copied["id"]
    shutil.move(tmp_path / "a", tmp_path / "moved")
    assert begin(tmp_path / "moved", 4, load=tmp_path / "moved") == (entry, True)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"wandb"', b"\xff\xfe", b'{"wandb": 3}', b'{"wandb": {"id": 3}}', b'{"wandb": {"id": "x"}}']
    + [b'{"folder": ["x"], "wandb": {"id": "x", "project": 5}}', b'{"folder": "\\u0000", "wandb": {"id": "x", "project": "p"}}'],
)
def test_a_damaged_file_begins_a_new_run(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOGGERS_FILE).write_bytes(content)
    entry, _ = begin(tmp_path, 4, load=tmp_path)
    assert json.loads((tmp_path / LOGGERS_FILE).read_bytes())["wandb"] == entry
    assert begin(tmp_path, 4, load=tmp_path) == (entry, True)


def test_entries_of_other_loggers_stay(tmp_path: Path) -> None:
    begin(tmp_path, 0)
    links = open_start(tmp_path, 4, load=tmp_path).links
    links.store("mlflow", {"id": "y"})
    assert set(json.loads((tmp_path / LOGGERS_FILE).read_bytes())) == {"folder", "wandb", "mlflow"}


def test_without_a_save_folder_nothing_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert begin(None, 0)[0] != begin(None, 0)[0]
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    RunLinks(str(tmp_path / "file" / "save"), None, is_restart=True).store("wandb", {"id": "x"})
    assert f"WARNING: {LOGGERS_FILE} in {tmp_path}/file/save cannot be" in capsys.readouterr().err


def test_an_action_that_hangs_is_left_alone() -> None:
    import threading

    blocked = threading.Event()
    assert isinstance(call_with_timeout(blocked.wait, 0.05), TimeoutError)
    blocked.set()
    assert call_with_timeout(lambda: None, 5.0) is None
    assert isinstance(call_with_timeout(lambda: 1 / 0, 5.0), ZeroDivisionError)
