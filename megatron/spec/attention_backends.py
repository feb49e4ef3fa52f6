"""Kernels that compute attention, and the calls that each of them cannot take. A call that no kernel of torch takes is computed
block by block (`megatron/attention/blocks.py`) under auto and math.

The conditions are those of torch for a causal mask without further mask (aten/src/ATen/native/transformers: sdp_utils_cpp.cpp,
cuda/sdp_utils.cpp).

Which kernel torch prefers depends on the device: from 2.11 on, cuDNN's on Hopper and Blackwell, flash attention elsewhere
(`check_prefer_cudnn_attention` there). So auto does not leave the choice to torch. cuDNN's kernel is off, and on a GPU a
measurement before the first step may put it in the place of flash attention (`kernels_to_time`, `fastest`). cuDNN is not timed
where

- an operation must give the same bits each time: torch has only the non-deterministic backward of cuDNN;
- shapes vary from call to call, as those of documents do: cuDNN builds a plan for each new shape, in 25 to 37 ms;
- a call has a mask beside the causal one: the backward gives NaN where the sequence length modulo 128 is 64
  (https://github.com/pytorch/pytorch/issues/196678, H100 and H200, since torch 2.11; a causal call without a mask is not affected).
  Training has no such call, and inference computes its calls with a mask by other kernels (`without_cudnn` in
  `megatron/attention/backends.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

AttentionKernel = Literal["flash", "cudnn", "efficient", "math"]
"""All but the last keep a number for each row; math multiplies, keeps the probabilities and, with dropout, its mask."""
AttentionBackend = Literal["auto", "flash", "cudnn", "efficient", "math", "fused", "unfused"]
"""Values of --attention-backend: the kernels, auto for the fastest, and Megatron-LM's names of cudnn and math."""

KERNELS: tuple[AttentionKernel, ...] = ("flash", "cudnn", "efficient", "math")
CHOSEN_BY_AUTO: tuple[AttentionKernel, ...] = ("flash", "efficient", "math")
"""Kernels of auto without a measurement. Torch tries them in this order on every device."""
CLEARLY_FASTER = 1.05
"""Flash attention is replaced only by a kernel this many times as fast, so that a repeated measurement gives the same choice."""
_SPELLED: dict[str, AttentionKernel] = {"fused": "cudnn", "unfused": "math"}
LARGEST_FLASH_HEAD, LARGEST_CUDNN_HEAD = 256, 128
"""Channels."""
_CUDNN_DROPOUT_STEPS = 16


def kernels_of(backend: AttentionBackend) -> tuple[AttentionKernel, ...]:
    """Return the kernels from which torch chooses, for auto those before any measurement."""
    return CHOSEN_BY_AUTO if backend == "auto" else tuple(one for one in KERNELS if one == _SPELLED.get(backend, backend))


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


def kernels_to_time(call: AttentionCall) -> tuple[AttentionKernel, ...]:
    """Return the kernels between which auto decides by measurement, flash attention first; none where only one takes the call."""
    candidates = tuple(kernel for kernel in KERNELS[:2] if call.obstacle(kernel) is None)
    return candidates if len(candidates) > 1 else ()


def fastest(milliseconds: Mapping[AttentionKernel, float]) -> AttentionKernel:
    """Choose by measured times. Flash attention keeps its place unless another kernel is `CLEARLY_FASTER`.

    Args:
        milliseconds: of one forward and backward, of the kernels that gave right results; never empty.
    """
    best = min(milliseconds, key=milliseconds.__getitem__)
    if "flash" in milliseconds and milliseconds["flash"] < CLEARLY_FASTER * milliseconds[best]:
        return "flash"
    return best
