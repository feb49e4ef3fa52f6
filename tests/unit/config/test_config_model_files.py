"""Models and recipes by name: sizes as published, other names, flags beside them, and the tables of all."""

from __future__ import annotations

import pytest

from megatron.config.cli import load
from megatron.config.errors import ConfigError
from megatron.config.model_files import find_settings_file, list_models, read_descriptions
from megatron.spec.counts import count_parameters
from megatron_lab.pages.model_tables import format_model_table, format_recipe_table

PARAMETERS = {
    "deepseek-v3": 671_026_419_200,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma3-1b": 999_885_952,
    "gpt2-1.5b": 1_557_611_200,
    "gpt2-124m": 124_439_808,
    "granite3-2b": 2_533_531_648,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama2-7b": 6_738_415_616,
    "llama3-405b": 405_853_388_800,
    "llama3-70b": 70_553_706_496,
    "llama3-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "olmo2-7b": 7_298_617_344,
    "phi3-mini": 3_821_079_552,
    "pythia-1b": 1_011_781_632,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
    "smollm3-3b": 3_075_098_624,
    "stablelm2-1.6b": 1_644_515_328,
}
"""The elements of the published weights."""
ROUNDED = {"gpt-1t": 1008e9, "gpt3-1.3b": 1.3e9, "gpt3-125m": 125e6, "gpt3-175b": 175e9, "gpt3-6.7b": 6.7e9}
"""Sizes by their papers of models without published weights."""
RUN = ["--dry-run", "--world-size", "1", "--micro-batch-size", "1"]


def test_each_model_is_valid_and_has_its_size() -> None:
    assert list_models() == sorted({**PARAMETERS, **ROUNDED})
    for name in list_models():
        found = load(["--model", name, *RUN], 1)
        assert found.notes == (), name
        assert found.config.data.vocab_size is not None
        count = count_parameters(found.config.model, found.config.data.vocab_size)
        assert count == (PARAMETERS[name] if name in PARAMETERS else pytest.approx(ROUNDED[name], rel=0.015)), name


def test_flags_and_files_count_instead() -> None:
    config = load(["--seq-length", "1024", "--model", "llama2-7b", "--model", "llama3-8b", "--num-layers", "4", *RUN], 1).config
    assert (config.model.num_layers, config.model.seq_length, config.model.ffn_hidden_size) == (4, 1024, 14336)


@pytest.mark.parametrize(
    "request_words",
    [["--model", "list"], ["--model", "list", "llama"], ["--recipe", "list"], ["--model=LIST", "Llama"], ["--recipe", "List"]],
)
def test_a_table_is_printed_instead_of_a_run(request_words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load([*request_words, "--lr", "x"], 1)
    flag, _, *words = " ".join(request_words).replace("=", " ").split()
    table = (format_model_table if flag == "--model" else format_recipe_table)(" ".join(words))
    assert stopped.value.code == 0 and capsys.readouterr().out == table


def test_the_table_of_models_fits_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = format_model_table("").splitlines()
    assert len(lines) < 24 and max(map(len, lines)) < 80
    assert lines[0].split() == ["model", "size", "layers", "hidden"] * 2
    rows = [line[column : column + 39].split() for line in lines[1 : lines.index("")] for column in (0, 41)]
    assert sorted(row[0] for row in rows if row) == list_models()
    assert ["llama3-8b", "8.03B", "32", "4,096"] in rows
    monkeypatch.setenv("COLUMNS", "60")
    assert len(format_model_table("").splitlines()) > len(list_models()) and max(map(len, format_model_table("").splitlines())) < 60


def test_the_table_of_some_models_shows_their_shapes_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table = format_model_table("llama2")
    assert max(map(len, table.splitlines())) < 80
    assert [line.split()[0] for line in table.splitlines() if line.startswith("llama")] == ["llama2-7b", "llama2-13b", "llama2-70b"]
    assert "llama2-7b       6.74 B     32   4,096    32    4,096     32,000" in table
    assert "Llama 2 7B (Touvron et al. 2023); examples/train_8gpu_llama_7b.sh; --recipe" in table
    with pytest.raises(ConfigError, match="--model list quen3-8b: no model has this in its name.\n  Perhaps you meant qwen3"):
        format_model_table("quen3-8b")


@pytest.mark.parametrize(
    "name, expected",
    [
        ("Llama-3.1-8B", "llama3-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
        ("meta-llama/Llama-2-70b-chat-hf", "llama2-70b"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama3.2-1b"),
        ("gpt2", "gpt2-124m"),
        ("openai-community/gpt2-xl", "gpt2-1.5b"),
        ("qwen2.5:7b", "qwen2.5-7b"),
        ("Qwen/Qwen3-30B-A3B-Base", "qwen3-30b-a3b"),
        ("google/gemma-2-2b-it", "gemma2-2b"),
        ("google/gemma-3-1b-pt", "gemma3-1b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi3-mini"),
        ("HuggingFaceTB/SmolLM2-135M", "smollm2-135m"),
        ("EleutherAI/pythia-1b-deduped", "pythia-1b"),
        ("allenai/OLMo-2-1124-7B", "olmo2-7b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("stabilityai/stablelm-2-1_6b", "stablelm2-1.6b"),
        ("Llama 3.1 8B", "llama3-8b"),
    ],
)
def test_names_of_the_hub_are_names_of_models(name: str, expected: str) -> None:
    assert find_settings_file("model", name).name == expected


def test_a_name_means_one_model_and_the_log_says_which() -> None:
    for file in read_descriptions("model").values():
        assert all(find_settings_file("model", name) is file for name in (file.name, *file.other_names)), file.name
    notes = load(["--model", "meta-llama/Llama-2-7b-hf", *RUN], 1).notes
    assert notes == ("--model meta-llama/Llama-2-7b-hf is taken as llama2-7b: Llama 2 7B (Touvron et al. 2023).",)


@pytest.mark.parametrize(
    "given, expected",
    [
        ("llama3-8", "Perhaps you meant llama3-8b"),
        ("mistral-7b-v0.1", "Perhaps you meant mistral-7b"),  # has another vocabulary
        ("qwen", "--model list qwen shows the 6 names that start like this"),
        ("../launch", "--model list shows all. --config FILE reads"),
        ("list.yaml", "--model list shows all"),
    ],
)
def test_an_unknown_name_is_told(given: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"--model {given}: there is no model of this name") as caught:
        load(["--model", given, *RUN], 1)
    assert expected in str(caught.value)
