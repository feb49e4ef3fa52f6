"""What put-off weight gradients keep: the formula against what an executor counts, to the byte."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from megatron.config.memory import MemoryConfig
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.partition import partition_layers
from megatron.pipeline_parallel.validate import compute_peak_deferred_memory
from megatron.spec.counts import count_deferred_elements_per_token
from megatron.spec.schedules import SCHEDULES, build_schedule
from megatron_lab.verification.reference.shape import ReferenceShape, build_random_weights
from tests.support.layout import Layout, Recipe, build_step, microbatches, model_config
from tests.support.reference_runs import deepseek_like, gpt2_like, llama_like, random_batches
from tests.support.warm import run_warm_ranks

SIZES = dict(num_layers=5, hidden=16, ffn=24, heads=4, kv_heads=2, head_size=4, vocab=29, seq=8)
SHAPES = {
    "gpt2": gpt2_like(**{**SIZES, "kv_heads": 4}),
    "llama": llama_like(**SIZES),
    "deepseek": deepseek_like(**{**SIZES, "kv_heads": 4}),
}

REMADE = MemoryConfig("selective", recompute_modules=("layernorm", "mlp_act"))


def counted_on_rank(rank: int, shape: ReferenceShape, layout: Layout) -> int:
    """Return the peak of a rank after a training step."""
    recipe = Recipe(shape, build_random_weights(shape, seed=1), random_batches(shape, 1, 10, 1, seed=2))
    context = make_context(Topology(tp=layout.tp, pp=layout.pp), rank, torch.device("cpu"))
    step = build_step(context, recipe, layout)
    step.run(microbatches(recipe.batches[0], context, 2), iteration=1, learning_rate=0.1, weight_decay=0.0)
    dist.barrier()
    return step.executor.peak_deferred_bytes


def counted(shape: ReferenceShape, layout: Layout) -> list[int]:
    """Return the peak of each stage."""
    ranks = run_warm_ranks(layout.world_size, counted_on_rank, shape, layout)
    return [ranks[stage * layout.tp] for stage in range(layout.pp)]


@pytest.mark.parametrize(
    ("name", "schedule", "tp", "sequence_parallel", "memory"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.full("the same schedules with latents below"))
            for case in (("gpt2", "zb-h1", 2, True, MemoryConfig()), ("llama", "zb-v", 2, True, REMADE))
        ),
        ("gpt2", "1f1b", 1, False, MemoryConfig()),
        ("gpt2", "zb-v", 2, False, REMADE),
        ("llama", "zb-h1", 1, False, REMADE),
        ("deepseek", "zb-h1", 2, True, MemoryConfig()),
        ("deepseek", "zb-v", 2, False, REMADE),
    ],
)
def test_the_formula_is_what_a_run_counts(name: str, schedule: str, tp: int, sequence_parallel: bool, memory: MemoryConfig) -> None:
    """Also where what is kept is the source of an input: it is never more than the input, so it does not matter."""
    shape = SHAPES[name]
    layout = Layout(
        tp=tp,
        pp=2,
        schedule=schedule,
        virtual_stages=SCHEDULES[schedule].chunks_per_stage,
        sequence_parallel=sequence_parallel,
        memory=memory,
    )
    config = model_config(shape)
    chunks = SCHEDULES[schedule].chunks_per_stage or 1
    made = build_schedule(schedule, 2, 5, chunks)
    table = partition_layers(shape.num_layers, made.stage_of_chunk)
    each = functools.partial(count_deferred_elements_per_token, config, tp=tp, sequence_parallel=sequence_parallel)
    kept = [8.0 * 2 * shape.seq * each(chunk.layers, is_last_chunk=chunk.is_last) for chunk in table]
    assert list(compute_peak_deferred_memory(made, kept)) == counted(shape, layout)
