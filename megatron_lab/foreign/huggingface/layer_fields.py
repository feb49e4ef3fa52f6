"""Fields of a config.json that say which layer is of which kind: windows of attention, layers without positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron.config.model import ModelConfig
from megatron.spec.layer_pattern import pattern_text
from megatron.spec.layers import LayerSpec, layers
from megatron_lab.foreign.huggingface.family import Settings
from megatron_lab.foreign.huggingface.fields import Fields
from megatron_lab.foreign.huggingface.rotary_fields import GLOBAL, LOCAL


@dataclass(frozen=True)
class NoRotaryLayers:
    """SmolLM3's layers without rotary positions: `no_rope_layers` has 0 for each of them, and 1 for all others."""

    every: int
    """Default of `no_rope_layer_interval`, which holds where the list is absent."""

    def without(self, fields: Fields) -> list[bool]:
        """Whether each layer has no rotary positions."""
        depth, every = fields.size("num_hidden_layers"), fields.size("no_rope_layer_interval", self.every)
        given = fields.raw("no_rope_layers")
        if given is None:
            given = [int((layer + 1) % every != 0) for layer in range(depth)]
        if not isinstance(given, list) or len(given) < depth or any(entry not in (0, 1) for entry in given):
            fields.refuse("no_rope_layers", "must have 0 or 1 for each layer")
            return [False] * depth
        return [not entry for entry in given[:depth]]

    def read(self, fields: Fields) -> Settings:
        without = self.without(fields)
        return {"no_rope_freq": _every(without)} if any(without) else {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        rotated = [int(layer.attention.rotary is not None) for layer in layers(model)]
        return {"no_rope_layers": rotated, "no_rope_layer_interval": self.every}


@dataclass(frozen=True, kw_only=True)
class WindowFields:
    """The window of attention, `sliding_window`: a token attends to so many, its own included. Null is none."""

    default: int | None
    """Window where the field is absent."""
    where: Literal["everywhere", "layer_types", "switched"] = "everywhere"
    """Which layers have it: all; those that `layer_types` names; or those, where `use_sliding_window` is on."""
    every: int | None = None
    """Number N: in files without `layer_types` all layers but every N-th have it. None: those from `max_window_layers` on."""
    every_name: str | None = None
    """Field of that number."""
    unrotated: NoRotaryLayers | None = None
    """Layers without rotary positions, which have the window in files without `layer_types`."""

    def read(self, fields: Fields) -> Settings:
        depth = fields.size("num_hidden_layers")
        given = fields.raw("sliding_window", self.default)
        window = None if given is None else fields.size("sliding_window", self.default)
        if self.where == "switched" and not fields.switch("use_sliding_window", False):
            window = None
        slides = [True] * depth if self.where == "everywhere" else self._kinds(fields, depth, window)
        if window is None or not any(slides):
            return {"rotary_base_local": None}  # that of layers with a window, of which there are none
        return {"window_size": f"{window - 1},0", "window_attn_skip_freq": _skipping(slides)}

    def _kinds(self, fields: Fields, depth: int, window: int | None) -> list[bool]:
        """Whether each layer has the window."""
        usual, kinds = self._usual_kinds(fields, depth), fields.raw("layer_types")
        if kinds is None:
            return usual
        if not isinstance(kinds, list):
            fields.refuse("layer_types", "must be a list of the kind of each layer")
        elif strange := sorted({repr(kind) for kind in kinds if kind not in (GLOBAL, LOCAL)}):
            fields.refuse("layer_types", f"layers of kind {', '.join(strange)} are not known")
        elif len(kinds) != depth:
            fields.refuse("layer_types", f"names {len(kinds)} layers of {depth}")
        else:
            return [kind == LOCAL for kind in kinds]
        return [False] * depth

    def _usual_kinds(self, fields: Fields, depth: int) -> list[bool]:
        if self.unrotated is not None:
            return self.unrotated.without(fields)
        if self.every is not None:
            every = self.every if self.every_name is None else fields.size(self.every_name, self.every)
            return [(layer + 1) % every != 0 for layer in range(depth)]
        first = fields.raw("max_window_layers", 28)
        return [layer >= first for layer in range(depth)] if isinstance(first, int) else [False] * depth

    def write(self, model: ModelConfig) -> dict[str, Any]:
        specs = layers(model)
        found = {window for layer in specs if (window := _window(layer)) is not None}
        slides = [_window(layer) is not None for layer in specs]
        if self.where == "everywhere":
            return {"sliding_window": max(found) + 1 if all(slides) else None}
        fields: dict[str, Any] = {"sliding_window": max(found) + 1 if found else None}
        if self.where == "switched":
            fields["use_sliding_window"] = bool(found)
        return fields | {"layer_types": [LOCAL if each else GLOBAL for each in slides]}


def _window(layer: LayerSpec) -> int | None:
    return layer.attention.scores.window


def _skipping(slides: list[bool]) -> str | None:
    """Which layers have the window, as --window-attn-skip-freq has it; None for all."""
    every = _every([not each for each in slides])
    return None if all(slides) else every if every.isdecimal() else pattern_text(tuple(slides))


def _every(marks: list[bool]) -> str:
    """Marked layers as a number N, for every N-th, or as a list."""
    every = marks.index(True) + 1 if True in marks else 0
    if every and marks == [(layer + 1) % every == 0 for layer in range(len(marks))]:
        return str(every)
    return pattern_text(tuple(marks))
