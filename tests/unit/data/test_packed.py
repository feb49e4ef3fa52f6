"""Samples of whole documents: nothing is cut that fits, everything is predicted once an epoch, and a number says it all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.blend import Blend, BlendedDataset
from megatron.data.gpt_dataset import PackedDataset, pack_best_fit, split_into_items
from megatron.data.indexed_dataset import MARK_TYPE, DatasetError, IndexedDataset, get_loss_mask_prefix, open_loss_mask
from megatron.data.indexed_writer import write_dataset
from megatron.data.samples import DOCUMENT_END, IN_LOSS, PADDING, DocumentRules, read_microbatch

EOD, LENGTH = 0, 9
SIZES = [3, 10, 4, 1, 6, 2, 7, 25, 5, 3, 0, 8, 2, 11, 4]


def dataset(folder: Path, *, marked: bool, sizes: list[int] = SIZES) -> PackedDataset:
    """Tokens tell document and place: 100 x document + place + 1. Every third is learned. Documents of one or two sequences."""
    prefix = str(folder / f"d{marked}")
    for path, dtype in ((prefix, np.uint16), (get_loss_mask_prefix(prefix), MARK_TYPE))[: 1 + marked]:
        with write_dataset(path, dtype) as writer:
            for number, size in enumerate(sizes):
                tokens = 100 * number + np.arange(size) + 1
                writer.add_documents((tokens % 3 == 0).astype(MARK_TYPE).tolist() if dtype is MARK_TYPE else tokens.tolist())
    opened = IndexedDataset(prefix)
    settings: dict[str, Any] = {"split": 0, "seed": 7, "seq_length": LENGTH, "vocab_size": 1600, "eod": EOD}
    marks = open_loss_mask(opened) if marked else None
    return PackedDataset(opened, range(len(sizes)), **settings, marks=marks)


@pytest.mark.parametrize("marked", [False, True])
def test_each_token_is_predicted_once_an_epoch(tmp_path: Path, marked: bool) -> None:
    source = dataset(tmp_path, marked=marked)
    rules = DocumentRules(EOD, reset_position_ids=True, reset_attention_mask=True)
    every = {100 * number + place + 1 for number, size in enumerate(SIZES) for place in range(1, size)}
    expected = {token for token in every if not marked or token % 3 == 0}
    orders = []
    for epoch in range(3):
        found = Counter[int]()
        first = epoch * source.samples_per_epoch
        for number in range(first, first + source.samples_per_epoch):
            micro = read_microbatch(source, number, 1, rules)
            assert micro.cu_seqlens is not None and micro.positions is not None
            tokens, labels, mask = micro.tokens[0], micro.labels[0], micro.loss_mask[0] > 0
            assert (labels[mask] == tokens[mask] + 1).all(), "the label is of the same document"
            found.update(labels[mask].tolist())
            for start, stop in zip(
                micro.cu_seqlens, micro.cu_seqlens[1:], strict=False
            ):  # attention and positions within a document
                own = tokens[start:stop]
                assert (own == EOD).all() or (np.diff(own) == 1).all()
                assert (micro.positions[0, start:stop] == np.arange(stop - start)).all()
            assert np.concatenate(
                [100 * piece.document + piece.first_token + 1 + np.arange(piece.num_tokens) for piece in source.get_lineage(number)]
            ).tolist() == [*tokens[tokens != EOD], *([labels[-1]] if labels[-1] != EOD else [])]
        assert set(found) == expected and set(found.values()) == {1}
        orders.append([source.get_lineage(number) for number in range(first, first + source.samples_per_epoch)])
    assert orders[0] != orders[1] and sorted(map(repr, orders[0])) == sorted(map(repr, orders[1]))


def test_what_fits_is_whole_and_what_was_read_is_one_number(tmp_path: Path) -> None:
    source = dataset(tmp_path, marked=False)
    pieces = [piece for number in range(source.samples_per_epoch) for piece in source.get_lineage(number)]
    parts = Counter(piece.document for piece in pieces)
    assert {number: parts[number] for number, size in enumerate(SIZES) if size > 1} == {
        number: 3 if size == 25 else 2 if size == 11 else 1 for number, size in enumerate(SIZES) if size > 1
    }
    told = "\n".join(source.describe(10))
    assert "2 documents are longer than a sample (10 tokens)" in told and "2 documents of fewer than two tokens" in told
    later = PackedDataset(
        source.selection.dataset, range(len(SIZES)), split=0, seed=7, seq_length=LENGTH, vocab_size=1600, eod=EOD, num_consumed=5
    )
    assert np.array_equal(later.get_samples(0, 20), source.get_samples(5, 20))
    blend = BlendedDataset([source, dataset(tmp_path, marked=True)], Blend([1.0, 1.0]))
    marks = blend.get_marks(0, 8)
    assert marks is not None and (marks & DOCUMENT_END > 0).any()
    assert (marks & ~MARK_TYPE(IN_LOSS | DOCUMENT_END) == PADDING * (blend.get_samples(0, 8) == EOD)).all()
    with pytest.raises(DatasetError, match="no document of two tokens"):
        dataset(tmp_path / "..", marked=False, sizes=[1, 0])


def test_a_microbatch_knows_where_padding_begins(tmp_path: Path) -> None:
    """Only if attention stops at documents; microbatches of full samples have none."""
    source, count = dataset(tmp_path, marked=False), 0
    for number in range(source.samples_per_epoch):
        filled = sum(piece.num_tokens for piece in source.get_lineage(number))
        apart = read_microbatch(source, number, 1, DocumentRules(EOD, reset_attention_mask=True))
        assert apart.data_lengths == (None if filled == LENGTH + 1 else (filled,))
        assert read_microbatch(source, number, 1, DocumentRules(EOD, reset_position_ids=True)).data_lengths is None
        count += filled == LENGTH + 1
    assert 0 < count < source.samples_per_epoch


def test_little_room_is_left() -> None:
    """Best fit needs no more samples than 11/9 of the fewest, and one (Johnson 1973)."""
    lengths = np.random.default_rng(1).integers(2, 400, 3000)
    parts = split_into_items(lengths, 256)
    found = pack_best_fit(parts.lengths, 256)
    assert sorted(part for sample in found for part in sample) == list(range(len(parts.lengths)))
    assert max(sum(int(parts.lengths[part]) for part in sample) for sample in found) <= 256
    assert len(found) <= 1.05 * parts.lengths.sum() / 256
