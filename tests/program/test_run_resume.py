"""N steps equal k steps, a resume, and N - k steps: bit for bit at the same layout, in float64 at another one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.equality import assert_equal_tensors, number_differences
from tests.support.runs import (
    arguments,
    at_iteration,
    checkpoint,
    digest,
    losses,
    run,
    saved_state,
    saved_tensors,
    spoil,
    timeless,
)

STEPS, STOP = 6, 4

EVERYTHING = {
    "train_iters": STEPS,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "rampup_batch_size": (4, 2, 20),
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 2,
    "min_lr": 1e-3,
    "weight_decay_incr_style": "linear",
    "start_weight_decay": 0.0,
    "end_weight_decay": 0.1,
    "eval_iters": 1,
    "eval_interval": 2,
    "num_workers": 2,
}
"""A run in which everything changes from step to step that may."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "float64": {"fp64": True},
    "float32": {},
    "bfloat16": {"bf16": True},
    "bfloat16, 8 bits": {"bf16": True, "fp8_format": "hybrid"},
    # The first steps overflow. At the stop one more step without overflow lets the scale grow.
    "float16, growing": {"fp16": True, "loss_scale_window": 3, "hysteresis": 2},
    # Two overflows are made, one on either side of the stop. The scale shrinks at the second only if the first is remembered.
    "float16, shrinking": {"fp16": True, "initial_loss_scale": 2**14, "hysteresis": 2},
}
SCALER_AT_STOP = {
    "float16, growing": {"clean_steps": 2, "hysteresis_left": 0},
    "float16, shrinking": {"clean_steps": 2, "hysteresis_left": 1},
}
# For batches as large as in one process. Partial sums of two tensor ranks overflow earlier than the whole.
GROWING_SCALE = {1: 2**21, 2: 2**21, 4: 2**19}
OVERFLOWS = (2, STOP + 1)

WHOLE = {"global_batch_size": 8, "rampup_batch_size": EVERYTHING["rampup_batch_size"]}
HALF = {"global_batch_size": 4, "rampup_batch_size": (2, 2, 10)}
"""Half of the samples, for layouts at which one data rank computes them all."""

LAYOUTS: dict[int, dict[str, Any]] = {
    1: {},
    2: {  # a way for each layer; of the made-up tokens every tenth ends a document
        **HALF,
        "num_layers": 3,
        "context_parallel_size": 2,
        "cp_comm_type": ("p2p", "all_gather", "a2a"),
        "reset_attention_mask": True,
    },
    4: {**HALF, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
}


QUICK = [(1, "bfloat16, 8 bits"), (1, "float16, growing"), (4, "float16, shrinking")]
"""Every state that a run has beside weights and moments, and once tensor ranks and stages. What any number of ranks save of weights
and moments of any precision: tests/proof/test_checkpoint_layouts.py, test_sharding_resume.py and test_checkpoint_optimizers.py."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "precision" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        cases = [(ranks, name) for ranks in LAYOUTS for name in PRECISIONS if full or (ranks, name) in QUICK]
        metafunc.parametrize(("world_size", "precision"), cases)


def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path, world_size: int, precision: str) -> None:
    """Weights, moments, scaler and counts by the checkpoint's digest; losses, norms, rates and evaluations by the metrics file.

    Two context ranks are resumed over gloo.
    """
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    settings = {**EVERYTHING, **PRECISIONS[precision], **LAYOUTS[world_size]}
    if precision == "float16, growing":
        settings |= {"initial_loss_scale": GROWING_SCALE[world_size], **WHOLE}

    def before(rank: int) -> None:
        if precision == "float16, shrinking" and rank == world_size - 1:
            for iteration in OVERFLOWS:
                at_iteration(iteration, spoil(math.inf))

    run(arguments(**settings, save=whole, save_interval=STOP, metrics_file=tmp_path / "whole.jsonl"), world_size, before=before)
    settings |= {"load": whole, "ckpt_step": STOP, "save": resumed, "metrics_file": tmp_path / "resumed.jsonl"}
    said = run(arguments(**settings), world_size, before=before, gloo=world_size == 2)

    assert f"resuming from {checkpoint(whole, STOP)} at iteration {STOP}" in said
    assert timeless(tmp_path / "resumed.jsonl") == [line for line in timeless(tmp_path / "whole.jsonl") if line["iteration"] > STOP]
    assert digest(resumed, STEPS) == digest(whole, STEPS) != digest(whole, STOP)
    state = saved_state(whole, STOP)
    skipped = state["progress"]["skipped_iterations"]
    assert state["optimizer_updates"] == STOP - skipped
    assert (skipped > 0) == (state["progress"]["updated_samples"] < state["progress"]["consumed_samples"])
    assert (skipped > 0) == (precision in SCALER_AT_STOP)
    assert state["scaler"].items() >= SCALER_AT_STOP.get(precision, {}).items()


def test_a_run_goes_on_with_8_bits_and_without(tmp_path: Path) -> None:
    """A checkpoint has nothing of them. The log says what differs."""
    settings = {"bf16": True, "lr_decay_style": "constant", "save": tmp_path, "load": tmp_path}
    for steps, eight in enumerate(({"fp8_format": "e4m3"}, {}, {"fp8_format": "hybrid", "fp8_recipe": "rowwise"}), start=1):
        said = run(arguments(**settings, train_iters=steps, **eight))
        assert ("in 8 bits in" in said) == bool(eight)
        assert ("differs from the checkpoint: --fp8-format" in said) == (steps > 1)


@pytest.mark.full("test_kept_state.py::test_a_lost_node_is_no_loss_with_a_copy, proof/test_checkpoint_layouts.py")
@pytest.mark.parametrize(
    ("eight", "then"), [({}, {}), ({"fp8_format": "hybrid"}, {"context_parallel_size": 2})], ids=["", "8 bits"]
)
def test_a_run_goes_on_at_another_layout(tmp_path: Path, eight: dict[str, Any], then: dict[str, Any]) -> None:
    """In float64: begun at TP 2, continued at PP 2 x DP 2 or PP 2 x CP 2, it ends as the run of one process does."""
    settings = {"fp64": True, "train_iters": STEPS, "global_batch_size": 4, "lr_decay_style": "cosine", **eight}
    run(arguments(**settings, save=tmp_path / "one", metrics_file=tmp_path / "one.jsonl"))
    run(
        arguments(
            **settings,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            save=tmp_path / "moved",
            exit_interval=STOP,
            metrics_file=tmp_path / "moved.jsonl",
        ),
        2,
    )
    run(
        arguments(
            **settings,
            pipeline_model_parallel_size=2,
            **then,
            load=tmp_path / "moved",
            save=tmp_path / "moved",
            metrics_file=tmp_path / "moved.jsonl",
        ),
        4,
    )
    found, wanted = losses(tmp_path / "moved.jsonl"), losses(tmp_path / "one.jsonl")
    assert not number_differences("losses", found, wanted, 1e-10)
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        moved, one = (saved_tensors(tmp_path / name, STEPS, kind) for name in ("moved", "one"))
        assert_equal_tensors(moved, one, what=kind)


def test_the_checkpoint_does_not_depend_on_the_models_dtype(tmp_path: Path) -> None:
    """A run in bfloat16 saves its float32 main parameters; a run in float32 goes on from exactly these."""
    run(arguments(bf16=True, train_iters=3, save=tmp_path / "bf16"))
    # Nothing is trained: the iteration is left out, and what was loaded is saved again.
    run(arguments(train_iters=4, iterations_to_skip=(4,), load=tmp_path / "bf16", save=tmp_path / "fp32", lr_decay_iters=3))
    for kind in ("model", "exp_avg"):
        before, after = saved_tensors(tmp_path / "bf16", 3, kind), saved_tensors(tmp_path / "fp32", 4, kind)
        assert_equal_tensors(after, before, tolerance=0.0, what=kind)
    weight = before["layers.0.mlp.up.weight"]
    assert not weight.equal(weight.bfloat16().float()), "the moments of float32 main parameters need more digits than bfloat16 has"
