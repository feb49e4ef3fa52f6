"""Flags under the names of other frameworks: each gets advice that names flags of this project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.config.cli import load, parse
from megatron.config.errors import ConfigError
from megatron.config.flags import find_flag, get_flags
from megatron_lab.migration.compat import COMPAT_FLAGS, TRANSLATIONS, NoEffectFlag
from megatron_lab.migration.flag_synonyms import find_advice, read_synonyms
from megatron_lab.pages.flag_help import PROGRAM_FLAGS

ROOT = Path(__file__).resolve().parents[3]


def _error(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    return str(caught.value)


@pytest.mark.parametrize(
    "flag, expected",
    [
        ("--learning-rate", ["--learning-rate is not a flag.\n  Use --lr."]),
        ("--learning_rate", ["Use --lr."]),
        ("--training.lr-min", ["Use --min-lr, a learning rate."]),
        ("--optimizer.lr", ["Use --lr."]),
        ("--epochs", ["--train-epochs", "--train-iters", "--train-samples"]),
        ("--num_train_epochs", ["--train-epochs", "--train-iters", "--train-samples"]),
        ("--load_best_model_at_end", ["--keep-best"]),
        ("--early_stopping_threshold", ["--early-stopping-min-delta"]),
        ("--preset", ["--model NAME", "--recipe NAME"]),
        ("--batch-size", ["--micro-batch-size", "--global-batch-size"]),
        ("--per_device_train_batch_size", ["Use --micro-batch-size"]),
        ("--gradient_accumulation_steps", ["--global-batch-size"]),
        ("--output_dir", ["--save", "--load"]),
        ("--resume_from_checkpoint", ["--load"]),
        ("--n_layer", ["--num-layers"]),
        ("--block_size", ["--seq-length"]),
        ("--max-steps", ["--train-iters"]),
        ("--warmup-steps", ["--lr-warmup-iters"]),
        ("--tp", ["--tensor-model-parallel-size"]),
        ("--gpus", ["--nproc"]),
        ("--dataset", ["--dataset 1 is refused.\n  Use --data-path"]),
        ("--warmup", ["--lr-warmup-iters", "--lr-warmup-fraction"]),
        ("--preemption", ["--exit-signal-code"]),
        ("--timeout", ["--distributed-timeout-minutes"]),
    ],
)
def test_a_synonym_is_answered_with_the_flag(flag: str, expected: list[str]) -> None:
    message = _error(flag, "1")
    assert all(part in message for part in expected), message
    assert "log-learning-rate-to-tensorboard" not in message


def test_an_unknown_name_points_to_the_search() -> None:
    assert _error("--zzz") == "--zzz is not a flag.\n  --help WORD searches the flags."


def test_a_misspelling_of_a_flag_gets_its_nearest_name() -> None:
    assert "--lr-decay-iters" in _error("--lr-decay-itres", "3")


def test_settings_that_the_advice_names_are_not_reported_as_missing() -> None:
    argv = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --train-iters 5 --mock-data"
    )
    with pytest.raises(ConfigError) as caught:
        load([*argv.split(), "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--learning-rate", "1e-3"], 1)
    assert str(caught.value) == "--learning-rate is not a flag.\n  Use --lr."


def test_advice_names_flags_and_files_that_exist() -> None:
    for name, advice in read_synonyms().items():
        assert advice.endswith("."), name
        flags = re.findall(r"(?<![\w-])--([a-z][\w-]*)", advice.replace("torchrun --nnodes", "torchrun"))
        assert all(find_flag(flag) is not None or flag in PROGRAM_FLAGS for flag in flags), (name, advice)
        assert all((ROOT / path).exists() for path in re.findall(r"(?:tools|docs)/[\w.]*\w", advice)), (name, advice)


def test_values_in_advice_are_accepted() -> None:
    """The first one after a flag that has choices, such as --lr-decay-style cosine."""
    checked = set()
    for advice in read_synonyms().values():
        for name, value in re.findall(r"--([\w-]+) ([\w-]+)", advice):
            flag = find_flag(name)
            if flag is not None and flag.choices and value not in ("or", "and", "if"):
                assert value in flag.choices, advice
                checked.add(name)
    assert {"lr-decay-style", "data-parallel-sharding-strategy", "device", "normalization"} <= checked


def test_no_synonym_hides_a_flag() -> None:
    for name in read_synonyms():
        assert find_flag(name) is None and name not in PROGRAM_FLAGS and name not in TRANSLATIONS, name
        assert isinstance(COMPAT_FLAGS.get(name), NoEffectFlag | None), f"{name} has advice in compat.py too"


def test_a_flag_of_a_section_is_found_by_its_last_name() -> None:
    assert find_advice("training.seq-length") == "Use --seq-length."
    assert find_advice("seq-length") is None and find_advice("no.such-flag") is None
    assert all(find_advice(f"section.{name}") == f"Use --{name}." for name in get_flags() if name not in read_synonyms())
