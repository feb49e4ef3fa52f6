"""The command line that becomes of foreign settings, and what is told about it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.config.checks.finding import RANKS
from megatron.config.cli import load
from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import flags
from megatron.config.given import split

_WIDTH = 110
_IDLE = "would have no effect"
"""How the rule says it that asks of each setting that it acts."""


@dataclass
class Line:
    """A command line that grows, and what was said on the way."""

    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Values by flag, in order; none for a switch."""
    launcher: tuple[str, ...] = ()
    """The launcher's words before the program."""
    world_size: int | None = None
    changed: list[tuple[str, str]] = field(default_factory=list)
    """What was given in other words, and the words here with the reason."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """What is not in the line and changes nothing, with the reason."""
    lost: list[tuple[str, str]] = field(default_factory=list)
    """What could not be carried over, with the reason."""
    differs: list[tuple[str, str]] = field(default_factory=list)
    """What is another thing here whatever the settings, with the reason."""
    missing: list[str] = field(default_factory=list)
    """What the user has to give."""
    variables: dict[str, str] = field(default_factory=dict)
    """Variables that the line may hold, with what to say of each that it does."""

    def put(self, flag: str, *values: object, given: str = "", why: str = "") -> None:
        """Set a flag.

        Args:
            given: how it was given, where that was in other words.
            why: the reason for the other words.
        """
        self.words[flag] = tuple(map(_text, values))
        if given:
            self.changed.append((given, f"{_shown(flag, self.words[flag])}{f': {why}' if why else ''}"))

    def take(self, flag: str) -> tuple[str, ...] | None:
        """Take a flag out of the line; its values, or None if it is not there."""
        return self.words.pop(flag, None)

    def number(self, flag: str) -> float | None:
        """The value of a flag, if it is there and a number."""
        values = self.words.get(flag, ())
        try:
            return float(values[0]) if len(values) == 1 else None
        except ValueError:
            return None

    def argv(self) -> list[str]:
        """The words behind the program's name."""
        return [word for flag, values in self.words.items() for word in (f"--{flag}", *values)]

    @property
    def model_ranks(self) -> int:
        """Ranks of one copy of the model."""
        return math.prod(int(self.number(field.replace("_", "-")) or 1) for field in RANKS)

    def settle(self) -> list[Violation]:
        """Check the line by this project's rules, leaving out what would have no effect. Returns what remains to be solved."""
        world_size = self.world_size or self.model_ranks
        while True:
            try:
                load(self.argv(), world_size)
            except ConfigError as error:
                idle = [broken for broken in error.violations if _IDLE in broken.message and self._drop(broken)]
                if idle:
                    continue
                return list(error.violations)
            return []

    def _drop(self, broken: Violation) -> bool:
        names = [one.removeprefix("--") for one in broken.flags]
        flag = next((name for one in names for name in (one, f"no-{one}") if name in self.words), None)
        if flag is None:
            return False
        self.left_out.append((_shown(flag, self.words.pop(flag)), broken.message.partition(f"{_IDLE}: ")[2] or broken.message))
        return True

    def notes(self) -> tuple[str, ...]:
        """What a run's log will say of settings that change nothing."""
        try:
            return load(self.argv(), self.world_size or self.model_ranks).notes
        except ConfigError:
            return ()

    def command(self) -> str:
        """The command, in lines that a shell joins."""
        pieces = [_shown(flag, values) for flag, values in self.words.items()]
        lines, line = [], " ".join([*(quoted(word) for word in self.launcher), "pretrain_gpt.py"])
        for piece in pieces:
            if len(line) + len(piece) > _WIDTH:
                lines.append(line)
                line = "   "
            line += f" {piece}"
        return " \\\n".join([*lines, line])


def report(line: Line, problems: Sequence[Violation]) -> str:
    """The command and everything that is told about it."""
    parts = [line.command()]
    for title, pairs in (
        ("Changed", line.changed),
        ("Left out, without effect here", line.left_out),
        ("COULD NOT BE CARRIED OVER", line.lost),
        ("Other than there, whatever the settings", line.differs),
    ):
        if pairs:
            parts.append("\n".join([f"# {title}:", *_grouped(pairs)]))
    used = " ".join(word for values in line.words.values() for word in values)
    missing = [f"{name}: {what}" for name, what in line.variables.items() if f"${name}" in used] + line.missing
    if missing:
        parts.append("\n".join(["# To be given:", *(f"#   {what}" for what in missing)]))
    if notes := line.notes():
        parts.append("\n".join(["# Notes of the run:", *(f"#   {note}" for note in notes)]))
    if problems:
        said = str(ConfigError(problems)).splitlines()
        parts.append(
            "\n".join(["# NOT READY: this project's rules refuse the line as it stands.", *(f"#   {text}" for text in said)])
        )
    return "\n\n".join(parts) + "\n"


def _grouped(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Lines of what was found, where those with the same reason stand together."""
    by_reason: dict[str, list[str]] = {}
    for what, why in pairs:
        by_reason.setdefault(why, []).append(what)
    return [line for why, whats in by_reason.items() for line in (*(f"#   {what}" for what in whats), f"#     {why}")]


def words_of(argv: Sequence[str]) -> list[tuple[str, tuple[str, ...], str]]:
    """(name, values, as it was spelled) of the flags of a command line."""
    return [(item.name, item.values, item.spelled) for item in split(argv)[1]]


def is_setting(name: str) -> bool:
    """Whether a flag is one of this project's settings."""
    return name in flags()


def with_own_flags(line: Line, argv: Sequence[str]) -> None:
    """Put the flags that the user adds, which count."""
    for name, values, _ in words_of(argv):
        line.words[name] = values


def _shown(flag: str, values: Sequence[str]) -> str:
    return " ".join([f"--{flag}", *map(quoted, values)])


def quoted(word: str) -> str:
    """A word as a shell takes it; a variable stays one."""
    return f'"{word}"' if re.search(r"\$\w", word) and not set(word) & set('"`\\') else shlex.quote(word)


def _text(value: object) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)
