"""When tensors that a microbatch has in host memory come back: it follows from the operations of its stage."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.spec.operations import Op, OpKind

_TAKES = (OpKind.RECOMPUTE, OpKind.BACKWARD, OpKind.INPUT_GRAD)
"""Operations that read what the forward has saved."""


def back_soon(ops: Sequence[Op]) -> frozenset[tuple[int, int]]:
    """(Chunk, microbatch) of each forward on a stage that is followed by the first of its backward operations, at once or after one
    other operation.

    What it moved last would have gone when that other one has run, and would come back while that one runs.
    """
    after = zip(ops, [*ops[1:], None], [*ops[2:], None, None], strict=False)
    return frozenset(
        (op.chunk, op.microbatch)
        for op, *next_two in after
        if op.kind is OpKind.FORWARD and any(one is not None and one[1:] == op[1:] and one.kind in _TAKES for one in next_two)
    )


def fetched_during(ops: Sequence[Op]) -> list[Op | None]:
    """For each operation of a stage, the next one, if that takes what may be in host memory: it comes back meanwhile."""
    return [op if op is not None and op.kind in _TAKES else None for op in [*ops[1:], None]] if ops else []
