"""Search for the change of settings that makes a job fit into device memory at the least extra time.

A lever is one change of settings that saves memory: for example more recomputation, a loss in chunks, more sharding of the state,
more tensor ranks, or more context ranks. Each valid lever is planned separately, which shows what it saves and costs. Levers of
different categories are then combined, cheapest combinations first, until the plan of a combination fits. Memory is that of the
plan. Time is the prediction of `step_time` for the cluster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from megatron.config.checks.finding import Change, create_change, get_data_parallel_size, reset
from megatron.config.checks.memory import AUTO
from megatron.config.config import Config
from megatron.config.optional_packages import get_install_command, is_missing
from megatron.config.parsed_flags import DryRun, fill_plan_defaults
from megatron.config.rules import find_violations
from megatron.pipeline_parallel.partition import build_layer_table
from megatron_lab.planner.advice import MIN_EFFICIENT_TOKENS
from megatron_lab.planner.chunk_trace import ChunkTrace, TraceCache
from megatron_lab.planner.cluster import DEFAULT_CLUSTER, load_cluster
from megatron_lab.planner.costs import get_loss_chunk_tokens
from megatron_lab.planner.dry_run import Planner
from megatron_lab.planner.plan import Plan
from megatron_lab.planner.plan_text import GPU_MEMORY_GB, SPARE_SHARE
from megatron_lab.planner.step_time import get_dtype_name, load_plan_cluster, predict_from_work
from megatron_lab.planner.units import format_bytes

_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_MAX_COMBINED = 4
_MAX_TRIED = 8  # combinations that are planned, the most promising first
# Estimated memory of a combination relative to the limit. Combinations up to the first ratio are planned first,
# then those up to the second; others are not planned.
_LIKELY_RATIO, _UNLIKELY_RATIO = 1.1, 1.6
_FULL_RECOMPUTE = "layers"  # category of the lever that recomputes layers, as few as needed


class Cost(NamedTuple):
    """Memory and time of a step with certain settings."""

    activation_bytes: int
    """Bytes of activations on the rank of the job that needs most device memory."""
    other_bytes: tuple[int, ...]
    """Bytes of device memory except activations on the rank of the job that needs most device memory. There is one number for each
    purpose (parameters, gradients, moments and so on)."""
    seconds: float
    """Predicted duration of a step in seconds."""

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory on the rank of the job that needs most, activations included."""
        return self.activation_bytes + sum(self.other_bytes)


class Lever(NamedTuple):
    """Change of settings that saves memory, with the memory and step time after this change."""

    category: str
    """Group to which the change belongs, such as "sharding". Changes of one group exclude each other: a combination contains at
    most one lever of each category."""
    change: Change
    cost: Cost


@dataclass(frozen=True)
class FittingChange:
    """Change of settings after which the job fits into device memory."""

    change: Change
    cost: Cost
    extra_time_share: float
    """Additional time of a step as a fraction of its time without the change; negative if the change saves time."""


def get_device_memory(config: Config) -> int | None:
    """Return the bytes of a device's memory: --device-memory-gb, or the memory of this machine's first GPU.

    Returns None if neither is known or the job runs on CPUs.
    """
    if config.memory.device_memory_gb is not None:
        return round(config.memory.device_memory_gb * 1e9)
    if config.parallel.device == "cpu" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def get_usable_bytes(limit: int) -> int:
    """Return how many of the `limit` bytes of a device a plan may use. The remainder is reserved for gaps between allocator
    blocks."""
    return int(limit * (1 - SPARE_SHARE))


def add_fit_advice(plan: Plan, config: Config, dry_run: DryRun, vocab_size: int) -> Plan:
    """Return a copy of the plan that also states the memory of a device. If the job does not fit into this memory, the first line
    of advice says which settings to change."""
    limit, required = get_device_memory(config), plan.profiles[plan.fullest_index].memory.total.device
    plan = replace(plan, device_memory=limit)
    if limit is None and plan.job.device != "cpu":
        limit = int(GPU_MEMORY_GB[-1] * 1e9)
    if limit is None or required <= get_usable_bytes(limit):
        return plan
    problem = (
        f"the fullest rank needs {format_bytes(required)}, but of a device of {format_bytes(limit)} it may take "
        f"{format_bytes(get_usable_bytes(limit))} ({SPARE_SHARE:.0%} are left for gaps)"
    )
    solution = _suggest_fix(config, dry_run, vocab_size, get_usable_bytes(limit))
    return replace(plan, advice=(f"{problem}. {solution}", *plan.advice))


def _suggest_fix(config: Config, dry_run: DryRun, vocab_size: int, limit: int) -> str:
    """Return a sentence that says which settings to change so that the job fits.

    Args:
        limit: bytes that a rank may use of its device.
    """
    if is_missing("yaml"):
        return f"What to change is not known without PyYAML, which reads the times of a cluster: {get_install_command('yaml')}"
    fitting = FitSearch(config, dry_run, vocab_size).find_best(limit)
    if fitting is None:
        return (
            "Nothing that was tried of recompute, a loss in chunks, sharding, offload and more tensor or context ranks brings it "
            "under that; take more ranks"
        )
    time = (
        f"{abs(fitting.extra_time_share):.1%} {'more' if fitting.extra_time_share > 0 else 'less'}"
        if abs(fitting.extra_time_share) >= 5e-4
        else "as much"
    )
    return f"It fits with {fitting.change} ({format_bytes(fitting.cost.device_bytes)}, about {time} time for a step)"


def find_min_recompute_layers(config: Config, dry_run: DryRun, vocab_size: int, limit: int) -> tuple[int, ...]:
    """Return, for each pipeline stage, the smallest number of recomputed layers with which the stage fits into memory (for
    --recompute-layers-per-stage).

    Args:
        config: settings with --recompute-granularity full and --recompute-method block.
        limit: bytes that a rank may use of its device.

    Raises:
        ValueError: a stage does not fit even if all of its layers are recomputed.
    """
    config, trace_cache = fill_plan_defaults(config), dict[object, ChunkTrace]()
    max_layers = [0] * config.parallel.pipeline_model_parallel_size
    for chunk in build_layer_table(config.model, config.parallel, vocab_size):
        max_layers[chunk.stage] += len(chunk.layers) or bool(chunk.depths)

    def compute_device_bytes(layers_per_stage: Sequence[int]) -> list[int]:
        recompute_change = create_change(recompute_layers_per_stage=",".join(map(str, layers_per_stage)))
        proposal, _ = recompute_change.apply(config, dry_run.world_size)
        return Planner(proposal, dry_run, vocab_size, shortened=True, trace_cache=trace_cache).compute_fullest_device_bytes()

    for stage, num_bytes in enumerate(compute_device_bytes(max_layers)):
        if num_bytes > limit:
            raise ValueError(
                f"stage {stage} needs {format_bytes(num_bytes)} of device memory even with all of its layers recomputed, "
                f"but at most {format_bytes(limit)} can be used. Change other settings to use less memory."
            )
    low, high = [0] * len(max_layers), max_layers  # a stage fits with `high` layers, and does not fit with fewer than `low`
    while low != high:
        middle = [(bottom + top) // 2 for bottom, top in zip(low, high, strict=True)]
        fits = [num_bytes <= limit for num_bytes in compute_device_bytes(middle)]
        low = [bottom if fit else min(mid + 1, top) for fit, bottom, mid, top in zip(fits, low, middle, high, strict=True)]
        high = [mid if fit else top for fit, mid, top in zip(fits, middle, high, strict=True)]
    return tuple(high)


def resolve_auto_recompute_layers(config: Config, dry_run: DryRun, vocab_size: int) -> Config:
    """Replace `--recompute-layers-per-stage auto` by the smallest numbers of layers with which the stages fit. Settings without
    `auto` are returned unchanged.

    Raises:
        ValueError: the device's memory is not known, or a stage does not fit even if all of its layers are recomputed. In the
            second case the message also says what to change.
    """
    if config.memory.recompute_layers_per_stage != AUTO:
        return config
    limit = get_device_memory(config)
    if limit is None:
        raise ValueError(
            f"--recompute-layers-per-stage {AUTO} needs the memory of a device, and this machine has no GPU. Give "
            "--device-memory-gb."
        )
    try:
        layers_per_stage = find_min_recompute_layers(config, dry_run, vocab_size, get_usable_bytes(limit))
    except ValueError as error:
        full_recompute, _ = build_recompute_change(config, count_max_chunk_layers(config, vocab_size)).apply(
            config, dry_run.world_size
        )
        raise ValueError(f"{error} {_suggest_fix(full_recompute, dry_run, vocab_size, get_usable_bytes(limit))}.") from None
    return replace(config, memory=replace(config.memory, recompute_layers_per_stage=",".join(map(str, layers_per_stage))))


class FitSearch:
    """Search for the change of settings that makes a job fit into device memory with the shortest step time.

    Args:
        config: settings that `load` accepted for the job's ranks.
    """

    def __init__(self, config: Config, dry_run: DryRun, vocab_size: int) -> None:
        self._config, self._dry_run, self._vocab_size = fill_plan_defaults(config), dry_run, vocab_size
        self._costs: dict[Change, Cost | None] = {}
        self._trace_caches: dict[object, TraceCache] = {}
        """Trace cache for each combination of the settings on which traces depend."""
        self._max_chunk_layers = count_max_chunk_layers(config, vocab_size)
        cluster = load_plan_cluster(config)
        has_peak = cluster is not None and cluster.has_peak(get_dtype_name(config))
        # Another cluster will do, because times are only compared.
        self._cluster = cluster if cluster is not None and has_peak else load_cluster(DEFAULT_CLUSTER)

    def find_best(self, limit: int) -> FittingChange | None:
        """Return the change of settings with the shortest step among those after which no rank needs more than `limit` bytes.

        Returns None if the search finds no such change.
        """
        base = self.get_cost(Change())
        assert base is not None, "settings that were loaded are valid"
        levers = [
            Lever(category, change, cost)
            for category, change in list_levers(self._config, self._dry_run, self._vocab_size, self._max_chunk_layers)
            if (cost := self.get_cost(change)) is not None
        ]
        useful = [lever for lever in levers if lever.cost.device_bytes < base.device_bytes]
        combinations = [(estimate_cost(base, combination, limit), combination) for combination in _iter_combinations(useful)]
        likely = [item for item in combinations if item[0].device_bytes <= limit * _LIKELY_RATIO]
        unlikely = [item for item in combinations if limit * _LIKELY_RATIO < item[0].device_bytes <= limit * _UNLIKELY_RATIO]
        fitting: FittingChange | None = None
        for group in (likely, unlikely):
            tried = 0
            for estimated, combination in sorted(group, key=lambda item: (item[0].seconds, len(item[1]))):
                if tried == _MAX_TRIED or (fitting is not None and estimated.seconds >= fitting.cost.seconds):
                    break
                tried += len(combination) > 1
                candidate = self._fit_with_min_recompute(combination, base, limit)
                if candidate is not None and (fitting is None or candidate.cost.seconds < fitting.cost.seconds):
                    fitting = candidate
        return fitting

    def get_cost(self, change: Change) -> Cost | None:
        """Return memory and step time of the settings after a change, or None if these settings are not valid."""
        if change not in self._costs:
            self._costs[change] = self._predict_cost(change)
        return self._costs[change]

    def _predict_cost(self, change: Change) -> Cost | None:
        config, world_size = change.apply(self._config, self._dry_run.world_size)
        if find_violations(config, world_size):
            return None
        parallel = config.parallel
        group_sizes = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        layout = group_sizes, parallel.sequence_parallel, config.training.micro_batch_size
        trace_cache = self._trace_caches.setdefault((layout, config.memory), {})
        work = Planner(config, self._dry_run, self._vocab_size, shortened=True, trace_cache=trace_cache).compute_step_work()
        time = predict_from_work(work, config, self._dry_run, self._vocab_size, self._cluster)
        fullest = max(work.profiles, key=lambda profile: profile.memory.total.device).memory
        other_bytes = (size.device for purpose, size in fullest.by_purpose.items() if purpose != "activations")
        return Cost(fullest.activations.device, tuple(other_bytes), time.seconds)

    def _fit_with_min_recompute(self, levers: Sequence[Lever], base: Cost, limit: int) -> FittingChange | None:
        """Combine the changes of several levers. If the combination contains full recompute, recompute only as many layers as
        needed. Returns None if the job does not fit with this combination.

        Args:
            base: memory and step time of the unchanged settings.
            limit: bytes that a rank may use of its device.
        """
        full = build_recompute_change(self._config, self._max_chunk_layers)
        other_fields = dict.fromkeys(field for lever in levers if lever.change != full for field in lever.change.fields)

        def build_change(num_layers: int) -> Change:
            return Change(
                (*build_recompute_change(self._config, num_layers).fields, *other_fields) if num_layers else tuple(other_fields)
            )

        low = high = self._max_chunk_layers if any(lever.change == full for lever in levers) else 0
        cost = self.get_cost(build_change(high))
        if cost is None or cost.device_bytes > limit:
            return None
        low = min(high, 1)
        while low < high:  # the job fits with `high` layers, and does not fit with fewer than `low`
            middle = (low + high) // 2
            middle_cost = self.get_cost(build_change(middle))
            if middle_cost is not None and middle_cost.device_bytes <= limit:
                high, cost = middle, middle_cost
            else:
                low = middle + 1
        return FittingChange(build_change(high), cost, cost.seconds / base.seconds - 1)


def count_max_chunk_layers(config: Config, vocab_size: int) -> int:
    """Return the number of layers of the model chunk that has most."""
    return max(len(chunk.layers) for chunk in build_layer_table(config.model, config.parallel, vocab_size))


def build_recompute_change(config: Config, num_layers: int) -> Change:
    """Return the change to full recompute of `num_layers` layers of each model chunk. The change replaces all current recompute
    settings."""
    reset_fields = reset(config, "recompute_activations", "recompute_modules", "recompute_layers_per_stage").fields
    return create_change(
        recompute_granularity="full", recompute_method="block", recompute_num_layers=num_layers, **dict(reset_fields)
    )


def recomputes_every_layer(config: Config, num_layers: int) -> bool:
    """Return whether every layer of the model is already recomputed on its own, so that more recompute cannot save memory.

    Args:
        num_layers: layers of the largest model chunk.
    """
    memory = config.memory
    if memory.effective_granularity != "full":
        return False
    if memory.recompute_method == "uniform":
        return memory.recompute_num_layers == 1  # while a larger group is recomputed, all activations of the group are in memory
    return memory.recompute_layers_per_stage is None and memory.recompute_num_layers >= num_layers


def list_levers(config: Config, dry_run: DryRun, vocab_size: int, num_layers: int) -> list[tuple[str, Change]]:
    """Return the valid changes of settings that save memory, each as (category, change). Changes that usually cost little time come
    first.

    Args:
        num_layers: layers of the largest model chunk.
    """
    config = fill_plan_defaults(config)
    candidates = _iter_levers(config, dry_run, vocab_size, num_layers)
    return [
        (category, candidate)
        for category, candidate in candidates
        if not find_violations(*candidate.apply(config, dry_run.world_size))
    ]


def _iter_levers(config: Config, dry_run: DryRun, vocab_size: int, num_layers: int) -> Iterator[tuple[str, Change]]:
    parallel, micro_batch_size = config.parallel, config.training.micro_batch_size
    chunk_tokens = min(MIN_EFFICIENT_TOKENS, micro_batch_size * config.tokens_per_rank)
    loss_levers = (
        [("loss", create_change(loss_chunk_tokens=chunk_tokens))]
        if (get_loss_chunk_tokens(config, vocab_size) or math.inf) > chunk_tokens
        else []
    )
    # --loss-chunk-tokens 0 disables chunks, so the logits may be many. By default only a loss with few logits has no chunks.
    disables_chunking = config.memory.loss_chunk_tokens == 0
    yield from loss_levers if disables_chunking else ()
    tp_size, dp_size = parallel.tensor_model_parallel_size, get_data_parallel_size(config, dry_run.world_size) or 1
    if config.memory.effective_granularity is None:
        yield _FULL_RECOMPUTE, create_change(recompute_granularity="selective", recompute_modules=("layernorm", "mlp_act"))
    cp_size = parallel.context_parallel_size
    can_shard = dp_size * cp_size > 1  # state is also sharded over the context ranks
    # Keep the global batch size if the microbatch or the number of data ranks changes.
    batch_setting = {"global_batch_size": micro_batch_size * dp_size} if config.training.global_batch_size is None else {}
    for strategy in _STRATEGIES[_STRATEGIES.index(parallel.sharding) + 1 :] if can_shard else ():
        yield "sharding", create_change(data_parallel_sharding_strategy=strategy)
    if tp_size > 1 and not parallel.sequence_parallel:
        yield "tensor", create_change(sequence_parallel=True)
    for divisor in (2, 4, 8):
        # Matrix products with fewer rows are slower by an unknown factor, so smaller ones are not proposed.
        if micro_batch_size % divisor == 0 and micro_batch_size // divisor * config.tokens_per_rank >= MIN_EFFICIENT_TOKENS:
            yield "batch", create_change(micro_batch_size=micro_batch_size // divisor, **batch_setting)
        # With context parallelism a microbatch is reduced to one sequence first: only then is the length the problem.
        if dp_size % divisor == 0 and config.tokens_per_rank // divisor >= MIN_EFFICIENT_TOKENS:
            micro_setting = {"micro_batch_size": 1} if micro_batch_size > 1 else {}
            yield "batch", create_change(context_parallel_size=cp_size * divisor, **micro_setting, **batch_setting)
    if not recomputes_every_layer(config, num_layers):
        yield _FULL_RECOMPUTE, build_recompute_change(config, num_layers)
    for factor in (2, 4, 8):
        if dp_size % factor == 0 and dry_run.gpus_per_node % (tp_size * factor) == 0:
            sequence_setting: dict[str, object] = {} if parallel.sequence_parallel else {"sequence_parallel": True}
            yield "tensor", create_change(tensor_model_parallel_size=tp_size * factor, **sequence_setting, **batch_setting)
    yield from () if disables_chunking else loss_levers
    if can_shard and not parallel.fsdp_params_cpu:
        yield "sharding", create_change(data_parallel_sharding_strategy=_STRATEGIES[-1], fsdp_params_cpu=True)
    if not config.memory.has_offload and parallel.device != "cpu":
        yield "offload", create_change(cpu_offload_activations=True)
    if not config.optimizer.optimizer_cpu_offload:
        yield "host", create_change(optimizer_cpu_offload=True)


def estimate_cost(base: Cost, levers: Sequence[Lever], limit: int) -> Cost:
    """Estimate the memory and step time if several levers (changes that save memory) are combined.

    A lever multiplies the activations, the memory of each other purpose, and the time, each by a factor. It is assumed that these
    factors are the same in a combination as for the lever alone. Full recompute is different: only as many layers as needed are
    recomputed, so its extra time is scaled down accordingly.

    Args:
        base: memory and step time of the unchanged settings.
        limit: bytes that a rank may use of its device.
    """
    activations, seconds, other_bytes = float(base.activation_bytes), base.seconds, [*map(float, base.other_bytes)]
    recompute_time = 0.0
    saved_share = 0.0
    for lever in levers:
        if lever.category == _FULL_RECOMPUTE:
            recompute_time, saved_share = (
                lever.cost.seconds - base.seconds,
                1 - lever.cost.activation_bytes / max(1, base.activation_bytes),
            )
            continue
        activations *= lever.cost.activation_bytes / max(1, base.activation_bytes)
        for purpose, (new_bytes, base_bytes) in enumerate(zip(lever.cost.other_bytes, base.other_bytes, strict=True)):
            other_bytes[purpose] = (
                other_bytes[purpose] * new_bytes / base_bytes if base_bytes else max(other_bytes[purpose], new_bytes)
            )
        seconds *= lever.cost.seconds / base.seconds
    total_other = sum(other_bytes)
    if saved_share:
        fraction = min(1.0, max(0.0, activations + total_other - limit) / (saved_share * activations))
        activations, seconds = activations * (1 - saved_share), seconds + fraction * recompute_time
    return Cost(math.ceil(activations), tuple(map(math.ceil, other_bytes)), seconds)


def _iter_combinations(levers: Sequence[Lever]) -> Iterator[tuple[Lever, ...]]:
    """Yield all combinations of 1 to `_MAX_COMBINED` levers (changes that save memory) of different categories."""
    for count in range(1, _MAX_COMBINED + 1):
        for combination in itertools.combinations(levers, count):
            if len({lever.category for lever in combination}) == count:
                yield combination
