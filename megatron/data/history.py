"""What a run has read: a list of phases, in each of which the data settings stayed the same.

A run may change its blend, weights, sequence length or batch size when it is resumed. What was consumed stays consumed: each
dataset continues after the samples that it gave in earlier phases. The list is saved with every checkpoint. Together with the
number of consumed samples it is the whole state of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from megatron.config.data import DataOrder
from megatron.config.imports import named

Blending = Literal["none", "sizes", "weights"]
"""How datasets are blended: one prefix, several by their sizes, or several by weights. It matters only in Megatron's order."""


@dataclass(frozen=True)
class BlendPart:
    """A dataset of a training blend."""

    prefix: str
    fingerprint: str
    """Hash of the content, so that a dataset is recognised wherever its files lie."""
    first_document: int
    num_documents: int
    weight: float
    """Weight in the blend; only the ratios within a phase count."""

    @property
    def key(self) -> tuple[str, int, int]:
        """What identifies the documents."""
        return self.fingerprint, self.first_document, self.num_documents


_PLACE = ("first_iteration", "first_sample", "passed_over")
"""Where a phase begins, which is no setting."""
_BATCHES = ("global_batch_size", "rampup_batch_size", "step_batch_size_schedule")
_LATER = ("step_batch_size_schedule", "passed_over")
"""What older checkpoints do not have."""


@dataclass(frozen=True)
class Phase:
    """A stretch of the run in which the data settings stayed the same."""

    first_iteration: int
    """Number of iterations before the phase."""
    first_sample: int
    """Number of samples consumed before the phase."""
    order: DataOrder
    seed: int
    seq_length: int
    global_batch_size: int
    rampup_batch_size: tuple[int, int, int] | None
    parts: tuple[BlendPart, ...]
    """The datasets; empty for made-up data."""
    blending: Blending = "none"
    num_samples: int | None = None
    """Length of the run in samples, where the order depends on it (megatron)."""
    step_batch_size_schedule: tuple[str, ...] = ()
    passed_over: int = 0
    """Samples before the phase that belong to no step: they were passed over after a loss spike."""

    def settings(self) -> dict[str, Any]:
        """The settings whose change begins a new phase, by name."""
        fields = {name: value for name, value in vars(self).items() if name not in _PLACE}
        total = sum(part.weight for part in self.parts)
        return fields | {"parts": tuple((part.key, part.weight / total) for part in self.parts)}

    def reading(self) -> dict[str, Any]:
        """The settings that decide the order of samples, whatever the batches."""
        return {name: value for name, value in self.settings().items() if name not in _BATCHES}

    def to_json(self) -> dict[str, Any]:
        """The phase as a checkpoint holds it; as in older ones where they could say as much."""
        return {name: value for name, value in asdict(self).items() if name not in _LATER or value}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Phase:
        """The phase that a checkpoint holds."""
        ramp, schedule = saved["rampup_batch_size"], saved.get("step_batch_size_schedule", ())
        parts = tuple(BlendPart(**part) for part in saved["parts"])
        tuples = {"rampup_batch_size": tuple(ramp) if ramp else None, "step_batch_size_schedule": tuple(schedule), "parts": parts}
        return cls(**{**saved, **tuples})


def go_on(before: Sequence[Phase], now: Phase) -> list[Phase]:
    """The phases of a run that continues with the settings of `now`.

    Args:
        before: Phases up to the checkpoint.
        now: The settings of this process, with the counts of the checkpoint.
    """
    kept = [phase for phase in before if phase.first_sample < now.first_sample]
    if not kept:
        return [replace(now, first_iteration=0, first_sample=0)]  # nothing is read yet, or an older checkpoint does not say what
    if kept[-1].settings() == now.settings():
        return [*kept[:-1], replace(kept[-1], parts=now.parts)]  # the files may have moved
    return [*kept, now]


def tokens_read(phases: Sequence[Phase], samples: int, seq_length: int) -> int:
    """Tokens of the first samples of a run, whose phases may have samples of several lengths.

    Args:
        phases: those up to there; none where nothing is known of them.
        seq_length: tokens of a sample now.
    """
    first = [*(phase.first_sample for phase in phases), samples]
    lengths = [phase.seq_length for phase in phases]
    known = sum(max(0, min(samples, end) - start) * length for start, end, length in zip(first, first[1:], lengths, strict=False))
    return known if phases else samples * seq_length


def pass_over(phases: Sequence[Phase], iteration: int, sample: int, count: int) -> list[Phase]:
    """The phases of a run that goes back to an iteration and reads on behind samples that it then passes over.

    These count as given: each dataset goes on behind them.

    Args:
        phases: those up to there, whose last holds for what comes too.
        iteration: number of iterations that stay.
        sample: the first sample that is passed over.
        count: how many are.
    """
    return [*phases, replace(phases[-1], first_iteration=iteration, first_sample=sample + count, passed_over=count)]


def readings(phases: Sequence[Phase]) -> list[Phase]:
    """Phases, joined where only the batches changed: these do not begin a blend anew."""
    found: list[Phase] = []
    for phase in phases:
        if not found or found[-1].reading() != phase.reading():
            found.append(phase)
    return found


@dataclass(frozen=True)
class Stretch:
    """A part of a run in which the sequence length stayed the same."""

    seq_length: int
    num_samples: int
    """Samples of the dataset that were read."""


def merged(earlier: Sequence[Stretch]) -> list[Stretch]:
    """The stretches without empty ones; consecutive ones of one sequence length are joined."""
    found: list[Stretch] = []
    for stretch in earlier:
        if found and found[-1].seq_length == stretch.seq_length:
            found[-1] = Stretch(stretch.seq_length, found[-1].num_samples + stretch.num_samples)
        elif stretch.num_samples:
            found.append(stretch)
    return found


def read_before(phases: Sequence[Phase], part: BlendPart) -> list[Stretch]:
    """What a dataset of the last phase gave in earlier phases that read it in the same order, the earliest first."""
    last = phases[-1]
    found: list[Stretch] = []
    for phase, following in pairwise(readings(phases)):
        if (phase.order, phase.seed) != (last.order, last.seed) or not phase.parts:
            continue
        counts = named("megatron.data.blend:Blend")([each.weight for each in phase.parts]).counts(
            following.first_sample - phase.first_sample
        )
        for each, count in zip(phase.parts, counts, strict=True):
            if each.key == part.key and count:
                found.append(Stretch(phase.seq_length, count))
    return found


def describe_phases(phases: Sequence[Phase]) -> list[str]:
    """Lines of the start-up log for a run whose data settings were changed, or that passed samples over; else empty."""
    joined = readings(phases)
    passed = [
        f"samples {phase.first_sample - phase.passed_over:,} to {phase.first_sample - 1:,} were passed over after a loss spike "
        f"(behind iteration {phase.first_iteration:,})"
        for phase in phases
        if phase.passed_over
    ]
    return passed + _describe_changes(joined)


def _describe_changes(joined: Sequence[Phase]) -> list[str]:
    if len(joined) < 2:
        return []
    now = joined[-1]
    lines = [f"the data settings changed at sample {now.first_sample:,} (iteration {now.first_iteration:,}):"]
    if now.order == "megatron":
        return [*lines, "  --data-order megatron computes the order of the whole run anew: what was read may come again"]
    return lines + [f"  {part.prefix}: {_going_on(joined, part)}" for part in now.parts]


def _going_on(phases: Sequence[Phase], part: BlendPart) -> str:
    """Words for where a dataset of the last phase continues."""
    if before := merged(read_before(phases, part)):
        given = [f"{each.num_samples:,} samples of {each.seq_length} tokens" for each in before]
        return f"goes on after {' and '.join(given)}"
    earlier = [each for phase in phases[:-1] for each in phase.parts]
    if any(each.fingerprint == part.fingerprint for each in earlier):
        return "begins anew: it was read under another --seed, --split or --data-order, and what was read may come again"
    if any(each.prefix == part.prefix for each in earlier):
        return "begins: it is not the dataset that was read from this place before"
    return "begins"
