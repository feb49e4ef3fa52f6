"""Megatron-LM's blend: each sample comes from the dataset that lacks most samples to its weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.data.blend import SampleDraw, check_weights
from megatron.data.index_cache import IndexCache

_SURPLUS = 0.005
_BLOCK = 1 << 12


def requested_samples(weights: Sequence[float], num_samples: int) -> list[int]:
    """How many samples each dataset is asked for: ceil(ceil(num_samples w) 1.005).

    The weights are those given to the run. They are divided by their sum here, since rounding matters.
    """
    return [math.ceil(math.ceil(num_samples * weight) * (1 + _SURPLUS)) for weight in _normalised(weights)]


class GreedyBlend(SampleDraw):
    """Sample i comes from the dataset with the largest weight * max(i, 1) - (its samples so far); if several, from the first.

    The choices equal Megatron-LM's, floating-point rounding included. They are computed for the whole run and cached.

    Args:
        weights: As given to the run. They are divided by their sum here.
        cache: Where the choices are kept (nowhere by default).
        by_size: The weights are numbers of samples in an epoch, since none were given to the run.
    """

    def __init__(
        self, weights: Sequence[float], num_samples: int, cache: IndexCache | None = None, *, by_size: bool = False
    ) -> None:
        check_weights(weights)
        self._num_samples = num_samples
        # Megatron-LM knows no weight of 0: such a dataset is left out
        used = [dataset for dataset, weight in enumerate(weights) if weight > 0]
        shares = _normalised([weights[dataset] for dataset in used])
        if not by_size:
            shares = _normalised(shares)  # there given weights are divided by their sum twice, which may change the last bit
        self.weights = [0.0] * len(weights)
        for dataset, share in zip(used, shares, strict=True):
            self.weights[dataset] = share
        (self._choices,) = (cache or IndexCache(None)).get(
            "blend",
            ("choices",),
            lambda: (num_samples, *(weight.hex() for weight in self.weights)),
            num_samples,
            lambda: (np.array(used, np.uint16)[greedy_choices(shares, num_samples)],),
        )
        self._before = self._counts_before_blocks()

    def place(self, numbers: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        if len(numbers) and int(np.max(numbers)) >= self._num_samples:
            raise ValueError(
                f"the blend has no sample {int(np.max(numbers)):,}: --data-order megatron was asked for {self._num_samples:,} "
                "samples.\n  A longer run needs another order from its start on; --data-order epoch has no end."
            )
        datasets = self._choices[numbers]
        indices = np.empty(len(numbers), dtype=np.int64)
        for block in np.unique(np.asarray(numbers) // _BLOCK).tolist():
            choices = self._choices[block * _BLOCK : (block + 1) * _BLOCK]
            ranks = _ranks(choices, self._before[block])
            inside = np.asarray(numbers) // _BLOCK == block
            indices[inside] = ranks[np.asarray(numbers)[inside] - block * _BLOCK]
        return datasets, indices

    def counts(self, num_samples: int) -> list[int]:
        block = num_samples // _BLOCK
        rest = np.bincount(self._choices[block * _BLOCK : num_samples], minlength=len(self.weights))
        return [int(count) for count in self._before[block] + rest]

    def _counts_before_blocks(self) -> NDArray[np.int64]:
        blocks = range(0, self._num_samples, _BLOCK)
        counts = [np.bincount(self._choices[start : start + _BLOCK], minlength=len(self.weights)) for start in blocks]
        return np.cumsum([np.zeros(len(self.weights), np.int64), *counts], axis=0)


def _normalised(weights: Sequence[float]) -> list[float]:
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def _ranks(choices: NDArray[np.integer], before: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each choice, the number of the sample within its dataset."""
    order = np.argsort(choices, kind="stable")
    counts = np.bincount(choices, minlength=len(before))
    ranks = np.empty(len(choices), dtype=np.int64)
    ranks[order] = np.arange(len(choices)) + np.repeat(before - (np.cumsum(counts) - counts), counts)
    return ranks


_LANES = 1024
_STEPS = 2048
"""Choices that one lane computes."""
_FEWEST_LANES = 16
_WARM_UP = 128
"""Choices before its part that a lane computes to get rid of the error of its guess; at most _STEPS."""

Counts = NDArray[np.float64]
"""Samples taken so far from each dataset: whole numbers, in the floating-point type of the rule."""


def greedy_choices(weights: Sequence[float], num_samples: int) -> NDArray[np.uint16]:
    """The dataset of each sample by the rule of `GreedyBlend`. The weights are above 0, and together 1."""
    shares, taken = np.array(weights), np.zeros(len(weights))
    choices = np.empty(num_samples, dtype=np.uint16)
    done = 0
    while done < num_samples:
        lanes = min(_LANES, (num_samples - done) // _STEPS)
        if lanes < _FEWEST_LANES:
            _one_by_one(shares, taken, done, choices[done:])
            break
        part = choices[done : done + lanes * _STEPS].reshape(lanes, _STEPS)
        taken = _in_lanes(shares, taken, done, part)
        done += part.size
    return choices


def _one_by_one(shares: Counts, taken: Counts, first: int, choices: NDArray[np.uint16]) -> None:
    """Fill in choices from number `first` on, and bring `taken` up to date."""
    for at in range(len(choices)):
        choice = (shares * float(max(first + at, 1)) - taken).argmax()
        taken[choice] += 1.0
        choices[at] = choice


def _in_lanes(shares: Counts, taken: Counts, first: int, choices: NDArray[np.uint16]) -> Counts:
    """Fill in choices from number `first` on, [lanes, steps], with all lanes at once; returns the counts after them."""
    lanes, steps = choices.shape
    starts = first + steps * np.arange(lanes)
    counts = _guess(shares, starts - _WARM_UP)
    _step_all(shares, counts, starts - _WARM_UP, _WARM_UP, None)
    counts[:, 0] = taken
    begins = counts.copy()
    found = np.empty((steps, lanes), dtype=np.uint16)
    _step_all(shares, counts, starts, steps, found)
    choices[:] = found.T
    taken = counts[:, 0]
    for lane in range(1, lanes):
        if np.array_equal(begins[:, lane], taken):
            taken = counts[:, lane]
        else:
            taken = taken.copy()
            _one_by_one(shares, taken, int(starts[lane]), choices[lane])
    return taken.copy()


def _step_all(shares: Counts, counts: NDArray[np.float64], starts: NDArray[np.int64], steps: int, found: NDArray | None) -> None:
    """Make `steps` choices in every lane. Updates the counts, [datasets, lanes], and puts the choices into `found`."""
    numbers, columns = starts.astype(np.float64), np.arange(counts.shape[1])
    for step in range(steps):
        choice = (shares[:, None] * np.maximum(numbers, 1.0) - counts).argmax(axis=0)
        counts[choice, columns] += 1.0
        if found is not None:
            found[step] = choice
        numbers += 1.0


def _guess(shares: Counts, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """Likely counts after `numbers` choices, [datasets, lanes]: exact shares rounded down, the rest to the largest fractions."""
    exact = shares[:, None] * numbers
    counts = np.floor(exact)
    rank = np.argsort(np.argsort(counts - exact, axis=0, kind="stable"), axis=0, kind="stable")
    return counts + (rank < numbers - counts.sum(axis=0))
