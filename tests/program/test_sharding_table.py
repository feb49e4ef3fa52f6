"""tools/sharding_table.py, and docs/data_parallel.md, whose tables it makes."""

from __future__ import annotations

import re

import pytest

from tests.support.cli import ROOT
from tools.sharding_table import DATA_SIZES, TABLES, all_reports, main

DOCUMENT = (ROOT / "docs/data_parallel.md").read_text()


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_the_document(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each stands between two marks that name the command. To renew one, put what the command prints in its place."""
    assert main([name]) == 0
    marks = rf"<!-- python tools/sharding_table\.py {name} -->\n\n(.*?)<!-- end -->"
    assert re.findall(marks, DOCUMENT, re.DOTALL) == [capsys.readouterr().out]


def test_sizes_are_those_of_the_names() -> None:
    """A rank of the first stage has its share of the parameters, and with an end of the model at most a tenth more; of the bytes,
    padding is what the document says at most."""
    billions = {"GPT 1.3B": 1.3, "Llama 7B": 6.7, "Llama 70B": 69.0, "GPT 1T": 1008.0}
    assert len(all_reports()) == len(billions) * len(DATA_SIZES)
    for one in all_reports():
        ranks = one.published.tensor_size * one.published.num_stages
        share = 18 * billions[one.published.name] * 1e9 / ranks
        assert 0.99 * share < one.by_strategy["no_shard"].memory.total.total < 1.12 * share
        for report in one.by_strategy.values():
            assert report.memory.total.padding < 4e-4 * report.memory.total.total
