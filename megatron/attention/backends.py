"""Selection of the attention kernel: which kernel runs, and whether it saves the softmax probabilities for backward. Used by the
attention layers, and by dry runs on machines without the device.

torch chooses a kernel at every call among those that are enabled in the process. So a run applies `--attention-backend` once, by
enabling only the kernels of that backend. Code that needs to know the kernel reads which kernels torch has enabled.

The order in which torch tries cuDNN's kernel and flash attention depends on the device. The order does not matter, because a run
never enables both.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch.backends import cuda as switches
from torch.nn.attention import SDPBackend

from megatron.parallel.torch_private import fused_sdp_choice
from megatron.spec.attention_backends import AttentionBackend, AttentionCall, AttentionKernel, get_kernels

BLOCKWISE_KERNEL_NAME = "products block by block"
"""Name that log lines use for the computation of `blocks.py`."""


_KERNEL_NAMES = {
    SDPBackend.FLASH_ATTENTION.value: "flash attention",
    SDPBackend.CUDNN_ATTENTION.value: "cuDNN's attention",
    SDPBackend.EFFICIENT_ATTENTION.value: "memory-efficient attention",
    SDPBackend.MATH.value: "plain products, which keep the probabilities",
    SDPBackend.OVERRIDEABLE.value: "the device's own kernel",
}


def use_backend(backend: AttentionBackend) -> Callable[[], None]:
    """Enable only the attention kernels of a backend (`--attention-backend`) in this process.

    Returns:
        a function that enables the previous kernels again.
    """
    previous_kernels = get_enabled_kernels()
    _enable_only(get_kernels(backend))
    return functools.partial(_enable_only, previous_kernels)


@contextlib.contextmanager
def backend_in_use(backend: AttentionBackend) -> Iterator[None]:
    """Enable only the attention kernels of a backend (`--attention-backend`) within the context."""
    restore = use_backend(backend)
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    """Within the context, enable the kernels of `--attention-backend auto` instead of cuDNN's attention kernel. If cuDNN's kernel
    is not enabled, nothing changes.

    Used for calls with a mask, and for calls whose shapes change from call to call.
    """
    with backend_in_use("auto") if switches.cudnn_sdp_enabled() else contextlib.nullcontext():
        yield


def get_enabled_kernels() -> tuple[AttentionKernel, ...]:
    """Return the attention kernels that are enabled in this process. Torch chooses among these kernels at every call of
    `scaled_dot_product_attention`."""
    is_enabled: dict[AttentionKernel, bool] = {
        "flash": switches.flash_sdp_enabled(),
        "cudnn": switches.cudnn_sdp_enabled(),
        "efficient": switches.mem_efficient_sdp_enabled(),
        "math": switches.math_sdp_enabled(),
    }
    return tuple(kernel for kernel, enabled in is_enabled.items() if enabled)


def _enable_only(kernels: tuple[AttentionKernel, ...]) -> None:
    switches.enable_flash_sdp("flash" in kernels)
    switches.enable_cudnn_sdp("cudnn" in kernels)
    switches.enable_mem_efficient_sdp("efficient" in kernels)
    switches.enable_math_sdp("math" in kernels)


def is_flash_enabled() -> bool:
    """Return whether torch may choose flash attention in this process, on any device that supports it."""
    return bool(switches.flash_sdp_enabled())


def select_kernel(call: AttentionCall, *, has_flash: bool = True) -> AttentionKernel:
    """Predict which enabled kernel `scaled_dot_product_attention` chooses for a call, from the call's dtype, head sizes and other
    properties.

    Args:
        has_flash: whether the GPU supports flash attention.
    """
    for kernel in get_enabled_kernels():
        if call.find_obstacle(kernel) is None and (has_flash or kernel not in ("flash", "cudnn")):
            return kernel
    return "math"


def saves_probabilities(q: torch.Tensor, v: torch.Tensor, *, is_grouped: bool, dropout: float) -> bool:
    """Return whether the attention kernel for these queries and values saves the softmax probabilities for backward. Only the
    unfused kernel ("math") does.

    Args:
        q, v: queries [..., head size] and values [..., head size].
        is_grouped: whether there are fewer key-value heads than query heads.
    """
    has_flash = not q.is_cuda or has_flash_attention(q.device)
    call = AttentionCall(8 * q.itemsize, q.shape[-1], is_grouped, q.is_cuda, dropout, value_head_size=v.shape[-1])
    return select_kernel(call, has_flash=has_flash) == "math"


def find_kernel_name(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, *, is_grouped: bool) -> str | None:
    """Return the name, as in log lines, of the kernel that torch chooses for causal attention of these tensors; None if no enabled
    kernel supports them.

    Args:
        q, k, v: [samples, heads, tokens, channels], with the shapes, strides and `requires_grad` of the call. The elements do not
            matter.
        is_grouped: whether there are fewer key-value heads than query heads.
    """
    try:
        backend = fused_sdp_choice(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=is_grouped)
    except RuntimeError:  # raised on CUDA; on a CPU the result is `SDPBackend.ERROR`
        return None
    return _KERNEL_NAMES.get(backend)


@functools.cache
def has_flash_attention(device: torch.device) -> bool:
    """Return whether the device supports flash attention: compute capability 8.0 or higher. The "meta" device of a dry run counts
    as a GPU that does."""
    if device.type == "meta":  # in a dry run, for GPUs that this machine need not have
        return True
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)
