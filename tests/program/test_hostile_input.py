"""Bad values of flags and damaged files: refused with a message, announced, or without effect; as in tests/trials/hostile.py."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.checkpoint import save_folder
from megatron.config import regular_file
from megatron.config.checks import single_settings
from megatron.config.flags import Flag
from tests.support import damage
from tests.support.hostile_commands import COMMANDS
from tests.support.hostile_runs import Outcome, WrongError, check_end, copy_workspace, put_bad_paths, run_program
from tests.trials.hostile import Trials

NUM_TRIALS, NUM_FULL_TRIALS, GROUPS = 100, 2000, 4


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    """With the files that the commands read."""
    return Trials(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("group", range(GROUPS))
def test_trials(trials: Trials, group: int, full: bool) -> None:
    """Always the same. Outcomes of each type occur, so the trials reach what they shall reach."""
    numbers = range(group, NUM_FULL_TRIALS if full else NUM_TRIALS, GROUPS)
    done = {number: trials.run(number) for number in numbers}
    wrong = [
        f"python -m tests.trials.hostile --repeat {number}: {trial.text}\n{trial.outcome}"
        for number, trial in done.items()
        if isinstance(trial.outcome, WrongError)
    ]
    assert not wrong, "\n\n".join(wrong)
    counts = Counter(trial.outcome for trial in done.values())
    assert counts[Outcome.REFUSED] > len(done) / 4 and counts[Outcome.SAME] > 0, counts


def test_every_command_has_its_files_and_works(trials: Trials, tmp_path: Path) -> None:
    folder = copy_workspace(trials.workspace, tmp_path / "copy")
    for command in COMMANDS:
        assert all(any(path.is_file() for path in folder.glob(pattern)) for pattern in command.files), command.name
        trials.get_baseline(command)


@pytest.mark.parametrize("name", ["verify", "resume", "data"])
def test_little_memory_is_enough(trials: Trials, tmp_path: Path, name: str) -> None:
    """As under `ulimit -v`: nothing asks for much more memory than the files need."""
    command = next(command for command in COMMANDS if command.name == name)
    folder = copy_workspace(trials.workspace, tmp_path / "copy")
    ended = run_program(command, folder, 60.0, memory_bytes=512 << 20)
    assert ended.code == 0, ended.output


def _raise(path: str) -> None:
    raise RuntimeError(path)


def _change_count(path: Path, draw: random.Random) -> None:
    """Another number of samples, of as many digits."""
    text = path.read_text()
    assert text.count('"consumed_samples": 16') == 1
    path.write_text(text.replace('"consumed_samples": 16', '"consumed_samples": 24'))


def _plant_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_file, "_NONBLOCKING", 0)


def _plant_ignored_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_folder, "checksums_match", lambda *_: True)


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Trials], Outcome | WrongError]]] = {
    "traceback": (
        lambda patch: patch.setattr(single_settings, "find_path_problem", _raise),
        lambda trials: trials.give_value(["--save", "x"], must_refuse=False),
    ),
    "signal 9": (
        lambda patch: patch.setattr(single_settings, "find_path_problem", lambda _: os.kill(os.getpid(), signal.SIGKILL)),
        lambda trials: trials.give_value(["--save", "x"], must_refuse=False),
    ),
    "no message": (
        lambda patch: patch.setattr(single_settings, "find_path_problem", lambda _: os._exit(1)),
        lambda trials: trials.give_value(["--save", "x"], must_refuse=False),
    ),
    "the message does not name the flag": (
        lambda patch: patch.setattr(regular_file, "find_path_problem", lambda _: sys.exit("no")),
        lambda trials: trials.give_value(["--save-trace", "tt"], must_refuse=False),
    ),
    "accepted": (
        lambda patch: patch.setattr(Flag, "_accepts", lambda *_: True),
        lambda trials: trials.give_value(["--timing-log-option", "x"], must_refuse=True),
    ),
    "hang": (_plant_waits, lambda trials: trials.damage_file("YAML", "run.yaml", damage.put_pipe, random.Random(1), timeout=6.0)),
    "another result, and no word about the file": (
        _plant_ignored_checksums,
        lambda trials: trials.damage_file("resume", "run/iter_0000002/state.json", _change_count, random.Random(1)),
    ),
}
"""Faults by what is reported: a change of the program, and a trial."""


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_faults_are_found(trials: Trials, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    plant, make_trial = PLANTED[kind]
    trials.get_baseline(next(command for command in COMMANDS if command.name == "resume"))
    assert isinstance(make_trial(trials), Outcome), "without the fault"
    plant(monkeypatch)
    found = make_trial(trials)
    assert isinstance(found, WrongError) and str(found).startswith(kind), found


def _write(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Write another content to a file."""

    def write(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def _edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    """Replace a text of a file, with checksums that fit if it is a file of a checkpoint."""

    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))
        damage.sign_checkpoint((folder / name).parent)

    return edit


def _lengthen(name: str, data: bytes) -> Callable[[Path], None]:
    def lengthen(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(data)

    return lengthen


def _change_names_of_entries(folder: Path) -> None:
    """In the directory of a zip file, which is its end."""
    path = folder / "legacy/iter_0000003/mp_rank_01_000/distrib_optim.pt"
    data = path.read_bytes()
    start = data.index(b"PK\1\2")
    path.write_bytes(data[:start] + data[start:].replace(b"/data/", b"\xff\xfe\xeb\x80\xff/"))


DEEP = "[" * 100_000 + "]" * 100_000
FOUND: list[tuple[str, Callable[[Path], None], list[str], str]] = [
    ("cluster", _write("cluster.yaml", b"\xff"), [], "the cluster file cluster.yaml cannot be read: it is not text in UTF-8"),
    ("migrate foreign.yaml", _write("foreign.yaml", "- a"), [], "migrate.py: foreign.yaml: the nanotron configuration"),
    ("migrate foreign.toml", _write("foreign.toml", "= 1"), [], "migrate.py: foreign.toml: the torchtitan configuration"),
    ("datasets by split", _write("splits.json", f'{{"train": {DEEP}}}'), [], "splits.json: the values in it are nested too deeply"),
    (
        "datasets by split",
        _write("splits.json", '{"train": [1]}'),
        [],
        "of --per-split-data-args-path splits.json 1: the last weight",
    ),
    ("list of datasets", _write("blend.txt", "x" * 5000), [], "--data-args-path blend.txt contains xxx"),
    ("layer costs", _write("costs.json", DEEP), [], "costs.json"),
    ("trace", _write("a.trace", DEEP + "\n{}\n"), [], "trace a.trace, line 1: not valid JSON"),
    (
        "inspect record",
        _edit("record/run.json", '"global_batch_size": 8', '"global_batch_size": null'),
        [],
        "run.json have no global",
    ),
    (
        "inspect record",
        _edit("record/run.json", '"tokenizer_type": "ByteTokenizer"', '"tokenizer_type": null'),
        [],
        "settings in record/run.json cannot be used: --tokenizer-type",
    ),
    ("inspect record", _write("record/run.json", '{"config": []}'), [], "config is [], but must be an object"),
    ("inspect", _edit("run/iter_0000002/config.json", '"config"', '"x"'), [], "config.json does not hold the settings of a run"),
    (
        "export",
        _edit("llama/iter_0000001/state.json", '"first_iteration"', '"x"'),
        [],
        "state.json does not have the content that a run",
    ),
    ("inspect run", _edit("bytes/iter_0000001/state.json", '"first_iteration"', '"x"'), [], "state.json does not have the content"),
    ("merges", _write("gpt2/merges.txt", ""), [], "--merge-file gpt2/merges.txt is empty"),
    ("data", put_bad_paths, ["--num-workers", "2147483648"], "--num-workers 2147483648 is out of range"),
    ("export", _edit("llama/iter_0000001/config.json", '"vocab_size": 61', '"x": 61'), [], "config.json has no entry vocab_size"),
    (
        "inspect run",
        _edit("bytes/iter_0000001/config.json", '"seq_length": 16', '"seq_length": {}'),
        [],
        "iter_0000001/config.json cannot",
    ),
    ("diff", lambda folder: (folder / "run/iter_0000002/state.json").unlink(), [], "note: taking run/iter_0000001, because"),
    ("reshard", lambda folder: (folder / "run/iter_0000002/state.json").unlink(), [], "note: taking run/iter_0000001, because"),
    (
        "export",
        lambda folder: (folder / "llama/iter_0000001/rank_00000.safetensors").chmod(0),
        [],
        "denied: 'llama/iter_0000001/rank_",
    ),
    ("report", _edit("run/history.jsonl", '"seq_length": 16', '"x": 16'), [], "the report is run/report.html"),
    ("report", _edit("run/history.jsonl", '"iteration": 1', '"iteration": [1]'), [], "the report is run/report.html"),
    ("picture", put_bad_paths, ["--output", "x/" * 200], "--output x/x/x/"),
    ("picture", put_bad_paths, ["--output", "0.5"], "--output 0.5 cannot be written: Format '5' is not supported"),
    ("merge", put_bad_paths, ["--input", "loop"], "dataset loop"),
    ("plot schedule", put_bad_paths, ["--microbatches", "9" * 19], "more than 1,000,000, which no picture shows"),
    ("generate", put_bad_paths, ["--prompt-file", "missing"], "--prompt-file missing cannot be read: No such file"),
    ("generate", put_bad_paths, ["--prompt-file", "pipe"], "--prompt-file pipe cannot be read: it is a pipe to which no process"),
    ("generate", _write("prompt.txt", ""), [], "--prompt-file prompt.txt is empty"),
    ("train tokenizer", _write("corpus.jsonl", ""), [], "empty files: 1, for example"),
    ("data", put_bad_paths, ["--tensorboard-dir", "readonly"], "--tensorboard-dir readonly cannot be written (Permission denied)"),
    ("data", put_bad_paths, ["--tensorboard-dir", "x" * 6000], "a name in it is longer than 255 bytes"),
    ("data", put_bad_paths, ["--compile", "--compile-cache-dir", " "], "is not a valid path: it is blank"),
    ("preprocess corpus.parquet", _write("corpus.parquet", b"PAR1" + bytes(40) + b"PAR1"), [], "corpus.parquet"),
    ("import legacy", _change_names_of_entries, [], "distrib_optim.pt is truncated, altered"),
    ("migrate two files", put_bad_paths, ["--pick=\udce9"], "udce9"),
    ("import distributed", _lengthen("dist/iter_0000003/common.pt", b"x" * 4096), [], "common.pt is damaged and cannot be read"),
]
"""Faults that trials have found: a command, what is done to its files, words to add, and a part of what is printed."""


@pytest.mark.parametrize(("name", "prepare", "words", "text"), FOUND, ids=[f"{case[0]}-{case[3][-30:]}" for case in FOUND])
def test_faults_that_trials_found(
    trials: Trials, tmp_path: Path, name: str, prepare: Callable[[Path], None], words: list[str], text: str
) -> None:
    folder = copy_workspace(trials.workspace, tmp_path / "copy")
    prepare(folder)
    ended = run_program(next(command for command in COMMANDS if command.name == name), folder, 60.0, words)
    check_end(ended)
    assert text in " ".join(ended.output.split()), ended.output[-3000:]


def test_a_run_is_not_held_up_by_a_pipe_in_the_place_of_its_report(trials: Trials, tmp_path: Path) -> None:
    folder = copy_workspace(trials.workspace, tmp_path / "copy")
    damage.put_pipe(folder / "run" / "report.html", random.Random(1))
    ended = run_program(next(command for command in COMMANDS if command.name == "resume"), folder, 60.0)
    check_end(ended)
    assert ended.code == 0 and "report.html cannot be written: it is a pipe" in ended.output, ended.output
