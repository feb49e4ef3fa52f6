"""Config.json fields of rotary position embeddings.

There are two formats. Before transformers 5, `rope_theta` is a top-level field, and `rope_scaling` is `null` or a mapping with the
key `type` or `rope_type`. Since transformers 5, one mapping `rope_parameters` contains `rope_type`, `rope_theta` and the parameters
of the type. If layers with an attention window have different rotary embeddings, `rope_parameters` contains one such mapping per
layer type.

Both formats are read. Written files contain both, so every version of transformers can read them.
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
    build_rotary_spec,
    get_original_context,
    get_yarn_mscale,
)
from megatron_lab.foreign.huggingface.family import Settings
from megatron_lab.foreign.huggingface.fields import FULL_ATTENTION, SLIDING_ATTENTION, Fields
from megatron_lab.foreign.huggingface.groups import get_max_positions

DEFAULT_THETA = 10000.0
_ORIGINAL_CONTEXT = "original_max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class RotaryFields:
    """Converter of the config.json fields for an architecture's rotary position embeddings."""

    max_positions: int
    """Maximum sequence length if config.json has no field max_position_embeddings."""
    theta: float = DEFAULT_THETA
    """Rotary base if config.json has no field rope_theta."""
    rotary_fraction: float | None = None
    """Fraction of the channels of a head that are rotated, if config.json contains no such fraction; None if the architecture
    always rotates all channels."""
    theta_field: str = "rope_theta"
    """Name of the field with the rotary base in files written before transformers 5."""
    rotary_fraction_field: str = "partial_rotary_factor"
    """Name of the field with the fraction of rotated channels in files written before transformers 5."""
    local_theta: float | None = None
    """Rotary base of layers with an attention window, if config.json contains none; None if all layers have the same rotary
    embeddings."""
    local_theta_field: str = "rope_local_base_freq"
    """Name of the field with the rotary base of layers with an attention window, in files written before transformers 5."""
    default_scaling: Settings | None = None
    """Rotary parameters (type and options of the frequency scaling) that apply if config.json contains none."""
    scaling_types: tuple[str, ...] = ("linear", "llama3", "dynamic", "yarn", "longrope")
    """Types of frequency scaling that transformers supports for this architecture."""
    default_original_context: int | None = None
    """Sequence length for which the unscaled frequencies were chosen, if config.json does not contain the top-level field
    `original_max_position_embeddings`. None if the architecture has no such field."""
    original_context_field: str = _ORIGINAL_CONTEXT
    """Name of a top-level field with this sequence length. Files may contain it in addition to the entry of the mapping."""
    query_scaling_key: str | None = None
    """Key of the rotary parameter b of architectures (Ministral 3) that multiply the query at position p by 1 + b ln(1 + floor(p /
    original_max_position_embeddings)), with positions counted from 0. None if the architecture never scales queries by position.
    This framework does not scale them. So a model is supported if b is 0, or if it has no position with another factor than 1."""

    def parse(self, fields: Fields) -> Settings:
        num_positions = get_max_positions(fields, self.max_positions)
        rope_parameters = _get_mapping(fields, "rope_parameters")
        local_parameters: Settings = {}
        if self.local_theta is not None:
            nested = {
                name: _normalize(fields, "rope_parameters", rope_parameters.pop(name))
                for name in (FULL_ATTENTION, SLIDING_ATTENTION)
                if name in rope_parameters
            }
            if nested and (set(rope_parameters) - {"rope_type"}):
                fields.refuse("rope_parameters", f"has {', '.join(rope_parameters)} next to the layer types")
            if nested:
                rope_parameters, local_parameters = nested.get(FULL_ATTENTION, {}), nested.get(SLIDING_ATTENTION, {})
        parameters = _RopeParameters(fields, rope_parameters, self.default_scaling or {})
        theta = parameters.pop_number("rope_theta", self.theta, self.theta_field)
        parsed: Settings = {"rotary_base": theta}
        fraction = parameters.pop_number(
            "partial_rotary_factor", 1.0 if self.rotary_fraction is None else self.rotary_fraction, self.rotary_fraction_field
        )
        if self.rotary_fraction is None and fraction != 1.0:
            fields.refuse(
                "partial_rotary_factor", f"{parameters.location}: this architecture always rotates all channels of a head"
            )
        elif fraction != 1.0:
            parsed["rotary_percent"] = fraction
        original_context = parameters.pop(
            _ORIGINAL_CONTEXT, self.default_original_context or num_positions, self.original_context_field
        )
        if self.query_scaling_key is not None:
            parameters.refuse_query_scaling(self.query_scaling_key, num_positions, original_context)
        if parameters.rope_type not in self.scaling_types:
            supported = f"default, {', '.join(self.scaling_types)}"
            if parameters.rope_type != "default":
                fields.refuse(
                    parameters.name, f"rotary embeddings of type {parameters.rope_type!r} are not supported, only {supported}"
                )
                return parsed
        else:
            parsed |= _PARSERS[parameters.rope_type](parameters, num_positions, original_context)
        parameters.finish()
        if self.local_theta is not None:
            if "yarn_correction_range_round_to_int" in parsed:
                # transformers ignores `truncate` in the parameters of a layer type.
                parsed["yarn_correction_range_round_to_int"] = True
            parsed |= self._parse_local_theta(fields, local_parameters, parsed)
        return parsed

    def _parse_local_theta(self, fields: Fields, parameters: Settings, parsed: Settings) -> Settings:
        """Return the setting for the rotary base of layers with an attention window; an empty dictionary if the base equals that of
        all other layers.

        Args:
            fields: fields of config.json.
            parameters: rotary parameters of the layers with an attention window.
            parsed: settings for the rotary embeddings of all other layers.
        """
        default_theta = parsed["rotary_base"]
        if self.local_theta_field != self.theta_field:
            default_theta = fields.get_number(self.local_theta_field, self.local_theta or DEFAULT_THETA)
        theta: Any = parameters.get("rope_theta", default_theta)
        if not _is_positive(theta):
            fields.refuse("rope_parameters", f"rope_theta of {SLIDING_ATTENTION} is {theta!r}, but must be a positive number")
            return {}
        if parameters.get("rope_type", "default") != "default" or set(parameters) - {"rope_type", "rope_theta"}:
            fields.refuse(
                "rope_parameters", f"frequencies in layers of type {SLIDING_ATTENTION} can have a different base, but no scaling"
            )
        return {} if theta == parsed["rotary_base"] and len(parsed) == 1 else {"rotary_base_local": float(theta)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        spec = build_rotary_spec(model)
        if spec is None:
            return {}
        scaling = _build_scaling_fields(spec.scaling, model)
        num_positions = spec.scaling.original_context if isinstance(spec.scaling, DynamicScaling) else model.num_positions
        if self.query_scaling_key is not None:  # transformers requires both parameters
            scaling = {_ORIGINAL_CONTEXT: num_positions, **scaling, self.query_scaling_key: 0.0}
        parameters = {"rope_theta": model.rotary_base, **scaling}
        fields: dict[str, Any] = {}
        if self.rotary_fraction is not None:
            parameters["partial_rotary_factor"] = fields[self.rotary_fraction_field] = model.rotary_percent
        if self.default_original_context is not None:
            fields[_ORIGINAL_CONTEXT] = scaling.get(_ORIGINAL_CONTEXT, self.default_original_context)
        if isinstance(spec.scaling, DynamicScaling):  # transformers computes the base from the ratio to this length
            fields["max_position_embeddings"] = num_positions
        elif isinstance(spec.scaling, YarnScaling | LongScaling):
            # The length of the extended context. Some programs compute the attention factor from its ratio to the original one.
            extended_context = round(model.rotary_scaling_factor * get_original_context(model))
            fields["max_position_embeddings"] = max(model.max_position_embeddings or 0, extended_context)
        fields[self.theta_field] = model.rotary_base
        has_defaults = spec.scaling is None and not self.default_scaling  # else an absent mapping means other parameters
        fields["rope_scaling"] = None if has_defaults else scaling
        if self.local_theta is None:
            return fields | {"rope_parameters": parameters}
        local_theta = model.rotary_base if model.rotary_base_local is None else model.rotary_base_local
        if self.local_theta_field != self.theta_field:
            fields[self.local_theta_field] = local_theta
        return fields | {
            "rope_parameters": {FULL_ATTENTION: parameters, SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": local_theta}}
        }


def _parse_linear(parameters: _RopeParameters, num_positions: int, original_context: Any) -> Settings:
    return {"rotary_seq_len_interpolation_factor": parameters.pop_number("factor", None)}


def _parse_llama3(parameters: _RopeParameters, num_positions: int, original_context: Any) -> Settings:
    return {
        "use_rope_scaling": True,
        "rope_scaling_factor": parameters.pop_number("factor", None),
        "rope_low_freq_factor": parameters.pop_number("low_freq_factor", None),
        "rope_high_freq_factor": parameters.pop_number("high_freq_factor", None),
        _ORIGINAL_CONTEXT: parameters.check_length(original_context),
    }


def _parse_dynamic(parameters: _RopeParameters, num_positions: int, original_context: Any) -> Settings:
    if original_context != num_positions:
        parameters.refuse(
            f"{_ORIGINAL_CONTEXT} {original_context!r} must be max_position_embeddings = {num_positions} with this type"
        )
    return {
        "rope_type": "dynamic",
        "rotary_scaling_factor": parameters.pop_number("factor", None),
        _ORIGINAL_CONTEXT: num_positions,
    }


def _parse_yarn(parameters: _RopeParameters, num_positions: int, original_context: Any) -> Settings:
    original_context = parameters.check_length(original_context)
    parsed: dict[str, Any] = {
        "rope_type": "yarn",
        "rotary_scaling_factor": parameters.pop_number("factor", num_positions / original_context),
        _ORIGINAL_CONTEXT: original_context,
        "beta_fast": parameters.pop_number("beta_fast", 32.0),
        "beta_slow": parameters.pop_number("beta_slow", 1.0),
        "yarn_correction_range_round_to_int": parameters.pop_bool("truncate", True),
    }
    attention_factor = parameters.pop_optional_number("attention_factor")
    mscales = [parameters.pop_optional_number(name, zero_is_none=True) for name in ("mscale", "mscale_all_dim")]
    if attention_factor is None and all(mscales):
        return parsed | dict(zip(("mscale", "mscale_all_dim"), mscales, strict=True))
    if mscales[1]:  # without mscale, it affects only the scores of latent attention
        attention_factor = get_yarn_mscale(parsed["rotary_scaling_factor"], 1.0) if attention_factor is None else attention_factor
        parsed["mscale_all_dim"] = mscales[1]
    return parsed if attention_factor is None else parsed | {"rope_attention_factor": attention_factor}


def _parse_longrope(parameters: _RopeParameters, num_positions: int, original_context: Any) -> Settings:
    original_context = parameters.check_length(original_context)
    attention_factor = parameters.pop_optional_number("attention_factor")
    return {
        "rope_type": "longrope",
        "rotary_scaling_factor": parameters.pop_number("factor", num_positions / original_context),
        _ORIGINAL_CONTEXT: original_context,
        "rope_short_factors": parameters.pop_list("short_factor"),
        "rope_long_factors": parameters.pop_list("long_factor"),
        **({} if attention_factor is None else {"rope_attention_factor": attention_factor}),
    }


_PARSERS: dict[str, Callable[[_RopeParameters, int, Any], Settings]] = {
    "linear": _parse_linear,
    "llama3": _parse_llama3,
    "dynamic": _parse_dynamic,
    "yarn": _parse_yarn,
    "longrope": _parse_longrope,
}
"""Functions that convert the parameters of a scaling type to settings. Arguments: parameters, maximum sequence length and
original context length."""


def _build_scaling_fields(scaling: Scaling | None, model: ModelConfig) -> dict[str, Any]:
    """Convert the frequency scaling of a model to rotary parameters of config.json: the type `rope_type` and the options of the
    type."""
    match scaling:
        case None:
            return {"rope_type": "default"}
        case LinearScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Llama3Scaling():
            freq_factors = {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
            return {"rope_type": "llama3", "factor": scaling.factor, **freq_factors, _ORIGINAL_CONTEXT: scaling.original_context}
        case DynamicScaling():
            return {"rope_type": "dynamic", "factor": scaling.factor}
        case YarnScaling():
            mscales = {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
            uses_mscales = model.rope_attention_factor is None and all(mscales.values())
            score_mscale = {"mscale_all_dim": model.mscale_all_dim} if model.multi_latent_attention and model.mscale_all_dim else {}
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                _ORIGINAL_CONTEXT: scaling.original_context,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": scaling.rounds_bounds,
                **(mscales if uses_mscales else {"attention_factor": scaling.attention_factor, **score_mscale}),
            }
        case LongScaling():
            return {
                "rope_type": "longrope",
                "factor": model.rotary_scaling_factor,
                _ORIGINAL_CONTEXT: get_original_context(model),
                "short_factor": list(scaling.short_factors),
                "long_factor": list(scaling.long_factors),
                "attention_factor": scaling.attention_factor,
            }


def _get_mapping(fields: Fields, name: str) -> dict[str, Any]:
    """Return the rotary parameters in a mapping-valued field of config.json, normalized by `_normalize`; empty if the field is
    absent."""
    return _normalize(fields, name, fields.get_raw(name))


def _normalize(fields: Fields, name: str, mapping: Any) -> dict[str, Any]:
    """Return a mapping of rotary parameters without its `null` entries, and with the scaling type under the key `rope_type`.

    Args:
        fields: fields of config.json, which record errors.
        name: name of the field with the mapping.
        mapping: value of the field.
    """
    mapping = {} if mapping is None else mapping
    if not isinstance(mapping, dict):
        fields.refuse(name, "must be a mapping" if mapping is fields.values.get(name) else f"{mapping!r} in it must be a mapping")
        return {}
    parameters = {key: entry for key, entry in mapping.items() if entry is not None}
    if "type" in parameters and parameters.setdefault("rope_type", parameters["type"]) != parameters.pop("type"):
        fields.refuse(name, "rope_type and type differ")
    if not isinstance(rope_type := parameters.get("rope_type", "default"), str):
        fields.refuse(name, f"rope_type is {rope_type!r}, but must be a text")
        parameters["rope_type"] = "default"
    elif "rope_type" in parameters:
        # The first Phi-3 models use the name "su".
        parameters["rope_type"] = {"su": "longrope"}.get(rope_type, rope_type)
    return {"rope_type": "default"} | parameters if mapping else {}


def _is_positive(value: Any) -> bool:
    """Return whether a value of JSON is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


class _RopeParameters:
    """Rotary parameters of a config.json in either format: the mapping `rope_parameters` (since transformers 5), or `rope_scaling`
    and top-level fields (before).

    Args:
        fields: fields of config.json.
        new_parameters: parameters in the mapping `rope_parameters`; empty if the file does not have the mapping.
        default: parameters that apply if the file contains none.
    """

    def __init__(self, fields: Fields, new_parameters: dict[str, Any], default: Settings) -> None:
        self._fields = fields
        old_parameters = _get_mapping(fields, "rope_scaling")
        self.name = "rope_parameters" if new_parameters else "rope_scaling"
        if new_parameters and old_parameters and new_parameters | old_parameters != new_parameters:
            fields.refuse(
                "rope_scaling", f"differs from rope_parameters = {fields.get_raw('rope_parameters')!r}: remove one of them"
            )
        self._unread = new_parameters or old_parameters or dict(default)
        self.location = f"{self.name} = {fields.get_raw(self.name)!r}" if new_parameters or old_parameters else "at the top level"
        self.rope_type = self._unread.pop("rope_type", "default")

    def refuse(self, reason: str) -> None:
        """Record the error that the rotary parameters are not supported.

        Args:
            reason: why they are not supported, for the end of the error message.
        """
        self._fields.refuse(self.name, reason)

    def pop(self, key: str, default: Any, top_level_name: str | None = None) -> Any:
        """Return a rotary parameter, and mark it as read by removing it. The parameter may be in the mapping or a top-level field.

        Args:
            key: key in the mapping.
            default: value if the parameter is absent.
            top_level_name: name of the top-level field; by default `key`.
        """
        top_level_name = top_level_name or key
        top_level_value, mapping_value = self._fields.get_raw(top_level_name), self._unread.pop(key, None)
        if top_level_value is not None and mapping_value is not None and top_level_value != mapping_value:
            self._fields.refuse(top_level_name, f"differs from {self.location}")
        value = mapping_value if mapping_value is not None else top_level_value
        return default if value is None else value

    def pop_number(self, key: str, default: float | None, top_level_name: str | None = None) -> float:
        """Return a rotary parameter that must be a positive number, and mark it as read by removing it. For any other value, record
        an error and return 1.

        Args:
            key: key in the mapping.
            default: value if the parameter is absent; None if it is required.
            top_level_name: name of the top-level field; by default `key`.
        """
        return self._check_positive(key, self.pop(key, default, top_level_name))

    def pop_optional_number(self, key: str, *, zero_is_none: bool = False) -> float | None:
        """Return a rotary parameter that must be a positive number, or None if it is absent, and mark it as read by removing it.
        For any other value, record an error and return 1.

        Args:
            key: key in the mapping, and name of the top-level field.
            zero_is_none: whether the parameter may be 0, which means the same as its absence.
        """
        value = self.pop(key, None)
        is_zero = isinstance(value, int | float) and not isinstance(value, bool) and value == 0
        return None if value is None or (zero_is_none and is_zero) else self._check_positive(key, value)

    def pop_bool(self, key: str, default: bool) -> bool:
        """Return a rotary parameter that must be true or false, and mark it as read by removing it. For any other value, record an
        error and return `default`.

        Args:
            key: key in the mapping, and name of the top-level field.
            default: value if the parameter is absent.
        """
        value = self.pop(key, default)
        if not isinstance(value, bool):
            self.refuse(f"{key} is {value!r}, but must be true or false")
            return default
        return value

    def pop_list(self, key: str) -> tuple[float, ...]:
        """Return a rotary parameter that must be a list of positive numbers, and mark it as read by removing it. If the value is
        not a list, record an error and return an empty tuple. For each item that is not a positive number, record an error and
        return 1 in its place."""
        values = self._unread.pop(key, None)
        if not isinstance(values, list):
            self.refuse(f"{key} is {values!r}, but must be a list of numbers")
            return ()
        return tuple(self._check_positive(key, value) for value in values)

    def check_length(self, value: Any) -> int:
        """Check that the value of original_max_position_embeddings is an integer of at least 2 tokens, and return it. For any other
        value, record an error and return 2."""
        if type(value) is not int or value < 2:
            self.refuse(f"{_ORIGINAL_CONTEXT} is {value!r}, but must be an integer of at least 2")
            return 2
        return value

    def _check_positive(self, key: str, value: Any) -> float:
        if not _is_positive(value):
            self.refuse(f"{key} is {value!r}, but must be a positive number")
            return 1.0
        return float(value)

    def refuse_query_scaling(self, key: str, num_positions: int, original_context: Any) -> None:
        """Record an error if queries are multiplied by a factor that depends on their position, and mark the parameters of the
        factor as read by removing them.

        Args:
            key: key of the parameter that determines the factor; 0 for the factor 1.
            num_positions: maximum sequence length.
            original_context: number of positions from the start whose factor is 1.
        """
        coefficient = self.pop_optional_number(key, zero_is_none=True)
        repeated_length = self._unread.pop("max_position_embeddings", None)
        if repeated_length not in (None, num_positions):
            self.refuse(f"max_position_embeddings {repeated_length!r} differs from the top-level field, {num_positions}")
        if not coefficient:
            return
        context = self.check_length(original_context)
        if num_positions > context:
            self.refuse(
                f"{key} {coefficient!r}: the factor of the queries after the first {context} tokens ({_ORIGINAL_CONTEXT}), which "
                "depends on the position, is not supported. To use the model for sequences up to this length, set "
                f"max_position_embeddings to {context}"
            )
        else:
            self._fields.notes.append(
                f"{key} {coefficient!r} is not kept. It has no effect, since it changes only the queries after the first {context} "
                f"tokens, and max_position_embeddings is {num_positions}"
            )

    def finish(self) -> None:
        """Record an error if the file contains rotary parameters that were not read, because they may change the model."""
        if self._unread:
            self.refuse(f"unknown parameters with type {self.rope_type!r}: {', '.join(self._unread)}")
