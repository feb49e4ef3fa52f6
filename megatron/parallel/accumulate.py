"""Accumulation of parameter gradients directly in `main_grad`, in the same way for every layer and without autograd hooks.

Every parameter that is trained has a `GradSink`. In their backward, layers pass gradients to one of these functions:

- `accumulate`: a gradient that is already computed;
- `accumulate_product`: a weight gradient as a matrix product that is not computed yet;
- `accumulate_product_sum`: a sum of matrix products, which are computed one by one;
- `accumulate_sum`: a sum of rows, such as the gradient of a bias;
- `accumulate_rows`: the gradient of a table of which a few rows were looked up;
- `accumulate_grouped`: the weight gradients of several matrices;
- `route_grad(param)`: for parameters that are used in ordinary torch operations.

Autograd itself never handles the gradient of a parameter, so no gradient is allocated twice. This also lets a pipeline schedule
decide when weight gradients are computed: within `deferring()`, matrix products are deferred.

A parameter without a sink (in a layer that is used outside of training) gets its gradient in `.grad`, as usual in torch. A
parameter with `requires_grad=False` is frozen and gets no gradient, and layers need not call these functions for it.

Shapes: [out, in] a weight, `n` rows (tokens) of its input and output, [v, h] a table of which rows are looked up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from megatron.parallel.matmul import add_rows, compute_weight_product

WorkFunction = Callable[[], Callable[[], None] | None]
"""Deferred computation. It either completes, or starts the communication that it needs and returns a function that completes it."""


StartGather = Callable[[], Callable[[], tuple[torch.Tensor, torch.Tensor]]]
"""Function that starts to gather the factors of a weight gradient. It returns a function that waits for them and returns (gradient
of the output, input)."""


MakeInput = Callable[[torch.Tensor], torch.Tensor]
"""Function that computes the input of a linear layer from the tensor that was saved for backward."""


class WeightProduct(Protocol):
    """Interface of a function that computes the weight gradient grad_output^T @ x, such as `compute_weight_product`. The function
    writes the gradient to `into`, or adds it if `add` is true."""

    def __call__(self, grad_output: torch.Tensor, x: torch.Tensor, into: torch.Tensor, *, add: bool) -> None: ...


class GroupedWeightProduct(Protocol):
    """Interface of a function that computes the weight gradients of several matrices, such as the experts of a layer.

    Matrix i has `rows_per_expert[i]` consecutive rows (tokens) of `grad_output` and of `x`; this number may be 0. The product
    grad_output^T @ x of these rows is written to `into[i]`, or added if `add` is true. `into` has the shape [matrices, out, in].
    """

    def __call__(
        self, grad_output: torch.Tensor, x: torch.Tensor, rows_per_expert: Sequence[int], into: torch.Tensor, *, add: bool
    ) -> None: ...


class DeferredWork:
    """Queue of deferred computations of weight gradients, with the number of bytes of the tensors that the queue keeps alive."""

    def __init__(self) -> None:
        self._work: deque[WorkFunction] = deque()
        self.num_bytes = 0
        """Bytes of the tensors that the queued computations need."""

    def __len__(self) -> int:
        return len(self._work)

    def add(self, work: WorkFunction, num_bytes: int) -> None:
        """Add a computation to the queue. `num_bytes` is the size of the tensors that the computation keeps alive."""
        self._work.append(work)
        self.num_bytes += num_bytes

    def run(self) -> None:
        """Run all computations in the order in which they were added.

        A computation may need communication, such as an all-gather of its input. This communication starts before the previous
        computation runs, so that the two overlap. The tensors of a computation are freed when it is complete.
        """
        finish: Callable[[], None] | None = None
        with torch.no_grad():  # the queue runs outside of backward, and inputs may require a gradient
            while self._work:
                next_finish = self._work.popleft()()
                if finish is not None:
                    finish()
                finish = next_finish
                del next_finish
            if finish is not None:
                finish()
        self.num_bytes = 0


# Set by the executor during one backward. A plain global, because on CUDA autograd runs backward on a separate thread.
_deferred: DeferredWork | None = None


class GradSink:
    """Destination for the gradient of one parameter, in place of `.grad`.

    `main_grad` accumulates the gradient. It has the shape of the parameter and the dtype of the sink. The first write of a step
    overwrites `main_grad`, so that it need not be set to zero before.

    Args:
        dtype: dtype of `main_grad`.
        on_write: called after each write. The receiver counts the writes to know when the gradient is complete.
        allocate: returns the memory for `main_grad`. Called before the first write if `main_grad` is None.
    """

    __slots__ = ("allocate", "dtype", "is_written", "main_grad", "on_write")

    def __init__(self, dtype: torch.dtype, on_write: Callable[[], None], allocate: Callable[[], torch.Tensor]) -> None:
        self.dtype, self.on_write, self.allocate, self.is_written = dtype, on_write, allocate, False
        self.main_grad: torch.Tensor | None = None

    def add(self, grad: torch.Tensor) -> None:
        """Add a gradient, which has the shape of the parameter, to `main_grad`."""
        main_grad = self._get_main_grad()
        if self.is_written:
            main_grad.add_(grad)
        else:
            main_grad.copy_(grad)
        self._finish_write()

    def add_product_sum(
        self, factors: Iterable[tuple[torch.Tensor, torch.Tensor]], product: WeightProduct = compute_weight_product
    ) -> None:
        """Add a sum of products grad_output^T @ x to the gradient of a weight with out * in elements.

        Each product is added before the next pair is taken from `factors`. All products together count as a single write.

        Args:
            factors: pairs (grad_output [n, out], x [n, in]), for `n` tokens.
            product: computes a product, and writes or adds it.
        """
        main_grad = self._get_main_grad()
        for grad_output, x in factors:
            product(grad_output, x, main_grad.view(-1, x.shape[-1]), add=self.is_written)
            self.is_written = True
        self._finish_write()

    def add_grouped(
        self, grad_output: torch.Tensor, x: torch.Tensor, rows_per_expert: Sequence[int], product: GroupedWeightProduct
    ) -> None:
        """Add the weight gradients of several matrices, such as the experts of a layer, to a gradient [matrices x out, in].

        Args:
            grad_output: gradients of the matrices' outputs, [n, out] for `n` tokens, ordered by matrix.
            x: inputs of the matrices, [n, in], in the same order.
            rows_per_expert: number of rows (tokens) of each matrix; the sum is `n`.
            product: computes the weight gradients of all matrices.
        """
        main_grad = self._get_main_grad()
        product(grad_output, x, rows_per_expert, main_grad.view(len(rows_per_expert), -1, x.shape[-1]), add=self.is_written)
        self._finish_write()

    def add_sum(self, rows: torch.Tensor) -> None:
        """Add the sum of rows [n, out] to a gradient of `out` elements, such as that of a bias.

        The sum is computed in the dtype of the sink: a 16-bit sum over all tokens would lose precision or overflow. The first sum
        is written directly to `main_grad`.
        """
        main_grad = self._get_main_grad().view(-1)
        if self.is_written:
            main_grad.add_(rows.sum(0, dtype=main_grad.dtype))
        else:
            torch.sum(rows, 0, dtype=main_grad.dtype, out=main_grad)
        self._finish_write()

    def add_rows(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Add the gradients of looked-up rows of a table, such as a word embedding, to the gradient of the table.

        Args:
            ids: indices of the rows in the table, [n].
            rows: gradients of the rows, [n, h], in the dtype of the sink.
        """
        main_grad = self._get_main_grad()
        add_rows(main_grad if self.is_written else main_grad.zero_(), ids, rows)
        self._finish_write()

    def _get_main_grad(self) -> torch.Tensor:
        if self.main_grad is None:
            self.main_grad = self.allocate()
        return self.main_grad

    def _finish_write(self) -> None:
        self.is_written = True
        self.on_write()


def get_grad_sink(param: torch.Tensor) -> GradSink | None:
    """Return the `GradSink` that accumulates the gradient of a parameter in place of `.grad`, or None if the parameter has none."""
    return getattr(param, "grad_sink", None)


def get_grad_dtype(param: torch.Tensor) -> torch.dtype:
    """Return the dtype in which the gradient of a parameter is accumulated: that of its `GradSink`, or without a sink its own."""
    sink = get_grad_sink(param)
    return param.dtype if sink is None else sink.dtype


def is_deferring() -> bool:
    """Return whether the code runs within `deferring()`, so that the matrix products of weight gradients are deferred."""
    return _deferred is not None


def accumulate(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Add a computed gradient, with the shape of the parameter, to the parameter's gradient sink (`GradSink`)."""
    sink = get_grad_sink(param)
    if not param.requires_grad:
        return
    if sink is not None:
        sink.add(grad)
    elif param.grad is None:
        param.grad = grad.to(param.dtype, copy=True)  # a copy: autograd may pass the same tensor to several parameters
    else:
        param.grad += grad


def accumulate_product_sum(
    param: torch.Tensor, factors: Iterable[tuple[torch.Tensor, torch.Tensor]], product: WeightProduct = compute_weight_product
) -> None:
    """Compute a weight gradient that is a sum of products grad_output^T @ x, and add it to the parameter's gradient sink.

    The products are computed at once, even within `deferring()`. All products together count as a single write to the sink.

    Args:
        param: weight with out * in elements.
        factors: pairs (grad_output [n, out], x [n, in]), each for some of the tokens. The memory of a pair may be reused for the
            next pair.
        product: computes each product.
    """
    if not param.requires_grad:
        for _ in factors:  # the iterator may have side effects, such as computing input gradients
            pass
        return
    _add_to_sink(param, lambda sink: sink.add_product_sum(factors, product))


def accumulate_grouped(
    param: torch.Tensor, grad_output: torch.Tensor, x: torch.Tensor, rows_per_expert: Sequence[int], product: GroupedWeightProduct
) -> None:
    """Compute the weight gradients of several matrices, such as the experts of a layer, and add them to the parameter's gradient
    sink.

    The gradient of each matrix is grad_output^T @ x for the rows (tokens) of the matrix. The gradients are computed at once, even
    within `deferring()`.

    Args:
        param: all matrices in one parameter, [matrices x out, in].
        grad_output: gradients of the matrices' outputs, [n, out] for `n` tokens, ordered by matrix.
        x: inputs of the matrices, [n, in], in the same order.
        rows_per_expert: number of rows of each matrix; the sum is `n`, and some may be zero.
        product: computes all products.
    """
    _add_to_sink(param, lambda sink: sink.add_grouped(grad_output, x, rows_per_expert, product))


def accumulate_sum(param: torch.Tensor, rows: torch.Tensor) -> None:
    """Add a gradient that is the sum of rows [n, out], one for each of `n` tokens, to the parameter's gradient sink. The parameter
    has `out` elements, for example a bias."""
    _add_to_sink(param, lambda sink: sink.add_sum(rows))


def accumulate_rows(param: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Add the gradient of a table [v, h], such as a word embedding, to the table's gradient sink. Only the looked-up rows have a
    gradient.

    Args:
        ids: indices of the looked-up rows, [n].
        rows: gradients of these rows, [n, h], in the dtype that `get_grad_dtype` returns for the table.
    """
    _add_to_sink(param, lambda sink: sink.add_rows(ids, rows))


def _add_to_sink(param: torch.Tensor, add: Callable[[GradSink], None]) -> None:
    """Call `add` with the gradient sink of a parameter. A parameter that is used outside of training has no sink. For such a
    parameter, use a temporary sink and add its gradient to `.grad`."""
    sink = get_grad_sink(param)
    if not param.requires_grad:
        return
    if sink is not None:
        add(sink)
        return
    temporary_sink = GradSink(param.dtype, lambda: None, lambda: torch.empty_like(param, requires_grad=False))
    add(temporary_sink)
    assert temporary_sink.main_grad is not None
    accumulate(param, temporary_sink.main_grad)


def run_or_defer(work: WorkFunction, *, inputs: tuple[torch.Tensor, ...] = ()) -> None:
    """Compute a weight gradient now or, within `deferring()`, add the computation to the queue that `deferring()` yields.

    Args:
        work: computes the gradient and adds it to the gradient sink.
        inputs: tensors that `work` needs. The queue counts their bytes, because it keeps them alive.
    """
    if _deferred is not None:
        _deferred.add(work, sum(tensor.nbytes for tensor in inputs))
    elif (finish := work()) is not None:
        finish()


def accumulate_product(
    param: torch.Tensor,
    grad_output: torch.Tensor,
    x: torch.Tensor,
    start_gather: StartGather | None = None,
    *,
    make_input: MakeInput | None = None,
    product: WeightProduct = compute_weight_product,
) -> None:
    """Compute the weight gradient grad_output^T @ x of a linear layer, and add it to the weight's gradient sink, which collects the
    gradient of the step. Within `deferring()`, the computation is only put into a queue, which the caller of `deferring()` runs
    later.

    Args:
        param: weight with out * in elements.
        grad_output: gradient of the output on this rank, [..., out].
        x: input of the layer on this rank, [..., in]; if `make_input` is set, the saved tensor from which it computes the input.
        start_gather: None unless `grad_output` or `x` is sharded. Starts to gather the sharded tensor, and returns a function that
            waits and returns (grad_output, x), with equal numbers of rows.
        make_input: computes the layer's input from `x`. Not used together with `start_gather`.
        product: computes the matrix product.
    """

    def finish(get_factors: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        rows, inputs = (tensor.flatten(0, -2) for tensor in get_factors())
        accumulate_product_sum(param, [(rows, inputs)], product)

    def work() -> Callable[[], None] | None:
        if start_gather is not None:
            return partial(finish, start_gather())
        finish(lambda: (grad_output, x if make_input is None else make_input(x)))
        return None

    run_or_defer(work, inputs=(grad_output, x))


@contextmanager
def deferring() -> Iterator[DeferredWork]:
    """Defer the matrix products of weight gradients within this context. Yield the queue of the deferred products, which the caller
    must run later."""
    global _deferred
    assert _deferred is None, "deferring() does not nest"
    _deferred = deferred = DeferredWork()
    try:
        yield deferred
    finally:
        _deferred = None


class _RouteGrad(torch.autograd.Function):
    """Autograd function that returns the parameter unchanged in forward. Backward passes the gradient of the parameter to
    `accumulate` and returns no gradient to autograd."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.param = param
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:  # type: ignore[override]
        accumulate(ctx.param, grad)


def route_grad(param: nn.Parameter) -> torch.Tensor:
    """Return the parameter as a tensor for ordinary torch operations. Backward passes the parameter's gradient to `accumulate`
    instead of `.grad`."""
    return _RouteGrad.apply(param) if param.requires_grad and torch.is_grad_enabled() else param


# ---- Counts of the gradients that parameters receive. They show when a microbatch is complete, and whether a gradient is missing.


class GradCounter:
    """Counts the gradients that the parameters of a bucket receive in a step, to find out when the gradients of a microbatch are
    complete.

    Args:
        uses: number of gradients that backward adds to each parameter per microbatch.
    """

    def __init__(self, uses: Sequence[int]) -> None:
        self.uses = list(uses)
        self.start_step()

    def start_step(self) -> None:
        """Reset the counts of gradients and of complete microbatches for a new step."""
        self.writes = [0] * len(self.uses)
        self.num_complete = 0
        """Number of microbatches whose gradients are complete."""
        self._num_incomplete_params = len(self.uses)

    def count_write(self, param_index: int) -> bool:
        """Count one more gradient of the parameter with this index in `uses`. Return whether this gradient completes a microbatch
        for all parameters.

        With deferred weight gradients, some parameters may be several microbatches ahead of others.
        """
        self.writes[param_index] += 1
        if self.writes[param_index] != self.uses[param_index] * (self.num_complete + 1):
            return False
        self._num_incomplete_params -= 1
        if self._num_incomplete_params:
            return False
        self.num_complete += 1
        self._num_incomplete_params = sum(
            writes < uses * (self.num_complete + 1) for writes, uses in zip(self.writes, self.uses, strict=True)
        )
        return True


def check_grad_counts(rank: int, counts: Iterable[tuple[str, int, int]]) -> None:
    """Check that every parameter received all of its gradients in a step.

    Args:
        counts: for each parameter its name, the number of gradients received, and the expected number.

    Raises:
        RuntimeError: a parameter received too few or too many gradients.
    """
    problems = []
    for name, actual, expected in counts:
        if actual > expected:
            problems.append(f"{actual - expected} gradients too many reached {name}")
        elif actual < expected:
            problems.append(f"{name} lacks {expected - actual} gradients" if actual else f"no gradient reached {name}")
    if problems:
        raise RuntimeError(
            f"rank {rank}: internal error: the backward passes of this step gave parameters a wrong number of gradients: "
            f"{'; '.join(problems)}. Please report this"
        )
