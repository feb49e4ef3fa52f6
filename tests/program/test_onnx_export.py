"""tools/checkpoint.py export --format onnx: what onnxruntime computes from the file, and what is refused."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron_lab.checkpoints.huggingface_writer import export
from megatron_lab.checkpoints.onnx_writer import find_obstacles
from megatron_lab.commands import checkpoint
from megatron_lab.verification.reference.model import compute_logits
from megatron_lab.verification.reference.shape import build_random_weights
from tests.support.memory_source import reference_source
from tests.support.reference_runs import llama_like

SHAPE = llama_like(num_layers=1, kv_heads=2)


def test_the_file_gives_the_logits_of_the_plain_model_at_any_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    weights = {name: weight.float() for name, weight in build_random_weights(SHAPE, seed=5).items()}
    source, out = tmp_path / "model", tmp_path / "out"
    export(reference_source(SHAPE, weights), source)
    words = ["export", str(source), str(out), "--format", "onnx", "--no-tokenizer"]
    assert checkpoint.main(words) == 0
    told = capsys.readouterr().out
    assert "Verified by onnxruntime" in told and [path.name for path in out.iterdir()] == ["model.onnx"]
    session = runtime.InferenceSession(str(out / "model.onnx"), providers=["CPUExecutionProvider"])
    wide = {name: weight.double() for name, weight in weights.items()}
    for size in ((2, 5), (1, 1), (4, SHAPE.seq)):
        ids = torch.randint(SHAPE.vocab, size)
        found = torch.from_numpy(session.run(None, {"input_ids": ids.numpy()})[0])
        expected = compute_logits(SHAPE, wide, ids)
        assert found.shape == (*size, SHAPE.vocab) and (found - expected).norm() <= 1e-5 * expected.norm()
    command = told.partition("\n  onnxruntime:\n")[2].replace("\\\n", "")  # as a shell does between double quotes
    python, _, code = shlex.split(command)
    exec(code, {})
    assert python == "python" and capsys.readouterr().out == f"(1, 3, {SHAPE.vocab})\n"

    # An output that is taken stays as it is, and one that differs is not left.
    assert checkpoint.main(words) == 1 and "exists already" in capsys.readouterr().err
    from megatron_lab.checkpoints import onnx_writer

    other = reference_source(SHAPE, {name: 1.1 * weight for name, weight in weights.items()})
    with pytest.raises(ValueError, match="more than the allowed 0.0001: the export is wrong"):
        onnx_writer._compare_logits(other, out / "model.onnx")


def test_what_cannot_be_exported_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=8)
    assert find_obstacles(model, 10**9) == []
    changed: dict[str, dict[str, Any]] = {"--num-experts 4": {"num_experts": 4}, "--rope-type dynamic": {"rope_type": "dynamic"}}
    for words, change in changed.items():
        (found,) = find_obstacles(dataclasses.replace(model, **change), 10**9)
        assert found.startswith(words) and "a graph is fixed" in found
    assert "3 GB in float32" in find_obstacles(model, 3 * 10**9)[0]
    export(
        reference_source(SHAPE, {name: weight.float() for name, weight in build_random_weights(SHAPE, seed=5).items()}),
        tmp_path / "a",
    )
    for flag, value in (("--dtype", "bfloat16"), ("--family", "llama"), ("--max-shard-size", "1GB"), ("--license", "mit")):
        assert checkpoint.main(["export", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "onnx", flag, value]) == 1
        assert f"{flag} has no effect with --format onnx" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
