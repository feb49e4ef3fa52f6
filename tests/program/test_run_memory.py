"""Memory in whole runs: reports beside the plan, and one message of a rank that has none left."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.pipeline_parallel.executor import Executor
from megatron.spec.operations import OpType
from megatron_lab.monitoring import rehearsal
from tests.support.runs import arguments, launch, report, run, timeless

STAGES: dict[str, Any] = {"pipeline_model_parallel_size": 2, "device": "cpu"}
NUMBER = r"([\d.]+ [a-zA-Z]+(?: - [\d.]+ [a-zA-Z]+)?)"


def reports(said: str) -> list[dict[str, tuple[str, str]]]:
    """Of each report, measured and planned by their name."""
    found = []
    for text in said.split("  memory after iteration ")[1:]:
        rows = re.findall(rf"^    (\S.*?)  +{NUMBER}  +({NUMBER[1:-1]}|-)$", text, re.MULTILINE)
        found.append({name: (measured, planned) for name, measured, planned in rows})
    return found


ZERO3: dict[str, Any] = {"data_parallel_sharding_strategy": "optim_grads_params", "bf16": True, "device": "cpu"}
HALF: dict[str, Any] = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "device": "cpu"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline": (4, {**STAGES, "bf16": True, "data_parallel_sharding_strategy": "optim_grads", "ddp_bucket_size": 3000}),
    "optim_grads_params": (2, ZERO3),
    "optim_grads_params, host": (2, {**ZERO3, "fsdp_params_cpu": True}),
    "activations on the host": (2, {"cpu_offload_activations": True, "device": "cpu"}),
    "half of the moments on the host": (2, HALF),
    "activations and half of the moments on the host": (1, {"cpu_offload_activations": True, **HALF}),
}
QUICK = ("optim_grads_params, host", "activations and half of the moments on the host")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", LAYOUTS if metafunc.config.getoption("--full") else QUICK)


def test_state_is_measured_as_planned(layout: str) -> None:
    """Parameter by parameter, on all ranks; after the first step and at intervals."""
    world_size, flags = LAYOUTS[layout]
    said = run(arguments(**flags, train_iters=3, global_batch_size=4, log_memory_interval=2), world_size)
    assert re.findall(r"memory after iteration (\d)", said) == ["1", "2"]
    first, last = reports(said)
    assert first == last or set(first) == set(last)
    state = {name: row for name, row in first.items() if not name.startswith(("activations", "Python", "the process", "buffers"))}
    where = " on the host" if flags.get("fsdp_params_cpu") else ""
    assert {f"parameters{where}", f"gradients{where}"} < set(state) and ("moments" in state or "moments on the host" in state)
    assert all(measured == planned for measured, planned in state.values()), state
    if "cpu_offload_activations" in flags:
        measured, planned = first["activations on the host"]
        assert measured == planned, first
    assert first["activations and temporary tensors"][1] != "-" and first["the process at its peak"][1] == "-"
    assert f"planned: the fullest rank takes {planned_total(said)} of its device" in said


def planned_total(said: str) -> str:
    (found,) = re.findall(r"planned: the fullest rank takes ([\d.]+ .B) of its device", said)
    return str(found)


def test_a_report_disturbs_nothing(tmp_path: Path) -> None:
    """The run is the same bit for bit; and a plan that cannot be made is told, not missed."""
    runs = []
    for number, flags in enumerate(({}, {"log_memory": True})):
        runs.append(tmp_path / str(number))
        said = run(arguments(**STAGES, **flags, train_iters=2, metrics_file=runs[-1]), 2)
        assert ("memory after" in said) == bool(flags)
    plain, lines = timeless(runs[0]), timeless(runs[1])
    memory = [line for line in lines if "memory/parameters" in line]
    assert plain == [line for line in lines if line not in memory] and [line["iteration"] for line in memory] == [1, 2]

    def before(rank: int) -> None:
        def fails(*_: Any) -> None:
            raise ValueError("no such plan")

        rehearsal.build_plan = fails  # type: ignore[assignment]

    said = run(arguments(device="cpu", train_iters=1, log_memory=True), before=before)
    assert "memory is reported without a plan: ValueError: no such plan" in said
    assert {planned for _, planned in reports(said)[0].values()} == {"-"}


def exhausted(kind: OpType, microbatch: int, error: BaseException) -> Any:
    """What makes the second rank fail within an operation."""

    def before(rank: int) -> None:
        if rank != 1:
            return
        backward = Executor._backward

        def fails(self: Executor, op: Any, received: Any) -> Any:
            if (op.type, op.microbatch) == (kind, microbatch):
                raise error
            return backward(self, op, received)

        Executor._backward = fails  # type: ignore[method-assign]

    return before


def test_a_rank_without_memory_says_what_took_it_and_what_to_change() -> None:
    """One message, on that rank; no traceback, and the other one ends too."""
    lost = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB")
    argv = arguments(**STAGES, train_iters=1, log_memory=True, device_memory_gb=0.0003)
    ended = launch(argv, 2, before=exhausted(OpType.BACKWARD, 1, lost), gloo=True)
    assert [end.code for end in ended] == [1, 1] and "Traceback" not in ended[1].stderr, report(ended)
    said = ended[1].stderr.splitlines()
    assert said[0] == (
        "pretrain_gpt.py: rank 1: out of memory in the backward pass of chunk 1, microbatch 1 on stage 1: "
        "2.00 GiB more were requested."
    )
    assert re.search(r"allocated: parameters (\S+ kB) \(planned \1\), gradients (\S+ kB) \(planned \2\), moments", said[1])
    assert "activations and temporary tensors" in said[1] and said[2] == "  Settings to change, the cheapest first:"
    assert "1. the fullest rank needs" in said[3] and "It fits with" in said[3], "the plan's advice comes first"
    assert re.match(r"    2\. --recompute-granularity selective", said[4]) and len(said) > 6
    assert "--dry-run --world-size 2 --gpus-per-node 2 --device-memory-gb" in said[-1]
    assert "out of memory" not in ended[0].stderr and "lost contact with another rank" in ended[0].stderr


@pytest.mark.parametrize(
    ("shape", "beyond", "where"),
    [
        ({"hidden_size": 4096, "num_layers": 2}, 300e6, "while the model's state is allocated, at "),
        ({"seq_length": 4096, "micro_batch_size": 8, "hidden_size": 128}, 300e6, "in the forward pass of chunk 0, microbatch 0"),
    ],
)
def test_memory_that_is_really_exhausted(shape: dict[str, Any], beyond: float, where: str) -> None:
    """The process may have only so much more address space than it has."""

    def before(rank: int) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + int(beyond)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    (ended,) = launch(arguments(**{"train_iters": 1, "device": "cpu", "global_batch_size": 8, **shape}), before=before)
    first, *rest = ended.stderr.splitlines()
    assert ended.code == 1 and "Traceback" not in ended.stderr, report([ended])
    assert first.startswith(f"pretrain_gpt.py: out of memory {where}") and first.endswith("more were requested."), report([ended])
    assert rest[-1].startswith("  The same flags with --dry-run --world-size 1 ") and "Settings to change" in ended.stderr
