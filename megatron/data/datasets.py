"""The training, validation and test data that the flags ask for: which datasets each split reads, and its samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.config.data import SPLIT_NAMES, DataConfig, DataOrder, WeightedPrefix, split_words
from megatron.config.imports import named
from megatron.data.blend import Blend, BlendedDataset
from megatron.data.gpt_dataset import GPTDataset, PackedDataset
from megatron.data.history import Blending, BlendPart, Phase, Stretch, read_before, readings
from megatron.data.indexed_dataset import DatasetError, IndexedDataset, fingerprint, has_loss_mask, loss_mask_prefix, open_loss_mask
from megatron.data.indexed_writer import cache_for
from megatron.data.samples import DocumentRules, SampleSource
from megatron.data.splits import DataSplit
from megatron.data.tokenizer import Tokenizer
from megatron.data.windows import split_documents

_log = logging.getLogger(__name__)

WHOLE = ", whole documents"
"""Behind the fingerprint of a dataset that is read by --whole-documents."""


def open_split(
    split: int, config: DataConfig, *, seed: int, seq_length: int, tokenizer: Tokenizer, opened: dict[str, IndexedDataset]
) -> SplitData:
    """Open the datasets of a split.

    Args:
        opened: datasets by their prefixes, to which those are added that this split opens.

    Raises:
        ValueError: no dataset, flags that are no blend, or a damaged file.
    """
    own_splits, per_split = split_words(config)
    given = per_split[split]
    if not given:
        raise ValueError(
            f"the {SPLIT_NAMES[split]} split has no data: no entry in {config.per_split_data_args_path}.\n"
            "  Add it there, or do without evaluation (--eval-iters 0)."
        )
    blending: Blending = "none"
    if len(given) > 1 or (given[0].weight is not None and not own_splits):  # Megatron's distinction
        blending = "sizes" if given[0].weight is None else "weights"
    components = _components(given, split, opened, None if own_splits else config.split, config.data_order, seq_length)
    components = _with_marks(components, split, config)
    return SplitData(split, config, seed, seq_length, tokenizer.vocab_size, tokenizer.eod, tuple(components), blending)


def _components(
    given: list[WeightedPrefix],
    split: int,
    opened: dict[str, IndexedDataset],
    shares: str | None,
    order: DataOrder,
    seq_length: int,
) -> list[Component]:
    """The datasets of a blend, with their documents of a split and their weights.

    Raises:
        DatasetError: a dataset is named twice, so that it would give the same samples twice, in the same order.
    """
    found: list[Component] = []
    for each in given:
        if each.weight == 0:
            _log.info("%s: %s has weight 0 and is not read", SPLIT_NAMES[split], each.prefix)
            continue
        dataset = opened.get(each.prefix) or opened.setdefault(each.prefix, IndexedDataset(each.prefix))
        dataset.check_covered()
        documents = range(dataset.num_documents) if shares is None else split_documents(shares, dataset.num_documents)[split]
        size = max(dataset.num_tokens(documents) - 1, 0) // seq_length  # the number of samples in an epoch
        found.append(Component(dataset, documents, float(size) if each.weight is None else each.weight))
    if len(found) > 1 and order != "megatron":  # there repeats are exactly what it does
        first: dict[str, str] = {}
        for component in found:
            prefix, content = component.dataset.prefix, fingerprint(component.dataset)
            if content in first:
                raise DatasetError(
                    f"a blend has {first[content]} and {prefix}, the same dataset: each of its samples would be read twice.\n"
                    "  Name it once, with the sum of the weights."
                )
            first[content] = prefix
    return found


def _with_marks(components: list[Component], split: int, config: DataConfig) -> list[Component]:
    """With --data-loss-mask, the datasets with the loss masks that lie beside some of them; all tokens of the others count.

    Raises:
        DatasetError: none has a mask.
    """
    masked = [has_loss_mask(each.dataset.prefix) for each in components]
    name = SPLIT_NAMES[split]
    if not config.data_loss_mask:
        for each, has in zip(components, masked, strict=True):
            if has:
                _log.info("%s: the loss mask of %s is not used, without --data-loss-mask", name, each.dataset.prefix)
        return components
    if not any(masked):
        prefix = components[0].dataset.prefix
        raise DatasetError(
            f"--data-loss-mask: no dataset of the {name} split has a loss mask (such as {loss_mask_prefix(prefix)}.idx).\n"
            "  tools/preprocess_data.py --chat-template writes it; or leave the flag out, and every token counts."
        )
    for each, has in zip(components, masked, strict=True):
        if not has:
            _log.info("%s: %s has no loss mask: all of its tokens count", name, each.dataset.prefix)
    return [
        replace(each, marks=open_loss_mask(each.dataset)) if has else each for each, has in zip(components, masked, strict=True)
    ]


@dataclass(frozen=True)
class Component:
    """One dataset of a blend, with its documents of one split."""

    dataset: IndexedDataset
    documents: range
    weight: float
    """The given weight, or the number of samples in an epoch; only the ratios in a blend count."""
    marks: IndexedDataset | None = None
    """Marks of its tokens, with --data-loss-mask."""

    def part(self, *, whole_documents: bool = False) -> BlendPart:
        """The form in which the history of a run records it. Whole documents are other samples than windows over them."""
        first, count = self.documents.start, len(self.documents)
        content = fingerprint(self.dataset) + (WHOLE if whole_documents else "")
        return BlendPart(self.dataset.prefix, content, first, count, self.weight)


class SplitData(DataSplit):
    """The data of one split: a blend of datasets."""

    components: tuple[Component, ...]

    def warnings(self, rules: DocumentRules) -> list[str]:
        """Return a warning for each dataset whose documents seem to have no end."""
        unmarked = [] if self.config.whole_documents else [each for each in self.components if each.marks is None]
        found = (missing_ends(each.dataset, each.documents, rules) for each in unmarked)
        return [text for text in found if text is not None]

    def source(self, num_samples: int, phases: Sequence[Phase] = (), *, num_read: int | None = None) -> SampleSource:
        """See `DataSplit`."""
        if self.config.data_order == "megatron":
            return self._in_megatron_order(num_samples, num_samples if num_read is None else num_read)
        before = [read_before(phases, part) if phases else [] for part in self.parts()]
        sources = [self._dataset(each, earlier=earlier) for each, earlier in zip(self.components, before, strict=True)]
        first_sample = readings(phases)[-1].first_sample if phases else 0
        if len(sources) == 1 and not first_sample:
            return sources[0]
        return BlendedDataset(sources, Blend([each.weight for each in self.components]), first_sample=first_sample)

    def _in_megatron_order(self, num_samples: int, num_read: int) -> SampleSource:
        if self.blending == "none":
            return self._dataset(self.components[0], num_samples=num_samples)
        weights = [each.weight for each in self.components]
        by_size = self.blending == "sizes"
        if by_size:
            num_samples = min(num_samples, int(sum(weights)))  # one epoch of each
            if num_read > num_samples:
                raise DatasetError(
                    f"{SPLIT_NAMES[self.split]} reads {num_read:,} samples, but in Megatron's order a blend by sizes has one epoch "
                    f"of each dataset: {num_samples:,}.\n"
                    "  Give weights (--data-path WEIGHT PREFIX ...), read less, or use --data-order epoch."
                )
        counts: Sequence[int | None] = [None] * len(weights)
        if not by_size:
            counts = named("megatron_lab.data_tools.megatron_order:requested_samples")(weights, num_samples)
        sources = [self._dataset(each, num_samples=count) for each, count in zip(self.components, counts, strict=True)]
        cache = cache_for(self.components[0].dataset.prefix, self.config.data_cache_path, note=_log.info)
        greedy = named("megatron_lab.data_tools.megatron_order:GreedyBlend")(weights, num_samples, cache, by_size=by_size)
        return BlendedDataset(sources, greedy)

    def _dataset(
        self, component: Component, *, num_samples: int | None = None, earlier: Sequence[Stretch] = ()
    ) -> GPTDataset | PackedDataset:
        if self.config.whole_documents:
            if other := [stretch.seq_length for stretch in earlier if stretch.seq_length != self.seq_length]:
                raise DatasetError(
                    "--whole-documents has no order for a run that changes --seq-length on the way "
                    f"({other[-1]} before, {self.seq_length} now).\n"
                    "  Keep --seq-length, or begin another order with another --seed."
                )
            return PackedDataset(
                component.dataset,
                component.documents,
                split=self.split,
                seed=self.seed,
                seq_length=self.seq_length,
                vocab_size=self.vocab_size,
                eod=self.eod,
                num_before=sum(stretch.num_samples for stretch in earlier),
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
            earlier=earlier,
            cache=cache_for(component.dataset.prefix, self.config.data_cache_path, note=_log.info),
            marks=component.marks,
        )


# ---- A warning about datasets whose documents have no ends.

_LOOKED_AT = 64
_TOKENS_LOOKED_AT = 2**22
"""How many tokens to search in documents that do not end with the token: it may stand inside (several texts in one document)."""


def missing_ends(dataset: IndexedDataset, documents: range, rules: DocumentRules) -> str | None:
    """A warning if rules about documents are on but no end of document is found in some 64 documents, spread over the range."""
    flags = [name for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(rules, name)]
    if not flags or not documents or _has_end(dataset, documents, rules.eod):
        return None
    words = ", ".join(f"--{name.replace('_', '-')}" for name in flags)
    return (
        f"{dataset.prefix}: none of {min(len(documents), _LOOKED_AT)} documents that were looked at has the end-of-document id "
        f"{rules.eod:,}, so {words} will do nothing for it. Make it again with tools/preprocess_data.py --append-eod, or give the "
        "tokenizer it was made with."
    )


def _has_end(dataset: IndexedDataset, documents: range, eod: int) -> bool:
    chosen = np.linspace(documents.start, documents.stop - 1, min(len(documents), _LOOKED_AT)).astype(np.int64).tolist()
    left = _TOKENS_LOOKED_AT
    for last_alone in (True, False):
        for document in chosen:
            first, stop = dataset.document_index[document : document + 2].tolist()
            for sequence in reversed(range(first, stop)):
                length = int(dataset.lengths[sequence])
                count = min(length, 1 if last_alone else left)
                if count and (dataset.read(sequence, length - count, count) == eod).any():
                    return True
                left -= 0 if last_alone else count
                if count and last_alone:
                    break
    return False
