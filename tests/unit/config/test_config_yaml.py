"""Settings from a file: below the user's own flags, with the same errors, and back from --print-config."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from megatron.config.cli import load, parse
from megatron.config.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that does not exist yet."""
    return tmp_path / "run.yaml"


def _error(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    return str(caught.value)


def test_keys_are_flag_names_flat_or_by_topic(file: Path) -> None:
    file.write_text(
        "# a comment\n"
        "num-layers: 12\n"
        "adam_eps: 1e-8\n"
        "bf16: true\n"
        "no-save-optim: true\n"
        "mock_data: false\n"
        "no_load_optim: false\n"
        "model:\n"
        "  hidden_size: 64\n"
        "  rotary-base: 5.0e+5\n"
        "optimizer: sgd\n"
        "training:\n"
        "  rampup_batch_size: [2, 2, 100]\n"
        "  iterations_to_skip: []\n"
        "data: {split: '969, 30, 1', data_path: corpus}\n"
        "logging:\n"
        "  profile_ranks:\n"
        "  - 0\n"
        "  - 3\n"
        "lr_decay_iters: null\n"
        "wandb_exp_name: no\n"
    )
    config = parse(["--config", str(file)])
    assert (config.model.num_layers, config.model.hidden_size, config.model.rotary_base) == (12, 64, 5e5)
    assert (config.optimizer.adam_eps, config.optimizer.optimizer, config.optimizer.lr_decay_iters) == (1e-8, "sgd", None)
    assert config.precision.bf16 and not config.data.mock_data
    assert not config.checkpoint.save_optim and config.checkpoint.load_optim
    assert (config.training.rampup_batch_size, config.training.iterations_to_skip) == ((2, 2, 100), ())
    assert (config.data.split, config.data.data_path) == ("969, 30, 1", ("corpus",))
    assert (config.logging.profile_ranks, config.logging.wandb_exp_name) == ((0, 3), "no")


def test_a_topic_may_have_the_name_of_a_flag(file: Path) -> None:
    file.write_text("optimizer:\n  optimizer: sgd\n  lr: 0.5\n")
    assert parse(["--config", str(file)]).optimizer.optimizer == "sgd"


@pytest.mark.parametrize("place", ["first", "middle", "last", "equals"])
def test_the_users_flags_win_wherever_the_file_is_named(place: str, file: Path) -> None:
    file.write_text("lr: 0.5\nswiglu: true\nseed: 7\nsave: folder\n")
    own = ["--lr", "0.25", "--no-swiglu", "--save", "None"]
    named = [f"--config={file}"] if place == "equals" else ["--config", str(file)]
    at = {"first": 0, "middle": 2, "last": len(own), "equals": 2}[place]
    config = parse([*own[:at], *named, *own[at:]])
    assert (config.optimizer.lr, config.model.swiglu, config.training.seed, config.checkpoint.save) == (0.25, False, 7, None)


def test_a_later_file_wins_over_an_earlier_one(file: Path, tmp_path: Path) -> None:
    file.write_text("lr: 0.5\nseed: 7\n")
    (tmp_path / "second.yaml").write_text("lr: 0.25\n")
    config = parse(["--config", str(file), "--config", str(tmp_path / "second.yaml")])
    assert (config.optimizer.lr, config.training.seed) == (0.25, 7)


def test_overruling_a_file_is_no_news(file: Path) -> None:
    base = shlex.split(
        "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 2 --lr 1e-3 --train-iters 10 "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 100"
    )
    file.write_text("lr: 0.5\n")
    assert load(["--config", str(file), *base], 1).notes == ()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("lr: 0.5\nnum-layrs: 3\n", ["line 2: --num-layrs is not a flag", "--num-layers"]),
        ("lr: abc\n", ["line 1: --lr abc", "takes a number"]),
        ("num_layers: 1.5\n", ["--num-layers 1.5", "takes a whole number"]),
        ("num_layers: true\n", ["--num-layers true", "takes a whole number"]),
        ("num_layers: null\n", ["takes a whole number, but has no value"]),
        ("bf16: 1\n", ["--bf16 1", "true or false"]),
        ("bf16: null\n", ["--bf16 null", "true or false"]),
        ("bf16: 'true'\n", ["true or false"]),
        ("rampup_batch_size: 2\n", ["takes 3 whole numbers, but has 1 value"]),
        ("lr: [1, 2]\n", ["--lr takes a number, but has 2 values."]),
        ("lr_decay_style: Cosine\n", ["--lr-decay-style cosine"]),
        ("tokenizer-type: SFTTokenizer\n", ["SFTTokenizer is not supported yet"]),
        ("model:\n  distribute-saved-activations: true\n", ["line 2: --distribute-saved-activations is refused"]),
        ("tensor-model-parallel-size: [1, 2]\n", ["takes a whole number, but has 2 values."]),
        ("model: 3\n", ["line 1: model is a topic that contains settings, not a setting."]),
        ("seed: 1\ndata:\n", ["line 2: data is a topic that contains settings"]),
        ("moe-extended-tp: true\n", ["--moe-extended-tp is refused"]),
        ("data_path: [--bf16]\n", ["takes any number of texts"]),
        ("lr: 1\nlr: 2\n", ["line 2: lr was already set in", "line 1"]),
        ("lr: 1\noptimizer: {lr: 2}\n", ["line 2: lr was already set"]),
        ("bf16: true\nno-bf16: true\n", ["bf16 was already set"]),
        ("model: {lr: 1}\n", ["lr belongs under optimizer, not under model"]),
        ("model: {no-save-optim: true}\n", ["save_optim belongs under checkpoint, not under model"]),
        ("modle: {lr: 1}\n", ["modle is not a setting", "model, training, spikes"]),
        ("lr: {a: 1}\n", ["lr is not a setting"]),
        ("data_path: [[a]]\n", ["data_path is not a setting"]),
        ("[1]: 2\n", ["the key is not a setting"]),
        ("config: other.yaml\n", ["config is allowed on the command line only"]),
        ("print_config: true\n", ["print_config is allowed on the command line only"]),
        ("- lr\n", ["not a mapping"]),
        ("lr\n", ["not a mapping"]),
        ("lr: [1\n", ["not valid YAML"]),
    ],
)
def test_errors_name_the_file(text: str, parts: list[str], file: Path) -> None:
    file.write_text(text)
    message = _error("--config", str(file))
    assert str(file) in message
    for part in parts:
        assert part in message


def test_a_file_that_cannot_be_read(file: Path) -> None:
    assert "cannot be read: No such file" in _error("--config", str(file))
    assert "cannot be read: Is a directory" in _error("--config", str(file.parent))
    file.write_bytes(b"\xff\xfe\xfa")
    assert "not text in UTF-8" in _error("--config", str(file))


def test_all_problems_of_a_file_are_reported_with_those_of_the_command_line(file: Path) -> None:
    file.write_text("lr: 1\nlr: 2\nmodel: {seed: 1}\n")
    message = _error("--config", str(file), "--bf16=3")
    assert message.startswith("3 problems")


def test_saying_no_to_what_is_refused_is_fine_and_what_has_no_effect_is_noted(file: Path) -> None:
    base = (
        "num-layers: 4\nhidden-size: 64\nnum-attention-heads: 8\nseq-length: 32\nmicro-batch-size: 2\nlr: 1e-3\ntrain-iters: 10\n"
        "mock-data: true\ntokenizer-type: NullTokenizer\nvocab-size: 100\n"
    )
    file.write_text(base + "multi-latent-attention: false\nuse-flash-attn: true\ntransformer_impl: local\n")
    first, second = load(["--config", str(file)], 1).notes
    assert first.startswith(f"{file} line 12: --use-flash-attn has no effect")
    assert second.startswith(f"{file} line 13: --transformer-impl local has no effect")


def test_an_empty_file_sets_nothing(file: Path) -> None:
    file.write_text("# nothing\n")
    assert parse(["--config", str(file)]) == parse([])


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--adam-eps", "1e-08", "--lr", "0.1", "--rotary-base", "1e30", "--initial-loss-scale", "4294967296"],
        ["--rampup-batch-size", "2", "2", "100", "--profile-ranks", "3", "1", "--iterations-to-skip", "4"],
        ["--save", "a folder: #1", "--load", "null", "--data-path", "- x", "true", "--split", "969, 30, 1"],
        ["--no-save-optim", "--swiglu", "--fp16", "--wandb-exp-name", "é 'quoted' \"text\"", "--metrics-file=--m"],
    ],
)
def test_print_config_goes_back_through_config(words: list[str], file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse([*words, "--print-config"])
    assert caught.value.code == 0
    file.write_text(capsys.readouterr().out)
    assert parse(["--config", str(file)]) == parse(words)


def test_print_config_still_names_bad_values() -> None:
    assert "takes a number" in _error("--print-config", "--lr", "abc")


def test_print_config_does_not_ask_for_a_complete_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(["--print-config"], 3)
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("model:\n  num_layers: 0\n")


def test_near_flags_are_looked_for_a_few_unknown_keys_only(file: Path) -> None:
    file.write_text("".join(f"key{number}: 1\n" for number in range(2000)))
    lines = _error("--config", str(file)).splitlines()
    assert lines[0] == "21 problems in the settings:" and lines[1] == f"{file} line 1: --key0 is not a flag."
    assert lines[-2] == f"{file} line 21: --key20 is not a flag, and 1,979 more are unknown."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1\n" + "lr: 1\n" * 30, "has 10 more problems.\n  Is it the right file?"),
        ("".join(f"k{number}: 1\n" for number in range(10_001)), "holds more than 10,000 settings."),
        (f"model: &a {{{'a: 1, ' * 5000}}}\n" + "model: *a\n" * 5000, "holds more than 10,000 settings."),
        (f"data_path: [{'1,' * 100_000}]\n", "holds more than 100,000 keys and values."),
        (f"lr: 1\ndata_path: {'[' * 30}{']' * 30}\n", "line 2 has more than 20 levels."),
        ("[" * 900_000, "line 1 has more than 20 levels."),
        ("#" * 1_000_001, "cannot be read: it has more than 1,000,000 bytes."),
    ],
    ids=["twice", "settings", "aliases", "values", "levels", "no levels end", "bytes"],
)
def test_what_is_too_much_for_settings_is_refused_in_words(text: str, message: str, file: Path) -> None:
    file.write_text(text)
    assert f"{file} {message}" in _error("--config", str(file))


def test_as_much_as_is_allowed_is_read(file: Path) -> None:
    file.write_text(f"data_path: [{'a,' * 90_000}]\n{'#' * 819_000}")
    assert len(parse(["--config", str(file)]).data.data_path) == 90_000


def test_a_device_is_not_read_but_a_pipe_is(tmp_path: Path) -> None:
    link = tmp_path / "shard"
    link.symlink_to("/dev/zero")
    assert f"{link} cannot be read: it is not a regular file, but a device." in _error("--config", str(link))
    os.mkfifo(tmp_path / "idle")
    assert f"{tmp_path}/idle cannot be read: it is a pipe to which no process writes." in _error("--config", f"{tmp_path}/idle")
    assert "cannot be read: embedded null byte" in _error("--config", "a\0b")
    reading, writing = os.pipe()
    try:
        os.write(writing, b"lr: 0.5\n")
        os.close(writing)
        assert parse(["--config", f"/dev/fd/{reading}"]).optimizer.lr == 0.5
    finally:
        os.close(reading)
