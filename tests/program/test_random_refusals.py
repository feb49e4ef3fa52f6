"""Random command lines that cannot be run: refused in words, whatever they hold, and never by an error of the rules themselves."""

from __future__ import annotations

import contextlib
import io
import itertools

from hypothesis import HealthCheck, given, settings

from megatron.config.cli import load
from megatron.config.errors import ConfigError
from megatron.config.flags import Flag, flags
from tests.support.random_configs import CommandLine, command_lines
from tests.support.random_runs import check_refusal
from tests.support.rule_cases import argv
from tests.support.wild_configs import WORDS, wild_lines

EXAMPLES = settings.default.max_examples * 2 // 3  # type: ignore[union-attr]
"""Fewer than of other properties, since it takes long to draw one."""


@settings(suppress_health_check=list(HealthCheck), max_examples=EXAMPLES)
@given(command_lines(spoiled=True))
def test_what_is_refused_is_told_with_valid_suggestions(line: CommandLine) -> None:
    """Each violation says what is wrong and names flags; what it suggests removes it."""
    try:
        load(line.argv, line.world_size)
    except ConfigError as error:
        check_refusal(line, error)


@settings(suppress_health_check=list(HealthCheck), max_examples=EXAMPLES)
@given(wild_lines())
def test_no_text_and_no_world_breaks_the_rules(line: CommandLine) -> None:
    """Every flag with any text: settings, or problems in words; nothing else is raised, and nothing is told on the screen."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        try:
            loaded = load(line.argv, line.world_size)
        except ConfigError as error:
            assert all(violation.message for violation in error.violations)
            assert str(error).encode(errors="backslashreplace")
        else:
            assert loaded.config
    assert not said.getvalue()


def test_every_flag_with_every_word(full: bool) -> None:
    """In a line that is otherwise good. In the normal run every flag with a word, and every word with some flags."""
    cases = [(flag, word) for flag in flags().values() for word in WORDS]
    for flag, word in cases if full else zip(flags().values(), itertools.cycle(WORDS), strict=False):
        words = [word] * (flag.count or 1)
        with contextlib.suppress(ConfigError):
            load([*argv(""), f"--{flag.name}", *words], 24)


def test_the_words_are_worth_trying() -> None:
    """Some are good for some flag, none for all."""

    def good(flag: Flag, word: str) -> bool:
        with contextlib.suppress(ValueError):
            flag.read(flag.name, [word] * (flag.count or 1))
            return True
        return False

    for word in WORDS:
        assert not all(good(flag, word) for flag in flags().values())
    assert {flag.name for flag in flags().values() if not any(good(flag, word) for word in WORDS)} <= _WITHOUT_A_GOOD_WORD


_WITHOUT_A_GOOD_WORD = {flag.name for flag in flags().values() if flag.kind is bool or flag.choices}
