"""Comparison of logits and token ids between this framework and Hugging Face transformers, to verify that a conversion between them
is right."""

from __future__ import annotations

import gc
import importlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron.checkpoint.errors import CheckpointError
from megatron.config.data import DataConfig
from megatron.config.model import ModelConfig
from megatron.config.optional_packages import import_optional
from megatron.config.regular_file import parse_json, read_text
from megatron.data.tokenizer import build_tokenizer
from megatron.parallel.context import make_context
from megatron.parallel.tensor_slice import TensorSlice
from megatron.parallel.topology import Topology
from megatron_lab.checkpoints import peft_writer
from megatron_lab.checkpoints.finite_values import count_nonfinite, describe_nonfinite_weights
from megatron_lab.foreign.source import TensorInfo, WeightSource
from megatron_lab.inference.forward import compute_sequence_logits
from megatron_lab.inference.model_from_source import load_model

MAX_LOGIT_DIFFERENCE = 1e-4
_NUM_SEQUENCES, _SEQUENCE_LENGTH = 2, 128
_SAMPLE_STRINGS = (
    "The quick brown fox jumps over the lazy dog. It's 12,345.67 metres away, isn't it?",
    "  two blanks before,  two between, and two behind  ",
    "def add(a, b):\n\treturn a + b  # lines and tabs\n\n\n",
    "größer, naïve, Москва, 東京都, עברית, 🙂🙂, e\u0301",
    "WE'LL see: don't; x=[1,2]; <html> & http://a.b/c?d=e_f",
)


@dataclass(frozen=True)
class _RoundedSource:
    """Weight source that rounds the weights of another source to the dtype of the exported files. The comparison with transformers
    uses it so that both models have equal weights."""

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

    def read(self, name: str, tensor_slice: TensorSlice | None = None) -> torch.Tensor:
        return self.source.read(name, tensor_slice).to(self.dtype)


def compare_logits(source: WeightSource, folder: Path, dtype: torch.dtype, *, adapters: Path | None = None, seed: int = 0) -> str:
    """Compare the logits of this framework with those of transformers on random token ids, in float32, in one process on the CPU.

    The two models are in memory one after the other: first that of this framework, then that of transformers.

    Args:
        source: weights for the model of this framework.
        folder: Hugging Face folder for transformers: the folder that was exported from `source`, or the folder that `source` reads.
        dtype: dtype of the weights in the folder, to which those of `source` are rounded before the comparison.
        adapters: PEFT folder with adapters for the model in `folder`; None for a model without adapters.
        seed: seed of the random token ids.

    Returns:
        A sentence with the largest difference between the logits.

    Raises:
        CheckpointError: logits differ by more than `MAX_LOGIT_DIFFERENCE`, both models give logits that are not finite, or
            transformers or PEFT reports missing or unexpected tensors.
        ValueError: transformers is not installed, or cannot open the folder.
    """
    shape = (_NUM_SEQUENCES, min(_SEQUENCE_LENGTH, source.model.seq_length))
    ids = torch.randint(source.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
    context = make_context(Topology(), 0, torch.device("cpu"))
    model = load_model(_RoundedSource(source, dtype), context, torch.float32)
    logits = compute_sequence_logits(model, context, ids)
    del model
    gc.collect()  # free the reference cycles of the model before transformers needs the memory
    expected, libraries = _compute_transformers_logits(folder, ids, adapters)
    if logits.shape != expected.shape:
        raise CheckpointError(
            f"internal error: {folder}: the logits of transformers have shape {list(expected.shape)}, those of this framework "
            f"{list(logits.shape)}: the conversion is wrong. Please report this"
        )
    if count_nonfinite(logits) and (num_nonfinite := count_nonfinite(expected)):
        weights = describe_nonfinite_weights(source)
        raise CheckpointError(
            f"the model itself gives NaN or infinity: {num_nonfinite:,} of {expected.numel():,} logits of {libraries} on random "
            "ids are not finite, nor are those of this framework, and cannot be compared.\n"
            f"  {weights or f'All weights of {source.name} are finite: they are so large that logits overflow in float32'}\n"
            "  Use another copy of the model, or an earlier checkpoint"
        )
    max_difference = (logits - expected).abs().max().item()
    result = (
        f"on {shape[0]} x {shape[1]} random ids in float32 differ by at most {max_difference:.1e} from those of {libraries} "
        f"(the largest is {expected.abs().max().item():.3g})"
    )
    if not max_difference <= MAX_LOGIT_DIFFERENCE:
        raise CheckpointError(
            f"internal error: the logits of {source.name} {result}, more than the allowed {MAX_LOGIT_DIFFERENCE:g}: the conversion "
            "is wrong. Please report this"
        )
    return f"Verified: the logits of the source {result}."


def _import_transformers() -> Any:
    """Import transformers and disable its warnings and progress bars."""
    transformers = import_optional("transformers", "--verify needs transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _compute_transformers_logits(folder: Path, ids: torch.Tensor, adapters: Path | None) -> tuple[torch.Tensor, str]:
    """Return the logits [b, s, v] of the model in a folder, with adapters from a PEFT folder or none, and the libraries that
    computed them."""
    transformers = _import_transformers()
    libraries = f"transformers {transformers.__version__}"
    dtype_argument = "torch_dtype" if int(transformers.__version__.split(".")[0]) < 5 else "dtype"
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, **{dtype_argument: torch.float32}, output_loading_info=True, local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ValueError(
            f"{libraries} cannot open {folder}: {error}.\n  Install another version of transformers, or leave --verify out."
        ) from error
    _check_report(report, f"{folder} does not fit the model in transformers: transformers")
    if adapters is not None:
        model, adapter_library = _add_adapters(model, adapters)
        libraries += f" and {adapter_library}"
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(ids).logits
    return logits.float(), libraries


def _check_report(report: Mapping[str, Any], subject: str) -> None:
    """Check that a library has found a value for each tensor of a model, and a place for each tensor of the files.

    Args:
        report: names of tensors by type of error, from the library.
        subject: start of the error message, which ends with the library.

    Raises:
        CheckpointError: the library reports tensors.
    """
    errors = {category: sorted(map(str, names)) for category, names in report.items() if names and category != "error_msgs"}
    if errors:
        raise CheckpointError(f"internal error: {subject} reports {errors}, so the conversion is wrong. Please report this")


def _add_adapters(model: Any, adapters: Path) -> tuple[Any, str]:
    """Add the LoRA adapters of a PEFT folder to a model of transformers. Return the model, and what added them.

    Without the library PEFT, the adapters are added to the weights by its formula.

    Raises:
        CheckpointError: the adapters do not fit the model.
    """
    try:
        peft = importlib.import_module("peft")
    except ImportError:
        return _merge_adapters(model, adapters), "PEFT's formula (the library peft is not installed)"
    try:
        adapted_model = peft.PeftModelForCausalLM(model, peft.PeftConfig.from_pretrained(str(adapters)), "default")
        result = adapted_model.load_adapter(str(adapters), "default")
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"PEFT {peft.__version__} cannot add the adapters in {adapters} to the model: {error}") from error
    report = {"missing_keys": [name for name in result.missing_keys if "lora_" in name], "unexpected_keys": result.unexpected_keys}
    _check_report(report, f"{adapters} does not fit the model: PEFT")
    return adapted_model, f"PEFT {peft.__version__}"


def _merge_adapters(model: Any, adapters: Path) -> Any:
    """Add alpha / r x B A of each adapter in a PEFT folder to the weight of its module: W + alpha / r x B A."""
    config = parse_json(read_text(adapters / peft_writer.CONFIG))
    tensors, modules = load_file(adapters / peft_writer.WEIGHTS), dict(model.named_modules())
    with torch.no_grad():
        for name in [name for name in tensors if name.endswith(peft_writer.A_SUFFIX)]:
            stem = name.removesuffix(peft_writer.A_SUFFIX)
            a, b = tensors.pop(name), tensors.pop(f"{stem}{peft_writer.B_SUFFIX}")
            product = config["lora_alpha"] / config["r"] * (b.float() @ a.float())
            weight = modules[stem.removeprefix(peft_writer.MODEL_PREFIX)].weight
            weight += product.t() if config["fan_in_fan_out"] else product
    _check_report({"unexpected_keys": tensors}, f"{adapters} is read without the library peft, which")
    return model


def compare_ids(config: DataConfig, folder: Path) -> str:
    """Compare the token ids of a few strings between the tokenizer of this framework and that of transformers, without and with
    the special tokens that begin and end each text.

    Args:
        config: settings of this framework's tokenizer.
        folder: folder with the tokenizer files for transformers.

    Returns:
        A sentence that says on how many strings the ids are equal.

    Raises:
        CheckpointError: the ids differ, or transformers cannot read the files.
    """
    tokenizer = build_tokenizer(config)
    try:
        transformers_tokenizer = _import_transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        raise CheckpointError(
            f"transformers cannot read the tokenizer in {folder}: {error}.\n"
            "  Install another version of transformers, or set --no-tokenizer to write only the weights."
        ) from error
    for text, is_complete in itertools.product(_SAMPLE_STRINGS, (False, True)):
        ids = tokenizer.encode_segment(text).tolist()
        if is_complete:
            ids = [*tokenizer.prefix_ids, *ids, *tokenizer.suffix_ids]
        transformers_ids = transformers_tokenizer(text, add_special_tokens=is_complete)["input_ids"]
        if ids != transformers_ids:
            raise CheckpointError(
                f"the tokenizer in {folder} gives other token ids in transformers than in this framework: transformers encodes "
                f"{text!r} to {transformers_ids}, and this framework encodes the text to {ids}.\n"
                "  Set --no-tokenizer to write only the weights."
            )
    return f"transformers' AutoTokenizer gives the same ids on {len(_SAMPLE_STRINGS)} texts."
