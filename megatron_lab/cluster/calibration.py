"""Calibration of a cluster file: its rates are adjusted to the step times that runs with --plan-report have measured.

Two factors are fitted, so that few reports suffice: one for computation and one for communication. A factor is the measured time
divided by the predicted time. The reported times cannot be separated into computation and communication, so both factors are fitted
together. The prediction itself counts as one more report with both factors 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.config.regular_file import parse_json, read_text
from megatron_lab.cluster.rates import fit_rates
from megatron_lab.monitoring.plan_report import IDLE_PARTS, STEP_END_PARTS, group_by_timer
from megatron_lab.planner.cluster import Cluster, Efficiency

COMPUTING, SENDING = "computing", "sending"
_MIN_SCALE, _MAX_SCALE = 1 / 3, 3.0
"""Bounds of a factor. A factor outside of them has another cause than a wrong rate in the cluster file."""
_COMMUNICATION_TYPES = ("messages", "gradients", "parameters", "numbers", "sharded state")
"""Names of the parts of a predicted step that are communication."""
_MIN_SPREAD = 0.03
_MIN_COMMUNICATION_SHARE = 0.02
"""Minimum predicted communication time, as a share of the measured time. With less, the factor of communication is not fitted."""


@dataclass(frozen=True)
class RunReport:
    """Predicted and measured times of a run, in seconds, read from a report of --plan-report."""

    predicted_s: Mapping[str, float]
    """Predicted seconds of each component of a step, such as matrix products or an all-reduce."""
    measured_s: Mapping[str, float]
    """Measured seconds of each of the three components that timers can separate: operations, waiting between operations, and
    end of the step. The names are those of `group_by_timer`."""
    step_s: float
    """Measured duration of a step."""


def read_report(path: Path) -> RunReport:
    """Read the JSON file that a run with --plan-report has written.

    Raises:
        ValueError: the file cannot be read, or is not such a report.
    """
    try:
        values = parse_json(read_text(path))
        predicted_s = {str(name): float(time) for name, time in values["foretold"]["parts"].items()}
        measured_values = values["measured"]
        measured_s = {name: float(measured_values["parts"][name]) for name in group_by_timer(predicted_s)}
        report = RunReport(predicted_s, measured_s, float(measured_values["seconds"]))
    except OSError as error:
        raise ValueError(f"--calibrate {path} cannot be read: {error.strerror}. Check the path.") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--calibrate {path} is not a report that a run with --plan-report has written: a value is missing or invalid "
            f"({error!r}). Choose another file."
        ) from error
    if not all(math.isfinite(x) and x >= 0 for x in (*predicted_s.values(), *measured_s.values())) or report.step_s <= 0:
        raise ValueError(
            f"--calibrate {path} contains a negative time, a step of 0 s, or a time that is not a finite number. Choose another "
            "report."
        )
    return report


def is_communication(work_type: str) -> bool:
    """Return whether a component of the predicted step time is communication. If not, it is computation, or waiting for
    computation.

    Args:
        work_type: name of the component, as in `RunReport.predicted_s`.
    """
    return work_type in _COMMUNICATION_TYPES or work_type.endswith(" ranks")


def pair_times(report: RunReport) -> list[tuple[dict[str, float], float]]:
    """Pair the predicted and measured times of a step, separately for each component that timers can measure (see
    `RunReport.measured_s`).

    Returns:
        for each component, a dict with the predicted seconds of computation (key `COMPUTING`) and of communication (key `SENDING`),
        and the measured seconds of the component. Components that take less than 2 % of the step are omitted.
    """
    pairs = []
    for name, measured in report.measured_s.items():
        timer_types = {"waiting between operations": IDLE_PARTS, "end of the step": STEP_END_PARTS}.get(name)
        predicted = {
            work_type: time
            for work_type, time in report.predicted_s.items()
            if (work_type in timer_types if timer_types else work_type not in (*IDLE_PARTS, *STEP_END_PARTS))
        }
        amounts = {
            COMPUTING: sum(time for work_type, time in predicted.items() if not is_communication(work_type)),
            SENDING: sum(time for work_type, time in predicted.items() if is_communication(work_type)),
        }
        if measured > 0.02 * report.step_s and sum(amounts.values()) > 0.02 * report.step_s:  # smaller values are noise
            pairs.append((amounts, measured))
    return pairs


def fit_scales(reports: Sequence[RunReport]) -> dict[str, float]:
    """Fit two factors by which measured times exceed predicted times: of computation (key `COMPUTING`) and of communication (key
    `SENDING`).

    Each factor is between 1/3 and 3. With few reports it stays close to 1.
    """
    pairs = [pair for report in reports for pair in pair_times(report)]
    has_communication = sum(amounts[SENDING] for amounts, _ in pairs) > _MIN_COMMUNICATION_SHARE * sum(
        measured for _, measured in pairs
    )
    if not has_communication:
        pairs = [({COMPUTING: amounts[COMPUTING]}, measured) for amounts, measured in pairs if amounts[COMPUTING]]
    scales, _ = fit_rates(pairs) if pairs else ({}, [])
    weight = len(reports) / (len(reports) + 1)
    bounded_scales = {
        name: min(_MAX_SCALE, max(_MIN_SCALE, scales.get(name, 1.0)))
        for name in (COMPUTING, SENDING if has_communication else COMPUTING)
    }
    return {name: bounded_scales.get(name, 1.0) ** weight for name in (COMPUTING, SENDING)}


def calibrate(cluster: Cluster, reports: Sequence[RunReport]) -> tuple[Cluster, list[str]]:
    """Scale the rates of a cluster so that the predictions of the planner fit the measured times in reports.

    Returns:
        the cluster with the new rates, and messages that describe the changes.
    """
    scales = fit_scales(reports)
    computing, sending = scales[COMPUTING], scales[SENDING]
    log_errors = []
    for report in reports:
        scaled_s = sum(
            time * scales[SENDING if is_communication(work_type) else COMPUTING] for work_type, time in report.predicted_s.items()
        )
        log_errors.append(math.log(report.step_s / scaled_s))
    # The spread in the file counts as much as two runs.
    spread = math.sqrt((2 * cluster.spread**2 + sum(error**2 for error in log_errors)) / (2 + len(log_errors)))
    messages = [
        f"computation takes {computing:.3g} times as long as predicted, communication {sending:.3g} times; "
        f"spread {max(spread, _MIN_SPREAD):.3g} "
        f"(was {cluster.spread:.3g}), of {len(reports)} report{'s' * (len(reports) > 1)}"
    ]
    changes: dict[str, Any] = {
        "reached": _scale_efficiency(
            cluster.reached, computing, sending, is_measured=bool(cluster.peak_tflops) and cluster.device == "cpu"
        ),
        "spread": round(max(spread, _MIN_SPREAD), 4),
    }
    for names, factor in (
        (("kernel_us", "host_us", "product_us", "step_ms"), computing),
        (("node_us", "network_us"), sending),
    ):
        changes |= {name: getattr(cluster, name) * factor for name in names}
    return replace(cluster, **changes), messages


def _scale_efficiency(efficiency: Efficiency, computing: float, sending: float, *, is_measured: bool) -> Efficiency:
    """Divide the efficiencies of a cluster by the factors that `fit_scales` returns, so that predictions become longer by these
    factors.

    An efficiency is the fraction of a peak rate that a run reaches. It is at most 1, unless the cluster's peak rates were measured:
    then they are not upper limits.

    Args:
        computing: factor by which computation takes longer than predicted.
        sending: factor by which communication takes longer than predicted.
        is_measured: whether the peak rates were measured.
    """

    def scale_share(value: float, factor: float) -> float:
        return value / factor if is_measured else min(max(1.0, value), value / factor)

    return Efficiency(
        products={dtype: scale_share(value, computing) for dtype, value in efficiency.products.items()},
        attention=scale_share(efficiency.attention, computing),
        attention_backward=scale_share(efficiency.attention_backward, computing),
        memory=scale_share(efficiency.memory, computing),
        state=scale_share(efficiency.state, computing),
        node=scale_share(efficiency.node, sending),
        network=scale_share(efficiency.network, sending),
    )


def write_calibrated_cluster(path: Path, cluster: Cluster, reports: Sequence[Path]) -> list[str]:
    """Calibrate a cluster by the reports of runs, and write the calibrated cluster file. Return messages for the user.

    Args:
        path: cluster file to write.
        reports: files written by runs with --plan-report.

    Raises:
        ValueError: a report cannot be read or is invalid.
    """
    calibrated, messages = calibrate(cluster, [read_report(report) for report in reports])
    path.parent.mkdir(parents=True, exist_ok=True)
    comment = f"# {cluster.name}, calibrated by tools/check_cluster.py --calibrate: {messages[0]}\n"
    path.write_text(comment + calibrated.to_yaml(), encoding="utf-8")
    return [f"wrote {path}", *messages]
