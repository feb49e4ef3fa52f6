"""A dataset whose documents do not end as the run expects is found out, if the run asks for anything at their ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.data.datasets import find_missing_ends
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import write_dataset
from megatron.data.samples import DocumentRules

EOD = 9
RULES = DocumentRules(EOD, reset_attention_mask=True, eod_mask_loss=True)


def dataset(folder: Path, documents: list[list[int]]) -> IndexedDataset:
    with write_dataset(str(folder / "tokens"), np.uint16) as writer:
        for document in documents:
            writer.add_documents(np.array(document, dtype=np.uint16))
    return IndexedDataset(str(folder / "tokens"))


def test_documents_without_an_end_are_told_with_the_flags_that_do_nothing(tmp_path: Path) -> None:
    found = find_missing_ends(dataset(tmp_path, [[1, 2, 3]] * 100), range(100), RULES)
    assert found is not None
    assert f"{tmp_path}/tokens: none of 64 probed documents" in found and "id 9" in found and "--append-eod" in found
    assert "--reset-attention-mask, --eod-mask-loss will do nothing" in found and "position" not in found


@pytest.mark.parametrize(
    "documents",
    [
        pytest.param([[1, 2, EOD]] * 3, id="at the end"),
        pytest.param([[1, EOD, 2], [1, 2, 3]], id="within a document"),
        pytest.param([[1, 2]] * 40 + [[3, EOD]] * 40, id="of some"),
        pytest.param([[], [EOD]], id="alone"),
    ],
)
def test_documents_with_an_end_are_fine(documents: list[list[int]], tmp_path: Path) -> None:
    assert find_missing_ends(dataset(tmp_path, documents), range(len(documents)), RULES) is None


def test_only_the_documents_of_the_split_count_and_only_where_a_rule_asks(tmp_path: Path) -> None:
    found = dataset(tmp_path, [[1, EOD], [2, 3], [], [4]])
    assert find_missing_ends(found, range(1, 4), RULES)
    assert find_missing_ends(found, range(1, 4), DocumentRules(EOD)) is None
    assert find_missing_ends(found, range(4, 4), RULES) is None


def test_long_documents_are_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = IndexedDataset.read

    def counting(self: IndexedDataset, sequence: int, offset: int, count: int) -> np.ndarray:
        read.append(count)
        return original(self, sequence, offset, count)

    monkeypatch.setattr(IndexedDataset, "read", counting)
    monkeypatch.setattr("megatron.data.datasets._MAX_PROBED_TOKENS", 50)
    assert find_missing_ends(dataset(tmp_path, [[1] * 40] * 5), range(5), RULES)
    assert sum(read) == 5 + 50
