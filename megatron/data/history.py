"""History of the data that a run has read: a list of phases, each with constant data settings.

When a run resumes, its blend, weights, sequence length or batch size may change. Each dataset then continues after the samples that
were read from it in earlier phases. Every checkpoint contains the list of phases. The list and the number of consumed samples are
the complete state of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from megatron.config.data import DataOrder
from megatron.config.imports import import_object

Blending = Literal["none", "sizes", "weights"]
"""Type of blend: a single dataset without weight, several datasets by their sizes, or datasets by weights. Only Megatron's order
distinguishes these types."""


@dataclass(frozen=True)
class BlendEntry:
    """Description of one dataset of a training blend, for the data history that checkpoints contain."""

    prefix: str
    fingerprint: str
    """Hash of the content, by which a dataset is recognized after its files have moved."""
    first_document: int
    num_documents: int
    weight: float
    """Weight in the blend. Only the ratios between the weights of a blend matter."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Identity of the dataset's documents in any run: fingerprint of the dataset, first document and number of documents."""
        return self.fingerprint, self.first_document, self.num_documents


_START_FIELDS = ("first_iteration", "first_sample", "passed_over")
"""Fields that describe the start of a phase and are not settings."""
_BATCH_FIELDS = ("global_batch_size", "rampup_batch_size", "step_batch_size_schedule")
"""Settings of the batch size, which do not change the order of samples."""
_OPTIONAL_FIELDS = ("step_batch_size_schedule", "passed_over")
"""Fields that checkpoints of earlier versions do not contain."""


@dataclass(frozen=True)
class Phase:
    """Part of a run in which the data settings (blend, sequence length, batch size and so on) do not change."""

    first_iteration: int
    """Number of iterations before the phase."""
    first_sample: int
    """Number of samples consumed before the phase."""
    order: DataOrder
    seed: int
    seq_length: int
    global_batch_size: int
    rampup_batch_size: tuple[int, int, int] | None
    parts: tuple[BlendEntry, ...]
    """Datasets of the blend; empty for mock data."""
    blending: Blending = "none"
    num_samples: int | None = None
    """Number of samples of the run if the order of samples depends on it (--data-order megatron); else None."""
    step_batch_size_schedule: tuple[str, ...] = ()
    passed_over: int = 0
    """Number of samples, just before the phase, that were skipped after a loss spike and belong to no step."""

    def get_settings(self) -> dict[str, Any]:
        """Return the data settings of this phase by field name. If one of them changes, the run starts a new phase."""
        fields = {name: value for name, value in vars(self).items() if name not in _START_FIELDS}
        total = sum(entry.weight for entry in self.parts)
        return fields | {"parts": tuple((entry.key, entry.weight / total) for entry in self.parts)}

    def order_settings(self) -> dict[str, Any]:
        """Return the settings that determine the order of samples. These are all data settings except the batch size."""
        return {name: value for name, value in self.get_settings().items() if name not in _BATCH_FIELDS}

    def to_json(self) -> dict[str, Any]:
        """Return the phase as JSON values for a checkpoint. Fields that earlier versions of this program do not know are left out
        if they are empty."""
        return {name: value for name, value in asdict(self).items() if name not in _OPTIONAL_FIELDS or value}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Phase:
        """Build the phase from the JSON values of a checkpoint."""
        ramp, schedule = saved["rampup_batch_size"], saved.get("step_batch_size_schedule", ())
        entries = tuple(BlendEntry(**entry) for entry in saved["parts"])
        converted = {
            "rampup_batch_size": tuple(ramp) if ramp else None,
            "step_batch_size_schedule": tuple(schedule),
            "parts": entries,
        }
        return cls(**{**saved, **converted})


def continue_phases(phases: Sequence[Phase], current: Phase) -> list[Phase]:
    """Return the phases (parts with constant data settings) of a run that resumes from a checkpoint.

    `current` is added as a new phase if its settings differ from those of the last phase.

    Args:
        phases: phases up to the checkpoint.
        current: phase with the settings of this process, which starts at the checkpoint's iteration and sample.
    """
    earlier = [phase for phase in phases if phase.first_sample < current.first_sample]
    if not earlier:
        return [replace(current, first_iteration=0, first_sample=0)]  # nothing is read yet, or an older checkpoint has no history
    if earlier[-1].get_settings() == current.get_settings():
        return [*earlier[:-1], replace(earlier[-1], parts=current.parts)]  # the files may have moved
    return [*earlier, current]


def count_tokens(phases: Sequence[Phase], num_samples: int, seq_length: int) -> int:
    """Return the number of tokens in the first `num_samples` samples of a run, whose phases may have different sequence lengths.

    Args:
        phases: parts of the run with constant data settings, up to these samples; empty if they are not known.
        seq_length: tokens of a sample if `phases` is empty.
    """
    starts = [*(phase.first_sample for phase in phases), num_samples]
    lengths = [phase.seq_length for phase in phases]
    num_tokens = sum(
        max(0, min(num_samples, end) - start) * length for start, end, length in zip(starts, starts[1:], lengths, strict=False)
    )
    return num_tokens if phases else num_samples * seq_length


def skip_samples(phases: Sequence[Phase], iteration: int, first_sample: int, num_samples: int) -> list[Phase]:
    """Return the phases (parts with constant data settings) of a run that goes back to an earlier iteration and skips samples
    there.

    Skipped samples count as consumed: each dataset continues after them.

    Args:
        phases: phases up to this iteration. The settings of the last phase also apply afterwards.
        iteration: number of iterations that the run keeps.
        first_sample: index of the first skipped sample.
        num_samples: number of skipped samples.
    """
    return [
        *phases,
        replace(phases[-1], first_iteration=iteration, first_sample=first_sample + num_samples, passed_over=num_samples),
    ]


def merge_batch_phases(phases: Sequence[Phase]) -> list[Phase]:
    """Merge consecutive phases of a run that differ only in the batch size. The batch size does not change the order of samples, so
    the blend continues across these phases."""
    merged: list[Phase] = []
    for phase in phases:
        if not merged or merged[-1].order_settings() != phase.order_settings():
            merged.append(phase)
    return merged


@dataclass(frozen=True)
class LengthPeriod:
    """Part of a run with one sequence length, from the view of one dataset: how many samples the run has read from the dataset."""

    seq_length: int
    num_samples: int
    """Number of samples that were read from the dataset."""


def merge_periods(earlier: Sequence[LengthPeriod]) -> list[LengthPeriod]:
    """Drop periods without samples, and merge consecutive periods of equal sequence length."""
    merged: list[LengthPeriod] = []
    for period in earlier:
        if merged and merged[-1].seq_length == period.seq_length:
            merged[-1] = LengthPeriod(period.seq_length, merged[-1].num_samples + period.num_samples)
        elif period.num_samples:
            merged.append(period)
    return merged


def find_earlier_periods(phases: Sequence[Phase], entry: BlendEntry) -> list[LengthPeriod]:
    """Return how many samples of one dataset the earlier phases of a run have read, with which sequence lengths, in chronological
    order.

    Only phases that have the same order and seed as the last phase count.

    Args:
        phases: parts of the run with constant data settings. The last one is the part that now reads the dataset.
        entry: the dataset.
    """
    last = phases[-1]
    periods: list[LengthPeriod] = []
    for phase, next_phase in pairwise(merge_batch_phases(phases)):
        if (phase.order, phase.seed) != (last.order, last.seed) or not phase.parts:
            continue
        counts = import_object("megatron.data.blend:Blend")([phase_entry.weight for phase_entry in phase.parts]).count_samples(
            next_phase.first_sample - phase.first_sample
        )
        for phase_entry, count in zip(phase.parts, counts, strict=True):
            if phase_entry.key == entry.key and count:
                periods.append(LengthPeriod(phase.seq_length, count))
    return periods


def describe_phases(phases: Sequence[Phase]) -> list[str]:
    """Return lines of the start-up log about skipped samples and changed data settings. The list is empty if there are none."""
    merged = merge_batch_phases(phases)
    skipped = [
        f"samples {phase.first_sample - phase.passed_over:,} to {phase.first_sample - 1:,} were skipped after a loss spike "
        f"(after iteration {phase.first_iteration:,})"
        for phase in phases
        if phase.passed_over
    ]
    return skipped + _describe_changes(merged)


def _describe_changes(phases: Sequence[Phase]) -> list[str]:
    if len(phases) < 2:
        return []
    current = phases[-1]
    lines = [f"the data settings changed at sample {current.first_sample:,} (iteration {current.first_iteration:,}):"]
    if current.order == "megatron":
        return [*lines, "  --data-order megatron computes a new order for the whole run: samples may be read a second time"]
    return lines + [f"  {entry.prefix}: {_describe_continuation(phases, entry)}" for entry in current.parts]


def _describe_continuation(phases: Sequence[Phase], entry: BlendEntry) -> str:
    """Describe how the current phase reads a dataset: from its start, or after the samples that earlier phases have read."""
    if periods := merge_periods(find_earlier_periods(phases, entry)):
        descriptions = [f"{period.num_samples:,} samples of {period.seq_length} tokens" for period in periods]
        return f"continues after {' and '.join(descriptions)}"
    earlier_entries = [e for phase in phases[:-1] for e in phase.parts]
    if any(e.fingerprint == entry.fingerprint for e in earlier_entries):
        return "starts again: it was read with another --seed, --split or --data-order, and samples may be read a second time"
    if any(e.prefix == entry.prefix for e in earlier_entries):
        return "starts: the dataset that was read from this path before is another one"
    return "starts"
