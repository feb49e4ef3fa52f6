"""The process that draws a run's picture cannot hold up the run; the picture shows the record."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.config.version import get_extra_install_command
from megatron.metrics.history import HistoryFile, read_history
from megatron_lab.commands import plot_loss
from megatron_lab.monitoring import loss_picture
from megatron_lab.monitoring.loss_picture import PICTURE_FILE, LossPicture, describe_missing_library


def program(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", f"import sys, time; {code}"]


def count(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def until(path: Path, size: int) -> None:
    """Wait for a file to be so large."""
    for _ in range(2000):
        if count(path) >= size:
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} has {count(path)} bytes")


def test_it_is_drawn_at_intervals_and_at_the_end(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    draw = program(f"open({str(marks)!r}, 'a').write(sys.argv[-1][-1])")
    picture = LossPicture(draw, tmp_path / "x", interval_s=0.01, first_delay_s=0.0)
    picture.start()
    until(marks, 2)
    picture.close()
    assert not picture._thread.is_alive()
    drawn = count(marks)
    LossPicture(draw, tmp_path / "x").close()  # a run that never began
    assert count(marks) == drawn

    picture = LossPicture(draw, tmp_path / "x", first_delay_s=1e6)
    picture.start()
    picture.close()
    assert count(marks) == drawn + 1
    picture.close_without_waiting()
    until(marks, drawn + 2)


def test_the_end_says_what_it_writes_or_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If time is short nothing is written, and the log has the command that writes it; a slow end is left to it too."""
    marks, folder, log = tmp_path / "marks", tmp_path / "my run", list[str]()
    mark, hang = program(f"open({str(marks)!r}, 'a').write('x')"), program("sys.stdin.read(); time.sleep(100)")
    later, report = ". To write them:\n  ", f"python tools/report.py '{folder}'"
    with LossPicture(mark, folder, mark, first_delay_s=1e6, log=log.append):
        pass
    assert count(marks) == 2 and log == [f"writing loss.png and report.html into {folder} ..."]

    log.clear()
    with LossPicture(mark, folder, mark, first_delay_s=1e6, log=log.append, is_time_short=lambda: True) as picture:
        pass
    picture._thread.join(10)
    assert not picture._thread.is_alive() and count(marks) == 2
    assert log == [
        f"to end quickly, the run leaves out loss.png and report.html{later}python tools/plot_loss.py '{folder}'; {report}"
    ]

    log.clear()
    monkeypatch.setattr(loss_picture, "_CLOSE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(loss_picture, "_PROCESS_TIMEOUT_S", 0.2)
    with LossPicture(None, folder, hang, first_delay_s=1e6, log=log.append) as picture:
        pass
    assert log[1:] == [f"this takes more than 0 s, so the run ends without it{later}{report}"]
    picture._thread.join(10)


def test_what_goes_wrong_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that fails, one that hangs, and one that is not there."""
    for command, reason in (
        (program("sys.exit('first\\nno space left')"), "no space left"),
        (program("sys.exit(3)"), "exit status 3"),
        ([str(tmp_path / "nothing")], "No such file or directory"),
        (program("time.sleep(100)"), "it took more than 0.2 s"),
    ):
        if "0.2" in reason:
            monkeypatch.setattr(loss_picture, "_PROCESS_TIMEOUT_S", 0.2)
        picture = LossPicture(command, tmp_path, first_delay_s=1e6)
        picture._make_file(PICTURE_FILE)
        picture._make_file(PICTURE_FILE)
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1 and reason in said[0] and said[0].endswith("training continues without it")


def test_the_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_missing_library() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert get_extra_install_command("matplotlib") in (describe_missing_library() or "")


def record(folder: Path, steps: int) -> None:
    """A run that was started again in its middle, with NaN, a spike and evaluations."""
    file = HistoryFile(folder, 64)
    for begin, end in ((0, steps // 2 + 1), (steps // 2, steps)):
        file.write_start(begin, begin * 2, begin * 128, {"total_iterations": 2 * steps})
        for iteration in range(begin + 1, end + 1):
            loss = float("nan") if iteration == 2 else 2.0 + 8 / iteration
            file.add_step(iteration, 2 * iteration, 2, lm_loss=loss, grad_norm=1.0, learning_rate=1e-3, seconds=0.1)
            if iteration % 3 == 0 and iteration < 30:
                file.write_line("evaluation", iteration, 2 * iteration, {"validation_loss": loss})
    file.write_line("event", 3, 6, {"event": "spike", "words": ""})
    file.close()


def test_records_of_any_length_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than have a point each, some, and one step; a file that was there is replaced or left as it is."""
    monkeypatch.setattr(plot_loss, "_MAX_POINTS", 200)
    for steps in (201, 150, 7, 1):
        folder = tmp_path / str(steps)
        record(folder, steps)
        assert [step.iteration for step in read_history(folder).steps] == [*range(1, steps + 1)]
        assert plot_loss.main([str(folder)]) == 0
        assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
        assert sorted(path.name for path in folder.iterdir()) == ["history.jsonl", "loss.png"]
    (tmp_path / "taken.svg").mkdir()
    assert plot_loss.main([str(folder), "--output", str(tmp_path / "taken.svg")]) == 1
    assert "taken.svg is a folder" in capsys.readouterr().err and not [*tmp_path.glob(".taken*")]
    (tmp_path / "new").mkdir()
    assert plot_loss.main([str(tmp_path / "new")]) == 1 and "there is no history file" in capsys.readouterr().err
    HistoryFile(tmp_path / "new", 1).close()
    assert plot_loss.main([str(tmp_path / "new")]) == 0 and "no steps yet" in capsys.readouterr().out


def test_the_smoothed_curve_is_a_mean_of_neighbours() -> None:
    """Over as many on both sides at the beginning; over those that there are at the end; without what is not a number."""
    values = np.array([10.0, 4.0, 1.0, np.nan, 3.0, 2.0])
    assert plot_loss.smooth(values, 1).tolist() == [10.0, 5.0, 2.5, 2.0, 2.5, 2.5]
    assert plot_loss.smooth(values, 2)[1] == 5.0
