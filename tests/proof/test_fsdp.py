"""Training with fully sharded parameters equals one plain process, where it is done in ways that the layout tests do not vary."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch._dynamo  # noqa: F401  FSDP's hooks import it at their first call: here once, not in every rank

from megatron.config.memory import MemoryConfig
from megatron_lab.verification.reference.shape import ReferenceShape, build_random_weights
from tests.support.equality import assert_equal_runs
from tests.support.layout import Layout, LayoutRun, Recipe, run_layout
from tests.support.reference_runs import ReferenceRun, gpt2_like, llama_like, random_batches, train

STEPS, MICROBATCHES = 2, 2
SHAPES: dict[str, ReferenceShape] = {
    "gpt2": gpt2_like(hidden=16, ffn=24, heads=4, kv_heads=4, head_size=4, seq=8, tied=False),
    "tied": gpt2_like(hidden=16, ffn=24, heads=4, kv_heads=4, head_size=4, seq=8),
    "llama": llama_like(hidden=16, ffn=24, heads=4, kv_heads=2, head_size=4, seq=8, qk_norm=True),
    "odd llama": llama_like(num_layers=2, hidden=16, ffn=26, heads=4, kv_heads=2, head_size=4, seq=8, vocab=61),
    "depths": llama_like(hidden=16, ffn=24, heads=4, kv_heads=2, head_size=4, seq=8, mtp_depths=2, mtp_factor=0.5),
    "llama of 4": llama_like(num_layers=4, hidden=16, ffn=24, heads=4, kv_heads=2, head_size=4, seq=8),
}


@functools.cache
def recipe(name: str, batch: int) -> Recipe:
    shape = SHAPES[name]
    return Recipe(shape, build_random_weights(shape, seed=1), random_batches(shape, STEPS, batch, 1, seed=2))


@functools.cache
def reference(name: str, batch: int) -> ReferenceRun:
    r = recipe(name, batch)
    return train(r.shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)


def run(name: str, layout: Layout) -> tuple[LayoutRun, ReferenceRun]:
    """Also evaluates, on the last step's batch: forwards without gradients between the steps must leave nothing stale."""
    batch = MICROBATCHES * layout.dp
    return run_layout(recipe(name, batch), layout, evaluate=recipe(name, batch).batches[-1]), reference(name, batch)


LAYOUTS = {
    "depths-never-hybrid": ("depths", Layout(dp=4, fsdp_shard_size=2, fsdp_reshard="never")),
    "depths-reduced-once-pipeline": ("depths", Layout(dp=3, pp=2, reduce_once=True)),
    "depths-reduced-once-recomputed": ("depths", Layout(dp=2, reduce_once=True, memory=MemoryConfig("full"))),
    "depths-host-tensor": ("depths", Layout(tp=2, dp=2, sequence_parallel=True, params_cpu=True)),
    "never": ("gpt2", Layout(dp=2, fsdp_reshard="never")),
    "never-tied-pipeline": ("tied", Layout(dp=2, pp=2, fsdp_reshard="never")),
    "never-interleaved": ("llama of 4", Layout(dp=2, pp=2, schedule="interleaved", virtual_stages=2, fsdp_reshard="never")),
    "reduced-once-never-hybrid": ("odd llama", Layout(dp=4, fsdp_shard_size=2, fsdp_reshard="never", reduce_once=True)),
    "reduced-once-interleaved": ("llama of 4", Layout(dp=2, pp=2, schedule="interleaved", virtual_stages=2, reduce_once=True)),
    "reduced-once-tied": ("tied", Layout(tp=2, dp=2, pp=2, sequence_parallel=True, reduce_once=True, fsdp_reshard="never")),
    "host-never-hybrid": ("odd llama", Layout(dp=4, fsdp_shard_size=2, fsdp_reshard="never", params_cpu=True)),
    "host-pipeline-tied": ("tied", Layout(tp=2, dp=2, pp=2, params_cpu=True, reduce_once=True, offload=0.5)),
    "host-uneven": ("odd llama", Layout(dp=3, params_cpu=True, reduce_once=True, offload=1.0)),
    "uneven": ("gpt2", Layout(dp=3)),
    "uneven-gated": ("odd llama", Layout(dp=3, fsdp_reshard="never")),
    "uneven-gated-hybrid": ("odd llama", Layout(dp=6, fsdp_shard_size=3)),
    "uneven-gated-tensor": ("odd llama", Layout(tp=2, dp=3, sequence_parallel=True)),
    "hybrid": ("llama", Layout(dp=4, fsdp_shard_size=2)),
    "hybrid-never": ("tied", Layout(dp=4, fsdp_shard_size=2, fsdp_reshard="never")),
    "hybrid-tensor": ("llama", Layout(tp=2, dp=4, sequence_parallel=True, fsdp_shard_size=2)),
    "hybrid-pipeline": ("gpt2", Layout(pp=2, dp=4, fsdp_shard_size=2, pp_before_dp=True)),
    "replicas-alone": ("gpt2", Layout(dp=2, fsdp_shard_size=1)),
    "alone": ("gpt2", Layout(tp=2, dp=1)),
    "offloaded": ("gpt2", Layout(dp=2, offload=1.0)),
}
"""16 rows of a parameter do not divide by 3, nor 61 of the vocabulary by 2, nor twice 26 of the odd llama's MLP by 3."""

NORMAL = ("uneven-gated-hybrid", "reduced-once-tied", "reduced-once-never-hybrid", "host-uneven", "alone")
"""Cases of a run without --full. The layout tests have each pair of settings of the others."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("--full")
    metafunc.parametrize("case", [case for case in LAYOUTS if full or case in NORMAL])


def test_training_equals_one_plain_process(case: str) -> None:
    name, layout = LAYOUTS[case]
    found, expected = run(name, replace(layout, sharding="optim_grads_params", micro_batch_size=1, bucket_size=500))
    assert_equal_runs(found, expected)
    assert found.evaluations[-2] == pytest.approx(expected.losses[-1], rel=1e-10), "evaluated in front of the last step"
