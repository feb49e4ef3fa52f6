"""The file of a trace: what is written is read again, also after a kill and a resume; what is no trace is named."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest

from megatron_lab.audit.trace_file import Signature, TraceHeader, TraceStep, TraceWriter, read_trace

HEADER = TraceHeader(
    settings={"training": {"seed": 3}},
    layout={"tp": 2, "cp": 1, "dp": 1, "pp": 1},
    layers=[(0, [0, 1]), (1, [2])],
    dtype="bfloat16",
    torch="2.13.0",
    vocab_size=61,
    parameters={"final_norm.weight": [4]},
)
STEP = TraceStep(
    iteration=6,
    samples=8,
    consumed_samples=48,
    loss=1 / 3,
    tokens=128.0,
    grad_norm=0.1,
    learning_rate=1e-3,
    weight_decay=0.1,
    loss_scale=1.0,
    skipped=False,
    gradients={"final_norm.weight": (1.0, 0.1, -0.2, 1e-300, 5.0)},
    weights={"final_norm.weight": (2.0, 0.1 + 0.2, -0.2, 1e300, 5.0)},
)


def write(path: Path, *, append: bool = False, steps: tuple[TraceStep, ...] = (STEP,)) -> None:
    writer = TraceWriter(path, append=append)
    writer.write_header(HEADER)
    writer.write_start(5, STEP.weights)
    for step in steps:
        writer.write_step(step)
    writer.close()


def test_there_and_back(tmp_path: Path) -> None:
    """Every digit, in a folder that is made."""
    write(tmp_path / "a" / "trace")
    (run,) = read_trace(tmp_path / "a" / "trace")
    assert run.header == HEADER and run.iteration == 5 and run.weights == STEP.weights and run.steps == [STEP]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    weights: dict[str, Signature] = {"final_norm.weight": (math.inf, math.nan, 1.0, 2.0, 3.0)}
    write(tmp_path / "t", steps=(dataclasses.replace(STEP, loss=math.nan, grad_norm=math.inf, weights=weights, gradients={}),))
    for line in (tmp_path / "t").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    (step,) = read_trace(tmp_path / "t")[0].steps
    assert math.isnan(step.loss) and math.isnan(step.grad_norm) and step.gradients == {}
    assert [math.isnan(number) for number in step.weights["final_norm.weight"]] == [True, True, False, False, False]


def test_a_resumed_run_goes_on_in_the_file(tmp_path: Path) -> None:
    """Behind a line that a kill has cut off, too; a run that begins anew begins the file anew."""
    path = tmp_path / "t"
    write(path)
    path.write_text(path.read_text() + path.read_text().splitlines()[-1][:100])
    assert len(read_trace(path)[0].steps) == 1
    write(path, append=True, steps=(STEP, STEP))
    assert [len(run.steps) for run in read_trace(path)] == [1, 2]
    write(path)
    assert [len(run.steps) for run in read_trace(path)] == [1]


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_trace(path)
    for text, words in (
        ("", "contains no run"),
        ("hello\nworld\n", "line 1: not valid JSON"),
        ('{"a": 1}\n', r"line 1: not in the format of --save-trace \(KeyError\('kind'\)\)"),
        ("[1]\n", "line 1: not in the format"),
        ('{"kind": "step"}\n', "line 1: not in the format"),
        ('{"kind": "header", "version": 2}\n', "line 1: .*version 2, but this program reads only version 1"),
        ('{"kind": "header", "version": 1, "dtype": "x"}\n', "line 1: not in the format"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            read_trace(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read"):
        read_trace(path)


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "t", steps=(STEP, STEP))
    lines = (tmp_path / "t").read_text().splitlines()
    lines[2] = lines[2][:50]
    (tmp_path / "t").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="line 3: not valid JSON"):
        read_trace(tmp_path / "t")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"--save-trace .*/file/t cannot be written: .*/file is not a folder. Give another path"):
        TraceWriter(tmp_path / "file" / "t", append=False)
    with pytest.raises(ValueError, match=r"--save-trace .*/pipe cannot be written: it is a pipe.* Give the path of a file"):
        TraceWriter(tmp_path / "pipe", append=False)
    with pytest.raises(ValueError, match=r"trace .*/pipe cannot be read: it is not a regular file, but a pipe"):
        read_trace(tmp_path / "pipe")
