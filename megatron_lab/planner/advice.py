"""Advice about settings that are valid but waste time or memory.

All figures are estimates, and advice never stops a job. Each line says what is wasted. It also names the valid changes that would
waste less and are closest to the current settings.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import get_args

from megatron.config.checks.finding import Change, create_change, format_setting, get_data_parallel_size, reset
from megatron.config.config import Config
from megatron.config.imports import import_object
from megatron.config.parallel import CpCommType
from megatron.config.parsed_flags import fill_plan_defaults
from megatron.config.rules import find_violations
from megatron.pipeline_parallel.partition import build_layer_table, find_recomputed_chunks, suggest_balanced_split
from megatron.spec.counts import count_parameters
from megatron.spec.schedules import build_schedule, list_split_backward_schedules
from megatron.spec.weights import pad_vocab_size
from megatron_lab.planner.costs import compute_bubble_share, recomputes_logits

MAX_BUBBLE_SHARE = 0.2
"""Share of a step's time in which pipeline stages are idle, above which advice is given."""
MAX_PADDING_SHARE = 0.05
"""Share by which padding enlarges the vocabulary, above which advice is given."""
MAX_TRAFFIC_RATIO = 2.0
"""Keys and values that context ranks send, as a multiple of the least possible, above which advice is given."""
MIN_EFFICIENT_TOKENS = 4096
"""Number of rows above which a matrix product on a GPU hardly becomes more efficient."""
_MIN_SAVED_BYTES = 10**9  # optimizer state on each rank that other data ranks hold too, above which sharding is proposed
_MAX_PROPOSALS = 3
_MAX_FORWARDS = 300_000  # a larger schedule is not simulated: it takes seconds, and its warm-up and cool-down are negligible
_MAX_REMAINING_WASTE = 0.9  # a change that leaves more than this share of the waste is not proposed
_MAX_PROPOSAL_FORWARDS = 40_000  # lower limit for proposals, because many of them are simulated
_ACCOUNTING_SETTINGS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")

Waste = Callable[[Config, int], float]
"""Function (settings, number of ranks) -> amount that these settings waste."""


def build_advice(
    config: Config, world_size: int, gpus_per_node: int, vocab_size: int, known_bubble_share: float | None = None
) -> list[str]:
    """Return advice about valid settings that waste time or memory: one line of text for each kind of waste that was found.

    Args:
        config: settings that satisfy all rules.
        known_bubble_share: share of time in which pipeline stages are idle, if `simulate_bubble_share` already computed it for
            these settings; None to simulate it here.
    """
    # The rules, which check each proposal, require settings that a plan does not need, such as a learning rate.
    config = fill_plan_defaults(config)
    return [
        *_check_bubble(config, world_size, vocab_size, known_bubble_share),
        *_check_stage_balance(config, vocab_size),
        *_check_tensor_groups(config, world_size, gpus_per_node),
        *_check_cp_comm_types(config, world_size),
        *_check_micro_batch_size(config, world_size),
        *_check_sequence_parallel(config, world_size),
        *_check_optimizer_sharding(config, world_size, vocab_size),
        *_check_vocab_padding(config, world_size, vocab_size),
    ]


def simulate_bubble_share(config: Config, world_size: int, vocab_size: int) -> float:
    """Simulate the pipeline schedule and return the share of a step's time in which stages are idle, as a mean over the stages.

    The batch size is that after any ramp-up. A dry run prints this share in its first lines.
    """
    table = build_layer_table(config.model, config.parallel, vocab_size, config.memory)
    stages, batch = config.parallel.pipeline_model_parallel_size, count_microbatches(config, world_size)
    schedule = build_schedule(
        config.parallel.schedule, stages, batch, len(table) // stages, recomputed_chunks=find_recomputed_chunks(table)
    )
    return compute_bubble_share(config.model, vocab_size, table, schedule, recomputes_logits=recomputes_logits(config, vocab_size))


def _count_forwards(config: Config, world_size: int) -> int:
    """Return the number of forwards in a step: microbatches of one data rank x model chunks of all pipeline stages.

    The time to simulate a pipeline schedule grows with this number.
    """
    stages, chunks = config.parallel.pipeline_model_parallel_size, config.parallel.get_chunks_per_stage(config.model.num_layers)
    return count_microbatches(config, world_size) * stages * chunks


def count_microbatches(config: Config, world_size: int) -> int:
    """Return the number of microbatches of each data rank in a step, after any batch-size ramp-up."""
    dp_size = get_data_parallel_size(config, world_size)
    assert dp_size is not None
    return config.training.get_final_batch_size(dp_size) // (config.training.micro_batch_size * dp_size)


def _check_bubble(config: Config, world_size: int, vocab_size: int, known_bubble_share: float | None) -> Iterator[str]:
    @functools.cache
    def compute_bubble(proposal: Config, ranks: int) -> float:
        return (
            known_bubble_share
            if known_bubble_share is not None and (proposal, ranks) == (config, world_size)
            else simulate_bubble_share(proposal, ranks, vocab_size)
        )

    stages, forwards = config.parallel.pipeline_model_parallel_size, _count_forwards(config, world_size)
    if stages == 1 or forwards > _MAX_FORWARDS or (share := compute_bubble(config, world_size)) <= MAX_BUBBLE_SHARE:
        return
    valid = [
        candidate
        for candidate in _list_bubble_changes(config, world_size, vocab_size)
        if not find_violations(*(proposed := candidate.apply(config, world_size)))
        and _count_forwards(*proposed) <= max(_MAX_PROPOSAL_FORWARDS, forwards)
    ]
    better = _format_proposals(config, world_size, valid, compute_bubble, MAX_BUBBLE_SHARE, "idle") or _format_best_proposal(
        config, world_size, valid, compute_bubble, share
    )
    yield (
        f"{count_microbatches(config, world_size)} microbatches through {stages} pipeline stages leave {share:.0%} of the "
        f"time idle (schedule {config.parallel.schedule}){better}"
    )


def _list_bubble_changes(config: Config, world_size: int, vocab_size: int) -> list[Change]:
    """Return changes of settings that may reduce pipeline idle time: more microbatches, more chunks per stage, or a schedule that
    splits the backward into input-gradient and weight-gradient passes.

    If another assignment of layers to stages would balance the FLOPs better, each change is also combined with that assignment.
    """
    training, micro_batch_size = config.training, config.training.micro_batch_size
    batch_size = training.get_final_batch_size(get_data_parallel_size(config, world_size) or 1)
    changes = [
        *(create_change(global_batch_size=batch_size * factor) for factor in (2, 4, 8, 16)),
        *(create_change(micro_batch_size=micro_batch_size // divisor) for divisor in (2, 4, 8) if micro_batch_size % divisor == 0),
        *(create_change(num_virtual_stages_per_pipeline_rank=count) for count in (2, 4, 8)),
        *(create_change(pipeline_schedule=name) for name in list_split_backward_schedules()),
    ]
    if suggest_balanced_split(config.model, config.parallel, vocab_size) is None:
        return changes
    balanced = reset(config, *_ACCOUNTING_SETTINGS, pipeline_split="balanced")
    return [*changes, balanced, *(Change((*candidate.fields, *balanced.fields)) for candidate in changes)]


def _check_stage_balance(config: Config, vocab_size: int) -> Iterator[str]:
    if config.parallel.pipeline_model_parallel_size > 1 and (
        message := suggest_balanced_split(config.model, config.parallel, vocab_size)
    ):
        yield message


def _check_tensor_groups(config: Config, world_size: int, gpus_per_node: int) -> Iterator[str]:
    """Yield advice if tensor-parallel groups span several nodes.

    Tensor ranks communicate several times per layer, and hardly any of this communication overlaps with computation. Links between
    nodes are much slower than links inside a node.
    """

    def crosses_nodes(proposal: Config, ranks: int) -> float:
        return float(gpus_per_node % proposal.parallel.tensor_model_parallel_size > 0)

    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    if world_size <= gpus_per_node or not crosses_nodes(config, world_size):
        return
    sizes = [size for size in range(min(tp - 1, gpus_per_node), 0, -1) if gpus_per_node % size == 0]
    with_more_stages = [(size, pp * tp // size) for size in sizes if tp % size == 0]
    candidates = [
        *(create_change(tensor_model_parallel_size=size, pipeline_model_parallel_size=stages) for size, stages in with_more_stages),
        *(create_change(tensor_model_parallel_size=size) for size in sizes),
    ]
    yield (
        f"{format_setting(config, 'tensor_model_parallel_size')} puts tensor groups across nodes of {gpus_per_node} "
        "GPUs: every layer waits "
        "several times for links much slower than those inside a "
        f"node{_format_proposals(config, world_size, candidates, crosses_nodes, 0)}"
    )


def _check_cp_comm_types(config: Config, world_size: int) -> Iterator[str]:
    """Yield advice if the keys and values that context ranks send are more than `MAX_TRAFFIC_RATIO` times the least that another
    --cp-comm-type would send.

    A smaller saving is not enough, because all-to-all communication, unlike the other types, does not overlap with matrix products.
    """
    itemsize = config.precision.itemsize

    def count_traffic(proposal: Config, ranks: int) -> float:
        return float(import_object("megatron_lab.planner.context_cost:count_attention_traffic")(proposal, itemsize))

    if config.parallel.context_parallel_size == 1:
        return
    candidates = [create_change(cp_comm_type=(comm_type,)) for comm_type in get_args(CpCommType)]
    valid = [candidate for candidate in candidates if not find_violations(*candidate.apply(config, world_size))]
    min_traffic = min((count_traffic(*candidate.apply(config, world_size)) for candidate in valid), default=math.inf)
    if (current := count_traffic(config, world_size)) > MAX_TRAFFIC_RATIO * min_traffic:
        yield (
            f"context ranks send {current / min_traffic:.1f} times what they could for the keys and values of these heads"
            f"{_format_proposals(config, world_size, valid, count_traffic, min_traffic)}"
        )


def _check_micro_batch_size(config: Config, world_size: int) -> Iterator[str]:
    def is_wasteful(proposal: Config, ranks: int) -> float:
        """Return 1.0 if half of the micro batch size would still give matrix products enough rows (tokens) to run near full speed,
        and 0.0 otherwise.

        `ranks` is not used; every function that measures waste gets it.
        """
        micro_batch_size = proposal.training.micro_batch_size
        return float(micro_batch_size > 1 and micro_batch_size // 2 * proposal.tokens_per_rank >= 2 * MIN_EFFICIENT_TOKENS)

    if not is_wasteful(config, world_size):
        return
    micro_batch_size, seq_length = config.training.micro_batch_size, config.model.seq_length
    candidates = [create_change(micro_batch_size=size) for size in range(1, micro_batch_size) if micro_batch_size % size == 0]
    yield (
        f"{format_setting(config, 'micro_batch_size')} x {seq_length:,} tokens wastes memory: activations grow with "
        "the microbatch, while "
        f"products of more than some {MIN_EFFICIENT_TOKENS:,} rows hardly get "
        f"faster{_format_proposals(config, world_size, candidates, is_wasteful, 0)}"
    )


def _check_sequence_parallel(config: Config, world_size: int) -> Iterator[str]:
    if config.parallel.tensor_model_parallel_size == 1 or config.parallel.sequence_parallel:
        return
    if proposals := _format_proposals(config, world_size, [create_change(sequence_parallel=True)], lambda proposal, ranks: 0.0, 0):
        yield (
            "every tensor rank keeps the activations of norms, dropout and the residual stream whole, and could keep its part of "
            f"each sequence by sending as much{proposals}"
        )


def _check_optimizer_sharding(config: Config, world_size: int, vocab_size: int) -> Iterator[str]:
    dp_size, parallel = get_data_parallel_size(config, world_size), config.parallel
    assert dp_size is not None
    num_replicas, axes = (
        dp_size * parallel.context_parallel_size,
        "data" if parallel.context_parallel_size == 1 else "context and data",
    )
    model_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    bytes_per_param = (4 if config.precision.fp16 or config.precision.bf16 else 0) + (
        8 if config.optimizer.optimizer == "adam" else 4
    )
    state_bytes = count_parameters(config.model, vocab_size) // model_ranks * bytes_per_param
    if parallel.sharding != "no_shard" or state_bytes * (num_replicas - 1) // num_replicas <= _MIN_SAVED_BYTES:
        return
    if proposals := _format_proposals(
        config, world_size, [create_change(use_distributed_optimizer=True)], lambda proposal, dp_size: 0.0, 0
    ):
        yield (
            f"each of {num_replicas} {axes} ranks keeps the whole optimizer state of its parameters, about "
            f"{state_bytes / 1e9:,.0f} GB; "
            f"shared out it would be {state_bytes / num_replicas / 1e9:,.1f} GB, for the same bytes sent{proposals}"
        )


def _check_vocab_padding(config: Config, world_size: int, vocab_size: int) -> Iterator[str]:
    def padding_share(proposal: Config, ranks: int) -> float:
        multiple, tp = proposal.model.make_vocab_size_divisible_by, proposal.parallel.tensor_model_parallel_size
        return pad_vocab_size(vocab_size, multiple, tp) / vocab_size - 1

    current = padding_share(config, world_size)
    if current > MAX_PADDING_SHARE:
        multiple = config.model.make_vocab_size_divisible_by
        powers = (2**exponent for exponent in range(multiple.bit_length()))
        candidates = [create_change(make_vocab_size_divisible_by=power) for power in powers if power < multiple]
        yield (
            f"the vocabulary of {vocab_size:,} is padded by {current:.0%} "
            f"({format_setting(config, 'make_vocab_size_divisible_by')} x TP "
            f"{config.parallel.tensor_model_parallel_size}): memory and time of embedding and output layer"
            f"{_format_proposals(config, world_size, candidates, padding_share, MAX_PADDING_SHARE, 'padding')}"
        )


def _format_proposals(
    config: Config, world_size: int, candidates: Iterable[Change], waste: Waste, max_waste: float, unit: str = ""
) -> str:
    """Format the end of a line of advice: the valid changes of settings that waste at most `max_waste`. At most `_MAX_PROPOSALS`
    changes are named, the closest to the current settings first.

    Args:
        candidates: changes to try.
        waste: function that returns how much settings waste, for example the idle share of a step.
        unit: word for the waste, such as "idle". It is printed with the share that a change still wastes. If empty, no share is
            printed.
    """
    proposals: list[tuple[Change, float]] = []
    for candidate in sorted(candidates, key=lambda candidate: candidate.compute_distance(config, world_size)):
        proposed, num_ranks = candidate.apply(config, world_size)
        if not find_violations(proposed, num_ranks) and (remaining := waste(proposed, num_ranks)) <= max_waste:
            proposals.append((candidate, remaining))
        if len(proposals) == _MAX_PROPOSALS:
            break
    return _format_changes(proposals, unit)


def _format_best_proposal(config: Config, world_size: int, valid: Iterable[Change], waste: Waste, current: float) -> str:
    """Format the end of a line of advice for the case that every valid change still wastes too much: name the change that wastes
    least. Among changes that waste about equally little, name the one closest to the current settings.

    Args:
        valid: changes that give valid settings.
        waste: function that returns the idle share of a step for given settings.
        current: idle share of a step with the current settings.

    Returns:
        the text; empty if no change reduces the idle share clearly (to less than `_MAX_REMAINING_WASTE` times `current`).
    """
    wastes = [(waste(*candidate.apply(config, world_size)), candidate) for candidate in valid]
    min_waste = min((remaining for remaining, _ in wastes), default=current)
    proposals = [
        (candidate, remaining)
        for remaining, candidate in wastes
        if remaining * _MAX_REMAINING_WASTE <= min_waste and remaining < current * _MAX_REMAINING_WASTE
    ]
    return _format_changes(sorted(proposals, key=lambda item: item[0].compute_distance(config, world_size))[:1], "idle")


def _format_changes(changes: Sequence[tuple[Change, float]], unit: str) -> str:
    proposals = [f"{candidate} ({remaining:.0%} {unit})" if unit else str(candidate) for candidate, remaining in changes]
    return f". Less with {' or '.join(proposals)}" if proposals else ""
