"""Public launch lines: each is accepted as it stands, or refused for what cannot be had here; and what is suggested is accepted."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings

from megatron.config.cli import load, parse
from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import find_flag, get_flags
from megatron.config.parsed_flags import REQUESTS, SEARCH_ADVICE
from megatron.config.save import run_record
from megatron.data.tokenizer import predict_embedding_rows
from megatron_lab.commands.verify_layout import ToolOptions
from megatron_lab.commands.verify_layout import load_run_config as proof_settings
from megatron_lab.migration.compat import _NO_EFFECT, _REFUSED, TRANSLATIONS, UNSUPPORTED_CHOICES, _parse_table
from megatron_lab.proofs.verify import get_vocab_size
from tests.support.random_configs import CommandLine, command_lines
from tests.support.rule_cases import argv, every

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --lr 1e-3 --train-iters 5"
FILE = Path(__file__).parents[2] / "data" / "launch_lines.txt"


@dataclass
class Line:
    """A launch line."""

    name: str
    ranks: int
    refused: set[str] = field(default_factory=set)
    words: list[str] = field(default_factory=list)


def lines() -> list[Line]:
    """Those of the file."""
    found: list[Line] = []
    for text in FILE.read_text().splitlines():
        kind, _, rest = text.partition(" ")
        if kind == "=":
            name, ranks, _ = rest.split(" ", 2)
            found.append(Line(name, int(ranks)))
        elif kind == "!":
            found[-1].refused |= set(rest.split())
        elif kind not in ("", "#"):
            found[-1].words += shlex.split(text)
    return found


def problems(words: list[str], ranks: int) -> tuple[Violation, ...]:
    """What is wrong with a command line; nothing if it is accepted."""
    try:
        load(words, ranks)
    except ConfigError as error:
        return error.violations
    return ()


def test_each_line_is_accepted_or_refused_for_what_cannot_be_had() -> None:
    def check(line: Line) -> None:
        found = problems(line.words, line.ranks)
        refused = {flag for each in found for flag in (each.flags if "refused" in each.message else each.flags[:1])}
        assert refused == line.refused
        assert all(" is not a flag" not in each.message and each.message + each.reason for each in found), found

    every(lines(), check)
    assert sum(not line.refused for line in lines()) == 22 and len(lines()) == 28


def test_what_a_reason_tells_to_use_can_be_used() -> None:
    """Every flag that a reason names is a setting, and a word behind it is one of its choices or plain English."""
    words = {"and", "sets", "with"}
    reasons = {reason for table in (_NO_EFFECT, _REFUSED) for _, _, reason in _parse_table(table)} | set(
        UNSUPPORTED_CHOICES.values()
    )

    def check(named: re.Match[str]) -> None:
        flag = find_flag(named[1])
        assert flag is not None or named[1] in REQUESTS
        if flag is not None and flag.choices and named[2]:
            assert named[2].strip(" .") in {*flag.choices, *words}

    every((named for reason in reasons for named in re.finditer(r"--([a-z0-9][a-z0-9-]*)( [\w.-]+)?", reason)), check)
    for name, taken in TRANSLATIONS.items():
        given = taken.values[0] if taken.values else "uniform" if "method" in name else "full" if "granularity" in name else "4"
        assert not [
            each for each in problems([*argv(""), *taken.template.format(given).split()], 2) if "not a flag" in each.message
        ]


def after(words: list[str], ranks: int, suggestion: str) -> tuple[Violation, ...]:
    """What is wrong once a suggestion is followed."""
    if suggestion.startswith("world size "):
        return problems(words, int(suggestion.removeprefix("world size ")))
    return problems([*words, *shlex.split(suggestion)], ranks)


@settings(max_examples=8)
@given(command_lines(spoiled=True))
def test_what_the_rules_suggest_is_accepted(line: CommandLine) -> None:
    """Of a line with one problem it makes one that is accepted; of a line with more, one with fewer."""
    words = list(line.argv)
    before = problems(words, line.world_size)
    for violation in before:
        for suggestion in violation.nearest:
            left = after(words, line.world_size, suggestion)
            assert len(left) < len(before), (suggestion, left)


def misspelled(random: Random) -> Iterator[tuple[list[str], str]]:
    """Settings with values that they can have, spelled wrong."""
    for flag in random.sample(list(get_flags().values()), 40):
        values = [flag.choices[0]] if flag.choices else [] if flag.value_type is bool else ["2"] * (flag.num_values or 1)
        at = random.randrange(1, len(flag.name))
        yield values, flag.name[:at] + random.choice(("", flag.name[at] * 2)) + flag.name[at + 1 :]


def test_the_name_that_is_suggested_is_accepted() -> None:
    """With the values that were given: another problem may remain, but that is not one of the form."""

    def check(case: tuple[list[str], str]) -> None:
        values, name = case
        found = [each for each in problems([*argv(""), f"--{name}", *values], 2) if "is not a flag" in each.message]
        for advice in (each.reason for each in found):
            names = re.findall(r"--[\w-]+", advice.removesuffix(SEARCH_ADVICE))
            left = [problems([*argv(""), near, *values], 2) for near in names]
            assert all("not a flag" not in each.message for some in left for each in some)
            assert len(names) < 2 or not any(left) or all(left)

    every(misspelled(Random(7)), check)


def test_of_a_checkpoint_only_what_it_leaves_open_is_suggested(tmp_path: Path) -> None:
    """Three key-value heads cannot be shared by two ranks, and the checkpoint has no other number of heads."""
    heads = "--num-attention-heads 6 --hidden-size 96 --group-query-attention --num-query-groups 3"
    given = argv(heads)
    place = tmp_path / "iter_0000001"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(run_record(parse(given), given)))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1\n")
    words = shlex.split(f"--lr 1e-3 --micro-batch-size 2 --train-iters 5 --mock-data --load {tmp_path} --use-checkpoint-args")
    split = ["--tensor-model-parallel-size", "2"]
    (violation,) = problems([*words, *split], 6)
    assert set(violation.nearest) == {"--tensor-model-parallel-size 1", "--tensor-model-parallel-size 3"}
    assert not any(after([*words, *split], 6, suggestion) for suggestion in violation.nearest)
    (same,) = problems([*given, *split], 6)
    assert any("--num-query-groups" in suggestion for suggestion in same.nearest)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("--vocab-file v --merge-file m", "GPT2BPETokenizer"),
        ("--tokenizer-model some.model", "SentencePieceTokenizer"),
        ("--tokenizer-model at/tokenizer.json", "HuggingFaceTokenizer"),
        ("--tokenizer-model {folder}", "HuggingFaceTokenizer"),
        ("--mock-data --vocab-size 100", "NullTokenizer"),
        ("--tokenizer-model at/tekken.json", None),
        ("--mock-data --vocab-size 100 --tokenizer-type ByteTokenizer", "ByteTokenizer"),
    ],
)
def test_the_kind_of_tokenizer_follows_from_what_is_given(given: str, kind: str | None, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    words = [*shlex.split(MODEL), *given.format(folder=tmp_path).split(), *([] if "mock" in given else ["--data-path", "corpus"])]
    if kind is None:
        assert [each.flags for each in problems(words, 1)] == [("--tokenizer-type",)]
        return
    loaded = load(words, 1)
    assert loaded.config.data.tokenizer_type == kind
    assert any(note.startswith(f"--tokenizer-type is {kind}, ") for note in loaded.notes) == ("--tokenizer-type" not in given)


def test_quotes_inside_a_value_are_taken_off() -> None:
    config = load(
        [*shlex.split(MODEL), *"--data-path corpus --vocab-size 9 --tokenizer-type NullTokenizer".split(), "--split", "'98,2,0'"], 1
    )
    assert config.config.data.split == "98,2,0"
    assert load([*argv(""), '--seed="7"'], 1).config.training.seed == 7


def test_without_validation_documents_there_is_no_evaluation() -> None:
    words = [*shlex.split(MODEL), *"--data-path corpus --vocab-size 9 --tokenizer-type NullTokenizer --split 100,0,0".split()]
    loaded = load(words, 1)
    assert loaded.config.training.eval_iters == 0
    assert sum("there is no evaluation" in note for note in loaded.notes) == 1
    assert load([*argv(""), "--split", "100,0,0"], 1).config.training.eval_iters == 100  # made-up tokens are made up for each split


def test_plans_and_proofs_need_no_tokenizer_files() -> None:
    words = [*shlex.split(MODEL), *"--data-path corpus --vocab-file no/vocab.json --merge-file no/merges.txt".split()]
    loaded = load([*words, "--dry-run"], 1)
    assert predict_embedding_rows(loaded.config.data) == 50_257
    assert sum("a vocabulary of 50,257 is assumed" in note for note in loaded.notes) == 1
    assert predict_embedding_rows(load([*words, "--dry-run", "--vocab-size", "77"], 1).config.data) == 77
    proved, _ = proof_settings(words, ToolOptions())
    assert get_vocab_size(proved.config.data) == 50_257 and "is assumed" in proved.notes[0]
    assert load(words, 1).config.data.vocab_size is None  # a run takes the number from the files
