"""Random kinds of attention: windows, layers without rotary positions, caps, sinks, a scale."""

from __future__ import annotations

from typing import Any

from tests.support.random_draws import Draw, chance, number, one_of


def draw_attention(draw: Draw, settings: dict[str, Any]) -> dict[str, Any]:
    """What layers attend to and how, for settings that have a model and its layers."""
    rope, layers = settings.get("position_embedding_type") == "rope", settings["num_layers"]
    found: dict[str, Any] = {}
    if chance(draw, 3):
        found["window_size"] = f"{number(draw, 1, settings['seq_length'])},0"
        found["window_attn_skip_freq"] = one_of(draw, None, str(number(draw, 1, 3)), _pattern(draw, layers))
        if rope:
            found["rotary_base_local"] = one_of(draw, None, 20.0)
    if rope and chance(draw, 4):
        found["no_rope_freq"] = one_of(draw, str(number(draw, 2, 3)), _pattern(draw, layers))
    if chance(draw, 6):
        found["softmax_scale"] = 0.3
    if chance(draw, 6):
        found["attn_logit_softcapping"] = one_of(draw, 0.5, 5.0)
    if chance(draw, 4):
        found["softmax_type"] = one_of(draw, "learnable", "learnable", "off-by-one")
    return found


def _pattern(draw: Draw, layers: int) -> str:
    """A list with 0 or 1 for each layer."""
    return "+".join(f"[{int(chance(draw, 2))}]" for _ in range(layers))
