"""A cluster file scaled by what runs with --plan-report found: how fast devices compute, how fast links send, and how sure that is.

Two numbers are fitted, so that few reports are enough: what computing takes over what was foretold, and what sending takes. The
parts that timers tell apart are sums of both. Each number is held at 1 as if one report more had found no difference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_lab.cluster.rates import fit
from megatron_lab.monitoring.plan_report import AT_END, BETWEEN, grouped
from megatron_lab.planner.cluster import Cluster, Reached

COMPUTING, SENDING = "computing", "sending"
_FASTEST, _SLOWEST = 1 / 3, 3.0
"""Between these lies what a number may be: beyond, something else is wrong."""
_SENT = ("messages", "gradients", "parameters", "numbers", "sharded state")
_LEAST_SPREAD = 0.03
_LEAST_SENT = 0.02
"""Where less of the time is sending, nothing can be said of links."""


@dataclass(frozen=True)
class Report:
    """What a run foretold and found, in seconds."""

    parts: Mapping[str, float]
    """Foretold."""
    found: Mapping[str, float]
    """Measured, by the names of `grouped`."""
    seconds: float
    """Measured."""


def read_report(path: Path) -> Report:
    """A report of a run.

    Raises:
        ValueError: the file cannot be read, or is none.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        parts = {str(name): float(seconds) for name, seconds in given["foretold"]["parts"].items()}
        measured = given["measured"]
        found = {name: float(measured["parts"][name]) for name in grouped(parts)}
        report = Report(parts, found, float(measured["seconds"]))
    except OSError as error:
        raise ValueError(f"--calibrate {path} cannot be read: {error.strerror}.") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"--calibrate {path} is no report of --plan-report ({error}).") from error
    if not all(math.isfinite(one) and one >= 0 for one in (*parts.values(), *found.values())) or report.seconds <= 0:
        raise ValueError(f"--calibrate {path} has a time that is no number from 0 on.")
    return report


def sends(part: str) -> bool:
    """Whether a part of a step is sending; all others are computing, and waiting for it."""
    return part in _SENT or part.endswith(" ranks")


def pieces_of(report: Report) -> list[tuple[dict[str, float], float]]:
    """For each part that timers tell apart: foretold seconds of computing and of sending in it, and what was measured."""
    found = []
    for name, seconds in report.found.items():
        own = {"waiting between operations": BETWEEN, "end of the step": AT_END}.get(name)
        mine = {part: took for part, took in report.parts.items() if (part in own if own else part not in (*BETWEEN, *AT_END))}
        amounts = {
            COMPUTING: sum(took for part, took in mine.items() if not sends(part)),
            SENDING: sum(took for part, took in mine.items() if sends(part)),
        }
        if seconds > 0.02 * report.seconds and sum(amounts.values()) > 0.02 * report.seconds:  # else it is noise
            found.append((amounts, seconds))
    return found


def scales(reports: Sequence[Report]) -> dict[str, float]:
    """What computing and sending take, over what was foretold."""
    pieces = [piece for report in reports for piece in pieces_of(report)]
    sent = sum(amounts[SENDING] for amounts, _ in pieces) > _LEAST_SENT * sum(seconds for _, seconds in pieces)
    if not sent:
        pieces = [({COMPUTING: amounts[COMPUTING]}, seconds) for amounts, seconds in pieces if amounts[COMPUTING]]
    found, _ = fit(pieces) if pieces else ({}, [])
    held = len(reports) / (len(reports) + 1)
    bounded = {name: min(_SLOWEST, max(_FASTEST, found.get(name, 1.0))) for name in (COMPUTING, SENDING if sent else COMPUTING)}
    return {name: bounded.get(name, 1.0) ** held for name in (COMPUTING, SENDING)}


def calibrated(cluster: Cluster, reports: Sequence[Report]) -> tuple[Cluster, list[str]]:
    """The cluster scaled by the reports, and what was done in words."""
    scale = scales(reports)
    computing, sending = scale[COMPUTING], scale[SENDING]
    errors = []
    for report in reports:
        again = sum(seconds * scale[SENDING if sends(part) else COMPUTING] for part, seconds in report.parts.items())
        errors.append(math.log(report.seconds / again))
    # As if the file's spread came from two runs more.
    spread = math.sqrt((2 * cluster.spread**2 + sum(error**2 for error in errors)) / (2 + len(errors)))
    words = [
        f"computing takes {computing:.3g} of what was foretold, sending {sending:.3g}; spread {max(spread, _LEAST_SPREAD):.3g} "
        f"(was {cluster.spread:.3g}), of {len(reports)} report{'s' * (len(reports) > 1)}"
    ]
    changes: dict[str, Any] = {
        "reached": _reached(cluster.reached, computing, sending, measured=bool(cluster.peak_tflops) and cluster.device == "cpu"),
        "spread": round(max(spread, _LEAST_SPREAD), 4),
    }
    for names, factor in (
        (("kernel_us", "host_us", "product_us", "step_ms"), computing),
        (("node_us", "network_us"), sending),
    ):
        changes |= {name: getattr(cluster, name) * factor for name in names}
    return replace(cluster, **changes), words


def _reached(reached: Reached, computing: float, sending: float, *, measured: bool) -> Reached:
    """Shares, none above 1; but where all of a machine's figures are measured, they are no limits of a maker."""

    def share(value: float, factor: float) -> float:
        return value / factor if measured else min(max(1.0, value), value / factor)

    return Reached(
        products={dtype: share(value, computing) for dtype, value in reached.products.items()},
        attention=share(reached.attention, computing),
        attention_backward=share(reached.attention_backward, computing),
        memory=share(reached.memory, computing),
        state=share(reached.state, computing),
        node=share(reached.node, sending),
        network=share(reached.network, sending),
    )


def calibrate_into(path: Path, cluster: Cluster, reports: Sequence[Path]) -> list[str]:
    """Write a calibrated cluster file; returns lines to tell.

    Raises:
        ValueError: a report cannot be used.
    """
    found, words = calibrated(cluster, [read_report(report) for report in reports])
    path.parent.mkdir(parents=True, exist_ok=True)
    comment = f"# {cluster.name}, calibrated by tools/check_cluster.py --calibrate: {words[0]}\n"
    path.write_text(comment + found.yaml(), encoding="utf-8")
    return [f"wrote {path}", *words]
