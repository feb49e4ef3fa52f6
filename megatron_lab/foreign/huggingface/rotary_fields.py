"""Rotary positions in a config.json.

They are spelt in two ways. Before transformers 5: `rope_theta` at the top level, and `rope_scaling` (null, or a mapping whose
kind is called `type` or `rope_type`). Since: one mapping `rope_parameters` with `rope_type`, `rope_theta` and the parameters of the
type; where layers with a window have rotary positions of their own, it holds one such mapping for each kind of layer. Files of
either kind are read. What is written says everything twice, so that every version reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.config.model import ModelConfig
from megatron.spec.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Scaling,
    YarnScaling,
    original_context,
    rotary_of,
    yarn_magnitude,
)
from megatron_lab.foreign.huggingface.family import Settings
from megatron_lab.foreign.huggingface.fields import Fields
from megatron_lab.foreign.huggingface.groups import max_positions

DEFAULT_THETA = 10000.0
GLOBAL, LOCAL = "full_attention", "sliding_attention"
"""Kinds of layers: without and with a window."""
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """The rotary fields of an architecture."""

    max_positions: int
    """Default of max_position_embeddings."""
    theta: float = DEFAULT_THETA
    """Default of rope_theta."""
    partial: float | None = None
    """Default of the share of a head that is rotated; None where heads are rotated as a whole."""
    theta_name: str = "rope_theta"
    """Its name before transformers 5."""
    partial_name: str = "partial_rotary_factor"
    """The same."""
    local_theta: float | None = None
    """Default of rope_theta in layers with a window; None where all layers have the same rotary positions."""
    local_theta_name: str = "rope_local_base_freq"
    """Its name before transformers 5."""
    default: Settings | None = None
    """Parameters where the file has none."""
    types: tuple[str, ...] = ("linear", "llama3", "dynamic", "yarn", "longrope")
    """Ways to stretch frequencies that transformers takes."""
    original_outside: int | None = None
    """Default of the original context, where it stands at the top level."""

    def read(self, fields: Fields) -> Settings:
        positions = max_positions(fields, self.max_positions)
        whole = _mapping(fields, "rope_parameters")
        local: Settings = {}
        if self.local_theta is not None:
            inside = {name: _normalised(fields, "rope_parameters", whole.pop(name)) for name in (GLOBAL, LOCAL) if name in whole}
            if inside and (set(whole) - {"rope_type"}):
                fields.refuse("rope_parameters", f"{', '.join(whole)} beside the kinds of layers")
            if inside:
                whole, local = inside.get(GLOBAL, {}), inside.get(LOCAL, {})
        parameters = _Parameters(fields, whole, self.default or {})
        theta = parameters.number("rope_theta", self.theta, self.theta_name)
        read: Settings = {"rotary_base": theta}
        share = parameters.take("partial_rotary_factor", 1.0 if self.partial is None else self.partial, self.partial_name)
        if self.partial is None and share != 1.0:
            fields.refuse("partial_rotary_factor", f"{parameters.place}: these architectures rotate whole heads")
        elif share != 1.0:
            read["rotary_percent"] = share
        original = parameters.take(_ORIGINAL, self.original_outside or positions)
        if parameters.kind not in self.types:
            kinds = f"default, {', '.join(self.types)}"
            if parameters.kind != "default":
                fields.refuse(parameters.name, f"rotary positions of type {parameters.kind!r} are not supported, only {kinds}")
                return read
        else:
            read |= _READERS[parameters.kind](parameters, positions, original)
        parameters.finish()
        if self.local_theta is not None:
            if "yarn_correction_range_round_to_int" in read:
                read["yarn_correction_range_round_to_int"] = True  # transformers looks for `truncate` beside the kinds of layers
            read |= self._read_local(fields, local, read)
        return read

    def _read_local(self, fields: Fields, parameters: Settings, read: Settings) -> Settings:
        """The base in layers with a window, if anything is different there."""
        outside = read["rotary_base"]
        if self.local_theta_name != self.theta_name:
            outside = fields.number(self.local_theta_name, self.local_theta or DEFAULT_THETA)
        theta: Any = parameters.get("rope_theta", outside)
        if parameters.get("rope_type", "default") != "default" or set(parameters) - {"rope_type", "rope_theta"}:
            fields.refuse("rope_parameters", f"frequencies in layers of kind {LOCAL} can have a base of their own, and no scaling")
        return {} if theta == read["rotary_base"] and len(read) == 1 else {"rotary_base_local": float(theta)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        spec = rotary_of(model)
        if spec is None:
            return {}
        scaling = _written(spec.scaling, model)
        parameters = {"rope_theta": model.rotary_base, **scaling}
        fields: dict[str, Any] = {}
        if self.partial is not None:
            parameters["partial_rotary_factor"] = fields[self.partial_name] = model.rotary_percent
        if self.original_outside is not None:
            fields[_ORIGINAL] = scaling.get(_ORIGINAL, self.original_outside)
        if isinstance(spec.scaling, DynamicScaling):
            fields["max_position_embeddings"] = spec.scaling.original_context
        fields[self.theta_name] = model.rotary_base
        fields["rope_scaling"] = None if spec.scaling is None else scaling
        if self.local_theta is None:
            return fields | {"rope_parameters": parameters}
        local = model.rotary_base if model.rotary_base_local is None else model.rotary_base_local
        if self.local_theta_name != self.theta_name:
            fields[self.local_theta_name] = local
        return fields | {"rope_parameters": {GLOBAL: parameters, LOCAL: {"rope_type": "default", "rope_theta": local}}}


def _linear(parameters: _Parameters, positions: int, original: Any) -> Settings:
    return {"rotary_seq_len_interpolation_factor": parameters.number("factor", None)}


def _llama3(parameters: _Parameters, positions: int, original: Any) -> Settings:
    return {
        "use_rope_scaling": True,
        "rope_scaling_factor": parameters.number("factor", None),
        "rope_low_freq_factor": parameters.number("low_freq_factor", None),
        "rope_high_freq_factor": parameters.number("high_freq_factor", None),
        _ORIGINAL: parameters.length(original),
    }


def _dynamic(parameters: _Parameters, positions: int, original: Any) -> Settings:
    if original != positions:
        parameters.refuse(f"{_ORIGINAL} {original!r} is not max_position_embeddings {positions}, from which this type begins")
    return {"rope_type": "dynamic", "rotary_scaling_factor": parameters.number("factor", None), _ORIGINAL: positions}


def _yarn(parameters: _Parameters, positions: int, original: Any) -> Settings:
    original = parameters.length(original)
    read: dict[str, Any] = {
        "rope_type": "yarn",
        "rotary_scaling_factor": parameters.number("factor", positions / original),
        _ORIGINAL: original,
        "beta_fast": parameters.number("beta_fast", 32.0),
        "beta_slow": parameters.number("beta_slow", 1.0),
        "yarn_correction_range_round_to_int": parameters.take("truncate", True) is True,
    }
    given = parameters.take("attention_factor", None)
    weights = [parameters.take(name, 0.0) for name in ("mscale", "mscale_all_dim")]
    if given is None and all(weights):
        return read | dict(zip(("mscale", "mscale_all_dim"), map(float, weights), strict=True))
    if weights[1]:  # by itself it acts on the scores of latent attention alone
        given = yarn_magnitude(read["rotary_scaling_factor"], 1.0) if given is None else given
        read["mscale_all_dim"] = float(weights[1])
    return read if given is None else read | {"rope_attention_factor": float(given)}


def _longrope(parameters: _Parameters, positions: int, original: Any) -> Settings:
    original = parameters.length(original)
    given = parameters.take("attention_factor", None)
    return {
        "rope_type": "longrope",
        "rotary_scaling_factor": parameters.number("factor", positions / original),
        _ORIGINAL: original,
        "rope_short_factors": parameters.numbers("short_factor"),
        "rope_long_factors": parameters.numbers("long_factor"),
        **({} if given is None else {"rope_attention_factor": float(given)}),
    }


_READERS: dict[str, Callable[[_Parameters, int, Any], Settings]] = {
    "linear": _linear,
    "llama3": _llama3,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""By type: what its parameters mean, given the longest sequence and the original context."""


def _written(scaling: Scaling | None, model: ModelConfig) -> dict[str, Any]:
    """The parameters of a scaling, with its type."""
    match scaling:
        case None:
            return {"rope_type": "default"}
        case LinearScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Llama3Scaling():
            bounds = {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
            return {"rope_type": "llama3", "factor": scaling.factor, **bounds, _ORIGINAL: scaling.original_context}
        case DynamicScaling():
            return {"rope_type": "dynamic", "factor": scaling.factor}
        case YarnScaling():
            weights = {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
            by_weights = model.rope_attention_factor is None and all(weights.values())
            of_scores = {"mscale_all_dim": model.mscale_all_dim} if model.multi_latent_attention and model.mscale_all_dim else {}
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                _ORIGINAL: scaling.original_context,
                "beta_fast": scaling.fast,
                "beta_slow": scaling.slow,
                "truncate": scaling.whole_pairs,
                **(weights if by_weights else {"attention_factor": scaling.magnitude, **of_scores}),
            }
        case LongScaling():
            return {
                "rope_type": "longrope",
                "factor": model.rotary_scaling_factor,
                _ORIGINAL: original_context(model),
                "short_factor": list(scaling.short),
                "long_factor": list(scaling.long),
                "attention_factor": scaling.magnitude,
            }


def _mapping(fields: Fields, name: str) -> dict[str, Any]:
    """The parameters in a field without those that are null, with the type under its newer name."""
    return _normalised(fields, name, fields.raw(name))


def _normalised(fields: Fields, name: str, given: Any) -> dict[str, Any]:
    given = given or {}
    if not isinstance(given, dict):
        fields.refuse(name, "must be a mapping")
        return {}
    found = {key: value for key, value in given.items() if value is not None}
    if "type" in found and found.setdefault("rope_type", found["type"]) != found.pop("type"):
        fields.refuse(name, "rope_type and type differ")
    if "rope_type" in found:
        found["rope_type"] = {"su": "longrope"}.get(found["rope_type"], found["rope_type"])  # the name in the first Phi-3
    return {"rope_type": "default"} | found if given else {}


class _Parameters:
    """The rotary parameters of a config.json, wherever they stand."""

    def __init__(self, fields: Fields, new: dict[str, Any], default: Settings) -> None:
        self._fields = fields
        old = _mapping(fields, "rope_scaling")
        self.name = "rope_parameters" if new else "rope_scaling"
        if new and old and new | old != new:
            fields.refuse("rope_scaling", f"differs from rope_parameters = {fields.raw('rope_parameters')!r}: remove one of them")
        self._left = new or old or dict(default)
        self.place = f"{self.name} = {fields.raw(self.name)!r}" if new or old else "at the top level"
        self.kind = self._left.pop("rope_type", "default")

    def refuse(self, why: str) -> None:
        """Record that the parameters cannot be accepted."""
        self._fields.refuse(self.name, why)

    def take(self, key: str, default: Any, outside_name: str | None = None) -> Any:
        """A parameter, which may stand in the mapping or at the top level."""
        outside_name = outside_name or key
        outside, inside = self._fields.raw(outside_name), self._left.pop(key, None)
        if outside is not None and inside is not None and outside != inside:
            self._fields.refuse(outside_name, f"differs from {self.place}")
        found = inside if inside is not None else outside
        return default if found is None else found

    def number(self, key: str, default: float | None, outside_name: str | None = None) -> float:
        """A parameter that must be a positive number."""
        return self._positive(key, self.take(key, default, outside_name))

    def numbers(self, key: str) -> tuple[float, ...]:
        """A parameter that must be a list of positive numbers."""
        values = self._left.pop(key, None)
        if not isinstance(values, list):
            self.refuse(f"{key} is {values!r}, it must be a list of numbers")
            return ()
        return tuple(self._positive(key, value) for value in values)

    def length(self, value: Any) -> int:
        """A number of tokens."""
        if type(value) is not int or value < 2:
            self.refuse(f"{_ORIGINAL} is {value!r}, it must be a whole number of at least 2")
            return 2
        return value

    def _positive(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.refuse(f"{key} is {value!r}, it must be a positive number")
            return 1.0
        return float(value)

    def finish(self) -> None:
        """Refuse parameters that were not taken."""
        if self._left:
            self.refuse(f"{', '.join(self._left)} unknown with type {self.kind!r}")
