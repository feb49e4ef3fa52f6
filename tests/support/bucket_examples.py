"""Models, buckets and made-up gradients for the tests of buckets."""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.data_parallel.buckets import BucketedParams
from megatron.model.build import Model, build_model, fill
from megatron.parallel.accumulate import GradSink, get_grad_sink
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry
from megatron.parallel.random import compute_stable_seed

VOCAB = 61
MODEL = ModelConfig(num_layers=4, hidden_size=16, num_attention_heads=4, seq_length=8, make_vocab_size_divisible_by=1)
UNTIED = replace(MODEL, untie_embeddings_and_output_weights=True)
WORD = "embedding.word.weight"


def build(
    context: ParallelContext,
    config: ModelConfig = MODEL,
    dtype: torch.dtype = torch.float32,
    *,
    sequence_parallel: bool = False,
    materialized: bool = True,
) -> Model:
    return build_model(
        config, context, dtype=dtype, vocab_size=VOCAB, sequence_parallel=sequence_parallel, seed=1, should_materialize=materialized
    )


def buckets_of(
    model: Model, context: ParallelContext, size: int | None = 1000, *, sharding: str = "no_shard", **settings: Any
) -> BucketedParams:
    """The model's parameters in buckets; `settings` are those of ParallelConfig."""
    config = ParallelConfig(ddp_bucket_size=size, **settings)
    units = [unit for chunk in model.chunks.values() for unit in chunk.get_units()]
    values = partial(fill, seed=model.seed)
    return BucketedParams(list(model.params), units, context, config, values, sharding=sharding)


def sink(entry: ParamEntry) -> GradSink:
    found = get_grad_sink(entry.param)
    assert found is not None
    return found


def gradient(entry: ParamEntry, *key: int) -> torch.Tensor:
    """Made-up numbers for a parameter and a purpose."""
    return _drawn(entry.record.name, tuple(entry.param.shape), *key).clone()


@functools.lru_cache(maxsize=4096)
def _drawn(name: str, shape: tuple[int, ...], *key: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(compute_stable_seed(name, *key)))


def write_all(model: Model, *key: int, skip: str = "") -> None:
    """One microbatch's gradients."""
    for entry in reversed(list(model.params)):
        for use in range(entry.uses_per_microbatch):
            if entry.record.name != skip:
                sink(entry).add(gradient(entry, use, *key))


def own_gradients(buckets: BucketedParams) -> dict[str, torch.Tensor]:
    """This rank's part of every gradient, flat, with where it begins in the parameter: by "name@start"."""
    return {
        f"{shard.record.name}@{shard.flat_range.start}": shard.grad.clone() for group in buckets.groups for shard in group.shards
    }
