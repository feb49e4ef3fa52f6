"""What a run tells torch about products of float32, and its log about it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron.config.config import Config
from megatron.config.precision import PrecisionConfig
from megatron.precision.gemms import format_precision
from megatron.training.startup import set_numerics


@pytest.fixture
def precision_of_torch() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("precision_of_torch")
def test_float32_products() -> None:
    """In TensorFloat32 on a GPU, if asked for, and else as they are."""
    for asked in ("high", "highest"):
        config = PrecisionConfig(fp32_matmul_precision=asked)  # type: ignore[arg-type]
        set_numerics(Config(precision=config))
        assert torch.get_float32_matmul_precision() == asked
        assert torch.backends.cuda.matmul.allow_tf32 == (asked == "high")
        told = [format_precision(config, 4, torch.device(device)) for device in ("cuda", "cpu")]
        assert [" ".join(lines).count("TensorFloat32") for lines in told] == [asked == "high", 0]
