"""Models of transformers here, and ours there: the same logits, and the same bits after a round trip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.parallel.tensor_slice import TensorSlice
from megatron_lab.checkpoints.huggingface_writer import export
from megatron_lab.foreign.huggingface.folder import HuggingFaceFolder
from megatron_lab.foreign.source import WeightSource
from megatron_lab.inference.forward import compute_sequence_logits
from megatron_lab.inference.model_from_source import load_model
from megatron_lab.verification.reference.experts import ExpertsShape
from megatron_lab.verification.reference.model import compute_logits as reference_logits
from megatron_lab.verification.reference.rotary import RotaryScaling
from megatron_lab.verification.reference.shape import LatentShape, ReferenceShape, build_random_weights
from tests.support.covering import full_but
from tests.support.huggingface_models import CASES, VOCAB, logits, opened, saved, some_ids
from tests.support.layout import Layout, context_of
from tests.support.lone_rank import lone_rank
from tests.support.memory_source import MemorySource, reference_source
from tests.support.reference_runs import deepseek_like, gpt2_like, llama_like
from tests.support.warm import run_warm_ranks

CLOSE = 1e-5
"""Of logits of about 5 in float32."""

_GEMMA: dict[str, Any] = {
    "vocab": 131,
    "activation": "geglu",
    "zero_centred": True,
    "tied": True,
    "embedding_multiplier": 32**0.5,
}
_UNGATED: dict[str, Any] = {"vocab": 131, "activation": "squared_relu"}
SHAPES: dict[str, tuple[str, ReferenceShape]] = {
    "gpt2": ("gpt2", gpt2_like(vocab=VOCAB, heads=6, kv_heads=6, hidden=48, ffn=56)),
    "llama": ("llama", llama_like(vocab=131, heads=6, kv_heads=3, hidden=48)),
    "llama3": (
        "llama",
        llama_like(heads=6, kv_heads=3, hidden=48, rotary_base=5e5, rope_scaling=RotaryScaling("llama3", 32.0, 8192)),
    ),
    "llama-biases": ("llama", llama_like(vocab=131, heads=6, kv_heads=3, hidden=48, bias=True, tied=True)),
    "mistral": ("mistral", llama_like(vocab=131, heads=6, kv_heads=3, hidden=32, epsilon=1e-3)),
    "qwen2": ("qwen2", llama_like(vocab=131, heads=6, kv_heads=3, hidden=48, qkv_bias=True, tied=True)),
    "qwen3": ("qwen3", llama_like(vocab=131, heads=6, kv_heads=2, hidden=48, qk_norm=True)),
    "llama-yarn": ("llama", llama_like(vocab=131, rope_scaling=RotaryScaling("yarn", 4.0, 12, 0.05, 1.0, False, 1.2))),
    "llama-dynamic": ("llama", llama_like(vocab=131, rope_scaling=RotaryScaling("dynamic", 3.0, 6))),
    "mistral-window": ("mistral", llama_like(vocab=131, windows=(4, 4))),
    "qwen3-windows": ("qwen3", llama_like(vocab=131, windows=(None, 4), qk_norm=True, qkv_bias=True, output_bias=True)),
    "phi3": ("phi3", llama_like(vocab=131, windows=(5, 5), rotary_percent=0.5)),
    "llama-longrope": (
        "llama",
        llama_like(
            vocab=131,
            rope_scaling=RotaryScaling(
                "longrope", 2.0, 9, attention_factor=1.1, short_factors=(2.0,) * 4, long_factors=(1.0, 1.5, 2.0, 4.0)
            ),
        ),
    ),
    "stablelm": ("stablelm", llama_like(vocab=131, norm="LayerNorm", rotary_percent=0.5, qkv_bias=True)),
    "olmo2": ("olmo2", llama_like(vocab=131, norms="post", qk_norm=True, qk_norm_all_heads=True)),
    "olmo3": (
        "olmo3",
        llama_like(
            vocab=131,
            norms="post",
            qk_norm=True,
            qk_norm_all_heads=True,
            windows=(4, None),
            local_base=9.0,
            rope_scaling=RotaryScaling("yarn", 4.0, 12, 0.05, 1.0, attention_factor=1.2),
        ),
    ),
    "granite": (
        "granite",
        llama_like(vocab=131, embedding_multiplier=6.0, score_scale=0.2, residual_multiplier=0.4, output_multiplier=2.5),
    ),
    "gemma": ("gemma", llama_like(**_GEMMA)),
    "gemma2": (
        "gemma2",
        llama_like(**_GEMMA, norms="sandwich", windows=(4, None), score_scale=20**-0.5, score_cap=2.0, logit_cap=3.0),
    ),
    "gemma3": ("gemma3_text", llama_like(**_GEMMA, norms="sandwich", windows=(4, None), local_base=9.0, qk_norm=True)),
    "gpt-neox": (
        "gpt_neox",
        gpt2_like(vocab=131, positions="rope", rotary_percent=0.5, activation="gelu_exact", parallel=True, tied=False),
    ),
    "mixtral": ("mixtral", llama_like(vocab=131, experts=ExpertsShape((True, True), 4, 2, 48))),
    "qwen2-moe": (
        "qwen2_moe",
        llama_like(
            vocab=131, qkv_bias=True, experts=ExpertsShape((True, True), 4, 2, 20, 24, True, score_function="softmax first")
        ),
    ),
    "qwen3-moe": ("qwen3_moe", llama_like(vocab=131, qk_norm=True, experts=ExpertsShape((False, True), 6, 3, 20))),
    "smollm3": ("smollm3", llama_like(vocab=131, unrotated=(True, False), windows=(4, None), mlp_bias=True, tied=True)),
    "deepseek-v2": (
        "deepseek_v2",
        deepseek_like(vocab=131, epsilon=1e-6, latent=LatentShape(10, 6, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=3)),
    ),
    "deepseek-v2-experts": (
        "deepseek_v2",
        deepseek_like(
            vocab=131,
            epsilon=1e-6,
            latent=LatentShape(10, 6, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=3),
            experts=ExpertsShape(
                (False, True), 6, 2, 12, 24, score_function="softmax first", scaling_factor=1.5, num_groups=3, group_top_k=2
            ),
        ),
    ),
    "deepseek-v3": (
        "deepseek_v3",
        deepseek_like(
            vocab=131,
            epsilon=1e-6,
            experts=ExpertsShape(
                (False, True),
                8,
                4,
                12,
                12,
                score_function="sigmoid",
                scaling_factor=2.5,
                num_groups=4,
                group_top_k=2,
                bias_update_rate=1e-3,
            ),
        ),
    ),
    "deepseek-v3-halves": (
        "deepseek_v3",
        deepseek_like(
            vocab=131,
            epsilon=1e-6,
            rotary_interleaved=False,
            latent=LatentShape(q_lora_rank=None, kv_lora_rank=6, qk_head_dim=5, qk_pos_emb_head_dim=4, v_head_dim=8),
            rope_scaling=RotaryScaling("yarn", 4.0, 12, 0.05, 1.0, False, 1.2),
        ),
    ),
    "starcoder2": ("starcoder2", gpt2_like(vocab=131, positions="rope", kv_heads=2, windows=(4, 4))),
    "nemotron": ("nemotron", llama_like(**_UNGATED, norm="LayerNorm", zero_centred=True, rotary_percent=0.5)),
    "olmo": ("olmo", llama_like(vocab=131, norm="LayerNorm", norm_weight=False)),
    "arcee": ("arcee", llama_like(**_UNGATED, mlp_bias=True)),
    "seed-oss": ("seed_oss", llama_like(vocab=131, qkv_bias=True, mlp_bias=True)),
    "ministral": ("ministral", llama_like(vocab=131, windows=(4, None))),
    "glm": ("glm", llama_like(vocab=131, rotary_interleaved=True, rotary_percent=0.5, qkv_bias=True)),
    "glm4": ("glm4", llama_like(vocab=131, rotary_interleaved=True, rotary_percent=0.5, norms="sandwich")),
    "ernie4-5": ("ernie4_5", llama_like(vocab=131, rotary_interleaved=True, bias=True, tied=True)),
}
"""Our models, and the architecture that each must become. Mistral's has heads that do not divide the hidden size."""


def rank_logits(rank: int, folder: Path, ids: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the logits of a rank, in float32."""
    context = context_of(layout, rank)
    return compute_sequence_logits(load_model(HuggingFaceFolder(folder), context, torch.float32), context, ids)


def one_process(source: WeightSource, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    context = lone_rank()
    return compute_sequence_logits(load_model(source, context, dtype), context, ids)


def double_source(shape: ReferenceShape) -> MemorySource:
    """The reference's weights, with values that float32 holds."""
    weights = {name: values.float().double() for name, values in build_random_weights(shape, seed=1).items()}
    return reference_source(shape, weights)


NORMAL = (
    *("gpt2-untied-relu2", "llama-tied-biases-all-heads", "llama-linear", "llama3", "llama-dynamic", "llama-yarn"),
    *("mistral-window", "qwen3-windows-biases", "smollm3-windows", "olmo3-yarn", "gemma3-linear", "gpt-neox", "gpt-neox-in-turn"),
    *("phi3-longrope", "deepseek-v2-yarn", "deepseek-v2-groups", "deepseek-v3", "deepseek-v3-halves", "deepseek-v3-one-group"),
    *("starcoder2-no-biases", "nemotron-biases", "olmo-biases", "arcee-biases-yarn", "seed-oss-biases", "ministral-some-windows"),
    *("ministral3-short", "glm4-no-biases", "ernie4-5-biases"),
)
"""Without --full: of architectures with several cases those that differ most. The others make a step like transformers in
test_huggingface_training.py, and are written below."""
WRITTEN = (
    *("mistral", "qwen2", "phi3", "llama-longrope", "stablelm", "olmo2", "granite", "gemma", "gemma2"),
    *("mixtral", "qwen2-moe", "qwen3-moe", "glm"),
)
"""Without --full: what no case of `NORMAL` writes."""


@pytest.mark.parametrize("case", full_but(NORMAL, CASES, "another case of the family, or its step and what is written of it"))
def test_their_models_have_the_same_logits_here_and_come_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    theirs = saved(case, tmp_path / "theirs", shard="500KB")
    source = HuggingFaceFolder(tmp_path / "theirs")
    ids = some_ids(source.vocab_size)
    expected = logits(theirs, ids)
    assert expected.abs().max() > 2
    torch.testing.assert_close(one_process(source, ids), expected, rtol=0, atol=CLOSE)

    export(source, tmp_path / "back", family=CASES[case][0])
    back = opened(tmp_path / "back")
    assert torch.equal(logits(back, ids), expected)
    old, new = theirs.state_dict(), back.state_dict()
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    assert type(back) is type(theirs)


@pytest.mark.parametrize("name", full_but(WRITTEN, SHAPES, "the case of transformers that is written back"))
def test_our_models_have_the_same_logits_there_and_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Against the reference in float64, so that a fault of ours in both directions would show."""
    family, shape = SHAPES[name]
    source, ids = double_source(shape), some_ids(shape.vocab, (2, shape.seq))
    written = export(source, tmp_path / "there", dtype=torch.float32)
    assert written.family == family
    expected = reference_logits(shape, source.tensors, ids)
    torch.testing.assert_close(logits(opened(tmp_path / "there"), ids).double(), expected, rtol=0, atol=CLOSE)

    back = HuggingFaceFolder(tmp_path / "there")
    assert list(back.weights) == list(source.weights)
    assert all(torch.equal(back.read(name).double(), values) for name, values in source.tensors.items())
    torch.testing.assert_close(one_process(back, ids, torch.float64), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("case", "changes", "layout"),
    [
        ("gpt2", {}, Layout(tp=2, pp=2)),
        ("llama-tied-biases-all-heads", {}, Layout(tp=2, pp=2)),
        ("llama", {}, Layout(tp=3)),
        ("starcoder2", {"vocab_size": VOCAB, "num_key_value_heads": 2}, Layout(tp=2, pp=2)),
        ("deepseek-v3-experts", {"vocab_size": VOCAB}, Layout(tp=2, pp=2, ep=2, etp=1)),
        *(
            pytest.param(*case, marks=pytest.mark.full("deepseek-v3-experts and llama"))
            for case in (
                ("qwen2-tied", {"vocab_size": VOCAB, "num_key_value_heads": 2}, Layout(tp=2, pp=2)),
                ("qwen3-moe", {"vocab_size": VOCAB, "num_key_value_heads": 2}, Layout(tp=2, pp=2)),
                ("mixtral", {"vocab_size": VOCAB}, Layout(dp=4, ep=2, etp=2)),
                ("nemotron", {"vocab_size": VOCAB}, Layout(tp=3)),
                ("olmo", {"vocab_size": VOCAB, "num_key_value_heads": 2}, Layout(tp=2, pp=2)),
                ("glm4", {"vocab_size": VOCAB, "num_key_value_heads": 2}, Layout(tp=2, pp=2)),
            )
        ),
    ],
)
def test_every_layout_reads_its_parts(case: str, changes: dict[str, Any], layout: Layout, tmp_path: Path) -> None:
    """5,003 tokens over two or three ranks: padding, and a part that is not a multiple of anything."""
    theirs = saved(case, tmp_path, num_hidden_layers=4, **changes) if case != "gpt2" else saved(case, tmp_path, n_layer=4)
    ids = some_ids(shape=(1, 24))
    expected = logits(theirs, ids)
    for found in run_warm_ranks(layout.world_size, rank_logits, tmp_path, ids, layout):
        torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("case", ["gpt2", "llama", "llama-tied-biases-all-heads"])
def test_a_box_is_the_part_of_the_whole(case: str, tmp_path: Path) -> None:
    """Boxes that begin and end anywhere: in the middle of a head, across the halves of the gated MLP, columns too."""
    saved(case, tmp_path)
    source = HuggingFaceFolder(tmp_path)
    generator = torch.Generator().manual_seed(5)
    for name, info in source.weights.items():
        whole = source.read(name)
        assert whole.shape == info.shape and whole.dtype == info.dtype
        for _ in range(4):
            ends = [sorted(torch.randint(size + 1, (2,), generator=generator).tolist()) for size in info.shape]
            box = TensorSlice(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))
            found = source.read(name, box)
            assert found.is_contiguous() and torch.equal(found, whole[tuple(slice(low, high) for low, high in ends)]), (name, box)


def test_bfloat16_stays_bfloat16_and_is_rounded_when_asked(tmp_path: Path) -> None:
    _, shape = SHAPES["qwen3"]
    source = double_source(shape)
    export(source, tmp_path / "half", dtype=torch.bfloat16)
    half = HuggingFaceFolder(tmp_path / "half")
    assert {info.dtype for info in half.weights.values()} == {torch.bfloat16}
    assert all(torch.equal(half.read(name), values.bfloat16()) for name, values in source.tensors.items())
    export(half, tmp_path / "again")
    again = HuggingFaceFolder(tmp_path / "again")
    assert all(torch.equal(half.read(name), again.read(name)) for name in half.weights)
    assert opened(tmp_path / "again").config.model_type == "qwen3"
