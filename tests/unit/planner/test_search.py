"""The search proposes what exact predictions of all layouts would, within its limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config.cli import load
from megatron.config.errors import ConfigError
from megatron.config.parsed_flags import DryRun
from megatron.config.rules import find_violations
from megatron_lab.planner.cluster import load_cluster
from megatron_lab.planner.search import LayoutSearch, Limits, explain_difference

VOCAB = 32_000
WORDS = (
    "--model llama2-7b --seq-length 1024 --bf16 --device cuda --mock-data --tokenizer-type NullTokenizer "
    f"--vocab-size {VOCAB} --lr 1e-4 --train-iters 2 --micro-batch-size 1 --global-batch-size 32"
).split()
CLUSTER = load_cluster("h100")


def search(limits: Limits, memory_gb: float = 80.0, layers: int = 4) -> LayoutSearch:
    words = [*WORDS, "--num-layers", str(layers)]
    return LayoutSearch(load(words, 8).config, DryRun(8, 8, None), VOCAB, replace(CLUSTER, memory_gb=memory_gb), limits)


def test_the_best_is_the_best_of_all() -> None:
    one = search(Limits(fixed_sizes={"micro": 2, "pipeline": 2}, max_sizes={"tensor": 2}))
    everything = [
        found for each in one.iter_candidates() if (found := one.predict(each)) is not None and found.fits_memory(CLUSTER)
    ]
    best = min(everything, key=lambda found: found.time.seconds)
    outcome = one.run(num_layouts=4)
    assert outcome.layouts[0].time.seconds <= 1.02 * best.time.seconds
    assert outcome.num_planned < len(everything) and outcome.num_estimated >= len(everything)
    assert [found.time.seconds for found in outcome.layouts] == sorted(found.time.seconds for found in outcome.layouts)
    for found in outcome.layouts:
        assert not find_violations(found.config, 8) and found.fits_memory(CLUSTER)
        assert found.config.parallel.tensor_model_parallel_size <= 2 and found.config.training.micro_batch_size == 2
    slow = max(outcome.layouts, key=lambda found: found.time.seconds)
    assert explain_difference(outcome.layouts[0], slow).startswith("takes +")


def test_what_was_given_of_a_layout_does_not_bind_the_search() -> None:
    given = "--use-distributed-optimizer --recompute-granularity full --recompute-method block --recompute-num-layers 2"
    limits = Limits(max_sizes={"tensor": 1, "pipeline": 2, "micro": 1})
    bound = LayoutSearch(load([*WORDS, "--num-layers", "4", *given.split()], 8).config, DryRun(8, 8, None), VOCAB, CLUSTER, limits)
    assert list(bound.iter_candidates()) == list(search(limits).iter_candidates())


def test_a_cluster_without_the_dtype_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match="peak"):
        LayoutSearch(load(WORDS, 8).config, DryRun(8, 8, None), VOCAB, replace(CLUSTER, device="none", peak_tflops={}))


def test_where_nothing_fits_the_closest_is_told() -> None:
    outcome = search(Limits(fixed_sizes={"tensor": 1, "pipeline": 1, "micro": 4}), memory_gb=4.0).run(num_layouts=2)
    assert not outcome.layouts and outcome.smallest_layout is not None
    assert outcome.smallest_layout.time.device_bytes > 4e9


def test_what_has_too_little_memory_moves_to_the_host_or_into_pieces() -> None:
    """On a device that nothing else fits."""
    one = search(Limits(fixed_sizes={"tensor": 1, "pipeline": 1, "micro": 4}), memory_gb=8.0, layers=8)
    found = one.run(num_layouts=3).layouts
    assert found and all(each.config.optimizer.optimizer_cpu_offload or each.config.memory.has_offload for each in found)
    assert any(each.time.breakdown["moves to the host"] > 0 or each.time.breakdown["optimizer"] > 0.05 for each in found)
    easy = search(one._limits, layers=8).run(num_layouts=3).layouts
    assert easy and not any(each.config.optimizer.optimizer_cpu_offload for each in easy)


def test_no_layout_at_all() -> None:
    outcome = search(Limits(fixed_sizes={"tensor": 3})).run()
    assert outcome.num_estimated == 0 and not outcome.layouts and outcome.smallest_layout is None
