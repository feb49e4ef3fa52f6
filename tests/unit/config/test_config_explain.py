"""`--explain FLAG`: every flag has a page, which follows from the settings and the rules themselves."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any, cast

import pytest

from megatron.config.checks.finding import find_out_of_range
from megatron.config.cli import load
from megatron.config.config import Config
from megatron.config.errors import ConfigError
from megatron.config.flags import get_flags, get_topics
from megatron.config.rules import RULES
from megatron_lab.migration.compat import COMPAT_FLAGS, TRANSLATIONS
from megatron_lab.pages.flag_help import PROGRAM_FLAGS, explain, find_rules, read_field_docs
from tests.support.rule_cases import config_of
from tests.unit.config import test_config_pipeline, test_config_rules, test_config_sharding


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal wider than the pages."""
    monkeypatch.setenv("COLUMNS", "130")


def test_every_flag_has_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*get_flags(), *PROGRAM_FLAGS, *COMPAT_FLAGS, *(name for name in TRANSLATIONS if name not in get_flags())]:
        page = explain(name)
        assert page.startswith(f"--{name}") and page.endswith("\n") and len(page.split()) > 3
        assert all(len(line) <= 110 for line in page.splitlines()), name
        monkeypatch.setenv("COLUMNS", "80")
        assert all(len(line) < 80 for line in explain(name).splitlines()), name
        monkeypatch.setenv("COLUMNS", "130")


def test_a_name_may_have_underscores() -> None:
    """Pages of a setting, of a request to the program, of a flag without effect, and of a flag that is taken as another."""
    names = (
        min(get_flags()),
        *(min(name for name in names if "-" in name) for names in (PROGRAM_FLAGS, COMPAT_FLAGS, {*TRANSLATIONS} - {*get_flags()})),
    )
    assert all("-" in name and explain(f"--{name.replace('-', '_')}") == explain(name) for name in names), names


def test_a_page_says_what_a_setting_is() -> None:
    page = explain("tensor-model-parallel-size")
    assert "Number of ranks that split each layer (TP)." in page and "unit      ranks" in page and "default   1\n" in page
    assert "takes     a whole number, at least 1\n" in page and "under parallel: tensor_model_parallel_size" in page
    assert "--num-attention-heads must be divisible by --tensor-model-parallel-size. Each tensor rank holds" in " ".join(
        page.split()
    )
    assert "default   none: it must be given" in explain("num-layers")
    assert "default   on" in explain("no-load-optim") and "acts      only with --load" in explain("no-load-optim")
    assert "needed by --trace-steps" in explain("save-trace")
    assert "one of even, balanced" in explain("pipeline-split")


def test_flags_that_are_no_settings_say_so() -> None:
    assert explain("moe-latent-size").startswith("--moe-latent-size is refused. This feature of mixtures of experts")
    assert "is accepted and has no effect" in explain("use-flash-attn")
    assert "taken as --check-replicas-every" in explain("check-weight-hash-across-dp-replicas-interval")


def test_an_unknown_flag_is_answered_with_near_ones() -> None:
    with pytest.raises(ConfigError, match="--num-layer is not a flag") as caught:
        explain("num-layer")
    assert caught.value.violations[0].nearest[0] == "--explain num-layers"


@pytest.mark.parametrize("words", [["--explain", "lr"], ["--explain", "--lr"], ["--explain=lr", "--num-layers", "x"]])
def test_it_is_answered_before_anything_else(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(words, 1)
    assert caught.value.code == 0
    assert capsys.readouterr().out == explain("lr")


def test_all_flags_that_are_asked_about_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(["--explain", "lr", "--explain", "--fp16"], 1)
    assert capsys.readouterr().out == f"{explain('lr')}\n{explain('fp16')}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--explain"], "--explain: --explain takes the name of one flag."),
        (["--explain", "lr", "fp16"], "--explain lr fp16: --explain takes the name of one flag."),
        (["--explain", "lr", "--bogus"], "--bogus is not a flag.\n  --help WORD searches the flags."),
    ],
)
def test_what_is_asked_wrongly_is_all_that_is_told(words: list[str], message: str) -> None:
    """Not what would be missing for a run."""
    with pytest.raises(ConfigError) as caught:
        load(words, 1)
    assert str(caught.value) == message


def test_every_number_has_a_unit_and_nothing_else() -> None:
    for flag in get_flags().values():
        assert (flag.metadata.unit is not None) == (flag.value_type in (int, float)), flag.name


def test_conditions_are_about_settings() -> None:
    counted = {"data_ranks", "sharing_ranks", "expert_ranks", "chunks", "microbatches"}
    known = {flag.field: flag for flag in get_flags().values()}
    for flag in known.values():
        assert flag.metadata.active_if is None or flag.field not in flag.metadata.active_if.values
        for beside in (flag.metadata.active_if, *flag.metadata.idle_if):
            for name, wanted in beside.values.items() if beside is not None else ():
                assert name in {*known, *counted}, flag.name
                values = wanted if isinstance(wanted, tuple) else (wanted,)
                choices = known[name].choices if name in known else ()
                assert all(value in choices for value in values if choices and isinstance(value, str)), flag.name


def test_every_setting_has_a_text() -> None:
    for flag in get_flags().values():
        assert read_field_docs(get_topics()[flag.topic])[flag.field].endswith((".", ".)"))


def test_a_rule_of_a_common_form_states_what_it_requires() -> None:
    page = " ".join(explain("lr").split())
    assert "- --min-lr must not be above --lr. --lr is the maximum learning rate of the run. -" in page
    assert "- --lr-warmup-init must not be above --lr." in page
    assert "--lr-wsd-decay-iters and --lr-wsd-decay-samples exclude each other." in explain("lr-wsd-decay-iters")
    for flag in get_flags().values():
        statements = [text for text, _ in find_rules(flag.field)]
        assert len(set(statements)) == len(statements), flag.name


def test_every_rule_says_why() -> None:
    for rule in RULES:
        assert rule.reason.endswith("."), rule.reason


class ReadFields:
    """Settings that write down which of them are read, also by way of their properties and methods."""

    def __init__(self, part: Any, found: set[str]) -> None:
        self._part, self._found = part, found

    def __getattr__(self, name: str) -> Any:
        reader = getattr(type(self._part), name, None)
        if isinstance(reader, property):
            assert reader.fget is not None
            return reader.fget(self)
        if inspect.isfunction(reader):
            return functools.partial(reader, self)
        value = getattr(self._part, name)
        if dataclasses.is_dataclass(value):
            return ReadFields(value, self._found)
        self._found.add(name)
        return value


def test_a_rule_declares_all_settings_that_it_reads_and_names() -> None:
    cases = [*test_config_rules.CASES, *test_config_pipeline.CASES, *test_config_sharding.CASES]
    seen = set()
    for extra, world_size, *_ in cases:
        wrong = find_out_of_range(config_of(extra))  # else each rule reads its own settings first, to see whether they are
        for rule in (rule for rule in RULES if rule.fields):
            read: set[str] = set()
            for finding in rule(cast(Config, ReadFields(config_of(extra), read)), world_size, wrong):
                seen.add(rule)
                assert set(finding.fields) <= set(rule.fields), rule.reason
            assert read <= set(rule.fields), rule.reason
    assert len(seen) > 40


def test_relations_go_both_ways() -> None:
    about = {flag.field: find_rules(flag.field) for flag in get_flags().values()}
    for field, rules in about.items():
        for why, others in rules:
            assert others and why
            for other in others:
                assert (why, field) in {(text, name) for text, names in about[other] for name in names}
