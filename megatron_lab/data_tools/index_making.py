"""Makes the indexes of a dataset ahead of training."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.data import SPLIT_NAMES, DataOrder
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.indexed_writer import IndexCache, cache_for
from megatron.data.windows import SampleOrder, split_documents


def build_index(
    prefix: str,
    *,
    split: str | None,
    seed: int,
    seq_length: int,
    epochs: int = 1,
    order: DataOrder = "epoch",
    num_samples: Sequence[int | None] = (None, None, None),
    data_cache_path: str | None = None,
) -> list[str]:
    """Make the indexes that training with these settings would make at its start.

    Args:
        prefix: An indexed dataset.
        split: Shares as in --split; None gives all documents to training, as --train-data-path does.
        seed: The seed of the run (--seed).
        seq_length: The sequence length of the run.
        epochs: How many epochs, from the first on; the megatron order has all in one index.
        order: As --data-order.
        num_samples: Samples that training, validation and test are asked for, on which the megatron order depends.
        data_cache_path: As in training; by default the folder `cache` beside the dataset.

    Returns:
        a line for each split: what was made, what was there, or why nothing is needed.

    Raises:
        ValueError: a damaged dataset, or a cache that cannot be written.
    """
    dataset = IndexedDataset(prefix)
    everything = range(dataset.num_documents)
    ranges = (everything,) if split is None else split_documents(split, dataset.num_documents)
    lines = []
    for number, documents in enumerate(ranges):
        cache = cache_for(dataset.prefix, data_cache_path)
        try:
            source = GPTDataset(
                dataset,
                documents,
                split=number,
                seed=seed,
                seq_length=seq_length,
                vocab_size=1,  # no token is read
                order=order,
                num_samples=num_samples[number],
                cache=cache,
            )
        except DatasetError as error:
            told = f"no index, since {str(error).splitlines()[0]}"
        else:
            told = _build(source.order, epochs if order == "epoch" else 1, cache)
        lines.append(f"{SPLIT_NAMES[number]}: {dataset.prefix}: {told}")
    return lines


def _build(samples: SampleOrder, num_passes: int, cache: IndexCache) -> str:
    """Make the indexes of the first passes; returns a line that says what was made."""
    for number in range(num_passes):
        samples.index(number)
    if cache.fault:
        raise ValueError(cache.fault)
    if not cache.made and not cache.found:
        return "no index is kept: it is so small that every start computes it in a blink"
    size = sum(file.stat().st_size for file in cache.made) / 1e6
    made = f"made {len(cache.made)} files ({size:,.0f} MB)" if cache.made else "nothing to do"
    return f"{made}, {len(cache.found)} files were there, in {cache.folder}"
