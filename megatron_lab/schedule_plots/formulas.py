"""What the papers say of each schedule in closed formulas: its bubble, and the activations that it keeps.

F, I and W are the times of a forward, an input gradient and a weight gradient. A formula is used only where it holds exactly.
Elsewhere its value is not even a reliable approximation. Time R to run layers again ahead of the gradient does not occur in them: a
stage has it in addition to its work, and the bubble is as long as without (tested with the simulator; the papers do not say it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron.spec.operations import Costs
from megatron.spec.schedules import rounds

Value = TypeVar("Value")


@dataclass(frozen=True)
class Case:
    """The input of a formula: p stages, m microbatches, v chunks a stage, and the times of a whole stage (the same on all)."""

    p: int
    m: int
    v: int
    costs: Costs

    @property
    def work(self) -> float:
        """Time that a stage computes for one microbatch: F + I + W."""
        return self.costs.forward + self.costs.input_grad + self.costs.weight_grad


@dataclass(frozen=True)
class Formula(Generic[Value]):
    """A closed formula of a paper."""

    text: str
    source: str
    value: Callable[[Case], Value]
    holds: Callable[[Case], bool] = lambda case: True
    needs: str = ""
    """The cases in which it is exact, in words; empty if it always is."""

    def __str__(self) -> str:
        return f"{self.text}{' where ' * bool(self.needs)}{self.needs} ({self.source})"


@dataclass(frozen=True)
class Published:
    """The formulas of one schedule."""

    bubble: Formula[float]
    """Time that each stage waits in a step, beside the m(F + R + I + W) in which it computes, if messages take no time."""
    peak_live: Formula[tuple[int, ...]]
    """For each stage, the most microbatch activations, of one chunk each, kept at once. Each is kept until its weight gradient."""


@dataclass(frozen=True)
class Expected:
    """What the formulas give for a case; None where none holds."""

    bubble_time: float | None
    """Time that each stage waits in a step, in the unit of the costs."""
    peak_live: tuple[int, ...] | None
    """For each stage, the most microbatch activations, of one chunk each, kept at once."""
    formulas: tuple[str, ...]
    """The formulas in words, whether they hold for the case or not."""


def expected(name: str, num_stages: int, num_microbatches: int, chunks_per_stage: int, costs: Costs) -> Expected:
    """What the papers' formulas give for a case. The costs are those of a whole stage, not of one of its chunks."""
    if name not in PUBLISHED:
        return Expected(None, None, ())
    case = Case(num_stages, num_microbatches, chunks_per_stage, costs)
    bubble, live = PUBLISHED[name].bubble, PUBLISHED[name].peak_live
    no_wait = costs.p2p == 0 or num_stages == 1
    return Expected(
        bubble.value(case) if no_wait and bubble.holds(case) else None,
        live.value(case) if live.holds(case) else None,
        (f"bubble {bubble}", f"live {live}"),
    )


def _live_of_interleaved(case: Case) -> tuple[int, ...]:
    """Live activations: the warm-up (a round through all chunks but the last, the way to the last stage and back) and one."""
    longest_round = len(rounds(case.p, case.m)[0])
    return tuple(min(case.m * case.v, (case.v - 1) * longest_round + 2 * (case.p - stage - 1) + 1) for stage in range(case.p))


def _bubble_of_zb_h1_holds(case: Case) -> bool:
    """Whether the formula is exact. Tested with the simulator: exact then, and else only in some cases with m < p.

    In the drain a stage computes weight gradients between input gradients that come F + I apart. A weight gradient that is longer
    than F, or than I, delays the next input gradient.
    """
    costs = case.costs
    return case.p == 1 or (costs.weight_grad <= min(costs.forward, costs.input_grad) and case.m >= case.p)


def _bubble_of_zb_v_holds(case: Case) -> bool:
    costs = case.costs
    return case.p == 1 or (costs.forward == costs.input_grad == costs.weight_grad and case.m >= 2 * case.p - 1)


_GPIPE, _1F1B = "Huang et al. 2019, section 2.3", "Narayanan et al. 2021, section 2.2.1"
_INTERLEAVED = "Narayanan et al. 2021, section 2.2.2"
_ZB_H1, _ZB_H1_BUBBLE, _ZB_V = (f"Qi et al. 2023, section {section}" for section in ("2.1", "2.3", "6"))

PUBLISHED = {
    "gpipe": Published(
        Formula("(p-1)(F+I+W)", _GPIPE, lambda case: (case.p - 1) * case.work),
        Formula("m", _GPIPE, lambda case: (case.m,) * case.p),
    ),
    "1f1b": Published(
        Formula("(p-1)(F+I+W)", _1F1B, lambda case: (case.p - 1) * case.work),
        Formula("min(m, p-s) on stage s", _1F1B, lambda case: tuple(min(case.m, case.p - stage) for stage in range(case.p))),
    ),
    "interleaved": Published(
        # The paper wants p to divide m. The generator lengthens rounds instead, for the same bubble.
        Formula(
            "(p-1)(F+I+W)/v",
            _INTERLEAVED,
            lambda case: (case.p - 1) * case.work / case.v,
            lambda case: case.v == 1 or (case.m >= case.p and case.costs.recompute <= case.costs.forward),
            "m >= p",
        ),
        # On the first stage p + (p-1)/v of a whole stage, as Korthikanti et al. 2022 have it (section 4.2), where p divides m.
        Formula(
            "min(mv, (v-1)r + 2(p-s) - 1) on stage s, with r microbatches in the longest round (p if p divides m)",
            _INTERLEAVED,
            _live_of_interleaved,
        ),
    ),
    "zb-h1": Published(
        Formula(
            "(p-1)(F+I-W)",
            _ZB_H1_BUBBLE,
            lambda case: (case.p - 1) * (case.costs.forward + case.costs.input_grad - case.costs.weight_grad),
            _bubble_of_zb_h1_holds,
            "W <= F, W <= I and m >= p",
        ),
        Formula("min(m, p)", _ZB_H1, lambda case: (min(case.m, case.p),) * case.p),
    ),
    "zb-v": Published(
        # The papers count each stage from its own first operation to its own last, and find no bubble at all. A step begins with
        # the first stage, and the last one gets its first microbatch p - 1 forwards of half a stage later.
        Formula(
            "(p-1)F/2",
            _ZB_V,
            lambda case: (case.p - 1) * case.costs.forward / 2,
            _bubble_of_zb_v_holds,
            "F = I = W and m >= 2p-1",
        ),
        Formula("2p", _ZB_V, lambda case: (2 * case.p,) * case.p, lambda case: case.m >= 2 * case.p - 1, "m >= 2p-1"),
    ),
}
"""The formulas by the name of the schedule."""
