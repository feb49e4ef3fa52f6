"""Prediction of the duration of a step. The pipeline schedule is simulated with the predicted time of each operation, and the time
of the optimizer's update is added.

All input comes from the planner's run on meta or fake tensors (`Planner.compute_step_work`): shapes of matrix products on one rank,
attention calls, memory traffic, and collectives with their bytes and process groups. `durations.py` predicts the time of each on a
cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megatron.config.config import Config
from megatron.config.optional_packages import is_missing
from megatron.config.parsed_flags import DryRun
from megatron.pipeline_parallel.simulate import Timeline, simulate
from megatron.spec.counts import count_flops_per_step
from megatron.spec.operations import Op, OpType
from megatron_lab.planner.chunk_trace import TraceCache
from megatron_lab.planner.cluster import DEFAULT_CLUSTER, Cluster, find_shipped_name, load_cluster
from megatron_lab.planner.dry_run import Planner
from megatron_lab.planner.durations import COMPILED_STACK, DEFAULT_STACK, CommGroup, DeviceTime, Durations, Stack, sum_times
from megatron_lab.planner.plan import RankProfile
from megatron_lab.planner.state_layout import Bytes, StateMemory
from megatron_lab.planner.step_work import StepWork

_NORMAL_90 = 1.645
"""Standard deviations on each side of the mean that contain 90 % of a normal distribution."""
_EXPOSED_SHARE = 0.03
"""Share of a chunk's parameter gathers and gradient reductions that nothing can hide: those of its first and last layer."""


@dataclass(frozen=True)
class StepTime:
    """Predicted duration of a step, its breakdown and its uncertainty."""

    breakdown: Mapping[str, float]
    """Seconds of each activity on the rank that limits the step, by name of the activity. Their sum is the duration of the
    step."""
    tokens: int
    """Tokens of a step, over all ranks."""
    flops: float
    """FLOPs of forward and backward of a step over all ranks, without recomputation."""
    world_size: int
    peak_flops: float
    """Peak rate of one device in the model's dtype, in FLOP/s."""
    device_bytes: int
    """Device memory in bytes of the rank that needs most."""
    log_std: float
    """Standard deviation of log(measured time / predicted time) over the runs to which the cluster's constants were fitted. The
    bounds `low` and `high` follow from it."""
    cluster: str
    """Name of the cluster for which the time is predicted."""
    uncalibrated_sizes: tuple[str, ...] = ()
    """Sizes of the layout that exceed those of the runs to which the cluster's constants were fitted. For these sizes the range
    from `low` to `high` is too narrow."""

    @cached_property
    def seconds(self) -> float:
        """Predicted duration of the step in seconds."""
        return sum(self.breakdown.values())

    @property
    def low(self) -> float:
        """Lower bound of the step's duration in seconds: 5 % of measured steps are expected to be shorter."""
        return self.seconds * math.exp(-_NORMAL_90 * self.log_std)

    @property
    def high(self) -> float:
        """Upper bound of the step's duration in seconds: 5 % of measured steps are expected to be longer."""
        return self.seconds * math.exp(_NORMAL_90 * self.log_std)

    def find_largest_shares(self) -> list[tuple[str, float]]:
        """Return the name of each activity and its share of the step's time, largest share first. Shares below 0.3 % are
        omitted."""
        shares = ((name, seconds / self.seconds) for name, seconds in self.breakdown.items())
        return sorted(((name, share) for name, share in shares if share >= 0.003), key=lambda item: -item[1])

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as a dictionary of strings, numbers and lists, for a JSON file."""
        return {
            "cluster": self.cluster,
            "seconds": self.seconds,
            "low": self.low,
            "high": self.high,
            "tokens_per_s_per_gpu": self.tokens_per_s,
            "mfu": self.mfu,
            "device_bytes": self.device_bytes,
            "outside": list(self.uncalibrated_sizes),
            "parts": dict(self.breakdown),
        }

    @property
    def tokens_per_s(self) -> float:
        """Number of tokens that one device processes per second."""
        return self.tokens / self.seconds / self.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: model FLOPs divided by the peak FLOPs of the devices in the same time."""
        return self.flops / self.seconds / self.world_size / self.peak_flops


def predict_step_time(
    config: Config,
    dry_run: DryRun,
    vocab_size: int,
    cluster: Cluster,
    stack: Stack | None = None,
    trace_cache: TraceCache | None = None,
) -> StepTime:
    """Predict the duration of a step on a cluster.

    Args:
        config: settings that `load` accepted for this number of ranks.
        dry_run: number of ranks of the job and of a node.
        vocab_size: rows of the word embedding, without padding.
        stack: speed of another training framework, if the time of that framework is predicted; None for this framework.
        trace_cache: traces (memory and communication of a chunk's operations) of earlier predictions. Jobs with equal chunks may
            share it.

    Raises:
        ValueError: the layout is impossible, or a step has too many operations to be planned.
    """
    work = Planner(config, dry_run, vocab_size, shortened=True, trace_cache=trace_cache).compute_step_work()
    return predict_from_work(work, config, dry_run, vocab_size, cluster, stack)


def predict_from_work(
    work: StepWork, config: Config, dry_run: DryRun, vocab_size: int, cluster: Cluster, stack: Stack | None = None
) -> StepTime:
    """Predict the duration of a step on a cluster from the work that the planner has counted. All arguments except `work` are those
    of `predict_step_time`."""
    stack = stack or (COMPILED_STACK if config.speed.compile else DEFAULT_STACK)
    sequences = count_sequences(work, config, dry_run)
    return StepTime(
        dict(_StepPredictor(work, config, dry_run, cluster, stack).iter_breakdown()),
        sequences * config.model.seq_length,
        count_flops_per_step(config.model, vocab_size, sequences),
        dry_run.world_size,
        cluster.get_peak_flops(get_dtype_name(config)),
        max(profile.memory.total.device for profile in work.profiles),
        cluster.spread,
        cluster.name,
        tuple(_find_uncalibrated_sizes(config, dry_run, cluster)),
    )


def _find_uncalibrated_sizes(config: Config, dry_run: DryRun, cluster: Cluster) -> Iterator[str]:
    parallel = config.parallel
    sizes = {
        "ranks": dry_run.world_size,
        "tensor": parallel.tensor_model_parallel_size,
        "pipeline": parallel.pipeline_model_parallel_size,
        "context": parallel.context_parallel_size,
        "expert": parallel.expert_model_parallel_size,
    }
    for name, max_size in cluster.calibrated.items():
        if sizes[name] > max_size:
            yield f"{sizes[name]} {name}{'' if name == 'ranks' else ' ranks'} (calibrated to {max_size:g})"


def load_plan_cluster(config: Config) -> Cluster | None:
    """Load the cluster for which a plan predicts times (`select_cluster_name`). Returns None if a plan predicts no times, for
    example for CPUs without --plan-cluster.

    Raises:
        ConfigError: no such cluster exists, or the file does not describe a cluster.
    """
    name = select_cluster_name(config)
    return None if name is None else load_cluster(name)


def select_cluster_name(config: Config) -> str | None:
    """Return the name of the cluster for which a plan predicts times.

    The name is that of --plan-cluster if set, else of the cluster shipped with this package that has this machine's GPU, else H100.
    Without --plan-cluster, the function returns None for CPUs, which differ too much from each other. It also returns None if
    PyYAML, which reads cluster files, is not installed.
    """
    if config.logging.plan_cluster is not None or config.parallel.device == "cpu" or is_missing("yaml"):
        return config.logging.plan_cluster
    return (find_shipped_name(torch.cuda.get_device_name()) if torch.cuda.is_available() else None) or DEFAULT_CLUSTER


def count_sequences(work: StepWork, config: Config, dry_run: DryRun) -> int:
    """Return the number of sequences in a step."""
    parallel = config.parallel
    model_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    return work.num_microbatches * config.training.micro_batch_size * (dry_run.world_size // model_ranks)


def get_dtype_name(config: Config) -> str:
    """Return the name of the model's dtype, such as "bfloat16", by which peak rates are looked up."""
    precision = config.precision
    return next(
        (
            name
            for name, is_set in (("bfloat16", precision.bf16), ("float16", precision.fp16), ("float64", precision.fp64))
            if is_set
        ),
        "float32",
    )


@dataclass(frozen=True)
class _OpTime:
    """Predicted seconds of an operation (such as a forward) on one microbatch of one model chunk."""

    device_time: DeviceTime
    comm_times: Mapping[str, float]
    """Seconds of the layers' communication during the operation that computation does not hide, by name of the process group."""
    sharding_time: float
    """Seconds of parameter gathers and gradient reductions during the operation that computation does not hide."""

    @property
    def total(self) -> float:
        return self.device_time.total + sum(self.comm_times.values()) + self.sharding_time


class _StepPredictor:
    """Predicts how many seconds of a step each activity takes, such as matrix products, communication or pipeline idle time."""

    def __init__(self, work: StepWork, config: Config, dry_run: DryRun, cluster: Cluster, stack: Stack) -> None:
        self._work, self._config, self._cluster = work, config, cluster
        self._ranks_per_device = max(1.0, min(dry_run.world_size, dry_run.gpus_per_node) / (cluster.shared_by or math.inf))
        self._durations = Durations(cluster, stack)
        self._hidden_share = min(1.0, cluster.hidden * stack.hidden)
        self._groups = {name: CommGroup(*group) for name, group in work.groups.items()}
        self._profile_of_stage = {stage: profile for profile in work.profiles for stage in profile.stages}
        self._is_fsdp = config.parallel.sharding == "optim_grads_params"

    def iter_breakdown(self) -> Iterator[tuple[str, float]]:
        """Yield the name and seconds of each activity of a step, for a rank of the stage that is busiest. Pipeline idle time is one
        of the activities."""
        work, schedule = self._work, self._work.schedule
        op_times = {
            (chunk, op_type): self._compute_op_time(chunk, op_type) for chunk, ops in enumerate(work.ops) for op_type in ops
        }
        self._op_times = op_times
        crosses_nodes = any(work.crosses_nodes[:-1]) if schedule.num_stages > 1 else False
        message_time = self._durations.predict_message_time(work.message_bytes, crosses_nodes=crosses_nodes)
        exposed_message_time = message_time * (1 - self._hidden_share if self._config.parallel.overlap_p2p_communication else 1.0)
        timeline = simulate(schedule, self._get_duration, p2p=message_time)
        extra_microbatches = work.num_microbatches - schedule.num_microbatches
        busy_times = timeline.busy_times
        slowest_stage = max(range(len(busy_times)), key=lambda stage: busy_times[stage])
        num_scheduled = schedule.num_microbatches
        pipeline_time = timeline.step_time + extra_microbatches * busy_times[slowest_stage] / num_scheduled
        seconds_by_name: dict[str, float] = {}
        for span in timeline.spans[slowest_stage]:
            for name, seconds in self._split_op_time(span.op):
                seconds_by_name[name] = seconds_by_name.get(name, 0.0) + seconds
        scale = work.num_microbatches / num_scheduled
        # Hidden messages also slow the stages down a little. This time is reported under `messages`.
        message_total = (
            exposed_message_time * 2 * work.num_microbatches * (len(work.ops) // schedule.num_stages)
            if schedule.num_stages > 1
            else 0.0
        )
        if self._ranks_per_device > 1:  # ranks that share cores run while others wait, so the total work of all ranks counts
            scale *= self._ranks_per_device * sum(busy_times) / len(busy_times) / busy_times[slowest_stage]
        compute_time = sum(seconds_by_name.values()) * scale
        yield from ((name, seconds * scale) for name, seconds in seconds_by_name.items())
        yield "messages", message_total
        yield "moves to the host", self._compute_offload_time(slowest_stage, compute_time)
        yield "pipeline idle", max(0.0, pipeline_time - compute_time)
        yield from ((name, seconds * self._ranks_per_device) for name, seconds in self._iter_update_times(timeline, slowest_stage))
        yield "other", self._cluster.step_ms * 1e-3

    def _split_op_time(self, op: Op) -> Iterator[tuple[str, float]]:
        time = self._op_times[op.chunk, op.type]
        name = "recompute" if op.type is OpType.RECOMPUTE else ""
        for category, seconds in zip(DeviceTime._fields, time.device_time, strict=True):
            yield name or category, seconds
        for group, seconds in time.comm_times.items():
            yield f"{group} ranks", seconds
        yield "sharded state", time.sharding_time

    def _get_duration(self, op: Op) -> float:
        return self._op_times[op.chunk, op.type].total

    def _compute_op_time(self, chunk: int, op_type: OpType) -> _OpTime:
        span = self._work.ops[chunk][op_type]
        device_time = self._durations.predict_device_time(span.work, new_bytes=span.peak_bytes)
        hideable = 0.0
        if op_type is not OpType.FORWARD:
            # Backward overlaps the gather of its input with the input gradient, and the reduction of that with the weight gradient.
            hideable = self._hidden_share * device_time.products / 2
        comm_times: dict[str, float] = {}
        for transfer in span.transfers:
            seconds = self._durations.predict_collective_time(
                transfer.bytes, transfer.calls, self._get_group(transfer.group), transfer.comm_type
            )
            if transfer.group == "cp":  # the next keys and values arrive while attention computes with the current ones
                hideable = max(hideable, self._hidden_share * (device_time.attention + device_time.products / 2))
            elif transfer.group == "tp" and self._config.parallel.tp_comm_overlap:
                hideable = self._hidden_share * device_time.products
            exposed = max(0.0, seconds - hideable) if transfer.group in ("tp", "cp") else seconds
            hideable = max(0.0, hideable - seconds)
            comm_times[transfer.group] = comm_times.get(transfer.group, 0.0) + exposed
        return _OpTime(
            device_time, comm_times, self._compute_sharding_time(chunk, op_type, device_time.total + sum(comm_times.values()))
        )

    def _get_group(self, name: str) -> CommGroup:
        return self._groups.get(name, CommGroup(1, 1))

    def _compute_sharding_time(self, chunk: int, op_type: OpType, compute_time: float) -> float:
        """Return the seconds of the parameter gathers and gradient reductions in one operation that computation does not hide. Only
        the sharding strategies that communicate for each microbatch have such a time.

        Args:
            chunk: index of the model chunk.
            compute_time: seconds of the operation without this communication.
        """
        parallel = self._config.parallel
        if not self._is_fsdp and parallel.sharding != "optim_grads":
            return 0.0
        stage = self._work.schedule.stage_of_chunk[chunk]
        chunks_per_stage = len(self._work.ops) // self._work.schedule.num_stages
        num_ops = chunks_per_stage * self._work.num_microbatches
        comm_time = 0.0
        if op_type is OpType.FORWARD and self._is_fsdp:
            comm_time = self._compute_state_comm_time(stage, "parameters") / num_ops / 2
        elif op_type in (OpType.BACKWARD, OpType.INPUT_GRAD):
            comm_time = self._compute_state_comm_time(stage, "gradients") / num_ops
            if self._is_fsdp:
                comm_time += self._compute_state_comm_time(stage, "parameters") / num_ops / 2
            else:
                comm_time /= self._work.scheduled_share
        return max(0.0, comm_time * (1 - _EXPOSED_SHARE) - self._hidden_share * compute_time) + _EXPOSED_SHARE * comm_time

    def _compute_state_comm_time(self, stage: int, purpose: str) -> float:
        """Return the seconds that a rank of a stage needs in a step to send all gradients, or to gather all parameters.

        Args:
            purpose: "gradients" or "parameters".
        """
        profile, sharding = self._get_profile(stage), self._config.parallel.sharding
        comm_type = "all-gather" if purpose == "parameters" else "all-reduce" if sharding == "no_shard" else "reduce-scatter"
        return sum(
            self._durations.predict_collective_time(
                entry.bytes, self._count_buckets(entry.bytes), self._get_group(entry.over), comm_type
            )
            for entry in profile.traffic
            if entry.what == purpose
        )

    def _get_profile(self, stage: int) -> RankProfile:
        return self._profile_of_stage.get(stage) or self._work.profiles[-1]

    def _count_buckets(self, num_bytes: int) -> float:
        """Estimate the number of collectives in which `num_bytes` are sent, from a typical bucket size of 200 MB."""
        return max(1.0, num_bytes / 2e8)

    def _iter_update_times(self, timeline: Timeline, stage: int) -> Iterator[tuple[str, float]]:
        """Yield the name and seconds of each activity of a stage after the last backward of a step: communication of gradients,
        parameters and scalars, and the optimizer."""
        parallel, profile = self._config.parallel, self._get_profile(stage)
        if not self._is_fsdp:
            grad_time, param_time = (
                self._compute_state_comm_time(stage, "gradients"),
                self._compute_state_comm_time(stage, "parameters"),
            )
            if parallel.sharding == "optim_grads":
                grad_time = 0.0
            backward_time = sum(
                self._op_times[chunk, op_type].total
                for chunk, ops in enumerate(self._work.ops)
                for op_type in ops
                if self._work.schedule.stage_of_chunk[chunk] == stage and op_type in (OpType.BACKWARD, OpType.INPUT_GRAD)
            )
            forward_time = sum(
                self._op_times[chunk, OpType.FORWARD].total
                for chunk in range(len(self._work.ops))
                if self._work.schedule.stage_of_chunk[chunk] == stage
            )
            yield "gradients", self._compute_exposed_time(grad_time, backward_time, parallel.overlap_grad_reduce)
            yield "parameters", self._compute_exposed_time(param_time, forward_time, parallel.overlap_param_gather)
        update_bytes = count_update_bytes(profile.memory)
        yield (
            "optimizer",
            self._durations.predict_optimizer_time(update_bytes.device) + self._predict_host_copy_time(update_bytes.host),
        )
        world_traffic = [entry for entry in profile.traffic if entry.over == "world"]
        yield (
            "numbers",
            sum(self._durations.predict_collective_time(entry.bytes, 1, self._get_group("world")) for entry in world_traffic),
        )

    def _compute_offload_time(self, stage: int, compute_time: float) -> float:
        """Return the seconds in which a rank of a stage waits for copies between device and host memory, over all microbatches of a
        step.

        These are copies of activations that computation does not hide. If parameters are in host memory, copies of parameters and
        of their gradients are added in full.

        Args:
            compute_time: seconds of computation in a step, behind which copies of activations can be hidden.
        """
        profile, parallel, num_microbatches = self._get_profile(stage), self._config.parallel, self._work.num_microbatches
        activation_bytes = 2 * profile.offloaded_bytes / self._work.scheduled_share
        num_copies = 2 * num_microbatches if parallel.fsdp_reshard_after_forward == "always" else 1
        num_copies += 1 if parallel.fsdp_reduce_once else num_microbatches
        return max(
            0.0, self._predict_host_copy_time(activation_bytes) - self._hidden_share * compute_time
        ) + self._predict_host_copy_time(profile.memory.parameters.host * num_copies)

    def _predict_host_copy_time(self, num_bytes: float) -> float:
        return num_bytes / (self._cluster.host_gb_s * 1e9)

    def _compute_exposed_time(self, seconds: float, compute_time: float, overlaps: bool) -> float:
        """Return the seconds of communication that computation does not hide.

        Args:
            seconds: duration of the communication.
            compute_time: duration of the computation.
            overlaps: whether communication and computation run at the same time.
        """
        return seconds if not overlaps else max(0.05 * seconds, seconds - self._hidden_share * compute_time)


def count_update_bytes(memory: StateMemory) -> Bytes:
    """Count the bytes that the optimizer step reads and writes: all state once each, and gradients are read a second time for their
    norm."""
    state = [memory.main_params, memory.moments, memory.averages, memory.parameters, memory.gradients]
    device, host = sum(sizes.device for sizes in state), sum(sizes.host for sizes in state)
    return Bytes(2 * device + memory.gradients.device, 2 * host)


def compute_device_time(work: StepWork, durations: Durations) -> DeviceTime:
    """Return the device time, by activity, of all operations on one microbatch in all model chunks."""
    return sum_times(durations.predict_device_time(span.work) for ops in work.ops for span in ops.values())
