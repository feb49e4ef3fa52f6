"""An order in which all operations of a schedule can run: each after those before it on its stage, and after what it needs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.spec.operations import LinkedOp, Message, Schedule


def walk(schedule: Schedule) -> Iterator[tuple[int, LinkedOp]]:
    """Every operation with its stage, once what it needs was given; each stage goes on as far as it can.

    Raises:
        ValueError: the stages wait for each other.
    """
    position = [0] * schedule.num_stages
    given: set[Message] = set()
    waiting: dict[Message, int] = {}
    ready = list(range(schedule.num_stages))
    while ready:
        stage = ready.pop()
        ops = schedule.linked_ops[stage]
        while position[stage] < len(ops):
            linked = ops[position[stage]]
            if linked.needs is not None and linked.needs not in given:
                waiting[linked.needs] = stage
                break
            position[stage] += 1
            yield stage, linked
            message = linked.gives
            if message is not None:
                given.add(message)
                if message in waiting:
                    ready.append(waiting.pop(message))
    stuck = {stage: ops[position[stage]] for stage, ops in enumerate(schedule.ops) if position[stage] < len(ops)}
    if stuck:
        waits = "; ".join(
            f"stage {stage} before {op.kind.value} of chunk {op.chunk}, microbatch {op.microbatch}" for stage, op in stuck.items()
        )
        raise ValueError(f"schedule {schedule.name} deadlocks: {waits}")
