"""The report of runs: what it says of a record, and whether its parts add up."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.config.cli import load
from megatron.config.launcher import build_module_command
from megatron.config.save import to_dict
from megatron.metrics.history import HistoryFile, read_history
from megatron_lab.commands import report
from megatron_lab.pages.curves import MAX_POINTS, Curve, build_chart
from megatron_lab.pages.run_page import compute_step_times, format_shares, list_changed_settings
from tests.support.runs import arguments
from tests.unit.tools.test_pages import Checked

HOSTILE = "</script><b>bold"


def record(folder: Path, losses: Sequence[float | None], *, lr: float = 1e-3, **settings: Any) -> Path:
    """A run that was started again in its middle, with an evaluation, a step left out, a save and an end."""
    folder.mkdir(parents=True)
    config = to_dict(load(arguments(train_iters=len(losses), lr=lr, save=str(folder), **settings), 1).config)
    facts = {"total_iterations": len(losses), "parameters": 27936, "world_size": 1, "layout": {"tp": 1, "dp": 1}}
    facts |= {"device": "cpu", "peak_flops": 1e12, "config": config, "command": ["--lr", str(lr)], "total_samples": 99}
    file, middle = HistoryFile(folder, 64), len(losses) // 2
    for begin, end in ((0, middle + 1), (middle, len(losses))):
        file.write_start(begin, begin * 2, begin * 128, facts | {"seq_length": 64})
        for iteration in range(begin + 1, end + 1):
            loss = losses[iteration - 1]
            norm = None if loss is None else 1.0
            file.add_step(iteration, 2 * iteration, 2, lm_loss=loss, grad_norm=norm, learning_rate=lr, seconds=0.1)
            spent = {"steps": 10.0 * iteration, "start-up": 1.0, "saves": 2.0}
            timers = {"batch-generator": 5.0, "forward-backward": 60.0, "grads-reduce": 20.0, "grad-norm": 3.0, "optimizer": 7.0}
            log = {"tokens_per_s": 1500.0, "goodput": 0.9, "elapsed_ms": 100.0, "memory_bytes": 2e9, "tflops_per_device": 0.25}
            file.write_line("log", iteration, 2 * iteration, {**log, "spent": spent, "timers_ms": timers})
    file.write_line("evaluation", middle, 2 * middle, {"validation_loss": 3.25})
    file.write_line("event", middle, 2 * middle, {"event": "spike", "words": HOSTILE})
    file.write_line("event", len(losses), 2 * len(losses), {"event": "end", "words": "done"})
    file.close()
    (folder / "iter_0000004").mkdir()
    (folder / "iter_0000004" / "weights").write_bytes(b"x" * 5000)
    return folder


def text_of(page: str) -> str:
    return re.sub(
        r"\s+", " ", re.sub(r"<[^>]*>", " ", re.sub(r"<script.*?</script>|<style.*?</style>", " ", page, flags=re.DOTALL))
    )


def test_a_run_is_told_in_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It holds what the record has, needs nothing from outside, and its words cannot end a script or an element."""
    run = record(tmp_path / "runs" / "a", [4.0, 3.5, None, 3.0])
    assert report.main([str(run), "--plan"]) == 0
    page = (run / "report.html").read_text()
    said = capsys.readouterr().out
    assert "training loss 4.000 at iteration 1, 3.000 at iteration 4" in said and f"the report is {run}/report.html" in said
    assert not Checked(page).addresses and "<b>bold" not in page
    text = text_of(page)
    for words in ("Run a", "4 of 4", "25.0%", "3.2500", "1 x restart", "1 steps made no update, the last one 3", "1 x spike"):
        assert words in text, words
    for words in ("iter_0000004", "5 kB", "--num-layers 2", "Planned", "parameters", "first rank: 2 GB", "stage 0", "512", "done"):
        assert words in text, words
    curves = [json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    assert [chart["title"] for chart in curves][:2] == ["loss (nats per token)", "learning rate"]
    steps = curves[0]["curves"][0]
    assert steps["y"] == [4.0, 3.5, None, 3.0] and steps["tokens"] == [128, 256, 384, 512]


def test_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        record(tmp_path / name / "checkpoints", losses, lr=lr)
        for name, losses, lr in (("a", [4.0, 3.0], 1e-3), ("b", [4.0, 5.0], 2e-3))
    ]
    output = tmp_path / "out" / "both.html"
    assert report.main([*map(str, runs), "--output", str(output), "--expect-lower-loss"]) == 1
    captured = capsys.readouterr()
    assert "b/checkpoints: training loss 4.000 at iteration 1, 5.000" in captured.out and "did not fall" in captured.err
    text = text_of(output.read_text())
    assert "--lr 0.001 0.002" in text and "--num-layers" not in text, "only what differs"
    assert report.main([str(runs[0]), "--expect-lower-loss", "--no-plan"]) == 0
    assert "Planned" not in (runs[0] / "report.html").read_text()
    assert report.main([str(tmp_path)]) == 1 and "there is no history file" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        report.main([*map(str, runs), "--plan"])
    assert "--plan shows the plan of a single run" in capsys.readouterr().err


def test_the_end_of_a_run_loads_no_torch(tmp_path: Path) -> None:
    """The report and the picture, as the processes at the end of a run write them. With torch and its compiler it takes seconds."""
    run = record(tmp_path / "a", [4.0, 3.0])
    code = (
        "import sys\n"
        "from megatron_lab.commands import plot_loss, report\n"
        f"assert report.main([{str(run)!r}]) == plot_loss.main([{str(run)!r}]) == 0\n"
        "assert not {'torch', 'sympy', 'scipy', 'pandas'} & set(sys.modules), 'slow imports'\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=build_module_command("x")[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--plan also shows the planned memory" in text_of((run / "report.html").read_text()) and (run / "loss.png").exists()


def test_shares_add_up_as_they_are_printed(tmp_path: Path) -> None:
    for parts in ([1.0, 1.0, 1.0], [2.0, 1.0, 1e-9], [0.335, 0.335, 0.33], [1 / 7] * 7):
        told = format_shares(dict(zip("abcdefg", parts, strict=False)))
        assert math.isclose(math.fsum(float(share.split()[0]) for share in told.values()), 100.0, abs_tol=1e-9), told
    assert format_shares({"a": 0.0}) == {"a": "-"}
    history = read_history(record(tmp_path / "a", [4.0, 3.0]))
    assert compute_step_times(history) == {
        "data": 5.0,
        "forward and backward": 40.0,
        "reducing gradients": 20.0,
        "gradient norm": 3.0,
        "optimizer": 7.0,
        "other": 25.0,
    }
    for line in history.logs:
        line["elapsed_ms"] = 60.0  # the slowest rank of each part is another one
    assert math.isclose(math.fsum(compute_step_times(history).values()), 60.0)


def test_only_what_was_changed_is_told(tmp_path: Path) -> None:
    start = read_history(record(tmp_path / "a", [4.0, 3.0], adam_beta2=0.95)).starts[-1]
    found = {flag: (value, default) for flag, value, default in list_changed_settings(start["config"])}
    assert found["--adam-beta2"] == ("0.95", "0.999") and "--adam-beta1" not in found and "--lora-targets" not in found


def test_a_long_curve_is_thinned() -> None:
    n = 3 * MAX_POINTS
    figure = build_chart("x", [Curve("y", "#000", range(n), range(n), [1.0, 2.0, 3.0] * MAX_POINTS)])
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', figure)
    (curve,) = json.loads(data)["curves"]
    assert (
        curve["y"] == [2.0] * MAX_POINTS
        and curve["iteration"][:2] == [2, 5]
        and build_chart("x", [Curve("y", "#000", [], [], [])]) == ""
    )
