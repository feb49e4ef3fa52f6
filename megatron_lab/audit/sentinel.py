"""Detection of silent data corruption (--sentinel-interval): devices that compute wrong results, and memory that changes, without
an error.

In every N-th step, two comparisons run before the update:

- Each data rank's step has computed gradients of its first microbatch. Another data rank computes the gradients of the same
  microbatch again, and both results are compared. `audit/votes.py` defines which data rank this is, and decides which rank is
  wrong.
- The optimizer state is compared with its contents after the previous update.

docs/trust.md lists the faults that are detected.
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
from megatron.parallel.collectives import all_reduce, gather_objects, ring_shift_object, ring_shift_tensor
from megatron.parallel.params import ParamEntry, Shard
from megatron.parallel.sequence_split import SequenceSplit
from megatron.spec.operations import OpType
from megatron.training.callbacks import Callback
from megatron.training.features import Feature, RunComponents
from megatron.training.progress import Progress
from megatron.training.reporter import Reporter
from megatron.training.step import StepResult, TrainStep
from megatron_lab.audit.digests import DigestComparer, compute_bit_digest, get_rounding_tolerance
from megatron_lab.audit.replicas import raise_audit
from megatron_lab.audit.votes import Dispute, DisputeResolver, build_model_replicas, count_data_ranks_per_replica, get_extra_shifts


class FirstMicrobatchGrads:
    """Records digests (short summaries) of this rank's local gradients of the first microbatch in a step. The digests are computed
    when backward writes the gradients, before any sum over ranks.

    If a parameter is used several times in a microbatch, its digest is that of the sum of the gradients of all uses.
    """

    def __init__(self, step: TrainStep, comparer: DigestComparer) -> None:
        self._executor, self._comparer, self._device = step.executor, comparer, step.context.device
        self._last_chunk = step.model.chunks.get(len(step.model.layer_table) - 1)
        """Last chunk of the model, whose outputs are the losses; None on ranks without it."""
        self._hook: RemovableHandle | None = None
        self._losses: torch.Tensor | None = None
        sinks = {record.name: sink for provider in step.providers for record, sink in provider.iter_grad_sinks()}
        self._entries = [entry for entry in step.model.params if entry.uses_per_microbatch]
        self._sinks = [sinks[entry.record.name] for entry in self._entries]
        self._row_of = {entry.record.name: row for row, entry in enumerate(self._entries)}
        self._original_on_write: list[Callable[[], None]] = []
        """Original `on_write` callbacks of the sinks, which `stop` restores."""

    @property
    def names(self) -> list[str]:
        """Names of the parameters, in the order of the rows of the digests. The last row, for the loss, has no name."""
        return list(self._row_of)

    def start(self) -> None:
        """Start to record digests of the gradients and the loss, until `stop` is called. The next forward and backward computes
        them."""
        self._digests = self._comparer.allocate_digests(len(self._entries) + 1, self._device)
        self._writes: list[list[tuple[int, int]]] = [[] for _ in self._entries]
        self._original_on_write = [sink.on_write for sink in self._sinks]
        for row, sink in enumerate(self._sinks):
            sink.on_write = partial(self._on_write, row, sink, sink.on_write)
        if self._last_chunk is not None:
            self._hook = self._last_chunk.register_forward_hook(self._on_forward)

    def stop(self) -> tuple[torch.Tensor, list[list[tuple[int, int]]]]:
        """Stop recording, and return the digests of the step.

        Returns:
            digests [number of parameters + 1, width], where the last row is the digest of the loss. The width is 1 for hashes of
            the bits, and 5 for comparison up to rounding. Also, for each parameter, the (microbatch, chunk) pairs whose gradients
            are summed in its digest. In some schedules these include a later microbatch.
        """
        for sink, on_write in zip(self._sinks, self._original_on_write, strict=True):
            sink.on_write = on_write
        if self._hook is not None:
            self._hook.remove()
        if self._losses is not None:
            self._digests[-1] = self._comparer.compute(self._losses)
        return self._digests, self._writes

    def accumulate_grad(self, entry: ParamEntry, grad: torch.Tensor) -> None:
        """Let the parameter's next gradient in this microbatch be added to `grad`, as in normal training.

        `TrainStep.compute_gradients` calls this method with each gradient, as its callback `inspect`. With such a callback, the
        gradients of a parameter that is used several times are otherwise not summed.
        """
        row = self._row_of[entry.record.name]
        if len(self._writes[row]) < entry.uses_per_microbatch:
            self._sinks[row].main_grad, self._sinks[row].is_written = grad, True

    def _on_forward(self, chunk: nn.Module, args: Any, losses: torch.Tensor) -> None:
        op = self._executor.current_op
        if op is not None and op.microbatch == 0 and op.type is OpType.FORWARD:
            self._losses = losses.detach()

    def _on_write(self, row: int, sink: GradSink, on_write: Callable[[], None]) -> None:
        writes, op = self._writes[row], self._executor.current_op
        if len(writes) < self._entries[row].uses_per_microbatch:
            assert op is not None and sink.main_grad is not None, "an operation has just written it"
            writes.append((op.microbatch, op.chunk))
            if len(writes) == self._entries[row].uses_per_microbatch:
                self._digests[row] = self._comparer.compute(sink.main_grad)
        on_write()


class PersistentState:
    """Computes digests (hashes of the bits) of all tensors that this rank updates: weights, main parameters, moments and averages
    of the weights. These tensors must not change between two updates.

    Args:
        shards: shards of this rank, which hold the tensors.
        device: device on which digests are compared.
    """

    def __init__(self, shards: Sequence[Shard], device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}
        for shard in shards:
            tensors = {"main weights": shard.main_param, "weights": shard.weights, "average": shard.average, **shard.moments}
            if shard.main_param.data_ptr() == shard.weights.data_ptr():
                del tensors["main weights"]
            name = shard.record.name
            self._tensors |= {
                f"{name} ({tensor_type})": tensor
                for tensor_type, tensor in tensors.items()
                if tensor is not None and tensor.numel()
            }

    @property
    def names(self) -> list[str]:
        """Name and type of each tensor, in the order of the digests, for messages."""
        return list(self._tensors)

    def compute_digests(self) -> torch.Tensor:
        """Compute a hash of the bits of each tensor: int64 [number of tensors]."""
        digests = [compute_bit_digest(tensor).to(self._device) for tensor in self._tensors.values()]
        return torch.stack(digests) if digests else torch.zeros(0, dtype=torch.int64, device=self._device)


class Sentinel(Callback):
    """Callback of --sentinel-interval, which detects silent data corruption. In every N-th step, before the update, it makes two
    comparisons and reports the ranks that are wrong:

    - Two replicas (copies of the model) compute the gradients of the same microbatch, which must agree.
    - The optimizer state must be the same as after the previous update.

    Args:
        interval: number of steps between comparisons.
        stops_run: whether a difference ends the run. If not, the run logs a warning and continues with the update.
        comparer: comparison of gradients, exactly or up to rounding.
    """

    def __init__(self, step: TrainStep, interval: int, *, stops_run: bool, comparer: DigestComparer, reporter: Reporter) -> None:
        self._step, self._interval, self._stops_run, self._comparer, self._reporter = step, interval, stops_run, comparer, reporter
        self._context = step.context
        self._gradients = FirstMicrobatchGrads(step, comparer)
        self._state = PersistentState(step.optimizer.shards, step.context.device)
        self._model_replicas = build_model_replicas(step.context.topology)
        self._data_ranks_per_replica = count_data_ranks_per_replica(step.context.topology)
        self._nodes = gather_objects(socket.gethostname(), step.context.world)
        self._state_digests = 0, torch.zeros(0, dtype=torch.int64)
        """Iteration of the next comparison, and the digests of the optimizer state after the previous update."""
        self._batch: Sequence[ModelInputs] = ()
        self._iteration = 0
        self._measurements: dict[str, float] | None = None
        if len(self._model_replicas) == 1:
            reporter.log(
                "  --sentinel-interval: there is only one copy of the model, so the same ranks compute a microbatch again: "
                "permanent faults are not detected"
            )

    @classmethod
    def of(cls, config: Config, step: TrainStep, interval: int, reporter: Reporter) -> Sentinel:
        """Build the sentinel of a run. It compares gradients bit by bit if the kernels are deterministic, and otherwise up to
        rounding."""
        is_exact = step.context.device.type == "cpu" or config.training.deterministic_mode
        comparer = DigestComparer(None if is_exact else get_rounding_tolerance(step.model.dtype))
        return cls(step, interval, stops_run=config.debug.sentinel_action == "stop", comparer=comparer, reporter=reporter)

    def before_step(self, batch: Sequence[ModelInputs], iteration: int) -> None:
        """Start to record digests of gradients if this step has a comparison."""
        if iteration % self._interval:
            return
        self._batch, self._iteration = batch, iteration
        if self._state_digests[0] != iteration:  # first step of a start, or the previous step was left out
            self._take_state(iteration)
        self._step.before_update_hooks.append(self._check)
        self._gradients.start()

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """Log the result of the comparison if this step had one. Compute the digests of the optimizer state if the next step has
        one."""
        if self._check in self._step.before_update_hooks:
            self._step.before_update_hooks.remove(self._check)
            if self._measurements is None:  # the step made no update
                self._gradients.stop()
            else:
                self._reporter.log_measurements(progress, self._measurements)
            self._measurements, self._batch = None, ()
        if (progress.iteration + 1) % self._interval == 0:
            self._take_state(progress.iteration + 1)

    def _take_state(self, iteration: int) -> None:
        self._step.finish_param_gather()  # copies of weights from host memory may still be in flight
        self._state_digests = iteration, self._state.compute_digests()

    def _check(self, result: StepResult) -> None:
        """Compare gradients between replicas, and the optimizer state with its digests after the previous update. Called before the
        update.

        For the gradients, this rank computes the first microbatch of another replica again. The result is compared with that of the
        other replica.

        Raises:
            AuditError: on every rank, if anything differs and the run must stop.
        """
        digests, writes = self._gradients.stop()
        shifted_digests, shifted_writes = self._compute_shifted(1)
        comparable = [a == b and all(microbatch == 0 for microbatch, _ in a) for a, b in zip(writes, shifted_writes, strict=True)]
        comparable_rows = torch.tensor([*comparable, True], device=digests.device).unsqueeze(1)
        shift_digests = [torch.where(comparable_rows, digests, 0), torch.where(comparable_rows, shifted_digests, 0)]
        owner_digests = ring_shift_tensor(shift_digests[0], self._data_ranks_per_replica, self._context.data_group)
        has_changed = self._state.compute_digests() != self._state_digests[1]
        counts = torch.stack(
            [self._comparer.find_differences(owner_digests, shift_digests[1]).any().sum(), has_changed.any().sum()]
        )
        num_differences, num_changes = all_reduce(counts, self._context.world).tolist()
        disputes = self._find_disputes(shift_digests, comparable_rows) if num_differences else []
        culprits = self._find_changed_memory(has_changed) if num_changes else {}
        wrong_ranks = {rank for dispute in disputes for rank in dispute.wrong_ranks} | {*culprits}
        messages = [*(dispute.message for dispute in disputes), *culprits.values()]
        self._measurements = {"sentinel_differences": len(messages), "sentinel_rank": min(wrong_ranks, default=-1)}
        self._report_findings(messages)

    def _find_disputes(self, shift_digests: list[torch.Tensor], comparable_rows: torch.Tensor) -> list[Dispute]:
        """Find the replicas whose gradients for the same microbatch differ, and decide which replica is wrong. All ranks must call
        this method together.

        Args:
            shift_digests: digests of this rank's gradients for the first microbatch of its own replica (shift 0) and of the
                previous replica (shift 1).
            comparable_rows: bool [rows, 1]: rows of the digests that contain only gradients of the first microbatch, so that they
                can be compared.
        """
        extra_digests = [
            torch.where(comparable_rows, self._compute_shifted(shift)[0], 0)
            for shift in get_extra_shifts(len(self._model_replicas))
        ]
        gathered = gather_objects((self._gradients.names, torch.stack([*shift_digests, *extra_digests]).cpu()), self._context.world)
        names, digests = zip(*gathered, strict=True)
        return DisputeResolver(
            self._model_replicas, self._data_ranks_per_replica, self._nodes, names, digests, self._comparer
        ).find_disputes()

    def _find_changed_memory(self, has_changed: torch.Tensor) -> dict[int, str]:
        """Return a message for each rank whose optimizer state has changed since the previous update, by rank. All ranks must call
        this method together.

        Args:
            has_changed: bool [number of tensors]: which tensors of this rank's optimizer state have changed.
        """
        changed_names = [name for name, is_changed in zip(self._state.names, has_changed.tolist(), strict=True) if is_changed]
        messages = {}
        for rank, names in enumerate(gather_objects(changed_names, self._context.world)):
            if names:
                suffix = f" and {len(names) - 1} more" if len(names) > 1 else ""
                location = f"rank {rank} on node {self._nodes[rank]}"
                messages[rank] = f"memory of {location} has changed since the previous update: {names[0]}{suffix}"
        return messages

    def _report_findings(self, messages: Sequence[str]) -> None:
        if self._stops_run:
            raise_audit(
                f"iteration {self._iteration}: a rank computes wrong results, or its memory has changed (--sentinel-interval).",
                messages,
                "Training stops before the update. Replace the faulty node, and restart from the last checkpoint.",
            )
        for message in messages:
            self._reporter.log(f"  WARNING: sentinel: {message}")

    def _compute_shifted(self, shift: int) -> tuple[torch.Tensor, list[list[tuple[int, int]]]]:
        """Compute the gradients for the first microbatch of another replica, and return their digests as
        `FirstMicrobatchGrads.stop` does. All ranks must call this method together. The results of the step do not change.

        Args:
            shift: distance to the other replica, which is `shift` positions before this replica in the ring of replicas.
        """
        step, group = self._step, self._context.data_group
        distance = shift * self._data_ranks_per_replica
        inputs = _to_device(
            ring_shift_object(_to_host(self._batch[0]), distance, group, self._context.device), self._context.device
        )
        recorder, step.executor.recorder = step.executor.recorder, None  # additional passes do not belong in the profile
        max_logits = None if step.model.logit_tracker is None else step.model.logit_tracker.max_logits.clone()
        self._gradients.start()
        step.compute_gradients([inputs], inspect=self._gradients.accumulate_grad, reuse_token_count=True)
        if step.model.logit_tracker is not None and max_logits is not None:
            step.model.logit_tracker.max_logits.copy_(max_logits)
        step.executor.recorder = recorder
        return self._gradients.stop()


_DocumentArgs = tuple[NDArray[np.int32], int, SequenceSplit | None, Sequence[int] | None]


def _to_host(inputs: ModelInputs) -> tuple[ModelInputs, _DocumentArgs | None]:
    """Return a copy of a microbatch that can be sent to another rank: its tensors in host memory, and separately the constructor
    arguments of its `Documents`."""
    documents = inputs.documents
    document_args = None
    if documents is not None:
        document_args = (documents.cu_seqlens, documents.batch_size, documents.sequence_split, documents.data_lengths)
    return _move_inputs(replace(inputs, documents=None), torch.Tensor.cpu), document_args


def _to_device(payload: tuple[ModelInputs, _DocumentArgs | None], device: torch.device) -> ModelInputs:
    inputs, document_args = _move_inputs(payload[0], lambda tensor: tensor.to(device)), payload[1]
    if document_args is None:
        return inputs
    return replace(inputs, documents=Documents(document_args[0], torch.from_numpy(document_args[0]).to(device), *document_args[1:]))


def _move_inputs(inputs: ModelInputs, move: Callable[[torch.Tensor], torch.Tensor]) -> ModelInputs:
    tensors: dict[str, Any] = {name: move(value) for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    return replace(inputs, **tensors, mtp_targets=[(move(labels), move(mask)) for labels, mask in inputs.mtp_targets])


class SentinelFeature(Feature):
    """Optional part of a run that detects silent data corruption (--sentinel-interval)."""

    def build_callbacks(self, run: RunComponents) -> list[Callback]:
        """Build the callback that compares gradients between replicas and checks the optimizer state."""
        interval = run.config.debug.sentinel_interval
        assert interval is not None
        return [Sentinel.of(run.config, run.step, interval, run.reporter)]
