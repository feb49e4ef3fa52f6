"""A product along with the collective on one side of it, so that each hides the other (`--tp-comm-overlap`).

Shapes: `s` sequence, `b` microbatch, `n` tensor ranks. Under sequence parallelism products wait for a collective: those of a
gathered input (a column layer's output, a row layer's input gradient), and those whose result is reduced and scattered (a row
layer's output, a column layer's input gradient). In pieces, a rank's rows each, one piece travels while another is multiplied.

There are two ways. `Pieces` is a ring of sends and receives, and runs anywhere (Wang et al. 2023, "Overlap communication with
dependent computation via decomposition in large deep learning models"). `SymmetricMemory` is torch's: each rank reads its peers'
memory over NVLink, without taking processors of the GPU for that; `choose` says whether these ranks can.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.parallel.collectives import Pending, all_gather, gather_objects, reduce_scatter, start_pass_on
from megatron.parallel.context import Group
from megatron.parallel.products import product_into


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


@dataclass(frozen=True)
class Pieces:
    """A ring. Each rank's rows are a piece; it goes from rank to rank, and is multiplied, or added to, where it is."""

    reason: str = ""
    """Why it is not symmetric memory, for the log."""

    def __str__(self) -> str:
        return f"pieces that go round a ring: {self.reason}"

    def gathered(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, group: Group, *, keeps: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """See `Overlap`. Of an input that is not kept, two pieces are there at once."""
        piece, rows = x.contiguous(), group.size * len(x)
        y = x.new_empty((rows, *x.shape[1:-1], matrix.shape[1]))
        whole = x.new_empty((rows, *x.shape[1:])) if keeps else None
        products, parts = y.chunk(group.size), whole.chunk(group.size) if whole is not None else None
        if parts is not None:
            parts[group.index].copy_(piece)
        for step in range(group.size):
            ahead: Pending | None = None
            if step + 1 < group.size:
                ahead = start_pass_on(piece, group, None if parts is None else parts[group.index - step - 1])
            product_into(products[group.index - step].flatten(0, -2), piece.flatten(0, -2), matrix, bias)
            if ahead is not None:
                piece = ahead.wait()
        return whole, y

    def scattered(self, x: torch.Tensor, matrix: torch.Tensor, group: Group) -> torch.Tensor:
        """See `Overlap`. The sum of a piece begins at the rank behind its own and ends at its own. It is rounded at each rank, as
        NCCL's ring does; and three pieces are there at once, where the whole product is not."""
        pieces = x.chunk(group.size)

        def product(place: int) -> torch.Tensor:
            piece = pieces[place]
            out = piece.new_empty((*piece.shape[:-1], matrix.shape[1]))
            product_into(out.flatten(0, -2), piece.flatten(0, -2), matrix)
            return out

        def next_sum(total: torch.Tensor, place: int) -> torch.Tensor:
            arriving = start_pass_on(total, group)
            return product(place).add_(arriving.wait())

        total = product(group.index - 1)
        for step in range(1, group.size):
            total = next_sum(total, group.index - 1 - step)
        return total


class SymmetricMemory:
    """torch's fused operations (torch/distributed/_symmetric_memory): pieces are read out of the memory of the peers."""

    def __str__(self) -> str:
        return "pieces that are read out of the peers' memory (torch's symmetric memory)"

    def gathered(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, group: Group, *, keeps: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """See `Overlap`."""
        whole, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x.contiguous(), [matrix], 0, _name(group), return_A=keeps)
        y = y if bias is None else y.add_(bias)
        return whole, torch.ops.aten._unsafe_view(y, y.shape)  # no view for autograd: the cross entropy writes over logits

    def scattered(self, x: torch.Tensor, matrix: torch.Tensor, group: Group) -> torch.Tensor:
        """See `Overlap`. Partial products are summed in one kernel, in the order of the ranks."""
        part: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), matrix, "sum", 0, _name(group))
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
        import torch.distributed._symmetric_memory  # defines the operations
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
