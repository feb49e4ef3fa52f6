"""A launch line of Megatron-LM, or of Megatron-DeepSpeed: most flags go through as they are."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import NamedTuple

from megatron.config.flags import flag_of
from megatron.config.given import REQUESTS
from megatron_lab.migration.compat import KNOWN, TAKEN, NoEffect, find_family
from megatron_lab.migration.line import Line, words_of


class Given(NamedTuple):
    """A flag of another framework."""

    spelled: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.spelled, *self.values))


def put_flags(line: Line, argv: list[str]) -> dict[str, tuple[str, ...]]:
    """Put the flags of a command line.

    Returns:
        those that speak of DeepSpeed, by name; `deepspeed.put_flags` takes them.
    """
    deepspeed: dict[str, tuple[str, ...]] = {}
    later: list[tuple[Callable[[Line, Given], None], Given]] = []
    for name, values, spelled in words_of(argv):
        given = Given(spelled, tuple(map(_unquoted, values)))
        if values != given.values:
            line.changed.append((" ".join((spelled, *values)), f"{given}: quotes inside a value were left by the shell"))
        if name in DEEPSPEED:
            deepspeed[name] = given.values
        elif name in _SAID_OTHERWISE:
            later.append((_SAID_OTHERWISE[name], given))
        elif flag_of(name) is not None or isinstance(KNOWN.get(name) or find_family(name), NoEffect):
            line.put(name, *given.values)
        elif name in TAKEN and TAKEN[name].fits(given.values):
            for new, words, _ in words_of(shlex.split(TAKEN[name].words.format(*given.values))):
                line.put(new, *words, given=str(given))
        elif name in REQUESTS:
            line.left_out.append((str(given), "it asks for something else than a run"))
        else:
            known = KNOWN.get(name) or find_family(name)
            line.lost.append((str(given), known.reason if known is not None else "This project does not know it."))  # type: ignore[union-attr]
    for put, given in later:  # they may need the others
        put(line, given)
    return deepspeed


DEEPSPEED = ("deepspeed", "deepspeed-config", "zero-stage", "deepspeed-activation-checkpointing", "no-pipeline-parallel")
"""Flags of Megatron-DeepSpeed that belong to its engine."""


def _renamed(flag: str, why: str = "") -> Callable[[Line, Given], None]:
    return lambda line, given: line.put(flag, *given.values, given=str(given), why=why)


def _rotary(line: Line, given: Given) -> None:
    line.put("position-embedding-type", "rope", given=str(given))


def _no_position_embedding(line: Line, given: Given) -> None:
    if line.words.get("position-embedding-type") == ("rope",):
        line.left_out.append((str(given), "with rotary embeddings it does nothing in Megatron-LM"))
    else:
        line.put("position-embedding-type", "none", given=str(given))


def _key_value_heads(line: Line, given: Given) -> None:
    if given.values == line.words.get("num-attention-heads"):
        line.left_out.append((str(given), "each query head has its own keys and values, which is the default"))
        return
    line.put("group-query-attention")
    line.put("num-query-groups", *given.values, given=str(given), why="with --group-query-attention, which switches it on")


def _recompute_all(line: Line, given: Given) -> None:
    if "recompute-granularity" not in line.words:
        line.put("recompute-granularity", "full", given=str(given))
        line.words.setdefault("recompute-method", ("uniform",))
        line.words.setdefault("recompute-num-layers", ("1",))
    else:
        line.left_out.append((str(given), "--recompute-granularity says what is computed again"))


def _recompute_layers(line: Line, given: Given) -> None:
    _recompute_all(line, given)
    line.put("recompute-num-layers", *given.values, given=str(given))


def _recompute_method(line: Line, given: Given) -> None:
    _recompute_all(line, given)
    line.put("recompute-method", *given.values, given=str(given))


def _in_samples(flag: str) -> Callable[[Line, Given], None]:
    def put(line: Line, given: Given) -> None:
        length = line.number("seq-length")
        if length is None or not given.values or not given.values[0].isdigit():
            line.lost.append((str(given), f"It becomes --{flag} where --seq-length and the tokens are numbers."))
            return
        samples = int(given.values[0]) // int(length)
        if flag == "train-samples" and flag in line.words:
            shorter = min(samples, int(line.number(flag) or samples))
            line.put(
                flag, shorter, given=f"{given} and --{flag}", why=f"a run ends with what comes first, in samples of {length:g}"
            )
        else:
            line.put(flag, samples, given=str(given), why=f"samples have {length:g} tokens")

    return put


def _data_impl(line: Line, given: Given) -> None:
    if given.values in (("mmap",), ("infer",)):
        line.left_out.append((str(given), "indexed datasets are always mapped into memory"))
    else:
        line.lost.append((str(given), "Indexed datasets have the mmap format here; make them again by tools/preprocess_data.py."))


def _not_needed(why: str) -> Callable[[Line, Given], None]:
    return lambda line, given: line.left_out.append((str(given), why))


def _normalization(line: Line, given: Given) -> None:
    name = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}.get(given.values[0].lower() if given.values else "")
    if name is None or given.values == (name,):
        line.put("normalization", *given.values)
    else:
        line.put("normalization", name, given=str(given))


def _ulysses(line: Line, given: Given) -> None:
    line.put(
        "context-parallel-size", *given.values, given=str(given), why="with --cp-comm-type a2a, which gives each rank some heads"
    )
    line.put("cp-comm-type", "a2a")


_SAID_OTHERWISE: dict[str, Callable[[Line, Given], None]] = {
    "use-rotary-position-embeddings": _rotary,
    "no-position-embedding": _no_position_embedding,
    "normalization": _normalization,
    "num-key-value-heads": _key_value_heads,
    "checkpoint-activations": _recompute_all,
    "checkpoint-num-layers": _recompute_layers,
    "activations-checkpoint-method": _recompute_method,
    "activations-checkpoint-num-layers": _recompute_layers,
    "train-tokens": _in_samples("train-samples"),
    "lr-decay-tokens": _in_samples("lr-decay-samples"),
    "lr-warmup-tokens": _in_samples("lr-warmup-samples"),
    "data-impl": _data_impl,
    "ds-sequence-parallel-size": _ulysses,
    "batch-size": _renamed("micro-batch-size"),
    "model-parallel-size": _renamed("tensor-model-parallel-size"),
    "warmup": _renamed("lr-warmup-fraction"),
    "encoder-num-layers": _renamed("num-layers"),
    "encoder-seq-length": _renamed("seq-length"),
    "cpu-optimizer": _renamed("optimizer-cpu-offload"),
    "moe-extended-tp": _not_needed("experts are split as --expert-tensor-parallel-size says"),
    "DDP-impl": _not_needed("gradients are always reduced from one buffer, as with DDP-impl local"),
    "local-rank": _not_needed("torchrun gives it in the environment"),
    "no-query-key-layer-scaling": _not_needed("scores are never scaled by the number of the layer"),
    "no-contiguous-buffers-in-local-ddp": _not_needed("gradients are always in contiguous buffers"),
    "log-batch-size-to-tensorboard": _not_needed("the batch size is always written"),
    "log-optimizer-states-to-tensorboard": _not_needed("it only watches; norms are logged by --log-params-norm"),
}
"""Flags that say in other words what a setting here says, or nothing that matters."""


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
