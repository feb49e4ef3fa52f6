"""Strict reader of config.json: every field must be read, or known to have no effect.

A field that the reader does not know may change the function that the model computes. The reader therefore records which fields
were read. At the end it rejects every other field, unless the field is known not to affect the logits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron.checkpoint.errors import CheckpointError

CONFIG = "config.json"
_LAYER_FIELDS = ("num_hidden_layers", "n_layer")
_MAX_LAYERS = 10_000
"""Largest number of layers in a file. A description is built for each layer, before the sizes of the tensors are compared."""
_MAX_SIZE = 2**31 - 1
"""Largest value of all other sizes in a file."""

IGNORED_FIELDS = frozenset(
    (
        # origin of the file
        *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "unsloth_version", "unsloth_fixed"),
        # execution options and outputs of the model
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "torchscript", "torch_dtype", "dtype"),
        *("use_bfloat16", "tf_legacy_loss", "gradient_checkpointing", "attn_implementation", "_attn_implementation"),
        *("_attn_implementation_autoset", "_attn_implementation_internal", "use_flash_attn", "pretraining_tp"),
        *("chunk_size_feed_forward", "keys_to_ignore_at_inference", "is_llama_config", "transformers.js_config"),
        *("_flash_attn_2_enabled", "use_flash_attention", "use_flash_attention_2", "use_deepspeed_checkpointing"),
        *("cache_implementation", "_experts_implementation", "experts_implementation", "output_past", "custom_pipelines"),
        # start of training
        *("initializer_cutoff_factor", "init_device"),
        # intended sequence lengths
        *("max_sequence_length", "model_max_length", "max_seq_len", "max_seq_length", "seq_length"),
        # special tokens and tokenizer
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
        *("tokenizer_class", "prefix"),
        # heads for other tasks
        *("finetuning_task", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "classifier_dropout"),
        *("_num_labels", "n_special", "predict_special_tokens", "summary_type", "summary_use_proj", "summary_activation"),
        *("summary_proj_to_labels", "summary_first_dropout"),
        # sampling
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
        *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate"),
        *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"),
        *("suppress_tokens", "begin_suppress_tokens", "max_new_tokens"),
    )
)
"""Fields of all architectures that do not change the logits."""

_UNKNOWN_REASON = "unknown field, which may change what the model computes; if it does not, remove it from the file"
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
"""Names of the types of layers in `layer_types`: without and with an attention window."""


class Fields:
    """Reader of the fields of a config.json. It collects all errors, and `finish` raises them together.

    Args:
        name: name of the file, for messages.
        values: content of the file.
        ignored_fields: fields of the architecture that have no effect, whatever their value.
    """

    def __init__(self, name: str, values: Mapping[str, Any], ignored_fields: Collection[str] = ()) -> None:
        self._name, self.values = name, values
        self._used: set[str] = {"model_type", "architectures", *IGNORED_FIELDS, *ignored_fields}
        self.errors: list[str] = []
        """Messages about unsupported values."""
        self.notes: list[str] = []
        """Notes for the user."""

    def get_raw(self, name: str, default: Any = None) -> Any:
        """Return the value of a config.json field without checking it, or `default` if the field is absent."""
        self._used.add(name)
        return self.values.get(name, default)

    def get_unread(self) -> dict[str, Any]:
        """Return the fields that were not read, except those known to be ignored and those whose value is `null`."""
        return {name: value for name, value in self.values.items() if name not in self._used and value is not None}

    def refuse(self, name: str, reason: str) -> None:
        """Record the error that the value of a field is not supported.

        Args:
            name: name of the field.
            reason: why the value is not supported, for the end of the error message.
        """
        self._used.add(name)
        self.errors.append(f"{name} = {self.values.get(name)!r}: {reason}")

    def get_size(self, name: str, default: int | None = None) -> int:
        """Return the value of a field that must be a positive integer, and not above the limit of the field. For any other value,
        record an error and return 1.

        Args:
            name: name of the field.
            default: value if the field is absent or `null`; None if the field is required.
        """
        value = self.get_raw(name)
        value = default if value is None else value
        if value is None:
            self.errors.append(f"{name} is missing")
            return 1
        if type(value) is not int or value < 1:
            self.refuse(name, "must be a positive integer")
            return 1
        if value > (limit := _MAX_LAYERS if name in _LAYER_FIELDS else _MAX_SIZE):
            self.refuse(name, f"must be at most {limit:,}")
            return 1
        return value

    def get_number(self, name: str, default: float) -> float:
        """Return the value of a field that must be a finite number of at least 0. For any other value, record an error and return
        `default`."""
        value = self.get_raw(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            self.refuse(name, "must be a number of 0 or more")
            return default
        return float(value)

    def get_bool(self, name: str, default: bool) -> bool:
        """Return the value of a field that must be true or false. For any other value, record an error and return `default`."""
        value = self.get_raw(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "must be true or false")
            return default
        return value

    def expect(self, name: str, allowed: Sequence[Any], default: Any, reason: str = "") -> Any:
        """Return the value of a field. If it is not one of the allowed values, or has a different type, record an error and return
        `default`.

        Args:
            name: name of the field.
            allowed: supported values.
            default: value of an absent field.
            reason: end of the error message; by default a list of the supported values.
        """
        value = self.get_raw(name, default)
        if not any(value == candidate and type(value) is type(candidate) for candidate in allowed):
            self.refuse(name, reason or f"only {' or '.join(map(repr, allowed))} is supported")
            return default
        return value

    def finish(self) -> None:
        """Check that every field was read or is known to be ignored.

        Raises:
            CheckpointError: fields have unsupported values or are unknown. The message lists all of them.
        """
        errors = self.errors + [f"{name} = {value!r}: {_UNKNOWN_REASON}" for name, value in self.get_unread().items()]
        if errors:
            raise CheckpointError(
                f"{self._name} describes a model that is not supported. Correct these fields, or choose another model:\n  "
                + "\n  ".join(errors)
            )
