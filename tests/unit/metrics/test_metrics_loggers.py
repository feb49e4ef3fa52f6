"""What the sinks write."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.config.cli import load
from megatron_lab.monitoring.curve_sinks.tensorboard_sink import TensorBoard, get_grouped_tag
from megatron_lab.monitoring.loggers import MetricsFile, build_curve_sinks
from tests.support.runs import arguments


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


def test_tensorboard_drops_points_of_abandoned_steps(tmp_path: Path) -> None:
    """After a resume from an earlier checkpoint, and after a rewind in the same process; tags that are not written again too."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def log(board: TensorBoard, iterations: range, value: float) -> None:
        for iteration in iterations:
            board.log_scalars(iteration, 8 * iteration, {"lm_loss": value})
            board.log_text(iteration, 8 * iteration, "samples/first", f"text {value}\n# of {iteration}")

    board = TensorBoard(str(tmp_path))
    log(board, range(1, 7), 1.0)
    board.log_scalars(5, 40, {"grad_norm": 1.0})
    board.close()
    board = TensorBoard(str(tmp_path), first_iteration=5)
    log(board, range(5, 8), 2.0)
    board.rewind(5)
    log(board, range(6, 7), 3.0)
    board.close()
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss/training")] == [
        *((step, 1.0) for step in range(1, 5)),
        *((5, 2.0), (6, 3.0)),
    ]
    assert events.Scalars("optimizer/gradient norm") == []
    texts = events.Tensors("samples/first/text_summary")  # this reader never removes texts; TensorBoard's server does
    assert texts[-1].step == 6
    assert texts[-1].tensor_proto.string_val == [b"    text 3.0\n    # of 6\n"]


def test_tensorboard_keeps_points_after_its_disk_was_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that a new writer begins must not remove the points of the file before."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(str(tmp_path), first_iteration=3)
    board.log_scalars(3, 24, {"lm_loss": 1.0})
    writer = board._writer

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, "add_scalar", fail)
    board.log_scalars(4, 32, {"lm_loss": 1.0})
    writer.close()
    board.log_scalars(5, 40, {"lm_loss": 1.0})
    board.close()
    assert [event.step for event in EventAccumulator(str(tmp_path)).Reload().Scalars("loss/training")] == [3, 5]


def test_megatron_tags_keep_the_curves_over_samples(tmp_path: Path) -> None:
    """An event that removes points from an iteration on would remove all points by samples, whose counts are higher."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first in (1, 3):
        board = TensorBoard(str(tmp_path), "megatron", first_iteration=first)
        board.log_scalars(first, 8 * first, {"lm_loss": 1.0, "validation_loss/web": 2.0})
        board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(event.step for event in events.Scalars("lm loss vs samples")) == [8, 24]
    assert {"lm loss validation-web", "lm loss validation-web ppl", "lm loss validation-web vs samples"} <= set(
        events.Tags()["scalars"]
    )


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("validation_loss/web", "loss/validation, web"),
        ("validation_mtp_loss/web", "loss/validation, multi-token, web"),
        ("busiest_expert/layers.0", "moe/busiest_expert, layers.0"),
    ],
)
def test_losses_of_several_sets_are_beside_the_others(name: str, tag: str) -> None:
    assert get_grouped_tag(name) == tag


@pytest.mark.parametrize(
    ("flag", "module", "extra"),
    [
        ({"wandb_project": "p"}, "wandb", r"\[wandb\]"),
        ({"mlflow_experiment": "x"}, "mlflow", r"\[mlflow\]"),
        ({"trackio_project": "p"}, "trackio", r"\[trackio\]"),
    ],
)
def test_a_missing_package_is_refused_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, flag: dict[str, str], module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    name = next(iter(flag)).replace("_", "-")
    with pytest.raises(ValueError, match=rf"--{name} needs {module}, which is not installed.\n.* pip install -e .*{extra}"):
        load(arguments(train_iters=8, **flag), 1)


def test_only_what_is_asked_for_is_opened(tmp_path: Path) -> None:
    assert build_curve_sinks(load(arguments(train_iters=8), 1).config, 0, {}) == []
    (sink,) = build_curve_sinks(load(arguments(train_iters=8, tensorboard_dir=tmp_path / "curves"), 1).config, 0, {})
    assert isinstance(sink, TensorBoard) and (tmp_path / "curves").is_dir()
    sink.close()
