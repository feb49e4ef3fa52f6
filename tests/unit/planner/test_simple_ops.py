"""Results of operations that a plan works out itself are those of torch, to the stride."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lab.planner.simple_ops import infer_result

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


WIDE, INT, BOOL = torch.float32, torch.int64, torch.bool
X, TURNED, GAPS = meta(6, 1, 4), meta(4, 1, 6).transpose(0, 2), meta(6, 1, 8)[..., :4]
CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "add a row": (aten.add.Tensor, (X, meta(4)), {}),
    "add formats": (aten.add.Tensor, (X, meta(6, 1, 4, dtype=WIDE)), {}),
    "add with gaps": (aten.add.Tensor, (GAPS, X), {}),
    "add turned": (aten.add.Tensor, (TURNED, X), {}),
    "multiply turned": (aten.mul.Tensor, (TURNED, TURNED), {}),
    "multiply by a number that is a tensor": (aten.mul.Tensor, (X, meta(dtype=WIDE)), {}),
    "multiply used again": (aten.mul.Tensor, (meta(6, 1, 1).expand(6, 3, 4), meta(3, 1)), {}),
    "divide integers": (aten.div.Tensor, (meta(6, dtype=INT), 2), {}),
    "divide down": (aten.div.Tensor_mode, (meta(6, dtype=INT), 2), {"rounding_mode": "floor"}),
    "floor": (aten.floor_divide.default, (meta(6, dtype=INT), 2), {}),
    "remainder": (aten.remainder.Scalar, (meta(6, 2, dtype=INT), 3), {}),
    "compare": (aten.ne.Tensor, (meta(6, dtype=INT), meta(6, dtype=INT)), {}),
    "power": (aten.pow.Scalar, (1e4, meta(4, dtype=torch.float64)), {}),
    "mask": (aten.masked_fill.Scalar, (X, meta(6, 1, 1, dtype=BOOL), 0), {}),
    "choose": (aten.where.self, (meta(6, 1, 4, dtype=BOOL), X, meta(dtype=torch.bfloat16)), {}),
    "gelu": (aten.gelu.default, (X,), {"approximate": "tanh"}),
    "gelu backward": (aten.gelu_backward.default, (X, X), {"approximate": "tanh"}),
    "exponential of integers": (aten.exp.default, (meta(6, dtype=INT),), {}),
    "product and bias": (aten.addmm.default, (meta(5), meta(6, 4), meta(5, 4).t()), {}),
    "dot": (aten.dot.default, (meta(6), meta(6)), {}),
    "lay side by side": (aten.cat.default, ([GAPS, X], -1), {}),
    "lay end to end": (aten.cat.default, ([X, X],), {}),
    "stack": (aten.stack.default, ([X, X], -2), {}),
    "stack numbers": (aten.stack.default, ([meta(), meta()],), {}),
    "layer norm": (aten.native_layer_norm.default, (X, [4], meta(4), meta(4), 1e-5), {}),
    "layer norm backward": (
        aten.native_layer_norm_backward.default,
        (X, X, [4], meta(6, 1, 1, dtype=WIDE), meta(6, 1, 1, dtype=WIDE), meta(4), meta(4), [True, True, True]),
        {},
    ),
    "dropout": (aten.native_dropout.default, (X, 0.1, True), {}),
    "sum of exponentials": (aten.logsumexp.default, (X, [-1]), {}),
    "softmax backward": (aten._softmax_backward_data.default, (X, X, -1, WIDE), {}),
    "numbers": (aten.arange.start_step, (0, 9, 2), {"dtype": WIDE, "device": torch.device("meta")}),
}


def look(out: Any) -> list[tuple[Any, ...]]:
    """What can be seen of tensors without memory."""
    return [(one.shape, one.stride(), one.dtype, one.device.type) for one in (out if isinstance(out, tuple) else (out,))]


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_torch(name: str) -> None:
    func, args, kwargs = CASES[name]
    assert look(infer_result(func, args, kwargs)) == look(func(*args, **kwargs))


def test_what_is_written_into_is_given_back() -> None:
    """With a name, or in place."""
    out = meta(6, 1, 4)
    assert infer_result(aten.mul.out, (X, X), {"out": out}) is out
    assert infer_result(aten.exp_.default, (out,), {}) is out
    assert infer_result(aten.mul.out, (X, X), {"out": meta(0)}) is None, "torch makes it larger"


def test_torch_is_asked_for_all_else() -> None:
    """Views, tensors with memory, what torch may lay out otherwise, and what is not known."""
    assert infer_result(aten.view.default, (X, [24]), {}) is None
    assert infer_result(aten.add.Tensor, (torch.ones(2), torch.ones(2)), {}) is None
    assert infer_result(aten.cat.default, ([TURNED, TURNED],), {}) is None
    assert infer_result(aten.cat.default, ([X, X.float()],), {}) is None
    assert infer_result(aten.clone.default, (TURNED,), {"memory_format": torch.contiguous_format}) is None
    assert infer_result(aten.mm.default, (meta(6, 4), meta(4, 5)), {}) is None
