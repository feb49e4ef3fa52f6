"""Reader of a Hugging Face folder: config.json, weights and tokenizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, format_list
from megatron.checkpoint.storage_url import open_storage
from megatron.config.data import DataConfig
from megatron.config.model import ModelConfig
from megatron.config.regular_file import parse_json, read_text
from megatron.parallel.tensor_slice import TensorSlice
from megatron.spec.weights import WORD_EMBEDDING
from megatron_lab.foreign.huggingface.block_scales import apply_scales, get_block_size
from megatron_lab.foreign.huggingface.families import FAMILIES, UNSUPPORTED
from megatron_lab.foreign.huggingface.family import Family
from megatron_lab.foreign.huggingface.fields import CONFIG, Fields
from megatron_lab.foreign.huggingface.weight_files import WEIGHT_DTYPES, open_tensors
from megatron_lab.foreign.source import TensorInfo, are_equal, find_mismatches


class HuggingFaceFolder:
    """A `WeightSource` that reads a folder with config.json and the weights of a model of a supported architecture.

    The vocabulary size is the number of rows of the embedding, which may exceed the number of the tokenizer's ids.

    Args:
        path: folder on a local disk.

    Raises:
        CheckpointError: the architecture or the quantization is not supported, config.json has a field whose effect is not known,
            or the tensors belong to a different model. The message lists all reasons.
        DamagedCheckpointError: files are missing, truncated, or do not match the index.
    """

    def __init__(self, path: Path | str) -> None:
        local = open_storage(path).local
        if local is None:
            raise CheckpointError(
                f"{path}: a Hugging Face folder can be read only from a local disk. Copy the folder to a local disk."
            )
        folder = self.folder = local
        self.name = str(path)
        config = _read_config(folder / CONFIG)
        family = _detect_family(folder, config)
        fields = Fields(str(folder / CONFIG), config, (*family.ignored_fields, "quantization_config"))
        quantization = config.get("quantization_config")
        block_size = get_block_size(quantization)
        if quantization is not None and block_size is None:
            fields.refuse(
                "quantization_config",
                "the weights are quantized. Only floating-point weights are supported, and fp8 (e4m3) with one scale per block: "
                "use the original model before its quantization, or let transformers dequantize it",
            )
        self.vocab_size = fields.get_size("vocab_size")
        self.model: ModelConfig = family.parse(fields)
        fields.finish()
        tensors = open_tensors(folder)
        tensors = tensors if block_size is None else apply_scales(tensors, block_size)
        self._tensors = {family.aliases.get(name, name): tensor for name, tensor in tensors.items()}
        if not any(name.startswith(family.prefix) for name in self._tensors):  # the model was saved without the output layer
            family = dataclasses.replace(family, prefix="")
        self._layouts = family.build_layouts(self.model, self.vocab_size)
        self.notes: list[str] = [*fields.notes]
        self._check_tensors(family, fields)
        self.tokenizer: DataConfig | None = _find_tokenizer(folder, family.model_type, self.notes)

    @functools.cached_property
    def weights(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every parameter. If a parameter is stored as several tensors, its dtype is the widest of their
        dtypes."""
        infos = {}
        for name, layout in self._layouts.items():
            dtypes = [self._tensors[hf_name].dtype for hf_name in layout.row_counts]
            infos[name] = TensorInfo(layout.shape, functools.reduce(torch.promote_types, dtypes))
        return infos

    def read(self, name: str, tensor_slice: TensorSlice | None = None) -> torch.Tensor:
        """Read a parameter, or a slice of it, into a new contiguous CPU tensor, as `WeightSource.read` specifies."""
        info = self.weights[name]
        tensor_slice = tensor_slice or TensorSlice.full(info.shape)
        return self._layouts[name].read_param(tensor_slice, info.dtype, lambda hf_name: self._tensors[hf_name].read())

    def read_parts(self, name: str) -> Mapping[str, torch.Tensor]:
        """Read the tensors of the files that form a parameter, by their names in the files."""
        return {hf_name: self._tensors[hf_name].read() for hf_name in self._layouts[name].row_counts}

    def _check_tensors(self, family: Family, fields: Fields) -> None:
        """Check that the folder has every tensor of the model with the right shape, and that each other tensor is known not to be a
        weight of the model.

        Args:
            family: description of the architecture.
            fields: fields of config.json.

        Raises:
            CheckpointError: tensors are missing, unexpected or of the wrong shape.
        """
        expected = dict(pair for layout in self._layouts.values() for pair in layout.get_hf_shapes().items())
        tensors = self._tensors
        mismatches = find_mismatches(tensors, expected)
        integers = [name for name in expected if name in tensors and tensors[name].dtype not in WEIGHT_DTYPES]
        mismatches += [f"{name} does not contain floating-point numbers" for name in integers]
        unexpected = [name for name in tensors if name not in expected]
        buffers = [name for name in unexpected if family.is_buffer(name)]
        num_mtp_layers = max((int(fields.get_raw(name) or 0) for name in family.mtp_fields), default=0)
        mtp_tensors = [name for name in unexpected if family.is_mtp_tensor(name, self.model, num_mtp_layers)]
        output_name = family.output_name
        if self.model.has_tied_embeddings and output_name in unexpected:
            buffers.append(output_name)  # old files contain the tied weight twice
            (embedding,) = self._layouts[WORD_EMBEDDING].row_counts
            if embedding in tensors and not are_equal(tensors[embedding].read(), tensors[output_name].read()):
                raise CheckpointError(
                    f"{self.name}: {CONFIG} ties the output layer to the embedding (tie_word_embeddings), but the values of "
                    f"{output_name} differ from those of the embedding.\n"
                    "  Set tie_word_embeddings to false if the output layer has its own weight, or remove the tensor."
                )
        mismatches += [
            f"{name} {list(tensors[name].shape)} is not a tensor of this model"
            for name in unexpected
            if name not in {*buffers, *mtp_tensors}
        ]
        if mismatches:
            raise CheckpointError(
                f"{self.name} does not hold the weights of the model in {CONFIG}:\n  "
                + format_list(mismatches, "\n  ")
                + "\n  The files do not belong together, or the model is not supported: copy the complete folder again."
            )
        if mtp_tensors:
            self.notes.append(
                f"not read: {len(mtp_tensors)} tensors of multi-token prediction ({family.mtp_fields[0]} = {num_mtp_layers}), "
                "whose layers differ from those of --mtp-num-layers; they change no logit of the next token"
            )
        if buffers:
            self.notes.append(f"not read, since these are buffers or copies of weights: {format_list(buffers)}")


def _read_config(path: Path) -> dict[str, Any]:
    """Read config.json and return its content.

    Raises:
        CheckpointError: there is no config.json, or it contains no object.
        DamagedCheckpointError: the file is not valid JSON.
    """
    try:
        content = parse_json(read_text(path))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} is not the folder of a Hugging Face model: it has no {CONFIG}. Choose the folder with this file"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Check the permissions of the file") from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is not valid JSON: {error}. If the file is damaged, copy it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} must contain a JSON object with the key model_type. The file is damaged, or not from a Hugging Face model: "
            "copy it again"
        )
    return content


def _detect_family(folder: Path, config: dict[str, Any]) -> Family:
    """Return the description of the architecture that a config.json names.

    Raises:
        CheckpointError: the architecture is not supported.
    """
    supported = "; ".join(f"{family.model_type} ({family.architecture})" for family in FAMILIES.values())
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        reason = UNSUPPORTED.get(str(config.get("model_type")))
        raise CheckpointError(
            f"{folder}: model_type {config.get('model_type')!r} (architectures {config.get('architectures')}) is not "
            f"supported{f', since it has {reason}' if reason else ''}. Choose a model of a supported type: {supported}"
        )
    base_class = f"{family.architecture.removesuffix('ForCausalLM').removesuffix('LMHeadModel')}Model"
    architectures = config.get("architectures")
    if architectures and (
        not isinstance(architectures, list) or not any(name in architectures for name in (family.architecture, base_class))
    ):
        raise CheckpointError(
            f"{folder}: architectures {architectures} is not a supported language model. Choose a model with a supported "
            f"architecture: {supported}"
        )
    return family


def _find_tokenizer(folder: Path, model_type: str, notes: list[str]) -> DataConfig | None:
    """Return settings for the tokenizer in a folder. If there is no supported tokenizer, return None and add a message for the user
    to `notes`."""
    if (file := folder / "tokenizer.json").is_file():
        return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(file))
    if (file := folder / "tokenizer.model").is_file():
        return DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(file))
    # vocab.json and merges.txt do not contain the pattern that splits texts, which is known only for GPT-2.
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if model_type == "gpt2" and vocab.is_file() and merges.is_file():
        return DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges))
    notes.append(
        f"{folder} holds no supported tokenizer: no tokenizer.json, tokenizer.model, or (only for GPT-2) vocab.json and merges.txt"
    )
    return None
