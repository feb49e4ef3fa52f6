"""Which change of settings brings a job that does not fit under a limit of device memory, at the least extra time.

A lever is one thing to change: what is computed again (layers, or the logits of a loss in chunks), how far state is sharded, how
many tensor ranks there are, how many context ranks share a sequence. Each lever that the rules accept is planned by itself. So it
is known what it saves and costs, and those of different kinds are taken together, in the order of their cost, until a plan of them
fits. Memory is that of the plan, time what `step_time` predicts for the cluster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from megatron.config.checks.finding import Change, change, data_size, without
from megatron.config.checks.memory import AUTO
from megatron.config.config import Config
from megatron.config.extras import how_to_get, is_missing
from megatron.config.given import DryRun, without_gaps
from megatron.config.rules import violations
from megatron.pipeline_parallel.partition import table_of
from megatron_lab.planner.advice import ENOUGH_TOKENS
from megatron_lab.planner.chunk_trace import ChunkTrace, Traces
from megatron_lab.planner.cluster import DEFAULT, load_cluster
from megatron_lab.planner.costs import loss_chunk
from megatron_lab.planner.dry_run import Planner
from megatron_lab.planner.plan import Plan
from megatron_lab.planner.plan_text import GPU_MEMORY_GB, SPARE
from megatron_lab.planner.state_report import amount
from megatron_lab.planner.step_time import cluster_of, dtype_of, time_of

_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_MOST_TOGETHER = 4
_MOST_TRIED = 8  # combinations of levers that are planned; those before are the likelier ones
_CLOSE, _FAR = 1.1, 1.6  # levers that may fit together, by what each of them saves, are planned first; then those that hardly may
_FULL = "layers"  # the kind of lever that takes a number of layers, as few as are enough


class Cost(NamedTuple):
    """The memory and the time that settings take."""

    activations: int
    """Bytes of them on the fullest rank."""
    others: tuple[int, ...]
    """Bytes of the other device memory there, by purpose."""
    seconds: float
    """Time of a step."""

    @property
    def device(self) -> int:
        """Bytes of device memory on the fullest rank."""
        return self.activations + sum(self.others)


class Lever(NamedTuple):
    """A thing to change, and what the settings take then."""

    kind: str
    """Its kind; of levers of one kind, one is taken."""
    change: Change
    cost: Cost


@dataclass(frozen=True)
class Fitting:
    """A change after which the job fits."""

    change: Change
    cost: Cost
    extra: float
    """Share of a step's time that it adds; below 0 where it saves time."""


def memory_limit(config: Config) -> int | None:
    """Bytes of a device's memory: what --device-memory-gb says, or on a machine with GPUs that of the first. None if neither is
    known, or the job runs on CPUs."""
    if config.memory.device_memory_gb is not None:
        return round(config.memory.device_memory_gb * 1e9)
    if config.parallel.device == "cpu" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def usable(limit: int) -> int:
    """The part of a device's memory that a plan may fill: some is lost in gaps."""
    return int(limit * (1 - SPARE))


def with_fit_advice(plan: Plan, config: Config, dry_run: DryRun, vocab_size: int) -> Plan:
    """The plan with what a device has, and a line of advice before the others if the job does not fit: what to change."""
    limit, needed = memory_limit(config), plan.kinds[plan.fullest].memory.total.device
    plan = replace(plan, limit=limit)
    if limit is None and plan.job.device != "cpu":
        limit = int(GPU_MEMORY_GB[-1] * 1e9)
    if limit is None or needed <= usable(limit):
        return plan
    beyond = (
        f"the fullest rank needs {amount(needed)}, but of a device of {amount(limit)} it may take {amount(usable(limit))} "
        f"({SPARE:.0%} are left for gaps)"
    )
    cure = _cure(config, dry_run, vocab_size, usable(limit))
    return replace(plan, advice=(f"{beyond}. {cure}", *plan.advice))


def _cure(config: Config, dry_run: DryRun, vocab_size: int, limit: int) -> str:
    """A sentence that says what to change."""
    if is_missing("yaml"):
        return f"What to change is not known without PyYAML, which reads the times of a cluster: {how_to_get('yaml')}"
    found = Search(config, dry_run, vocab_size).best(limit)
    if found is None:
        return (
            "Nothing that was tried of recompute, a loss in chunks, sharding, offload and more tensor or context ranks brings it "
            "under that; take more ranks"
        )
    time = f"{abs(found.extra):.1%} {'more' if found.extra > 0 else 'less'}" if abs(found.extra) >= 5e-4 else "as much"
    return f"It fits with {found.change} ({amount(found.cost.device)}, about {time} time for a step)"


def least_layers(config: Config, dry_run: DryRun, vocab_size: int, limit: int) -> tuple[int, ...]:
    """The fewest layers that each pipeline stage must compute again to fit (for --recompute-layers-per-stage).

    Args:
        config: with full recompute by blocks.
        limit: bytes that a rank may take of its device.

    Raises:
        ValueError: a stage does not fit with all of its layers computed again.
    """
    config, traces = without_gaps(config), dict[object, ChunkTrace]()
    most = [0] * config.parallel.pipeline_model_parallel_size
    for chunk in table_of(config.model, config.parallel, vocab_size):
        most[chunk.stage] += len(chunk.layers) or bool(chunk.depths)

    def needed(numbers: Sequence[int]) -> list[int]:
        change_ = change(recompute_layers_per_stage=",".join(map(str, numbers)))
        changed, _ = change_.apply(config, dry_run.world_size)
        return Planner(changed, dry_run, vocab_size, few=True, traces=traces).device_bytes()

    for stage, bytes_ in enumerate(needed(most)):
        if bytes_ > limit:
            raise ValueError(
                f"stage {stage} needs {amount(bytes_)} even with all of its layers computed again, but may take {amount(limit)} of "
                "its device."
            )
    low, high = [0] * len(most), most  # with `high` each stage fits, with fewer than `low` it does not
    while low != high:
        middle = [(least + top) // 2 for least, top in zip(low, high, strict=True)]
        fits = [bytes_ <= limit for bytes_ in needed(middle)]
        low = [least if fit else min(number + 1, top) for fit, least, number, top in zip(fits, low, middle, high, strict=True)]
        high = [number if fit else top for fit, number, top in zip(fits, middle, high, strict=True)]
    return tuple(high)


def with_least_layers(config: Config, dry_run: DryRun, vocab_size: int) -> Config:
    """The settings with numbers of layers in place of `--recompute-layers-per-stage auto`, if that is asked for.

    Raises:
        ValueError: no limit is known, or a stage does not fit with all of its layers computed again; then it says what to change
            too.
    """
    if config.memory.recompute_layers_per_stage != AUTO:
        return config
    limit = memory_limit(config)
    if limit is None:
        raise ValueError(f"--recompute-layers-per-stage {AUTO} needs a limit where there is no GPU. Give --device-memory-gb.")
    try:
        numbers = least_layers(config, dry_run, vocab_size, usable(limit))
    except ValueError as error:
        all_again, _ = recomputed(config, most_layers(config, vocab_size)).apply(config, dry_run.world_size)
        raise ValueError(f"{error} {_cure(all_again, dry_run, vocab_size, usable(limit))}.") from None
    return replace(config, memory=replace(config.memory, recompute_layers_per_stage=",".join(map(str, numbers))))


class Search:
    """Looks for settings that need less.

    Args:
        config: settings that `load` accepted for the job's ranks.
    """

    def __init__(self, config: Config, dry_run: DryRun, vocab_size: int) -> None:
        self._config, self._dry_run, self._vocab_size = without_gaps(config), dry_run, vocab_size
        self._known: dict[Change, Cost | None] = {}
        self._traces: dict[object, Traces] = {}
        """By the settings on which the traces of chunks depend."""
        self._most_layers = most_layers(config, vocab_size)
        cluster = cluster_of(config)
        knows = cluster is not None and cluster.knows(dtype_of(config))
        self._cluster = cluster if cluster is not None and knows else load_cluster(DEFAULT)  # times are only compared

    def best(self, limit: int) -> Fitting | None:
        """The change that costs the least time among those after which no rank needs more than `limit` bytes."""
        base = self.cost(Change())
        assert base is not None, "settings that were loaded are valid"
        found = [
            Lever(kind, one, cost)
            for kind, one in levers(self._config, self._dry_run, self._vocab_size, self._most_layers)
            if (cost := self.cost(one)) is not None
        ]
        useful = [lever for lever in found if lever.cost.device < base.device]
        combined = [(estimate(base, some, limit), some) for some in _together(useful)]
        likely = [item for item in combined if item[0].device <= limit * _CLOSE]
        unlikely = [item for item in combined if limit * _CLOSE < item[0].device <= limit * _FAR]
        fitting: Fitting | None = None
        for group in (likely, unlikely):
            tried = 0
            for estimated, some in sorted(group, key=lambda item: (item[0].seconds, len(item[1]))):
                if tried == _MOST_TRIED or (fitting is not None and estimated.seconds >= fitting.cost.seconds):
                    break
                tried += len(some) > 1
                made = self._least(some, base, limit)
                if made is not None and (fitting is None or made.cost.seconds < fitting.cost.seconds):
                    fitting = made
        return fitting

    def cost(self, one: Change) -> Cost | None:
        """What the settings take after a change; None if they are not valid then."""
        if one not in self._known:
            self._known[one] = self._plan(one)
        return self._known[one]

    def _plan(self, one: Change) -> Cost | None:
        config, world_size = one.apply(self._config, self._dry_run.world_size)
        if violations(config, world_size):
            return None
        parallel = config.parallel
        sharers = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        layout = sharers, parallel.sequence_parallel, config.training.micro_batch_size
        traces = self._traces.setdefault((layout, config.memory), {})
        work = Planner(config, self._dry_run, self._vocab_size, few=True, traces=traces).work()
        time = time_of(work, config, self._dry_run, self._vocab_size, self._cluster)
        fullest = max(work.kinds, key=lambda kind: kind.memory.total.device).memory
        others = (part.device for purpose, part in fullest.parts.items() if purpose != "activations")
        return Cost(fullest.activations.device, tuple(others), time.seconds)

    def _least(self, some: Sequence[Lever], base: Cost, limit: int) -> Fitting | None:
        """These levers together, with the fewest layers computed again that are enough, if they fit at all."""
        full = recomputed(self._config, self._most_layers)
        rest = dict.fromkeys(field for lever in some if lever.change != full for field in lever.change.fields)

        def with_layers(number: int) -> Change:
            return Change((*recomputed(self._config, number).fields, *rest) if number else tuple(rest))

        low = high = self._most_layers if any(lever.change == full for lever in some) else 0
        cost = self.cost(with_layers(high))
        if cost is None or cost.device > limit:
            return None
        low = min(high, 1)
        while low < high:  # with `high` it fits, with fewer than `low` it does not
            middle = (low + high) // 2
            one = self.cost(with_layers(middle))
            if one is not None and one.device <= limit:
                high, cost = middle, one
            else:
                low = middle + 1
        return Fitting(with_layers(high), cost, cost.seconds / base.seconds - 1)


def most_layers(config: Config, vocab_size: int) -> int:
    """Layers of the largest chunk of the model."""
    return max(len(chunk.layers) for chunk in table_of(config.model, config.parallel, vocab_size))


def recomputed(config: Config, num_layers: int) -> Change:
    """Full recompute of so many layers of each chunk, in place of what is computed again now."""
    back = without(config, "recompute_activations", "recompute_modules", "recompute_layers_per_stage").fields
    return change(recompute_granularity="full", recompute_method="block", recompute_num_layers=num_layers, **dict(back))


def each_runs_again(config: Config, num_layers: int) -> bool:
    """Whether each layer of the model is computed again by itself, so that there are no more to take.

    Args:
        num_layers: layers of the largest chunk.
    """
    memory = config.memory
    if memory.recompute != "full":
        return False
    if memory.recompute_method == "uniform":
        return memory.recompute_num_layers == 1  # a larger group is held whole while it runs again
    return memory.recompute_layers_per_stage is None and memory.recompute_num_layers >= num_layers


def levers(config: Config, dry_run: DryRun, vocab_size: int, num_layers: int) -> list[tuple[str, Change]]:
    """What may be changed to save memory, those first that usually cost little; each with its kind. The rules accept all of it.

    Args:
        num_layers: layers of the largest chunk.
    """
    config = without_gaps(config)
    found = _levers(config, dry_run, vocab_size, num_layers)
    return [(kind, one) for kind, one in found if not violations(*one.apply(config, dry_run.world_size))]


def _levers(config: Config, dry_run: DryRun, vocab_size: int, num_layers: int) -> Iterator[tuple[str, Change]]:
    parallel, micro = config.parallel, config.training.micro_batch_size
    chunk = min(ENOUGH_TOKENS, micro * config.tokens_per_rank)
    chunked = [("loss", change(loss_chunk_tokens=chunk))] if (loss_chunk(config, vocab_size) or math.inf) > chunk else []
    asked_whole = config.memory.loss_chunk_tokens == 0  # otherwise it is whole because the logits are few
    yield from chunked if asked_whole else ()
    tensor, data = parallel.tensor_model_parallel_size, data_size(config, dry_run.world_size) or 1
    if config.memory.recompute is None:
        yield _FULL, change(recompute_granularity="selective", recompute_modules=("layernorm", "mlp_act"))
    context = parallel.context_parallel_size
    shared = data * context > 1  # state is sharded over the context ranks too
    # With smaller microbatches or fewer data ranks the batch stays what it is.
    batch = {"global_batch_size": micro * data} if config.training.global_batch_size is None else {}
    for strategy in _STRATEGIES[_STRATEGIES.index(parallel.sharding) + 1 :] if shared else ():
        yield "sharding", change(data_parallel_sharding_strategy=strategy)
    if tensor > 1 and not parallel.sequence_parallel:
        yield "tensor", change(sequence_parallel=True)
    for part in (2, 4, 8):
        # Products of fewer rows are slower, by how much is not known: so no smaller ones are proposed.
        if micro % part == 0 and micro // part * config.tokens_per_rank >= ENOUGH_TOKENS:
            yield "batch", change(micro_batch_size=micro // part, **batch)
        # It is the length that is too much only where a microbatch is one sequence.
        if data % part == 0 and config.tokens_per_rank // part >= ENOUGH_TOKENS:
            whole = {"micro_batch_size": 1} if micro > 1 else {}
            yield "batch", change(context_parallel_size=context * part, **whole, **batch)
    if not each_runs_again(config, num_layers):
        yield _FULL, recomputed(config, num_layers)
    for factor in (2, 4, 8):
        if data % factor == 0 and dry_run.gpus_per_node % (tensor * factor) == 0:
            split: dict[str, object] = {} if parallel.sequence_parallel else {"sequence_parallel": True}
            yield "tensor", change(tensor_model_parallel_size=tensor * factor, **split, **batch)
    yield from () if asked_whole else chunked
    if shared and not parallel.fsdp_params_cpu:
        yield "sharding", change(data_parallel_sharding_strategy=_STRATEGIES[-1], fsdp_params_cpu=True)
    if not config.memory.offloads and parallel.device != "cpu":
        yield "offload", change(cpu_offload_activations=True)
    if not config.optimizer.optimizer_cpu_offload:
        yield "host", change(optimizer_cpu_offload=True)


def estimate(base: Cost, some: Sequence[Lever], limit: int) -> Cost:
    """What levers may take together: each divides activations, each other purpose and the time as it does by itself. Of layers only
    as many as are needed are computed again, so their time is taken in proportion."""
    activations, seconds, parts = float(base.activations), base.seconds, [*map(float, base.others)]
    again = 0.0
    saved = 0.0
    for lever in some:
        if lever.kind == _FULL:
            again, saved = lever.cost.seconds - base.seconds, 1 - lever.cost.activations / max(1, base.activations)
            continue
        activations *= lever.cost.activations / max(1, base.activations)
        for number, (now, before) in enumerate(zip(lever.cost.others, base.others, strict=True)):
            parts[number] = parts[number] * now / before if before else max(parts[number], now)
        seconds *= lever.cost.seconds / base.seconds
    others = sum(parts)
    if saved:
        part = min(1.0, max(0.0, activations + others - limit) / (saved * activations))
        activations, seconds = activations * (1 - saved), seconds + part * again
    return Cost(math.ceil(activations), tuple(map(math.ceil, parts)), seconds)


def _together(levers: Sequence[Lever]) -> Iterator[tuple[Lever, ...]]:
    """One to a few levers of different kinds."""
    for count in range(1, _MOST_TOGETHER + 1):
        for some in itertools.combinations(levers, count):
            if len({lever.kind for lever in some}) == count:
                yield some
