"""Plan which rank gathers and updates which full matrix, and the exchange that carries it out.

Update rules such as Muon compute with full matrices, of which each rank holds shards: tensor ranks hold rows or columns, and data
ranks hold slices of these. Each matrix has one owner among the ranks of a pipeline stage. In a round, every rank sends its shards
to the owners, the owners compute, and each rank receives the results for the elements of its shards. If several ranks hold the same
shard, as replicas do, the rank nearest to the owner sends the shard, and all of these ranks receive the result.

Matrices are assigned in descending order of cost, such as FLOPs, each to the rank with the least load so far (Graham 1969), in
rounds of similar matrices. So all ranks have about equal load in each round, and the exchange of one round overlaps the computation
of another.

The plan depends only on shapes and the layout. Every rank of a stage computes the same plan without communication.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron.parallel.collectives import Pending, start_all_to_all
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamPartition, ParamRecord
from megatron.parallel.tensor_slice import BufferSlice, FlatRange, TensorSlice, map_flat_range
from megatron.parallel.topology import STAGE_AXES

MAX_ROUND_ELEMENTS = 2**24
"""Elements that a rank gathers in one round, unless a single matrix is larger. Large enough to batch products of equal shape, and
small enough that buffers are small compared with the model (32 MiB in bfloat16)."""


@dataclass(frozen=True)
class MatrixShard:
    """Part of a matrix: the elements that one rank holds, or that several ranks hold as replicas."""

    ranks: tuple[int, ...]
    """Ranks that hold the shard, ascending, numbered within the pipeline stage."""
    flat_range: FlatRange
    """Range of the shard's elements in the flattened local parameter. The range is equal on all ranks that hold the shard
    (`ranks`)."""
    slices: tuple[BufferSlice, ...]
    """Rectangular regions of the matrix that the shard consists of, in the order of `flat_range`."""

    @property
    def numel(self) -> int:
        """Number of elements of the shard."""
        return self.flat_range.stop - self.flat_range.start


@dataclass(frozen=True)
class Matrix:
    """Matrix of a parameter, with the shards in which the ranks hold it. The last two dimensions form a matrix; `index` counts the
    matrices over the leading dimensions."""

    record: ParamRecord
    index: int
    shards: tuple[MatrixShard, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and of columns."""
        return self.record.shape[-2], self.record.shape[-1]

    @property
    def numel(self) -> int:
        """Number of elements of the full matrix."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardTransfer:
    """Transfer of one shard: from a rank that holds the shard to the owner of its matrix, and of the results back to all ranks that
    hold the shard."""

    matrix: Matrix
    owner: int
    """Rank, numbered within the pipeline stage, that computes with the full matrix."""
    sender: int
    """Rank, numbered within the pipeline stage, that sends the shard to the owner."""
    shard: MatrixShard


@dataclass(frozen=True)
class MatrixRound:
    """Matrices of a pipeline stage that are gathered, computed and scattered together, in one of the rounds of an update."""

    owned: tuple[tuple[Matrix, ...], ...]
    """For each rank of the pipeline stage, the matrices that it gathers and computes in this round. Matrices that can be
    computed in one batch are adjacent."""

    @cached_property
    def transfers(self) -> tuple[ShardTransfer, ...]:
        """All transfers of shards in the round, ordered by owner, matrix and shard."""
        return tuple(
            ShardTransfer(matrix, owner, min(shard.ranks, key=lambda rank: abs(rank - owner)), shard)
            for owner, matrices in enumerate(self.owned)
            for matrix in matrices
            for shard in matrix.shards
        )


@dataclass(frozen=True)
class MatrixPlan:
    """Plan of one update of a pipeline stage for rules that need full matrices: the rounds in which its ranks gather, compute and
    scatter all matrices."""

    num_ranks: int
    rounds: tuple[MatrixRound, ...]

    @property
    def num_slots(self) -> int:
        """Number of send buffers and of receive buffers for each all-to-all. With several ranks and several rounds it is 2, so that
        one buffer is filled while the other is in flight. Otherwise it is 1."""
        return min(len(self.rounds), 2 if self.num_ranks > 1 else 1)

    @cached_property
    def max_sent(self) -> tuple[int, int]:
        """Largest number of elements that any rank sends in a round, as two numbers: elements of shards sent to the owners of the
        matrices, and elements of computed results sent by owners.

        Elements that a rank sends to itself count too.
        """
        return max((max(row) for row in self._round_loads(0)), default=0), max(
            (max(row) for row in self._round_loads(1)), default=0
        )

    @cached_property
    def max_owned(self) -> int:
        """Largest number of elements of full matrices that any rank gathers and computes in one round. It determines the size of
        the buffers."""
        return max((sum(m.numel for m in matrices) for matrix_round in self.rounds for matrices in matrix_round.owned), default=0)

    @cached_property
    def max_returned(self) -> int:
        """Largest number of elements of computed results that any rank gets back for its shards in one round.

        Elements that a rank gets from itself count too.
        """
        return max((max(row) for row in self._round_loads(2)), default=0)

    @property
    def buffer_elements(self) -> int:
        """Number of elements in all buffers for the exchange of matrices. It is the same on all ranks of the pipeline stage."""
        max_shard_elements, max_result_elements = self.max_sent
        exchange_elements = max_shard_elements + max_result_elements  # a single rank uses its send buffers to receive
        if self.num_ranks > 1:
            exchange_elements += self.max_owned + self.max_returned
        return self.num_slots * exchange_elements + 2 * self.max_owned

    def compute_rank_costs(self, cost: Callable[[Matrix], float]) -> list[float]:
        """Return for each rank of the pipeline stage the total cost of the matrices that it computes in an update.

        Args:
            cost: returns the cost of computing with a matrix, for example its FLOPs.
        """
        costs = [0.0] * self.num_ranks
        for matrix_round in self.rounds:
            for owner, matrices in enumerate(matrix_round.owned):
                costs[owner] += sum(cost(matrix) for matrix in matrices)
        return costs

    def count_sent_elements(self) -> list[int]:
        """Return how many elements each rank of the pipeline stage sends to other ranks in an update. A rank sends its gradient
        shards to the ranks that compute the matrices, and the computed results back to the ranks that hold the shards."""
        sent = [0] * self.num_ranks
        for transfer in itertools.chain.from_iterable(matrix_round.transfers for matrix_round in self.rounds):
            sent[transfer.sender] += transfer.shard.numel * (transfer.sender != transfer.owner)
            sent[transfer.owner] += transfer.shard.numel * sum(rank != transfer.owner for rank in transfer.shard.ranks)
        return sent

    def _round_loads(self, role: int) -> list[list[int]]:
        """Return how many elements each rank sends or receives in each round: a list per round, with one number per rank.

        Args:
            role: 0 counts elements of shards sent to owners, 1 elements of results sent by owners, 2 elements of results received.
        """
        loads = []
        for matrix_round in self.rounds:
            rank_loads = [0] * self.num_ranks
            for transfer in matrix_round.transfers:
                for rank in ((transfer.sender,), (transfer.owner,) * len(transfer.shard.ranks), transfer.shard.ranks)[role]:
                    rank_loads[rank] += transfer.shard.numel
            loads.append(rank_loads)
        return loads


def plan_matrices(params: Iterable[ParamPartition], context: ParallelContext, cost: Callable[[Matrix], float]) -> MatrixPlan:
    """Plan which rank of a pipeline stage computes which full matrix, and in which round, for the parameters whose update rule
    needs full matrices.

    Args:
        params: these parameters of the stage, in an order that is the same on all ranks.
        cost: returns the cost of computing with a matrix, for example its FLOPs. Ranks get about equal sums of costs.
    """
    num_ranks = context.group(*STAGE_AXES).size
    shard_map = _MatrixShards(context)
    matrices = [matrix for param in params for matrix in shard_map.get_matrices(param)]
    remaining = sorted(matrices, key=lambda m: (-cost(m), m.shape))  # a stable sort
    rank_loads = [(0.0, rank) for rank in range(num_ranks)]  # a heap of (cost so far, rank)
    rounds = []
    while remaining:
        round_size = num_ranks * max(1, MAX_ROUND_ELEMENTS // remaining[0].numel)
        round_matrices, remaining = remaining[:round_size], remaining[round_size:]
        owned: list[list[Matrix]] = [[] for _ in range(num_ranks)]
        for matrix in round_matrices:
            load, rank = heapq.heappop(rank_loads)
            owned[rank].append(matrix)
            heapq.heappush(rank_loads, (load + cost(matrix), rank))
        rounds.append(MatrixRound(tuple(tuple(sorted(rank_matrices, key=_build_batch_key)) for rank_matrices in owned)))
    return MatrixPlan(num_ranks, tuple(rounds))


def group_by_batch_key(matrices: Sequence[Matrix]) -> list[list[Matrix]]:
    """Group matrices that can be computed in one batch. Such matrices must be adjacent, as in `MatrixRound.owned`."""
    return [list(group) for _, group in itertools.groupby(matrices, key=_build_batch_key)]


def _build_batch_key(matrix: Matrix) -> tuple[int, ...]:
    """Return a key that is equal for matrices that can be computed in one batch: the shape, and the arrangement of attention heads
    in the rows."""
    heads = matrix.record.fused_heads
    return (*matrix.shape, *((heads.queries_per_group, heads.head_size) if heads else ()))


class _MatrixShards:
    """Finder of the matrices in the parameters of a pipeline stage, and of the ranks that hold each shard of a matrix."""

    def __init__(self, context: ParallelContext) -> None:
        self._axis_sizes = context.axis_sizes
        ranks = context.group(*STAGE_AXES).ranks
        self._coordinates = [context.topology.get_coordinates(rank) for rank in ranks]
        self._topology, self._ranks = context.topology, ranks
        self._ranks_by_shard: dict[tuple[tuple[str, ...], int], dict[int, list[int]]] = {}

    def get_matrices(self, param: ParamPartition) -> list[Matrix]:
        """Return the matrices of a parameter with their shards."""
        record = param.record
        local_shape = record.get_local_shape(self._axis_sizes)
        num_local_matrices, matrix_numel = math.prod(local_shape[:-2]), math.prod(local_shape[-2:])
        assert all(split.dim >= len(local_shape) - 2 for split in record.splits), f"{record.name} is split between matrices"
        shards: list[list[MatrixShard]] = [[] for _ in range(num_local_matrices)]
        for shard_index, flat_range in enumerate(param.get_flat_ranges(num_local_matrices * matrix_numel)):
            replicas: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for rank in self._shard_ranks(param.axes, param.num_ranks)[param.first_rank + shard_index]:
                replicas[tuple(self._coordinates[rank][split.axis] for split in record.splits)].append(rank)
            for ranks in replicas.values():
                local_slice = record.get_local_slice(self._axis_sizes, self._coordinates[ranks[0]])
                for index in range(flat_range.start // matrix_numel, -(-flat_range.stop // matrix_numel)):
                    matrix_range = FlatRange(
                        max(flat_range.start, index * matrix_numel), min(flat_range.stop, (index + 1) * matrix_numel)
                    )
                    buffer_slices = map_flat_range(local_shape, local_slice, matrix_range)
                    if buffer_slices:
                        unpadded_range = FlatRange(
                            matrix_range.start, matrix_range.start + sum(buffer_slice.slice.numel for buffer_slice in buffer_slices)
                        )
                        shards[index].append(
                            MatrixShard(tuple(ranks), unpadded_range, tuple(map(_drop_leading_dims, buffer_slices)))
                        )
        return [Matrix(record, index, tuple(matrix_shards)) for index, matrix_shards in enumerate(shards)]

    def _shard_ranks(self, axes: Sequence[str], num_ranks: int) -> dict[int, list[int]]:
        """Return the ranks, numbered within the pipeline stage, that hold each shard of a parameter. The key is the position of the
        shard's rank among the ranks that divide the parameter's update.

        Args:
            axes: axes of the ranks that divide the update.
            num_ranks: number of ranks that divide the update.
        """
        key = (tuple(axes), num_ranks)
        if key not in self._ranks_by_shard:
            self._ranks_by_shard[key] = defaultdict(list)
            ranks_in_group: dict[tuple[int, ...], dict[int, int]] = {}
            for stage_rank, (rank, coordinates) in enumerate(zip(self._ranks, self._coordinates, strict=True)):
                other_coordinates = tuple(coordinates[axis] for axis in STAGE_AXES if axis not in axes)
                if other_coordinates not in ranks_in_group:
                    ranks_in_group[other_coordinates] = {
                        group_rank: i for i, group_rank in enumerate(self._topology.group(rank, *axes))
                    }
                self._ranks_by_shard[key][ranks_in_group[other_coordinates][rank] % num_ranks].append(stage_rank)
        return self._ranks_by_shard[key]


def _drop_leading_dims(buffer_slice: BufferSlice) -> BufferSlice:
    """Convert a slice of a parameter that lies within one matrix to a slice of that matrix, without the leading dimensions."""
    return BufferSlice(TensorSlice(buffer_slice.slice.offsets[-2:], buffer_slice.slice.sizes[-2:]), buffer_slice.offset)


# ---- Exchange of matrices by a `MatrixPlan`: bring shards to the owners of the full matrices, and bring the results back.
#
# While the owners compute the matrices of one round, the shards of the next round and the results of the previous round are in
# flight. Buffers and all views of them are created once. Their sizes are the maximum over the ranks, so the plan gives them for
# any rank.

Compute = Callable[[int], None]
"""Function that computes the results of a round, given its index. It reads `MatrixExchange.full_matrices` and writes
`MatrixExchange.results`."""


@dataclass(frozen=True)
class LocalShard:
    """This rank's shard of a parameter, with the values to send to the owners of its matrices."""

    flat_range: FlatRange
    """Range of the shard in the flattened local parameter."""
    values: torch.Tensor
    """Flattened values of the shard, such as the momentum, that this rank sends to the owners of the matrices."""


@dataclass(frozen=True)
class ReturnedResult:
    """Part of the update of a matrix, returned to this rank by the matrix's owner: the elements in this rank's shard of the
    parameter."""

    param_name: str
    """Global name of the parameter."""
    shard_range: FlatRange
    """Range of the returned elements within the rank's shard."""
    result: torch.Tensor
    """Returned elements of the update, flattened, in the dtype in which ranks exchange matrices."""


@dataclass(frozen=True)
class _Exchange:
    """One all-to-all between the ranks of a pipeline stage, with its buffers and the tensors to copy into the send buffer."""

    receive_buffer: torch.Tensor
    send_buffer: torch.Tensor
    splits: tuple[list[int], list[int]]
    """Number of elements received from each rank, and number of elements sent to each rank."""
    send_views: list[torch.Tensor]
    """Views of `send_buffer` that are filled before the exchange, one for each of `send_sources`."""
    send_sources: list[torch.Tensor]
    """Tensors that are copied into `send_views`, in the same order."""

    def start(self, context: ParallelContext) -> Pending:
        """Fill the send buffer and start the all-to-all."""
        for view, source in zip(self.send_views, self.send_sources, strict=True):
            view.copy_(source, non_blocking=True)
        return start_all_to_all(self.receive_buffer, self.send_buffer, self.splits, context.group(*STAGE_AXES))


@dataclass(frozen=True)
class _RoundExchange:
    """The two all-to-alls of one round on this rank: shards go to the owners of the matrices, and computed results come back."""

    gather: _Exchange
    """Exchange that brings shards to the owners."""
    received_copies: list[tuple[torch.Tensor, torch.Tensor]]
    """Pairs of a region of a full matrix and the received elements to copy there."""
    scatter: _Exchange
    """Exchange that brings results back to the ranks that hold the shards."""
    returned_results: list[ReturnedResult]


class MatrixExchange:
    """Executor of a `MatrixPlan` on this rank: sends the shards of each matrix to the rank that owns the matrix, and sends what the
    owner computes from the full matrix back to the ranks that hold the shards. All of them are ranks of the same pipeline stage.

    Args:
        local_shards: shards of this rank by the global name of their parameter.
        dtype: dtype of the exchange and of the full matrices.
    """

    def __init__(
        self, plan: MatrixPlan, local_shards: Mapping[str, LocalShard], context: ParallelContext, dtype: torch.dtype
    ) -> None:
        self.plan, self._local_shards, self._context = plan, local_shards, context
        self._stage_rank = context.group(*STAGE_AXES).rank
        device, num_slots, (max_shard_elements, max_result_elements) = context.device, plan.num_slots, plan.max_sent

        def allocate(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.full_matrices, self.results = allocate(plan.max_owned), allocate(plan.max_owned)
        """Full matrices of a round, one after the other. `results` has the results in the same order. Both may be overwritten."""
        self._gather_send, self._scatter_send = allocate(num_slots, max_shard_elements), allocate(num_slots, max_result_elements)
        is_single_rank = plan.num_ranks == 1
        self._gather_receive = self._gather_send if is_single_rank else allocate(num_slots, plan.max_owned)
        self._scatter_receive = self._scatter_send if is_single_rank else allocate(num_slots, plan.max_returned)
        self._round_exchanges = [self._build_round(matrix_round, i % num_slots) for i, matrix_round in enumerate(plan.rounds)]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All buffers for the exchange of matrices. They stay allocated between updates."""
        buffers = [
            self.full_matrices,
            self.results,
            self._gather_send,
            self._scatter_send,
            self._gather_receive,
            self._scatter_receive,
        ]
        return list({id(buffer): buffer for buffer in buffers}.values())

    def get_owned_matrices(self, round_index: int) -> Sequence[Matrix]:
        """Return the matrices that this rank gathers and computes in a round, in their order in `full_matrices`."""
        return self.plan.rounds[round_index].owned[self._stage_rank]

    def run(self, compute: Compute) -> Iterator[Sequence[ReturnedResult]]:
        """Run all rounds, in order. For each round, yield the computed results that this rank received for its shards.

        All ranks of the stage must call this together.

        Args:
            compute: computes the results of this rank's full matrices in a round, given the index of the round.
        """
        context, rounds = self._context, self._round_exchanges
        pending_gather = rounds[0].gather.start(context) if rounds else None
        previous: tuple[Pending, _RoundExchange] | None = None
        for round_index, round_exchange in enumerate(rounds):
            next_gather = (
                rounds[round_index + 1].gather.start(context) if round_index + 1 < len(rounds) and self.plan.num_slots > 1 else None
            )
            assert pending_gather is not None
            pending_gather.wait()
            for matrix_view, source in round_exchange.received_copies:
                matrix_view.copy_(source)
            compute(round_index)
            pending_scatter = round_exchange.scatter.start(context)
            if previous is not None:
                previous[0].wait()
                yield previous[1].returned_results
            previous, pending_gather = (pending_scatter, round_exchange), next_gather
            if pending_gather is None and round_index + 1 < len(
                rounds
            ):  # a single rank has one slot, which is free once its results are consumed
                pending_scatter.wait()
                yield round_exchange.returned_results
                previous, pending_gather = None, rounds[round_index + 1].gather.start(context)
        if previous is not None:
            previous[0].wait()
            yield previous[1].returned_results

    def _build_round(self, matrix_round: MatrixRound, slot: int) -> _RoundExchange:
        """Build the two all-to-alls of a round, with all views of the buffers.

        Args:
            slot: index of the send and receive buffers to use.
        """
        owned = matrix_round.owned[self._stage_rank]
        offsets, offset = {}, 0
        for matrix in owned:
            offsets[matrix], offset = offset, offset + matrix.numel
        stage_rank = self._stage_rank
        ranks = range(self.plan.num_ranks)
        to_owners = [
            [transfer for transfer in matrix_round.transfers if transfer.sender == stage_rank and transfer.owner == owner]
            for owner in ranks
        ]
        from_senders = [
            [transfer for transfer in matrix_round.transfers if transfer.owner == stage_rank and transfer.sender == sender]
            for sender in ranks
        ]
        to_holders = [
            [transfer for transfer in matrix_round.transfers if transfer.owner == stage_rank and holder in transfer.shard.ranks]
            for holder in ranks
        ]
        from_owners = [
            [transfer for transfer in matrix_round.transfers if transfer.owner == owner and stage_rank in transfer.shard.ranks]
            for owner in ranks
        ]

        def view_slice(buffer: torch.Tensor, transfer: ShardTransfer, slice_index: int) -> torch.Tensor:
            matrix = buffer[offsets[transfer.matrix] :][: transfer.matrix.numel].view(transfer.matrix.shape)
            return matrix[transfer.shard.slices[slice_index].slice.index]

        gather_send, gather_receive = self._gather_send[slot], self._gather_receive[slot]
        gather = self._build_exchange(gather_receive, from_senders, gather_send, to_owners)
        for transfer, view in _iter_views(gather_send, to_owners):
            gather.send_views.append(view)
            gather.send_sources.append(self._get_local_values(transfer))
        received_copies = []
        for transfer, view in _iter_views(gather_receive, from_senders):
            for slice_index, buffer_slice in enumerate(transfer.shard.slices):
                received = view[buffer_slice.offset : buffer_slice.offset + buffer_slice.slice.numel].view(buffer_slice.slice.sizes)
                received_copies.append((view_slice(self.full_matrices, transfer, slice_index), received))
        scatter_send, scatter_receive = self._scatter_send[slot], self._scatter_receive[slot]
        scatter = self._build_exchange(scatter_receive, from_owners, scatter_send, to_holders)
        for transfer, view in _iter_views(scatter_send, to_holders):
            for slice_index, buffer_slice in enumerate(transfer.shard.slices):
                scatter.send_views.append(
                    view[buffer_slice.offset : buffer_slice.offset + buffer_slice.slice.numel].view(buffer_slice.slice.sizes)
                )
                scatter.send_sources.append(view_slice(self.results, transfer, slice_index))
        returned_results = [
            ReturnedResult(transfer.matrix.record.name, self._compute_range_in_shard(transfer), view)
            for transfer, view in _iter_views(scatter_receive, from_owners)
        ]
        return _RoundExchange(gather, received_copies, scatter, returned_results)

    def _build_exchange(
        self,
        receive_buffer: torch.Tensor,
        receives: Sequence[Sequence[ShardTransfer]],
        send_buffer: torch.Tensor,
        sends: Sequence[Sequence[ShardTransfer]],
    ) -> _Exchange:
        """Build an all-to-all whose list of tensors to copy into the send buffer is still empty.

        Args:
            receives: for each rank of the stage, the transfers whose elements the local rank receives from it.
            sends: for each rank of the stage, the transfers whose elements the local rank sends to it.
        """
        receive_splits, send_splits = (
            [sum(transfer.shard.numel for transfer in transfers) for transfers in direction] for direction in (receives, sends)
        )
        return _Exchange(
            receive_buffer[: sum(receive_splits)], send_buffer[: sum(send_splits)], (receive_splits, send_splits), [], []
        )

    def _compute_range_in_shard(self, transfer: ShardTransfer) -> FlatRange:
        """Return the range of a transfer's elements within this rank's shard of the parameter."""
        local_range, transfer_range = self._local_shards[transfer.matrix.record.name].flat_range, transfer.shard.flat_range
        assert local_range.start <= transfer_range.start and transfer_range.stop <= local_range.stop, (
            f"{transfer.matrix.record.name}: {transfer_range} lies not in {local_range}"
        )
        return FlatRange(transfer_range.start - local_range.start, transfer_range.stop - local_range.start)

    def _get_local_values(self, transfer: ShardTransfer) -> torch.Tensor:
        """Return the values of this rank's shard that belong to a transfer."""
        shard_range = self._compute_range_in_shard(transfer)
        return self._local_shards[transfer.matrix.record.name].values[shard_range.start : shard_range.stop]


def _iter_views(
    buffer: torch.Tensor, transfers_by_rank: Sequence[Sequence[ShardTransfer]]
) -> Iterator[tuple[ShardTransfer, torch.Tensor]]:
    """Yield each transfer with its view of a flat buffer. The buffer holds the transfers of the first rank, then those of the
    second, and so on."""
    offset = 0
    for transfer in (transfer for transfers in transfers_by_rank for transfer in transfers):
        yield transfer, buffer[offset : offset + transfer.shard.numel]
        offset += transfer.shard.numel
