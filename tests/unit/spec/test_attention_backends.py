"""Kernels of attention: which calls each of them takes, and which one auto chooses by measured times."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.spec.attention_backends import (
    KERNELS,
    AttentionCall,
    AttentionKernel,
    get_kernels,
    get_kernels_to_time,
    select_fastest_kernel,
)

BOTH: tuple[AttentionKernel, ...] = ("flash", "cudnn")


def test_what_each_kernel_takes() -> None:
    """Of each call that differs in one point from the plainest, those kernels of a GPU that refuse it, and a word of the reason."""
    plain = {"num_bits": 16, "head_size": 64, "is_grouped_query": False, "is_on_cuda": True}
    cases: list[tuple[dict[str, Any], dict[AttentionKernel, str]]] = [
        ({}, {}),
        ({"num_bits": 32}, {"flash": "16 bits", "cudnn": "16 bits"}),
        ({"num_bits": 64}, {"flash": "16 bits", "cudnn": "16 bits", "efficient": "64 bits"}),
        ({"head_size": 136}, {"cudnn": "up to 128, not 136"}),
        ({"head_size": 264}, {"flash": "at most 256", "cudnn": "up to 128"}),
        ({"head_size": 68}, {"cudnn": "multiple of 8", "efficient": "multiple of 8"}),
        ({"head_size": 68, "num_bits": 32}, {"flash": "16 bits", "cudnn": "16 bits"}),
        ({"is_grouped_query": True}, {"efficient": "key-value heads"}),
        ({"dropout": 0.1}, {"cudnn": "1/16, not 0.1"}),
        ({"dropout": 0.125}, {}),
        ({"is_deterministic": True}, {"cudnn": "not deterministic"}),
        ({"has_documents": True}, {"cudnn": "one token"}),
        ({"has_window": True}, {"cudnn": "no window", "efficient": "no window"}),
        ({"has_window": True, "dropout": 0.125}, {"flash": "dropout with a window", "cudnn": "window", "efficient": "window"}),
        ({"has_window": True, "head_size": 68}, {"flash": "multiple of 8", "cudnn": "window", "efficient": "window"}),
        ({"has_window": True, "is_on_cuda": False}, {"flash": "on a CPU", "cudnn": "GPUs only", "efficient": "GPUs only"}),
        ({"value_head_size": 64}, {}),
        ({"value_head_size": 32}, {"flash": "not 32 beside 64"}),
        ({"value_head_size": 36}, {"flash": "not 36 beside 64", "cudnn": "multiple of 8", "efficient": "not 36"}),
        (
            {"value_head_size": 32, "is_on_cuda": False},
            {"flash": "not 32 beside 64", "cudnn": "GPUs only", "efficient": "GPUs only"},
        ),
        ({"has_softcap_or_sinks": True}, {"flash": "nor sinks", "cudnn": "nor sinks", "efficient": "nor sinks"}),
        ({"is_on_cuda": False}, {"cudnn": "GPUs only", "efficient": "GPUs only"}),
        (
            {"is_on_cuda": False, "num_bits": 64, "head_size": 7, "dropout": 0.1},
            {"cudnn": "GPUs", "efficient": "GPUs", "flash": "dropout"},
        ),
    ]
    for changes, refused in cases:
        found = {kernel: AttentionCall(**{**plain, **changes}).find_obstacle(kernel) for kernel in KERNELS}
        assert {kernel for kernel, why in found.items() if why} == set(refused), changes
        assert all(words in (found[kernel] or "") for kernel, words in refused.items()), found


def test_megatrons_names_are_those_of_kernels() -> None:
    assert [get_kernels(name) for name in ("fused", "unfused", "flash")] == [("cudnn",), ("math",), ("flash",)]
    assert get_kernels("auto") == ("flash", "efficient", "math"), "cuDNN's only by a measurement"


@pytest.mark.parametrize(
    ("changes", "timed"),
    [
        ({}, BOTH),
        ({"is_grouped_query": True}, BOTH),
        ({"dropout": 0.125}, BOTH),
        ({"is_on_cuda": False}, ()),
        ({"num_bits": 32}, ()),
        ({"head_size": 256}, ()),
        ({"dropout": 0.1}, ()),
        ({"value_head_size": 32}, ()),
        ({"is_deterministic": True}, ()),
        ({"has_documents": True}, ()),
        ({"has_window": True}, ()),
        ({"has_softcap_or_sinks": True}, ()),
        ({"is_context_parallel": True}, ()),
    ],
)
def test_only_where_both_take_the_call_they_are_timed(changes: dict[str, Any], timed: tuple[AttentionKernel, ...]) -> None:
    """cuDNN's kernel not with deterministic results, nor where shapes vary as those of documents do."""
    assert (
        get_kernels_to_time(
            AttentionCall(**{"num_bits": 16, "head_size": 64, "is_grouped_query": False, "is_on_cuda": True, **changes})
        )
        == timed
    )


def test_flash_attention_keeps_its_place_unless_another_is_clearly_faster() -> None:
    assert select_fastest_kernel({"flash": 1.04, "cudnn": 1.0}) == "flash"
    assert select_fastest_kernel({"flash": 1.06, "cudnn": 1.0}) == "cudnn"
    assert select_fastest_kernel({"flash": 1.0, "cudnn": 2.0}) == "flash"
    assert (
        select_fastest_kernel({"flash": 10.4, "cudnn": 10.0}) == "flash"
        and select_fastest_kernel({"flash": 0.4, "cudnn": 0.3}) == "cudnn"
    ), "by a factor"
    assert select_fastest_kernel({"cudnn": 2.0}) == "cudnn"
