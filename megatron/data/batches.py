"""From samples to the arrays of a microbatch.

Shape legend: `b` micro-batch size, `s` sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class SampleSource(Protocol):
    """Numbered samples: the same number always gives the same tokens."""

    seq_length: int
    masked_id: int | None
    """Token at which the loss does not count, if any."""

    def sample(self, number: int) -> NDArray[np.int64]:
        """Tokens of a sample, [s + 1]."""

    def epochs_for(self, num_samples: int) -> float:
        """Passes over the data that a number of samples takes."""

    def describe(self) -> str:
        """A line for the start-up log."""


@dataclass(frozen=True)
class Microbatch:
    """What one forward pass of one data rank reads."""

    tokens: NDArray[np.int64]
    """Input ids, [b, s]."""
    labels: NDArray[np.int64]
    """Id to predict at each position, [b, s]."""
    loss_mask: NDArray[np.float32]
    """1 where the position counts in the loss, else 0, [b, s]."""
    first_sample: int
    """Number of the first sample; the others follow it."""


def read_microbatch(source: SampleSource, first_sample: int, size: int) -> Microbatch:
    """The `size` samples from `first_sample` on.

    A position whose *input* is the masked token does not count: what starts the next document cannot be predicted.
    """
    windows = np.stack([source.sample(number) for number in range(first_sample, first_sample + size)])
    tokens, labels = np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
    loss_mask = np.ones(tokens.shape, dtype=np.float32)
    if source.masked_id is not None:
        loss_mask[tokens == source.masked_id] = 0.0
    return Microbatch(tokens, labels, loss_mask, first_sample)
