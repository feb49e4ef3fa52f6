"""What a split of layers into chunks must meet, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """What lies on a stage, all in one unit: parameters, gradients, optimizer state, activations."""

    layers: Sequence[float]
    """Of each layer."""
    embedding: float
    """Of the embedding, on the stage of the first chunk."""
    output: float
    """Of the output layer and the loss, on the stage of the last chunk."""
    limits: Sequence[float]
    """What each stage has."""


@dataclass(frozen=True)
class Problem:
    """Consecutive layers to be cut into chunks that lie on stages."""

    stage_of_chunk: tuple[int, ...]
    costs: tuple[float, ...]
    """Of each layer."""
    fixed_costs: tuple[float, ...]
    """Of each chunk, whatever its layers."""
    min_layers: tuple[int, ...]
    """Of each chunk."""
    max_layers: tuple[int, ...]
    """Of each chunk."""
    memory: Memory | None = None

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.costs)

    @property
    def num_chunks(self) -> int:
        """Parts into which it is cut."""
        return len(self.stage_of_chunk)

    @property
    def num_stages(self) -> int:
        """Pipeline ranks."""
        return max(self.stage_of_chunk) + 1

    @property
    def fixed_memory(self) -> tuple[float, ...]:
        """Of each chunk, whatever its layers."""
        assert self.memory is not None
        return at_the_ends(self.num_chunks, self.memory.embedding, self.memory.output)

    def memory_of_stages(self, counts: Sequence[int]) -> list[float]:
        """What a split needs on each stage."""
        assert self.memory is not None
        return sum_on_stages(self.stage_of_chunk, chunk_sums(self.memory.layers, self.fixed_memory, counts))

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether a split respects the memory of every stage."""
        return self.memory is None or all(
            need <= room(limit) for need, limit in zip(self.memory_of_stages(counts), self.memory.limits, strict=True)
        )


def at_the_ends(num_chunks: int, first: float, last: float) -> tuple[float, ...]:
    """Zero for each chunk but the first and the last, which may be one."""
    values: list[float] = [0] * num_chunks
    values[0] += first
    values[-1] += last
    return tuple(values)


def chunk_sums(layers: Sequence[float], fixed: Iterable[float], counts: Sequence[int]) -> list[float]:
    """For each chunk the sum over its layers and what is fixed."""
    sums, start = [], 0
    for base, count in zip(fixed, counts, strict=True):
        sums.append(base + sum(layers[start : start + count]))
        start += count
    return sums


def sum_on_stages(stage_of_chunk: Sequence[int], of_chunks: Iterable[float]) -> list[float]:
    """Sums over the chunks of each stage."""
    sums: list[float] = [0] * (max(stage_of_chunk) + 1)
    for stage, value in zip(stage_of_chunk, of_chunks, strict=True):
        sums[stage] += value
    return sums


def room(limit: float) -> float:
    """A limit with a margin for rounding, so that three times 0.1 fits into 0.3."""
    return limit + 1e-9 * abs(limit)
