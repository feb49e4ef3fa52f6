"""Layers whose saved tensors are in host memory between forward and backward: what moves and what stays, when it comes back, and
that streams are waited for."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.memory.host_buffers import HostBuffer, HostBufferPool, get_buffer_size
from megatron.memory.offload import create_offloader
from megatron.memory.recompute import ActivationStore, run_with_recompute, storing_activations
from megatron.parallel.accumulate import route_grad
from megatron.pipeline_parallel.executor import Executor, Tensors, find_immediate_backwards, plan_prefetches
from megatron.pipeline_parallel.p2p import TensorSpec
from megatron.spec.operations import Op, OpType, Schedule, add_recompute
from megatron.spec.schedules import SCHEDULES as SCHEDULES_BY_NAME
from megatron.spec.schedules import build_1f1b, build_gpipe, build_schedule
from tests.support.lone_rank import CPU, lone_rank

SHAPE = (4, 16)
BYTES = 4 * 16 * 8
LAYERS = 4
Layer = Callable[[torch.Tensor], torch.Tensor]


def values(seed: int) -> torch.Tensor:
    """Fixed random numbers."""
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Model:
    """A chain of layers, some of them chosen; each saves two results of its own, and its input."""

    def __init__(self, host: HostBufferPool, chosen: int = LAYERS, *, again: bool = False) -> None:
        self.host, self.chosen, self.again = host, chosen, again
        self.log: list[str] = []
        self.inner: list[StorageWeakRef] = []
        self.grads: list[torch.Tensor] = []

    def layer(self, x: torch.Tensor, *, is_recompute: bool = False) -> torch.Tensor:
        middle = x.sin()
        self.inner.append(StorageWeakRef(middle.untyped_storage()))
        return (middle * middle.exp()) * x

    def forward(self, chunk: int, microbatch: int, received: Tensors) -> Tensors:
        x = start = values(microbatch).requires_grad_()
        start.register_hook(lambda grad: self.grads.append(grad.clone()))
        for number in range(LAYERS):
            layer: Layer = self.layer
            last = number == LAYERS - 1
            if self.again:
                layer = functools.partial(run_with_recompute, self.layer, is_recomputed_ahead=last)
            on_host = None
            if number < self.chosen:
                on_host = create_offloader(x, is_last=number == self.chosen - 1, is_recomputed_ahead=self.again and last)
            x = layer(x) if on_host is None else on_host.run(layer, x)
        return {"loss": x.sum()}

    def run(self, schedule: Schedule) -> list[torch.Tensor]:
        """The gradients of the inputs, in the order of the backwards."""
        executor = Executor(lone_rank(), {"hidden": TensorSpec(SHAPE, torch.float64)}, host=self.host)
        executor.recorder = self
        self.grads = []
        executor.run(schedule, self.forward)
        return self.grads

    def start(self, op: Op) -> None:
        self.log.append(f"{op.type}{op.microbatch}")

    def end(self, op: Op) -> None:
        pass


class Stream:
    """Copies that have been asked for and not done; they run as late as they may."""

    def __init__(self, *_: Any) -> None:
        self.todo: list[Callable[[], None]] = []

    def wait_stream(self, other: Stream) -> None:
        """Only for the stream that computes, which on the CPU has done everything so far."""
        assert not other.todo

    def record_event(self) -> Callable[[], None]:
        """A call runs everything before."""
        todo, self.todo = self.todo, []

        def run_all() -> None:
            while todo:
                todo.pop(0)()

        self.todo.append(run_all)
        return run_all

    def wait_event(self, event: Callable[[], None]) -> None:
        """The stream that computes cannot go on before."""
        if self is Late.compute_stream:
            event()
        else:
            self.todo.append(event)


class Late(HostBufferPool):
    """Copies run when computation waits for them, and not before: neither side may be freed until then."""

    compute_stream = Stream()

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self._now = Late.compute_stream
        self.device_module = SimpleNamespace(Stream=Stream, current_stream=lambda device: self._now, stream=self._use_stream)

    @contextmanager
    def _use_stream(self, stream: Stream) -> Iterator[None]:
        self._now = stream
        yield
        self._now = Late.compute_stream

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # A view of its own would keep memory alive.
        alive = [weakref.ref(one.untyped_storage()) for one in (target, source)]
        begin_to, begin_source, size = target.storage_offset(), source.storage_offset(), len(target)

        def run() -> None:
            storages = [storage for ref in alive if (storage := ref()) is not None]
            assert len(storages) == 2, "freed while a copy is under way"
            there, here = (torch.empty(0, dtype=torch.uint8).set_(one) for one in storages)
            there[begin_to : begin_to + size] = here[begin_source : begin_source + size]

        self._now.todo.append(run)


class Watched(HostBufferPool):
    """Notes what moves."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.sizes: list[int] = []
        self.log: list[str] = []

    def start_copy_to_host(self, source: torch.Tensor) -> HostBuffer:
        self.sizes.append(len(source))
        return super().start_copy_to_host(source)

    def record_copies_to_host(self) -> Any:
        self.log.append("away")
        return super().record_copies_to_host()

    def start_copy_to_device(self, *args: Any) -> Any:
        self.log.append("back")
        return super().start_copy_to_device(*args)


@contextmanager
def one_forward(host: HostBufferPool, **named: Any) -> Iterator[ActivationStore]:
    with storing_activations(ActivationStore(host_pool=host, **named)) as kept:
        yield kept


def test_between_forward_and_backward_the_device_holds_nothing_of_it() -> None:
    """While a layer runs, the one before it is still on its way; the last one until the next operation has run."""
    host = Watched()
    model, alive = Model(host), []
    x = values(0).requires_grad_()
    with one_forward(host) as kept:
        y = x
        for number in range(3):
            on_host = create_offloader(y, is_last=number == 2)
            assert on_host is not None
            y = on_host.run(model.layer, y)
            alive.append([not storage.expired() for storage in model.inner])
    assert alive == [[True], [False, True], [False, False, True]]
    kept.release_device_copies()
    assert all(storage.expired() for storage in model.inner)
    assert host.num_bytes == sum(map(get_buffer_size, host.sizes)) > 6 * BYTES
    plain = values(0).requires_grad_()
    model.layer(model.layer(model.layer(plain))).sum().backward()
    y.sum().backward()
    assert x.grad is not None and plain.grad is not None and torch.equal(x.grad, plain.grad)


def test_what_frees_little_or_lives_anyway_stays_and_a_storage_moves_once() -> None:
    host, weight = Watched(), nn.Parameter(torch.ones(16, 16, dtype=torch.float64))
    table, received = values(1), values(2).requires_grad_()
    places, few = torch.arange(4).repeat(40), torch.ones(4, 1, dtype=torch.float64)
    eighth = torch.ones(4, 2, 1, dtype=torch.float64)

    def layer(x: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([x, x], 1)
        first, second = wide.sin().split(16, 1)  # which saves `wide`
        y = first * second * table * few  # saves two views of one storage; of the table and the few only these
        y = (y.view(4, 2, 8) * eighth).view(SHAPE)  # of a size that is worth it
        y = (y @ route_grad(weight)).index_select(0, places)  # saves y before the product
        return y.view(40, *SHAPE) * x

    with one_forward(host, live_tensors=[received]) as kept:
        on_host = create_offloader(received, shared=[table])
        assert on_host is not None
        y = on_host.run(layer, received)
    assert host.sizes == [2 * BYTES, 2 * BYTES, BYTES // 8, BYTES, 40 * BYTES]
    kept.release_device_copies()
    y.sum().backward()
    again = values(2).requires_grad_()
    layer(again).sum().backward()
    assert received.grad is not None and again.grad is not None and torch.equal(received.grad, again.grad)


def test_without_backward_or_executor_nothing_moves() -> None:
    host = Watched()
    assert create_offloader(values(0)) is None
    with one_forward(host), torch.no_grad():
        assert create_offloader(values(0)) is None


def test_only_a_layer_that_is_remade_ahead_comes_back_for_a_remake() -> None:
    """Every other one for the backward, as one of which nothing is said."""
    for ahead in (False, True):
        host, x = Watched(), values(0).requires_grad_()
        with one_forward(host) as kept:
            on_host = create_offloader(x, is_recomputed_ahead=True) if ahead else create_offloader(x)
            assert on_host is not None
            on_host.run(Model(host).layer, x)
        kept.release_device_copies()
        kept.fetch(for_recompute=True)
        assert host.log == ["away", *["back"] * ahead]
        kept.fetch(for_recompute=False)
        assert host.log == ["away", "back"]


def test_a_buffer_is_large_enough_and_less_than_twice_as_large() -> None:
    """A power of two, so that tensors of about one size share buffers."""
    for num_bytes in range(1, 1025):
        size = get_buffer_size(num_bytes)
        assert num_bytes <= size < 2 * num_bytes and size.bit_count() == 1


SCHEDULES = (build_1f1b(1, 3), build_gpipe(1, 4))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("chosen", [LAYERS, 2])
def test_the_same_bits_however_late_copies_run(again: bool, chosen: int) -> None:
    for schedule in (add_recompute(one, [0]) if again else one for one in SCHEDULES):
        plain = Model(HostBufferPool(CPU), 0, again=again).run(schedule)
        for host in (HostBufferPool(CPU), Late()):
            model = Model(host, chosen, again=again)
            for _ in range(2):
                found = model.run(schedule)
                assert len(found) == len(plain) and all(map(torch.equal, found, plain))
                taken = host.num_bytes
            assert host.num_bytes == taken > 0, "a second step takes no more memory"


def test_the_last_layer_comes_back_one_operation_ahead_the_others_one_layer_ahead() -> None:
    away, back = ["away"] * 3, ["back"]

    def log(schedule: Schedule, *, again: bool = False) -> list[str]:
        """Three of four layers are chosen."""
        host = Watched()
        model = Model(host, 3, again=again)
        model.log = host.log
        model.run(schedule)
        return host.log

    forwards = ["F0", *away, "F1", *away, "F2", *away, *back, "F3", *away]  # `begin` is told when the fetch has begun
    backwards = [*back, "B0", *back, *back, *back, "B1", *back, *back, *back, "B2", *back, *back, "B3", *back, *back]
    assert log(build_gpipe(1, 4)) == [*forwards, *backwards]
    # The last region, which runs again ahead, keeps its input on the device: so the third layer comes back for the backward.
    ahead = [line for m in range(4) for line in (f"R{m}", f"B{m}")]
    found = log(add_recompute(build_gpipe(1, 4), [0]), again=True)
    assert [line for line in found if line[0] in "RB"] == ahead
    assert all(found[found.index(f"R{m}") - 1] == "back" != found[found.index(f"B{m}") - 1] for m in range(4))
    # Where backward follows at once, the last chosen layer stays.
    assert log(build_1f1b(1, 1)) == ["F0", *away, "B0", *back, *back]


def test_a_layer_that_would_come_back_before_it_has_gone_stays() -> None:
    """Whatever the schedule: in the end nothing is asked back while its device copy lives, which `fetch` asserts."""
    for name, stages, microbatches in product(SCHEDULES_BY_NAME, (1, 2, 4), (2, 3, 8)):
        schedule = build_schedule(name, stages, microbatches, 1 if name in ("1f1b", "gpipe", "zb-h1") else 2)
        for ops in schedule.ops:
            soon, places = find_immediate_backwards(ops), {op: place for place, op in enumerate(ops)}
            fetched = {op[1:]: place for place, op in reversed([*enumerate(plan_prefetches(ops))]) if op is not None}
            for op, place in places.items():
                if op.type is OpType.FORWARD:
                    assert (fetched[op[1:]] < place + 2) == (op[1:] in soon)


class Early(HostBufferPool):
    """A fault: a buffer is given to the next tensor before it has been read."""

    def start_copy_to_host(self, source: torch.Tensor) -> HostBuffer:
        buffer = super().start_copy_to_host(source)
        self._free_buffers[len(buffer.memory)].append(buffer)
        return buffer

    def start_copy_to_device(self, *args: Any) -> Any:
        found = super().start_copy_to_device(*args)
        self._free_buffers.clear()
        return found


class Mixed(HostBufferPool):
    """A fault: what comes back is of another microbatch."""

    before: Sequence[torch.Tensor] = ()

    def start_copy_to_device(self, *args: Any) -> Any:
        found, mark = super().start_copy_to_device(*args)
        found, self.before = [*(self.before or found)], found
        return found, mark


class NeverWaits(Late):
    """A fault: computation does not wait for copies."""

    def wait(self, event: Any) -> None:
        pass


class OverwritesTooEarly(Late):
    """A fault: the next copy to a buffer does not wait until its content has been read."""

    def start_copy_to_host(self, source: torch.Tensor) -> HostBuffer:
        for free in self._free_buffers.values():
            for buffer in free:
                buffer.read_event = None
        return super().start_copy_to_host(source)


@pytest.mark.parametrize("fault", [Early, Mixed, NeverWaits, OverwritesTooEarly])
def test_a_planted_fault_shows(fault: type[HostBufferPool]) -> None:
    plain = Model(HostBufferPool(CPU), 0).run(build_gpipe(1, 4))
    try:
        found = Model(fault(CPU)).run(build_gpipe(1, 4))
    except AssertionError as error:
        assert "freed while a copy is under way" in str(error)
    else:
        assert not all(map(torch.equal, found, plain))
