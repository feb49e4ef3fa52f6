"""Which kernel computes attention, and what it keeps: for the layers that call it, and for a plan on a machine without the device.

torch chooses at each call, from the kernels that are switched on. So a backend is chosen once, by leaving only its kernel on; who
asks for the kernel reads the same switches.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch.backends import cuda as switches
from torch.nn.attention import SDPBackend

from megatron.parallel.torch_private import fused_sdp_choice
from megatron.spec.attention_backends import AttentionBackend, AttentionCall, AttentionKernel, kernels_of

_IN_WORDS = {
    SDPBackend.FLASH_ATTENTION.value: "flash attention",
    SDPBackend.CUDNN_ATTENTION.value: "cuDNN's attention",
    SDPBackend.EFFICIENT_ATTENTION.value: "memory-efficient attention",
    SDPBackend.MATH.value: "plain products, which keep the probabilities",
}


def use_backend(backend: AttentionBackend) -> Callable[[], None]:
    """Have attention of this process computed by these kernels only, from now on; returns what brings back those before."""
    before = _switched_on()
    _switch_on(kernels_of(backend))
    return functools.partial(_switch_on, before)


@contextlib.contextmanager
def backend_in_use(backend: AttentionBackend) -> Iterator[None]:
    """For a while."""
    bring_back = use_backend(backend)
    try:
        yield
    finally:
        bring_back()


def _switched_on() -> tuple[AttentionKernel, ...]:
    on: dict[AttentionKernel, bool] = {
        "flash": switches.flash_sdp_enabled(),
        "cudnn": switches.cudnn_sdp_enabled(),
        "efficient": switches.mem_efficient_sdp_enabled(),
        "math": switches.math_sdp_enabled(),
    }
    return tuple(kernel for kernel, enabled in on.items() if enabled)


def _switch_on(kernels: tuple[AttentionKernel, ...]) -> None:
    switches.enable_flash_sdp("flash" in kernels)
    switches.enable_cudnn_sdp("cudnn" in kernels)
    switches.enable_mem_efficient_sdp("efficient" in kernels)
    switches.enable_math_sdp("math" in kernels)


def flash_is_on() -> bool:
    """Whether flash attention is among the kernels that are switched on."""
    return bool(switches.flash_sdp_enabled())


def attention_kernel(call: AttentionCall, *, flash: bool = True) -> AttentionKernel:
    """The kernel that `scaled_dot_product_attention` chooses among those that are switched on.

    Args:
        flash: the GPU has flash attention.
    """
    for kernel in _switched_on():
        if call.obstacle(kernel) is None and (flash or kernel not in ("flash", "cudnn")):
            return kernel
    return "math"


def keeps_probabilities(q: torch.Tensor, v: torch.Tensor, *, grouped: bool, dropout: float) -> bool:
    """Whether attention of these queries [..., d] and values [..., e] keeps its probabilities."""
    flash = not q.is_cuda or flash_runs_on(q.device)
    call = AttentionCall(8 * q.itemsize, q.shape[-1], grouped, q.is_cuda, dropout, value_size=v.shape[-1])
    return attention_kernel(call, flash=flash) == "math"


def chosen_kernel(
    q: torch.Size, kv_heads: int, dtype: torch.dtype, device: torch.device, dropout: float, value_size: int | None = None
) -> str | None:
    """The kernel, in words, that torch chooses on this device for causal attention; None if none that is switched on takes it.

    Args:
        q: shape of the queries, [b, n, s, d].
        value_size: channels of a value head, if others than d.
    """
    # Without memory of their own: all rows are one.
    query, key, value = (
        torch.empty(size, dtype=dtype, device=device).expand(q[0], heads, q[2], size)
        for heads, size in ((q[1], q[3]), (kv_heads, q[3]), (kv_heads, value_size or q[3]))
    )
    query.requires_grad_()
    try:
        number = fused_sdp_choice(query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=q[1] != kv_heads)
    except RuntimeError:  # on CUDA, where a CPU gives a number for it
        return None
    return _IN_WORDS.get(number)


@functools.cache
def flash_runs_on(device: torch.device) -> bool:
    """Whether this GPU has flash attention."""
    if device.type == "meta":  # in a plan, for GPUs that this machine need not have
        return True
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)
