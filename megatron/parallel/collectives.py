"""All communication of tensor groups: plain collectives, and the conjugate autograd pairs made of them.

Shapes: `s` sequence, `b` microbatch, `h` hidden. What is gathered or scattered is always dimension 0 (the sequence), so messages
are contiguous. Reductions are sums; any scaling is the caller's and explicit. Nothing happens in a group of one.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.context import Group

# Renamed in torch 2.13; the old names warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective that has started. `wait()` returns its result.

    Args:
        reads: what it reads until then. (Backends hold on to it too; here it is seen, and counted, whatever the backend.)
    """

    def __init__(
        self, result: torch.Tensor, work: dist.Work | _Works | Pending | None = None, reads: torch.Tensor | None = None
    ) -> None:
        self._result, self._work, self._reads = result, work, reads

    @property
    def unfinished(self) -> torch.Tensor:
        """The result, which may be read after `wait`."""
        return self._result

    def wait(self) -> torch.Tensor:
        """Wait (on CUDA: let the current stream wait; several streams may) and return the result."""
        if self._work is not None:
            self._work.wait()
        self._reads = None
        return self._result


def start_all_reduce(tensor: torch.Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
    """Begin to reduce `tensor` in place over the group."""
    if group.size == 1:
        return Pending(tensor)
    return Pending(tensor, dist.all_reduce(tensor, op, group=group.process_group, async_op=True))


def start_all_gather(tensor: torch.Tensor, group: Group, out: torch.Tensor | None = None) -> Pending:
    """Begin to join the ranks' tensors along dimension 0: [s/n, ...] to [s, ...].

    Args:
        out: the result; `tensor` may be this rank's part of it.
    """
    if group.size == 1:
        return Pending(tensor)
    joined = tensor.new_empty((tensor.shape[0] * group.size, *tensor.shape[1:])) if out is None else out
    tensor = tensor.contiguous()
    return Pending(joined, _all_gather(joined, tensor, group=group.process_group, async_op=True), tensor)


def start_reduce_scatter(tensor: torch.Tensor, group: Group, out: torch.Tensor | None = None) -> Pending:
    """Begin to sum over the ranks and keep this rank's part of dimension 0: [s, ...] to [s/n, ...].

    Args:
        out: the result; it may be this rank's part of `tensor`.
    """
    if group.size == 1:
        return Pending(tensor)
    part = tensor.new_empty((tensor.shape[0] // group.size, *tensor.shape[1:])) if out is None else out
    tensor = tensor.contiguous()
    return Pending(part, _reduce_scatter(part, tensor, group=group.process_group, async_op=True), tensor)


def start_exchange(
    received: torch.Tensor, sent: torch.Tensor, counts: tuple[Sequence[int], Sequence[int]], group: Group
) -> Pending:
    """Begin to give each rank its part of `sent`, and to receive each rank's part into `received`. Both are flat.

    Args:
        counts: the elements that come from each rank, and those that go to each.
    """
    if group.size == 1:
        if received.data_ptr() != sent.data_ptr():
            received.copy_(sent)
        return Pending(received)
    come, go = map(list, counts)
    work = dist.all_to_all_single(received, sent, come, go, group=group.process_group, async_op=True)
    return Pending(received, work, sent)


class _Works:
    """Several works that are waited for as one."""

    def __init__(self, works: Sequence[dist.Work | None]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each."""
        for work in self._works:
            assert work is not None, "this rank is not in the group"
            work.wait()


def _keeps_order(device: torch.device) -> bool:
    """Whether what is sent and received runs one after the other: NCCL has a stream for it."""
    return device.type == "cuda"


def start_pass_on(tensor: torch.Tensor, group: Group, out: torch.Tensor | None = None) -> Pending:
    """Begin to send to the next rank of the group's ring, and to receive as much from the one before.

    Args:
        out: the result, what is received.
    """
    received = torch.empty_like(tensor) if out is None else out
    place, ranks, over = group.index, group.ranks, group.process_group
    to, source = ranks[(place + 1) % group.size], ranks[place - 1]
    if _keeps_order(tensor.device):
        # One operation. Of two, the receive could run first on every rank, and wait for a send that is behind a receive.
        send, receive = dist.P2POp(dist.isend, tensor, to, over), dist.P2POp(dist.irecv, received, source, over)
        return Pending(received, _Works(dist.batch_isend_irecv([send, receive])), tensor)
    return Pending(received, _Works([dist.isend(tensor, to, group=over), dist.irecv(received, source, group=over)]), tensor)


def all_reduce(tensor: torch.Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce in place over the group; returns the tensor."""
    return start_all_reduce(tensor, group, op).wait()


def all_gather(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Join the ranks' tensors along dimension 0, in the order of the ranks: [s/n, ...] to [s, ...]."""
    return start_all_gather(tensor, group).wait()


def reduce_scatter(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the ranks and keep this rank's part of dimension 0: [s, ...] to [s/n, ...]."""
    return start_reduce_scatter(tensor, group).wait()


def all_to_all(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Give rank i part i of dimension 0, of as many parts as ranks; receive one of each rank, in their order."""
    if group.size == 1:
        return tensor
    received, counts = (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device),
        [tensor.numel() // group.size] * group.size,
    )
    start_exchange(received.flatten(), tensor.contiguous().flatten(), (counts, counts), group).wait()
    return received


def own_part(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's part of dimension 0, without communication: [s, ...] to a view [s/n, ...]."""
    size, rest = divmod(tensor.shape[0], group.size)
    assert rest == 0, f"dimension 0 of {tuple(tensor.shape)} does not divide by {group.size} ranks"
    return tensor.narrow(0, group.index * size, size)


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Every rank's small Python value, in the order of the ranks. For reports and errors, not for the hot path."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values


def passed_tensor(tensor: torch.Tensor, by: int, group: Group) -> torch.Tensor:
    """The tensor, contiguous and of the same shape on all, of the rank `by` places before in the group's ring."""
    if by % group.size == 0:
        return tensor
    received = torch.empty_like(tensor)
    start_exchange(received.view(-1), tensor.view(-1), _around(group, by, tensor.numel(), tensor.numel()), group).wait()
    return received


def passed_object(value: Any, by: int, group: Group, device: torch.device) -> Any:
    """The Python value of the rank `by` places before in the group's ring. Tensors in it must be in host memory.

    Args:
        device: that of the group's tensors.
    """
    if by % group.size == 0:
        return value
    sent = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    size = int(passed_tensor(torch.full((1,), len(sent), device=device), by, group))
    received = sent.new_empty(size)
    start_exchange(received, sent, _around(group, by, size, len(sent)), group).wait()
    return pickle.loads(received.cpu().numpy().tobytes())


def _around(group: Group, by: int, come: int, go: int) -> tuple[list[int], list[int]]:
    """The counts of an exchange in which each rank sends to one rank, `by` places further in the ring."""
    source, to = (group.index - by) % group.size, (group.index + by) % group.size
    places = range(group.size)
    return [come * (place == source) for place in places], [go * (place == to) for place in places]


def broadcast_object(value: Any, group: Group) -> Any:
    """The first rank's small Python value on every rank."""
    if group.size == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=group.ranks[0], group=group.process_group)
    return values[0]


class _SumForward(torch.autograd.Function):
    """Forward: sum over the group. Backward: identity. ("g" in Shoeybi et al. 2019, section 3.)"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:  # type: ignore[override]
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class _ReduceScatterForward(torch.autograd.Function):
    """Forward: sum, keep this rank's part of the sequence. Backward: gather. (Korthikanti et al. 2022, "g-bar".)"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return all_gather(grad, ctx.group), None


class _AllGatherForward(torch.autograd.Function):
    """Forward: gather. Backward: sum, keep this rank's part. (Korthikanti et al. 2022, "g".)"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return reduce_scatter(grad, ctx.group), None


def sum_forward(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum of the ranks' partial results, in place; its gradient is passed on as it is."""
    return x if group.size == 1 else _SumForward.apply(x, group)


def reduce_scatter_forward(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum of the ranks' partial results, cut along the sequence: [s, b, h] to [s/n, b, h]; its gradient is gathered."""
    return x if group.size == 1 else _ReduceScatterForward.apply(x, group)


def all_gather_forward(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The ranks' parts along dimension 0 as a whole; of its gradient, the sum over the ranks, each gets its part."""
    return x if group.size == 1 else _AllGatherForward.apply(x, group)
