"""Rotary positions and sliding windows in a config.json.

Rotary positions are spelt in two ways. Before transformers 5: `rope_theta` at the top level, and `rope_scaling` (null, or a mapping
whose kind is called `type` or `rope_type`). Since: one mapping `rope_parameters` with `rope_type`, `rope_theta` and the parameters
of the type. Files of either kind are read. What is written says everything twice, so that every version reads it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron.checkpoint.huggingface.fields import Fields
from megatron.config.model import ModelConfig


def read_window(fields: Fields, no_window: Collection[str], layers: int) -> int | None:
    """The attention window; None if there is none.

    Without the field `sliding_window` it is 4096 tokens, and null is none. Mistral has it in every layer. Qwen2 and Qwen3 have it
    with `use_sliding_window`, in layers that `layer_types` names, or else from `max_window_layers` on.

    Args:
        no_window: the fields about windows that the architecture has.
    """
    if not no_window:
        return None
    window = None if fields.raw("sliding_window", 4096) is None else fields.size("sliding_window", 4096)
    if "use_sliding_window" not in no_window:
        return window
    from_layer, kinds, slides = fields.raw("max_window_layers", 28), fields.raw("layer_types"), False
    if kinds is None:
        slides = from_layer < layers
    elif isinstance(kinds, list):
        if strange := sorted({repr(kind) for kind in kinds if kind not in ("full_attention", "sliding_attention")}):
            fields.refuse("layer_types", f"layers of kind {', '.join(strange)} are not known")
        elif len(kinds) != layers:
            fields.refuse("layer_types", f"names {len(kinds)} layers of {layers}")
        slides = "sliding_attention" in kinds
    else:
        fields.refuse("layer_types", "must be a list of the kind of each layer")
    return window if fields.switch("use_sliding_window", False) and slides else None


DEFAULT_THETA = 10000.0
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of Llama 3.1, the only ones of this type that the model can have."""


def read_rope(fields: Fields, max_positions: int) -> dict[str, Any]:
    """Rotary settings of `ModelConfig`. What cannot be accepted is recorded in `fields`."""
    parameters = _Parameters(fields)
    theta = parameters.number("rope_theta", DEFAULT_THETA)
    if parameters.take("partial_rotary_factor", 1.0) != 1.0:
        fields.refuse("partial_rotary_factor", f"{parameters.place}: these architectures rotate whole heads")
    original = parameters.take("original_max_position_embeddings", max_positions)
    read: dict[str, Any] = {"rotary_base": theta}
    if parameters.kind == "llama3":
        found = {key: parameters.take(key, None) for key in ("low_freq_factor", "high_freq_factor")}
        if (found | {"original_max_position_embeddings": original}) != _LLAMA3:
            fields.refuse(parameters.name, f"of type llama3 only {_LLAMA3} can be read")
        read |= {"use_rope_scaling": True, "rope_scaling_factor": parameters.number("factor", None)}
    elif parameters.kind == "linear":
        read["rotary_seq_len_interpolation_factor"] = parameters.number("factor", None)
    elif parameters.kind != "default":
        kinds = "default, linear and llama3"
        fields.refuse(parameters.name, f"rotary positions of type {parameters.kind!r} are not supported, only {kinds}")
        return read
    parameters.finish()
    return read


class _Parameters:
    """The rotary parameters of a config.json, wherever they stand."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        new, old = (self._mapping(name) for name in ("rope_parameters", "rope_scaling"))
        self.name = "rope_parameters" if new else "rope_scaling"
        if new and old and new | old != new:
            fields.refuse("rope_scaling", f"differs from rope_parameters = {fields.raw('rope_parameters')!r}: remove one of them")
        self._left = new or old
        self.place = f"{self.name} = {fields.raw(self.name)!r}" if self._left else "at the top level"
        self.kind = self._left.pop("rope_type", "default")

    def _mapping(self, name: str) -> dict[str, Any]:
        """The parameters in a field without those that are null, with the type under its newer name."""
        given = self._fields.raw(name) or {}
        if not isinstance(given, dict):
            self._fields.refuse(name, "must be a mapping")
            return {}
        found = {key: value for key, value in given.items() if value is not None}
        if "type" in found and found.setdefault("rope_type", found["type"]) != found.pop("type"):
            self._fields.refuse(name, "rope_type and type differ")
        return {"rope_type": "default"} | found if given else {}

    def take(self, key: str, default: Any) -> Any:
        """A parameter, which may stand in the mapping or at the top level."""
        outside, inside = self._fields.raw(key), self._left.pop(key, None)
        if outside is not None and inside is not None and outside != inside:
            self._fields.refuse(key, f"differs from {self.place}")
        found = inside if inside is not None else outside
        return default if found is None else found

    def number(self, key: str, default: float | None) -> float:
        """A parameter that must be a positive number."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self._fields.refuse(self.name, f"{key} is {value!r}, it must be a positive number")
            return 1.0
        return float(value)

    def finish(self) -> None:
        """Refuse parameters that were not taken."""
        if self._left:
            self._fields.refuse(self.name, f"{', '.join(self._left)} unknown with type {self.kind!r}")


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """The rotary fields of a config.json."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if model.use_rope_scaling:
        scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3}
    elif model.rotary_seq_len_interpolation_factor != 1.0:
        scaling = {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    return {
        "rope_theta": model.rotary_base,
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "rope_parameters": {"rope_theta": model.rotary_base, **scaling},
    }
