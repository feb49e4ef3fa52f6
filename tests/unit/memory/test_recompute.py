"""Regions that run again in backward: what they keep, when they run, what they skip, and that nothing else changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from megatron.memory.recompute import ActivationStore, run_with_recompute, storing_activations
from megatron.parallel.context import make_context
from megatron.parallel.random import DropoutKey, seed_device
from megatron.parallel.topology import Topology
from megatron.precision.gemms import DEFAULT_GEMMS
from megatron.tensor_parallel.linear import parallel_linear

CPU = torch.device("cpu")
Layer = Callable[..., torch.Tensor]


class Log:
    """Layers that note when they run, forward and backward."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.inner: list[weakref.ref[torch.Tensor]] = []

    def layer(self, name: str) -> Layer:
        def run(x: torch.Tensor, *, is_recompute: bool) -> torch.Tensor:
            self.lines.append(name + "'" * is_recompute)
            middle = x.sin()
            self.inner.append(weakref.ref(middle))
            out = middle * middle.exp()
            if out.requires_grad and not is_recompute:
                out.register_hook(lambda grad: self.lines.append(f"-{name}"))
            return out

        return run


def test_each_region_runs_again_when_backward_enters_it_and_the_last_when_it_is_told() -> None:
    for ahead in (False, True):
        log, x = Log(), torch.linspace(0, 1, 5, dtype=torch.float64, requires_grad=True)
        with storing_activations() as kept:
            y = run_with_recompute(log.layer("b"), run_with_recompute(log.layer("a"), x), is_recomputed_ahead=True)
        assert log.lines == ["a", "b"] and [ref() for ref in log.inner] == [None, None], "of a forward only the input is kept"
        if ahead:
            kept.recompute_last()
            assert log.lines == ["a", "b", "b'"]
        y.sum().backward()
        after = ["b'", "-b"] if ahead else ["-b", "b'"]
        assert log.lines == ["a", "b", *after, "-a", "a'"]
        assert all(ref() is None for ref in log.inner), "and nothing after backward"
        found, x.grad = x.grad, None
        plain = Log()
        plain.layer("b")(plain.layer("a")(x, is_recompute=False), is_recompute=False).sum().backward()
        assert found is not None and x.grad is not None and torch.equal(found, x.grad)


def test_without_a_gradient_nothing_is_kept_or_repeated() -> None:
    log = Log()
    with torch.no_grad():
        run_with_recompute(log.layer("a"), torch.ones(3))
    assert log.lines == ["a"]


def test_modules_are_named_before_they_run_again() -> None:
    module, named = torch.nn.Linear(3, 3), []
    x = torch.ones(2, 3, requires_grad=True)
    with storing_activations(ActivationStore(lambda modules: named.append(list(modules)))):
        y = run_with_recompute(lambda x, is_recompute: module(x), x, modules=[module])
    assert not named
    y.sum().backward()
    assert named == [[module]]


def test_the_last_product_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two products, whose results nobody but the next operation reads."""
    group = make_context(Topology(), 0, CPU).group("tp")
    weights = [torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in range(2)]
    products = 0
    product = DEFAULT_GEMMS.compute_output

    def counted(*args: torch.Tensor) -> torch.Tensor:
        nonlocal products
        products += 1
        return product(*args)

    monkeypatch.setattr(DEFAULT_GEMMS, "compute_output", counted)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor, *, is_recompute: bool) -> torch.Tensor:
        return x + parallel_linear(parallel_linear(x, weights[0], None, group).tanh(), weights[1], None, group)

    y = run_with_recompute(run, x)
    assert products == 2
    y.sum().backward()
    assert products == 3


def test_dropout_draws_the_same_mask_again() -> None:
    """And leaves no other draw changed: masks follow from keys."""
    key, x = DropoutKey(1, 2, 3), torch.randn(1000, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor, *, is_recompute: bool) -> torch.Tensor:
        seed_device(CPU, key.get_site_seed(0, "here"))
        return F.dropout(x * x, 0.5)

    for function in (lambda x: run(x, is_recompute=False), lambda x: run_with_recompute(run, x)):
        y = function(x)
        torch.rand(7)
        y.sum().backward()
    assert x.grad is not None
    mask = run(x.detach(), is_recompute=False) != 0
    assert torch.equal(x.grad, 2 * (2 * x.detach() * 2 * mask)), "two backwards with one mask"
