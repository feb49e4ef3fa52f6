"""The keys of a foreign configuration, each of which is taken once: what nobody takes is told."""

from __future__ import annotations

from typing import Any

from megatron.config.flags import flags
from megatron_lab.migration.line import Line


class Keys:
    """A section of a configuration.

    Args:
        found: its keys and values.
        line: where they go.
        name: how the section is called, for messages.
    """

    def __init__(self, found: dict[str, Any], line: Line, name: str = "") -> None:
        self._left, self._line, self.name = dict(found), line, name

    def section(self, key: str) -> Keys | None:
        """The section behind a key; None if there is none."""
        found = self._left.pop(key, None)
        return Keys(found, self._line, self.path(key)) if isinstance(found, dict) else None

    def sections(self, key: str) -> list[Keys]:
        """The sections of a list behind a key."""
        found = self._left.pop(key, None)
        listed = found if isinstance(found, list) else []
        return [Keys(each, self._line, f"{self.path(key)}[{n}]") for n, each in enumerate(listed) if isinstance(each, dict)]

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, which counts as carried over."""
        return self._left.pop(key, default)

    def number(self, key: str, default: float | None = None) -> float | None:
        """The value of a key that is a number; what else stands there is told."""
        value = self._left.pop(key, None)
        if value == "auto":
            self._line.missing.append(f"{self.path(key)}: it is auto, which another program fills in")
            return default
        if isinstance(value, str):  # YAML reads 3e-4 as a text
            try:
                value = float(value)
            except ValueError:
                self._line.lost.append((f"{self.path(key)} {value}", "It is no number."))
                return default
        if value is None or isinstance(value, bool) or not isinstance(value, int | float):
            return default
        return value

    def put(self, key: str, flag: str, *, whole: bool = False, when: bool = True) -> float | None:
        """Put the number of a key as a flag, if it is there; returns it.

        Args:
            whole: the flag takes a whole number.
            when: leave the key where this does not hold.
        """
        if not when:
            return None
        value = self.number(key)
        if value is None:
            return None
        before = self._line.number(flag)
        if before is not None and before != value:
            self._line.lost.append((f"{self.path(key)} {value:g}", f"--{flag} {before:g} is taken, which was given before."))
        elif before is None:
            self._line.put(flag, int(value) if whole else value, given=f"{self.path(key)} {value:.15g}")
        return value

    def default(self, flag: str, value: object, framework: str) -> None:
        """Put a flag that was not given, with the other framework's default, which differs from that here."""
        if flag not in self._line.words and flags()[flag].default != value:
            self._line.put(flag, value, given=f"(by default, {framework})", why="the default here is another")

    def pass_over(self, keys: str, why: str) -> None:
        """Leave out what changes nothing here."""
        for key in keys.split():
            if key in self._left:
                value = self._left.pop(key)
                if says_something(value):
                    self._line.left_out.append((f"{self.path(key)} {_short(value)}", why))

    def pass_over_rest(self) -> None:
        """Tell what is left: nobody knows it."""
        for key, value in self._left.items():
            if isinstance(value, dict) and value:
                Keys(value, self._line, self.path(key)).pass_over_rest()
            elif says_something(value):
                self._line.lost.append((f"{self.path(key)} {_short(value)}", "This tool does not know the key."))
        self._left = {}

    def ignore_rest(self) -> None:
        """The section is switched off, or has said all that matters."""
        self._left = {}

    def path(self, key: str) -> str:
        """The key with its sections, for messages."""
        return f"{self.name}.{key}" if self.name else key


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def says_something(value: object) -> bool:
    """Whether a value is more than nothing, or something switched off."""
    return value is not None and value is not False and value not in ([], {}, "")
