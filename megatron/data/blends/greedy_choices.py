"""The choices of Megatron-LM's blend, exact in floating point, in many places of the sequence at once.

Each choice depends on those before it. But the rule soon forgets where it began: what one dataset is ahead is made good at the
next occasion. So lanes start all over the sequence from guessed counts, each a little before its part, and nearly all of them
arrive at their part with the true counts. That is checked, and a lane that did not is computed again from the true ones: the result
is that of the plain rule, bit for bit, whatever was guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_LANES = 1024
_STEPS = 2048
"""Choices of a lane."""
_FEWEST_LANES = 16
_WARM_UP = 128
"""Choices before its part in which a lane may forget its guess; at most _STEPS."""

Counts = NDArray[np.float64]
"""Samples taken of each dataset: whole numbers, in the type in which the rule computes."""


def greedy_choices(weights: Sequence[float], num_samples: int) -> NDArray[np.uint16]:
    """Dataset of each sample: that with the largest weight * max(i, 1) - (its samples so far), of equal ones the first.

    Args:
        weights: All above 0; together 1.
        num_samples: How many choices.
    """
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
    behind = np.empty_like(shares)
    for at in range(len(choices)):
        np.multiply(shares, float(max(first + at, 1)), out=behind)
        np.subtract(behind, taken, out=behind)
        choice = behind.argmax()
        taken[choice] += 1.0
        choices[at] = choice


def _in_lanes(shares: Counts, taken: Counts, first: int, choices: NDArray[np.uint16]) -> Counts:
    """Fill in choices from number `first` on, [lanes, steps]; returns the counts after them."""
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
    """Take `steps` choices in every lane; brings the counts, [datasets, lanes], up to date and puts the choices into `found`."""
    lanes = counts.shape[1]
    numbers = starts.astype(np.float64)
    flat, columns = counts.reshape(-1), np.arange(lanes)
    factor, most, behind = np.empty(lanes), np.empty(lanes), np.empty(lanes)
    above, choice = np.empty(lanes, dtype=bool), np.empty(lanes, dtype=np.int64)
    for step in range(steps):
        np.maximum(numbers, 1.0, out=factor)
        np.multiply(factor, shares[0], out=most)
        np.subtract(most, counts[0], out=most)
        choice.fill(0)
        for dataset in range(1, len(shares)):
            np.multiply(factor, shares[dataset], out=behind)
            np.subtract(behind, counts[dataset], out=behind)
            np.greater(behind, most, out=above)
            np.copyto(choice, dataset, where=above)
            np.maximum(behind, most, out=most)
        if found is not None:
            found[step] = choice
        flat[choice * lanes + columns] += 1.0
        numbers += 1.0


def _guess(shares: Counts, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """Likely counts after so many choices, [datasets, lanes]: the exact shares rounded down, the rest to the largest fractions."""
    exact = shares[:, None] * numbers
    counts = np.floor(exact)
    rank = np.argsort(np.argsort(counts - exact, axis=0, kind="stable"), axis=0, kind="stable")
    return counts + (rank < numbers - counts.sum(axis=0))
