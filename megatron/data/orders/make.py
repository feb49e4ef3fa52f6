"""The order of samples that --data-order names."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.data import DataOrder
from megatron.data.cache.index_cache import IndexCache
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.orders.epoch_order import EpochOrder
from megatron.data.orders.megatron_order import MegatronOrder
from megatron.data.orders.sample_order import SampleOrder
from megatron.data.orders.stretches import Stretch
from megatron.data.split import SPLIT_NAMES

_OWN_PATHS = ("--train-data-path", "--valid-data-path", "--test-data-path")


def make_order(
    order: DataOrder,
    dataset: IndexedDataset,
    documents: range,
    *,
    split: int,
    seed: int,
    seq_length: int,
    num_samples: int | None,
    earlier: Sequence[Stretch],
    cache: IndexCache,
) -> SampleOrder:
    """The order of a split's samples; for the arguments see `GPTDataset`. Its indexes are built when they are asked for.

    Raises:
        DatasetError: the split is shorter than one window.
        ValueError: stretches at other sequence lengths in Megatron's order.
    """
    for length in (seq_length, *(stretch.seq_length for stretch in earlier)):
        _check_size(dataset, documents, split, length)
    if order == "epoch":
        return EpochOrder(dataset, documents, split=split, seed=seed, seq_length=seq_length, earlier=earlier, cache=cache)
    if earlier:
        raise ValueError(
            f"--data-order megatron has no order for a run that changes --seq-length on the way ({earlier[-1].seq_length} before, "
            f"{seq_length} now).\n  Keep --seq-length, or train with --data-order epoch."
        )
    return MegatronOrder(dataset, documents, split=split, seed=seed, seq_length=seq_length, num_samples=num_samples, cache=cache)


def _check_size(dataset: IndexedDataset, documents: range, split: int, seq_length: int) -> None:
    num_tokens = dataset.num_tokens(documents)
    if num_tokens > seq_length:
        return
    raise DatasetError(
        f"the {SPLIT_NAMES[split]} split of {dataset.prefix} has {len(documents):,} of {dataset.num_documents:,} documents and "
        f"{num_tokens:,} tokens; one sample takes {seq_length + 1:,} (--seq-length {seq_length} + 1).\n"
        "  Give it a larger share with --split, take a dataset with more documents or a shorter --seq-length"
        + (f", give this split data of its own ({_OWN_PATHS[split]}), or do without evaluation (--eval-iters 0)." if split else ".")
    )
