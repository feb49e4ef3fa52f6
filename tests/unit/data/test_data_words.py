"""The words of the data paths, on the command line and in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.config.data import DataConfig, WeightedPrefix, parse_blend, read_split_blends

BLEND = [WeightedPrefix(0.3, "a"), WeightedPrefix(7.0, "b")]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a"], [WeightedPrefix(None, "a")]),
        (["a", "b"], [WeightedPrefix(None, "a"), WeightedPrefix(None, "b")]),
        (["a", "b", "c", "d"], [WeightedPrefix(None, name) for name in "abcd"]),
        (["1", "a"], [WeightedPrefix(1.0, "a")]),
        ([".3", "a", "7e0", "b"], BLEND),
        (["0", "a", "1", "./2020"], [WeightedPrefix(0.0, "a"), WeightedPrefix(1.0, "./2020")]),
    ],
)
def test_words_are_datasets_with_or_without_weights(words: list[str], expected: list[WeightedPrefix]) -> None:
    assert parse_blend(words) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "has no value"),
        (["0.5"], "the last weight, 0.5, has no prefix"),
        (["0.5", "a", "b", "c"], "value 3, 'b', should be a weight"),
        (["a", "0.5", "b", "0.5"], "value 1, 'a', should be a weight"),
        (["1", "2"], "value 2, '2', should be a prefix"),
        (["1", "a", "2"], "the last weight, 2, has no prefix"),
        (["-1", "a", "2", "b"], "the weight of a is -1.0"),
        (["nan", "a"], "the weight of a is nan"),
        (["inf", "a"], "the weight of a is inf"),
        (["0", "a", "0.0", "b"], "all weights are 0"),
    ],
)
def test_words_that_are_no_blend(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match="\n  ") as caught:
        parse_blend(words, "--valid-data-path")
    assert str(caught.value).startswith("--valid-data-path") and message in str(caught.value)


def test_one_path_serves_all_splits(tmp_path: Path) -> None:
    (tmp_path / "blend").write_text("0.3 a\n7\tb\n")
    assert read_split_blends(DataConfig(data_path=("0.3", "a", "7", "b"))) == (False, [{"": BLEND}] * 3)
    assert read_split_blends(DataConfig(data_args_path=str(tmp_path / "blend"))) == (False, [{"": BLEND}] * 3)
    assert read_split_blends(DataConfig(mock_data=True)) == (False, [{"": []}] * 3)


def test_splits_with_paths_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "splits.json"
    file.write_text(json.dumps({"train": [0.3, "a", 7, "b"], "test": ["t"]}))
    alone = [WeightedPrefix(None, "t")]
    assert read_split_blends(DataConfig(per_split_data_args_path=str(file))) == (True, [{"": BLEND}, {}, {"": alone}])
    given = DataConfig(train_data_path=("0.3", "a", "7", "b"), valid_data_path=("t",))
    assert read_split_blends(given) == (True, [{"": BLEND}, {"": alone}, {}])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"\xff", "not UTF-8"),
        (b"[", "Expecting value"),
        (b"[]", "must have the entry train"),
        (b'{"valid": ["a"]}', "must have the entry train"),
        (b'{"train": ["a"], "vaild": ["b"]}', "no entries other than train"),
        (b'{"train": "a"}', "not a list of weights and prefixes"),
        (b'{"train": [["a"]]}', "not a list of weights and prefixes"),
        (b'{"train": ["1", "a", "b", "c"]}', "splits.json 1 a b c: value 3"),
    ],
)
def test_a_file_of_splits_that_cannot_be_used(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "splits.json").write_bytes(content)
    with pytest.raises(ValueError, match="\n  ") as caught:
        read_split_blends(DataConfig(per_split_data_args_path=str(tmp_path / "splits.json")))
    assert message in str(caught.value)


@pytest.mark.parametrize("content", ["", "0.5 a b"])
def test_a_file_of_words_that_cannot_be_used(tmp_path: Path, content: str) -> None:
    file = tmp_path / "blend"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"--data-args-path {file}"):
        read_split_blends(DataConfig(data_args_path=str(file)))
