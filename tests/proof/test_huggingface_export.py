"""What an export writes: files of a limited size, settings, special tokens; whole or not at all; one parameter at a time."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from megatron.checkpoint.errors import CheckpointError
from megatron.parallel.tensor_slice import TensorSlice
from megatron_lab.checkpoints.generation_settings import SpecialTokens
from megatron_lab.checkpoints.huggingface_writer import export
from megatron_lab.foreign.huggingface.folder import HuggingFaceFolder
from megatron_lab.verification.reference.shape import ReferenceShape, build_random_weights
from tests.support.huggingface_models import opened
from tests.support.memory_source import MemorySource, reference_source
from tests.support.reference_runs import gpt2_like, llama_like


def source_of(shape: ReferenceShape) -> MemorySource:
    return reference_source(shape, {name: values.float() for name, values in build_random_weights(shape, seed=1).items()})


def keys(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened_file:
        assert opened_file.metadata() == {"format": "pt"}
        return list(opened_file.keys())


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())


def test_one_file_or_several_with_an_index(tmp_path: Path) -> None:
    source = source_of(llama_like())
    one = export(source, tmp_path / "one")
    assert sorted(path.name for path in one.folder.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    export(source, tmp_path / "several", max_shard_bytes=20_000)
    index = read_json(tmp_path / "several" / "model.safetensors.index.json")
    files = sorted(path.name for path in (tmp_path / "several").glob("*.safetensors"))
    count = len(files)
    assert count > 2 and files == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert all((tmp_path / "several" / name).stat().st_size < 22_000 for name in files)
    assert index["weight_map"] == {key: name for name in files for key in keys(tmp_path / "several" / name)}
    assert sorted(index["weight_map"]) == sorted(keys(tmp_path / "one" / "model.safetensors"))
    assert index["metadata"]["total_size"] == one.num_bytes == 4 * one.num_parameters
    one_model, other = opened(tmp_path / "one"), opened(tmp_path / "several")
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one_model.state_dict().items())


def test_a_tensor_larger_than_a_file_may_be_has_a_file_of_its_own(tmp_path: Path) -> None:
    export(source_of(llama_like()), tmp_path / "x", max_shard_bytes=1)
    assert all(len(keys(file)) == 1 for file in (tmp_path / "x").glob("*.safetensors"))


def test_settings_and_special_tokens(tmp_path: Path) -> None:
    export(source_of(gpt2_like()), tmp_path / "x", dtype=torch.bfloat16, tokens=SpecialTokens(bos=None, eos=3, pad=5))
    config = read_json(tmp_path / "x" / "config.json")
    assert config["architectures"] == ["GPT2LMHeadModel"] and config["torch_dtype"] == "bfloat16" and config["vocab_size"] == 64
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (None, 3, 5)
    assert read_json(tmp_path / "x" / "generation_config.json") == {"eos_token_id": 3, "pad_token_id": 5}
    model = opened(tmp_path / "x")
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (None, 3)


def test_special_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="eos_token_id of the tokenizer is 64, but the vocabulary of the model has 64 token ids"
    ):
        export(source_of(gpt2_like()), tmp_path / "x", tokens=SpecialTokens(eos=64))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine").write_text("1")
    with pytest.raises(CheckpointError, match="exists already"):
        export(source_of(gpt2_like()), tmp_path / "x")
    assert [path.name for path in tmp_path.rglob("*")] == ["x", "mine"]
    (tmp_path / "x" / "mine").unlink()
    export(source_of(gpt2_like()), tmp_path / "x")  # an empty one is no obstacle
    assert (tmp_path / "x" / "config.json").exists()


def test_a_model_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no supported architecture of transformers"):
        export(source_of(llama_like(embedding_norm=True)), tmp_path / "x")
    assert not list(tmp_path.iterdir())


class Failing(MemorySource):
    """Cannot read one parameter."""

    def read(self, name: str, box: TensorSlice | None = None) -> torch.Tensor:
        if name == "final_norm.weight":
            raise OSError("the disk is gone")
        return super().read(name, box)


def failing() -> MemorySource:
    source = source_of(llama_like())
    return Failing(source.model, source.tensors)


def test_after_a_failure_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        export(failing(), tmp_path / "x")

    def refuse(folder: Path) -> str:
        assert (folder / "config.json").exists() and HuggingFaceFolder(folder).weights
        assert not (tmp_path / "x").exists(), "the folder has its name only when it is whole"
        raise CheckpointError("the logits differ")

    with pytest.raises(CheckpointError, match="the logits differ"):
        export(source_of(llama_like()), tmp_path / "x", check=refuse)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["missing", "extra", "shape"])
def test_every_parameter_must_have_its_place(wrong: str, tmp_path: Path) -> None:
    source = source_of(llama_like())
    if wrong == "missing":
        del source.tensors["final_norm.weight"]
    elif wrong == "extra":
        source.tensors["final_norm.bias"] = torch.zeros(32)
    else:
        source.tensors["final_norm.weight"] = torch.zeros(31)
    with pytest.raises(
        CheckpointError,
        match=r"final_norm\.(weight is missing|bias is not a parameter of the architecture|weight is \[31\], not \[32\])",
    ):
        export(source, tmp_path / "x")
    assert not list(tmp_path.iterdir())


class Watched(MemorySource):
    """Sees how many of the tensors that it gave are alive when the next is asked for."""

    def __init__(self, source: MemorySource) -> None:
        super().__init__(source.model, source.tensors)
        self.given: list[weakref.ref[torch.Tensor]] = []
        self.most_alive = 0

    def read(self, name: str, box: TensorSlice | None = None) -> torch.Tensor:
        self.most_alive = max(self.most_alive, sum(given() is not None for given in self.given))
        found = super().read(name, box)
        self.given.append(weakref.ref(found))
        return found


@pytest.mark.parametrize("shape", [gpt2_like(), llama_like()], ids=["gpt2", "llama"])
def test_one_parameter_is_in_memory_at_a_time(shape: ReferenceShape, tmp_path: Path) -> None:
    source = Watched(source_of(shape))
    export(source, tmp_path / "x", dtype=torch.bfloat16, max_shard_bytes=20_000)
    assert len(source.given) == len(source.tensors) and source.most_alive == 0


def test_the_readme_says_what_was_found_and_what_is_lost(tmp_path: Path) -> None:
    source = source_of(llama_like())
    source.notes.append("a note of the source")
    object.__setattr__(source.model, "fp32_residual_connection", True)
    object.__setattr__(source.model, "hidden_dropout", 0.125)
    written = export(source, tmp_path / "x", extras=lambda folder: ["a note of the tokenizer"], check=lambda folder: "All is well.")
    text = (tmp_path / "x" / "README.md").read_text()
    for said in (
        "All is well.",
        "a note of the source",
        "--fp32-residual-connection",
        "0.125",
        "a note of the tokenizer",
        "license: unknown",
    ):
        assert said in text
    assert len(written.notes) == 4 and written.verification == "All is well."
    assert "AutoTokenizer" not in text
    export(source_of(llama_like()), tmp_path / "y")
    assert "not compared" in (tmp_path / "y" / "README.md").read_text()


def test_the_peak_that_is_stated(tmp_path: Path) -> None:
    """The largest parameter in its own type and in that of the files."""
    source = source_of(llama_like(vocab=1000))
    assert export(source, tmp_path / "x", dtype=torch.float16).max_memory_bytes == 1000 * 32 * (4 + 2)


def weights_of(folder: Path) -> Mapping[str, Any]:
    return HuggingFaceFolder(folder).weights


def test_the_files_can_be_read_by_others(tmp_path: Path) -> None:
    """Not only by their owner."""
    export(source_of(llama_like()), tmp_path / "x")
    mode = (tmp_path / "x").stat().st_mode & 0o777
    (tmp_path / "plain").mkdir()
    assert mode == (tmp_path / "plain").stat().st_mode & 0o777 and weights_of(tmp_path / "x")
