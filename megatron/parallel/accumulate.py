"""Where a parameter's gradient goes: one way for every layer, straight into `main_grad`, without autograd hooks.

A parameter that takes part in training carries a `GradSink`. Layers hand their gradients to `accumulate` (a ready gradient),
`accumulate_product` (a weight gradient that is still a matrix product), `accumulate_products` (a sum of products that are made one
by one), `accumulate_sum` (a sum of rows, as a bias has), `accumulate_rows` (that of a table of which a few rows were looked up) or
`accumulate_grouped` (those of many matrices); `through(param)` does the same for parameters that are used in ordinary torch
operations. Autograd itself never sees a parameter's gradient, so nothing is allocated twice. And a schedule decides when a weight
gradient is computed: inside `deferring()` products are deferred.

A parameter without a sink (a layer used on its own) gets its gradient in `.grad`, as usual in torch. One that requires no gradient
is frozen: it gets none, and an operation that has nothing else to do for it need not come here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from megatron.parallel.products import add_rows, weight_product

Work = Callable[[], Callable[[], None] | None]
"""Does a piece of work; or starts the communication that it needs, and returns the rest of the work."""


Start = Callable[[], Callable[[], tuple[torch.Tensor, torch.Tensor]]]
"""Begins to gather, and returns a function that waits for (gradient of the output, input)."""


Make = Callable[[torch.Tensor], torch.Tensor]
"""Makes a linear layer's input of what is kept in its place."""


class Product(Protocol):
    """Makes a weight gradient; see `weight_product`."""

    def __call__(self, grad_output: torch.Tensor, x: torch.Tensor, into: torch.Tensor, *, add: bool) -> None: ...


class GroupedProduct(Protocol):
    """Makes the weight gradients of many matrices from the rows of each, of which there may be none: into [matrices, out, in]."""

    def __call__(
        self, grad_output: torch.Tensor, x: torch.Tensor, counts: Sequence[int], into: torch.Tensor, *, add: bool
    ) -> None: ...


class Deferred:
    """Deferred work, in order, and the memory that waits with it."""

    def __init__(self) -> None:
        self._work: deque[Work] = deque()
        self.num_bytes = 0
        """Bytes of the tensors that are kept for the work still to do."""

    def __len__(self) -> int:
        return len(self._work)

    def add(self, work: Work, num_bytes: int) -> None:
        """Defer one piece."""
        self._work.append(work)
        self.num_bytes += num_bytes

    def run(self) -> None:
        """Do all pieces, first come, first served. The communication of a piece begins before the piece before it is finished.

        The tensors of a piece are freed as soon as it is done.
        """
        rest: Callable[[], None] | None = None
        with torch.no_grad():  # outside of autograd here, with inputs that may require a gradient
            while self._work:
                started = self._work.popleft()()
                if rest is not None:
                    rest()
                rest = started
                del started
            if rest is not None:
                rest()
        self.num_bytes = 0


# Set by the executor around one backward. A plain global: on CUDA, autograd runs backward on a thread of its own.
_deferred: Deferred | None = None


class GradSink:
    """The place of one parameter's gradient.

    `main_grad` has the parameter's shape and the sink's dtype. The first write overwrites it, so it is never zeroed; where there is
    no memory for it yet, `provide` gives it before that write. `on_write` is called after each write, and the receiver counts the
    writes to know when the gradient is complete.
    """

    __slots__ = ("dtype", "main_grad", "on_write", "provide", "written")

    def __init__(self, dtype: torch.dtype, on_write: Callable[[], None], provide: Callable[[], torch.Tensor]) -> None:
        self.dtype, self.on_write, self.provide, self.written = dtype, on_write, provide, False
        self.main_grad: torch.Tensor | None = None

    def add(self, grad: torch.Tensor) -> None:
        """Add a gradient, which has the parameter's shape."""
        main_grad = self._open()
        if self.written:
            main_grad.add_(grad)
        else:
            main_grad.copy_(grad)
        self._wrote()

    def add_products(self, pieces: Iterable[tuple[torch.Tensor, torch.Tensor]], product: Product = weight_product) -> None:
        """Add the sum of products grad_output^T x, with grad_output [n, out] and x [n, in], to a gradient of out * in elements.
        Each is added before the next is asked for; all together are one write."""
        main_grad = self._open()
        for grad_output, x in pieces:
            product(grad_output, x, main_grad.view(-1, x.shape[-1]), add=self.written)
            self.written = True
        self._wrote()

    def add_grouped(self, grad_output: torch.Tensor, x: torch.Tensor, counts: Sequence[int], product: GroupedProduct) -> None:
        """Add to each matrix of a gradient [matrices x out, in] the product of its rows; see `accumulate_grouped`."""
        main_grad = self._open()
        product(grad_output, x, counts, main_grad.view(len(counts), -1, x.shape[-1]), add=self.written)
        self._wrote()

    def add_sum(self, rows: torch.Tensor) -> None:
        """Add the sum of rows [n, out] to a gradient of `out` elements, in the sink's dtype: a 16-bit sum over all tokens would
        lose digits, or overflow. The first is summed up where it belongs."""
        main_grad = self._open().view(-1)
        if self.written:
            main_grad.add_(rows.sum(0, dtype=main_grad.dtype))
        else:
            torch.sum(rows, 0, dtype=main_grad.dtype, out=main_grad)
        self._wrote()

    def add_rows(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Add rows [n, h], in the sink's dtype, to those that `ids` [n] name; the others get nothing."""
        main_grad = self._open()
        add_rows(main_grad if self.written else main_grad.zero_(), ids, rows)
        self._wrote()

    def _open(self) -> torch.Tensor:
        if self.main_grad is None:
            self.main_grad = self.provide()
        return self.main_grad

    def _wrote(self) -> None:
        self.written = True
        self.on_write()


def sink_of(param: torch.Tensor) -> GradSink | None:
    """The parameter's sink, if it has one."""
    return getattr(param, "grad_sink", None)


def grad_dtype(param: torch.Tensor) -> torch.dtype:
    """Dtype in which a parameter's gradient is summed."""
    sink = sink_of(param)
    return param.dtype if sink is None else sink.dtype


def is_deferring() -> bool:
    """Whether weight-gradient products are being deferred."""
    return _deferred is not None


def accumulate(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Add a ready gradient, which has the parameter's shape."""
    sink = sink_of(param)
    if not param.requires_grad:
        return
    if sink is not None:
        sink.add(grad)
    elif param.grad is None:
        param.grad = grad.to(param.dtype, copy=True)  # autograd may hand the same memory to another parameter
    else:
        param.grad += grad


def accumulate_products(
    param: torch.Tensor, pieces: Iterable[tuple[torch.Tensor, torch.Tensor]], product: Product = weight_product
) -> None:
    """Add a weight gradient that comes as a sum of products grad_output^T x, now, whatever is being deferred. For its receiver it
    is one gradient.

    Args:
        param: the weight, of out * in elements.
        pieces: ([n, out], [n, in]) of some rows each; the memory of a piece may be used again for the next.
        product: makes each of them.
    """
    if not param.requires_grad:
        for _ in pieces:  # what makes them does more than that
            pass
        return
    _collect(param, lambda sink: sink.add_products(pieces, product))


def accumulate_grouped(
    param: torch.Tensor, grad_output: torch.Tensor, x: torch.Tensor, counts: Sequence[int], product: GroupedProduct
) -> None:
    """Add the weight gradients of many matrices [matrices x out, in], now: for each grad_output^T x of its rows, of which there may
    be none.

    Args:
        grad_output: [n, out].
        x: [n, in].
        counts: rows of each matrix, n in all, in their order.
        product: computes all of them.
    """
    _collect(param, lambda sink: sink.add_grouped(grad_output, x, counts, product))


def accumulate_sum(param: torch.Tensor, rows: torch.Tensor) -> None:
    """Add a gradient that is the sum of rows [n, out], such as a bias's. The parameter has `out` elements."""
    _collect(param, lambda sink: sink.add_sum(rows))


def accumulate_rows(param: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Add the gradient of a table [v, h] of which rows were looked up: rows [n, h] for ids [n], in `grad_dtype`."""
    _collect(param, lambda sink: sink.add_rows(ids, rows))


def _collect(param: torch.Tensor, add: Callable[[GradSink], None]) -> None:
    """Add to the parameter's sink or, where it has none, by way of a passing one to `.grad`."""
    sink = sink_of(param)
    if not param.requires_grad:
        return
    if sink is not None:
        add(sink)
        return
    passing = GradSink(param.dtype, lambda: None, lambda: torch.empty_like(param, requires_grad=False))
    add(passing)
    assert passing.main_grad is not None
    accumulate(param, passing.main_grad)


def now_or_deferred(work: Work, *, keeps: tuple[torch.Tensor, ...] = ()) -> None:
    """Do a part of a weight gradient now or, inside `deferring()`, when the schedule says so.

    Args:
        keeps: the tensors that the work holds on to, for the count of memory.
    """
    if _deferred is not None:
        _deferred.add(work, sum(tensor.nbytes for tensor in keeps))
    elif (rest := work()) is not None:
        rest()


def accumulate_product(
    param: torch.Tensor,
    grad_output: torch.Tensor,
    x: torch.Tensor,
    start: Start | None = None,
    *,
    make: Make | None = None,
    product: Product = weight_product,
) -> None:
    """Add the weight gradient grad_output^T x of a linear layer now or, inside `deferring()`, when the schedule says so.

    Args:
        param: the weight, of out * in elements.
        grad_output: [..., out], as this rank keeps it.
        x: the layer's input, [..., in], as this rank keeps it; or what it is made of.
        start: where one of the two is only a part, begins to gather it and returns what waits for both as a whole, with the same
            number of rows.
        make: without `start`, makes the input of x.
        product: what computes it.
    """

    def finish(whole: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        rows, inputs = (tensor.flatten(0, -2) for tensor in whole())
        accumulate_products(param, [(rows, inputs)], product)

    def work() -> Callable[[], None] | None:
        if start is not None:
            return partial(finish, start())
        finish(lambda: (grad_output, x if make is None else make(x)))
        return None

    now_or_deferred(work, keeps=(grad_output, x))


@contextmanager
def deferring() -> Iterator[Deferred]:
    """Defer weight-gradient products instead of computing them. The caller runs them later."""
    global _deferred
    assert _deferred is None, "deferring() does not nest"
    _deferred = deferred = Deferred()
    try:
        yield deferred
    finally:
        _deferred = None


class _Through(torch.autograd.Function):
    """Forward: the parameter itself. Backward: its gradient goes to `accumulate`, and autograd gets none."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.param = param
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:  # type: ignore[override]
        accumulate(ctx.param, grad)


def through(param: nn.Parameter) -> torch.Tensor:
    """The parameter for use in an ordinary torch operation. Its gradient goes to `accumulate`."""
    return _Through.apply(param) if param.requires_grad else param


# ---- Counts of the gradients that reach some parameters: they tell when those of a microbatch are complete, and that none is
# missing.


class WriteCount:
    """Counts how often the parameters of a bucket got a gradient in a step.

    Args:
        uses: how often each gets one in a microbatch.
    """

    def __init__(self, uses: Sequence[int]) -> None:
        self.uses = list(uses)
        self.start()

    def start(self) -> None:
        """Begin a new step."""
        self.writes = [0] * len(self.uses)
        self.rounds = 0
        """Number of microbatches whose gradients are all there."""
        self._left = len(self.uses)

    def add(self, number: int) -> bool:
        """Count one gradient; returns whether this completes the gradients of one more microbatch.

        With deferred weight gradients, other gradients may be microbatches ahead of these.
        """
        self.writes[number] += 1
        if self.writes[number] != self.uses[number] * (self.rounds + 1):
            return False
        self._left -= 1
        if self._left:
            return False
        self.rounds += 1
        self._left = sum(writes < uses * (self.rounds + 1) for writes, uses in zip(self.writes, self.uses, strict=True))
        return True


def check_writes(rank: int, counts: Iterable[tuple[str, int, int]]) -> None:
    """Check that nothing is missing.

    Args:
        counts: name of a parameter, gradients that reached it in this step, gradients that should have.

    Raises:
        RuntimeError: a parameter got too few or too many.
    """
    words = []
    for name, found, wanted in counts:
        if found > wanted:
            words.append(f"{found - wanted} gradients too many reached {name}")
        elif found < wanted:
            words.append(f"{name} lacks {wanted - found} gradients" if found else f"no gradient reached {name}")
    if words:
        raise RuntimeError(f"rank {rank}: the backward passes of this step are incomplete: {'; '.join(words)}")
