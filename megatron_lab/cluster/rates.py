"""Rates of a cluster file, fitted to measurements. With these rates, the predictions of megatron_lab/planner/durations.py come as
close to the measured durations as possible.

The duration of each measured computation is modelled as a sum: FLOPs of matrix products, bytes of memory traffic, number of kernels
and so on, each divided by a rate. A least-squares fit of the relative errors finds the rates. No rate is negative, and outliers get
less weight.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron.metrics.measures import get_peak_flops
from megatron_lab.cluster.measurement import Measurement
from megatron_lab.cluster.probes import CollectiveTiming, Durations, OverlapTiming, WorkTiming
from megatron_lab.planner.cluster import Cluster, Efficiency
from megatron_lab.planner.device_work import DeviceWork
from megatron_lab.planner.durations import count_gemm_bytes, get_peak_name

_NUM_ITERATIONS = 30
_MIN_ERROR = 0.03
"""Relative errors below this bound do not reduce the weight of a sample."""
_MIN_SPREAD = 0.05
_TYPE_WEIGHTS = {"layers": 4.0}
"""Weights of types of work in the fit; 1 for types that are not listed. Layers have the highest weight because they are to be
predicted: their operands are not in a cache and their results are in newly allocated memory. Separate matrix products and attention
are needed to separate rates that layers combine."""
GEMM_FLOPS, GEMM, KERNEL, MEMORY, NEW_MEMORY = "products in", "product", "kernel", "memory", "fresh"
ATTENTION, ATTENTION_BACKWARD = "attention", "attention backward"


@dataclass(frozen=True)
class Figure:
    """One value of a cluster file, for comments and messages: its name, the value and its accuracy, as texts."""

    name: str
    value: str
    accuracy: str


def compute_lower_quartile(durations: Durations) -> float:
    """Return the lower quartile of measured durations. It is more stable than the mean, because disturbances can only make a
    measurement longer."""
    return sorted(durations)[len(durations) // 4]


def compute_amounts(work: DeviceWork, *, includes_launches: bool = True) -> dict[str, float]:
    """Return the amounts of work from which the duration of a computation is predicted.

    Args:
        includes_launches: whether to count kernel launches. Use False if launch times have been subtracted from the durations.

    Returns:
        by name: FLOPs for each type of matrix product and attention, bytes of memory traffic, number of matrix products, and number
            of kernels.
    """
    amounts = {MEMORY: float(work.memory_bytes), KERNEL: float(work.num_kernels) * includes_launches}
    for gemm, count in work.gemms.items():
        name = f"{GEMM_FLOPS} {get_peak_name(gemm.dtype)}"
        amounts[name] = amounts.get(name, 0.0) + count * gemm.flops
        amounts[GEMM] = amounts.get(GEMM, 0.0) + count
        amounts[MEMORY] += count * count_gemm_bytes(gemm)
    for attention_work, count in work.attention.items():
        name = ATTENTION_BACKWARD if attention_work.backward else ATTENTION
        amounts[name] = amounts.get(name, 0.0) + count * attention_work.flops
    return amounts


def fit_rates(
    samples: Sequence[tuple[Mapping[str, float], float]], work_types: Sequence[str] = ()
) -> tuple[dict[str, float], list[float]]:
    """Fit the seconds per unit of each amount of work (one FLOP, one byte, one kernel) to measured durations.

    Args:
        samples: for each measurement, the amounts by name and the seconds.
        work_types: type of each measurement, such as "layers". If given, all types have equal total weight, multiplied by the
            factors in `_TYPE_WEIGHTS`. By default all measurements have equal weight.

    Returns:
        the seconds per unit by name of the amount, and for each measurement the logarithm of measured divided by fitted seconds.
    """
    names = sorted({name for amounts, _ in samples for name, amount in amounts.items() if amount})
    durations = np.array([duration for _, duration in samples])
    matrix = np.array([[amounts.get(name, 0.0) for name in names] for amounts, _ in samples]) / durations[:, None]
    scale = np.abs(matrix).max(axis=0)
    matrix /= scale
    base_weights = (
        np.array([_TYPE_WEIGHTS.get(work_type, 1.0) * work_types.count(work_type) ** -0.5 for work_type in work_types])
        if work_types
        else np.ones(len(samples))
    )
    weights = base_weights
    rates = np.zeros(len(names))
    for _ in range(_NUM_ITERATIONS):
        rates = _solve_non_negative(matrix * weights[:, None], weights)
        weights = base_weights / np.sqrt(np.maximum(np.abs(matrix @ rates - 1), _MIN_ERROR))
    fitted_ratios = np.maximum(matrix @ rates, 1e-9)
    return dict(zip(names, (rates / scale).tolist(), strict=True)), (-np.log(fitted_ratios)).tolist()


def _solve_non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Find a vector x without negative elements for which matrix @ x is close to `target` (least squares).

    Solve without this bound first. As long as an element is negative, fix the most negative one at 0 and solve again.
    """
    columns = list(range(matrix.shape[1]))
    solution = np.zeros(matrix.shape[1])
    while columns:
        values = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
        if (values >= 0).all():
            solution[columns] = values
            return solution
        del columns[int(np.argmin(values))]
    return solution


def fit_line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Fit a straight line through points (amount of work, seconds). Return its seconds at amount 0, and the seconds per unit of
    amount."""
    rates, _ = fit_rates([({"each": 1.0, "unit": amount}, duration) for amount, duration in points])
    return rates.get("each", 0.0), rates.get("unit", 0.0)


def estimate_std(log_ratios: Sequence[float]) -> float:
    """Estimate the standard deviation of log ratios so that outliers have little influence.

    The estimate is the median of the absolute values divided by 0.6745, which is this median for a normal distribution of standard
    deviation 1.

    Args:
        log_ratios: logarithms of measured divided by fitted seconds.
    """
    return statistics.median(map(abs, log_ratios)) / 0.6745 if log_ratios else 0.0


def build_cluster(measurement: Measurement, name: str) -> tuple[Cluster, list[Figure]]:
    """Build a cluster whose rates are fitted to a measurement.

    Args:
        name: name of the cluster.

    Returns:
        the cluster, and a line about each value and its accuracy for comments and messages.
    """
    uses_cuda = measurement.device != "cpu"
    figures: list[Figure] = []
    kernel_s = compute_lower_quartile(measurement.empty_kernel)
    samples = [
        (timing.name, compute_amounts(timing.work, includes_launches=False), compute_lower_quartile(timing.durations) - kernel_s)
        for timing in measurement.work_timings
        if compute_lower_quartile(timing.durations) > 2 * kernel_s
    ]
    for timing in (layer_timing for layer_times in measurement.layers for layer_timing in layer_times.timings):
        duration = statistics.median(timing.durations)
        if not uses_cuda:
            samples.append((timing.name, {**compute_amounts(timing.work), NEW_MEMORY: timing.new_bytes}, duration))
        elif duration > 1.5e-6 * _compute_launch_us(measurement) * timing.work.num_kernels:  # the duration is not only launch time
            samples.append(
                (timing.name, compute_amounts(timing.work, includes_launches=False), duration - kernel_s * timing.work.num_kernels)
            )
    rates, log_ratios = fit_rates(
        [(amounts, duration) for _, amounts, duration in samples], [work_type for work_type, *_ in samples]
    )
    for work_type in dict.fromkeys(work_type for work_type, *_ in samples):
        type_log_ratios = [
            log_ratio for (sample_type, *_), log_ratio in zip(samples, log_ratios, strict=True) if sample_type == work_type
        ]
        figures.append(
            Figure(
                work_type, f"{len(type_log_ratios)} measurements", f"fitted within {_format_percent(estimate_std(type_log_ratios))}"
            )
        )
    layer_log_ratios = [
        log_ratio for (sample_type, *_), log_ratio in zip(samples, log_ratios, strict=True) if sample_type == "layers"
    ]

    memory_rate = _invert(rates.get(MEMORY, 0.0))  # 0 if matrix products and launches explain all durations
    memory_timings = [timing for timing in measurement.work_timings if timing.name == "memory"]
    max_memory_bytes = max(timing.work.memory_bytes for timing in memory_timings)
    max_memory_rate = max(timing.work.memory_bytes / compute_lower_quartile(timing.durations) for timing in memory_timings)
    stream_rate = max(
        timing.work.memory_bytes / compute_lower_quartile(timing.durations)
        for timing in memory_timings
        if timing.work.memory_bytes > max_memory_bytes / 2
    )
    measured_peaks, gemm_efficiencies = {}, {}
    for dtype, max_gemm_rate in _compute_max_gemm_rates(measurement).items():
        seconds_per_flop = rates.get(f"{GEMM_FLOPS} {dtype}", 0.0)
        rate = 1 / seconds_per_flop if seconds_per_flop else max_gemm_rate
        dtype_peak = get_peak_flops(measurement.device, dtype) if uses_cuda else None
        if dtype_peak is None:
            measured_peaks[dtype] = dtype_peak = rate
        gemm_efficiencies[dtype] = min(1.0, rate / dtype_peak)
        value = f"{rate / 1e12:.3g} TFLOP/s in layers, {max_gemm_rate / 1e12:.3g} in the fastest single product"
        figures.append(
            Figure(
                f"products in {dtype}",
                value,
                _format_accuracy(timing.durations for timing in measurement.work_timings if _has_dtype(timing, dtype)),
            )
        )
    peak = (
        measured_peaks.get(_get_layer_dtype(measurement))
        or get_peak_flops(measurement.device, _get_layer_dtype(measurement))
        or 1.0
    )
    step_s, seconds_per_byte = fit_line(
        (layer_times.update_bytes, statistics.median(layer_times.remaining)) for layer_times in measurement.layers
    )
    efficiency = Efficiency(
        products={dtype: _round_to_3_digits(fraction) for dtype, fraction in gemm_efficiencies.items()},
        attention=_compute_efficiency(_invert(rates.get(ATTENTION, 0.0)), peak) or 0.5,
        attention_backward=_compute_efficiency(_invert(rates.get(ATTENTION_BACKWARD, 0.0)), peak) or 0.5,
        memory=_compute_efficiency(memory_rate or max_memory_rate, stream_rate),
        state=_compute_efficiency(_invert(seconds_per_byte), stream_rate),
        node=1.0,
        network=1.0,
    )
    launch_us = _compute_launch_us(measurement) if uses_cuda else 0.0
    cluster = Cluster(
        name=name,
        device=measurement.device,
        memory_gb=_round_to_3_digits(measurement.memory_bytes / 1e9),
        memory_gb_s=_round_to_3_digits(stream_rate / 1e9),
        gpus_per_node=measurement.ranks_per_node,
        node_gb_s=0.0,
        network_gb_s=0.0,
        reached=efficiency,
        peak_tflops={dtype: _round_to_3_digits(rate / 1e12) for dtype, rate in measured_peaks.items()},
        fresh_gb_s=_round_to_3_digits(min(1e6, 1e-9 * _invert(rates.get(NEW_MEMORY, 0.0)))),
        kernel_us=_round_to_3_digits(1e6 * (kernel_s if uses_cuda else rates.get(KERNEL, 0.0))),
        host_us=_round_to_3_digits(launch_us),
        product_us=_round_to_3_digits(1e6 * rates.get(GEMM, 0.0)),
        step_ms=_round_to_3_digits(1e3 * step_s),
        shared_by=measurement.num_concurrent_ranks,
        spread=max(_MIN_SPREAD, _round_to_3_digits(estimate_std(layer_log_ratios))),
    )
    cluster, link_figures = _add_links(cluster, measurement)
    return cluster, [*figures, *link_figures]


def _has_dtype(timing: WorkTiming, dtype: str) -> bool:
    return any(get_peak_name(gemm.dtype) == dtype for gemm in timing.work.gemms)


def _compute_max_gemm_rates(measurement: Measurement) -> dict[str, float]:
    """Return the highest FLOP/s that a measured matrix product reaches, by dtype."""
    dtypes = dict.fromkeys(get_peak_name(gemm.dtype) for timing in measurement.work_timings for gemm in timing.work.gemms)
    return {
        dtype: max(
            timing.work.flops / compute_lower_quartile(timing.durations)
            for timing in measurement.work_timings
            if _has_dtype(timing, dtype) and not timing.work.attention
        )
        for dtype in dtypes
    }


def get_fastest_work(measurement: Measurement) -> DeviceWork:
    """Return the computation with the shortest measured duration: forward or backward of the layers of one of the small models. On
    a GPU this duration is the time to launch its kernels."""
    return min(
        (timing for layer_times in measurement.layers for timing in layer_times.timings),
        key=lambda timing: compute_lower_quartile(timing.durations),
    ).work


def _compute_launch_us(measurement: Measurement) -> float:
    work = get_fastest_work(measurement)
    (timing,) = (timing for layer_times in measurement.layers for timing in layer_times.timings if timing.work is work)
    return 1e6 * compute_lower_quartile(timing.durations) / max(1, work.num_kernels)


def _get_layer_dtype(measurement: Measurement) -> str:
    """Return the name of the dtype in which the small models compute."""
    return next(
        get_peak_name(gemm.dtype)
        for layer_times in measurement.layers
        for timing in layer_times.timings
        for gemm in timing.work.gemms
    )


def _add_links(cluster: Cluster, measurement: Measurement) -> tuple[Cluster, list[Figure]]:
    """Add the measured links to a cluster: latencies and rates inside and between nodes, and the rate of copies to the host. Also
    add the fraction of communication that is hidden behind computation.

    Returns:
        the new cluster, and a line about each added value and its accuracy.
    """
    figures: list[Figure] = []
    intra_node = [timing for timing in measurement.collectives if timing.ranks_per_node == timing.group_size]
    inter_node = [timing for timing in measurement.collectives if timing.ranks_per_node == 1 and timing.group_size > 1]
    changes: dict[str, Any] = {}
    relative_rates: dict[str, list[float]] = {}
    for link, timings, count_hops in (
        ("node", intra_node, lambda group_size: group_size - 1.0),
        ("network", inter_node, lambda group_size: (group_size - 1) ** 0.5),
    ):
        if not timings:
            continue
        # Communication uses cores too, which ranks may share.
        ranks_per_core = {
            timing.group_size: max(1.0, timing.group_size / (measurement.num_concurrent_ranks or timing.group_size))
            if link == "node"
            else 1.0
            for timing in timings
        }
        latencies_and_rates = {
            key: (latency, ranks_per_core[key[1]] * rate) for key, (latency, rate) in _fit_collectives(timings).items()
        }
        latencies = [
            1e6 * latency / count_hops(group_size) / ranks_per_core[group_size]
            for (_, group_size), (latency, _) in latencies_and_rates.items()
        ]
        all_reduce_rates = {
            group_size: rate for (operation, group_size), (_, rate) in latencies_and_rates.items() if operation == "all-reduce"
        }
        for (operation, group_size), (_, rate) in latencies_and_rates.items():
            if group_size in all_reduce_rates:
                relative_rates.setdefault(operation, []).append(rate / all_reduce_rates[group_size])
        changes[f"{link}_us"] = _round_to_3_digits(statistics.median(latencies))
        changes[f"{link}_gb_s"] = _round_to_3_digits(statistics.median(all_reduce_rates.values()) / 1e9)
        for operation in dict.fromkeys(operation for operation, _ in latencies_and_rates):
            operation_values = [
                (group_size, latency, rate)
                for (name, group_size), (latency, rate) in latencies_and_rates.items()
                if name == operation
            ]
            value = ", ".join(
                f"{group_size} ranks {1e6 * latency:.0f} us and {rate / 1e9:.3g} GB/s"
                for group_size, latency, rate in operation_values
            )
            figures.append(
                Figure(
                    f"{operation} ({link})",
                    value,
                    _format_accuracy(timing.durations for timing in timings if timing.operation == operation),
                )
            )
    changes["operations"] = {
        operation: _round_to_3_digits(statistics.median(values))
        for operation, values in relative_rates.items()
        if operation != "all-reduce"
    }
    changes.setdefault("node_gb_s", cluster.memory_gb_s)
    changes.setdefault("network_gb_s", changes["node_gb_s"])
    changes.setdefault("network_us", changes.get("node_us", cluster.network_us))
    if measurement.host_copies:
        _, seconds_per_byte = fit_line(
            (num_bytes, compute_lower_quartile(durations)) for num_bytes, durations in measurement.host_copies
        )
        changes["host_gb_s"] = _round_to_3_digits(min(1e6, 1e-9 / seconds_per_byte)) if seconds_per_byte else cluster.host_gb_s
    if measurement.overlap is not None:
        changes["hidden"] = _round_to_3_digits(compute_hidden_share(measurement.overlap))
        samples = (measurement.overlap.gemms, measurement.overlap.all_reduce, measurement.overlap.both)
        value = " and ".join(f"{1e3 * compute_lower_quartile(durations):.2f} ms" for durations in samples[:2])
        figures.append(
            Figure(
                "all-reduce and products",
                f"{value}, {1e3 * compute_lower_quartile(samples[2]):.2f} ms overlapped",
                _format_accuracy(samples),
            )
        )
    return replace(cluster, **changes), figures


def _format_accuracy(samples: Iterable[Durations]) -> str:
    """Format the accuracy of measured durations as text: half of the relative distance between their quartiles, as the median over
    all measurements.

    Args:
        samples: repeated durations of each measurement.
    """
    half_spreads = [
        (sorted(durations)[-1 - len(durations) // 4] / sorted(durations)[len(durations) // 4] - 1) / 2 for durations in samples
    ]
    return f"samples within {_format_percent(statistics.median(half_spreads))}"


def _fit_collectives(timings: Sequence[CollectiveTiming]) -> dict[tuple[str, int], tuple[float, float]]:
    """Fit latency and rate of each collective, separately for each number of ranks.

    Returns:
        latency in seconds and rate in bytes per second, by name of the collective and number of ranks.
    """
    results = {}
    for key in dict.fromkeys((timing.operation, timing.group_size) for timing in timings):
        points = [
            (timing.num_bytes, statistics.median(timing.durations))
            for timing in timings
            if (timing.operation, timing.group_size) == key
        ]
        latency, seconds_per_byte = fit_line(points)
        max_rate = max(num_bytes / duration for num_bytes, duration in points)
        results[key] = latency, min(100 * max_rate, 1 / seconds_per_byte) if seconds_per_byte else max_rate
    return results


def compute_hidden_share(overlap: OverlapTiming) -> float:
    """Return how well matrix products and an all-reduce overlap: 0 if they run one after the other, 1 if the shorter of them takes
    no extra time."""
    gemms, all_reduce, both = (compute_lower_quartile(durations) for durations in (overlap.gemms, overlap.all_reduce, overlap.both))
    return min(1.0, max(0.0, (gemms + all_reduce - both) / min(gemms, all_reduce)))


def _invert(value: float) -> float:
    return 1 / value if value else 0.0


def _compute_efficiency(rate: float, full_rate: float) -> float:
    """Return the rate of a type of kernel as a fraction of the device's full rate.

    The fraction is limited to 100, because the fit to the measurements may attribute almost no time to the kernels.
    """
    return _round_to_3_digits(min(100.0, rate / full_rate))


def _round_to_3_digits(value: float) -> float:
    """Round to three significant digits. Infinity and NaN become 0."""
    return float(f"{value:.3g}") if math.isfinite(value) else 0.0


def _format_percent(value: float) -> str:
    return f"{100 * value:.0f} %"
