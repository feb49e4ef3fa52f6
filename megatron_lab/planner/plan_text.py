"""Text form of a plan: first whether it fits and how a step's time is spent, then the memory and traffic of the ranks of each
stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.partition import Chunk, describe_offload, describe_recompute
from megatron_lab.planner.plan import ExpertsPlan, Plan, RankProfile
from megatron_lab.planner.state_report import format_device_memory, format_host_memory
from megatron_lab.planner.step_time import StepTime
from megatron_lab.planner.units import format_bytes, format_with_unit
from megatron_lab.terminal import format_table

GPU_MEMORY_GB = (16, 24, 32, 40, 48, 80, 94, 141, 180, 288)
"""Memory of current GPUs, in gigabytes."""
SPARE_SHARE = 0.05
"""Share of a GPU's memory that must remain free for memory that the plan does not count: gaps between allocator blocks, and
memory of CUDA that the allowances do not cover."""
_MAX_STAGE_COLUMNS = 6
"""Maximum number of stage columns in the traffic table."""


def format_plan(plan: Plan, time: StepTime | None = None, width: int | None = None) -> list[str]:
    """Return the full plan as lines of text.

    Args:
        time: predicted time of a step; None to print no time.
        width: maximum number of characters of a table's line; None for no limit.
    """
    rows = build_rows(plan)
    return [
        *_format_fullest_rank(plan),
        *_format_work(plan, rows),
        *([] if time is None else _format_time(time)),
        "",
        *_format_job(plan),
        "",
        *_format_memory_table(plan, rows, width),
        "",
        *_format_traffic_table(rows, width),
        "",
        *_format_layer_table(plan, width),
        "",
        *_format_estimates(plan),
        *(f"note: {note}" for note in plan.notes),
        *(f"advice: {proposal}" for proposal in plan.advice),
    ]


def _format_fullest_rank(plan: Plan) -> Iterator[str]:
    profile = plan.profiles[plan.fullest_index]
    total = profile.memory.total
    location = f"stage {profile.stages[0]}, rank {profile.first_rank}" if plan.job.pipeline > 1 else f"rank {profile.first_rank}"
    yield f"fullest rank ({location}): needs {format_bytes(total.device)} of device memory{_format_fit(plan, total.device)}"
    yield f"  {format_device_memory(profile.memory)}"
    if total.host:
        ranks_per_node = min(plan.job.gpus_per_node, plan.job.world_size)
        yield (
            f"  and {format_bytes(total.host)} of host memory, {format_bytes(ranks_per_node * total.host)} on a "
            f"node: {format_host_memory(profile.memory)}"
        )
    if plan.experts is not None:
        yield from _format_experts(plan, plan.experts)


def _format_experts(plan: Plan, experts: ExpertsPlan) -> Iterator[str]:
    if not experts.unbalanced_profiles:
        yield (
            "  all experts are taken to get as many tokens: a rank of busier ones keeps more activations "
            "(--plan-expert-imbalance FACTOR tells how much)"
        )
    else:
        profile = experts.fullest
        device_bytes = profile.memory.total.device
        load = "take their whole capacity" if experts.imbalance is None else f"get {experts.imbalance:g} x the mean of tokens"
        yield (
            f"  that is with as many tokens for each expert; a rank whose experts {load} needs {format_bytes(device_bytes)}"
            f" ({format_bytes(profile.memory.activations.device)} of activations){_format_fit(plan, device_bytes)}"
        )
    if experts.dispatched_bytes_per_layer:
        yield (
            f"  tokens travel to experts and back in {_format_count(experts.num_layers, 'layer')}: a rank sends "
            f"{format_bytes(experts.dispatched_bytes_per_layer)} a layer in a step, "
            f"{format_bytes(experts.dispatched_bytes or 0)} in all"
        )


def _format_estimates(plan: Plan) -> Iterator[str]:
    """Yield a note that says which part of the plan's memory is an estimate (CUDA's own memory). All other memory is exact."""
    allowances = plan.profiles[plan.fullest_index].allowances
    if allowances:
        listing = ", ".join(map(str, allowances))
        yield f"note: cuda is an estimate ({listing}; sources in the JSON file); all other memory is exact to the byte"


def _format_fit(plan: Plan, required: int) -> str:
    if plan.device_memory is not None:
        spare = plan.device_memory - required
        if spare < 0:
            return f": more than a device of {format_bytes(plan.device_memory)} has"
        verdict = "fits" if spare >= SPARE_SHARE * plan.device_memory else "too tight for"
        return f": {verdict} a device of {format_bytes(plan.device_memory)}, with {format_bytes(spare)} to spare"
    if plan.job.device == "cpu":
        return ""
    too_small = [size for size in GPU_MEMORY_GB if size * 1e9 <= required]
    too_tight = [size for size in GPU_MEMORY_GB if 0 < size * 1e9 - required < SPARE_SHARE * size * 1e9]
    larger = [size for size in GPU_MEMORY_GB if size * 1e9 - required >= SPARE_SHARE * size * 1e9]
    if not (larger or too_tight):
        return f": more than any GPU has (the largest has {GPU_MEMORY_GB[-1]} GB)"
    verdicts = []
    if too_tight:
        verdicts.append(f"too tight for a GPU of {too_tight[-1]} GB ({format_bytes(too_tight[-1] * 1e9 - required)} to spare)")
    elif too_small:
        verdicts.append(f"more than a GPU of {too_small[-1]} GB has")
    if larger:
        verdicts.append(f"fits one of {larger[0]} GB with {format_bytes(larger[0] * 1e9 - required)} to spare")
    return f": {', '.join(verdicts)}"


def _format_work(plan: Plan, rows: Sequence[StageRow]) -> Iterator[str]:
    job, work = plan.job, plan.work
    flops_per_rank = work.compute_flops_per_rank(job.world_size)
    bubble_note = f"; {work.bubble_share:.1%} of the time idle in the pipeline" if job.pipeline > 1 else ""
    fp8_note = f" ({work.fp8_flops / work.flops:.0%} of them in 8 bits)" if work.fp8_flops else ""
    recompute_note = (
        f" and {work.recompute_flops / work.flops:.1%} more to compute layers or logits again" if work.recompute_flops else ""
    )
    yield (
        f"a step: {work.tokens:,} tokens, {_format_flops(work.flops)}{fp8_note}, {_format_flops(flops_per_rank)} on "
        f"each rank{recompute_note}{bubble_note}"
    )
    offloaded_bytes = max(profile.offloaded_bytes for profile in plan.profiles)
    if offloaded_bytes and job.device != "cpu":
        yield f"  a rank moves up to {format_bytes(offloaded_bytes)} of activations to host memory and back"
    if job.world_size == 1:
        return
    busiest = max(rows, key=lambda row: sum(compute_mean_traffic(row)))
    intra_node, inter_node = compute_mean_traffic(busiest)
    yield (
        f"  a rank of {busiest.name} sends {format_bytes(intra_node)} inside its node and {format_bytes(inter_node)} to other nodes"
    )


def _format_time(time: StepTime) -> Iterator[str]:
    breakdown = ", ".join(f"{name} {share:.1%}" for name, share in time.find_largest_shares())
    yield (
        f"  such a step takes about {format_duration(time.seconds)} (90 % range {format_duration(time.low)} to "
        f"{format_duration(time.high)}; "
        f"{time.tokens_per_s:,.0f} tokens/s per GPU, {time.mfu:.1%} MFU) on {time.cluster}"
    )
    yield f"    on its busiest rank: {breakdown}"
    if time.uncalibrated_sizes:
        yield f"    not calibrated there: {', '.join(time.uncalibrated_sizes)}"


def _format_job(plan: Plan) -> Iterator[str]:
    job = plan.job
    yield (
        f"{_format_count(job.world_size, 'rank')} on {_format_count(job.nodes, 'node')} of {job.gpus_per_node}: "
        f"{Topology(tp=job.tensor, cp=job.context, pp=job.pipeline, dp=job.data)}"
        + (", sequence parallel" if job.sequence_parallel else "")
        + f"; {job.sharding}"
    )
    padding = job.padded_vocab_size - job.vocab_size
    active = "" if plan.active_parameters == plan.parameters else f" ({plan.active_parameters:,} active)"
    yield (
        f"model of {plan.parameters:,} parameters{active} in {job.dtype}, vocabulary {job.vocab_size:,}"
        + (f" and {_format_count(padding, 'row')} of padding" if padding else "")
    )
    microbatches = _format_count(job.num_microbatches, "microbatch", "microbatches")
    yield (
        f"batch of {job.global_batch_size:,} x {job.seq_length:,} tokens in {microbatches} of {job.micro_batch_size}, "
        f"schedule {job.schedule}" + (f" with {job.chunks_per_stage} chunks a stage" if job.chunks_per_stage > 1 else "")
    )
    yield from describe_recompute(plan.layer_table)
    yield from describe_offload(plan.layer_table)


def _format_memory_table(plan: Plan, rows: Sequence[StageRow], width: int | None) -> list[str]:
    """Format a table of device memory, with a column for each purpose (parameters, gradients and so on). Adjacent stages with equal
    memory and traffic share a row."""
    profiles = plan.profiles
    columns: list[tuple[str, Callable[[RankProfile], float]]] = [
        (name.replace("_", " "), lambda profile, name=name: profile.memory.by_purpose[name].total)  # type: ignore[misc]
        for name in profiles[0].memory.by_purpose
        if any(profile.memory.by_purpose[name].total for profile in profiles)
    ]
    columns.append(("device", lambda profile: profile.memory.total.device))
    if any(profile.memory.total.host for profile in profiles):
        columns.append(("host", lambda profile: profile.memory.total.host))
    head = ["memory of a rank", "ranks", "elements", *(heading for heading, _ in columns)]
    body = [
        [
            row.name,
            f"{row.num_ranks:,}",
            row.format_range(lambda profile: profile.parameters, _format_elements),
            *(row.format_range(get_value, format_bytes) for _, get_value in columns),
        ]
        for row in rows
    ]
    return format_table([head, *body], width=width)


def _format_traffic_table(rows: Sequence[StageRow], width: int | None) -> list[str]:
    """Format a table of the bytes that a rank sends, with a row for each process group and purpose. Adjacent stages with equal
    memory and traffic share a column.

    If there would be too many columns, one column stands for all stages.
    """
    if len(rows) > _MAX_STAGE_COLUMNS:
        profiles = tuple(dict.fromkeys(profile for row in rows for profile in row.profiles))
        rows = [StageRow(rows[0].first_stage, rows[-1].last_stage, sum(row.num_ranks for row in rows), profiles)]
    entries = [entry for row in rows for profile in row.profiles for entry in profile.traffic if entry.over != "world"]
    if not entries:
        return ["a rank sends nothing in a step"]
    entries.sort(key=lambda entry: entry.bytes)
    entry_of_key = dict(reversed({(entry.over, entry.what): entry for entry in entries}.items()))
    body = [
        [
            f"{group}: {purpose}",
            f"{entry.group_size:,}",
            _format_destination(compute_inter_node_share([profile for row in rows for profile in row.profiles], group, purpose)),
            *(
                row.format_range(lambda profile, key=(group, purpose): profile.get_traffic_bytes(*key), format_bytes)  # type: ignore[misc]
                for row in rows
            ),
        ]
        for (group, purpose), entry in entry_of_key.items()
    ]
    return format_table([["sent by a rank in a step", "ranks", "to", *(row.name for row in rows)], *body], width=width)


def _format_layer_table(plan: Plan, width: int | None) -> list[str]:
    """Format a table of layers with a row for each stage. Adjacent stages share a row if each has one model chunk and their chunks
    have equally many layers."""
    by_stage = [[chunk for chunk in plan.layer_table if chunk.stage == stage] for stage in range(plan.job.pipeline)]

    def build_key(chunks: Sequence[Chunk]) -> object:
        return chunks[0].stage if len(chunks) > 1 else (len(chunks[0].layers), chunks[0].is_first, chunks[0].is_last)

    body = []
    for run in (list(run) for _, run in itertools.groupby(by_stage, key=build_key)):
        cells = [_format_chunk(low, high) for low, high in zip(run[0], run[-1], strict=True)]
        body.append([_format_stages(run[0][0].stage, run[-1][0].stage), *cells])
    head = ["layers", *(f"chunk {i}" if len(by_stage[0]) > 1 else "" for i in range(len(by_stage[0])))]
    return format_table([head, *body], width=width)


def _format_chunk(chunk: Chunk, last_chunk: Chunk) -> str:
    """Describe the contents of a model chunk.

    Args:
        last_chunk: chunk of the last stage in the row, if the row stands for several stages; otherwise `chunk` itself.
    """
    contents = ["embedding"] if chunk.is_first else []
    if count := len(chunk.layers):
        first, end = chunk.layers.start, last_chunk.layers.stop - 1
        suffix = " each" if chunk is not last_chunk else ""
        contents.append(f"{_format_count(count, 'layer')}{suffix}: {first}" + (f"-{end}" if end > first else ""))
    contents += ["norm, output, loss"] if chunk.is_last else []
    return ", ".join(contents) or "no layer"


def _format_stages(first: int, last: int) -> str:
    return f"stage {first}" if first == last else f"stages {first}-{last}"


def _format_destination(inter_node_share: float) -> str:
    if inter_node_share in (0, 1):
        return "other nodes" if inter_node_share else "inside the node"
    return f"{inter_node_share:.0%} to other nodes"


def _format_count(count: int, singular: str, plural: str | None = None) -> str:
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def _format_elements(num_elements: float) -> str:
    return format_with_unit(num_elements, ["", " k", " M", " G", " T"])


def _format_flops(flops: float) -> str:
    return format_with_unit(flops, [" FLOP", " kFLOP", " MFLOP", " GFLOP", " TFLOP", " PFLOP", " EFLOP", " ZFLOP"])


def format_duration(seconds: float) -> str:
    """Format a duration in seconds, with a unit that suits its size."""
    return f"{seconds:.3g} s" if seconds >= 0.0995 else f"{1000 * seconds:.3g} ms"


@dataclass(frozen=True)
class StageRow:
    """Row of a table: adjacent stages whose ranks have equal memory and traffic, to three digits."""

    first_stage: int
    last_stage: int
    num_ranks: int
    profiles: tuple[RankProfile, ...]

    @property
    def name(self) -> str:
        """Name of the row, such as "stages 0-3"."""
        return _format_stages(self.first_stage, self.last_stage)

    def format_range(self, get_value: Callable[[RankProfile], float], format_value: Callable[[float], str]) -> str:
        """Format a value of the row's ranks, or its range, such as "1.2 GB - 1.3 GB", if the ranks differ.

        Args:
            get_value: returns the value of the ranks with one profile.
            format_value: converts a value to text.
        """
        low, high = (format_value(bound(map(get_value, self.profiles))) for bound in (min, max))
        return high if low == high else f"{low} - {high}"


def build_rows(plan: Plan) -> list[StageRow]:
    """Divide the stages into rows of a table: adjacent stages with equal memory and traffic share a row."""
    by_stage = [tuple(profile for profile in plan.profiles if stage in profile.stages) for stage in range(plan.job.pipeline)]
    rows: list[StageRow] = []
    for _, run in itertools.groupby(range(len(by_stage)), key=lambda stage: frozenset(map(_build_row_key, by_stage[stage]))):
        stages = list(run)
        profiles = [profile for stage in stages for profile in by_stage[stage]]
        num_ranks = sum(profile.num_ranks // len(profile.stages) for profile in profiles)
        rows.append(StageRow(stages[0], stages[-1], num_ranks, tuple(dict.fromkeys(profiles))))
    return rows


def compute_mean_traffic(row: StageRow) -> tuple[float, float]:
    """Return the bytes that a rank of the row sends in a step to ranks of its own node, and the bytes that it sends to other nodes.
    Both are means over the ranks."""
    num_ranks = sum(profile.num_ranks for profile in row.profiles)
    intra_node = sum(profile.num_ranks * profile.intra_node_bytes for profile in row.profiles)
    inter_node = sum(profile.num_ranks * profile.inter_node_bytes for profile in row.profiles)
    return intra_node / num_ranks, inter_node / num_ranks


def compute_inter_node_share(profiles: Iterable[RankProfile], group: str, purpose: str) -> float:
    """Return how large a share of the bytes sent over one process group for one purpose goes to other nodes."""
    shares = [
        (profile.num_ranks * entry.bytes, entry.between_nodes)
        for profile in profiles
        for entry in profile.traffic
        if (entry.over, entry.what) == (group, purpose)
    ]
    return sum(num_bytes * share for num_bytes, share in shares) / sum(num_bytes for num_bytes, _ in shares)


def _build_row_key(profile: RankProfile) -> object:
    state = profile.memory.total.device - profile.memory.activations.device
    return (
        format_bytes(state),
        format_bytes(profile.memory.total.host),
        tuple((entry.over, entry.what, format_bytes(entry.bytes)) for entry in profile.traffic),
    )
