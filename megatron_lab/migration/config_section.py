"""Sections of another framework's configuration. A converter removes each key that it reads; the keys that remain are reported as
unconverted."""

from __future__ import annotations

from typing import Any

from megatron.config.flags import flags
from megatron_lab.migration.launch_command import LaunchCommand


class ConfigSection:
    """Section of another framework's configuration. It holds the keys that no converter has read yet.

    Args:
        values: values by key.
        command: command that receives the converted settings and the messages.
        name: path of the section for messages, such as ``model.init_method``.
    """

    def __init__(self, values: dict[str, Any], command: LaunchCommand, name: str = "") -> None:
        self._remaining, self._command, self.name = dict(values), command, name

    def pop_section(self, key: str) -> ConfigSection | None:
        """Remove a key and return its value as a section, or None if its value is not a section."""
        value = self._remaining.pop(key, None)
        return ConfigSection(value, self._command, self.get_path(key)) if isinstance(value, dict) else None

    def pop_sections(self, key: str) -> list[ConfigSection]:
        """Remove a key whose value is a list, and return the sections in the list."""
        value = self._remaining.pop(key, None)
        items = value if isinstance(value, list) else []
        return [
            ConfigSection(item, self._command, f"{self.get_path(key)}[{i}]")
            for i, item in enumerate(items)
            if isinstance(item, dict)
        ]

    def pop(self, key: str, default: Any = None) -> Any:
        """Remove a key and return its value, or `default` if the section does not have the key."""
        return self._remaining.pop(key, default)

    def pop_number(self, key: str, default: float | None = None) -> float | None:
        """Remove a key and return its value as a number, or `default` if it has no numeric value.

        The value ``auto`` is reported as missing. A text that is not a number is reported as unconverted.
        """
        value = self._remaining.pop(key, None)
        if value == "auto":
            self._command.missing.append(f"{self.get_path(key)}: it is auto, which another program fills in")
            return default
        if isinstance(value, str):  # YAML parses 3e-4 as a string
            try:
                value = float(value)
            except ValueError:
                self._command.unconverted.append((f"{self.get_path(key)} {value}", "It is not a number."))
                return default
        if value is None or isinstance(value, bool) or not isinstance(value, int | float):
            return default
        return value

    def convert_number(self, key: str, flag: str, *, is_integer: bool = False, is_enabled: bool = True) -> float | None:
        """Set a flag to the numeric value of a key.

        A flag that already has a value keeps it. The key is then reported as unconverted if the two values differ.

        Args:
            flag: name of the flag without the leading dashes.
            is_integer: convert the number to an integer.
            is_enabled: convert the key. If False, the key remains in the section.

        Returns:
            The value of the key, or None if it has no numeric value or is not converted.
        """
        if not is_enabled:
            return None
        value = self.pop_number(key)
        if value is None:
            return None
        previous = self._command.get_number(flag)
        if previous is not None and previous != value:
            self._command.unconverted.append(
                (f"{self.get_path(key)} {value:g}", f"--{flag} {previous:g} is used, which was set before.")
            )
        elif previous is None:
            self._command.set_flag(flag, int(value) if is_integer else value, source=f"{self.get_path(key)} {value:.15g}")
        return value

    def set_default(self, flag: str, value: object, framework: str) -> None:
        """Set a flag to the default value of another framework. Nothing is set if the command contains the flag or this project has
        the same default."""
        if flag not in self._command.flags and flags()[flag].default != value:
            self._command.set_flag(flag, value, source=f"(by default, {framework})", reason="this project has another default")

    def omit(self, keys: str, reason: str) -> None:
        """Remove keys and report that they have no effect in this project. Keys that are empty or switched off are not reported.

        Args:
            keys: names of keys, separated by blanks.
            reason: why the keys have no effect.
        """
        for key in keys.split():
            if key in self._remaining:
                value = self._remaining.pop(key)
                if is_set(value):
                    self._command.omitted.append((f"{self.get_path(key)} {_shorten(value)}", reason))

    def report_unconverted(self) -> None:
        """Report all keys that remain as unconverted, including those in nested sections. Keys that are empty or switched off are
        not reported."""
        for key, value in self._remaining.items():
            if isinstance(value, dict) and value:
                ConfigSection(value, self._command, self.get_path(key)).report_unconverted()
            elif is_set(value):
                self._command.unconverted.append((f"{self.get_path(key)} {_shorten(value)}", "This tool does not know the key."))
        self._remaining = {}

    def clear(self) -> None:
        """Discard all remaining keys without a report, because the section is disabled or fully converted."""
        self._remaining = {}

    def get_path(self, key: str) -> str:
        """Return a key preceded by the names of its sections, for messages."""
        return f"{self.name}.{key}" if self.name else key


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_set(value: object) -> bool:
    """Return whether a configuration value requests something, that is, whether it is not null, false or empty."""
    return value is not None and value is not False and value not in ([], {}, "")
