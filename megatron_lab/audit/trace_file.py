"""The file of a trace (--save-trace): JSON lines, one header for each start of the run, then one line a step. Needs no torch.

A header has the settings of the run, a start line the weights, a step line the results of the step. A tensor is described by its
norm and the four signed sums of its signature (see `signature.py`), which are the same at every layout but for rounding. Numbers
have full digits; one that is not finite is written as null. A run that resumes appends to the file.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.metrics.log_line import LineFile

VERSION = 1

NUM_SIGNS = 4
"""Signed sums in a signature."""
SIGNATURE_SIZE = NUM_SIGNS + 1
Signature = tuple[float, ...]
"""A tensor's norm, then its signed sums."""


@dataclass(frozen=True)
class TraceHeader:
    """The settings of a run."""

    settings: dict[str, Any]
    """All settings by topic, as `config.save.to_dict` makes them."""
    layout: dict[str, int]
    """Sizes of the axes tp, cp, dp and pp."""
    layers: list[tuple[int, list[int]]]
    """Pipeline stage and layers of each chunk, in order."""
    dtype: str
    """The model's dtype, e.g. bfloat16."""
    torch: str
    vocab_size: int
    parameters: dict[str, list[int]]
    """Global shapes by name, in the order of the forward."""


@dataclass(frozen=True)
class TraceStep:
    """The results of one training step."""

    iteration: int
    samples: int
    """Sequences of the global batch."""
    consumed_samples: int
    """Samples consumed after the step."""
    loss: float
    tokens: float
    """Sum of the loss mask over the global batch."""
    grad_norm: float
    learning_rate: float
    weight_decay: float
    loss_scale: float
    skipped: bool
    """Whether the update was skipped because the gradient overflowed; the line then has no gradients."""
    gradients: dict[str, Signature]
    """Signatures of the gradients of the mean loss, before clipping."""
    weights: dict[str, Signature]
    """Signatures of the weights after the update, as exact as the run keeps them."""


@dataclass
class TraceRun:
    """The lines that one start of a run wrote."""

    header: TraceHeader
    iteration: int = 0
    """Number of steps done at the start."""
    weights: dict[str, Signature] = field(default_factory=dict)
    """Signatures of the weights before the first step."""
    steps: list[TraceStep] = field(default_factory=list)


class TraceWriter:
    """Writes whole lines, each at once.

    Args:
        append: keep what is there (a resumed run) instead of beginning a new file.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, path: str | Path, *, append: bool) -> None:
        self._file = LineFile("--save-trace", path, append=append)

    def header(self, header: TraceHeader) -> None:
        """Write the header of a run."""
        self._write({"kind": "header", "version": VERSION, **dataclasses.asdict(header)})

    def start(self, iteration: int, weights: Mapping[str, Signature]) -> None:
        """Write the weights before the first step."""
        self._write({"kind": "start", "iteration": iteration, "weights": dict(weights)})

    def step(self, step: TraceStep) -> None:
        """Write one step."""
        self._write({"kind": "step", **dataclasses.asdict(step)})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(_finite(line), allow_nan=False))


def read_trace(path: str | Path) -> list[TraceRun]:
    """Read every start of a run in a trace file. A last line that was cut off, and lines of another kind, are left out.

    Raises:
        ValueError: it is no trace; names the file and the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"trace {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    runs: list[TraceRun] = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            read = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) or lines[number].startswith('{"kind": "header"'):
                continue  # cut off when the run was killed
            raise ValueError(f"trace {path}, line {number}: no JSON ({error.msg})") from error
        try:
            _enter(runs, read)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"trace {path}, line {number}: not as --save-trace writes it ({error!r})") from error
    if not runs:
        raise ValueError(f"trace {path} holds no run: the file of --save-trace begins with a header")
    return runs


def _enter(runs: list[TraceRun], line: dict[str, Any]) -> None:
    kind = line.pop("kind")
    if kind == "header":
        version = line.pop("version")
        if version != VERSION:
            raise ValueError(f"version {version}, and this program reads {VERSION}")
        layers = [(int(stage), list(layers)) for stage, layers in line.pop("layers")]
        for name, size in line["layout"].items():
            _whole(name, size)
        for name, shape in line["parameters"].items():
            line["parameters"][name] = [_whole(name, size) for size in shape]
        runs.append(TraceRun(TraceHeader(layers=layers, **line)))
    elif kind == "start":
        runs[-1].iteration = _whole("iteration", line["iteration"])
        runs[-1].weights = _signatures("weights", line["weights"])
    elif kind == "step":
        reads = {field.name: _READS[str(field.type)] for field in dataclasses.fields(TraceStep)}
        runs[-1].steps.append(TraceStep(**{name: reads[name](name, value) for name, value in line.items()}))


def _signatures(_: str, read: Mapping[str, list[Any]]) -> dict[str, Signature]:
    for name, numbers in read.items():
        if len(numbers) != SIGNATURE_SIZE:
            raise ValueError(f"{name} has {len(numbers)} numbers and not {SIGNATURE_SIZE}")
    return {name: tuple(_number(name, number) for number in numbers) for name, numbers in read.items()}


def _number(name: str, value: Any) -> float:
    if value is None:
        return math.nan
    if type(value) not in (int, float):
        raise TypeError(f"{name}: {value!r} is no number")
    return float(value)


def _whole(name: str, value: Any) -> int:
    if type(value) is not int:  # to isinstance, True is one
        raise TypeError(f"{name}: {value!r} is no whole number")
    return value


def _truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: {value!r} is neither true nor false")
    return value


_READS: dict[str, Callable[[str, Any], Any]] = {
    "int": _whole,
    "float": _number,
    "bool": _truth,
    "dict[str, Signature]": _signatures,
}
"""How to read a value of a step, by the type of its field."""


def _finite(value: Any) -> Any:
    """The same value, with null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
