"""Validation sets: their names and blends, and the source that gives each sample of a set once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.config.cli import load
from megatron.config.data import DataConfig, WeightedPrefix, parse_validation_sets, read_split_blends
from megatron.config.errors import ConfigError
from megatron.data.indexed_dataset import MARK_TYPE
from megatron.data.indexed_writer import write_dataset
from megatron.data.samples import DEFAULT_MARKS, IN_LOSS, DocumentRules, read_microbatch
from megatron.data.splits import DataSplit, open_datasets
from megatron.data.tokenizer import NullTokenizer
from megatron.metrics.log_line import format_short_validation_line, format_validation_lines
from megatron.training.reporter import add_mean
from megatron_lab.data_tools.complete_sets import CompleteSet
from megatron_lab.data_tools.validation_sets import separate_datasets
from megatron_lab.monitoring.curve_sinks.tensorboard_sink import get_grouped_tag

FLAG = "--valid-data-path"
BASE = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --tokenizer-type ByteTokenizer "
    "--lr 1e-3 --train-iters 2 --train-data-path t"
).split()


def prefixes(*names: str) -> list[WeightedPrefix]:
    return [WeightedPrefix(None, name) for name in names]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("a", {"": prefixes("a")}),
        ("books=a", {"books": prefixes("a")}),
        (
            "books=0.3 a 0.7 b code=c d",
            {"books": [WeightedPrefix(0.3, "a"), WeightedPrefix(0.7, "b")], "code": prefixes("c", "d")},
        ),
        ("x.y-1=/data/lang=en/a 2=b", {"x.y-1": prefixes("/data/lang=en/a"), "2": prefixes("b")}),
        ("./lang=en/a data/lang=de/b", {"": prefixes("./lang=en/a", "data/lang=de/b")}),
    ],
)
def test_a_word_with_an_equals_sign_starts_a_set(words: str, expected: dict[str, list[WeightedPrefix]]) -> None:
    assert parse_validation_sets(words.split(), FLAG) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a books=b", "a has no name, but books has one"),
        ("books=a books=b", "two validation sets with the name books"),
        ("books= a", "books= has no dataset after the equals sign"),
        ("books=0.3 code=a", "set books, 0.3: the last weight, 0.3, has no prefix"),
        ("books=a 0.7 code=b", "set books, a 0.7: value 1, 'a', should be a weight"),
    ],
)
def test_words_that_are_no_sets(words: str, message: str) -> None:
    """Refused with the settings, before anything runs."""
    with pytest.raises(ValueError, match="\n  ") as caught:
        parse_validation_sets(words.split(), FLAG)
    assert str(caught.value).startswith(FLAG) and message in str(caught.value)
    with pytest.raises(ConfigError) as refused:
        load([*BASE, FLAG, *words.split()], 1)
    assert message in refused.value.violations[0].message


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ("a", "a"),
        ("/x/a /y/b", "a b"),
        ("/x/code/text /x/books/text", "code/text books/text"),
        ("x/a/t y/a/t z/b/t u", "x/a/t y/a/t b/t u"),
        ("text x/text", "text x/text"),
    ],
)
def test_a_set_has_the_shortest_name_that_is_its_own(paths: str, names: str) -> None:
    found = parse_validation_sets(paths.split(), FLAG, one_per_dataset=True)
    assert found == {name: prefixes(path) for name, path in zip(names.split(), paths.split(), strict=True)}


def test_one_set_for_each_dataset() -> None:
    """Names that are given win; weights have no effect; a dataset that occurs twice is refused; training is not divided."""
    assert parse_validation_sets(["n=a", "b"], FLAG, one_per_dataset=True) == {"n": prefixes("a", "b")}
    assert parse_validation_sets(["0.3", "x/a", "0.7", "b"], FLAG, one_per_dataset=True) == {
        "a": prefixes("x/a"),
        "b": prefixes("b"),
    }
    with pytest.raises(ValueError, match="names a twice"):
        separate_datasets(prefixes("a", "./a"), FLAG)
    blend = [WeightedPrefix(0.3, "a"), WeightedPrefix(0.7, "b")]
    data = DataConfig(data_path=("0.3", "a", "0.7", "b"), multiple_validation_sets=True)
    assert read_split_blends(data) == (False, [{"": blend}, {"a": prefixes("a"), "b": prefixes("b")}, {"": blend}])


def test_a_file_names_sets(tmp_path: Path) -> None:
    file = tmp_path / "splits.json"
    data = DataConfig(per_split_data_args_path=str(file))
    file.write_text(json.dumps({"train": ["t"], "valid": {"books": [0.3, "a", 0.7, "b"], "code": ["x=c"]}}))
    books = [WeightedPrefix(0.3, "a"), WeightedPrefix(0.7, "b")]
    assert read_split_blends(data) == (True, [{"": prefixes("t")}, {"books": books, "code": prefixes("x=c")}, {}])
    for valid, message in (
        ({"books": "a"}, "the entry valid, books is not a list"),
        ({"books": []}, "set books, has no value"),
        ({"a/b": ["a"]}, "'a/b' is not a valid name"),
        ({}, "the entry valid is not a list"),
        ({"books": ["a\0"]}, "not a valid path"),
    ):
        file.write_text(json.dumps({"train": ["t"], "valid": valid}))
        with pytest.raises(ValueError, match="\n  ") as caught:
            read_split_blends(data)
        assert message in str(caught.value)


def test_settings_that_do_not_go_together() -> None:
    """A flag without effect is named; --mock-data has no end; an evaluation needs data."""
    assert any(
        "--eval-iters 7 has no effect" in note
        for note in load([*BASE, FLAG, "a", *"--full-validation --eval-iters 7".split()], 1).notes
    )
    mock = [word for word in BASE if word not in ("--train-data-path", "t")] + ["--mock-data"]
    assert any("--multiple-validation-sets has no effect" in note for note in load([*mock, "--multiple-validation-sets"], 1).notes)
    for words, message in (
        ("--full-validation", "--full-validation cannot be used with --mock-data."),
        ("--skip-train --eval-iters 0", "--skip-train has nothing to evaluate."),
    ):
        with pytest.raises(ConfigError, match=message):
            load([*mock, *words.split()], 1)
    without_training = BASE[: BASE.index("--lr")]
    config = load([*without_training, FLAG, "a", "--skip-train", "--load", "x"], 1).config
    assert not config.checkpoint.load_optim and config.optimizer.optimizer == "sgd" and config.optimizer.sgd_momentum == 0
    with pytest.raises(ConfigError, match="--train-data-path is not"):
        load([*without_training, FLAG, "a", "--train-iters", "1", "--lr", "1"], 1)


# ---- Complete sets.

SEQ = 4


@pytest.fixture
def split(tmp_path: Path) -> DataSplit:
    """A blend of two datasets with 5 and 3 samples, of which the second has a loss mask of every other token."""
    for name, first, count in (("a", 0, 22), ("b", 100, 14)):
        with write_dataset(str(tmp_path / name), np.uint16) as writer:
            writer.add_documents(list(range(first, first + count)))
    with write_dataset(str(tmp_path / "b_loss_mask"), MARK_TYPE) as writer:
        writer.add_documents([number % 2 for number in range(14)])
    blend = ("0.9", str(tmp_path / "a"), "0.1", str(tmp_path / "b"))
    config = DataConfig(train_data_path=(str(tmp_path / "a"),), valid_data_path=blend, data_loss_mask=False)
    opened = open_datasets(
        config, seed=1, seq_length=SEQ, tokenizer=NullTokenizer(300), need_validation=True, need_test=False, need_training=False
    )
    assert not opened.train.components, "the training data is not opened"
    return opened.valid[""]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 16])
def test_each_sample_comes_once(split: DataSplit, size: int) -> None:
    """In microbatches of any size, whose loss mask is zero after the last sample; weights have no effect."""
    source, rules = CompleteSet(split), DocumentRules(300)
    assert source.num_samples == 8
    counted: list[tuple[int, ...]] = []
    for first in range(0, -(-8 // size) * size + 2 * size, size):
        batch = read_microbatch(source, first, size, rules)
        assert batch.tokens.shape == (size, SEQ)
        for row, (tokens, labels, mask) in enumerate(zip(batch.tokens, batch.labels, batch.loss_mask, strict=True)):
            assert mask.tolist() == [float(first + row < 8)] * SEQ
            counted += [(*tokens.tolist(), int(labels[-1]))] if mask.any() else []
    assert len(counted) == len(set(counted)) == 8
    read = sorted(counted)
    starts = [row[0] for row in read]
    assert all(row == tuple(range(row[0], row[0] + SEQ + 1)) for row in read)
    assert np.diff(starts[:5]).tolist() == [SEQ] * 4 and np.diff(starts[5:]).tolist() == [SEQ] * 2, "windows side by side"
    assert source.describe(8)[-1] == (
        "validation: all 8 samples, each once (--full-validation); the weights of the blend have no effect"
    )
    assert source.get_lineage(7)[0].prefix.endswith("b")


def test_marks_of_samples_and_padding(split: DataSplit) -> None:
    marks = CompleteSet(split).get_marks(6, 4)
    assert (marks[:2] == DEFAULT_MARKS).all() and (marks[2:] == DEFAULT_MARKS & ~IN_LOSS).all()


# ---- Names in the log and the curves.


def test_lines_of_a_set_and_of_the_mean() -> None:
    """Megatron-LM prints `validation-0`; the rest of the line is as ever. Only the mean is told as such."""
    (_, plain, _), (_, named, _) = format_validation_lines(5, 2.0), format_validation_lines(5, 2.0, set_name="books")
    assert named == plain.replace(" validation loss", " validation-books loss")
    _, mean, rule = format_validation_lines(5, 2.0, num_averaged=2, mtp_loss=3.0)
    assert mean == f"{plain}mtp loss value: 3.000000E+00 | mean of sets: 2 | " and len(rule) == len(mean) + 1
    assert format_short_validation_line(5, 2.0, set_name="books") == ["validation books at it 5 | loss 2.000 | perplexity 7.389"]
    assert format_short_validation_line(5, 2.0, num_averaged=2)[0].endswith("| perplexity 7.389 | mean of 2 sets")


def test_the_mean_has_no_name() -> None:
    assert add_mean({"": (2.0, None)}) == {"": (2.0, None)}
    assert add_mean({"a": (2.0, 1.0), "b": (4.0, 5.0)}) == {"a": (2.0, 1.0), "b": (4.0, 5.0), "": (3.0, 3.0)}
    assert add_mean({"a": (2.0, None)})[""] == (2.0, None)


def test_tags_of_a_set() -> None:
    names = ("validation_loss", "validation_loss/books", "validation_mtp_loss/x/y", "busiest_expert/layer 1")
    assert [get_grouped_tag(name) for name in names] == [
        *("loss/validation", "loss/validation, books", "loss/validation, multi-token, x/y", "moe/busiest_expert, layer 1")
    ]
