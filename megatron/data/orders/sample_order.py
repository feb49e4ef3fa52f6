"""What an order of samples is: passes over the documents, each with an index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megatron.data.orders.epoch_index import Layout, Windows


@dataclass(frozen=True)
class PassIndex:
    """The order of one pass."""

    layout: Layout
    windows: Windows


@dataclass(frozen=True)
class Place:
    """Where a sample stands."""

    pass_number: int
    position: int
    """In the pass."""
    num_left: int
    """Samples of the pass from there on."""


class SampleOrder(Protocol):
    """Which window of which pass each sample is."""

    samples_per_epoch: int

    def place(self, number: int) -> Place:
        """Place of a sample.

        Raises:
            DatasetError: the order ends before it.
        """

    def index(self, pass_number: int) -> PassIndex:
        """The order of a pass; takes seconds for a large dataset that is not in the cache."""

    def describe(self, num_samples: int) -> list[str]:
        """Which epochs so many samples take, and what is left out: a line, and a second one where there is more to say."""
