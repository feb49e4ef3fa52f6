"""Collectives over process groups, and conjugate pairs of them as autograd functions.

Shapes: `s` sequence, `b` microbatch, `h` hidden, `n` ranks of the group. Tensors are always gathered and scattered along dimension
0 (the sequence), so messages are contiguous. Reductions are sums by default, never averages: callers scale the sums. In a group of
size one, collectives do nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.context import Group

# Renamed in torch 2.13, where the old names raise a warning.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """Handle of a collective operation that has started. `wait` returns the result of the operation.

    Args:
        input_tensor: tensor that the operation reads, kept alive until `wait`. (Backends keep it alive too. This reference makes
            the memory visible to memory accounting, whatever the backend.)
    """

    def __init__(
        self, result: torch.Tensor, work: dist.Work | _WorkList | Pending | None = None, input_tensor: torch.Tensor | None = None
    ) -> None:
        self._result, self._work, self._input = result, work, input_tensor

    @property
    def result_buffer(self) -> torch.Tensor:
        """Tensor that receives the result. Its contents are undefined until `wait`."""
        return self._result

    def wait(self) -> torch.Tensor:
        """Wait for the operation and return its result. On CUDA only the current stream waits; several streams may call it."""
        if self._work is not None:
            self._work.wait()
        self._input = None
        return self._result


def start_all_reduce(tensor: torch.Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
    """Start to reduce `tensor` in place over the ranks of the group, by default to the sum."""
    if group.size == 1:
        return Pending(tensor)
    return Pending(tensor, dist.all_reduce(tensor, op, group=group.process_group, async_op=True))


def start_all_gather(tensor: torch.Tensor, group: Group, out: torch.Tensor | None = None) -> Pending:
    """Start to concatenate the tensors of all ranks along dimension 0: [s/n, ...] to [s, ...] with `n` ranks.

    Args:
        out: buffer for the result; None to allocate it. `tensor` may be this rank's slice of `out`.
    """
    if group.size == 1:
        return Pending(tensor)
    gathered = tensor.new_empty((tensor.shape[0] * group.size, *tensor.shape[1:])) if out is None else out
    tensor = tensor.contiguous()
    return Pending(gathered, _all_gather(gathered, tensor, group=group.process_group, async_op=True), tensor)


def start_reduce_scatter(tensor: torch.Tensor, group: Group, out: torch.Tensor | None = None) -> Pending:
    """Start to sum a tensor over the ranks and to scatter the sum along dimension 0: [s, ...] to [s/n, ...] on `n` ranks.

    Args:
        out: buffer for the result; None to allocate it. It may be this rank's slice of `tensor`.
    """
    if group.size == 1:
        return Pending(tensor)
    scattered = tensor.new_empty((tensor.shape[0] // group.size, *tensor.shape[1:])) if out is None else out
    tensor = tensor.contiguous()
    return Pending(scattered, _reduce_scatter(scattered, tensor, group=group.process_group, async_op=True), tensor)


def start_all_to_all(
    received: torch.Tensor, to_send: torch.Tensor, counts: tuple[Sequence[int], Sequence[int]], group: Group
) -> Pending:
    """Start an all-to-all of flat tensors with a variable number of elements per rank.

    Args:
        received: flat tensor for the received elements, in the order of the ranks.
        to_send: flat tensor with the elements to send, in the order of the ranks.
        counts: number of elements received from each rank, and number of elements sent to each rank.
    """
    if group.size == 1:
        if received.data_ptr() != to_send.data_ptr():
            received.copy_(to_send)
        return Pending(received)
    receive_counts, send_counts = map(list, counts)
    work = dist.all_to_all_single(received, to_send, receive_counts, send_counts, group=group.process_group, async_op=True)
    return Pending(received, work, to_send)


class _WorkList:
    """List of communication operations with the interface of a single `dist.Work`: `wait` waits for all of them."""

    def __init__(self, works: Sequence[dist.Work | None]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            assert work is not None, "this rank is not in the group"
            work.wait()


def _runs_p2p_in_order(device: torch.device) -> bool:
    """Return whether the device runs sends and receives one after the other. NCCL does, because it uses one stream for them. A send
    and a receive must then be issued as one batch, because separate ones can deadlock."""
    return device.type == "cuda"


def start_ring_shift(tensor: torch.Tensor, group: Group, out: torch.Tensor | None = None) -> Pending:
    """Start to send a tensor to the next rank of the ring, and to receive a tensor of the same shape from the previous rank.

    Args:
        out: buffer for the received tensor; None to allocate it.
    """
    received = torch.empty_like(tensor) if out is None else out
    rank, ranks, process_group = group.rank, group.ranks, group.process_group
    destination, source = ranks[(rank + 1) % group.size], ranks[rank - 1]
    if _runs_p2p_in_order(tensor.device):
        # A single batch: with separate operations, every rank could run its receive first, and wait for sends that never start.
        send, receive = (
            dist.P2POp(dist.isend, tensor, destination, process_group),
            dist.P2POp(dist.irecv, received, source, process_group),
        )
        return Pending(received, _WorkList(dist.batch_isend_irecv([send, receive])), tensor)
    return Pending(
        received,
        _WorkList([dist.isend(tensor, destination, group=process_group), dist.irecv(received, source, group=process_group)]),
        tensor,
    )


def all_reduce(tensor: torch.Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce a tensor in place over the ranks of the group, by default to the sum, and return it."""
    return start_all_reduce(tensor, group, op).wait()


def all_gather(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Concatenate the tensors of all ranks along dimension 0, in the order of the ranks: [s/n, ...] to [s, ...]."""
    return start_all_gather(tensor, group).wait()


def reduce_scatter(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum a tensor over the ranks and return this rank's slice of dimension 0: [s, ...] to [s/n, ...]."""
    return start_reduce_scatter(tensor, group).wait()


def all_to_all(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Split a tensor along dimension 0 into n equal slices, and send slice i to rank i.

    Returns:
        The received slices, in the order of the ranks; same shape as `tensor`.
    """
    if group.size == 1:
        return tensor
    received, counts = (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device),
        [tensor.numel() // group.size] * group.size,
    )
    start_all_to_all(received.flatten(), tensor.contiguous().flatten(), (counts, counts), group).wait()
    return received


def split_along_first_dim(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's slice of dimension 0 as a view, without communication: [s, ...] to [s/n, ...]."""
    size, remainder = divmod(tensor.shape[0], group.size)
    assert remainder == 0, f"dimension 0 of {tuple(tensor.shape)} does not divide by {group.size} ranks"
    return tensor.narrow(0, group.rank * size, size)


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Return a list of the Python objects of all ranks, in the order of the ranks.

    For small objects in reports and errors, not for the training step, because objects are pickled.
    """
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values


def ring_shift_tensor(tensor: torch.Tensor, distance: int, group: Group) -> torch.Tensor:
    """Send a tensor to the rank `distance` positions later in the ring of the group. Return the tensor of the rank `distance`
    positions earlier.

    Tensors are contiguous and have the same shape on all ranks.
    """
    if distance % group.size == 0:
        return tensor
    received = torch.empty_like(tensor)
    start_all_to_all(
        received.view(-1), tensor.view(-1), _compute_ring_shift_counts(group, distance, tensor.numel(), tensor.numel()), group
    ).wait()
    return received


def ring_shift_object(value: Any, distance: int, group: Group, device: torch.device) -> Any:
    """Send a Python object to the rank `distance` positions later in the ring of the group. Return the object of the rank
    `distance` positions earlier.

    Tensors in the object must be in host memory.

    Args:
        device: device of the tensors that the group's backend can send.
    """
    if distance % group.size == 0:
        return value
    to_send = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    size = int(ring_shift_tensor(torch.full((1,), len(to_send), device=device), distance, group))
    received = to_send.new_empty(size)
    start_all_to_all(received, to_send, _compute_ring_shift_counts(group, distance, size, len(to_send)), group).wait()
    return pickle.loads(received.cpu().numpy().tobytes())


def _compute_ring_shift_counts(group: Group, distance: int, receive_count: int, send_count: int) -> tuple[list[int], list[int]]:
    """Return the arguments `counts` of `start_all_to_all` for a ring shift, in which each rank sends only to the rank `distance`
    positions later.

    Returns:
        Number of elements that this rank receives from each rank, and number of elements that it sends to each rank.
    """
    source, destination = (group.rank - distance) % group.size, (group.rank + distance) % group.size
    ranks = range(group.size)
    return [receive_count * (rank == source) for rank in ranks], [send_count * (rank == destination) for rank in ranks]


def broadcast_object(value: Any, group: Group) -> Any:
    """Return the Python object of the group's first rank on all ranks. For small objects, which are pickled."""
    if group.size == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=group.ranks[0], group=group.process_group)
    return values[0]


class _AllReduceForward(torch.autograd.Function):
    """Autograd function: all-reduce in forward, identity in backward. Shoeybi et al. 2019, section 3, call it "g"."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:  # type: ignore[override]
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class _ReduceScatterForward(torch.autograd.Function):
    """Autograd function: reduce-scatter along the sequence in forward, all-gather in backward. Korthikanti et al. 2022 call it
    "g-bar"."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return all_gather(grad, ctx.group), None


class _AllGatherForward(torch.autograd.Function):
    """Autograd function: all-gather along the sequence in forward, reduce-scatter in backward. Korthikanti et al. 2022 call it
    "g"."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return reduce_scatter(grad, ctx.group), None


def all_reduce_forward(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum the partial results of the ranks, in place. Backward returns the gradient unchanged."""
    return x if group.size == 1 else _AllReduceForward.apply(x, group)


def reduce_scatter_forward(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum the partial results of the ranks and scatter the sum along the sequence: [s, b, h] to [s/n, b, h].

    Backward all-gathers the gradient.
    """
    return x if group.size == 1 else _ReduceScatterForward.apply(x, group)


def all_gather_forward(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Concatenate the tensors of all ranks along dimension 0. Backward sums the gradient over the ranks and scatters it."""
    return x if group.size == 1 else _AllGatherForward.apply(x, group)
