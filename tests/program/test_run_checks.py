"""Whole runs with all checks on: nothing changes, and planted faults end every rank alike, named, before anything is saved."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron.data_parallel.fsdp  # noqa: F401  # imported here once, not in every forked rank
from megatron.data_parallel import bucket as bucket_module
from megatron.data_parallel.bucket import FullGradBucket
from megatron.parallel.accumulate import GradSink, get_grad_sink
from megatron.parallel.collectives import Pending
from megatron.spec.weights import WORD_EMBEDDING
from megatron.training.step import TrainStep
from megatron_lab.audit.trace_file import read_trace
from tests.support.forked_modules import fork_modules
from tests.support.runs import (
    Ended,
    arguments,
    checkpoint,
    complete_checkpoints,
    digest,
    launch,
    on_rank,
    report,
    run,
    timeless,
)

CHECKS: dict[str, Any] = {"check_replicas_every": 1, "trace_steps": 2}
TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "global_batch_size": 4}
STAGES: dict[str, Any] = {"pipeline_model_parallel_size": 2, "micro_batch_size": 1, "global_batch_size": 4}
CONTEXT: dict[str, Any] = {"context_parallel_size": 2, "global_batch_size": 4}
ZERO3: dict[str, Any] = {"data_parallel_sharding_strategy": "optim_grads_params"}
OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
OVERFLOWS: dict[str, Any] = {"fp16": True, "initial_loss_scale": 2.0**20, "hysteresis": 1}
"""In the first step of two tensor ranks."""

CLEAN: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "no_shard, tensor, bf16": (4, {**TENSOR, "bf16": True, "num_layers": 1}),
    "optim, late weight gradients, tied, host memory": (
        4,
        {**STAGES, **OVERLAP, "use_distributed_optimizer": True, "pipeline_schedule": "zb-h1", "optimizer_cpu_offload": True},
    ),
    "optim_grads, tensor, fp16": (
        4,
        {**TENSOR, **OVERLAP, "data_parallel_sharding_strategy": "optim_grads", **OVERFLOWS, "train_iters": 3, "num_layers": 1},
    ),
    "optim_grads_params, context, parts of two, bf16, host memory": (
        4,
        {
            **ZERO3,
            **CONTEXT,
            "num_layers": 1,
            "fsdp_shard_size": 2,
            "bf16": True,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 0.5,
        },
    ),
    "optim_grads_params, tensor without sequences, never": (
        4,
        {**ZERO3, "tensor_model_parallel_size": 2, "fsdp_reshard_after_forward": "never", "global_batch_size": 4, "num_layers": 1},
    ),
    "optim_grads_params, uneven, host memory, reduced once": (
        3,
        {
            **ZERO3,
            "fsdp_params_cpu": True,
            "fsdp_reduce_once": True,
            "make_vocab_size_divisible_by": 1,
            "global_batch_size": 6,
            "num_layers": 1,
        },
    ),
    "optim_grads_params, stages": (
        4,
        {**ZERO3, **STAGES, "num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4},
    ),
}


COMPARED = ["optim_grads, tensor, fp16", "optim_grads_params, uneven, host memory, reduced once"]
"""Both kinds of buckets, with all that is compared and audited. The third case of the normal run, where ends are tied and weight
gradients come late, is compared with the run without checks with --full alone, as the others are."""
QUICK = [*COMPARED, "optim, late weight gradients, tied, host memory"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_checks_find_nothing_and_change_nothing:
        metafunc.parametrize("name", CLEAN if metafunc.config.getoption("--full") else QUICK)


def test_checks_find_nothing_and_change_nothing(tmp_path: Path, full: bool, name: str) -> None:
    """Weights, moments and every logged number are those of the run without checks, bit for bit. With dropout."""
    world_size, flags = CLEAN[name]
    settings: dict[str, Any] = {"train_iters": 2, "make_vocab_size_divisible_by": 4, "hidden_dropout": 0.1, "ddp_bucket_size": 5000}
    settings |= flags
    on, off = tmp_path / "on", tmp_path / "off"
    said = run(arguments(**settings, **CHECKS, save_trace=on / "trace", save=on, metrics_file=on / "metrics"), world_size)
    parameters = len(read_trace(on / "trace")[0].header.parameters)
    audited = (
        f"audit of the first step: gradients of {parameters} parameters were all written, summed over their ranks and counted once"
    )
    assert "copies of weights" in said and audited in said and "all zero" not in said
    if full or name in COMPARED:
        unchecked = run(arguments(**settings, save=off, metrics_file=off / "metrics"), world_size)
        last = settings["train_iters"]
        assert digest(on, last) == digest(off, last)
        assert timeless(on / "metrics") == timeless(off / "metrics")
        assert "audit" not in unchecked and "copies" not in unchecked


def test_a_step_that_overflows_leaves_the_audit_to_the_next() -> None:
    said = run(arguments(**TENSOR, **OVERFLOWS, train_iters=3, check_replicas_every=5, num_layers=1), 2)
    lines = [line for line in said.splitlines() if "iteration  " in line or "audit" in line]
    (at,) = (number for number, line in enumerate(lines) if "audit" in line)
    assert at > 0 and all("skipped iterations:   1" in line for line in lines[:at]), said
    assert "not audited" not in said
    assert "skipped iterations:   0" in lines[at + 1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_without_an_update_says_that_nothing_was_audited(world_size: int) -> None:
    """Once, at its end; steps that overflow and one that is left out."""
    scale = {"fp16": True, "loss_scale": 2.0**40}
    ended = launch(arguments(**scale, train_iters=3, iterations_to_skip=(2,), check_replicas_every=5), world_size)
    assert all(end.code == 0 for end in ended), report(ended)
    said = [line for end in ended for line in end.stdout.splitlines() if "audit" in line]
    assert said == ["  no step made an update: gradients were not audited"], report(ended)


def failed(ended: list[Ended]) -> str:
    """What rank 0 said of a run that every rank ended in the same way; the others say nothing."""
    assert [end.code for end in ended] == [1] * len(ended), report(ended)
    assert not any(end.stderr for end in ended[1:]), report(ended)
    assert "Traceback" not in ended[0].stderr and ended[0].stderr.startswith("pretrain_gpt.py: iteration "), report(ended)
    return ended[0].stderr


# ---- weights that differ


def flip(name: str) -> Callable[[TrainStep], None]:
    """For `on_rank`: change one of the last bits of a weight. (An update may round away that of the very last one.)"""

    def action(step: TrainStep) -> None:
        bits = step.model.params[name].param.detach().view(-1).view(torch.int32)
        bits[3] ^= 16

    return action


FLIPS: dict[str, tuple[int, dict[str, Any], int, str, str]] = {
    "a tensor rank": (
        4,
        TENSOR,
        1,
        "layers.0.attention_norm.weight",
        "the values of rank 1 differ from those of ranks 0, 2 and 3 (tensor group [0, 1], data group [1, 3])",
    ),
    "a data rank": (
        3,
        {"global_batch_size": 6},
        2,
        "layers.1.mlp.up.weight",
        "the values of rank 2 differ from those of ranks 0 and 1 (data group [0, 1, 2])",
    ),
    "one end of a tied pair": (
        2,
        STAGES,
        1,
        "embedding.word.weight",
        "rank 0 and rank 1 have different values, and it cannot be decided which are wrong (first and last stage [0, 1])",
    ),
}


A_DATA_RANK = pytest.param("a data rank", marks=pytest.mark.full("test_nothing_is_saved_that_was_not_compared"))


@pytest.mark.parametrize("where", [A_DATA_RANK if where == "a data rank" else where for where in FLIPS])
def test_a_weight_that_differs_is_named(tmp_path: Path, where: str) -> None:
    """At the next comparison, and nothing of that iteration is saved."""
    world_size, flags, rank, name, words = FLIPS[where]
    settings = {**flags, "train_iters": 5, "check_replicas_every": 2, "save_interval": 2, "save": tmp_path}
    message = failed(launch(arguments(**settings), world_size, before=on_rank(rank, 4, flip(name))))
    assert "iteration 4: copies of weights that must be equal differ between ranks (at iteration 2 they were equal)" in message
    assert f"\n  {name}: {words}\n" in message
    assert complete_checkpoints(tmp_path) == ["iter_0000002"]


def test_nothing_is_saved_that_was_not_compared(tmp_path: Path) -> None:
    """A save between two comparisons makes one; one in the background that has begun before is finished."""
    settings = {"train_iters": 5, "check_replicas_every": 4, "save_interval": 1, "save": tmp_path, "async_save": True}

    def before(rank: int) -> None:
        fork_modules()
        on_rank(1, 3, flip("final_norm.weight"))(rank)

    message = failed(launch(arguments(**settings), 2, before=before))
    assert "iteration 3: " in message and "(at iteration 2 they were equal)" in message and "final_norm.weight: " in message
    assert complete_checkpoints(tmp_path) == ["iter_0000001", "iter_0000002"]


def test_main_weights_and_parts_of_sharded_ones_are_compared() -> None:
    """Mains that are apart from the weights, and with --fsdp-shard-size what two ranks hold the same part of."""

    def spoil_main(step: TrainStep) -> None:
        shard = next(shard for shard in step.optimizer.shards if shard.record.name == "layers.0.mlp.down.weight")
        shard.main_param[0] += 1e-6  # less than the weight's last bit

    flags = {"train_iters": 3, "check_replicas_every": 1, "num_layers": 1}
    message = failed(launch(arguments(**flags, bf16=True, lr=1e-6, global_batch_size=4), 2, before=on_rank(1, 2, spoil_main)))
    assert "layers.0.mlp.down.weight (main weights): rank 0 and rank 1 have different values" in message
    flags |= {**ZERO3, "fsdp_shard_size": 2, "fsdp_params_cpu": True}
    message = failed(launch(arguments(**flags), 4, before=on_rank(1, 2, spoil_main)))
    assert "layers.0.mlp.down.weight: rank 1 and rank 3 have different values" in message


def test_a_checkpoint_whose_replicas_are_read_wrong_is_seen_before_the_first_step(tmp_path: Path) -> None:
    flags = {"lr_decay_style": "constant"}
    run(arguments(**flags, train_iters=1, save=tmp_path), 2)

    def before(rank: int) -> None:
        prepare = TrainStep.prepare

        def spoiled(self: TrainStep, num_microbatches: int) -> None:
            if rank == 1:
                flip("layers.0.mlp.up.bias")(self)
            prepare(self, num_microbatches)

        TrainStep.prepare = spoiled  # type: ignore[method-assign]

    message = failed(
        launch(arguments(**flags, train_iters=2, load=tmp_path, save=tmp_path, check_replicas_every=9), 2, before=before)
    )
    assert (
        "iteration 1: copies of weights that must be equal differ between ranks, so" in message
        and "layers.0.mlp.up.bias: " in message
    )
    assert complete_checkpoints(tmp_path) == ["iter_0000001"] and checkpoint(tmp_path, 1).exists()


# ---- the audit of the first step


def audited(tmp_path: Path, world_size: int, before: Callable[[int], None], **flags: Any) -> str:
    """What the audit says of a run with a fault."""
    settings = {"train_iters": 2, "check_replicas_every": 1, "save": tmp_path, "save_interval": 1, "ddp_bucket_size": 5000}
    message = failed(launch(arguments(**{**settings, **flags}), world_size, before=before))
    assert complete_checkpoints(tmp_path) == []
    return message


def reducing(fault: Callable[[FullGradBucket], Pending | None]) -> Callable[[int], None]:
    """For `before`: what a bucket does instead of its reduction, or None if it is right."""

    def before(rank: int) -> None:
        reduce = FullGradBucket._start_reduction

        def changed(self: FullGradBucket) -> None:
            self._reduction = fault(self)
            if self._reduction is None:
                reduce(self)

        FullGradBucket._start_reduction = changed  # type: ignore[method-assign]

    return before


def test_a_gradient_that_is_not_summed_over_data_ranks(tmp_path: Path) -> None:
    def fault(bucket: FullGradBucket) -> Pending | None:
        return Pending(bucket.grads) if bucket.plan.params[0].entry.record.name == "layers.1.mlp.down.weight" else None

    message = audited(tmp_path, 2, reducing(fault))
    assert "iteration 1: the audit of the first step failed.\n" in message
    words = "not summed over data ranks: ranks 0 and 1 would use only their local gradients (group [0, 1])"
    assert f"\n  layers.1.mlp.down.weight: {words}\n" in message and "layers.0" not in message


def test_a_gradient_that_is_not_summed_over_tensor_ranks(tmp_path: Path) -> None:
    """Under sequence parallelism, where data ranks are as they should be: the sum over data ranks alone."""

    def fault(bucket: FullGradBucket) -> Pending | None:
        if "tp" not in bucket.plan.axes:
            return None
        return bucket_module.start_all_reduce(bucket.grads, bucket.context.group("dp"))

    message = audited(tmp_path, 4, reducing(fault), **TENSOR)
    words = "not summed over tensor ranks, but only over data ranks (group [0, 1], [2, 3])"
    assert f"\n  layers.0.attention_norm.weight: {words}\n" in message and "qkv.weight" not in message


def test_a_gradient_that_is_not_summed_over_context_ranks(tmp_path: Path) -> None:
    """But over data ranks: each rank updates its slice of that sum."""

    def fault(bucket: FullGradBucket) -> Pending | None:
        if bucket.plan.params[0].entry.record.name != "layers.1.mlp.down.weight":
            return None
        return bucket_module.start_all_reduce(bucket.grads, bucket.context.group("dp"))

    message = audited(tmp_path, 4, reducing(fault), **CONTEXT, use_distributed_optimizer=True)
    words = "not summed over context ranks, but only over data ranks (group [0, 1], [2, 3])"
    assert f"\n  layers.1.mlp.down.weight: {words}\n" in message and "layers.0" not in message


def test_a_record_that_forgets_the_tensor_ranks(tmp_path: Path) -> None:
    """Reduction follows it, so it is the ranks' own gradients that tell."""

    def before(rank: int) -> None:
        from megatron.spec.weights import WeightSpec

        WeightSpec.has_partial_tp_grad = lambda self, sequence_parallel: False  # type: ignore[method-assign]

    message = audited(tmp_path, 2, before, **TENSOR)
    assert "layers.0.mlp_norm.weight: its gradient differs between tensor ranks, although each of them should have" in message


def test_a_gradient_that_is_summed_twice(tmp_path: Path) -> None:
    def fault(bucket: FullGradBucket) -> Pending | None:
        bucket.grads.mul_(2)
        return None

    message = audited(tmp_path, 2, reducing(fault))
    words = "the optimizer gets 2 x the sum of its gradients (the data size); its shards are on ranks 0 and 1"
    assert f"\n  layers.0.attention_norm.weight: {words}\n" in message


def test_a_tied_embedding_that_is_not_joined(tmp_path: Path) -> None:
    def before(rank: int) -> None:
        bucket_module.Bucket.reduce_tied_grads = lambda self: None  # type: ignore[method-assign]

    message = audited(tmp_path, 2, before, **STAGES)
    words = "not summed over the stages that share it: ranks 0 and 1 would use only their local gradients"
    assert f"\n  embedding.word.weight: {words}\n" in message and message.count("not summed") == 1


def test_a_gradient_that_is_never_written(tmp_path: Path) -> None:
    """On the second stage: the first one learns it from the others and does not wait for ever."""

    def before(rank: int) -> None:
        add, name = GradSink.add_sum, "layers.1.mlp.down.bias"
        gradients = TrainStep.compute_gradients

        def noting(self: TrainStep, *args: Any, **named: Any) -> Any:
            lost = get_grad_sink(self.model.params[name].param) if name in self.model.params else None

            def lossy(sink: GradSink, rows: torch.Tensor) -> None:
                if sink is not lost:
                    add(sink, rows)

            GradSink.add_sum = lossy  # type: ignore[method-assign, assignment]
            return gradients(self, *args, **named)

        TrainStep.compute_gradients = noting  # type: ignore[method-assign]

    message = audited(tmp_path, 2, before, **STAGES)
    assert "iteration 1: gradients are incomplete.\n  layers.1.mlp.down.bias: none of 4 gradients received on rank 1\n" in message


def changed_counts(change: Callable[[TrainStep], None], chosen: int) -> Callable[[int], None]:
    """For `before`: change what a rank counts in the norm, after the number of parameters was checked."""

    def before(rank: int) -> None:
        prepare = TrainStep.prepare

        def changed(self: TrainStep, num_microbatches: int) -> None:
            if rank == chosen:
                change(self)
            prepare(self, num_microbatches)

        TrainStep.prepare = changed  # type: ignore[method-assign]

    return before


def test_an_element_that_is_counted_twice_in_the_norm(tmp_path: Path) -> None:
    """By two ranks, as the boxes tell."""

    def widen(step: TrainStep) -> None:
        shard = next(shard for shard in step.norm_shards if shard.norm_range.start > 0 and shard.record.name != WORD_EMBEDDING)
        shard.norm_range = range(shard.norm_range.start - 1, shard.norm_range.stop)

    message = audited(tmp_path, 2, changed_counts(widen, 1))
    assert re.search(r"\n  [a-z0-9._]+: counted twice in the norm by ranks 0 and 1: an element at \([0-9, ]+\)\n", message)


def test_a_parameter_that_is_counted_twice_in_the_norm(tmp_path: Path) -> None:
    """By one rank, as the norm tells."""

    def again(step: TrainStep) -> None:
        at = [shard.record.name for shard in step.norm_shards].index("layers.0.mlp.up.weight")
        step._norm_grads.append(step._norm_grads[at])

    message = audited(tmp_path, 2, changed_counts(again, 0))
    assert "\n  the norm: the step computed " in message and "; layers.0.mlp.up.weight is counted twice on rank 0\n" in message


def test_an_element_that_nobody_counts(tmp_path: Path) -> None:
    def leave_out(step: TrainStep) -> None:
        shard = next(shard for shard in step.norm_shards if shard.record.name == "final_norm.weight")
        shard.norm_range = range(shard.norm_range.start, shard.norm_range.stop - 2)

    message = audited(tmp_path, 1, changed_counts(leave_out, 0))
    assert "final_norm.weight: 2 of 32 elements are counted in the norm by no rank" in message
