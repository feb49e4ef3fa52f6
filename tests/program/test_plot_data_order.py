"""`tools/plot_data_order.py` draws the order that training reads, and the picture of the documents is still that."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import write_dataset
from megatron_lab.commands import plot_data_order
from tests.support.cli import ROOT

pytest.importorskip("matplotlib")


def drawn(path: Path) -> list[str]:
    """All texts of a picture, in their order."""
    return re.findall(r"<text [^>]*>([^<]+)</text>", path.read_text())


def test_the_picture_of_the_page_shows_the_order_of_today(tmp_path: Path) -> None:
    assert plot_data_order.main(["--output", str(tmp_path / "order.svg")]) == 0
    shown = drawn(tmp_path / "order.svg")
    assert [text for text in shown if "epoch" in text] == [
        f"epoch {number}: 9 samples of 16 tokens, in the order in which they are read" for number in (0, 1)
    ]
    assert shown == drawn(ROOT / "docs/images/data_order.svg"), "draw it again: --output docs/images/data_order.svg"


def test_a_dataset_is_drawn_as_it_is_read(tmp_path: Path) -> None:
    prefix = str(tmp_path / "d")
    with write_dataset(prefix, np.uint16) as writer:
        for length in (30, 12, 25):
            writer.add_documents(np.zeros(length, np.uint16))
    words = ["--data-path", prefix, "--seq-length", "20", "--epochs", "1", "--seed", "3", "--output", str(tmp_path / "o.svg")]
    assert plot_data_order.main(words) == 0
    dataset = IndexedDataset(prefix)
    samples = GPTDataset(dataset, range(3), split=0, seed=3, seq_length=20, vocab_size=10)
    labels = [text for text in drawn(tmp_path / "o.svg") if re.fullmatch(r"\d+ to \d+", text)]
    assert labels[:3] == ["0 to 29", "0 to 11", "0 to 24"]
    expected = []
    for number in range(samples.samples_per_epoch):
        left = 20
        for piece in samples.get_lineage(number):
            count = min(piece.num_tokens, left)
            left -= count
            if count >= 0.07 * samples.selection.num_tokens:
                expected.append(f"{piece.first_token} to {piece.first_token + count - 1}")
    assert labels[3:] == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seq-length", "1000"], "one sample needs 1,001"),
        (["--data-path", "nothing"], "does not exist"),
        (["--seq-length", "1", "--data-path", "long"], "a picture can show an epoch of at most"),
    ],
)
def test_what_cannot_be_drawn(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with write_dataset(str(tmp_path / "long"), np.uint16) as writer:
        writer.add_documents(np.zeros(500, np.uint16))
    words = [str(tmp_path / word) if word == "long" else word for word in words]
    assert plot_data_order.main([*words, "--output", str(tmp_path / "o.svg")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o.svg").exists()


def test_several_epochs_of_megatron_are_one_order(tmp_path: Path) -> None:
    """Whose length is part of it."""
    words = ["--output", str(tmp_path / "order.svg"), "--data-order", "megatron", "--epochs", "3"]
    assert plot_data_order.main(words) == 0
    assert len([text for text in drawn(tmp_path / "order.svg") if text.startswith("epoch ")]) == 3
