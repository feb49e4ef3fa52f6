"""Weights out of Megatron-LM's legacy checkpoints, bit for bit, whatever the layout and the style of names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.parallel.context import make_context
from megatron.parallel.tensor_slice import TensorSlice
from megatron.parallel.topology import Topology
from megatron_lab.commands import checkpoint
from megatron_lab.foreign.legacy_checkpoint import LegacyCheckpoint
from megatron_lab.inference.forward import compute_sequence_logits
from megatron_lab.inference.model_from_source import load_model
from megatron_lab.verification.reference.model import compute_logits
from megatron_lab.verification.reference.shape import ReferenceShape, Weights, build_random_weights
from tests.support.layout import model_config
from tests.support.legacy_checkpoints import PADDING, LegacyLayout, padded_rows, write_legacy
from tests.support.reference_runs import gpt2_like, llama_like

VOCAB = 61
STYLES = {
    "gpt2": gpt2_like(num_layers=4, vocab=VOCAB),
    "llama": llama_like(num_layers=4, vocab=VOCAB, kv_heads=2),
    "qwen": llama_like(num_layers=4, vocab=VOCAB, kv_heads=2, qk_norm=True, qkv_bias=True, tied=True),
}
LAYOUTS = [
    LegacyLayout(tp, pp, virtual, engine)
    for tp in (1, 2)
    for pp in (1, 2)
    for virtual in ((1, 2) if pp > 1 else (1,))
    for engine in (False, True)
]


def named(layout: LegacyLayout) -> str:
    return f"tp{layout.tp}-pp{layout.pp}-v{layout.virtual}-{'engine' if layout.engine else 'local'}"


def weights_of(shape: ReferenceShape, dtype: torch.dtype = torch.bfloat16) -> Weights:
    return {name: tensor.to(dtype) for name, tensor in build_random_weights(shape, seed=5).items()}


def assert_same(source: LegacyCheckpoint, weights: Weights) -> None:
    assert set(source.weights) == set(weights)
    for name, tensor in weights.items():
        found = source.read(name)
        assert source.weights[name].shape == found.shape and source.weights[name].dtype == found.dtype
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_weights_are_the_same_bits(tmp_path: Path, style: str, layout: LegacyLayout) -> None:
    shape = STYLES[style]
    weights = weights_of(shape)
    write_legacy(tmp_path, shape, weights, layout)
    source = LegacyCheckpoint(tmp_path)
    there = {"make_vocab_size_divisible_by": PADDING, "max_position_embeddings": shape.seq}
    assert source.model == model_config(shape, num_query_groups=source.model.num_query_groups, **there)
    assert source.vocab_size == VOCAB
    assert source.tokenizer is not None and source.tokenizer.vocab_size == VOCAB - 1
    assert_same(source, weights)


def test_uneven_stages(tmp_path: Path) -> None:
    """The first stage without a layer, as a split that counts the embedding as one may have it."""
    shape = STYLES["gpt2"]
    weights = weights_of(shape)
    write_legacy(tmp_path, shape, weights, LegacyLayout(2, 2, 2, layers=(0, 3, 0, 1)))
    assert_same(LegacyCheckpoint(tmp_path), weights)


def test_a_box_is_that_part(tmp_path: Path) -> None:
    """Boxes that cross the borders of tensor ranks, and of a gated projection's halves."""
    shape = STYLES["llama"]
    weights = weights_of(shape, torch.float32)
    write_legacy(tmp_path, shape, weights, LegacyLayout(tp=2, pp=2))
    source = LegacyCheckpoint(tmp_path)
    boxes = {
        "layers.2.mlp.up.weight": TensorSlice((1, 20, 3), (1, 9, 17)),
        "layers.3.attention.qkv.weight": TensorSlice((30, 0), (5, 32)),
        "layers.0.mlp.down.weight": TensorSlice((4, 22), (3, 6)),
        "embedding.word.weight": TensorSlice((29, 1), (VOCAB - 29, 2)),
        "layers.1.attention_norm.weight": TensorSlice((3,), (9,)),
    }
    for name, box in boxes.items():
        found = source.read(name, box)
        assert found.is_contiguous() and torch.equal(found, weights[name][box.index]), name


@pytest.mark.parametrize("iteration", [100, None], ids=["iteration", "release"])
def test_every_folder_that_means_it(tmp_path: Path, iteration: int | None) -> None:
    shape = STYLES["gpt2"]
    folder = write_legacy(tmp_path, shape, weights_of(shape), LegacyLayout(tp=2), iteration=iteration)
    for path in (tmp_path, folder, str(tmp_path)):
        assert LegacyCheckpoint(path).folder == folder


def test_the_model_computes_what_the_weights_say(tmp_path: Path) -> None:
    shape = STYLES["llama"]
    weights = weights_of(shape, torch.float64)
    write_legacy(tmp_path, shape, weights, LegacyLayout(2, 2, 2, engine=True))
    context = make_context(Topology(), 0, torch.device("cpu"))
    tokens = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    found = compute_sequence_logits(load_model(LegacyCheckpoint(tmp_path), context, torch.float64), context, tokens)
    torch.testing.assert_close(found, compute_logits(shape, weights, tokens), rtol=0, atol=1e-12)


def test_vocabulary(tmp_path: Path) -> None:
    """Asked for, or padding is kept and said."""
    shape = STYLES["gpt2"]
    weights = weights_of(shape)
    write_legacy(tmp_path, shape, weights, LegacyLayout(tp=2), tokenizer_type="GPT2BPETokenizer", vocab_file="v", vocab_size=None)
    asked = LegacyCheckpoint(tmp_path, vocab_size=VOCAB)
    assert_same(asked, weights)
    assert asked.tokenizer is not None and asked.tokenizer.vocab_file == "v" and asked.tokenizer.vocab_size is None
    kept = LegacyCheckpoint(tmp_path)
    assert kept.vocab_size == padded_rows(VOCAB, 2) > VOCAB
    assert any("all 64 rows" in note and "tokenizer" in note for note in kept.notes)
    assert torch.equal(kept.read("embedding.word.weight")[:VOCAB], weights["embedding.word.weight"])
    with pytest.raises(CheckpointError, match="a vocabulary of 65 does not fit the word embedding of 64 rows"):
        LegacyCheckpoint(tmp_path, vocab_size=65)


def test_only_padding_is_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer of fewer ids than the checkpoint's would take trained rows away."""
    shape = STYLES["gpt2"]
    legacy, out = tmp_path / "legacy", tmp_path / "out"
    write_legacy(legacy, shape, weights_of(shape), LegacyLayout(tp=2), tokenizer_type="GPT2BPETokenizer", vocab_size=None)
    words = ["import", str(legacy), str(out), "--tokenizer-type", "NullTokenizer", "--vocab-size"]
    assert checkpoint.main([*words, "30"]) == 1
    assert "Megatron-LM would not pad" in capsys.readouterr().err and not out.exists()
    assert checkpoint.main([*words, str(VOCAB - 1)]) == 0
    padding = padded_rows(VOCAB, 2) - VOCAB
    assert f"The last {padding} of {padding + VOCAB} rows of the word embedding are padding" in capsys.readouterr().out


@pytest.mark.parametrize("setting", ["qk_l2_norm", "head_wise_attn_gate"])
def test_what_changes_the_model_and_has_no_weights_is_refused(tmp_path: Path, setting: str) -> None:
    shape = STYLES["gpt2"]
    changed: dict[str, Any] = {setting: True}
    write_legacy(tmp_path, shape, weights_of(shape), LegacyLayout(), **changed)
    with pytest.raises(CheckpointError, match=f"not supported: {setting} = True"):
        LegacyCheckpoint(tmp_path)


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    shape = STYLES["gpt2"]
    changes: dict[str, Any] = {"bias_gelu_fusion": False, "tokenizer_type": "OwnTokenizer"}
    write_legacy(tmp_path, shape, weights_of(shape), LegacyLayout(engine=True), **changes)
    source = LegacyCheckpoint(tmp_path)
    notes = " ".join(source.notes)
    for word in ("num_floating_point_operations_so_far, rng_state", "12 entries _extra_state", "exact GELU"):
        assert word in notes, word
    assert source.tokenizer is None


# ---- what is refused


def edit(folder: Path, change: Any, rank: str = "mp_rank_00") -> None:
    """Change what a rank saved."""
    path = folder / rank / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shape = STYLES["gpt2"]
    return write_legacy(tmp_path, shape, weights_of(shape), LegacyLayout(tp=2), model_type=None, attention_backend=None)


NORM = "decoder.layers.1.input_layernorm.weight"
FC1 = "decoder.layers.1.mlp.linear_fc1.weight"
CHANGES: dict[str, tuple[Any, str]] = {
    "version": (lambda c: c.update(checkpoint_version=2.0), "checkpoint version 2.0; only version 3.0"),
    "no args": (lambda c: c.pop("args"), "holds no args"),
    "experts": (lambda c: setattr(c["args"], "num_experts", 8), "num_experts = 8"),
    "norm plus one": (lambda c: setattr(c["args"], "apply_layernorm_1p", True), "apply_layernorm_1p = True"),
    "positions": (lambda c: setattr(c["args"], "position_embedding_type", "mrope"), "position_embedding_type = 'mrope'"),
    "missing argument": (lambda c: delattr(c["args"], "hidden_size"), "lack hidden_size"),
    "width below 1": (
        lambda c: setattr(c["args"], "hidden_size", -32),
        "say hidden_size = -32; each of these settings must be at least 1",
    ),
    "groups that do not divide": (
        lambda c: vars(c["args"]).update(group_query_attention=True, num_query_groups=3),
        "describe an invalid model, .*: --num-attention-heads 4",
    ),
    "sizes of another type": (lambda c: setattr(c["args"], "tensor_model_parallel_size", "2"), "tensor_model_parallel_size = '2'"),
    "ranks without number": (lambda c: setattr(c["args"], "tensor_model_parallel_size", 10**12), "lacks mp_rank_02, mp_rank_03"),
    "argument of another type": (lambda c: setattr(c["args"], "num_layers", "4"), "num_layers = '4'"),
    "other depth": (
        lambda c: setattr(c["args"], "num_layers", 6),
        "holds 4 layers, but the arguments of the run .args. say num_layers = 6",
    ),
    "other width": (
        lambda c: setattr(c["args"], "ffn_hidden_size", 48),
        "according to the arguments of the run .args. it should be",
    ),
    "missing tensor": (lambda c: c["model"].pop(NORM), f"no {NORM}"),
    "unknown tensor": (lambda c: c["model"].update({"decoder.layers.0.adapter.weight": torch.ones(2)}), "adapter.weight"),
    "two norms": (
        lambda c: c["model"].update({"decoder.layers.1.self_attention.linear_qkv.layer_norm_weight": torch.ones(32)}),
        "has both",
    ),
    "old names": (lambda c: c.update(model={"language_model": {}}), "before Megatron-Core"),
    "more ranks": (
        lambda c: setattr(c["args"], "tensor_model_parallel_size", 1),
        "holds files of 2 ranks, which are more than the 1 tensor-parallel",
    ),
    "fewer ranks": (lambda c: setattr(c["args"], "tensor_model_parallel_size", 4), "lacks mp_rank_02, mp_rank_03"),
    "no model": (lambda c: c.pop("model"), "holds no weights"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_does_not_fit_is_refused(folder: Path, what: str) -> None:
    change, message = CHANGES[what]
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        LegacyCheckpoint(folder)


def test_copies_that_differ(tmp_path: Path) -> None:
    """A norm on two tensor ranks, a tied embedding on two stages: which of them would be right?"""
    shape = replace(STYLES["gpt2"])
    folder = write_legacy(tmp_path, shape, weights_of(shape), LegacyLayout(2, 2), model_type=None, attention_backend=None)
    edit(folder, lambda c: c["model"]["decoder.layers.0.input_layernorm.weight"].add_(1), "mp_rank_01_000")
    edit(folder, lambda c: c["model"]["output_layer.weight"][3].add_(1), "mp_rank_00_001")
    source = LegacyCheckpoint(folder)
    with pytest.raises(DamagedCheckpointError, match="differs between .* and .*mp_rank_01_000/model_optim_rng.pt"):
        source.read("layers.0.attention_norm.weight")
    with pytest.raises(DamagedCheckpointError, match="the two copies diverged"):
        source.read("embedding.word.weight")


def test_padding_of_a_tied_copy_may_differ(tmp_path: Path) -> None:
    shape = STYLES["gpt2"]
    weights = weights_of(shape)
    folder = write_legacy(tmp_path, shape, weights, LegacyLayout(2, 2), model_type=None, attention_backend=None)
    edit(folder, lambda c: c["model"]["output_layer.weight"][VOCAB - 32 :].add_(1), "mp_rank_01_001")
    assert_same(LegacyCheckpoint(folder), weights)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no legacy checkpoint"):
        LegacyCheckpoint(tmp_path)
    for word in (b"", b"\xff\xfe", b"9" * 5000, b"../elsewhere", b"7"):
        (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(word)
        with pytest.raises(CheckpointError, match="holds no legacy checkpoint"):
            LegacyCheckpoint(tmp_path)
    with pytest.raises(CheckpointError, match="Copy the checkpoint to a local disk"):
        LegacyCheckpoint("memory://legacy")
