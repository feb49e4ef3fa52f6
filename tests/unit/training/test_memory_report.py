"""What a rank on CUDA says of its memory, with torch's allocator played; and which errors mean that none is left."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config.cli import load
from megatron.data_parallel.provider import PersistentTensors
from megatron.spec.operations import Op, OpType
from megatron.training.failure import is_out_of_memory
from megatron_lab.monitoring.memory_report import MemoryAccount, gather_report, measure_memory
from megatron_lab.monitoring.out_of_memory import OutOfMemoryReport
from megatron_lab.planner.state_layout import Bytes
from tests.support.runs import arguments

GIB = 2**30


class Card:
    """Memory of a GPU of 80 GB of which torch's allocator has 70."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stats = {"allocated_bytes.all.peak": 60 * 10**9, "reserved_bytes.all.peak": 70 * 10**9}
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * 10**9, 80 * 10**9))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70 * 10**9)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 55 * 10**9)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=80 * 10**9))


def step_of(current: Op | None = None) -> Any:
    """A training step whose state is on the meta device, played by tensors that say that they are elsewhere."""
    weights, grads = torch.zeros(1000), torch.zeros(1000)
    shard = SimpleNamespace(main_param=torch.zeros(1000), moments={"exp_avg": torch.zeros(1000)}, average=None, on_host=True)
    provider = SimpleNamespace(
        get_persistent_tensors=lambda: PersistentTensors([weights[:500], weights[500:]], [grads], [grads[3:], torch.zeros(7)])
    )
    optimizer = SimpleNamespace(shards=[shard], offloaded_shards=[shard], staging_buffers=[torch.zeros(10)], buffers=[])
    topology = SimpleNamespace(pp=2)
    context = SimpleNamespace(device=torch.device("cuda", 0), topology=topology, coordinates={"pp": 1})
    executor = SimpleNamespace(current_op=current, host=SimpleNamespace(num_bytes=123_000))
    return SimpleNamespace(context=context, providers=[provider], optimizer=optimizer, executor=executor)


def test_storages_count_once_and_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch)
    found = measure_memory(step_of(), baseline=5)
    assert found.state.parameters == Bytes(host=4000) and found.state.gradients == Bytes(host=4000), "a CPU is no CUDA device"
    assert found.state.moments == Bytes(host=4000) and found.state.main_params == Bytes(host=4000)
    assert found.state.buffers == Bytes(host=28 + 40), "without the one that gradients lie in"
    assert found.activations == found.peak == 60 * 10**9 and found.reserved == 70 * 10**9 and found.device_used == 72 * 10**9


def test_a_report_on_cuda_has_the_allocators_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch)
    world: Any = SimpleNamespace(world=SimpleNamespace(size=1))
    lines, most = gather_report(MemoryAccount(step=step_of()), world, "after iteration 7")
    text = "\n".join(lines)
    assert most["memory/reserved-at-the-peak"] == 70e9 and most["memory/parameters-on-the-host"] == 4000
    assert text.startswith("  memory after iteration 7, of this process")
    for name, amount in (
        ("allocated at the peak", "60 GB"),
        ("reserved at the peak", "70 GB"),
        ("used of the device", "72 GB"),
        ("activations on the host", "123 kB"),
    ):
        assert f"{name}  " in text and any(name in line and amount in line for line in text.splitlines())


ENDED = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB"),
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    ),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("NCCL error: ncclUnhandledCudaError. Last error: Failed to CUDA calloc 6291456 bytes"),
)


def test_which_errors_are_explained() -> None:
    assert all(map(is_out_of_memory, ENDED))
    others = (RuntimeError("shape mismatch"), ValueError("out of memory"), OSError(errno.ENOSPC, "No space left on device"))
    assert not any(map(is_out_of_memory, others))


def test_gaps_of_the_allocator_are_told_with_their_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is applied already. The flags that follow are those of this job."""
    Card(monkeypatch)
    config = load(arguments(train_iters=1, num_layers=4, micro_batch_size=8, seq_length=2048, device="cuda"), 1).config
    account = MemoryAccount(step=step_of(Op(OpType.RECOMPUTE, 1, 2)))
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    said = OutOfMemoryReport(config, account, vocab_size=61).format_message(ENDED[0]).splitlines()
    assert (
        said[0] == "out of memory in the recomputation of layers of chunk 1, microbatch 2 on stage 1: 1.50 GiB more were requested."
    )
    assert said[2] == "  torch's allocator has reserved 70 GB of the device, of which 15 GB are unused"
    assert said[4].startswith("    1. PYTORCH_ALLOC_CONF=expandable_segments:True in the environment")
    flags = "\n".join(said[5:])
    assert "--recompute-granularity full" in flags and "--micro-batch-size 2" in flags and "--loss-chunk-tokens" in flags
    assert "--sequence-parallel" not in flags and "sharding" not in flags, "one rank"
    assert said[-1].endswith("--world-size 1 --gpus-per-node 1 --device-memory-gb 80 show whether a change is enough.")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    again = OutOfMemoryReport(config, account, vocab_size=61).format_message(ENDED[0])
    assert "are unused" in again and "PYTORCH_ALLOC_CONF" not in again


def test_a_message_survives_what_cannot_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may be gone for good: then there is less of the message."""
    account = MemoryAccount(step=step_of())
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: 1 / 0)
    said = OutOfMemoryReport(load(arguments(train_iters=1), 1).config, account).format_message(MemoryError())
    assert said.splitlines()[1] == "  (no further explanation: ZeroDivisionError)" and "--dry-run" in said
