"""Conversion of a command line of Megatron-LM or Megatron-DeepSpeed.

Most flags have the same name and meaning in this project and are copied.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import NamedTuple

from megatron.config.flags import find_flag
from megatron.config.parsed_flags import REQUESTS
from megatron_lab.migration.compat import (
    COMPAT_FLAGS,
    EQUIVALENT_CHOICES,
    TRANSLATIONS,
    NoEffectFlag,
    find_equivalent,
    match_flag_pattern,
)
from megatron_lab.migration.launch_command import LaunchCommand, parse_argv


class SourceFlag(NamedTuple):
    """Flag in the command line of another framework, with its values."""

    spelling: str
    """Flag as the user has written it, with its leading dashes."""
    values: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.spelling, *self.values))


def convert_flags(command: LaunchCommand, source_args: list[str]) -> dict[str, tuple[str, ...]]:
    """Convert the flags of a Megatron-LM or Megatron-DeepSpeed command line to flags of this project.

    Args:
        command: launch command of this project. It receives the flags, and messages about flags that were changed, omitted or not
            converted.
        source_args: arguments of the training program.

    Returns:
        Values of the flags that configure DeepSpeed, by name without the leading dashes. `deepspeed.convert_flags` converts them.
    """
    deepspeed_values: dict[str, tuple[str, ...]] = {}
    deferred: list[tuple[Callable[[LaunchCommand, SourceFlag], None], SourceFlag]] = []
    for name, values, spelling in parse_argv(source_args):
        source = SourceFlag(spelling, tuple(map(_strip_quotes, values)))
        if values != source.values:
            command.changes.append((" ".join((spelling, *values)), f"{source}: quotes inside the value are removed"))
        if name in DEEPSPEED_FLAGS:
            deepspeed_values[name] = source.values
        elif name in _CONVERTERS:
            deferred.append((_CONVERTERS[name], source))
        elif any((name, value) in EQUIVALENT_CHOICES for value in source.values):
            _replace_choices(command, name, source)
        elif find_flag(name) is not None or isinstance(COMPAT_FLAGS.get(name) or match_flag_pattern(name), NoEffectFlag):
            command.set_flag(name, *source.values)
        elif name in TRANSLATIONS and TRANSLATIONS[name].applies_to(source.values):
            for new_name, new_values, _ in parse_argv(shlex.split(TRANSLATIONS[name].template.format(*source.values))):
                command.set_flag(new_name, *new_values, source=str(source))
        elif name in REQUESTS:
            command.omitted.append((str(source), "it requests an action other than training"))
        elif (equivalent := find_equivalent(name)) is not None:
            for new_name, new_values, _ in parse_argv(equivalent.flags.split()):
                command.set_flag(new_name, *new_values)
            command.changes.append((str(source), f"{equivalent.flags}, which computes the same: {equivalent.remark}"))
        else:
            compat_flag = COMPAT_FLAGS.get(name) or match_flag_pattern(name)
            command.unconverted.append(
                (str(source), compat_flag.reason if compat_flag is not None else "This project does not know it.")
            )
    for convert, source in deferred:
        convert(command, source)
    return deepspeed_values


def _replace_choices(command: LaunchCommand, name: str, source: SourceFlag) -> None:
    """Set a flag with values of Megatron-LM, of which some are replaced by values that compute the same.

    Args:
        name: name of the flag without the leading dashes.
    """
    new_values: list[str] = []
    for value in source.values:
        equivalent = EQUIVALENT_CHOICES.get((name, value))
        if equivalent is None:
            new_values.append(value)
            continue
        for new_name, replacements, _ in parse_argv(equivalent.flags.split()):
            if new_name == name:
                new_values += replacements
            else:
                command.set_flag(new_name, *replacements)
        command.changes.append((f"{source.spelling} {value}", f"{equivalent.flags}, which computes the same: {equivalent.remark}"))
    without_mlp = "mlp" in new_values and name == "recompute-modules"  # mlp includes mlp_act
    command.set_flag(name, *dict.fromkeys(value for value in new_values if not (without_mlp and value == "mlp_act")))


DEEPSPEED_FLAGS = ("deepspeed", "deepspeed-config", "zero-stage", "deepspeed-activation-checkpointing", "no-pipeline-parallel")
"""Flags of Megatron-DeepSpeed that configure the DeepSpeed engine."""


def _rename(name: str, reason: str = "") -> Callable[[LaunchCommand, SourceFlag], None]:
    """Return a function that converts a flag by giving it another name and keeping its values.

    Args:
        name: name of the flag in this project, without the leading dashes.
        reason: reason for the change, for the report.
    """
    return lambda command, source: command.set_flag(name, *source.values, source=str(source), reason=reason)


def _convert_rotary(command: LaunchCommand, source: SourceFlag) -> None:
    command.set_flag("position-embedding-type", "rope", source=str(source))


def _convert_no_position_embedding(command: LaunchCommand, source: SourceFlag) -> None:
    if command.flags.get("position-embedding-type") == ("rope",):
        command.omitted.append((str(source), "with rotary embeddings it does nothing in Megatron-LM"))
    else:
        command.set_flag("position-embedding-type", "none", source=str(source))


def _convert_num_kv_heads(command: LaunchCommand, source: SourceFlag) -> None:
    if source.values == command.flags.get("num-attention-heads"):
        command.omitted.append((str(source), "each query head has its own keys and values, which is the default"))
        return
    command.set_flag("group-query-attention")
    command.set_flag(
        "num-query-groups", *source.values, source=str(source), reason="with --group-query-attention, which switches it on"
    )


def _convert_recompute(command: LaunchCommand, source: SourceFlag) -> None:
    """Convert a switch for full activation recomputation, unless the command already sets --recompute-granularity."""
    if "recompute-granularity" not in command.flags:
        command.set_flag("recompute-granularity", "full", source=str(source))
        command.flags.setdefault("recompute-method", ("uniform",))
        command.flags.setdefault("recompute-num-layers", ("1",))
    else:
        command.omitted.append((str(source), "--recompute-granularity sets what is recomputed"))


def _convert_recompute_num_layers(command: LaunchCommand, source: SourceFlag) -> None:
    _convert_recompute(command, source)
    command.set_flag("recompute-num-layers", *source.values, source=str(source))


def _convert_recompute_method(command: LaunchCommand, source: SourceFlag) -> None:
    _convert_recompute(command, source)
    command.set_flag("recompute-method", *source.values, source=str(source))


def _convert_tokens_to_samples(name: str) -> Callable[[LaunchCommand, SourceFlag], None]:
    """Return a function that converts a flag with a number of tokens to a flag with a number of samples.

    If the source limits the run by both, the run ends at the lower limit, so ``train-samples`` gets the minimum.

    Args:
        name: flag with the number of samples, without the leading dashes.
    """

    def convert(command: LaunchCommand, source: SourceFlag) -> None:
        seq_length = command.get_number("seq-length")
        if seq_length is None or not source.values or not source.values[0].isdigit():
            command.unconverted.append((str(source), f"It becomes --{name} if --seq-length and the tokens are numbers."))
            return
        num_samples = int(source.values[0]) // int(seq_length)
        if name == "train-samples" and name in command.flags:
            min_samples = min(num_samples, int(command.get_number(name) or num_samples))
            command.set_flag(
                name,
                min_samples,
                source=f"{source} and --{name}",
                reason=f"a run ends at the lower limit; a sample has {seq_length:g} tokens",
            )
        else:
            command.set_flag(name, num_samples, source=str(source), reason=f"samples have {seq_length:g} tokens")

    return convert


def _convert_moe_layer_recompute(command: LaunchCommand, source: SourceFlag) -> None:
    """Add the experts to the modules that selective recompute covers."""
    if command.flags.get("recompute-granularity") == ("full",):
        command.omitted.append((str(source), "--recompute-granularity full recomputes experts too"))
        return
    modules = command.flags.get("recompute-modules", ("core_attn",))
    command.set_flag("recompute-granularity", "selective")
    command.set_flag(
        "recompute-modules",
        *dict.fromkeys((*(module for module in modules if module != "mlp_act"), "mlp")),
        source=str(source),
        reason="mlp includes experts",
    )


def _convert_data_impl(command: LaunchCommand, source: SourceFlag) -> None:
    if source.values in (("mmap",), ("infer",)):
        command.omitted.append((str(source), "indexed datasets are always mapped into memory"))
    else:
        command.unconverted.append(
            (str(source), "Indexed datasets have the mmap format here; create them again with tools/preprocess_data.py.")
        )


def _omit(reason: str) -> Callable[[LaunchCommand, SourceFlag], None]:
    """Return a function that leaves a flag out of the command and reports that it has no effect in this project.

    Args:
        reason: why the flag has no effect, for the report.
    """
    return lambda command, source: command.omitted.append((str(source), reason))


def _convert_normalization(command: LaunchCommand, source: SourceFlag) -> None:
    name = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}.get(source.values[0].lower() if source.values else "")
    if name is None or source.values == (name,):
        command.set_flag("normalization", *source.values)
    else:
        command.set_flag("normalization", name, source=str(source))


def _convert_ulysses(command: LaunchCommand, source: SourceFlag) -> None:
    """Convert the size of DeepSpeed-Ulysses to --context-parallel-size with --cp-comm-type a2a."""
    command.set_flag(
        "context-parallel-size",
        *source.values,
        source=str(source),
        reason="with --cp-comm-type a2a, which gives each rank some heads",
    )
    command.set_flag("cp-comm-type", "a2a")


_CONVERTERS: dict[str, Callable[[LaunchCommand, SourceFlag], None]] = {
    "use-rotary-position-embeddings": _convert_rotary,
    "no-position-embedding": _convert_no_position_embedding,
    "normalization": _convert_normalization,
    "num-key-value-heads": _convert_num_kv_heads,
    "checkpoint-activations": _convert_recompute,
    "checkpoint-num-layers": _convert_recompute_num_layers,
    "activations-checkpoint-method": _convert_recompute_method,
    "activations-checkpoint-num-layers": _convert_recompute_num_layers,
    "train-tokens": _convert_tokens_to_samples("train-samples"),
    "lr-decay-tokens": _convert_tokens_to_samples("lr-decay-samples"),
    "lr-warmup-tokens": _convert_tokens_to_samples("lr-warmup-samples"),
    "data-impl": _convert_data_impl,
    "ds-sequence-parallel-size": _convert_ulysses,
    "batch-size": _rename("micro-batch-size"),
    "model-parallel-size": _rename("tensor-model-parallel-size"),
    "warmup": _rename("lr-warmup-fraction"),
    "encoder-num-layers": _rename("num-layers"),
    "encoder-seq-length": _rename("seq-length"),
    "moe-expert-parallel-size": _rename("expert-model-parallel-size"),
    "moe-loss-coeff": _rename("moe-aux-loss-coeff"),
    "moe-layer-recompute": _convert_moe_layer_recompute,
    "persistent-save-interval": _rename("save-interval"),
    "wandb-name": _rename("wandb-exp-name"),
    "cpu-optimizer": _rename("optimizer-cpu-offload"),
    "moe-extended-tp": _omit("--expert-tensor-parallel-size sets how experts are split"),
    "DDP-impl": _omit("gradients are always reduced from one buffer, as with DDP-impl local"),
    "local-rank": _omit("torchrun sets it in the environment"),
    "no-query-key-layer-scaling": _omit("attention scores are never scaled by the layer number"),
    "no-contiguous-buffers-in-local-ddp": _omit("gradients are always in contiguous buffers"),
    "log-batch-size-to-tensorboard": _omit("the batch size is always written"),
    "log-optimizer-states-to-tensorboard": _omit("it only affects the log; --log-params-norm logs norms"),
}
"""Converters of flags that have another spelling or no effect in this project. They run last, because some of them read other
flags."""


def _strip_quotes(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
