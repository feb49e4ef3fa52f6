"""`--data-order megatron`: the sample order of Megatron-LM's GPTDataset and BlendedDataset, for runs that must read exactly the
samples of a Megatron-LM run.

The order depends on the seed, on numpy's legacy random generator (whose numbers never change), and on the number of requested
samples. So a run of another length reads its samples in another order from the first step on. In a blend of datasets, each sample
comes from the dataset that is furthest behind its share of the samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import SPLIT_NAMES
from megatron.data.blend import BlendOrder, check_weights
from megatron.data.indexed_dataset import DatasetError
from megatron.data.indexed_writer import IndexCache
from megatron.data.samples import get_index_dtype
from megatron.data.windows import DocumentLayout, PassIndex, SampleOrder, SamplePosition, Selection, Windows, lay_out

_MIN_LAST_EPOCH_SHARE = 0.80
"""The last epoch is shuffled separately if less than this share of its samples is requested."""


@dataclass(frozen=True)
class MegatronPlan:
    """Plan of Megatron-LM's sample order: how many epochs the requested samples need, and which epochs are shuffled together."""

    num_tokens: int
    """Number of tokens of one epoch. It is larger than `seq_length` + 1, the tokens of one sample and its last label."""
    seq_length: int
    num_samples: int | None
    """Number of requested samples; None requests the samples of one epoch."""

    @property
    def num_epochs(self) -> int:
        """Smallest number of epochs that contain the requested samples.

        Consecutive samples overlap by one token: the last label of a sample is the first token of the next sample.
        """
        num_needed_tokens = 0 if self.num_samples is None else self.num_samples * self.seq_length + 1
        return max(1, -(-num_needed_tokens // self.num_tokens))

    def count_samples(self, num_epochs: int) -> int:
        """Return the number of samples in `num_epochs` consecutive epochs."""
        return (num_epochs * self.num_tokens - 1) // self.seq_length

    @property
    def has_separate_last_epoch(self) -> bool:
        """Whether the last epoch is shuffled separately from the previous epochs. This is so if less than 80 % of its samples are
        requested."""
        if self.num_epochs == 1 or self.num_samples is None:
            return False
        last_epoch_samples = self.num_samples - self.count_samples(self.num_epochs - 1)
        return last_epoch_samples < int(_MIN_LAST_EPOCH_SHARE * self.count_samples(1))

    @property
    def num_joint_epochs(self) -> int:
        """Number of epochs that are shuffled together: all epochs except a last epoch that is shuffled separately."""
        return self.num_epochs - self.has_separate_last_epoch


class MegatronOrder(SampleOrder):
    """Sample order of Megatron-LM's GPTDataset.

    The documents of all epochs are shuffled, joined and split into windows (a sample and its last label), and the windows are
    shuffled. Windows overlap by one token. The second shuffle continues the random numbers of the first. The last epoch is shuffled
    separately if less than 80 % of its samples are requested.

    Megatron-LM splits and shuffles sequences; this class splits and shuffles documents. The result is identical if each document is
    one sequence, as Megatron-LM's tools write them for GPT. Other datasets are refused.

    Args:
        selection: documents of one split, with the seed and the sequence length. The random numbers of each split start from the
            seed.
        num_samples: number of requested samples; None requests the samples of one epoch.

    Raises:
        DatasetError: a document does not consist of exactly one sequence.
    """

    def __init__(self, selection: Selection, *, num_samples: int | None, cache: IndexCache) -> None:
        dataset = selection.dataset
        if not dataset.has_single_sequences:
            raise DatasetError(
                f"--data-order megatron needs one sequence per document, but {dataset.prefix} has "
                f"{len(dataset.lengths):,} sequences in {dataset.num_documents:,} documents: "
                "Megatron-LM shuffles sequences, while this order shuffles documents, so the two orders would differ.\n"
                "  Train with --data-order epoch, or create the dataset again with tools/preprocess_data.py, which writes "
                "one sequence per document."
            )
        self._selection = selection
        self._cache = cache
        self._plan = MegatronPlan(selection.num_tokens, selection.seq_length, num_samples)
        self.samples_per_epoch = self._plan.count_samples(1)
        self._num_samples = self._plan.count_samples(self._plan.num_epochs)

    def locate(self, sample_index: int) -> SamplePosition:
        if not 0 <= sample_index < self._num_samples:
            num_requested = self._plan.num_samples or self.samples_per_epoch
            raise DatasetError(
                f"the {SPLIT_NAMES[self._selection.split]} split of {self._selection.dataset.prefix} has no sample "
                f"{sample_index:,}: its order (--data-order megatron) was computed for {num_requested:,} requested "
                f"samples and has {self._num_samples:,} samples.\n"
                "  This order depends on the length of the run, so it cannot be extended. Start a run with --data-order epoch, "
                "which has no end."
            )
        return SamplePosition(0, sample_index, self._num_samples - sample_index)

    def get_index(self, pass_index: int) -> PassIndex:
        plan = self._plan

        def build_key() -> tuple[object, ...]:
            document_bounds = (self._selection.documents.start, self._selection.documents.stop)
            return (
                self._selection.dataset.digest,
                *document_bounds,
                self._selection.seed,
                plan.seq_length,
                plan.num_epochs,
                plan.has_separate_last_epoch,
            )

        sequences, starts, shuffle = self._cache.get(
            "megatron",
            ("sequences", "starts", "shuffle"),
            build_key,
            max(len(self._selection.documents) * plan.num_epochs, self._num_samples),
            self._build,
        )
        first_samples = np.array([0, self._num_samples], np.int64)
        return DocumentLayout(sequences, starts), Windows(np.zeros(1, np.int64), first_samples, shuffle, plan.seq_length)

    def describe(self, num_samples: int) -> list[str]:
        plan = self._plan
        num_left_tokens = plan.num_epochs * plan.num_tokens - 1 - self._num_samples * plan.seq_length
        separate_text = ", the last one separately" if plan.has_separate_last_epoch else ""
        epochs_text = f"epochs 0.00 to {num_samples / self.samples_per_epoch:.2f} of {self.samples_per_epoch:,} samples"
        shuffled_text = (
            f"{plan.num_epochs:,} epochs{separate_text}: {self._num_samples:,} samples "
            f"({num_left_tokens:,} tokens left out: less than a sample)"
        )
        return [f"{epochs_text}; --data-order megatron shuffles {shuffled_text}"]

    def _build(self) -> tuple[NDArray, ...]:
        plan, rng = self._plan, np.random.RandomState(self._selection.seed)
        num_joint_epochs, num_separate_epochs = plan.num_joint_epochs, plan.num_epochs - plan.num_joint_epochs
        document_orders = [
            _shuffle_range(rng, self._selection.documents, epochs) for epochs in (num_joint_epochs, num_separate_epochs) if epochs
        ]
        layout = lay_out(self._selection.dataset, np.concatenate(document_orders))
        bounds = [0, plan.count_samples(num_joint_epochs), self._num_samples][: 3 if num_separate_epochs else 2]
        window_orders = [_shuffle_range(rng, range(start, stop), 1) for start, stop in pairwise(bounds)]
        return (*layout, np.concatenate(window_orders))


def _shuffle_range(rng: np.random.RandomState, values: range, num_repeats: int) -> NDArray[np.integer]:
    """Return an array of `values`, each `num_repeats` times, in a random order."""
    array = np.tile(np.arange(values.start, values.stop, dtype=get_index_dtype(values.stop)), num_repeats)
    rng.shuffle(array)
    return array


_SAMPLE_MARGIN = 0.005
"""Share of additional samples that Megatron-LM requests from each dataset of a blend."""
_BLOCK_SIZE = 1 << 12
"""Samples of a block. The counts of all datasets are stored at the start of each block."""


def count_requested_samples(weights: Sequence[float], num_samples: int) -> list[int]:
    """Return the number of samples that Megatron-LM requests from each dataset of a blend.

    The number is ceil(ceil(num_samples * weight) * 1.005): 0.5 % more than the dataset's share.

    Args:
        weights: weights as the user gives them. This function divides them by their sum. Dividing them before the call would change
            the rounding.
        num_samples: number of samples that are read from the blend.
    """
    return [math.ceil(math.ceil(num_samples * weight) * (1 + _SAMPLE_MARGIN)) for weight in _normalize(weights)]


class GreedyBlend(BlendOrder):
    """Blend order of Megatron-LM: each sample comes from the dataset that is furthest behind its share of the samples.

    Sample i comes from the dataset with the largest weight * max(i, 1) - (number of samples already taken from the dataset). Of
    several equal datasets, the first is taken. The choices equal those of Megatron-LM, including floating-point rounding. They are
    computed for the complete run and cached.

    Args:
        weights: weight of each dataset, as the user gives them. The class divides them by their sum.
        num_samples: number of samples of the run.
        cache: files in which the choices are stored for later runs; None to store nothing.
        by_size: whether the user gives no weights, so that each weight is the number of samples in an epoch of the dataset.
    """

    def __init__(
        self, weights: Sequence[float], num_samples: int, cache: IndexCache | None = None, *, by_size: bool = False
    ) -> None:
        check_weights(weights)
        self._num_samples = num_samples
        # Megatron-LM does not support a weight of 0, so datasets with weight 0 are left out.
        used_datasets = [dataset for dataset, weight in enumerate(weights) if weight > 0]
        normalized = _normalize([weights[dataset] for dataset in used_datasets])
        if not by_size:
            # Megatron-LM divides user weights by their sum twice, which may change the last bit.
            normalized = _normalize(normalized)
        self.weights = [0.0] * len(weights)
        for dataset, normalized_weight in zip(used_datasets, normalized, strict=True):
            self.weights[dataset] = normalized_weight
        (self._choices,) = (cache or IndexCache(None)).get(
            "blend",
            ("choices",),
            lambda: (num_samples, *(weight.hex() for weight in self.weights)),
            num_samples,
            lambda: (np.array(used_datasets, np.uint16)[compute_greedy_choices(normalized, num_samples)],),
        )
        self._block_start_counts = self._count_before_blocks()

    def locate(self, sample_indices: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        if len(sample_indices) and int(np.max(sample_indices)) >= self._num_samples:
            raise ValueError(
                f"the blend has no sample {int(np.max(sample_indices)):,}: its order (--data-order megatron) was computed for "
                f"{self._num_samples:,} samples.\n"
                "  This order depends on the length of the run, so it cannot be extended. Start a run with --data-order epoch, "
                "which has no end."
            )
        datasets = self._choices[sample_indices]
        indices = np.empty(len(sample_indices), dtype=np.int64)
        for block in np.unique(np.asarray(sample_indices) // _BLOCK_SIZE).tolist():
            choices = self._choices[block * _BLOCK_SIZE : (block + 1) * _BLOCK_SIZE]
            block_indices = _compute_dataset_indices(choices, self._block_start_counts[block])
            is_in_block = np.asarray(sample_indices) // _BLOCK_SIZE == block
            indices[is_in_block] = block_indices[np.asarray(sample_indices)[is_in_block] - block * _BLOCK_SIZE]
        return datasets, indices

    def count_samples(self, num_samples: int) -> list[int]:
        block = num_samples // _BLOCK_SIZE
        counts_in_block = np.bincount(self._choices[block * _BLOCK_SIZE : num_samples], minlength=len(self.weights))
        return [int(count) for count in self._block_start_counts[block] + counts_in_block]

    def _count_before_blocks(self) -> NDArray[np.int64]:
        blocks = range(0, self._num_samples, _BLOCK_SIZE)
        counts = [np.bincount(self._choices[start : start + _BLOCK_SIZE], minlength=len(self.weights)) for start in blocks]
        return np.cumsum([np.zeros(len(self.weights), np.int64), *counts], axis=0)


def _normalize(weights: Sequence[float]) -> list[float]:
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def _compute_dataset_indices(choices: NDArray[np.integer], start_counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each sample of a block among the samples of its own dataset, counted from the start of the run.

    Args:
        choices: index of the dataset from which each sample of the block comes.
        start_counts: number of samples that each dataset has given before the block.
    """
    order = np.argsort(choices, kind="stable")
    counts = np.bincount(choices, minlength=len(start_counts))
    dataset_indices = np.empty(len(choices), dtype=np.int64)
    dataset_indices[order] = np.arange(len(choices)) + np.repeat(start_counts - (np.cumsum(counts) - counts), counts)
    return dataset_indices


_MAX_LANES = 1024
"""Maximum number of lanes, which bounds memory."""
_CHOICES_PER_LANE = 2048
"""Consecutive choices that one lane computes. Lanes are computed in parallel by vectorized operations."""
_MIN_LANES = 16
"""With fewer lanes the choices are computed sequentially."""
_WARM_UP = 128
"""Additional choices that a lane computes before its own range, to remove the error of its estimated start. At most
`_CHOICES_PER_LANE`."""

Counts = NDArray[np.float64]
"""Number of samples chosen so far from each dataset: integers, in the floating-point type of the rule."""


def compute_greedy_choices(weights: Sequence[float], num_samples: int) -> NDArray[np.uint16]:
    """Return the index of the dataset from which each sample comes, by the rule of `GreedyBlend`.

    The run's samples are divided into consecutive ranges (lanes), which are computed in parallel. Each lane starts from an estimate
    of the samples already taken from each dataset. A lane whose estimate was wrong is computed again, sequentially.

    Args:
        weights: positive weight of each dataset, with sum 1.
        num_samples: number of samples of the run.
    """
    weight_array, counts = np.array(weights), np.zeros(len(weights))
    choices = np.empty(num_samples, dtype=np.uint16)
    num_chosen = 0
    while num_chosen < num_samples:
        num_lanes = min(_MAX_LANES, (num_samples - num_chosen) // _CHOICES_PER_LANE)
        if num_lanes < _MIN_LANES:
            _choose_sequentially(weight_array, counts, num_chosen, choices[num_chosen:])
            break
        lane_choices = choices[num_chosen : num_chosen + num_lanes * _CHOICES_PER_LANE].reshape(num_lanes, _CHOICES_PER_LANE)
        counts = _choose_in_lanes(weight_array, counts, num_chosen, lane_choices)
        num_chosen += lane_choices.size
    return choices


def _choose_sequentially(weights: Counts, counts: Counts, first_sample: int, choices: NDArray[np.uint16]) -> None:
    """Choose the dataset of each sample of a blend from `first_sample` on, one sample after another: the dataset that is furthest
    below its share (weight * number of samples so far).

    Args:
        counts: number of samples already taken from each dataset, updated in place.
        choices: index of the dataset of each sample, filled in place.
    """
    for i in range(len(choices)):
        choice = (weights * float(max(first_sample + i, 1)) - counts).argmax()
        counts[choice] += 1.0
        choices[i] = choice


def _choose_in_lanes(weights: Counts, counts: Counts, first_sample: int, choices: NDArray[np.uint16]) -> Counts:
    """Choose the dataset of each sample from `first_sample` on, in lanes (consecutive ranges of samples that are computed in
    parallel).

    Each lane starts from estimated counts of the samples taken from each dataset. If the estimate differs from the counts at the
    end of the previous lane, the lane is computed again, sequentially.

    Args:
        counts: number of samples taken from each dataset before `first_sample`.
        choices: [lanes, samples per lane], index of each sample's dataset, filled in place.

    Returns:
        The number of samples taken from each dataset after the last lane.
    """
    num_lanes, num_steps = choices.shape
    starts = first_sample + num_steps * np.arange(num_lanes)
    lane_counts = _estimate_counts(weights, starts - _WARM_UP)
    _advance_lanes(weights, lane_counts, starts - _WARM_UP, _WARM_UP, None)
    lane_counts[:, 0] = counts
    estimated_counts = lane_counts.copy()
    step_choices = np.empty((num_steps, num_lanes), dtype=np.uint16)
    _advance_lanes(weights, lane_counts, starts, num_steps, step_choices)
    choices[:] = step_choices.T
    counts = lane_counts[:, 0]
    for lane in range(1, num_lanes):
        if np.array_equal(estimated_counts[:, lane], counts):
            counts = lane_counts[:, lane]
        else:
            counts = counts.copy()
            _choose_sequentially(weights, counts, int(starts[lane]), choices[lane])
    return counts.copy()


def _advance_lanes(
    weights: Counts, counts: NDArray[np.float64], starts: NDArray[np.int64], num_steps: int, out: NDArray | None
) -> None:
    """Choose the dataset of the next `num_steps` samples of every lane (range of samples that is computed in parallel with others).

    Args:
        counts: [datasets, lanes], number of samples already taken from each dataset at each lane's position, updated in place.
        starts: index in the run of the first sample that each lane chooses now.
        out: [num_steps, lanes], filled with the indices of the chosen datasets; None to update only `counts`.
    """
    sample_indices, lane_indices = starts.astype(np.float64), np.arange(counts.shape[1])
    for step in range(num_steps):
        choice = (weights[:, None] * np.maximum(sample_indices, 1.0) - counts).argmax(axis=0)
        counts[choice, lane_indices] += 1.0
        if out is not None:
            out[step] = choice
        sample_indices += 1.0


def _estimate_counts(weights: Counts, num_choices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Estimate how many of the first `num_choices` samples come from each dataset. Return [datasets, lanes].

    Each dataset gets its weight times `num_choices`, rounded down. The remaining samples go to the datasets with the largest
    fractions that were rounded off.

    Args:
        num_choices: number of samples before the start of each lane (range of samples that is computed in parallel with others).
    """
    exact_counts = weights[:, None] * num_choices
    counts = np.floor(exact_counts)
    fraction_order = np.argsort(np.argsort(counts - exact_counts, axis=0, kind="stable"), axis=0, kind="stable")
    return counts + (fraction_order < num_choices - counts.sum(axis=0))
