"""The memory of messages between stages: the executor's and the messenger's rules, with counts in the place of tensors."""

from __future__ import annotations

from megatron.pipeline_parallel.exchange import ReceivePlan
from megatron.spec.operations import Message, OpKind, Schedule


class Mail:
    """What one stage holds of messages while it goes through its operations.

    Args:
        size: bytes of a message.
        overlap: messages travel while operations compute; without, all that was sent has left before the next operation.
        notices: the messenger sees when a message has left, as NCCL's do: by the time of the next one, if no stage is late. gloo's
            are only known to have arrived once an answer to them comes back.
    """

    def __init__(self, schedule: Schedule, stage: int, plan: ReceivePlan, size: int, *, overlap: bool, notices: bool) -> None:
        self._schedule, self._stage, self._plan, self._size = schedule, stage, plan, size
        self._overlap, self._notices = overlap, notices
        self._ops = schedule.linked_ops[stage]
        self._buffers = self._free = 0
        """Buffers are used again and never given up."""
        self._own: set[Message] = set()
        """From a chunk of this stage to another one of it."""
        self._leaving: set[Message] = set()

    @property
    def bytes(self) -> int:
        """Held now."""
        return self._size * (self._buffers + len(self._own) + len(self._leaving))

    def before(self, place: int) -> None:
        """Receives are posted in front of an operation."""
        for _ in self._plan.before[place]:
            if self._free:
                self._free -= 1
            else:
                self._buffers += 1
        if not self._overlap:
            self._leaving.clear()

    def behind(self, place: int) -> None:
        """The result of an operation is sent, and what nobody reads any more let go."""
        op, _, gives = self._ops[place]
        if gives is not None:
            if self._schedule.stage_of_chunk[gives.chunk] == self._stage:
                self._own.add(gives)
            else:
                if self._notices:
                    self._leaving.clear()
                self._leaving.add(gives)
        if op.kind in (OpKind.BACKWARD, OpKind.WEIGHT_GRAD):
            for is_gradient in (False, True):
                self._read(Message(is_gradient, op.chunk, op.microbatch))
        self._leaving.difference_update(self._plan.arrived[place])

    def _read(self, message: Message) -> None:
        if message in self._own:
            self._own.remove(message)
        elif message.chunk > 0 if not message.is_gradient else message.chunk < self._schedule.num_chunks - 1:
            self._free += 1
