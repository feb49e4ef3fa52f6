"""The file in which a rank leaves its last message: torchrun reports that of the rank that failed first, and one rank speaks."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.config import launcher
from megatron.config.launcher import end_with_consequence, end_with_message, has_failed_neighbor, write_error_file

Rank = Callable[..., None]


@pytest.fixture
def become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """Make this process a local rank of torchrun."""
    monkeypatch.setattr(launcher, "_SPEAKER_PATIENCE_S", 0.1)
    monkeypatch.setattr(launcher, "_CAUSE_PATIENCE_S", 0.1)

    def as_rank(rank: int, first_of_node: int = 0) -> None:
        (tmp_path / str(rank)).mkdir(exist_ok=True)
        for name, value in {"RANK": rank + first_of_node, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))

    yield as_rank


def _report(folder: Path, ranks: int) -> str:
    """What torchrun prints at the end."""
    failures = {rank: ProcessFailure(rank, 100 + rank, 1, str(folder / str(rank) / "error.json")) for rank in range(ranks)}
    return str(ChildFailedError("pretrain_gpt.py", failures))


def _message(folder: Path, rank: int) -> str:
    return str(json.loads((folder / str(rank) / "error.json").read_text())["message"])


def test_an_error_of_all_ranks_is_told_by_the_first(tmp_path: Path, become: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1, 2):
        become(rank)
        end_with_message("--lr -1 is not possible\n  Use a rate above 0.")
    assert capsys.readouterr().err == "pretrain_gpt.py: --lr -1 is not possible\n  Use a rate above 0.\n"
    report = _report(tmp_path, 3)
    assert report.count("--lr -1 is not possible") == 1
    assert "--lr -1 is not possible\n  Use a rate above 0." in report.partition("Root Cause")[2]


def test_other_ranks_wait_for_the_first_of_their_node(
    tmp_path: Path, become: Rank, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a node without rank 0 too, where nothing is printed. If it never writes, another does."""
    monkeypatch.setattr(launcher, "_SPEAKER_PATIENCE_S", 60.0)
    become(0, first_of_node=4)
    write_later = threading.Timer(
        0.2, lambda: (tmp_path / "0" / "error.json").write_text('{"message": "refused", "timestamp": "1"}')
    )
    become(1, first_of_node=4)
    write_later.start()
    end_with_message("refused")
    assert (tmp_path / "0" / "error.json").exists() and _message(
        tmp_path, 1
    ) == "the message is that of the first rank of this node"
    write_later.join()
    (tmp_path / "0" / "error.json").unlink()
    monkeypatch.setattr(launcher, "_SPEAKER_PATIENCE_S", 0.1)
    end_with_message("refused")
    assert _message(tmp_path, 1) == "refused" and capsys.readouterr().err == ""


def test_the_cause_is_reported_not_what_follows_from_it(tmp_path: Path, become: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    become(0)
    end_with_consequence("rank 0: lost contact with rank 1")
    become(2)
    end_with_consequence("rank 2: lost contact with rank 0")  # the first has said it
    assert capsys.readouterr().err == "pretrain_gpt.py: rank 0: lost contact with rank 1\n" and not has_failed_neighbor()
    become(1)
    write_error_file("rank 1: the disk is full")
    assert not has_failed_neighbor()  # itself
    assert "rank 1: the disk is full" in _report(tmp_path, 3).partition("Root Cause")[2]
    become(2)
    assert has_failed_neighbor()
    end_with_consequence("rank 2: lost contact with rank 1")
    assert capsys.readouterr().err == ""


def test_without_error_files_every_rank_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(launcher, "_wait_until", lambda *_: pytest.fail("it waits for a file that cannot come"))
    end_with_consequence("rank 3: lost contact with rank 1")
    end_with_message("only rank 0 says this")
    assert capsys.readouterr().err == "pretrain_gpt.py: rank 3: lost contact with rank 1\n" and not has_failed_neighbor()


@pytest.mark.parametrize("path", ["error.json", "all/error.json", "1/mine.json"])
def test_a_file_that_is_arranged_in_another_way_is_this_rank_s_alone(
    tmp_path: Path, become: Rank, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    """A person has named it, or another launcher: nobody waits for the file of the first rank, or reads those of others."""
    become(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "error.json").write_text('{"message": "of another job", "timestamp": "1"}')
    monkeypatch.setattr(launcher, "_wait_until", lambda *_: pytest.fail("it waits for a file that cannot come"))
    end_with_message("refused")
    assert json.loads((tmp_path / path).read_text())["message"] == "refused" and not has_failed_neighbor()
    end_with_consequence("lost contact")
    assert capsys.readouterr().err == "pretrain_gpt.py: lost contact\n"


@pytest.mark.parametrize("lines", [1, 14, 15, 60])
def test_the_reason_fits_a_terminal(tmp_path: Path, become: Rank, lines: int) -> None:
    """24 rows of 80 columns, with whole lines from the first on, and the lines of torchrun around it."""
    become(0)
    words = [
        f"{number} problem with a long explanation that needs more than one row of a terminal-window" for number in range(lines)
    ]
    write_error_file("\n".join(words))
    rows = _report(tmp_path, 1).splitlines()
    at = max(index for index, row in enumerate(rows) if row.startswith("  traceback : "))
    assert all(len(row) <= 80 for row in rows[at:]), rows
    last = "\n".join(rows[-24:])
    num_shown, omitted = last.count("terminal-window"), re.search(r"in the log: (\d+) more lines\)\n", last)
    assert "traceback : 0 problem" in last and num_shown + (0 if omitted is None else int(omitted[1])) == lines
    assert (omitted is None) == (lines == 1) and (lines == 1 or num_shown > 5)
