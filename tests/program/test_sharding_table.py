"""tools/sharding_table.py, and docs/data_parallel.md, whose tables it makes."""

from __future__ import annotations

import functools
import re

import pytest

from megatron_lab.commands import sharding_table
from megatron_lab.commands.sharding_table import DATA_SIZES, MODELS, TABLES, ModelReports, build_reports, main
from tests.support.cli import ROOT

DOCUMENT = (ROOT / "docs/data_parallel.md").read_text()


@functools.cache
def some_reports(full: bool) -> list[ModelReports]:
    """All rows, or those of every model and of every data size: with many layers and many data ranks a row takes long."""
    chosen = [(one, size) for one in MODELS for size in DATA_SIZES if full or size == DATA_SIZES[0] or one is MODELS[-1]]
    return [build_reports(*each) for each in chosen]


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_the_document(
    name: str, full: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stands between two marks that name the command. To renew one, put what the command prints in its place."""
    monkeypatch.setattr(sharding_table, "build_all_reports", lambda: some_reports(full))
    assert main([name]) == 0
    marks = rf"<!-- python tools/sharding_table\.py {name} -->\n\n(.*?)<!-- end -->"
    (table,) = re.findall(marks, DOCUMENT, re.DOTALL)
    printed = capsys.readouterr().out
    if full or name == "parts":
        assert printed == table
    else:
        heads = tuple(f"| {sharding_table._format_layout(one)} |" for one in some_reports(full))
        lines = table.splitlines()
        assert printed.splitlines() == [*lines[:2], *(line for line in lines[2:] if line.startswith(heads))]
        assert len(lines) == 2 + len(MODELS) * len(DATA_SIZES) and len(printed.splitlines()) == 2 + len(heads)


def test_sizes_are_those_of_the_names(full: bool) -> None:
    """A rank of the first stage has its share of the parameters, and with an end of the model at most a tenth more; of the bytes,
    padding is what the document says at most."""
    billions = {"GPT 1.3B": 1.3, "Llama 7B": 6.7, "Llama 70B": 69.0, "GPT 1T": 1008.0}
    assert [one.name for one in MODELS] == [*billions]
    for one in some_reports(full):
        ranks = one.published.tensor_size * one.published.num_stages
        share = 18 * billions[one.published.name] * 1e9 / ranks
        assert 0.99 * share < one.by_strategy["no_shard"].memory.total.total < 1.12 * share
        for report in one.by_strategy.values():
            assert report.memory.total.padding < 4e-4 * report.memory.total.total
