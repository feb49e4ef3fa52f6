"""Writes the forward of a model as an ONNX file, and compares what onnxruntime makes of it with the framework's own logits.

What is exported is the plain model (`megatron_lab/verification/reference/`): tensor operations and nothing of the framework, the
same function by the proofs of this project. One file holds graph and weights in float32; batch and sequence have any size.
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
from megatron.config.extras import optional
from megatron.config.model import ModelConfig
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron_lab.foreign.as_used import as_used
from megatron_lab.foreign.source import WeightSource
from megatron_lab.inference.forward import sequence_logits
from megatron_lab.inference.model_from_source import model_from
from megatron_lab.verification.plain_run import reference_shape
from megatron_lab.verification.reference.model import logits

MODEL = "model.onnx"
TOKENS, LOGITS = "input_ids", "logits"
"""Names of the input [batch, sequence] of int64 and of the output [batch, sequence, vocabulary]."""
LARGEST_DIFFERENCE = 1e-4
_LARGEST = 2 * 10**9
"""Bytes of weights that fit into one file: a message of protobuf is below 2 GiB."""


@dataclass(frozen=True)
class OnnxExport:
    """The result of an export."""

    folder: Path
    num_bytes: int
    checked: str
    notes: list[str]


class _Forward(nn.Module):
    """The plain model with the weights of a source, as a module."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__()
        self._shape, self._names = reference_shape(source.model, source.vocab_size), [*source.weights]
        self._values = nn.ParameterList(nn.Parameter(source.read(name).float(), requires_grad=False) for name in self._names)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, sequence, vocabulary] of ids [batch, sequence]."""
        return logits(self._shape, dict(zip(self._names, self._values, strict=True)), tokens)


def refusals(model: ModelConfig, num_bytes: int) -> list[str]:
    """What keeps a model from being exported, in words; nothing if it can be."""
    found = []
    if model.num_experts:
        found.append(
            f"--num-experts {model.num_experts}: which experts a token goes to depends on its values, and a graph is fixed"
        )
    if model.rope_type in ("dynamic", "longrope"):
        found.append(f"--rope-type {model.rope_type}: its frequencies depend on the length of the sequence, and a graph is fixed")
    if num_bytes > _LARGEST:
        found.append(f"its weights are {num_bytes / 1e9:.3g} GB in float32, and an ONNX file holds less than {_LARGEST / 1e9:g} GB")
    return found


def export_onnx(source: WeightSource, folder: Path, extras: Callable[[Path], list[str]] | None = None) -> OnnxExport:
    """Write a folder with the file; it appears under its name when it is complete and checked.

    Args:
        source: the weights. The whole model is in memory twice.
        folder: must not exist, or be empty.
        extras: writes further files (the tokenizer's) into the folder, and returns notes for the user.

    Raises:
        CheckpointError: the folder is taken, the model cannot be exported, or onnxruntime gives other logits.
        ValueError: a library is missing.
    """
    for library in ("onnx", "onnxscript", "onnxruntime"):
        optional(library, "--format onnx needs the extra onnx", extra="onnx")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already; choose another name, or remove it")
    used = as_used(source)
    num_bytes = sum(4 * math.prod(one.shape) for one in used.weights.values())
    if found := refusals(used.model, num_bytes):
        raise CheckpointError(
            f"{source.name} cannot become an ONNX file:\n  "
            + "\n  ".join(found)
            + "\n  A Hugging Face folder can hold it (without --format)."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.exporting-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        _write(used, temporary / MODEL)
        checked = _compare(used, temporary / MODEL)
        notes = [*used.notes, *(extras(temporary) if extras else [])]
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return OnnxExport(folder, (folder / MODEL).stat().st_size, checked, notes)


def _write(source: WeightSource, path: Path) -> None:
    """The graph, by torch's exporter. What it says of other libraries is of no use to a user."""
    tokens = torch.zeros(2, max(2, min(8, source.model.seq_length // 2)), dtype=torch.long)
    most = source.model.num_positions if source.model.position_embedding_type == "learned_absolute" else None
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=most)}
    speaker = logging.getLogger("torch.onnx")
    before = speaker.level
    speaker.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _Forward(source).eval(),
                (tokens,),
                path,
                dynamo=True,
                dynamic_shapes=(sizes,),
                input_names=[TOKENS],
                output_names=[LOGITS],
                external_data=False,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise CheckpointError(f"torch {torch.__version__} cannot export {source.name}: {str(error).splitlines()[0]}") from error
    finally:
        speaker.setLevel(before)


def _compare(source: WeightSource, path: Path) -> str:
    """Compare onnxruntime's logits with the framework's, on random ids of several sizes.

    Raises:
        CheckpointError: they differ.
    """
    runtime = optional("onnxruntime", "--format onnx needs onnxruntime", extra="onnx")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    context = make_context(Topology(), 0, torch.device("cpu"))
    model = model_from(source, context, torch.float32)
    generator, gap, largest = torch.Generator().manual_seed(0), 0.0, 0.0
    longest = source.model.seq_length
    for shape in ((1, 1), (3, longest // 2 + 1), (1, min(longest, 512))):
        tokens = torch.randint(source.vocab_size, shape, generator=generator)
        ours = sequence_logits(model, context, tokens)
        theirs = torch.from_numpy(session.run(None, {TOKENS: tokens.numpy()})[0])
        if theirs.shape != ours.shape:
            raise CheckpointError(f"onnxruntime gives logits {list(theirs.shape)}, here they are {list(ours.shape)}")
        gap, largest = max(gap, (ours - theirs).abs().max().item()), max(largest, ours.abs().max().item())
    told = f"onnxruntime {runtime.__version__}: logits differ by at most {gap:.1e} (the largest is {largest:.3g})"
    if not gap <= LARGEST_DIFFERENCE:
        raise CheckpointError(f"{told}, more than {LARGEST_DIFFERENCE:g}: the export is wrong")
    return f"Verified by {told}."
