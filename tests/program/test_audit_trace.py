"""The trace of a run: in float64 the same to rounding at every layout; of the numbers that the run itself has; once a step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron.data_parallel.fsdp  # imported here once, not in every forked rank
import megatron.training.trainer
import megatron_lab.audit.callbacks
import pretrain_gpt
from megatron.metrics import log_line
from megatron.training.step import TrainStep
from megatron_lab.audit.signature import compute_signature, to_trace_signature
from megatron_lab.audit.trace_file import Signature, TraceRun, read_trace
from tests.support.runs import arguments, launch, on_rank, read_metrics, report, run, saved_tensors

STEPS = 2
BASE: dict[str, Any] = {
    "fp64": True,
    "num_layers": 4,
    "mtp_num_layers": 1,
    "train_iters": STEPS,
    "global_batch_size": 4,
    "lr_decay_style": "constant",
    "ddp_bucket_size": 5000,
    "make_vocab_size_divisible_by": 4,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"tensor_model_parallel_size": 2}),
    "pipeline, tied": (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "micro_batch_size": 1}),
    "data": (2, {}),
    "context": (2, {"context_parallel_size": 2, "cp_comm_type": ("p2p",)}),
    "context, data": (4, {"context_parallel_size": 2, "cp_comm_type": ("p2p",)}),
}
"""Without sharding; traces of sharded runs on several data ranks are compared in tests/program/test_run_sharding.py."""
QUICK = ("tensor", "pipeline, tied")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", LAYOUTS if metafunc.config.getoption("--full") else QUICK)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of one process."""
    folder = tmp_path_factory.mktemp("one")
    settings = {**BASE, "save": folder, "save_interval": 1, "metrics_file": folder / "metrics"}
    run(arguments(**settings, save_trace=folder / "trace"))
    return folder


def assert_near(found: dict[str, Signature], wanted: dict[str, Signature], band: float = 1e-10) -> None:
    """Within a share of the norm; what is zero but for rounding (the gradient of a key bias) within a share of the largest."""
    assert list(found) == list(wanted)
    scale = max(numbers[0] for numbers in wanted.values())
    for name, numbers in wanted.items():
        assert len(found[name]) == len(numbers) == 5
        off = max(abs(a - b) for a, b in zip(found[name], numbers, strict=True))
        assert off <= band * max(numbers[0], 1e-6 * scale), name


def assert_same(found: TraceRun, wanted: TraceRun) -> None:
    """All but the header, in float64."""
    assert found.iteration == wanted.iteration and len(found.steps) == len(wanted.steps)
    assert_near(found.weights, wanted.weights)
    for step, other in zip(found.steps, wanted.steps, strict=True):
        for name in (
            "iteration",
            "samples",
            "consumed_samples",
            "tokens",
            "learning_rate",
            "weight_decay",
            "loss_scale",
            "skipped",
        ):
            assert getattr(step, name) == getattr(other, name), name
        assert step.loss == pytest.approx(other.loss, rel=1e-10) and step.grad_norm == pytest.approx(other.grad_norm, rel=1e-10)
        assert_near(step.gradients, other.gradients)
        assert_near(step.weights, other.weights)


def test_it_is_the_same_at_every_layout(one_process: Path, tmp_path: Path, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    run(arguments(**{**BASE, **flags}, save_trace=tmp_path / "trace"), world_size)
    (found,), (wanted,) = read_trace(tmp_path / "trace"), read_trace(one_process / "trace")
    assert_same(found, wanted)
    assert found.header.parameters == wanted.header.parameters and found.header.dtype == "float64"
    sizes = found.header.layout
    assert sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"] == world_size
    assert [layer for _, layers in found.header.layers for layer in layers] == [0, 1, 2, 3]


def test_it_tells_what_the_run_has(one_process: Path) -> None:
    """Losses and norms of the metrics, weights of the checkpoints; the gradients' norms make up the global one."""
    (trace,) = read_trace(one_process / "trace")
    assert trace.iteration == 0 and [step.iteration for step in trace.steps] == [1, 2]
    for step, line in zip(trace.steps, read_metrics(one_process / "metrics"), strict=True):
        assert (step.loss, step.grad_norm, step.consumed_samples) == (line["lm_loss"], line["grad_norm"], line["consumed_samples"])
        assert sum(numbers[0] ** 2 for numbers in step.gradients.values()) ** 0.5 == pytest.approx(step.grad_norm, rel=1e-12)
        assert step.samples == 4 and step.tokens == 4 * 16
        weights = saved_tensors(one_process, step.iteration)
        assert step.weights == {name: to_trace_signature(compute_signature(name, weights[name])) for name in step.weights}
        assert set(weights) == set(step.weights)
    settings = json.loads((one_process / "trace").read_text().splitlines()[0])["settings"]
    assert settings["training"]["train_iters"] == STEPS and trace.header.settings == settings


def test_gradients_are_unscaled_and_steps_without_an_update_have_none(tmp_path: Path) -> None:
    """With float16's loss scale; a step that overflows, and one that is left out, which has no line."""
    flags = {"hysteresis": 1, "initial_loss_scale": 2.0**22, "train_iters": 5, "iterations_to_skip": (2,), "trace_steps": 5}
    run(arguments(**flags, fp16=True, save_trace=tmp_path / "fp16"))
    steps = read_trace(tmp_path / "fp16")[0].steps
    assert [step.iteration for step in steps] == [1, 3, 4, 5]
    assert steps[0].skipped and not steps[0].gradients and not steps[-1].skipped
    for step in steps:
        if not step.skipped:
            assert sum(numbers[0] ** 2 for numbers in step.gradients.values()) ** 0.5 == pytest.approx(step.grad_norm, rel=1e-5)
    assert steps[0].weights == read_trace(tmp_path / "fp16")[0].weights


def test_a_resumed_run_appends_and_stops_after_its_steps(tmp_path: Path) -> None:
    """In bfloat16, where the weights of a trace are the main parameters, as those of a checkpoint."""
    flags = {
        "lr_decay_style": "constant",
        "bf16": True,
        "save": tmp_path,
        "load": tmp_path,
        "save_trace": tmp_path / "trace",
        "trace_steps": 2,
        "exit_interval": 3,
        "global_batch_size": 4,
    }
    for iterations in (6, 6):
        run(arguments(**{**flags, "train_iters": iterations}))
    runs = read_trace(tmp_path / "trace")
    assert [(r.iteration, [step.iteration for step in r.steps]) for r in runs] == [(0, [1, 2]), (3, [4, 5])]
    weights = saved_tensors(tmp_path, 3)
    assert runs[1].weights == {name: to_trace_signature(compute_signature(name, tensor)) for name, tensor in weights.items()}


def test_off_it_costs_nothing() -> None:
    """Neither the trace nor the checks make anything, and nobody looks at a step."""

    def before(rank: int) -> None:
        for name in ("TraceCallback", "ReplicaChecks"):
            assert hasattr(megatron_lab.audit.callbacks, name)
            setattr(megatron_lab.audit.callbacks, name, None)
        step = TrainStep.run

        def looking(self: TrainStep, *args: Any, **named: Any) -> Any:
            assert not self.before_update_hooks
            return step(self, *args, **named)

        TrainStep.run = looking  # type: ignore[method-assign]

    run(arguments(train_iters=2), 2, before=before)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("at", "words"), [("", "{0} is a folder"), ("file/new/trace", "{0}/file/new/trace cannot be written")])
def test_a_file_that_cannot_be_written_is_refused_before_ranks_meet(tmp_path: Path, world_size: int, at: str, words: str) -> None:
    """In the words of one rank, with the exit status of a wrong setting."""

    def before(rank: int) -> None:
        megatron.training.trainer.connect = lambda config: os._exit(77)  # type: ignore[attr-defined]

    (tmp_path / "file").touch()
    ended = launch(arguments(train_iters=2, save_trace=tmp_path / at), world_size, before=before)
    assert [end.code for end in ended] == [2] * world_size, report(ended)
    assert (
        ended[0].stderr.startswith(f"pretrain_gpt.py: --save-trace {words.format(tmp_path)}") and ended[0].stderr.count("\n") == 1
    )
    assert not any(end.stderr for end in ended[1:]) and not any(end.stdout for end in ended), report(ended)


def test_a_file_that_cannot_be_opened_after_all_ends_every_rank_before_training(tmp_path: Path) -> None:
    """As where the folder is lost between the check and the first line."""

    def before(rank: int) -> None:
        pretrain_gpt.check_output = log_line.check_output = lambda *_: None  # type: ignore[assignment]

    ended = launch(arguments(train_iters=2, save_trace=tmp_path), 2, before=before)
    assert [end.code for end in ended] == [1, 1], report(ended)
    assert "--save-trace" in ended[0].stderr and "cannot be written" in ended[0].stderr and "iteration" not in ended[0].stdout


def test_the_ranks_of_another_node_do_not_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may be missing there: the first rank writes."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    pretrain_gpt.check_trace_file(str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        pretrain_gpt.check_trace_file(str(tmp_path))


def test_the_folder_of_a_trace_is_made(tmp_path: Path) -> None:
    run(arguments(train_iters=1, save_trace=tmp_path / "new" / "folder" / "trace"))
    assert len(read_trace(tmp_path / "new" / "folder" / "trace")[0].steps) == 1


def test_weights_that_were_spoilt_show_in_the_step_after(one_process: Path, tmp_path: Path) -> None:
    """What the trace is for: the first step and parameter where two runs part."""

    def spoil(step: TrainStep) -> None:
        shard = next(shard for shard in step.optimizer.shards if shard.record.name == "layers.1.mlp.up.weight")
        shard.main_param[5] += 1e-3

    run(arguments(**BASE, save_trace=tmp_path / "ill"), before=on_rank(0, 2, spoil))
    (well,), (ill,) = read_trace(one_process / "trace"), read_trace(tmp_path / "ill")
    assert well.weights == ill.weights and well.steps[0] == ill.steps[0] and well.steps[1].loss != ill.steps[1].loss
    one, other = (torch.tensor(trace.steps[1].weights["layers.1.mlp.up.weight"][1:]) for trace in (well, ill))
    assert (one - other).abs().max() > 1e-4
