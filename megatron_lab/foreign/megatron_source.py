"""Base class of the readers for both Megatron-LM checkpoint formats: parameter names, the model configuration and the state of the
run."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.global_tensor import WEIGHT
from megatron.parallel.params import ParamRecord, build_global_records
from megatron.parallel.tensor_slice import TensorSlice
from megatron.spec.weights import pad_vocab_size, split_layer_name
from megatron_lab.foreign.legacy_settings import build_model_config, build_tokenizer_config, describe_differences, infer_vocab_size
from megatron_lab.foreign.source import TensorInfo, are_equal

EMBEDDING_KEY, OUTPUT_KEY = "embedding.word_embeddings.weight", "output_layer.weight"
_MEGATRON_PREFIXES = {
    "embedding.word": ("embedding.word_embeddings.",),
    "embedding.position": ("embedding.position_embeddings.",),
    "attention_norm": ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    "attention.qkv": ("self_attention.linear_qkv.",),
    "attention.q_norm": ("self_attention.q_layernorm.",),
    "attention.k_norm": ("self_attention.k_layernorm.",),
    "attention.output": ("self_attention.linear_proj.",),
    "mlp_norm": ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    "mlp.up": ("mlp.linear_fc1.",),
    "mlp.down": ("mlp.linear_fc2.",),
    "final_norm": ("decoder.final_layernorm.",),
    "output": ("output_layer.",),
}
"""Prefixes of Megatron-LM's parameter names by module name of this framework.

A norm has two possible prefixes: the separate module, and the fused module of Transformer Engine that applies the norm and the
following linear layer.
"""
NON_PARAM_SUFFIXES = ("_extra_state", "rotary_pos_emb.inv_freq")
"""Suffixes of the names of stored tensors that are not parameters: the state of FP8 matrix products, and the rotary
frequencies, which follow from the settings."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of Adam's moments. Adam is the only optimizer whose state is read."""
_LOW_PRECISION_ARGS = ("fp8_param", "fp8_param_gather", "fp4_param", "fp4_param_gather")
"""Arguments with which the stored weights are not the main parameters rounded to the model's dtype."""
WEIGHTS_ONLY_HINT = "Set --weights-only to import the weights without the optimizer state."
"""Sentence that ends the error messages about optimizer state."""


def get_megatron_keys(name: str, first_layer: int) -> list[str]:
    """Return the names that a parameter may have in a Megatron-LM checkpoint. A checkpoint contains exactly one of them.

    Args:
        name: name of the parameter in this framework.
        first_layer: index of the first layer of the model chunk. Megatron-LM numbers the layers of each chunk from 0.
    """
    layer, param = split_layer_name(name)
    module, _, attribute = param.rpartition(".")
    layer_prefix = "" if layer is None else f"decoder.layers.{layer - first_layer}."
    return [f"{layer_prefix}{module_prefix}{attribute}" for module_prefix in _MEGATRON_PREFIXES[module]]


def get_megatron_shape(record: ParamRecord, shape: list[int]) -> list[int]:
    """Convert the shape of a parameter, or of a shard of it, to the shape that it has in Megatron-LM.

    The weight of a gated MLP is [2f, h] in Megatron-LM and [2, f, h] in this framework (f: FFN hidden size, h: hidden size).

    Args:
        record: properties of the parameter.
        shape: shape of the parameter or shard in this framework.
    """
    return [math.prod(shape[:-1]), shape[-1]] if record.param_type != "vector" else [math.prod(shape)]


@dataclass(frozen=True)
class SavedRun:
    """State of a Megatron-LM run without its tensors: arguments, counters, schedules and loss scaler."""

    args: Namespace
    iteration: int
    updates: int
    """Number of optimizer updates that the run has made."""
    schedule: Mapping[str, Any]
    """State of the learning-rate and weight-decay schedules, as Megatron-LM saves it."""
    scaler: Mapping[str, Any] | None
    """State of the dynamic loss scaler; None if the run had none."""


class MegatronSource(ABC):
    """A `WeightSource` that reads the weights, the optimizer state and the state of the run from a Megatron-LM checkpoint. Each of
    the formats `torch` and `torch_dist` has a subclass.

    Args:
        name: folder, as the user wrote it.
        args: arguments of the run that saved the checkpoint.
        args_path: file with the arguments, for error messages.
    """

    def __init__(self, name: str, args: Namespace, args_path: str) -> None:
        self.name, self.args = name, args
        self.model, self.tokenizer = build_model_config(args, args_path), build_tokenizer_config(args)
        self.notes: list[str] = []
        self.vocab_size = 0
        self._padded_vocab_size = self._tp_size = 0
        self._records: dict[str, ParamRecord] = {}

    def _set_vocab_size(self, padded_vocab_size: int, tp_size: int, requested: int | None) -> None:
        """Set the vocabulary size without padding. Also build the records of the parameters, whose shapes depend on it.

        Args:
            padded_vocab_size: rows of the stored word embedding, with padding.
            tp_size: tensor-parallel size of the run.
            requested: vocabulary size that the user set; None if the user set none.
        """
        self._padded_vocab_size, self._tp_size = padded_vocab_size, tp_size
        self.vocab_size = self._resolve_vocab_size(requested)
        self._records = build_global_records(self.model, self.vocab_size)
        self.notes += describe_differences(self.args)

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every parameter of the model, by name."""

    @abstractmethod
    def read(self, name: str, tensor_slice: TensorSlice | None = None) -> torch.Tensor:
        """Read a parameter, or a slice of it, into a new contiguous CPU tensor, as `WeightSource.read` specifies."""

    @functools.cached_property
    @abstractmethod
    def saved_run(self) -> SavedRun | None:
        """State of the run (counters, schedules, loss scaler); None if the checkpoint holds only weights.

        Raises:
            CheckpointError: the state cannot be converted exactly.
        """

    @abstractmethod
    def _get_state_info(self, state_type: str, name: str) -> TensorInfo | None:
        """Return the shape and dtype of a main parameter or of a moment.

        Args:
            state_type: `WEIGHT` for the main parameter, or the name of a moment.
            name: name of the parameter.

        Returns:
            None if there is no separate main parameter, because the optimizer updates the parameter itself.
        """

    @abstractmethod
    def _read_state(self, state_type: str, name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        """Read a slice of a main parameter or of a moment.

        Args:
            state_type: `WEIGHT` for the main parameter, or the name of a moment.
            name: name of the parameter.
            tensor_slice: region to read.
        """

    @functools.cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of all tensors of the training state, by full name. `model.<name>` is the main parameter, or the weight
        if it has no main parameter; `exp_avg.<name>` and `exp_avg_sq.<name>` are the moments."""
        assert self.saved_run is not None, "the checkpoint holds only weights"
        tensors = {f"{WEIGHT}.{name}": self._get_state_info(WEIGHT, name) or info for name, info in self.weights.items()}
        for state_type in MOMENTS:
            for name in self.weights:
                info = self._get_state_info(state_type, name)
                assert info is not None, "moments are state"
                tensors[f"{state_type}.{name}"] = info
        return tensors

    def read_stored(self, full_name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        """Read a slice of a tensor of the training state. Also check that a weight equals its main parameter (float32 copy in the
        optimizer state), rounded to the dtype of the weight.

        Args:
            full_name: name in `tensors`, such as `exp_avg.<name>`.
            tensor_slice: region to read.

        Raises:
            DamagedCheckpointError: the file is damaged, or a weight does not equal its rounded main parameter.
        """
        state_type, _, name = full_name.partition(".")
        if state_type == WEIGHT and self._get_state_info(state_type, name) is None:
            return self.read(name, tensor_slice)
        tensor = self._read_state(state_type, name, tensor_slice)
        has_full_main_param = state_type == WEIGHT and not any(vars(self.args).get(arg) for arg in _LOW_PRECISION_ARGS)
        if has_full_main_param and not are_equal(tensor.to(self.weights[name].dtype), self.read(name, tensor_slice)):
            raise DamagedCheckpointError(
                f"{self.name}: the weight {name} differs from its float32 copy in the optimizer state, rounded to the dtype of "
                "the weight. The optimizer state belongs to another run or step, or it is divided among the ranks in a way that "
                f"the checkpoint's settings do not describe. {WEIGHTS_ONLY_HINT}"
            )
        return tensor

    def _resolve_vocab_size(self, requested: int | None) -> int:
        """Return the vocabulary size without padding. If it is not known, the padding rows count as part of the vocabulary, and a
        note for the user says so.

        Args:
            requested: vocabulary size that the user set; None if the user set none.

        Raises:
            CheckpointError: the size exceeds the number of rows of the word embedding.
        """
        size = infer_vocab_size(self.args) if requested is None else requested
        if size is None:
            self.notes.append(
                f"The vocabulary size without padding is unknown: all {self._padded_vocab_size} rows of the word embedding are "
                "kept. To cut the padding, give the tokenizer or the number of rows without padding."
            )
            return self._padded_vocab_size
        if not 0 < size <= self._padded_vocab_size:
            raise CheckpointError(
                f"{self.name}: a vocabulary of {size} does not fit the word embedding of {self._padded_vocab_size} rows. Choose "
                "the tokenizer with which the model was trained, or set --embedding-rows to the number of rows without padding"
            )
        if size < self._padded_vocab_size:
            self.notes.append(
                f"The last {self._padded_vocab_size - size} of {self._padded_vocab_size} rows of the word embedding are padding "
                "and were cut off."
            )
        return size

    def pads_to_stored_rows(self, vocab_size: int) -> bool:
        """Return whether Megatron-LM pads a vocabulary of this size to the number of rows that the stored word embedding has. If
        so, all rows beyond the vocabulary are padding."""
        return pad_vocab_size(vocab_size, self.model.make_vocab_size_divisible_by, self._tp_size) == self._padded_vocab_size


def parse_saved_run(content: Mapping[str, Any], optimizer: Any, path: str) -> SavedRun:
    """Return the state of a run without its tensors, from the content of a Megatron-LM checkpoint.

    Args:
        content: dictionary with the keys `args`, `iteration` and `opt_param_scheduler`.
        optimizer: state of the optimizer, with or without tensors.
        path: checkpoint file, for error messages.

    Raises:
        CheckpointError: the optimizer is not Adam, there are several optimizers, or an entry is missing.
    """
    args, schedule = content["args"], content.get("opt_param_scheduler")
    optimizer_name = vars(args).get("optimizer", "adam")
    if optimizer_name != "adam":
        raise CheckpointError(
            f"{path} holds the state of --optimizer {optimizer_name}; only the state of adam can be imported. {WEIGHTS_ONLY_HINT}"
        )
    if vars(args).get("decoupled_weight_decay") is False:
        raise CheckpointError(
            f"{path} holds the state of Adam with weight decay added to the gradient (decoupled_weight_decay = False), but "
            f"--optimizer adam is AdamW in this framework. {WEIGHTS_ONLY_HINT}"
        )
    if not isinstance(optimizer, dict) or 0 in optimizer:
        raise CheckpointError(f"{path} holds the states of several optimizers, but only one is supported. {WEIGHTS_ONLY_HINT}")
    inner_optimizer = optimizer.get("optimizer", optimizer)
    groups = inner_optimizer.get("param_groups") if isinstance(inner_optimizer, dict) else None
    if not isinstance(groups, list) or not isinstance(schedule, dict) or not isinstance(content.get("iteration"), int):
        raise CheckpointError(
            f"{path} lacks param_groups, opt_param_scheduler or iteration, so its run cannot be continued. {WEIGHTS_ONLY_HINT}"
        )
    state = inner_optimizer.get("state") or {}
    step_values = {group.get("step") for group in groups} | {state.get("common_step")}
    step_values |= {param_state.get("step") for param_state in state.values() if isinstance(param_state, dict)}
    steps = {int(step) for step in step_values if step is not None}
    if len(steps) != 1:
        raise CheckpointError(
            f"{path}: the step counts in the state of the optimizer differ: {sorted(steps)}. {WEIGHTS_ONLY_HINT}"
            if steps
            else f"{path} does not contain the step count of the optimizer. {WEIGHTS_ONLY_HINT}"
        )
    return SavedRun(args, content["iteration"], steps.pop(), schedule, optimizer.get("grad_scaler"))
