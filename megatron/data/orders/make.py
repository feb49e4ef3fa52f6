"""The order of samples that --data-order names."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.data import DataOrder
from megatron.data.cache.index_cache import IndexCache
from megatron.data.indexed_dataset import DatasetError
from megatron.data.orders.epoch_order import EpochOrder
from megatron.data.orders.megatron_order import MegatronOrder
from megatron.data.orders.sample_order import SampleOrder
from megatron.data.orders.selection import Selection
from megatron.data.orders.stretches import Stretch
from megatron.data.split import SPLIT_NAMES

_OWN_PATHS = ("--train-data-path", "--valid-data-path", "--test-data-path")


def make_order(
    order: DataOrder, selection: Selection, *, num_samples: int | None, earlier: Sequence[Stretch], cache: IndexCache
) -> SampleOrder:
    """The order of a split's samples; for the arguments see `GPTDataset`. Its indexes are built when they are asked for.

    Raises:
        DatasetError: the split is shorter than one window.
        ValueError: stretches at other sequence lengths in Megatron's order.
    """
    for length in (selection.seq_length, *(stretch.seq_length for stretch in earlier)):
        _check_size(selection, length)
    if order == "epoch":
        return EpochOrder(selection, earlier=earlier, cache=cache)
    if earlier:
        raise ValueError(
            f"--data-order megatron has no order for a run that changes --seq-length on the way ({earlier[-1].seq_length} before, "
            f"{selection.seq_length} now).\n  Keep --seq-length, or train with --data-order epoch."
        )
    return MegatronOrder(selection, num_samples=num_samples, cache=cache)


def _check_size(selection: Selection, seq_length: int) -> None:
    if selection.num_tokens > seq_length:
        return
    dataset, split = selection.dataset, selection.split
    raise DatasetError(
        f"the {SPLIT_NAMES[split]} split of {dataset.prefix} has {len(selection.documents):,} of {dataset.num_documents:,} "
        f"documents and {selection.num_tokens:,} tokens; one sample takes {seq_length + 1:,} (--seq-length {seq_length} + 1).\n"
        "  Give it a larger share with --split, take a dataset with more documents or a shorter --seq-length"
        + (f", give this split data of its own ({_OWN_PATHS[split]}), or do without evaluation (--eval-iters 0)." if split else ".")
    )
