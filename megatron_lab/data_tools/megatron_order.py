"""`--data-order megatron`: the order of Megatron-LM's GPTDataset and its blend, for runs that must read what one of it reads.

The order depends on the seed, on numpy's legacy random stream (which never changes), and on the number of samples asked for. So
another length of the run shuffles what was already read. In a blend each sample comes from the dataset that lacks most samples to
its weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import SPLIT_NAMES
from megatron.data.blend import SampleDraw, check_weights
from megatron.data.indexed_dataset import DatasetError
from megatron.data.indexed_writer import IndexCache
from megatron.data.samples import index_dtype
from megatron.data.windows import DocumentLayout, PassIndex, SampleOrder, SamplePlace, Selection, Windows, lay_out

_LEAST_SHARE = 0.80
"""If a smaller share of the last epoch's samples is needed, that epoch is shuffled separately."""


@dataclass(frozen=True)
class MegatronPlan:
    """How many epochs are shuffled, and which samples they hold."""

    num_tokens: int
    """Tokens of an epoch; more than one window."""
    seq_length: int
    num_samples: int | None
    """Samples asked for; None for those of one epoch."""

    @property
    def num_epochs(self) -> int:
        """The fewest epochs that hold the samples asked for; samples overlap by one token."""
        asked = 0 if self.num_samples is None else self.num_samples * self.seq_length + 1
        return max(1, -(-asked // self.num_tokens))

    def samples_of(self, epochs: int) -> int:
        """Number of samples in `epochs` epochs, laid end to end."""
        return (epochs * self.num_tokens - 1) // self.seq_length

    @property
    def last_is_apart(self) -> bool:
        """Whether the last epoch is shuffled separately from those before."""
        if self.num_epochs == 1 or self.num_samples is None:
            return False
        of_last = self.num_samples - self.samples_of(self.num_epochs - 1)
        return of_last < int(_LEAST_SHARE * self.samples_of(1))

    @property
    def num_together(self) -> int:
        """Number of epochs that are shuffled together."""
        return self.num_epochs - self.last_is_apart


class MegatronOrder(SampleOrder):
    """One shuffle of the documents of all epochs, cut into windows that overlap by one token, and one shuffle of the windows.

    Both shuffles use the same random stream, one after the other. The last epoch has shuffles of its own if less than 80 % of its
    samples are asked for. Megatron-LM splits and shuffles sequences, this class documents: the same where each document is one
    sequence, as its tools write them for GPT. Other datasets are refused.

    Args:
        selection: The documents to be ordered. Each split starts the random stream of the seed anew.
        num_samples: Samples asked for; None for those of one epoch.

    Raises:
        DatasetError: a document is not one sequence.
    """

    def __init__(self, selection: Selection, *, num_samples: int | None, cache: IndexCache) -> None:
        dataset = selection.dataset
        if not dataset.one_sequence_each:
            raise DatasetError(
                f"{dataset.prefix} has documents of several sequences or of none ({len(dataset.lengths):,} sequences in "
                f"{dataset.num_documents:,} documents): Megatron-LM would split and shuffle its sequences, not its documents.\n"
                "  Train with --data-order epoch, or make the dataset again with tools/preprocess_data.py: one sequence a document."
            )
        self._of = selection
        self._cache = cache
        self._plan = MegatronPlan(selection.num_tokens, selection.seq_length, num_samples)
        self.samples_per_epoch = self._plan.samples_of(1)
        self._num_samples = self._plan.samples_of(self._plan.num_epochs)

    def place(self, number: int) -> SamplePlace:
        if not 0 <= number < self._num_samples:
            asked = self._plan.num_samples or self.samples_per_epoch
            raise DatasetError(
                f"the {SPLIT_NAMES[self._of.split]} split of {self._of.dataset.prefix} has no sample {number:,}: --data-order "
                f"megatron was asked for {asked:,} samples, for which it made {self._num_samples:,}.\n"
                "  A longer run needs another order from its start on; --data-order epoch has no end."
            )
        return SamplePlace(0, number, self._num_samples - number)

    def index(self, pass_number: int) -> PassIndex:
        plan = self._plan

        def key() -> tuple[object, ...]:
            documents = (self._of.documents.start, self._of.documents.stop)
            return (self._of.dataset.digest, *documents, self._of.seed, plan.seq_length, plan.num_epochs, plan.last_is_apart)

        sequences, starts, shuffle = self._cache.get(
            "megatron",
            ("sequences", "starts", "shuffle"),
            key,
            max(len(self._of.documents) * plan.num_epochs, self._num_samples),
            self._build,
        )
        firsts = np.array([0, self._num_samples], np.int64)
        return DocumentLayout(sequences, starts), Windows(np.zeros(1, np.int64), firsts, shuffle, plan.seq_length)

    def describe(self, num_samples: int) -> list[str]:
        plan = self._plan
        tail = plan.num_epochs * plan.num_tokens - 1 - self._num_samples * plan.seq_length
        apart = ", the last of them apart" if plan.last_is_apart else ""
        epochs = f"epochs 0.00 to {num_samples / self.samples_per_epoch:.2f} of {self.samples_per_epoch:,} samples"
        shuffled = (
            f"{plan.num_epochs:,} epochs{apart}: {self._num_samples:,} samples ({tail:,} tokens left out: less than a sample)"
        )
        return [f"{epochs}; --data-order megatron shuffles {shuffled}"]

    def _build(self) -> tuple[NDArray, ...]:
        plan, stream = self._plan, np.random.RandomState(self._of.seed)
        together, apart = plan.num_together, plan.num_epochs - plan.num_together
        shuffled = [_shuffled(stream, self._of.documents, epochs) for epochs in (together, apart) if epochs]
        layout = lay_out(self._of.dataset, np.concatenate(shuffled))
        bounds = [0, plan.samples_of(together), self._num_samples][: 3 if apart else 2]
        windows = [_shuffled(stream, range(start, stop), 1) for start, stop in pairwise(bounds)]
        return (*layout, np.concatenate(windows))


def _shuffled(stream: np.random.RandomState, numbers: range, times: int) -> NDArray[np.integer]:
    """`numbers`, repeated `times` times, in an order that the stream draws."""
    array = np.tile(np.arange(numbers.start, numbers.stop, dtype=index_dtype(numbers.stop)), times)
    stream.shuffle(array)
    return array


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
