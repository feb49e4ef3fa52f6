"""What the sinks write."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config.outputs import LoggingConfig
from megatron_lab.monitoring.loggers import MetricsFile, TensorBoard, WandB, build_curve_sinks


def strict_lines(path: Path) -> list[dict[str, Any]]:
    """The records, read as a strict reader does: NaN and Infinity are errors."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_metrics_file_has_full_digits_and_is_flushed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    metrics = MetricsFile(path, append=False)
    loss = 2.718281828459045
    metrics.log_scalars(10, 320, {"lm_loss": loss, "skipped": 0})
    assert strict_lines(path) == [{"iteration": 10, "consumed_samples": 320, "lm_loss": loss, "skipped": 0}]
    metrics.log_scalars(10, 320, {"validation_loss": 0.1 + 0.2})
    metrics.close()
    assert strict_lines(path)[1] == {"iteration": 10, "consumed_samples": 320, "validation_loss": 0.30000000000000004}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_json_cannot_say_is_null_and_marked(tmp_path: Path, value: float) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", append=False)
    metrics.log_scalars(1, 2, {"lm_loss": value, "grad_norm": 1.0})
    metrics.close()
    expected = {"iteration": 1, "consumed_samples": 2, "lm_loss": None, "grad_norm": 1.0, "nonfinite": True}
    assert strict_lines(tmp_path / "metrics.jsonl") == [expected]


def test_resumed_run_appends_after_half_a_line_and_a_new_run_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for iteration, append in ((1, True), (2, True)):
        metrics = MetricsFile(path, append=append)
        metrics.log_scalars(iteration, 0, {})
        metrics.close()
    assert [record["iteration"] for record in strict_lines(path)] == [1, 2]

    with path.open("a") as file:
        file.write('{"iterat')  # killed while writing
    metrics = MetricsFile(path, append=True)
    metrics.log_scalars(3, 0, {})
    metrics.close()
    lines = path.read_text().splitlines()
    assert lines[2] == '{"iterat' and json.loads(lines[3])["iteration"] == 3

    metrics = MetricsFile(path, append=False)
    metrics.log_scalars(9, 0, {})
    metrics.close()
    assert [record["iteration"] for record in strict_lines(path)] == [9]


def test_path_that_cannot_be_written_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (
        ("", "is a folder"),
        ("file/metrics.jsonl", "cannot be written: .*/file is not a folder"),
        ("pipe", "a pipe"),
    ):
        for append in (False, True):
            with pytest.raises(ValueError, match=rf"--metrics-file {tmp_path / name} .*{reason}"):
                MetricsFile(tmp_path / name, append=append)


def test_a_line_is_whole_or_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a disk that is full in the middle of a line, and then is not."""
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, append=False)
    metrics.log_scalars(1, 0, {})
    real = metrics._file._file

    class Full:
        """Takes five bytes, then none."""

        def __init__(self) -> None:
            self.room = 5

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken, self.room = real.write(data[: self.room]), 0
            return taken

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    for iteration in (2, 3):
        metrics._file._file = Full()  # type: ignore[assignment]
        metrics.log_scalars(iteration, 0, {})
    metrics._file._file = real
    metrics.log_scalars(4, 0, {})
    metrics.close()
    assert [record["iteration"] for record in strict_lines(path)] == [1, 4]
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"--metrics-file {path} cannot be written (No space left on device): training continues, but its output there is lost "
        "until writing works again",
        f"--metrics-file {path} is written again",
    ]


def test_tensorboard_has_the_tags_of_megatron(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(str(tmp_path), "megatron")
    board.log_scalars(10, 320, {"lm_loss": 4.0, "elapsed_ms": 250.0, "learning_rate": 0.5, "forward-time": 3.0})
    board.log_scalars(10, 320, {"validation_loss": 0.0, "test_loss": 1.0})
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    points = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    e = pytest.approx(2.718281828, rel=1e-6)
    curves = {
        "lm loss": 4.0,
        "iteration-time": 0.25,
        "learning-rate": 0.5,
        "lm loss validation": 0.0,
        "lm loss validation ppl": 1.0,
        "lm loss test": 1.0,
        "lm loss test ppl": e,
    }
    expected = {tag: [(10, value)] for tag, value in curves.items()}
    expected |= {f"{tag} vs samples": [(320, value)] for tag, value in curves.items()}
    assert points == expected | {"forward-time": [(10, 3.0)]}


def test_tensorboard_opens_on_the_loss(tmp_path: Path) -> None:
    """Each number is one curve, in a group; of all groups the loss comes first."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(str(tmp_path))
    names = (
        "lm_loss learning_rate tokens_per_s mfu memory_bytes busiest_expert busiest_expert/layers.0 forward-time compile_seconds"
    )
    board.log_scalars(10, 320, dict.fromkeys(names.split(), 4.0) | {"elapsed_ms": 250.0})
    board.log_scalars(10, 320, {"validation_loss": 1.0, "memory/parameters": 7.0, "grad-norm/layers.1": 1.0, "straggler_rank": 2})
    board.close()
    tags = sorted(EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"])
    assert tags == sorted(
        [
            *("loss/training", "loss/validation", "optimizer/learning rate", "speed/tokens per second", "speed/MFU"),
            *("speed/seconds a step", "memory/most bytes of rank 0", "memory/parameters", "moe/busiest expert"),
            *("moe/busiest_expert, layers.0", "norms/grad-norm, layers.1", "times/forward", "other/compile_seconds"),
            "other/straggler_rank",
        ]
    )
    assert tags[0].startswith("loss/")


def test_tensorboard_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ValueError, match="--tensorboard-dir needs .* tensorboard, which is not installed: pip install tensorboard"):
        TensorBoard(str(tmp_path))


def test_tensorboard_folder_that_cannot_be_made_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--tensorboard-dir .* cannot be written"):
        TensorBoard(str(tmp_path / "file" / "curves"))


def test_wandb_receives_values_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(log=lambda values, step: calls.append((values, step)), finish=lambda: calls.append("finished"))

    def init(**settings: Any) -> SimpleNamespace:
        calls.append(settings)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    board = WandB("project", "name", {"lr": 0.1})
    board.log_scalars(10, 320, {"lm_loss": 4.0})
    board.close()
    settings = {"project": "project", "name": "name", "config": {"lr": 0.1}, "entity": None, "dir": None}
    assert calls == [settings, ({"lm_loss": 4.0, "consumed_samples": 320}, 10), "finished"]


def test_wandb_without_the_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"--wandb-project needs the package wandb: pip install -e .*\[wandb\]"):
        WandB("project")


def test_only_what_is_asked_for_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened: list[Any] = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: opened.append(settings)))
    assert build_curve_sinks(LoggingConfig()) == [] == opened
    config = LoggingConfig(tensorboard_dir=str(tmp_path / "curves"), wandb_project="project", wandb_exp_name="name")
    config = replace(config, wandb_entity="team", wandb_save_dir=str(tmp_path / "files"))
    sinks = build_curve_sinks(config, {"lr": 1.0})
    assert [type(sink) for sink in sinks] == [TensorBoard, WandB]
    where = {"entity": "team", "dir": str(tmp_path / "files")}
    assert opened == [{"project": "project", "name": "name", "config": {"lr": 1.0}, **where}]
    assert (tmp_path / "files").is_dir()
    sinks[0].close()
    assert (tmp_path / "curves").is_dir()
