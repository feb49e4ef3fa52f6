"""Which kernels compute attention, and what each of them cannot take. What none of torch's takes is multiplied block by block
(`megatron/attention/blocks.py`), with auto and math.

The conditions are those of torch for a causal mask without further mask (aten/src/ATen/native/transformers: sdp_utils_cpp.cpp,
cuda/sdp_utils.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionKernel = Literal["flash", "cudnn", "efficient", "math"]
"""All but the last keep a number for each row; math multiplies, keeps the probabilities and, with dropout, its mask."""
AttentionBackend = Literal["auto", "flash", "cudnn", "efficient", "math", "fused", "unfused"]
"""What a user can ask for: the kernels, torch's choice of them, and Megatron-LM's names of cudnn and math."""

KERNELS: tuple[AttentionKernel, ...] = ("flash", "cudnn", "efficient", "math")
_SPELLED: dict[str, AttentionKernel] = {"fused": "cudnn", "unfused": "math"}
LARGEST_FLASH_HEAD, LARGEST_CUDNN_HEAD = 256, 128
"""Channels."""
_CUDNN_DROPOUT_STEPS = 16


def kernels_of(backend: AttentionBackend) -> tuple[AttentionKernel, ...]:
    """The kernels from which torch chooses."""
    return KERNELS if backend == "auto" else tuple(one for one in KERNELS if one == _SPELLED.get(backend, backend))


@dataclass(frozen=True)
class AttentionCall:
    """What a kernel has to compute."""

    bits: int
    """Size of a number. float16 and bfloat16 are alike to all kernels."""
    head_size: int
    grouped: bool
    """Fewer key-value heads than query heads."""
    on_cuda: bool
    dropout: float = 0.0
    deterministic: bool = False
    within_documents: bool = False
    window: bool = False
    """A token attends to some of those before it."""
    value_size: int | None = None
    """Channels of a value head, if others than a query head has."""
    shaped: bool = False
    """Scores are capped, or the softmax has sinks."""
    in_parts: bool = False
    """Context ranks compute it part by part."""

    def obstacle(self, kernel: AttentionKernel) -> str | None:
        """Why a kernel cannot compute it, as a sentence goes on behind its name; None if it can."""
        if not self.on_cuda and kernel in ("cudnn", "efficient"):
            return "runs on GPUs only"
        if kernel != "math" and self.shaped:
            return "takes neither capped scores nor sinks"
        for what in ["window"] * self.window + ["part of a sequence"] * self.in_parts:
            if kernel != "math" and (obstacle := self._obstacle_of(what, kernel)) is not None:
                return obstacle
        if kernel == "flash" and self.value_size not in (None, self.head_size):
            return f"takes values of as many channels as queries, not {self.value_size} beside {self.head_size}"
        if not self.on_cuda:
            return "has no dropout on a CPU" if kernel == "flash" and self.dropout else None
        size = self.head_size
        if kernel == "flash":
            return self._wide() or (
                f"takes heads of at most {LARGEST_FLASH_HEAD} channels, not {size}" if size > LARGEST_FLASH_HEAD else None
            )
        if kernel == "cudnn":
            return self._wide() or self._obstacle_of_cudnn()
        if kernel == "efficient":
            multiple = 8 if self.bits == 16 else 4
            if self.bits == 64:
                return "does not compute in 64 bits"
            if self.grouped:
                return "takes as many key-value heads as query heads"
            odd = [size for size in self._sizes if size % multiple]
            return f"takes heads of a multiple of {multiple} channels, not {odd[0]}" if odd else None
        return None

    def _obstacle_of(self, what: str, kernel: AttentionKernel) -> str | None:
        """Why a kernel computes no window, or no part of a sequence."""
        if kernel != "flash":
            return f"takes no {what}"
        if not self.on_cuda:
            return f"takes no {what} on a CPU"
        if self.dropout:
            return f"has no dropout with a {what}"
        return f"takes heads of a multiple of 8 channels with a {what}, not {self.head_size}" if self.head_size % 8 else None

    def _wide(self) -> str | None:
        return None if self.bits == 16 else f"computes in 16 bits, not in {self.bits}"

    @property
    def _sizes(self) -> tuple[int, int]:
        """Channels of a query and of a value head."""
        return self.head_size, self.value_size or self.head_size

    def _obstacle_of_cudnn(self) -> str | None:
        odd = [size for size in self._sizes if size % 8 or size > LARGEST_CUDNN_HEAD]
        if odd:
            return f"takes heads of a multiple of 8 channels up to {LARGEST_CUDNN_HEAD}, not {odd[0]}"
        if self.dropout * _CUDNN_DROPOUT_STEPS % 1:
            return f"drops multiples of 1/{_CUDNN_DROPOUT_STEPS}, not {self.dropout:g}"
        if self.deterministic:
            return "is not deterministic"
        return "does not take documents of one token" if self.within_documents else None
