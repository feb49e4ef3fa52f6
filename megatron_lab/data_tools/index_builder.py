"""Creation of a dataset's sample indexes (the shuffled order of its documents and samples) before training.

A run then finds the indexes in the cache instead of building them at its start.
"""

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

    A sample index lists the documents in their shuffled order, the token at which each of them starts, and the order of the
    samples.

    Args:
        prefix: path of an indexed dataset without .bin and .idx.
        split: proportions of training, validation and test as in --split. None assigns all documents to training, as
            --train-data-path does.
        seed: seed of the run (--seed).
        seq_length: sequence length of the run, in tokens.
        epochs: number of epochs to build, from the first one. It is used only with order "epoch": with order "megatron", one index
            covers all epochs.
        order: order of the samples, as --data-order.
        num_samples: number of samples of training, validation and test that the run requests. Order "megatron" depends on these
            numbers.
        data_cache_path: folder of the index files, as --data-cache-path; by default the folder `cache` next to the dataset.

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
    """Build the indexes of the first `num_passes` passes (epochs) over the data.

    Return a message for the user with the number of index files that were written and that existed before.
    """
    for pass_index in range(num_passes):
        sample_order.get_index(pass_index)
    if cache.problem:
        raise ValueError(cache.problem)
    if not cache.written_files and not cache.loaded_files:
        return "no index is cached: it is so small that each start computes it quickly"
    size_mb = sum(file.stat().st_size for file in cache.written_files) / 1e6
    summary = f"made {len(cache.written_files)} files ({size_mb:,.0f} MB)" if cache.written_files else "nothing to do"
    return f"{summary}, {len(cache.loaded_files)} files were there, in {cache.folder}"
