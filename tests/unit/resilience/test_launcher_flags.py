"""The flags of the launcher for one node: what is refused, how many ranks they stand for, and where the log files are."""

from __future__ import annotations

from pathlib import Path

import pytest

import pretrain_gpt
from megatron.config.cli import load
from megatron.config.launcher import ErrorReport, ProcessInfo, read_process_info
from megatron_lab.cluster import node_info
from megatron_lab.resilience import launcher_flags
from megatron_lab.resilience.command import parse_command_line
from megatron_lab.resilience.launcher_flags import (
    LauncherFlags,
    check_devices,
    count_ranks,
    create_log_folder,
    parse_launcher_flags,
)
from megatron_lab.resilience.node_launcher import find_cause, launch_ranks
from tests.support.cli import last_rows
from tests.support.runs import arguments

RUN = ["--lr", "1"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # restored afterwards
        monkeypatch.delenv(name)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is printed when a command line is refused."""
    with pytest.raises(SystemExit) as ended:
        pretrain_gpt.main([*words])
    output = capsys.readouterr()
    assert ended.value.code == 2 and not output.out
    assert last_rows(output.err) == output.err, "it does not fit a terminal"
    return " ".join(output.err.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nproc", "8", *RUN], LauncherFlags("8", None, RUN)),
        (["--lr", "1", "--nproc=2", "--log_dir=x"], LauncherFlags("2", "x", RUN)),
        (["--nproc", "1", "--nproc", "auto", *RUN], LauncherFlags("auto", None, RUN)),
        (["--lr", "--log-dir", "x", "1", "--nproc", "2"], LauncherFlags("2", "x", RUN)),
    ],
)
def test_flags_of_the_launcher_are_taken_out(words: list[str], expected: LauncherFlags) -> None:
    assert parse_launcher_flags(words) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc", "0"], "--nproc 0 is not valid. It takes the number of ranks"),
        (["--nproc", "-1"], "--nproc -1 is not valid."),
        (["--nproc", "²"], "--nproc ² is not valid."),
        (["--nproc", "100000000"], "--nproc 100000000 is not valid."),
        (["--nproc=two"], "--nproc two is not valid."),
        (["--nproc", "--lr", "1"], "--nproc has no value. It takes"),
        (["--nproc"], "--nproc has no value. It takes"),
        (["--nproc", "2", "--log-dir"], "--log-dir has no value."),
        (["--log-dir", "x"], "--log-dir needs --nproc N"),
    ],
)
def test_bad_flags_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = refusal(capsys, *words)
    assert text.startswith(f"pretrain_gpt.py: {message}") and text.count("pretrain_gpt.py:") == 1


def test_wrong_settings_are_refused_once_for_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """By the launcher, which knows the number of ranks, before any rank starts."""
    assert refusal(capsys, "--nproc", "8", "--bogus", "3", *arguments()).count("--bogus is not a flag.") == 1
    text = refusal(capsys, "--nproc", "3", *arguments(tensor_model_parallel_size=2))
    assert "The world size 3 is not divisible by" in text


@pytest.mark.parametrize("variables", [{"RANK": "3", "WORLD_SIZE": "4"}, {"SLURM_STEP_NUM_TASKS": "8"}])
def test_a_rank_of_another_launcher_starts_no_ranks(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the first rank says so."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    message = "--nproc starts the ranks itself, but another launcher"
    assert (message in refusal(capsys, "--nproc", "2", *arguments())) != ("RANK" in variables)


@pytest.mark.parametrize(
    ("nproc", "device", "num_devices", "num_ranks"),
    [
        ("auto", "auto", 8, 8),
        ("auto", "auto", 0, 1),
        ("auto", "cpu", 8, 1),
        ("gpu", "auto", 4, 4),
        ("gpu", "auto", 0, None),
        ("gpu", "cpu", 4, None),
        ("cpu", "auto", 0, 6),
        ("3", "auto", 0, 3),
    ],
)
def test_number_of_ranks(
    nproc: str,
    device: str,
    num_devices: int,
    num_ranks: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launcher_flags, "count_devices", lambda: num_devices)
    monkeypatch.setattr(node_info, "count_cores", lambda: 6)
    flags = LauncherFlags(nproc, None, arguments(device=device))
    reason = "--device is cpu" if device == "cpu" else "torch sees no CUDA device on this machine"
    if num_ranks is None:
        with pytest.raises(SystemExit, match="2"):
            count_ranks(flags)
        assert f"--nproc gpu: {reason}. Use --nproc cpu" in capsys.readouterr().err
    else:
        assert count_ranks(flags) == num_ranks
        assert (f"--nproc auto starts 1 rank, because {reason}" in capsys.readouterr().err) == (num_ranks == 1)


def test_a_machine_starts_a_limited_number_of_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(node_info, "count_cores", lambda: 2)
    with pytest.raises(SystemExit, match="2"):
        check_devices(129, load(arguments(train_iters=1, device="cpu"), 1).config)
    assert "--nproc 129: this machine starts at most 128 ranks (64 per CPU core)." in capsys.readouterr().err


def test_each_rank_needs_its_own_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(launcher_flags, "count_devices", lambda: 2)
    for device, num_ranks in (("auto", 2), ("cpu", 4)):
        check_devices(num_ranks, load(arguments(train_iters=1, device=device), num_ranks).config)
    with pytest.raises(SystemExit, match="2"):
        check_devices(4, load(arguments(train_iters=1), 4).config)
    assert "4 ranks need 4 devices, but torch sees 2 CUDA devices" in capsys.readouterr().err


def test_the_supervisor_starts_the_ranks_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_command_line(["--nproc-per-node", "2", pretrain_gpt.__file__, "--lr", "1", "--nproc=2"])
    assert "--nproc=2 is for runs without another launcher. Remove it" in capsys.readouterr().err


def test_a_plan_starts_no_ranks() -> None:
    """The program makes it, for as many ranks."""
    plan = ["--dry-run", *arguments(train_iters=1)]
    assert launch_ranks(pretrain_gpt.__file__, ["--nproc", "4", *plan]) == plan
    assert read_process_info() == ProcessInfo(rank=0, local_rank=0, world_size=4)


def test_folder_of_the_log_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save = load(arguments(train_iters=1, save=tmp_path / "save"), 1).config
    folders = [create_log_folder(None, save) for _ in range(2)]  # perhaps in the same second
    assert len(set(folders)) == 2 and all(folder.parent == tmp_path / "save/logs" for folder in folders)
    board = load(arguments(train_iters=1, tensorboard_dir=tmp_path / "board", save="s3://bucket/run"), 1).config
    assert create_log_folder(None, board).parent == tmp_path / "board/logs"
    temporary = create_log_folder(None, load(arguments(train_iters=1), 1).config)
    assert temporary.name.startswith("megatron-logs-")
    temporary.rmdir()
    assert create_log_folder(str(tmp_path / "a/b"), save) == tmp_path / "a/b"
    with pytest.raises(SystemExit, match="2"):
        create_log_folder(str(tmp_path / "a/b/rank_0.log"), save)
    assert "rank_0.log: cannot write there (File exists)" in capsys.readouterr().err


CAUSE, OTHER_CAUSE, CONSEQUENCE = ErrorReport("bad", False), ErrorReport("worse", False), ErrorReport("lost", True)


@pytest.mark.parametrize(
    ("codes", "errors", "expected"),
    [
        ({1: 1, 0: 1}, {0: CONSEQUENCE, 1: CAUSE}, (1, CAUSE)),
        ({1: 1, 0: 1}, {0: CAUSE, 1: CONSEQUENCE}, (0, CAUSE)),  # rank 0 speaks for all
        ({1: 1, 0: 1}, {0: CAUSE, 1: OTHER_CAUSE}, (1, OTHER_CAUSE)),
        ({1: 7, 0: 1}, {0: CAUSE}, (1, None)),
        ({1: 1, 0: 1}, {1: CONSEQUENCE}, (1, CONSEQUENCE)),
        ({1: 1}, {}, (1, None)),
        ({1: -9, 0: 87}, {0: CONSEQUENCE, 1: CAUSE}, (1, None)),  # it was written before the signal came
    ],
)
def test_the_cause_of_a_failure(
    codes: dict[int, int], errors: dict[int, ErrorReport], expected: tuple[int, ErrorReport | None]
) -> None:
    """Rank 1 has ended first."""
    assert find_cause(1, codes, errors) == expected
