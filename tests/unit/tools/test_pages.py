"""Pages of one HTML file: whether what is drawn is what was planned, and whether a page needs nothing from outside."""

from __future__ import annotations

import os
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron.parallel.topology import Topology
from megatron_lab.pages.figures import Bar, build_stacked_bars
from megatron_lab.pages.html import Section, build_page, build_table, write_page
from megatron_lab.pages.plan_page import build_plan_page
from megatron_lab.pages.rank_grid import build_rank_grid
from megatron_lab.planner.plan_text import format_plan
from megatron_lab.planner.units import format_bytes
from tests.support.planned import kind_of, plans_of, settings

_EMPTY = {"meta", "rect", "line", "wbr"}


class Checked(HTMLParser):
    """Reads a page; elements must be closed in order. What names an address is collected."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.titles: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in _EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _EMPTY:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in _EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "title":
            self.titles.append(data)


@pytest.mark.parametrize("order", [False, True])
def test_a_plan_as_a_page_draws_every_rank_with_the_memory_of_its_kind(order: bool) -> None:
    flags = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2, "num_layers": 4}
    loaded = settings(16, gpus_per_node=4, use_tp_pp_dp_mapping=order, **flags)
    (plan,) = plans_of([loaded])
    topology = Topology.of(loaded.config.parallel, 16)
    text = build_plan_page(plan, topology, notes=["a <note>"])
    found = Checked(text)
    assert not found.addresses and "http" not in text and "@import" not in text and "url(" not in text
    ranks = {}
    for title in found.titles:
        if told := re.match(
            r"rank (\d+) on node (\d+): pipeline (\d), data (\d), context (\d), tensor (\d); device memory (.*)", title
        ):
            ranks[int(told[1])] = told.groups()[1:]
    assert sorted(ranks) == [*range(16)]
    for rank, (node, pipeline, data, context, tensor, memory) in ranks.items():
        assert int(node) == rank // 4
        assert topology.find_rank(tp=int(tensor), cp=int(context), dp=int(data), pp=int(pipeline)) == rank
        assert memory == format_bytes(kind_of(plan.profiles, topology, rank).memory.total.device)
    for kind in plan.profiles:
        for name, part in kind.memory.by_purpose.items():
            if part.device > 0.01 * kind.memory.total.device:
                assert any(f"{name.replace('_', ' ')}: {format_bytes(part.device)}" in title for title in found.titles), name
    assert "a &lt;note&gt;" in text and all(escape(line) in text for line in format_plan(plan))


def lines(text: str) -> int:
    return text.count("<line ")


def test_a_grid_parts_nodes_and_leaves_out_the_middle_of_large_jobs() -> None:
    # 2 stages x 2 data ranks x 2 tensor ranks: nodes of 2 part data ranks (2 lines) and stages (4 cells).
    assert lines(build_rank_grid(Topology(tp=2, dp=2, pp=2), 2, float, str, "x")) == 2 + 4
    assert lines(build_rank_grid(Topology(tp=2, dp=2, pp=2), 8, float, str, "x")) == 0
    large = build_rank_grid(Topology(tp=8, dp=48, pp=100), 8, lambda rank: 1.0, str, "x")
    drawn = large.count("<rect ") - 1  # one is the frame
    assert drawn == 64 * 64 and f"{38_400 - drawn:,} of 38,400 ranks are left out in the middle" in large
    assert "x: 1.0 on all ranks" in large and ">stage 99<" in large and ">stage 98<" not in large


def test_bars_are_shares_of_the_longest_and_text_is_escaped() -> None:
    drawn = build_stacked_bars([Bar("<a>", {"p": 30.0, "q": 20.0}), Bar("b", {"q": 10.0})], str, limit=100.0)
    widths = [float(width) for width in re.findall(r'<rect x="[\d.]+%" y="\d+" width="([\d.]+)%"', drawn)]
    assert [width * 1.02 for width in widths] == pytest.approx([30, 20, 10], abs=0.01)
    assert "&lt;a&gt;: 50.0" in drawn and "<a>" not in drawn and 'x1="98.039%"' in drawn


def test_a_page_is_written_into_new_folders_or_refused(tmp_path: Path) -> None:
    text = build_page("T & U", [Section("one", build_table(["a", "b"], [["<1>", "2"]], numeric_columns=[1]))])
    Checked(text)
    write_page("--x", str(tmp_path / "new" / "page.html"), text)
    assert "T &amp; U" in (tmp_path / "new" / "page.html").read_text() and "&lt;1&gt;" in text
    os.mkfifo(tmp_path / "pipe")
    for path, problem in ((tmp_path, "is a folder"), (tmp_path / "pipe", "cannot be written: it is a pipe")):
        with pytest.raises(ValueError, match=f"--x {path} {problem}"):
            write_page("--x", str(path), text)
