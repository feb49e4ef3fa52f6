"""A product along with the collective on one side of it, so that each hides the other (`--tp-comm-overlap`).

Shapes: `s` sequence, `b` microbatch, `n` tensor ranks. Under sequence parallelism products wait for a collective: those of a
gathered input (a column layer's output, a row layer's input gradient), and those whose result is reduced and scattered (a row
layer's output, a column layer's input gradient). In pieces of the rows, one piece travels while another is multiplied.

There are two ways. `Pieces` is a ring of sends and receives, and runs anywhere (Wang et al. 2023, "Overlap communication with
dependent computation via decomposition in large deep learning models"). `SymmetricMemory` is torch's: each rank reads its peers'
memory over NVLink, without taking processors of the GPU for that; `choose` says whether these ranks can.
"""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.parallel.collectives import Pending, all_gather, gather_objects, reduce_scatter, start_pass_on
from megatron.parallel.context import Group
from megatron.parallel.products import product_into
from megatron.parallel.torch_private import symmetric_memory_operation, unsafe_view


class Overlap(Protocol):
    """Products with a collective of the tensor group, outside of autograd. Every rank of the group calls the same."""

    def gathered(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, group: Group, *, keeps: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Gather x [s/n, b, in] along the sequence and multiply it by the matrix [in, out].

        Args:
            bias: [out], added to the product.
            keeps: whether the whole of x is asked for too.

        Returns:
            x [s, b, in] if it is asked for, and the product [s, b, out].
        """

    def scattered(self, x: torch.Tensor, matrix: torch.Tensor, group: Group) -> torch.Tensor:
        """Multiply x [s, b, in] by the matrix [in, out], sum over the ranks, and keep this rank's part: [s/n, b, out]."""


_FEWEST = 4
"""A product is cut into at least so many pieces. The first needs no gather and the last hides nothing of a reduce-scatter: of two
pieces one would have to hide all that is sent."""


@dataclass(frozen=True)
class Pieces:
    """A ring. The rows of a rank, in one piece or a few, go from rank to rank, and are multiplied, or added to, where they are."""

    reason: str = ""
    """Why it is not symmetric memory, for the log."""

    def __str__(self) -> str:
        return f"pieces that go round a ring: {self.reason}"

    def gathered(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, group: Group, *, keeps: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """See `Overlap`. Of an input that is not kept, the rows of two ranks are there at once."""
        rows, held = group.size * len(x), deque(Pending(piece) for piece in _cut(x.contiguous(), group))
        y = x.new_empty((rows, *x.shape[1:-1], matrix.shape[1]))
        whole = x.new_empty((rows, *x.shape[1:])) if keeps else None
        places = None if whole is None else _on_the_ring(whole, group, group.index)
        of_a_rank, products = len(held), _on_the_ring(y, group, group.index)
        for number, product in enumerate(products):
            piece = held.popleft().wait()
            if number + of_a_rank < len(products):
                held.append(start_pass_on(piece, group, None if places is None else places[number + of_a_rank]))
            if places is not None and number < of_a_rank:
                places[number].copy_(piece)
            product_into(product.flatten(0, -2), piece.flatten(0, -2), matrix, bias)
        return whole, y

    def scattered(self, x: torch.Tensor, matrix: torch.Tensor, group: Group) -> torch.Tensor:
        """See `Overlap`. The sum of a rank's rows begins at the rank behind it and ends there, and is rounded at each, as in NCCL's
        ring. The products of three ranks' rows are there at once."""
        pieces, sums = _on_the_ring(x, group, group.index - 1), deque[Pending]()
        shape = (len(x) // group.size, *x.shape[1:-1], matrix.shape[1])
        of_a_rank = len(pieces) // group.size
        others = len(pieces) - of_a_rank
        for number, piece in enumerate(pieces):
            if number == others:
                part = x.new_empty(shape)
                own = _cut(part, group)
            product = x.new_empty((len(piece), *shape[1:])) if number < others else own[number - others]
            product_into(product.flatten(0, -2), piece.flatten(0, -2), matrix)
            if number >= of_a_rank:
                product.add_(sums.popleft().wait())
            if number < others:
                sums.append(start_pass_on(product, group))
        return part


def _cut(rows: torch.Tensor, group: Group) -> tuple[torch.Tensor, ...]:
    """The pieces of one rank's rows."""
    return rows.chunk(-(-_FEWEST // group.size))


def _on_the_ring(whole: torch.Tensor, group: Group, first: int) -> list[torch.Tensor]:
    """The pieces of all ranks' rows in the order in which they pass this rank: those of rank `first`, then of the one before it."""
    ranks = whole.chunk(group.size)
    return [piece for step in range(group.size) for piece in _cut(ranks[first - step], group)]


@dataclass(frozen=True)
class SymmetricMemory:
    """torch's fused operations (torch/distributed/_symmetric_memory): pieces are read out of the memory of the peers."""

    def __str__(self) -> str:
        return "pieces that are read out of the peers' memory (torch's symmetric memory)"

    def gathered(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, group: Group, *, keeps: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """See `Overlap`."""
        whole, (y,) = symmetric_memory_operation("fused_all_gather_matmul")(
            x.contiguous(), [matrix], 0, _name(group), return_A=keeps
        )
        y = y if bias is None else y.add_(bias)
        return whole, unsafe_view(y, y.shape)  # no view for autograd: the cross entropy writes over logits

    def scattered(self, x: torch.Tensor, matrix: torch.Tensor, group: Group) -> torch.Tensor:
        """See `Overlap`. Partial products are summed in one kernel, in the order of the ranks."""
        part: torch.Tensor = symmetric_memory_operation("fused_matmul_reduce_scatter")(
            x.contiguous(), matrix, "sum", 0, _name(group)
        )
        return part


def choose(group: Group, device: torch.device) -> Overlap:
    """The way for these ranks, which ask together."""
    reason = _why_not(group, device)
    return Pieces(reason) if reason else SymmetricMemory()


def _why_not(group: Group, device: torch.device) -> str:
    """Why symmetric memory cannot be used; empty if it can. The same on every rank."""
    if device.type != "cuda":
        return f"symmetric memory needs CUDA, and the device is {device.type}"
    try:
        symmetric_memory_operation("fused_all_gather_matmul")
    except ImportError as error:
        return f"this torch has no symmetric memory: {error}"
    own = str(torch.cuda.get_device_properties(device).uuid)
    facts: list[tuple[str, str]] = gather_objects((socket.gethostname(), own), group)
    if len({host for host, _ in facts}) > 1:
        return "the tensor ranks are on several nodes"
    if len({gpu for _, gpu in facts}) < group.size:
        return "tensor ranks share a GPU"
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    cut_off = [gpu for _, gpu in facts if gpu in seen and gpu != own and not torch.cuda.can_device_access_peer(device, seen[gpu])]
    if any(gather_objects(bool(cut_off), group)):
        return "the GPUs cannot read each other's memory"
    return next((found for found in gather_objects(_trial(group, device), group) if found), "")


def _trial(group: Group, device: torch.device) -> str:
    """What goes wrong with small numbers, whose products are exact; empty if nothing does."""
    rows, size = 16 * group.size, 16
    x = (torch.arange(rows * size, device=device).view(rows, 1, size) + group.index) % 3 - 1
    matrix = (torch.arange(size * size, device=device).view(size, size) + group.index) % 3 - 1
    x, matrix = x.bfloat16(), matrix.bfloat16()
    part = x[:16].contiguous()
    try:
        whole, y = SymmetricMemory().gathered(part, matrix, None, group, keeps=True)
        scattered = SymmetricMemory().scattered(x, matrix, group)
    except Exception as error:  # noqa: BLE001, whatever it is, the ring does without
        return f"a trial failed: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
    gathered = all_gather(part, group)
    assert whole is not None
    same = torch.equal(whole, gathered) and torch.equal(y, gathered @ matrix)
    return "" if same and torch.equal(scattered, reduce_scatter(x @ matrix, group)) else "a trial gave wrong numbers"


def _name(group: Group) -> str:
    assert group.process_group is not None
    return group.process_group.group_name
