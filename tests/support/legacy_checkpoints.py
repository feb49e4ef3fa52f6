"""Writes checkpoints as Megatron-LM does in its format `torch`: one pickled model_optim_rng.pt a tensor and pipeline rank."""

from __future__ import annotations

import argparse
import contextlib
import enum
import io
import itertools
import random
import signal
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lab.verification.reference.shape import ReferenceShape, Weights

PADDING = 4
"""Rows of the vocabulary are padded to a multiple of this x TP."""


@dataclass(frozen=True)
class LegacyLayout:
    """How the job was cut that wrote the checkpoint."""

    tp: int = 1
    pp: int = 1
    virtual: int = 1
    engine: bool = False
    """Names of Transformer Engine."""
    layers: tuple[int, ...] | None = None
    """Layers of each chunk in the order of the depth; by default all alike."""

    def chunk_layers(self, num_layers: int) -> list[range]:
        """Return the layers of each chunk in the order of the depth."""
        chunks = self.pp * self.virtual
        ends = np.cumsum([0, *(self.layers or [num_layers // chunks] * chunks)]).tolist()
        return [range(start, end) for start, end in itertools.pairwise(ends)]

    def folder(self, stage: int, rank: int) -> str:
        """Return the name of the folder of a stage's tensor rank."""
        return f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if self.pp > 1 else "")


def padded_rows(vocab: int, tp: int) -> int:
    return -(-vocab // (PADDING * tp)) * PADDING * tp


def arguments_of(shape: ReferenceShape, layout: LegacyLayout, **changes: Any) -> argparse.Namespace:
    """The arguments as Megatron-LM would have them, with things around that no reader of weights needs."""
    settings: dict[str, Any] = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        kv_channels=shape.head_size,
        group_query_attention=shape.kv_heads != shape.heads,
        num_query_groups=shape.kv_heads if shape.kv_heads != shape.heads else 1,
        seq_length=shape.seq,
        max_position_embeddings=shape.num_positions or shape.seq,
        position_embedding_type={"learned": "learned_absolute"}.get(shape.positions, shape.positions),
        rotary_base=int(shape.rotary_base),
        rotary_percent=shape.rotary_percent,
        rotary_seq_len_interpolation_factor=None,
        use_rope_scaling=shape.rope_scaling is not None,
        rope_scaling_factor=8.0 if shape.rope_scaling is None else shape.rope_scaling.factor,
        normalization=shape.norm,
        norm_epsilon=shape.epsilon,
        swiglu=shape.activation == "swiglu",
        squared_relu=shape.activation == "squared_relu",
        untie_embeddings_and_output_weights=not shape.tied,
        add_bias_linear=shape.bias,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        make_vocab_size_divisible_by=PADDING,
        padded_vocab_size=padded_rows(shape.vocab, layout.tp),
        vocab_size=shape.vocab - 1,
        tokenizer_type="NullTokenizer",
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        num_experts=None,
        bias_gelu_fusion=shape.bias and shape.activation == "gelu",
        params_dtype=torch.bfloat16,
        data_path=["1.0", "somewhere"],
        exit_signal=signal.SIGTERM,
        pid_file=Path("somewhere"),
    )
    return argparse.Namespace(**{**settings, **changes})


def legacy_names(name: str, layer: int | None, engine: bool) -> str:
    """What a tensor of ours is called there, its layer counted in its chunk."""
    outside = {
        "embedding.word.weight": "embedding.word_embeddings.weight",
        "embedding.position.weight": "embedding.position_embeddings.weight",
        "final_norm.weight": "decoder.final_layernorm.weight",
        "final_norm.bias": "decoder.final_layernorm.bias",
        "output.weight": "output_layer.weight",
    }
    if layer is None:
        return outside[name]
    part, _, attribute = name.split(".", 2)[2].rpartition(".")
    there = {
        "attention_norm": "self_attention.linear_qkv.layer_norm_" if engine else "input_layernorm.",
        "attention.qkv": "self_attention.linear_qkv.",
        "attention.q_norm": "self_attention.q_layernorm.",
        "attention.k_norm": "self_attention.k_layernorm.",
        "attention.output": "self_attention.linear_proj.",
        "mlp_norm": "mlp.linear_fc1.layer_norm_" if engine else "pre_mlp_layernorm.",
        "mlp.up": "mlp.linear_fc1.",
        "mlp.down": "mlp.linear_fc2.",
    }[part]
    return f"decoder.layers.{layer}.{there}{attribute}"


def tensor_part(name: str, tensor: torch.Tensor, rank: int, tp: int, *, swiglu: bool) -> torch.Tensor:
    """What a tensor rank holds: rows of qkv and fc1 (of gate and up each, one below the other), columns of proj and fc2."""
    if name.endswith(("attention.qkv.weight", "attention.qkv.bias", "embedding.word.weight")) or name == "output.weight":
        return tensor.chunk(tp, 0)[rank].clone()
    if ".mlp.up." in name:
        halves = [tensor[0], tensor[1]] if swiglu else [tensor]
        return torch.cat([half.chunk(tp, 0)[rank] for half in halves])
    if name.endswith(("attention.output.weight", "mlp.down.weight")):
        return tensor.chunk(tp, 1)[rank].clone()
    return tensor.clone()


def chunk_state(shape: ReferenceShape, weights: Weights, layout: LegacyLayout, chunk: int, rank: int) -> OrderedDict[str, Any]:
    """The state of one chunk on one tensor rank."""
    state: OrderedDict[str, Any] = OrderedDict()
    last = layout.pp * layout.virtual - 1
    layers = layout.chunk_layers(shape.num_layers)[chunk]
    for name, tensor in weights.items():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        outside = last if name.startswith(("final_norm", "output")) else 0
        if not (layer in layers if layer is not None else chunk == outside):
            continue
        if name in ("embedding.word.weight", "output.weight"):
            extra = padded_rows(shape.vocab, layout.tp) - shape.vocab
            tensor = torch.cat([tensor, torch.full((extra, shape.hidden), 7.0, dtype=tensor.dtype)])
        part = tensor_part(name, tensor, rank, layout.tp, swiglu=shape.activation == "swiglu")
        state[legacy_names(name, None if layer is None else layer - layers.start, layout.engine)] = part
    if shape.tied and chunk == last > 0:  # the copy for the output layer
        first = chunk_state(shape, {"embedding.word.weight": weights["embedding.word.weight"]}, layout, 0, rank)
        state["output_layer.weight"] = first["embedding.word_embeddings.weight"]
    state = OrderedDict((name, state[name]) for name in sorted(state, key=declared_at))
    if layout.engine:
        for i in range(len(layers)):
            state[f"decoder.layers.{i}.self_attention.linear_qkv._extra_state"] = io.BytesIO(b"scales")
            state[f"decoder.layers.{i}.mlp.linear_fc1._extra_state"] = torch.tensor([1, 2], dtype=torch.uint8)
            state[f"decoder.layers.{i}.mlp.linear_fc2._extra_state"] = None
    return state


_ORDER = (
    *("embedding.word", "embedding.position", "decoder.layers.", "input_layernorm", "linear_proj", "linear_qkv.layer_norm"),
    *("linear_qkv", "q_layernorm", "k_layernorm", "pre_mlp_layernorm", "linear_fc1.layer_norm", "linear_fc1", "linear_fc2"),
    *("decoder.final_layernorm", "output_layer"),
)


def declared_at(name: str) -> tuple[int, ...]:
    """A key that sorts the parameters of a chunk as its model declares them."""
    place, *inside = [place for place, part in enumerate(_ORDER) if part in name]
    layer = int(name.split(".")[2]) if inside else 0
    return place, layer, max(inside, key=lambda place: len(_ORDER[place]), default=0), int(name.endswith("bias"))


def write_legacy(
    folder: Path,
    shape: ReferenceShape,
    weights: Weights,
    layout: LegacyLayout,
    *,
    iteration: int | None = 100,
    optimizer_of: Callable[[int, int], dict[str, Any]] = lambda stage, rank: {},
    **changes: Any,
) -> Path:
    """Write a checkpoint into a --save folder; returns the folder of the iteration (None: a release).

    Args:
        optimizer_of: what a stage's tensor rank holds of the optimizer, with other things beside the weights.
        changes: of the arguments.
    """
    name = "release" if iteration is None else f"iter_{iteration:07d}"
    with megatron_enums() as enums:
        args = arguments_of(shape, layout, **{**enums, **changes})
        for stage, rank in itertools.product(range(layout.pp), range(layout.tp)):
            keys = ["model"] if layout.virtual == 1 else [f"model{i}" for i in range(layout.virtual)]
            states = {key: chunk_state(shape, weights, layout, i * layout.pp + stage, rank) for i, key in enumerate(keys)}
            path = folder / name / layout.folder(stage, rank) / "model_optim_rng.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({**common_content(args, iteration), **states, **optimizer_of(stage, rank)}, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("release" if iteration is None else str(iteration))
    return folder / name


def common_content(args: argparse.Namespace, iteration: int | None) -> dict[str, Any]:
    random_state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": iteration or 0,
        "rng_state": [random_state],
        "num_floating_point_operations_so_far": 1e15,
    }


@contextlib.contextmanager
def megatron_enums() -> Iterator[dict[str, Any]]:
    """Arguments that are enums of NVIDIA's package, which is there only meanwhile."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for argument, module, name in (
            ("model_type", "megatron.core.enums", "ModelType"),
            ("attention_backend", "megatron.core.transformer.enums", "AttnBackend"),
        ):
            made = types.ModuleType(module)
            kind = enum.Enum(name, ["first", "second"], module=module)  # type: ignore[misc]
            setattr(made, name, kind)
            patch.setitem(sys.modules, module, made)
            found[argument] = kind.first  # type: ignore[attr-defined]
        yield found
