"""With which settings a difference comes and goes: runs with less of the layout, as far as the time allows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from typing import Protocol

from megatron.config.config import Config
from megatron.verification.diagnosis.diagnose import Diagnosis, diagnose
from megatron.verification.diagnosis.variants import Variant, axes_alone, one_process, without_each
from megatron.verification.local_ranks import RanksError
from megatron.verification.observing.observation import Observation


class Prove(Protocol):
    """Observe a run of settings with a number of ranks."""

    def __call__(self, config: Config, world_size: int, *, dropout: bool = True) -> Observation:
        """With or without probabilities of dropout, which must not act."""


def isolate(config: Config, world_size: int, prove: Prove, *, seconds: float) -> list[str]:
    """A line for each run with less of the layout: whether the difference is still there.

    Args:
        config: settings that differ from one process, or fail.
        seconds: no further run is begun after so long.
    """
    lines, started = [], time.monotonic()
    waiting = chain(
        ((variant, "comes with {}{}", "does not come with {}") for variant in axes_alone(config, world_size)),
        ((variant, "stays without {}{}", "goes away without {}") for variant in without_each(config, world_size)),
    )
    alone = one_process(config, world_size)
    if alone is not None and (differs := _outcome(alone, prove)):
        lines.append(f"it comes in one process too ({differs}): it is the model's code or the training step, not the layout")
        left_out = without_each(alone.config, 1)
        waiting = chain((variant, "stays there without {}{}", "goes away there without {}") for variant in left_out)
    for variant, bad, good in waiting:
        if time.monotonic() - started > seconds:
            lines.append(f"no time was left to try it with and without the rest ({seconds:g} s)")
            break
        differs = _outcome(variant, prove)
        lines.append(bad.format(variant.words, f" ({differs})") if differs else good.format(variant.words))
    return lines


def _outcome(variant: Variant, prove: Prove) -> str:
    """What differs, in a few words; empty if all is equal."""
    try:
        found: Diagnosis = diagnose(prove(variant.config, variant.world_size, dropout=variant.dropout))
    except RanksError:
        return "the run fails"
    return "" if found.equal else f"{found.findings[0].kind} of {found.findings[0].place}"


def conclusions(lines: list[str]) -> Iterator[str]:
    """What tells most, first: what it comes with, what it goes away without, and then the rest."""
    order = ("it comes", "comes with", "goes away", "does not come", "stays", "no time")
    yield from sorted(lines, key=lambda line: next(place for place, words in enumerate(order) if line.startswith(words)))
