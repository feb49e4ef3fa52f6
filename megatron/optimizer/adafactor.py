"""Adafactor (Shazeer and Stern 2018, algorithms 4 and 5): the second moments of a matrix are kept as those of its rows and columns.

With g the gradient of a matrix [R, C], t the number of the update and b = 1 - t^-decay_rate ::

    rows    = b rows    + (1 - b) mean over columns of (g^2 + eps)         [R]
    columns = b columns + (1 - b) mean over rows    of (g^2 + eps)         [C]
    u = g / sqrt(rows columns / mean(rows))
    u = u / max(1, RMS(u) / clip_threshold) * rate
    m = beta1 m + (1 - beta1) u, and m in place of u, if there is a first moment
    weights = weights - rate * decay * weights - u

Where the step is relative, the rate is multiplied by max(least_scale, RMS(weights)). Of vectors the second moment is kept for each
element. Several matrices in one parameter are matrices of their own. All means are over the whole matrix, whichever ranks hold it.

An update needs two rounds of numbers of whole parameters: the sums over rows and columns, and RMS(u), which follows from them.
Between these u lies where the gradient did, so no memory is needed for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron.config.training import OptimizerConfig
from megatron.optimizer.matrices import (
    Part,
    add_squares,
    columns_kept,
    counted_parts,
    parts_of,
    rows_kept,
    unit_dims,
    unit_numel,
    units_of,
)
from megatron.optimizer.rule import KeptState, Target, Update, Updater, UpdateRule
from megatron.optimizer.statistics import Rounds, Statistic
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import DividedParam, ParamRecord
from megatron.parallel.state_shape import COLUMNS, ROWS

_ROWS, _COLUMNS, _FIRST, _SECOND = "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg", "exp_avg_sq"


class Adafactor(UpdateRule):
    """See above. Decay and rate are those of the parameter's group."""

    elementwise = False

    def __init__(self, config: OptimizerConfig) -> None:
        self.decay_rate, self.clip_threshold = config.adafactor_decay_rate, config.adafactor_clip_threshold
        self.eps, self.beta1 = config.adafactor_eps, config.adafactor_beta1
        self.least_scale = config.adafactor_least_scale if config.adafactor_relative_step else None

    def states(self, record: ParamRecord) -> tuple[KeptState, ...]:
        """See `UpdateRule`."""
        first = (KeptState(_FIRST),) if self.beta1 else ()
        if record.kind == "vector":
            return (*first, KeptState(_SECOND))
        return (*first, KeptState(_ROWS, ROWS), KeptState(_COLUMNS, COLUMNS))

    def statistics(self, param: DividedParam, context: ParallelContext) -> Rounds:
        """See `UpdateRule`."""
        record, units = param.record, units_of(param.record)
        first: list[Statistic] = []
        if record.kind != "vector":
            first += [Statistic("rows", ROWS.shape(record.shape)), Statistic("columns", COLUMNS.shape(record.shape))]
            first.append(Statistic("kept", units))
        if self.least_scale is not None:
            first.append(Statistic("weights", units))
        return first, [Statistic("updates", units)]

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """See `UpdateRule`."""
        ones = [_One(self, target, context) for target in targets]

        def step(update: Update) -> Iterator[None]:
            for one in ones:
                one.sum(update.factor)
            yield
            kept = 1.0 - update.number**-self.decay_rate
            for one in ones:
                one.scale(kept, update.factor)
            yield
            for one in ones:
                one.update(update.rate(one.target.group), update.decay(one.target.group))

        return step


class _One:
    """One target under update."""

    def __init__(self, rule: Adafactor, target: Target, context: ParallelContext) -> None:
        self.target, self._rule, self._whole, self._context = target, rule, target.whole, context
        self._dims, self._numel = unit_dims(target.record), unit_numel(target.record)
        self._factored = target.record.kind != "vector"
        self._parts, self._counted = parts_of(target, context), counted_parts(target, context)

    def sum(self, factor: float) -> None:
        """Give this rank's shares of the first round."""
        grad, whole = self.target.grad, self._whole
        if self._rule.least_scale is not None:
            add_squares(whole["weights"], self.target.main, self._counted, self._dims)
        if not self._factored:
            return
        for part in self._counted:
            view = part.of(grad)
            for name, index, dim in (("rows", part.rows, -1), ("columns", part.columns, -2)):
                norms = torch.linalg.vector_norm(view, dim=dim).mul_(factor)
                whole[name][index].add_(norms.square_().to(whole[name].device))
            if part.begins_rows:
                kept = rows_kept(self.target, _ROWS, part, self._context)
                whole["kept"][part.units(2)].add_(kept.sum(-1).to(whole["kept"].device))

    def scale(self, kept: float, factor: float) -> None:
        """Put u where the gradient was, and give this rank's share of its squares.

        Args:
            kept: how much of the second moments stays.
        """
        if self._factored:
            self._scale_by_rows_and_columns(kept, factor)
        else:
            grad, second = self.target.grad.mul_(factor), self.target.moments[_SECOND]
            second.lerp_(grad.square().add_(self._rule.eps), 1.0 - kept)
            grad.mul_(second.rsqrt())
        add_squares(self._whole["updates"], self.target.grad, self._counted, self._dims)

    def _scale_by_rows_and_columns(self, kept: float, factor: float) -> None:
        target, whole, eps = self.target, self._whole, self._rule.eps
        num_rows, num_columns = target.record.shape[-2:]
        device, share = target.main.device, 1.0 - kept
        # The mean of all rows' means is that of the matrix.
        mean = kept / num_rows * whole["kept"] + share * (whole["rows"].sum(-1) / self._numel + eps)
        for columns, index in columns_kept(target, _COLUMNS, self._context):
            now = whole["columns"][index].to(device) / num_rows + eps
            columns.lerp_(now, share)
            whole["columns"][index].copy_(columns)  # from here on what is kept, for the parts
        for part in self._parts:
            now = whole["rows"][part.rows].to(device) / num_columns + eps
            rows = rows_kept(target, _ROWS, part, self._context).lerp_(now, share)
            by_row = rows.div(mean[part.units(2)].to(device).unsqueeze(-1)).rsqrt_().mul_(factor)
            by_column = whole["columns"][part.columns].to(device).rsqrt()
            part.of(target.grad).mul_(by_row.unsqueeze(-1)).mul_(by_column.unsqueeze(-2))

    def update(self, rate: float, decay: float) -> None:
        """Make the update."""
        target, rule = self.target, self._rule
        root = (self._whole["updates"] / self._numel).sqrt_()
        scales = rate / (root / rule.clip_threshold).clamp_(min=1.0)
        shrinks = torch.full_like(scales, rate * decay)
        if rule.least_scale is not None:
            relative = (self._whole["weights"] / self._numel).sqrt_().clamp_(min=rule.least_scale)
            scales, shrinks = scales * relative, shrinks * relative
        scales, shrinks = scales.to(target.main.device), shrinks.to(target.main.device)
        for part in self._parts:
            u = part.of(target.grad).mul_(self._of_units(scales, part))
            if rule.beta1:
                u = part.of(target.moments[_FIRST]).lerp_(u, 1.0 - rule.beta1)
            main = part.of(target.main)
            if decay:
                main.mul_(1.0 - self._of_units(shrinks, part))
            main.sub_(u)

    def _of_units(self, numbers: torch.Tensor, part: Part) -> torch.Tensor:
        """The numbers of a part's units, to be multiplied with its elements."""
        return numbers[part.units(self._dims)][(..., *(None for _ in range(self._dims)))]
