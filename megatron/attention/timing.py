"""Times attention's kernels on a GPU, once before the first step, to choose the one that a run uses.

The choice may differ between two starts only where kernels are about as fast (`CLEARLY_FASTER`). It costs no reproducibility: where
the same bits are asked for (--deterministic-mode) nothing is timed, and without it the backward of all these kernels adds in
whichever order thread blocks finish.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.attention.backends import backend_in_use
from megatron.attention.core import core_attention
from megatron.spec.attention_backends import AttentionKernel, fastest

_WARM_UPS, _REPETITIONS = 2, 5
_TOLERANCE = 0.05
"""Largest difference from flash attention, relative to the largest number of a tensor. It finds failures, not rounding."""


@dataclass(frozen=True)
class KernelChoice:
    """Kernel chosen by measurement."""

    kernel: AttentionKernel
    milliseconds: Mapping[AttentionKernel, float]
    """Median time of one forward and backward of a layer's attention over one microbatch, of the kernels that can be used."""
    failures: Mapping[AttentionKernel, str]
    """Error of each kernel that cannot be used."""

    def __str__(self) -> str:
        """Return the times, as "flash 1.83 ms, cudnn 1.21 ms"."""
        times = [f"{kernel} {time:.3g} ms" for kernel, time in self.milliseconds.items()]
        return ", ".join([*times, *(f"{kernel} failed ({why})" for kernel, why in self.failures.items())])


def choose_kernel(kernels: Sequence[AttentionKernel], time_kernel: Callable[[AttentionKernel], float]) -> KernelChoice:
    """Time every kernel and choose the fastest. A kernel that raises is left out.

    Args:
        kernels: the first one is chosen if all of them fail, so that the error is raised again in the first step.
        time_kernel: returns milliseconds, or raises RuntimeError.
    """
    milliseconds: dict[AttentionKernel, float] = {}
    failures: dict[AttentionKernel, str] = {}
    for kernel in kernels:
        try:
            milliseconds[kernel] = time_kernel(kernel)
        except RuntimeError as error:
            failures[kernel] = str(error).partition("\n")[0]
    return KernelChoice(fastest(milliseconds) if milliseconds else kernels[0], milliseconds, failures)


def choose_on_device(
    kernels: Sequence[AttentionKernel],
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dropout: float = 0.0,
    seed: int = 0,
) -> KernelChoice:
    """Choose between kernels on the current GPU. Its random state stays as it was, and all memory is given back.

    Args:
        inputs: q [s, b, g, r, d], k and v [s, b, g, channels]; they are overwritten with random numbers.
    """
    device = inputs[0].device
    generator = torch.Generator(device).manual_seed(seed)
    for tensor in inputs:
        tensor.normal_(generator=generator)
    with torch.random.fork_rng(devices=[device]):  # which dropout draws from
        choice = choose_kernel(kernels, functools.partial(time_on_device, run=AttentionStep(inputs, dropout)))
    torch.cuda.empty_cache()
    return choice


def time_on_device(kernel: AttentionKernel, run: AttentionStep) -> float:
    """Return the median milliseconds of a step on a GPU. It waits for the device.

    Raises:
        RuntimeError: the kernel does not take the call, or its results are wrong.
    """
    with backend_in_use(kernel):
        run.check()
        for _ in range(_WARM_UPS):
            run()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPETITIONS + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        events[-1].synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in itertools.pairwise(events))


class AttentionStep:
    """One forward and backward of a layer's attention over one microbatch, as training computes it.

    Args:
        inputs: see `choose_on_device`.
    """

    def __init__(self, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], dropout: float) -> None:
        self._inputs, self._dropout = [tensor.detach().requires_grad_() for tensor in inputs], dropout
        self._expected: list[torch.Tensor] | None = None

    def __call__(self) -> list[torch.Tensor]:
        """Return the result and the gradients of q, k and v, by the kernels that are switched on."""
        q, k, v = self._inputs
        out = core_attention(q, k, v, dropout=self._dropout)
        return [out.detach(), *torch.autograd.grad(out, self._inputs, torch.ones_like(out))]

    def check(self) -> None:
        """Check that results are finite, and about those of the first kernel that was checked.

        Raises:
            RuntimeError: they are not.
        """
        results = self()
        for name, tensor in zip(("result", "gradient of q", "gradient of k", "gradient of v"), results, strict=True):
            if not tensor.isfinite().all():
                raise RuntimeError(f"its {name} is not finite")
        if self._expected is None:
            self._expected = results
        elif not self._dropout:  # each kernel drops others
            for tensor, expected in zip(results, self._expected, strict=True):
                if (tensor - expected).abs().max() > _TOLERANCE * expected.abs().max():
                    raise RuntimeError("its results differ from those of flash attention")
