"""Zero-bubble schedules: backward is split in two, and weight gradients run where a stage would otherwise wait."""

from __future__ import annotations

from megatron.spec.operations import Op, OpKind, Schedule, first_microbatches, loop, v_shape
from megatron.spec.schedule_spec import ScheduleSpec


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with late weight gradients (Qi et al. 2023, section 2.1, "handcrafted schedule ZB-H1").

    Each stage defers as many weight gradients as there are stages before it. So every stage keeps as many live activations as the
    first stage of 1F1B (p), and while the pipeline drains, input gradients pass on without waiting for weight gradients.
    """

    def stage_ops(stage: int) -> tuple[Op, ...]:
        warmup = min(num_stages - stage - 1, num_microbatches)
        ops = [Op(OpKind.FORWARD, stage, m) for m in range(warmup)]
        next_weight = 0
        for m in range(num_microbatches):
            if warmup + m < num_microbatches:
                ops.append(Op(OpKind.FORWARD, stage, warmup + m))
            ops.append(Op(OpKind.INPUT_GRAD, stage, m))
            # In the drain an input gradient comes only every second turn: weight gradients fill the turns between.
            if m >= stage:
                ops.append(Op(OpKind.WEIGHT_GRAD, stage, next_weight))
                next_weight += 1
        return tuple(ops + [Op(OpKind.WEIGHT_GRAD, stage, m) for m in range(next_weight, num_microbatches)])

    return Schedule("zb-h1", num_microbatches, loop(num_stages), tuple(map(stage_ops, range(num_stages))))


ZB_H1 = ScheduleSpec("zb-h1", make=lambda p, m, v: zb_h1(p, m), splits_backward=True)


def zb_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Two chunks a stage in a V ("ZB-V", Qi et al. 2023, section 6; "V-ZB", Qi et al. 2024).

    At equal costs and at least 2p - 1 microbatches, no stage waits between its first and last operation. Each stage keeps as much
    as the first stage of 1F1B (2p live activations of half a stage each). With fewer it is the beginning of a longer one.
    """
    total = max(num_microbatches, 2 * num_stages - 1)

    def stage_ops(stage: int) -> tuple[Op, ...]:
        down, up = stage, 2 * num_stages - 1 - stage
        ops: list[Op] = []
        done = {(kind, chunk): 0 for kind in OpKind for chunk in (down, up)}

        def add(chunk: int, *kinds: OpKind) -> None:
            for kind in kinds:
                ops.append(Op(kind, chunk, done[kind, chunk]))
                done[kind, chunk] += 1

        forward, input_grad, weight_grad = OpKind.FORWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD
        # Until the first microbatch has come back up to this stage.
        for _ in range(2 * (num_stages - stage) - 1):
            add(down, forward)
        # Until it has gone from here to the end.
        for _ in range(stage):
            add(up, forward)
            add(down, forward)
        # Until its gradient comes back to the lower chunk.
        for _ in range(num_stages - stage):
            add(up, forward, input_grad, weight_grad)
        while done[forward, up] < total:
            if done[forward, down] < total:
                add(down, forward)
            add(down, input_grad, weight_grad)
            add(up, forward, input_grad, weight_grad)
        # Drain: first the input gradients that others wait for, then also the deferred weight gradients.
        for _ in range(stage):
            add(down, input_grad)
            add(up, input_grad)
        for _ in range(num_stages - stage):
            add(down, input_grad, weight_grad)
        for chunk in (up, down):
            while done[weight_grad, chunk] < total:
                add(chunk, weight_grad)
        return tuple(ops)

    whole = Schedule("zb-v", total, v_shape(num_stages), tuple(map(stage_ops, range(num_stages))))
    return first_microbatches(whole, num_microbatches)


ZB_V = ScheduleSpec(
    "zb-v",
    make=lambda p, m, v: zb_v(p, m),
    place=lambda p, v: v_shape(p),
    chunks_per_stage=2,
    splits_backward=True,
    about_chunks="It places two virtual stages (chunks) on each pipeline rank, in a V.",
)
