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
from megatron.metrics.history import History, HistoryFile, StepRecord, read_history
from megatron_lab.commands import plot_loss, report
from megatron_lab.pages.run_facts import Run, compute_median_mfu, compute_median_tokens_per_s, find_last_loss, name_runs, summarize
from megatron_lab.pages.run_marks import list_marks
from megatron_lab.pages.run_page import compute_step_times, format_shares, list_changed_settings
from tests.support.runs import arguments, run
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
    folder = record(tmp_path / "runs" / "a", [4.0, 3.5, None, 3.0])
    assert report.main([str(folder), "--plan"]) == 0
    page = (folder / "report.html").read_text()
    said = capsys.readouterr().out
    assert "training loss 4.000 at iteration 1, 3.000 at iteration 4" in said and f"the report is {folder}/report.html" in said
    assert not Checked(page).addresses and "<b>bold" not in page
    text = text_of(page)
    for words in (
        "Run a",
        "4 of 4",
        "25.0%",
        "3.250 (at iteration 2)",
        "1 x restart",
        "1 steps made no update, the last one 3",
        "1 x spike",
    ):
        assert words in text, words
    for words in ("iter_0000004", "5 kB", "--num-layers 2", "Planned", "parameters", "first rank: 2 GB", "stage 0", "512", "done"):
        assert words in text, words
    curves = [json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    assert [chart["title"] for chart in curves][:2] == ["loss (nats per token)", "learning rate"]
    steps = curves[0]["curves"][0]
    assert steps["y"] == [4.0, 3.5, None, 3.0] and steps["tokens"] == [128, 256, 384, 512]


def test_a_report_shows_what_the_run_used(tmp_path: Path) -> None:
    """The best checkpoint; no --split beside datasets for each split; a learning rate that was high for two steps; all flags."""
    data_flags: dict[str, Any] = {"mock_data": False, "train_data_path": ("data/a",), "valid_data_path": ("data/b",)}
    folder = record(tmp_path / "a", [4.0] * 200, **data_flags)
    file = HistoryFile(folder, 64)
    file.write_start(200, 400, 12800, read_history(folder).starts[-1] | {"command": ["--some-long-flag", "value"] * 20})
    for iteration in range(201, 301):
        lr = 0.5 if iteration < 203 else 1e-3
        file.add_step(iteration, 2 * iteration, 2, lm_loss=4.0, grad_norm=1.0, learning_rate=lr, seconds=0.1)
    file.close()
    (folder / "best_checkpoint.json").write_text('{"iteration": 4}')
    assert report.main([str(folder)]) == 0
    page = (folder / "report.html").read_text()
    text = text_of(page)
    assert "iter_0000004 has the lowest validation loss" in text
    assert "train data path data/ a" in text and "valid data path data/ b" in text and " split 969" not in text
    assert "--train-data-path data/ a not set" in text
    (flags,) = re.findall(r'<pre class="command">(.*?)</pre>', page, re.DOTALL)
    lines = flags.split("\n")
    assert flags.count("--some-long-flag value") == 20 and len(lines) > 1 and all(line.endswith(" \\") for line in lines[:-1])
    charts = [json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    (rates,) = [chart for chart in charts if chart["title"] == "learning rate"]
    assert rates["limits"] == [None, None], "all learning rates are visible"
    assert "each step training (smoothed)" in text, "the pale curve has a legend"


@pytest.mark.parametrize("num_runs", [1, 2])
def test_an_outlier_flattens_no_smoothed_curve(tmp_path: Path, num_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single huge loss and gradient norm: both are outside the visible range, although the smoothed curve spreads them."""
    for name in ("a", "b")[:num_runs]:
        file = HistoryFile(tmp_path / name, 64)
        file.write_start(0, 0, 0, {})
        for iteration in range(1, 241):
            value = 500.0 if iteration == 107 else 3.0 + math.sin(iteration)
            file.add_step(iteration, 2 * iteration, 2, lm_loss=value, grad_norm=value, learning_rate=1e-3, seconds=0.1)
        file.close()
    output = tmp_path / "report.html"
    assert report.main([*(str(tmp_path / name) for name in ("a", "b")[:num_runs]), "--output", str(output)]) == 0
    charts = [json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', output.read_text())]
    for title in ("loss (nats per token)", "gradient norm"):
        (limits,) = [chart["limits"] for chart in charts if chart["title"] == title]
        assert limits[1] is not None and limits[1] < 5, title
    axes, tops = pytest.importorskip("matplotlib.axes").Axes, list[float]()
    set_ylim = axes.set_ylim

    def record_ylim(ax: Any, *limits: Any, **options: Any) -> Any:
        tops.extend(limits[1:2])
        return set_ylim(ax, *limits, **options)

    monkeypatch.setattr(axes, "set_ylim", record_ylim)
    assert plot_loss.main([str(tmp_path / "a"), "--output", str(tmp_path / "loss.svg")]) == 0
    assert 3.5 < max(tops) < 5, "nor in the picture"


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
    folder = record(tmp_path / "a", [4.0, 3.0])
    code = (
        "import sys\n"
        "from megatron_lab.commands import plot_loss, report\n"
        f"assert report.main([{str(folder)!r}]) == plot_loss.main([{str(folder)!r}]) == 0\n"
        "assert not {'torch', 'sympy', 'scipy', 'pandas'} & set(sys.modules), 'slow imports'\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=build_module_command("x")[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (
        "--plan also shows the planned memory" in text_of((folder / "report.html").read_text()) and (folder / "loss.png").exists()
    )


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


def test_a_run_is_named_by_the_folder_that_identifies_it() -> None:
    """A name that many folders have takes the one above it, and two runs of one name are told apart."""
    empty = History()
    for path, name in (
        ("/data/llama-1b/checkpoints", "llama-1b/checkpoints"),
        ("/data/llama-1b/run3/ckpt", "llama-1b/run3/ckpt"),
        ("/data/llama-1b", "llama-1b"),
        ("/checkpoints", "checkpoints"),
        ("/a/run/out/run/out/run/out", "run/out/run/out"),
    ):
        assert [run.name for run in name_runs([Path(path)], [empty])] == [name]
    twice = [Path("/x/a/checkpoints"), Path("/y/a/checkpoints")]
    assert [run.name for run in name_runs(twice, [empty, empty])] == ["x/a/checkpoints", "y/a/checkpoints"]
    assert Run(Path("/x"), "x", History(starts=[{"parameters": 1.24e9, "config": {"model": {"num_layers": 16}}}])).description == (
        "1.24B parameters, 16 layers"
    )


def _log(iteration: int, **values: Any) -> dict[str, Any]:
    return {"iteration": iteration, "tokens": 100 * iteration, "time": 100.0 + iteration, **values}


def test_the_speed_is_a_median_without_the_first_line_of_each_start() -> None:
    speeds = [(1, 1.0), (10, 50.0), (20, 60.0), (21, 2.0), (30, 70.0), (40, 9.0)]
    logs = [_log(iteration, tokens_per_s=speed, tflops_per_device=speed / 10) for iteration, speed in speeds]
    history = History(starts=[{"iteration": 0}, {"iteration": 20, "peak_flops": 1e13}], logs=logs)
    assert compute_median_tokens_per_s(history) == 55.0 and compute_median_mfu(history) == pytest.approx(0.55)
    only = History(starts=[{"iteration": 0}], logs=[_log(1, tokens_per_s=3.0, mfu=0.4)])
    assert compute_median_tokens_per_s(only) == 3.0 and compute_median_mfu(only) == 0.4
    assert compute_median_tokens_per_s(History()) is None and compute_median_mfu(History()) is None


def test_the_last_loss_is_that_of_the_last_log_line() -> None:
    steps = [StepRecord(iteration, 0, 1, float(iteration), 1.0, 1.0, 1.0) for iteration in range(1, 26)]
    history = History(starts=[{"iteration": 0}], steps=steps, logs=[_log(1, lm_loss=1.0), _log(10, lm_loss=5.5), _log(20)])
    last = find_last_loss(history)
    assert last == (5.5, 10, 9) and last is not None and last.definition == "last log line, mean of 9 steps"
    assert summarize(history) == ["training loss 1.000 at iteration 1, 5.500 at iteration 10 (last log line, mean of 9 steps)"]
    history.logs.clear()
    assert find_last_loss(history) == (25.0, 25, 1) and find_last_loss(History()) is None
    history.starts.append({"iteration": 24})
    history.logs.append(_log(25, lm_loss=7.0))
    assert find_last_loss(history) == (7.0, 25, 1), "the first step after a restart has a line of its own"


def test_several_validation_sets_have_a_curve_and_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the report of one run, in its summary, in its picture, and in a comparison with a run that has one set."""
    runs = [record(tmp_path / name, [4.0, 3.0]) for name in ("a", "b")]
    with (runs[0] / "history.jsonl").open("a") as file:
        for iteration, code, web in ((1, 2.0, 4.0), (2, 1.0, 3.0)):
            losses = {"validation_loss/code": code, "validation_loss/web": web, "validation_loss": (code + web) / 2}
            print(json.dumps({"kind": "evaluation", **_log(iteration, **losses)}), file=file)
    assert report.main([str(runs[0])]) == plot_loss.main([str(runs[0]), "--output", str(tmp_path / "loss.svg")]) == 0
    assert "validation loss code: 2.000 at iteration 1, 1.000 at iteration 2" in capsys.readouterr().out
    page = (runs[0] / "report.html").read_text()
    for words in ("validation loss (mean) 2.000 (at iteration 2)", "validation loss code 1.000", "validation loss web 3.000"):
        assert words in text_of(page), words
    loss, *_ = (json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', page))
    curves = {curve["name"]: curve for curve in loss["curves"]}
    assert curves["validation code"]["y"] == [2.0, 1.0] and curves["validation web"]["y"] == [4.0, 3.0]
    looks = {(curve["colour"], curve.get("dash")) for name, curve in curves.items() if name.startswith("validation")}
    assert len(looks) == 3 and "validation (mean)" in curves
    picture = (tmp_path / "loss.svg").read_text()
    assert all(f"<!-- {name} -->" in picture for name in ("validation code", "validation web", "validation (mean)"))
    assert report.main([*map(str, runs), "--output", str(tmp_path / "both.html")]) == 0
    both = (tmp_path / "both.html").read_text()
    titles = [json.loads(found)["title"] for found in re.findall(r'<script type="application/json">(.*?)</script>', both)]
    assert titles[:3] == ["loss (nats per token)", "loss of validation code", "loss of validation web"]
    assert "validation loss web 3.000 (at iteration 2) -" in text_of(both), "the other run has no such set"


def test_lives_of_a_run_are_marked(tmp_path: Path) -> None:
    """Killed, restarted on other ranks, finished, extended, rewound, and ended early by a signal."""
    now = iter(range(1_000_000, 2_000_000, 10))
    file = HistoryFile(tmp_path, 64, clock=lambda: float(next(now)))

    def train(first: int, last: int, **facts: Any) -> None:
        if facts:
            file.write_start(first, first, first * 64, {"device": "cpu", **facts})
        for iteration in range(first + 1, last + 1):
            file.add_step(iteration, iteration, 1, lm_loss=2.0, grad_norm=1.0, learning_rate=1.0, seconds=1.0)
        file.flush()

    train(0, 17, world_size=4)
    train(10, 20, world_size=2)
    file.write_line("event", 20, 20, {"event": "end", "words": "done after 20 iterations", "complete": True})
    file.write_start(20, 20, 1280, {"device": "cpu", "world_size": 8})
    file.write_line("event", 20, 20, {"event": "end", "words": "evaluated after 20 iterations", "complete": None})
    train(20, 28, world_size=2)
    file.write_line("event", 28, 28, {"event": "spike", "words": "loss spike"})
    file.write_line("event", 24, 24, {"event": "rewind", "words": "back from iteration 28 to 24", "left": 28})
    train(24, 30)
    file.write_line("event", 30, 30, {"event": "end", "words": "exiting on SIGTERM", "complete": False})
    file.close()
    marks = list_marks(read_history(tmp_path))
    assert [(mark.type, mark.iteration) for mark in marks] == [
        *(("restart", 10), ("extended", 20), ("rewind", 24), ("loss spike", 28), ("early end", 30))
    ]
    restart, extended, rewind, _, end = (mark.text for mark in marks)
    assert restart.startswith("restart from iteration 10: 2 ranks on cpu, steps 11 to 17 ran again, 19")
    assert "killed?" in restart and "ranks" not in extended
    assert rewind.startswith("back from iteration 28 to 24 (19") and end.startswith("exiting on SIGTERM")
    zone = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC([+-]\d\d:\d\d)?"
    assert all(re.search(zone, mark.text) for mark in marks), "every time has its zone"
    assert report.main([str(tmp_path)]) == 0 and plot_loss.main([str(tmp_path), "--output", str(tmp_path / "loss.svg")]) == 0
    page, picture = (tmp_path / "report.html").read_text(), (tmp_path / "loss.svg").read_text()
    placed = json.loads(re.findall(r'id="marks">(.*?)</script>', page)[0])
    assert [(mark["iteration"], mark["tokens"]) for mark in placed] == [(each, each * 64) for each in (10, 20, 24, 28, 30)]
    for name in ("restart", "extended", "rewind", "loss spike", "early end"):
        assert f'data-mark="{name}"' in page and f"<!-- {name} -->" in picture
    assert len(re.findall(zone, text_of(page))) >= 8, "events, state and creation"
    assert not re.search(r"\d\d:\d\d:\d\d(?! UTC)", text_of(page))


def test_log_report_and_picture_print_one_last_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last log line is older than the last step."""
    said = run(arguments(train_iters=7, log_interval=3, eval_iters=1, log_format="short", save=tmp_path))
    losses = re.findall(r"it \d/7 \| loss (\S+)", said)
    validation = re.findall(r"validation at it 7 \| loss (\S+)", said)
    assert len(losses) == 3 and len(validation) == 1
    assert report.main([str(tmp_path)]) == plot_loss.main([str(tmp_path), "--output", str(tmp_path / "loss.svg")]) == 0
    summary = capsys.readouterr().out
    assert f"{losses[-1]} at iteration 6 (last log line, mean of 3 steps)" in summary
    assert f"training loss {losses[-1]} (last log line, mean of 3 steps)" in text_of((tmp_path / "report.html").read_text())
    assert f"training loss {losses[-1]} (last log line, mean of 3 steps)" in (tmp_path / "loss.svg").read_text()
    assert f"validation loss {validation[0]} (at iteration 7)" in text_of((tmp_path / "report.html").read_text())


def report_page(folder: Path) -> str:
    """The report of one run, without a plan."""
    assert report.main([str(folder), "--no-plan"]) == 0
    return (folder / "report.html").read_text()


def test_the_samples_of_a_prompt_are_newest_first(tmp_path: Path) -> None:
    """What a model has written is text, not markup; a run without samples has no such section."""
    folder = record(tmp_path / "run", [3.0, 2.0])
    assert "Samples" not in text_of(report_page(folder))
    file = HistoryFile(folder, 64)
    for iteration in range(1, 13):
        samples = [{"prompt": "", "text": f"start {iteration}"}, {"prompt": HOSTILE, "text": f"{HOSTILE} {iteration}\x1b"}]
        file.write_line("samples", iteration, 2 * iteration, {"samples": samples})
    file.close()
    page = report_page(folder)
    assert not Checked(page).addresses
    text = text_of(page)
    assert "<b" not in page.partition("<h2>Samples</h2>")[2].partition("<section>")[0] and "\x1b" not in page
    places = [text.index(f"start {iteration} ") for iteration in (12, 11, 3)] + [
        text.index("2 older samples"),
        text.index("start 2 "),
    ]
    assert places == sorted(places)
