"""tools/sharding_table.py, and docs/data_parallel.md, whose tables it makes."""

from __future__ import annotations

import re

import pytest

from tests.cli import ROOT
from tools.sharding_table import MODELS, TABLES, main, reports_of

DOCUMENT = (ROOT / "docs/data_parallel.md").read_text()


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_the_document(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each stands between two marks that name the command. To renew one, put what the command prints in its place."""
    assert main([name]) == 0
    marks = rf"<!-- python tools/sharding_table\.py {name} -->\n\n(.*?)<!-- end -->"
    assert re.findall(marks, DOCUMENT, re.DOTALL) == [capsys.readouterr().out]


@pytest.mark.parametrize("published", MODELS, ids=lambda published: published.name)
def test_sizes_are_those_of_the_names(published) -> None:  # type: ignore[no-untyped-def]
    """A rank of the largest stage has its share of the parameters, and with ends or odd sizes at most a fifth more."""
    billions = {"GPT 1.3B": 1.3, "Llama 7B": 6.7, "Llama 70B": 69.0, "GPT 1T": 1008.0}[published.name]
    share = billions * 1e9 / published.tensor_size / published.num_stages
    one = reports_of(published, 8)
    memory = one.by_strategy["no_shard"].memory
    assert 18 * share < 1.02 * memory.total.total < 1.2 * 18 * share
    assert one.shard_size == 8
    for report in one.by_strategy.values():
        assert report.memory.total.padding < 2e-4 * report.memory.total.total
