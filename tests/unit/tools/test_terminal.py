"""Texts, commands, tables and the help of all tools on a terminal of 80 columns."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterator

import pytest

from megatron_lab.__main__ import list_programs
from megatron_lab.__main__ import main as run_by_name
from megatron_lab.commands import checkpoint, plan, plot_schedule, simulate_failures
from megatron_lab.commands.parser import ToolParser
from megatron_lab.resilience.command import parse_command_line
from megatron_lab.resilience.supervisor import log
from megatron_lab.terminal import (
    TerminalStream,
    fill_help,
    fit_output_to_terminal,
    format_table,
    get_terminal_width,
    wrap_command,
    wrap_line,
    wrap_text,
)

COMMAND = (
    "env OMP_NUM_THREADS=1 .venv/bin/python -m torch.distributed.run pretrain_gpt.py --config 'my run/settings.yaml' "
    "--prompt 'a  b, c' --imports one two three --min-lr -1e-3 --no-report"
)


class FakeTerminal(io.StringIO):
    """A terminal that does not know its size, as over a serial line: COLUMNS says it."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def fake_terminal() -> Iterator[FakeTerminal]:
    """What this process prints goes to a terminal of 80 columns."""
    stream = FakeTerminal()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        patch.setenv("COLUMNS", "80")
        yield stream
        sys.stdout.flush()


def assert_fits(text: str, *, width: int = 79) -> None:
    """No line is too long, except a single long word such as a path."""
    for line in text.splitlines():
        plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line)
        assert len(plain) <= width or " " not in plain.strip(), line


def test_a_sentence_breaks_between_words() -> None:
    assert wrap_line("short", 5) == ["short"]
    assert wrap_line("  one two three --a-flag-of-two", 13) == ["  one two", "    three", "    --a-flag-of-two"]
    path = "/a/path/that/is/longer/than/the/line"
    assert wrap_line(f"see {path} there", 20) == ["see", f"  {path}", "  there"]
    assert wrap_line("any" * 30, None) == ["any" * 30]
    assert wrap_text("one two\nthree four", 7) == "one two\nthree\n  four"
    assert wrap_text("a line with\r a bar", 5) == "a line with\r a bar"


def test_a_log_line_breaks_between_its_fields() -> None:
    line = "it 1/150 | loss 8.551 | norm 4.27 | 614 tok/s | < 8 min left"
    assert wrap_line(line, 55) == ["it 1/150 | loss 8.551 | norm 4.27 | 614 tok/s", "  | < 8 min left"]
    for count in ("     1", "   100", "100000"):
        lines = wrap_line(f"it {count}/100000 | loss 8.551 | norm 4.27 | 614 tok/s | < 8 min left", 55)
        assert lines[1:] == ["  | < 8 min left"], "the indent does not depend on the padding of the number"


def test_text_after_a_label_hangs_below_it() -> None:
    assert wrap_line("model   layers 4, width 8", 17) == ["model   layers 4,", "        width 8"]
    assert wrap_line("a label that is long   words behind", 20) == ["a label that is long", "  words behind"]
    digest = "0123456789" * 3
    assert wrap_line(f"digest    {digest}, and more", 32) == ["digest", f"  {digest},", "  and more"]


def test_a_command_can_be_pasted() -> None:
    """The shell reads the same words; a flag stays with its values."""
    lines = wrap_command(COMMAND, 79)
    assert len(lines) > 2 and all(line.endswith(" \\") for line in lines[:-1]) and max(map(len, lines)) < 80
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(COMMAND)
    assert wrap_line(COMMAND, 79) == lines and wrap_command(COMMAND, None) == [COMMAND]
    for words in ("--prompt 'a  b, c'", "--imports one two three", "--min-lr -1e-3", "--config 'my run/settings.yaml'"):
        assert any(words in line for line in wrap_command(COMMAND, 40)), words
    assert wrap_command("    python tools/x.py a     what it does and why", 30) == [
        "    python tools/x.py a",
        "        what it does and why",
    ]
    quoted = "python -c 'print(\"a long text\")'"
    assert wrap_line(f"  transformers:  {quoted}", 36) == ["  transformers:", f"    {quoted}"]
    sentence = "python -m megatron_lab: there is no program plam, and these are the programs"
    assert wrap_line(sentence, 60)[0].endswith("and these") and "it's" in wrap_line(f"python it's {'x ' * 40}", 40)[0]


def test_a_table_wraps_long_cells_and_splits() -> None:
    rows = [("name", "value", "what it is"), ("one", "1.5 MB", "a long text that says much"), ("two", "12 MB", "")]
    assert format_table(rows, (1,)) == [
        "name   value  what it is",
        "one   1.5 MB  a long text that says much",
        "two    12 MB",
    ]
    assert format_table(rows, (1,), width=30) == [
        "name   value  what it is",
        "one   1.5 MB  a long text that",
        "              says much",
        "two    12 MB",
    ]
    wide = [["stage", *(f"column {i}" for i in range(8))], ["0", *(f"{i}.25 MB" for i in range(8))]]
    lines = format_table(wide, width=40)
    assert [line.split()[0] for line in lines] == ["stage", "0"] * 3 and max(map(len, lines)) <= 40
    assert [cell for line in lines for cell in re.findall(r"column \d", line)] == wide[0][1:], "no column is dropped"
    assert format_table([]) == []


def test_help_is_filled_again() -> None:
    text = "usage: x A\n\nOne\ntwo three.\n\n    python x.py A    first\n"
    text += "  --flag N        a description\n                  of two lines\n"
    assert fill_help(text, 40) == (
        "usage: x A\n\nOne two three.\n\n    python x.py A    first\n"
        "  --flag N        a description of two\n                  lines\n"
    )


def test_only_a_terminal_is_fitted() -> None:
    """A file gets complete lines. A terminal gets a text when its line is complete, or when the writer wants it at once."""
    with fake_terminal() as terminal:
        assert get_terminal_width() == 79 and get_terminal_width(io.StringIO()) is None
        fit_output_to_terminal()
        fit_output_to_terminal()
        assert isinstance(sys.stdout, TerminalStream) and sys.stdout.isatty()
        print("word " * 20)
        assert_fits(terminal.getvalue())
        assert terminal.getvalue().split() == ["word"] * 20
        print("incomplete", end="")
        assert "incomplete" not in terminal.getvalue()
        sys.stdout.flush()
        assert terminal.getvalue().endswith("incomplete")
        print("\r\x1b[K", end="")
        assert terminal.getvalue().endswith("\r\x1b[K")
    with contextlib.redirect_stdout(io.StringIO()) as file:
        fit_output_to_terminal()
        assert sys.stdout is file
    with contextlib.redirect_stdout(None):
        assert get_terminal_width() is None


@pytest.mark.parametrize("name", list_programs())
def test_the_help_of_every_tool(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    main = importlib.import_module(f"megatron_lab.commands.{name}").main
    with fake_terminal() as terminal:
        try:
            main(*[["--help"]] * len(inspect.signature(main).parameters))
        except SystemExit as ended:
            assert not ended.code
    assert "usage:" in terminal.getvalue()
    assert_fits(terminal.getvalue())


@pytest.mark.parametrize("name", ["checkpoint", "inspect_data", "preprocess_data"])
def test_an_error_has_no_usage(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--no-such-flag"])
    main = importlib.import_module(f"megatron_lab.commands.{name}").main
    with fake_terminal() as terminal, pytest.raises(SystemExit, match="2"):
        main(*[["--no-such-flag"]] * len(inspect.signature(main).parameters))
    assert "error: " in terminal.getvalue() and terminal.getvalue().endswith(".py --help lists the flags.\n")
    assert "usage:" not in terminal.getvalue() and len(terminal.getvalue().splitlines()) < 4, terminal.getvalue()


def test_without_a_command_the_commands_are_listed() -> None:
    with fake_terminal() as terminal, pytest.raises(SystemExit, match="2"):
        checkpoint.main([])
    assert all(f"\n  {name} " in terminal.getvalue() for name in checkpoint.SUBCOMMANDS)
    assert_fits(terminal.getvalue())


def test_messages_of_the_supervisor_fit_the_terminal() -> None:
    with fake_terminal() as terminal:
        log("SIGTERM: the ranks of all nodes save a checkpoint and end; a second signal ends the job at once, without a checkpoint")
    with fake_terminal() as errors, pytest.raises(SystemExit, match="2"):
        parse_command_line(["--nnodes", "x"])
    assert "usage:" not in errors.getvalue() and errors.getvalue().endswith(" --help lists the flags.\n")
    assert_fits(errors.getvalue())
    lines = terminal.getvalue().splitlines()
    assert len(lines) == 2 and lines[0].startswith("supervisor: SIGTERM: ") and max(map(len, lines)) < 80


def test_long_choices_are_in_the_description() -> None:
    parser = ToolParser("tool")
    choices = [f"choice-{i}" for i in range(12)]
    parser.add_argument("--format", choices=choices)
    parser.add_argument("--short", choices=("a", "b"))
    with fake_terminal() as terminal:
        parser.print_help()
    assert f"--format FORMAT One of: {', '.join(choices)}." in " ".join(terminal.getvalue().split())
    assert "[--short {a,b}]" in terminal.getvalue()


def test_the_list_of_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron_lab"])
    with fake_terminal() as terminal:
        run_by_name()
    assert_fits(terminal.getvalue())


JOB = "--gpus 64 --model llama3-8b --global-batch-size 64 --tokens 1e12 --price 2 --rows 2".split()


@pytest.mark.parametrize(
    ("main", "argv"),
    [
        (plan.main, [*JOB, "--fix", "tensor=4", "--fix", "micro=1", "--why", "--pipeline-model-parallel-size 2"]),
        (plot_schedule.main, ["--compare", "--stages", "4", "--microbatches", "8"]),
        (simulate_failures.main, ["--gpus", "4096", "--draws", "2"]),
    ],
)
def test_what_tools_print(main: Callable[[list[str]], int], argv: list[str]) -> None:
    with fake_terminal() as terminal:
        assert main(argv) == 0
    assert len(terminal.getvalue().splitlines()) > 5
    assert_fits(terminal.getvalue())
