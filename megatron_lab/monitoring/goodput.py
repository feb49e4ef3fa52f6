"""Goodput: fraction of the time since a run's first start that was spent on steps that count.

Steps do not count if they are lost in a restart or a rewind, or if they make no update. docs/spikes.md has the definition.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeGuard

from megatron.config.imports import import_object
from megatron.training.callbacks import Callback
from megatron.training.features import Feature, RunComponents
from megatron.training.progress import Progress
from megatron.training.step import StepResult

TimeUse = Literal["steps", "start-up", "saves", "evaluations", "steps that do not count", "between starts"]
TIME_USES: tuple[TimeUse, ...] = ("steps", "start-up", "saves", "evaluations", "steps that do not count", "between starts")
_MAX_SECONDS = 1e10


class Goodput:
    """Account of what the time of a run is spent on. Each second since the first start is assigned to exactly one of `TIME_USES`.
    The time in which the run was finished, before it was extended, is left out.

    Args:
        saved: result of `to_json` in the checkpoint from which the run continues; None for a new run.
        start_time: time of this start, by `wall_clock`; the current time by default.
        clock: function that returns seconds and is never set back or forward. Its zero point may differ between starts.
        wall_clock: function that returns the seconds since 1970.
        gap_s: seconds between the checkpoint and this start that count (`measure_gap_seconds` in `idle_time.py`).
    """

    def __init__(
        self,
        saved: Mapping[str, Any] | None = None,
        start_time: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        gap_s: float = 0.0,
    ):
        self._clock, self._wall_clock = clock, wall_clock
        self._last_time = clock() - (0.0 if start_time is None else wall_clock() - start_time)
        self.seconds: dict[TimeUse, float] = dict.fromkeys(TIME_USES, 0.0)
        """Seconds by use. Their sum is the time since the first start, without the time in which the run was finished."""
        if saved is not None and is_account(saved):
            self.seconds |= {use: float(saved["seconds"][use]) for use in TIME_USES}
            self.seconds["between starts"] += gap_s

    def record(self, use: TimeUse) -> None:
        """Assign the time since the previous call to `use`: one of `TIME_USES`, such as steps or saves."""
        now = self._clock()
        self.seconds[use] += max(0.0, now - self._last_time)
        self._last_time = now

    def rewind(self, saved: Mapping[str, Any] | None) -> None:
        """Assign the time of the steps since a checkpoint to "steps that do not count", because the run goes back to that
        checkpoint.

        The time since the previous call of `record` does not count either.

        Args:
            saved: result of `to_json` in that checkpoint.
        """
        self.record("steps that do not count")
        if saved is not None and is_account(saved):
            lost_s = max(0.0, self.seconds["steps"] - saved["seconds"]["steps"])
            self.seconds["steps"] -= lost_s
            self.seconds["steps that do not count"] += lost_s

    @property
    def share(self) -> float:
        """Goodput: fraction of the time spent on steps that count, from 0 to 1; 0 if no time has been recorded."""
        total = math.fsum(self.seconds.values())
        return self.seconds["steps"] / total if total else 0.0

    def format_summary(self) -> str:
        """Format goodput, and the shares of all other uses of the run's time, as a log line."""
        total = math.fsum(self.seconds.values())
        shares = [f"{use} {use_s / total:.1%}" for use, use_s in self.seconds.items() if use != "steps" and use_s > 0]
        return f"goodput {self.share:.1%} of {total / 3600:.3g} hours since the first start; {', '.join(shares)}"

    def to_json(self) -> dict[str, Any]:
        """Return the recorded times, for storage in a checkpoint.

        Returns:
            `seconds`: the seconds of each use of time; `at`: time of the last call of `record`, in seconds since 1970.
        """
        return {"at": self._wall_clock() - (self._clock() - self._last_time), "seconds": dict(self.seconds)}


def is_account(saved: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether a value from a checkpoint has the types and ranges of a result of `Goodput.to_json`. Other values are
    ignored."""
    if not isinstance(saved, dict) or not isinstance(saved.get("seconds"), dict):
        return False
    values = [saved.get("at"), *(saved["seconds"].get(use) for use in TIME_USES)]
    return all(type(value) in (int, float) and 0 <= value <= _MAX_SECONDS for value in values)


METRIC_NAME = "goodput"
"""Name of the goodput in the metrics file, and of the account in the `config.json` of a checkpoint. The account is not in
`state.json`, because that file must not depend on the duration of a run."""

_PHASE_USES: Mapping[str, TimeUse] = {"evaluating": "evaluations", "sampling": "evaluations", "saving": "saves"}
"""Use of the time of each phase that is not part of a step."""


class GoodputCallback(Callback):
    """Callback that measures what the time of a run is spent on.

    Args:
        account: account to which the callback adds times.
        get_saved: function that returns the account in the checkpoint that was loaded last (a result of `Goodput.to_json`, not
            validated).
        log: function that writes a log line.
    """

    def __init__(self, account: Goodput, get_saved: Callable[[], Any], log: Callable[[str], None]) -> None:
        self._account, self._get_saved, self._log = account, get_saved, log
        self._current_use: TimeUse = "steps"

    @contextmanager
    def around_steps(self) -> Iterator[None]:
        """Assign the time before the first step to start-up: the time since the start of the run, or since the end of an earlier
        `fit`."""
        self._account.record("start-up")
        yield
        self._end_phase()

    def on_phase(self, name: str, iteration: int | None = None) -> None:
        """If an evaluation or a save has just ended, assign its time to evaluations or saves. Remember the phase that begins."""
        self._end_phase()
        self._current_use = _PHASE_USES.get(name, "steps")

    def on_result(self, progress: Progress, result: StepResult | None, samples: int) -> None:
        """Assign the time since the last assignment to steps that count or, if the step made no update, to steps that do not
        count."""
        self._account.record("steps that do not count" if result is None or result.skipped else "steps")

    def log_values(self, result: StepResult | None) -> Mapping[str, float]:
        """Return the current goodput, for the log line."""
        return {METRIC_NAME: self._account.share}

    def record_values(self) -> Mapping[str, Any]:
        """Return the seconds of each use of time, for the history file of the run."""
        return {"spent": self._account.seconds}

    def after_rewind(self, progress: Progress) -> None:
        """Assign the time of the steps since the checkpoint to steps that do not count, after the run has been set back to the
        checkpoint."""
        self._account.rewind(self._get_saved())

    def on_end(self) -> None:
        """Log the goodput of the run."""
        self._end_phase()
        self._log(self._account.format_summary())

    def _end_phase(self) -> None:
        if self._current_use != "steps":
            self._account.record(self._current_use)
        self._current_use = "steps"


class GoodputFeature(Feature):
    """Feature that measures goodput: the fraction of time spent on steps that count.

    It is enabled in every run. Goodput appears in log lines, in checkpoints and at the end of the log.
    """

    def around_run(self, run: RunComponents) -> AbstractContextManager[object]:
        """Start to count how the run spends its time (steps, evaluations, saves, failures), or continue the counts of the
        checkpoint. Later checkpoints store the counts."""
        start_time = time.time() - (time.monotonic() - run.started_at)
        saved = run.control.checkpoint.get(METRIC_NAME)
        gap_s = 0.0
        if is_account(saved):
            gap_s = import_object("megatron_lab.monitoring.idle_time:measure_gap_seconds")(run, saved["at"], start_time)
        self._account = Goodput(saved, start_time, wall_clock=time.time, gap_s=gap_s)
        run.control.checkpoint_extras[METRIC_NAME] = self._account.to_json
        return nullcontext()

    def build_callbacks(self, run: RunComponents) -> Sequence[Callback]:
        """Build the callback that measures the time of steps, evaluations and saves."""
        return [GoodputCallback(self._account, lambda: run.control.checkpoint.get(METRIC_NAME), run.reporter.log)]
