"""With which settings a difference comes and goes: runs with less of the layout, as far as the time allows."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from megatron.config.config import Config
from megatron.config.rules import violations
from megatron.verification.diagnosis import Diagnosis, diagnose
from megatron.verification.local_ranks import RanksError
from megatron.verification.observation import Observation


class Prove(Protocol):
    """Observe a run of settings with a number of ranks."""

    def __call__(self, config: Config, world_size: int, *, dropout: bool = True) -> Observation:
        """With or without probabilities of dropout, which must not act."""


def isolate(config: Config, world_size: int, prove: Prove, *, seconds: float) -> list[str]:
    """A line for each run with less of the layout: whether the difference is still there.

    Args:
        config: settings that differ from one process, or fail.
        seconds: no further run is begun after so long.
    """
    lines, started = [], time.monotonic()
    waiting = chain(
        ((variant, "comes with {}{}", "does not come with {}") for variant in axes_alone(config, world_size)),
        ((variant, "stays without {}{}", "goes away without {}") for variant in without_each(config, world_size)),
    )
    alone = one_process(config, world_size)
    if alone is not None and (differs := _outcome(alone, prove)):
        lines.append(f"it comes in one process too ({differs}): it is the model's code or the training step, not the layout")
        left_out = without_each(alone.config, 1)
        waiting = chain((variant, "stays there without {}{}", "goes away there without {}") for variant in left_out)
    for variant, bad, good in waiting:
        if time.monotonic() - started > seconds:
            lines.append(f"no time was left to try it with and without the rest ({seconds:g} s)")
            break
        differs = _outcome(variant, prove)
        lines.append(bad.format(variant.words, f" ({differs})") if differs else good.format(variant.words))
    return lines


def _outcome(variant: Variant, prove: Prove) -> str:
    """What differs, in a few words; empty if all is equal."""
    try:
        found: Diagnosis = diagnose(prove(variant.config, variant.world_size, dropout=variant.dropout))
    except RanksError:
        return "the run fails"
    return "" if found.equal else f"{found.findings[0].kind} of {found.findings[0].place}"


def conclusions(lines: list[str]) -> Iterator[str]:
    """What tells most, first: what it comes with, what it goes away without, and then the rest."""
    order = ("it comes", "comes with", "goes away", "does not come", "stays", "no time")
    yield from sorted(lines, key=lambda line: next(place for place, words in enumerate(order) if line.startswith(words)))


@dataclass(frozen=True)
class Variant:
    """Settings to run in place of those that differ."""

    words: str
    """What is kept alone, or left out."""
    config: Config
    world_size: int
    dropout: bool = True
    """Whether the model has probabilities of dropout, which must not act."""


_ONE_STAGE: dict[str, Any] = dict(
    pipeline_model_parallel_size=1,
    pipeline_schedule=None,
    num_layers_per_virtual_pipeline_stage=None,
    num_virtual_stages_per_pipeline_rank=None,
    pipeline_split="even",
    decoder_first_pipeline_num_layers=None,
    decoder_last_pipeline_num_layers=None,
    account_for_embedding_in_pipeline_split=False,
    account_for_loss_in_pipeline_split=False,
    pipeline_model_parallel_layout=None,
)
_ONE_TENSOR: dict[str, Any] = dict(tensor_model_parallel_size=1, sequence_parallel=False)
_UNSHARDED: dict[str, Any] = dict(
    data_parallel_sharding_strategy="no_shard",
    use_distributed_optimizer=False,
    fsdp_shard_size=None,
    fsdp_reshard_after_forward="always",
    overlap_param_gather=False,
)


def one_process(config: Config, world_size: int) -> Variant | None:
    """All in one process: where this differs too, it is not the layout. None if the settings are that already, or cannot be."""
    fixed = _with_batch(config, world_size)
    return _variant("one rank", fixed, fixed, 1, **_ONE_TENSOR, **_ONE_STAGE, **_UNSHARDED)


def axes_alone(config: Config, world_size: int) -> Iterator[Variant]:
    """Each axis by itself, where there are several."""
    parallel = config.parallel
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    data = world_size // (tensor * stages)
    if (tensor > 1) + (stages > 1) + (data > 1) < 2:
        return
    fixed = _with_batch(config, world_size)
    found = []
    if tensor > 1:
        words = f"--tensor-model-parallel-size {tensor} alone (pipeline and data size 1)"
        found.append(_variant(words, fixed, fixed, tensor, **_ONE_STAGE, **_UNSHARDED))
    if stages > 1:
        words = f"--pipeline-model-parallel-size {stages} alone (tensor and data size 1)"
        found.append(_variant(words, fixed, fixed, stages, **_ONE_TENSOR, **_UNSHARDED))
    if data > 1:
        words = f"data size {data} alone (tensor and pipeline size 1)"
        found.append(_variant(words, fixed, fixed, data, **_ONE_TENSOR, **_ONE_STAGE))
    yield from (variant for variant in found if variant is not None)


def without_each(config: Config, world_size: int) -> Iterator[Variant]:
    """The layout as it is, with one thing left out at a time."""
    parallel, fixed = config.parallel, _with_batch(config, world_size)
    plain = {
        "--sequence-parallel": dict(sequence_parallel=False),
        "--overlap-grad-reduce": dict(overlap_grad_reduce=False),
        "--overlap-param-gather": dict(overlap_param_gather=False),
        "--overlap-p2p-communication": dict(overlap_p2p_communication=False),
        f"--data-parallel-sharding-strategy {parallel.sharding}": _UNSHARDED,
        "--use-tp-pp-dp-mapping": dict(use_tp_pp_dp_mapping=False),
        f"--pipeline-schedule {parallel.schedule} and everything about the split": {
            **_ONE_STAGE,
            "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        },
    }
    found: list[Variant | None] = [Variant("dropout", config, world_size, dropout=False)]
    found += [_variant(words, fixed, fixed, world_size, **changes) for words, changes in plain.items()]
    topics: dict[str, tuple[str, dict[str, Any]]] = {
        "--rampup-batch-size": ("training", dict(rampup_batch_size=None)),
        "accumulation (one microbatch a data rank)": ("training", dict(global_batch_size=_one_microbatch(config, world_size))),
        "--reset-attention-mask, --reset-position-ids and --eod-mask-loss": (
            "data",
            dict(reset_attention_mask=False, reset_position_ids=False, eod_mask_loss=False),
        ),
        "--clip-grad": ("optimizer", dict(clip_grad=0.0)),
        "--optimizer-cpu-offload": ("optimizer", dict(optimizer_cpu_offload=False)),
        "the tied embedding (--untie-embeddings-and-output-weights)": ("model", dict(untie_embeddings_and_output_weights=True)),
    }
    for words, (topic, changes) in topics.items():
        changed = dataclasses.replace(fixed, **{topic: dataclasses.replace(getattr(fixed, topic), **changes)})
        found.append(_variant(words, fixed, changed, world_size))
    yield from (variant for variant in found if variant is not None)


def _one_microbatch(config: Config, world_size: int) -> int:
    parallel = config.parallel
    data = world_size // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    return config.training.micro_batch_size * data


def _with_batch(config: Config, world_size: int) -> Config:
    """With the global batch in numbers, so that it stays when the data size changes."""
    if config.training.global_batch_size is not None:
        return config
    training = dataclasses.replace(config.training, global_batch_size=_one_microbatch(config, world_size))
    return dataclasses.replace(config, training=training)


def _variant(words: str, base: Config, config: Config, world_size: int, **parallel: Any) -> Variant | None:
    """None where that changes nothing of the settings that differ (`base`), or is not valid."""
    changed = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **parallel))
    return None if changed == base or violations(changed, world_size) else Variant(words, changed, world_size)
