"""The three products of a linear layer in 8 bits, against the reference's; and what of them a GPU can do."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from megatron.config.precision import Fp8, Fp8Format, Fp8Recipe, PrecisionConfig
from megatron.parallel.accumulate import GradSink
from megatron.precision.fp8_gemms import E4M3, Fp8Gemms, QuantizedMatrix, ScaleGranularity, compute_amax, scaled_matmul_into
from megatron.precision.gemms import check_fp8_support, find_fp8_problem
from megatron.tensor_parallel.linear import LinearConfig, apply_linear_config
from megatron_lab.planner.kernel_memory import CudaKernels
from megatron_lab.planner.storages import StorageLedger
from megatron_lab.verification.reference.eight_bits import Fp8Spec, fp8_linear
from tests.support.launches import Launches
from tests.support.lone_rank import lone_rank

ALL = [(recipe, format_) for recipe in get_args(Fp8Recipe) for format_ in get_args(Fp8Format)]


def products_of(recipe: Fp8Recipe, format_: Fp8Format) -> Fp8Gemms:
    return Fp8Gemms(Fp8(format_, recipe), lone_rank().group("tp"), "outputs")


def matrices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [s, b, in], w [out, in] and dy [s, b, out]; rows and columns of very different sizes."""
    generator = torch.Generator().manual_seed(1)
    x, w, dy = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((64, 2, 256), (384, 256), (64, 2, 384)))
    x *= torch.logspace(-3, 3, 256, dtype=torch.float64)
    dy *= torch.logspace(2, -4, 64, dtype=torch.float64)[:, None, None]
    return x.to(dtype), w.to(dtype), dy.to(dtype)


def distances(recipe: Fp8Recipe, format_: Fp8Format, dtype: torch.dtype) -> list[float]:
    """How far output (with a bias) and gradients of input and weight are from the reference's, relative to these. The gradient of
    the weight goes into a buffer of its own dtype."""
    x, w, dy = matrices(dtype)
    bias = torch.linspace(-1, 1, 384, dtype=torch.float64).to(dtype)
    exact_x, exact_w = (tensor.double().requires_grad_() for tensor in (x, w))
    y = fp8_linear(Fp8Spec(recipe, format_ == "hybrid"), exact_x.transpose(0, 1), exact_w).transpose(0, 1)
    y.backward(dy.double())

    weight = torch.nn.Parameter(w)
    wide = torch.promote_types(dtype, torch.float32)
    buffer = torch.empty(w.shape, dtype=wide)
    weight.grad_sink = GradSink(wide, lambda: None, lambda: buffer)  # type: ignore[attr-defined]
    x.requires_grad_()
    found = apply_linear_config(
        LinearConfig(lone_rank().group("tp"), gemms=products_of(recipe, format_)), x, weight, torch.nn.Parameter(bias)
    )
    found.backward(dy)
    assert x.grad is not None and exact_x.grad is not None and exact_w.grad is not None
    assert found.dtype == x.grad.dtype == dtype
    pairs = ((found, y + bias.double()), (x.grad, exact_x.grad), (buffer, exact_w.grad))
    return [((one.double() - exact).norm() / exact.norm()).item() for one, exact in pairs]


@pytest.mark.parametrize(("recipe", "format_"), ALL)
def test_products_are_those_of_the_reference(recipe: Fp8Recipe, format_: Fp8Format) -> None:
    assert max(distances(recipe, format_, torch.float64)) < 1e-14
    # Results are rounded to bfloat16, the gradient of the weight is not; and scales in float32 move a few numbers over a middle.
    *rounded, summed = distances(recipe, format_, torch.bfloat16)
    assert max(rounded) < 4e-3 and summed < 2e-4


def test_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales along the wrong dimension, of matrices before, and of the other format. (Others are planted in whole runs.)"""
    kept: dict[ScaleGranularity, torch.Tensor] = {}
    faults: dict[str, tuple[Fp8Recipe, str, Any]] = {
        "wrong dimension": ("rowwise", "compute_amax", lambda x, grain: compute_amax(x.t(), grain).t()),
        "stale": ("tensorwise", "compute_amax", lambda x, grain: kept.setdefault(grain, compute_amax(x, grain))),
        "wrong format": ("blockwise", "E5M2", E4M3),
    }
    for name, (recipe, what, fault) in faults.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"megatron.precision.fp8_gemms.{what}", fault)
            assert max(distances(recipe, "hybrid", torch.float64)) > 1e-3, name


@pytest.mark.parametrize(("recipe", "format_"), ALL)
def test_kernels_accept_what_they_are_given(recipe: Fp8Recipe, format_: Fp8Format) -> None:
    """torch checks shapes, strides and dtypes of these products without a GPU too."""
    products = products_of(recipe, format_)
    with torch.device("meta"), CudaKernels(), Launches() as launches:
        x, w = torch.empty(96, 4, 256, dtype=torch.bfloat16), torch.empty(640, 256, dtype=torch.bfloat16)
        y = products.compute_output(x, w, torch.empty(640, dtype=torch.bfloat16))
        assert (y.shape, y.dtype) == ((96, 4, 640), torch.bfloat16)
        dx = products.compute_input_grad(y, w)
        assert (dx.shape, dx.dtype) == (x.shape, torch.bfloat16)
        into = torch.empty(640, 256)
        for add in (False, True):
            products.compute_weight_grad(y.flatten(0, 1), x.flatten(0, 1), into, add=add)
        assert products.compute_output(x.double(), w.double()).dtype == torch.float64, "emulated"
    assert not launches.by_name["aten::cat"], "a rank alone has no scales to put together for others"


def test_a_large_weight_gradient_takes_at_most_128_mib_beside() -> None:
    """On a GPU: the product is made in parts, of which one at a time is there before it is added."""
    for rows, columns in ((1 << 14, 1 << 13), (1 << 13, 1 << 15)):
        with torch.device("meta"), CudaKernels(), StorageLedger() as ledger:
            scale = torch.empty(1, 1)
            a, b = (QuantizedMatrix(torch.empty(size, 16, dtype=E4M3.dtype), scale, "tensor") for size in (rows, columns))
            into = torch.empty(rows, columns)
            ledger.take_span()
            scaled_matmul_into(into, a, b, add=True)
            assert 0 < ledger.take_span().peak_bytes <= 128 << 20 < into.nbytes


def test_what_a_gpu_lacks_is_said() -> None:
    tensorwise, rowwise, blockwise = (Fp8("hybrid", recipe) for recipe in get_args(Fp8Recipe))
    assert "8.9" in str(find_fp8_problem(tensorwise, (8, 6), "12.8"))
    assert "--fp8-format e4m3" in str(find_fp8_problem(blockwise, (9, 0), "12.9"))
    blockwise = Fp8("e4m3", "blockwise")
    assert "9.0" in str(find_fp8_problem(blockwise, (10, 0), "13.0"))
    assert "12.9" in str(find_fp8_problem(blockwise, (9, 0), "12.8"))
    able = [
        (tensorwise, (8, 9), "12.4"),
        (rowwise, (8, 9), "12.4"),
        (rowwise, (10, 0), "13.0"),
        (blockwise, (9, 0), "12.9"),
    ]
    assert not any(find_fp8_problem(*case) for case in able)


def test_a_gpu_that_cannot_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, precision = torch.device("cuda"), PrecisionConfig(bf16=True, fp8_format="e4m3")
    check_fp8_support(precision, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_fp8_support(PrecisionConfig(bf16=True), cuda)
    with pytest.raises(ValueError, match=r"tensorwise needs compute capability 8\.9 .* A100-SXM4-80GB has compute capability 8\.0"):
        check_fp8_support(precision, cuda)
    check_fp8_support(PrecisionConfig(fp64=True, fp8_format="e4m3"), cuda)  # emulated
