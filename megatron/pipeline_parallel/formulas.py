"""Closed formulas of the papers: the bubble of a schedule, and the activations that it keeps. Pure.

p stages, m microbatches, v chunks a stage; F, I and W are the times of a forward, an input gradient and a weight gradient of a
whole stage, the same on all stages. Messages take no time. A step takes m(F + I + W) and the bubble: what each stage waits in it.
Where a formula does not hold exactly there is none: what it would give is no approximation that one could rely on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron.pipeline_parallel.simulate import Costs

Value = TypeVar("Value")


@dataclass(frozen=True)
class Case:
    """What the formulas are about."""

    num_stages: int
    num_microbatches: int
    chunks_per_stage: int
    costs: Costs
    """Of a whole stage."""


@dataclass(frozen=True)
class Formula(Generic[Value]):
    """A formula, and for which cases it is exact."""

    text: str
    needs: str
    """Said of the cases in words; empty for all."""
    source: str
    holds: Callable[[Case], bool]
    value: Callable[[Case], Value]

    def __str__(self) -> str:
        return f"{self.text}{' where ' * bool(self.needs)}{self.needs} ({self.source})"


@dataclass(frozen=True)
class Expected:
    """What the papers say of a case; None where no formula holds."""

    bubble_time: float | None
    """Time that each stage waits in a step, in the unit of the costs."""
    peak_live: tuple[int, ...] | None
    """For each stage, the most microbatch activations, of one chunk each, kept at once; one lives until its weight gradient."""
    formulas: tuple[str, ...] = ()
    """The formulas in words, whether they hold or not."""


def expected(name: str, num_stages: int, num_microbatches: int, chunks_per_stage: int, costs: Costs) -> Expected:
    """What the papers say of the schedule of this name; nothing of a schedule that is in none of them.

    Args:
        costs: of a whole stage, not of one of its chunks.
    """
    case = Case(num_stages, num_microbatches, chunks_per_stage, costs)
    if name not in BUBBLE or name not in PEAK_LIVE:
        return Expected(None, None)
    bubble, live = BUBBLE[name], PEAK_LIVE[name]
    messages_are_free = costs.p2p == 0 or num_stages == 1
    return Expected(
        bubble.value(case) if messages_are_free and bubble.holds(case) else None,
        live.value(case) if live.holds(case) else None,
        (f"bubble {bubble}", f"live {live}"),
    )


def _always(case: Case) -> bool:
    return True


# ---- bubbles


def _bubble_of_1f1b(case: Case) -> float:
    costs = case.costs
    return (case.num_stages - 1) * (costs.forward + costs.input_grad + costs.weight_grad)


def _zb_h1_holds(case: Case) -> bool:
    """Exact in the simulator, and only then (but for some cases with fewer microbatches than stages).

    In the drain a stage computes its weight gradients between input gradients that come F + I apart: one that is longer than F, or
    than I, delays the next input gradient.
    """
    costs = case.costs
    short = costs.weight_grad <= min(costs.forward, costs.input_grad)
    return case.num_stages == 1 or (short and case.num_microbatches >= case.num_stages)


def _zb_v_holds(case: Case) -> bool:
    costs = case.costs
    equal = costs.forward == costs.input_grad == costs.weight_grad
    return case.num_stages == 1 or (equal and case.num_microbatches >= 2 * case.num_stages - 1)


BUBBLE: dict[str, Formula[float]] = {
    "gpipe": Formula("(p-1)(F+I+W)", "", "Huang et al. 2019, section 2.3", _always, _bubble_of_1f1b),
    "1f1b": Formula("(p-1)(F+I+W)", "", "Narayanan et al. 2021, section 2.2.1", _always, _bubble_of_1f1b),
    # The paper wants p to divide m. The generator lengthens rounds instead, for the same bubble.
    "interleaved": Formula(
        "(p-1)(F+I+W)/v",
        "m >= p",
        "Narayanan et al. 2021, section 2.2.2",
        lambda case: case.chunks_per_stage == 1 or case.num_microbatches >= case.num_stages,
        lambda case: _bubble_of_1f1b(case) / case.chunks_per_stage,
    ),
    "zb-h1": Formula(
        "(p-1)(F+I-W)",
        "W <= F, W <= I and m >= p",
        "Qi et al. 2023, section 2.3",
        _zb_h1_holds,
        lambda case: (case.num_stages - 1) * (case.costs.forward + case.costs.input_grad - case.costs.weight_grad),
    ),
    # The papers count each stage from its own first operation to its own last, and find no bubble at all. A step begins with the
    # first stage, and the last one gets its first microbatch p - 1 forwards of half a stage later.
    "zb-v": Formula(
        "(p-1)F/2",
        "F = I = W and m >= 2p-1",
        "Qi et al. 2023, section 6",
        _zb_v_holds,
        lambda case: (case.num_stages - 1) * case.costs.forward / 2,
    ),
}
"""By the name of the schedule."""


# ---- memory


def _live_of_interleaved(case: Case) -> tuple[int, ...]:
    """Warm-up and one more: a round through all chunks but the last, and the way from the stage to the last one and back."""
    p, m, v = case.num_stages, case.num_microbatches, case.chunks_per_stage
    longest_round = -(-m // max(1, m // p))
    return tuple(min(m * v, (v - 1) * longest_round + 2 * (p - stage - 1) + 1) for stage in range(p))


PEAK_LIVE: dict[str, Formula[tuple[int, ...]]] = {
    "gpipe": Formula("m", "", "Huang et al. 2019, section 2.3", _always, lambda case: (case.num_microbatches,) * case.num_stages),
    "1f1b": Formula(
        "min(m, p-s) on stage s",
        "",
        "Narayanan et al. 2021, section 2.2.1",
        _always,
        lambda case: tuple(min(case.num_microbatches, case.num_stages - stage) for stage in range(case.num_stages)),
    ),
    # On the first stage p + (p-1)/v of a whole stage, as Korthikanti et al. 2022 have it (section 4.2), where p divides m.
    "interleaved": Formula(
        "min(mv, (v-1)r + 2(p-s) - 1) on stage s, with r microbatches in the longest round (p if p divides m)",
        "",
        "Narayanan et al. 2021, section 2.2.2",
        _always,
        _live_of_interleaved,
    ),
    "zb-h1": Formula(
        "min(m, p)",
        "",
        "Qi et al. 2023, section 2.1",
        _always,
        lambda case: (min(case.num_microbatches, case.num_stages),) * case.num_stages,
    ),
    "zb-v": Formula(
        "2p",
        "m >= 2p-1",
        "Qi et al. 2023, section 6",
        lambda case: case.num_microbatches >= 2 * case.num_stages - 1,
        lambda case: (2 * case.num_stages,) * case.num_stages,
    ),
}
"""By the name of the schedule."""
