"""Adapters as PEFT's files: with its names, they give the weights of the model to which they are added."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.errors import CheckpointError
from megatron.config.model import LoraFields
from megatron.parallel.params import build_global_records
from megatron_lab.checkpoints.against_transformers import compare_logits
from megatron_lab.checkpoints.huggingface_writer import export
from megatron_lab.checkpoints.peft_writer import export_adapters
from megatron_lab.foreign.adapters import build_base_source, merge_adapters
from megatron_lab.foreign.huggingface.folder import HuggingFaceFolder
from megatron_lab.verification.reference.shape import ReferenceShape, build_random_weights
from tests.support.huggingface_models import CASES as CASES_OF_FAMILIES
from tests.support.huggingface_models import saved
from tests.support.layout import model_config
from tests.support.memory_source import MemorySource
from tests.support.reference_runs import gpt2_like, llama_like

ALL = LoraFields().lora_targets
LLAMA = llama_like(lora_rank=3, lora_scale=1.5, lora_targets=ALL)
GPT2 = gpt2_like(lora_rank=2, lora_scale=0.5, lora_targets=("attention.qkv", "attention.output"))
CASES: dict[str, tuple[ReferenceShape, list[str]]] = {
    "llama": (LLAMA, [f"mlp.{part}_proj" for part in ("down", "gate", "up")] + [f"self_attn.{part}_proj" for part in "koqv"]),
    "phi3": (LLAMA, ["mlp.down_proj", "mlp.gate_up_proj", "self_attn.o_proj", "self_attn.qkv_proj"]),
    "gpt2": (GPT2, ["attn.c_attn", "attn.c_proj"]),
}


@pytest.mark.parametrize("family", CASES)
def test_they_give_the_weights_with_which_they_are_merged(family: str, tmp_path: Path) -> None:
    """By PEFT's formula, weight + alpha / r x B A, on the base model's files; of those stored [in, out] the transposed product."""
    shape, targets = CASES[family]
    source = MemorySource(model_config(shape), build_random_weights(shape, seed=3))
    export(build_base_source(source), tmp_path / "base", family=family)
    export(merge_adapters(source), tmp_path / "merged", family=family)
    written = export_adapters(source, tmp_path / "adapters", base="somebody/base", family=family)
    settings = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert settings["target_modules"] == targets == list(written.targets)
    assert (settings["r"], settings["base_model_name_or_path"]) == (shape.lora_rank, "somebody/base")
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    adapters = load_file(tmp_path / "adapters/adapter_model.safetensors")
    for name in [name for name in adapters if name.endswith("lora_A.weight")]:
        a, b = adapters.pop(name), adapters.pop(name.replace("lora_A", "lora_B"))
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert module.endswith(tuple(f".{target}" for target in targets))
        product = settings["lora_alpha"] / settings["r"] * (b @ a)
        found[f"{module}.weight"] += product.T if settings["fan_in_fan_out"] else product
    assert not adapters and found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-14)


def test_adapters_with_values_that_are_not_finite_are_told(tmp_path: Path) -> None:
    weights = build_random_weights(GPT2, seed=3)
    source = MemorySource(model_config(GPT2), weights)
    assert not export_adapters(source, tmp_path / "whole").notes
    name = next(name for name in weights if "lora_b" in name)
    weights[name].view(-1)[0] = float("nan")
    (note,) = export_adapters(MemorySource(model_config(GPT2), weights), tmp_path / "damaged").notes
    assert "not finite (NaN or infinite)" in note and "lora_B.weight (1 of " in note


def test_only_adapters_are_exported_so(tmp_path: Path) -> None:
    shape = llama_like()
    source = MemorySource(model_config(shape), build_random_weights(shape, seed=3))
    with pytest.raises(CheckpointError, match="has no adapters"):
        export_adapters(source, tmp_path / "out")
    assert not list(tmp_path.iterdir())


FAMILIES = (
    *("gpt2", "llama-tied-biases-all-heads", "llama-yarn", "mistral-window", "qwen2-tied", "qwen3", "smollm3", "stablelm", "olmo2"),
    *("olmo3", "granite", "gemma", "gemma2", "gemma3", "gpt-neox", "gpt-neox-in-turn", "phi3", "phi3-longrope"),
)
"""Cases of `tests/support/huggingface_models.py`, one or two of each family that can have adapters."""


def with_adapters(folder: Path) -> MemorySource:
    """The model of a folder with random adapters on all layers, in float64."""
    base = HuggingFaceFolder(folder)
    model = replace(base.model, lora_rank=3, lora_alpha=4.5, lora_targets=ALL)
    tensors = {name: base.read(name).double() for name in base.weights}
    generator = torch.Generator().manual_seed(5)
    for name, record in build_global_records(model, base.vocab_size).items():
        if ".lora_" in name:
            tensors[name] = torch.randn(record.shape, generator=generator, dtype=torch.float64) * 0.1
    return MemorySource(model, tensors, name="adapters")


@pytest.mark.parametrize("has_peft", [True, False], ids=["peft", "formula"])
@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_gives_the_logits_of_its_adapters(
    case: str, has_peft: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT finds a place for each tensor and misses none; base and adapters together compute what this framework computes."""
    if has_peft:
        pytest.importorskip("peft")
    else:
        monkeypatch.setitem(sys.modules, "peft", None)
    kind, _ = CASES_OF_FAMILIES[case]
    saved(case, tmp_path / "base", vocab_size=131)
    source = with_adapters(tmp_path / "base")
    export_adapters(source, tmp_path / "adapters", family=kind)
    merged = merge_adapters(source)
    told = compare_logits(merged, tmp_path / "base", torch.float64, adapters=tmp_path / "adapters")
    assert ("and PEFT 0." in told) == has_peft and "Verified: the logits" in told
    settings = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert settings["lora_alpha"] == 4.5 and settings["fan_in_fan_out"] == (kind == "gpt2")

    file = tmp_path / "adapters/adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "lora_B" in name)
    save_file(tensors | {name: tensors[name] * 2}, file)
    with pytest.raises(CheckpointError, match="more than the allowed"):
        compare_logits(merged, tmp_path / "base", torch.float64, adapters=tmp_path / "adapters")


def test_tensors_that_are_missing_or_left_over_are_found(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    saved("llama", tmp_path / "base", vocab_size=131)
    source = with_adapters(tmp_path / "base")
    export_adapters(source, tmp_path / "adapters")
    file = tmp_path / "adapters/adapter_model.safetensors"
    tensors = load_file(file)
    last = [name for name in tensors if "lora_A" in name][-1]
    for changed, category in (
        ({name: tensor for name, tensor in tensors.items() if name != last}, "missing_keys"),
        (tensors | {last.replace("_proj", "_other"): tensors[last].clone()}, "unexpected_keys"),
    ):
        save_file(changed, file)
        with pytest.raises(CheckpointError, match=f"PEFT reports .*{category}"):
            compare_logits(merge_adapters(source), tmp_path / "base", torch.float64, adapters=tmp_path / "adapters")
