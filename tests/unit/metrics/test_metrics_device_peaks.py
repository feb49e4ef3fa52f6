"""The table of device peaks: names as drivers give them, and no guess for what is not in it."""

from __future__ import annotations

import pytest

from megatron.metrics.measures import get_mixed_peak_flops, get_peak_flops


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("NVIDIA A10", "bfloat16", 125),
        ("NVIDIA A30", "bfloat16", 165),
        ("NVIDIA A40", "bfloat16", 149.7),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA H200", "torch.bfloat16", 989.4),
        ("NVIDIA H200", "float32", 66.9),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA H200 NVL", "float16", 835.5),
        ("NVIDIA GH200 480GB", "bfloat16", 989.4),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA GB200", "bfloat16", 2500),
        ("NVIDIA L40S", "bfloat16", 362.05),
        ("NVIDIA L40", "bfloat16", 181.05),
        ("NVIDIA L4", "bfloat16", 121),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla V100-PCIE-32GB", "float64", 7),
        ("Tesla T4", "float16", 65),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("NVIDIA GeForce RTX 3090", "float16", 71),
        ("NVIDIA H100 80GB HBM3", "float8", 1978.9),
        ("NVIDIA B200", "float8", 4500),
        ("NVIDIA L4", "float8", 242.5),
        ("AMD Instinct MI250X", "bfloat16", 191.5),
        ("AMD Instinct MI300X", "float64", 163.4),
        ("AMD Instinct MI325X", "bfloat16", 1307.4),
    ],
)
def test_known_devices(name: str, dtype: str, teraflops: float) -> None:
    assert get_peak_flops(name, dtype) == pytest.approx(teraflops * 1e12, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cpu", "float32"),
        ("NVIDIA A100X", "bfloat16"),
        ("NVIDIA A10G", "bfloat16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16"),  # a seventh of the device
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16"),
        ("NVIDIA GeForce RTX 3090 Ti", "bfloat16"),
        ("NVIDIA H100 80GB HBM2e", "bfloat16"),
        ("AMD Instinct MI250X / MI250", "bfloat16"),
        ("Tesla V100-SXM2-16GB", "bfloat16"),  # emulated there
        ("NVIDIA L4", "float64"),
        ("NVIDIA A100 80GB PCIe", "float8"),
    ],
)
def test_unknown_devices_and_formats_have_no_peak(name: str, dtype: str) -> None:
    assert get_peak_flops(name, dtype) is None


def test_a_peak_of_several_formats_is_that_of_the_time_they_take() -> None:
    """Half of 2 PFLOP in 8 bits, half in 16, each at its peak."""
    half = get_mixed_peak_flops("NVIDIA B200", "bfloat16", 0.5)
    assert half == pytest.approx(2e15 / (1e15 / 4500e12 + 1e15 / 2250e12))
    assert get_mixed_peak_flops("NVIDIA B200", "bfloat16", 0.0) == 2250e12
    assert get_mixed_peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16", 0.5) is None
