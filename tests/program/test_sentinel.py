"""Whole runs that the sentinel watches: it changes nothing, and finds flips, faults that pass and faults that stay."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.parallel.accumulate import GradSink
from megatron.training.reporter import Reporter
from megatron.training.step import TrainStep
from megatron_lab.audit.digests import DigestComparer
from megatron_lab.audit.sentinel import Sentinel
from tests.support.runs import (
    Ended,
    arguments,
    complete_checkpoints,
    digest,
    launch,
    on_rank,
    read_metrics,
    report,
    run,
    timeless,
)
from tests.trials.flips import BITS, KINDS, LAYOUTS, Flip, draw_flips, flip_bit, run_flips

WATCHED: dict[str, Any] = {"sentinel_interval": 1}
EXPERTS: dict[str, Any] = {
    "num_layers": 1,
    "num_experts": 4,
    "moe_ffn_hidden_size": 16,
    "disable_bias_linear": True,
    "expert_model_parallel_size": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "global_aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_input_jitter_eps": 0.1,
    "moe_expert_capacity_factor": 1.25,
}
CLEAN: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor, optim, overlap, bf16, documents, all that is measured beside": (
        4,
        {
            "num_layers": 1,
            "reset_attention_mask": True,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "bf16": True,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "log_gradient_noise": True,
            "qk_clip": True,
            "qk_clip_threshold": 0.001,
            "check_replicas_every": 2,
        },
    ),
    "experts over some data ranks": (4, EXPERTS),
    "one copy of the experts": (2, {**EXPERTS, "iterations_to_skip": (2,)}),
    "zb-v, tied ends on one stage, optim_grads": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "micro_batch_size": 1,
            "global_batch_size": 4,
            "pipeline_schedule": "zb-v",
            "num_layers": 4,
            "num_virtual_stages_per_pipeline_rank": 2,
            "data_parallel_sharding_strategy": "optim_grads",
        },
    ),
    "fully_shard, context, documents, several predictions": (
        4,
        {
            "data_parallel_sharding_strategy": "optim_grads_params",
            "context_parallel_size": 2,
            "fsdp_shard_size": 2,
            "reset_attention_mask": True,
            "num_layers": 1,
            "micro_batch_size": 1,
            "global_batch_size": 4,
            "mtp_num_layers": 1,
        },
    ),
    "fp16, a step that overflows": (2, {"fp16": True, "initial_loss_scale": 2.0**21, "hysteresis": 1, "num_layers": 1}),
}
QUICK = (
    "tensor, optim, overlap, bf16, documents, all that is measured beside",
    "one copy of the experts",
    "fp16, a step that overflows",
)
"""What all data ranks hold, what one holds alone, and steps without an update. With other schedules and more sharding, which the
sentinel does not ask for, the run is the same with --full."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_the_sentinel_finds_nothing_and_changes_nothing:
        metafunc.parametrize("name", CLEAN if metafunc.config.getoption("--full") else QUICK)


def test_the_sentinel_finds_nothing_and_changes_nothing(tmp_path: Path, name: str) -> None:
    """Weights, moments and every logged number are those of the run without it, bit for bit. With dropout.

    One copy of the experts talks over gloo.
    """
    world_size, flags = CLEAN[name]
    alone = name == "one copy of the experts"
    makes_all_updates = not {"fp16", "iterations_to_skip"} & {*flags}
    steps = 2 if makes_all_updates else 3
    settings = {"train_iters": steps, "make_vocab_size_divisible_by": 4, "hidden_dropout": 0.1, "ddp_bucket_size": 5000, **flags}
    said = []
    for folder, watched in ((tmp_path / "off", {}), (tmp_path / "on", WATCHED)):
        argv = arguments(**settings, **watched, save=folder, metrics_file=folder / "metrics")
        said.append(run(argv, world_size, gloo=alone))
    assert digest(tmp_path / "on", steps) == digest(tmp_path / "off", steps)
    lines = timeless(tmp_path / "on" / "metrics")
    checks = [line["sentinel_differences"] for line in lines if "sentinel_differences" in line]
    assert checks == [0, 0], "each step that makes an update"
    assert [line for line in lines if "sentinel_differences" not in line] == timeless(tmp_path / "off" / "metrics")
    assert ["there is only one copy of the model" in one for one in said] == [False, alone]
    assert "WARNING" not in said[1]


# ---- flips of one bit


def test_flips_of_one_bit_are_found_and_named(full: bool) -> None:
    """Of the tables in docs/trust.md: in all that is compared, and each change of a gradient is seen."""
    if full:
        flips = {layout: draw_flips(layout, 5, seed=2) for layout in LAYOUTS}
    else:
        low = [
            Flip(kind, bit, (at + 1) % 3, at) for at, (kind, bit) in enumerate(zip(KINDS, ["mantissa low", *BITS[2:]], strict=True))
        ]
        flips = {"dp 3": [*low, Flip("gradients", "sign", 1, 7)]}
    for layout, some in flips.items():
        outcomes = run_flips(layout, some)
        assert outcomes and all(one.found for one in outcomes if not one.ended and one.flip.kind in ("gradients", "moments")), (
            outcomes
        )
        others = [one.found for one in outcomes if not one.ended]
        assert sum(others) >= 0.8 * len(others), "some activations and weights have no share in any gradient"
        assert all(one.named for one in outcomes if one.found) or "dp 2" in layout, outcomes


# ---- faults


def failed(ended: list[Ended]) -> str:
    """What rank 0 said of a run that every rank ended in the same way; the others say nothing."""
    assert [end.code for end in ended] == [1] * len(ended), report(ended)
    assert not any(end.stderr for end in ended[1:]) and "Traceback" not in ended[0].stderr, report(ended)
    return ended[0].stderr


def on_own_nodes(plant: Callable[[int], None]) -> Callable[[int], None]:
    """For `before`: each rank has a node of its own."""

    def before(rank: int) -> None:
        socket.gethostname = lambda: f"gpu-{rank}"
        plant(rank)

    return before


def computes_wrong(culprit: int, *, times: float, factor: float = 1.001) -> Callable[[int], None]:
    """For `before`: so often a gradient of `layers.1.mlp.up.weight` is wrong on a rank, from iteration 2 on."""

    def action(step: TrainStep) -> None:
        wrote, left = GradSink._finish_write, times
        sink = {record.name: one for provider in step.providers for record, one in provider.iter_grad_sinks()}[
            "layers.1.mlp.up.weight"
        ]

        def wrong(self: GradSink) -> None:
            nonlocal left
            if self is sink and left > 0:
                left -= 1
                assert self.main_grad is not None
                self.main_grad.view(-1)[0] *= factor
            wrote(self)

        GradSink._finish_write = wrong  # type: ignore[method-assign]

    return on_own_nodes(on_rank(culprit, 2, action))


def test_a_fault_that_stays_is_named_by_a_third(tmp_path: Path) -> None:
    """The run ends before the update, at every rank, and saves nothing of it. Pairs are told by the nodes; in the steps between two
    comparisons nothing is seen."""
    settings = {"train_iters": 6, "sentinel_interval": 3, "save": tmp_path, "save_interval": 2, "global_batch_size": 12}
    argv = arguments(**settings, tensor_model_parallel_size=2, use_distributed_optimizer=True)
    message = failed(launch(argv, 6, before=computes_wrong(3, times=math.inf)))
    assert "iteration 3: a rank computes wrong" in message and "Training stops before the update" in message
    assert (
        "the first microbatch of data rank 1 (rank 3 on node gpu-3), computed again by data rank 2 (rank 5 on node gpu-5), has "
        "a different result: 1 of 28 gradients (first in backward: layers.1.mlp.up.weight); data rank 0 agrees with data rank 2: "
        "data rank 1 is wrong\n" in message
    ), message
    assert "data rank 2 agrees with data rank 0: data rank 1 is wrong\n" in message, "its own microbatch, and that before"
    assert complete_checkpoints(tmp_path) == ["iter_0000002"]


@pytest.mark.parametrize("times", [1, math.inf])
def test_two_can_tell_a_fault_that_passes(tmp_path: Path, times: float) -> None:
    """By repetition. Of one that stays they know no more than that it is there."""
    flags = {"train_iters": 3, "sentinel_action": "warn", "metrics_file": tmp_path / "metrics"}
    said = run(arguments(**WATCHED, **flags), 2, before=computes_wrong(1, times=times))
    told = [line for line in said.splitlines() if "WARNING: sentinel: " in line]
    found = [
        (line["sentinel_differences"], line["sentinel_rank"])
        for line in read_metrics(tmp_path / "metrics")
        if "sentinel_rank" in line
    ]
    if times == 1:
        assert len(told) == 1 and told[0].endswith("data rank 1 does not reproduce its result: it is wrong")
        assert found == [(0, -1), (1, 1), (0, -1)], "and the run goes on"
    else:
        assert len(told) == 4 and all("without a third replica it cannot be decided which" in line for line in told)
        assert found == [(0, -1), (2, -1), (2, -1)]


def test_memory_that_changes_between_updates_is_named() -> None:
    """What one rank alone holds: no other could be asked."""

    def action(step: TrainStep) -> None:
        shard = step.optimizer.shards[0]
        flip_bit(shard.moments["exp_avg_sq"], 0, "mantissa low")

    flags = {"use_distributed_optimizer": True, "bf16": True}
    message = failed(launch(arguments(**WATCHED, **flags, train_iters=3), 2, before=on_own_nodes(on_rank(1, 2, action))))
    assert "iteration 2: " in message
    assert "memory of rank 1 on node gpu-1 has changed since the previous update: " in message and "(exp_avg_sq)" in message


def test_where_kernels_are_not_deterministic_a_band_is_compared() -> None:
    """As on a GPU without --deterministic-mode: rounding is nothing, a wrong number is."""

    def banded(plant: Callable[[int], None]) -> Callable[[int], None]:
        def before(rank: int) -> None:
            def of(cls: type[Sentinel], config: Any, step: TrainStep, every: int, reporter: Reporter) -> Sentinel:
                return cls(step, every, stops_run=True, comparer=DigestComparer(1e-3), reporter=reporter)

            Sentinel.of = classmethod(of)  # type: ignore[assignment, method-assign]
            plant(rank)

        return before

    run(arguments(**WATCHED, train_iters=2), 2, before=banded(computes_wrong(1, times=math.inf, factor=1 + 1e-6)))
    message = failed(launch(arguments(**WATCHED, train_iters=2), 2, before=banded(computes_wrong(1, times=1, factor=-1e3))))
    assert "layers.1.mlp.up.weight); data rank 1 does not reproduce its result" in message
