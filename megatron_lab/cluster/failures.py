"""Simulation of a job with random failures, to choose the save interval. The result is the fraction of the job's time that is spent
on steps that are not lost."""

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
    """Times of a job with random failures, in seconds: the input of the simulation.

    Raises:
        ValueError: a value is out of range.
    """

    mtbf_s: float
    """Mean time between failures of the job as a whole. Failures are independent of each other (exponentially distributed
    times)."""
    step_s: float
    """Duration of a step."""
    save_stall_s: float
    """Time for which a save blocks training."""
    save_s: float
    """Time from the end of the stall `save_stall_s` until the checkpoint is complete. The next save waits for it."""
    detect_s: float
    """Time from a failure to its detection."""
    restart_s: float
    """Time from the detection of a failure to the first step, including the load of a checkpoint."""
    copy_interval: int = 0
    """Steps between copies of the state into the memory of other nodes; 0 for no copies."""
    copy_stall_s: float = 0.0
    """Time for which a copy blocks training."""
    copy_survives: float = 0.0
    """Fraction of failures after which a complete copy in the memory of other nodes remains."""
    copy_restart_s: float = 0.0
    """Time from the detection of a failure to the first step, for a restart from a copy."""

    def __post_init__(self) -> None:
        times = self.save_stall_s, self.save_s, self.detect_s, self.restart_s, self.copy_stall_s, self.copy_restart_s
        if not (self.step_s > 0 and self.mtbf_s > 0 and all(0 <= time < math.inf for time in times)):
            raise ValueError("times must be at least 0, and the duration of a step must be above 0.")
        if not 0 <= self.copy_survives <= 1 or self.copy_interval < 0:
            raise ValueError("--copy-survives must be from 0 to 1, and --copy-interval at least 0 steps.")


@dataclass(frozen=True)
class Outcome:
    """Result of the simulation: what the time of a job is spent on, as fractions, averaged over the simulated jobs."""

    ettr: float
    """Effective training time ratio: fraction of the time spent on steps that are not lost."""
    low: float
    high: float
    """Upper bound of the range that contains the ratio of nine of ten simulated jobs; `low` is the lower bound."""
    again: float
    """Fraction of the time spent on steps that are lost and therefore repeated."""
    saving: float
    """Fraction of the time in which training is blocked by saves of checkpoints and by copies of the state into the memory of other
    nodes."""
    down: float
    """Fraction of the time spent on the detection of failures and on restarts."""
    failures: float
    """Mean number of failures of a simulated job."""


def simulate(job: Job, save_interval: int, days: float, num_draws: int, seed: int) -> Outcome:
    """Simulate a job several times with random failures.

    Args:
        save_interval: steps between saves.
        days: duration of each simulated job.
        num_draws: number of simulated jobs.

    Raises:
        ValueError: the interval is less than one step.
    """
    if save_interval < 1:
        raise ValueError("--save-interval must be at least 1 step.")
    outcomes = [_simulate_once(job, save_interval, 86_400 * days, random.Random(f"{seed} {i}")) for i in range(num_draws)]
    ettrs = sorted(outcome.ettr for outcome in outcomes)
    index_5_percent = (len(ettrs) - 1) / 20

    def mean(name: str) -> float:
        return sum(getattr(outcome, name) for outcome in outcomes) / num_draws

    low, high = ettrs[round(index_5_percent)], ettrs[round(19 * index_5_percent)]
    return Outcome(mean("ettr"), low, high, mean("again"), mean("saving"), mean("down"), mean("failures"))


def _simulate_once(job: Job, save_interval: int, horizon: float, rng: random.Random) -> Outcome:
    """Simulate one job as a sequence of periods. In each period the job works from a checkpoint or a copy until a failure, and then
    recovers.

    Args:
        save_interval: steps between saves.
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
            lost_s = min(lost_s, _seconds_since_copy(job, steps_s))
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
    """Simulate a period of `work_s` seconds without failures.

    Args:
        save_interval: steps between saves.

    Returns:
        seconds of complete steps, seconds of the steps that a complete checkpoint contains at the end, and seconds of stalls.
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


def _seconds_since_copy(job: Job, steps_s: float) -> float:
    """Return how many of `steps_s` seconds of steps are not contained in the last copy to the memory of other nodes."""
    return steps_s % (job.copy_interval * job.step_s)


def find_best_interval(outcomes: Mapping[int, Outcome]) -> int:
    """Return the save interval with the highest effective training time ratio."""
    return max(outcomes, key=lambda interval: outcomes[interval].ettr)


def list_intervals(job: Job) -> list[int]:
    """Return the save intervals to simulate, in steps: from a fifth of Young's interval to the time between failures, each about
    1.6 times the previous one."""
    max_interval = max(1.0, job.mtbf_s / job.step_s)
    intervals = {max(1, round(max_interval / 1.6**i)) for i in range(64)}
    min_interval = max(1, round(0.2 * compute_young_interval_s(job) / job.step_s))
    return sorted(interval for interval in intervals if interval >= min_interval) or [1]


def compute_young_interval_s(job: Job) -> float:
    """Return the time between saves, in seconds, that minimizes the time lost to saves and repeated steps, by the first-order
    estimate of Young (1974)."""
    return math.sqrt(2 * job.save_stall_s * job.mtbf_s)


def compute_daly_interval_s(job: Job) -> float:
    """Return the time between saves, in seconds, that minimizes the lost time, by the higher-order estimate of Daly (2006, equation
    37)."""
    cost, mtbf = job.save_stall_s, job.mtbf_s
    if cost >= 2 * mtbf:
        return mtbf
    root = math.sqrt(cost / (2 * mtbf))
    return math.sqrt(2 * cost * mtbf) * (1 + root / 3 + root * root / 9) - cost
