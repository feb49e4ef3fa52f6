"""A loss or gradient that is not finite: where it began, and whether the data or a device is to blame, told before the run ends.

The step is run again, since it is a function of its inputs, dropout included; and if it fails again, once more with the
microbatches of another data rank. docs/spikes.md says what follows from what.
"""

from __future__ import annotations

import dataclasses
import math
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from megatron.attention.documents import Documents
from megatron.checkpoint.errors import listed
from megatron.data_parallel.provider import Inspect, Provider
from megatron.model.inputs import ModelInputs
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.params import ParamEntry
from megatron.training.failure import NonFiniteError, ranks_in_words


class RepeatableStep(Protocol):
    """A training step as far as it is run again here (`megatron.training.step.TrainStep`)."""

    context: ParallelContext
    providers: list[Provider]
    look_at_loss: Callable[[int, torch.Tensor], None]
    """Receives the number of each microbatch, from 0 on, and its loss, on the last stage."""

    def gradients(
        self, batch: Sequence[ModelInputs], *, inspect: Inspect | None = None, again: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill the gradients; `inspect` receives this rank's own as they are written."""


class _Repeated(NamedTuple):
    """What this rank finds when it runs a step again, before any sum over ranks."""

    names: list[str]
    """Parameters whose gradient is not finite."""
    microbatches: list[int]
    """Numbers of the microbatches whose loss is not finite, where this rank computes it."""

    @property
    def bad(self) -> bool:
        """Whether anything is not finite."""
        return bool(self.names or self.microbatches)


class _Place(NamedTuple):
    """A rank, and the samples that it was given."""

    host: str
    samples: list[range]
    """Their numbers, for each microbatch; empty where they are not known."""


def raise_nonfinite(step: RepeatableStep, batch: Sequence[ModelInputs], iteration: int, loss_sum: float) -> NoReturn:
    """Find where it began, and raise the same error everywhere. All ranks call it together.

    Args:
        batch: this data rank's microbatches.
        loss_sum: this rank's share of the loss.

    Raises:
        NonFiniteError: always.
    """
    context = step.context
    summed = sorted(set().union(*(provider.nonfinite() for provider in step.providers)))
    seen = gather_objects((math.isfinite(loss_sum), summed), context.world)
    here = gather_objects(_run_again(step, batch), context.world)
    again = any(found.bad for found in here)
    lines = [f"iteration {iteration}: the loss or the gradient is not finite, so training stops before the update."]
    lossy = [rank for rank, (finite, _) in enumerate(seen) if not finite]
    if lossy:
        lines.append(f"  loss not finite on {ranks_in_words(lossy)}")
    named: dict[str, list[int]] = {}
    for rank, (_, names) in enumerate(seen):
        for name in here[rank].names if again else names:
            named.setdefault(name, []).append(rank)
    if named:
        words = [f"gradient of {name} not finite on {ranks_in_words(ranks)}" for name, ranks in named.items()]
        lines.append("  " + listed(words, "\n  "))
    if named and not again:
        lines.append("  (after the sums over ranks; the step run again is finite: a passing fault, as of hardware)")
    if not named and not lossy:
        lines.append("  every gradient is finite by itself, but their squares overflow: the norm exceeds the range of the dtype")
    if again:
        lines.append(f"  {_on_other_ranks(step, batch, here)}")
    lines.append("  Resume from the last checkpoint with a lower --lr or a smaller --clip-grad, or leave the batch out with")
    lines.append(f"  --iterations-to-skip {iteration}.")
    raise NonFiniteError("\n".join(lines))


def _on_other_ranks(step: RepeatableStep, batch: Sequence[ModelInputs], here: Sequence[_Repeated]) -> str:
    """Run the step with the microbatches of the data rank before, and say what follows. All ranks call it together."""
    context, group = step.context, step.context.data_group
    if group.size == 1:
        return "whether the data or a device is to blame cannot be told with one data rank"
    there = gather_objects(_run_again(step, _passed_on(batch, group, context.device)), context.world)
    keys = [inputs.dropout_key for inputs in batch]
    size = batch[0].positions.shape[1]
    samples = [range(key.first_sample, key.first_sample + size) for key in keys if key is not None]
    places = gather_objects(_Place(socket.gethostname(), samples), context.world)
    data_rank = [context.topology.coordinates(rank)["dp"] for rank in range(context.world.size)]
    by_loss = any(found.microbatches for found in here)  # gradients may go wrong on more ranks, by way of their experts
    bad_here, bad_there = (
        {data_rank[rank] for rank, found in enumerate(ranks) if (found.microbatches if by_loss else found.bad)}
        for ranks in (here, there)
    )
    verdicts = judged(bad_here, bad_there, group.size)
    if not verdicts:
        return "the same with the data of another data rank, on all of them: the weights, or what the data has in common" + (
            "; or one rank, from which experts have spread it" if context.topology.ep > 1 else ""
        )
    words = []
    for number, verdict in verdicts.items():
        ranks = [rank for rank, found in enumerate(here) if found.bad and data_rank[rank] == number]
        words.append(_words(number, verdict, ranks, here, places))
    return listed(words, "\n  ")


def judged(here: Collection[int], there: Collection[int], size: int) -> Mapping[int, str]:
    """What is to blame for what is not finite, for each data rank where it is: "data", "device", "both together" or "unknown".

    Args:
        here: data ranks that are not finite with their own data.
        there: those that are not with the data of the rank before, where the first follows the last.
        size: how many there are.

    Returns:
        nothing where all ranks are bad both times.
    """
    if len(set(here)) == len(set(there)) == size:
        return {}
    moved = {(rank + 1) % size for rank in here}
    if set(there) == moved:
        return dict.fromkeys(sorted(here), "data")
    if set(there) == set(here):
        return dict.fromkeys(sorted(here), "device")
    found = {}
    for rank in sorted(here):
        data, device = (rank + 1) % size in there, rank in there
        found[rank] = "unknown" if data and device else "data" if data else "device" if device else "both together"
    return found


def _words(number: int, verdict: str, ranks: Sequence[int], here: Sequence[_Repeated], places: Sequence[_Place]) -> str:
    """A sentence on one data rank."""
    hosts = listed(list(dict.fromkeys(places[rank].host for rank in ranks)))
    device = f"{'the device' if len(ranks) == 1 else 'one of the devices'} of {ranks_in_words(list(ranks))} on node {hosts}"
    lossy = sorted({microbatch for rank in ranks for microbatch in here[rank].microbatches})
    given = places[ranks[0]].samples
    known = [given[microbatch] for microbatch in lossy if given] or given
    samples = listed([f"{each.start:,} to {each.stop - 1:,}" if len(each) > 1 else f"{each.start:,}" for each in known])
    numbers = f", microbatch {listed([str(microbatch + 1) for microbatch in lossy])}" if lossy else ""
    data = f"samples {samples} (data rank {number}{numbers})" if given else f"the batch of data rank {number}"
    return {
        "data": f"not finite again with the same data on another data rank: the data, {data}, or the weights that it meets",
        "device": f"not finite again there with other data, and finite elsewhere with the same: {device}, or the weights it holds",
        "both together": f"finite with other data there, and with {data} elsewhere: a passing fault of {device}, or both together",
        "unknown": f"not finite again with {data} elsewhere, nor with other data there: cannot be told apart from {device}",
    }[verdict]


def _run_again(step: RepeatableStep, batch: Sequence[ModelInputs]) -> _Repeated:
    names: set[str] = set()
    lossy: list[int] = []

    def look(entry: ParamEntry, grad: torch.Tensor) -> None:
        if not torch.isfinite(grad).all():
            names.add(entry.record.name)

    def look_at_loss(microbatch: int, loss: torch.Tensor) -> None:
        if not torch.isfinite(loss).all():
            lossy.append(microbatch)

    ignored, step.look_at_loss = step.look_at_loss, look_at_loss
    step.gradients(batch, inspect=look)
    step.look_at_loss = ignored
    return _Repeated(sorted(names), lossy)


def _passed_on(batch: Sequence[ModelInputs], group: Group, device: torch.device) -> list[ModelInputs]:
    """The microbatches of the rank before in the group, the first following the last; they travel in host memory."""
    batches: list[list[ModelInputs]] = gather_objects([_moved(inputs, torch.Tensor.cpu) for inputs in batch], group)
    return [_moved(inputs, lambda tensor: tensor.to(device)) for inputs in batches[group.index - 1]]


def _moved(inputs: ModelInputs, move: Callable[[torch.Tensor], torch.Tensor]) -> ModelInputs:
    documents = inputs.documents
    tensors: dict[str, Any] = {name: move(value) for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(
        inputs,
        **tensors,
        documents=documents and Documents(documents.bounds, move(documents.on_device), documents.batch, documents.cut),
        ahead=[(move(labels), move(mask)) for labels, mask in inputs.ahead],
    )
