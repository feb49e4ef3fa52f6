"""Which kernel computes attention, and whether it keeps its probabilities."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend

from megatron.attention import backends
from megatron.attention.backends import backend_in_use, find_kernel_name, get_enabled_kernels, saves_probabilities, select_kernel
from megatron.attention.core import core_attention, view_as_sdpa_inputs
from megatron.model.key_value_cache import KeyValueCache
from megatron.spec.attention_backends import AttentionCall, AttentionKernel

S, B = 24, 2


def test_what_the_cpu_keeps_is_known() -> None:
    """Against what autograd saves; head sizes that vector registers do not like as well."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    drawn = itertools.product(dtypes, (4, 7, 264), ((4, 4), (4, 2)), (("auto", 0.0), ("auto", 0.1), ("flash", 0.0), ("math", 0.0)))
    for dtype, size, heads, (backend, dropout) in drawn:
        q, k, v = (torch.randn(S, B, number, size, dtype=dtype, requires_grad=True) for number in (heads[0], heads[1], heads[1]))
        kept: list[int] = []

        def keep(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(tensor.shape[-2:].numel() if tensor.shape[-2:] == (S, S) else 0)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), backend_in_use(backend):  # type: ignore[arg-type]
            core_attention(q, k, v, dropout=dropout)
            expected = saves_probabilities(q, q, is_grouped=heads[0] != heads[1], dropout=dropout)
            queries, keys, values, grouped = view_as_sdpa_inputs(q.unflatten(2, (heads[1], -1)), k, v)
            words = find_kernel_name(queries, keys, values, dropout, is_grouped=grouped)
        assert any(kept) == expected == (backend == "math" or dropout > 0), (backend, dtype, size, heads, dropout)
        assert words == ("plain products, which keep the probabilities" if expected else "flash attention")


@pytest.mark.parametrize("value_size", [8, 4])
def test_values_of_another_size_are_multiplied_on_a_cpu(value_size: int) -> None:
    q, v = torch.zeros(S, B, 4, 8), torch.zeros(S, B, 4, value_size)
    fused = value_size == 8
    assert saves_probabilities(q, v, is_grouped=False, dropout=0.0) is not fused
    queries, keys, values, grouped = view_as_sdpa_inputs(q.unsqueeze(3), q, v)
    words = find_kernel_name(queries, keys, values, 0.0, is_grouped=grouped)
    assert words == ("flash attention" if fused else "plain products, which keep the probabilities")
    assert core_attention(q, q, v).shape == (S, B, 4 * value_size)


def test_an_older_gpu_has_no_flash_attention() -> None:
    kinds = [select_kernel(AttentionCall(16, 64, grouped, is_on_cuda=True), has_flash=False) for grouped in (False, True)]
    assert kinds == ["efficient", "math"]


def test_the_cpu_says_where_no_kernel_is_left() -> None:
    with backend_in_use("flash"), pytest.warns(UserWarning, match="Flash attention kernel not used|dropout"):
        q = torch.zeros(B, 4, S, 8)
        assert find_kernel_name(q, q, q, 0.1, is_grouped=False) is None


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (SDPBackend.FLASH_ATTENTION, "flash attention"),
        (SDPBackend.CUDNN_ATTENTION, "cuDNN's attention"),
        (SDPBackend.EFFICIENT_ATTENTION, "memory-efficient attention"),
        (SDPBackend.MATH, "plain products, which keep the probabilities"),
        (SDPBackend.OVERRIDEABLE, "the device's own kernel"),
        (SDPBackend.ERROR, None),
    ],
)
def test_every_answer_of_torch_has_a_name(monkeypatch: pytest.MonkeyPatch, backend: SDPBackend, words: str | None) -> None:
    monkeypatch.setattr(backends, "fused_sdp_choice", lambda *_, **__: backend.value)
    q = torch.zeros(B, 4, S, 8)
    assert find_kernel_name(q, q, q, 0.0, is_grouped=False) == words


def test_a_gpu_that_lacks_a_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(backends, "fused_sdp_choice", refuse)
    q = torch.zeros(B, 4, S, 8)
    assert find_kernel_name(q, q, q, 0.0, is_grouped=False) is None


def test_auto_leaves_nothing_to_the_order_of_torch() -> None:
    """Torch prefers cuDNN's kernel on some devices: it is off, whatever was on before."""
    for before in ("auto", "cudnn"):
        with backend_in_use(before), backend_in_use("auto"):  # type: ignore[arg-type]
            assert get_enabled_kernels() == ("flash", "efficient", "math")
    with backend_in_use("cudnn"):
        assert get_enabled_kernels() == ("cudnn",)


def test_a_call_with_a_mask_never_meets_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients may be NaN there, and each length of the keys would need a plan of its own."""
    seen: list[tuple[AttentionKernel, ...]] = []

    def attend(q: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        seen.append(get_enabled_kernels())
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    cache = KeyValueCache(8)
    cache.prepare_prefill([3, 5], torch.device("cpu"))
    cache.append(0, torch.zeros(5, 2, 1, 8), torch.zeros(5, 2, 1, 8))
    cache.finish_prefill()
    for backend in ("cudnn", "math"):
        with backend_in_use(backend):  # type: ignore[arg-type]
            cache.attend(0, torch.zeros(1, 2, 1, 2, 8))
    assert seen == [("flash", "efficient", "math"), ("math",)]
