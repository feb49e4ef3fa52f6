"""Sections (nested mappings) of another framework's configuration.

The code that converts a section removes each key that it reads. The keys that remain are reported to the user as unconverted.
"""

from __future__ import annotations

from typing import Any

from megatron.config.flags import get_flags
from megatron_lab.migration.launch_command import LaunchCommand


class ConfigSection:
    """Section (mapping) of another framework's configuration. It holds only the keys that have not been read yet.

    Args:
        values: values by key.
        command: launch command of this project that receives the converted flags, and the messages for the user.
        name: path of the section for messages, such as ``model.init_method``.
    """

    def __init__(self, values: dict[str, Any], command: LaunchCommand, name: str = "") -> None:
        self._remaining, self._command, self.name = dict(values), command, name

    def pop_section(self, key: str) -> ConfigSection | None:
        """Remove a key and return its value as a section; None if the value is not a mapping."""
        value = self._remaining.pop(key, None)
        return ConfigSection(value, self._command, self.get_path(key)) if isinstance(value, dict) else None

    def pop_sections(self, key: str) -> list[ConfigSection]:
        """Remove a key whose value is a list of mappings, and return a section for each of them."""
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
        """Remove a key and return its value as a number, or `default` if the value is not a number.

        The value ``auto`` is reported as a value that the user has to supply. Another text that is not a number is reported as
        unconverted.
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
        """Remove a key with a number and set a flag of the launch command to this number.

        If the flag already has another value, keep that value and report the key as unconverted.

        Args:
            flag: name of the flag without the leading dashes.
            is_integer: convert the number to an integer.
            is_enabled: whether to convert the key. If False, the key stays in the section.

        Returns:
            The number, or None if the key has no number or is not converted.
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
        """Set a flag to the value that another framework uses by default.

        Nothing is set if the command already contains the flag, or if this project has the same default.

        Args:
            flag: name of the flag without the leading dashes.
            value: default value of the other framework.
            framework: name of the other framework, for the message.
        """
        if flag not in self._command.flags and get_flags()[flag].default != value:
            self._command.set_flag(flag, value, source=f"(by default, {framework})", reason="this project has another default")

    def omit(self, keys: str, reason: str) -> None:
        """Remove keys, and report to the user that they have no effect in this project. Keys that are empty or switched off are not
        reported.

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
        """Report all remaining keys to the user as unconverted, including those in nested sections.

        Keys that are empty or switched off are not reported.
        """
        for key, value in self._remaining.items():
            if isinstance(value, dict) and value:
                ConfigSection(value, self._command, self.get_path(key)).report_unconverted()
            elif is_set(value):
                self._command.unconverted.append((f"{self.get_path(key)} {_shorten(value)}", "This tool does not know the key."))
        self._remaining = {}

    def clear(self) -> None:
        """Discard all remaining keys without a report, because the section is switched off or needs no further conversion."""
        self._remaining = {}

    def get_path(self, key: str) -> str:
        """Return the key with the names of its sections, such as ``model.init_method.std``, for messages."""
        return f"{self.name}.{key}" if self.name else key


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_set(value: object) -> bool:
    """Return whether a value of a configuration is not null, false or empty, and therefore has an effect."""
    return value is not None and value is not False and value not in ([], {}, "")
