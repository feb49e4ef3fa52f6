"""Whether transformers computes the same logits from a Hugging Face folder as this framework from the source of its weights."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.errors import CheckpointError
from megatron.config.data import DataConfig
from megatron.config.extras import optional
from megatron.config.model import ModelConfig
from megatron.data.tokenizer import build_tokenizer
from megatron.parallel.boxes import Box
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron_lab.foreign.source import TensorInfo, WeightSource
from megatron_lab.inference.forward import sequence_logits
from megatron_lab.inference.model_from_source import model_from

LARGEST_DIFFERENCE = 1e-4
_SEQUENCES, _TOKENS = 2, 128
_TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 12,345.67 metres away, isn't it?",
    "  two blanks before,  two between, and two behind  ",
    "def add(a, b):\n\treturn a + b  # lines and tabs\n\n\n",
    "größer, naïve, Москва, 東京都, עברית, 🙂🙂, e\u0301",
    "WE'LL see: don't; x=[1,2]; <html> & http://a.b/c?d=e_f",
)


@dataclass(frozen=True)
class _Rounded:
    """A source whose weights are rounded to a dtype, as they are in the files."""

    source: WeightSource
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def model(self) -> ModelConfig:
        return self.source.model

    @property
    def vocab_size(self) -> int:
        return self.source.vocab_size

    @property
    def tokenizer(self) -> DataConfig | None:
        return self.source.tokenizer

    @property
    def weights(self) -> Mapping[str, TensorInfo]:
        return self.source.weights

    @property
    def notes(self) -> list[str]:
        return self.source.notes

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        return self.source.read(name, box).to(self.dtype)


def compare_logits(source: WeightSource, folder: Path, dtype: torch.dtype, *, seed: int = 0) -> str:
    """Compare on random ids, in float32, one process and the CPU. Holds the whole model, ours and theirs one after the other.

    Args:
        source: the weights.
        folder: what was written of them, or what they are read from.
        dtype: of the weights in the folder.

    Returns:
        what was found, as a sentence.

    Raises:
        CheckpointError: the logits differ, or transformers finds tensors missing or left over.
        ValueError: transformers is not installed, or cannot open the folder.
    """
    transformers = _library()
    shape = (_SEQUENCES, min(_TOKENS, source.model.seq_length))
    ids = torch.randint(source.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
    context = make_context(Topology(), 0, torch.device("cpu"))
    model = model_from(_Rounded(source, dtype), context, torch.float32)
    ours = sequence_logits(model, context, ids)
    del model
    gc.collect()  # its modules and its table point at each other, and theirs needs the room
    theirs = _their_logits(folder, ids)
    if ours.shape != theirs.shape:
        raise CheckpointError(f"{folder}: transformers gives logits {list(theirs.shape)}, here they are {list(ours.shape)}")
    gap = (ours - theirs).abs().max().item()
    told = (
        f"on {shape[0]} x {shape[1]} random ids in float32 differ by at most {gap:.1e} from those of transformers "
        f"{transformers.__version__} (the largest is {theirs.abs().max().item():.3g})"
    )
    if not gap <= LARGEST_DIFFERENCE:
        raise CheckpointError(f"the logits of {source.name} {told}, more than {LARGEST_DIFFERENCE:g}: the conversion is wrong")
    return f"Verified: the logits of the source {told}."


def _library() -> Any:
    """transformers, told to be quiet."""
    transformers = optional("transformers", "--verify needs transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _their_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    transformers = _library()
    dtype_argument = "torch_dtype" if int(transformers.__version__.split(".")[0]) < 5 else "dtype"
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, **{dtype_argument: torch.float32}, output_loading_info=True, local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ValueError(f"transformers {transformers.__version__} cannot open {folder}: {error}") from error
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names and kind != "error_msgs"}
    if wrong:
        raise CheckpointError(f"{folder}: transformers reports {wrong}")
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(ids).logits
    return logits.float()


def compare_ids(config: DataConfig, folder: Path) -> str:
    """Compare the ids of a few texts.

    Args:
        config: of our tokenizer.
        folder: with the files of theirs.

    Returns:
        what was found, as a sentence.

    Raises:
        CheckpointError: they differ, or transformers cannot read the files.
    """
    ours = build_tokenizer(config)
    try:
        theirs = _library().AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        raise CheckpointError(f"transformers cannot read the tokenizer in {folder}: {error}") from error
    for text in _TEXTS:
        mine = ours.encode(text)
        found = theirs(text, add_special_tokens=config.tokenizer_type == "Llama2Tokenizer")["input_ids"]
        if mine != found:
            raise CheckpointError(
                f"the tokenizer in {folder} gives other ids in transformers: {text!r} is {found} there and {mine} here.\n"
                "  --no-tokenizer writes the weights alone."
            )
    return f"transformers' AutoTokenizer gives the same ids on {len(_TEXTS)} texts."
