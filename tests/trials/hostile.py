"""Bad values for every flag, and damage to every file that a program reads.

    python -m tests.trials.hostile --minutes N [--seed S]
    python -m tests.trials.hostile --repeat NUMBER

Every trial has a number, which decides all of it: a command with a bad value, or a command with a file that is truncated, altered,
replaced by a folder or a pipe, and so on. A program may refuse with a message that names the flag or the file, go on and say what
it did, or give the same result. It may not raise a traceback, end by a signal, wait forever, or give another result without a
word. The last lines are counts and the failures, with the number that repeats each. Exit status: 0 if nothing failed, else 1.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, as in conftest.py
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch

from tests.support.bad_values import draw_flag, draw_option, list_companions, list_flags
from tests.support.damage import REPLACEMENTS, Damage, change_signed_json, list_damages
from tests.support.hostile_commands import COMMANDS, TRAIN, write_workspace
from tests.support.hostile_runs import (
    Command,
    Ended,
    Outcome,
    WrongError,
    copy_workspace,
    judge_damage,
    judge_value,
    put_bad_paths,
    read_result,
    remove_workspace,
    run_program,
)

TIMEOUT_S = 60.0
"""After which a program that does not compute waits forever."""
_FLAG_TIMEOUT_S = 20.0
_VALUES_SHARE = 0.4
"""Share of the trials with a bad value. The others damage a file."""
_WITH_FLAGS = ("plot_memory", "verify_layout")
"""Tools that take the flags of pretrain_gpt.py."""
_TOOLS = "megatron_lab.commands"
_MAX_PER_KIND = 3  # failures of one type that are printed in full
BASE = Command("flags", TRAIN, next(command.argv for command in COMMANDS if command.name == "data"))


class Trial(NamedTuple):
    """What a trial did, and what came of it."""

    text: str
    outcome: Outcome | WrongError
    group: str
    """`values` or `files`."""


class Trials:
    """The files of all trials, and what the commands give without damage.

    Args:
        folder: an empty folder.
    """

    workspace: Path
    """Folder with the files that the commands read. Not to be changed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.workspace = folder, folder / "workspace"
        write_workspace(self.workspace)
        self._baselines: dict[str, tuple[tuple[object, ...], Ended]] = {}
        self._options: dict[str, list[argparse.Action]] = {}

    def run(self, number: int) -> Trial:
        """Make the trial of a number."""
        draw = random.Random(number)
        folder = copy_workspace(self.workspace, self._folder / "trial")
        try:
            return self._run_value(draw, folder) if draw.random() < _VALUES_SHARE else self._run_damage(draw, folder)
        finally:
            remove_workspace(folder)

    def get_baseline(self, command: Command) -> tuple[tuple[object, ...], Ended]:
        """The result of a command without damage, and how it ended."""
        if command.name not in self._baselines:
            folder = copy_workspace(self.workspace, self._folder / "baseline")
            try:
                ended = run_program(command, folder, 4 * TIMEOUT_S)
                assert ended.code == 0, f"{command.name}: {ended.output}"
                self._baselines[command.name] = read_result(command, folder, ended), ended
            finally:
                remove_workspace(folder)
        return self._baselines[command.name]

    def damage_file(
        self, name: str, file: str, damage: Damage, draw: random.Random, timeout: float = TIMEOUT_S
    ) -> Outcome | WrongError:
        """Make a trial that damages a file.

        Args:
            name: name of the command.
            file: path of the file, from the folder of the command.
        """
        command = next(command for command in COMMANDS if command.name == name)
        folder = copy_workspace(self.workspace, self._folder / "trial")
        try:
            return self._judge_damage(command, folder, folder / file, damage, draw, timeout)
        finally:
            remove_workspace(folder)

    def _judge_damage(
        self, command: Command, folder: Path, path: Path, damage: Damage, draw: random.Random, timeout: float
    ) -> Outcome | WrongError:
        baseline, normal = self.get_baseline(command)
        damage(path, draw)
        ended = run_program(command, folder, timeout)
        try:
            return judge_damage(
                command,
                folder,
                ended,
                baseline,
                normal.output,
                path.relative_to(folder),
                is_gone=damage in REPLACEMENTS,
                is_signed=damage is change_signed_json,
            )
        except WrongError as error:
            return error

    def _run_damage(self, draw: random.Random, folder: Path) -> Trial:
        command = draw.choice([command for command in COMMANDS if command.files])
        groups = [sorted(path for path in folder.glob(pattern) if path.is_file()) for pattern in command.files]
        assert all(groups), f"{command.name} has no file {command.files[groups.index([])]}"
        path = draw.choice(draw.choice(groups))
        damage = draw.choice(list_damages(path))
        text = f"{command.name}: {damage.__name__} {path.relative_to(folder)}"
        return Trial(text, self._judge_damage(command, folder, path, damage, draw, TIMEOUT_S), "files")

    def _run_value(self, draw: random.Random, folder: Path) -> Trial:
        put_bad_paths(folder)
        if draw.random() < 0.65:
            flag, command = draw.choice(list_flags()), BASE
            words, must_refuse = draw_flag(flag, draw)
            more = list_companions(flag) if draw.random() < 0.8 else []
        else:
            command, more = draw.choice([command for command in COMMANDS if command.program != TRAIN]), []
            if command.program.endswith(_WITH_FLAGS):
                command = Command("plot memory", f"{_TOOLS}.plot_memory", BASE.argv)
                words, must_refuse = draw_flag(draw.choice(list_flags()), draw)
            else:
                words, must_refuse = draw_option(draw.choice(self._list_options(command)), draw)
        text = f"{command.name}: {shlex.join(word[:100] for word in [*more, *words])}"
        return Trial(text, self._judge_value(command, folder, words, more, must_refuse=must_refuse), "values")

    def give_value(self, words: Sequence[str], *, must_refuse: bool) -> Outcome | WrongError:
        """Make a trial that gives a flag of pretrain_gpt.py a value."""
        folder = copy_workspace(self.workspace, self._folder / "trial")
        try:
            put_bad_paths(folder)
            return self._judge_value(BASE, folder, words, (), must_refuse=must_refuse)
        finally:
            remove_workspace(folder)

    def _judge_value(
        self, command: Command, folder: Path, words: Sequence[str], more: Sequence[str], *, must_refuse: bool
    ) -> Outcome | WrongError:
        ended = run_program(command, folder, _FLAG_TIMEOUT_S, [*more, *words])
        try:
            return judge_value(ended, [*words, *more], must_refuse=must_refuse)
        except WrongError as error:
            return error

    def _list_options(self, command: Command) -> list[argparse.Action]:
        """The options that the parser of a tool has."""
        if command.program not in self._options:
            self._options[command.program] = _read_options(command)
        return self._options[command.program]


def _read_options(command: Command) -> list[argparse.Action]:
    parsers: list[argparse.ArgumentParser] = []

    class Parsed(BaseException):
        """Ends the program where it has built its parser."""

    def catch(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        parsers.append(parser)
        raise Parsed

    names = ("parse_args", "parse_known_args")
    real = {name: getattr(argparse.ArgumentParser, name) for name in names}
    try:
        for name in names:
            setattr(argparse.ArgumentParser, name, catch)
        sys.modules.setdefault(command.program, __import__(command.program, fromlist=["main"])).main(list(command.argv))
    except Parsed:
        pass
    finally:
        for name, function in real.items():
            setattr(argparse.ArgumentParser, name, function)
    parser = parsers[0]
    subparsers = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if subparsers:
        parser = subparsers[0].choices[command.argv[0]]
    return [action for action in parser._actions if action.option_strings and action.dest not in ("help", "version")]


def count(trials: Sequence[Trial]) -> str:
    """How many trials of each group came to each outcome."""
    lines = []
    for group, noun in (("values", "commands with a bad value"), ("files", "damaged files")):
        chosen = [trial.outcome for trial in trials if trial.group == group]
        counts = Counter(outcome.value for outcome in chosen if isinstance(outcome, Outcome))
        wrong = sum(isinstance(outcome, WrongError) for outcome in chosen)
        lines.append(
            f"{len(chosen):,} {noun}: {', '.join(f'{count} {name}' for name, count in counts.most_common())}, {wrong} failed"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**6) * 10**4, help="number of the first trial"
    )
    parser.add_argument("--repeat", type=int, nargs="+", default=[], metavar="NUMBER", help="make these trials alone")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        trials = Trials(Path(name))
        if options.repeat:
            for number in options.repeat:
                trial = trials.run(number)
                print(f"{number}: {trial.text}\n{trial.outcome}")
            return 0
        return _run_all(trials, options.minutes, options.seed)


def _run_all(trials: Trials, minutes: float, seed: int) -> int:
    print(f"--seed {seed}", flush=True)
    done: list[Trial] = []
    kinds: Counter[str] = Counter()
    failures = []
    start = reported = time.monotonic()
    while time.monotonic() - start < 60 * minutes:
        number = seed + len(done)
        trial = trials.run(number)
        done.append(trial)
        if isinstance(trial.outcome, WrongError):
            kinds[trial.outcome.kind] += 1
            failures.append(f"--repeat {number}: {trial.text}: {trial.outcome.kind}")
            print(failures[-1], flush=True)
            if kinds[trial.outcome.kind] <= _MAX_PER_KIND:
                print(f"{trial.outcome}\n", flush=True)
        if time.monotonic() - reported > 60:
            reported = time.monotonic()
            print(f"{(reported - start) / 60:.0f} minutes, {len(done)} trials\n{count(done)}", flush=True)
    print(f"{count(done)}\n" + "\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
