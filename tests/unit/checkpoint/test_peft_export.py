"""Adapters as PEFT's files: with its names, they give the weights of the model to which they are added."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoint.errors import CheckpointError
from megatron_lab.checkpoints.huggingface_writer import export
from megatron_lab.checkpoints.peft_writer import export_adapters
from megatron_lab.foreign.adapters import merge_adapters
from megatron_lab.foreign.source import DerivedSource
from megatron_lab.verification.reference.shape import ReferenceShape, build_random_weights
from tests.support.layout import model_config
from tests.support.memory_source import MemorySource
from tests.support.reference_runs import gpt2_like, llama_like

ALL = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
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
    base = DerivedSource(source, model_config(replace(shape, lora_rank=None)))
    base.weights = {name: one for name, one in source.weights.items() if ".lora_" not in name}
    export(base, tmp_path / "base", family=family)
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


def test_only_adapters_are_exported_so(tmp_path: Path) -> None:
    shape = llama_like()
    source = MemorySource(model_config(shape), build_random_weights(shape, seed=3))
    with pytest.raises(CheckpointError, match="has no adapters"):
        export_adapters(source, tmp_path / "out")
    assert not list(tmp_path.iterdir())
