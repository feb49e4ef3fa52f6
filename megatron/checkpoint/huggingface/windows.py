"""Sliding attention windows in a config.json."""

from __future__ import annotations

from megatron.checkpoint.huggingface.fields import Fields


def never(fields: Fields, layers: int) -> int | None:
    """An architecture without windows."""
    return None


def in_every_layer(fields: Fields, layers: int) -> int | None:
    """Mistral: `sliding_window` tokens in every layer; null is none, and a file that does not say means 4096."""
    return None if fields.raw("sliding_window", 4096) is None else fields.size("sliding_window", 4096)


def in_some_layers(fields: Fields, layers: int) -> int | None:
    """Qwen2 and Qwen3: where `use_sliding_window`, in layers that `layer_types` names, or else from `max_window_layers` on."""
    window = None if fields.raw("sliding_window", 4096) is None else fields.size("sliding_window", 4096)
    from_layer = fields.raw("max_window_layers", 28)
    kinds = fields.raw("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        fields.refuse("layer_types", "must be a list of the kind of each layer")
        slides = False
    elif kinds is not None:
        strange = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
        if strange:
            named = ", ".join(sorted(dict.fromkeys(map(repr, strange))))
            fields.refuse("layer_types", f"layers of kind {named} are not known")
        elif len(kinds) != layers:
            fields.refuse("layer_types", f"names {len(kinds)} layers of {layers}")
        slides = "sliding_attention" in kinds
    else:
        slides = from_layer < layers
    return window if fields.switch("use_sliding_window", False) and slides else None
