"""What a run measures itself by: peak rates of devices for the model FLOPs utilisation (MFU), timers, memory of the process.

All rates are dense: vendors' headline figures "with sparsity" are twice as high and mean nothing for training. float32 is
without TF32, which PyTorch does not use unless asked ("tf32" has its own column). Products of 16 and 8 bits accumulate in float32.
float64 is the matrix rate where the device has one. What a source does not state is left out.
"""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal


def _rates(
    *,
    half: float,
    bfloat16: bool = True,
    eight: float | None = None,
    tf32: float | None = None,
    single: float | None = None,
    double: float | None = None,
) -> dict[str, float]:
    """A row: TFLOP/s in float16 (and bfloat16 where the device has it), in 8 bits ("float8"), TF32, float32 and float64."""
    rates = {
        "float8": eight,
        "float16": half,
        "bfloat16": half if bfloat16 else None,
        "tf32": tf32,
        "float32": single,
        "float64": double,
    }
    return {dtype: rate for dtype, rate in rates.items() if rate is not None}


_DEVICES = {
    # NVIDIA Tesla V100 datasheet: 125 | 112 (PCIe) TFLOPS tensor; no bfloat16.
    r"V100-PCIE": _rates(half=112, bfloat16=False, single=14, double=7),
    r"V100-SXM2": _rates(half=125, bfloat16=False, single=15.7, double=7.8),
    # NVIDIA T4 datasheet: 65 TFLOPS mixed precision, 8.1 single.
    r"T4": _rates(half=65, bfloat16=False, single=8.1),
    # NVIDIA A100 datasheet, the same for PCIe and SXM: 312 dense (624 sparse).
    r"A100": _rates(half=312, tf32=156, single=19.5, double=19.5),
    # NVIDIA A30 datasheet: 165 dense (330 sparse).
    r"A30": _rates(half=165, tf32=82, single=10.3, double=10.3),
    # NVIDIA A40 datasheet: 149.7 dense (299.4 sparse).
    r"A40": _rates(half=149.7, tf32=74.8, single=37.4),
    # NVIDIA A10 datasheet: 125 dense (250 sparse).
    r"A10": _rates(half=125, tf32=62.5, single=31.2),
    # NVIDIA H100 datasheet, H100 NVL column: 1,671 sparse, halved; FP8 3,341.
    r"H100 NVL": _rates(half=835.5, eight=1670.5, tf32=417.5, single=60, double=60),
    # NVIDIA H100 datasheet, H100 PCIe column: 1,513 sparse, halved; FP8 3,026.
    r"H100 PCIe": _rates(half=756.5, eight=1513, tf32=378, single=51, double=51),
    # NVIDIA H100 Tensor Core GPU Architecture whitepaper, SXM5: 989.4 dense (1,978.9 sparse); FP8 1,978.9 dense.
    r"H100 (SXM5|\d+GB HBM3)": _rates(half=989.4, eight=1978.9, tf32=494.7, single=66.9, double=66.9),
    # NVIDIA GH200 datasheet: the GPU is that of H100 SXM, 1,979 sparse.
    r"GH200": _rates(half=989.4, eight=1978.9, tf32=494.7, single=66.9, double=66.9),
    # NVIDIA H200 datasheet, H200 NVL column: 1,671 sparse, halved; FP8 3,341.
    r"H200 NVL": _rates(half=835.5, eight=1670.5, tf32=417.5, single=60, double=60),
    # NVIDIA H200 datasheet, H200 SXM column: as H100 SXM, 1,979 sparse.
    r"H200": _rates(half=989.4, eight=1978.9, tf32=494.7, single=66.9, double=66.9),
    # NVIDIA Blackwell datasheet, HGX B200: 36 PFLOPS sparse for 8 devices; FP8 72.
    r"B200": _rates(half=2250, eight=4500),
    # NVIDIA Blackwell datasheet, GB200 NVL72: 360 PFLOPS sparse for 72 devices; FP8 720.
    r"GB200": _rates(half=2500, eight=5000),
    # NVIDIA L40S datasheet: 362.05 dense (733 sparse); FP8 733 dense.
    r"L40S": _rates(half=362.05, eight=733, tf32=183, single=91.6),
    # NVIDIA L40 datasheet: 181.05 dense (362.1 sparse); FP8 362 dense.
    r"L40": _rates(half=181.05, eight=362, tf32=90.5, single=90.5),
    # NVIDIA L4 datasheet: 242 sparse, halved; TF32 120 and FP8 485 sparse, halved.
    r"L4": _rates(half=121, eight=242.5, tf32=60, single=30.3),
    # NVIDIA Ada GPU Architecture whitepaper: 165.2 with float32 accumulation, dense; FP8 330.3.
    r"RTX 4090": _rates(half=165.2, eight=330.3, tf32=82.6, single=82.6),
    # NVIDIA Ampere GA102 GPU Architecture whitepaper: 71 with float32 accumulation, dense.
    r"RTX 3090": _rates(half=71, tf32=35.6, single=35.6),
    # AMD Instinct MI250X product page: 383 and 95.7 for the card, of which PyTorch shows each half as a device.
    # A driver that says "MI250X / MI250" does not know which of the two it has.
    r"MI250X(?! ?/)": _rates(half=191.5, single=47.85, double=47.85),
    # AMD Instinct MI300X data sheet: matrix rates, 1,307.4 dense (2,614.9 sparse).
    r"MI300X": _rates(half=1307.4, tf32=653.7, single=163.4, double=163.4),
    # AMD Instinct MI325X data sheet: compute as MI300X.
    r"MI325X": _rates(half=1307.4, tf32=653.7, single=163.4, double=163.4),
}
"""Rates of devices, by a regular expression for whole words of torch.cuda.get_device_name(). The first match counts, so the special
form of a device stands above the general one."""

_OTHER_DEVICES = re.compile(r"\b(MIG|GRID|Laptop|Max-Q|Ti|Super|D)\b", re.IGNORECASE)
"""Words that make another, slower device of a known name: a slice of one, or a model of another class."""


def peak_flops(device_name: str, dtype_name: str) -> float | None:
    """Dense peak rate in FLOP/s of one device, or None if the device or the dtype is not in the table.

    Args:
        device_name: As torch.cuda.get_device_name() gives it, for example "NVIDIA H100 80GB HBM3".
        dtype_name: "float8", "float16", "bfloat16", "float32", "tf32" or "float64" ("torch." in front is ignored).
    """
    if _OTHER_DEVICES.search(device_name):
        return None
    for pattern, rates in _DEVICES.items():
        if re.search(rf"(?<!\w){pattern}(?!\w)", device_name, re.IGNORECASE):
            teraflops = rates.get(dtype_name.removeprefix("torch."))
            return None if teraflops is None else teraflops * 1e12
    return None


def mixed_peak_flops(device_name: str, dtype_name: str, share_in_8_bits: float) -> float | None:
    """Peak rate in FLOP/s of work of which a share is done in 8 bits and the rest in a dtype, each at its own peak; or None.

    Args:
        share_in_8_bits: of the FLOPs.
    """
    rest, eight = peak_flops(device_name, dtype_name), peak_flops(device_name, "float8")
    if share_in_8_bits == 0 or rest is None:
        return rest
    return None if eight is None else 1 / (share_in_8_bits / eight + (1 - share_in_8_bits) / rest)


# ---- Named timers, and the report of their times over all ranks.
#
# timers = Timers(level=1, synchronize=torch.cuda.synchronize)
# with timers("forward-backward", level=1):
#     ...
# times = times_of_ranks(gather(timers.elapsed_ms()))  # on every rank
# report = format_times(times, "minmax")

TimingOption = Literal["minmax", "max", "all"]


class Timers:
    """The timers of one rank.

    Args:
        level: Timers of a higher level do nothing (--timing-log-level), and never make the device wait.
        synchronize: Waits for the device, at each start and stop; None where work is not asynchronous.
        clock: Seconds, from any origin.
    """

    def __init__(
        self, level: int, synchronize: Callable[[], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._level = level
        self._synchronize = synchronize
        self._clock = clock
        self._elapsed: dict[str, float] = {}

    def __call__(self, name: str, level: int = 0) -> AbstractContextManager[object]:
        """While it is entered, the time counts for the timer of that name."""
        return self.of_level(level)(name)

    def of_level(self, level: int) -> Callable[[str], AbstractContextManager[object]]:
        """Return a function from names to context managers of timers. If timers of this level are off, these do nothing."""
        return self._timed if level <= self._level else nullcontext

    def elapsed_ms(self) -> dict[str, float]:
        """Milliseconds of every timer since the last call. All start anew."""
        elapsed = {name: seconds * 1000.0 for name, seconds in self._elapsed.items()}
        self._elapsed = dict.fromkeys(elapsed, 0.0)
        return elapsed

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._elapsed.setdefault(name, 0.0)
        started = self._now()
        try:
            yield
        finally:
            self._elapsed[name] += self._now() - started

    def _now(self) -> float:
        # Devices work ahead of the host: without waiting, a timer would measure how long it took to ask for the work.
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()


def times_of_ranks(ranks: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Times of all ranks by name, in the order in which the names first occur.

    Args:
        ranks: Milliseconds of each rank. Ranks may have different timers (only the last stage has a loss).

    Returns:
        For each name one time a rank, 0 where the rank has no such timer.
    """
    names = dict.fromkeys(name for times in ranks for name in times)
    return {name: [times.get(name, 0.0) for times in ranks] for name in names}


def format_times(times: Mapping[str, Sequence[float]], option: TimingOption) -> str:
    """The report of --timing-log-option, in Megatron's format.

    Args:
        times: Milliseconds by name, one for each rank; 0 means that the rank has no such timer and is left out.
        option: The least and the greatest time, the greatest only, or the time of each rank.

    Returns:
        Lines without a newline at the end; nothing at all when there are no times.
    """
    lines = []
    for name, ranks in times.items():
        measured = {rank: ms for rank, ms in enumerate(ranks) if ms > 0.0}
        if not measured:
            continue
        least, greatest = min(measured.values()), max(measured.values())
        dotted = "    " + (name + " ").ljust(48, ".")
        if option == "minmax":
            lines.append(f"{dotted}: ({least:.2f}, {greatest:.2f})")
        elif option == "max":
            lines.append(f"{dotted}: {greatest:.2f}")
        else:
            lines += [f"  {name}:", *(f"     rank {rank:2d}: {ms:.2f}" for rank, ms in measured.items())]
    title = {"minmax": "(min, max) time", "max": "max time", "all": "times"}[option]
    return "\n".join([f"{title} across ranks (ms):", *lines]) if lines else ""


def process_bytes() -> int:
    """The most host memory that this process had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
