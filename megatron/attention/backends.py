"""Which kernel computes attention, and what it keeps: for the layers that call it, and for a plan on a machine without the device.

torch chooses at each call, from the kernels that are switched on. So a backend is chosen once, by leaving only its kernel on; who
asks for the kernel reads the same switches. cuDNN's kernel and flash attention are never both on in a run, so the order in which
torch would try these two, which differs between devices, decides nothing.
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

BLOCK_BY_BLOCK = "products block by block"
"""What `blocks.py` computes attention by, in words."""


_IN_WORDS = {
    SDPBackend.FLASH_ATTENTION.value: "flash attention",
    SDPBackend.CUDNN_ATTENTION.value: "cuDNN's attention",
    SDPBackend.EFFICIENT_ATTENTION.value: "memory-efficient attention",
    SDPBackend.MATH.value: "plain products, which keep the probabilities",
    SDPBackend.OVERRIDEABLE.value: "the device's own kernel",
}


def use_backend(backend: AttentionBackend) -> Callable[[], None]:
    """Have attention of this process computed by these kernels only, from now on; returns what brings back those before."""
    before = kernels_in_use()
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


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    """While entered, compute by the kernels of auto if cuDNN's is on: for a call with a mask, or whose shape is new each time."""
    with backend_in_use("auto") if switches.cudnn_sdp_enabled() else contextlib.nullcontext():
        yield


def kernels_in_use() -> tuple[AttentionKernel, ...]:
    """Return the kernels from which torch chooses now."""
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
    for kernel in kernels_in_use():
        if call.obstacle(kernel) is None and (flash or kernel not in ("flash", "cudnn")):
            return kernel
    return "math"


def keeps_probabilities(q: torch.Tensor, v: torch.Tensor, *, grouped: bool, dropout: float) -> bool:
    """Whether attention of these queries [..., d] and values [..., e] keeps its probabilities."""
    flash = not q.is_cuda or flash_runs_on(q.device)
    call = AttentionCall(8 * q.itemsize, q.shape[-1], grouped, q.is_cuda, dropout, value_size=v.shape[-1])
    return attention_kernel(call, flash=flash) == "math"


def chosen_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, *, grouped: bool) -> str | None:
    """Name the kernel that torch chooses for causal attention of these tensors; None if none that is switched on takes it.

    Args:
        q, k, v: [samples, heads, s, channels], with the shapes, strides and `requires_grad` of a call; values do not matter.
        grouped: there are fewer key-value heads than query heads.
    """
    try:
        backend = fused_sdp_choice(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)
    except RuntimeError:  # on CUDA, where a CPU returns `SDPBackend.ERROR`
        return None
    return _IN_WORDS.get(backend)


@functools.cache
def flash_runs_on(device: torch.device) -> bool:
    """Whether this GPU has flash attention."""
    if device.type == "meta":  # in a plan, for GPUs that this machine need not have
        return True
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)
