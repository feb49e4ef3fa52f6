"""Parser of command lines: it splits a command line into flags with their values and classifies them as settings, requests to the
program, flags without effect, and problems.

A request (``--config``, ``--explain``, ``--dry-run``) changes no setting: it names a file to read, or a page or plan to print.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.config.checks.single_settings import MAX_WORLD_SIZE
from megatron.config.config import Config
from megatron.config.data import is_number, list_path_settings
from megatron.config.errors import Violation
from megatron.config.flags import Flag, build_config, find_flag, get_flags, suggest_names
from megatron.config.launcher import read_process_info
from megatron.config.resolve import format_no_effect_note

_FLAG = re.compile(r"--[A-Za-z]|-[A-Za-z]")


@dataclass(frozen=True)
class GivenFlag:
    """Flag with its values, as it occurs on the command line or in a file."""

    name: str
    """Name without leading dashes, with dashes instead of underscores: ``lr-decay-style``."""
    values: tuple[str, ...]
    spelling: str
    """The flag as the user typed it."""
    source: str = ""
    """File and line in which the flag is given, such as ``run.yaml line 3``; empty for the command line."""

    @property
    def message_prefix(self) -> str:
        """Start of a message about the flag, which says where it is given: ``run.yaml line 3: ``. Empty for the command line."""
        return f"{self.source}: " if self.source else ""

    def __str__(self) -> str:
        """Format the flag for a message, such as ``run.yaml line 3: --lr abc``."""
        return self.message_prefix + " ".join((self.spelling, *(value or repr(value) for value in self.values)))


def split_argv(argv: Sequence[str]) -> tuple[list[str], list[GivenFlag]]:
    """Split a command line into flags. ``--flag=value``, underscores for dashes and negative numbers are supported.

    Returns:
        The arguments before the first flag, which belong to no flag, and the flags in order.
    """
    stray: list[str] = []
    given_flags: list[GivenFlag] = []
    for word in _strip_quotes(argv):
        if _FLAG.match(word) and not is_number(word):
            spelling, equals, value = word.partition("=")
            values = (value,) if equals else ()
            name = spelling.lstrip("-").replace("_", "-")
            if not spelling.startswith("--") and name != "h":
                name = f"-{name}"  # a single dash is kept, so that the message shows it
            given_flags.append(GivenFlag(name, values, spelling))
        elif given_flags:
            given_flags[-1] = replace(given_flags[-1], values=(*given_flags[-1].values, word))
        else:
            stray.append(word)
    return stray, given_flags


def _strip_quotes(argv: Sequence[str]) -> Iterator[str]:
    """Yield the command-line arguments. If quotes enclose a value, as in '99,1,0', they are removed. Such quotes remain when a
    shell expands an array entry that contains them."""
    for word in argv:
        spelling, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            word = f"{spelling}{equals}{value[1:-1]}"
        yield word


TRANSLATED_SETTINGS = ("eval-iters", "optimizer")
"""Settings of which some values of Megatron-LM are translated to other flags."""
NO_POSITION_EMBEDDING = "no-position-embedding"
"""Flag of Megatron-LM that it accepts only with rotary positions, where the flag has no effect."""
SEARCH_ADVICE = "--help WORD searches the flags."
"""Advice for an unknown flag without a similar one."""
_MAX_SUGGESTED = 20  # unknown flags to search suggestions for, which takes milliseconds each


@dataclass
class ParsedFlags:
    """Result of parsing the flags of a command line and of files: valid settings, notes and problems."""

    settings: list[tuple[Flag, GivenFlag, Any]] = field(default_factory=list)
    """Valid settings in order, with their parsed values. If a flag occurs more than once, the last value counts."""
    notes: list[str] = field(default_factory=list)
    """Lines for the start-up log: flags without effect, and flags that are given twice."""
    problems: list[Violation] = field(default_factory=list)
    """Violations to report to the user: unknown and refused flags, and invalid values."""
    uncertain: set[str] = field(default_factory=set)
    """Flags, such as ``--lr``, whose values are unknown because of a problem. Violated rules about these flags are not
    reported, because their messages would mislead."""

    ambiguous: list[tuple[Violation, Sequence[str], list[str]]] = field(default_factory=list)
    """Unknown flags for which several settings may be meant: the problem, the values of the flag, and the names of these
    settings."""
    fixed_fields: set[str] = field(default_factory=set)
    """Names of the settings whose values come from a checkpoint, so that messages may not suggest other values for them."""

    @property
    def explicit_fields(self) -> set[str]:
        """Names of the settings that the user has set to a value other than None."""
        return {flag.field for flag, _, value in self.settings if value is not None}

    def build_config(self) -> Config:
        """Build a `Config` from the valid settings. Settings that are not given have their defaults."""
        values: dict[str, dict[str, Any]] = {}
        for flag, _, value in self.settings:
            values.setdefault(flag.topic, {})[flag.field] = value
        return build_config(values)

    def mark_all_uncertain(self) -> None:
        """Mark the values of all flags as unknown, so that violated rules are not reported."""
        self.uncertain.update(f"--{name}" for name in get_flags())


def parse_flags(
    stray: Sequence[str], given_flags: Sequence[GivenFlag], find_flag_of_name: Callable[[str], str | None] = lambda word: None
) -> ParsedFlags:
    """Parse the values of flags, and sort the flags into settings, flags without effect, and problems.

    Args:
        stray: arguments that belong to no flag.
        given_flags: flags in the order in which they apply.
        find_flag_of_name: returns the flag that an argument without a flag may belong to, with the argument as its value, such as
            --model llama3-8b; None for any other argument.
    """
    parsed = ParsedFlags()
    for word in stray:
        flag_with_name = find_flag_of_name(word)
        if flag_with_name is not None:
            parsed.mark_all_uncertain()  # the model or recipe would set them
        advice = "Every setting starts with a flag; see --help." if flag_with_name is None else f"Use {flag_with_name}."
        parsed.problems.append(Violation((), f"{word} belongs to no flag.", advice))
    unknown = []
    names_by_reason: dict[str, list[str]] = {}
    refused_by_reason: dict[str, list[GivenFlag]] = {}
    no_position_embedding = None
    for item in _translate(given_flags, parsed.notes):
        flag = find_flag(item.name)
        compat_flag = None if flag is not None else get_compat().COMPAT_FLAGS.get(item.name) or _match_flag_pattern(item.name)
        if flag is not None:
            try:
                parsed.settings.append((flag, item, flag.parse(item.name, item.values)))
            except ValueError as error:
                parsed.uncertain.add(f"--{flag.name}")
                parsed.problems.append(
                    _build_value_violation(item, flag.name, str(error).removeprefix(f"--{flag.name} "), flag.choices)
                )
        elif item.name == NO_POSITION_EMBEDDING and not item.values:
            no_position_embedding = item
        elif compat_flag is not None and compat_flag.is_accepted:
            if problem := compat_flag.find_problem(item.values):
                synonym_advice = _find_synonym_advice(item.name)
                parsed.problems.append(
                    _build_value_violation(item, item.name, problem)
                    if synonym_advice is None
                    else Violation((f"--{item.name}",), f"{item} is refused.", synonym_advice)
                )
            else:
                names_by_reason.setdefault(compat_flag.reason, []).append(str(item))
        elif compat_flag is not None:
            refused_by_reason.setdefault(compat_flag.reason, []).append(item)
        else:
            unknown.append(item)
    if no_position_embedding is not None:
        _handle_no_position_embedding(no_position_embedding, parsed, names_by_reason, refused_by_reason)
    parsed.notes += [format_no_effect_note(list(dict.fromkeys(names)), reason) for reason, names in names_by_reason.items()]
    for reason, items in refused_by_reason.items():
        names = [str(item) for item in items]
        message = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} refused."
        parsed.problems.append(Violation(tuple(f"--{item.name}" for item in items), message, reason))
    _report_unknown(unknown, parsed)
    _note_overridden(parsed)
    return parsed


def _translate(given_flags: Sequence[GivenFlag], notes: list[str]) -> Iterator[GivenFlag]:
    """Yield the flags, with those of Megatron-LM replaced by the settings of this project that they correspond to. A note about
    each replacement is appended to `notes`."""
    for item in given_flags:
        is_setting = find_flag(item.name) is not None and item.name not in TRANSLATED_SETTINGS
        translation = None if is_setting else get_compat().TRANSLATIONS.get(item.name)
        if translation is None or not translation.applies_to(item.values):
            yield item
            continue
        translated = translation.template.format(*item.values)
        notes.append(f"{item} is taken as {translated}.")
        for translated_item in split_argv(translated.split())[1]:
            yield replace(translated_item, source=item.source)


def get_compat() -> Any:
    """Return the module with the tables of Megatron-LM's flags that are not settings of this project. It is imported only when a
    flag is not a setting."""
    return importlib.import_module("megatron_lab.migration.compat")


def _match_flag_pattern(name: str) -> Any:
    """Return the table entry of the family of Megatron-LM flags whose pattern matches a name. The entry says whether these flags
    are ignored or refused. None if no pattern matches, or if the name is more likely a misspelled setting."""
    compat_flag = get_compat().match_flag_pattern(name)
    if compat_flag is None or difflib.get_close_matches(name, get_flags(), n=1, cutoff=0.85) or _find_synonym_advice(name):
        return None
    return compat_flag


def _find_synonym_advice(name: str) -> str | None:
    """Return advice if a name without leading dashes is that of a flag in another framework, such as `learning-rate`."""
    advice: str | None = importlib.import_module("megatron_lab.migration.flag_synonyms").find_advice(name)
    return advice


def _handle_no_position_embedding(
    item: GivenFlag, parsed: ParsedFlags, names_by_reason: dict[str, list[str]], refused_by_reason: dict[str, list[GivenFlag]]
) -> None:
    """Add --no-position-embedding to the refused flags if the model has a learned position table, otherwise to the flags without
    effect.

    Args:
        item: the flag.
        parsed: settings so far.
        names_by_reason: flags without effect, by the reason for the user.
        refused_by_reason: refused flags, by the reason for the user.
    """
    config = parsed.build_config()
    if config.model.position_embedding_type == "learned_absolute" and not config.checkpoint.use_checkpoint_args:
        refused_by_reason.setdefault("Use --position-embedding-type none, or rope.", []).append(item)
    else:
        names_by_reason.setdefault(get_compat().COMPAT_FLAGS[NO_POSITION_EMBEDDING].reason, []).append(str(item))


def _build_value_violation(item: GivenFlag, name: str, problem: str, choices: Sequence[str] = ()) -> Violation:
    """Build the problem to report for a flag with invalid values.

    Args:
        item: flag with its values, as the user wrote them.
        name: name of the setting.
        problem: what is wrong, as the end of a sentence about the flag: "takes a number".
        choices: allowed values, of which the most similar one is suggested.
    """
    reasons = get_compat().UNSUPPORTED_CHOICES
    value = next((value for value in item.values if (name, value) in reasons), item.values[0] if len(item.values) == 1 else "")
    if reason := reasons.get((name, value)):
        return Violation((f"--{name}",), f"{item}: {value} {reason}.")
    nearest = tuple(f"--{name} {choice}" for choice in difflib.get_close_matches(value, choices, n=1))
    return Violation((f"--{name}",), f"{item}: --{name} {problem}.", nearest=nearest)


def _report_unknown(unknown: Sequence[GivenFlag], parsed: ParsedFlags) -> None:
    """Report unknown flags as problems, with suggestions for the first ones. If there are very many, only their number is reported:
    the user has probably made another mistake."""
    for item in unknown[:_MAX_SUGGESTED]:
        name = item.name.lstrip("-")
        if (advice := _find_synonym_advice(name)) is not None:
            parsed.uncertain.update(re.findall(r"--[a-z0-9-]+", advice))
            parsed.problems.append(Violation((f"--{item.name}",), f"{item.message_prefix}{item.spelling} is not a flag.", advice))
            continue
        negated_names = [f"no-{flag.name}" for flag in get_flags().values() if flag.default is True]
        names = suggest_names(name, [*get_flags(), *negated_names])
        names = [candidate for candidate in names if _try_parse(candidate, item.values) is not None] or names[:1]
        advice = _format_suggestion(names) if names else SEARCH_ADVICE
        if not names and (compat_names := suggest_names(name, [*get_compat().COMPAT_FLAGS, *get_compat().TRANSLATIONS])):
            compat_flag = get_compat().COMPAT_FLAGS.get(compat_names[0])
            advice = (
                compat_flag.reason
                if compat_flag is not None and not compat_flag.is_accepted
                else _format_suggestion(compat_names[:1])
            )
        parsed.uncertain.update(f"--{name}" for name in names)
        problem = Violation((f"--{item.name}",), f"{item.message_prefix}{item.spelling} is not a flag.", advice)
        parsed.problems.append(problem)
        if len(names) > 1:
            parsed.ambiguous.append((problem, item.values, names))
    if remaining := unknown[_MAX_SUGGESTED:]:
        message = (
            f"{remaining[0].message_prefix}{remaining[0].spelling} is not a flag, and {len(remaining) - 1:,} more are unknown."
        )
        parsed.problems.append(Violation((f"--{remaining[0].name}",), message, SEARCH_ADVICE))
        parsed.mark_all_uncertain()  # the user may have meant any flag


def refine_suggestions(parsed: ParsedFlags, is_accepted: Callable[[str, Any], bool]) -> list[Violation]:
    """Return all problems of parsing. If an unknown flag may mean several settings, only those that accept its values are
    suggested.

    Args:
        is_accepted: takes a field and a value; returns whether the field can have the value, given all other settings.
    """
    refined: dict[int, Violation] = {}
    for problem, values, names in parsed.ambiguous:
        accepted_names = [
            candidate
            for candidate in names
            if (field_and_value := _try_parse(candidate, values)) is not None and is_accepted(*field_and_value)
        ]
        if accepted_names:
            refined[id(problem)] = replace(problem, reason=_format_suggestion(accepted_names))
    return [refined.get(id(problem), problem) for problem in parsed.problems]


def _format_suggestion(names: Sequence[str]) -> str:
    return f"Perhaps you meant {' or '.join(f'--{name}' for name in names)}."


def _try_parse(name: str, values: Sequence[str]) -> tuple[str, Any] | None:
    """Return the field that a flag sets, and its value parsed from the user's words; None if the words are invalid."""
    flag = find_flag(name)
    assert flag is not None
    try:
        return flag.field, flag.parse(name, values)
    except ValueError:
        return None


def _note_overridden(parsed: ParsedFlags) -> None:
    """Add a note for each setting that the command line gives more than once with different values."""
    last: dict[str, GivenFlag] = {}
    for flag, item, _ in parsed.settings:
        previous = last.get(flag.name)
        if previous is not None and not previous.source and (previous.name, previous.values) != (item.name, item.values):
            parsed.notes.append(f"{previous} is overridden by {item}, which comes later.")
        last[flag.name] = item


def is_count(text: str, max_value: int) -> bool:
    """Return whether a text is an integer from 1 to `max_value`. (`max_value` must be below 10^12, because only 12 digits are
    read.)"""
    return text.isascii() and text.isdigit() and 1 <= int(text[:12]) <= max_value


def is_factor(text: str) -> bool:
    """Return whether a text is a finite number of at least 1."""
    return is_number(text) and 1.0 <= float(text) < float("inf")


GPUS_PER_NODE = 8


@dataclass(frozen=True)
class DryRun:
    """Options of --dry-run, which plans the run and prints the plan instead of executing it."""

    world_size: int
    gpus_per_node: int
    json_file: str | None
    expert_imbalance: float | None = None
    """Assumed load of the busiest rank: number of token assignments to its experts, as a multiple of the mean over the ranks. None
    without --plan-expert-imbalance."""
    html_file: str | None = None


def get_current_job() -> DryRun:
    """Return the options for a plan of the job that is running: its number of ranks, and of ranks per node."""
    job = read_process_info()
    return DryRun(job.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", job.world_size)), None)


def fill_plan_defaults(config: Config) -> Config:
    """Fill in settings that a run requires but that have no effect on a plan, such as the number of steps and the data."""
    training, optimizer, data = config.training, config.optimizer, config.data
    if training.train_iters is training.train_samples is training.train_epochs is None:
        training = replace(training, train_iters=1)
    if not list_path_settings(data):
        data = replace(data, data_path=() if data.mock_data else ("dataset",))
    if data.tokenizer_type is None and data.vocab_size is not None:
        data = replace(data, tokenizer_type="NullTokenizer")
    if optimizer.lr is None:
        optimizer = replace(optimizer, lr=1.0)
    logging = config.logging
    if logging.plan_cluster is not None and logging.plan_report is None:
        logging = replace(logging, plan_report="none")  # the plan itself reports step times for the cluster
    return replace(config, training=training, optimizer=optimizer, data=data, logging=logging)


LIST_NAME = "list"
"""Value of --model and --recipe that prints the table of all models or recipes."""
_LISTING_REQUESTS = ("model", "recipe")
NO_VALUE, COUNT, FACTOR = "no value", f"a whole number from 1 to {MAX_WORLD_SIZE:,}", "a number of at least 1"
REQUESTS = {
    "model": (
        "one name",
        "Model whose settings to use, such as llama3-8b. Flags and --config files override its settings. list prints all models "
        "with their sizes, list WORD those whose names contain the word, with their shapes and sources.",
    ),
    "recipe": (
        "one name",
        "Published training settings to use, such as llama2-7b: batch size, schedule, optimizer, precision. Chooses the model too, "
        "unless --model is given. Flags and --config files override its settings. list prints all recipes with their sources.",
    ),
    "config": (
        "one file",
        "YAML or TOML file of settings: flag names, flat or under the topics of --help. Flags override the file. May be repeated.",
    ),
    "print-config": (NO_VALUE, "Print the resolved settings as YAML, which --config reads back, and exit."),
    "version": (NO_VALUE, "Print the version and exit."),
    "explain": (
        "the name of one flag",
        "Explain a flag, with its unit, its default and its interactions, and exit. May be repeated.",
    ),
    "dry-run": (
        NO_VALUE,
        "Plan the job without running it: layers, memory, bytes sent, idle time and FLOPs of each kind of rank. Needs no GPU, "
        "no launcher and no data.",
    ),
    "plan": (
        NO_VALUE,
        "Search for the fastest layouts of the job instead of running it, as tools/plan.py does, whose flags are valid too "
        "(--tokens, --why, --fix, --json, --write-script and others).",
    ),
    "world-size": (COUNT, "Number of ranks of the job that --dry-run plans; by default the launcher's world size."),
    "gpus-per-node": (COUNT, f"Number of ranks per node, for --dry-run; by default {GPUS_PER_NODE}."),
    "dry-run-json": ("one file", "File for the result of --dry-run, as JSON."),
    "dry-run-html": (
        "one file",
        "File for the result of --dry-run, as a web page with memory bars and the grid of the ranks, which needs no network.",
    ),
    "plan-expert-imbalance": (
        FACTOR,
        "Assignments to the experts of the busiest rank, as a multiple of the mean over the ranks, for --dry-run, which then also "
        "reports the memory of this rank; by default as many as --moe-expert-capacity-factor allows.",
    ),
}
"""Accepted values and help text of each request."""
LAUNCHER_FLAGS = {
    "nproc": (
        "a number of ranks, or auto, gpu or cpu",
        "Start this many ranks on this machine, each on a device: gpu starts one for each CUDA device, cpu one for each CPU core, "
        "auto as many as gpu, or a single rank without CUDA devices. (Several machines need a launcher on each, such as torchrun.)",
    ),
    "log-dir": (
        "one folder",
        "Folder for the log files of the ranks that --nproc starts; by default logs/TIME in the folder of --save or "
        "--tensorboard-dir, or a temporary folder without both.",
    ),
}
"""Accepted values and help text of the flags that start the ranks of one machine. Programs remove them before they parse the other
flags."""


def find_launcher_flags(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line that are flags of `LAUNCHER_FLAGS`, such as "--nproc" or "--nproc=8"."""
    return [word for word in argv if word.startswith("--") and word[2:].partition("=")[0].replace("_", "-") in LAUNCHER_FLAGS]


_VALUE_CHECKS: Mapping[str, Callable[[str], bool]] = {COUNT: lambda text: is_count(text, MAX_WORLD_SIZE), FACTOR: is_factor}
"""Functions that check the value of a request. Any non-empty value is valid as the name of a file or model."""
_DRY_RUN_OPTIONS = ("world-size", "gpus-per-node", "dry-run-json", "dry-run-html", "plan-expert-imbalance")


def split_requests(given_flags: Sequence[GivenFlag]) -> tuple[list[GivenFlag], dict[str, list[str]], list[Violation]]:
    """Separate the settings from the requests: flags that are not settings, such as --explain and --dry-run.

    Returns:
        the settings, the values of the requests by flag name, and the problems of the requests.
    """
    settings: list[GivenFlag] = []
    requests: dict[str, list[str]] = {}
    problems: list[Violation] = []
    for item in _join_explained_flags(given_flags):
        if item.name not in REQUESTS:
            settings.append(item)
            continue
        value_format, _ = REQUESTS[item.name]
        has_single_value = len(item.values) == 1
        is_list = item.name in _LISTING_REQUESTS and [word.lower() for word in item.values[:1]] == [LIST_NAME]
        is_valid = is_list or (
            not item.values
            if value_format == NO_VALUE
            else has_single_value and _VALUE_CHECKS.get(value_format, bool)(item.values[0])
        )
        if is_valid:
            requests.setdefault(item.name, []).extend((LIST_NAME, *item.values[1:]) if is_list else item.values)
        else:
            problems.append(Violation((f"--{item.name}",), f"{item}: --{item.name} takes {value_format}."))
    names = {item.name for item in given_flags}
    for name in _DRY_RUN_OPTIONS:
        if name in names and "dry-run" not in names:
            reason = "The number of ranks of a run comes from its launcher." if name == "world-size" else ""
            problems.append(Violation((f"--{name}",), f"--{name} is for --dry-run only, which is not given.", reason))
    return settings, requests, problems


def _join_explained_flags(given_flags: Sequence[GivenFlag]) -> list[GivenFlag]:
    """Join ``--explain --lr``, which was split into two flags, into the flag --explain with the value ``lr``."""
    joined_flags: list[GivenFlag] = []
    for item in given_flags:
        if joined_flags and joined_flags[-1].name == "explain" and not joined_flags[-1].values:
            joined_flags[-1] = replace(joined_flags[-1], values=(item.name,))
        else:
            joined_flags.append(item)
    return joined_flags


def build_dry_run(requests: Mapping[str, Sequence[str]], world_size: int) -> DryRun | None:
    """Return the requested dry run, or None if there is no --dry-run.

    Args:
        world_size: number of ranks if --world-size is not given.
    """
    if "dry-run" not in requests:
        return None
    last = {name: values[-1] for name, values in requests.items() if values}
    num_ranks, per_node = last.get("world-size", world_size), last.get("gpus-per-node", GPUS_PER_NODE)
    factor = last.get("plan-expert-imbalance")
    imbalance = None if factor is None else float(factor)
    return DryRun(int(num_ranks), int(per_node), last.get("dry-run-json"), imbalance, last.get("dry-run-html"))
