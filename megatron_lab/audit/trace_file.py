"""Trace file (--save-trace): JSON lines that record the results of the first steps, to compare runs. This module does not need
torch.

At each start of a run, the file gets a header line with the settings and a start line with the weights. A step line with the
results follows for each step. A tensor is described by its norm and the four signed sums of its signature (`signature.py`), which
are equal at every layout up to rounding. Numbers have full precision. A number that is not finite is written as null. A run that
resumes appends to the file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.regular_file import parse_json, read_text
from megatron.metrics.log_line import LineFile

VERSION = 1

NUM_SIGNS = 4
"""Number of signed sums in a signature."""
SIGNATURE_SIZE = NUM_SIGNS + 1
"""Number of values in a signature."""
Signature = tuple[float, ...]
"""Norm of a tensor, then its signed sums."""


@dataclass(frozen=True)
class TraceHeader:
    """Header line that a trace has for each start of a run: settings, layout and parameter shapes. They show which traces can be
    compared."""

    settings: dict[str, Any]
    """All settings by topic (model, training, ...), as returned by `config.save.to_dict`."""
    layout: dict[str, int]
    """Number of ranks along the axes tp, cp, dp and pp."""
    layers: list[tuple[int, list[int]]]
    """For each model chunk, in the order of the forward pass: its pipeline stage, and the indices of its layers."""
    dtype: str
    """Dtype of the model, e.g. bfloat16."""
    torch: str
    vocab_size: int
    parameters: dict[str, list[int]]
    """Shape of each parameter of the unsharded model by name, in the order of the forward pass."""


@dataclass(frozen=True)
class TraceStep:
    """Results of one training step in a trace: batch, loss, and signatures (norm and four signed sums) of gradients and weights."""

    iteration: int
    samples: int
    """Number of samples in the global batch."""
    consumed_samples: int
    """Number of samples that the run has consumed up to and including this step."""
    loss: float
    tokens: float
    """Number of tokens that count in the loss: the sum of the loss mask over the global batch."""
    grad_norm: float
    learning_rate: float
    weight_decay: float
    loss_scale: float
    skipped: bool
    """Whether the update was skipped because the gradient overflowed. The step then has no gradients in the trace."""
    gradients: dict[str, Signature]
    """Signature of each parameter's gradient by name: gradient of the mean loss over the global batch, before clipping."""
    weights: dict[str, Signature]
    """Signature of each parameter by name, after the update and in the precision of the main parameters."""


@dataclass
class TraceRun:
    """Contents of a trace for one start of a run: header, initial weights and steps."""

    header: TraceHeader
    iteration: int = 0
    """Number of training steps that were completed before this start."""
    weights: dict[str, Signature] = field(default_factory=dict)
    """Signature (norm and four signed sums) of each parameter by name, before the first step."""
    steps: list[TraceStep] = field(default_factory=list)


class TraceWriter:
    """Writer of a trace file. Each call of a `write_` method writes one complete line.

    Args:
        append: append to an existing file (a resumed run) instead of creating a new file.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, path: str | Path, *, append: bool) -> None:
        self._file = LineFile("--save-trace", path, append=append)

    def write_header(self, header: TraceHeader) -> None:
        """Write the header line: settings, layout and parameter shapes. Each start of the run writes one."""
        self._write({"kind": "header", "version": VERSION, **dataclasses.asdict(header)})

    def write_start(self, iteration: int, weights: Mapping[str, Signature]) -> None:
        """Write the start line: the signatures of the weights before the first step.

        Args:
            iteration: number of completed training steps.
            weights: signature (norm and four signed sums) of each parameter, by name.
        """
        self._write({"kind": "start", "iteration": iteration, "weights": dict(weights)})

    def write_step(self, step: TraceStep) -> None:
        """Write the step line: the results of one training step."""
        self._write({"kind": "step", **dataclasses.asdict(step)})

    def close(self) -> None:
        """Close the trace file."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(_replace_nonfinite(line), allow_nan=False))


def read_trace(path: str | Path) -> list[TraceRun]:
    """Read a trace file. Return one `TraceRun` for each start of the run. A truncated last line and lines of unknown types are
    ignored.

    Raises:
        ValueError: the file cannot be read, or is not a trace. The message names the file and the line.
    """
    try:
        text = read_text(Path(path), sys.maxsize)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"trace {path} cannot be read: {getattr(error, 'strerror', None) or error}. Check the path, or record the trace again "
            "with --save-trace"
        ) from error
    runs: list[TraceRun] = []
    lines = text.splitlines()
    for line_number, line in enumerate(lines, 1):
        try:
            values = parse_json(line)
        except ValueError as error:
            if line_number == len(lines) or lines[line_number].startswith('{"kind": "header"'):
                continue  # truncated when the run was killed
            raise ValueError(
                f"trace {path}, line {line_number}: not valid JSON ({getattr(error, 'msg', error)}). The file is damaged: copy it "
                "again."
            ) from error
        try:
            _add_line(runs, values)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(
                f"trace {path}, line {line_number}: not in the format of --save-trace ({error!r}). If the file is not damaged, "
                "another version of the program wrote it: record the trace again with --save-trace."
            ) from error
    if not runs:
        raise ValueError(
            f"trace {path} contains no run, because it has no header line: the file is empty, or --save-trace did not write it. "
            "Choose another file, or record the trace again"
        )
    return runs


def _add_line(runs: list[TraceRun], line: dict[str, Any]) -> None:
    line_type = line.pop("kind")
    if line_type == "header":
        version = line.pop("version")
        if version != VERSION:
            raise ValueError(
                f"the trace has version {version}, but this program reads only version {VERSION}: use the version of the program "
                "that wrote the trace"
            )
        layers = [(int(stage), list(layers)) for stage, layers in line.pop("layers")]
        for name, size in line["layout"].items():
            _parse_int(name, size)
        for name, shape in line["parameters"].items():
            line["parameters"][name] = [_parse_int(name, size) for size in shape]
        runs.append(TraceRun(TraceHeader(layers=layers, **line)))
    elif line_type == "start":
        runs[-1].iteration = _parse_int("iteration", line["iteration"])
        runs[-1].weights = _parse_signatures("weights", line["weights"])
    elif line_type == "step":
        parsers = {field.name: _PARSERS[str(field.type)] for field in dataclasses.fields(TraceStep)}
        runs[-1].steps.append(TraceStep(**{name: parsers[name](name, value) for name, value in line.items()}))


def _parse_signatures(_: str, signatures: Mapping[str, list[Any]]) -> dict[str, Signature]:
    for name, values in signatures.items():
        if len(values) != SIGNATURE_SIZE:
            raise ValueError(
                f"the signature of the tensor {name} (values that summarize the tensor) has {len(values)} values instead of "
                f"{SIGNATURE_SIZE}: copy the trace file again"
            )
    return {name: tuple(_parse_float(name, value) for value in values) for name, values in signatures.items()}


def _parse_float(name: str, value: Any) -> float:
    if value is None:
        return math.nan
    if type(value) not in (int, float):
        raise TypeError(f"the value {value!r} of {name} in the trace is not a number: copy the trace file again")
    return float(value)


def _parse_int(name: str, value: Any) -> int:
    if type(value) is not int:  # isinstance would accept True
        raise TypeError(f"the value {value!r} of {name} in the trace is not an integer: copy the trace file again")
    return value


def _parse_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"the value {value!r} of {name} in the trace is neither true nor false: copy the trace file again")
    return value


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "int": _parse_int,
    "float": _parse_float,
    "bool": _parse_bool,
    "dict[str, Signature]": _parse_signatures,
}
"""Parser of a value of a step, by the type of its field."""


def _replace_nonfinite(value: Any) -> Any:
    """Return a copy of a JSON value in which None replaces NaN and infinity, which JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _replace_nonfinite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(item) for item in value]
    return value
