"""Signatures that gradients would have if some axes were left out of their sum over ranks. If the actual signature of a gradient
equals one of these, the audit reports the axes that were left out. A signature consists of four signed sums and the sum of squares
of a tensor (`signature.py`).

If axes are left out, the shard of a rank contains only the sum over the remaining axes. This is the sum over those ranks that have
equal coordinates along the omitted axes. Each rank therefore computes the signature of those elements of its local gradients that
these ranks count in the global gradient norm. Summed over all ranks, these signatures are the signature of all shards together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord, Shard
from megatron.parallel.tensor_slice import BufferSlice, FlatRange
from megatron.parallel.topology import GRADIENT_AXES, Topology
from megatron_lab.audit.signature import compute_buffer_signature
from megatron_lab.audit.trace_file import SIGNATURE_SIZE

_AXES = ("tp", *GRADIENT_AXES)
OMITTED_AXES = tuple(axes for count in range(1, len(_AXES)) for axes in itertools.combinations(_AXES, count))
"""Sets of axes that may be missing in a sum over more axes. The set of all axes is not included: if all are missing, a rank
notices by itself that its shard contains its local gradient."""


def get_summed_axes(record: ParamRecord, topology: Topology) -> tuple[str, ...]:
    """Return the axes of size greater than 1 over which the gradient of a parameter is summed: some of "tp", "cp" and "dp", or
    "edp" for experts."""
    return tuple(axis for axis in record.partial_axes if topology.get_size(axis) > 1)


class PartialSumSignatures:
    """Computes the signatures (four signed sums and the sum of squares) that the gradients in the shards would have if some axes
    were left out of the sum over ranks. They are computed from the local gradients of one step.

    Args:
        shards: shards of this rank.
        row_of: row of `signatures` for each parameter, by name.
    """

    def __init__(self, shards: Sequence[Shard], row_of: Mapping[str, int], context: ParallelContext) -> None:
        self._row_of, self._context, topology = row_of, context, context.topology
        self.signatures = torch.zeros(len(OMITTED_AXES), len(row_of), SIGNATURE_SIZE, dtype=torch.float64, device=context.device)
        """This rank's summands of the signatures of all shards: float64 [len(OMITTED_AXES), number of parameters, 5]."""
        multi_axis_shards = [
            shard for shard in shards if len(get_summed_axes(shard.record, topology)) > 1 and not shard.record.tied
        ]
        counted_ranges = {
            shard.record.name: (shard.flat_range.start + shard.norm_range.start, len(shard.norm_range))
            for shard in multi_axis_shards
        }
        stage_group = context.group(*_AXES)
        self._counted_ranges = dict(zip(stage_group.ranks, gather_objects(counted_ranges, stage_group), strict=True))
        self._ranges: dict[str, list[tuple[int, FlatRange, list[BufferSlice]]]] = {}

    def add_grad(self, record: ParamRecord, grad: torch.Tensor) -> None:
        """Add one local gradient of a parameter to the signatures (four signed sums and the sum of squares) of the parameter, one
        signature for each set of axes that the sum over ranks may leave out.

        Args:
            grad: gradient in the shape of this rank's part of the parameter.
        """
        if record.name not in self._ranges:
            self._ranges[record.name] = [*self._find_ranges(record)]
        for omitted_index, flat_range, buffer_slices in self._ranges[record.name]:
            elements = grad.view(-1)[flat_range.start : flat_range.stop]
            self.signatures[omitted_index, self._row_of[record.name]] += compute_buffer_signature(
                record.name, buffer_slices, elements
            )

    def _find_ranges(self, record: ParamRecord) -> Iterator[tuple[int, FlatRange, list[BufferSlice]]]:
        """Yield the ranges of the local gradient that this rank would contribute to the shards of each rank if axes were left out
        of the sum.

        Yields:
            index of the set of omitted axes in `OMITTED_AXES`, range of the flattened local gradient, and slices of the global
            parameter in this range.
        """
        context = self._context
        summed_axes = get_summed_axes(record, context.topology)
        for omitted_index, omitted_axes in enumerate(OMITTED_AXES):
            remaining_axes = [axis for axis in summed_axes if axis not in omitted_axes]
            if remaining_axes and {*omitted_axes} < {*summed_axes}:
                for rank in context.topology.group(context.rank, *remaining_axes):
                    start, size = self._counted_ranges[rank].get(record.name, (0, 0))
                    if size:
                        flat_range = FlatRange(start, start + size)
                        yield omitted_index, flat_range, record.get_slices(flat_range, context)
