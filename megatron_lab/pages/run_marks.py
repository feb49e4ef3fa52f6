"""Marks on the horizontal axis of a run's curves: where the run was started again, was extended, went back to a checkpoint, had a
loss spike, was saved, or ended early."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.metrics.history import History
from megatron_lab.monitoring.idle_time import is_complete_end, is_end_without_training
from megatron_lab.pages.run_facts import find_end, format_ranks, format_seconds_since_1970, has_ended_early

MarkType = Literal["restart", "extended", "rewind", "loss spike", "early end", "save"]
MARK_COLOURS: Mapping[str, tuple[str, str]] = {
    "restart": ("#5b6472", "#a7b0bf"),
    "extended": ("#00795a", "#3cc79c"),
    "rewind": ("#8a4a9e", "#cf95e0"),
    "loss spike": ("#c0392b", "#ff8274"),
    "early end": ("#b3261e", "#ff9d94"),
    "save": ("#8a8f98", "#7d8694"),
}
"""Colour of each type of mark on a light and on a dark ground. The order is that of the legend."""


@dataclass(frozen=True)
class Mark:
    """A mark at an iteration of a run."""

    type: MarkType
    iteration: int
    text: str
    """Event and its time, for the reader who points at the mark."""


def list_marks(history: History) -> list[Mark]:
    """Return the marks of a run up to its last step, sorted by iteration. Marks of one type at the same iteration are one mark."""
    marks: dict[tuple[MarkType, int], Mark] = {}
    for mark in [*_iter_start_marks(history), *_iter_event_marks(history)]:
        earlier = marks.get((mark.type, mark.iteration))
        text = mark.text if earlier is None or earlier.text == mark.text else f"{earlier.text}; {mark.text}"
        marks[mark.type, mark.iteration] = Mark(mark.type, mark.iteration, text)
    last_iteration = history.steps[-1].iteration if history.steps else 0
    return sorted((mark for mark in marks.values() if mark.iteration <= last_iteration), key=lambda mark: mark.iteration)


def _iter_start_marks(history: History) -> Iterator[Mark]:
    for previous, start in itertools.pairwise(_list_training_starts(history)):
        events = (event for event in history.events if previous["time"] <= event["time"] <= start["time"])
        ends = [event for event in events if event["event"] == "end" and not is_end_without_training(event)]
        iteration, left = start["iteration"], start.get("left", start["iteration"])
        facts = [format_ranks(start) if _is_elsewhere(previous, start) else ""]
        facts += [f"steps {iteration + 1:,} to {left:,} ran again" if left > iteration else ""]
        facts += [format_seconds_since_1970(start["time"])]
        details = ", ".join(fact for fact in facts if fact)
        if ends and is_complete_end(ends[-1]) and left == iteration:
            yield Mark("extended", iteration, f"extended from iteration {iteration:,}: {details}")
        else:
            reason = str(ends[-1]["words"]) if ends else "the run before left no message (killed?)"
            yield Mark("restart", iteration, f"restart from iteration {iteration:,}: {details}; {reason}")


def _list_training_starts(history: History) -> list[dict[str, Any]]:
    """Return the first start, and all later ones after which steps were recorded."""
    last_iteration = history.steps[-1].iteration if history.steps else 0
    reached = [*(start.get("left", start["iteration"]) for start in history.starts[1:]), last_iteration]
    pairs = zip(history.starts, reached, strict=True) if history.starts else ()
    return [start for start, end in pairs if end > start["iteration"] or start is history.starts[0]]


def _is_elsewhere(previous: Mapping[str, Any], start: Mapping[str, Any]) -> bool:
    return any(previous.get(name) != start.get(name) for name in ("world_size", "device"))


def _iter_event_marks(history: History) -> Iterator[Mark]:
    event_types: Mapping[str, MarkType] = {"spike": "loss spike", "rewind": "rewind", "save": "save"}
    for event in history.events:
        if event["event"] in event_types:
            time = format_seconds_since_1970(event["time"])
            yield Mark(event_types[event["event"]], event["iteration"], f"{event['words']} ({time})")
    end_event = find_end(history)
    if end_event is not None and has_ended_early(history):
        text = f"{end_event['words']} ({format_seconds_since_1970(end_event['time'])})"
        yield Mark("early end", end_event["iteration"], text)
