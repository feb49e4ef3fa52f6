"""A plan as lines of text: first whether it fits and where the time goes, then what each kind of rank keeps and sends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.partition import Chunk, describe_offload, describe_recompute
from megatron_lab.planner.plan import ExpertsPlan, Plan, RankKind
from megatron_lab.planner.state_report import amount, device_parts, host_parts, in_units
from megatron_lab.planner.step_time import StepTime

GPU_MEMORY_GB = (16, 24, 32, 40, 48, 80, 94, 141, 180, 288)
"""Memory of the GPUs that are sold, in gigabytes."""
SPARE = 0.05
"""Share of a GPU's memory that must be left for what the plan does not count: gaps between the allocator's blocks, and whatever the
allowances for CUDA leave out."""
_COLUMNS = 6
"""Stages side by side in the table of what is sent."""


def format_plan(plan: Plan, time: StepTime | None = None) -> list[str]:
    """The whole plan as lines of text, with the time of a step where it is predicted."""
    rows = rows_of(plan)
    return [
        *_verdict(plan),
        *_work(plan, rows),
        *([] if time is None else _time(time)),
        "",
        *_job(plan),
        "",
        *_memory_table(plan, rows),
        "",
        *_traffic_table(rows),
        "",
        *_layer_table(plan),
        "",
        *_estimates(plan),
        *(f"note: {note}" for note in plan.notes),
        *(f"advice: {line}" for line in plan.advice),
    ]


def _verdict(plan: Plan) -> Iterator[str]:
    kind = plan.kinds[plan.fullest]
    total = kind.memory.total
    where = f"stage {kind.stages[0]}, rank {kind.first_rank}" if plan.job.pipeline > 1 else f"rank {kind.first_rank}"
    yield f"fullest rank ({where}): needs {amount(total.device)} of device memory{_fits(plan, total.device)}"
    yield f"  {device_parts(kind.memory)}"
    if total.host:
        each = min(plan.job.gpus_per_node, plan.job.world_size)
        yield f"  and {amount(total.host)} of host memory, {amount(each * total.host)} on a node: {host_parts(kind.memory)}"
    if plan.experts is not None:
        yield from _experts(plan, plan.experts)


def _experts(plan: Plan, experts: ExpertsPlan) -> Iterator[str]:
    if not experts.unbalanced:
        yield (
            "  all experts are taken to get as many tokens: a rank of busier ones keeps more activations "
            "(--plan-expert-imbalance FACTOR tells how much)"
        )
    else:
        kind = experts.fullest
        more = kind.memory.total.device
        busy = "take their whole capacity" if experts.factor is None else f"get {experts.factor:g} x the mean of tokens"
        yield (
            f"  that is with as many tokens for each expert; a rank whose experts {busy} needs {amount(more)}"
            f" ({amount(kind.memory.activations.device)} of activations){_fits(plan, more)}"
        )
    if experts.dispatched_a_layer:
        yield (
            f"  tokens travel to experts and back in {_count(experts.layers, 'layer')}: a rank sends "
            f"{amount(experts.dispatched_a_layer)} a layer in a step, {amount(experts.dispatched or 0)} in all"
        )


def _estimates(plan: Plan) -> Iterator[str]:
    """What stands apart from numbers that are exact."""
    taken = plan.kinds[plan.fullest].allowances
    if taken:
        parts = ", ".join(map(str, taken))
        yield f"note: cuda is an estimate ({parts}; sources in the JSON file); all other memory is exact to the byte"


def _fits(plan: Plan, needed: int) -> str:
    if plan.limit is not None:
        spare = plan.limit - needed
        if spare < 0:
            return f": more than a device of {amount(plan.limit)} has"
        found = "fits" if spare >= SPARE * plan.limit else "too tight for"
        return f": {found} a device of {amount(plan.limit)}, with {amount(spare)} to spare"
    if plan.job.device == "cpu":
        return ""
    too_small = [size for size in GPU_MEMORY_GB if size * 1e9 <= needed]
    too_tight = [size for size in GPU_MEMORY_GB if 0 < size * 1e9 - needed < SPARE * size * 1e9]
    larger = [size for size in GPU_MEMORY_GB if size * 1e9 - needed >= SPARE * size * 1e9]
    if not (larger or too_tight):
        return f": more than any GPU has (the largest has {GPU_MEMORY_GB[-1]} GB)"
    words = []
    if too_tight:
        words.append(f"too tight for a GPU of {too_tight[-1]} GB ({amount(too_tight[-1] * 1e9 - needed)} to spare)")
    elif too_small:
        words.append(f"more than a GPU of {too_small[-1]} GB has")
    if larger:
        words.append(f"fits one of {larger[0]} GB with {amount(larger[0] * 1e9 - needed)} to spare")
    return f": {', '.join(words)}"


def _work(plan: Plan, rows: Sequence[Row]) -> Iterator[str]:
    job, work = plan.job, plan.work
    each = work.flops_per_rank(job.world_size)
    idle = f"; {work.bubble:.1%} of the time idle in the pipeline" if job.pipeline > 1 else ""
    eight = f" ({work.in_8_bits / work.flops:.0%} of them in 8 bits)" if work.in_8_bits else ""
    again = f" and {work.again / work.flops:.1%} more to compute layers or logits again" if work.again else ""
    yield f"a step: {work.tokens:,} tokens, {_flops(work.flops)}{eight}, {_flops(each)} on each rank{again}{idle}"
    moved = max(kind.to_host for kind in plan.kinds)
    if moved and job.device != "cpu":
        yield f"  a rank moves up to {amount(moved)} of activations to host memory and back"
    if job.world_size == 1:
        return
    busiest = max(rows, key=lambda row: sum(bytes_sent(row)))
    inside, between = bytes_sent(busiest)
    yield f"  a rank of {busiest.name} sends {amount(inside)} inside its node and {amount(between)} to other nodes"


def _time(time: StepTime) -> Iterator[str]:
    parts = ", ".join(f"{name} {share:.1%}" for name, share in time.shares())
    yield (
        f"  such a step takes about {duration(time.seconds)} ({duration(time.low)} to {duration(time.high)} in nine of ten cases; "
        f"{time.tokens_per_s:,.0f} tokens/s per GPU, {time.mfu:.1%} MFU) on {time.cluster}"
    )
    yield f"    on its busiest rank: {parts}"
    if time.outside:
        yield f"    not calibrated there: {', '.join(time.outside)}"


def _job(plan: Plan) -> Iterator[str]:
    job = plan.job
    yield (
        f"{_count(job.world_size, 'rank')} on {_count(job.nodes, 'node')} of {job.gpus_per_node}: "
        f"{Topology(tp=job.tensor, cp=job.context, pp=job.pipeline, dp=job.data)}"
        + (", sequence parallel" if job.sequence_parallel else "")
        + f"; {job.sharding}"
    )
    padding = job.padded_vocab_size - job.vocab_size
    active = "" if plan.active_parameters == plan.parameters else f" ({plan.active_parameters:,} active)"
    yield (
        f"model of {plan.parameters:,} parameters{active} in {job.dtype}, vocabulary {job.vocab_size:,}"
        + (f" and {_count(padding, 'row')} of padding" if padding else "")
    )
    microbatches = _count(job.num_microbatches, "microbatch", "microbatches")
    yield (
        f"batch of {job.global_batch_size:,} x {job.seq_length:,} tokens in {microbatches} of {job.micro_batch_size}, "
        f"schedule {job.schedule}" + (f" with {job.chunks_per_stage} chunks a stage" if job.chunks_per_stage > 1 else "")
    )
    yield from describe_recompute(plan.layers)
    yield from describe_offload(plan.layers)


def _memory_table(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """A row for stages that keep as much, and a column for each part."""
    kinds = plan.kinds
    columns: list[tuple[str, Callable[[RankKind], float]]] = [
        (name.replace("_", " "), lambda kind, name=name: kind.memory.parts[name].total)  # type: ignore[misc]
        for name in kinds[0].memory.parts
        if any(kind.memory.parts[name].total for kind in kinds)
    ]
    columns.append(("device", lambda kind: kind.memory.total.device))
    if any(kind.memory.total.host for kind in kinds):
        columns.append(("host", lambda kind: kind.memory.total.host))
    head = ["memory of a rank", "ranks", "elements", *(words for words, _ in columns)]
    body = [
        [
            row.name,
            f"{row.ranks:,}",
            row.spread(lambda kind: kind.parameters, _elements),
            *(row.spread(number, amount) for _, number in columns),
        ]
        for row in rows
    ]
    return table(head, body)


def _traffic_table(rows: Sequence[Row]) -> list[str]:
    """A row for each group and purpose, and a column for stages that send alike; one for all if these are many."""
    if len(rows) > _COLUMNS:
        kinds = tuple(dict.fromkeys(kind for row in rows for kind in row.kinds))
        rows = [Row(rows[0].first, rows[-1].last, sum(row.ranks for row in rows), kinds)]
    found = [one for row in rows for kind in row.kinds for one in kind.sent if one.over != "world"]
    if not found:
        return ["a rank sends nothing in a step"]
    found.sort(key=lambda one: one.bytes)
    sent = dict(reversed({(one.over, one.what): one for one in found}.items()))
    body = [
        [
            f"{over}: {what}",
            f"{one.group_size:,}",
            _where(leaving([kind for row in rows for kind in row.kinds], over, what)),
            *(row.spread(lambda kind, key=(over, what): kind.sent_over(*key), amount) for row in rows),  # type: ignore[misc]
        ]
        for (over, what), one in sent.items()
    ]
    return table(["sent by a rank in a step", "ranks", "to", *(row.name for row in rows)], body)


def _layer_table(plan: Plan) -> list[str]:
    """One line for each stage; neighbours with equally many layers in one chunk share a line."""
    by_stage = [[chunk for chunk in plan.layers if chunk.stage == stage] for stage in range(plan.job.pipeline)]

    def alike(chunks: Sequence[Chunk]) -> object:
        return chunks[0].stage if len(chunks) > 1 else (len(chunks[0].layers), chunks[0].first, chunks[0].last)

    body = []
    for run in (list(run) for _, run in itertools.groupby(by_stage, key=alike)):
        texts = [_chunk(low, high) for low, high in zip(run[0], run[-1], strict=True)]
        body.append([_stages(run[0][0].stage, run[-1][0].stage), *texts])
    return table(["layers", *(f"chunk {i}" if len(by_stage[0]) > 1 else "" for i in range(len(by_stage[0])))], body)


def _chunk(chunk: Chunk, last: Chunk) -> str:
    """What a chunk holds in words; `last` is the chunk of the last of several stages, or the same."""
    parts = ["embedding"] if chunk.first else []
    if count := len(chunk.layers):
        first, end = chunk.layers.start, last.layers.stop - 1
        each = " each" if chunk is not last else ""
        parts.append(f"{_count(count, 'layer')}{each}: {first}" + (f"-{end}" if end > first else ""))
    parts += ["norm, output, loss"] if chunk.last else []
    return ", ".join(parts) or "no layer"


def _stages(first: int, last: int) -> str:
    return f"stage {first}" if first == last else f"stages {first}-{last}"


def _where(between: float) -> str:
    if between in (0, 1):
        return "other nodes" if between else "inside the node"
    return f"{between:.0%} to other nodes"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _elements(number: float) -> str:
    return in_units(number, ["", " k", " M", " G", " T"])


def _flops(number: float) -> str:
    return in_units(number, [" FLOP", " kFLOP", " MFLOP", " GFLOP", " TFLOP", " PFLOP", " EFLOP", " ZFLOP"])


def duration(number: float) -> str:
    """Seconds as text."""
    return f"{number:.3g} s" if number >= 0.0995 else f"{1000 * number:.3g} ms"


@dataclass(frozen=True)
class Row:
    """Neighbouring stages whose ranks keep and send equally much, to three digits."""

    first: int
    last: int
    ranks: int
    kinds: tuple[RankKind, ...]

    @property
    def name(self) -> str:
        """The stages in words."""
        return _stages(self.first, self.last)

    def spread(self, number: Callable[[RankKind], float], text: Callable[[float], str]) -> str:
        """A number that each rank has; its range where ranks differ."""
        low, high = (text(bound(map(number, self.kinds))) for bound in (min, max))
        return high if low == high else f"{low} - {high}"


def rows_of(plan: Plan) -> list[Row]:
    """All stages, as rows."""
    by_stage = [tuple(kind for kind in plan.kinds if stage in kind.stages) for stage in range(plan.job.pipeline)]
    rows: list[Row] = []
    for _, run in itertools.groupby(range(len(by_stage)), key=lambda stage: frozenset(map(_look, by_stage[stage]))):
        stages = list(run)
        kinds = [kind for stage in stages for kind in by_stage[stage]]
        ranks = sum(kind.ranks // len(kind.stages) for kind in kinds)
        rows.append(Row(stages[0], stages[-1], ranks, tuple(dict.fromkeys(kinds))))
    return rows


def bytes_sent(row: Row) -> tuple[float, float]:
    """Bytes that a rank sends in a step inside its node, and to other nodes: the mean over the row's ranks."""
    ranks = sum(kind.ranks for kind in row.kinds)
    inside = sum(kind.ranks * kind.inside_bytes for kind in row.kinds)
    between = sum(kind.ranks * kind.between_bytes for kind in row.kinds)
    return inside / ranks, between / ranks


def leaving(kinds: Iterable[RankKind], over: str, what: str) -> float:
    """The share of what ranks send over a group that goes to other nodes."""
    found = [
        (kind.ranks * one.bytes, one.between_nodes) for kind in kinds for one in kind.sent if (one.over, one.what) == (over, what)
    ]
    return sum(sent * share for sent, share in found) / sum(sent for sent, _ in found)


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *body)]


def _look(kind: RankKind) -> object:
    state = kind.memory.total.device - kind.memory.activations.device
    return amount(state), amount(kind.memory.total.host), tuple((one.over, one.what, amount(one.bytes)) for one in kind.sent)
