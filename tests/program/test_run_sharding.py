"""Whole runs with sharded state: the losses of one process, whatever is sharded and overlapped, and what the start-up log tells."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import megatron.data_parallel.fsdp  # noqa: F401  # imported here once, not in every forked rank
from megatron_lab.audit.trace_file import read_trace
from tests.program.test_audit_trace import assert_same
from tests.support.equality import assert_equal_tensors
from tests.support.runs import arguments, run, saved_tensors, timeless

STEPS = 2
BASE: dict[str, Any] = {
    "fp64": True,
    "train_iters": STEPS,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "lr_decay_style": "cosine",
    "eval_iters": 1,
    "eval_interval": 1,
    "ddp_bucket_size": 5000,
    "make_vocab_size_divisible_by": 4,
    "log_params_norm": True,
    "log_layer_norms": True,
}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
STAGED = {"pipeline_model_parallel_size": 2, "num_layers": 4}
ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params"}

RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "distributed optimizer": (4, {"use_distributed_optimizer": True, **OVERLAP}),
    "distributed optimizer, tensor": (4, {"use_distributed_optimizer": True, **SPLIT}),
    "optim, pipeline": (4, {"data_parallel_sharding_strategy": "optim", **STAGED, **OVERLAP, "pipeline_schedule": "zb-v"}),
    "optim_grads": (2, {"data_parallel_sharding_strategy": "optim_grads", **OVERLAP}),
    "optim_grads, ranks of a pipeline side by side": (
        4,
        {"data_parallel_sharding_strategy": "optim_grads", **STAGED, "pipeline_schedule": "zb-h1", "use_tp_pp_dp_mapping": True},
    ),
    "optim_grads_params": (2, ZERO3),
    "optim_grads_params, tensor": (4, {**ZERO3, **SPLIT}),
    "optim_grads_params, pipeline": (4, {**ZERO3, **STAGED, "num_virtual_stages_per_pipeline_rank": 2}),
    "optim_grads_params, never": (2, {**ZERO3, "fsdp_reshard_after_forward": "never"}),
    "optim_grads_params, replicas": (4, {**ZERO3, "fsdp_shard_size": 2}),
    "optim_grads_params, host, once": (4, {**ZERO3, **STAGED, "fsdp_params_cpu": True, "fsdp_reduce_once": True}),
    "host memory": (2, {"data_parallel_sharding_strategy": "optim_grads", "optimizer_cpu_offload": True, **OVERLAP}),
    "optim_grads_params, never, half in host memory": (
        2,
        {**ZERO3, "fsdp_reshard_after_forward": "never", "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
    ),
    "half in host memory": (2, {**ZERO3, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}),
}
TRACED = (
    "distributed optimizer, tensor",
    "optim_grads, ranks of a pipeline side by side",
    "optim_grads_params, replicas",
    "optim_grads_params, never, half in host memory",
    "half in host memory",
)


OVER_GLOO = ("distributed optimizer, tensor", "optim_grads_params, host, once")
"""Runs over gloo, as a user's; others go through shared memory."""
QUICK = ("optim_grads, ranks of a pipeline side by side",)
"""Each strategy beside all other axes: tests/proof/test_layouts_sharding.py and test_layouts.py; whole runs: test_run_checks.py."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("--full")
    if metafunc.function is test_losses_are_those_of_one_process:
        metafunc.parametrize("name", RUNS if full else QUICK)
    if metafunc.function is test_the_start_up_log_tells_what_is_kept_and_sent:
        metafunc.parametrize("strategy", PER_PARAMETER if full else ("optim_grads_params",))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, full: bool) -> dict[int, Path]:
    """Folders of runs of one process, by the number of layers."""
    folders = {}
    for layers in (2, 4) if full else (4,):
        folders[layers] = folder = tmp_path_factory.mktemp("one")
        files = {"save": folder, "metrics_file": folder / "metrics", "save_trace": folder / "trace"}
        said = run(arguments(**BASE, num_layers=layers, **files))
        (folder / "said").write_text(said)
    return folders


def told(said: str) -> list[str]:
    """Losses as they are printed, of training and validation."""
    return re.findall(r"lm loss(?: value)?: (\d\.\d{6}E[+-]\d\d)", said)


def test_losses_are_those_of_one_process(one_process: dict[int, Path], tmp_path: Path, name: str) -> None:
    """As printed, and in full digits; so are norms, the weights, and of some the traces."""
    world_size, flags = RUNS[name]
    alone = one_process[flags.get("num_layers", 2)]
    files = {"save": tmp_path, "metrics_file": tmp_path / "metrics", "save_trace": tmp_path / "trace" if name in TRACED else None}
    said = run(arguments(**{**BASE, **flags}, **files), world_size, gloo=name in OVER_GLOO)
    expected = told((alone / "said").read_text())
    assert len(expected) >= STEPS + 2 and told(said) == expected
    lines, wanted = timeless(tmp_path / "metrics"), timeless(alone / "metrics")
    assert len(lines) == len(wanted)
    for line, other in zip(lines, wanted, strict=True):
        assert line.keys() == other.keys()
        for what, number in other.items():
            assert line[what] == pytest.approx(number, rel=1e-10), what
    assert_equal_tensors(saved_tensors(tmp_path, STEPS), saved_tensors(alone, STEPS), what="weights")
    if name in TRACED:
        (found,), (expected_trace,) = read_trace(tmp_path / "trace"), read_trace(alone / "trace")
        assert_same(found, expected_trace)
        assert found.header.parameters == expected_trace.header.parameters


def test_zeros_of_the_gradient_are_counted_once(tmp_path: Path, full: bool) -> None:
    """Those of tokens that the batch does not have, in the table of an untied embedding; padding is none of them."""
    flags = {"untie_embeddings_and_output_weights": True, "vocab_size": 500, "log_num_zeros_in_grad": True, "fp64": True}
    found = []
    # Without sharding, tensor and pipeline ranks count in tests/program/test_run_log.py.
    strategies = ("no_shard", *(["no_shard", "optim", "optim_grads"] if full else []), "optim_grads_params")
    beside, ranks = (SPLIT, 4) if full else ({}, 2)
    for number, strategy in enumerate(strategies):
        settings = {
            **flags,
            "num_layers": 1,
            "train_iters": 1,
            "global_batch_size": 4,
            "ddp_bucket_size": 5000,
            "data_parallel_sharding_strategy": strategy,
        }
        run(arguments(**settings, **(beside if number else {}), metrics_file=tmp_path / str(number)), ranks if number else 1)
        found.append(timeless(tmp_path / str(number))[0]["num_zeros"])
    assert found[0] > 32 * 300
    assert found == pytest.approx([found[0]] * len(found), abs=8)  # others may be zero by chance


UNITS = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
PER_PARAMETER: dict[str, dict[str, float]] = {
    "no_shard": {"parameters": 2, "gradients": 4, "main params": 4, "moments": 8},
    "optim": {"parameters": 2, "gradients": 4, "main params": 2, "moments": 4},
    "optim_grads": {"parameters": 2, "gradients": 2, "main params": 2, "moments": 4},
    "optim_grads_params": {"parameters": 2, "gradients": 2, "moments": 4},
}
"""Bytes on each of two data ranks, in 16 bits with Adam."""
SENT = {"no_shard": 4.0, "optim": 3.0, "optim_grads": 2 * 2 + 1.0, "optim_grads_params": 2 * (2 + 2 * 1.0)}
"""Bytes for each parameter over two data ranks in a step of two microbatches: half of what is reduced (4 each) or gathered (2)."""


def test_the_start_up_log_tells_what_is_kept_and_sent(strategy: str) -> None:
    flags: dict[str, Any] = {"data_parallel_sharding_strategy": strategy, "untie_embeddings_and_output_weights": True}
    sizes = {"hidden_size": 128, "vocab_size": 511, "num_layers": 1, "train_iters": 1, "bf16": True}
    said = run(arguments(**flags, **sizes), 2)
    found = re.search(r"model of ([\d,]+) parameters", said)
    assert found is not None
    parameters = int(found[1].replace(",", ""))
    lines = [line.strip() for line in said.splitlines()]
    (state,) = (line for line in lines if line.startswith("state of the model"))
    (sends,) = (line for line in lines if line.startswith("in a step of 2 microbatches such a rank sends "))
    assert state.startswith(f"state of the model, {strategy} over 2 data ranks: ") and " on each rank: " in state
    for what, each in PER_PARAMETER[strategy].items():
        told_bytes = re.search(rf"{what} ([\d.]+) (\w+)", state)
        assert told_bytes is not None, what
        assert float(told_bytes[1]) * UNITS[told_bytes[2]] == pytest.approx(each * parameters, rel=0.01), what
    assert ("main params" in state) == ("main params" in PER_PARAMETER[strategy])
    told_bytes = re.search(r"sends ([\d.]+) (\w+) over dp", sends)
    assert told_bytes is not None
    assert float(told_bytes[1]) * UNITS[told_bytes[2]] == pytest.approx(SENT[strategy] * parameters, rel=0.01)


def test_the_start_up_log_tells_of_host_memory() -> None:
    said = run(arguments(use_distributed_optimizer=True, optimizer_cpu_offload=True, train_iters=1, bf16=True), 2)
    (line,) = (line.strip() for line in said.splitlines() if "in host memory: " in line)
    assert re.fullmatch(r"and [\d.]+ kB in host memory: main params [\d.]+ kB, moments [\d.]+ kB", line)
