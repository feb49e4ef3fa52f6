"""Which kernel computes attention, and whether it keeps its probabilities."""

from __future__ import annotations

import itertools

import torch

from megatron.model.attention import core_attention
from megatron.model.attention_kernel import attention_kernel, keeps_probabilities

S, B = 24, 2


def test_what_the_cpu_keeps_is_known() -> None:
    """Against what autograd saves; head sizes that vector registers do not like as well."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for dtype, size, heads, dropout in itertools.product(dtypes, (4, 7, 264), ((4, 4), (4, 2)), (0.0, 0.1)):
        q, k, v = (torch.randn(S, B, number, size, dtype=dtype, requires_grad=True) for number in (heads[0], heads[1], heads[1]))
        kept: list[int] = []

        def keep(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(tensor.shape[-2:].numel() if tensor.shape[-2:] == (S, S) else 0)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            core_attention(q, k, v, dropout=dropout)
        expected = keeps_probabilities(q, grouped=heads[0] != heads[1], dropout=dropout)
        assert any(kept) == expected, (dtype, size, heads, dropout)


def test_an_older_gpu_has_no_flash_attention() -> None:
    kinds = [attention_kernel(torch.float16, 64, grouped=grouped, flash=False) for grouped in (False, True)]
    assert kinds == ["memory-efficient", "math"]
