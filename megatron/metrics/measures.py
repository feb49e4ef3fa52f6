"""Peak FLOP/s of devices for the model FLOPs utilization (MFU), timers, and host memory of the process.

All rates are for dense matrices. Vendors' headline figures "with sparsity" are twice as high and do not apply to training. The
float32 rate is without TF32, which PyTorch does not use by default; "tf32" has a separate rate. Products in 16 and 8 bits
accumulate in float32. The float64 rate is that of the matrix units if the device has them for float64. Rates that a source does not
state are omitted.
"""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal


def _build_rates(
    *,
    float16: float,
    has_bfloat16: bool = True,
    float8: float | None = None,
    tf32: float | None = None,
    float32: float | None = None,
    float64: float | None = None,
) -> dict[str, float]:
    """Build the entry of one device in the table of peak rates: TFLOP/s by name of the dtype. Dtypes without a rate are left out.
    The float16 rate also counts for bfloat16 if the device has bfloat16."""
    rates = {
        "float8": float8,
        "float16": float16,
        "bfloat16": float16 if has_bfloat16 else None,
        "tf32": tf32,
        "float32": float32,
        "float64": float64,
    }
    return {dtype: rate for dtype, rate in rates.items() if rate is not None}


_PEAK_TFLOPS = {
    # NVIDIA Tesla V100 datasheet: 125 | 112 (PCIe) TFLOPS tensor; no bfloat16.
    r"V100-PCIE": _build_rates(float16=112, has_bfloat16=False, float32=14, float64=7),
    r"V100-SXM2": _build_rates(float16=125, has_bfloat16=False, float32=15.7, float64=7.8),
    # NVIDIA T4 datasheet: 65 TFLOPS mixed precision, 8.1 single.
    r"T4": _build_rates(float16=65, has_bfloat16=False, float32=8.1),
    # NVIDIA A100 datasheet, the same for PCIe and SXM: 312 dense (624 sparse).
    r"A100": _build_rates(float16=312, tf32=156, float32=19.5, float64=19.5),
    # NVIDIA A30 datasheet: 165 dense (330 sparse).
    r"A30": _build_rates(float16=165, tf32=82, float32=10.3, float64=10.3),
    # NVIDIA A40 datasheet: 149.7 dense (299.4 sparse).
    r"A40": _build_rates(float16=149.7, tf32=74.8, float32=37.4),
    # NVIDIA A10 datasheet: 125 dense (250 sparse).
    r"A10": _build_rates(float16=125, tf32=62.5, float32=31.2),
    # NVIDIA H100 datasheet, H100 NVL column: 1,671 sparse, halved; FP8 3,341.
    r"H100 NVL": _build_rates(float16=835.5, float8=1670.5, tf32=417.5, float32=60, float64=60),
    # NVIDIA H100 datasheet, H100 PCIe column: 1,513 sparse, halved; FP8 3,026.
    r"H100 PCIe": _build_rates(float16=756.5, float8=1513, tf32=378, float32=51, float64=51),
    # NVIDIA H100 Tensor Core GPU Architecture whitepaper, SXM5: 989.4 dense (1,978.9 sparse); FP8 1,978.9 dense.
    r"H100 (SXM5|\d+GB HBM3)": _build_rates(float16=989.4, float8=1978.9, tf32=494.7, float32=66.9, float64=66.9),
    # NVIDIA GH200 datasheet: the GPU is that of H100 SXM, 1,979 sparse.
    r"GH200": _build_rates(float16=989.4, float8=1978.9, tf32=494.7, float32=66.9, float64=66.9),
    # NVIDIA H200 datasheet, H200 NVL column: 1,671 sparse, halved; FP8 3,341.
    r"H200 NVL": _build_rates(float16=835.5, float8=1670.5, tf32=417.5, float32=60, float64=60),
    # NVIDIA H200 datasheet, H200 SXM column: as H100 SXM, 1,979 sparse.
    r"H200": _build_rates(float16=989.4, float8=1978.9, tf32=494.7, float32=66.9, float64=66.9),
    # NVIDIA Blackwell datasheet, HGX B200: 36 PFLOPS sparse for 8 devices; FP8 72.
    r"B200": _build_rates(float16=2250, float8=4500),
    # NVIDIA Blackwell datasheet, GB200 NVL72: 360 PFLOPS sparse for 72 devices; FP8 720.
    r"GB200": _build_rates(float16=2500, float8=5000),
    # NVIDIA L40S datasheet: 362.05 dense (733 sparse); FP8 733 dense.
    r"L40S": _build_rates(float16=362.05, float8=733, tf32=183, float32=91.6),
    # NVIDIA L40 datasheet: 181.05 dense (362.1 sparse); FP8 362 dense.
    r"L40": _build_rates(float16=181.05, float8=362, tf32=90.5, float32=90.5),
    # NVIDIA L4 datasheet: 242 sparse, halved; TF32 120 and FP8 485 sparse, halved.
    r"L4": _build_rates(float16=121, float8=242.5, tf32=60, float32=30.3),
    # NVIDIA Ada GPU Architecture whitepaper: 165.2 with float32 accumulation, dense; FP8 330.3.
    r"RTX 4090": _build_rates(float16=165.2, float8=330.3, tf32=82.6, float32=82.6),
    # NVIDIA Ampere GA102 GPU Architecture whitepaper: 71 with float32 accumulation, dense.
    r"RTX 3090": _build_rates(float16=71, tf32=35.6, float32=35.6),
    # AMD Instinct MI250X product page: 383 and 95.7 for the card, of which PyTorch shows each half as a device.
    # A driver that says "MI250X / MI250" does not know which of the two it has.
    r"MI250X(?! ?/)": _build_rates(float16=191.5, float32=47.85, float64=47.85),
    # AMD Instinct MI300X data sheet: matrix rates, 1,307.4 dense (2,614.9 sparse).
    r"MI300X": _build_rates(float16=1307.4, tf32=653.7, float32=163.4, float64=163.4),
    # AMD Instinct MI325X data sheet: compute as MI300X.
    r"MI325X": _build_rates(float16=1307.4, tf32=653.7, float32=163.4, float64=163.4),
}
"""Peak rates in TFLOP/s, by a regular expression that matches whole words of torch.cuda.get_device_name().

The first match counts, so variants of a device precede its general name.
"""

_SLOWER_VARIANTS = re.compile(r"\b(MIG|GRID|Laptop|Max-Q|Ti|Super|D)\b", re.IGNORECASE)
"""Words in a device name that denote another, slower device: a slice of a device, or a model of another class."""


def get_peak_flops(device_name: str, dtype_name: str) -> float | None:
    """Return the peak rate of one device in FLOP/s, for dense matrices. Return None if the rate of the device or dtype is not
    known.

    Args:
        device_name: name as returned by torch.cuda.get_device_name(), for example "NVIDIA H100 80GB HBM3".
        dtype_name: "float8", "float16", "bfloat16", "float32", "tf32" or "float64", with an optional prefix "torch.".
    """
    if _SLOWER_VARIANTS.search(device_name):
        return None
    for pattern, rates in _PEAK_TFLOPS.items():
        if re.search(rf"(?<!\w){pattern}(?!\w)", device_name, re.IGNORECASE):
            teraflops = rates.get(dtype_name.removeprefix("torch."))
            return None if teraflops is None else teraflops * 1e12
    return None


def get_mixed_peak_flops(device_name: str, dtype_name: str, fp8_share: float) -> float | None:
    """Return the peak rate of one device in FLOP/s for matrix products of which some are in FP8. Return None if one of the two
    rates is not known.

    The products of each dtype run at the peak rate of that dtype, so the result is the weighted harmonic mean of the two rates.

    Args:
        dtype_name: dtype of the products that are not in FP8.
        fp8_share: fraction of the FLOPs that is in FP8, 0 to 1.
    """
    dtype_peak, fp8_peak = get_peak_flops(device_name, dtype_name), get_peak_flops(device_name, "float8")
    if fp8_share == 0 or dtype_peak is None:
        return dtype_peak
    return None if fp8_peak is None else 1 / (fp8_share / fp8_peak + (1 - fp8_share) / dtype_peak)


# ---- Named timers, and the report of their times over all ranks.
#
# timers = Timers(level=1, synchronize=torch.cuda.synchronize)
# with timers("forward-backward", level=1):
#     ...
# times = merge_rank_times(gather(timers.reset_elapsed_ms()))  # on every rank
# report = format_times(times, "minmax")

TimingOption = Literal["minmax", "max", "all"]


class Timers:
    """Named timers of one rank.

    Args:
        level: maximum level of detail (--timing-log-level). Timers with a higher level do nothing and never wait for the device.
        synchronize: function that waits for the device, called at each start and stop; None if all work is synchronous.
        clock: function that returns seconds since an arbitrary origin.
    """

    def __init__(
        self, level: int, synchronize: Callable[[], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._level = level
        self._synchronize = synchronize
        self._clock = clock
        self._elapsed: dict[str, float] = {}

    def __call__(self, name: str, level: int = 0) -> AbstractContextManager[object]:
        """Return a context manager that adds the duration of its block to the timer `name`.

        Args:
            level: level of detail of the timer. If it is above the level of --timing-log-level, nothing is measured.
        """
        return self.select_level(level)(name)

    def select_level(self, level: int) -> Callable[[str], AbstractContextManager[object]]:
        """Return a function that creates context managers for the timers of one level of detail.

        The function takes the name of a timer. The context manager adds the duration of its block to the timer, or does nothing if
        --timing-log-level is lower than `level`.
        """
        return self._time if level <= self._level else nullcontext

    def reset_elapsed_ms(self) -> dict[str, float]:
        """Return the milliseconds that each timer has measured since the previous call, by name, and reset all timers."""
        elapsed = {name: seconds * 1000.0 for name, seconds in self._elapsed.items()}
        self._elapsed = dict.fromkeys(elapsed, 0.0)
        return elapsed

    @contextmanager
    def _time(self, name: str) -> Iterator[None]:
        self._elapsed.setdefault(name, 0.0)
        start = self._synchronized_time()
        try:
            yield
        finally:
            self._elapsed[name] += self._synchronized_time() - start

    def _synchronized_time(self) -> float:
        # Devices run asynchronously: without synchronization, a timer would measure only the time to launch the work.
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()


def merge_rank_times(times_of_ranks: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Merge the timers of all ranks: return the times of all ranks for each timer name. Names are in the order in which they first
    occur.

    Args:
        times_of_ranks: milliseconds by timer name, for each rank. Ranks may have different timers (only the last stage has a loss).

    Returns:
        one time per rank for each name; 0 for a rank without this timer.
    """
    names = dict.fromkeys(name for times in times_of_ranks for name in times)
    return {name: [times.get(name, 0.0) for times in times_of_ranks] for name in names}


def format_times(times: Mapping[str, Sequence[float]], option: TimingOption) -> str:
    """Format the times of all ranks as --timing-log-option requires, in Megatron-LM's format.

    Args:
        times: milliseconds of each rank, by timer name. Ranks with 0 have no such timer and are omitted.
        option: report the minimum and maximum ("minmax"), the maximum ("max") or the time of each rank ("all").

    Returns:
        Lines without a final newline; an empty string if there are no times.
    """
    lines = []
    for name, rank_times in times.items():
        ms_of_rank = {rank: ms for rank, ms in enumerate(rank_times) if ms > 0.0}
        if not ms_of_rank:
            continue
        min_ms, max_ms = min(ms_of_rank.values()), max(ms_of_rank.values())
        label = "    " + (name + " ").ljust(48, ".")
        if option == "minmax":
            lines.append(f"{label}: ({min_ms:.2f}, {max_ms:.2f})")
        elif option == "max":
            lines.append(f"{label}: {max_ms:.2f}")
        else:
            lines += [f"  {name}:", *(f"     rank {rank:2d}: {ms:.2f}" for rank, ms in ms_of_rank.items())]
    title = {"minmax": "(min, max) time", "max": "max time", "all": "times"}[option]
    return "\n".join([f"{title} across ranks (ms):", *lines]) if lines else ""


def get_peak_host_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
