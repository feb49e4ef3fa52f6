"""Attention within documents: the same as with a dense mask, by either way of computing it, without such a mask in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.attention import documents as document_attention
from megatron.attention.backends import has_flash_attention
from megatron.attention.core import core_attention
from megatron.attention.documents import Documents, _load_varlen_attn, varlen_attention
from megatron.data.samples import compute_cu_seqlens
from megatron.parallel.random import seed_device

EOD = 0
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
CPU = torch.device("cpu")


def documents_of(rows: list[list[int]]) -> Documents:
    """The documents of tokens [b, s]."""
    bounds = compute_cu_seqlens(np.array(rows) == EOD)
    return Documents(bounds, torch.from_numpy(bounds), len(rows))


def heads(s: int, b: int, n: int, g: int, seed: int, dtype: torch.dtype = torch.float64) -> Heads:
    """Random q, k and v."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(s, b, count, 8, generator=generator, dtype=torch.float64).to(dtype) for count in (n, g, g))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: list[list[int]]) -> torch.Tensor:
    """The same with a mask [b, s, s] made token by token."""
    s, b, n, d = q.shape
    allowed = torch.zeros(b, s, s, dtype=torch.bool)
    for sample, row in enumerate(rows):
        start = 0
        for i, token in enumerate(row):
            allowed[sample, i, start : i + 1] = True
            start = i + 1 if token == EOD else start
    k, v = (x.repeat_interleave(n // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("ibnd,jbnd->bnij", q, k) / math.sqrt(d)
    weights = scores.masked_fill(~allowed[:, None], -math.inf).softmax(dim=-1)
    return torch.einsum("bnij,jbnd->ibnd", weights, v).flatten(2)


def plain_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    **options: Any,
) -> torch.Tensor:
    """What torch's `varlen_attn` computes on CUDA, sequence by sequence."""
    assert query.dim() == 3 and cu_seq_q.dtype == torch.int32 and window_size[1] == 0
    lengths = cu_seq_q.diff().tolist()
    assert torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k == max(lengths)
    assert int(cu_seq_q[0]) == 0 and int(cu_seq_q[-1]) == len(query) and min(lengths) > 0
    if query.shape[1] != key.shape[1]:
        assert options.pop("enable_gqa"), "heads differ"
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    assert not options
    parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
    outs = []
    for part in parts:
        q, k, v = (x.transpose(0, 1)[None] for x in part)
        if window_size[0] == -1:
            outs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0])
            continue
        back = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        seen = (back >= 0) & (back <= window_size[0])
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)[0])
    return torch.cat(outs, dim=1).transpose(0, 1).contiguous()


def by_varlen_with_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents) -> torch.Tensor:
    return varlen_attention(q, k, v, documents.cu_seqlens_device, documents.max_seqlen, plain_varlen, has_enable_gqa=True)


def by_varlen_without_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents) -> torch.Tensor:
    return varlen_attention(q, k, v, documents.cu_seqlens_device, documents.max_seqlen, plain_varlen, has_enable_gqa=False)


WAYS: list[Callable[..., torch.Tensor]] = [core_attention, by_varlen_with_groups, by_varlen_without_groups]
S = 12
CASES: dict[str, list[list[int]]] = {
    "no end": [[1] * S, [1] * S],
    "ends at the edges": [[0, *[1] * (S - 2), 0]],
    "ends only": [[0] * S, [0] * S, [0] * S],
    "several in a row": [[1, 1, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]],
    "a whole sample is one document": [[*[1] * (S - 1), 0], [1, 0, *[1] * (S - 2)]],
}


def check(way: Callable[..., torch.Tensor], rows: list[list[int]], n: int, g: int) -> None:
    inputs = heads(len(rows[0]), len(rows), n, g, seed=len(rows))
    found, expected = way(*inputs, documents_of(rows)), dense(*inputs, rows)
    assert found.shape == expected.shape and found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pairs = zip(*(torch.autograd.grad((out * weights).sum(), inputs) for out in (found, expected)), strict=True)
    for gradient, wanted in pairs:
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n, g", [(4, 4), (4, 2), (3, 1)])
def test_it_equals_a_dense_mask(way: Callable[..., torch.Tensor], case: str, n: int, g: int) -> None:
    check(way, CASES[case], n, g)


@settings(max_examples=30)
@given(
    rows=st.integers(1, 20).flatmap(lambda s: st.lists(st.lists(st.integers(0, 3), min_size=s, max_size=s), min_size=1, max_size=3))
)
@pytest.mark.parametrize("way", WAYS[:2])
def test_any_documents_equal_a_dense_mask(way: Callable[..., torch.Tensor], rows: list[list[int]]) -> None:
    check(way, rows, 2, 1)


def test_only_a_sample_of_several_documents_is_bounded_by_them() -> None:
    """A document that ends where its sample does hides nothing."""
    bounded = {name for name, rows in CASES.items() if documents_of(rows).is_packed}
    assert bounded == CASES.keys() - {"no end"}
    assert not documents_of([[*[1] * (S - 1), 0]] * 2).is_packed


def test_samples_without_an_end_equal_plain_attention_bit_for_bit() -> None:
    inputs = heads(16, 3, 4, 2, seed=1)
    assert torch.equal(core_attention(*inputs, documents_of([[1] * 16] * 3)), core_attention(*inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_dtypes_stay_near(dtype: torch.dtype) -> None:
    inputs, rows = heads(S, 2, 4, 2, 3, dtype), CASES["several in a row"]
    found = core_attention(*inputs, documents_of(rows))
    assert found.dtype == dtype
    q, k, v = (x.double() for x in inputs)
    expected = dense(q, k, v, rows)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_one_call_serves_all_documents_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a document is a token; and the calls are few however many documents there are."""
    lengths: list[int] = []
    attend = F.scaled_dot_product_attention

    def counting(q: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        lengths.append(q.shape[2])
        return attend(q, *others, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    core_attention(*heads(500, 3, 2, 2, seed=1), documents_of([[0] * 500] * 3))
    assert lengths == [1]
    lengths.clear()
    row = [token for length in range(1, 31) for token in [*[1] * (length - 1), 0]]
    core_attention(*heads(465, 2, 2, 2, seed=1), documents_of([row, row[::-1]]))
    assert lengths == sorted(set(lengths)) and len(lengths) <= math.sqrt(2 * 2 * 465)


def test_more_documents_than_one_call_takes_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_attention, "MAX_SEQUENCES_PER_CALL", 3)
    assert documents_of([[0] * 8, [1, 0] * 4]).sorted_by_length.groups == [(3, 1), (3, 1), (2, 1), (3, 2), (1, 2)]
    for rows in CASES.values():
        check(core_attention, rows, 2, 1)


def test_dropout_is_a_function_of_the_seed_and_stays_within_documents() -> None:
    inputs, documents = heads(S, 2, 4, 2, seed=1), documents_of(CASES["several in a row"])

    def draw(seed: int) -> torch.Tensor:
        seed_device(CPU, seed)
        return core_attention(*inputs, documents, 0.5)

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))
    (gradient,) = torch.autograd.grad(draw(3)[4:].sum(), [inputs[2]])
    assert not gradient[:2, 0].any() and gradient[5:, 0].any(), "what is before the end is out of sight"


class Largest(TorchDispatchMode):
    """Notes the most elements that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("way", [core_attention, by_varlen_with_groups])
@pytest.mark.parametrize("g", [2, 1])
@pytest.mark.parametrize("length", [2048, 100, 1])
def test_nothing_of_the_sequence_squared_is_made(way: Callable[..., torch.Tensor], g: int, length: int) -> None:
    """Forward and backward, one document or many: the largest tensor holds the heads of a sequence."""
    if length == 1 and way is not core_attention:
        length = 16  # the stand-in for torch's function goes from document to document
    s, n = 2048, 2
    row = [0 if i % length == length - 1 else 1 for i in range(s)]
    inputs, documents = heads(s, 1, n, g, 1, torch.float32), documents_of([row])
    with Largest() as largest:
        way(*inputs, documents).sum().backward()
    assert s * n * 8 <= largest.elements < s * s // 64


def test_the_search_for_large_tensors_finds_a_mask() -> None:
    with Largest() as largest:
        torch.ones(300, 300, dtype=torch.bool).tril().logical_not()
    assert largest.elements == 300 * 300


@pytest.mark.parametrize(
    "dtype, size, dropout, capability, expected",
    [
        (torch.bfloat16, 64, 0.0, (9, 0), True),
        (torch.float16, 256, 0.0, (8, 0), True),
        (torch.float32, 64, 0.0, (9, 0), False),
        (torch.bfloat16, 64, 0.1, (9, 0), False),
        (torch.bfloat16, 60, 0.0, (9, 0), False),
        (torch.bfloat16, 264, 0.0, (9, 0), False),
        (torch.bfloat16, 64, 0.0, (7, 0), False),
    ],
)
def test_flash_attention_is_used_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: int, dropout: float, capability: tuple[int, int], expected: bool
) -> None:
    class OnCuda:
        """As much of a tensor on CUDA as is asked."""

        is_cuda, device, shape = True, torch.device("cuda", 0), (S, 1, 2, size)

        def __init__(self) -> None:
            self.dtype = dtype

    has_flash_attention.cache_clear()
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert document_attention.flash_supports(OnCuda(), OnCuda(), dropout) is expected  # type: ignore[arg-type]
    has_flash_attention.cache_clear()


def test_torchs_function_has_the_arguments_that_are_given() -> None:
    """By its own registration for shapes alone, as no CPU computes it: [T, n, d] comes out, whatever is grouped."""
    attend, takes_groups = _load_varlen_attn()
    documents = documents_of(CASES["several in a row"])
    q, k, v = (x.detach().to(torch.bfloat16).to("meta") for x in heads(S, 2, 4, 2, 1))
    on_meta = Documents(documents.cu_seqlens, documents.cu_seqlens_device.to("meta"), 2)
    for groups in {takes_groups, False}:
        assert varlen_attention(q, k, v, on_meta.cu_seqlens_device, S, attend, groups, window=3, scale=0.5).shape == (S, 2, 32)
