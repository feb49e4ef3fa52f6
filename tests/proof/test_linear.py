"""Column- and row-parallel layers over two ranks against torch's linear layer, and the operation under both on one."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from megatron.parallel.accumulate import deferring
from megatron.parallel.context import SELF_GROUP, ParallelContext, make_context
from megatron.parallel.overlap import RingOverlap
from megatron.parallel.params import ParamTable, Scope, materialize
from megatron.parallel.topology import Topology
from megatron.precision.gemms import DEFAULT_GEMMS
from megatron.spec.weights import build_column_parallel_linear, build_row_parallel_linear
from megatron.tensor_parallel.layers import ColumnParallelLinear, LinearLayer, RowParallelLinear
from megatron.tensor_parallel.linear import RecomputableInput, parallel_linear
from tests.support.lone_rank import CPU, lone_rank
from tests.support.sinks import sink_over
from tests.support.warm import run_forked_ranks

SEQ, BATCH, IN, OUT = 6, 2, 4, 10
STEPS = 2


def values(*shape: int, key: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(key))


def error(found: torch.Tensor | None, exact: torch.Tensor | None) -> float:
    assert found is not None and exact is not None
    return ((found.double() - exact).norm() / exact.norm()).item()


@dataclass(frozen=True)
class Case:
    """A layer and how it runs."""

    kind: str
    bias: bool
    sequence_parallel: bool
    halves: int = 1
    overlap: bool = False

    @property
    def lead(self) -> tuple[int, ...]:
        return (self.halves,) if self.halves > 1 else ()


CASES = [
    Case(kind, bias, sp, halves)
    for kind, bias, sp, halves in itertools.product(("column", "row"), (True, False), (True, False), (1, 2))
    if kind == "column" or halves == 1
]
CASES += [replace(case, overlap=True) for case in CASES if case.sequence_parallel]


def expected(case: Case) -> dict[str, torch.Tensor]:
    """The whole layer in one process by torch, gradients summed over the steps."""
    weight = values(*case.lead, OUT, IN, key=1).requires_grad_()
    bias = values(*case.lead, OUT, key=2).requires_grad_() if case.bias else None
    found: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        x = values(SEQ, BATCH, IN, key=3 + step).requires_grad_()
        y = F.linear(x, weight.flatten(0, -2), None if bias is None else bias.flatten()).unflatten(-1, (*case.lead, OUT))
        y.backward(values(SEQ, BATCH, *case.lead, OUT, key=20 + step))
        assert x.grad is not None
        found |= {f"y{step}": y.detach(), f"dx{step}": x.grad}
    assert weight.grad is not None
    return found | {"weight": weight.grad} | ({"bias": bias.grad} if bias is not None and bias.grad is not None else {})


def part(tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    return tensor.chunk(2, dim)[rank].clone()


def layer_of(case: Case, context: ParallelContext) -> tuple[nn.Module, ParamTable]:
    """The layer with this rank's part of the weights, and sinks."""
    table = ParamTable()
    if case.kind == "column":
        weights = build_column_parallel_linear("layer", IN, OUT, bias=case.bias, std=1.0, num_halves=case.halves)
    else:
        weights = build_row_parallel_linear("layer", IN, OUT, bias=case.bias, std=1.0)
    by_name = {name: replace(weight, name=name) for weight in weights for name in [weight.name.removeprefix("layer.")]}
    scope = Scope(context, table, by_name, torch.float64, case.sequence_parallel, RingOverlap() if case.overlap else None)
    layer: nn.Module = ColumnParallelLinear(scope) if case.kind == "column" else RowParallelLinear(scope)
    materialize(layer, table, CPU)
    for entry in table:
        box = entry.record.get_local_slice(context.axis_sizes, context.coordinates)
        whole = values(*entry.record.shape, key=1 if entry.record.name == "weight" else 2)
        with torch.no_grad():
            entry.param.copy_(whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))])
        entry.param.grad_sink = sink_over(torch.full_like(entry.param, torch.nan))  # type: ignore[attr-defined]
    return layer, table


def deferred_is_the_same(case: Case, context: ParallelContext, x: torch.Tensor, dy: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether one step with a deferred weight gradient gives the same bits as one without."""
    grads = []
    for defer in (False, True):
        layer, table = layer_of(case, context)
        leaf = x.detach().clone().requires_grad_()
        out = layer(leaf * 1.0)
        if defer:
            with deferring() as put_off:
                out.backward(dy)
            assert len(put_off) == 1 and table["weight"].param.grad_sink.main_grad.isnan().all()  # type: ignore[attr-defined]
            put_off.run()
        else:
            out.backward(dy)
        assert torch.equal(out.detach(), y)
        grads.append([leaf.grad, *(entry.param.grad_sink.main_grad for entry in table)])  # type: ignore[attr-defined]
    return all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def remade_is_the_same(case: Case, context: ParallelContext, x: torch.Tensor, dy: torch.Tensor) -> bool:
    """Whether an input that is made again gives the same bits, however large what it is made of. Put off, nothing more is kept."""
    same = True
    for source, make in ((x, torch.tanh), (torch.stack([x, x + 1], 2), lambda s: s[:, :, 0] * s[:, :, 1])):
        for defer in (False, True):
            grads, made, kept = [], [0], []

            def again(s: torch.Tensor, make: Any = make, made: list[int] = made) -> torch.Tensor:
                made[0] += 1
                return make(s)

            for remade in (False, True):
                layer, table = layer_of(case, context)
                leaf = source.detach().clone().requires_grad_()
                out = layer(RecomputableInput.of(again, leaf * 1.0) if remade else make(leaf * 1.0))
                with deferring() if defer else contextlib.nullcontext() as put_off:
                    out.backward(dy)
                if put_off is not None:
                    kept.append(put_off.num_bytes)
                    put_off.run()
                grads.append([leaf.grad, *(entry.param.grad_sink.main_grad for entry in table)])  # type: ignore[attr-defined]
            same &= made == [2] and len(set(kept)) < 2 and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    return same


def on_two_ranks(rank: int) -> list[dict[str, Any]]:
    context = make_context(Topology(tp=2), rank, CPU)
    found = []
    for case in CASES:
        layer, table = layer_of(case, context)
        result: dict[str, Any] = {}
        for step in range(STEPS):
            x, dy = values(SEQ, BATCH, IN, key=3 + step), values(SEQ, BATCH, *case.lead, OUT, key=20 + step)
            if case.kind == "column":
                x, dy = part(x, 0, rank) if case.sequence_parallel else x, part(dy, -1, rank)
            else:
                x, dy = part(x, -1, rank), part(dy, 0, rank) if case.sequence_parallel else dy
            x.requires_grad_()
            y = layer(x)
            y.backward(dy)
            result |= {f"y{step}": y.detach(), f"dx{step}": x.grad}
            result["bits"] = result.get("bits", True) and deferred_is_the_same(case, context, x, dy, y.detach())
        result["remade"] = remade_is_the_same(case, context, x, dy)
        for entry in table:
            result[entry.record.name] = entry.param.grad_sink.main_grad  # type: ignore[attr-defined]
            result[f"{entry.record.name} partial"] = "tp" in entry.record.partial_axes
            assert entry.param.grad is None
        found.append(result)
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def two() -> list[list[dict[str, Any]]]:
    return run_forked_ranks(2, on_two_ranks, timeout=60.0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_equal_one_plain_layer(two: list[list[dict[str, Any]]], case: Case) -> None:
    """Outputs and gradients of two steps; the first write of a gradient overwrites, the second adds."""
    whole = expected(case)
    number = CASES.index(case)
    column = case.kind == "column"
    for rank in range(2):
        found = two[rank][number]
        wanted: dict[str, torch.Tensor] = {}
        for step in range(STEPS):
            y, dx = whole[f"y{step}"], whole[f"dx{step}"]
            if column:
                wanted[f"y{step}"], wanted[f"dx{step}"] = part(y, -1, rank), part(dx, 0, rank) if case.sequence_parallel else dx
            else:
                wanted[f"y{step}"], wanted[f"dx{step}"] = part(y, 0, rank) if case.sequence_parallel else y, part(dx, -1, rank)
        wanted["weight"] = part(whole["weight"], -2 if column else -1, rank)
        if case.bias and column:
            wanted["bias"] = part(whole["bias"], -1, rank)
        for name, tensor in wanted.items():
            assert error(found[name], tensor) < 1e-14, name
        assert not found["weight partial"] and found["bits"] and found["remade"]
    if case.bias and not column:
        first, second = two[0][number], two[1][number]
        assert first["bias partial"] is second["bias partial"] is case.sequence_parallel
        total = first["bias"] + second["bias"] if case.sequence_parallel else first["bias"]
        torch.testing.assert_close(total, whole["bias"], rtol=1e-13, atol=1e-13)
        assert case.sequence_parallel or torch.equal(first["bias"], second["bias"]), "replicas"


@pytest.mark.parametrize("case", [Case("column", True, False, 2), Case("row", True, False)], ids=str)
def test_a_tensor_group_of_one_equals_the_plain_layer(case: Case) -> None:
    whole = expected(case)
    layer, table = layer_of(case, lone_rank())
    for step in range(STEPS):
        x = values(SEQ, BATCH, IN, key=3 + step).requires_grad_()
        y = layer(x)
        y.backward(values(SEQ, BATCH, *case.lead, OUT, key=20 + step))
        torch.testing.assert_close(y.detach(), whole[f"y{step}"], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(x.grad, whole[f"dx{step}"], rtol=1e-13, atol=1e-13)
    for entry in table:
        found = entry.param.grad_sink.main_grad  # type: ignore[attr-defined]
        torch.testing.assert_close(found, whole[entry.record.name], rtol=1e-13, atol=1e-13)


def test_records_of_the_layers() -> None:
    """Biases do not decay; the halves of a gated layer are split each by itself."""
    _, table = layer_of(Case("column", True, False, 2), lone_rank(Topology(tp=2)))
    weight, bias = table["weight"].record, table["bias"].record
    assert (weight.shape, bias.shape) == ((2, OUT, IN), (2, OUT))
    assert [split.dim for split in weight.splits + bias.splits] == [1, 1]
    assert weight.has_weight_decay and not bias.has_weight_decay
    assert table["weight"].param.shape == (2, OUT // 2, IN)
    _, table = layer_of(Case("row", True, True), lone_rank(Topology(tp=2)))
    assert table["weight"].record.splits[0].dim == 1 and not table["bias"].record.splits
    assert table["weight"].record.has_weight_decay and not table["bias"].record.has_weight_decay


# ---- the operation


def test_without_sinks_gradients_are_in_grad() -> None:
    weight, bias = nn.Parameter(values(OUT, IN, key=1)), nn.Parameter(values(OUT, key=2))
    plain = nn.Linear(IN, OUT, dtype=torch.float64)
    plain.weight, plain.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
    for step in range(2):
        x = values(SEQ, BATCH, IN, key=3 + step)
        parallel_linear(x, weight, bias, SELF_GROUP).square().sum().backward()
        plain(x).square().sum().backward()
    torch.testing.assert_close(weight.grad, plain.weight.grad)
    torch.testing.assert_close(bias.grad, plain.bias.grad)


@pytest.mark.parametrize("wanted", [False, True])
def test_the_input_gradient_is_computed_only_for_those_who_want_it(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[bool] = []
    product = DEFAULT_GEMMS.compute_input_grad

    def counted(*args: torch.Tensor) -> torch.Tensor:
        computed.append(True)
        return product(*args)

    monkeypatch.setattr(DEFAULT_GEMMS, "compute_input_grad", counted)
    weight = nn.Parameter(values(OUT, IN, key=1))
    x = values(SEQ, BATCH, IN, key=3).requires_grad_(wanted)
    parallel_linear(x, weight, None, SELF_GROUP).sum().backward()
    assert computed == [True] * wanted
    assert weight.grad is not None and (x.grad is not None) == wanted


def test_a_gradient_that_is_not_contiguous() -> None:
    """The backward of a sum gives an expanded tensor, that of a transpose a strided one."""
    weight = nn.Parameter(values(OUT, IN, key=1))
    x = values(SEQ, BATCH, IN, key=3)
    for use in (lambda y: y.sum(), lambda y: (y.transpose(0, 2) * values(OUT, BATCH, SEQ, key=4)).sum()):
        weight.grad = None
        use(parallel_linear(x, weight, None, SELF_GROUP)).backward()
        plain = weight.detach().clone().requires_grad_()
        use(F.linear(x, plain)).backward()
        torch.testing.assert_close(weight.grad, plain.grad)


def test_deferred_weight_gradients_are_the_same_bits() -> None:
    """Two layers, so that the second one's input has a graph behind it; with sinks and without."""
    for with_sinks in (False, True):
        found: list[list[torch.Tensor]] = []
        for defer in (False, True):
            weights = [nn.Parameter(values(IN, IN, key=key)) for key in (1, 2)]
            for weight in weights if with_sinks else ():
                weight.grad_sink = sink_over(torch.zeros_like(weight))  # type: ignore[attr-defined]
            for step in range(2):
                x = values(SEQ, BATCH, IN, key=3 + step).requires_grad_()
                y = parallel_linear(parallel_linear(x, weights[0], None, SELF_GROUP).tanh(), weights[1], None, SELF_GROUP)
                if defer:
                    with deferring() as put_off:
                        y.square().sum().backward()
                    assert len(put_off) == 2
                    put_off.run()
                else:
                    y.square().sum().backward()
            kept: list[torch.Tensor] = [w.grad_sink.main_grad if with_sinks else w.grad for w in weights]  # type: ignore
            assert not any(tensor.requires_grad for tensor in kept)
            found.append(kept)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("widened", [False, True])
def test_an_input_is_made_again_when_its_product_is_computed_unless_that_takes_less_memory(widened: bool) -> None:
    """A deferred product keeps what is smaller, the input or what it is made of. Of two that are as large it keeps what is kept
    anyway."""
    made: list[torch.Size] = []

    def make(source: torch.Tensor) -> torch.Tensor:
        made.append(source.shape)
        return source.tanh()[..., :IN]

    source, weight = values(SEQ, BATCH, IN * (1 + widened), key=3), nn.Parameter(values(OUT, IN, key=1))
    y = parallel_linear(RecomputableInput.of(make, source), weight, None, SELF_GROUP)
    with deferring() as put_off:
        y.sum().backward()
    assert len(made) == 1 + widened, "at once what frees the larger source"
    put_off.run()
    assert len(made) == 2
    plain = weight.detach().clone().requires_grad_()
    F.linear(source.tanh()[..., :IN], plain).sum().backward()
    torch.testing.assert_close(weight.grad, plain.grad)


def test_a_bias_before_a_sum_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="would count once a rank"):
        bias = nn.Parameter(values(OUT, key=2))
        parallel_linear(values(SEQ, IN, key=3), nn.Parameter(values(OUT, IN, key=1)), bias, SELF_GROUP, output_mode="sum")


# ---- 16 bits


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)])
def test_16_bit_layers_are_within_rounding_of_float64(dtype: torch.dtype, rounding: float) -> None:
    """float16 sums of 3,000 products must not be made in float16; the main gradient is a float32 sum over microbatches."""
    inner, out = 3000, 8
    weight, bias = nn.Parameter(values(out, inner, key=1).to(dtype)), nn.Parameter(values(out, key=2).to(dtype))
    sinks = [sink_over(torch.zeros(p.shape, dtype=torch.float32)) for p in (weight, bias)]
    weight.grad_sink, bias.grad_sink = sinks  # type: ignore[attr-defined]
    exact_weight, exact_bias = weight.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    for step in range(3):
        x = (values(40, inner, key=3 + step) / 8).to(dtype).requires_grad_()
        dy = values(40, out, key=9 + step).to(dtype)
        exact_x = x.detach().double().requires_grad_()
        y, exact = parallel_linear(x, weight, bias, SELF_GROUP), F.linear(exact_x, exact_weight, exact_bias)
        y.backward(dy)
        exact.backward(dy.double())
        assert y.dtype == dtype and x.grad is not None and x.grad.dtype == dtype
        assert error(y, exact.detach()) < rounding and error(x.grad, exact_x.grad) < rounding
    assert error(sinks[0].main_grad, exact_weight.grad) < (1e-6 if dtype == torch.float16 else rounding)
    assert error(sinks[1].main_grad, exact_bias.grad) < rounding


def test_float16_products_on_a_cpu_are_made_in_float32() -> None:
    """A float16 matrix product there takes a hundred times as long."""
    seen: set[torch.dtype] = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_, torch.ops.aten.bmm):
                seen.update(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
            return function(*args, **(kwargs or {}))

    weight, bias = nn.Parameter(values(OUT, IN, key=1).half()), nn.Parameter(values(OUT, key=2).half())
    for with_sink in (False, True):
        if with_sink:
            weight.grad_sink = sink_over(torch.zeros(OUT, IN))  # type: ignore[attr-defined]
        for _ in range(2):
            x = values(SEQ, BATCH, IN, key=3).half().requires_grad_()
            with Watch():
                parallel_linear(x, weight, bias, SELF_GROUP).float().square().sum().backward()
    assert seen == {torch.float32}


@pytest.mark.full("test_compiled.py::test_tracing_changes_no_bit_and_all_layers_share_it, of whole layers")
@pytest.mark.usefixtures("compiles_before_forks")
def test_compiled_layers_share_one_graph_and_have_the_same_bits() -> None:
    """A layer enters its compiled operation as a handle: a second one takes the first one's graph, and its own parameters."""
    graphs = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    for number in range(2):
        layer, table = layer_of(Case("column", bias=True, sequence_parallel=False), lone_rank())
        assert isinstance(layer, LinearLayer)
        layer.create_handle(CPU)
        layer.compile(backend=graphs, fullgraph=True)
        leaf, found = values(SEQ, BATCH, IN, key=7 + number).requires_grad_(), []
        for forward in (layer.forward, layer):
            for entry in table:
                entry.param.grad_sink = sink_over(torch.empty_like(entry.param))  # type: ignore[attr-defined]
            forward(leaf.tanh()).sin().sum().backward()
            found.append([leaf.grad, *(entry.param.grad_sink.main_grad.clone() for entry in table)])  # type: ignore[attr-defined]
            leaf.grad = None
        assert all(torch.equal(eager, compiled) for eager, compiled in zip(*found, strict=True)), "not the same bits"
    assert graphs.frame_count == 1
