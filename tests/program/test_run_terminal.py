"""What a person sees of a run on a terminal, and what a program reads of it anywhere else."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import sys
import termios
import threading
from pathlib import Path
from typing import Any

import pytest

from megatron.metrics.history import read_history
from megatron.training import loop, reporter
from megatron_lab.monitoring import live_lines
from tests.support.runs import arguments, launch, on_rank, report, run, spoil

LINE = re.compile(
    r"it +\d+/6 \| loss \d\.\d{3} \| norm \d\S* \| lr 1\.00e-2 \| \d\S* tok/s \| \d\S* [kMG]FLOP/s(?: \| (?:< )?\d+ s left)?"
)


class Terminal:
    """A pseudo-terminal, whose output is read all the time, as a person's terminal does."""

    def __init__(self, columns: int = 100) -> None:
        self._master, self.slave = os.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self._found = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def take_stdout(self) -> None:
        """In a process that was forked: print to it from now on."""
        self._before = sys.stdout  # which would close the descriptor when it is dropped
        os.dup2(self.slave, 1)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8")
        os.environ["TERM"] = "xterm"

    def text(self) -> str:
        """All that was written to it, once the writers have ended."""
        os.close(self.slave)
        self._reader.join(10)
        return self._found.decode()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # nobody has it open any more
                return
            self._found += data


def seen(text: str) -> list[str]:
    """The lines that a terminal shows of a text, with the movements of the cursor that the log makes.

    Raises:
        AssertionError: there is another escape sequence.
    """
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\d*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[J":
            lines[row:] = [lines[row][:column]]
        elif up := re.fullmatch(r"\x1b\[(\d+)A", part):
            row -= int(up[1])
        else:
            assert part[0] != "\x1b", repr(part)
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return lines


def on_terminal(
    argv: list[str],
    world_size: int = 1,
    code: int = 0,
    before: Any = None,
    *,
    columns: int = 100,
    takes_stderr: bool = False,
) -> tuple[str, str]:
    """Run with rank 0 on a terminal. Returns all that was written there, and what is on stderr."""
    terminal = Terminal(columns)

    def start(rank: int) -> None:
        live_lines._MIN_INTERVAL_S = 0.0
        if before is not None:
            before(rank)
        if rank == 0:
            terminal.take_stdout()
            if takes_stderr:
                sys.stderr = sys.stdout

    ended = launch(argv, world_size, before=start)
    text = terminal.text()
    assert all(end.code == code for end in ended), text + report(ended)
    return text, ended[0].stderr


def test_a_terminal_has_short_lines_under_a_bar(tmp_path: Path) -> None:
    """The last lines stay, nothing of what changed below them does; no line is as long as the terminal is wide."""
    settings = {"train_iters": 6, "log_interval": 2, "lr_decay_style": "constant", "eval_iters": 1, "eval_interval": 3}
    text, _ = on_terminal(arguments(**settings, log_throughput=True, save=tmp_path, num_workers=2), 2)
    lines = [line for line in seen(text) if line.strip()]
    logged = [line for line in lines if line.startswith("it ")]
    assert [int(line[3:].partition("/")[0]) for line in logged] == [1, 2, 4, 6], lines
    assert all(LINE.fullmatch(line) for line in logged), logged
    assert [line for line in lines if line.startswith("validation at")] and "iteration        1/" not in text
    assert lines[-1].startswith("done after 6 iterations") and not any("━" in line for line in lines)
    shown = text.replace("\x1b", "").splitlines()
    for what in ("━", "100 %", "it 6/6 | evaluating ...", "it 6/6 | saving ...", "it 4/6 | loss", " left"):
        assert any(what in line for line in shown), what
    assert max(len(line) for line in re.sub(r"\x1b\[\d*[A-Z]|\r", "\n", text).splitlines() if "━" in line) < 100


def test_the_start_of_a_run_fits_the_terminal(tmp_path: Path) -> None:
    """Model, layout and data first; the details are in start.log, and on the terminal with --verbose. No word is cut."""
    settings = {"train_iters": 2, "lr": 1.0, "lr_decay_style": "constant", "save": tmp_path, "num_workers": 2}
    short = seen(on_terminal(arguments(**settings), 2, columns=80)[0])
    started, first, *details = (tmp_path / "start.log").read_text().splitlines()
    assert re.fullmatch(r"started on \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC([+-]\d\d:\d\d)?", started)
    assert first.startswith("  model of ")
    assert [line.split()[0] for line in short[:3]] == ["model", "2", "made-up"], short
    text = " ".join(" ".join(short).split())
    assert "parameter groups" not in text and f"more lines: {tmp_path}/start.log, or --verbose" in text
    for shown in ("WARNING: --lr 1 is", "checkpoints: every 30 minutes", "the record of the run is"):
        assert shown in text, "warnings and outputs are always shown"
    resumed = on_terminal(arguments(**{**settings, "train_iters": 4}, load=tmp_path, verbose=True), 2, columns=80)[0]
    told = " ".join(resumed.split())
    assert (tmp_path / "start.log").read_text().count("started on ") == 1
    for line in details:
        unchanged = "WARNING" not in line and not line.strip().startswith(("made-up", "the run takes", "state of"))
        assert not unchanged or " ".join(line.split()) in told, line
    for line in (*short, *seen(resumed)):
        assert len(line) < 80 or " " not in line.strip(), line
    said = run(arguments(**settings), 2)
    assert "parameter groups:" in said and all(line in said for line in details[:3]), "a file gets all lines, complete"


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"num_layers": 7, "pipeline_model_parallel_size": 3, "tensor_model_parallel_size": 5}, 2, "is not divisible by"),
        ({"dry_run": True, "world_size": 8, "tensor_model_parallel_size": 2}, 0, "memory of a rank"),
    ],
)
def test_refusals_and_plans_fit_the_terminal(settings: dict[str, Any], code: int, words: str) -> None:
    text, said = on_terminal(arguments(**{"train_iters": 2, **settings}), code=code, columns=80, takes_stderr=True)
    assert words in text and not said
    assert all(len(line) < 80 or " " not in line.strip() for line in seen(text)), text


def test_a_failure_leaves_the_terminal_clean() -> None:
    """The bar is gone when the message comes."""
    settings = arguments(train_iters=6, lr_decay_style="constant")
    text, said = on_terminal(settings, code=1, before=on_rank(0, 4, spoil(float("nan"))))
    lines = [line for line in seen(text) if line.strip()]
    assert lines[-1].startswith("it 3/6 | loss") and "iteration 4" in said


def test_the_format_can_be_chosen(tmp_path: Path) -> None:
    """Megatron's line on a terminal, without a bar; the short one in a file, where it is not the default."""
    text, _ = on_terminal(arguments(train_iters=2, log_format="megatron"))
    assert "iteration        1/       2 |" in text and "\x1b" not in text and "━" not in text
    said = run(arguments(train_iters=2, log_format="short"))
    assert "it 1/2 | loss" in said and "\x1b" not in said and "━" not in said
    assert "iteration        1/       2 |" in run(arguments(train_iters=2))


def test_the_lines_of_megatron_are_followed_by_one_estimate() -> None:
    """Its own line has no room for it. A short run says nothing."""

    def soon(_: int) -> None:
        reporter._MIN_MEASURED_S, reporter._MIN_REMAINING_S = 1e-9, 0.0

    said = run(arguments(train_iters=6), before=soon).splitlines()
    (at,) = [
        i
        for i, line in enumerate(said)
        if re.fullmatch(r"  about \d+ s left, until \d{4}-\d\d-\d\d \d\d:\d\d UTC([+-]\d\d:\d\d)?", line)
    ]
    assert "iteration        1/" in said[at - 1] and "iteration        2/" in said[at + 1]
    assert " left" not in run(arguments(train_iters=6))


def test_warnings_are_told_once_and_kept(tmp_path: Path) -> None:
    """In the log and in the record of the run: of a rate at the start, of a loss that rises, of a validation loss far above; none
    of a run with which nothing is wrong."""
    original = loop.evaluate

    def far_above(rank: int) -> None:
        def changed(*arguments: Any, **named: Any) -> Any:
            original(*arguments, **named)
            return 1e6, None

        loop.evaluate = changed  # type: ignore[assignment]

    def warnings(before: Any = None, **settings: Any) -> list[str]:
        said = run(arguments(**settings, log_interval=100, eval_iters=1, global_batch_size=2), before=before)
        return [line.strip().removeprefix("WARNING: ") for line in said.splitlines() if "WARNING" in line]

    rate, rises = warnings(train_iters=62, lr=1.0, lr_decay_style="constant", clip_grad=100.0, save=tmp_path)
    assert "--lr 1 is" in rate and "the usual rate of AdamW" in rate
    assert "above its initial value for 50 iterations" in rises
    (above,) = warnings(far_above, train_iters=12, eval_interval=4, save=tmp_path / "other")
    assert "the validation loss, 1000000.00, is far above that of training" in above
    for folder, words in ((tmp_path, rises), (tmp_path / "other", above)):
        assert [event["words"] for event in read_history(folder).events if event["event"] == "warning"] == [words]
    assert not warnings(train_iters=12, eval_interval=4)
