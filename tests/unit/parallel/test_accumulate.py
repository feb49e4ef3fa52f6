"""Where gradients go: sinks, ordinary `.grad`, deferred products; and the products themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from megatron.parallel import matmul
from megatron.parallel.accumulate import (
    GradSink,
    accumulate,
    accumulate_product,
    accumulate_product_sum,
    accumulate_rows,
    accumulate_sum,
    deferring,
    get_grad_sink,
    route_grad,
    run_or_defer,
)
from megatron.parallel.matmul import compute_input_product, compute_weight_product, has_float32_output, linear, matmul_into
from megatron_lab.planner.storages import StorageLedger
from tests.support.lone_rank import CPU
from tests.support.sinks import sink_over, summed


def values(*shape: int, key: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(key))


def with_sink(param: nn.Parameter, dtype: torch.dtype | None = None) -> tuple[GradSink, list[int]]:
    """A sink full of NaN, and the list that grows with each write."""
    writes: list[int] = []
    main_grad = torch.full(param.shape, torch.nan, dtype=dtype or param.dtype)
    sink = sink_over(main_grad, lambda: writes.append(len(writes)))
    param.grad_sink = sink  # type: ignore[attr-defined]
    return sink, writes


def test_the_first_write_overwrites_and_the_next_ones_add() -> None:
    param = nn.Parameter(values(3, 4))
    assert get_grad_sink(param) is None
    sink, writes = with_sink(param)
    assert get_grad_sink(param) is sink and not sink.is_written
    first, second = values(3, 4, key=1), values(3, 4, key=2)
    accumulate(param, first)
    assert torch.equal(summed(sink), first) and sink.is_written
    accumulate(param, second)
    assert torch.equal(summed(sink), first + second)
    sink.is_written = False  # the next step
    accumulate(param, second)
    assert torch.equal(summed(sink), second)
    assert len(writes) == 3 and param.grad is None


@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4)])
def test_products_overwrite_and_add_too(shape: tuple[int, ...]) -> None:
    param = nn.Parameter(values(*shape))
    sink, writes = with_sink(param)
    pairs = [(values(5, 6, key=key), values(5, 4, key=key + 10)) for key in (1, 2)]
    for grad_output, x in pairs:
        accumulate_product(param, grad_output, x)
    expected = sum(grad_output.t() @ x for grad_output, x in pairs)
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(summed(sink), expected.view(shape), rtol=1e-14, atol=1e-14)
    assert len(writes) == 2


@pytest.mark.parametrize("with_a_sink", [True, False])
def test_pieces_of_a_product_are_one_write(with_a_sink: bool) -> None:
    """Their memory is used again; nothing is deferred."""
    param = nn.Parameter(values(6, 4))
    sink, writes = with_sink(param) if with_a_sink else (None, [])
    grad_output, x, memory = values(5, 6, key=1), values(5, 4, key=2), torch.empty(2, 6, dtype=torch.float64)

    def pieces() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for rows in (slice(0, 2), slice(2, 4), slice(4, 5)):
            yield memory[: rows.stop - rows.start].copy_(grad_output[rows]), x[rows]

    for _ in range(2):
        with deferring() as deferred:
            accumulate_product_sum(param, pieces())
        assert not len(deferred)
    found = summed(sink) if sink is not None else param.grad
    torch.testing.assert_close(found, 2 * grad_output.t() @ x, rtol=1e-14, atol=1e-14)
    assert len(writes) == 2 * with_a_sink


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sum_of_rows_is_made_in_the_dtype_of_its_place(dtype: torch.dtype) -> None:
    """The first where it belongs, without a tensor in between; 4,096 ones would be 256 in bfloat16."""
    wide = torch.promote_types(dtype, torch.float32)
    with StorageLedger() as ledger:
        param, rows = nn.Parameter(torch.zeros(2, 3, dtype=dtype)), torch.ones(4096, 6, dtype=dtype)
        param.grad_sink = sink = sink_over(torch.full((2, 3), torch.nan, dtype=wide))  # type: ignore[attr-defined]
        ledger.take_span()
        accumulate_sum(param, rows)
        assert ledger.take_span().peak_bytes == (0 if dtype == wide else 2 * rows.nbytes), "the CPU widens what it sums up"
    for times in (1, 2):
        assert torch.equal(summed(sink), torch.full((2, 3), 4096.0 * times, dtype=wide))
        accumulate_sum(param, rows)


def test_the_first_rows_of_a_step_make_the_others_zero() -> None:
    param = nn.Parameter(values(4, 2))
    sink, writes = with_sink(param)
    rows = values(3, 2, key=1)
    accumulate_rows(param, torch.tensor([2, 0, 2]), rows)
    expected = torch.stack([rows[1], torch.zeros(2), rows[0] + rows[2], torch.zeros(2)])
    assert torch.equal(summed(sink), expected)
    accumulate_rows(param, torch.tensor([3]), rows[:1])
    assert torch.equal(summed(sink), expected + torch.stack([*torch.zeros(3, 2), rows[0]])) and len(writes) == 2


@pytest.mark.parametrize("with_a_sink", [True, False])
def test_a_parameter_in_ordinary_operations(with_a_sink: bool) -> None:
    """Used twice, its gradient is complete when it is handed over: one write."""
    param = nn.Parameter(values(4))
    sink, writes = with_sink(param) if with_a_sink else (None, [])
    x = values(3, 4, key=1)
    for _ in range(2):
        weight = route_grad(param)
        assert torch.equal(weight, param) and weight.data_ptr() == param.data_ptr()
        (x * weight + weight.square()).sum().backward()
    expected = 2 * (x.sum(0) + 3 * 2 * param.detach())
    found = summed(sink) if sink is not None else param.grad
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    if sink is not None:
        assert param.grad is None and len(writes) == 2


def test_without_a_sink_parameters_do_not_share_the_memory_of_a_gradient() -> None:
    """Autograd gives both terms of a sum the same gradient tensor."""
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    for gradient in (torch.ones(3), torch.full((3,), 10.0)):
        (route_grad(a) + route_grad(b)).backward(gradient)
    assert a.grad is not None and b.grad is not None
    assert a.grad.tolist() == b.grad.tolist() == [11.0] * 3


def test_without_a_sink_an_expanded_gradient_is_kept_as_a_whole_tensor() -> None:
    param = nn.Parameter(torch.zeros(3))
    for _ in range(2):
        route_grad(param).sum().backward()
    assert param.grad is not None and param.grad.tolist() == [2.0] * 3


def test_a_float32_sink_of_a_16_bit_parameter_keeps_small_gradients() -> None:
    """A thousand microbatches of 2^-10 beside a first one of 1: bfloat16 would not move from 1."""
    param = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    sink, _ = with_sink(param, torch.float32)
    accumulate(param, torch.ones(2, dtype=torch.bfloat16))
    for _ in range(1024):
        accumulate(param, torch.full((2,), 2.0**-10, dtype=torch.bfloat16))
    assert summed(sink).tolist() == [2.0, 2.0]


# ---- deferring


def test_only_products_are_deferred_and_only_inside() -> None:
    weight, bias = nn.Parameter(values(6, 4)), nn.Parameter(values(4))
    (sink, writes), (_, bias_writes) = with_sink(weight), with_sink(bias)
    asked: list[str] = []
    part, dy = values(3, 4, key=4), values(5, 6, key=1)

    def start() -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        asked.append("start")
        return lambda: (dy, values(5, 4, key=2))

    with deferring() as put_off:
        accumulate_product(weight, dy, part, start)
        accumulate(bias, values(4, key=3))
        route_grad(bias).sum().backward()
        assert len(put_off) == 1 and not writes and len(bias_writes) == 2 and not asked
    assert put_off.num_bytes == (5 * 6 + 3 * 4) * 8, "what it keeps: the output's gradient, and the input as this rank has it"
    accumulate_product(weight, dy, part, start)
    assert len(put_off) == 1 and len(writes) == 1
    put_off.run()
    assert len(put_off) == put_off.num_bytes == 0
    torch.testing.assert_close(summed(sink), 2 * values(5, 6, key=1).t() @ values(5, 4, key=2))


def test_communication_of_the_next_piece_begins_before_this_one_is_finished() -> None:
    heard: list[str] = []

    def piece(name: str, rests: bool) -> Callable[[], Callable[[], None] | None]:
        def work() -> Callable[[], None] | None:
            heard.append(f"start {name}")
            return (lambda: heard.append(f"finish {name}")) if rests else None

        return work

    with deferring() as put_off:
        for name, rests in (("a", True), ("b", True), ("c", False), ("d", True)):
            run_or_defer(piece(name, rests), inputs=(torch.zeros(2),))
    assert put_off.num_bytes == 4 * 8 and not heard
    put_off.run()
    assert heard == ["start a", "start b", "finish a", "start c", "finish b", "start d", "finish d"]
    assert put_off.num_bytes == 0
    run_or_defer(piece("now", True))
    assert heard[-2:] == ["start now", "finish now"]


def test_a_deferred_product_takes_an_input_that_has_a_graph() -> None:
    weight = nn.Parameter(values(6, 4))
    sink, _ = with_sink(weight)
    x = values(5, 4, key=2).requires_grad_() * 2
    with deferring() as put_off:
        accumulate_product(weight, values(5, 6, key=1), x)
        accumulate_product(weight, values(5, 6, key=1), x)
    put_off.run()
    assert not summed(sink).requires_grad
    torch.testing.assert_close(summed(sink), 2 * values(5, 6, key=1).t() @ x.detach())


def test_deferring_does_not_nest_and_ends_with_an_error() -> None:
    with deferring(), pytest.raises(AssertionError, match="does not nest"), deferring():
        pass
    with pytest.raises(KeyError), deferring():
        raise KeyError
    weight = nn.Parameter(values(6, 4))
    _, writes = with_sink(weight)
    accumulate_product(weight, values(5, 6), values(5, 4))
    assert len(writes) == 1, "nothing is deferred any more"


# ---- products


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float64: 1e-14, torch.float32: 5e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.fixture(params=[False, True])
def fast_bfloat16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A processor that multiplies bfloat16 fast, and one that does not."""
    monkeypatch.setattr(matmul, "has_fast_bfloat16", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_within_rounding(dtype: torch.dtype, fast_bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sums, so that one made in 16 bits would be far off; and with few blocks or many."""
    x, weight, bias = values(20, 2, 4000).to(dtype), values(6, 4000, key=1).to(dtype), values(6, key=2).to(dtype)
    exact = x.double() @ weight.double().t()
    for block in (1 << 25, 4 * 4000):
        monkeypatch.setattr(matmul, "_BLOCK_ELEMENTS", block)
        assert error(linear(x, weight), exact) <= ROUNDING[dtype]
        assert error(linear(x, weight, bias), exact + bias.double()) <= ROUNDING[dtype]
        into = torch.empty(40, 6, dtype=dtype)
        assert error(matmul_into(into, x.flatten(0, 1), weight.t(), bias).view(20, 2, 6), exact + bias.double()) <= ROUNDING[dtype]
        back = compute_input_product(x, weight.t().contiguous())
        assert back.dtype == dtype and error(back, exact) <= ROUNDING[dtype]


@pytest.mark.parametrize(("dtype", "wide", "add"), list(itertools.product(DTYPES, (False, True), (False, True))))
def test_weight_products_write_or_add(dtype: torch.dtype, wide: bool, add: bool, fast_bfloat16: bool) -> None:
    """Into the same dtype, or into float32 and wider; rows that are not contiguous too."""
    grad_output, x = values(6, 4000, key=1).to(dtype).t(), values(4000, 5, key=2).to(dtype)
    into = values(6, 5, key=3).to(torch.promote_types(dtype, torch.float32) if wide else dtype)
    exact = grad_output.double().t() @ x.double() + (into.double() if add else 0.0)
    into = into if add else torch.full_like(into, torch.nan)
    before = into.data_ptr()
    compute_weight_product(grad_output, x, into, add=add)
    assert into.data_ptr() == before and error(into, exact) <= 2 * ROUNDING[dtype]


@pytest.mark.parametrize("add", [False, True])
def test_a_product_in_other_bits_is_made_in_blocks(add: bool, fast_bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which take no more memory than they may, and give what the whole gives."""
    rows, block = 40, 3 * 40
    monkeypatch.setattr(matmul, "_BLOCK_ELEMENTS", block)
    with StorageLedger() as ledger:
        grad_output, x, into = values(rows, 70, key=1).bfloat16(), values(rows, 4, key=2).bfloat16(), values(70, 4, key=3).float()
        exact = grad_output.double().t() @ x.double() + (into.double() if add else 0.0)
        ledger.take_span()
        compute_weight_product(grad_output, x, into, add=add)
        # What is made in blocks: the product in 16 bits; or the gradient in 32, beside the whole input.
        assert ledger.take_span().peak_bytes == (block * 2 if fast_bfloat16 else block * 4 + 2 * x.nbytes)
    assert error(into, exact) <= 2 * ROUNDING[torch.bfloat16]


def test_few_rows_are_multiplied_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a token at a time, as when text is generated, widening the weight would take longer than its product."""
    monkeypatch.setattr(matmul, "has_fast_bfloat16", lambda: False)
    for rows, widened in ((1, False), (31, False), (32, True)):
        assert matmul.should_widen(torch.empty(rows, 3, dtype=torch.bfloat16)) == widened
        assert matmul.should_widen(torch.empty(rows, 3, dtype=torch.float16))
        assert not matmul.should_widen(torch.empty(rows, 3)) and not matmul.should_widen(
            torch.empty(rows, 3, device="meta").bfloat16()
        )


def test_on_a_gpu_a_wide_product_is_written_where_it_belongs() -> None:
    """As a plan for one sees it: one operation, and no memory."""
    for add in (False, True):
        with StorageLedger() as ledger:
            grad_output, x = (torch.empty(8, size, dtype=torch.bfloat16, device="meta") for size in (7, 4))
            into = torch.empty(7, 4, device="meta")
            ledger.take_span()
            compute_weight_product(grad_output, x, into, add=add)
        assert ("aten::addmm.dtype_out" if add else "aten::mm.dtype_out") in ledger.op_names
        assert ledger.take_span().peak_bytes == 0
    assert not has_float32_output(CPU, torch.bfloat16)
