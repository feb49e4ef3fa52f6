"""The executor with a small chain of layers as the model: any schedule gives the gradients of one plain process.

Buffers that are handed back for use again are filled with NaN at once, so that whatever still needs them shows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.parallel.context import SELF_GROUP, ParallelContext, make_context
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel import p2p
from megatron.pipeline_parallel import validate as validating
from megatron.pipeline_parallel.exchange import ReceiveChoice, plan_receives_in_send_order
from megatron.pipeline_parallel.executor import Executor
from megatron.pipeline_parallel.p2p import Boundary, Messenger, Tensors, TensorSpec
from megatron.spec.operations import Message, Op, OpType, Schedule, extract_forwards
from megatron.spec.schedules import build_1f1b, build_gpipe, build_schedule
from megatron.tensor_parallel.linear import parallel_linear
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.lone_rank import CPU, lone_rank
from tests.support.schedule_examples import B, F, greedy, split_backwards
from tests.support.sinks import sink_over

SHAPE = (3, 2, 4)
BOUNDARY: Boundary = {"hidden": TensorSpec(SHAPE, torch.float64)}
Grads = dict[str, torch.Tensor]


@functools.cache
def values(*key: int | str, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """Fixed random numbers for a purpose."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(map(ord, repr(key)))))


class Chain:
    """Some chunks of a chain; a chunk is tanh and a linear layer, or passes on what it gets. The last gives a sum."""

    def __init__(self, num_chunks: int, mine: Iterable[int], passing: int | None = None) -> None:
        self.last, self.passing = num_chunks - 1, passing
        self.params: dict[str, nn.Parameter] = {}
        for chunk in mine:
            self.params[f"{chunk}.weight"] = nn.Parameter(values("weight", chunk, shape=(4, 4)).clone())
            self.params[f"{chunk}.bias"] = nn.Parameter(values("bias", chunk, shape=(4,)).clone())
        for param in self.params.values():
            param.grad_sink = sink_over(torch.zeros_like(param))  # type: ignore[attr-defined]
        self.outputs: list[StorageWeakRef] = []
        self.input_grads: list[StorageWeakRef] = []
        self.alive: list[int] = []
        """Earlier outputs and gradients of inputs still in memory at each forward."""
        self.losses: list[float] = []

    def forward(self, chunk: int, microbatch: int, received: Tensors) -> Tensors:
        self.alive.append(sum(not memory.expired() for memory in self.outputs + self.input_grads))
        if received and received["hidden"].requires_grad:
            received["hidden"].register_hook(lambda grad: self.input_grads.append(StorageWeakRef(grad.untyped_storage())))
        x = received["hidden"] if received else values("data", microbatch)
        if chunk == self.passing:
            return {"hidden": x.view(-1).view(SHAPE) if microbatch % 2 else x}
        out = parallel_linear(x.tanh(), self.params[f"{chunk}.weight"], self.params[f"{chunk}.bias"], SELF_GROUP)
        if chunk == self.last:
            loss = (out * values("target", microbatch)).sum()
            self.losses.append(loss.item())
            return {"loss": loss}
        self.outputs.append(StorageWeakRef(out.untyped_storage()))
        return {"hidden": out}

    def start_step(self) -> None:
        for param in self.params.values():
            param.grad_sink.is_written = False  # type: ignore[attr-defined]

    @property
    def grads(self) -> Grads:
        return {name: param.grad_sink.main_grad.clone() for name, param in self.params.items()}  # type: ignore[attr-defined]


def plain_grads(num_chunks: int, num_microbatches: int, passing: int | None = None) -> Grads:
    """By ordinary autograd in one process."""
    chunks = [chunk for chunk in range(num_chunks) if chunk != passing]
    params = {f"{c}.weight": values("weight", c, shape=(4, 4)).clone().requires_grad_() for c in chunks}
    params |= {f"{c}.bias": values("bias", c, shape=(4,)).clone().requires_grad_() for c in chunks}
    for m in range(num_microbatches):
        x = values("data", m)
        for chunk in chunks:
            x = nn.functional.linear(x.tanh(), params[f"{chunk}.weight"], params[f"{chunk}.bias"])
        (x * values("target", m)).sum().backward()
    return {name: param.grad for name, param in params.items() if param.grad is not None}


def assert_close(actual: Grads, expected: Grads) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=1e-12, atol=1e-13, msg=functools.partial("{}: {}".format, name)
        )


def assert_bitwise(actual: Grads, expected: Grads) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def alone(schedule: Schedule, passing: int | None = None) -> Chain:
    """The chain after one step in this process."""
    chain = Chain(schedule.num_chunks, range(schedule.num_chunks), passing)
    Executor(lone_rank(), BOUNDARY).run(schedule, chain.forward)
    return chain


# ---- one process


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("weights_last", [False, True])
def test_split_backwards_give_the_same_bits(chunks: int, weights_last: bool) -> None:
    together = greedy((0,) * chunks, 4, split=False, seed=0)
    split = alone(split_backwards(together, weights_last)).grads
    assert_bitwise(split, alone(together).grads)
    assert_close(split, plain_grads(chunks, 4))


@pytest.mark.parametrize("seed", range(4))
def test_any_order_on_one_rank_gives_the_same_gradients(seed: int) -> None:
    assert_close(alone(greedy((0, 0, 0), 3, split=True, seed=seed)).grads, plain_grads(3, 3))


def test_a_weight_gradient_is_computed_when_the_schedule_says() -> None:
    """After the input gradient the bias is done (it is not deferred), the weight is not."""
    schedule = split_backwards(build_gpipe(1, 1))
    chain = Chain(1, [0])
    writes: list[str] = []
    for name, param in chain.params.items():
        param.grad_sink.on_write = functools.partial(writes.append, name)  # type: ignore[attr-defined]
    executor = Executor(lone_rank(), BOUNDARY)
    backward = torch.autograd.backward

    def noted(*args: Any) -> None:
        backward(*args)
        writes.append("end of input gradient")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "backward", noted)
        executor.run(schedule, chain.forward)
    assert writes == ["0.bias", "end of input gradient", "0.weight"]


def test_an_invalid_schedule_is_not_run() -> None:
    chain = Chain(1, [0])
    schedule = Schedule("broken", 1, (0,), ((Op(B, 0, 0), Op(F, 0, 0)),))
    with pytest.raises(ValueError, match="is scheduled before its forward"):
        Executor(lone_rank(), BOUNDARY).run(schedule, chain.forward)
    assert not chain.losses


def test_evaluation_keeps_nothing() -> None:
    schedule = Schedule("forward-only", 3, (0, 0), (tuple(Op(F, c, m) for m in range(3) for c in range(2)),))
    outputs: list[torch.Tensor] = []
    chain = Chain(2, [0, 1])

    def forward(chunk: int, microbatch: int, received: Tensors) -> Tensors:
        assert not torch.is_grad_enabled()
        given = chain.forward(chunk, microbatch, received)
        outputs.extend(t.detach() for t in given.values() if t.requires_grad)
        return given

    Executor(lone_rank(), BOUNDARY).run(schedule, forward)
    assert not outputs and all(output.expired() for output in chain.outputs)
    assert chain.losses == alone(gpipe_on_one(2, 3)).losses
    assert torch.is_grad_enabled()


def gpipe_on_one(chunks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, of several chunks on one rank."""
    forwards = [Op(F, c, m) for m in range(microbatches) for c in range(chunks)]
    backwards = [Op(B, c, m) for m in range(microbatches) for c in reversed(range(chunks))]
    return Schedule("gpipe", microbatches, (0,) * chunks, (tuple(forwards + backwards),))


def test_a_chunk_that_passes_on_what_it_gets() -> None:
    assert_close(alone(gpipe_on_one(3, 4), passing=1).grads | {}, plain_grads_with_zeros(3, 4, passing=1))


def plain_grads_with_zeros(chunks: int, microbatches: int, passing: int) -> Grads:
    zeros = {f"{passing}.weight": torch.zeros(4, 4).double(), f"{passing}.bias": torch.zeros(4).double()}
    return plain_grads(chunks, microbatches, passing) | zeros


def test_what_needs_no_gradient_gets_none() -> None:
    """A number that travels beside the hidden states is no root of backward, although it was computed from parameters."""
    boundary: Boundary = {**BOUNDARY, "note": TensorSpec((), torch.float64, requires_grad=False)}
    chain = Chain(2, [0, 1])
    notes: list[float] = []

    def forward(chunk: int, microbatch: int, received: Tensors) -> Tensors:
        given = chain.forward(chunk, microbatch, {"hidden": received["hidden"]} if received else {})
        if chunk == 1:
            assert received["hidden"].requires_grad and not received["note"].requires_grad
            notes.append(received["note"].item())
            return given
        return given | {"note": given["hidden"].sum()}

    Executor(lone_rank(), boundary).run(gpipe_on_one(2, 3), forward)
    assert len(set(notes)) == 3
    assert_close(chain.grads, plain_grads(2, 3))


def test_a_tensor_that_is_not_as_agreed_is_our_mistake() -> None:
    messenger = Messenger(lone_rank(Topology(pp=2)), BOUNDARY)
    for wrong in (torch.zeros(3, 2, 5, dtype=torch.float64), torch.zeros(SHAPE)):
        with pytest.raises(AssertionError, match="hidden: .* agreed"):
            messenger.send(Message(False, 1, 0), 1, {"hidden": wrong})


def test_a_chunk_that_does_not_use_what_it_gets_gives_it_no_gradient() -> None:
    chain = Chain(2, [0, 1])

    def forward(chunk: int, microbatch: int, received: Tensors) -> Tensors:
        return chain.forward(chunk, microbatch, {"hidden": values("data", microbatch)} if chunk == 1 else received)

    Executor(lone_rank(), BOUNDARY).run(gpipe_on_one(2, 3), forward)
    assert chain.grads["0.weight"].eq(0).all() and not chain.grads["1.weight"].eq(0).any()


def test_what_deferred_weight_gradients_keep_is_counted() -> None:
    """Each keeps the input and the output's gradient of its linear layer, 3 x 2 x 4 numbers of 8 bytes both."""
    one = 2 * 3 * 2 * 4 * 8
    for schedule, number in (
        (build_gpipe(1, 4), 0),
        (split_backwards(build_gpipe(1, 4)), 1),
        (split_backwards(build_gpipe(1, 4), weights_last=True), 4),
    ):
        executor = Executor(lone_rank(), BOUNDARY)
        for _ in range(2):
            executor.run(schedule, Chain(1, [0]).forward)
        assert executor.peak_deferred_bytes == number * one


class Noted:
    """A recorder that keeps the operations."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.computing: Op | None = None

    def start(self, op: Op) -> None:
        assert self.computing is None
        self.computing = op

    def end(self, op: Op) -> None:
        assert self.computing == op
        self.computing = None
        self.ops.append(op)


def test_a_recorder_hears_of_every_operation_in_order() -> None:
    schedule = build_schedule("zb-v", 1, 3, 2)
    executor, noted = Executor(lone_rank(), BOUNDARY), Noted()
    executor.recorder = noted
    executor.run(schedule, Chain(2, [0, 1]).forward)
    assert tuple(noted.ops) == schedule.ops[0]


def test_backwards_are_announced_but_not_late_weight_gradients() -> None:
    schedule = build_schedule("zb-v", 1, 3, 2)
    announced: list[int] = []
    Executor(lone_rank(), BOUNDARY, before_backward=[announced.append]).run(schedule, Chain(2, [0, 1]).forward)
    assert announced == [op.chunk for op in schedule.ops[0] if op.type in (OpType.BACKWARD, OpType.INPUT_GRAD)]
    assert sorted(announced) == [0] * 3 + [1] * 3


# ---- two ranks

ON_TWO: dict[str, Schedule] = {
    "1f1b": build_1f1b(2, 5),
    "gpipe": build_gpipe(2, 5),
    "1f1b split": split_backwards(build_1f1b(2, 5)),
    "1f1b weights last": split_backwards(build_1f1b(2, 5), weights_last=True),
    "v": greedy((0, 1, 1, 0), 4, split=False, seed=1),
    "v split": greedy((0, 1, 1, 0), 4, split=True, seed=2),
    "interleaved": build_schedule("interleaved", 2, 5, 2),
    "ring split": greedy((0, 1, 0, 1), 4, split=True, seed=3),
    "backwards": greedy((1, 0), 3, split=True, seed=4),
    "zb-h1": build_schedule("zb-h1", 2, 5),
    "zb-v": build_schedule("zb-v", 2, 5, 2),
}


LATE = split_backwards(build_1f1b(2, 8), weights_last=True)


def poison_recycled_buffers() -> None:
    """What is handed back for use again holds NaN from then on."""
    recycle = Messenger.recycle

    def poisoning(self: Messenger, buffers: Tensors) -> None:
        recycle(self, buffers)
        for free in self._free_buffers.values():
            for buffer in free:
                buffer.fill_(torch.nan)

    Messenger.recycle = poisoning  # type: ignore[method-assign]


class WatchedDist:
    """torch.distributed, noting where messages are received, and whether an earlier message may still be leaving from there."""

    def __init__(self) -> None:
        self.leaving: list[tuple[int, dist.Work]] = []
        self.received: list[int] = []
        self.overwritten = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def isend(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        work = dist.isend(tensor, *args, **kwargs)
        assert work is not None
        self.leaving.append((tensor.untyped_storage().data_ptr(), work))
        return work

    def irecv(self, buffer: torch.Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        self.received.append(buffer.data_ptr())
        self.overwritten += any(memory == buffer.data_ptr() and not work.is_completed() for memory, work in self.leaving)
        return dist.irecv(buffer, *args, **kwargs)


def one_step(
    context: ParallelContext, schedule: Schedule, passing: int | None = None, *, overlap: bool = True, device_type: str = "cpu"
) -> Chain:
    stage = context.group("pp").rank
    chain = Chain(schedule.num_chunks, [c for c, s in enumerate(schedule.stage_of_chunk) if s == stage and c != passing], passing)
    executor = Executor(context, BOUNDARY, overlap=overlap)
    executor._device_type = device_type  # which plan of messages it takes
    executor.run(schedule, chain.forward)
    return chain


def on_two_ranks(rank: int) -> dict[str, Any]:
    """Everything that needs two ranks, in one world."""
    context = make_context(Topology(pp=2), rank, CPU)
    results: dict[str, Any] = {name: one_step(context, schedule).grads for name, schedule in ON_TWO.items()}
    results |= {f"{name}, waiting": one_step(context, schedule, overlap=False).grads for name, schedule in ON_TWO.items()}
    results |= {f"{name}, cuda": one_step(context, schedule, device_type="cuda").grads for name, schedule in ON_TWO.items()}
    chosen = validating.choose_receive_plans
    validating.choose_receive_plans = lambda schedule, _: ReceiveChoice(plan_receives_in_send_order(schedule), None)  # type: ignore[assignment]
    results |= {f"{name}, as sent": one_step(context, schedule).grads for name, schedule in ON_TWO.items()}
    validating.choose_receive_plans = chosen
    results["losses"] = {s.name: one_step(context, s).losses for s in (extract_forwards(build_1f1b(2, 5)), build_1f1b(2, 5))}
    results["alive"] = {s.name: one_step(context, s).alive for s in (build_1f1b(2, 8), LATE)}

    watched = p2p.dist = WatchedDist()  # type: ignore[assignment]
    # The same executor for several steps of growing length: buffers of earlier steps come back.
    chain, executor = Chain(2, [rank]), Executor(context, BOUNDARY)
    results["memory"] = []
    for microbatches in (4, 4, 6):
        watched.received.clear()
        chain.start_step()
        executor.run(build_1f1b(2, microbatches), chain.forward)
        results["memory"].append(list(watched.received))
    results["third step"] = chain.grads
    executor.run(extract_forwards(build_1f1b(2, 6)), chain.forward)
    results["memory in evaluation"] = watched.received[6:]

    poison_recycled_buffers()
    for name, schedule in ON_TWO.items():
        results[f"{name}, poisoned"] = one_step(context, schedule).grads
    passing = gpipe_over((0, 1, 0), 6)
    results["passing"] = one_step(context, passing, passing=1).grads
    evaluation = Schedule("forward-only", 6, (0, 1, 0), tuple(tuple(op for op in ops if op.type is F) for ops in passing.ops))
    results["passing losses"] = one_step(context, evaluation, passing=1).losses
    results["overwritten"] = watched.overwritten
    dist.barrier()
    return results


def gpipe_over(stage_of_chunk: tuple[int, ...], microbatches: int) -> Schedule:
    """All forwards, then all backwards, microbatch by microbatch on each stage."""
    chunks = range(len(stage_of_chunk))
    ops = []
    for stage in range(max(stage_of_chunk) + 1):
        mine = [c for c in chunks if stage_of_chunk[c] == stage]
        forwards = [Op(F, c, m) for c in mine for m in range(microbatches)]
        ops.append(tuple(forwards + [Op(B, c, m) for c in reversed(mine) for m in range(microbatches)]))
    return Schedule("gpipe", microbatches, stage_of_chunk, tuple(ops))


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(2, on_two_ranks, timeout=60.0)


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_give_the_gradients_of_one_process(two: list[dict[str, Any]], name: str) -> None:
    schedule = ON_TWO[name]
    expected = plain_grads(schedule.num_chunks, schedule.num_microbatches)
    assert_close(two[0][name] | two[1][name], expected)
    assert not two[0][name].keys() & two[1][name].keys()


def test_splitting_backwards_over_two_ranks_changes_no_bit(two: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert_bitwise(two[rank]["1f1b split"], two[rank]["1f1b"])
        assert_bitwise(two[rank]["1f1b weights last"], two[rank]["1f1b"])
        assert_bitwise(two[rank]["gpipe"], two[rank]["1f1b"])


@pytest.mark.parametrize("name", ON_TWO)
def test_no_buffer_is_handed_back_while_it_is_needed(two: list[dict[str, Any]], name: str) -> None:
    for rank in range(2):
        assert_bitwise(two[rank][f"{name}, poisoned"], two[rank][name])


@pytest.mark.parametrize("name", ON_TWO)
def test_waiting_for_every_exchange_changes_no_bit(two: list[dict[str, Any]], name: str) -> None:
    for rank in range(2):
        assert_bitwise(two[rank][f"{name}, waiting"], two[rank][name])


@pytest.mark.parametrize("name", ON_TWO)
def test_receives_that_are_posted_as_hardware_queues_allow_change_no_bit(two: list[dict[str, Any]], name: str) -> None:
    """The plans for CUDA: one operation ahead where two would hang, or in the order of sending."""
    for rank in range(2):
        assert_bitwise(two[rank][f"{name}, cuda"], two[rank][name])
        assert_bitwise(two[rank][f"{name}, as sent"], two[rank][name])


def test_a_buffer_that_a_chunk_passes_on_is_not_filled_again_before_it_has_left(two: list[dict[str, Any]]) -> None:
    assert_close(two[0]["passing"] | two[1]["passing"], plain_grads(3, 6, passing=1))
    assert two[0]["passing losses"] == alone(gpipe_on_one(3, 6), passing=1).losses
    assert two[0]["overwritten"] == two[1]["overwritten"] == 0


def test_evaluation_gives_the_losses_of_training(two: list[dict[str, Any]]) -> None:
    assert two[0]["losses"] == {"1f1b, forward only": [], "1f1b": []}
    assert two[1]["losses"]["1f1b, forward only"] == two[1]["losses"]["1f1b"] == alone(gpipe_on_one(2, 5)).losses


def test_what_was_sent_is_freed_while_its_graph_lives(two: list[dict[str, Any]]) -> None:
    """Of eight outputs on the first rank, and eight gradients on the last, only those that may still be on their way are kept."""
    for schedule in (build_1f1b(2, 8), LATE):
        assert len(two[0]["alive"][schedule.name]) == len(two[1]["alive"][schedule.name]) == 8
        assert max(two[0]["alive"][schedule.name]) <= 2
        assert max(two[1]["alive"][schedule.name]) <= 2


def test_receive_buffers_are_used_again(two: list[dict[str, Any]]) -> None:
    """Activations on the last rank, gradients on the first."""
    for rank in range(2):
        memory = two[rank]["memory"]
        assert [len(step) for step in memory] == [4, 4, 6]
        used = {place for step in memory for place in step}
        assert used == set(memory[0]), "later steps allocate nothing"
        assert len(used) <= 2, "one in use, one arriving"
        evaluating = two[1]["memory in evaluation"]
    assert len(evaluating) == 6 and len({*evaluating, *(place for step in two[1]["memory"] for place in step)}) <= 3, "two arriving"
    assert_close(two[0]["third step"] | two[1]["third step"], plain_grads(2, 6))
