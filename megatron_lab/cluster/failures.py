"""Simulation of a job with random failures, to choose the interval between saves (tools/simulate_failures.py).

The result is the fraction of the job's time that is spent on training steps that no failure has undone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

GPU_HOURS = {"llama3": 54 * 24 * 16_384 / 419}
"""Mean device hours between two failures that end a job. llama3: 419 unexpected interruptions, including software errors, in 54
days of 16,384 H100 (Llama Team 2024, section 3.3.4)."""
_MIN_TOTAL_S = 1e-9


@dataclass(frozen=True)
class Job:
    """Durations and failure rate of a job: the input of the simulation. Names with the ending `_s` are seconds.

    Raises:
        ValueError: a value is out of range.
    """

    mtbf_s: float
    """Mean time between failures of the whole job. The times between failures are independent and exponentially distributed."""
    step_s: float
    """Duration of a training step."""
    save_stall_s: float
    """Time for which training waits for a save."""
    save_s: float
    """Time that an asynchronous save takes after the stall `save_stall_s`, until its checkpoint is complete. The next save waits
    for it."""
    detect_s: float
    """Time from a failure to its detection."""
    restart_s: float
    """Time from the detection of a failure to the first training step, including the load of a checkpoint."""
    copy_interval: int = 0
    """Number of steps between copies of the training state into the memory of other nodes; 0 for no copies."""
    copy_stall_s: float = 0.0
    """Time for which training waits for a copy."""
    copy_survives: float = 0.0
    """Fraction of failures after which a complete copy in the memory of other nodes remains."""
    copy_restart_s: float = 0.0
    """Time from the detection of a failure to the first training step if the job restarts from a copy in memory."""

    def __post_init__(self) -> None:
        if not (self.step_s > 0 and self.mtbf_s > 0):
            raise ValueError(
                f"--step-s {self.step_s:g} must be above 0, and so must the mean time between failures, which is {self.mtbf_s:g} s "
                "(--gpu-hours divided by --gpus). Correct these flags."
            )
        for name in ("save_stall_s", "save_s", "detect_s", "restart_s", "copy_stall_s", "copy_restart_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"--{name.replace('_', '-')} {getattr(self, name):g} must be finite and at least 0. Correct the flag."
                )
        if not 0 <= self.copy_survives <= 1 or self.copy_interval < 0:
            raise ValueError(
                f"--copy-survives {self.copy_survives:g} must be from 0 to 1, and "
                f"--copy-interval {self.copy_interval} at least 0 steps. Correct these flags."
            )


@dataclass(frozen=True)
class Outcome:
    """Fractions of a job's time by use: mean values over the simulated jobs."""

    ettr: float
    """Effective training time ratio: fraction of a job's time in which it runs training steps that no failure undoes."""
    low: float
    high: float
    """95th percentile of the effective training time ratio over the simulated jobs. `low` is the 5th percentile."""
    again: float
    """Fraction of a job's time in which it runs training steps that a failure later undoes. The job repeats these steps."""
    saving: float
    """Fraction of the time in which training waits for saves of checkpoints and for copies of the training state into the memory of
    other nodes."""
    down: float
    """Fraction of a job's time that passes between a failure and the first training step after it: detection of the failure,
    and restart."""
    failures: float
    """Mean number of failures of a simulated job."""


def simulate(job: Job, save_interval: int, days: float, num_draws: int, seed: int) -> Outcome:
    """Simulate several jobs with random failures, and average the results.

    Args:
        save_interval: number of steps between saves.
        days: duration of each simulated job.
        num_draws: number of simulated jobs.
        seed: seed of the random failure times.

    Raises:
        ValueError: `save_interval` is less than 1.
    """
    if save_interval < 1:
        raise ValueError(f"--save-interval {save_interval} must be at least 1 step. Raise it.")
    outcomes = [_simulate_once(job, save_interval, 86_400 * days, random.Random(f"{seed} {i}")) for i in range(num_draws)]
    ettrs = sorted(outcome.ettr for outcome in outcomes)
    index_5_percent = (len(ettrs) - 1) / 20

    def compute_mean(name: str) -> float:
        return sum(getattr(outcome, name) for outcome in outcomes) / num_draws

    low, high = ettrs[round(index_5_percent)], ettrs[round(19 * index_5_percent)]
    return Outcome(
        compute_mean("ettr"),
        low,
        high,
        compute_mean("again"),
        compute_mean("saving"),
        compute_mean("down"),
        compute_mean("failures"),
    )


def _simulate_once(job: Job, save_interval: int, horizon: float, rng: random.Random) -> Outcome:
    """Simulate one job as a sequence of periods. A period starts from a checkpoint or a copy in memory, and ends with a failure and
    the recovery from it.

    Args:
        save_interval: number of steps between saves.
        horizon: duration of the job in seconds.
        rng: generator of the random times between failures.
    """
    time = useful_s = repeated_s = stalled_s = down_s = 0.0
    num_failures = 0
    copy_lead_s = 0.0
    """Seconds of steps between the last checkpoint and the copy from which the current period began; 0 without a copy."""
    while time < horizon:
        until_failure_s = rng.expovariate(1 / job.mtbf_s)
        work_s = min(until_failure_s, horizon - time)
        steps_s, saved_s, stall_s = _simulate_work(job, save_interval, work_s)
        time += work_s
        stalled_s += stall_s
        if work_s < until_failure_s:  # no failure before the end of the job
            useful_s += work_s - stall_s
            break
        num_failures += 1
        from_copy = bool(job.copy_interval) and rng.random() < job.copy_survives
        lost_s = steps_s - saved_s + (copy_lead_s if not saved_s else 0.0)
        if from_copy:
            lost_s = min(lost_s, _compute_seconds_since_copy(job, steps_s))
            copy_lead_s = max(0.0, steps_s - saved_s - lost_s + (copy_lead_s if not saved_s else 0.0))
        else:
            copy_lead_s = 0.0
        repeated_s += lost_s + (work_s - steps_s - stall_s)  # includes the unfinished step
        useful_s += steps_s - lost_s
        recovery_s = job.detect_s + (job.copy_restart_s if from_copy else job.restart_s)
        while (next_failure_s := rng.expovariate(1 / job.mtbf_s)) < recovery_s and time < horizon:  # failures during the restart
            time, down_s, num_failures = time + next_failure_s, down_s + next_failure_s, num_failures + 1
        time, down_s = time + recovery_s, down_s + recovery_s
    total_s = max(time, _MIN_TOTAL_S)
    ettr = useful_s / total_s
    return Outcome(ettr, ettr, ettr, repeated_s / total_s, stalled_s / total_s, down_s / total_s, num_failures)


def _simulate_work(job: Job, save_interval: int, work_s: float) -> tuple[float, float, float]:
    """Simulate `work_s` seconds of work without failures, from a checkpoint or copy on.

    Args:
        save_interval: number of steps between saves.

    Returns:
        seconds of completed steps; seconds of those steps that are in a complete checkpoint at the end; seconds in which training
        waits for saves and copies.
    """
    interval_steps_s = save_interval * job.step_s
    copy_stalls_s = (save_interval // job.copy_interval) * job.copy_stall_s if job.copy_interval else 0.0
    cycle_s = max(
        interval_steps_s + copy_stalls_s + job.save_stall_s, job.save_stall_s + job.save_s
    )  # a save waits for the previous one
    num_cycles = int(work_s // cycle_s)
    remaining_s = work_s - num_cycles * cycle_s
    remaining_steps = min(save_interval, int(remaining_s / (job.step_s + copy_stalls_s / save_interval)))
    total_steps_s = num_cycles * interval_steps_s + remaining_steps * job.step_s
    num_complete_saves = max(0, math.floor((work_s - job.save_s) / cycle_s)) if work_s >= job.save_s else 0
    stall_s = num_cycles * (cycle_s - interval_steps_s) + remaining_steps * copy_stalls_s / save_interval
    return total_steps_s, num_complete_saves * interval_steps_s, stall_s


def _compute_seconds_since_copy(job: Job, steps_s: float) -> float:
    """Return how many seconds of steps are lost if the job restarts from its last copy of the training state in the memory of other
    nodes.

    Args:
        steps_s: seconds of completed steps since the last start.
    """
    return steps_s % (job.copy_interval * job.step_s)


def find_best_interval(outcomes: Mapping[int, Outcome]) -> int:
    """Return the save interval with the highest effective training time ratio.

    Args:
        outcomes: result of the simulation, by save interval in steps.
    """
    return max(outcomes, key=lambda interval: outcomes[interval].ettr)


def list_intervals(job: Job) -> list[int]:
    """Return the save intervals to simulate, in steps.

    They range from a fifth of Young's interval (`compute_young_interval_s`) to the mean time between failures. Each is about 1.6
    times the previous one.
    """
    max_interval = max(1.0, job.mtbf_s / job.step_s)
    intervals = {max(1, round(max_interval / 1.6**i)) for i in range(64)}
    min_interval = max(1, round(0.2 * compute_young_interval_s(job) / job.step_s))
    return sorted(interval for interval in intervals if interval >= min_interval) or [1]


def compute_young_interval_s(job: Job) -> float:
    """Return the time between saves, in seconds, at which waiting for saves and repeating steps cost the least time together.

    Source: first-order estimate of Young (1974).
    """
    return math.sqrt(2 * job.save_stall_s * job.mtbf_s)


def compute_daly_interval_s(job: Job) -> float:
    """Return the time between saves, in seconds, at which waiting for saves and repeating steps cost the least time together.

    Source: higher-order estimate of Daly (2006, equation 37).
    """
    cost, mtbf = job.save_stall_s, job.mtbf_s
    if cost >= 2 * mtbf:
        return mtbf
    root = math.sqrt(cost / (2 * mtbf))
    return math.sqrt(2 * cost * mtbf) * (1 + root / 3 + root * root / 9) - cost
