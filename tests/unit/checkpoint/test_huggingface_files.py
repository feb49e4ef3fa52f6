"""Folders that are not whole, not of this model, or not safe: refused with what is wrong; old ones with tables in them: read."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron_lab.checkpoints.huggingface_writer import export
from megatron_lab.foreign.huggingface.folder import HuggingFaceFolder
from megatron_lab.foreign.open_source import open_source
from tests.support.huggingface_models import saved

SMALL: dict[str, Any] = {"vocab_size": 64}
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    saved("llama", tmp_path, **SMALL)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    saved("llama", tmp_path, shard="40KB", **SMALL)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    return tmp_path


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Change the tensors of a folder with one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def set_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_it_is_recognised(llama: Path) -> None:
    source = open_source(llama)
    assert isinstance(source, HuggingFaceFolder) and source.name == str(llama) and source.vocab_size == 64
    assert source.tokenizer is None and "holds no supported tokenizer" in source.notes[0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight is missing"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda t: t.update({"model.norm.weight": torch.ones(47)}), r"model.norm.weight is \[47\], not \[48\]"),
        (lambda t: t.update({"model.norm.bias": torch.ones(48)}), r"model.norm.bias \[48\] is not a tensor of this model"),
        (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(1)}), "layers.3.mlp.up_proj.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}), "does not contain floating-point numbers"),
    ],
)
def test_nothing_is_missing_and_nothing_unread(llama: Path, change: Callable[[Tensors], Any], named: str) -> None:
    rewrite(llama, change)
    with pytest.raises(CheckpointError, match=named):
        HuggingFaceFolder(llama)


@pytest.mark.parametrize("rows", [63, 65])
def test_the_vocabulary_is_the_rows_of_the_embedding(llama: Path, rows: int) -> None:
    set_config(llama, vocab_size=rows)
    with pytest.raises(CheckpointError, match=rf"model.embed_tokens.weight is \[64, 48\], not \[{rows}, 48\]"):
        HuggingFaceFolder(llama)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "model_type 'mamba'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": 5}, "architectures 5 is not a supported language model"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_another_architecture_is_refused(llama: Path, changes: dict[str, Any], named: str) -> None:
    set_config(llama, **changes)
    with pytest.raises(CheckpointError, match=named):
        HuggingFaceFolder(llama)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    file = sorted(sharded.glob("model-*.safetensors"))[1]
    file.unlink()
    with pytest.raises(DamagedCheckpointError, match=f"{file.name} is missing"):
        HuggingFaceFolder(sharded)


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    file = sorted(sharded.glob("model-*.safetensors"))[1]
    os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(DamagedCheckpointError, match=f"{file.name} is not a complete safetensors file"):
        HuggingFaceFolder(sharded)


def test_index_and_files_must_agree(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = "model.layers.1.mlp.up_proj.weight"
    others = [file for file in content["weight_map"].values() if file != content["weight_map"][name]]
    moved = content | {"weight_map": content["weight_map"] | {name: others[0]}}
    index.write_text(json.dumps(moved))
    with pytest.raises(DamagedCheckpointError, match=name):
        HuggingFaceFolder(sharded)
    index.write_text(json.dumps(content | {"weight_map": {k: v for k, v in content["weight_map"].items() if k != name}}))
    with pytest.raises(DamagedCheckpointError, match=f"does not name: {name}"):
        HuggingFaceFolder(sharded)
    index.write_text(json.dumps(content | {"weight_map": dict.fromkeys(content["weight_map"], "../x")}))
    with pytest.raises(DamagedCheckpointError, match="not a file in its folder"):
        HuggingFaceFolder(sharded)
    index.write_text("{")
    with pytest.raises(DamagedCheckpointError, match="not a readable index"):
        HuggingFaceFolder(sharded)


def test_no_folder_and_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it has no config.json"):
        HuggingFaceFolder(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="only from a local disk"):
        HuggingFaceFolder("memory://model")
    saved("llama", tmp_path, **SMALL)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        HuggingFaceFolder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(DamagedCheckpointError, match="not valid JSON"):
        HuggingFaceFolder(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(DamagedCheckpointError, match="not valid JSON"):
        HuggingFaceFolder(tmp_path)


def as_pickle(folder: Path, *, shards: int = 1, old: bool = False) -> Tensors:
    """Replace the file of a folder by pickles."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = [dict(list(tensors.items())[n::shards]) for n in range(shards)]
    names = ["pytorch_model.bin"] if shards == 1 else [f"pytorch_model-{n + 1:05d}-of-{shards:05d}.bin" for n in range(shards)]
    for name, part in zip(names, parts, strict=True):
        torch.save(part, folder / name, _use_new_zipfile_serialization=not old)
    if shards > 1:
        mapping = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapping}))
    return tensors


@pytest.mark.parametrize(("shards", "old"), [(1, False), (1, True), (3, False)])
def test_pickled_weights_are_read(llama: Path, shards: int, old: bool) -> None:
    expected = {name: HuggingFaceFolder(llama).read(name) for name in HuggingFaceFolder(llama).weights}
    as_pickle(llama, shards=shards, old=old)
    source = HuggingFaceFolder(llama)
    assert list(source.weights) == list(expected)
    assert all(torch.equal(source.read(name), values) for name, values in expected.items())


class Attack:
    """Makes a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


def test_a_pickle_with_a_program_in_it_is_refused_and_does_not_run(llama: Path) -> None:
    proof = llama / "ran"
    tensors = as_pickle(llama)
    torch.save({**tensors, "more": Attack(proof)}, llama / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a pickle that contains more than weights"):
        HuggingFaceFolder(llama)
    (llama / "pytorch_model.bin").write_bytes(pickle.dumps(Attack(proof), protocol=2))
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin"):
        HuggingFaceFolder(llama)
    assert not proof.exists()


def test_a_cut_or_strange_pickle_is_named(llama: Path) -> None:
    as_pickle(llama)
    file = llama / "pytorch_model.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedCheckpointError, match="not a complete file of weights"):
        HuggingFaceFolder(llama)
    for content in ([1, 2], {"a": 1}, {1: torch.ones(2)}):
        torch.save(content, file)
        with pytest.raises(CheckpointError, match="is not a state dict: expected a mapping from parameter names to tensors"):
            HuggingFaceFolder(llama)


def test_tables_of_old_files_are_passed_over_and_told(llama: Path) -> None:
    rewrite(llama, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    notes = HuggingFaceFolder(llama).notes
    assert "rotary_emb.inv_freq" in notes[0]


def test_old_gpt2_files_have_no_prefix_and_hold_masks(tmp_path: Path) -> None:
    """As the first files of GPT-2: names without `transformer.`, the causal masks stored, which are called bias."""
    saved("gpt2", tmp_path, **SMALL)
    expected = {name: HuggingFaceFolder(tmp_path).read(name) for name in HuggingFaceFolder(tmp_path).weights}

    def strip(tensors: Tensors) -> None:
        for name in [*tensors]:
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(3):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8 if layer else torch.float32).tril()
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    rewrite(tmp_path, strip)
    source = HuggingFaceFolder(tmp_path)
    assert all(torch.equal(source.read(name), values) for name, values in expected.items())
    assert "h.0.attn.bias" in source.notes[0]


def test_a_tied_output_layer_that_is_stored_must_be_the_embedding(tmp_path: Path) -> None:
    saved("qwen2-tied", tmp_path, **SMALL)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    source = HuggingFaceFolder(tmp_path)
    assert "output.weight" not in source.weights and "lm_head.weight" in source.notes[0]
    rewrite(tmp_path, lambda t: t["lm_head.weight"][3].add_(1))
    with pytest.raises(CheckpointError, match="the values of lm_head.weight differ"):
        HuggingFaceFolder(tmp_path)
    rewrite(tmp_path, lambda t: t.pop("model.embed_tokens.weight"))
    with pytest.raises(CheckpointError, match="embed_tokens.weight is missing"):
        HuggingFaceFolder(tmp_path)


def test_parts_of_several_types_become_the_widest(llama: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(llama, lambda t: t.update({key: value.bfloat16() for key, value in t.items() if key != name}))
    source = HuggingFaceFolder(llama)
    assert source.weights["layers.0.attention.qkv.weight"].dtype == torch.float32
    assert source.weights["layers.1.attention.qkv.weight"].dtype == torch.bfloat16
    assert source.read("layers.0.attention.qkv.weight").dtype == torch.float32


def test_the_tokenizer_of_the_folder_is_found(tmp_path: Path) -> None:
    saved("gpt2", tmp_path, **SMALL)
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text("")
    found = HuggingFaceFolder(tmp_path).tokenizer
    assert found is not None and found.tokenizer_type == "GPT2BPETokenizer" and found.merge_file == str(tmp_path / "merges.txt")
    (tmp_path / "tokenizer.model").write_text("")
    found = HuggingFaceFolder(tmp_path).tokenizer
    assert found is not None and found.tokenizer_type == "Llama2Tokenizer"
    (tmp_path / "tokenizer.json").write_text("")
    found = HuggingFaceFolder(tmp_path).tokenizer
    assert found is not None and found.tokenizer_type == "HuggingFaceTokenizer"


def test_merges_without_a_pattern_are_no_tokenizer_but_for_gpt2(llama: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        (llama / name).write_text("")
    assert HuggingFaceFolder(llama).tokenizer is None


def test_layers_that_predict_later_tokens_are_left_out_with_a_note(tmp_path: Path) -> None:
    """As many as config.json names, and no others."""
    saved("deepseek-v3-experts", tmp_path, num_nextn_predict_layers=1)
    plain = HuggingFaceFolder(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(48, 96)}))
    found = HuggingFaceFolder(tmp_path)
    assert found.weights == plain.weights and [note for note in found.notes if "1 tensors of multi-token prediction" in note]
    rewrite(tmp_path, lambda t: t.update({"model.layers.4.eh_proj.weight": torch.ones(48, 96)}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.4\.eh_proj\.weight \[48, 96\] is not a tensor of this model"):
        HuggingFaceFolder(tmp_path)


def test_biases_of_choices_keep_their_32_bits(tmp_path: Path) -> None:
    """An update moves them by 0.001, which bfloat16 would lose beside 1."""
    saved("deepseek-v3-experts", tmp_path / "there")
    source = HuggingFaceFolder(tmp_path / "there")
    export(source, tmp_path / "back", dtype=torch.bfloat16)
    back = HuggingFaceFolder(tmp_path / "back")
    name = "layers.1.mlp.router.bias"
    assert torch.equal(back.read(name), source.read(name)) and source.read(name).abs().max() > 0
    assert {info.dtype for other, info in back.weights.items() if other.endswith("router.bias")} == {torch.float32}
    assert {info.dtype for other, info in back.weights.items() if not other.endswith("router.bias")} == {torch.bfloat16}
    export(back, tmp_path / "again")  # without being asked
    assert HuggingFaceFolder(tmp_path / "again").weights == back.weights


def test_weights_in_8_bits_with_scales_of_blocks_are_multiplied_out(tmp_path: Path) -> None:
    """Blocks of 16 x 32, which do not divide the matrices; layers that are left out have them too."""
    saved("deepseek-v3-experts", tmp_path, num_nextn_predict_layers=1)
    rows, columns, expected = 16, 32, {}

    def quantize(tensors: Tensors) -> None:
        tensors["model.layers.3.mlp.up_proj.weight"] = torch.randn(42, 48)
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            values = tensors[name]
            high, wide = values.shape
            scales, small, whole = (
                torch.empty(-(-high // rows), -(-wide // columns)),
                values.to(torch.float8_e4m3fn),
                values.clone(),
            )
            for i in range(len(scales)):
                for j in range(scales.shape[1]):
                    part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                    scales[i, j] = values[part].abs().max() / 448
                    small[part] = (values[part] / scales[i, j]).to(small.dtype)
                    whole[part] = small[part].float() * scales[i, j]
            assert not torch.equal(whole, values) and (whole - values).abs().max() < 0.07 * values.abs().max()
            tensors[name], tensors[f"{name}_scale_inv"], expected[name] = small, scales, whole

    rewrite(tmp_path, quantize)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [rows, columns]}
    set_config(tmp_path, quantization_config=quantization)
    export(HuggingFaceFolder(tmp_path), tmp_path / "whole")
    whole = load_file(tmp_path / "whole/model.safetensors")
    assert {name for name in expected if "layers.3." not in name} == {name for name in whole if name.endswith("proj.weight")}
    assert all(torch.equal(whole[name], values) for name, values in expected.items() if name in whole)
    set_config(tmp_path, quantization_config=None)
    with pytest.raises(CheckpointError, match="weight does not contain floating-point numbers"):
        HuggingFaceFolder(tmp_path)
    set_config(tmp_path, quantization_config=quantization)
    rewrite(tmp_path, lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(2, 2)}))
    with pytest.raises(DamagedCheckpointError, match=r"must be torch.float32 \[3, 2\], but it is torch.float32 \[2, 2\]"):
        HuggingFaceFolder(tmp_path)
