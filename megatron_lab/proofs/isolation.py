"""Search for the settings that make a layout differ from the reference run, which is a run in one process. The layout runs with
single axes only, or without single features (optional settings such as a sharding strategy), as far as the time allows."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config.checks.finding import create_change
from megatron.config.config import Config
from megatron.config.rules import find_violations
from megatron_lab.proofs.small_layout import DEFAULT_SPLIT, get_axis_sizes
from megatron_lab.verification.diagnosis import diagnose
from megatron_lab.verification.local_ranks import RanksError
from megatron_lab.verification.observation import Observation

Prove = Callable[..., Observation]
"""Function that observes a run of settings with a number of ranks. With `dropout=False` the dropout probabilities are 0."""

_TENSOR_SIZE_1: dict[str, Any] = {"tensor_model_parallel_size": 1, "sequence_parallel": False, "tp_comm_overlap": False}
_CONTEXT_SIZE_1: dict[str, Any] = {"context_parallel_size": 1, "cp_comm_type": ()}
_PIPELINE_SIZE_1: dict[str, Any] = {**DEFAULT_SPLIT, "pipeline_model_parallel_size": 1, "pipeline_schedule": None}
_UNSHARDED: dict[str, Any] = {
    "data_parallel_sharding_strategy": "no_shard",
    "use_distributed_optimizer": False,
    "fsdp_shard_size": None,
    "fsdp_reshard_after_forward": "always",
    "fsdp_reduce_once": False,
    "fsdp_params_cpu": False,
    "overlap_param_gather": False,
}
_REMOVABLE_FEATURES: dict[str, dict[str, Any]] = {
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
        "whole_documents": False,
    },
    "--whole-documents": {"whole_documents": False},
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
"""Settings that switch a feature off, by the description of the feature."""


@dataclass(frozen=True)
class Variant:
    """Layout with fewer axes, or with a feature (optional setting) switched off. It is run to see whether it still differs from the
    reference run in one process."""

    description: str
    """Text for the report: the axis that remains in this layout (or "one rank"), or the feature that is switched off."""
    config: Config
    world_size: int
    dropout: bool = True


def isolate(config: Config, world_size: int, prove: Prove, *, max_seconds: float) -> list[str]:
    """Run the layout with fewer axes or features (optional settings). Describe for each of these runs whether it still differs from
    the reference run in one process.

    Args:
        config: settings whose run differs from the reference run, or fails.
        world_size: number of ranks of that run.
        prove: function that runs settings and records values to compare with the reference run.
        max_seconds: seconds after which no further run starts.

    Returns:
        a line of text for each run. The most informative runs come first.
    """
    started = time.monotonic()
    still_text, gone_text = "stays without", "goes away without"
    single_process, variants = build_single_process_variant(config, world_size), [*iter_single_axis_variants(config, world_size)]
    num_single_axis = len(variants)
    ranked_lines: list[tuple[int, str]] = []
    if single_process is not None and (outcome := _run_variant(single_process, prove)):
        text = f"it occurs in one process too ({outcome}): the cause is the model's code or the training step, not the layout"
        ranked_lines.append((0, text))
        config, world_size, num_single_axis, variants = single_process.config, 1, 0, []
        still_text, gone_text = "stays there without", "goes away there without"
    for index, variant in enumerate([*variants, *iter_reduced_variants(config, world_size)]):
        if time.monotonic() - started > max_seconds:
            ranked_lines.append((5, f"no time was left to try the remaining axes and settings ({max_seconds:g} s)"))
            break
        outcome = _run_variant(variant, prove)
        result = f" {variant.description}" + (f" ({outcome})" if outcome else "")
        if index < num_single_axis:
            ranked_lines.append((1, "comes with" + result) if outcome else (3, "does not come with" + result))
        else:
            ranked_lines.append((4, still_text + result) if outcome else (2, gone_text + result))
    return [line for _, line in sorted(ranked_lines, key=lambda ranked_line: ranked_line[0])]


def build_single_process_variant(config: Config, world_size: int) -> Variant | None:
    """Build the settings of the same training in one process. If this run differs from the reference run too, the layout is not the
    cause.

    Returns:
        the changed settings, or None if the settings are those of one process already or are not valid in one process.
    """
    return _build_variant("one rank", config, world_size, _TENSOR_SIZE_1 | _CONTEXT_SIZE_1 | _PIPELINE_SIZE_1 | _UNSHARDED, 1)


def iter_single_axis_variants(config: Config, world_size: int) -> Iterator[Variant]:
    """Yield, for each axis (such as tensor) with a size above 1, changed settings in which all other axes have size 1.

    Yields nothing if only one axis has a size above 1.
    """
    sizes = get_axis_sizes(config, world_size)
    fields_of_size_1 = {"tensor": _TENSOR_SIZE_1, "context": _CONTEXT_SIZE_1, "pipeline": _PIPELINE_SIZE_1, "data": _UNSHARDED}
    candidates = []
    for axis, size, flag in (
        ("tensor", sizes.tp, "--tensor-model-parallel-size"),
        ("context", sizes.cp, "--context-parallel-size"),
        ("pipeline", sizes.pp, "--pipeline-model-parallel-size"),
        ("data", sizes.dp, "data size"),
    ):
        other_axes = [
            other_axis for other_axis in fields_of_size_1 if other_axis != axis and (other_axis != "context" or sizes.cp > 1)
        ]
        description = (
            f"{flag} {size} alone ({', '.join(other_axes[:-1])} and {other_axes[-1]} size 1)" if len(other_axes) > 2 else ""
        )
        description = description or f"{flag} {size} alone ({' and '.join(other_axes)} size 1)"
        candidates.append(
            (
                size,
                description,
                functools.reduce(
                    operator.or_, (fields_of_size_1[other_axis] for other_axis in fields_of_size_1 if other_axis != axis)
                ),
            )
        )
    parallel_axes = [axis for axis in candidates if axis[0] > 1]
    for size, description, fields in parallel_axes if len(parallel_axes) > 1 else ():
        if (variant := _build_variant(description, config, world_size, fields, size)) is not None:
            yield variant


def iter_reduced_variants(config: Config, world_size: int) -> Iterator[Variant]:
    """Yield changed settings with the same number of ranks, each without one feature (optional setting such as
    --sequence-parallel)."""
    parallel = config.parallel
    yield Variant("dropout", config, world_size, dropout=False)
    same_size = {"pipeline_model_parallel_size": parallel.pipeline_model_parallel_size}
    removable_features = {
        **_REMOVABLE_FEATURES,
        "gradient accumulation (one microbatch per data rank)": {
            "global_batch_size": _get_single_microbatch_size(config, world_size)
        },
        f"--pipeline-schedule {parallel.schedule} and all settings of the split into stages": _PIPELINE_SIZE_1 | same_size,
    }
    for description, fields in removable_features.items():
        if (variant := _build_variant(description.format(parallel=parallel), config, world_size, fields, world_size)) is not None:
            yield variant


def _run_variant(variant: Variant, prove: Prove) -> str:
    """Run the layout with fewer axes or features, and return a text about the first difference from the reference run. The text is
    empty if the runs are equal."""
    try:
        diagnosis = diagnose(prove(variant.config, variant.world_size, dropout=variant.dropout))
    except RanksError:
        return "the run fails"
    return "" if diagnosis.equal else f"{diagnosis.findings[0].kind} of {diagnosis.findings[0].place}"


def _get_single_microbatch_size(config: Config, world_size: int) -> int:
    return config.training.micro_batch_size * get_axis_sizes(config, world_size).dp


def _build_variant(description: str, config: Config, world_size: int, fields: dict[str, Any], num_ranks: int) -> Variant | None:
    """Build changed settings: the user's settings with other values of some fields.

    The global batch size is set explicitly, so that it does not change with the number of data ranks.

    Args:
        description: text that names the change in the report.
        world_size: number of ranks of the user's settings.
        fields: new values, by field name of the settings.
        num_ranks: number of ranks of the changed settings.

    Returns:
        the changed settings, or None if the settings have these values already or are not valid with them.
    """
    batch = config.training.get_final_batch_size(get_axis_sizes(config, world_size).dp)
    baseline, reduced = (
        create_change(**{"global_batch_size": batch, **changes}).apply(config, world_size)[0]
        for changes in (dict[str, Any](), fields)
    )
    return None if reduced == baseline or find_violations(reduced, num_ranks) else Variant(description, reduced, num_ranks)
