"""Muon: momentum whose matrices are brought near to orthogonality, so that an update changes all directions equally.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with the decoupled weight decay and the scales of Liu et al. 2025 ("Muon is
scalable for LLM training", arXiv 2502.16982). For a matrix W [outputs, inputs] with gradient G:

    M = momentum M + (1 - momentum) G          (Nesterov: U = momentum M + (1 - momentum) G, else U = M)
    W = (1 - rate decay) W - rate scale NS(U)

NS is Newton and Schulz's iteration, which takes singular values to about 1. It needs the whole matrix. Momentum stays where the
gradient's piece is, as finely cut as any; the pieces of U travel (`matrix_plan.py`).

What is one matrix: the two halves of a gated MLP are two; queries, keys and values, fused in one weight, are three, as both sources
have them, and as Megatron-LM does. --muon-no-split-qkv takes the fused weight as one, --muon-split-heads each head of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from megatron.config.training import OptimizerConfig
from megatron.optimizer.matrix_plan import LocalPiece, Matrix, MatrixExchange, MatrixPlan, by_kind, plan_matrices
from megatron.optimizer.rule import StageSize, StageWork, Target, Update, Updater, UpdateRule
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import DividedParam
from megatron.parallel.torch_private import foreach_lerp_, foreach_mul_

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Factors of x, x^3 and x^5 (Jordan et al. 2024): steepest at 0, and [0.7, 1.2] is mapped to about itself."""
_EPS = 1e-7  # added to the norm of a matrix, by which it is divided

Stack = tuple[int, int, int]
"""Shape of equal matrices that are computed together: [matrices, rows, columns]."""


class Muon(UpdateRule):
    """See the module. The rule of matrices in layers; embeddings, the output layer and vectors have another."""

    moments = ("momentum_buffer",)
    elementwise = False
    works_with_stage = True

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """See `UpdateRule`."""
        grads = [target.grad for target in targets]
        momentum, keeps = [target.moments["momentum_buffer"] for target in targets], self._config.muon_momentum

        def step(update: Update) -> Iterator[None]:
            if update.factor != 1.0:
                foreach_mul_(grads, update.factor)
            foreach_lerp_(momentum, grads, 1.0 - keeps)
            if self._config.muon_use_nesterov:
                foreach_lerp_(grads, momentum, keeps)
            yield  # and the stage does its work

        return step

    def stage_work(self, targets: Sequence[Target], params: Sequence[DividedParam], context: ParallelContext) -> StageWork:
        """See `UpdateRule`."""
        return Orthogonalisation(self._config, targets, params, context)

    def stage_size(self, params: Sequence[DividedParam], context: ParallelContext) -> StageSize:
        """See `UpdateRule`."""
        plan, each = matrix_plan(params, self._config, context), exchange_dtype(params, self._config).itemsize
        memory = plan.buffer_elements + scratch_elements(plan, self._config)
        return StageSize(memory * each, max(plan.sent(), default=0) * each)


class Orthogonalisation(StageWork):
    """What the ranks of a stage do together: each orthogonalises some matrices, and updates its pieces of all.

    Args:
        targets: this rank's.
        params: all of the stage that the rule updates, in an order that is the same on all ranks.
    """

    def __init__(
        self, config: OptimizerConfig, targets: Sequence[Target], params: Sequence[DividedParam], context: ParallelContext
    ) -> None:
        self._config = config
        self._targets = {target.record.name: target for target in targets}
        nesterov = config.muon_use_nesterov
        pieces = {
            name: LocalPiece(one.piece, one.grad if nesterov else one.moments["momentum_buffer"])
            for name, one in self._targets.items()
        }
        plan, dtype = matrix_plan(params, config, context), exchange_dtype(params, config)
        self._exchange = MatrixExchange(plan, pieces, context, dtype)
        scratch = scratch_elements(plan, config)
        self._products = torch.empty(2, scratch // 2, dtype=dtype, device=context.device)
        self._kinds = [by_kind(self._exchange.owned(number)) for number in range(len(plan.rounds))]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """See `StageWork`."""
        return [*self._exchange.buffers, self._products]

    def run(self, update: Update) -> None:
        """See `StageWork`."""
        for returned in self._exchange.run(self._compute):
            for one in returned:
                target = self._targets[one.name]
                main, rate = target.main[one.piece.start : one.piece.stop], update.rate(target.group)
                main.mul_(1.0 - rate * update.decay(target.group))
                main.add_(one.result.to(main.device), alpha=-rate)

    def _compute(self, number: int) -> None:
        """Orthogonalise a round's matrices. What starts in `whole` ends in `results`, whatever the number of steps."""
        exchange, config, at = self._exchange, self._config, 0
        for matrices in self._kinds[number]:
            numel, heads = sum(matrix.numel for matrix in matrices), matrices[0].record.heads
            stacks = _stacks_of(len(matrices), matrices[0], config)
            whole, results = exchange.whole[at : at + numel], exchange.results[at : at + numel]
            at += numel
            if heads is None or len(stacks) == 1:
                if self._orthogonalise(whole, results, stacks) is not results:
                    results.copy_(whole)
                continue
            # Heads lie group by group. Those of queries are put together, and so are those of keys and of values.
            queries, columns = heads.queries, matrices[0].shape[1]
            groups, split = (len(matrices), -1, queries + 2, heads.size, columns), math.prod(stacks[0])
            of_queries, of_others = (len(matrices), -1, queries, heads.size, columns), (len(matrices), 2, -1, heads.size, columns)
            results[:split].view(of_queries).copy_(whole.view(groups)[:, :, :queries])
            results[split:].view(of_others).copy_(whole.view(groups)[:, :, queries:].transpose(1, 2))
            if self._orthogonalise(results, whole, stacks) is not whole:
                whole.copy_(results)
            results.view(groups)[:, :, :queries].copy_(whole[:split].view(of_queries))
            results.view(groups)[:, :, queries:].copy_(whole[split:].view(of_others).transpose(1, 2))

    def _orthogonalise(self, x: torch.Tensor, other: torch.Tensor, stacks: Sequence[Stack]) -> torch.Tensor:
        """Orthogonalise and scale stacks that lie one after the other in x; the result is in x or in other."""
        at, steps, found = 0, self._config.muon_num_ns_steps, x
        for stack in stacks:
            count, rows, columns = stack
            numel, side = math.prod(stack), min(rows, columns)
            here = slice(at, at + numel)
            a, b = (products[: count * side * side].view(count, side, side) for products in self._products)
            result = newton_schulz(x[here].view(stack), other[here].view(stack), a, b, steps)
            result.mul_(scale_of(rows, columns, self._config))
            found, at = other if steps % 2 else x, at + numel
        return found


def newton_schulz(x: torch.Tensor, other: torch.Tensor, a: torch.Tensor, b: torch.Tensor, steps: int) -> torch.Tensor:
    """Take the singular values of matrices to about 1.

    Args:
        x: [k, m, n]; overwritten.
        other, a, b: memory like x, and twice [k, s, s] with s the smaller of m and n.

    Returns:
        x or other, whichever has the result.
    """
    first, third, fifth = NS_COEFFICIENTS
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide) + _EPS)
    tall = x.shape[-2] > x.shape[-1]
    for _ in range(steps):
        torch.bmm(*((x.mT, x) if tall else (x, x.mT)), out=a)
        torch.baddbmm(a, a, a, beta=third, alpha=fifth, out=b)
        torch.baddbmm(x, *((x, b) if tall else (b, x)), beta=first, out=other)
        x, other = other, x
    return x


def scale_of(rows: int, columns: int, config: OptimizerConfig) -> float:
    """The factor on an orthogonalised matrix [outputs, inputs].

    - spectral: sqrt(max(outputs, inputs)), so that elements have the same mean square in matrices of every shape. With
      --muon-extra-scale-factor 0.2 it is about that of AdamW's updates, and its rates carry over (Liu et al. 2025, section 2.2).
    - unit_rms_norm: sqrt(outputs / inputs), by which outputs change as much as inputs are large (Bernstein 2025).
    - shape_scaling: the same but at least 1 (Jordan et al. 2024).
    """
    factor = {
        "spectral": math.sqrt(max(rows, columns)),
        "unit_rms_norm": math.sqrt(rows / columns),
        "shape_scaling": math.sqrt(max(1.0, rows / columns)),
    }[config.muon_scale_mode]
    return factor * config.muon_extra_scale_factor


def exchange_dtype(params: Sequence[DividedParam], config: OptimizerConfig) -> torch.dtype:
    """In which dtype matrices travel and are orthogonalised: float64 where all is."""
    if any(param.main_dtype == torch.float64 for param in params):
        return torch.float64
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[config.muon_dtype]


def matrix_plan(params: Sequence[DividedParam], config: OptimizerConfig, context: ParallelContext) -> MatrixPlan:
    """Which rank orthogonalises which matrix."""
    return plan_matrices(params, context, lambda matrix: flops(matrix, config))


def flops(matrix: Matrix, config: OptimizerConfig) -> float:
    """Number of them in a matrix's orthogonalisation: per step 4 s^2 l + 2 s^3 with its sides s <= l."""
    return sum(
        count * config.muon_num_ns_steps * (4 * min(m, n) ** 2 * max(m, n) + 2 * min(m, n) ** 3)
        for count, m, n in _stacks_of(1, matrix, config)
    )


def scratch_elements(plan: MatrixPlan, config: OptimizerConfig) -> int:
    """Elements of memory for the small products of the fullest round of any rank."""
    sizes = (
        count * min(m, n) ** 2
        for one in plan.rounds
        for owned in one.owned
        for matrices in by_kind(owned)
        for count, m, n in _stacks_of(len(matrices), matrices[0], config)
    )
    return 2 * max(sizes, default=0)


def _stacks_of(count: int, matrix: Matrix, config: OptimizerConfig) -> list[Stack]:
    """The stacks of so many matrices of one kind."""
    (rows, columns), heads = matrix.shape, matrix.record.heads
    if heads is not None and config.muon_split_heads:
        return [(count * (rows // heads.size), heads.size, columns)]
    if heads is None or config.muon_no_split_qkv:
        return [(count, rows, columns)]
    each = rows // (heads.queries + 2)
    return [(count, each * heads.queries, columns), (2 * count, each, columns)]
