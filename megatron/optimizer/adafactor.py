"""Adafactor (Shazeer and Stern 2018, algorithms 4 and 5): row means and column means represent the second moments of a matrix.

With g the gradient of a matrix [R, C], t the number of the update and b = 1 - t^-decay_rate ::

    rows    = b * rows    + (1 - b) * mean over columns of (g^2 + eps)         [R]
    columns = b * columns + (1 - b) * mean over rows    of (g^2 + eps)         [C]
    u = g / sqrt(rows * columns / mean(rows))
    u = u / max(1, RMS(u) / clip_threshold) * rate
    m = beta1 * m + (1 - beta1) * u, and m in place of u, if there is a first moment
    weights = weights - rate * decay * weights - u

With --adafactor-relative-step, the rate is multiplied by max(min_scale, RMS(weights)). Vectors have one second moment per element.
If a parameter holds several matrices, each is treated separately. All means are over the full matrix, even if several ranks hold
its elements.

An update therefore needs two reductions over the ranks: first the sums over rows and columns, then RMS(u), which depends on these
sums. Between the two reductions, u overwrites the gradient, so that u needs no extra memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron.config.training import OptimizerConfig
from megatron.optimizer.matrices import (
    TargetSlice,
    add_squared_norms,
    compute_unit_numel,
    count_unit_dims,
    get_units_shape,
    slice_norm_range,
    slice_target,
    view_column_states,
    view_row_state,
)
from megatron.optimizer.rule import StateSpec, Target, Update, Updater, UpdateRule
from megatron.optimizer.statistics import Statistic, StatisticsRounds
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamPartition, ParamRecord
from megatron.parallel.state_shape import PER_COLUMN, PER_ROW

_ROWS, _COLUMNS, _FIRST, _SECOND = "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg", "exp_avg_sq"


class Adafactor(UpdateRule):
    """Adafactor update rule. Learning rate and weight decay are those of the parameter group."""

    elementwise = False

    def __init__(self, config: OptimizerConfig) -> None:
        self.decay_rate, self.clip_threshold = config.adafactor_decay_rate, config.adafactor_clip_threshold
        self.eps, self.beta1 = config.adafactor_eps, config.adafactor_beta1
        self.min_scale = config.adafactor_least_scale if config.adafactor_relative_step else None

    def states(self, record: ParamRecord) -> tuple[StateSpec, ...]:
        """Return the optimizer states of a parameter: second moments, and the first moment if beta1 is not 0. A matrix has one
        second moment per row and one per column; a vector has one per element."""
        first = (StateSpec(_FIRST),) if self.beta1 else ()
        if record.param_type == "vector":
            return (*first, StateSpec(_SECOND))
        return (*first, StateSpec(_ROWS, PER_ROW), StateSpec(_COLUMNS, PER_COLUMN))

    def statistics(self, param: ParamPartition, context: ParallelContext) -> StatisticsRounds:
        """Return the sums over a full parameter that an update needs, as two lists. The ranks reduce the sums of the first list,
        then those of the second list.

        - First list: squared gradients summed over each row and each column, the sum of the row states (second moments of the rows)
          and, with --adafactor-relative-step, squared norms of the weights.
        - Second list: squared norms of the update.
        """
        record, units = param.record, get_units_shape(param.record)
        first: list[Statistic] = []
        if record.param_type != "vector":
            first += [Statistic("rows", PER_ROW.get_shape(record.shape)), Statistic("columns", PER_COLUMN.get_shape(record.shape))]
            first.append(Statistic("kept", units))
        if self.min_scale is not None:
            first.append(Statistic("weights", units))
        return first, [Statistic("updates", units)]

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """Build the function that updates the targets (main parameters with their gradients and states) in place."""
        target_updates = [_TargetUpdate(self, target, context) for target in targets]

        def step(update: Update) -> Iterator[None]:
            for target_update in target_updates:
                target_update.sum_statistics(update.grad_factor)
            yield
            beta2 = 1.0 - update.step**-self.decay_rate
            for target_update in target_updates:
                target_update.compute_update(beta2, update.grad_factor)
            yield
            for target_update in target_updates:
                target_update.update(update.rate(target_update.target.group), update.decay(target_update.target.group))

        return step


class _TargetUpdate:
    """Update of one target (main parameter with its gradient and states), in three steps: sum the squared gradients, compute the
    update u, and update the main parameter."""

    def __init__(self, rule: Adafactor, target: Target, context: ParallelContext) -> None:
        self.target, self._rule, self._statistics, self._context = target, rule, target.statistics, context
        self._dims, self._numel = count_unit_dims(target.record), compute_unit_numel(target.record)
        self._factored = target.record.param_type != "vector"
        self._slices, self._norm_slices = slice_target(target, context), slice_norm_range(target, context)

    def sum_statistics(self, grad_factor: float) -> None:
        """Add this rank's contributions to the sums that the ranks reduce before `compute_update`: squared gradients of each row
        and column, stored second moments of the rows, and squared weights.

        Args:
            grad_factor: number by which the gradient is multiplied (clip coefficient / loss scale).
        """
        grad, statistics = self.target.grad, self._statistics
        if self._rule.min_scale is not None:
            add_squared_norms(statistics["weights"], self.target.main, self._norm_slices, self._dims)
        if not self._factored:
            return
        for target_slice in self._norm_slices:
            view = target_slice.of(grad)
            for name, index, dim in (("rows", target_slice.row_index, -1), ("columns", target_slice.column_index, -2)):
                norms = torch.linalg.vector_norm(view, dim=dim).mul_(grad_factor)
                statistics[name][index].add_(norms.square_().to(statistics[name].device))
            if target_slice.has_row_starts:
                row_state = view_row_state(self.target, _ROWS, target_slice, self._context)
                statistics["kept"][target_slice.get_unit_index(2)].add_(row_state.sum(-1).to(statistics["kept"].device))

    def compute_update(self, beta2: float, grad_factor: float) -> None:
        """Overwrite the gradient with the update u = gradient / sqrt(second moments), and add this rank's contribution to the
        squared norm of u.

        Args:
            beta2: decay rate of the second moments in this update (b in the module's formulas).
            grad_factor: number by which the gradient is multiplied (clip coefficient / loss scale).
        """
        if self._factored:
            self._compute_factored_update(beta2, grad_factor)
        else:
            grad, second = self.target.grad.mul_(grad_factor), self.target.moments[_SECOND]
            second.lerp_(grad.square().add_(self._rule.eps), 1.0 - beta2)
            grad.mul_(second.rsqrt())
        add_squared_norms(self._statistics["updates"], self.target.grad, self._norm_slices, self._dims)

    def _compute_factored_update(self, beta2: float, grad_factor: float) -> None:
        """Update the second moments of a matrix, which are stored per row and per column, and overwrite the gradient with the
        update u."""
        target, statistics, eps = self.target, self._statistics, self._rule.eps
        num_rows, row_length = target.record.shape[-2:]
        device, new_weight = target.main.device, 1.0 - beta2
        # The mean of the new row states is the mean of the matrix's second moments.
        mean = beta2 / num_rows * statistics["kept"] + new_weight * (statistics["rows"].sum(-1) / self._numel + eps)
        for column_state, index in view_column_states(target, _COLUMNS, self._context):
            mean_square = statistics["columns"][index].to(device) / num_rows + eps
            column_state.lerp_(mean_square, new_weight)
            statistics["columns"][index].copy_(column_state)  # the slices below read the new column states here
        for target_slice in self._slices:
            mean_square = statistics["rows"][target_slice.row_index].to(device) / row_length + eps
            row_state = view_row_state(target, _ROWS, target_slice, self._context).lerp_(mean_square, new_weight)
            row_factor = row_state.div(mean[target_slice.get_unit_index(2)].to(device).unsqueeze(-1)).rsqrt_().mul_(grad_factor)
            column_factor = statistics["columns"][target_slice.column_index].to(device).rsqrt()
            target_slice.of(target.grad).mul_(row_factor.unsqueeze(-1)).mul_(column_factor.unsqueeze(-2))

    def update(self, rate: float, decay: float) -> None:
        """Update the main parameter from u, which `compute_update` wrote over the gradient. Apply clipping by RMS(u), first moment
        and weight decay.

        Args:
            rate: learning rate of the parameter group.
            decay: weight decay of the parameter group.
        """
        target, rule = self.target, self._rule
        rms = (self._statistics["updates"] / self._numel).sqrt_()
        scales = rate / (rms / rule.clip_threshold).clamp_(min=1.0)
        decays = torch.full_like(scales, rate * decay)
        if rule.min_scale is not None:
            param_scale = (self._statistics["weights"] / self._numel).sqrt_().clamp_(min=rule.min_scale)
            scales, decays = scales * param_scale, decays * param_scale
        scales, decays = scales.to(target.main.device), decays.to(target.main.device)
        for target_slice in self._slices:
            u = target_slice.of(target.grad).mul_(self._expand_units(scales, target_slice))
            if rule.beta1:
                u = target_slice.of(target.moments[_FIRST]).lerp_(u, 1.0 - rule.beta1)
            main = target_slice.of(target.main)
            if decay:
                main.mul_(1.0 - self._expand_units(decays, target_slice))
            main.sub_(u)

    def _expand_units(self, unit_values: torch.Tensor, target_slice: TargetSlice) -> torch.Tensor:
        """Return values that belong to full matrices or vectors in a shape that broadcasts over the elements of a slice.

        Args:
            unit_values: one value per unit, that is per matrix or vector of the parameter.
            target_slice: slice of the parameter.
        """
        return unit_values[target_slice.get_unit_index(self._dims)][(..., *(None for _ in range(self._dims)))]
