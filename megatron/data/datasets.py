"""Training, validation and test data in files: the datasets that each split reads, and the source of its samples."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.config.data import SPLIT_NAMES, DataConfig, WeightedPrefix, has_split_datasets
from megatron.config.imports import import_object
from megatron.data.blend import Blend, BlendedDataset
from megatron.data.gpt_dataset import GPTDataset, PackedDataset
from megatron.data.history import BlendEntry, Blending, LengthPeriod, Phase, find_earlier_periods, merge_batch_phases
from megatron.data.indexed_dataset import (
    DatasetError,
    IndexedDataset,
    fingerprint,
    get_loss_mask_prefix,
    has_loss_mask,
    open_loss_mask,
)
from megatron.data.indexed_writer import open_index_cache
from megatron.data.samples import DocumentRules, SampleSource
from megatron.data.splits import DataSplit
from megatron.data.tokenizer import Tokenizer
from megatron.data.windows import split_document_ranges

_log = logging.getLogger(__name__)

WHOLE_DOCUMENTS_SUFFIX = ", whole documents"
"""Suffix of the fingerprint of a dataset that is read with --whole-documents."""


def open_split(
    split: int,
    weighted_prefixes: list[WeightedPrefix],
    config: DataConfig,
    *,
    seed: int,
    seq_length: int,
    tokenizer: Tokenizer,
    datasets_by_prefix: dict[str, IndexedDataset],
) -> SplitData:
    """Open the datasets of one split (training, validation or test), or of one of several validation sets.

    Args:
        split: 0 training, 1 validation, 2 test.
        weighted_prefixes: the datasets with their weights.
        datasets_by_prefix: datasets that are already open, by path without .bin and .idx. Datasets that this call opens are added.

    Raises:
        ValueError: there is no dataset, or a file is damaged.
    """
    has_per_split_data = has_split_datasets(config)
    if not weighted_prefixes:
        raise ValueError(
            f"the {SPLIT_NAMES[split]} split has no data: {config.per_split_data_args_path} has no entry for it.\n"
            "  Add an entry, or switch evaluation off (--eval-iters 0)."
        )
    blending: Blending = "none"
    # Megatron-LM distinguishes the same cases.
    if len(weighted_prefixes) > 1 or (weighted_prefixes[0].weight is not None and not has_per_split_data):
        blending = "sizes" if weighted_prefixes[0].weight is None else "weights"
    components = _open_components(
        weighted_prefixes, split, datasets_by_prefix, None if has_per_split_data else config.split, config, seq_length
    )
    components = _open_loss_masks(components, split, config)
    return SplitData(split, config, seed, seq_length, tokenizer.vocab_size, tokenizer.eod, tuple(components), blending)


def _open_components(
    weighted_prefixes: list[WeightedPrefix],
    split: int,
    datasets_by_prefix: dict[str, IndexedDataset],
    split_shares: str | None,
    config: DataConfig,
    seq_length: int,
) -> list[Component]:
    """Open the datasets of a blend, select the documents of each that belong to the split, and determine each dataset's weight.

    Args:
        split: index of the split: 0 training, 1 validation, 2 test.
        split_shares: value of --split, by which the splits share a dataset; None if each split has its own datasets.

    Raises:
        DatasetError: a dataset occurs twice. Both copies would yield the same samples in the same order.
    """
    components: list[Component] = []
    for weighted in weighted_prefixes:
        if weighted.weight == 0:
            _log.info("%s: %s has weight 0 and is not read", SPLIT_NAMES[split], weighted.prefix)
            continue
        dataset = datasets_by_prefix.get(weighted.prefix) or datasets_by_prefix.setdefault(
            weighted.prefix, _open_dataset(weighted.prefix, config)
        )
        dataset.check_covered()
        documents = (
            range(dataset.num_documents)
            if split_shares is None
            else split_document_ranges(split_shares, dataset.num_documents)[split]
        )
        samples_per_epoch = max(dataset.count_tokens(documents) - 1, 0) // seq_length  # the number of samples in an epoch
        components.append(Component(dataset, documents, float(samples_per_epoch) if weighted.weight is None else weighted.weight))
    if len(components) > 1 and config.data_order != "megatron":  # Megatron-LM accepts repeated datasets
        first_prefixes: dict[str, str] = {}
        for component in components:
            prefix, content_hash = component.dataset.prefix, fingerprint(component.dataset)
            if content_hash in first_prefixes:
                raise DatasetError(
                    f"the blend contains one dataset twice, as {first_prefixes[content_hash]} and {prefix}: each sample would be "
                    "read twice.\n  Name the dataset once, with the sum of the weights."
                )
            first_prefixes[content_hash] = prefix
    return components


def _open_dataset(prefix: str, config: DataConfig) -> IndexedDataset:
    """Open a dataset.

    Raises:
        DatasetError: there is no dataset with this prefix, or it is damaged. For a text, the message contains the command that
            converts it.
    """
    if not os.path.exists(f"{prefix}.idx"):
        message = import_object("megatron_lab.data_tools.missing_dataset:explain_missing_dataset")(prefix, config)
        if message is not None:
            raise DatasetError(message)
    return IndexedDataset(prefix)


def _open_loss_masks(components: list[Component], split: int, config: DataConfig) -> list[Component]:
    """Return the datasets with their loss masks opened, if --data-loss-mask is set. All tokens of datasets without a mask count in
    the loss.

    Raises:
        DatasetError: --data-loss-mask is set, but no dataset has a mask.
    """
    has_masks = [has_loss_mask(component.dataset.prefix) for component in components]
    split_name = SPLIT_NAMES[split]
    if not config.data_loss_mask:
        for component, has_mask in zip(components, has_masks, strict=True):
            if has_mask:
                _log.info("%s: the loss mask of %s is not used, without --data-loss-mask", split_name, component.dataset.prefix)
        return components
    if not any(has_masks):
        prefix = components[0].dataset.prefix
        raise DatasetError(
            f"--data-loss-mask: no dataset of the {split_name} split has a loss mask "
            f"(such as {get_loss_mask_prefix(prefix)}.idx).\n"
            "  Write the mask with tools/preprocess_data.py --chat-template, or leave the flag out, so that "
            "every token counts in the loss."
        )
    for component, has_mask in zip(components, has_masks, strict=True):
        if not has_mask:
            _log.info("%s: %s has no loss mask: all of its tokens count", split_name, component.dataset.prefix)
    return [
        replace(component, marks=open_loss_mask(component.dataset)) if has_mask else component
        for component, has_mask in zip(components, has_masks, strict=True)
    ]


@dataclass(frozen=True)
class Component:
    """Dataset of a blend, restricted to the documents of one split (training, validation or test)."""

    dataset: IndexedDataset
    documents: range
    weight: float
    """Weight from the flags, or the number of samples in an epoch if the flags give no weights. Only the ratios in a blend
    matter."""
    marks: IndexedDataset | None = None
    """Loss mask of the dataset (--data-loss-mask), with one byte per token (see `open_loss_mask`); None if all tokens count in
    the loss."""

    def blend_entry(self, *, whole_documents: bool = False) -> BlendEntry:
        """Return a description of this dataset (path, fingerprint, documents and weight) for the data history that checkpoints
        contain.

        With `whole_documents`, the fingerprint is different. Samples of complete documents are not the samples of windows, so a run
        cannot continue from one to the other.
        """
        first, count = self.documents.start, len(self.documents)
        content = fingerprint(self.dataset) + (WHOLE_DOCUMENTS_SUFFIX if whole_documents else "")
        return BlendEntry(self.dataset.prefix, content, first, count, self.weight)


class SplitData(DataSplit):
    """Data of one split (training, validation or test): a blend of indexed datasets."""

    components: tuple[Component, ...]

    def find_warnings(self, rules: DocumentRules) -> list[str]:
        """Return a warning for each dataset whose documents seem to have no end-of-document token."""
        unmasked = [] if self.config.whole_documents else [component for component in self.components if component.marks is None]
        texts = (find_missing_ends(component.dataset, component.documents, rules) for component in unmasked)
        return [text for text in texts if text is not None]

    def count_epoch_samples(self) -> int:
        """Return the sum of the numbers of samples of one pass over each dataset. The weights of the blend do not matter, except
        that datasets of weight 0 are left out."""
        return sum(self._build_dataset(component).samples_per_epoch for component in self.components)

    def build_source(self, num_samples: int, phases: Sequence[Phase] = (), *, num_consumed: int | None = None) -> SampleSource:
        """Build the source of the split's samples. The arguments are those of `DataSplit.build_source`."""
        if self.config.data_order == "megatron":
            return self._build_megatron_source(num_samples, num_samples if num_consumed is None else num_consumed)
        earlier_periods = [find_earlier_periods(phases, entry) if phases else [] for entry in self.blend_entries()]
        sources = [
            self._build_dataset(component, earlier_periods=periods)
            for component, periods in zip(self.components, earlier_periods, strict=True)
        ]
        first_sample = merge_batch_phases(phases)[-1].first_sample if phases else 0
        if len(sources) == 1 and not first_sample:
            return sources[0]
        return BlendedDataset(sources, Blend([component.weight for component in self.components]), first_sample=first_sample)

    def build_epochs(self) -> list[tuple[SampleSource, int]]:
        """Return for each dataset a source that starts with one epoch, and the number of samples of the epoch."""
        sources = [self._build_dataset(component) for component in self.components]
        return [(source, source.samples_per_epoch) for source in sources]

    def _build_megatron_source(self, num_samples: int, num_consumed: int) -> SampleSource:
        """Build the source for --data-order megatron, with Megatron-LM's blend if the split has several datasets.

        Args:
            num_samples: number of samples of the run, on which Megatron-LM's order depends.
            num_consumed: number of these samples that are read.

        Raises:
            DatasetError: a blend without weights ends before `num_consumed` samples.
        """
        if self.blending == "none":
            return self._build_dataset(self.components[0], num_samples=num_samples)
        weights = [component.weight for component in self.components]
        by_size = self.blending == "sizes"
        if by_size:
            num_samples = min(num_samples, int(sum(weights)))  # one epoch of each dataset
            if num_consumed > num_samples:
                raise DatasetError(
                    f"the {SPLIT_NAMES[self.split]} split needs {num_consumed:,} samples, but with --data-order megatron "
                    f"a blend without weights ends after one epoch of each dataset, {num_samples:,} samples.\n"
                    "  Give weights (--data-path WEIGHT PREFIX ...), train for fewer samples, or use --data-order epoch."
                )
        counts: Sequence[int | None] = [None] * len(weights)
        if not by_size:
            counts = import_object("megatron_lab.data_tools.megatron_order:count_requested_samples")(weights, num_samples)
        sources = [
            self._build_dataset(component, num_samples=count) for component, count in zip(self.components, counts, strict=True)
        ]
        cache = open_index_cache(self.components[0].dataset.prefix, self.config.data_cache_path, notify=_log.info)
        blend = import_object("megatron_lab.data_tools.megatron_order:GreedyBlend")(weights, num_samples, cache, by_size=by_size)
        return BlendedDataset(sources, blend)

    def _build_dataset(
        self, component: Component, *, num_samples: int | None = None, earlier_periods: Sequence[LengthPeriod] = ()
    ) -> GPTDataset | PackedDataset:
        """Build the sample source of one dataset. The samples are windows, or complete documents with --whole-documents.

        Args:
            num_samples: number of samples of the run, on which Megatron-LM's order depends; None for one epoch.
            earlier_periods: number of samples that the run has already read from the dataset, for each sequence length in turn.

        Raises:
            DatasetError: --whole-documents is set and the sequence length has changed.
        """
        if self.config.whole_documents:
            if other_lengths := [period.seq_length for period in earlier_periods if period.seq_length != self.seq_length]:
                raise DatasetError(
                    "--whole-documents does not support a change of --seq-length within a run "
                    f"({other_lengths[-1]} before, {self.seq_length} now).\n"
                    "  Keep --seq-length, or start a new sample order with another --seed."
                )
            return PackedDataset(
                component.dataset,
                component.documents,
                split=self.split,
                seed=self.seed,
                seq_length=self.seq_length,
                vocab_size=self.vocab_size,
                eod=self.eod,
                num_consumed=sum(period.num_samples for period in earlier_periods),
                marks=component.marks,
            )
        return GPTDataset(
            component.dataset,
            component.documents,
            split=self.split,
            seed=self.seed,
            seq_length=self.seq_length,
            vocab_size=self.vocab_size,
            order=self.config.data_order,
            num_samples=num_samples,
            earlier=earlier_periods,
            cache=open_index_cache(component.dataset.prefix, self.config.data_cache_path, notify=_log.info),
            marks=component.marks,
        )


# ---- Warning about datasets without end-of-document tokens.

_NUM_PROBED_DOCUMENTS = 64
_MAX_PROBED_TOKENS = 2**22
"""Number of tokens to search in documents that do not end with the end-of-document token. The token may be inside a document that
consists of several texts."""


def find_missing_ends(dataset: IndexedDataset, documents: range, rules: DocumentRules) -> str | None:
    """Return a warning if a flag that acts at the ends of documents is set (such as --reset-attention-mask) but documents have no
    end-of-document token; else None.

    The check reads up to 64 documents, evenly spread over the range.
    """
    flags = [name for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(rules, name)]
    if not flags or not documents or _has_end(dataset, documents, rules.eod):
        return None
    flag_list = ", ".join(f"--{name.replace('_', '-')}" for name in flags)
    return (
        f"{dataset.prefix}: none of {min(len(documents), _NUM_PROBED_DOCUMENTS)} probed documents has the end-of-document id "
        f"{rules.eod:,}, so {flag_list} will do nothing for this dataset. Make it again with tools/preprocess_data.py "
        "--append-eod, or use the tokenizer it was made with."
    )


def _has_end(dataset: IndexedDataset, documents: range, eod: int) -> bool:
    """Return whether any probed document contains the end-of-document token. Up to 64 documents of the range are probed.

    The last token of every probed document is checked first, and then complete documents, up to `_MAX_PROBED_TOKENS` tokens.
    """
    probed = np.linspace(documents.start, documents.stop - 1, min(len(documents), _NUM_PROBED_DOCUMENTS)).astype(np.int64).tolist()
    remaining = _MAX_PROBED_TOKENS
    for last_token_only in (True, False):
        for document in probed:
            first, stop = dataset.document_index[document : document + 2].tolist()
            for sequence in reversed(range(first, stop)):
                length = int(dataset.lengths[sequence])
                count = min(length, 1 if last_token_only else remaining)
                if count and (dataset.read(sequence, length - count, count) == eod).any():
                    return True
                remaining -= 0 if last_token_only else count
                if count and last_token_only:
                    break
    return False
