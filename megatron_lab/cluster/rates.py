"""A cluster's figures from what was measured: the rates that bring megatron_lab/planner/durations.py closest.

Each piece of work is so many FLOPs of products, bytes, kernels, and so on, and its time is the sum of these, each at its own rate.
So the rates are a least-squares fit: of relative errors, with no rate below zero, and pieces that are far off count less.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron.metrics.measures import peak_flops
from megatron_lab.cluster.measurement import Measured
from megatron_lab.cluster.probes import Beside, Seconds, Sent, Timed
from megatron_lab.planner.cluster import Cluster, Reached
from megatron_lab.planner.durations import column, product_bytes
from megatron_lab.planner.work import DeviceWork

_ROUNDS = 30
_CLOSE = 0.03
"""Relative errors below this count as nothing when it is judged which pieces are far off."""
_LEAST_SPREAD = 0.05
_COUNTS = {"layers": 4.0}
"""How much kinds of pieces count. Layers are what is to be foretold: their operands lie anywhere in memory, their results are new.
Products and attention by themselves tell apart what layers only show together."""
PRODUCTS, PRODUCT, KERNEL, MEMORY, FRESH = "products in", "product", "kernel", "memory", "fresh"
ATTENTION, ATTENTION_BACK = "attention", "attention backward"


@dataclass(frozen=True)
class Figure:
    """A figure of the cluster file, in words: what it is, its value, how sure."""

    name: str
    value: str
    spread: str


def typical(seconds: Seconds) -> float:
    """The lower quartile of samples: what disturbs only makes longer."""
    return sorted(seconds)[len(seconds) // 4]


def amounts(work: DeviceWork, *, launches: bool = True) -> dict[str, float]:
    """What some work has of everything that takes time."""
    found = {MEMORY: float(work.moved), KERNEL: float(work.kernels) * launches}
    for one, times in work.products.items():
        name = f"{PRODUCTS} {column(one.dtype)}"
        found[name] = found.get(name, 0.0) + times * one.flops
        found[PRODUCT] = found.get(PRODUCT, 0.0) + times
        found[MEMORY] += times * product_bytes(one)
    for part, times in work.attention.items():
        name = ATTENTION_BACK if part.backward else ATTENTION
        found[name] = found.get(name, 0.0) + times * part.flops
    return found


def fit(pieces: Sequence[tuple[Mapping[str, float], float]], kinds: Sequence[str] = ()) -> tuple[dict[str, float], list[float]]:
    """Seconds of a unit of each thing, and of each piece the logarithm of measured over fitted time.

    Args:
        pieces: amounts, and seconds.
        kinds: what each piece is; each kind counts as much, however many pieces it has.
    """
    names = sorted({name for have, _ in pieces for name, amount in have.items() if amount})
    seconds = np.array([took for _, took in pieces])
    table = np.array([[have.get(name, 0.0) for name in names] for have, _ in pieces]) / seconds[:, None]
    scale = np.abs(table).max(axis=0)
    table /= scale
    shares = np.array([_COUNTS.get(kind, 1.0) * kinds.count(kind) ** -0.5 for kind in kinds]) if kinds else np.ones(len(pieces))
    weights = shares
    found = np.zeros(len(names))
    for _ in range(_ROUNDS):
        found = _not_negative(table * weights[:, None], weights)
        weights = shares / np.sqrt(np.maximum(np.abs(table @ found - 1), _CLOSE))
    fitted = np.maximum(table @ found, 1e-9)
    return dict(zip(names, (found / scale).tolist(), strict=True)), (-np.log(fitted)).tolist()


def _not_negative(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares of which what would be below zero is nothing."""
    kept = list(range(table.shape[1]))
    found = np.zeros(table.shape[1])
    while kept:
        part = np.linalg.lstsq(table[:, kept], wanted, rcond=None)[0]
        if (part >= 0).all():
            found[kept] = part
            return found
        del kept[int(np.argmin(part))]
    return found


def line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Seconds at nothing, and seconds of a unit, of (amount, seconds)."""
    rates, _ = fit([({"each": 1.0, "unit": amount}, took) for amount, took in points])
    return rates.get("each", 0.0), rates.get("unit", 0.0)


def spread(logs: Sequence[float]) -> float:
    """Standard deviation of logarithms, by their median distance from zero (that of a normal distribution is 0.6745 of it)."""
    return statistics.median(map(abs, logs)) / 0.6745 if logs else 0.0


def cluster_of(found: Measured, name: str) -> tuple[Cluster, list[Figure]]:
    """The cluster file of a measurement, and its figures with their spreads."""
    on_cuda = found.device != "cpu"
    figures: list[Figure] = []
    kernel = typical(found.kernels)
    pieces = [
        (one.what, amounts(one.work, launches=False), typical(one.seconds) - kernel)
        for one in found.timed
        if typical(one.seconds) > 2 * kernel
    ]
    for one in (each for layers in found.layers for each in layers.timed):
        took = statistics.median(one.seconds)
        if not on_cuda:
            pieces.append((one.what, {**amounts(one.work), FRESH: one.fresh}, took))
        elif took > 1.5e-6 * _host_us(found) * one.work.kernels:  # launching is not all that it takes
            pieces.append((one.what, amounts(one.work, launches=False), took - kernel * one.work.kernels))
    rates, logs = fit([(have, took) for _, have, took in pieces], [what for what, *_ in pieces])
    for what in dict.fromkeys(what for what, *_ in pieces):
        mine = [log for (kind, *_), log in zip(pieces, logs, strict=True) if kind == what]
        figures.append(Figure(what, f"{len(mine)} pieces", f"fitted within {_percent(spread(mine))}"))
    of_layers = [log for (kind, *_), log in zip(pieces, logs, strict=True) if kind == "layers"]

    memory = _inverse(rates.get(MEMORY, 0.0))  # none where products and launches tell all
    streams = [one for one in found.timed if one.what == "memory"]
    largest = max(one.work.moved for one in streams)
    fastest = max(one.work.moved / typical(one.seconds) for one in streams)
    stream = max(one.work.moved / typical(one.seconds) for one in streams if one.work.moved > largest / 2)
    peaks, products = {}, {}
    for dtype, quickest in _fastest(found).items():
        each = rates.get(f"{PRODUCTS} {dtype}", 0.0)
        rate = 1 / each if each else quickest
        known = peak_flops(found.device, dtype) if on_cuda else None
        if known is None:
            peaks[dtype] = known = rate
        products[dtype] = min(1.0, rate / known)
        words = f"{rate / 1e12:.3g} TFLOP/s in layers, {quickest / 1e12:.3g} by the quickest product alone"
        figures.append(Figure(f"products in {dtype}", words, _samples(one.seconds for one in found.timed if _of(one, dtype))))
    peak = peaks.get(_main(found)) or peak_flops(found.device, _main(found)) or 1.0
    each_step, per_byte = line((layers.state, statistics.median(layers.rest)) for layers in found.layers)
    reached = Reached(
        products={dtype: _short(share) for dtype, share in products.items()},
        attention=_share(_inverse(rates.get(ATTENTION, 0.0)), peak) or 0.5,
        attention_backward=_share(_inverse(rates.get(ATTENTION_BACK, 0.0)), peak) or 0.5,
        memory=_share(memory or fastest, stream),
        state=_share(_inverse(per_byte), stream),
        node=1.0,
        network=1.0,
    )
    host = _host_us(found) if on_cuda else 0.0
    cluster = Cluster(
        name=name,
        device=found.device,
        memory_gb=_short(found.memory / 1e9),
        memory_gb_s=_short(stream / 1e9),
        gpus_per_node=found.per_node,
        node_gb_s=0.0,
        network_gb_s=0.0,
        reached=reached,
        peak_tflops={dtype: _short(rate / 1e12) for dtype, rate in peaks.items()},
        fresh_gb_s=_short(min(1e6, 1e-9 * _inverse(rates.get(FRESH, 0.0)))),
        kernel_us=_short(1e6 * (kernel if on_cuda else rates.get(KERNEL, 0.0))),
        host_us=_short(host),
        product_us=_short(1e6 * rates.get(PRODUCT, 0.0)),
        step_ms=_short(1e3 * each_step),
        shared_by=found.shared_by,
        spread=max(_LEAST_SPREAD, _short(spread(of_layers))),
    )
    cluster, of_links = _with_links(cluster, found)
    return cluster, [*figures, *of_links]


def _of(one: Timed, dtype: str) -> bool:
    return any(column(product.dtype) == dtype for product in one.work.products)


def _fastest(found: Measured) -> dict[str, float]:
    """FLOP/s of the quickest product of each dtype."""
    dtypes = dict.fromkeys(column(product.dtype) for one in found.timed for product in one.work.products)
    return {
        dtype: max(one.work.flops / typical(one.seconds) for one in found.timed if _of(one, dtype) and not one.work.attention)
        for dtype in dtypes
    }


def smallest(found: Measured) -> DeviceWork:
    """Of the layers the one that is over soonest: where the device works beside its host, launching is all that it takes."""
    return min((one for layers in found.layers for one in layers.timed), key=lambda one: typical(one.seconds)).work


def _host_us(found: Measured) -> float:
    work = smallest(found)
    (one,) = (one for layers in found.layers for one in layers.timed if one.work is work)
    return 1e6 * typical(one.seconds) / max(1, work.kernels)


def _main(found: Measured) -> str:
    """The dtype of the layers."""
    return next(column(one.dtype) for layers in found.layers for timed in layers.timed for one in timed.work.products)


def _with_links(cluster: Cluster, found: Measured) -> tuple[Cluster, list[Figure]]:
    """Latency and rate inside a node and between nodes, copies to the host, and how well sending is hidden."""
    figures: list[Figure] = []
    inside = [one for one in found.sent if one.per_node == one.size]
    across = [one for one in found.sent if one.per_node == 1 and one.size > 1]
    changes: dict[str, Any] = {}
    speeds: dict[str, list[float]] = {}
    for where, some, hops in (("node", inside, lambda size: size - 1.0), ("network", across, lambda size: (size - 1) ** 0.5)):
        if not some:
            continue
        # Ranks that share cores also share what sending takes of these.
        crowd = {one.size: max(1.0, one.size / (found.shared_by or one.size)) if where == "node" else 1.0 for one in some}
        lines = {key: (each, crowd[key[1]] * rate) for key, (each, rate) in _lines(some).items()}
        latencies = [1e6 * each / hops(size) / crowd[size] for (_, size), (each, _) in lines.items()]
        whole = {size: rate for (what, size), (_, rate) in lines.items() if what == "all-reduce"}
        for (what, size), (_, rate) in lines.items():
            if size in whole:
                speeds.setdefault(what, []).append(rate / whole[size])
        changes[f"{where}_us"] = _short(statistics.median(latencies))
        changes[f"{where}_gb_s"] = _short(statistics.median(whole.values()) / 1e9)
        for what in dict.fromkeys(what for what, _ in lines):
            mine = [(size, each, rate) for (name, size), (each, rate) in lines.items() if name == what]
            words = ", ".join(f"{size} ranks {1e6 * each:.0f} us and {rate / 1e9:.3g} GB/s" for size, each, rate in mine)
            figures.append(Figure(f"{what} ({where})", words, _samples(one.seconds for one in some if one.what == what)))
    changes["operations"] = {what: _short(statistics.median(each)) for what, each in speeds.items() if what != "all-reduce"}
    changes.setdefault("node_gb_s", cluster.memory_gb_s)
    changes.setdefault("network_gb_s", changes["node_gb_s"])
    changes.setdefault("network_us", changes.get("node_us", cluster.network_us))
    if found.copies:
        _, unit = line((size, typical(seconds)) for size, seconds in found.copies)
        changes["host_gb_s"] = _short(min(1e6, 1e-9 / unit)) if unit else cluster.host_gb_s
    if found.beside is not None:
        changes["hidden"] = _short(hidden(found.beside))
        each = (found.beside.products, found.beside.reduction, found.beside.both)
        words = " and ".join(f"{1e3 * typical(seconds):.2f} ms" for seconds in each[:2])
        figures.append(Figure("all-reduce beside products", f"{words}, {1e3 * typical(each[2]):.2f} ms together", _samples(each)))
    return replace(cluster, **changes), figures


def _samples(some: Iterable[Seconds]) -> str:
    """How far samples lie apart: half of the distance of their quartiles."""
    apart = [(sorted(each)[-1 - len(each) // 4] / sorted(each)[len(each) // 4] - 1) / 2 for each in some]
    return f"samples within {_percent(statistics.median(apart))}"


def _lines(some: Sequence[Sent]) -> dict[tuple[str, int], tuple[float, float]]:
    """Latency, and rate beyond it, by kind and number of ranks."""
    found = {}
    for key in dict.fromkeys((one.what, one.size) for one in some):
        points = [(one.num_bytes, statistics.median(one.seconds)) for one in some if (one.what, one.size) == key]
        each, unit = line(points)
        fastest = max(num_bytes / seconds for num_bytes, seconds in points)
        found[key] = each, min(100 * fastest, 1 / unit) if unit else fastest
    return found


def hidden(beside: Beside) -> float:
    """The share of the shorter of the two that runs beside the other."""
    products, reduction, both = (typical(seconds) for seconds in (beside.products, beside.reduction, beside.both))
    return min(1.0, max(0.0, (products + reduction - both) / min(products, reduction)))


def _inverse(value: float) -> float:
    return 1 / value if value else 0.0


def _share(rate: float, whole: float) -> float:
    """At most 100: what is faster takes no time."""
    return _short(min(100.0, rate / whole))


def _short(value: float) -> float:
    """With three digits."""
    return float(f"{value:.3g}") if math.isfinite(value) else 0.0


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"
