"""Writer of a model's forward pass as an ONNX file, and comparison of the logits of onnxruntime with those of this framework.

The exported graph is that of the reference model (`megatron_lab/verification/reference/`), which consists of tensor operations
only. The proofs of this project show that it computes the same function. One file holds the graph and the float32 weights. Batch
size and sequence length are dynamic.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import secrets
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from megatron.checkpoint.errors import CheckpointError
from megatron.config.model import ModelConfig
from megatron.config.optional_packages import import_optional
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron_lab.foreign.inference_source import build_inference_source
from megatron_lab.foreign.source import WeightSource
from megatron_lab.inference.forward import compute_sequence_logits
from megatron_lab.inference.model_from_source import load_model
from megatron_lab.verification.reference.model import compute_logits
from megatron_lab.verification.reference_run import build_reference_shape

MODEL = "model.onnx"
TOKENS, LOGITS = "input_ids", "logits"
"""Names of the input, int64 [batch, sequence], and of the output, [batch, sequence, vocabulary]."""
MAX_LOGIT_DIFFERENCE = 1e-4
_MAX_BYTES = 2 * 10**9
"""Maximum size of the weights in one file, in bytes: a protobuf message must be smaller than 2 GiB."""


@dataclass(frozen=True)
class OnnxExport:
    """Result of exporting a model to ONNX, for the summary."""

    folder: Path
    num_bytes: int
    verification: str
    notes: list[str]


class _Forward(nn.Module):
    """Forward pass as a torch module that can be exported. It runs the reference model, a second implementation that consists of
    tensor operations only, with the weights of a source."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__()
        self._shape, self._names = build_reference_shape(source.model, source.vocab_size), [*source.weights]
        self._values = nn.ParameterList(nn.Parameter(source.read(name).float(), requires_grad=False) for name in self._names)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [batch, sequence, vocabulary] of token ids [batch, sequence]."""
        return compute_logits(self._shape, dict(zip(self._names, self._values, strict=True)), tokens)


def find_obstacles(model: ModelConfig, num_bytes: int) -> list[str]:
    """Return the reasons why a model cannot be exported to ONNX, as sentences. The list is empty if it can be exported.

    Args:
        num_bytes: size of the weights in float32.
    """
    obstacles = []
    if model.num_experts:
        obstacles.append(
            f"--num-experts {model.num_experts}: which experts a token goes to depends on its values, and a graph is fixed"
        )
    if model.rope_type in ("dynamic", "longrope"):
        obstacles.append(
            f"--rope-type {model.rope_type}: its frequencies depend on the length of the sequence, and a graph is fixed"
        )
    if num_bytes > _MAX_BYTES:
        obstacles.append(
            f"its weights are {num_bytes / 1e9:.3g} GB in float32, and an ONNX file holds less than {_MAX_BYTES / 1e9:g} GB"
        )
    return obstacles


def export_onnx(source: WeightSource, folder: Path, extras: Callable[[Path], list[str]] | None = None) -> OnnxExport:
    """Write a folder with the ONNX file. The folder has a temporary name until it is complete and verified.

    Args:
        source: weights of the model. The complete model is in memory twice.
        folder: folder to write. It must not exist, or must be empty.
        extras: function that writes additional files (the tokenizer's) into the folder, and returns notes for the user.

    Raises:
        CheckpointError: the folder is not empty, the model cannot be exported, or the logits of onnxruntime differ.
        ValueError: onnx, onnxscript or onnxruntime is not installed.
    """
    for library in ("onnx", "onnxscript", "onnxruntime"):
        import_optional(library, "--format onnx needs the extra onnx", extra="onnx")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already and is not an empty folder. Choose another name, or remove it")
    exported_source = build_inference_source(source)
    num_bytes = sum(4 * math.prod(info.shape) for info in exported_source.weights.values())
    if obstacles := find_obstacles(exported_source.model, num_bytes):
        raise CheckpointError(
            f"{source.name} cannot be exported to ONNX:\n  " + "\n  ".join(obstacles) + "\n"
            "  Leave --format out to write a Hugging Face folder, which does not have these limits."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.exporting-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        _write_graph(exported_source, temporary / MODEL)
        verification = _compare_logits(exported_source, temporary / MODEL)
        notes = [*exported_source.notes, *(extras(temporary) if extras else [])]
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return OnnxExport(folder, (folder / MODEL).stat().st_size, verification, notes)


def _write_graph(source: WeightSource, path: Path) -> None:
    """Write the ONNX file of the model's forward pass with torch's exporter. The exporter's messages are suppressed, because they
    do not help the user."""
    tokens = torch.zeros(2, max(2, min(8, source.model.seq_length // 2)), dtype=torch.long)
    max_length = source.model.num_positions if source.model.position_embedding_type == "learned_absolute" else None
    dynamic_dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=max_length)}
    logger = logging.getLogger("torch.onnx")
    old_level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _Forward(source).eval(),
                (tokens,),
                path,
                dynamo=True,
                dynamic_shapes=(dynamic_dims,),
                input_names=[TOKENS],
                output_names=[LOGITS],
                external_data=False,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise CheckpointError(
            f"torch {torch.__version__} cannot export {source.name}: {str(error).splitlines()[0]}.\n"
            "  Use another version of torch, or leave --format out to write a Hugging Face folder."
        ) from error
    finally:
        logger.setLevel(old_level)


def _compare_logits(source: WeightSource, path: Path) -> str:
    """Compare the logits of onnxruntime with those of this framework, on random token ids of several shapes. Returns a sentence
    with the largest difference.

    Raises:
        CheckpointError: logits differ by more than `MAX_LOGIT_DIFFERENCE`.
    """
    runtime = import_optional("onnxruntime", "--format onnx needs onnxruntime", extra="onnx")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    context = make_context(Topology(), 0, torch.device("cpu"))
    model = load_model(source, context, torch.float32)
    generator, max_difference, max_logit = torch.Generator().manual_seed(0), 0.0, 0.0
    max_length = source.model.seq_length
    for shape in ((1, 1), (3, max_length // 2 + 1), (1, min(max_length, 512))):
        tokens = torch.randint(source.vocab_size, shape, generator=generator)
        expected = compute_sequence_logits(model, context, tokens)
        actual = torch.from_numpy(session.run(None, {TOKENS: tokens.numpy()})[0])
        if actual.shape != expected.shape:
            raise CheckpointError(
                f"internal error: the logits of onnxruntime have shape {list(actual.shape)}, those of this framework "
                f"{list(expected.shape)}: the export is wrong. Please report this"
            )
        max_difference, max_logit = (
            max(max_difference, (expected - actual).abs().max().item()),
            max(max_logit, expected.abs().max().item()),
        )
    result = f"onnxruntime {runtime.__version__}: logits differ by at most {max_difference:.1e} (the largest is {max_logit:.3g})"
    if not max_difference <= MAX_LOGIT_DIFFERENCE:
        raise CheckpointError(
            f"internal error: {result}, more than the allowed {MAX_LOGIT_DIFFERENCE:g}: the export is wrong. Please report this"
        )
    return f"Verified by {result}."
