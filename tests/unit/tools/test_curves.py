"""The charts of a report: their data, and the functions of `curves.js` that need no browser."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import quickjs

from megatron_lab.pages import curves
from megatron_lab.pages.curves import MAX_POINTS, AxisMark, Curve, build_chart, build_charts, find_limits
from megatron_lab.pages.run_marks import MARK_COLOURS
from tests.unit.tools.test_pages import Checked

SCRIPT = Path(curves.__file__).with_name("curves.js").read_text()


@pytest.fixture(scope="module")
def script() -> quickjs.Context:
    context = quickjs.Context()
    context.eval(SCRIPT)
    return context


def call(script: quickjs.Context, expression: str, *arguments: Any) -> Any:
    """Call a function of the script with values that JSON can represent."""
    words = ", ".join(json.dumps(argument) for argument in arguments)
    return json.loads(script.eval(f"JSON.stringify({expression}({words}))"))


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 3e-4), (1, 300), (1, 200_000), (2.31, 2.47), (-1.5, 0.2), (0, 1.2e12), (10.9, 11.3), (1e-8, 9e-8)]
)
def test_an_axis_has_round_ticks(script: quickjs.Context, low: float, high: float) -> None:
    counts = [len(call(script, "linearTicks", low, high, wanted)) for wanted in (5, 6, 7, 8)]
    assert sum(5 <= count <= 8 for count in counts) >= (0 if (low, high) == (1e-8, 9e-8) else 4), counts
    for wanted in (5, 6, 7, 8):
        ticks = call(script, "linearTicks", low, high, wanted)
        assert 4 <= len(ticks) <= 9 and low - 1e-9 * high <= ticks[0] and ticks[-1] <= high * (1 + 1e-9)
        steps = [b - a for a, b in itertools.pairwise(ticks)]
        assert max(steps) == pytest.approx(min(steps))
        mantissa = float(f"{steps[0]:.6e}".partition("e")[0])
        assert mantissa in (1, 2, 2.5, 5), "steps are round numbers"
        labels = call(script, "formatTicks", ticks)
        assert len({*labels}) == len(labels) and max(map(len, labels)) <= 7, labels
    assert call(script, "linearTicks", 3, 3) == [3]


def test_ticks_are_numbers_that_people_write(script: quickjs.Context) -> None:
    assert call(script, "formatTicks", [0, 5e-5, 1e-4, 1.5e-4]) == ["0", "5e-5", "1e-4", "1.5e-4"]
    assert call(script, "formatTicks", [0, 5000, 10_000]) == ["0", "5k", "10k"]
    assert call(script, "formatTicks", [5e8, 1e9, 1.5e9]) == ["0.5B", "1B", "1.5B"]
    assert call(script, "formatTicks", [0.25, 0.30000000000000004]) == ["0.25", "0.3"]
    assert [call(script, "formatNumber", value) for value in (3e-4, 12_000, 1.5e9, 2.41057, -0.5, 0)] == [
        *("3e-4", "12k", "1.5B", "2.411", "-0.5", "0")
    ]
    assert call(script, "logTicks", 1e-3, 100) == [1e-3, 1e-2, 0.1, 1, 10, 100]
    assert call(script, "logTicks", 0.5, 12) == [0.5, 1, 2, 5, 10]
    assert 4 <= len(call(script, "logTicks", 2.3, 2.9)) <= 8 and len(call(script, "logTicks", 1e-30, 1.0)) <= 8


def test_outliers_do_not_set_the_range_and_are_merged(script: quickjs.Context) -> None:
    assert call(script, "findRange", [1, 2, 900], [0, 5], False) == [0.95, 2.05]
    low, high = call(script, "findRange", [1, 2, 900], [0, 5], True)
    assert low == 0 and high == pytest.approx(2.1)
    assert call(script, "findRange", [7, 8, 9, 4], [0, 5], False)[1] > 9, "most of them: the reader has zoomed into the start"
    assert call(script, "findRange", [], [0, 5], False) is None
    merged = call(script, "mergeOutliers", [{"pixel": p, "value": v, "x": p} for p, v in ((1, 5), (4, 9), (30, 7))], 9)
    assert [(one["value"], one["count"]) for one in merged] == [(9, 2), (7, 1)]
    assert [call(script, "findNearest", [1, 5, 9], x) for x in (-3, 2.9, 3.1, 7.5, 99)] == [0, 0, 1, 2, 2]
    assert call(script, "findNearest", [], 1) == -1


def test_limits_leave_out_spikes_and_the_start_of_a_long_run() -> None:
    """A short run shows everything, a divergence too; every curve has a range of its own."""
    wave = [2.5 + 0.1 * math.sin(step) for step in range(1000)]
    assert find_limits([wave]) == (None, None)
    low, high = find_limits([[*wave[:500], 40.0, *wave[500:], math.nan, None]])
    assert low is None and high == max(wave)
    assert find_limits([[*wave, *([9.0] * 200)]]) == (None, None), "a run that diverges is no outlier"
    start = [11.0, 9.0, 6.0, 4.0, *wave]
    assert find_limits([start])[1] == max(wave)
    fall = [4.0 - 0.002 * step for step in range(1000)]
    assert find_limits([[5.0, 4.5, *fall]]) == (None, None), "the start makes the range little higher"
    assert find_limits([wave, [1.8, 1.7, 1.6]]) == (None, None), "another validation set is no outlier"
    assert find_limits([[11.0, 3.0, 2.0]]) == (None, None) and find_limits([[]]) == (None, None)


def test_a_long_curve_is_thinned_and_keeps_its_extremes() -> None:
    n = 3 * MAX_POINTS
    values = [1.0, 2.0, 3.0] * MAX_POINTS
    chart = build_chart("x", [Curve("steps", "#000", range(n), range(n), values, is_faint=True)])
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', chart)
    (curve,) = json.loads(data)["curves"]
    assert curve["y"] == [2.0] * MAX_POINTS and curve["iteration"][:2] == [2, 5]
    assert {*curve["low"]} == {1.0} and {*curve["high"]} == {3.0}
    assert build_chart("x", [Curve("y", "#000", [], [], [])]) == ""
    assert build_chart("x", [Curve("y", "#000", [1], [1], [None])]) == ""


def test_marks_have_buttons_and_texts_cannot_end_a_script() -> None:
    marks = [AxisMark("restart", 5, 50, "</script><b>x"), AxisMark("save", 6, 60, "y")]
    page = build_charts([build_chart("<loss>", [Curve("<i>", "#000", [1], [1], [2.0])])], marks, MARK_COLOURS, ("save",))
    Checked(page.partition('<script type="application/json" id="marks">')[0].replace("<noscript>", "").replace("</noscript>", ""))
    buttons = re.findall(r'<button data-mark="([^"]*)" aria-pressed="(\w+)">.*?</svg>([^<]*)</button>', page)
    assert buttons == [("restart", "true", "restart (1)"), ("save", "false", "save (1)")]
    (data,) = re.findall(r'id="marks">(.*?)</script>', page)
    assert json.loads(data)[0] == {"type": "restart", "iteration": 5, "tokens": 50, "text": "</script><b>x"}
    assert "http://www.w3.org/2000/svg" in page and page.count("http") == 1, "nothing comes from the network"
    for name in MARK_COLOURS:
        assert page.count(f"--mark-{name.replace(' ', '-')}:") == 3, "on a light and a dark ground, and in print"
