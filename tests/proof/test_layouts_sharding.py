"""The proof for what sharding over the data ranks may meet: ties, ranks without a shard, three ranks, replicas, steps that differ.

In float64 every strategy trains as one plain process does. `test_layouts.py` takes each through all layouts; here are
the cases that chance would leave out.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from megatron_lab.verification.reference.shape import ReferenceShape, build_random_weights
from tests.support.covering import full_but
from tests.support.equality import assert_equal_runs, number_differences
from tests.support.layout import Layout, Recipe, run_layout
from tests.support.reference_runs import ReferenceRun, gpt2_like, llama_like, mean_loss, random_batches, train

SHARDED = ("optim", "optim_grads", "optim_grads_params")
STRATEGIES = ("no_shard", *SHARDED)


normally = functools.partial(
    full_but, instead="the other cases of the test, and test_layouts.py::test_layout_equals_one_plain_process"
)

SMALL: dict[str, Any] = dict(hidden=16, ffn=24, heads=4, kv_heads=4, head_size=4, vocab=61, seq=8)


@functools.cache
def recipe(shape: ReferenceShape, *sizes: int) -> Recipe:
    """One step for each size of a global batch; microbatches are of one sequence and differ much in their masks."""
    batches = [random_batches(shape, 1, size, 1, seed=step)[0] for step, size in enumerate(sizes)]
    return Recipe(shape, build_random_weights(shape, seed=1), batches)


@functools.cache
def reference(shape: ReferenceShape, *sizes: int) -> ReferenceRun:
    r = recipe(shape, *sizes)
    return train(r.shape, r.weights, r.batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip)


def check(layout: Layout, shape: ReferenceShape, *sizes: int) -> list[int]:
    """Returns the number of shards of each rank."""
    found = run_layout(recipe(shape, *sizes), layout)
    assert_equal_runs(found, reference(shape, *sizes))
    return found.num_shards


def layout(sharding: str, **settings: Any) -> Layout:
    """Buckets so small that slices cut across parameters; everything overlapped."""
    gathers = sharding in ("optim", "optim_grads")
    basis = Layout(sharding=sharding, overlap_param_gather=gathers, micro_batch_size=1, bucket_size=1500)  # type: ignore[arg-type]
    return replace(basis, **settings)


ENDS: dict[str, dict[str, Any]] = {
    "one-stage": {"dp": 2},
    "two-stages": {"pp": 2, "dp": 2},
    "apart": {"pp": 3, "dp": 2},
    "interleaved": {"pp": 2, "dp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "late": {"pp": 2, "dp": 2, "schedule": "zb-h1"},
    "one-rank-has-both": {"pp": 2, "dp": 2, "schedule": "zb-v", "virtual_stages": 2},
    "tensor": {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True},
}


def may_be(schedule: str, sharding: str) -> bool:
    """Whether it is not refused with the settings."""
    return not (sharding == "optim_grads_params" and schedule.startswith("zb"))


TIED = [(e, s) for e in ENDS for s in SHARDED if may_be(ENDS[e].get("schedule", "1f1b"), s)]


FEW = [
    ("one-stage", "optim_grads_params"),
    ("two-stages", "optim"),
    ("apart", "optim_grads"),
    ("interleaved", "optim_grads_params"),
    ("late", "optim_grads"),
    ("one-rank-has-both", "optim"),
    ("tensor", "optim_grads_params"),
]


@pytest.mark.parametrize(("ends", "sharding"), full_but(FEW, TIED, "each place and each strategy at another pair of them"))
def test_a_tied_embedding(ends: str, sharding: str) -> None:
    """Its gradient has two parts: on two stages, or from two uses on one rank. Summed over the data ranks, and over the stages."""
    settings = ENDS[ends]
    chunks = settings.get("pp", 1) * settings.get("virtual_stages", 1)
    check(layout(sharding, **settings), gpt2_like(num_layers=chunks, tied=True, **SMALL), 6, 2)


@pytest.mark.parametrize(
    ("style", "sharding"),
    normally(
        [("gpt2", "optim_grads"), ("llama", "optim_grads_params")],
        [*(("gpt2", sharding) for sharding in STRATEGIES), ("llama", "optim_grads_params")],
    ),
)
def test_three_data_ranks(style: str, sharding: str) -> None:
    """Where the order of a sum matters, and slices cut parameters in the middle of a row."""
    like = gpt2_like if style == "gpt2" else llama_like
    shape = like(num_layers=1, hidden=12, ffn=24, heads=3, kv_heads=3, head_size=4, vocab=61, seq=6)
    check(layout(sharding, dp=3), shape, 6, 3)


@pytest.mark.parametrize("sharding", normally(["optim"], SHARDED))
def test_ranks_without_a_shard(sharding: str) -> None:
    """Every parameter in a bucket of its own, most smaller than a slice for each rank: some ranks have little or nothing."""
    shape = gpt2_like(num_layers=1, hidden=8, ffn=8, heads=2, kv_heads=2, head_size=4, vocab=5, seq=4, tied=True)
    shards = check(layout(sharding, dp=4, bucket_size=1), shape, 4, 8)
    if sharding != "optim_grads_params":
        assert shards[0] > shards[2] > shards[3] == 0


@pytest.mark.parametrize(
    ("ranks", "shard_size", "reshard", "host"),
    normally([(6, None, "never", True)], [(6, None, "never", True), (8, None, "always", False), (8, 4, "never", True)]),
)
def test_fewer_rows_than_ranks(ranks: int, shard_size: int | None, reshard: str, host: bool) -> None:
    """Of some parameters the last ranks hold nothing but padding, of vectors of 4 elements and of a table of 3 rows too."""
    shape = gpt2_like(num_layers=1, hidden=4, ffn=6, heads=2, kv_heads=2, head_size=2, vocab=3, seq=3, tied=False)
    settings = layout("optim_grads_params", dp=ranks, fsdp_shard_size=shard_size, fsdp_reshard=reshard, params_cpu=host)
    check(settings, shape, ranks, 2 * ranks)


@pytest.mark.parametrize("sharding", normally(["optim_grads", "optim_grads_params"], SHARDED))
def test_one_data_rank(sharding: str) -> None:
    """Nobody to share with, except that what sequence parallelism leaves whole is divided over the tensor ranks."""
    check(layout(sharding, tp=2, sequence_parallel=True), gpt2_like(num_layers=1, tied=False, **SMALL), 2, 2)


@pytest.mark.parametrize(
    ("shard_size", "reshard", "microbatches"),
    normally(
        [(2, "never", 3), (1, "always", 2)],
        [(2, "always", 1), (2, "always", 3), (2, "never", 3), (1, "always", 2), (None, "never", 3)],
    ),
)
def test_replicas_of_sharded_parameters(shard_size: int | None, reshard: str, microbatches: int) -> None:
    shape = llama_like(num_layers=2, **{**SMALL, "kv_heads": 2})
    settings = layout("optim_grads_params", dp=4, fsdp_shard_size=shard_size, fsdp_reshard=reshard)
    check(settings, shape, 4 * microbatches, 4)


EACH = [*((sharding, "always") for sharding in STRATEGIES), ("optim_grads_params", "never")]
"""Every strategy and reshard policy."""


@pytest.mark.parametrize(
    ("schedule", "sharding", "reshard"),
    full_but(
        [("1f1b", *EACH[3]), ("1f1b", *EACH[2]), ("interleaved", *EACH[4]), ("zb-v", *EACH[1])],
        [
            *(("1f1b", *each) for each in EACH),
            *(("interleaved", *each) for each in EACH[3:]),
            *(("zb-v", *each) for each in EACH[:3]),
        ],
        "each strategy and each schedule at another pair of them",
    ),
)
def test_the_number_of_microbatches_changes(schedule: str, sharding: str, reshard: str) -> None:
    """Up, as in a ramp-up of the batch, and down."""
    chunks = 1 if schedule == "1f1b" else 2
    shape = gpt2_like(num_layers=2 * chunks, tied=True, **SMALL)
    settings = layout(sharding, pp=2, dp=2, schedule=schedule, virtual_stages=chunks, fsdp_reshard=reshard)
    check(settings, shape, 4, 8, 4)


@pytest.mark.parametrize(("sharding", "reshard"), normally([("optim", "always"), ("optim_grads_params", "never")], EACH))
def test_evaluation_between_steps_sees_the_new_weights(sharding: str, reshard: str) -> None:
    """And leaves nothing behind that the next step would take for its own."""
    shape = gpt2_like(num_layers=2, tied=True, **SMALL)
    sizes = (4, 4)
    batch = random_batches(shape, 1, 4, 1, seed=9)[0]
    found = run_layout(recipe(shape, *sizes), layout(sharding, pp=2, dp=2, fsdp_reshard=reshard), evaluate=batch)
    assert_equal_runs(found, reference(shape, *sizes))
    r = recipe(shape, *sizes)
    after = [
        train(shape, r.weights, r.batches[:steps], lr=r.lr, weight_decay=r.weight_decay, clip=r.clip).weights_after
        for steps in range(1, len(sizes) + 1)
    ]
    wanted = [mean_loss(shape, weights, batch).item() for weights in (r.weights, *after)]
    assert len(set(wanted)) == len(wanted)
    assert not number_differences("evaluations", found.evaluations, wanted, 1e-10)


@pytest.mark.parametrize("sharding", normally(["optim_grads", "optim_grads_params"], STRATEGIES))
def test_offloaded_state(sharding: str) -> None:
    shape = gpt2_like(num_layers=1, tied=False, **SMALL)
    check(layout(sharding, dp=2, offload=0.4), shape, 4, 2, 2)


@pytest.mark.parametrize("sharding", normally(["optim_grads"], ["optim", "optim_grads"]))
def test_many_small_buckets(sharding: str) -> None:
    """Each parameter in a bucket of its own, in a pipeline with accumulated gradients: more buckets under way than may be."""
    check(layout(sharding, pp=2, dp=2, bucket_size=1), llama_like(num_layers=2, tied=True, **SMALL), 8, 2)


@pytest.mark.parametrize("schedule", normally(["zb-v"], ["zb-h1", "zb-v"]))
@pytest.mark.parametrize("sharding", normally(["optim_grads"], ["optim", "optim_grads"]))
def test_late_weight_gradients_in_large_buckets(sharding: str, schedule: str) -> None:
    """Vectors, whose gradients come microbatches before those of matrices, have buckets of their own."""
    chunks = 2 if schedule == "zb-v" else 1
    settings = layout(sharding, pp=2, dp=2, schedule=schedule, virtual_stages=chunks, bucket_size=None)
    check(settings, gpt2_like(num_layers=2 * chunks, tied=False, **SMALL), 10, 4)
