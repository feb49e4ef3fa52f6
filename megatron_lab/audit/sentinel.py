"""--sentinel-interval: finds devices that compute wrong, and memory that changes, without a sign of either.

In every N-th step the gradients of each data rank's first microbatch, as the step has written them, are compared before the update
with those that another data rank computes of it (`audit/votes.py` says which, and who is wrong); and the state of the optimizer
with what it was after the update before. docs/trust.md says what is found so.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron.attention.documents import Documents
from megatron.config.config import Config
from megatron.model.inputs import ModelInputs
from megatron.parallel.accumulate import GradSink
from megatron.parallel.collectives import all_reduce, gather_objects, passed_object, passed_tensor
from megatron.parallel.cut import Cut
from megatron.parallel.params import ParamEntry, Shard
from megatron.spec.operations import OpKind
from megatron.training.features import Feature, RunParts
from megatron.training.progress import Progress
from megatron.training.reporter import Reporter
from megatron.training.step import StepResult, TrainStep
from megatron.training.watch import Watcher
from megatron_lab.audit.digests import Likeness, bit_digest, rounding_band
from megatron_lab.audit.replicas import raise_audit
from megatron_lab.audit.votes import Court, Dispute, blocks_of, data_ranks_of_block, further_turns


class FirstGradients:
    """Takes the digests of this rank's own gradients of the first microbatch while a step writes them, before any sum over ranks.

    Where a parameter is used several times in a microbatch, the digest is that of their sum.
    """

    def __init__(self, step: TrainStep, likeness: Likeness) -> None:
        self._executor, self._likeness, self._device = step.executor, likeness, step.context.device
        self._last = step.model.chunks.get(len(step.model.layer_table) - 1)
        """The last chunk, on a rank that has it: it gives the losses."""
        self._hook: RemovableHandle | None = None
        self._losses: torch.Tensor | None = None
        sinks = {record.name: sink for provider in step.providers for record, sink in provider.sinks()}
        self._entries = [entry for entry in step.model.params if entry.uses_per_microbatch]
        self._sinks = [sinks[entry.record.name] for entry in self._entries]
        self._row_of = {entry.record.name: row for row, entry in enumerate(self._entries)}
        self._counting: list[Callable[[], None]] = []
        """What the sinks call outside of `begin` and `end`."""

    @property
    def names(self) -> list[str]:
        """Those of the parameters, in the order of the rows."""
        return list(self._row_of)

    def begin(self) -> None:
        """Take those of the step that comes."""
        self._found = self._likeness.empty(len(self._entries) + 1, self._device)
        self._writes: list[list[tuple[int, int]]] = [[] for _ in self._entries]
        self._counting = [sink.on_write for sink in self._sinks]
        for row, sink in enumerate(self._sinks):
            sink.on_write = partial(self._wrote, row, sink, sink.on_write)
        if self._last is not None:
            self._hook = self._last.register_forward_hook(self._gave)

    def end(self) -> tuple[torch.Tensor, list[list[tuple[int, int]]]]:
        """Take no more.

        Returns:
            the digests [parameters + 1, width], the last that of the loss; and for each parameter the microbatches and chunks of
            the uses that are summed up in it. In some schedules there are those of a later microbatch among them.
        """
        for sink, counting in zip(self._sinks, self._counting, strict=True):
            sink.on_write = counting
        if self._hook is not None:
            self._hook.remove()
        if self._losses is not None:
            self._found[-1] = self._likeness.digest(self._losses)
        return self._found, self._writes

    def look(self, entry: ParamEntry, grad: torch.Tensor) -> None:
        """Let the next use of the parameter in this microbatch be added to this one, as in a step that is not inspected."""
        row = self._row_of[entry.record.name]
        if len(self._writes[row]) < entry.uses_per_microbatch:
            self._sinks[row].main_grad, self._sinks[row].written = grad, True

    def _gave(self, chunk: nn.Module, args: Any, losses: torch.Tensor) -> None:
        op = self._executor.current
        if op is not None and op.microbatch == 0 and op.kind is OpKind.FORWARD:
            self._losses = losses.detach()

    def _wrote(self, row: int, sink: GradSink, counting: Callable[[], None]) -> None:
        writes, op = self._writes[row], self._executor.current
        if len(writes) < self._entries[row].uses_per_microbatch:
            assert op is not None and sink.main_grad is not None, "an operation has just written it"
            writes.append((op.microbatch, op.chunk))
            if len(writes) == self._entries[row].uses_per_microbatch:
                self._found[row] = self._likeness.digest(sink.main_grad)
        counting()


class StateAtRest:
    """The tensors that this rank updates: nobody may change them between one update and the next.

    Args:
        device: where digests are compared.
    """

    def __init__(self, shards: Sequence[Shard], device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}
        for shard in shards:
            kinds = {"main weights": shard.main, "weights": shard.weights, "average": shard.average, **shard.moments}
            if shard.main.data_ptr() == shard.weights.data_ptr():
                del kinds["main weights"]
            name = shard.record.name
            self._tensors |= {f"{name} ({kind})": one for kind, one in kinds.items() if one is not None and one.numel()}

    @property
    def names(self) -> list[str]:
        """What each row of the digests is of."""
        return list(self._tensors)

    def digests(self) -> torch.Tensor:
        """Digests of their bits: int64 [tensors]."""
        found = [bit_digest(one).to(self._device) for one in self._tensors.values()]
        return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64, device=self._device)


class Sentinel(Watcher):
    """Compares, in every N-th step before its update, and says who differs.

    Args:
        every: steps between comparisons.
        stops: whether a difference ends the run; else it goes on, with the update.
        likeness: of gradients.
    """

    def __init__(self, step: TrainStep, every: int, *, stops: bool, likeness: Likeness, reporter: Reporter) -> None:
        self._step, self._every, self._stops, self._likeness, self._reporter = step, every, stops, likeness, reporter
        self._context = step.context
        self._gradients = FirstGradients(step, likeness)
        self._state = StateAtRest(step.optimizer.shards, step.context.device)
        self._blocks = blocks_of(step.context.topology)
        self._data_ranks = data_ranks_of_block(step.context.topology)
        self._nodes = gather_objects(socket.gethostname(), step.context.world)
        self._at_rest = 0, torch.zeros(0, dtype=torch.int64)
        """Digests of the state after the update before a comparison, and the iteration of that."""
        self._batch: Sequence[ModelInputs] = ()
        self._iteration = 0
        self._found: dict[str, float] | None = None
        if len(self._blocks) == 1:
            reporter.say(
                "  --sentinel-interval: no other data rank holds these parts of the model, so the same ranks compute a microbatch "
                "again: a fault that stays is not found so"
            )

    @classmethod
    def of(cls, config: Config, step: TrainStep, every: int, reporter: Reporter) -> Sentinel:
        """That of a run. Gradients are compared in every bit where kernels are deterministic."""
        exact = step.context.device.type == "cpu" or config.training.deterministic_mode
        likeness = Likeness(None if exact else rounding_band(step.model.dtype))
        return cls(step, every, stops=config.debug.sentinel_action == "stop", likeness=likeness, reporter=reporter)

    def before_step(self, batch: Sequence[ModelInputs], iteration: int) -> None:
        """See `Watcher`. Begin to take digests, if it is time."""
        if iteration % self._every:
            return
        self._batch, self._iteration = batch, iteration
        if self._at_rest[0] != iteration:  # the first step of a start, or the one before was left out
            self._take_state(iteration)
        self._step.before_update.append(self._check)
        self._gradients.begin()

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """See `Watcher`."""
        if self._check in self._step.before_update:
            self._step.before_update.remove(self._check)
            if self._found is None:  # the step made no update
                self._gradients.end()
            else:
                self._reporter.measured(progress, self._found)
            self._found, self._batch = None, ()
        if (progress.iteration + 1) % self._every == 0:
            self._take_state(progress.iteration + 1)

    def _take_state(self, iteration: int) -> None:
        self._step.finish_publishing()  # the weights may still be on their way from host memory
        self._at_rest = iteration, self._state.digests()

    def _check(self, result: StepResult) -> None:
        """Before the update: compare what this rank computes of another's microbatch with what that has computed.

        Raises:
            AuditError: on every rank, if any two differ and that ends the run.
        """
        own, writes = self._gradients.end()
        again, same_writes = self._again(1)
        comparable = [
            one == other and all(microbatch == 0 for microbatch, _ in one) for one, other in zip(writes, same_writes, strict=True)
        ]
        kept = torch.tensor([*comparable, True], device=own.device).unsqueeze(1)
        turns = [torch.where(kept, own, 0), torch.where(kept, again, 0)]
        theirs = passed_tensor(turns[0], self._data_ranks, self._context.data_group)
        changed = self._state.digests() != self._at_rest[1]
        counts = torch.stack([self._likeness.apart(theirs, turns[1]).any().sum(), changed.any().sum()])
        differs, decays = all_reduce(counts, self._context.world).tolist()
        disputes = self._disputes(turns, kept) if differs else []
        culprits = self._changed(changed) if decays else {}
        wrong = {rank for dispute in disputes for rank in dispute.wrong} | {*culprits}
        lines = [*(dispute.words for dispute in disputes), *culprits.values()]
        self._found = {"sentinel_differences": len(lines), "sentinel_rank": min(wrong, default=-1)}
        self._tell(lines)

    def _disputes(self, turns: list[torch.Tensor], kept: torch.Tensor) -> list[Dispute]:
        """Who differs, and who of them is wrong. All ranks call it together.

        Args:
            turns: digests of the first two turns of the ring.
            kept: the rows that are compared, [rows, 1].
        """
        more = [torch.where(kept, self._again(turn)[0], 0) for turn in further_turns(len(self._blocks))]
        seen = gather_objects((self._gradients.names, torch.stack([*turns, *more]).cpu()), self._context.world)
        names, digests = zip(*seen, strict=True)
        return Court(self._blocks, self._data_ranks, self._nodes, names, digests, self._likeness).disputes()

    def _changed(self, changed: torch.Tensor) -> dict[int, str]:
        """The ranks whose memory has changed, with the words. All ranks call it together.

        Args:
            changed: which tensors of this rank's state.
        """
        mine = [name for name, bad in zip(self._state.names, changed.tolist(), strict=True) if bad]
        found = {}
        for rank, names in enumerate(gather_objects(mine, self._context.world)):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                where = f"rank {rank} on node {self._nodes[rank]}"
                found[rank] = f"memory of {where} has changed since the update before: {names[0]}{more}"
        return found

    def _tell(self, lines: Sequence[str]) -> None:
        if self._stops:
            raise_audit(
                f"iteration {self._iteration}: a rank computes wrong, or its memory changes (--sentinel-interval).",
                lines,
                "Training stops before the update. Take the node that is wrong out, and start again from the last checkpoint.",
            )
        for line in lines:
            self._reporter.say(f"  WARNING: sentinel: {line}")

    def _again(self, turn: int) -> tuple[torch.Tensor, list[list[tuple[int, int]]]]:
        """Compute the first microbatch of the block so many places before. All ranks do it together; what the step has found stays
        as it is."""
        step, group = self._step, self._context.data_group
        by = turn * self._data_ranks
        inputs = _on_device(passed_object(_on_host(self._batch[0]), by, group, self._context.device), self._context.device)
        recorder, step.executor.recorder = step.executor.recorder, None  # the profile shows the step alone
        largest = None if step.model.largest is None else step.model.largest.found.clone()
        self._gradients.begin()
        step.gradients([inputs], inspect=self._gradients.look, again=True)
        if step.model.largest is not None and largest is not None:
            step.model.largest.found.copy_(largest)
        step.executor.recorder = recorder
        return self._gradients.end()


_Bounds = tuple[NDArray[np.int32], int, Cut | None]


def _on_host(inputs: ModelInputs) -> tuple[ModelInputs, _Bounds | None]:
    """A microbatch that can be sent: its tensors in host memory, and of the bounds of its documents what they are made of."""
    documents = inputs.documents
    bounds = None if documents is None else (documents.bounds, documents.batch, documents.cut)
    return _moved(replace(inputs, documents=None), torch.Tensor.cpu), bounds


def _on_device(sent: tuple[ModelInputs, _Bounds | None], device: torch.device) -> ModelInputs:
    inputs, bounds = _moved(sent[0], lambda one: one.to(device)), sent[1]
    if bounds is None:
        return inputs
    return replace(inputs, documents=Documents(bounds[0], torch.from_numpy(bounds[0]).to(device), *bounds[1:]))


def _moved(inputs: ModelInputs, move: Callable[[torch.Tensor], torch.Tensor]) -> ModelInputs:
    changes: dict[str, Any] = {name: move(one) for name, one in vars(inputs).items() if isinstance(one, torch.Tensor)}
    return replace(inputs, **changes, ahead=[(move(labels), move(mask)) for labels, mask in inputs.ahead])


class SentinelFeature(Feature):
    """--sentinel-interval."""

    def watchers(self, run: RunParts) -> list[Watcher]:
        """Compare in every N-th step."""
        interval = run.config.debug.sentinel_interval
        assert interval is not None
        return [Sentinel.of(run.config, run.step, interval, run.reporter)]
