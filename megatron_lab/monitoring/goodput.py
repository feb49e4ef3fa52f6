"""Goodput: the share of a run's time that went into steps that count, since its first start. docs/spikes.md has the definition."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

from megatron.training.features import Feature, RunParts
from megatron.training.progress import Progress
from megatron.training.step import StepResult
from megatron.training.watch import Watcher

Use = Literal["steps", "start-up", "saves", "evaluations", "steps that do not count", "between starts"]
USES: tuple[Use, ...] = ("steps", "start-up", "saves", "evaluations", "steps that do not count", "between starts")
_MOST_S = 1e10


class Goodput:
    """Divides the time of a run among `USES`. No second counts twice.

    Args:
        saved: what `to_json` returned for the checkpoint that the run goes on from; None for a run that begins.
        began: when this start began, by the clock.
        clock: seconds since an epoch that all starts share.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None, began: float | None = None, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._since = clock() if began is None else began
        self.seconds: dict[Use, float] = dict.fromkeys(USES, 0.0)
        """Seconds by use. Their sum is the time since the first start."""
        if saved is not None and _is_sound(saved):
            self.seconds |= {use: float(saved["seconds"][use]) for use in USES}
            self.seconds["between starts"] += max(0.0, self._since - saved["at"])

    def enter(self, use: Use) -> None:
        """Enter the time since the last entry under a use."""
        now = self._clock()
        self.seconds[use] += max(0.0, now - self._since)  # clocks are set back at times
        self._since = now

    def went_back(self, saved: Mapping[str, Any] | None) -> None:
        """The run went back to a checkpoint: steps made since do not count, nor does the time since the last call.

        Args:
            saved: what `to_json` returned for that checkpoint.
        """
        self.enter("steps that do not count")
        if saved is not None and _is_sound(saved):
            lost = max(0.0, self.seconds["steps"] - saved["seconds"]["steps"])
            self.seconds["steps"] -= lost
            self.seconds["steps that do not count"] += lost

    @property
    def share(self) -> float:
        """The goodput, from 0 to 1; 0 where no time is accounted for."""
        total = math.fsum(self.seconds.values())
        return self.seconds["steps"] / total if total else 0.0

    def words(self) -> str:
        """A line for the log."""
        total = math.fsum(self.seconds.values())
        parts = [f"{use} {seconds / total:.1%}" for use, seconds in self.seconds.items() if use != "steps" and seconds > 0]
        return f"goodput {self.share:.1%} of {total / 3600:.3g} hours since the first start; {', '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        """Return the account as a checkpoint holds it. `at` is the time of the last entry."""
        return {"at": self._since, "seconds": dict(self.seconds)}


def _is_sound(saved: Any) -> bool:
    """Return whether an account has the types and ranges that `to_json` gives it. A malformed one is ignored."""
    if not isinstance(saved, dict) or not isinstance(saved.get("seconds"), dict):
        return False
    numbers = [saved.get("at"), *(saved["seconds"].get(use) for use in USES)]
    return all(type(each) in (int, float) and 0 <= each <= _MOST_S for each in numbers)


NAME = "goodput"
"""Name of the share in the metrics file, and of the account in the `config.json` of a checkpoint. `state.json` does not hold it,
since that must not depend on the time that a run took."""

_USE_OF_PHASE: Mapping[str, Use] = {"evaluating": "evaluations", "saving": "saves"}
"""Uses of the phases that are not steps."""


class GoodputWatcher(Watcher):
    """Says what each moment of a run was used for.

    Args:
        checkpoint: returns the account in the checkpoint that the run has gone on from, unchecked.
        say: writes a line into the log.
    """

    def __init__(self, account: Goodput, checkpoint: Callable[[], Any], say: Callable[[str], None]) -> None:
        self._account, self._checkpoint, self._say = account, checkpoint, say
        self._use: Use = "steps"

    @contextmanager
    def around_steps(self) -> Iterator[None]:
        """Enter the time before the steps, since the start or since an earlier `fit`, as start-up."""
        self._account.enter("start-up")
        yield
        self._end_phase()

    def on_phase(self, name: str, iteration: int | None = None) -> None:
        """Enter a finished evaluation or save, and remember the new phase."""
        self._end_phase()
        self._use = _USE_OF_PHASE.get(name, "steps")

    def on_result(self, progress: Progress, result: StepResult | None, samples: int) -> None:
        """Enter the time since the last entry as a step."""
        self._account.enter("steps that do not count" if result is None or result.skipped else "steps")

    def log_values(self, result: StepResult | None) -> Mapping[str, float]:
        """The share up to now."""
        return {NAME: self._account.share}

    def record_values(self) -> Mapping[str, Any]:
        """The seconds of each use."""
        return {"spent": self._account.seconds}

    def after_rewind(self, progress: Progress) -> None:
        """Move the steps since the checkpoint to those that do not count."""
        self._account.went_back(self._checkpoint())

    def on_end(self) -> None:
        """Tell the share of the whole run."""
        self._end_phase()
        self._say(self._account.words())

    def _end_phase(self) -> None:
        if self._use != "steps":
            self._account.enter(self._use)
        self._use = "steps"


class GoodputFeature(Feature):
    """The goodput, in every run: in lines of the log, in checkpoints, and at the end."""

    def around_run(self, run: RunParts) -> AbstractContextManager[object]:
        """Open the account, or go on with that of the checkpoint."""
        began = time.time() - (time.monotonic() - run.started_at)
        self._account = Goodput(run.control.checkpoint.get(NAME), began)
        run.control.checkpoint_extras[NAME] = self._account.to_json
        return nullcontext()

    def watchers(self, run: RunParts) -> Sequence[Watcher]:
        """Account for the time of the steps."""
        return [GoodputWatcher(self._account, lambda: run.control.checkpoint.get(NAME), run.reporter.say)]
