"""`tools/plot_cut.py` draws who holds which tokens, and the picture of the page is still that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_lab.commands import plot_cut
from tests.support.cli import ROOT

pytest.importorskip("matplotlib")


def drawn(path: Path) -> list[str]:
    """All texts of a picture, in their order."""
    return re.findall(r"<text [^>]*>([^<]+)</text>", path.read_text())


def test_the_picture_of_the_page_is_that_of_today(tmp_path: Path) -> None:
    assert plot_cut.main(["--output", str(tmp_path / "cut.svg")]) == 0
    shown = drawn(tmp_path / "cut.svg")
    assert shown == drawn(ROOT / "docs/images/cut.svg"), "draw it again: --output docs/images/cut.svg"
    ranks = [text for text in shown if text.startswith("rank")]
    assert ranks[:7] == [f"rank {rank}" for rank in (0, 0, 1, 1, 2, 2, 3)], "two pieces each, but for those that touch"
    assert "the busiest rank computes 1.00 x the mean" in " ".join(shown)


def test_what_does_not_divide_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_cut.main(["--output", str(tmp_path / "c.svg"), "--documents", "7", "8"]) == 1
    assert "15 tokens cannot be split over 4 context ranks" in capsys.readouterr().err
    assert not (tmp_path / "c.svg").exists()
