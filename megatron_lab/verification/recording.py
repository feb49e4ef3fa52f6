"""Recorder of training steps on one rank. It uses hooks on the model and wraps methods of the training step, so the framework needs
no code for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.model.gpt import GPTChunk
from megatron.model.inputs import ModelInputs
from megatron.parallel.params import Shard
from megatron.spec.operations import Op, OpType
from megatron.training.step import StepResult, TrainStep
from megatron_lab.verification.observation import EVALUATED_STEPS, LocalTensor, RankStep

_INITIAL_OP = Op(OpType.FORWARD, 0, -1)


@dataclass
class StepRecorder:
    """Recorder of all steps that a `TrainStep` runs after the recorder is created.

    Args:
        step: training step to record.
        after_step: called after each of the first `EVALUATED_STEPS` steps, before the recorder reads the updated parameters.
        overwritten: list to which the collectives add descriptions of tensors that were overwritten while they were being sent. The
            recorder moves them to the record of the step.
    """

    step: TrainStep
    after_step: Callable[[], None]
    overwritten: list[str]
    steps: list[RankStep] = field(default_factory=list)
    activations: list[LocalTensor] = field(default_factory=list)
    _gradients: list[LocalTensor] = field(default_factory=list)
    _loss_sum_and_count: tuple[float, float] = (0.0, 0.0)
    _op: Op = _INITIAL_OP
    _batch: Sequence[ModelInputs] = ()

    def __post_init__(self) -> None:
        self._run, self._compute_gradients = self.step.run, self.step.compute_gradients
        self.step.run = self._run_and_record  # type: ignore[method-assign]
        self.step.compute_gradients = self._compute_and_record  # type: ignore[method-assign]
        self.step.before_update_hooks.append(self._record_gradients)

    def _run_and_record(self, batch: Sequence[ModelInputs], **kwargs: Any) -> StepResult:
        self._gradients = []
        result = self._run(batch, **kwargs)
        squared_norms, gradients = compute_squared_norms(self.step, result.loss_scale), self._gradients
        restart_gather = self._snapshot_before_gather()
        if len(self.steps) < EVALUATED_STEPS:
            self.after_step()
        parameters = record_params(self.step)
        restart_gather()
        self.steps.append(
            RankStep(
                iteration=kwargs["iteration"],
                loss=result.loss,
                grad_norm=result.grad_norm,
                skipped=result.skipped,
                learning_rate=kwargs["learning_rate"],
                weight_decay=kwargs["weight_decay"],
                num_microbatches=len(batch),
                loss_sum=self._loss_sum_and_count[0],
                token_count=self._loss_sum_and_count[1],
                gradients=gradients,
                squared_norms=squared_norms,
                main_params=record_shards(self.step, lambda shard: shard.main_param),
                parameters=parameters,
                overwritten=list(dict.fromkeys(self.overwritten)),
            )
        )
        self.overwritten.clear()
        return result

    def _snapshot_before_gather(self) -> Callable[[], None]:
        """Copy the model parameters before the caller waits for the all-gather of the updated parameters.

        The recorder must wait for this all-gather to read the updated parameters. Its wait would hide that the next step forgets to
        wait.

        Returns:
            A function that starts the all-gather again and restores the copied values, so that the next step gives wrong results
            unless it waits for the all-gather itself. It does nothing if the all-gather does not overlap with other work.
        """
        if not self.step.overlaps_param_gather:
            return lambda: None
        params = [entry.param.detach() for entry in self.step.model.params if not isinstance(entry.param, DTensor)]
        old_values = [param.clone() for param in params]

        def restart_gather() -> None:
            self.step.optimizer.copy_main_to_model_params()
            for values, old in zip(params, old_values, strict=True):
                values.copy_(old)

        return restart_gather

    def _compute_and_record(self, batch: Sequence[ModelInputs], **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if kwargs.get("inspect") is not None:  # an extra pass for a diagnostic, not a training step
            return self._compute_gradients(batch, **kwargs)
        self._batch = batch
        with nullcontext() if self.steps else self._recording_activations(len(batch)):
            loss_sum, count = self._compute_gradients(batch, **kwargs)
        self._loss_sum_and_count = (loss_sum.item(), count.item())
        return loss_sum, count

    def _record_gradients(self, result: StepResult) -> None:
        def unscale(shard: Shard) -> torch.Tensor:
            return shard.grad.double() / (result.loss_scale if shard.record.count_update is None else 1.0)

        self._gradients = record_shards(self.step, unscale, with_frozen=False)

    def start(self, op: Op) -> None:
        """Remember the operation that the executor starts, to know to which microbatch a recorded output belongs."""
        self._op = op

    def end(self, op: Op) -> None:
        """Do nothing: the end of an operation is not recorded."""

    @contextmanager
    def _recording_activations(self, num_microbatches: int) -> Iterator[None]:
        """Record module outputs of this rank's model chunks in a `with` block, which must contain exactly one training step.
        Evaluations have other inputs and are not recorded."""
        self.step.executor.recorder = self
        hooks = []
        for chunk in self.step.model.chunks.values():
            for name, module in _list_recorded_modules(chunk).items():
                hooks.append(module.register_forward_hook(partial(self._record_output, name, num_microbatches)))
            for k, block in enumerate([] if chunk.mtp is None else chunk.mtp.blocks):
                keep = partial(self._record_input, f"mtp.{k}.projection", num_microbatches)
                hooks.append(block.register_forward_pre_hook(keep))
        yield
        self.step.executor.recorder = None
        for hook in hooks:
            hook.remove()

    def _record_input(self, name: str, num_microbatches: int, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        """Record the first input of a module (forward pre-hook).

        Args:
            name: name under which the input is recorded.
            num_microbatches: microbatches of the step on this rank.
            args: inputs with which the module was called.
        """
        self._record_output(name, num_microbatches, module, args, args[0])

    def _record_output(self, name: str, num_microbatches: int, module: nn.Module, args: object, out: torch.Tensor) -> None:
        """Record the output of a module in forward (forward hook). Outputs of the recomputation in backward are not recorded.

        Args:
            name: name under which the output is recorded.
            num_microbatches: microbatches of the step on this rank.
            out: [s, b, h], or [s/tp, b, h] under sequence parallelism; s counts the tokens of this context-parallel rank.
        """
        if self._op.type is not OpType.FORWARD:
            return
        split = self.step.context.group("tp") if self.step.model.sequence_parallel else None
        positions, samples, hidden = out.shape
        values = out.detach().transpose(0, 1).cpu().to(torch.float64, copy=True).contiguous()
        data, context_group = self.step.context.data_group, self.step.context.context_group
        first = (self._op.microbatch * data.size + data.rank) * samples
        start = positions * (split.rank if split else 0)
        seq_length = positions * (split.size if split else 1) * context_group.size
        documents = self._batch[self._op.microbatch].documents
        sequence_split = None if documents is None else documents.sequence_split
        token_positions = np.arange(seq_length) if sequence_split is None else sequence_split.get_positions(context_group.rank)
        token_positions = token_positions[start : start + positions]
        # Record each range of consecutive tokens.
        for token_range in np.split(np.arange(positions), np.flatnonzero(np.diff(token_positions) != 1) + 1):
            offsets, shape = (
                (first, int(token_positions[token_range[0]]), 0),
                (num_microbatches * data.size * samples, seq_length, hidden),
            )
            self.activations.append(LocalTensor(name, offsets, shape, values[:, token_range[0] : token_range[-1] + 1]))


def _list_recorded_modules(chunk: GPTChunk) -> dict[str, nn.Module]:
    """Return the modules of a model chunk whose outputs are recorded and compared with those of the reference model. The key is the
    name of the record, such as `layers.3.mlp`."""
    modules: dict[str, nn.Module] = {} if chunk.embedding is None else {"embedding": chunk.embedding}
    named = [(f"layers.{block.layer}", block) for block in chunk.blocks]
    named += [(f"mtp.{k}.layer", block) for k, block in enumerate([] if chunk.mtp is None else chunk.mtp.blocks)]
    for name, block in named:
        if block.compiled is None:  # hooks inside a compiled block would be compiled too
            modules |= {f"{name}.attention": block.attention.output, f"{name}.mlp": block.mlp}
        modules[name] = block
    return modules


def record_shards(step: TrainStep, tensor_of: Callable[[Shard], torch.Tensor], *, with_frozen: bool = True) -> list[LocalTensor]:
    """Copy a value for each element of this rank's shards, such as the gradients, and return the copies as slices of full tensors.

    Args:
        tensor_of: returns the values of a shard as a flat tensor, such as `shard.main_param`.
        with_frozen: include shards of parameters that are not trained.
    """
    local_tensors = []
    for shard in step.optimizer.checkpoint_shards if with_frozen else step.optimizer.shards:
        flat = tensor_of(shard).detach()
        assert flat.shape == (shard.weights.numel(),)
        for buffer_slice in shard.get_slices(step.context):
            values = flat[buffer_slice.offset : buffer_slice.offset + buffer_slice.slice.numel].cpu().to(torch.float64, copy=True)
            local_tensors.append(
                LocalTensor(
                    shard.record.name, buffer_slice.slice.offsets, shard.record.shape, values.view(buffer_slice.slice.sizes)
                )
            )
    return local_tensors


def record_params(step: TrainStep) -> list[LocalTensor]:
    """Copy the model parameters as the next forward uses them; of a tensor-parallel parameter, this rank's shard. Parameters that
    are sharded over data-parallel ranks are omitted."""
    if step.overlaps_param_gather:  # otherwise the parameters are complete after the step
        step.finish_param_gather()
    local_tensors = []
    for entry in step.model.params:
        if not isinstance(entry.param, DTensor):
            local_slice = entry.record.get_local_slice(step.context.axis_sizes, step.context.coordinates)
            values = entry.param.detach()[tuple(slice(n) for n in local_slice.sizes)].cpu().to(torch.float64, copy=True)
            local_tensors.append(LocalTensor(entry.record.name, local_slice.offsets, entry.record.shape, values))
    return local_tensors


def compute_squared_norms(step: TrainStep, scale: float) -> dict[str, float]:
    """Return this rank's summand in the squared global gradient norm of the last step, by the name of the parameter.

    Args:
        scale: loss scale of the step, which is divided out.
    """
    squared_norms: dict[str, float] = {}
    for shard, square in zip(step.norm_shards, step.shard_squared_norms.tolist(), strict=True):
        squared_norms[shard.record.name] = squared_norms.get(shard.record.name, 0.0) + square / scale**2
    return squared_norms


def set_weights(step: TrainStep, weights: Mapping[str, torch.Tensor]) -> None:
    """Set this rank's shards of the main parameters from full weights, and copy them to the model parameters. This is how a resumed
    run sets weights, too."""
    for shard in step.optimizer.checkpoint_shards:
        assert weights[shard.record.name].shape == shard.record.shape, shard.record.name
        for buffer_slice in shard.get_slices(step.context):
            values = weights[shard.record.name][buffer_slice.slice.index].reshape(-1)
            shard.main_param[buffer_slice.offset : buffer_slice.offset + buffer_slice.slice.numel].copy_(values)
    step.optimizer.reset_averages()
    step.optimizer.copy_main_to_model_params()
    step.finish_param_gather()
