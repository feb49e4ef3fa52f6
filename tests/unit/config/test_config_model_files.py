"""Models by name: sizes as published, flags beside them, and the table of all."""

from __future__ import annotations

import pytest

from megatron.config.cli import load
from megatron.config.errors import ConfigError
from megatron.config.model_files import format_model_table, list_models
from megatron.spec.counts import count_parameters

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


def test_the_table_shows_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load(["--model", "list"], 1)
    assert stopped.value.code == 0 and capsys.readouterr().out == format_model_table()
    rows = [line.split() for line in format_model_table().splitlines()[1:-2]]
    assert sorted(row[0] for row in rows) == list_models()
    assert ["llama3-8b", "8.03", "B", "32", "4,096", "32", "8,192", "128,256", "train_8gpu_llama_7b.sh"] in rows


@pytest.mark.parametrize(
    "given, expected", [("llama3-8", "llama3-8b"), ("../launch", "--model list"), ("list.yaml", "--model list")]
)
def test_an_unknown_name_is_told(given: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(["--model", given, *RUN], 1)
