"""The same settings with less of the layout: with which of them does a difference come and go? Settings only, nothing runs here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config.config import Config
from megatron.config.rules import violations


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
