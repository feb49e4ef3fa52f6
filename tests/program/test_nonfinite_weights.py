"""Values that are not finite in what is read: the tensor is named where it comes in, and where a run stops because of it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron.data_parallel.fsdp  # noqa: F401  # imported here once, not in every forked rank
from megatron.training.step import TrainStep
from megatron_lab.checkpoints.finite_values import count_nonfinite, describe_nonfinite_weights
from megatron_lab.commands.checkpoint import main
from megatron_lab.foreign.adapters import get_adapter_names, merge_adapters
from megatron_lab.foreign.open_source import open_source
from megatron_lab.verification.reference.shape import build_random_weights
from tests.support.huggingface_models import saved
from tests.support.legacy_checkpoints import LegacyLayout
from tests.support.megatron_states import made_up, write_legacy_run
from tests.support.memory_source import reference_source
from tests.support.reference_runs import gpt2_like, llama_like
from tests.support.runs import arguments, at_iteration, launch, report, run

Texts = pytest.CaptureFixture[str]
UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"


def tool(*words: object) -> int:
    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers with a NaN in one matrix of a fused parameter, and two infinite values in a norm."""
    pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("damaged")
    saved("qwen2-tied", folder, vocab_size=128, num_key_value_heads=2, num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    tensors[UP][3, 5] = math.nan
    tensors[NORM][:2] = -math.inf
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_values_of_every_dtype_are_counted() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2):
        assert count_nonfinite(torch.tensor([1.0, math.nan, math.inf, -math.inf, 0.0]).to(dtype)) == 3
        assert count_nonfinite(torch.zeros(2, 3, dtype=dtype)) == 0
    assert count_nonfinite(torch.tensor([1, 2])) == 0


def test_an_import_names_all_tensors_and_writes_nothing(damaged: Path, tmp_path: Path, capsys: Texts) -> None:
    assert tool("import", damaged, tmp_path / "out", "--no-tokenizer") == 1
    said = capsys.readouterr().err
    assert f"{damaged}: 2 tensors have values that are not finite" in said
    numel = open_source(damaged).read("layers.1.mlp.up.weight").numel() // 2
    assert f"\n  {UP} (parameter layers.1.mlp.up.weight): 1 of {numel:,} values\n" in said, said
    assert f"\n  {NORM} (parameter layers.0.attention_norm.weight): 2 of " in said
    assert "gate_proj" not in said and not (tmp_path / "out").exists()


def test_an_export_tells_them_and_values_that_become_infinite(damaged: Path, tmp_path: Path, capsys: Texts) -> None:
    assert tool("export", damaged, tmp_path / "out", "--no-tokenizer") == 0
    told = capsys.readouterr().out
    assert "note: values that are not finite (NaN or infinite) in " in told and f"{UP} (1 of " in told and f"{NORM} (2 of " in told

    from safetensors.torch import load_file, save_file

    large = tmp_path / "large"
    shutil.copytree(damaged, large)
    tensors = load_file(large / "model.safetensors")
    tensors[UP][3, 5], tensors[NORM][:2] = 1e6, 1.0  # float16 ends at 65504
    save_file(tensors, large / "model.safetensors", metadata={"format": "pt"})
    for dtype, expected in (("float32", False), ("float16", True)):
        assert tool("export", large, tmp_path / dtype, "--no-tokenizer", "--dtype", dtype) == 0
        assert ("values are too large for float16" in capsys.readouterr().out) is expected


def test_verify_says_that_the_model_itself_gives_nan(damaged: Path, tmp_path: Path, capsys: Texts) -> None:
    assert tool("import", damaged, tmp_path / "out", "--no-tokenizer", "--verify") == 1
    said = capsys.readouterr().err
    assert "the model itself gives NaN or infinity" in said and UP in said and NORM in said
    assert "conversion is wrong" not in said and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "layout", [{}, {"tensor_model_parallel_size": 2}, {"data_parallel_sharding_strategy": "optim_grads_params"}], ids=str
)
def test_a_run_that_begins_with_them_names_them(damaged: Path, tmp_path: Path, capsys: Texts, layout: dict[str, Any]) -> None:
    """Imported as they are, which is said."""
    assert tool("import", damaged, tmp_path / "base", "--no-tokenizer", "--allow-nonfinite") == 0
    assert f"note: {damaged}: 2 tensors have" in capsys.readouterr().out
    model = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads"))
    start = {"use_checkpoint_args": True, "pretrained_checkpoint": tmp_path / "base", "seq_length": 16, "train_iters": 2}
    ended = launch(arguments(**{**model, **start, "vocab_size": 127, **layout}), 2)
    assert [end.code for end in ended] == [1, 1], report(ended)
    said = ended[0].stderr
    assert "iteration 1: the loss or the gradient is not finite" in said
    assert "The cause is neither the data nor a device" in said and "--lr" not in said
    assert "layers.1.mlp.up.weight on rank" in said and ": 1 of its values\n" in said, said
    assert "layers.0.attention_norm.weight on rank" in said and ": 2 of its values\n" in said
    assert "layers.0.mlp" not in said and "main parameter" not in said


def spoil_moment(step: TrainStep) -> None:
    for shard in (shard for shard in step.optimizer.shards if shard.record.name == "layers.0.mlp.up.weight"):
        shard.moments["exp_avg"][:2] = math.nan


def test_a_resumed_run_names_them(tmp_path: Path) -> None:
    """A moment has NaN when the run goes on: the first update spoils the weight, and the next step stops."""
    settings = {"save": tmp_path / "run", "load": tmp_path / "run", "train_iters": 4}
    run(arguments(**settings, exit_interval=1))
    ended = launch(arguments(**settings), before=lambda rank: at_iteration(2, spoil_moment))
    assert ended[0].code == 1, report(ended)
    said = ended[0].stderr
    assert "iteration 3: the loss or the gradient is not finite" in said
    assert "layers.0.mlp.up.weight on rank 0: 2 of its values\n  exp_avg of layers.0.mlp.up.weight on rank 0: " in said, said


def test_an_adapter_is_named() -> None:
    """Not only the weight to which it is added."""
    shape = llama_like(lora_rank=2, lora_targets=("mlp.down",))
    weights = build_random_weights(shape, seed=5)
    name = get_adapter_names("layers.1.mlp.down.weight")[1]
    weights[name][0, 1] = math.inf
    said = describe_nonfinite_weights(merge_adapters(reference_source(shape, weights)))
    assert (
        f"a tensor has values that are not finite (NaN or infinite):\n  {name} (parameter layers.1.mlp.down.weight): 1 of " in said
    )
    weights[name][0, 1] = 0.0
    assert describe_nonfinite_weights(merge_adapters(reference_source(shape, weights))) == ""


@pytest.mark.parametrize("kind", ["exp_avg_sq", "model"])
def test_moments_and_weights_of_a_megatron_run_are_named(tmp_path: Path, capsys: Texts, kind: str) -> None:
    """A NaN in a weight and in its main parameter is no difference between them."""
    model = made_up(gpt2_like(num_layers=2, vocab=61)).rounded()
    name = "layers.1.mlp.down.weight"
    for tensors in (model.weights, model.mains) if kind == "model" else (model.moments[kind],):
        tensors[name][0, 0] = math.nan
    write_legacy_run(tmp_path / "run", model, LegacyLayout(1, 1), sharded=False)
    assert tool("import", tmp_path / "run", tmp_path / "out", "--no-tokenizer") == 1
    said = capsys.readouterr().err
    expected = name if kind == "model" else f"{kind}.{name}"
    assert f"a tensor has values that are not finite (NaN or infinite):\n  {expected}: 1 of 2,048 values\n" in said, said
    assert not (tmp_path / "out").exists()
