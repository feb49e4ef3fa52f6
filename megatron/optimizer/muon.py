"""Muon: momentum whose matrices are approximately orthogonalized, so that an update changes all directions equally.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with the decoupled weight decay and the scales of Liu et al. 2025 ("Muon is
scalable for LLM training", arXiv 2502.16982). For a matrix W [outputs, inputs] with gradient G and momentum M:

    M = momentum * M + (1 - momentum) * G
    U = momentum * M + (1 - momentum) * G      with Nesterov momentum, otherwise U = M
    W = (1 - lr * decay) * W - lr * scale * NS(U)

NS is the Newton-Schulz iteration, which moves all singular values close to 1. It needs the full matrix. The momentum stays sharded
like the gradient, and a shard may begin and end anywhere in a matrix. Before the iteration, the ranks exchange their shards of U
(`matrix_plan.py`).

The two halves of a gated MLP's weight are two matrices. Queries, keys and values, fused in one weight, are three matrices, as in
both papers and in Megatron-LM. --muon-no-split-qkv treats the fused weight as one matrix. --muon-split-heads treats each head of
queries, keys and values as a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from megatron.config.training import OptimizerConfig
from megatron.optimizer.matrix_plan import LocalShard, Matrix, MatrixExchange, MatrixPlan, group_by_batch_key, plan_matrices
from megatron.optimizer.rule import StageUpdate, StageUpdateSize, Target, Update, Updater, UpdateRule
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamPartition
from megatron.parallel.torch_private import foreach_lerp_, foreach_mul_

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Factors of x, x^3 and x^5 (Jordan et al. 2024). The polynomial is steepest at 0 and maps [0.7, 1.2] to about itself."""
_EPS = 1e-7  # added to the norm by which a matrix is divided

Stack = tuple[int, int, int]
"""Shape of equally shaped matrices that are computed in one batch: [matrices, rows, columns]."""


class Muon(UpdateRule):
    """Muon update rule, for the matrices of transformer layers. Embeddings, the output layer and vectors use another rule."""

    moments = ("momentum_buffer",)
    elementwise = False
    has_stage_update = True

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """Build the function that adds the gradients of the targets (this rank's main parameters) to their momentum. Afterwards,
        `OrthogonalizationUpdate` updates the main parameters."""
        grads = [target.grad for target in targets]
        momentum_buffers, momentum_factor = [target.moments["momentum_buffer"] for target in targets], self._config.muon_momentum

        def step(update: Update) -> Iterator[None]:
            if update.grad_factor != 1.0:
                foreach_mul_(grads, update.grad_factor)
            foreach_lerp_(momentum_buffers, grads, 1.0 - momentum_factor)
            if self._config.muon_use_nesterov:
                foreach_lerp_(grads, momentum_buffers, momentum_factor)
            yield  # the ranks of the stage run `OrthogonalizationUpdate`

        return step

    def build_stage_update(
        self, targets: Sequence[Target], params: Sequence[ParamPartition], context: ParallelContext
    ) -> StageUpdate:
        """Build the orthogonalization and update that all ranks of a pipeline stage compute together."""
        return OrthogonalizationUpdate(self._config, targets, params, context)

    def compute_stage_update_size(self, params: Sequence[ParamPartition], context: ParallelContext) -> StageUpdateSize:
        """Return the buffer memory of the orthogonalization, and the bytes that the rank with the most traffic sends. They are the
        same on all ranks of a stage."""
        plan, itemsize = build_matrix_plan(params, self._config, context), exchange_dtype(params, self._config).itemsize
        num_elements = plan.buffer_elements + count_scratch_elements(plan, self._config)
        return StageUpdateSize(num_elements * itemsize, max(plan.count_sent_elements(), default=0) * itemsize)


class OrthogonalizationUpdate(StageUpdate):
    """Update by Muon that all ranks of a pipeline stage compute together. Each matrix is orthogonalized by one rank, its owner.
    Then each rank updates its shards of all matrices.

    Args:
        targets: main parameters of this rank with their gradients and momentum.
        params: all parameters of the stage that Muon updates, in an order that is the same on all ranks.
    """

    def __init__(
        self, config: OptimizerConfig, targets: Sequence[Target], params: Sequence[ParamPartition], context: ParallelContext
    ) -> None:
        self._config = config
        self._targets = {target.record.name: target for target in targets}
        nesterov = config.muon_use_nesterov
        local_shards = {
            name: LocalShard(t.flat_range, t.grad if nesterov else t.moments["momentum_buffer"])
            for name, t in self._targets.items()
        }
        plan, dtype = build_matrix_plan(params, config, context), exchange_dtype(params, config)
        self._exchange = MatrixExchange(plan, local_shards, context, dtype)
        scratch = count_scratch_elements(plan, config)
        self._scratch = torch.empty(2, scratch // 2, dtype=dtype, device=context.device)
        self._batches = [
            group_by_batch_key(self._exchange.get_owned_matrices(round_index)) for round_index in range(len(plan.rounds))
        ]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Buffers for the exchange of matrices between ranks, and scratch memory for matrix products."""
        return [*self._exchange.buffers, self._scratch]

    def run(self, update: Update) -> None:
        """Orthogonalize all matrices of the stage, and update this rank's main parameters."""
        for results in self._exchange.run(self._compute):
            for result in results:
                target = self._targets[result.param_name]
                main, rate = target.main[result.shard_range.start : result.shard_range.stop], update.rate(target.group)
                main.mul_(1.0 - rate * update.decay(target.group))
                main.add_(result.result.to(main.device), alpha=-rate)

    def _compute(self, round_index: int) -> None:
        """Orthogonalize the matrices that this rank computes in a round. Read them from `full_matrices` of the exchange and write
        to its `results`."""
        exchange, config, offset = self._exchange, self._config, 0
        for matrices in self._batches[round_index]:
            numel, heads = sum(matrix.numel for matrix in matrices), matrices[0].record.fused_heads
            stacks = _stack_shapes(len(matrices), matrices[0], config)
            inputs, results = exchange.full_matrices[offset : offset + numel], exchange.results[offset : offset + numel]
            offset += numel
            if heads is None or len(stacks) == 1:
                if self._orthogonalize(inputs, results, stacks) is not results:
                    results.copy_(inputs)
                continue
            # The rows are in query groups: query heads, one key head, one value head. Collect all queries, all keys and all values.
            queries_per_group, row_length = heads.queries_per_group, matrices[0].shape[1]
            qkv_shape, query_numel = (len(matrices), -1, queries_per_group + 2, heads.head_size, row_length), math.prod(stacks[0])
            query_shape, key_value_shape = (
                (len(matrices), -1, queries_per_group, heads.head_size, row_length),
                (len(matrices), 2, -1, heads.head_size, row_length),
            )
            results[:query_numel].view(query_shape).copy_(inputs.view(qkv_shape)[:, :, :queries_per_group])
            results[query_numel:].view(key_value_shape).copy_(inputs.view(qkv_shape)[:, :, queries_per_group:].transpose(1, 2))
            if self._orthogonalize(results, inputs, stacks) is not inputs:
                inputs.copy_(results)
            results.view(qkv_shape)[:, :, :queries_per_group].copy_(inputs[:query_numel].view(query_shape))
            results.view(qkv_shape)[:, :, queries_per_group:].copy_(inputs[query_numel:].view(key_value_shape).transpose(1, 2))

    def _orthogonalize(self, x: torch.Tensor, scratch: torch.Tensor, stacks: Sequence[Stack]) -> torch.Tensor:
        """Orthogonalize and scale the matrices in x. Return the buffer with the result, x or scratch.

        Args:
            x: flat buffer with the matrices of the first stack, then those of the second, and so on.
            scratch: buffer of the size of x.
            stacks: shapes [matrices, rows, columns] of batches of equally shaped matrices.
        """
        offset, steps, result_buffer = 0, self._config.muon_num_ns_steps, x
        for stack in stacks:
            count, rows, row_length = stack
            numel, side = math.prod(stack), min(rows, row_length)
            stack_range = slice(offset, offset + numel)
            a, b = (product[: count * side * side].view(count, side, side) for product in self._scratch)
            result = newton_schulz(x[stack_range].view(stack), scratch[stack_range].view(stack), a, b, steps)
            result.mul_(update_scale(rows, row_length, self._config))
            result_buffer, offset = scratch if steps % 2 else x, offset + numel
        return result_buffer


def newton_schulz(x: torch.Tensor, scratch: torch.Tensor, a: torch.Tensor, b: torch.Tensor, steps: int) -> torch.Tensor:
    """Move the singular values of matrices close to 1 by Newton-Schulz iterations.

    Args:
        x: matrices [k, m, n]; overwritten.
        scratch: memory of the shape of x.
        a, b: scratch memory [k, s, s], where s is the smaller of m and n.
        steps: number of iterations.

    Returns:
        x or scratch, whichever has the result.
    """
    first, third, fifth = NS_COEFFICIENTS
    norm_dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=norm_dtype) + _EPS)
    is_tall = x.shape[-2] > x.shape[-1]
    for _ in range(steps):
        torch.bmm(*((x.mT, x) if is_tall else (x, x.mT)), out=a)
        torch.baddbmm(a, a, a, beta=third, alpha=fifth, out=b)
        torch.baddbmm(x, *((x, b) if is_tall else (b, x)), beta=first, out=scratch)
        x, scratch = scratch, x
    return x


def update_scale(num_outputs: int, num_inputs: int, config: OptimizerConfig) -> float:
    """Return the number by which an orthogonalized matrix [outputs, inputs] is multiplied, by --muon-scale-mode.

    - spectral: sqrt(max(outputs, inputs)). The elements then have the same mean square in matrices of every shape. With
      --muon-extra-scale-factor 0.2 the mean square is about that of AdamW's updates, so AdamW's learning rates can be used (Liu et
      al. 2025, section 2.2).
    - unit_rms_norm: sqrt(outputs / inputs). The change of the outputs is then as large as the inputs (Bernstein 2025).
    - shape_scaling: sqrt(outputs / inputs), but at least 1 (Jordan et al. 2024).
    """
    factor = {
        "spectral": math.sqrt(max(num_outputs, num_inputs)),
        "unit_rms_norm": math.sqrt(num_outputs / num_inputs),
        "shape_scaling": math.sqrt(max(1.0, num_outputs / num_inputs)),
    }[config.muon_scale_mode]
    return factor * config.muon_extra_scale_factor


def exchange_dtype(params: Sequence[ParamPartition], config: OptimizerConfig) -> torch.dtype:
    """Return the dtype in which matrices are exchanged and orthogonalized: --muon-dtype, or float64 if main parameters are
    float64."""
    if any(param.main_dtype == torch.float64 for param in params):
        return torch.float64
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[config.muon_dtype]


def build_matrix_plan(params: Sequence[ParamPartition], config: OptimizerConfig, context: ParallelContext) -> MatrixPlan:
    """Plan which rank orthogonalizes which matrix, so that the ranks of a stage have about equal FLOPs."""
    return plan_matrices(params, context, lambda matrix: count_matrix_flops(matrix, config))


def count_matrix_flops(matrix: Matrix, config: OptimizerConfig) -> float:
    """Return the floating-point operations to orthogonalize a matrix. One Newton-Schulz iteration takes 4 * s^2 * l + 2 * s^3
    operations for sides s <= l."""
    return sum(
        count * config.muon_num_ns_steps * (4 * min(m, n) ** 2 * max(m, n) + 2 * min(m, n) ** 3)
        for count, m, n in _stack_shapes(1, matrix, config)
    )


def count_scratch_elements(plan: MatrixPlan, config: OptimizerConfig) -> int:
    """Return the number of elements of scratch memory that `newton_schulz` needs for two products [k, s, s], for the largest batch
    of any round and rank.

    k is the number of matrices of the batch, and s the smaller side of a matrix.
    """
    sizes = (
        count * min(m, n) ** 2
        for matrix_round in plan.rounds
        for owned in matrix_round.owned
        for matrices in group_by_batch_key(owned)
        for count, m, n in _stack_shapes(len(matrices), matrices[0], config)
    )
    return 2 * max(sizes, default=0)


def _stack_shapes(count: int, matrix: Matrix, config: OptimizerConfig) -> list[Stack]:
    """Return the shapes [matrices, rows, columns] of the batched tensors in which Muon orthogonalizes `count` matrices of the same
    shape as `matrix`.

    A fused QKV matrix is first separated into queries, keys and values, or with --muon-split-heads into heads. With
    --muon-no-split-qkv it is not separated.
    """
    (rows, row_length), heads = matrix.shape, matrix.record.fused_heads
    if heads is not None and config.muon_split_heads:
        return [(count * (rows // heads.head_size), heads.head_size, row_length)]
    if heads is None or config.muon_no_split_qkv:
        return [(count, rows, row_length)]
    rows_per_query_group = rows // (heads.queries_per_group + 2)
    return [(count, rows_per_query_group * heads.queries_per_group, row_length), (2 * count, rows_per_query_group, row_length)]
