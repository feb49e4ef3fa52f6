"""`--help`: the main flags on one screen, topics, all flags, a search in names, texts and names of other frameworks, and the
message without flags."""

from __future__ import annotations

import re
import shlex

import pytest

from megatron.config.cli import load, parse
from megatron.config.errors import ConfigError
from megatron.config.flags import find_flag, get_flags, get_topics
from megatron_lab.pages.flag_help import PROGRAM_FLAGS, explain

SCREEN = (80, 24)


@pytest.fixture(autouse=True)
def screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 x 24."""
    for name, size in zip(("COLUMNS", "LINES"), SCREEN, strict=True):
        monkeypatch.setenv(name, str(size))


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    return Show(capsys)


class Show:
    """Text that a command line prints to stdout before it exits with 0."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, line: str) -> str:
        with pytest.raises(SystemExit) as caught:
            load(shlex.split(line), 1)
        assert caught.value.code == 0
        return self._capsys.readouterr().out


def _assert_fits(text: str, lines: int | None = None) -> None:
    """A column stays free, and a line for the prompt."""
    assert text.endswith("\n") and max(map(len, text.splitlines())) < SCREEN[0], text
    assert lines is None or len(text.splitlines()) <= lines, text


def _get_main_flags(text: str) -> list[str]:
    return [flag for line in text.splitlines() if line.startswith("  --") for flag in re.findall(r"--([\w-]+)", line[:35])]


def test_the_main_help_is_one_screen(show: Show) -> None:
    text = show("--help")
    _assert_fits(text, SCREEN[1] - 1)
    assert text.startswith("python pretrain_gpt.py FLAGS") and "python pretrain_gpt.py --nproc 8 FLAGS" in text
    assert sum(line.startswith("  --") for line in text.splitlines()) == 12
    assert all(name in get_flags() or name in PROGRAM_FLAGS for name in re.findall(r"--([a-z][\w-]*)", text) if name != "help")
    assert {"lr", "train-iters", "global-batch-size", "tensor-model-parallel-size", "save", "load"} <= set(_get_main_flags(text))
    listed = " ".join(text.split()).partition("flags of a topic: ")[2].partition(" --help WORD")[0]
    assert listed.split(", ") == list(get_topics())


@pytest.mark.parametrize("line", ["-h", "--lr 3 --help", "--help --bf16 --lr 3", "--num-layers x --help"])
def test_help_beside_other_flags_is_the_main_help(line: str, show: Show) -> None:
    assert show(line) == show("--help")


def test_the_topics_contain_every_flag_once(show: Show) -> None:
    listed = []
    for topic in get_topics():
        text = show(f"--help {topic}")
        _assert_fits(text)
        assert text.startswith(f"{topic}:\n")
        listed += [find_flag(line.split()[0].lstrip("-")) for line in text.splitlines() if line.startswith("  --")]
    assert listed == list(get_flags().values())


def test_a_topic_shows_values_and_short_texts(show: Show) -> None:
    text = show("--help memory")
    assert "  --recompute-granularity full|selective\n" in text and "  --device-memory-gb X " in text
    assert "  --recompute-num-layers N      With --recompute-method uniform: number of\n" in text


def test_a_switch_that_is_on_by_default_is_shown_with_the_flag_that_switches_it_off(show: Show) -> None:
    """Its help text says what it does while it is on, so that text may not stand beside the negation."""
    assert (
        "  --load-optim                  Load the optimizer state too (on by default;\n"
        "                                --no-load-optim switches it off)\n"
    ) in show("--help checkpoint")
    switches = [flag for flag in get_flags().values() if flag.value_type is bool and flag.default]
    assert len(switches) > 5
    for flag in switches:
        note = f"on by default; --no-{flag.name} switches it off"
        topic = show(f"--help {flag.topic}")
        assert f"\n  --no-{flag.name}" not in topic
        for text in (topic, show(f"--help no-{flag.name}"), explain(flag.name)):
            assert note in " ".join(text.split()).replace("On by", "on by"), text


def test_all_has_every_flag_with_its_full_text(show: Show) -> None:
    text = show("--help all")
    assert max(map(len, text.splitlines())) <= SCREEN[0]
    ends = [line for line in text.splitlines() if line.startswith("          ") and len(line.split()) < 3 and "--" not in line]
    assert max(map(len, text.splitlines())) < SCREEN[0] and not ends, "lines are wrapped once"
    assert text.startswith("usage: pretrain_gpt.py") and "Pretrain a GPT- or Llama-style model" in text
    for topic in get_topics():
        assert f"{topic} options" in text
    for name in (*get_flags(), *PROGRAM_FLAGS):
        assert f"--{name}" in text
    assert "--gpus-per-node INT" in text and "by default 8. (default: 8)" in text


@pytest.mark.parametrize("line", ["--help lr", "--help --lr", "--help=lr", "--help LR"])
def test_the_name_of_a_flag_shows_it_and_its_relatives(line: str, show: Show) -> None:
    text = show(line)
    _assert_fits(text, SCREEN[1] - 1)
    assert text.startswith("--lr\n  Maximum learning rate. Required.\n  takes     a number, above 0\n")
    assert "\n  --lr-decay-style constant|linear|cosine|inverse-square-root|WSD\n" in text
    assert "Also: --lr-" in text and "more (all: --help lr all)" in " ".join(text.split())
    everything = show("--help lr all")
    assert "Also:" not in everything and "\n  --muon-extra-scale-factor X " in everything


@pytest.mark.parametrize(
    "words, expected",
    [
        ("warm-up", ["--lr-warmup-iters"]),  # in texts
        ("gradient norm", ["--clip-grad", "--log-layer-norms"]),
        ("sharding", ["--data-parallel-sharding-strategy"]),  # a part of the name
        ("expert parallel", ["--expert-model-parallel-size"]),
        ("epochs", ["--epochs is not a flag.", "--train-iters", "--train-samples"]),  # names of other frameworks
        ("learning rate", ["--learning-rate is not a flag. Use --lr.", "--lr "]),
        ("batch size", ["--batch-size is refused. Use --micro-batch-size", "  --global-batch-size N"]),  # names of Megatron-LM
        ("nproc", ["--nproc\n  Start this many ranks"]),  # flags that are no settings
        ("config", ["--config\n  YAML or TOML file", "--print-config"]),
        ("no-load-optim", ["--no-load-optim"]),
        ("tensor_model_parallel_size", ["--tensor-model-parallel-size\n"]),
        ("signals", ["  --exit-signal SIGTERM|", "  --exit-signal-code N"]),  # a plural
        ("preemption", ["--preemption is not a flag.", "--exit-signal-code", "--exit-duration-in-mins"]),
        ("timeouts", ["--distributed-timeout-minutes"]),
    ],
)
def test_a_search_finds_flags_by_name_synonym_and_text(words: str, expected: list[str], show: Show) -> None:
    text = show(f"--help {words}")
    _assert_fits(text, SCREEN[1] - 1)
    assert all(part in text for part in expected), text


def test_every_name_of_a_flag_can_be_searched(show: Show) -> None:
    for name in (*get_flags(), *PROGRAM_FLAGS):
        if name not in get_topics():
            text = show(f"--help {name}")
            _assert_fits(text)
            assert text.startswith(explain(name).partition("\n")[0]), name


@pytest.mark.parametrize(
    "line, part", [("--help xyzzy", "The topics are model, training"), ("--help optimzer", "--help optimizer")]
)
def test_a_search_without_result_says_what_exists(line: str, part: str) -> None:
    with pytest.raises(ConfigError, match=f"{line}: no topic and no flag matches") as caught:
        load(line.split(), 1)
    assert part in str(caught.value)


def test_without_flags_a_user_is_told_how_to_start() -> None:
    with pytest.raises(ConfigError) as caught:
        load([], 1)
    text = f"pretrain_gpt.py: {caught.value}\n"
    _assert_fits(text, 8)
    for command in (
        "bash examples/quickstart.sh",
        "pretrain_gpt.py --model list",
        "pretrain_gpt.py --recipe list",
        "pretrain_gpt.py --help",
    ):
        assert command in text
    assert parse([]).model.num_layers == 0, "programs may parse no flags"
