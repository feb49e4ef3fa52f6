"""Operations on CPU tensors without memory give the second time what they give the first time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_lab.planner import cpu_kernels
from megatron_lab.planner.cpu_kernels import CpuKernels

Described = tuple[torch.Size, tuple[int, ...], int, torch.dtype, bool]


def described(tensor: Tensor, base: Tensor) -> Described:
    """Shape, strides, offset, dtype, and whether the tensor lies in the storage of another."""
    shared = tensor.untyped_storage()._cdata == base.untyped_storage()._cdata
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, shared


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a new tensor": lambda x: x @ x.transpose(0, 1),
    "one of several": lambda x: torch.max(x, dim=0)[1],
    "a view": lambda x: x[1:, 2:],
    "a view of a view": lambda x: x[1:][1:],
    "a row of a view": lambda x: x[1:][2],
    "other dimensions": lambda x: x.transpose(0, 1).unsqueeze(1).view(2, 3, 1, 9),
    "a dtype of its own": lambda x: x.to(torch.bfloat16),
    "written in place": lambda x: x.add_(1),
    "written into another": lambda x: torch.mul(x, 2, out=torch.empty_like(x)),
    "transposed in place": lambda x: x.t_(),
    "a dimension more, in place": lambda x: x.unsqueeze_(0),
    "resized": lambda x: x[:2].clone().resize_(1, 3),
    "strides by hand": lambda x: x[1:].as_strided((2, 2), (1, 1)),
    "strides and offset by hand": lambda x: x[1:].as_strided((2, 2), (1, 1), 3),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.usefixtures("compiles_before_forks")
def test_the_result_is_that_of_the_library_each_time(
    operation: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "_cache", {})

    def results(mode: FakeTensorMode) -> list[Described]:
        with mode:
            bases = [torch.empty(9, 6), torch.empty(9, 6), torch.empty(18, 6)[9:]]
            return [described(operation(base), base) for base in bases]

    assert results(CpuKernels()) == results(FakeTensorMode())


@pytest.mark.usefixtures("compiles_before_forks")
def test_the_second_time_the_library_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "_cache", {})
    asked: list[str] = []
    dispatch = FakeTensorMode.__torch_dispatch__

    def noted(self: FakeTensorMode, func: torch._ops.OpOverload, *args: object, **named: object) -> object:
        if func.namespace == "aten":
            asked.append(func.name())
        return dispatch(self, func, *args, **named)  # type: ignore[arg-type]

    with CpuKernels():
        x, y = torch.empty(3, 4), torch.empty(3, 4)
        monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", noted)
        (x + 1)[1:]
        before = [*asked]
        (y + 1)[1:]
    assert {"aten::add.Tensor", "aten::slice.Tensor"} <= {*before}
    assert asked == before
