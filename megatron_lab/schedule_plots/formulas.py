"""Closed formulas from papers for each pipeline schedule: its bubble, and the number of activations that each stage keeps.

F, I and W are the durations of a forward, an input gradient and a weight gradient on a full stage. p is the number of stages, m the
number of microbatches, v the number of model chunks per stage, and s the index of a stage.

A formula is used only for cases in which it is exact. In other cases its value is not even a reliable approximation.

The formulas do not contain R, the time to recompute layers before the gradient arrives. A stage spends R in addition to its other
work, and the bubble is as long as without recomputation. The papers do not state this; tests with the simulator show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron.spec.operations import OpCosts
from megatron.spec.schedules import split_into_rounds

Value = TypeVar("Value")


@dataclass(frozen=True)
class Case:
    """Arguments of a formula: p stages, m microbatches, v model chunks per stage, and the durations of operations on a full stage.

    The durations are equal on all stages.
    """

    p: int
    m: int
    v: int
    op_costs: OpCosts

    @property
    def compute_time(self) -> float:
        """Time for which a stage computes for one microbatch in a step: forward + input gradient + weight gradient. Recomputation
        is not included."""
        return self.op_costs.forward + self.op_costs.input_grad + self.op_costs.weight_grad


@dataclass(frozen=True)
class Formula(Generic[Value]):
    """Closed formula from a paper for a property of a pipeline schedule, with its source and the cases in which it is exact."""

    text: str
    source: str
    evaluate: Callable[[Case], Value]
    is_exact: Callable[[Case], bool] = lambda case: True
    condition: str = ""
    """Text that says in which cases the formula is exact; empty if it is exact in all cases."""

    def __str__(self) -> str:
        return f"{self.text}{' where ' * bool(self.condition)}{self.condition} ({self.source})"


@dataclass(frozen=True)
class ScheduleFormulas:
    """Formulas from papers for the bubble and for the number of kept activations of one pipeline schedule."""

    bubble: Formula[float]
    """Time that each stage waits in a step, if messages take no time. In the remaining time of the step it computes: the
    forward, recomputation, input gradient and weight gradient of all microbatches."""
    max_activations: Formula[tuple[int, ...]]
    """Maximum number of activations that each stage keeps at the same time. One activation means all saved tensors of one
    microbatch in one model chunk. It is kept until its weight gradient has been computed."""


@dataclass(frozen=True)
class ExpectedValues:
    """Values of the papers' formulas for one schedule and its sizes. A value is None if its formula is not exact for these
    sizes."""

    bubble_time: float | None
    """Time that each stage waits in a step, in the same unit as the durations of the operations."""
    max_activations: tuple[int, ...] | None
    """Maximum number of activations that each stage keeps at the same time. One activation means all saved tensors of one
    microbatch in one model chunk."""
    formulas: tuple[str, ...]
    """The papers' formulas as text, including those that are not exact for these sizes."""


def compute_expected(name: str, num_stages: int, num_microbatches: int, chunks_per_stage: int, op_costs: OpCosts) -> ExpectedValues:
    """Evaluate the papers' formulas for the bubble and the kept activations of a pipeline schedule.

    Args:
        name: name of the schedule. If there are no formulas for it, all values are None.
        op_costs: durations of operations on a full stage, not on one of its model chunks.
    """
    if name not in SCHEDULE_FORMULAS:
        return ExpectedValues(None, None, ())
    case = Case(num_stages, num_microbatches, chunks_per_stage, op_costs)
    bubble, activations = SCHEDULE_FORMULAS[name].bubble, SCHEDULE_FORMULAS[name].max_activations
    messages_are_free = op_costs.p2p == 0 or num_stages == 1
    return ExpectedValues(
        bubble.evaluate(case) if messages_are_free and bubble.is_exact(case) else None,
        activations.evaluate(case) if activations.is_exact(case) else None,
        (f"bubble {bubble}", f"live {activations}"),
    )


def _count_interleaved_activations(case: Case) -> tuple[int, ...]:
    """Return the maximum number of activations that each stage keeps under the interleaved schedule.

    It is the number of forwards in the warm-up, plus one. In the warm-up a stage runs the first round of microbatches through all
    its model chunks except the last. It also runs two more forwards for each stage after it, because an activation travels to the
    last stage and its gradient back.
    """
    max_round = len(split_into_rounds(case.p, case.m)[0])
    return tuple(min(case.m * case.v, (case.v - 1) * max_round + 2 * (case.p - stage - 1) + 1) for stage in range(case.p))


def _is_zb_h1_bubble_exact(case: Case) -> bool:
    """Return whether the bubble formula of ZB-H1 is exact for these sizes and durations: W <= F, W <= I and m >= p, or p = 1.

    F, I and W are the durations of forward, input gradient and weight gradient; p stages, m microbatches. In the drain phase a
    stage computes weight gradients between input gradients, which arrive at intervals of F + I. A weight gradient that is longer
    than F or than I delays the next input gradient. Tests with the simulator show that the formula is exact under this condition,
    and otherwise only in some cases with m < p.
    """
    op_costs = case.op_costs
    return case.p == 1 or (op_costs.weight_grad <= min(op_costs.forward, op_costs.input_grad) and case.m >= case.p)


def _is_zb_v_bubble_exact(case: Case) -> bool:
    op_costs = case.op_costs
    return case.p == 1 or (op_costs.forward == op_costs.input_grad == op_costs.weight_grad and case.m >= 2 * case.p - 1)


_GPIPE, _1F1B = "Huang et al. 2019, section 2.3", "Narayanan et al. 2021, section 2.2.1"
_INTERLEAVED = "Narayanan et al. 2021, section 2.2.2"
_ZB_H1, _ZB_H1_BUBBLE, _ZB_V = (f"Qi et al. 2023, section {section}" for section in ("2.1", "2.3", "6"))

SCHEDULE_FORMULAS = {
    "gpipe": ScheduleFormulas(
        Formula("(p-1)(F+I+W)", _GPIPE, lambda case: (case.p - 1) * case.compute_time),
        Formula("m", _GPIPE, lambda case: (case.m,) * case.p),
    ),
    "1f1b": ScheduleFormulas(
        Formula("(p-1)(F+I+W)", _1F1B, lambda case: (case.p - 1) * case.compute_time),
        Formula("min(m, p-s) on stage s", _1F1B, lambda case: tuple(min(case.m, case.p - stage) for stage in range(case.p))),
    ),
    "interleaved": ScheduleFormulas(
        # The paper requires that p divides m. This project's generator makes some rounds longer instead, with the same bubble.
        Formula(
            "(p-1)(F+I+W)/v",
            _INTERLEAVED,
            lambda case: (case.p - 1) * case.compute_time / case.v,
            lambda case: case.v == 1 or (case.m >= case.p and case.op_costs.recompute <= case.op_costs.forward),
            "m >= p",
        ),
        # If p divides m, the first stage keeps p + (p-1)/v activations of a full stage (Korthikanti et al. 2022, section 4.2).
        Formula(
            "min(mv, (v-1)r + 2(p-s) - 1) on stage s, with r microbatches in the longest round (p if p divides m)",
            _INTERLEAVED,
            _count_interleaved_activations,
        ),
    ),
    "zb-h1": ScheduleFormulas(
        Formula(
            "(p-1)(F+I-W)",
            _ZB_H1_BUBBLE,
            lambda case: (case.p - 1) * (case.op_costs.forward + case.op_costs.input_grad - case.op_costs.weight_grad),
            _is_zb_h1_bubble_exact,
            "W <= F, W <= I and m >= p",
        ),
        Formula("min(m, p)", _ZB_H1, lambda case: (min(case.m, case.p),) * case.p),
    ),
    "zb-v": ScheduleFormulas(
        # The papers count for each stage the time from its first to its last operation, and thus find no bubble. Here a step
        # starts with the first stage. The last stage gets its first microbatch p - 1 forwards of half a stage later.
        Formula(
            "(p-1)F/2",
            _ZB_V,
            lambda case: (case.p - 1) * case.op_costs.forward / 2,
            _is_zb_v_bubble_exact,
            "F = I = W and m >= 2p-1",
        ),
        Formula("2p", _ZB_V, lambda case: (2 * case.p,) * case.p, lambda case: case.m >= 2 * case.p - 1, "m >= 2p-1"),
    ),
}
"""Formulas by the name of the schedule."""
