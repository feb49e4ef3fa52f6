"""Recipes by name: published training settings that pass all checks, with their sources, below the user's own flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.config.cli import LoadedConfig, load, load_values
from megatron.config.errors import ConfigError
from megatron.config.model_files import list_models, read_descriptions
from megatron.config.yaml_file import read_yaml
from megatron_lab.pages.model_tables import format_recipe_table

RECIPES = read_descriptions("recipe")
RUN = ["--dry-run", "--world-size", "1", "--micro-batch-size", "1"]


def _load(*argv: str) -> LoadedConfig:
    return load([*argv, *RUN], 1)


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_is_valid_with_its_model_and_names_its_source(name: str) -> None:
    recipe = RECIPES[name]
    loaded = _load("--recipe", name)
    assert recipe.model == name and name in list_models()
    assert loaded.notes[0] == f"--recipe {name} has the settings of {recipe.source}"
    assert re.search(r"\((.+ 20\d\d|karpathy/nanoGPT)[,;)].*", recipe.source), "who published it, and where"
    assert all("has no effect" not in note for note in loaded.notes)
    assert set(recipe.properties) <= {"Model", "Tokens", "Not published", "Differs"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_batch_length_schedule_and_optimizer(name: str) -> None:
    config = _load("--recipe", name).config
    settings = {item.name for item in read_yaml(str(RECIPES[name].path))}
    assert {"seq-length", "optimizer", "lr", "min-lr", "lr-decay-style"} <= settings
    batch_sizes = config.training.compute_batch_sizes(1, config.model.seq_length)
    samples = config.training.train_samples or (config.training.train_iters or 0) * batch_sizes[-1][1]
    tokens = (
        float(RECIPES[name].properties["Tokens"].partition(" ")[0]) * {"B": 1e9, "T": 1e12}[RECIPES[name].properties["Tokens"][-1]]
    )
    assert samples * config.model.seq_length == pytest.approx(tokens, rel=0.005)


def test_values_of_the_publications() -> None:
    """Llama 2, table 1 and section 2.2; GPT-3, table 2.1 and appendix B; Llama 3, section 3.4.1."""
    llama = _load("--recipe", "llama2-70b").config
    assert (llama.training.global_batch_size, llama.model.seq_length) == (4 * 2**20 // 4096, 4096)
    assert (llama.optimizer.lr, llama.optimizer.min_lr, llama.optimizer.lr_warmup_iters) == (1.5e-4, 1.5e-5, 2000)
    assert (llama.optimizer.adam_beta1, llama.optimizer.adam_beta2, llama.optimizer.adam_eps) == (0.9, 0.95, 1e-5)
    gpt = _load("--recipe", "gpt3-175b").config
    assert gpt.training.train_samples == 300 * 10**9 // 2048 and gpt.optimizer.lr_decay_samples == 260 * 10**9 // 2048
    assert (gpt.optimizer.lr, gpt.optimizer.lr_warmup_samples, gpt.optimizer.weight_decay) == (6e-5, 375 * 10**6 // 2048, 0.1)
    large = _load("--recipe", "llama3-405b").config
    batches = large.training.compute_batch_sizes(1, 8192)
    first, second = batches[1][0], batches[2][0]
    assert [tokens * 8192 for _, tokens in batches] == [4 * 2**20, 8 * 2**20, 16 * 2**20]
    steps = -(-first // 512)  # 4 M tokens a step
    assert large.optimizer.lr_warmup_samples == steps * 512 + (8_000 - steps) * 1024
    steps_before_last = steps + -(-(second - steps * 512) // 1024)
    samples = steps * 512 + (steps_before_last - steps) * 1024
    assert large.optimizer.lr_decay_samples == pytest.approx(samples + (1_200_000 - steps_before_last) * 2048, rel=1e-6)


def test_flags_and_files_replace_settings_of_a_recipe_and_the_log_names_them(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("weight-decay: 0.01\n")
    argv = ["--recipe", "llama2-7b", "--lr", "1e-3", "--config", str(tmp_path / "run.yaml"), "--bf16"]
    for words in (argv, [*argv[2:], *argv[:2]]):
        loaded = _load(*words)
        optimizer = loaded.config.optimizer
        assert (optimizer.lr, optimizer.weight_decay, optimizer.min_lr) == (1e-3, 0.01, 3e-5)
        assert "--recipe llama2-7b: your settings replace --lr 3e-4, --weight-decay 0.1." in loaded.notes


def test_a_flag_replaces_the_setting_that_it_excludes() -> None:
    """Otherwise the checks would refuse both together."""
    loaded = _load("--recipe", "gpt3-125m", "--train-iters", "1000", "--lr-warmup-iters", "10")
    training, optimizer = loaded.config.training, loaded.config.optimizer
    assert (training.train_iters, training.train_samples) == (1000, None)
    assert (optimizer.lr_warmup_iters, optimizer.lr_warmup_samples) == (10, 0)
    assert optimizer.lr_decay_iters == -(-126_953_125 // 256), "at the final batch size, as in the recipe"
    replaced = "--recipe gpt3-125m: your settings replace --train-samples 146484375, --lr-warmup-samples 183105."
    assert replaced in loaded.notes
    assert any("--lr-decay-samples 126953125 is --lr-decay-iters 495911" in note for note in loaded.notes)
    assert _load("--recipe", "llama2-7b", "--train-samples", "10000000").config.optimizer.lr_warmup_samples == 2000 * 1024
    assert _load("--recipe", "llama3-405b", "--train-iters", "10000").config.optimizer.lr_warmup_iters == -(-8_160_768 // 2048)
    precision = _load("--recipe", "pythia-1b", "--bf16").config.precision
    assert precision.bf16 and not precision.fp16
    assert _load("--recipe", "pythia-1b", "--no-bf16").config.precision.fp16
    notes = _load("--recipe", "gpt2", "--norm-bias").notes
    assert any("your settings replace --no-norm-bias" in note for note in notes)
    batches = _load("--recipe", "llama3-405b", "--global-batch-size", "64").config.training
    assert (batches.global_batch_size, batches.step_batch_size_schedule) == (64, ())


def test_a_recipe_sets_the_model_unless_the_user_does() -> None:
    assert _load("--recipe", "llama2-7b").config.model.num_layers == 32
    loaded = _load("--recipe", "llama2-7b", "--model", "llama2-13b")
    assert loaded.config.model.num_layers == 40
    assert "--recipe llama2-7b was published for llama2-7b, not for llama2-13b." in loaded.notes
    shape = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "100"]
    model = _load("--recipe", "llama2-7b", *shape).config.model
    assert (model.num_layers, model.swiglu, model.seq_length) == (2, False, 4096)
    values = {"recipe": "llama2-7b", "micro-batch-size": 1, "mock-data": True, "tokenizer-type": "NullTokenizer"}
    assert load_values(values, 1).config.optimizer.lr == 3e-4


@pytest.mark.parametrize(
    "name, expected", [("gpt2", "gpt2-124m"), ("meta-llama/Llama-2-7b-hf", "llama2-7b"), ("GPT3-XL", "gpt3-1.3b")]
)
def test_a_recipe_has_the_names_of_its_model(name: str, expected: str) -> None:
    assert _load("--recipe", name).notes[0].startswith(f"--recipe {expected} has the settings of ")


@pytest.mark.parametrize(
    "name, expected",
    [
        ("llama3", "Perhaps you meant llama3-405b. --recipe list"),  # it starts like this; llama2-13b is only similar
        ("llama2", "Perhaps you meant llama2-13b or llama2-70b or llama2-7b."),
        ("meta-llama/Llama-3.1-8B", "The training settings of llama3-8b are not published completely. --model llama3-8b sets"),
        ("xyz", "--recipe list shows all."),
    ],
)
def test_an_unknown_recipe_is_told(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"--recipe {name}: there is no recipe of this name") as caught:
        _load("--recipe", name)
    assert expected in str(caught.value)


def test_the_table_fits_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = format_recipe_table("").splitlines()
    assert len(lines) < 24 and max(map(len, lines)) < 80
    assert {line.split()[0] for line in lines[1 : lines.index("")]} == set(RECIPES)
    assert "llama2-70b       2 T    4.19 M   1.5e-4 cosine  Touvron et al. 2023" in lines
    text = " ".join(format_recipe_table("deepseek").split())
    assert "--recipe list gpt3" in lines[-2] + lines[-1] and "--recipe list" not in text, "the advice that was followed is left out"
    assert "arXiv 2412.19437, section 4.2" in text and "Not published: increments of the batch size" in text
