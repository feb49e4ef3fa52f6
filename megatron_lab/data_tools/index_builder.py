"""Creation of a dataset's sample indexes before training, so that a run finds them in the cache."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.data import SPLIT_NAMES, DataOrder
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.indexed_writer import IndexCache, open_index_cache
from megatron.data.windows import SampleOrder, split_document_ranges


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
    """Build the sample indexes that a training run with these settings would build at its start.

    Args:
        prefix: path of an indexed dataset without .bin and .idx.
        split: proportions of training, validation and test as in --split. None assigns all documents to training, as
            --train-data-path does.
        seed: seed of the run (--seed).
        seq_length: sequence length of the run.
        epochs: number of epochs to build, from the first one. Only for the epoch order: the megatron order has one index for all
            epochs.
        order: as --data-order.
        num_samples: requested samples of training, validation and test. The megatron order depends on them.
        data_cache_path: as --data-cache-path; by default the folder `cache` next to the dataset.

    Returns:
        A message for each split: which files were written, which existed, or why no index is needed.

    Raises:
        ValueError: the dataset is damaged, or the cache cannot be written.
    """
    dataset = IndexedDataset(prefix)
    all_documents = range(dataset.num_documents)
    ranges = (all_documents,) if split is None else split_document_ranges(split, dataset.num_documents)
    messages = []
    for split_index, document_range in enumerate(ranges):
        cache = open_index_cache(dataset.prefix, data_cache_path)
        try:
            gpt_dataset = GPTDataset(
                dataset,
                document_range,
                split=split_index,
                seed=seed,
                seq_length=seq_length,
                vocab_size=1,  # no token is read
                order=order,
                num_samples=num_samples[split_index],
                cache=cache,
            )
        except DatasetError as error:
            result = f"no index, since {str(error).splitlines()[0]}"
        else:
            result = _build_passes(gpt_dataset.order, epochs if order == "epoch" else 1, cache)
        messages.append(f"{SPLIT_NAMES[split_index]}: {dataset.prefix}: {result}")
    return messages


def _build_passes(sample_order: SampleOrder, num_passes: int, cache: IndexCache) -> str:
    """Build the indexes of the first `num_passes` passes over the data.

    Return a message with the number of written and of existing files.
    """
    for pass_index in range(num_passes):
        sample_order.index(pass_index)
    if cache.problem:
        raise ValueError(cache.problem)
    if not cache.written_files and not cache.loaded_files:
        return "no index is cached: it is so small that each start computes it quickly"
    size_mb = sum(file.stat().st_size for file in cache.written_files) / 1e6
    summary = f"made {len(cache.written_files)} files ({size_mb:,.0f} MB)" if cache.written_files else "nothing to do"
    return f"{summary}, {len(cache.loaded_files)} files were there, in {cache.folder}"
