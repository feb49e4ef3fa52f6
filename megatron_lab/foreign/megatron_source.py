"""What the two formats of Megatron-LM's checkpoints have in common: weights of the model of its arguments, the state of a run."""

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
from megatron.parallel.boxes import Box
from megatron.parallel.params import ParamRecord, global_records
from megatron.spec.weights import in_layer, padded_vocab_size
from megatron_lab.foreign.legacy_settings import model_of, notes_on, tokenizer_of, vocabulary_of
from megatron_lab.foreign.source import TensorInfo

WORD, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_THEIRS = {
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
"""Their names by ours: the own module and, where Transformer Engine joins a norm to the product after it, that one."""
LEFT_OUT = ("_extra_state", "rotary_pos_emb.inv_freq")
"""Ends of names that hold no parameter: states of 8-bit products, and a table that follows from the settings."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""State of Adam, the one optimizer whose state is read."""
_NARROWER = ("fp8_param", "fp8_param_gather", "fp4_param", "fp4_param_gather")
"""Arguments with which weights are not main parameters in the model's dtype."""
WEIGHTS_ALONE = "--weights-only takes the weights without it."


def stored_names(name: str, first_layer: int) -> list[str]:
    """Possible names of one of our parameters in the state of a chunk that begins with `first_layer`; one of them is there."""
    layer, part = in_layer(name)
    module, _, attribute = part.rpartition(".")
    before = "" if layer is None else f"decoder.layers.{layer - first_layer}."
    return [f"{before}{start}{attribute}" for start in _THEIRS[module]]


def their_shape(record: ParamRecord, shape: list[int]) -> list[int]:
    """The shape there of a parameter, or a part of it, that has `shape` here: a gated up projection is [2f, h], not [2, f, h]."""
    return [math.prod(shape[:-1]), shape[-1]] if record.kind != "vector" else [math.prod(shape)]


@dataclass(frozen=True)
class SavedRun:
    """The state of a run beside tensors, as Megatron-LM has saved it."""

    args: Namespace
    iteration: int
    updates: int
    """Updates that the optimizer has made."""
    schedule: Mapping[str, Any]
    """State of the schedules of learning rate and weight decay."""
    scaler: Mapping[str, Any] | None
    """State of the dynamic loss scale."""


class MegatronSource(ABC):
    """A `WeightSource` over a checkpoint of Megatron-LM that knows the state of its run too.

    Args:
        name: the folder, as the user names it.
        args: of the run that saved it.
        where: the file with the arguments, for messages.
    """

    def __init__(self, name: str, args: Namespace, where: str) -> None:
        self.name, self.args = name, args
        self.model, self.tokenizer = model_of(args, where), tokenizer_of(args)
        self.notes: list[str] = []
        self.vocab_size = 0
        self._padded = self._tensor_ranks = 0
        self._records: dict[str, ParamRecord] = {}

    def _decide_vocabulary(self, padded: int, tensor_ranks: int, asked: int | None) -> None:
        """Set the size of the vocabulary without padding, and the parameters that follow from it."""
        self._padded, self._tensor_ranks = padded, tensor_ranks
        self.vocab_size = self._vocabulary(asked)
        self._records = global_records(self.model, self.vocab_size)
        self.notes += notes_on(self.args)

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, TensorInfo]:
        """Every parameter of the model."""

    @abstractmethod
    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """See `WeightSource`."""

    @functools.cached_property
    @abstractmethod
    def saved(self) -> SavedRun | None:
        """The state of the run; None if the checkpoint holds weights alone.

        Raises:
            CheckpointError: it is there and cannot be read exactly.
        """

    @abstractmethod
    def _state_info(self, kind: str, name: str) -> TensorInfo | None:
        """A main parameter (`WEIGHT`) or a moment. None: the parameter is its own main parameter."""

    @abstractmethod
    def _read_state(self, kind: str, name: str, box: Box) -> torch.Tensor:
        """The same, or a box of it."""

    @functools.cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors of the state of the run by full name: weights in their most exact form as `model.<name>`, moments."""
        assert self.saved is not None, "asked for the state of weights alone"
        found = {f"{WEIGHT}.{name}": self._state_info(WEIGHT, name) or info for name, info in self.weights.items()}
        for kind in MOMENTS:
            for name in self.weights:
                info = self._state_info(kind, name)
                assert info is not None, "moments are state"
                found[f"{kind}.{name}"] = info
        return found

    def read_stored(self, full_name: str, box: Box) -> torch.Tensor:
        """A box of one of `tensors`. A main parameter is compared with the weight that follows from it.

        Raises:
            DamagedCheckpointError: its file is damaged, or a weight is not its main parameter, rounded.
        """
        kind, _, name = full_name.partition(".")
        if kind == WEIGHT and self._state_info(kind, name) is None:
            return self.read(name, box)
        found = self._read_state(kind, name, box)
        comparable = kind == WEIGHT and not any(vars(self.args).get(flag) for flag in _NARROWER)
        if comparable and not torch.equal(found.to(self.weights[name].dtype), self.read(name, box)):
            raise DamagedCheckpointError(
                f"{self.name}: the weight {name} is not the main parameter of the optimizer state, rounded: the state is of "
                f"another run or step, or lies otherwise than its settings say. {WEIGHTS_ALONE}"
            )
        return found

    def _vocabulary(self, asked: int | None) -> int:
        size = vocabulary_of(self.args) if asked is None else asked
        if size is None:
            self.notes.append(
                f"The vocabulary's size without padding is not known: all {self._padded} rows of the word embedding are kept, "
                "until its tokenizer is named or how many rows are no padding."
            )
            return self._padded
        if not 0 < size <= self._padded:
            raise CheckpointError(f"{self.name}: a vocabulary of {size} does not fit its word embedding of {self._padded} rows")
        if size < self._padded:
            self.notes.append(
                f"The last {self._padded - size} of {self._padded} rows of the word embedding are padding and were cut off."
            )
        return size

    def pads_to_this(self, vocab_size: int) -> bool:
        """Whether a vocabulary of this size is padded to the stored number of rows, so that only padding is cut off."""
        return padded_vocab_size(vocab_size, self.model.make_vocab_size_divisible_by, self._tensor_ranks) == self._padded


def saved_run(content: Mapping[str, Any], optimizer: Any, where: str) -> SavedRun:
    """The state of a run from what Megatron-LM saves beside tensors.

    Args:
        content: the dictionary with args, iteration and opt_param_scheduler.
        optimizer: state of the optimizer, without tensors or with them.

    Raises:
        CheckpointError: it is that of another optimizer than Adam, or of several, or something is missing.
    """
    args, schedule = content["args"], content.get("opt_param_scheduler")
    kind = vars(args).get("optimizer", "adam")
    if kind != "adam":
        raise CheckpointError(f"{where} holds the state of --optimizer {kind}; that of adam alone is read. {WEIGHTS_ALONE}")
    if vars(args).get("decoupled_weight_decay") is False:
        raise CheckpointError(
            f"{where} is of Adam with weight decay in its gradient, and --optimizer adam is AdamW. {WEIGHTS_ALONE}"
        )
    if not isinstance(optimizer, dict) or 0 in optimizer:
        raise CheckpointError(f"{where} holds the states of several optimizers, of which only one is read. {WEIGHTS_ALONE}")
    inner = optimizer.get("optimizer", optimizer)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(groups, list) or not isinstance(schedule, dict) or not isinstance(content.get("iteration"), int):
        raise CheckpointError(f"{where} lacks param_groups, opt_param_scheduler or iteration of a run. {WEIGHTS_ALONE}")
    state = inner.get("state") or {}
    found = {group.get("step") for group in groups} | {state.get("common_step")}
    found |= {each.get("step") for each in state.values() if isinstance(each, dict)}
    steps = {int(step) for step in found if step is not None}
    if len(steps) != 1:
        raise CheckpointError(f"{where} says that the optimizer has made {sorted(steps) or 'no'} updates, and one number is needed")
    return SavedRun(args, content["iteration"], steps.pop(), schedule, optimizer.get("grad_scaler"))
