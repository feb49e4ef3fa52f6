"""Config.json fields that differ by layer: attention windows, and layers without rotary embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron.config.model import ModelConfig
from megatron.spec.layer_pattern import format_pattern
from megatron.spec.layers import build_layer_specs
from megatron_lab.foreign.huggingface.family import Settings
from megatron_lab.foreign.huggingface.fields import FULL_ATTENTION, SLIDING_ATTENTION, Fields
from megatron_lab.foreign.huggingface.neutral_fields import list_windows


@dataclass(frozen=True)
class NoRotaryLayers:
    """Converter of the config.json fields that select layers without rotary embeddings (SmolLM3).

    `no_rope_layers` has one entry per layer: 0 for a layer without rotary embeddings, else 1.
    """

    interval: int
    """Value N of the field `no_rope_layer_interval` if config.json does not contain it. Every N-th layer has no rotary embeddings,
    unless the list `no_rope_layers` selects the layers."""

    def list_unrotated_layers(self, fields: Fields) -> list[bool]:
        """Return for each layer whether it has no rotary embeddings."""
        num_layers, interval = fields.get_size("num_hidden_layers"), fields.get_size("no_rope_layer_interval", self.interval)
        entries = fields.get_raw("no_rope_layers")
        if entries is None:
            entries = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
        if not isinstance(entries, list) or len(entries) < num_layers or any(entry not in (0, 1) for entry in entries):
            fields.refuse("no_rope_layers", "must have 0 or 1 for each layer")
            return [False] * num_layers
        return [not entry for entry in entries[:num_layers]]

    def parse(self, fields: Fields) -> Settings:
        unrotated = self.list_unrotated_layers(fields)
        return {"no_rope_freq": _format_interval(unrotated)} if any(unrotated) else {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        rotated = [int(layer.attention.rotary is not None) for layer in build_layer_specs(model)]
        return {"no_rope_layers": rotated, "no_rope_layer_interval": self.interval}


@dataclass(frozen=True, kw_only=True)
class WindowFields:
    """Converter of the config.json fields for sliding-window attention.

    `sliding_window` is the number of tokens to which a token attends, including itself; `null` for no window.
    """

    default: int | None
    """Value of `sliding_window` if the field is absent."""
    applies_to: Literal["everywhere", "layer_types", "switched"] = "everywhere"
    """Layers that have the window: all layers ("everywhere"), the layers that `layer_types` selects ("layer_types"), or these
    layers only if `use_sliding_window` is true ("switched")."""
    interval: int | None = None
    """Interval N of layers with full attention in files without `layer_types`: every N-th layer has full attention, all other
    layers have the window. None: all layers have the window, or only those from `max_window_layers` on if `applies_to` is
    "switched"."""
    interval_field: str | None = None
    """Name of the config.json field that contains N; None if the architecture has no such field. If config.json lacks the field, N
    is `interval`."""
    no_rotary_layers: NoRotaryLayers | None = None
    """Converter that selects the layers without rotary embeddings. It is set only for architectures (SmolLM3) in which, by default,
    these layers have the window and all others have full attention. The default applies to files without `layer_types`."""

    def parse(self, fields: Fields) -> Settings:
        num_layers = fields.get_size("num_hidden_layers")
        value = fields.get_raw("sliding_window", self.default)
        window = None if value is None else fields.get_size("sliding_window", self.default)
        if self.applies_to == "switched" and not fields.get_bool("use_sliding_window", False):
            window = None
        has_window = [True] * num_layers if self.applies_to == "everywhere" else self._parse_layer_types(fields, num_layers, window)
        if window is None or not any(has_window):
            return {"rotary_base_local": None}  # the base for layers with a window is not used
        return {"window_size": f"{window - 1},0", "window_attn_skip_freq": _format_skip_freq(has_window)}

    def _parse_layer_types(self, fields: Fields, num_layers: int, window: int | None) -> list[bool]:
        """Return for each layer whether it has the attention window. The field `layer_types` selects the layers; without it, the
        defaults of the architecture apply."""
        default_layers, layer_types = self._get_default_layers(fields, num_layers, window), fields.get_raw("layer_types")
        if layer_types is None:
            return default_layers
        if not isinstance(layer_types, list):
            fields.refuse("layer_types", "must be a list of the type of each layer")
        elif unknown := sorted(
            {repr(layer_type) for layer_type in layer_types if layer_type not in (FULL_ATTENTION, SLIDING_ATTENTION)}
        ):
            fields.refuse("layer_types", f"layers of type {', '.join(unknown)} are not supported")
        elif len(layer_types) != num_layers:
            fields.refuse("layer_types", f"lists {len(layer_types)} layers, but the model has {num_layers}")
        else:
            return [layer_type == SLIDING_ATTENTION for layer_type in layer_types]
        return [False] * num_layers

    def _get_default_layers(self, fields: Fields, num_layers: int, window: int | None) -> list[bool]:
        """Return for each layer whether it has the attention window, for a config.json without `layer_types`."""
        if self.no_rotary_layers is not None:
            return self.no_rotary_layers.list_unrotated_layers(fields)
        if self.interval is not None:
            interval = self.interval if self.interval_field is None else fields.get_size(self.interval_field, self.interval)
            return [(layer + 1) % interval != 0 for layer in range(num_layers)]
        if self.applies_to == "layer_types":
            return [True] * num_layers
        first_layer = fields.get_raw("max_window_layers", 28)
        if first_layer is None and window is None:
            return [False] * num_layers
        if type(first_layer) is not int or first_layer < 0:
            fields.refuse("max_window_layers", "must be a number of layers")
            return [False] * num_layers
        return [layer >= first_layer for layer in range(num_layers)]

    def write(self, model: ModelConfig) -> dict[str, Any]:
        windows = {window for window in list_windows(model) if window is not None}
        has_window = [window is not None for window in list_windows(model)]
        if self.applies_to == "everywhere":
            return {"sliding_window": max(windows) + 1 if all(has_window) else None}
        fields: dict[str, Any] = {"sliding_window": max(windows) + 1 if windows else None}
        if self.applies_to == "switched":
            fields["use_sliding_window"] = bool(windows)
        return fields | {"layer_types": [SLIDING_ATTENTION if is_local else FULL_ATTENTION for is_local in has_window]}


def _format_skip_freq(has_window: list[bool]) -> str | None:
    """Return the value of --window-attn-skip-freq, which selects the layers without the attention window; None if all layers have
    the window.

    Args:
        has_window: for each layer, whether it has the window.
    """
    pattern = _format_interval([not windowed for windowed in has_window])
    return None if all(has_window) else pattern if pattern.isdecimal() else format_pattern(tuple(has_window))


def _format_interval(marks: list[bool]) -> str:
    """Format a selection of layers as the value of a flag: the number N if every N-th layer is selected, otherwise a list with an
    entry per layer.

    Args:
        marks: for each layer, whether it is selected.
    """
    interval = marks.index(True) + 1 if True in marks else 0
    if interval and marks == [(layer + 1) % interval == 0 for layer in range(len(marks))]:
        return str(interval)
    return format_pattern(tuple(marks))
