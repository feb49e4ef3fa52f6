"""Flags that ask something of the program instead of setting something of the run: a file to read, a plan to be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron.config.checks.each import LARGEST_WORLD
from megatron.config.config import Config
from megatron.config.data_words import has_own_splits
from megatron.config.errors import Violation
from megatron.config.given import Given, is_count

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class DryRun:
    """Lay out the job and say what it takes, instead of running it."""

    world_size: int
    gpus_per_node: int
    json_file: str | None


def without_gaps(config: Config) -> Config:
    """Settings of a job that is only laid out, with something in the place of what a run needs and the plan does not depend on."""
    training, optimizer, data = config.training, config.optimizer, config.data
    if training.train_iters is None and training.train_samples is None:
        training = replace(training, train_iters=1)
    if not any((data.data_path, data.data_args_path, data.per_split_data_args_path, has_own_splits(data))):
        data = replace(data, data_path=() if data.mock_data else ("dataset",))
    if data.tokenizer_type is None and data.vocab_size is not None:
        data = replace(data, tokenizer_type="NullTokenizer")
    if optimizer.lr is None:
        optimizer = replace(optimizer, lr=1.0)
    return replace(config, training=training, optimizer=optimizer, data=data)


@dataclass
class Requests:
    """What was asked for."""

    files: list[str]
    """Of --config, in their order."""
    print_config: bool = False
    explain: list[str] = field(default_factory=list)
    """Names of flags."""
    dry_run: bool = False
    world_size: int | None = None
    gpus_per_node: int | None = None
    dry_run_json: str | None = None

    def planned(self, world_size: int) -> DryRun | None:
        """The dry run that was asked for; `world_size` is the number of ranks where --world-size is not given."""
        if not self.dry_run:
            return None
        return DryRun(self.world_size or world_size, self.gpus_per_node or GPUS_PER_NODE, self.dry_run_json)


HELP = {
    "config": "YAML file of settings below the flags given here: flag names, flat or under the topics of this help. May be "
    "repeated.",
    "print-config": "Print the resolved settings as YAML, which --config reads back, and stop.",
    "explain": "Say what a flag does, its unit and default and what it interacts with, and stop. May be repeated.",
    "dry-run": "Lay the job out without running it: layers, memory, bytes sent, idle time and FLOPs of every kind of rank. "
    "Needs no GPU, no launcher and no data.",
    "world-size": "Ranks of the job that --dry-run lays out; by default those that the launcher gives.",
    "gpus-per-node": f"Ranks of a node, for --dry-run; by default {GPUS_PER_NODE}.",
    "dry-run-json": "File for what --dry-run tells, as JSON.",
}
"""What each of these flags does."""

_SWITCHES = ("print-config", "dry-run")
_NEEDING_DRY_RUN = ("world-size", "gpus-per-node", "dry-run-json")


def take(given: Sequence[Given]) -> tuple[list[Given], Requests, list[Violation]]:
    """Part the requests from the settings.

    Returns:
        the settings, the requests, and what is wrong with these.
    """
    rest: list[Given] = []
    found = Requests([])
    problems: list[Violation] = []
    for item in _with_named_flags(given):
        if item.name not in HELP:
            rest.append(item)
        elif (fault := _enter(item, found)) is not None:
            problems.append(Violation((f"--{item.name}",), f"{item}: --{item.name} {fault}."))
    names = {item.name for item in given}
    for name in _NEEDING_DRY_RUN:
        if name in names and "dry-run" not in names:
            rule = "The number of ranks of a run comes from its launcher." if name == "world-size" else ""
            problems.append(Violation((f"--{name}",), f"--{name} is for --dry-run only, which is not given.", rule))
    return rest, found, problems


def _with_named_flags(given: Sequence[Given]) -> list[Given]:
    """``--explain --lr`` reads as two flags; the second is what the first asks about."""
    found: list[Given] = []
    for item in given:
        if found and found[-1].name == "explain" and not found[-1].values:
            found[-1] = Given("explain", (item.name,), found[-1].spelled, found[-1].where)
        else:
            found.append(item)
    return found


def _enter(item: Given, found: Requests) -> str | None:
    """Write a request down, or say what is wrong with it."""
    if item.name in _SWITCHES:
        if item.values:
            return "takes no value"
        setattr(found, item.name.replace("-", "_"), True)
        return None
    if len(item.values) != 1 or not item.values[0]:
        return {"config": "takes one file", "dry-run-json": "takes one file", "explain": "takes the name of one flag"}.get(
            item.name, "takes one whole number"
        )
    if item.name == "config":
        found.files.append(item.values[0])
    elif item.name == "explain":
        found.explain.append(item.values[0])
    elif item.name == "dry-run-json":
        found.dry_run_json = item.values[0]
    else:
        if not is_count(item.values[0], LARGEST_WORLD):
            return f"takes a whole number from 1 to {LARGEST_WORLD:,}"
        setattr(found, item.name.replace("-", "_"), int(item.values[0]))
    return None
