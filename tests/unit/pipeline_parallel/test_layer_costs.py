"""Measured costs of layers: how they come from a profile, and how a balanced split goes by them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config.cli import load
from megatron.config.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline_layout import LayerCosts, read_layer_costs
from megatron.pipeline_parallel.partition import build_layer_table
from megatron.pipeline_parallel.simulate import OpSpan
from megatron.spec.operations import Op, OpType
from megatron_lab.monitoring.profiler import EMBEDDING, compute_layer_costs

MODEL = ModelConfig(num_layers=8, hidden_size=64, num_attention_heads=4, seq_length=32)
EVEN = LayerCosts((1.0,) * 8, 0.0, 0.0)


def lengths(path: Path, costs: LayerCosts, model: ModelConfig = MODEL, stages: int = 2, **settings: Any) -> list[int]:
    costs.write(path)
    split = ParallelConfig(pipeline_model_parallel_size=stages, pipeline_split="balanced", layer_costs=str(path), **settings)
    return [len(chunk.layers) for chunk in build_layer_table(model, split, 1000)]


def test_slow_parts_move_the_cut(tmp_path: Path) -> None:
    """A dear embedding, a dear loss, and layers that differ."""
    path = tmp_path / "costs.json"
    assert lengths(path, EVEN) == [4, 4]
    assert lengths(path, replace(EVEN, embedding=2.0)) == [3, 5]
    assert lengths(path, replace(EVEN, loss=4.0)) == [6, 2]
    assert lengths(path, replace(EVEN, embedding=9.0)) == [0, 8]
    # The first layer attends to all tokens, the others to a window: two kinds, of which one takes long.
    mixed = replace(MODEL, window_size="8,0", window_attn_skip_freq="[0]+[1]*7")
    assert lengths(path, LayerCosts((8.0, *[1.0] * 7), 0.0, 0.0), mixed) == [1, 7]


def test_layers_of_one_kind_cost_the_same(tmp_path: Path) -> None:
    """Noise moves nothing: only the mean of a kind is known well."""
    assert lengths(tmp_path / "c", LayerCosts((3.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5), 0.0, 0.0)) == [4, 4]
    assert LayerCosts((1.0, 2.0, 3.0), 0.0, 0.0).average_by_type("aba") == (2.0, 2.0, 2.0)


def test_a_profile_is_shared_by_forwards() -> None:
    """The operations of a chunk take what they take; its parts share that as they share its forward."""
    table = build_layer_table(MODEL, ParallelConfig(pipeline_model_parallel_size=2), 1000)
    spans = [
        OpSpan(Op(kind, chunk, microbatch), 0.0, seconds)
        for chunk, forward in ((0, 5.0), (1, 8.0))
        for microbatch in range(2)
        for kind, seconds in ((OpType.FORWARD, forward), (OpType.BACKWARD, 2 * forward))
    ]
    # Of the first chunk's forwards (10 s) 0.5 s belong to no part; of the second's (16 s) 8 s are the loss.
    forwards = {EMBEDDING: 1.5, **dict.fromkeys(range(4), 2.0), **dict.fromkeys(range(4, 8), 2.0)}
    costs = compute_layer_costs(table, spans, forwards, 2)
    assert costs.embedding == pytest.approx(15_000 * 1.5 / 9.5)
    assert costs.layers == pytest.approx([15_000 * 2 / 9.5] * 4 + [24_000 * 2 / 16] * 4)
    assert costs.loss == pytest.approx(24_000 * 8 / 16)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        ("[]", "is not of the form"),
        ('{"layers": [1], "embedding": 0}', "is not of the form"),
        ('{"layers": [1, -1], "embedding": 0, "loss": 0}', "a time that is negative, too large or not a number"),
        (f'{{"layers": [1, 1{"0" * 400}], "embedding": 0, "loss": 0}}', "a time that is negative, too large or not a number"),
        ('{"layers": [1, true], "embedding": 0, "loss": 0}', "a time that is negative, too large or not a number"),
        ('{"layers": [0, 0], "embedding": 0, "loss": 0}', "no layer with a time above 0"),
        (json.dumps({"layers": [1.0] * 4, "embedding": 0, "loss": 0}), "has 4 layers, but --num-layers is 8"),
    ],
)
def test_wrong_files_are_told(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    flags = f"""--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
        --micro-batch-size 1 --global-batch-size 4 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer
        --vocab-size 99 --pipeline-model-parallel-size 2 --pipeline-split balanced --layer-costs {path}""".split()
    with pytest.raises(ConfigError) as caught:
        load(flags, 2)
    assert words in str(caught.value) and "--layer-costs" in str(caught.value)


def test_costs_are_read_as_they_were_written(tmp_path: Path) -> None:
    costs = LayerCosts((1.5, 2.25), 0.125, 3.0)
    costs.write(tmp_path / "c")
    assert read_layer_costs(str(tmp_path / "c")) == costs
