"""Gradients that are not finite: skipped in float16, an error in other formats, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron.data_parallel.fsdp  # noqa: F401  # imported here once, not in every forked rank
from megatron.parallel.accumulate import GradSink, get_grad_sink
from megatron.training.step import TrainStep
from tests.support.checkpoint_worlds import read_manifest
from tests.support.runs import (
    TINY,
    arguments,
    at_iteration,
    checkpoint,
    complete_checkpoints,
    launch,
    on_rank,
    read_metrics,
    report,
    run,
    saved_state,
    saved_tensors,
    spoil,
)

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2, "global_batch_size": 4},
    "pp2": {"pipeline_model_parallel_size": 2, "global_batch_size": 4},
    "optim": {"data_parallel_sharding_strategy": "optim"},
    "optim, gathered late": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "optim, offload": {"use_distributed_optimizer": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
    "optim_grads": {"data_parallel_sharding_strategy": "optim_grads"},
    "optim_grads_params": {"data_parallel_sharding_strategy": "optim_grads_params"},
    "optim_grads_params, never": {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "fsdp_reshard_after_forward": "never",
    },
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Take every layout with --full, and without it a subset for each test, so that each kind of buckets is in one."""
    if "layout" not in metafunc.fixturenames:
        return
    full, subset = CASES[metafunc.function]
    metafunc.parametrize("layout", full if metafunc.config.getoption("--full") else subset)


def contents(folder: Path, iteration: int, kind: str) -> dict[str, str | None]:
    """Digests of what a checkpoint holds of each parameter: weights, or moments such as exp_avg."""
    stored = read_manifest(checkpoint(folder, iteration)).tensors
    return {name: tensor.content for name, tensor in stored.items() if name.startswith(f"{kind}.")}


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path, layout: str) -> None:
    """No weight, no moment and no average moves, the schedules stand still, data and ramp-up go on, the step is counted.

    Once by infinity and once by NaN.
    """
    batch = LAYOUTS[layout].get("global_batch_size", TINY["global_batch_size"])

    def before(rank: int) -> None:
        if rank == 1:
            at_iteration(2, spoil(math.inf, "layers.1.mlp.up.weight"))
            at_iteration(3, spoil(math.nan, "layers.1.mlp.up.weight"))

    run(
        arguments(
            fp16=True,
            initial_loss_scale=2**12,
            hysteresis=1,
            train_iters=4,
            lr_decay_iters=4,
            ema_decay=0.5,
            save=tmp_path,
            save_interval=1,
            metrics_file=tmp_path / "metrics",
            **LAYOUTS[layout],
        ),
        2,
        before=before,
    )
    for kind in ("model", "exp_avg", "exp_avg_sq", "ema"):
        first, second, third, fourth = (contents(tmp_path, iteration, kind) for iteration in range(1, 5))
        assert first and None not in first.values()
        assert first == second == third
        assert all(third[name] != fourth[name] for name in first)
    state = saved_state(tmp_path, 4)
    del state["progress"]["phases"]
    assert state["progress"] == {
        "iteration": 4,
        "consumed_samples": 4 * batch,
        "updated_samples": 2 * batch,
        "skipped_iterations": 2,
    }
    assert state["optimizer_updates"] == 2
    lines = read_metrics(tmp_path / "metrics")
    assert [line["skipped"] for line in lines] == [0, 1, 1, 0]
    assert [line["loss_scale"] for line in lines] == [2**12, 2**12, 2**11, 2**10]
    assert [line["learning_rate"] for line in lines] == pytest.approx([1e-2, 7.5e-3, 7.5e-3, 7.5e-3], rel=1e-12)
    assert all(line["grad_norm"] is None and line["nonfinite"] is True for line in lines[1:3]) and lines[3]["grad_norm"] > 0


def test_an_overflow_at_the_smallest_scale_ends_the_run(tmp_path: Path) -> None:
    """One message, exit code 1 everywhere, and no checkpoint."""
    scale = {"initial_loss_scale": 2**40, "min_loss_scale": 2**40}
    ended = launch(arguments(fp16=True, train_iters=3, save=tmp_path, save_interval=1, **scale), 2)
    assert [end.code for end in ended] == [1, 1], report(ended)
    assert "--min-loss-scale" in ended[0].stderr and "Traceback" not in ended[0].stderr
    assert ended[1].stderr == ""
    assert complete_checkpoints(tmp_path) == []


def test_a_constant_scale_stays(tmp_path: Path) -> None:
    """--loss-scale: an overflow is skipped and counted, the scale is as given."""
    settings = {"fp16": True, "loss_scale": 512.0, "train_iters": 3, "metrics_file": tmp_path / "metrics"}
    run(arguments(**settings), before=on_rank(0, 2, spoil(math.inf)))
    lines = read_metrics(tmp_path / "metrics")
    assert [(line["loss_scale"], line["skipped"]) for line in lines] == [(512.0, 0), (512.0, 1), (512.0, 0)]


@pytest.mark.parametrize("precision", [pytest.param({}, marks=pytest.mark.full("the other case, in bfloat16")), {"bf16": True}])
def test_a_nan_names_step_rank_and_parameter(tmp_path: Path, precision: dict[str, bool]) -> None:
    """Exit code 1 on every rank, rank 0 alone explains, and nothing of the step is saved."""
    name = "layers.1.mlp.down.weight"
    ended = launch(
        arguments(**precision, pipeline_model_parallel_size=2, train_iters=4, save=tmp_path, save_interval=2),
        2,
        before=on_rank(1, 3, spoil(math.nan, name)),
    )
    assert [end.code for end in ended] == [1, 1], report(ended)
    said = ended[0].stderr
    assert "iteration 3:" in said and f"gradient of {name} not finite on rank 1\n" in said
    assert said.count("not finite on rank") == 1, "no other parameter is bad"
    assert "--iterations-to-skip 3" in said
    assert ended[1].stderr == "" and "Traceback" not in said
    assert complete_checkpoints(tmp_path) == ["iter_0000002"]


DATA_PARALLEL = [name for name in LAYOUTS if name not in ("tp2", "pp2")]


def test_a_nan_that_comes_again_is_named_where_it_begins(layout: str) -> None:
    """Each parameter on the rank in whose own gradient it is, and on no other that it has reached in the sum."""
    names = ("embedding.word.weight", "layers.1.mlp.down.weight")

    def keep_spoiling(step: TrainStep) -> None:
        wrote = GradSink._finish_write

        def spoiled(self: GradSink) -> None:
            if any(get_grad_sink(step.model.params[name].param) is self for name in names):
                assert self.main_grad is not None
                self.main_grad.view(-1)[0] = math.nan
            wrote(self)

        GradSink._finish_write = spoiled  # type: ignore[method-assign]

    ended = launch(arguments(bf16=True, train_iters=3, **LAYOUTS[layout]), 2, before=on_rank(1, 2, keep_spoiling))
    assert [end.code for end in ended] == [1, 1], report(ended)
    said = ended[0].stderr
    assert "iteration 2:" in said and all(f"  gradient of {name} not finite on rank 1\n" in said for name in names), said
    assert said.count("not finite on rank") == len(names) and "transient hardware fault" not in said
    assert ended[1].stderr == ""


def test_a_nan_that_does_not_come_again_is_named_where_the_sum_is(layout: str) -> None:
    """And is called a transient fault."""
    name = "layers.1.mlp.down.weight"
    ended = launch(arguments(bf16=True, train_iters=3, **LAYOUTS[layout]), 2, before=on_rank(1, 2, spoil(math.nan, name)))
    assert [end.code for end in ended] == [1, 1], report(ended)
    said = ended[0].stderr
    assert f"  gradient of {name} not finite on rank " in said and "a transient hardware fault" in said
    assert said.count("not finite on rank") == 1


REPLICATED: dict[str, dict[str, Any]] = {
    name: LAYOUTS[name] for name in ("tp2", "optim", "optim, offload", "optim_grads", "optim_grads_params")
}
"""Layouts of two data ranks, of two tensor ranks each; the first without data ranks."""
SPLIT = {"tensor_model_parallel_size": 2, "global_batch_size": 4, "num_layers": 1}


def spoil_sum(name: str, value: float) -> Callable[[TrainStep], None]:
    """For `at_iteration`: write a value into this rank's summed gradients, once, where the rank keeps any of the parameter's."""

    def action(step: TrainStep) -> None:
        gradients = step.compute_gradients

        def spoiled(*args: Any, **kwargs: Any) -> Any:
            found = gradients(*args, **kwargs)
            step.compute_gradients = gradients  # type: ignore[method-assign]
            for shard in step.optimizer.shards:
                if shard.record.name == name:
                    shard.grad.fill_(value)
            return found

        step.compute_gradients = spoiled  # type: ignore[method-assign]

    return action


def test_a_nan_in_one_tensor_replica_alone_is_seen_at_once(layout: str) -> None:
    """The global norm counts the replica of tensor rank 0, and the NaN is in that of tensor rank 1."""
    name, settings = "final_norm.weight", {**REPLICATED[layout], **SPLIT}
    size = 2 if layout == "tp2" else 4
    ended = launch(arguments(train_iters=4, **settings), size, before=on_rank(1, 2, spoil_sum(name, math.nan)))
    assert [end.code for end in ended] == [1] * size, report(ended)
    said = ended[0].stderr
    assert "iteration 2:" in said and f"  gradient of {name} not finite on rank 1\n" in said, said
    assert said.count("not finite on rank") == 1 and "a transient hardware fault" in said


def test_an_overflow_in_one_tensor_replica_alone_skips_the_step_on_all(tmp_path: Path, layout: str) -> None:
    settings = {**REPLICATED[layout], **SPLIT, "initial_loss_scale": 2**12, "hysteresis": 1}
    size = 2 if layout == "tp2" else 4
    run(
        arguments(fp16=True, train_iters=3, metrics_file=tmp_path / "metrics", check_replicas_every=1, **settings),
        size,
        before=on_rank(1, 2, spoil_sum("final_norm.weight", math.inf)),
    )
    assert [(line["skipped"], line["loss_scale"]) for line in read_metrics(tmp_path / "metrics")] == [
        (0, 2**12),
        (1, 2**12),
        (0, 2**11),
    ]


def test_a_nan_in_the_loss_names_the_rank_that_has_it(tmp_path: Path) -> None:
    """A weight of the last stage is so large that its logits overflow: its rank's loss is not finite."""

    def poison(step: Any) -> None:
        next(entry.param for entry in step.model.params if entry.record.name == "final_norm.weight").data.fill_(3e38)

    ended = launch(arguments(pipeline_model_parallel_size=2, train_iters=4, save=tmp_path), 2, before=on_rank(1, 2, poison))
    assert [end.code for end in ended] == [1] * 2, report(ended)
    assert "iteration 2:" in ended[0].stderr and "loss not finite on rank 1\n" in ended[0].stderr
    assert complete_checkpoints(tmp_path) == []


def test_an_absurd_learning_rate_ends_the_run(tmp_path: Path) -> None:
    """The step after the first update finds a loss that is not finite."""
    ended = launch(arguments(lr=1e30, train_iters=4, save=tmp_path, metrics_file=tmp_path / "metrics"))
    assert ended[0].code == 1, report(ended)
    assert "iteration 2:" in ended[0].stderr and "lower --lr" in ended[0].stderr
    assert len(read_metrics(tmp_path / "metrics")) == 1
    assert complete_checkpoints(tmp_path) == []


@pytest.mark.full("test_run_spikes.py::test_a_rewind_is_the_run_that_is_started_by_hand")
def test_the_bad_batch_can_be_left_out(tmp_path: Path) -> None:
    """As the message of a NaN advises: its data is consumed without an update."""
    settings = {"train_iters": 4, "save": tmp_path, "save_interval": 1}
    run(arguments(**settings, iterations_to_skip=(2, 3), metrics_file=tmp_path / "metrics"), 2)
    weights = [saved_tensors(tmp_path, iteration) for iteration in range(1, 5)]
    assert all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    assert not torch.equal(weights[2]["final_norm.weight"], weights[3]["final_norm.weight"])
    lines = read_metrics(tmp_path / "metrics")
    assert [line["skipped"] for line in lines] == [0, 1, 1, 0]
    assert [line["consumed_samples"] for line in lines] == [8, 16, 24, 32]
    assert saved_state(tmp_path, 4)["progress"]["updated_samples"] == 16
    # The fourth step sees the fourth batch, not the second: the loss is the one of a run that reads on.
    at_fourth = _loss_of_fourth_batch_with(tmp_path)
    assert lines[3]["lm_loss"] == at_fourth


def _loss_of_fourth_batch_with(folder: Path) -> float:
    """Loss that the weights after the first update have on the fourth batch: of a run that resumes before it."""
    run(arguments(train_iters=4, load=folder, ckpt_step=3, metrics_file=folder / "resumed"), 2)
    return read_metrics(folder / "resumed")[0]["lm_loss"]


def test_a_batch_without_tokens_that_count_is_an_error(tmp_path: Path) -> None:
    """A loss mask of zeros everywhere: there is no mean, and the message says so."""

    def blind(step: Any) -> None:
        gradients = step.compute_gradients

        def masked(batch: Any) -> Any:
            for inputs in batch:
                inputs.loss_mask.zero_()
            return gradients(batch)

        step.compute_gradients = masked

    ended = launch(arguments(train_iters=3, save=tmp_path), 2, before=lambda rank: at_iteration(2, blind))
    assert [end.code for end in ended] == [1, 1], report(ended)
    assert "iteration 2:" in ended[0].stderr and "loss mask" in ended[0].stderr
    assert complete_checkpoints(tmp_path) == []


CASES: dict[Callable[..., None], tuple[Sequence[str], Sequence[str]]] = {
    test_an_overflow_on_one_rank_skips_the_step_on_all: (
        [*LAYOUTS],
        ["pp2", "optim, offload", "optim_grads_params"],
    ),
    test_a_nan_that_comes_again_is_named_where_it_begins: (DATA_PARALLEL, ["optim_grads_params"]),
    test_a_nan_that_does_not_come_again_is_named_where_the_sum_is: (
        DATA_PARALLEL,
        ["optim, gathered late"],
    ),
    test_a_nan_in_one_tensor_replica_alone_is_seen_at_once: ([*REPLICATED], ["optim"]),
    test_an_overflow_in_one_tensor_replica_alone_skips_the_step_on_all: ([*REPLICATED], ["optim_grads"]),
}
"""The layouts of each test, with --full and without."""
