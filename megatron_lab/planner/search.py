"""Search for the layout with the shortest step: estimate many layouts roughly, then plan the best of them exactly.

A rough estimate starts from one stage that holds the full model. The stage runs on meta or fake tensors (shapes without data), once
for each way to divide a layer (tensor, context and expert ranks, recompute). Then arithmetic divides time and bytes among pipeline
stages and data ranks. Estimates only select layouts; all printed figures come from `predict_step_time` and the exact plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.config.checks.finding import Change, create_change, reset
from megatron.config.config import Config
from megatron.config.parsed_flags import DryRun
from megatron.config.rules import find_violations
from megatron.spec.operations import OpType
from megatron.spec.schedules import SCHEDULES
from megatron_lab.planner.advice import MIN_EFFICIENT_TOKENS
from megatron_lab.planner.chunk_trace import TraceCache
from megatron_lab.planner.cluster import Cluster
from megatron_lab.planner.dry_run import Planner
from megatron_lab.planner.durations import COMPILED_STACK, DEFAULT_STACK, CommGroup, Durations
from megatron_lab.planner.fit import get_usable_bytes
from megatron_lab.planner.step_time import StepTime, compute_device_time, get_dtype_name, predict_step_time

_MEMORY_TOLERANCE = 1.15
"""Estimated memory, as a multiple of a device's memory, up to which a layout is planned exactly. Estimates may be off by this
factor."""
_BUBBLE_FACTORS = {"zb-h1": 0.5, "zb-v": 0.2}
"""Approximate pipeline idle time relative to 1F1B."""
_OFFLOAD_SETTINGS = ("cpu_offload_activations", "optimizer_cpu_offload")
_MIN_CONTEXT_LENGTH = 16_384
"""Sequence length in tokens from which context parallelism is tried."""
_RECOMPUTE_OPTIONS: tuple[Mapping[str, Any], ...] = (
    {},
    {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp_act")},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
)
_MEMORY_SAVERS: tuple[Mapping[str, Any], ...] = (
    {"loss_chunk_tokens": MIN_EFFICIENT_TOKENS},
    {"cpu_offload_activations": True},
    {"optimizer_cpu_offload": True},
    {"optimizer_cpu_offload": True, "cpu_offload_activations": True},
)
"""Changes that are tried for a layout that needs too much memory."""
SIZE_SETTINGS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "micro": "micro_batch_size",
}
"""Names by which a user fixes or limits a size in a search, with the setting for each."""
SEARCHED_SETTINGS = (
    *SIZE_SETTINGS.values(),
    *("sequence_parallel", "expert_tensor_parallel_size", "overlap_p2p_communication"),
    *("data_parallel_sharding_strategy", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
    *("pipeline_schedule", "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
    "pipeline_model_parallel_layout",
    *("recompute_granularity", "recompute_activations", "recompute_modules", "recompute_method", "recompute_num_layers"),
    "recompute_layers_per_stage",
    *("loss_chunk_tokens", "cpu_offload_activations", "cpu_offloading", "cpu_offloading_num_layers"),
    *("optimizer_cpu_offload", "optimizer_offload_fraction"),
)
"""Settings that a search chooses. The values that the user sets for them do not restrict the search."""


@dataclass(frozen=True)
class Limits:
    """Restrictions on the layouts that a search tries, such as a fixed tensor-parallel size."""

    fixed_sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes that are fixed, by their names in `SIZE_SETTINGS` (such as "tensor")."""
    max_sizes: Mapping[str, int] = field(default_factory=dict)
    """Largest sizes to try, by their names in `SIZE_SETTINGS` (such as "tensor")."""

    def get_allowed_sizes(self, axis: str, sizes: Sequence[int]) -> list[int]:
        """Return the sizes along one axis that the search may try. If the size is fixed, this is the fixed size, even if `sizes`
        lacks it.

        Args:
            axis: name in `SIZE_SETTINGS`, such as "tensor".
            sizes: sizes to choose from.
        """
        if axis in self.fixed_sizes:
            return [self.fixed_sizes[axis]]
        return [size for size in sizes if size <= self.max_sizes.get(axis, size)]


@dataclass(frozen=True)
class PlannedLayout:
    """Settings of a layout, with its predicted step time and exactly planned memory."""

    config: Config
    time: StepTime

    def fits_memory(self, cluster: Cluster) -> bool:
        """Return whether the layout fits into the memory of a device of this cluster."""
        return self.time.device_bytes <= get_usable_bytes(int(cluster.memory_gb * 1e9))


@dataclass(frozen=True)
class SearchResult:
    """Result of a search: the layouts that fit into memory, and the numbers of layouts that were tried."""

    layouts: tuple[PlannedLayout, ...]
    """Layouts that fit into memory, fastest first."""
    smallest_layout: PlannedLayout | None
    """If no layout fits into memory: among the exactly planned layouts, the one with the least memory. Otherwise None."""
    num_estimated: int
    """Number of layouts for which memory and time were estimated roughly."""
    num_planned: int
    """Number of layouts for which memory was planned exactly and time predicted."""

    def find_tied_layouts(self) -> tuple[PlannedLayout, ...]:
        """Return the layouts that may be as fast as the best layout, given the uncertainty of the prediction.

        These are the layouts whose predicted time is at most sqrt(`seconds` x `high`) of the best layout: the geometric mean of its
        predicted time `seconds` and the upper end `high` of its 90 % range.
        """
        best = self.layouts[0].time
        return tuple(layout for layout in self.layouts if layout.time.seconds / best.seconds <= (best.high / best.seconds) ** 0.5)


class LayoutSearch:
    """Search for the fastest layouts of a job that fit into device memory.

    Args:
        config: settings of the model, the batch and everything else that the search does not change.
        dry_run: number of ranks of the job and of a node.
        limits: restrictions on the sizes to try; None for no restriction.

    Raises:
        ConfigError: the cluster's peak rate in the model's dtype is not known.
    """

    def __init__(self, config: Config, dry_run: DryRun, vocab_size: int, cluster: Cluster, limits: Limits | None = None) -> None:
        cluster.get_peak_flops(get_dtype_name(config))
        self._config, _ = reset(config, *SEARCHED_SETTINGS[len(SIZE_SETTINGS) :]).apply(config, dry_run.world_size)
        self._dry_run, self._vocab_size, self._cluster = dry_run, vocab_size, cluster
        self._limits = limits or Limits()
        self._rough_costs: dict[object, _RoughCost | None] = {}
        self._trace_caches: dict[object, TraceCache] = {}
        self._planned: dict[Change, PlannedLayout | None] = {}

    def run(self, num_layouts: int = 16) -> SearchResult:
        """Estimate memory and time of all layouts roughly, then plan the most promising exactly. Planning stops when `num_layouts`
        of them fit into memory, or 3 x `num_layouts` have been planned."""
        limit = get_usable_bytes(int(self._cluster.memory_gb * 1e9))
        estimated: list[tuple[tuple[float, float], Change]] = []
        for candidate in self.iter_candidates():
            estimate = self._estimate(candidate)
            if estimate is None:
                continue
            estimated.append((estimate, candidate))
            if estimate[1] > _MEMORY_TOLERANCE * limit:
                estimated += [
                    (saving_estimate, saving)
                    for saving in self._iter_memory_savers(candidate)
                    if (saving_estimate := self._estimate(saving)) is not None
                ]
        likely = sorted((time, index) for index, ((time, memory), _) in enumerate(estimated) if memory <= _MEMORY_TOLERANCE * limit)
        if not likely:
            likely = sorted((memory, index) for index, ((_, memory), _) in enumerate(estimated))[:num_layouts]
        layouts: list[PlannedLayout] = []
        for _, index in likely:
            if sum(layout.fits_memory(self._cluster) for layout in layouts) >= num_layouts or len(layouts) >= 3 * num_layouts:
                break
            if (layout := self.predict(estimated[index][1])) is not None:
                layouts.append(layout)
        fitting = sorted(
            (layout for layout in layouts if layout.fits_memory(self._cluster)), key=lambda layout: layout.time.seconds
        )
        closest = min(layouts, key=lambda layout: layout.time.device_bytes, default=None)
        return SearchResult(tuple(fitting), None if fitting else closest, len(estimated), len(layouts))

    def predict(self, candidate: Change) -> PlannedLayout | None:
        """Return the exact memory and the predicted step time of a layout, or None if the layout is impossible.

        Args:
            candidate: layout as a change of the search's settings.
        """
        if candidate not in self._planned:
            config, num_ranks = candidate.apply(self._config, self._dry_run.world_size)
            parallel = config.parallel
            group_sizes = (
                *(parallel.tensor_model_parallel_size, parallel.context_parallel_size),
                *(parallel.expert_model_parallel_size, parallel.expert_tensor_size),
            )
            splits_backward = SCHEDULES[parallel.schedule].splits_backward
            key = group_sizes, config.training.micro_batch_size, config.memory, splits_backward, parallel.sharding
            try:
                time = predict_step_time(
                    config,
                    replace(self._dry_run, world_size=num_ranks),
                    self._vocab_size,
                    self._cluster,
                    trace_cache=self._trace_caches.setdefault(key, {}),
                )
                self._planned[candidate] = PlannedLayout(config, time)
            except ValueError:
                self._planned[candidate] = None
        return self._planned[candidate]

    def iter_candidates(self) -> Iterator[Change]:
        """Yield every layout within the limits whose settings are valid, as a change of the search's settings."""
        config, world_size = self._config, self._dry_run.world_size
        model, limits = config.model, self._limits
        powers = [2**k for k in range(11)]
        gpus_per_node = self._dry_run.gpus_per_node
        tensor = limits.get_allowed_sizes("tensor", [n for n in powers if n <= min(gpus_per_node, model.num_attention_heads)])
        pipeline = limits.get_allowed_sizes("pipeline", [n for n in powers if n <= min(world_size, model.num_layers)])
        context = limits.get_allowed_sizes(
            "context", [n for n in powers if n <= 16] if model.seq_length >= _MIN_CONTEXT_LENGTH else [1]
        )
        expert = limits.get_allowed_sizes("expert", [n for n in powers if n <= min(model.num_experts or 1, world_size)])
        micro = limits.get_allowed_sizes("micro", [1, 2, 4, 8])
        for t, p, c, e, b in itertools.product(tensor, pipeline, context, expert, micro):
            if world_size % (t * p * c) or (e > 1 and (world_size // p) % e):
                continue
            expert_options = [{"expert_tensor_parallel_size": n} for n in dict.fromkeys((1, t))] if e > 1 else [{}]
            options = self._list_sharding_options(p), self._list_schedule_options(p), _RECOMPUTE_OPTIONS, expert_options
            for sharding, schedule, recompute, experts in itertools.product(*options):
                candidate = create_change(
                    **dict(zip(SIZE_SETTINGS.values(), (t, p, c, e, b), strict=True)),
                    sequence_parallel=t > 1,
                    **experts,
                    **sharding,
                    **schedule,
                    **recompute,
                )
                if not find_violations(*candidate.apply(config, world_size)):
                    yield candidate

    def _iter_memory_savers(self, candidate: Change) -> Iterator[Change]:
        """Yield variants of a layout that need less memory: with offload to host memory, or with a loss in chunks of tokens.
        Variants whose settings are not valid are skipped.

        Args:
            candidate: layout as a change of the search's settings.
        """
        for saver in _MEMORY_SAVERS:
            saving = Change((*candidate.fields, *create_change(**saver).fields))
            if not find_violations(*saving.apply(self._config, self._dry_run.world_size)):
                yield saving

    def _list_sharding_options(self, stages: int) -> list[Mapping[str, Any]]:
        optim = {"data_parallel_sharding_strategy": "optim", "overlap_grad_reduce": True, "overlap_param_gather": True}
        fsdp = {"data_parallel_sharding_strategy": "optim_grads_params"}
        return [optim, fsdp] if stages == 1 else [optim]

    def _list_schedule_options(self, stages: int) -> list[Mapping[str, Any]]:
        if stages == 1:
            return [{}]
        overlap = {"overlap_p2p_communication": True}
        num_layers = self._config.model.num_layers
        num_virtual = [v for v in (2, 4, 8) if v * stages <= num_layers]
        return [
            {**overlap, "pipeline_schedule": "1f1b"},
            {**overlap, "pipeline_schedule": "zb-h1"},
            {**overlap, "pipeline_schedule": "zb-v"},
            *({**overlap, "pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": v} for v in num_virtual),
        ]

    def _estimate(self, candidate: Change) -> tuple[float, float] | None:
        """Return rough estimates of the seconds of a step and the device bytes of the fullest rank. Returns None if the batch
        cannot be divided into microbatches, or if the layout is impossible.

        Args:
            candidate: layout as a change of the search's settings.
        """
        config, world_size = candidate.apply(self._config, self._dry_run.world_size)
        parallel, sizes = config.parallel, dict(candidate.fields)
        pp_size, tp_size, cp_size = (sizes[SIZE_SETTINGS[axis]] for axis in ("pipeline", "tensor", "context"))
        rough = self._get_rough_cost(config, sizes)
        dp_size = world_size // (pp_size * tp_size * cp_size)
        batch_size = config.training.global_batch_size or dp_size
        num_microbatches, remainder = divmod(batch_size, dp_size * config.training.micro_batch_size)
        if rough is None or remainder or not num_microbatches:
            return None
        num_virtual = parallel.num_virtual_stages_per_pipeline_rank or 1
        bubble = (pp_size - 1) / (num_virtual * num_microbatches) * _BUBBLE_FACTORS.get(parallel.schedule, 1.0)
        compute_time = rough.seconds * config.training.micro_batch_size * num_microbatches / pp_size * (1 + bubble)
        num_params = rough.num_params / pp_size
        is_fsdp = parallel.sharding == "optim_grads_params"
        shard_size = dp_size * cp_size
        optimizer_bytes_per_param = 12 / shard_size
        state_bytes = num_params * ((6 / shard_size + 4 * rough.gathered_share) if is_fsdp else 6)
        host_bytes = 0.0
        if config.optimizer.optimizer_cpu_offload:
            host_bytes += 2 * num_params * optimizer_bytes_per_param
        else:
            state_bytes += num_params * optimizer_bytes_per_param
        live_microbatches = (
            min(num_microbatches, pp_size) * (1 + (pp_size - 1) / (pp_size * num_virtual) if num_virtual > 1 else 1) / pp_size
        )
        saved_bytes = rough.saved_bytes * config.training.micro_batch_size
        if config.memory.has_offload:
            host_bytes += max(0.0, 2 * saved_bytes * num_microbatches / pp_size - compute_time * self._cluster.host_gb_s * 1e9)
            # About two layers of a chunk stay on the device.
            saved_bytes *= min(1.0, 2 * pp_size * num_virtual / config.model.num_layers)
        activation_bytes = saved_bytes * live_microbatches + rough.temporary_bytes * config.training.micro_batch_size
        shard_group = CommGroup(shard_size, max(1.0, min(shard_size, self._dry_run.gpus_per_node / tp_size)))
        seconds_per_byte = Durations(self._cluster).predict_collective_time(1e9, 0, shard_group) / 1e9
        # A reduction in float32 (4 bytes) and a gather in 16 bits (2 bytes): once per step, or under FSDP for each microbatch.
        sharding_time = num_params * (8 * num_microbatches if is_fsdp else 6) * seconds_per_byte
        exposed_time = max(0.05 * sharding_time, sharding_time - 0.8 * compute_time) + host_bytes / (self._cluster.host_gb_s * 1e9)
        return compute_time + exposed_time, state_bytes + activation_bytes

    def _get_rough_cost(self, config: Config, sizes: Mapping[str, Any]) -> _RoughCost | None:
        tensor, context, expert = (sizes[SIZE_SETTINGS[axis]] for axis in ("tensor", "context", "expert"))
        etp_size, memory = config.parallel.expert_tensor_size, config.memory
        key = tensor, context, expert, etp_size, memory.effective_granularity, memory.loss_chunk_tokens
        if key not in self._rough_costs:
            num_ranks = math.lcm(tensor * context, expert * etp_size)
            state_settings = ("data_parallel_sharding_strategy", "overlap_grad_reduce", "overlap_param_gather", *_OFFLOAD_SETTINGS)
            stage_settings = ("pipeline_schedule", "num_virtual_stages_per_pipeline_rank", "overlap_p2p_communication")
            single_sizes = {
                SIZE_SETTINGS["pipeline"]: 1,
                SIZE_SETTINGS["micro"]: 1,
                "global_batch_size": num_ranks // (tensor * context),
            }
            reset_change = reset(config, *state_settings, *stage_settings, **single_sizes)
            unsplit, _ = reset_change.apply(config, num_ranks)
            self._rough_costs[key] = self._measure_single_stage(unsplit, num_ranks)
        return self._rough_costs[key]

    def _measure_single_stage(self, config: Config, num_ranks: int) -> _RoughCost | None:
        """Return time and memory of one sequence on a single pipeline stage that holds the full model. Returns None if such a stage
        is impossible.

        Args:
            config: settings with one pipeline stage.
            num_ranks: ranks of the stage.
        """
        try:
            work = Planner(
                config, replace(self._dry_run, world_size=num_ranks), self._vocab_size, shortened=True
            ).compute_step_work()
        except ValueError:
            return None
        durations = Durations(self._cluster, COMPILED_STACK if config.speed.compile else DEFAULT_STACK)
        seconds = compute_device_time(work, durations).total
        for ops in work.ops:
            for span in ops.values():
                seconds += (
                    sum(
                        durations.predict_collective_time(transfer.bytes, transfer.calls, _get_group(work.groups, transfer.group))
                        for transfer in span.transfers
                    )
                    / 2
                )
        forward = work.ops[0][OpType.FORWARD]
        temporary_bytes = max(span.peak_bytes for span in work.ops[0].values()) - forward.net_bytes if len(work.ops) == 1 else 0
        num_params = max(profile.parameters for profile in work.profiles)
        return _RoughCost(seconds, forward.net_bytes, max(temporary_bytes, 0), num_params, min(1.0, 2 / config.model.num_layers))


@dataclass(frozen=True)
class _RoughCost:
    """Rough estimate of the time and memory of one sequence if a single pipeline stage holds the full model."""

    seconds: float
    saved_bytes: int
    """Bytes of activations that one rank keeps between forward and backward."""
    temporary_bytes: int
    """Peak bytes of one rank in addition to `saved_bytes`, for tensors that exist only during an operation."""
    num_params: int
    """Number of parameters with which a rank computes (its tensor-parallel and expert-parallel share of the model)."""
    gathered_share: float
    """Share of the parameters that are gathered at the same time if parameters are sharded over data ranks (FSDP)."""


def _get_group(groups: Mapping[str, tuple[int, float]], name: str) -> CommGroup:
    return CommGroup(*groups.get(name, (1, 1)))


def explain_difference(best: PlannedLayout, layout: PlannedLayout) -> str:
    """Describe in which activities a layout is slower or faster than the best layout. The differences are shares of the best
    layout's step time."""
    extra_time = {
        name: layout.time.breakdown.get(name, 0.0) - best.time.breakdown.get(name, 0.0)
        for name in {**best.time.breakdown, **layout.time.breakdown}
    }
    total = layout.time.seconds / best.time.seconds - 1
    shares = sorted(((seconds / best.time.seconds, name) for name, seconds in extra_time.items()), reverse=True)
    worse = ", ".join(f"{share:.1%} {name}" for share, name in shares[:3] if share >= 0.002)
    better = ", ".join(f"{-share:.1%} {name}" for share, name in shares[::-1][:2] if share <= -0.002)
    return f"takes {total:+.1%}: more of {worse or 'nothing'}" + (f"; less of {better}" if better else "")
