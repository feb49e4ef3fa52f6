"""Random command lines that cannot be run: refused in words, whatever they hold, and never by an error of the rules themselves."""

from __future__ import annotations

import contextlib
import io
import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.config.cli import load
from megatron.config.errors import ConfigError
from megatron.config.flags import Flag, get_flags
from megatron_lab.migration.compat import COMPAT_FLAGS
from tests.support.random_configs import CommandLine, command_lines
from tests.support.random_draws import Draw, chance, number, one_of
from tests.support.random_runs import check_refusal
from tests.support.rule_cases import argv

EXAMPLES = settings.default.max_examples * 2 // 3  # type: ignore[union-attr]
"""Fewer than of other properties, since it takes long to draw one."""


WORDS = (
    *("0", "-1", "1", "2", "3", "7", "-0", "+4", "1_000", "٣", "10000000", "2147483648", "9223372036854775808", f"1{'0' * 30}"),
    *(f"1{'0' * 400}", f"-1{'0' * 400}", "9" * 4000, "9" * 5000),
    *("0.5", "-0.5", "1e-320", "1e308", "1e999", "-1e999", "nan", "-nan", "inf", "-inf", "0x10", "1.0", "1.", "1e3"),
    *(
        "",
        " ",
        "None",
        "none",
        "True",
        "false",
        "-",
        "--",
        "---",
        "=",
        "\n",
        "\0",
        "é",
        "\ud800",
        "'",
        '"',
        "%s",
        "{}",
        "../..",
        "/",
    ),
    *(
        "EttL",
        "E|L",
        "L|E",
        "t*999999999",
        f"E{'(' * 300}t{')*2' * 300}L",
        "E(t|)*10000000L",
        "((((",
        "E*3L",
        "|",
        "E" + "t|" * 9999 + "L",
    ),
    *("interleaved", "optim_grads_params", "balanced", "rope", "WSD", "NullTokenizer", "HuggingFaceTokenizer", "cuda", "nccl"),
    *("1,2,3", "0,0,0", "1e999,1", "-1,2", ",,,", "1 a 1", "a b", "s3://", "file:///", "https://example.invalid/x"),
)
"""Texts that some reader of numbers, names or paths may stumble over."""

WORLDS = (1, 2, 8, 0, -1, 7, 1000, 1_048_576, 1_048_577, 9_999_991, 10_000_000, 2**31, 2**63, 10**30)
"""Numbers of ranks."""


@st.composite
def wild_lines(draw: Draw) -> CommandLine:
    """A command line of which some flags make sense, or none."""
    argv = list(draw(command_lines()).argv) if not chance(draw, 4) else []
    names = [*get_flags(), *(f"no-{name}" for name, flag in get_flags().items() if flag.value_type is bool)]
    for _ in range(number(draw, 1, 5)):
        name = draw(st.sampled_from(names))
        if chance(draw, 12):
            name = one_of(draw, *sorted(COMPAT_FLAGS), "hiden-size", "", "-", "lr=1", "tensor_model_parallel_size")
        argv += [f"--{name}", *_values(draw, get_flags().get(name))]
    return CommandLine(tuple(argv), one_of(draw, *WORLDS, *WORLDS[:3], *WORLDS[:3]))


def _values(draw: Draw, flag: Flag | None) -> list[str]:
    """As many as the flag takes, most times."""
    count = flag.num_values if flag is not None and flag.num_values is not None and not chance(draw, 10) else number(draw, 0, 3)
    if flag is not None and flag.choices and not chance(draw, 4):
        return [one_of(draw, *flag.choices)]
    return [draw(st.sampled_from(WORDS) | st.text(max_size=6)) for _ in range(count)]


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
    cases = [(flag, word) for flag in get_flags().values() for word in WORDS]
    for flag, word in cases if full else zip(get_flags().values(), itertools.cycle(WORDS), strict=False):
        words = [word] * (flag.num_values or 1)
        with contextlib.suppress(ConfigError):
            load([*argv(""), f"--{flag.name}", *words], 24)


def test_the_words_are_worth_trying() -> None:
    """Some are good for some flag, none for all."""

    def good(flag: Flag, word: str) -> bool:
        with contextlib.suppress(ValueError):
            flag.parse(flag.name, [word] * (flag.num_values or 1))
            return True
        return False

    for word in WORDS:
        assert not all(good(flag, word) for flag in get_flags().values())
    assert {flag.name for flag in get_flags().values() if not any(good(flag, word) for word in WORDS)} <= _WITHOUT_A_GOOD_WORD


_WITHOUT_A_GOOD_WORD = {flag.name for flag in get_flags().values() if flag.value_type is bool or flag.choices}
