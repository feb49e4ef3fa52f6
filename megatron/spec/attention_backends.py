"""Attention kernels, and the calls that each of them cannot compute.

With --attention-backend auto or math, a call that none of torch's kernels can compute is computed block by block
(`megatron/attention/blocks.py`).

The conditions are those of torch for causal attention without an additional mask (aten/src/ATen/native/transformers:
sdp_utils_cpp.cpp, cuda/sdp_utils.cpp).

The kernel that torch prefers depends on the device: from torch 2.11 on, cuDNN on Hopper and Blackwell, flash attention elsewhere
(`check_prefer_cudnn_attention` in these files). So auto does not leave the choice to torch. It disables the cuDNN kernel, and on a
GPU a measurement before the first step may replace flash attention by cuDNN (`get_kernels_to_time`, `select_fastest_kernel`). cuDNN
is not measured if

- operations must be deterministic: torch has only the non-deterministic backward of cuDNN;
- shapes vary from call to call, as with documents: cuDNN builds a plan for each new shape, in 25 to 37 ms;
- a call has a mask besides the causal one: the backward returns NaN if the sequence length modulo 128 is 64
  (https://github.com/pytorch/pytorch/issues/196678, H100 and H200, since torch 2.11; a causal call without a mask is not affected).
  Training has no such call, and inference computes its calls with a mask with other kernels (`without_cudnn` in
  `megatron/attention/backends.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

AttentionKernel = Literal["flash", "cudnn", "efficient", "math"]
"""Torch's attention kernels.

All except math save one number per row for backward. math uses separate matrix products, and saves the probabilities and, with
dropout, the dropout mask.
"""
AttentionBackend = Literal["auto", "flash", "cudnn", "efficient", "math", "fused", "unfused"]
"""Values of --attention-backend: a kernel, auto (the fastest kernel), or Megatron-LM's names fused (cudnn) and unfused (math)."""

KERNELS: tuple[AttentionKernel, ...] = ("flash", "cudnn", "efficient", "math")
AUTO_KERNELS: tuple[AttentionKernel, ...] = ("flash", "efficient", "math")
"""Kernels of auto without a measurement. Torch tries them in this order on every device."""
CLEARLY_FASTER = 1.05
"""Speedup that another kernel needs to replace flash attention, so that a repeated measurement selects the same kernel."""
_MEGATRON_NAMES: dict[str, AttentionKernel] = {"fused": "cudnn", "unfused": "math"}
MAX_FLASH_HEAD_SIZE, MAX_CUDNN_HEAD_SIZE = 256, 128
"""Largest head sizes that the kernels support, in channels."""
_CUDNN_DROPOUT_STEPS = 16
"""cuDNN supports dropout probabilities that are multiples of 1 / this number."""


def get_kernels(backend: AttentionBackend) -> tuple[AttentionKernel, ...]:
    """Return the attention kernels that torch may use for a value of --attention-backend. For "auto", these are the kernels that
    may be used until a measurement has selected one."""
    return (
        AUTO_KERNELS
        if backend == "auto"
        else tuple(kernel for kernel in KERNELS if kernel == _MEGATRON_NAMES.get(backend, backend))
    )


@dataclass(frozen=True)
class AttentionCall:
    """Properties of a call of attention that decide which of torch's kernels can compute it."""

    num_bits: int
    """Bits per element. float16 and bfloat16 are equivalent for all kernels."""
    head_size: int
    is_grouped_query: bool
    """Whether there are fewer key-value heads than query heads."""
    is_on_cuda: bool
    dropout: float = 0.0
    is_deterministic: bool = False
    has_documents: bool = False
    """Whether tokens attend only within their document."""
    has_window: bool = False
    """Whether a token attends only to a window of the previous tokens."""
    value_head_size: int | None = None
    """Channels of a value head; None if equal to `head_size`."""
    has_softcap_or_sinks: bool = False
    """Whether scores are soft-capped or the softmax has attention sinks."""
    is_context_parallel: bool = False
    """Whether attention on a context-parallel rank is split into several calls, each with a part of the keys."""

    def find_obstacle(self, kernel: AttentionKernel) -> str | None:
        """Return why a kernel cannot compute the call, or None if it can. The text continues a sentence that begins with the
        kernel's name, such as "takes heads of ..."."""
        if not self.is_on_cuda and kernel in ("cudnn", "efficient"):
            return "runs on GPUs only"
        if kernel != "math" and self.has_softcap_or_sinks:
            return "takes neither capped scores nor sinks"
        for feature in ["window"] * self.has_window + ["part of a sequence"] * self.is_context_parallel:
            if kernel != "math" and (obstacle := self._find_flash_only_obstacle(feature, kernel)) is not None:
                return obstacle
        if kernel == "flash" and self.value_head_size not in (None, self.head_size):
            return f"takes values of as many channels as queries, not {self.value_head_size} beside {self.head_size}"
        if not self.is_on_cuda:
            return "has no dropout on a CPU" if kernel == "flash" and self.dropout else None
        size = self.head_size
        if kernel == "flash":
            return self._find_bits_obstacle() or (
                f"takes heads of at most {MAX_FLASH_HEAD_SIZE} channels, not {size}" if size > MAX_FLASH_HEAD_SIZE else None
            )
        if kernel == "cudnn":
            return self._find_bits_obstacle() or self._find_cudnn_obstacle()
        if kernel == "efficient":
            multiple = 8 if self.num_bits == 16 else 4
            if self.num_bits == 64:
                return "does not compute in 64 bits"
            if self.is_grouped_query:
                return "takes as many key-value heads as query heads"
            unsupported = [size for size in self._head_sizes if size % multiple]
            return f"takes heads of a multiple of {multiple} channels, not {unsupported[0]}" if unsupported else None
        return None

    def _find_flash_only_obstacle(self, feature: str, kernel: AttentionKernel) -> str | None:
        """Return why a kernel does not support a feature that no kernel except flash attention supports, or None if it does.

        Args:
            feature: "window" or "part of a sequence", as in the message.
        """
        if kernel != "flash":
            return f"takes no {feature}"
        if not self.is_on_cuda:
            return f"takes no {feature} on a CPU"
        if self.dropout:
            return f"has no dropout with a {feature}"
        return f"takes heads of a multiple of 8 channels with a {feature}, not {self.head_size}" if self.head_size % 8 else None

    def _find_bits_obstacle(self) -> str | None:
        return None if self.num_bits == 16 else f"computes in 16 bits, not in {self.num_bits}"

    @property
    def _head_sizes(self) -> tuple[int, int]:
        """Channels of a query head and of a value head."""
        return self.head_size, self.value_head_size or self.head_size

    def _find_cudnn_obstacle(self) -> str | None:
        unsupported = [size for size in self._head_sizes if size % 8 or size > MAX_CUDNN_HEAD_SIZE]
        if unsupported:
            return f"takes heads of a multiple of 8 channels up to {MAX_CUDNN_HEAD_SIZE}, not {unsupported[0]}"
        if self.dropout * _CUDNN_DROPOUT_STEPS % 1:
            return f"drops multiples of 1/{_CUDNN_DROPOUT_STEPS}, not {self.dropout:g}"
        if self.is_deterministic:
            return "is not deterministic"
        return "does not take documents of one token" if self.has_documents else None


def get_kernels_to_time(call: AttentionCall) -> tuple[AttentionKernel, ...]:
    """Return the kernels that --attention-backend auto measures on a GPU to select the faster one: flash attention, then cuDNN.

    The result is empty unless both can compute the call.
    """
    candidates = tuple(kernel for kernel in KERNELS[:2] if call.find_obstacle(kernel) is None)
    return candidates if len(candidates) > 1 else ()


def select_fastest_kernel(milliseconds: Mapping[AttentionKernel, float]) -> AttentionKernel:
    """Return the fastest kernel. Flash attention is selected unless another kernel is at least `CLEARLY_FASTER` times as fast.

    Args:
        milliseconds: time of one forward and backward, for each kernel that computed correct results; never empty.
    """
    fastest = min(milliseconds, key=milliseconds.__getitem__)
    if "flash" in milliseconds and milliseconds["flash"] < CLEARLY_FASTER * milliseconds[fastest]:
        return "flash"
    return fastest
