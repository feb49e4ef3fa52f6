"""Overlap of matrix products with the collective before or after them (`--tp-comm-overlap`).

With sequence parallelism, matrix products are adjacent to a collective. The input is all-gathered for the output of a
column-parallel layer and the input gradient of a row-parallel layer. The result is reduce-scattered for the output of a
row-parallel layer and the input gradient of a column-parallel layer. Here the rows are divided into blocks: one block is
communicated while another is multiplied.

There are two implementations, and `choose_overlap` selects one. `RingOverlap` uses sends and receives in a ring and runs on every
device (Wang et al. 2023, "Overlap communication with dependent computation via decomposition in large deep learning models").
`SymmetricMemoryOverlap` uses torch's symmetric memory: each rank reads the memory of its peers over NVLink, without using
multiprocessors of the GPU.

Shapes: `s` sequence, `b` microbatch, `n` tensor-parallel ranks, [in, out] the matrix of the product.
"""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.parallel.collectives import Pending, all_gather, gather_objects, reduce_scatter, start_ring_shift
from megatron.parallel.context import Group
from megatron.parallel.matmul import matmul_into
from megatron.parallel.torch_private import find_symmetric_memory_op, unsafe_view


class Overlap(Protocol):
    """Interface for matrix products that overlap with a collective of the tensor-parallel group. The methods run outside of
    autograd.

    All ranks of the group call the same methods in the same order.
    """

    def all_gather_matmul(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, group: Group, *, returns_input: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """All-gather x [s/n, b, in] of `n` ranks along the sequence and multiply it by the matrix [in, out].

        Args:
            bias: [out], added to the product; None for no bias.
            returns_input: return the gathered x too.

        Returns:
            The gathered x [s, b, in], or None unless `returns_input`; and the product [s, b, out].
        """

    def matmul_reduce_scatter(self, x: torch.Tensor, matrix: torch.Tensor, group: Group) -> torch.Tensor:
        """Multiply x [s, b, in] by the matrix [in, out] and reduce-scatter the product along the sequence over `n` ranks: [s/n, b,
        out]."""


_MIN_ROW_BLOCKS = 4
"""Minimum number of blocks of a product, over all ranks. The first block needs no all-gather, and during the last block of a
reduce-scatter nothing is communicated. So with two blocks, a single block would have to hide all communication."""


@dataclass(frozen=True)
class RingOverlap:
    """Overlap of matrix products with a ring of sends and receives.

    The rows (tokens) of a rank form one or more blocks. For an all-gather, blocks of the input travel from rank to rank; for a
    reduce-scatter, partial sums of blocks of the output. Meanwhile each rank multiplies another block.
    """

    reason: str = ""
    """Reason why the ring is used instead of symmetric memory, for the log."""

    def __str__(self) -> str:
        return f"a ring of sends and receives: {self.reason}"

    def all_gather_matmul(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, group: Group, *, returns_input: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """All-gather x [s/n, b, in] and multiply it by the matrix [in, out]. The rows of one rank are multiplied while those of the
        next rank are received.

        Unless `returns_input`, only the rows of two ranks are in memory at a time.
        """
        rows, received = group.size * len(x), deque(Pending(block) for block in _split_rows(x.contiguous(), group))
        y = x.new_empty((rows, *x.shape[1:-1], matrix.shape[1]))
        gathered_x = x.new_empty((rows, *x.shape[1:])) if returns_input else None
        x_blocks = None if gathered_x is None else _split_in_ring_order(gathered_x, group, group.rank)
        blocks_per_rank, y_blocks = len(received), _split_in_ring_order(y, group, group.rank)
        for block_index, y_block in enumerate(y_blocks):
            block = received.popleft().wait()
            if block_index + blocks_per_rank < len(y_blocks):
                received.append(
                    start_ring_shift(block, group, None if x_blocks is None else x_blocks[block_index + blocks_per_rank])
                )
            if x_blocks is not None and block_index < blocks_per_rank:
                x_blocks[block_index].copy_(block)
            matmul_into(y_block.flatten(0, -2), block.flatten(0, -2), matrix, bias)
        return gathered_x, y

    def matmul_reduce_scatter(self, x: torch.Tensor, matrix: torch.Tensor, group: Group) -> torch.Tensor:
        """Multiply x [s, b, in] by the matrix [in, out] and reduce-scatter the product: [s/n, b, out].

        The partial sum for the rows of a rank starts at the next rank of the ring and ends at the rank itself. Each rank on the way
        adds its product and rounds the sum, as in the ring of NCCL. Products for the rows of at most three ranks are in memory at a
        time.
        """
        x_blocks, partial_sums = _split_in_ring_order(x, group, group.rank - 1), deque[Pending]()
        shape = (len(x) // group.size, *x.shape[1:-1], matrix.shape[1])
        blocks_per_rank = len(x_blocks) // group.size
        num_remote_blocks = len(x_blocks) - blocks_per_rank
        for block_index, x_block in enumerate(x_blocks):
            if block_index == num_remote_blocks:
                y = x.new_empty(shape)
                local_blocks = _split_rows(y, group)
            product = (
                x.new_empty((len(x_block), *shape[1:]))
                if block_index < num_remote_blocks
                else local_blocks[block_index - num_remote_blocks]
            )
            matmul_into(product.flatten(0, -2), x_block.flatten(0, -2), matrix)
            if block_index >= blocks_per_rank:
                product.add_(partial_sums.popleft().wait())
            if block_index < num_remote_blocks:
                partial_sums.append(start_ring_shift(product, group))
        return y


def _split_rows(rows: torch.Tensor, group: Group) -> tuple[torch.Tensor, ...]:
    """Split the rows of one rank into blocks, so that one block is sent while another is multiplied. All ranks together have at
    least `_MIN_ROW_BLOCKS` blocks."""
    return rows.chunk(-(-_MIN_ROW_BLOCKS // group.size))


def _split_in_ring_order(x: torch.Tensor, group: Group, first_rank: int) -> list[torch.Tensor]:
    """Split the rows of all ranks into blocks, in the order in which this rank multiplies them.

    The order starts with the rows of `first_rank` and goes backwards through the ring.
    """
    rank_rows = x.chunk(group.size)
    return [block for step in range(group.size) for block in _split_rows(rank_rows[first_rank - step], group)]


@dataclass(frozen=True)
class SymmetricMemoryOverlap:
    """Overlap by torch's fused operations (torch/distributed/_symmetric_memory), in which each rank reads blocks from the memory of
    its peers."""

    def __str__(self) -> str:
        return "reads of the peers' memory (torch's symmetric memory)"

    def all_gather_matmul(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, group: Group, *, returns_input: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """All-gather x [s/n, b, in] and multiply it by the matrix [in, out], in torch's fused operation."""
        gathered_x, (y,) = find_symmetric_memory_op("fused_all_gather_matmul")(
            x.contiguous(), [matrix], 0, _get_process_group_name(group), return_A=returns_input
        )
        y = y if bias is None else y.add_(bias)
        return gathered_x, unsafe_view(y, y.shape)  # not a view for autograd: cross entropy overwrites the logits

    def matmul_reduce_scatter(self, x: torch.Tensor, matrix: torch.Tensor, group: Group) -> torch.Tensor:
        """Multiply x [s, b, in] by the matrix [in, out] and reduce-scatter the product: [s/n, b, out], in torch's fused operation.

        A single kernel sums the partial products, in the order of the ranks.
        """
        y: torch.Tensor = find_symmetric_memory_op("fused_matmul_reduce_scatter")(
            x.contiguous(), matrix, "sum", 0, _get_process_group_name(group)
        )
        return y


def choose_overlap(group: Group, device: torch.device) -> Overlap:
    """Select how the matrix products of a tensor-parallel group overlap with its collectives: by symmetric memory if it works,
    otherwise by a ring of sends and receives.

    All ranks of the group call this function together.
    """
    reason = _find_symmetric_memory_problem(group, device)
    return RingOverlap(reason) if reason else SymmetricMemoryOverlap()


def _find_symmetric_memory_problem(group: Group, device: torch.device) -> str:
    """Return why symmetric memory cannot be used, or "" if it can. The result is the same on every rank."""
    if device.type != "cuda":
        return f"symmetric memory needs CUDA, and the device is {device.type}"
    try:
        find_symmetric_memory_op("fused_all_gather_matmul")
    except ImportError as error:
        return f"this torch has no symmetric memory: {error}"
    local_uuid = str(torch.cuda.get_device_properties(device).uuid)
    host_and_uuids: list[tuple[str, str]] = gather_objects((socket.gethostname(), local_uuid), group)
    if len({host for host, _ in host_and_uuids}) > 1:
        return "the tensor ranks are on several nodes"
    if len({uuid for _, uuid in host_and_uuids}) < group.size:
        return "tensor ranks share a GPU"
    visible_devices = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    unreachable = [
        uuid
        for _, uuid in host_and_uuids
        if uuid in visible_devices and uuid != local_uuid and not torch.cuda.can_device_access_peer(device, visible_devices[uuid])
    ]
    if any(gather_objects(bool(unreachable), group)):
        return "the GPUs cannot read each other's memory"
    return next((problem for problem in gather_objects(_try_symmetric_memory(group, device), group) if problem), "")


def _try_symmetric_memory(group: Group, device: torch.device) -> str:
    """Run both operations of `SymmetricMemoryOverlap` and compare their results with those of plain collectives. The inputs are
    small integers, so the products are exact.

    Returns:
        What went wrong, or "" if the results are equal.
    """
    rows, size = 16 * group.size, 16
    x = (torch.arange(rows * size, device=device).view(rows, 1, size) + group.rank) % 3 - 1
    matrix = (torch.arange(size * size, device=device).view(size, size) + group.rank) % 3 - 1
    x, matrix = x.bfloat16(), matrix.bfloat16()
    local_rows = x[:16].contiguous()
    try:
        gathered_x, y = SymmetricMemoryOverlap().all_gather_matmul(local_rows, matrix, None, group, returns_input=True)
        scattered = SymmetricMemoryOverlap().matmul_reduce_scatter(x, matrix, group)
    except Exception as error:  # noqa: BLE001, after any error the ring is used instead
        return f"a test of it failed: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
    gathered = all_gather(local_rows, group)
    assert gathered_x is not None
    is_equal = torch.equal(gathered_x, gathered) and torch.equal(y, gathered @ matrix)
    return "" if is_equal and torch.equal(scattered, reduce_scatter(x @ matrix, group)) else "a test of it gave wrong results"


def _get_process_group_name(group: Group) -> str:
    assert group.process_group is not None
    return group.process_group.group_name
