"""The record of a run: what is written is read back, and what does not count is left out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.metrics.history import HISTORY_FILE, HistoryFile, read_first_losses, read_history

SEQUENCE = 16


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def take(file: HistoryFile, iterations: range, *, loss: float = 1.0, batch: int = 4, before: int = 0) -> None:
    """Steps of one batch size, behind so many samples."""
    for number, iteration in enumerate(iterations, 1):
        numbers: dict[str, Any] = {"lm_loss": loss + iteration, "grad_norm": 0.5, "learning_rate": 1e-3, "seconds": 0.25}
        file.add_step(iteration, before + number * batch, batch, **numbers)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """Steps by number, with tokens that follow a batch that grows; other lines in their places; a NaN is no number."""
    clock = Clock()
    file = HistoryFile(tmp_path, SEQUENCE, clock)
    file.write_start(0, 0, 0, {"world_size": 2, "peak_flops": math.inf})
    take(file, range(1, 4))
    take(file, range(4, 6), batch=8, before=12)
    file.write_line("log", 5, 28, {"lm_loss": 3.0, "spent": {"steps": 1.5, "saves": math.nan}})
    file.write_line("evaluation", 5, 28, {"validation_loss": 2.5})
    file.add_step(6, 36, 8, lm_loss=math.nan, grad_norm=None, learning_rate=1e-3, seconds=0.1)
    file.write_line("event", 6, 36, {"event": "end", "words": "done"})
    file.close()
    found = read_history(tmp_path)
    assert [(step.iteration, step.tokens // SEQUENCE, step.batch) for step in found.steps] == [
        *((1, 4, 4), (2, 8, 4), (3, 12, 4), (4, 20, 8), (5, 28, 8), (6, 36, 8))
    ]
    assert [step.lm_loss for step in found.steps] == [2.0, 3.0, 4.0, 5.0, 6.0, None]
    assert found.steps[0][-3:] == (0.5, 1e-3, 0.25) and found.steps[-1].grad_norm is None
    assert found.starts[0]["world_size"] == 2 and found.starts[0]["peak_flops"] is None and found.starts[0]["format"] == 1
    assert found.logs[0]["spent"] == {"steps": 1.5, "saves": None} and found.logs[0]["tokens"] == 28 * SEQUENCE
    assert found.evaluations[0]["validation_loss"] == 2.5 and found.events[0]["words"] == "done"
    assert all(json.loads(line)["time"] == 1000.0 for line in (tmp_path / HISTORY_FILE).read_text().splitlines())


def test_steps_are_written_soon(tmp_path: Path) -> None:
    """With the next line of another kind, or after half a minute; so a run that is killed leaves almost all."""
    clock = Clock()
    file = HistoryFile(tmp_path, SEQUENCE, clock)
    take(file, range(1, 3))
    assert not read_history(tmp_path).steps
    clock.now += 31
    take(file, range(3, 4))
    assert len(read_history(tmp_path).steps) == 3
    take(file, range(4, 5))
    file.write_line("event", 4, 16, {"event": "save", "words": ""})
    assert len(read_history(tmp_path).steps) == 4


def test_steps_that_are_made_again_count_once(tmp_path: Path) -> None:
    """After a restart from an earlier checkpoint with longer samples, half a line of the start that was killed, and a rewind."""
    file = HistoryFile(tmp_path, SEQUENCE)
    file.write_start(0, 0, 0, {})
    take(file, range(1, 8))
    file.write_line("evaluation", 5, 20, {"validation_loss": 8.0})
    file.write_line("evaluation", 7, 28, {"validation_loss": 9.0})
    file.close()
    with (tmp_path / HISTORY_FILE).open("a") as text:
        text.write('{"kind": "steps", "iterat')
    file = HistoryFile(tmp_path, 2 * SEQUENCE)
    file.write_start(5, 20, 20 * SEQUENCE, {})
    take(file, range(6, 10), loss=100.0, before=20)
    file.write_line("event", 8, 32, {"event": "rewind", "words": "", "left": 9})
    take(file, range(9, 11), loss=200.0, before=40)
    file.close()
    found = read_history(tmp_path / HISTORY_FILE)
    assert [step.iteration for step in found.steps] == [*range(1, 11)]
    assert [step.lm_loss for step in found.steps] == [2, 3, 4, 5, 6, 106, 107, 108, 209, 210]
    assert found.steps[4].tokens == 20 * SEQUENCE and found.steps[5].tokens == 20 * SEQUENCE + 4 * 2 * SEQUENCE
    assert len(found.starts) == 2 and found.num_unreadable == 1
    assert [line["validation_loss"] for line in found.evaluations] == [8.0]


def test_the_first_losses_are_found(tmp_path: Path) -> None:
    """Those of the run that goes on in the folder, not of one that began there before."""
    assert read_first_losses(tmp_path, 5) == []
    for loss in (1.0, 50.0):
        file = HistoryFile(tmp_path, SEQUENCE)
        file.write_start(0, 0, 0, {})
        for begin in (1, 3):
            take(file, range(begin, begin + 2), loss=loss)
            file.flush()
        file.write_start(3, 12, 12 * SEQUENCE, {})
        file.close()
    assert read_first_losses(tmp_path, 3) == [51.0, 52.0, 53.0]


def test_a_folder_without_a_record_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no history file .*history.jsonl.*--save, or of --tensorboard-dir"):
        read_history(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"iteration": [1]},
        {"iteration": -1},
        {"iteration": 10**400},
        {"tokens": None},
        {"batch": "2"},
        {"kind": ["steps"]},
        {"lm_loss": None},
        {"lm_loss": ["x", 1.0]},
        {"grad_norm": [10**400, 1.0]},
        {"kind": "log", "spent": 3},
        {"kind": "log", "timers_ms": {"forward": "x"}},
        {"kind": "event", "event": "rewind", "words": 5},
        {"kind": "evaluation", "validation_loss": {}},
        {"kind": "start", "layout": []},
    ],
)
def test_lines_of_other_types_are_skipped(tmp_path: Path, changes: dict[str, object]) -> None:
    """And counted; the pages that read the history need no checks of their own."""
    lists = {name: [1.0, 2.0] for name in ("lm_loss", "grad_norm", "learning_rate", "seconds")}
    line = {"kind": "steps", "time": 1.0, "iteration": 2, "tokens": 64, "batch": 2, "seq_length": 16, **lists}
    texts = [json.dumps(line), json.dumps({**line, **changes}), "[" * 100_000, json.dumps({**line, "iteration": 4})]
    (tmp_path / HISTORY_FILE).write_text("\n".join(texts) + "\n")
    found = read_history(tmp_path)
    assert [step.iteration for step in found.steps] == [1, 2, 3, 4] and found.num_unreadable == 2
    assert not (found.logs or found.events or found.evaluations or found.starts)


def test_samples_after_a_return_do_not_count(tmp_path: Path) -> None:
    file = HistoryFile(tmp_path, SEQUENCE, Clock())
    file.write_start(0, 0, 0, {})
    for iteration in (2, 4):
        file.write_line("samples", iteration, 0, {"samples": [{"prompt": "a", "text": f"of {iteration}"}]})
    file.write_line("event", 3, 0, {"event": "rewind", "words": "", "left": 4})
    file.write_line("samples", 4, 0, {"samples": [{"prompt": "a", "text": "again"}]})
    file.write_line("samples", 5, 0, {"samples": [{"prompt": "a"}, "no object"]})
    file.close()
    found = read_history(tmp_path)
    assert [line["samples"][0]["text"] for line in found.samples] == ["of 2", "again"] and found.num_unreadable == 1
