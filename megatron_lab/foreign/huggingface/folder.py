"""A Hugging Face model as a source of weights."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, listed
from megatron.checkpoint.storage_kinds import open_storage
from megatron.config.data import DataConfig
from megatron.config.model import ModelConfig
from megatron.config.regular_file import read_text
from megatron.parallel.boxes import Box
from megatron.spec.weights import WORD_EMBEDDING
from megatron_lab.foreign.huggingface.block_scales import block_size, without_scales
from megatron_lab.foreign.huggingface.families import FAMILIES, MISSING
from megatron_lab.foreign.huggingface.family import Family
from megatron_lab.foreign.huggingface.fields import CONFIG, Fields
from megatron_lab.foreign.huggingface.weight_files import WEIGHT_DTYPES, stored_tensors
from megatron_lab.foreign.source import TensorInfo, misfits


class HuggingFaceFolder:
    """A folder with config.json and weights, of one of the known architectures; a `WeightSource`.

    The vocabulary is the rows of the embedding, which may be more than the tokenizer has ids.

    Raises:
        CheckpointError: another architecture, a field that changes the model in an unknown way, tensors that belong to another
            model. The message lists all reasons.
        DamagedCheckpointError: files are missing, truncated, or not what the index says.
    """

    def __init__(self, path: Path | str) -> None:
        local = open_storage(path).local
        if local is None:
            raise CheckpointError(f"{path}: a Hugging Face folder is read from a local disk only; copy it there first")
        folder = self.folder = local
        self.name = str(path)
        content = _read_config(folder / CONFIG)
        family = _family(folder, content)
        fields = Fields(str(folder / CONFIG), content, (*family.without_effect, "quantization_config"))
        self.vocab_size = fields.size("vocab_size")
        self.model: ModelConfig = family.read(fields)
        fields.finish()
        stored, block = stored_tensors(folder), block_size(content.get("quantization_config"))
        stored = stored if block is None else without_scales(stored, block)
        self._stored = {family.renamed.get(name, name): tensor for name, tensor in stored.items()}
        if not any(name.startswith(family.prefix) for name in self._stored):  # saved without the output layer
            family = dataclasses.replace(family, prefix="")
        self._layouts = family.layouts(self.model, self.vocab_size)
        self.notes: list[str] = [*fields.notes]
        self._check_tensors(family, fields)
        self.tokenizer: DataConfig | None = _find_tokenizer(folder, family.model_type, self.notes)

    @functools.cached_property
    def weights(self) -> Mapping[str, TensorInfo]:
        """Every parameter; one that is made of several tensors has the widest of their dtypes."""
        found = {}
        for name, layout in self._layouts.items():
            dtypes = [self._stored[theirs].dtype for theirs in layout.rows]
            found[name] = TensorInfo(layout.shape, functools.reduce(torch.promote_types, dtypes))
        return found

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A parameter, or a box of it; see `WeightSource`."""
        info = self.weights[name]
        box = box or Box.whole(info.shape)
        return self._layouts[name].ours(box, info.dtype, lambda theirs: self._stored[theirs].read())

    def _check_tensors(self, family: Family, fields: Fields) -> None:
        """Check that every tensor of the model is there in its shape, and every other is known to be no weight."""
        expected = dict(pair for layout in self._layouts.values() for pair in layout.their_shapes().items())
        stored = self._stored
        wrong = misfits(stored, expected)
        integers = [name for name in expected if name in stored and stored[name].dtype not in WEIGHT_DTYPES]
        wrong += [f"{name} is not of floating-point numbers" for name in integers]
        unread = [name for name in stored if name not in expected]
        buffers = [name for name in unread if family.is_buffer(name)]
        depths = max((int(fields.raw(name) or 0) for name in family.later_tokens), default=0)
        later = [name for name in unread if family.is_of_later_token(name, self.model, depths)]
        output = family.output
        if self.model.tied and output in unread:
            buffers.append(output)  # a second copy, as old files have
            (embedding,) = self._layouts[WORD_EMBEDDING].rows
            if embedding in stored and not torch.equal(stored[embedding].read(), stored[output].read()):
                raise CheckpointError(
                    f"{self.name}: {CONFIG} ties the output layer to the embedding (tie_word_embeddings), but {output} is stored "
                    "with other values.\n  Set tie_word_embeddings to false if the model has both, or remove the tensor."
                )
        wrong += [f"{name} {list(stored[name].shape)} is not of this model" for name in unread if name not in {*buffers, *later}]
        if wrong:
            raise CheckpointError(f"{self.name} does not hold the weights of the model in {CONFIG}:\n  " + listed(wrong, "\n  "))
        if later:
            self.notes.append(
                f"not read: {len(later)} tensors of multi-token prediction ({family.later_tokens[0]} = {depths}), which "
                "differs from --mtp-num-layers here; they change no logit of the next token"
            )
        if buffers:
            self.notes.append(f"not read, since these are no weights of their own: {listed(buffers)}")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} is no model of Hugging Face: it has no {CONFIG}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must be a JSON object with model_type")
    return content


def _family(folder: Path, config: dict[str, Any]) -> Family:
    """The architecture that a config.json names.

    Raises:
        CheckpointError: it is unknown.
    """
    known = "; ".join(f"{family.model_type} ({family.architecture})" for family in FAMILIES.values())
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        lacking = MISSING.get(str(config.get("model_type")))
        raise CheckpointError(
            f"{folder}: model_type {config.get('model_type')!r} (architectures {config.get('architectures')}) is not supported"
            f"{f', since it has {lacking}' if lacking else ''}; known are {known}"
        )
    quantization = config.get("quantization_config")
    if quantization is not None and block_size(quantization) is None:
        raise CheckpointError(
            f"{folder} holds quantized weights (quantization_config = {quantization!r}): only floating-point weights can be read, "
            "and those in fp8 (e4m3) with a scale for each block; take the model that it was made from"
        )
    base = f"{family.architecture.removesuffix('ForCausalLM').removesuffix('LMHeadModel')}Model"
    named = config.get("architectures")
    if named and (not isinstance(named, list) or not any(name in named for name in (family.architecture, base))):
        raise CheckpointError(f"{folder}: architectures {named} is not a language model that can be read; known are {known}")
    return family


def _find_tokenizer(folder: Path, model_type: str, notes: list[str]) -> DataConfig | None:
    """The settings of the tokenizer in a folder, or None, which is noted."""
    if (file := folder / "tokenizer.json").is_file():
        return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(file))
    if (file := folder / "tokenizer.model").is_file():
        return DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(file))
    # The files do not say how text is split before it is merged, which is known for GPT-2 alone.
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    if model_type == "gpt2" and vocabulary.is_file() and merges.is_file():
        return DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocabulary), merge_file=str(merges))
    notes.append(
        f"{folder} holds no tokenizer that is known: no tokenizer.json, tokenizer.model, or (of GPT-2) vocab.json with merges.txt"
    )
    return None
