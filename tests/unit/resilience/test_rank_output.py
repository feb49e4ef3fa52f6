"""The output of ranks: all of it in their log files, and each line once on the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lab.resilience import rank_output
from megatron_lab.resilience.rank_output import LogFileInUseError, RankOutput, _Screen


@pytest.fixture
def output(tmp_path: Path) -> Iterator[RankOutput]:
    """That of two ranks, which has no terminal."""
    made = RankOutput(tmp_path, 2)
    yield made
    for fds in (*made.rank_streams, made.own_fds):
        for fd in fds:
            os.close(fd)


def write(output: RankOutput, rank: int, text: str, stream: int = 2) -> None:
    os.write(output.rank_streams[rank][stream - 1], text.encode())
    for fd in output.read_fds:
        output.read(fd)


def test_the_log_files_are_complete(tmp_path: Path, output: RankOutput, capfd: pytest.CaptureFixture[str]) -> None:
    """Of stdout, the terminal shows that of the first rank."""
    for rank in range(2):
        write(output, rank, f"step {rank}\n", stream=1)
        write(output, rank, f"note {rank}\n")
    output.is_muted = True
    write(output, 1, "an end without a line break")
    output.read_all()
    assert (tmp_path / "rank_0.log").read_text() == "step 0\nnote 0\n"
    assert (tmp_path / "rank_1.log").read_text() == "step 1\nnote 1\nan end without a line break"
    assert capfd.readouterr() == ("step 0\n", "")
    assert output.take_last_lines(1, 5) == ["note 1", "an end without a line break"]


def test_a_line_of_several_ranks_is_shown_once(output: RankOutput, capfd: pytest.CaptureFixture[str]) -> None:
    """Also if torch puts the rank and the time before it. A rank may repeat its own lines."""
    write(output, 1, "W0101 10:00:00.000000 7 torch/a.py:1] slow\nonly mine\nrank 1: named\n\n")
    write(output, 0, "[rank0]:W0101 10:00:00.000002 8 torch/a.py:1] slow\nagain\nagain\n")
    output.show_all_lines()
    assert capfd.readouterr().err.splitlines() == [
        "[rank0]:W0101 10:00:00.000002 8 torch/a.py:1] slow",
        "again",
        "again",
        "[rank 1] only mine",
        "rank 1: named",
    ]


def test_lines_wait_for_a_failure(output: RankOutput, capfd: pytest.CaptureFixture[str]) -> None:
    """Until their time has come, they can still be left out."""
    assert output.get_wait_s() is None
    write(output, 0, "a line\n")
    wait_s = output.get_wait_s()
    assert wait_s is not None and 0 < wait_s <= output.delay_s
    output.show_due_lines()
    assert not capfd.readouterr().err
    output.delay_s = 0.0
    output.show_due_lines()
    assert capfd.readouterr().err == "a line\n"


def test_output_without_line_ends_is_shown(
    output: RankOutput, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question at once; of a line that is overwritten, the last state from time to time. The rest of a line is a line too."""
    monkeypatch.setattr(rank_output, "_DELAY_S", 0.0)
    output.delay_s = 0.0
    write(output, 0, "Password: ")
    assert output.get_wait_s() == 0.0
    output.show_due_lines()
    assert capfd.readouterr().err == "Password: \n"
    write(output, 0, "\n")
    for percent in range(90):
        write(output, 1, f"\r{percent} %")
    output.show_due_lines()
    assert not capfd.readouterr().err
    monkeypatch.setattr(rank_output, "_PROGRESS_DELAY_S", 0.0)
    output.show_due_lines()
    assert capfd.readouterr().err == "[rank 1] 89 %\n"
    write(output, 1, "\r99 %\r")
    write(output, 1, "100 %\r")
    write(output, 1, "\nnext\r\n")
    output.show_due_lines()
    assert capfd.readouterr().err.splitlines() == ["[rank 1] 100 %", "[rank 1] next"]


def test_a_line_without_an_end_takes_little_memory(tmp_path: Path, output: RankOutput, capfd: pytest.CaptureFixture[str]) -> None:
    """Whether it is muted or not. The log file has all of it."""
    block = "x" * 30_000
    for _ in range(100):
        write(output, 0, block)
        assert output._num_pending_bytes + output._sources[output.read_fds[1]].last_line._num_bytes < 2 << 20
    shown = len(capfd.readouterr().err)
    assert 1 << 20 < shown < 3_000_000 + 100
    output.is_muted = True
    for _ in range(100):
        write(output, 0, f"{block}\n")
        assert output._num_pending_bytes < 2 << 20
    write(output, 0, "the end\n")
    assert not capfd.readouterr().err
    assert output.take_last_lines(0, 1) == ["the end"] and not output._num_pending_bytes
    assert (tmp_path / "rank_0.log").stat().st_size == 100 * 30_000 + 100 * 30_001 + len("the end\n")


def test_a_log_file_has_one_writer(tmp_path: Path, output: RankOutput) -> None:
    with pytest.raises(LogFileInUseError, match="rank_0.log"):
        RankOutput(tmp_path, 1)


def test_a_message_is_repeated_if_it_has_left_the_terminal(output: RankOutput) -> None:
    message = "a message of\n  several lines that a narrow terminal breaks elsewhere, so that its words are compared"
    output.print_message(message.replace("\n  ", " "))
    write(output, 0, "x" * 80 * 10 + "\n", stream=1)
    assert output.has_shown(message)
    write(output, 0, "x\n" * 10, stream=1)
    assert not output.has_shown(message)


def test_a_long_line_of_a_terminal_is_cut() -> None:
    """Its parts are in the log at once."""
    screen = _Screen()
    kept = b"".join(screen.keep_lines(b"x" * 50_000) for _ in range(5))
    assert len(kept) == 200_000 and screen.take_last_line() == b"x" * 50_000


def test_the_log_of_a_terminal_has_the_lines_that_stay() -> None:
    """Whatever the reads cut the output into."""
    status = b"---- 50 %\nit 1 | training"
    screen = _Screen()
    kept = [screen.keep_lines(b"first\r\n" + status), screen.keep_lines(b"\x1b[1A\r\x1b")]
    kept.append(screen.keep_lines(b"[Jit 1 | loss 2\n" + status))
    kept.append(screen.keep_lines(b"\x1b[1A\r\x1b[Jlast"))
    assert b"".join(kept).replace(b"---- 50 %\n", b"") == b"first\nit 1 | loss 2\n" and screen.take_last_line() == b"last"
