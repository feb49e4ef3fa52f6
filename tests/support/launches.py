"""Counts what a GPU would be given to run: the operations that reach the dispatcher and compute something, on tensors without
memory.

An operation that torch has as one kernel counts as one (attention and a norm launch a few more in backward). Views, allocations and
what asks for a dtype launch nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lab.planner.op_cache import run_op

_NO_LAUNCH = {"aten::_unsafe_view", "aten::detach", "aten::promote_types"}


class Launches(TorchDispatchMode):
    """While it is entered, counts by name. Goes beneath a `FusedNorms` and the planner's `CudaKernels`."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.by_name.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.namespace in ("aten", "prim"), f"what runs inside {func.name()} is not seen"
        if func is torch.ops.aten._softmax.default and args[2]:  # the meta device takes bfloat16 too
            assert args[0].dtype == torch.float16, "CUDA's softmax widens nothing but float16"
        if func.namespace == "aten" and not func.is_view and "empty" not in func.name() and func.name() not in _NO_LAUNCH:
            self.by_name[func.name()] += 1
        return run_op(func, args, kwargs or {})


class FusedNorms(TorchFunctionMode):
    """Counts the RMSNorm of CUDA, for which a plan has a stand-in: one operation forward, one backward, under their own names."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.rms_norm:
            counts, trained = self._launches.by_name, torch.is_grad_enabled()
            counts.update({"aten::_fused_rms_norm": 1, "aten::_fused_rms_norm_backward": int(trained)})
            counts.subtract({"aten::mul.Tensor": 1, "aten::add.Tensor": int(trained)})  # what stands in for them
        return func(*args, **(kwargs or {}))
