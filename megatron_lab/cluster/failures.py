"""A job that fails now and then, played: how much of its time goes into steps that count."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

GPU_HOURS = {"llama3": 54 * 24 * 16_384 / 419}
"""Hours of one device between two failures that ended a job. llama3: 419 unexpected interruptions in 54 days of 16,384 H100 (Llama
Team 2024, section 3.3.4), software among them."""
_SMALLEST_COUNT = 1e-9


@dataclass(frozen=True)
class Job:
    """A job, in seconds.

    Raises:
        ValueError: a number is out of its range.
    """

    mtbf_s: float
    """Mean time between failures of the whole job; failures come independently of each other (exponential times)."""
    step_s: float
    save_stall_s: float
    """Training waits so long in a save, ..."""
    save_s: float
    """... which is a checkpoint so long after. The next save waits for that."""
    detect_s: float
    restart_s: float
    """From the detection to the first step, with the load of a checkpoint."""
    copy_interval: int = 0
    """Steps between copies of the state in the memory of other nodes; 0: there are none."""
    copy_stall_s: float = 0.0
    copy_survives: float = 0.0
    """Share of failures that leave a whole copy."""
    copy_restart_s: float = 0.0

    def __post_init__(self) -> None:
        times = self.save_stall_s, self.save_s, self.detect_s, self.restart_s, self.copy_stall_s, self.copy_restart_s
        if not (self.step_s > 0 and self.mtbf_s > 0 and all(0 <= time < math.inf for time in times)):
            raise ValueError("times must be numbers from 0 on, and that of a step more than 0.")
        if not 0 <= self.copy_survives <= 1 or self.copy_interval < 0:
            raise ValueError("--copy-survives is a share from 0 to 1, --copy-interval a number of steps.")


@dataclass(frozen=True)
class Outcome:
    """Shares of the time of a job, means over the draws."""

    ettr: float
    """Steps that count."""
    low: float
    high: float
    """Nine of ten draws lie between these."""
    again: float
    """Steps that were made again."""
    saving: float
    """Waits for saves and copies."""
    down: float
    """Detection and restart."""
    failures: float


def play(job: Job, save_interval: int, days: float, draws: int, seed: int) -> Outcome:
    """Play a job several times.

    Args:
        save_interval: steps between saves.

    Raises:
        ValueError: the interval is none.
    """
    if save_interval < 1:
        raise ValueError("--save-interval takes numbers of steps from 1 on.")
    played = [_play(job, save_interval, 86_400 * days, random.Random(f"{seed} {draw}")) for draw in range(draws)]
    shares = sorted(each.ettr for each in played)
    at = (len(shares) - 1) / 20

    def mean(name: str) -> float:
        return sum(getattr(each, name) for each in played) / draws

    low, high = shares[round(at)], shares[round(19 * at)]
    return Outcome(mean("ettr"), low, high, mean("again"), mean("saving"), mean("down"), mean("failures"))


def _play(job: Job, save_interval: int, horizon: float, draw: random.Random) -> Outcome:
    """One job: stretches of work, each from a checkpoint or a copy to a failure, and the time until the next one."""
    now = kept = again = saving = down = 0.0
    failures = 0
    ahead = 0.0
    """Seconds of steps that the work begins ahead of its last checkpoint: it began from a copy."""
    while now < horizon:
        until = draw.expovariate(1 / job.mtbf_s)
        works = min(until, horizon - now)
        made, safe, stalled = _work(job, save_interval, works)
        now += works
        saving += stalled
        if works < until:  # the job is over
            kept += works - stalled
            break
        failures += 1
        from_copy = bool(job.copy_interval) and draw.random() < job.copy_survives
        lost = made - safe + (ahead if not safe else 0.0)
        if from_copy:
            lost = min(lost, _since_copy(job, made))
            ahead = max(0.0, made - safe - lost + (ahead if not safe else 0.0))
        else:
            ahead = 0.0
        again += lost + (works - made - stalled)  # the step that was under way
        kept += made - lost
        needs = job.detect_s + (job.copy_restart_s if from_copy else job.restart_s)
        while (next_one := draw.expovariate(1 / job.mtbf_s)) < needs and now < horizon:  # it fails while it starts
            now, down, failures = now + next_one, down + next_one, failures + 1
        now, down = now + needs, down + needs
    whole = max(now, _SMALLEST_COUNT)
    share = kept / whole
    return Outcome(share, share, share, again / whole, saving / whole, down / whole, failures)


def _work(job: Job, save_interval: int, works: float) -> tuple[float, float, float]:
    """Seconds of whole steps in so many seconds of work, of those that a checkpoint has at its end, and of stalls."""
    steps_s = save_interval * job.step_s
    copies = (save_interval // job.copy_interval) * job.copy_stall_s if job.copy_interval else 0.0
    cycle = max(steps_s + copies + job.save_stall_s, job.save_stall_s + job.save_s)  # a save waits for the one before
    cycles = int(works // cycle)
    rest = works - cycles * cycle
    steps = min(save_interval, int(rest / (job.step_s + copies / save_interval)))
    made = cycles * steps_s + steps * job.step_s
    complete = max(0, math.floor((works - job.save_s) / cycle)) if works >= job.save_s else 0
    stalled = cycles * (cycle - steps_s) + steps * copies / save_interval
    return made, complete * steps_s, stalled


def _since_copy(job: Job, made: float) -> float:
    """Seconds of steps since the last copy."""
    return made % (job.copy_interval * job.step_s)


def best_of(found: Mapping[int, Outcome]) -> int:
    """The interval of the highest share."""
    return max(found, key=lambda number: found[number].ettr)


def intervals(job: Job) -> list[int]:
    """Intervals to try, each about 1.6 times the one before: from a step to the time between failures."""
    most = max(1.0, job.mtbf_s / job.step_s)
    found = {max(1, round(most / 1.6**number)) for number in range(64)}
    least = max(1, round(0.2 * young_s(job) / job.step_s))
    return sorted(number for number in found if number >= least) or [1]


def young_s(job: Job) -> float:
    """Seconds between saves that lose least, by the first order of what a save costs and a failure repeats (Young 1974)."""
    return math.sqrt(2 * job.save_stall_s * job.mtbf_s)


def daly_s(job: Job) -> float:
    """The same by a higher order (Daly 2006, equation 37)."""
    cost, mtbf = job.save_stall_s, job.mtbf_s
    if cost >= 2 * mtbf:
        return mtbf
    root = math.sqrt(cost / (2 * mtbf))
    return math.sqrt(2 * cost * mtbf) * (1 + root / 3 + root * root / 9) - cost
