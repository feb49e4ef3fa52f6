"""Launch command of this project that is converted from the settings of another framework, with the report about the conversion."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.config.checks.finding import MODEL_PARALLEL_SIZES
from megatron.config.cli import load
from megatron.config.errors import ConfigError, Violation
from megatron.config.parsed_flags import split_argv

_MAX_WIDTH = 110
"""Width in characters at which the printed command continues on the next line."""
_NO_EFFECT_TEXT = "would have no effect"
"""Text in the message of the rule that every requested setting must have an effect."""


@dataclass
class LaunchCommand:
    """Launch command of this project, converted from another framework (the source), with messages about the conversion.

    The program is always ``pretrain_gpt.py``. The messages are shown to the user.
    """

    flags: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Values of each flag, by its name without the leading dashes, in the order of the command. A switch has no values."""
    launcher: tuple[str, ...] = ()
    """Program that starts the ranks, with its arguments, such as ``torchrun --nproc-per-node 8``."""
    world_size: int | None = None
    """Number of ranks of the job, or None if it is unknown."""
    changes: list[tuple[str, str]] = field(default_factory=list)
    """Settings that are spelled differently in this project: (setting in the source, flag of this project with the reason)."""
    omitted: list[tuple[str, str]] = field(default_factory=list)
    """Settings of the source that are left out, because they have no effect in this project: (setting, reason)."""
    unconverted: list[tuple[str, str]] = field(default_factory=list)
    """Settings of the source that could not be converted: (setting, reason)."""
    differences: list[tuple[str, str]] = field(default_factory=list)
    """Differences between runs of this project and of the source framework that no setting can remove: (property,
    explanation)."""
    missing: list[str] = field(default_factory=list)
    """Messages about values and decisions that the user has to add to the command."""
    variables: dict[str, str] = field(default_factory=dict)
    """Message about the meaning or value of each shell variable, by the variable's name. The report shows only variables that
    the command contains."""

    def set_flag(self, flag: str, *values: object, source: str = "", reason: str = "") -> None:
        """Set a flag of the command.

        Args:
            flag: name of the flag without the leading dashes.
            values: values of the flag; none for a switch.
            source: setting in the source framework, if the report is to list the change. Empty if the setting is not changed.
            reason: reason for the change, for the report.
        """
        self.flags[flag] = tuple(map(_format_value, values))
        if source:
            self.changes.append((source, f"{_format_flag(flag, self.flags[flag])}{f': {reason}' if reason else ''}"))

    def get_number(self, flag: str) -> float | None:
        """Return the value of a flag as a number, or None if the flag is missing or its value is not a single number."""
        values = self.flags.get(flag, ())
        try:
            return float(values[0]) if len(values) == 1 else None
        except ValueError:
            return None

    def build_argv(self) -> list[str]:
        """Return the arguments of ``pretrain_gpt.py``: each flag with its values."""
        return [word for flag, values in self.flags.items() for word in (f"--{flag}", *values)]

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that together hold one copy of the model: the product of the model-parallel sizes."""
        return math.prod(int(self.get_number(field.replace("_", "-")) or 1) for field in MODEL_PARALLEL_SIZES)

    def find_violations(self) -> list[Violation]:
        """Check the flags of the command as a run does at its start.

        Flags without an effect are not violations: they are moved from the command to `omitted`.

        Returns:
            Violations of rules between the flags, which the user has to resolve.
        """
        world_size = self.world_size or self.model_parallel_size
        while True:
            try:
                load(self.build_argv(), world_size)
            except ConfigError as error:
                ignored = [
                    violation
                    for violation in error.violations
                    if _NO_EFFECT_TEXT in violation.message and self._remove_idle_flag(violation)
                ]
                if ignored:
                    continue
                return list(error.violations)
            return []

    def _remove_idle_flag(self, violation: Violation) -> bool:
        """Move a flag without an effect from the command to `omitted`.

        Args:
            violation: violation that names the flag.

        Returns:
            False if the command does not contain the flag.
        """
        names = [name.removeprefix("--") for name in violation.flags]
        flag = next((candidate for name in names for candidate in (name, f"no-{name}") if candidate in self.flags), None)
        if flag is None:
            return False
        self.omitted.append(
            (_format_flag(flag, self.flags.pop(flag)), violation.message.partition(f"{_NO_EFFECT_TEXT}: ")[2] or violation.message)
        )
        return True

    def get_notes(self) -> tuple[str, ...]:
        """Return the notes about flags that a run with this command would log at its start. If the command has violations, there
        are no notes."""
        try:
            return load(self.build_argv(), self.world_size or self.model_parallel_size).notes
        except ConfigError:
            return ()

    def format(self) -> str:
        """Return the command as text for a shell. A long command is split into several lines, each ending with a backslash."""
        flag_texts = [_format_flag(flag, values) for flag, values in self.flags.items()]
        completed, current = [], " ".join([*(quote_word(word) for word in self.launcher), "pretrain_gpt.py"])
        for flag_text in flag_texts:
            if len(current) + len(flag_text) > _MAX_WIDTH:
                completed.append(current)
                current = "   "
            current += f" {flag_text}"
        return " \\\n".join([*completed, current])


def format_report(command: LaunchCommand, violations: Sequence[Violation]) -> str:
    """Return the command as text, followed by the messages about the conversion as comment lines.

    Args:
        violations: rules of this project that the command violates, as `LaunchCommand.find_violations` returns them.
    """
    sections = [command.format(), *_build_conversion_sections(command)]
    if run_notes := command.get_notes():
        sections.append("\n".join(["# Notes of the run:", *(f"#   {message}" for message in run_notes)]))
    if violations:
        error_lines = str(ConfigError(violations)).splitlines()
        sections.append(
            "\n".join(["# NOT READY: the command violates rules of this project.", *(f"#   {text}" for text in error_lines)])
        )
    return "\n\n".join(sections) + "\n"


def format_conversion(command: LaunchCommand) -> str:
    """Return the messages about the conversion as comment lines, without the command. The text is empty if nothing was changed."""
    return "".join(f"{section}\n\n" for section in _build_conversion_sections(command))


def _build_conversion_sections(command: LaunchCommand) -> list[str]:
    sections = []
    for title, pairs in (
        ("Changed", command.changes),
        ("Left out, without effect here", command.omitted),
        ("COULD NOT BE CARRIED OVER", command.unconverted),
        ("Different from the source at any settings", command.differences),
    ):
        if pairs:
            sections.append("\n".join([f"# {title}:", *_group_by_reason(pairs)]))
    argv_text = " ".join(word for values in command.flags.values() for word in values)
    missing = [f"{name}: {message}" for name, message in command.variables.items() if f"${name}" in argv_text] + command.missing
    if missing:
        sections.append("\n".join(["# To be given:", *(f"#   {message}" for message in missing)]))
    return sections


def _group_by_reason(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Format (setting, reason) pairs as comment lines. Each reason is written once, below all settings that have it."""
    by_reason: dict[str, list[str]] = {}
    for message, reason in pairs:
        by_reason.setdefault(reason, []).append(message)
    return [
        text for reason, messages in by_reason.items() for text in (*(f"#   {message}" for message in messages), f"#     {reason}")
    ]


def parse_argv(argv: Sequence[str]) -> list[tuple[str, tuple[str, ...], str]]:
    """Split the arguments of a command into flags.

    Returns:
        (name without the leading dashes, values, flag as it is written) for each flag.
    """
    return [(item.name, item.values, item.spelling) for item in split_argv(argv)[1]]


def add_flags(command: LaunchCommand, argv: Sequence[str]) -> None:
    """Add flags of the user to the command. They replace flags of the command that have the same name.

    Args:
        argv: flags of the user with their values, as on a command line.
    """
    for name, values, _ in parse_argv(argv):
        command.flags[name] = values


def _format_flag(flag: str, values: Sequence[str]) -> str:
    return " ".join([f"--{flag}", *map(quote_word, values)])


def quote_word(word: str) -> str:
    """Quote an argument for a shell. An argument with a variable gets double quotes, in which the shell expands the variable."""
    return f'"{word}"' if re.search(r"\$\w", word) and not set(word) & set('"`\\') else shlex.quote(word)


def _format_value(value: object) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)
