"""Handles of compiled graphs: they name living objects only, are never read, and are declared unsafe for CUDA graphs."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megatron.model.all_heads_norm
import megatron.model.block
import megatron.tensor_parallel.linear  # noqa: F401 (registers operations, as the two above)
from megatron.parallel.handles import Handles
from tests.support.lone_rank import CPU


class Target:
    """Something that a handle names."""


class NoReads(TorchDispatchMode):
    """Fails where a tensor's value is read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket is not torch.ops.aten._local_scalar_dense, "on a GPU the host would wait"
        return func(*args, **(kwargs or {}))


def test_each_handle_finds_its_object_without_reading_a_value() -> None:
    handles: Handles[Target] = Handles("target")
    targets = [Target() for _ in range(100)]
    with NoReads():
        created = [handles.create(target, CPU) for target in targets]
        assert all(handles.find(handle) is target for handle, target in zip(created, targets, strict=True))
        with pytest.raises(AssertionError, match="would wait"):
            int(torch.ones(()))
    assert all(handle.dim() == 0 and not handle.is_floating_point() for handle in created)


def test_a_dead_object_is_gone_and_a_copy_finds_nothing() -> None:
    handles: Handles[Target] = Handles("target")
    target = Target()
    handle = handles.create(target, CPU)
    for copy in (handle.clone(), pickle.loads(pickle.dumps(handle))):
        with pytest.raises(RuntimeError, match="names no target"):
            handles.find(copy)
    del target
    gc.collect()
    assert not len(handles)
    with pytest.raises(RuntimeError, match="no longer exists"):
        handles.find(handle)


def test_an_address_that_is_used_again_names_the_new_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the old object, whose handle is gone, dies after the new one got its own."""
    handles: Handles[Target] = Handles("target")
    old, new, memory = Target(), Target(), torch.zeros((), dtype=torch.int64)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: memory.view(()))
    first = handles.create(old, CPU)
    assert handles.find(first) is old
    second = handles.create(new, CPU)
    assert first.data_ptr() == second.data_ptr()
    del old
    gc.collect()
    assert handles.find(second) is new and len(handles) == 1


def test_the_meta_device_has_handles_without_entries() -> None:
    handles: Handles[Target] = Handles("target")
    assert handles.create(Target(), torch.device("meta")).is_meta
    assert not len(handles)


def test_no_operation_of_the_project_may_be_recorded_in_a_cuda_graph() -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("megatron::")}
    assert names >= {"megatron::linear", "megatron::linear_backward", "megatron::dropout", "megatron::sum_both_ways"}
    for name in names:
        overload = getattr(torch.ops.megatron, name.partition("::")[2]).default
        assert torch.Tag.cudagraph_unsafe in overload.tags, name
