"""Finds the settings with which a difference comes and goes: it runs parts of the layout, as far as the time allows."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config.checks.finding import change
from megatron.config.config import Config
from megatron.config.rules import violations
from megatron_lab.proofs.small_layout import NO_SPLIT, sizes_of
from megatron_lab.verification.diagnosis import diagnose
from megatron_lab.verification.local_ranks import RanksError
from megatron_lab.verification.observation import Observation

Prove = Callable[..., Observation]
"""Observes a run of settings with a number of ranks; with `dropout=False` the model's probabilities of dropout are 0."""

_ONE_TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 1, "sequence_parallel": False, "tp_comm_overlap": False}
_ONE_CONTEXT: dict[str, Any] = {"context_parallel_size": 1, "cp_comm_type": ()}
_ONE_STAGE: dict[str, Any] = {**NO_SPLIT, "pipeline_model_parallel_size": 1, "pipeline_schedule": None}
_UNSHARDED: dict[str, Any] = {
    "data_parallel_sharding_strategy": "no_shard",
    "use_distributed_optimizer": False,
    "fsdp_shard_size": None,
    "fsdp_reshard_after_forward": "always",
    "fsdp_reduce_once": False,
    "fsdp_params_cpu": False,
    "overlap_param_gather": False,
}
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "--cp-comm-type (all layers gather)": {"cp_comm_type": ("all_gather",)},
    "--sequence-parallel": {"sequence_parallel": False, "tp_comm_overlap": False},
    "--tp-comm-overlap": {"tp_comm_overlap": False},
    "--overlap-grad-reduce": {"overlap_grad_reduce": False},
    "--overlap-param-gather": {"overlap_param_gather": False},
    "--overlap-p2p-communication": {"overlap_p2p_communication": False},
    "--data-parallel-sharding-strategy {parallel.sharding}": _UNSHARDED,
    "--fsdp-reduce-once": {"fsdp_reduce_once": False},
    "--fsdp-params-cpu": {"fsdp_params_cpu": False},
    "--use-tp-pp-dp-mapping": {"use_tp_pp_dp_mapping": False},
    "--rampup-batch-size": {"rampup_batch_size": None},
    "--step-batch-size-schedule": {"step_batch_size_schedule": ()},
    "--reset-attention-mask, --reset-position-ids and --eod-mask-loss": {
        "reset_attention_mask": False,
        "reset_position_ids": False,
        "eod_mask_loss": False,
    },
    "--clip-grad": {"clip_grad": 0.0},
    "--fp8-format": {
        "fp8_format": None,
        "fp8_recipe": "tensorwise",
        "first_last_layers_bf16": False,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
    },
    "--optimizer-cpu-offload": {"optimizer_cpu_offload": False},
    "the tied embedding (--untie-embeddings-and-output-weights)": {"untie_embeddings_and_output_weights": True},
}
"""What can be left out by itself, in words, and the settings without it."""


@dataclass(frozen=True)
class Variant:
    """Settings to run in place of those that differ."""

    words: str
    """What is kept, or left out, in words."""
    config: Config
    world_size: int
    dropout: bool = True


def isolate(config: Config, world_size: int, prove: Prove, *, seconds: float) -> list[str]:
    """A line for each run with less of the layout: whether the difference is still there. The most informative runs come first.

    Args:
        config: settings that differ from one process, or fail.
        seconds: no further run is begun after this time.
    """
    started = time.monotonic()
    bad, good = "stays without", "goes away without"
    alone, waiting = one_process(config, world_size), [*axes_alone(config, world_size)]
    num_axes = len(waiting)
    found: list[tuple[int, str]] = []
    if alone is not None and (differs := _outcome(alone, prove)):
        text = f"it comes in one process too ({differs}): it is the model's code or the training step, not the layout"
        found.append((0, text))
        config, world_size, num_axes, waiting = alone.config, 1, 0, []
        bad, good = "stays there without", "goes away there without"
    for number, variant in enumerate([*waiting, *without_each(config, world_size)]):
        if time.monotonic() - started > seconds:
            found.append((5, f"no time was left to try it with and without the rest ({seconds:g} s)"))
            break
        differs = _outcome(variant, prove)
        told = f" {variant.words}" + (f" ({differs})" if differs else "")
        if number < num_axes:
            found.append((1, "comes with" + told) if differs else (3, "does not come with" + told))
        else:
            found.append((4, bad + told) if differs else (2, good + told))
    return [line for _, line in sorted(found, key=lambda each: each[0])]


def one_process(config: Config, world_size: int) -> Variant | None:
    """The settings in one process. If these differ too, the layout is not the cause. None if they are so already, or cannot be."""
    return _variant("one rank", config, world_size, _ONE_TENSOR | _ONE_CONTEXT | _ONE_STAGE | _UNSHARDED, 1)


def axes_alone(config: Config, world_size: int) -> Iterator[Variant]:
    """Each axis by itself, if there are several."""
    sizes = sizes_of(config, world_size)
    one = {"tensor": _ONE_TENSOR, "context": _ONE_CONTEXT, "pipeline": _ONE_STAGE, "data": _UNSHARDED}
    axes = []
    for axis, size, flag in (
        ("tensor", sizes.tp, "--tensor-model-parallel-size"),
        ("context", sizes.cp, "--context-parallel-size"),
        ("pipeline", sizes.pp, "--pipeline-model-parallel-size"),
        ("data", sizes.dp, "data size"),
    ):
        others = [other for other in one if other != axis and (other != "context" or sizes.cp > 1)]
        words = f"{flag} {size} alone ({', '.join(others[:-1])} and {others[-1]} size 1)" if len(others) > 2 else ""
        words = words or f"{flag} {size} alone ({' and '.join(others)} size 1)"
        axes.append((size, words, functools.reduce(operator.or_, (one[other] for other in one if other != axis))))
    several = [axis for axis in axes if axis[0] > 1]
    for size, words, fields in several if len(several) > 1 else ():
        if (variant := _variant(words, config, world_size, fields, size)) is not None:
            yield variant


def without_each(config: Config, world_size: int) -> Iterator[Variant]:
    """The whole layout with one thing left out at a time."""
    parallel = config.parallel
    yield Variant("dropout", config, world_size, dropout=False)
    same_size = {"pipeline_model_parallel_size": parallel.pipeline_model_parallel_size}
    left_out = {
        **_LEFT_OUT,
        "accumulation (one microbatch a data rank)": {"global_batch_size": _one_microbatch(config, world_size)},
        f"--pipeline-schedule {parallel.schedule} and everything about the split": _ONE_STAGE | same_size,
    }
    for words, fields in left_out.items():
        if (variant := _variant(words.format(parallel=parallel), config, world_size, fields, world_size)) is not None:
            yield variant


def _outcome(variant: Variant, prove: Prove) -> str:
    """The result of a run in a few words; empty if all is equal."""
    try:
        found = diagnose(prove(variant.config, variant.world_size, dropout=variant.dropout))
    except RanksError:
        return "the run fails"
    return "" if found.equal else f"{found.findings[0].kind} of {found.findings[0].place}"


def _one_microbatch(config: Config, world_size: int) -> int:
    return config.training.micro_batch_size * sizes_of(config, world_size).dp


def _variant(words: str, config: Config, world_size: int, fields: dict[str, Any], ranks: int) -> Variant | None:
    """The settings with other values. None if they have these already, or are not valid then.

    The global batch is given as a number, so that it stays when the data size changes.
    """
    batch = config.training.final_batch_size(sizes_of(config, world_size).dp)
    fixed, less = (
        change(**{"global_batch_size": batch, **more}).apply(config, world_size)[0] for more in (dict[str, Any](), fields)
    )
    return None if less == fixed or violations(less, ranks) else Variant(words, less, ranks)
