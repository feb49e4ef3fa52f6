"""Settings there and back, the record of a run, and settings taken from a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import platform
from importlib import metadata
from pathlib import Path

import pytest
import xxhash
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.cli import load, parse
from megatron.config.config import Config
from megatron.config.errors import ConfigError
from megatron.config.flags import Flag, get_flags
from megatron.config.save import from_dict, run_record, to_dict, to_yaml
from megatron.config.version import DISTRIBUTION, __version__

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --tokenizer-type NullTokenizer --vocab-size 100"
RUN = "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data"


def _values(flag: Flag) -> st.SearchStrategy[object]:
    if flag.choices:
        one: st.SearchStrategy[object] = st.sampled_from(flag.choices)
    else:
        kinds: dict[type, st.SearchStrategy[object]] = {
            bool: st.booleans(),
            int: st.integers(-(10**15) + 1, 10**15 - 1),
            float: st.floats(allow_nan=False),
            str: st.text(),
        }
        one = kinds[flag.value_type]
    if flag.is_tuple:
        one = st.lists(one, min_size=flag.num_values or 0, max_size=flag.num_values or 3).map(tuple)
    return st.one_of(st.none(), one) if flag.is_optional else one


@st.composite
def _configs(draw: st.DrawFn, least: int = 0, most: int = 8) -> Config:
    config = Config()
    every = sorted(get_flags().values(), key=lambda flag: flag.name)
    chosen = draw(st.sets(st.sampled_from(every), min_size=least, max_size=most))
    for flag in sorted(chosen, key=lambda flag: flag.name):  # the order of a set differs from run to run
        part = dataclasses.replace(getattr(config, flag.topic), **{flag.field: draw(_values(flag))})
        config = dataclasses.replace(config, **{flag.topic: part})
    return config


@given(_configs())
def test_settings_go_through_json_and_back(config: Config) -> None:
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@settings(max_examples=max(4, settings().max_examples // 4))
@given(_configs(least=16, most=32))
def test_yaml_holds_the_same(config: Config) -> None:
    """A file has all settings and is read slowly: few files, each with many that differ from their defaults."""
    assert from_dict(yaml.safe_load(to_yaml(config))) == config


@pytest.mark.parametrize("text", ["\x85", "a\x85b", "a\u2028b", "\u2029", "ä\x85", "a\nb", "ä"])
def test_line_breaks_go_through_yaml_and_back(text: str) -> None:
    config = Config(data=dataclasses.replace(Config().data, vocab_file=text))
    assert from_dict(yaml.safe_load(to_yaml(config))) == config
    assert ("ä" in to_yaml(config)) == (text == "ä")


def test_types_survive() -> None:
    config = from_dict(json.loads(json.dumps(to_dict(parse(["--rampup-batch-size", "2", "2", "9", "--rotary-base", "5"])))))
    assert config.training.rampup_batch_size == (2, 2, 9)
    assert type(config.model.rotary_base) is float
    assert type(from_dict({"model": {"rotary_base": 5}}).model.rotary_base) is float


def test_missing_fields_take_their_defaults() -> None:
    assert from_dict({"model": {"num_layers": 3}}) == parse(["--num-layers", "3"])


@pytest.mark.parametrize(
    ("nested", "part"),
    [
        ({"model": {"num_layrs": 3}}, "model.num_layrs is not a setting"),
        ({"modle": {}}, "modle is not a topic"),
        ({"model": 3}, "model is not a topic"),
        ({"model": {"num_layers": "3"}}, "model.num_layers must be a whole number, not '3'"),
        ({"model": {"num_layers": True}}, "model.num_layers must be a whole number"),
        ({"model": {"num_layers": 3.0}}, "model.num_layers must be a whole number"),
        ({"model": {"num_layers": None}}, "model.num_layers must be a whole number"),
        ({"model": {"swiglu": 1}}, "model.swiglu must be true or false"),
        ({"model": {"normalization": "BatchNorm"}}, "model.normalization must be one of LayerNorm, RMSNorm"),
        ({"model": {"rotary_base": "5"}}, "model.rotary_base must be a number"),
        ({"training": {"rampup_batch_size": [1, 2]}}, "training.rampup_batch_size must be 3 whole numbers"),
        ({"data": {"data_path": "x"}}, "data.data_path must be any number of texts"),
        ({"data": {"split": ["1"]}}, "data.split must be a text"),
    ],
)
def test_what_does_not_fit_is_named(nested: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(nested)
    assert part in str(caught.value)


def test_everything_that_does_not_fit_is_named_together() -> None:
    with pytest.raises(ConfigError, match=r"model\.a is not a setting.*model\.b is not a setting.*x is not a topic"):
        from_dict({"model": {"a": 1, "b": 2}, "x": {}})


def test_run_record() -> None:
    argv = ["--num-layers", "3"]
    record = run_record(parse(argv), argv)
    assert json.loads(json.dumps(record)) == record
    assert from_dict(record["config"]) == parse(argv)
    assert record["command"] == argv
    assert record["versions"]["python"] == platform.python_version() and record["versions"][DISTRIBUTION] == __version__
    for package in ("torch", "tyro", "PyYAML"):
        assert record["versions"][package] == metadata.version(package)
    assert "wandb" not in record["versions"] or metadata.version("wandb")


def _checkpoint(folder: Path, flags_: str, step: int = 100, newest: str | None = None) -> None:
    place = folder / f"iter_{step:07d}"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(run_record(parse(flags_.split()), flags_.split())))
    (folder / "latest_checkpointed_iteration.txt").write_text(newest if newest is not None else f"{step}\n")


def test_the_model_and_the_tokenizer_come_from_the_checkpoint(tmp_path: Path) -> None:
    _checkpoint(tmp_path, f"{MODEL} --swiglu --ffn-hidden-size 96 --lr 7 --seed 5")
    config = load([*RUN.split(), "--load", str(tmp_path), "--use-checkpoint-args"], 1).config
    assert config.model == parse([*MODEL.split(), "--swiglu", "--ffn-hidden-size", "96"]).model
    assert (config.data.tokenizer_type, config.data.vocab_size) == ("NullTokenizer", 100)
    assert (config.optimizer.lr, config.training.seed) == (1e-3, 1234)


def test_ckpt_step_chooses_the_checkpoint(tmp_path: Path) -> None:
    _checkpoint(tmp_path, MODEL, step=100)
    _checkpoint(tmp_path, f"{MODEL} --swiglu --ffn-hidden-size 96", step=200)
    words = [*RUN.split(), "--load", str(tmp_path), "--use-checkpoint-args"]
    assert load(words, 1).config.model.swiglu
    assert not load([*words, "--ckpt-step", "100"], 1).config.model.swiglu


@pytest.mark.parametrize("newest", ["release", "300", None], ids=str)
def test_a_latest_file_that_names_nothing_is_passed_over(newest: str | None, tmp_path: Path) -> None:
    """As when the run itself looks for its checkpoint."""
    _checkpoint(tmp_path, MODEL, step=100)
    _checkpoint(tmp_path, f"{MODEL} --swiglu --ffn-hidden-size 96", step=200, newest=newest or "")
    if newest is None:
        (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert load([*RUN.split(), "--load", str(tmp_path), "--use-checkpoint-args"], 1).config.model.swiglu


def test_the_model_comes_from_the_pretrained_checkpoint_until_the_run_has_its_own(tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    _checkpoint(base, f"{MODEL} --swiglu --ffn-hidden-size 96", step=0)
    words = [*RUN.split(), "--load", str(run), "--use-checkpoint-args", "--pretrained-checkpoint"]
    for folder in (base, base / "iter_0000000"):
        assert load([*words, str(folder)], 1).config.model.swiglu
    _checkpoint(run, MODEL)
    assert not load([*words, str(base)], 1).config.model.swiglu


def test_settings_come_through_a_url(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    _checkpoint(tmp_path, f"{MODEL} --swiglu --ffn-hidden-size 96", step=0)
    words = [*RUN.split(), "--use-checkpoint-args", "--load"]
    assert load([*words, tmp_path.as_uri()], 1).config.model.swiglu
    for url, part in (("nothing-of-the-kind://bucket/run", "pip install"), (f"{tmp_path.as_uri()}/none", "There is no checkpoint")):
        with pytest.raises(ConfigError, match=part):
            load([*words, url], 1)


def test_what_may_differ_may_be_given(tmp_path: Path) -> None:
    """The length of a sample; and the stretch of rotary positions, where the run only begins with the weights."""
    _checkpoint(tmp_path, MODEL)
    words = [*RUN.split(), "--use-checkpoint-args", "--load", str(tmp_path)]
    shorter = load([*words, "--seq-length", "16"], 1).config.model
    assert (shorter.seq_length, shorter.num_positions) == (16, 32)  # the position table keeps its rows
    rotary = tmp_path / "rotary"
    _checkpoint(rotary, f"{MODEL} --position-embedding-type rope")
    stretched = [*RUN.split(), "--use-checkpoint-args", "--rotary-base", "500000"]
    for begins in (["--pretrained-checkpoint", str(rotary)], ["--load", str(rotary), "--finetune"]):
        assert load([*stretched, *begins], 1).config.model.rotary_base == 500000
    with pytest.raises(ConfigError, match="--rotary-base is given as 500000"):
        load([*stretched, "--load", str(rotary)], 1)


def test_a_checkpoint_without_a_tokenizer_leaves_it_to_the_flags(tmp_path: Path) -> None:
    """Weights that were imported alone."""
    model, _, tokenizer = MODEL.partition(" --tokenizer-type")
    _checkpoint(tmp_path, model)
    words = [*RUN.split(), "--use-checkpoint-args", "--pretrained-checkpoint", str(tmp_path)]
    config = load([*words, *f"--tokenizer-type {tokenizer}".split()], 1).config
    assert (config.data.tokenizer_type, config.data.vocab_size, config.model.num_layers) == ("NullTokenizer", 100, 4)


def test_damaged_settings_are_passed_over_for_older_ones(tmp_path: Path) -> None:
    """As the load does; but for a checkpoint that is asked for by its number."""
    _checkpoint(tmp_path, MODEL, step=100)
    _checkpoint(tmp_path, f"{MODEL} --swiglu --ffn-hidden-size 96", step=200)
    file = tmp_path / "iter_0000200/config.json"
    manifest = {"files": {"config.json": {"bytes": 1, "checksum": f"xxh3:{xxhash.xxh3_64_hexdigest(file.read_bytes())}"}}}
    (file.parent / "manifest.json").write_text(json.dumps(manifest))
    words = [*RUN.split(), "--load", str(tmp_path), "--use-checkpoint-args"]
    assert load(words, 1).config.model.swiglu
    file.write_text(file.read_text().replace('"num_layers": 4', '"num_layers": 8'))
    assert not load(words, 1).config.model.swiglu
    with pytest.raises(ConfigError, match="was altered since it was saved"):
        load([*words, "--ckpt-step", "200"], 1)


def test_the_files_of_the_tokenizer_come_along_unless_they_are_given(tmp_path: Path) -> None:
    here = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --tokenizer-type GPT2BPETokenizer"
    _checkpoint(tmp_path, f"{here} --vocab-file a/vocab.json --merge-file a/merges.txt")
    words = [*RUN.split(), "--use-checkpoint-args", "--load", str(tmp_path)]
    data = load(words, 1).config.data
    assert (data.vocab_file, data.merge_file) == ("a/vocab.json", "a/merges.txt")
    data = load([*words, "--vocab-file", "b.json", "--merge-file", "b.txt"], 1).config.data
    assert (data.vocab_file, data.merge_file) == ("b.json", "b.txt")


def test_flags_that_agree_with_the_checkpoint_are_fine(tmp_path: Path) -> None:
    _checkpoint(tmp_path, MODEL)
    words = [*RUN.split(), "--load", str(tmp_path), "--use-checkpoint-args"]
    agreeing = f"{MODEL} --ffn-hidden-size 256 --kv-channels 8 --max-position-embeddings 32".split()
    assert load([*words, *agreeing], 1) == load(words, 1)
    assert load([*words, "--ffn-hidden-size", "None"], 1) == load(words, 1)


def test_settings_of_the_checkpoint_get_no_note(tmp_path: Path) -> None:
    """The user has not set them, so "has no effect" would tell him nothing."""
    length = "--max-position-embeddings 64"
    _checkpoint(tmp_path, f"{MODEL} --position-embedding-type rope {length}")
    words = [*RUN.split(), "--load", str(tmp_path), "--use-checkpoint-args"]
    assert load(words, 1).notes == ()
    (note,) = load([*words, *length.split()], 1).notes
    assert note == f"{length} has no effect: there is no learned position table."


@pytest.mark.parametrize(
    ("extra", "name", "mine", "theirs"),
    [
        ("--num-layers 5", "--num-layers", "5", "4"),
        ("--ffn-hidden-size 100", "--ffn-hidden-size", "100", "256"),
        ("--swiglu", "--swiglu", "True", "False"),
        ("--vocab-size 7", "--vocab-size", "7", "100"),
        ("--tokenizer-type ByteTokenizer", "--tokenizer-type", "ByteTokenizer", "NullTokenizer"),
    ],
)
def test_a_flag_that_contradicts_the_checkpoint_is_an_error(extra: str, name: str, mine: str, theirs: str, tmp_path: Path) -> None:
    _checkpoint(tmp_path, MODEL)
    with pytest.raises(ConfigError) as caught:
        load([*RUN.split(), "--load", str(tmp_path), "--use-checkpoint-args", *extra.split()], 1)
    (violation,) = caught.value.violations
    assert violation.flags == (name, "--use-checkpoint-args")
    wanted = f"{name} is given as {mine}, but the checkpoint {tmp_path}/iter_0000100 was trained with {theirs}."
    assert wanted in str(caught.value)


def test_all_contradictions_are_named_together(tmp_path: Path) -> None:
    _checkpoint(tmp_path, MODEL)
    with pytest.raises(ConfigError) as caught:
        load(
            ["--lr", "1", "--num-layers", "5", "--swiglu", "--keep-last", "3", "--load", str(tmp_path), "--use-checkpoint-args"], 1
        )
    named = {violation.flags[0] for violation in caught.value.violations}
    assert {"--num-layers", "--swiglu", "--micro-batch-size", "--train-iters", "--data-path"} == named


def test_settings_of_another_version_beside_the_model_do_not_matter(tmp_path: Path) -> None:
    _checkpoint(tmp_path, MODEL)
    file = tmp_path / "iter_0000100" / "config.json"
    record = json.loads(file.read_text())
    record["config"]["data"]["from_another_version"] = 1
    record["config"]["logging"]["from_another_version"] = 1
    file.write_text(json.dumps(record))
    words = [*RUN.split(), "--load", str(tmp_path), "--use-checkpoint-args"]
    assert load(words, 1).config.model.num_layers == 4
    record["config"]["model"]["from_another_version"] = 1
    file.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"model\.from_another_version is not a setting"):
        load(words, 1)


def test_a_checkpoint_from_before_a_setting_existed(tmp_path: Path) -> None:
    """What it could not know has its default: it is resumed, and its model taken, as before."""
    _checkpoint(tmp_path, MODEL)
    file = tmp_path / "iter_0000100" / "config.json"
    record = json.loads(file.read_text())
    for name in ("fsdp_shard_size", "fsdp_reshard_after_forward", "use_distributed_optimizer", "overlap_param_gather"):
        del record["config"]["parallel"][name]
    for name in ("optimizer_cpu_offload", "optimizer_offload_fraction"):
        del record["config"]["optimizer"][name]
    del record["config"]["model"]["qk_layernorm"]
    file.write_text(json.dumps(record))
    assert from_dict(record["config"]) == parse(MODEL.split())
    sharded = ["--data-parallel-sharding-strategy", "optim_grads_params", "--fsdp-shard-size", "2"]
    config = load([*RUN.split(), "--load", str(tmp_path), "--use-checkpoint-args", *sharded], 4).config
    assert config.model == parse(MODEL.split()).model
    assert (config.parallel.sharding, config.parallel.fsdp_shard_size) == ("optim_grads_params", 2)


@pytest.mark.parametrize(
    ("content", "newest", "part"),
    [
        (None, None, "There is no checkpoint in"),
        (None, "release", "There is no checkpoint in"),
        ("", "100", "config.json cannot be read: No such file"),
        ("{", "100", "is not valid JSON"),
        ("[]", "100", "no mapping named config"),
        ('{"config": 3}', "100", "no mapping named config"),
        ('{"model_type": "llama"}', "100", "belongs to a model of Hugging Face"),
        ('{"config": {"model": {}}}', "100", "no settings of the model and the data"),
        ('{"config": {"model": {"num_layers": "4"}, "data": {}}}', "100", "model.num_layers must be a whole number"),
    ],
)
def test_a_checkpoint_without_readable_settings_is_one_clear_error(
    content: str | None, newest: str | None, part: str, tmp_path: Path
) -> None:
    if newest is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(newest)
    if content is not None:
        (tmp_path / "iter_0000100").mkdir()
        if content:
            (tmp_path / "iter_0000100" / "config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        load([*RUN.split(), "--load", str(tmp_path), "--use-checkpoint-args"], 1)
    (violation,) = caught.value.violations
    assert part in violation.message
    assert "--use-checkpoint-args" in violation.flags


def test_print_config_shows_what_came_from_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _checkpoint(tmp_path, MODEL)
    words = ["--load", str(tmp_path), "--use-checkpoint-args"]
    with pytest.raises(SystemExit):
        parse([*words, "--print-config"])
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert parse(["--config", str(file)]) == parse(words)
    assert parse(words).model.num_layers == 4
