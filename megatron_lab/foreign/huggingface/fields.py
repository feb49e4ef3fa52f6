"""Reads the fields of a config.json, each of which must be understood.

A field that is ignored may change what the model computes. So each field that is read is marked. At the end, every field that was
not read and is not known to be without effect is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron.checkpoint.errors import CheckpointError

CONFIG = "config.json"

WITHOUT_EFFECT = frozenset(
    (
        # where the file comes from
        *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "unsloth_version", "unsloth_fixed"),
        # how transformers runs the model, and what it gives back
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "torchscript", "torch_dtype", "dtype"),
        *("use_bfloat16", "tf_legacy_loss", "gradient_checkpointing", "attn_implementation", "_attn_implementation"),
        *("_attn_implementation_autoset", "_attn_implementation_internal", "use_flash_attn", "pretraining_tp"),
        *("chunk_size_feed_forward", "keys_to_ignore_at_inference", "is_llama_config", "transformers.js_config"),
        # what lengths were meant for
        *("max_sequence_length", "model_max_length"),
        # tokens with a role, and the tokenizer
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
        *("tokenizer_class", "prefix"),
        # heads for other tasks
        *("finetuning_task", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "classifier_dropout"),
        # how to sample
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
        *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate"),
        *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"),
        *("suppress_tokens", "begin_suppress_tokens", "max_new_tokens"),
    )
)
"""Fields of every architecture that do not change the logits."""

_EXPECTED: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "is_causal": (True,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}
"""Fields of every architecture, with the values at which they change nothing."""

_UNKNOWN = "unknown here, and it may change what the model computes; remove it from the file if it does not"
_STRANGE = {
    "auto_map": "the model is defined by a program in its folder, which may compute something else than transformers' own class; "
    "remove it from the file if it is known that it does not",
}


class Fields:
    """Reads fields and collects errors; `finish` raises.

    Args:
        name: name of the file, for messages.
        values: its content.
        without_effect: fields of this architecture that change nothing, whatever their value.
    """

    def __init__(self, name: str, values: Mapping[str, Any], without_effect: Collection[str] = ()) -> None:
        self._name, self._values = name, values
        self._read: set[str] = {"model_type", "architectures", *WITHOUT_EFFECT, *without_effect}
        self.faults: list[str] = []
        """What cannot be accepted."""
        self.notes: list[str] = []
        """Notes for the user on what was read."""

    def raw(self, name: str, default: Any = None) -> Any:
        """A value as it is; `default` where the field is absent."""
        self._read.add(name)
        return self._values.get(name, default)

    def refuse(self, name: str, why: str) -> None:
        """Record that a value cannot be accepted."""
        self._read.add(name)
        self.faults.append(f"{name} = {self._values.get(name)!r}: {why}")

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer, which must be there if there is no default. `null` counts as absent."""
        value = self.raw(name)
        value = default if value is None else value
        if value is None:
            self.faults.append(f"{name} is missing")
            return 1
        if type(value) is not int or value < 1:
            self.refuse(name, "must be a positive integer")
            return 1
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number of 0 or more."""
        value = self.raw(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            self.refuse(name, "must be a number of 0 or more")
            return default
        return float(value)

    def switch(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.raw(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "must be true or false")
            return default
        return value

    def expect(self, name: str, allowed: Sequence[Any], default: Any, why: str = "") -> Any:
        """A value that must be one of `allowed`."""
        value = self.raw(name, default)
        if not any(value == one and type(value) is type(one) for one in allowed):
            self.refuse(name, why or f"only {' or '.join(map(repr, allowed))} can be read")
            return default
        return value

    def finish(self) -> None:
        """Check that every field was understood.

        Raises:
            CheckpointError: values that cannot be accepted, and unknown fields, all of them named.
        """
        for name, allowed in _EXPECTED.items():
            if name in self._values and name not in self._read:
                self.expect(name, allowed, None)
        strange = {name: value for name, value in self._values.items() if name not in self._read and value is not None}
        faults = self.faults + [f"{name} = {value!r}: {_STRANGE.get(name, _UNKNOWN)}" for name, value in strange.items()]
        if faults:
            raise CheckpointError(f"{self._name} describes a model that cannot be read:\n  " + "\n  ".join(faults))
