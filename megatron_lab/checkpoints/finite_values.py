"""Check that the tensors of a source are finite while they are read, and messages that name the tensors with NaN or infinite
values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron.checkpoint.errors import CheckpointError, format_list
from megatron.checkpoint.global_tensor import WEIGHT
from megatron.parallel.tensor_slice import TensorSlice
from megatron_lab.foreign.source import WeightSource, read_parts

_CHUNK_NUMEL = 1 << 22
"""Number of values that are checked at a time, so that the check needs little memory."""


def count_nonfinite(tensor: torch.Tensor) -> int:
    """Return how many values of a tensor are NaN or infinite."""
    if not tensor.is_floating_point():
        return 0
    # isfinite does not support all 8-bit dtypes.
    chunks = (chunk.float() if chunk.itemsize == 1 else chunk for chunk in tensor.reshape(-1).split(_CHUNK_NUMEL))
    return sum(chunk.numel() - int(chunk.isfinite().count_nonzero()) for chunk in chunks)


@dataclass
class FiniteCheck:
    """Counts values that are not finite in the tensors that are read from a source."""

    source: WeightSource
    _counts: dict[str, int] = field(default_factory=dict)
    """Number of values that are not finite, by the full name of each tensor that has any."""
    _numels: dict[str, int] = field(default_factory=dict)
    """Number of all values of these tensors that were read."""

    def wrap(self, read: Callable[[str, TensorSlice], torch.Tensor]) -> Callable[[str, TensorSlice], torch.Tensor]:
        """Return a function that reads a slice of a tensor by `read`, and counts its values that are not finite. It takes the full
        name of the tensor, such as `model.layers.0.mlp.up.weight`."""

        def read_and_count(name: str, tensor_slice: TensorSlice) -> torch.Tensor:
            tensor = read(name, tensor_slice)
            self._numels[name] = self._numels.get(name, 0) + tensor.numel()
            if count := count_nonfinite(tensor):
                self._counts[name] = self._counts.get(name, 0) + count
            return tensor

        return read_and_count

    def describe(self) -> str:
        """Return a sentence about the tensors that have NaN or infinite values; empty if all values are finite.

        Each tensor has its name in the files of the source, followed by the name of the parameter if the two names differ.
        """
        lines = []
        for full_name, count in self._counts.items():
            kind, _, name = full_name.partition(".")
            if kind != WEIGHT:
                lines.append(_format_line(full_name, count, self._numels[full_name]))
                continue
            parts = {part: tensor for part, tensor in read_parts(self.source, name).items() if count_nonfinite(tensor)}
            lines += [
                _format_line(
                    part if part == name else f"{part} (parameter {name})", count_nonfinite(tensor), math.prod(tensor.shape)
                )
                for part, tensor in parts.items()
            ] or [_format_line(name, count, self._numels[full_name])]
        if not lines:
            return ""
        tensors = "a tensor has" if len(lines) == 1 else f"{len(lines)} tensors have"
        return f"{self.source.name}: {tensors} values that are not finite (NaN or infinite):\n  " + format_list(lines, "\n  ")

    def raise_if_found(self) -> None:
        """Raise an error if a tensor that was read has values that are not finite.

        Raises:
            CheckpointError: with the names of these tensors.
        """
        if text := self.describe():
            raise CheckpointError(
                f"{text}\n  The files are damaged, or were saved after a loss of NaN: every model that reads them computes NaN. "
                "Nothing is written. Use another copy or an earlier checkpoint, or import it as it is with --allow-nonfinite"
            )


def describe_nonfinite_weights(source: WeightSource) -> str:
    """Read all weights of a source, and return a sentence about those with NaN or infinite values; empty if all are finite."""
    check = FiniteCheck(source)
    read = check.wrap(lambda full_name, tensor_slice: source.read(full_name.removeprefix(f"{WEIGHT}."), tensor_slice))
    for name, info in source.weights.items():
        read(f"{WEIGHT}.{name}", TensorSlice.full(info.shape))
    return check.describe()


@dataclass
class WrittenCheck:
    """Counts values that are not finite in the tensors that an export writes."""

    _lines: dict[str, str] = field(default_factory=dict)
    """Description of each tensor that has any, by name."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Count the values of a tensor."""
        if count := count_nonfinite(tensor):
            self._lines[name] = f"{name} ({count:,} of {tensor.numel():,} values)"

    def list_notes(self, dtype: str) -> list[str]:
        """Return a note for the user about the tensors with such values; an empty list if there are none.

        Args:
            dtype: name of the dtype that was written.
        """
        if not self._lines:
            return []
        tensors = format_list([*self._lines.values()])
        return [
            f"values that are not finite (NaN or infinite) in {tensors}: the model computes NaN. Either the source has them, or "
            f"its values are too large for {dtype}"
        ]


def _format_line(name: str, count: int, numel: int) -> str:
    return f"{name}: {count:,} of {numel:,} values"
