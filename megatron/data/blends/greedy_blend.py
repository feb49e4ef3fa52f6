"""Megatron-LM's blend: each sample comes from the dataset that is furthest behind its weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.data.blends.blend import check_weights
from megatron.data.blends.greedy_choices import greedy_choices
from megatron.data.cache.index_cache import IndexCache

_SURPLUS = 0.005
_BLOCK = 1 << 12


def requested_samples(weights: Sequence[float], num_samples: int) -> list[int]:
    """Samples that each dataset is asked for: ceil(ceil(num_samples w) 1.005).

    Args:
        weights: As given to the run: they are divided by their sum here, and rounding matters.
        num_samples: Of the blend.
    """
    return [math.ceil(math.ceil(num_samples * weight) * (1 + _SURPLUS)) for weight in _normalised(weights)]


class GreedyBlend:
    """Sample i comes from the dataset with the largest weight * max(i, 1) - (its samples so far), of equal ones from the first.

    Exact in floating point, so the same choices as there. They are computed for the whole run and cached.

    Args:
        weights: As given to the run: they are divided by their sum here.
        num_samples: Of the blend.
        cache: Where the choices are kept (nowhere by default).
        by_size: The weights are samples of an epoch, since none were given to the run.
    """

    def __init__(
        self, weights: Sequence[float], num_samples: int, cache: IndexCache | None = None, *, by_size: bool = False
    ) -> None:
        check_weights(weights)
        self._num_samples = num_samples
        # Megatron-LM knows no weight of 0: such a dataset is left out.
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
        """Dataset of each of these samples, and which of its samples it is.

        Raises:
            ValueError: the blend ends before one of them.
        """
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
        """Samples of each dataset among the first `num_samples`."""
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
    """Which sample of its dataset each choice is."""
    order = np.argsort(choices, kind="stable")
    counts = np.bincount(choices, minlength=len(before))
    ranks = np.empty(len(choices), dtype=np.int64)
    ranks[order] = np.arange(len(choices)) + np.repeat(before - (np.cumsum(counts) - counts), counts)
    return ranks
