"""The command line: flags in Megatron's spelling made from the dataclasses, with YAML files below them.

The table of flags (`flags`) reads the arguments, not the library that prints the help. So every problem can be reported at once,
with its place, beside refused flags and violated rules.

Programs call ``load``, which reports every problem of the settings at once. ``load_or_exit`` also talks to the user. Nothing here
imports torch, so that ``--help`` and bad settings are answered at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from megatron.config.checks.each import notes as effect_notes
from megatron.config.checks.each import plan_notes
from megatron.config.config import Config
from megatron.config.errors import ConfigError, Violation
from megatron.config.extras import missing_note, missing_packages, optional
from megatron.config.flags import flag_of, flags
from megatron.config.given import DryRun, Given, Sorted, dry_run_in, judged, of_megatron, sort_given, split, take, without_gaps
from megatron.config.imports import import_modules, named
from megatron.config.launcher import adopt_launcher, is_first_rank, launched
from megatron.config.model_files import LIST, file_of, table
from megatron.config.rules import is_harmless, violations
from megatron.config.save import to_yaml
from megatron.config.settle import settled, with_vocabulary

PROGRAM = "pretrain_gpt.py"


@dataclass(frozen=True)
class LoadedConfig:
    """Settings that can be run, with lines for the start-up log about them."""

    config: Config
    notes: tuple[str, ...]
    """One line for each flag that has no effect, with the reason."""
    dry_run: DryRun | None = None
    """The dry run that was asked for in place of a run, if any."""


def parse(argv: Sequence[str]) -> Config:
    """Settings from a command line, without the rules between them (see `load`).

    Raises:
        ConfigError: unknown or refused flags, values of a wrong form, a bad ``--config`` file, or a checkpoint in which
            ``--use-checkpoint-args`` finds no settings.
        SystemExit: 0 after ``--help``, ``--version``, ``--model list``, ``--explain`` or ``--print-config``.
    """
    config, _, found = _read(argv)
    if found.problems:
        raise ConfigError(found.problems)
    return config


def load(argv: Sequence[str], world_size: int) -> LoadedConfig:
    """Settings from a command line that can be run with this many ranks.

    Args:
        argv: the words after the program's name.
        world_size: number of ranks, but that of a dry run may be given in the command line.

    Raises:
        ConfigError: with all problems together: those of `parse` and the violated rules.
        SystemExit: 0 after ``--help``, ``--version``, ``--explain`` or ``--print-config``.
    """
    config, requests, found = _read(argv)
    return _ruled(config, found, world_size, dry_run_in(requests, world_size))


def load_values(values: Mapping[str, Any], world_size: int, *more: Mapping[str, Any]) -> LoadedConfig:
    """Settings that a program gives as values, which can be run with this many ranks: the same names, rules and defaults.

    Args:
        values: by the names of flags or of their fields, flat or under topics; `model` may name a model, and `config` files, whose
            settings lie below all others.
        more: further values, of which the later count.

    Raises:
        ConfigError: with all problems together.
    """
    own: list[Given] = []
    named: dict[str, list[str]] = {}
    problems: list[Violation] = []
    for part in (values, *more):
        files = {name: part[name] for name in _OF_FILES if name in part and not isinstance(part[name], Mapping)}
        named |= {name: [str(each)] if isinstance(each, str | os.PathLike) else list(each) for name, each in files.items()}
        try:
            optional("yaml", "settings that are given as values need PyYAML")
            from megatron.config.yaml_file import read_mapping

            own += read_mapping({name: value for name, value in part.items() if name not in files})
        except ConfigError as error:
            problems += error.violations
    config, found = _assembled((), own, named, problems)
    if problems:
        found.doubt_all()
    return _ruled(config, found, world_size, None)


_OF_FILES = ("model", "config")
"""Requests that bring settings."""


def _ruled(config: Config, found: Sorted, world_size: int, dry_run: DryRun | None) -> LoadedConfig:
    """What can be run of what was found.

    Raises:
        ConfigError: with all problems together, those of the form and the violated rules.
    """
    world_size = dry_run.world_size if dry_run else world_size
    config, notes = settled(config)
    if dry_run is not None:
        config, assumed = with_vocabulary(config)
        notes += assumed
    whole = without_gaps(config) if dry_run else config
    ruled = violations(whole, world_size, found.explicit, found.fixed)
    told = judged(found, lambda field, value: is_harmless(whole, world_size, field, value)) if found.guesses else found.problems
    problems = told + [broken for broken in ruled if not found.doubtful.intersection(broken.flags)]
    if dry_run is None:
        problems += missing_packages(config)
    if problems:
        raise ConfigError(problems)
    notes += [*effect_notes(config, world_size), *(plan_notes(config) if dry_run else ()), *missing_note()]
    return LoadedConfig(config, (*found.notes, *notes), dry_run)


def load_or_exit(argv: Sequence[str]) -> LoadedConfig:
    """`load` for a program's main, in its launcher's world: problems are printed by rank 0, and every rank exits with code 2."""
    adopt_launcher(argv)
    try:
        return load(argv, launched().world_size)
    except ConfigError as error:
        if is_first_rank():
            sys.stderr.write(f"{PROGRAM}: {error}\n")
        sys.exit(2)


def _read(argv: Sequence[str]) -> tuple[Config, dict[str, list[str]], Sorted]:
    """The settings of a command line, its requests, and what was found with its problems."""
    stray, given = split(argv)
    if any(item.name in ("help", "h") for item in given):
        help_text = named("megatron_lab.pages.flag_help:help_text")

        _write_and_exit(help_text(PROGRAM))
    own, requests, problems = take(given)
    if "version" in requests:
        from megatron.config.version import version_line  # it reads a file

        _write_and_exit(f"{version_line()}\n")
    if LIST in requests.get("model", ()):
        _write_and_exit(table())
    if any(item.name == "explain" for item in given):
        _explain_and_exit(requests.get("explain", ()), own, problems)
    config, found = _assembled(stray, own, requests, problems)
    if "print-config" in requests and not found.problems:
        _write_and_exit(to_yaml(config))
    return config, requests, found


def _assembled(
    stray: Sequence[str], own: Sequence[Given], requests: Mapping[str, Sequence[str]], problems: Sequence[Violation]
) -> tuple[Config, Sorted]:
    """The settings of files and the user's own, once the user's modules are imported; and what was found with its problems."""
    from_files, unread = _read_files(requests.get("model", ()), requests.get("config", ()))
    given, unread_groups = _with_group_files([*from_files, *own])
    unread += unread_groups
    modules = [item.values for item in given if item.name == "imports"]
    missing = list(import_modules(modules[-1] if modules else ()))
    found = sort_given(stray, given)
    if missing:  # what they would have registered is no problem of its own
        opened = {f"--{flag.name}" for flag in flags().values() if flag.facts.opens}
        found.problems = [problem for problem in found.problems if not opened.intersection(problem.flags)]
        unread += missing
    if unread:
        found.doubt_all()
    config = found.config()
    contradictions: list[Violation] = []
    if config.checkpoint.use_checkpoint_args and (config.checkpoint.load or config.checkpoint.pretrained_checkpoint):
        set_by_checkpoint = named("megatron_lab.migration.checkpoint_args:set_by_checkpoint")  # its module imports numpy
        take_from_checkpoint = named("megatron_lab.migration.checkpoint_args:take_from_checkpoint")

        found.fixed.update(set_by_checkpoint())
        config, contradictions = take_from_checkpoint(config, found.explicit)
        found.doubtful.update(flag for item in contradictions for flag in item.flags)  # the model's shape is not known
    found.problems[:0] = [*problems, *unread, *contradictions]
    return config, found


def _explain_and_exit(names: Sequence[str], given: Sequence[Given], problems: Sequence[Violation]) -> NoReturn:
    """Answer every --explain, whatever is missing or wrong for a run. An unknown flag is reported too."""
    explain = named("megatron_lab.pages.flag_help:explain")  # this reads the settings' source, for which only this page has time

    problems = [problem for problem in problems if "--explain" in problem.flags]
    known = {**of_megatron().KNOWN, **of_megatron().TAKEN}
    problems += sort_given((), [item for item in given if flag_of(item.name) is None and item.name not in known]).problems
    if problems:
        raise ConfigError(problems)
    _write_and_exit("\n".join(map(explain, names)))


def _read_files(models: Sequence[str], paths: Sequence[str]) -> tuple[list[Given], list[Violation]]:
    """The settings of the model that ``--model`` names (the last one) and of ``--config`` files, which go before the user's own, so
    that the user's count; and problems of the files."""
    found: list[Given] = []
    problems: list[Violation] = []
    for kind, name in [*(("model", name) for name in models[-1:]), *(("config", path) for path in paths)]:
        try:
            optional("yaml", f"--{kind} needs PyYAML")
            from megatron.config.yaml_file import read_yaml

            found.extend(read_yaml(file_of(name) if kind == "model" else name))
        except ConfigError as error:
            problems.extend(error.violations)
    return found, problems


def _with_group_files(given: Sequence[Given]) -> tuple[list[Given], list[Violation]]:
    """The settings with the entries of --param-groups files in place of their names, and problems of the files."""
    found: list[Given] = []
    problems: list[Violation] = []
    for item in given:
        if item.name == "param-groups" and len(item.values) == 1 and "=" not in item.values[0]:
            try:
                optional("yaml", "a file of --param-groups needs PyYAML")
                from megatron.config.yaml_file import read_groups

                item = replace(item, values=read_groups(item.values[0]))
            except ConfigError as error:
                problems.extend(error.violations)
                continue
        found.append(item)
    return found, problems


def _write_and_exit(text: str) -> NoReturn:
    if is_first_rank():
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:  # `--help | head`: nobody reads on, and Python must not try to flush at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)
