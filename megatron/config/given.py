"""What was given: the command line cut into flags with their values, and those sorted: requests to the program, settings, flags
without effect, and problems.

A request (``--config``, ``--explain``, ``--dry-run``) sets nothing of the run: it names a file to read, a page or a plan to print.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.config.checks.each import LARGEST_WORLD
from megatron.config.config import Config
from megatron.config.data import is_number, path_flags
from megatron.config.errors import Violation
from megatron.config.flags import Flag, build, flag_of, flags, nearest_names
from megatron.config.launcher import launched
from megatron.config.settle import no_effect

_FLAG = re.compile(r"--[A-Za-z]|-[A-Za-z]")


@dataclass(frozen=True)
class Given:
    """A flag as it was given."""

    name: str
    """Its name with inner dashes, without the leading ones: ``lr-decay-style``."""
    values: tuple[str, ...]
    spelled: str
    """The name as the user wrote it."""
    where: str = ""
    """File and line, or empty for the command line."""

    @property
    def place(self) -> str:
        """The beginning of a message about it: ``run.yaml line 3: ``."""
        return f"{self.where}: " if self.where else ""

    def __str__(self) -> str:
        """The setting for a message, such as ``run.yaml line 3: --lr abc``."""
        return self.place + " ".join((self.spelled, *(value or repr(value) for value in self.values)))


def split(argv: Sequence[str]) -> tuple[list[str], list[Given]]:
    """Cut a command line at its flags. It understands ``--flag=value``, underscores for dashes and negative numbers.

    Returns:
        The arguments before the first flag, which belong to nothing, and the flags in order.
    """
    stray: list[str] = []
    found: list[Given] = []
    for word in _unquoted(argv):
        if _FLAG.match(word) and not is_number(word):
            spelled, equals, value = word.partition("=")
            values = (value,) if equals else ()
            name = spelled.lstrip("-").replace("_", "-")
            if not spelled.startswith("--") and name != "h":
                name = f"-{name}"  # one dash: no flag of ours, but the message should say so
            found.append(Given(name, values, spelled))
        elif found:
            found[-1] = replace(found[-1], values=(*found[-1].values, word))
        else:
            stray.append(word)
    return stray, found


def _unquoted(words: Sequence[str]) -> Iterator[str]:
    """The words without quotes that are left around a value, as a shell leaves those of an array's entry: '99,1,0'."""
    for word in words:
        spelled, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            word = f"{spelled}{equals}{value[1:-1]}"
        yield word


TAKEN_SETTINGS = ("eval-iters", "optimizer")
"""Settings of which some values of Megatron-LM are taken as others."""
NO_TABLE = "no-position-embedding"
"""Megatron-LM takes it only beside rotary positions, where it does nothing."""
_MOST_GUESSED = 20  # unknown flags for which near ones are looked for, which takes some milliseconds each


@dataclass
class Sorted:
    """The given flags, sorted."""

    settings: list[tuple[Flag, Given, Any]] = field(default_factory=list)
    """Good settings in order, with their values. If a flag occurs more than once, the last counts."""
    notes: list[str] = field(default_factory=list)
    """A line for each flag that has no effect, and for each that was given twice."""
    problems: list[Violation] = field(default_factory=list)
    """Unknown and refused flags, and values that do not fit."""
    doubtful: set[str] = field(default_factory=set)
    """Flags (``--lr``) whose value is not known because of a problem: a rule about them would mislead."""

    guesses: list[tuple[Violation, Sequence[str], list[str]]] = field(default_factory=list)
    """Problems of unknown flags, with the values that were given and the several names that may have been meant."""
    fixed: set[str] = field(default_factory=set)
    """Fields that a checkpoint sets, so that no other value of them can be suggested."""

    @property
    def explicit(self) -> set[str]:
        """Fields that the user set."""
        return {flag.field for flag, _, value in self.settings if value is not None}

    def config(self) -> Config:
        """The good settings, and defaults for all others."""
        parts: dict[str, dict[str, Any]] = {}
        for flag, _, value in self.settings:
            parts.setdefault(flag.topic, {})[flag.field] = value
        return build(parts)

    def doubt_all(self) -> None:
        """Nothing is known for sure."""
        self.doubtful.update(f"--{name}" for name in flags())


def sort_given(stray: Sequence[str], given: Sequence[Given]) -> Sorted:
    """Look up every flag and check the form of its values."""
    found = Sorted()
    for word in stray:
        found.problems.append(Violation((), f"{word} belongs to no flag.", "Every setting starts with a flag; see --help."))
    unknown = []
    idle: dict[str, list[str]] = {}
    refused: dict[str, list[Given]] = {}
    positions = None
    for item in _taken(given, found.notes):
        flag = flag_of(item.name)
        known = None if flag is not None else of_megatron().KNOWN.get(item.name) or _family(item.name)
        if flag is not None:
            try:
                found.settings.append((flag, item, flag.read(item.name, item.values)))
            except ValueError as error:
                found.doubtful.add(f"--{flag.name}")
                found.problems.append(_misused(item, flag.name, str(error), flag.choices))
        elif item.name == NO_TABLE and not item.values:
            positions = item
        elif known is not None and known.is_accepted:
            if fault := known.fault(item.values):
                found.problems.append(_misused(item, item.name, fault))
            else:
                idle.setdefault(known.reason, []).append(str(item))
        elif known is not None:
            refused.setdefault(known.reason, []).append(item)
        else:
            unknown.append(item)
    if positions is not None:
        _sort_positions(positions, found, idle, refused)
    found.notes += [no_effect(list(dict.fromkeys(names)), reason) for reason, names in idle.items()]
    for reason, items in refused.items():
        names = [str(item) for item in items]
        message = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} refused."
        found.problems.append(Violation(tuple(f"--{item.name}" for item in items), message, reason))
    _suggest(unknown, found)
    _note_repeated(found)
    return found


def _taken(given: Sequence[Given], notes: list[str]) -> Iterator[Given]:
    """The flags with those that are taken as others replaced by these; each is noted."""
    for item in given:
        is_ours = flag_of(item.name) is not None and item.name not in TAKEN_SETTINGS
        other = None if is_ours else of_megatron().TAKEN.get(item.name)
        if other is None or not other.fits(item.values):
            yield item
            continue
        words = other.words.format(*item.values)
        notes.append(f"{item} is taken as {words}.")
        for each in split(words.split())[1]:
            yield replace(each, where=item.where)


def of_megatron() -> Any:
    """The module of Megatron-LM's flags that are no settings here. It is imported where a flag is no setting."""
    return importlib.import_module("megatron_lab.migration.compat")


def _family(name: str) -> Any:
    """The family of flags that a name belongs to, unless it is a setting that was spelled wrong."""
    family = of_megatron().find_family(name)
    return None if family is not None and difflib.get_close_matches(name, flags(), n=1, cutoff=0.85) else family


def _sort_positions(item: Given, found: Sorted, idle: dict[str, list[str]], refused: dict[str, list[Given]]) -> None:
    """Note or refuse what switches off a table of positions: a model without one has none to switch off."""
    config = found.config()
    if config.model.position_embedding_type == "learned_absolute" and not config.checkpoint.use_checkpoint_args:
        refused.setdefault("Use --position-embedding-type none, or rope.", []).append(item)
    else:
        idle.setdefault(of_megatron().KNOWN[NO_TABLE].reason, []).append(str(item))


def _misused(item: Given, name: str, fault: str, choices: Sequence[str] = ()) -> Violation:
    """The problem of a flag that cannot have these values."""
    reasons = of_megatron().CHOICES
    value = next((value for value in item.values if (name, value) in reasons), item.values[0] if len(item.values) == 1 else "")
    if reason := reasons.get((name, value)):
        return Violation((f"--{name}",), f"{item}: {value} {reason}.")
    nearest = tuple(f"--{name} {choice}" for choice in difflib.get_close_matches(value, choices, n=1))
    return Violation((f"--{name}",), f"{item}: --{name} {fault}.", nearest=nearest)


def _suggest(unknown: Sequence[Given], found: Sorted) -> None:
    """Suggest what may have been meant, unless too many flags are unknown: then the fault is likely another."""
    for item in unknown[:_MOST_GUESSED]:
        name = item.name.lstrip("-")
        negative = [f"no-{flag.name}" for flag in flags().values() if flag.default is True]
        names = nearest_names(name, [*flags(), *negative])
        names = [near for near in names if _reads(near, item.values) is not None] or names[:1]
        advice = _perhaps(names) if names else "See --help for all flags."
        if not names and (old := nearest_names(name, [*of_megatron().KNOWN, *of_megatron().TAKEN])):
            known = of_megatron().KNOWN.get(old[0])
            advice = known.reason if known is not None and not known.is_accepted else _perhaps(old[:1])
        found.doubtful.update(f"--{name}" for name in names)
        problem = Violation((f"--{item.name}",), f"{item.place}{item.spelled} is not a flag.", advice)
        found.problems.append(problem)
        if len(names) > 1:
            found.guesses.append((problem, item.values, names))
    if more := unknown[_MOST_GUESSED:]:
        message = f"{more[0].place}{more[0].spelled} is not a flag, and {len(more) - 1:,} more are none."
        found.problems.append(Violation((f"--{more[0].name}",), message, "See --help for all flags."))
        found.doubt_all()  # any of them may have been meant


def judged(found: Sorted, accepted: Callable[[str, Any], bool]) -> list[Violation]:
    """The problems, in which of several names that may have been meant those are told that can be given.

    Args:
        accepted: whether a field can have a value, beside the other settings.
    """
    better: dict[int, Violation] = {}
    for problem, values, names in found.guesses:
        able = [near for near in names if (read := _reads(near, values)) is not None and accepted(*read)]
        if able:
            better[id(problem)] = replace(problem, rule=_perhaps(able))
    return [better.get(id(problem), problem) for problem in found.problems]


def _perhaps(names: Sequence[str]) -> str:
    return f"Perhaps you meant {' or '.join(f'--{name}' for name in names)}."


def _reads(name: str, values: Sequence[str]) -> tuple[str, Any] | None:
    """The field that a flag sets, and its value from these texts; None if they cannot be read."""
    flag = flag_of(name)
    assert flag is not None
    try:
        return flag.field, flag.read(name, values)
    except ValueError:
        return None


def _note_repeated(found: Sorted) -> None:
    """Note the settings that the command line gives more than once with different values."""
    last: dict[str, Given] = {}
    for flag, item, _ in found.settings:
        before = last.get(flag.name)
        if before is not None and not before.where and (before.name, before.values) != (item.name, item.values):
            found.notes.append(f"{before} is overruled by {item}, which comes later.")
        last[flag.name] = item


def is_count(text: str, most: int) -> bool:
    """Whether a text is a whole number from 1 to `most`, of less than a million million."""
    return text.isascii() and text.isdigit() and 1 <= int(text[:12]) <= most


def is_factor(text: str) -> bool:
    """Whether a text is a finite number of at least 1."""
    return is_number(text) and 1.0 <= float(text) < float("inf")


GPUS_PER_NODE = 8


@dataclass(frozen=True)
class DryRun:
    """A request to plan the job and print what it takes, instead of running it."""

    world_size: int
    gpus_per_node: int
    json_file: str | None
    expert_imbalance: float | None = None
    """How many times the mean of choices the experts of the busiest rank are taken to get."""
    html_file: str | None = None


def this_job() -> DryRun:
    """The size of the job that the launcher describes, as a request to lay it out."""
    job = launched()
    return DryRun(job.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", job.world_size)), None)


def without_gaps(config: Config) -> Config:
    """Settings of a job that is only planned; what a run needs and the plan does not depend on is filled in."""
    training, optimizer, data = config.training, config.optimizer, config.data
    if training.train_iters is None and training.train_samples is None:
        training = replace(training, train_iters=1)
    if not path_flags(data):
        data = replace(data, data_path=() if data.mock_data else ("dataset",))
    if data.tokenizer_type is None and data.vocab_size is not None:
        data = replace(data, tokenizer_type="NullTokenizer")
    if optimizer.lr is None:
        optimizer = replace(optimizer, lr=1.0)
    logging = config.logging
    if logging.plan_cluster is not None and logging.plan_report is None:
        logging = replace(logging, plan_report="none")  # the plan itself tells step times for the cluster
    return replace(config, training=training, optimizer=optimizer, data=data, logging=logging)


NO_VALUE, COUNT, FACTOR = "no value", f"a whole number from 1 to {LARGEST_WORLD:,}", "a number of at least 1"
REQUESTS = {
    "model": (
        "one name",
        "Model whose settings are taken, below those of --config and those given here: llama3-8b and others; list shows all, with "
        "their sizes.",
    ),
    "config": (
        "one file",
        "YAML file of settings below the flags given here: flag names, flat or under the topics of this help. May be repeated.",
    ),
    "print-config": (NO_VALUE, "Print the resolved settings as YAML, which --config reads back, and stop."),
    "version": (NO_VALUE, "Say which version this is, and stop."),
    "explain": (
        "the name of one flag",
        "Say what a flag does, its unit and default and what it interacts with, and stop. May be repeated.",
    ),
    "dry-run": (
        NO_VALUE,
        "Lay the job out without running it: layers, memory, bytes sent, idle time and FLOPs of every kind of rank. Needs no GPU, "
        "no launcher and no data.",
    ),
    "plan": (
        NO_VALUE,
        "Look for the fastest layouts of the job instead of running it, as tools/plan.py does, whose flags it takes too (--tokens, "
        "--why, --fix, --json, --write-script and others).",
    ),
    "world-size": (COUNT, "Ranks of the job that --dry-run lays out; by default those that the launcher gives."),
    "gpus-per-node": (COUNT, f"Ranks of a node, for --dry-run; by default {GPUS_PER_NODE}."),
    "dry-run-json": ("one file", "File for what --dry-run tells, as JSON."),
    "dry-run-html": (
        "one file",
        "File for what --dry-run tells, as a page with memory bars and the grid of the ranks, which opens without a network.",
    ),
    "plan-expert-imbalance": (
        FACTOR,
        "How many times the mean of choices the experts of the busiest rank get, for --dry-run, which then tells its memory too; "
        "by default as many as --moe-expert-capacity-factor lets them take.",
    ),
}
"""What each request takes, and its help text."""
_FITS: Mapping[str, Callable[[str], bool]] = {COUNT: lambda text: is_count(text, LARGEST_WORLD), FACTOR: is_factor}
"""Whether a value is what a request takes; any that is not empty is a file or a name."""
_NEEDING_DRY_RUN = ("world-size", "gpus-per-node", "dry-run-json", "dry-run-html", "plan-expert-imbalance")


def take(given: Sequence[Given]) -> tuple[list[Given], dict[str, list[str]], list[Violation]]:
    """Separate the requests from the settings.

    Returns:
        the settings, the values of each request that was made, and the problems of the requests.
    """
    rest: list[Given] = []
    asked: dict[str, list[str]] = {}
    problems: list[Violation] = []
    for item in _with_named_flags(given):
        if item.name not in REQUESTS:
            rest.append(item)
            continue
        takes, _ = REQUESTS[item.name]
        alone = len(item.values) == 1
        fits = not item.values if takes == NO_VALUE else alone and _FITS.get(takes, bool)(item.values[0])
        if fits:
            asked.setdefault(item.name, []).extend(item.values)
        else:
            problems.append(Violation((f"--{item.name}",), f"{item}: --{item.name} takes {takes}."))
    names = {item.name for item in given}
    for name in _NEEDING_DRY_RUN:
        if name in names and "dry-run" not in names:
            rule = "The number of ranks of a run comes from its launcher." if name == "world-size" else ""
            problems.append(Violation((f"--{name}",), f"--{name} is for --dry-run only, which is not given.", rule))
    return rest, asked, problems


def _with_named_flags(given: Sequence[Given]) -> list[Given]:
    """Join ``--explain --lr``, which was read as two flags: the second is what the first asks about."""
    found: list[Given] = []
    for item in given:
        if found and found[-1].name == "explain" and not found[-1].values:
            found[-1] = replace(found[-1], values=(item.name,))
        else:
            found.append(item)
    return found


def dry_run_in(asked: Mapping[str, Sequence[str]], world_size: int) -> DryRun | None:
    """The dry run that was asked for, if any; `world_size` is the number of ranks if --world-size is not given."""
    if "dry-run" not in asked:
        return None
    last = {name: values[-1] for name, values in asked.items() if values}
    ranks, per_node = last.get("world-size", world_size), last.get("gpus-per-node", GPUS_PER_NODE)
    factor = last.get("plan-expert-imbalance")
    imbalance = None if factor is None else float(factor)
    return DryRun(int(ranks), int(per_node), last.get("dry-run-json"), imbalance, last.get("dry-run-html"))


def check_output(flag: str, path: str) -> None:
    """Check that a file can be written, without touching anything. Folders that do not exist yet will be made.

    Args:
        flag: the flag with which the path was given.

    Raises:
        ValueError: there cannot be such a file.
    """
    if os.path.isdir(path):
        raise ValueError(f"{flag} {path} is a folder. It takes the name of a file.")
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        raise ValueError(f"{flag} {path} cannot be written: {folder} is no folder.")
    # To enter a name into a folder takes the right to write there and the right to go there.
    allowed = os.access(path, os.W_OK) if os.path.exists(path) else os.access(folder, os.W_OK | os.X_OK)
    if not allowed:
        raise ValueError(f"{flag} {path} cannot be written: permission denied. Give a path in a folder that you may write to.")
