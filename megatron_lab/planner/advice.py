"""Advice about settings that can be run, but waste time or memory. Estimates: no rule is broken, nothing is refused.

Each line says what is wasted and which nearest settings, all of them valid, would waste less.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import get_args

from megatron.config.checks.finding import Change, change, data_size, shown, without
from megatron.config.config import Config
from megatron.config.given import without_gaps
from megatron.config.imports import named
from megatron.config.parallel import ContextWay
from megatron.config.rules import violations
from megatron.pipeline_parallel.partition import recomputed_chunks, split_advice, table_of
from megatron.spec.counts import count_parameters
from megatron.spec.schedules import make_schedule, names_that_split_backward
from megatron.spec.weights import padded_vocab_size
from megatron_lab.planner.costs import idle_share, loss_again

MOST_IDLE = 0.2
"""Advice is given where pipeline stages wait for more than this share of their time."""
MOST_PADDING = 0.05
"""Advice is given where padding adds more than this share to the vocabulary."""
MOST_SENT = 2.0
"""Advice is given where context ranks send more than this multiple of the least for keys and values."""
ENOUGH_TOKENS = 4096
"""A matrix product of more rows than this runs hardly faster on a GPU."""
_WORTH_SHARDING = 10**9  # bytes of optimizer state that each data rank holds as copies of the others' state
_SHOWN = 3
_MOST_FORWARDS = 300_000  # a schedule with more forwards is not simulated: it takes seconds, and no ramp matters in it
_WORTH_TELLING = 0.9  # a proposal that leaves more than this share of the waste is no gain
_QUICK_FORWARDS = 40_000  # the same limit for a proposal, since there are many of them
_ACCOUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")

Waste = Callable[[Config, int], float]
"""How much these settings waste on this number of ranks."""


def advice(config: Config, world_size: int, gpus_per_node: int, vocab_size: int, idle: float | None = None) -> list[str]:
    """Lines of advice. The settings must have passed the rules.

    Args:
        idle: their `bubble_share`, where it is known.
    """
    config = without_gaps(config)  # a plan needs no learning rate, and the rules judge what is proposed
    return [
        *_idle_stages(config, world_size, vocab_size, idle),
        *_uneven_stages(config, vocab_size),
        *_tensor_groups(config, world_size, gpus_per_node),
        *_context_ways(config, world_size),
        *_microbatch(config, world_size),
        *_whole_residual(config, world_size),
        *_whole_optimizer(config, world_size, vocab_size),
        *_padding(config, world_size, vocab_size),
    ]


def bubble_share(config: Config, world_size: int, vocab_size: int) -> float:
    """The share of their time in which pipeline stages wait, after any ramp-up. A dry run prints it at its head."""
    table = table_of(config.model, config.parallel, vocab_size, config.memory)
    stages, batch = config.parallel.pipeline_model_parallel_size, num_microbatches(config, world_size)
    schedule = make_schedule(config.parallel.schedule, stages, batch, len(table) // stages, recomputed=recomputed_chunks(table))
    return idle_share(config.model, vocab_size, table, schedule, loss_again=loss_again(config, vocab_size))


def _forwards(config: Config, world_size: int) -> int:
    """The number of forwards in a step, over all chunks. The time to simulate a schedule grows with it."""
    stages, chunks = config.parallel.pipeline_model_parallel_size, config.parallel.chunks_per_stage(config.model.num_layers)
    return num_microbatches(config, world_size) * stages * chunks


def num_microbatches(config: Config, world_size: int) -> int:
    """Microbatches of each data rank in a step, after any ramp-up."""
    ranks = data_size(config, world_size)
    assert ranks is not None
    return config.training.final_batch_size(ranks) // (config.training.micro_batch_size * ranks)


def _idle_stages(config: Config, world_size: int, vocab_size: int, known: float | None) -> Iterator[str]:
    @functools.cache
    def idle(changed: Config, ranks: int) -> float:
        return known if known is not None and (changed, ranks) == (config, world_size) else bubble_share(changed, ranks, vocab_size)

    stages, forwards = config.parallel.pipeline_model_parallel_size, _forwards(config, world_size)
    if stages == 1 or forwards > _MOST_FORWARDS or (share := idle(config, world_size)) <= MOST_IDLE:
        return
    quick = [
        one
        for one in _less_idle(config, world_size, vocab_size)
        if not violations(*(changed := one.apply(config, world_size))) and _forwards(*changed) <= max(_QUICK_FORWARDS, forwards)
    ]
    better = _better(config, world_size, quick, idle, MOST_IDLE, "idle") or _least(config, world_size, quick, idle, share)
    yield (
        f"{num_microbatches(config, world_size)} microbatches through {stages} pipeline stages leave {share:.0%} of the time idle "
        f"(schedule {config.parallel.schedule}){better}"
    )


def _less_idle(config: Config, world_size: int, vocab_size: int) -> list[Change]:
    """More microbatches, more chunks or another order of them; each also with a split by work, where that gains something."""
    training, micro = config.training, config.training.micro_batch_size
    whole = training.final_batch_size(data_size(config, world_size) or 1)
    tried = [
        *(change(global_batch_size=whole * factor) for factor in (2, 4, 8, 16)),
        *(change(micro_batch_size=micro // part) for part in (2, 4, 8) if micro % part == 0),
        *(change(num_virtual_stages_per_pipeline_rank=count) for count in (2, 4, 8)),
        *(change(pipeline_schedule=name) for name in names_that_split_backward()),
    ]
    if split_advice(config.model, config.parallel, vocab_size) is None:
        return tried
    by_work = without(config, *_ACCOUNTED, pipeline_split="balanced")
    return [*tried, by_work, *(Change((*one.fields, *by_work.fields)) for one in tried)]


def _uneven_stages(config: Config, vocab_size: int) -> Iterator[str]:
    if config.parallel.pipeline_model_parallel_size > 1 and (line := split_advice(config.model, config.parallel, vocab_size)):
        yield line


def _tensor_groups(config: Config, world_size: int, gpus_per_node: int) -> Iterator[str]:
    """Tensor ranks talk several times a layer, and hardly any of it is hidden. Between nodes that takes long."""

    def crosses(changed: Config, ranks: int) -> float:
        return float(gpus_per_node % changed.parallel.tensor_model_parallel_size > 0)

    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    if world_size <= gpus_per_node or not crosses(config, world_size):
        return
    sizes = [size for size in range(min(tp - 1, gpus_per_node), 0, -1) if gpus_per_node % size == 0]
    deeper = [(size, pp * tp // size) for size in sizes if tp % size == 0]
    tried = [
        *(change(tensor_model_parallel_size=size, pipeline_model_parallel_size=stages) for size, stages in deeper),
        *(change(tensor_model_parallel_size=size) for size in sizes),
    ]
    yield (
        f"{shown(config, 'tensor_model_parallel_size')} puts tensor groups across nodes of {gpus_per_node} GPUs: every layer waits "
        f"several times for links much slower than those inside a node{_better(config, world_size, tried, crosses, 0)}"
    )


def _context_ways(config: Config, world_size: int) -> Iterator[str]:
    """What context ranks send for keys and values, by the ways that these heads allow. An exchange of heads is not hidden behind
    products as the others are, so it has to send much less."""
    itemsize = config.precision.itemsize

    def sent(changed: Config, ranks: int) -> float:
        return float(named("megatron_lab.planner.context_cost:sent_for_attention")(changed, itemsize))

    if config.parallel.context_parallel_size == 1:
        return
    tried = [change(cp_comm_type=(way,)) for way in get_args(ContextWay)]
    valid = [one for one in tried if not violations(*one.apply(config, world_size))]
    least = min((sent(*one.apply(config, world_size)) for one in valid), default=math.inf)
    if (now := sent(config, world_size)) > MOST_SENT * least:
        yield (
            f"context ranks send {now / least:.1f} times what they could for the keys and values of these heads"
            f"{_better(config, world_size, valid, sent, least)}"
        )


def _microbatch(config: Config, world_size: int) -> Iterator[str]:
    def wastes(changed: Config, ranks: int) -> float:
        """1 where half of the microbatch still gives products of enough rows."""
        micro = changed.training.micro_batch_size
        return float(micro > 1 and micro // 2 * changed.tokens_per_rank >= 2 * ENOUGH_TOKENS)

    if not wastes(config, world_size):
        return
    micro, length = config.training.micro_batch_size, config.model.seq_length
    tried = [change(micro_batch_size=size) for size in range(1, micro) if micro % size == 0]
    yield (
        f"{shown(config, 'micro_batch_size')} x {length:,} tokens wastes memory: activations grow with the microbatch, while "
        f"products of more than some {ENOUGH_TOKENS:,} rows hardly get faster{_better(config, world_size, tried, wastes, 0)}"
    )


def _whole_residual(config: Config, world_size: int) -> Iterator[str]:
    if config.parallel.tensor_model_parallel_size == 1 or config.parallel.sequence_parallel:
        return
    if better := _better(config, world_size, [change(sequence_parallel=True)], lambda changed, ranks: 0.0, 0):
        yield (
            "every tensor rank keeps the activations of norms, dropout and the residual stream whole, and could keep its part of "
            f"each sequence by sending as much{better}"
        )


def _whole_optimizer(config: Config, world_size: int, vocab_size: int) -> Iterator[str]:
    ranks, parallel = data_size(config, world_size), config.parallel
    assert ranks is not None
    copies, who = ranks * parallel.context_parallel_size, "data" if parallel.context_parallel_size == 1 else "context and data"
    model_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    bytes_each = (4 if config.precision.fp16 or config.precision.bf16 else 0) + (8 if config.optimizer.optimizer == "adam" else 4)
    state = count_parameters(config.model, vocab_size) // model_ranks * bytes_each
    if parallel.sharding != "no_shard" or state * (copies - 1) // copies <= _WORTH_SHARDING:
        return
    if better := _better(config, world_size, [change(use_distributed_optimizer=True)], lambda changed, ranks: 0.0, 0):
        yield (
            f"each of {copies} {who} ranks keeps the whole optimizer state of its parameters, about {state / 1e9:,.0f} GB; "
            f"shared out it would be {state / copies / 1e9:,.1f} GB, for the same bytes sent{better}"
        )


def _padding(config: Config, world_size: int, vocab_size: int) -> Iterator[str]:
    def share(changed: Config, ranks: int) -> float:
        multiple, tp = changed.model.make_vocab_size_divisible_by, changed.parallel.tensor_model_parallel_size
        return padded_vocab_size(vocab_size, multiple, tp) / vocab_size - 1

    wasted = share(config, world_size)
    if wasted > MOST_PADDING:
        multiple = config.model.make_vocab_size_divisible_by
        powers = (2**exponent for exponent in range(multiple.bit_length()))
        tried = [change(make_vocab_size_divisible_by=power) for power in powers if power < multiple]
        yield (
            f"the vocabulary of {vocab_size:,} is padded by {wasted:.0%} ({shown(config, 'make_vocab_size_divisible_by')} x TP "
            f"{config.parallel.tensor_model_parallel_size}): memory and time of embedding and output layer"
            f"{_better(config, world_size, tried, share, MOST_PADDING, 'padding')}"
        )


def _better(config: Config, world_size: int, tried: Iterable[Change], waste: Waste, most: float, what: str = "") -> str:
    """Name the valid changes that waste no more than `most`, the nearest first, as the end of a line of advice.

    Args:
        what: each change leaves a share of this; empty if the share is not to be named.
    """
    found: list[tuple[Change, float]] = []
    for one in sorted(tried, key=lambda one: one.distance(config, world_size)):
        changed, ranks = one.apply(config, world_size)
        if not violations(changed, ranks) and (left := waste(changed, ranks)) <= most:
            found.append((one, left))
        if len(found) == _SHOWN:
            break
    return _less_with(found, what)


def _least(config: Config, world_size: int, valid: Iterable[Change], waste: Waste, now: float) -> str:
    """Where no change wastes little, name the nearest of those that waste hardly more than the best. Empty if that is no gain."""
    found = [(waste(*one.apply(config, world_size)), one) for one in valid]
    least = min((left for left, _ in found), default=now)
    good = [(one, left) for left, one in found if left * _WORTH_TELLING <= least and left < now * _WORTH_TELLING]
    return _less_with(sorted(good, key=lambda item: item[0].distance(config, world_size))[:1], "idle")


def _less_with(changes: Sequence[tuple[Change, float]], what: str) -> str:
    texts = [f"{one} ({left:.0%} {what})" if what else str(one) for one, left in changes]
    return f". Less with {' or '.join(texts)}" if texts else ""
