"""Diagnosis of a loss or gradient that is not finite: which tensors are affected, and whether the data or a device is the likely
cause.

A step is a deterministic function of its inputs, including dropout, so the step is run again. If the results are again not finite,
each data rank runs the step a third time, with the microbatches of another data rank. docs/spikes.md explains the conclusions.
"""

from __future__ import annotations

import dataclasses
import math
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from megatron.attention.documents import Documents
from megatron.checkpoint.errors import format_list
from megatron.data_parallel.provider import GradInspector, ShardProvider
from megatron.model.inputs import ModelInputs
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.params import ParamEntry
from megatron.training.failure import NonFiniteError, format_ranks


class RepeatableStep(Protocol):
    """Interface of a training step that can be run again (`megatron.training.step.TrainStep`)."""

    context: ParallelContext
    providers: list[ShardProvider]
    on_loss: Callable[[int, torch.Tensor], None]
    """Callback for each microbatch, called on the last pipeline stage with the index of the microbatch (from 0 on) and its
    loss."""

    def compute_gradients(
        self, batch: Sequence[ModelInputs], *, inspect: GradInspector | None = None, reuse_token_count: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the gradients of a batch.

        Args:
            inspect: called with each local gradient of this rank when backward writes it. The gradients are then not reduced over
                ranks.
            reuse_token_count: use the token count of the previous step.

        Returns:
            this rank's summands of the global sums of loss and loss mask.
        """


class _RerunResult(NamedTuple):
    """Result of running the step again on one rank: the parameters whose gradient is not finite and the microbatches whose loss is
    not finite, before any sum over ranks."""

    names: list[str]
    """Names of the parameters whose gradient is not finite."""
    microbatches: list[int]
    """Indices of the microbatches whose loss is not finite; empty on ranks that do not compute the loss."""

    @property
    def has_nonfinite(self) -> bool:
        """Whether any loss or gradient of the rank is not finite."""
        return bool(self.names or self.microbatches)


class _RankSamples(NamedTuple):
    """Node of a rank, and the samples that the rank processes in the step."""

    host: str
    samples: list[range]
    """Indices of the samples of each microbatch; empty if unknown."""


def raise_nonfinite(step: RepeatableStep, batch: Sequence[ModelInputs], iteration: int, loss_sum: float) -> NoReturn:
    """Run the step again to find the source of a loss or gradient that is not finite, and raise an error with the explanation. All
    ranks must call this function together.

    Args:
        batch: microbatches of this data rank.
        iteration: iteration of the step, for the message.
        loss_sum: this rank's summand of the loss.

    Raises:
        NonFiniteError: always.
    """
    context = step.context
    weights = _describe_nonfinite_state(step)
    if weights:
        listed = format_list(weights, "\n  ")
        raise NonFiniteError(
            f"iteration {iteration}: the loss or the gradient is not finite, so training stops before the update.\n"
            "  The cause is neither the data nor a device: these tensors had values that are not finite before this step:\n  "
            f"{listed}\n"
            "  They come from the checkpoint with which the run began (--load, --pretrained-checkpoint), or from an update after "
            "it. Begin with another copy of the weights, or resume from an earlier checkpoint (--ckpt-step)."
        )
    nonfinite_params = sorted(set().union(*(provider.find_nonfinite_params() for provider in step.providers)))
    initial_states = gather_objects((math.isfinite(loss_sum), nonfinite_params), context.world)
    results = gather_objects(_rerun_step(step, batch), context.world)
    is_repeated = any(result.has_nonfinite for result in results)
    lines = [f"iteration {iteration}: the loss or the gradient is not finite, so training stops before the update."]
    bad_loss_ranks = [rank for rank, (finite, _) in enumerate(initial_states) if not finite]
    if bad_loss_ranks:
        lines.append(f"  loss not finite on {format_ranks(bad_loss_ranks)}")
    ranks_by_param: dict[str, list[int]] = {}
    details: list[str] = []
    for rank, (_, names) in enumerate(initial_states):
        for name in results[rank].names if is_repeated else names:
            ranks_by_param.setdefault(name, []).append(rank)
    if ranks_by_param:
        messages = [f"gradient of {name} not finite on {format_ranks(ranks)}" for name, ranks in ranks_by_param.items()]
        details = ["  " + format_list(messages, "\n  ")]
    if ranks_by_param and not is_repeated:
        lines.append("  the repeated step is finite: probably a transient hardware fault (gradients after the sums over ranks:)")
    if not ranks_by_param and not bad_loss_ranks:
        lines.append("  every gradient is finite, but the sum of their squares overflows: the norm exceeds the range of its dtype")
    if is_repeated:
        lines.append(f"  {_diagnose_with_shifted_data(step, batch, results)}")
    remedies = f"a lower --lr or a smaller --clip-grad, or skip the batch with --iterations-to-skip {iteration}."
    lines.append(f"  Resume from the last checkpoint with {remedies}")
    raise NonFiniteError("\n".join([*lines, *details]))


def _describe_nonfinite_state(step: RepeatableStep) -> list[str]:
    """Return a line for each parameter that has weights or optimizer states that are not finite, with the number of values. Weights
    come first. All ranks must call this function together."""
    shards = [shard for provider in step.providers for group in provider.groups for shard in group.shards]
    shards += [shard for provider in step.providers for shard in provider.frozen]
    counts: dict[tuple[bool, str], int] = {}
    for shard in shards:
        # Each element is counted on one rank, but a copy on another rank may be the only one that is not finite.
        own = slice(shard.norm_range.start, shard.norm_range.stop)
        counted = {shard.record.name: (shard.weights, shard.weights[own])}
        if shard.main_param is not shard.weights:
            counted[f"the main parameter of {shard.record.name}"] = (shard.main_param, shard.main_param[own])
        for state, values in shard.moments.items():
            is_per_element = values.shape == shard.weights.shape
            counted[f"{state} of {shard.record.name}"] = (values, values[own] if is_per_element else values)
        for name, (all_values, own_values) in counted.items():
            if not torch.isfinite(all_values).all():
                counts[name != shard.record.name, name] = own_values.numel() - int(own_values.isfinite().sum())
    counts_of_ranks = gather_objects(counts, step.context.world)
    lines = []
    for key in sorted({key for counts in counts_of_ranks for key in counts}):
        ranks = [rank for rank, counts in enumerate(counts_of_ranks) if key in counts]
        count = sum(counts_of_ranks[rank][key] for rank in ranks)
        lines.append(f"{key[1]} on {format_ranks(ranks)}" + (f": {count:,} of its values" if count else ""))
    return lines


def _diagnose_with_shifted_data(step: RepeatableStep, batch: Sequence[ModelInputs], results: Sequence[_RerunResult]) -> str:
    """Run the step on each data rank with the microbatches of the previous data rank. Return a message that names the likely cause:
    data, device or weights. All ranks must call this function together.

    Args:
        results: for each rank, which losses and gradients are not finite with the rank's own microbatches.
    """
    context, group = step.context, step.context.data_group
    if group.size == 1:
        return "with a single data rank it cannot be decided whether the data or a device is the cause"
    shifted_results = gather_objects(_rerun_step(step, _shift_batch(batch, group, context.device)), context.world)
    keys = [inputs.dropout_key for inputs in batch]
    size = batch[0].positions.shape[1]
    samples = [range(key.first_sample, key.first_sample + size) for key in keys if key is not None]
    rank_samples = gather_objects(_RankSamples(socket.gethostname(), samples), context.world)
    data_ranks = [context.topology.get_coordinates(rank)["dp"] for rank in range(context.world.size)]
    by_loss = any(result.microbatches for result in results)  # experts can spread nonfinite gradients to other ranks
    bad_data_ranks, bad_shifted_data_ranks = (
        {data_ranks[rank] for rank, result in enumerate(ranks) if (result.microbatches if by_loss else result.has_nonfinite)}
        for ranks in (results, shifted_results)
    )
    causes = determine_causes(bad_data_ranks, bad_shifted_data_ranks, group.size)
    if not causes:
        return (
            "every data rank also fails with the data of another data rank: the cause is the weights, or a property of all data"
            + ("; or one rank, whose values the experts have spread" if context.topology.ep > 1 else "")
        )
    messages = []
    for data_rank, cause in causes.items():
        ranks = [rank for rank, result in enumerate(results) if result.has_nonfinite and data_ranks[rank] == data_rank]
        messages.append(_format_cause(data_rank, cause, ranks, results, rank_samples))
    return format_list(messages, "\n  ")


def determine_causes(bad_ranks: Collection[int], bad_shifted_ranks: Collection[int], num_data_ranks: int) -> Mapping[int, str]:
    """Return the likely cause of nonfinite results on each affected data rank: its data or its device. Each data rank has run the
    step with its own data, and with the data of the previous data rank.

    Args:
        bad_ranks: data ranks whose results are not finite with their own data.
        bad_shifted_ranks: data ranks whose results are not finite with the data of the previous data rank. Data rank 0 uses the
            data of the last data rank.
        num_data_ranks: number of data ranks.

    Returns:
        likely cause, by data rank:

        - "data": the data also gives nonfinite results on the next data rank.
        - "device": the data rank also gives nonfinite results with other data.
        - "unknown": both of these hold.
        - "both together": neither holds, so only this data on this device fails.

        Empty if every data rank fails with both batches.
    """
    if len(set(bad_ranks)) == len(set(bad_shifted_ranks)) == num_data_ranks:
        return {}
    next_ranks = {(rank + 1) % num_data_ranks for rank in bad_ranks}
    if set(bad_shifted_ranks) == next_ranks:
        return dict.fromkeys(sorted(bad_ranks), "data")
    if set(bad_shifted_ranks) == set(bad_ranks):
        return dict.fromkeys(sorted(bad_ranks), "device")
    causes = {}
    for rank in sorted(bad_ranks):
        follows_data, stays_on_device = (rank + 1) % num_data_ranks in bad_shifted_ranks, rank in bad_shifted_ranks
        causes[rank] = (
            "unknown"
            if follows_data and stays_on_device
            else "data"
            if follows_data
            else "device"
            if stays_on_device
            else "both together"
        )
    return causes


def _format_cause(
    data_rank: int, cause: str, ranks: Sequence[int], results: Sequence[_RerunResult], rank_samples: Sequence[_RankSamples]
) -> str:
    """Format the likely cause on one data rank as a sentence of the error message.

    Args:
        cause: "data", "device", "both together" or "unknown".
        ranks: ranks of this data rank whose results are not finite.
        results: results of the repeated step, by rank.
        rank_samples: node and samples of each rank.
    """
    nodes = format_list(list(dict.fromkeys(rank_samples[rank].host for rank in ranks)))
    device_text = f"{'the device' if len(ranks) == 1 else 'one of the devices'} of {format_ranks(list(ranks))} on node {nodes}"
    bad_microbatches = sorted({microbatch for rank in ranks for microbatch in results[rank].microbatches})
    samples = rank_samples[ranks[0]].samples
    reported_samples = [samples[microbatch] for microbatch in bad_microbatches if samples] or samples
    samples_text = format_list(
        [
            f"{sample_range.start:,} to {sample_range.stop - 1:,}" if len(sample_range) > 1 else f"{sample_range.start:,}"
            for sample_range in reported_samples
        ]
    )
    microbatch_text = (
        f", microbatch {format_list([str(microbatch + 1) for microbatch in bad_microbatches])}" if bad_microbatches else ""
    )
    data_text = (
        f"samples {samples_text} (data rank {data_rank}{microbatch_text})" if samples else f"the batch of data rank {data_rank}"
    )
    return {
        "data": (
            f"also not finite with this data on another data rank: the cause is the data, {data_text}, or the weights that it uses"
        ),
        "device": (
            f"also not finite on this data rank with other data, but finite with this data on another data rank: "
            f"the cause is {device_text}, or the weights on it"
        ),
        "both together": (
            f"finite on this data rank with other data, and with {data_text} on another data rank: "
            f"a transient fault of {device_text}, or both together"
        ),
        "unknown": (
            f"also not finite with {data_text} on another data rank, and on this data rank with other data: "
            f"it cannot be decided whether the data or {device_text} is the cause"
        ),
    }[cause]


def _rerun_step(step: RepeatableStep, batch: Sequence[ModelInputs]) -> _RerunResult:
    names: set[str] = set()
    bad_microbatches: list[int] = []

    def inspect_grad(entry: ParamEntry, grad: torch.Tensor) -> None:
        if not torch.isfinite(grad).all():
            names.add(entry.record.name)

    def inspect_loss(microbatch: int, loss: torch.Tensor) -> None:
        if not torch.isfinite(loss).all():
            bad_microbatches.append(microbatch)

    original_on_loss, step.on_loss = step.on_loss, inspect_loss
    step.compute_gradients(batch, inspect=inspect_grad)
    step.on_loss = original_on_loss
    return _RerunResult(sorted(names), bad_microbatches)


def _shift_batch(batch: Sequence[ModelInputs], group: Group, device: torch.device) -> list[ModelInputs]:
    """Return the microbatches of the previous rank of the group; the first rank gets those of the last rank. If the step is run
    again with them, its result shows whether the data or the device is the cause. The microbatches are exchanged through host
    memory."""
    batches: list[list[ModelInputs]] = gather_objects([_move_inputs(inputs, torch.Tensor.cpu) for inputs in batch], group)
    return [_move_inputs(inputs, lambda tensor: tensor.to(device)) for inputs in batches[group.rank - 1]]


def _move_inputs(inputs: ModelInputs, move: Callable[[torch.Tensor], torch.Tensor]) -> ModelInputs:
    documents = inputs.documents
    tensors: dict[str, Any] = {name: move(value) for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(
        inputs,
        **tensors,
        documents=documents
        and Documents(
            documents.cu_seqlens,
            move(documents.cu_seqlens_device),
            documents.batch_size,
            documents.sequence_split,
            documents.data_lengths,
        ),
        mtp_targets=[(move(labels), move(mask)) for labels, mask in inputs.mtp_targets],
    )
