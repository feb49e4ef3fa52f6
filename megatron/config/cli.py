"""The command line: flags in Megatron-LM's spelling, generated from the settings dataclasses, with YAML or TOML files whose
settings the flags override.

This package parses the flags itself, with the table in `flags`; the library tyro only formats the help. Parsing continues after a
problem. So all problems are reported together, each with its location: invalid values, refused flags and violated rules.

Programs call ``load``, which reports all problems of the settings in one error, or ``load_or_exit``, which prints them and exits.
No module of this package imports torch, so that ``--help`` and errors in settings are answered immediately.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from megatron.config.checks.single_settings import list_idle_settings, list_plan_caveats
from megatron.config.config import Config
from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import find_flag, get_flags
from megatron.config.imports import import_modules, import_object
from megatron.config.launcher import PROGRAM, adopt_launcher, end_with_message, is_first_rank, read_process_info
from megatron.config.optional_packages import find_missing_packages, import_optional, note_missing_packages
from megatron.config.parsed_flags import (
    LIST_NAME,
    DryRun,
    GivenFlag,
    ParsedFlags,
    build_dry_run,
    fill_plan_defaults,
    get_compat,
    parse_flags,
    refine_suggestions,
    split_argv,
    split_requests,
)
from megatron.config.resolve import resolve_settings
from megatron.config.rules import find_violations, is_harmless
from megatron.config.save import to_yaml


@dataclass(frozen=True)
class LoadedConfig:
    """Settings that have been checked, with notes about them for the start-up log."""

    config: Config
    notes: tuple[str, ...]
    """Lines for the start-up log: flags that have no effect, settings that were derived or overridden, and missing packages."""
    dry_run: DryRun | None = None
    """Options of --dry-run, which plans the run instead of executing it; None for a normal run."""


def parse(argv: Sequence[str]) -> Config:
    """Parse a command line into settings, without checking the rules that `load` checks.

    Raises:
        ConfigError: unknown or refused flags, invalid values, an invalid ``--config`` file, or a checkpoint in which
            ``--use-checkpoint-args`` finds no settings.
        SystemExit: 0 after ``--help``, ``--version``, ``--model list``, ``--recipe list``, ``--explain`` or ``--print-config``.
    """
    config, _, parsed = _read_command_line(argv)
    if parsed.problems:
        raise ConfigError(parsed.problems)
    return config


def load(argv: Sequence[str], world_size: int) -> LoadedConfig:
    """Parse a command line into settings and check them with all rules, for a given number of ranks.

    Args:
        argv: the arguments after the program's name.
        world_size: number of ranks. For a dry run, --world-size overrides it.

    Raises:
        ConfigError: with all problems together: those of `parse` and the violated rules. Without any arguments, the error says how
            to start.
        SystemExit: 0 after ``--help``, ``--version``, ``--model list``, ``--recipe list``, ``--explain`` or ``--print-config``.
    """
    if not argv:
        raise ConfigError([Violation((), "no settings are given. Start with one of these commands:", table=_FIRST_STEPS)])
    config, requests, parsed = _read_command_line(argv)
    return _validate(config, parsed, world_size, build_dry_run(requests, world_size))


_FIRST_STEPS = tuple(
    f"{command:<38}{text}"
    for command, text in (
        ("bash examples/quickstart.sh", "train a small model on text"),
        (f"python {PROGRAM} --model {LIST_NAME}", "models by name, for --model NAME"),
        (f"python {PROGRAM} --recipe {LIST_NAME}", "published training settings"),
        (f"python {PROGRAM} --help", "main flags, and how to find others"),
    )
)
"""Commands to show to a user who has given no arguments."""


def load_values(values: Mapping[str, Any], world_size: int, *overrides: Mapping[str, Any]) -> LoadedConfig:
    """Build and check settings from a mapping instead of a command line, with the same names, defaults and rules.

    Args:
        values: values by flag or field name, either flat, ``{"num-layers": 12}``, or by topic, ``{"model": {"num_layers": 12}}``.
            The key `model` may name a model, `recipe` a recipe, and `config` YAML or TOML files, as --model, --recipe and --config
            do; all other values override the settings in these files.
        world_size: number of ranks.
        overrides: further mappings in the format of `values`; later ones override earlier ones.

    Raises:
        ConfigError: with all problems together.
    """
    own_settings: list[GivenFlag] = []
    requests: dict[str, list[str]] = {}
    problems: list[Violation] = []
    for source in (values, *overrides):
        files = {name: source[name] for name in _FILE_REQUESTS if name in source and not isinstance(source[name], Mapping)}
        requests |= {name: [str(path)] if isinstance(path, str | os.PathLike) else list(path) for name, path in files.items()}
        try:
            import_optional("yaml", "settings that are given as values need PyYAML")
            from megatron.config.yaml_file import read_mapping

            own_settings += read_mapping({name: value for name, value in source.items() if name not in files})
        except ConfigError as error:
            problems += error.violations
    config, parsed = _assemble((), own_settings, requests, problems)
    if problems:
        parsed.mark_all_uncertain()
    return _validate(config, parsed, world_size, None)


_FILE_REQUESTS = ("model", "recipe", "config")
"""Requests that read settings from files."""


def _validate(config: Config, parsed: ParsedFlags, world_size: int, dry_run: DryRun | None) -> LoadedConfig:
    """Derive missing settings, check all rules, and return the settings with lines for the start-up log.

    Args:
        parsed: parsed flags, with the problems of parsing. Violated rules about flags with such problems are not reported.
        world_size: number of ranks, unless `dry_run` has another one.

    Raises:
        ConfigError: with all problems together, those of parsing and the violated rules.
    """
    world_size = dry_run.world_size if dry_run else world_size
    config, notes = resolve_settings(config)
    if dry_run is not None:
        config, vocab_notes = import_object("megatron_lab.planner.vocabulary:assume_vocab_size")(config)
        notes += vocab_notes
    complete_config = fill_plan_defaults(config) if dry_run else config
    rule_violations = find_violations(complete_config, world_size, parsed.explicit_fields, parsed.fixed_fields)
    refined = (
        refine_suggestions(parsed, lambda field, value: is_harmless(complete_config, world_size, field, value))
        if parsed.ambiguous
        else parsed.problems
    )
    problems = refined + [violation for violation in rule_violations if not parsed.uncertain.intersection(violation.flags)]
    if dry_run is None:
        problems += find_missing_packages(config)
    if problems:
        raise ConfigError(problems)
    notes += list_idle_settings(config, world_size, parsed.fixed_fields - parsed.explicit_fields)
    notes += [*(list_plan_caveats(config) if dry_run else ()), *note_missing_packages()]
    return LoadedConfig(config, (*parsed.notes, *notes), dry_run)


def load_or_exit(argv: Sequence[str]) -> LoadedConfig:
    """Parse the command line of a program and check it for the launcher's world size. If there are problems, rank 0 prints them,
    and every rank exits with code 2."""
    adopt_launcher(argv)
    try:
        return load(argv, read_process_info().world_size)
    except ConfigError as error:
        end_with_message(str(error))
        sys.exit(2)


def _read_command_line(argv: Sequence[str]) -> tuple[Config, dict[str, list[str]], ParsedFlags]:
    """Read a command line and the files that it names, without checking rules.

    Returns:
        the settings, the values of the flags that are not settings (such as --dry-run) by flag name, and the parsed flags with
        their problems.

    Raises:
        SystemExit: 0 after flags that print a text, such as ``--help``.
    """
    stray, given_flags = split_argv(argv)
    if any(item.name in ("help", "h") for item in given_flags):
        format_help = import_object("megatron_lab.pages.help_pages:format_help")

        _write_and_exit(format_help(PROGRAM, _get_help_words(given_flags)))
    own_settings, requests, problems = split_requests(given_flags)
    if "version" in requests:
        from megatron.config.version import format_version  # it reads a file

        _write_and_exit(f"{format_version()}\n")
    for name in ("model", "recipe"):
        if requests.get(name, ())[:1] == [LIST_NAME]:
            import_optional("yaml", f"--{name} needs PyYAML")
            format_table = import_object("megatron_lab.pages.model_tables:format_table")

            _write_and_exit(format_table(name, " ".join(requests[name][1:])))
    if any(item.name == "explain" for item in given_flags):
        _explain_and_exit(requests.get("explain", ()), own_settings, problems)
    config, parsed = _assemble(stray, own_settings, requests, problems)
    if "print-config" in requests and not parsed.problems:
        _write_and_exit(to_yaml(config))
    return config, requests, parsed


def _get_help_words(given_flags: Sequence[GivenFlag]) -> tuple[str, ...]:
    """Return the words that follow --help: its values, or the flag in ``--help --lr``. There are none for a --help at another
    position, or before a flag with values."""
    if given_flags[0].name not in ("help", "h"):
        return next(item.values for item in given_flags if item.name in ("help", "h"))
    is_flag_next = len(given_flags) == 2 and not given_flags[0].values and not given_flags[1].values
    return (given_flags[1].spelling,) if is_flag_next else given_flags[0].values


def _find_flag_of_name(word: str) -> str | None:
    """Return --model or --recipe with a name if a word is the name of a model or recipe, else None."""
    from megatron.config.model_files import find_name

    names = ((flag, find_name(flag, word)) for flag in ("model", "recipe"))
    return next((f"--{flag} {name}" for flag, name in names if name is not None), None)


def _assemble(
    stray: Sequence[str], own_settings: Sequence[GivenFlag], requests: Mapping[str, Sequence[str]], problems: Sequence[Violation]
) -> tuple[Config, ParsedFlags]:
    """Combine the settings of files with those of the command line. Before that, import the user's modules (--imports), which may
    add choices to flags.

    Args:
        stray: arguments of the command line that belong to no flag.
        own_settings: settings of the command line, which take precedence over those of files.
        requests: values of the flags that are not settings (`REQUESTS`), by flag name. Of these, --model names a model, --recipe
            a recipe and --config files whose settings are read here.
        problems: problems of the command line that were detected before this call.

    Returns:
        the settings, and the parsed flags with all problems.
    """
    file_settings, file_notes, file_problems = _read_files(requests, own_settings)
    given_flags, group_problems = _expand_param_group_files([*file_settings, *own_settings])
    file_problems += group_problems
    modules = [item.values for item in given_flags if item.name == "imports"]
    import_problems = list(import_modules(modules[-1] if modules else ()))
    parsed = parse_flags(stray, given_flags, _find_flag_of_name)
    parsed.notes[:0] = file_notes
    if import_problems:  # choices that these modules would register are not reported as unknown
        extensible_flags = {f"--{flag.name}" for flag in get_flags().values() if flag.metadata.is_extensible}
        parsed.problems = [problem for problem in parsed.problems if not extensible_flags.intersection(problem.flags)]
        file_problems += import_problems
    if file_problems:
        parsed.mark_all_uncertain()
    config = parsed.build_config()
    contradictions: list[Violation] = []
    if config.checkpoint.use_checkpoint_args and (config.checkpoint.load or config.checkpoint.pretrained_checkpoint):
        # Import the module only here: it imports NumPy.
        get_checkpoint_fields = import_object("megatron_lab.migration.checkpoint_args:get_checkpoint_fields")
        apply_checkpoint_args = import_object("megatron_lab.migration.checkpoint_args:apply_checkpoint_args")

        parsed.fixed_fields.update(get_checkpoint_fields())
        config, contradictions = apply_checkpoint_args(config, parsed.explicit_fields)
        parsed.uncertain.update(flag for item in contradictions for flag in item.flags)  # the shape of the model is unknown
    parsed.problems[:0] = [*problems, *file_problems, *contradictions]
    return config, parsed


def _explain_and_exit(names: Sequence[str], given_flags: Sequence[GivenFlag], problems: Sequence[Violation]) -> NoReturn:
    """Print the explanation of each flag in `names` (the values of --explain) and exit.

    Raises:
        ConfigError: a value of --explain is invalid, or another flag of the command line is unknown. Missing and invalid settings
            are not reported.
    """
    explain = import_object("megatron_lab.pages.flag_help:explain")  # it parses the source of the settings, which takes time

    problems = [problem for problem in problems if "--explain" in problem.flags]
    compat_flags = {**get_compat().COMPAT_FLAGS, **get_compat().TRANSLATIONS}
    problems += parse_flags(
        (), [item for item in given_flags if find_flag(item.name) is None and item.name not in compat_flags]
    ).problems
    if problems:
        raise ConfigError(problems)
    _write_and_exit("\n".join(map(explain, names)))


def _read_files(
    requests: Mapping[str, Sequence[str]], own_settings: Sequence[GivenFlag]
) -> tuple[list[GivenFlag], list[str], list[Violation]]:
    """Read the model file that ``--model`` names (the last one), the recipe that ``--recipe`` names, and the ``--config`` files.

    The caller puts the settings of its command line after these, so that they override the files.

    Args:
        requests: values of the flags that are not settings, by flag name.
        own_settings: settings of the command line, which replace settings of a recipe.

    Returns:
        the settings of the files, each overridden by later ones: model, recipe, --config files. Then notes for the start-up log,
        and the problems of the files.
    """
    config_settings: list[GivenFlag] = []
    problems: list[Violation] = []
    for path in requests.get("config", ()):
        try:
            import_optional("yaml", "--config needs PyYAML")
            from megatron.config.yaml_file import read_yaml

            config_settings += read_yaml(path)
        except ConfigError as error:
            problems += error.violations
    models = list(requests.get("model", ()))
    settings: list[GivenFlag] = []
    notes: list[str] = []
    if not models and not requests.get("recipe"):
        return config_settings, notes, problems
    from megatron.config.model_files import read_model, read_recipe

    try:
        for name in requests.get("recipe", ())[-1:]:
            import_optional("yaml", "--recipe needs PyYAML")
            settings, recipe_model, notes = read_recipe(name, models, [*config_settings, *own_settings])
            models += [recipe_model] if recipe_model is not None else []
        for name in models[-1:]:
            import_optional("yaml", "--model needs PyYAML")
            model_settings, model_notes = read_model(name)
            settings, notes = [*model_settings, *settings], [*model_notes, *notes]
    except ConfigError as error:
        problems += error.violations
    return [*settings, *config_settings], notes, problems


def _expand_param_group_files(given_flags: Sequence[GivenFlag]) -> tuple[list[GivenFlag], list[Violation]]:
    """Replace each --param-groups flag that names a file by one with the entries of the file. Returns the flags and the problems of
    the files."""
    expanded: list[GivenFlag] = []
    problems: list[Violation] = []
    for item in given_flags:
        if item.name == "param-groups" and len(item.values) == 1 and "=" not in item.values[0]:
            try:
                import_optional("yaml", "a file of --param-groups needs PyYAML")
                from megatron.config.yaml_file import read_param_groups

                item = replace(item, values=read_param_groups(item.values[0]))
            except ConfigError as error:
                problems.extend(error.violations)
                continue
        expanded.append(item)
    return expanded, problems


def _write_and_exit(text: str) -> NoReturn:
    if is_first_rank():
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:  # `--help | head` closed the pipe: keep Python from flushing it at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)
