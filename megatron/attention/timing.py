"""Measurement of the attention kernels on a GPU, once before the first step, to select the kernel of the run.

The selection may differ between two starts only if kernels are about equally fast (`CLEARLY_FASTER`). This does not reduce
reproducibility. With --deterministic-mode nothing is measured. Without it, the backward of all these kernels adds in the order in
which thread blocks finish, which varies anyway.

Shapes: `s` sequence, `b` microbatch, `g` key-value heads, `r` query heads per key-value head, `d` size of a query head.
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
from megatron.spec.attention_backends import AttentionKernel, select_fastest_kernel

_WARM_UPS, _REPETITIONS = 2, 5
_TOLERANCE = 0.05
"""Largest allowed difference from the results of flash attention, relative to the largest absolute value of a tensor. It
detects failures, not rounding."""


@dataclass(frozen=True)
class KernelChoice:
    """Attention kernel that was selected by timing all candidates."""

    kernel: AttentionKernel
    milliseconds: Mapping[AttentionKernel, float]
    """Median time of one forward and backward of a layer's attention over one microbatch, for each kernel that works."""
    failures: Mapping[AttentionKernel, str]
    """Error message of each kernel that failed or computed wrong results."""

    def __str__(self) -> str:
        """Format the measured times, and the errors of kernels that failed, such as "flash 1.83 ms, cudnn 1.21 ms"."""
        times = [f"{kernel} {time:.3g} ms" for kernel, time in self.milliseconds.items()]
        return ", ".join([*times, *(f"{kernel} failed ({error})" for kernel, error in self.failures.items())])


def choose_kernel(kernels: Sequence[AttentionKernel], time_kernel: Callable[[AttentionKernel], float]) -> KernelChoice:
    """Measure the time of every kernel and select the fastest. A kernel that raises an error is left out.

    Args:
        kernels: candidates. If all fail, the first is selected, and the first training step raises its error again.
        time_kernel: returns milliseconds, or raises RuntimeError.
    """
    milliseconds: dict[AttentionKernel, float] = {}
    failures: dict[AttentionKernel, str] = {}
    for kernel in kernels:
        try:
            milliseconds[kernel] = time_kernel(kernel)
        except RuntimeError as error:
            failures[kernel] = str(error).partition("\n")[0]
    return KernelChoice(select_fastest_kernel(milliseconds) if milliseconds else kernels[0], milliseconds, failures)


def choose_on_device(
    kernels: Sequence[AttentionKernel],
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dropout: float = 0.0,
    seed: int = 0,
) -> KernelChoice:
    """Select the fastest attention kernel on the current GPU. Afterwards the states of the random generators are as before, and the
    memory of the measurement is free.

    Args:
        kernels: candidates.
        inputs: q [s, b, g, r, d], k and v [s, b, g, channels of a head]: sequence, microbatch, key-value heads, query heads per
            key-value head, channels. They are overwritten with random numbers.
    """
    device = inputs[0].device
    generator = torch.Generator(device).manual_seed(seed)
    for tensor in inputs:
        tensor.normal_(generator=generator)
    with torch.random.fork_rng(devices=[device]):  # restores the generator state after dropout
        choice = choose_kernel(kernels, functools.partial(time_on_device, run=AttentionStep(inputs, dropout)))
    torch.cuda.empty_cache()
    return choice


def time_on_device(kernel: AttentionKernel, run: AttentionStep) -> float:
    """Return the median time of one forward and backward with a kernel on a GPU, in milliseconds. Waits for the device.

    Args:
        kernel: the only kernel that is enabled during the measurement.
        run: the operation to time.

    Raises:
        RuntimeError: the kernel does not support the call, or its results are wrong.
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
    """One forward and backward of a layer's attention over one microbatch, as in training: the operation that is timed.

    Args:
        inputs: q [s, b, g, r, d], k and v [s, b, g, channels of a head]: sequence, microbatch, key-value heads, query heads per
            key-value head, channels.
    """

    def __init__(self, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], dropout: float) -> None:
        self._inputs, self._dropout = [tensor.detach().requires_grad_() for tensor in inputs], dropout
        self._expected: list[torch.Tensor] | None = None

    def __call__(self) -> list[torch.Tensor]:
        """Run attention forward and backward with the enabled kernels. Returns the output and the gradients of q, k and v."""
        q, k, v = self._inputs
        out = core_attention(q, k, v, dropout=self._dropout)
        return [out.detach(), *torch.autograd.grad(out, self._inputs, torch.ones_like(out))]

    def check(self) -> None:
        """Check that output and gradients are finite, and close to those of the kernel that was checked first.

        With dropout only finiteness is checked, because each kernel drops other elements.

        Raises:
            RuntimeError: output or gradients are not finite, or differ too much.
        """
        results = self()
        for name, tensor in zip(("output", "gradient of q", "gradient of k", "gradient of v"), results, strict=True):
            if not tensor.isfinite().all():
                raise RuntimeError(
                    f"its {name} contains NaN or infinity, although all inputs are finite. If another kernel works, "
                    "--attention-backend auto uses it, and no action is needed"
                )
        if self._expected is None:
            self._expected = results
        elif not self._dropout:  # with dropout, each kernel drops other elements
            for tensor, expected in zip(results, self._expected, strict=True):
                if (tensor - expected).abs().max() > _TOLERANCE * expected.abs().max():
                    raise RuntimeError(
                        "its results differ from those of the kernel that was measured first. --attention-backend auto uses "
                        "another kernel, so no action is needed"
                    )
