"""The command line: what each spelling gives, and what is said about what cannot be read."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.cli import load, load_or_exit, parse
from megatron.config.config import Config
from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import Flag, get_flags, get_topics
from megatron.config.parsed_flags import DryRun, GivenFlag, split_argv

ROOT = Path(__file__).resolve().parents[3]

BASE = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 2 --lr 1e-3 --train-iters 10 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)


def _value(config: Config, name: str) -> object:
    flag = get_flags()[name]
    return getattr(getattr(config, flag.topic), flag.field)


def _error(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--num-layers", "12"], "num-layers", 12),
        (["--num_layers", "12"], "num-layers", 12),
        (["--num-layers=12"], "num-layers", 12),
        (["--lr", "1e-4"], "lr", 1e-4),
        (["--adam-eps", "1e-8"], "adam-eps", 1e-8),
        (["--rotary-base", "500000"], "rotary-base", 500000.0),
        (["--seed", "-5"], "seed", -5),
        (["--lr", "-1e-3"], "lr", -1e-3),
        (["--lr", "-.5"], "lr", -0.5),
        (["--swiglu"], "swiglu", True),
        (["--no-swiglu"], "swiglu", False),
        (["--swiglu", "--no-swiglu"], "swiglu", False),
        (["--no-load-optim"], "load-optim", False),
        (["--no_save_optim"], "save-optim", False),
        (["--override-opt_param-scheduler"], "override-opt-param-scheduler", True),
        (["--override-opt-param-scheduler"], "override-opt-param-scheduler", True),
        (["--use-checkpoint-opt_param-scheduler"], "use-checkpoint-opt-param-scheduler", True),
        (["--rampup-batch-size", "2", "2", "100"], "rampup-batch-size", (2, 2, 100)),
        (["--rampup-batch-size", "None"], "rampup-batch-size", None),
        (["--split", "969, 30, 1"], "split", "969, 30, 1"),
        (["--split", "969,30,1"], "split", "969,30,1"),
        (["--profile-ranks", "0", "1"], "profile-ranks", (0, 1)),
        (["--iterations-to-skip", "3", "7"], "iterations-to-skip", (3, 7)),
        (["--iterations-to-skip"], "iterations-to-skip", ()),
        (["--data-path", "folder/corpus_text_document"], "data-path", ("folder/corpus_text_document",)),
        (["--data-path", "0.3", "a", "0.7", "b"], "data-path", ("0.3", "a", "0.7", "b")),
        (["--save", "ckpt"], "save", "ckpt"),
        (["--save", "ckpt", "--save", "None"], "save", None),
        (["--wandb-exp-name=--odd--"], "wandb-exp-name", "--odd--"),
        (["--lr-decay-style", "inverse-square-root"], "lr-decay-style", "inverse-square-root"),
        (["--train-iters", "5", "--train-iters", "6"], "train-iters", 6),
    ],
)
def test_a_spelling_gives_its_value(words: list[str], name: str, value: object) -> None:
    found = _value(parse(words), name)
    assert found == value
    assert type(found) is type(value)


def test_without_flags_every_field_has_its_default() -> None:
    assert parse([]) == Config()


def test_each_field_has_a_flag_with_its_default() -> None:
    config = Config()
    assert {(flag.topic, flag.field) for flag in get_flags().values()} == {
        (topic, field) for topic in get_topics() for field in vars(getattr(config, topic))
    }
    for flag in get_flags().values():
        assert getattr(getattr(config, flag.topic), flag.field) == flag.default


_TEXTS = st.one_of(
    st.text(alphabet="0123456789+-._eEnaif ", max_size=6), st.sampled_from(["None", "adam", "LayerNorm", "x y", "-", "é", "1e400"])
)


@given(flag=st.sampled_from(sorted(get_flags().values(), key=lambda flag: flag.name)), values=st.lists(_TEXTS, max_size=4))
def test_a_value_is_read_or_has_a_fault(flag: Flag, values: list[str]) -> None:
    """What is read has the field's type: it is accepted as plain data too."""
    try:
        value = flag.parse(flag.name, values)
    except ValueError as error:
        assert str(error).startswith((f"--{flag.name} takes", f"--{flag.name} is a switch"))
    else:
        assert repr(flag.from_json(value)) == repr(value)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--tensor-model-paralel-size", "2"], ["--tensor-model-paralel-size is not a flag", "--tensor-model-parallel-size."]),
        (["--lr-decay", "2"], ["--lr-decay-iters", "--lr-decay-samples"]),
        (["--no-load-opt"], ["--no-load-optim"]),
        (["--zzz"], ["--zzz is not a flag", "--help"]),
        (["-lr", "1"], ["-lr is not a flag", "--lr."]),
        (["--ckpt-stpe", "3"], ["--ckpt-step"]),
        (["--lr", "abc"], ["--lr abc", "takes a number"]),
        (["--train-iters", "1e6"], ["takes a whole number"]),
        (["--train-iters", "--lr", "1"], ["--train-iters", "takes a whole number, but has no value"]),
        (["--lr", "1", "2"], ["--lr 1 2", "takes a number, but has 2 values"]),
        (["--rampup-batch-size", "2", "2"], ["takes 3 whole numbers, but has 2 values"]),
        (["--bf16", "true"], ["--bf16 true", "is a switch and takes no value"]),
        (["--bf16=1"], ["is a switch and takes no value"]),
        (["--lr-decay-style", "Cosine"], ["one of constant, linear, cosine", "--lr-decay-style cosine."]),
        (["--save", ""], ["--save ''", "takes a text"]),
        (["--num-layers", "None"], ["takes a whole number"]),
        (["corpus", "--bf16"], ["corpus belongs to no flag.\n  Every setting starts"]),
        (["llama3-8b"], ["llama3-8b belongs to no flag.\n  Use --model llama3-8b."]),
        (["--print-config", "yes"], ["--print-config takes no value"]),
        (["--config"], ["--config takes one file"]),
    ],
)
def test_what_cannot_be_read_is_named(words: list[str], parts: list[str]) -> None:
    message = _error(*words)
    for part in parts:
        assert part in message


def test_all_problems_are_reported_together() -> None:
    """Forms of values, refused flags and rules between the others, in one message."""
    with pytest.raises(ConfigError) as caught:
        load([*BASE, "--hidden-sise", "7", "--lr", "abc", "--moe-layer-recompute", "--attention-dropout", "2"], 1)
    text = str(caught.value)
    assert len(caught.value.violations) == 4
    assert text.startswith("4 problems in the settings:\n")
    for part in (
        "--hidden-sise is not a flag",
        "--lr takes a number",
        "--moe-layer-recompute is refused",
        "--attention-dropout 2.0",
    ):
        assert part in text


def test_a_value_that_is_not_known_makes_no_second_problem() -> None:
    """A mistyped or refused value must not be followed by complaints about the default in its place."""
    for words in (["--lr", "abc"], ["--num-layer", "4"], ["--tokenizer-type", "TikTokenizer"]):
        cut = BASE.index({"--num-layer": "--num-layers"}.get(words[0], words[0]))
        with pytest.raises(ConfigError) as caught:
            load([*BASE[:cut], *BASE[cut + 2 :], *words], 1)
        assert [violation.message for violation in caught.value.violations if "missing" in violation.message] == []


def test_load_returns_settings_and_notes() -> None:
    loaded = load([*BASE, "--lr", "0.5", "--sequence-parallel"], 1)
    assert loaded.config.optimizer.lr == 0.5
    assert [note.split(" has no effect")[0] for note in loaded.notes[1:]] == ["--sequence-parallel"]
    assert loaded.notes[0] == "--lr 1e-3 is overridden by --lr 0.5, which comes later."
    assert load(BASE, 1).notes == ()


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("1", False), (None, True)])
def test_only_the_first_rank_speaks(
    rank: str | None, speaks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
    for words, code in ((["--lr", "abc"], 2), (["--help"], 0), (["--print-config"], 0)):
        with pytest.raises(SystemExit) as caught:
            load_or_exit(words)
        printed = capsys.readouterr()
        assert caught.value.code == code
        assert bool(printed.err) == (speaks and code == 2)
        assert bool(printed.out) == (speaks and code == 0)


def test_load_or_exit_returns_what_load_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_or_exit(BASE) == load(BASE, 1)
    assert capsys.readouterr() == ("", "")


def test_answers_without_torch_and_numpy() -> None:
    lines: tuple[list[str], ...] = (
        ["--help"],
        ["--help", "all"],
        ["--help", "lr"],
        [],
        [*BASE, "--print-config"],
        ["--help", "--lr", "x"],
        ["--lr", "x"],
    )
    program = (
        "import sys\n"
        "from megatron.config.cli import load_or_exit\n"
        f"for argv in {lines}:\n"
        "    try:\n        load_or_exit(argv)\n"
        "    except SystemExit as end:\n        print(end.code, file=sys.stderr)\n"
        "    assert not {'torch', 'numpy'} & set(sys.modules), f'heavy imports for {argv}'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert [line for line in done.stderr.splitlines() if line.isdigit()] == ["0", "0", "0", "2", "0", "0", "2"], done.stderr


def test_help_survives_a_reader_that_leaves() -> None:
    program = "from megatron.config.cli import parse; parse(['--help'])"
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_split_cuts_at_flags() -> None:
    stray, found = split_argv(["a", "--x_y", "1", "-2", "--z=3=4", "-q", "-inf"])
    assert stray == ["a"]
    assert found == [
        GivenFlag("x-y", ("1", "-2"), "--x_y"),
        GivenFlag("z", ("3=4",), "--z"),
        GivenFlag("-q", ("-inf",), "-q"),
    ]


def test_message_of_violations() -> None:
    heads = Violation(
        ("--num-attention-heads", "--tensor-model-parallel-size"),
        "--num-attention-heads 12 is not divisible by --tensor-model-parallel-size 8.",
        "Each tensor rank holds whole heads.",
        ("--tensor-model-parallel-size 4", "--tensor-model-parallel-size 6", "--num-attention-heads 16", "--bf16", "world size 4"),
    )
    assert str(ConfigError([heads])) == (
        "--num-attention-heads 12 is not divisible by --tensor-model-parallel-size 8.\n"
        "  Each tensor rank holds whole heads. Nearest valid: --tensor-model-parallel-size 4 or 6, --num-attention-heads 16, "
        "--bf16, world size 4."
    )
    plain = Violation((), "One.")
    assert str(ConfigError([plain, plain])) == "2 problems in the settings:\nOne.\nOne."
    assert isinstance(ConfigError([plain]), ValueError)
    assert str(ConfigError([plain])) == "One."


JOB = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --vocab-size 100".split()


def test_a_dry_run_needs_no_more_than_the_job() -> None:
    found = load([*JOB, "--dry-run", "--world-size", "24", "--tensor-model-parallel-size", "4"], 1)
    assert found.dry_run == DryRun(24, 8, None) and found.config.optimizer.lr is None and not found.config.data.mock_data
    found = load([*JOB, "--dry-run", "--gpus-per-node", "4", "--dry-run-json", "plan.json"], 3)
    assert found.dry_run == DryRun(3, 4, "plan.json")
    assert load([*JOB, "--dry-run", "--dry-run-html", "plan.html"], 1).dry_run == DryRun(1, 8, None, html_file="plan.html")
    assert load([*JOB, "--dry-run", "--plan-expert-imbalance", "1.5"], 1).dry_run == DryRun(1, 8, None, 1.5)
    for factor in ("0.5", "inf", "much", "nan"):
        with pytest.raises(ConfigError, match="--plan-expert-imbalance takes a number of at least 1"):
            load([*JOB, "--dry-run", "--plan-expert-imbalance", factor], 1)
    with pytest.raises(ConfigError) as error:
        load(JOB, 1)
    assert {violation.flags[0] for violation in error.value.violations} == {
        *("--lr", "--tokenizer-type", "--train-iters", "--data-path"),
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--dry-run --world-size 10000000", "--world-size takes a whole number from 1 to 1,048,576"),
        ("--dry-run --world-size 0", "takes a whole number from 1"),
        ("--dry-run --world-size -4", "takes a whole number from 1"),
        ("--dry-run --world-size eight", "takes a whole number from 1"),
        ("--dry-run --world-size " + "9" * 5000, "takes a whole number from 1"),
        ("--dry-run --gpus-per-node 0", "--gpus-per-node takes a whole number from 1"),
        ("--dry-run yes", "--dry-run takes no value"),
        ("--dry-run --dry-run-json", "takes one file"),
        ("--world-size 8", "--world-size is for --dry-run only, which is not given.\n  The number of ranks of a run comes from"),
        ("--gpus-per-node 8", "--gpus-per-node is for --dry-run only"),
        ("--dry-run-json x", "--dry-run-json is for --dry-run only"),
        ("--dry-run-html x", "--dry-run-html is for --dry-run only"),
        ("--dry-run --world-size 6 --tensor-model-parallel-size 4", "The world size 6 is not divisible by TP x CP x PP = 4 x 1"),
        ("--dry-run --lr 0", "--lr 0.0 is out of range"),
        ("--explain", "--explain takes the name of one flag"),
    ],
)
def test_bad_requests_are_answered_in_words(words: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        load([*JOB, *words.split()], 4)
    assert expected in str(error.value)
