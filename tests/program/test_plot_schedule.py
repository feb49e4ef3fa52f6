"""tools/plot_schedule.py as a user runs it, and docs/pipeline.md, whose pictures and numbers it makes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron.spec.schedules import SCHEDULES
from megatron_lab.commands.plot_schedule import main
from tests.support.cli import ROOT

SIZE = ["--stages", "4", "--microbatches", "8"]
DOCUMENT = (ROOT / "docs/pipeline.md").read_text()


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the tool prints."""
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the tool says when it does not begin."""
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err.split("error: ", 1)[1]


def line(text: str, title: str) -> list[str]:
    """Cells of a row of the table."""
    return next(re.split("  +", row) for row in text.splitlines() if re.match(rf"{re.escape(title)}  +\d", row))


# ---- what it shows


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_timeline_and_a_table_in_the_terminal(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--schedule", name, *SIZE)
    assert [len(re.findall(rf"^stage {stage}  ", text, re.MULTILINE)) >= 1 for stage in range(5)] == [True] * 4 + [False]
    title = f"{name} (v = 2)" if name in ("interleaved", "zb-v") else name
    step = {"gpipe": "330", "1f1b": "330", "interleaved": "285", "zb-h1": "270", "zb-v": "255"}[name]
    assert line(text, title)[1:3] == [step, step]
    assert f"{title}: step {step} ms" in text
    assert "p = 4 stages, m = 8 microbatches" in text


def test_compare_puts_all_schedules_in_one_table_and_one_figure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "all.svg"
    text = shown(capsys, "--compare", *SIZE, "--virtual-stages", "3", "--output", str(picture))
    for title in ("gpipe", "1f1b", "interleaved (v = 3)", "zb-h1", "zb-v (v = 2)"):
        assert len(line(text, title)) == 9
        assert f"{title}: step" in picture.read_text()


def test_costs_are_those_of_a_whole_stage(capsys: pytest.CaptureFixture[str]) -> None:
    costs = ["--forward-ms", "8", "--input-grad-ms", "12", "--weight-grad-ms", "4"]
    text = shown(capsys, "--schedule", "interleaved", "--virtual-stages", "4", *SIZE, *costs)
    assert line(text, "interleaved (v = 4)")[1:5] == ["210", "210", "8.6%", "8.6%"], "8 x 24 + 3 x 24 / 4"
    text = shown(capsys, "--schedule", "1f1b", "--stages", "2", "--microbatches", "1", *costs, "--p2p-ms", "0.5")
    assert line(text, "1f1b")[1:3] == ["49", "-"], "there and back through both stages, and two messages"
    assert "F = 8 ms" in text and "I = 12 ms" in text and "W = 4 ms" in text and "A message takes 0.5 ms" in text


def test_recompute_is_drawn_and_priced(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--schedule", "1f1b", *SIZE, "--recompute-ms", "5")
    assert line(text, "1f1b")[1:3] == ["370", "370"], "8 x (10 + 5 + 20) and the bubble of 3 x 30, in which the rest hides"
    assert "R recompute" in text and "R = 5 ms to recompute layers" in text
    assert "recompute" not in shown(capsys, "--schedule", "1f1b", *SIZE)


def test_several_outputs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paths = [tmp_path / f"picture{suffix}" for suffix in (".svg", ".png", ".json", ".txt")]
    main(["--schedule", "zb-v", *SIZE, *(word for path in paths for word in ("--output", str(path)))])
    captured = capsys.readouterr()
    assert captured.err.split() == [word for path in paths for word in ("wrote", str(path))]
    ElementTree.parse(paths[0])
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    events = json.loads(paths[2].read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 4 * 8 * 6
    assert "F0" in paths[3].read_text()


def test_the_width_is_the_terminals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (60, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = shown(capsys, "--schedule", "1f1b", *SIZE)
        longest = max(len(row) for row in text.splitlines() if row.startswith("stage"))
        assert columns / 2 < longest <= columns


# ---- what it refuses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "zbv", *SIZE], "invalid choice: 'zbv' (choose from"),
        (
            ["--schedule", "1f1b", *SIZE, "--virtual-stages", "2"],
            "--virtual-stages 2: the pipeline schedule 1f1b requires 1 chunk per stage, not 2",
        ),
        (
            ["--schedule", "zb-v", *SIZE, "--virtual-stages", "3"],
            "--virtual-stages 3: the pipeline schedule zb-v requires 2 chunks per stage, not 3",
        ),
        (["--schedule", "1f1b", "--stages", "0", "--microbatches", "8"], "--stages: must be a whole number, 1 or more, not 0"),
        (["--schedule", "1f1b", "--stages", "4", "--microbatches", "2.5"], "--microbatches: must be a whole number"),
        (["--schedule", "1f1b", *SIZE, "--p2p-ms", "-1"], "--p2p-ms: must be a time in milliseconds, 0 or more, not -1"),
        (["--schedule", "1f1b", *SIZE, "--recompute-ms", "-1"], "--recompute-ms: must be a time in milliseconds"),
        (["--schedule", "1f1b", *SIZE, "--forward-ms", "nan"], "--forward-ms: must be a time"),
        (["--schedule", "1f1b", *SIZE, "--forward-ms", "ten"], "--forward-ms: must be a time"),
        (
            ["--schedule", "1f1b", *SIZE, "--forward-ms", "0", "--input-grad-ms", "0", "--weight-grad-ms", "0"],
            "at least one must take time",
        ),
        (
            ["--schedule", "1f1b", *SIZE, "--output", "a.pdf"],
            "--output a.pdf: a picture is a .svg, .png, .json, .txt file, not .pdf",
        ),
        (["--schedule", "1f1b", *SIZE, "--output", "nowhere/a.svg"], "there is no folder nowhere"),
        (["--schedule", "1f1b", "--compare", *SIZE], "not allowed with"),
        (SIZE, "one of the arguments --schedule --compare is required"),
        (["--compare", "--stages", "4"], "--microbatches"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, *arguments)


def test_a_bad_output_stops_the_good_one_before_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    outputs = ["--output", str(tmp_path / "a.json"), "--output", str(tmp_path / "b.gif")]
    refused(capsys, "--schedule", "1f1b", *SIZE, *outputs)
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["--schedule", "1f1b", *SIZE, "--output", str(tmp_path / "a.json")]) == 1
    assert "a.json cannot be written (No space left on device)" in capsys.readouterr().err


def test_it_needs_neither_torch_nor_matplotlib_without_a_figure(tmp_path: Path) -> None:
    code = (
        "import sys; from megatron_lab.commands.plot_schedule import main\n"
        f"assert main(['--compare', '--stages', '2', '--microbatches', '2', '--output', {str(tmp_path / 'a.json')!r}]) == 0\n"
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    told = capsys.readouterr().out
    times = "forward-ms recompute-ms input-grad-ms weight-grad-ms p2p-ms"
    for flag in f"schedule compare stages microbatches virtual-stages {times} output".split():
        assert f"--{flag}" in told


# ---- the document

COMMANDS = [
    command
    for block in re.findall(r"```bash\n(.*?)```", DOCUMENT, re.DOTALL)
    for command in block.replace("\\\n", " ").splitlines()
    if command.startswith("python tools/plot_schedule.py ")
]


def words_of(svg: Path) -> list[str]:
    """All text of a figure, whatever version of matplotlib drew it."""
    found = ElementTree.parse(svg).getroot().iter("{http://www.w3.org/2000/svg}text")
    return ["".join(element.itertext()) for element in found]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_document(command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It runs, and gives the picture and the numbers that stand there."""
    words = shlex.split(command)[2:]
    outputs = [i + 1 for i, word in enumerate(words) if word == "--output"]
    kept = [ROOT / words[i] for i in outputs]
    for i in outputs:
        words[i] = str(tmp_path / Path(words[i]).name)
    text = shown(capsys, *words)
    for path in kept:
        assert words_of(path) == words_of(tmp_path / path.name), f"{path} is old: {command}"
    block = DOCUMENT.split(command)[1].split("```text\n")[1].split("```")[0] if not outputs else ""
    for row in block.splitlines():
        assert row in text.splitlines(), f"{row} is old: {command}"


def test_every_picture_of_the_document_is_made_by_a_command_in_it() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", DOCUMENT)
    assert {f"--output docs/{picture}" for picture in pictures} == {
        f"--output {c.split('--output ')[1]}" for c in COMMANDS if "--output" in c
    }
    assert {Path(picture).stem for picture in pictures} == {*SCHEDULES, "1f1b_recompute"}
    assert sorted(path.name for path in (ROOT / "docs/images/pipeline").iterdir()) == sorted(
        Path(picture).name for picture in pictures
    )


def test_the_bubbles_of_the_document_with_more_microbatches(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--compare", "--stages", "8", "--microbatches", "64")
    sentence = re.search(r"With 64 microbatches instead of 16, the bubbles are\s+(.*?)\.\n", DOCUMENT, re.DOTALL)
    assert sentence is not None
    bubbles = {
        name: share for share, names in re.findall(r"([\d.]+) % \((.*?)\)", sentence[1]) for name in re.findall("`(.*?)`", names)
    }
    titles = {"interleaved": "interleaved (v = 2)", "zb-v": "zb-v (v = 2)"}
    assert set(bubbles) == {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"}
    for name, share in bubbles.items():
        assert line(text, titles.get(name, name))[3] == f"{share}%"
