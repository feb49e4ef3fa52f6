"""Records what a training step does on a rank, by hooks on the model and around the step. The framework knows nothing of it."""

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
from megatron.spec.operations import Op, OpKind
from megatron.training.step import StepResult, TrainStep
from megatron_lab.verification.observation import EVALUATED_STEPS, RankStep, TensorPart

_BEFORE_ALL = Op(OpKind.FORWARD, 0, -1)


@dataclass
class StepRecorder:
    """Records every step that `step` makes from now on.

    Args:
        look: called after each of the first steps, before anything else is done with the model.
        overwritten: grows by what is written to while it is being sent.
    """

    step: TrainStep
    look: Callable[[], None]
    overwritten: list[str]
    steps: list[RankStep] = field(default_factory=list)
    activations: list[TensorPart] = field(default_factory=list)
    _gradients: list[TensorPart] = field(default_factory=list)
    _shares: tuple[float, float] = (0.0, 0.0)
    _op: Op = _BEFORE_ALL
    _batch: Sequence[ModelInputs] = ()

    def __post_init__(self) -> None:
        self._run, self._sums = self.step.run, self.step.gradients
        self.step.run = self._recorded_run  # type: ignore[method-assign]
        self.step.gradients = self._recorded_gradients  # type: ignore[method-assign]
        self.step.before_update.append(self._keep_gradients)

    def _recorded_run(self, batch: Sequence[ModelInputs], **named: Any) -> StepResult:
        self._gradients = []
        result = self._run(batch, **named)
        squares, gradients = counted_squares(self.step, result.loss_scale), self._gradients
        resume = self._pause_publishing()
        if len(self.steps) < EVALUATED_STEPS:
            self.look()
        parameters = parts_of_parameters(self.step)
        resume()
        self.steps.append(
            RankStep(
                iteration=named["iteration"],
                loss=result.loss,
                grad_norm=result.grad_norm,
                skipped=result.skipped,
                learning_rate=named["learning_rate"],
                weight_decay=named["weight_decay"],
                num_microbatches=len(batch),
                loss_sum=self._shares[0],
                token_count=self._shares[1],
                gradients=gradients,
                counted_squares=squares,
                main_params=parts_of_shards(self.step, lambda shard: shard.main),
                parameters=parameters,
                overwritten=list(dict.fromkeys(self.overwritten)),
            )
        )
        self.overwritten.clear()
        return result

    def _pause_publishing(self) -> Callable[[], None]:
        """Wait for parameters that are on their way, so that they can be read. Returns a function that puts them back on their way,
        so that the next step has to wait by itself."""
        if not self.step.overlaps_publishing:
            return lambda: None
        held = [entry.param.detach() for entry in self.step.model.params if not isinstance(entry.param, DTensor)]
        before = [values.clone() for values in held]

        def resume() -> None:
            self.step.optimizer.publish()
            for values, old in zip(held, before, strict=True):
                values.copy_(old)

        return resume

    def _recorded_gradients(self, batch: Sequence[ModelInputs], **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if named.get("inspect") is not None:  # the step run once more, for others to observe
            return self._sums(batch, **named)
        self._batch = batch
        with nullcontext() if self.steps else self._watched(len(batch)):
            loss_sum, count = self._sums(batch, **named)
        self._shares = (loss_sum.item(), count.item())
        return loss_sum, count

    def _keep_gradients(self, result: StepResult) -> None:
        def unscaled(shard: Shard) -> torch.Tensor:
            return shard.grad.double() / (result.loss_scale if shard.record.by_counts is None else 1.0)

        self._gradients = parts_of_shards(self.step, unscaled, with_frozen=False)

    def begin(self, op: Op) -> None:
        """Called when the executor begins an operation."""
        self._op = op

    def end(self, op: Op) -> None:
        """Called when the executor has ended it."""

    @contextmanager
    def _watched(self, num_microbatches: int) -> Iterator[None]:
        """Set hooks on this rank's chunks for one step. An evaluation has other inputs and is not recorded."""
        self.step.executor.recorder = self
        hooks = []
        for chunk in self.step.model.chunks.values():
            for name, module in _seen_modules(chunk).items():
                hooks.append(module.register_forward_hook(partial(self._keep, name, num_microbatches)))
            for k, block in enumerate([] if chunk.mtp is None else chunk.mtp.blocks):
                keep = partial(self._keep_input, f"mtp.{k}.projection", num_microbatches)
                hooks.append(block.register_forward_pre_hook(keep))
        yield
        self.step.executor.recorder = None
        for hook in hooks:
            hook.remove()

    def _keep_input(self, name: str, num_microbatches: int, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        """Record the first input of a module."""
        self._keep(name, num_microbatches, module, args, args[0])

    def _keep(self, name: str, num_microbatches: int, module: nn.Module, args: object, out: torch.Tensor) -> None:
        """Record the output of a module, [s, b, h], or under sequence parallelism [s/n, b, h]; not what runs again in backward."""
        if self._op.kind is not OpKind.FORWARD:
            return
        split = self.step.context.group("tp") if self.step.model.sequence_parallel else None
        positions, samples, hidden = out.shape
        values = out.detach().transpose(0, 1).cpu().to(torch.float64, copy=True).contiguous()
        data, sharers = self.step.context.data_group, self.step.context.context_group
        first = (self._op.microbatch * data.size + data.index) * samples
        own = positions * (split.index if split else 0)
        whole = positions * (split.size if split else 1) * sharers.size
        documents = self._batch[self._op.microbatch].documents
        cut = None if documents is None else documents.cut
        places = np.arange(whole) if cut is None else cut.places(sharers.index)
        places = places[own : own + positions]
        for run in np.split(np.arange(positions), np.flatnonzero(np.diff(places) != 1) + 1):  # of tokens that are neighbours
            offsets, shape = (first, int(places[run[0]]), 0), (num_microbatches * data.size * samples, whole, hidden)
            self.activations.append(TensorPart(name, offsets, shape, values[:, run[0] : run[-1] + 1]))


def _seen_modules(chunk: GPTChunk) -> dict[str, nn.Module]:
    """The recorded modules of a chunk, by the names of their activations."""
    found: dict[str, nn.Module] = {} if chunk.embedding is None else {"embedding": chunk.embedding}
    named = [(f"layers.{block.layer}", block) for block in chunk.blocks]
    named += [(f"mtp.{k}.layer", block) for k, block in enumerate([] if chunk.mtp is None else chunk.mtp.blocks)]
    for name, block in named:
        if block.compiled is None:  # hooks within it would be compiled with it
            found |= {f"{name}.attention": block.attention.output, f"{name}.mlp": block.mlp}
        found[name] = block
    return found


def parts_of_shards(step: TrainStep, tensor_of: Callable[[Shard], torch.Tensor], *, with_frozen: bool = True) -> list[TensorPart]:
    """Parts of global tensors from this rank's shards; `tensor_of` gives a number for each element of a shard."""
    parts = []
    for shard in step.optimizer.held if with_frozen else step.optimizer.shards:
        flat = tensor_of(shard).detach()
        assert flat.shape == (shard.weights.numel(),)
        for placed in shard.boxes(step.context):
            values = flat[placed.start : placed.start + placed.box.numel].cpu().to(torch.float64, copy=True)
            parts.append(TensorPart(shard.record.name, placed.box.offsets, shard.record.shape, values.view(placed.box.sizes)))
    return parts


def parts_of_parameters(step: TrainStep) -> list[TensorPart]:
    """The parameters that this rank holds whole (its tensor rank's part of them), as the next forward will use them."""
    if step.overlaps_publishing:  # the next forward waits for them; otherwise they are there
        step.finish_publishing()
    parts = []
    for entry in step.model.params:
        if not isinstance(entry.param, DTensor):
            box = entry.record.held_box(step.context.axis_sizes, step.context.coordinates)
            values = entry.param.detach()[tuple(slice(n) for n in box.sizes)].cpu().to(torch.float64, copy=True)
            parts.append(TensorPart(entry.record.name, box.offsets, entry.record.shape, values))
    return parts


def counted_squares(step: TrainStep, scale: float) -> dict[str, float]:
    """What this rank added to the square of the global norm of the last step, which used this loss scale, by parameter."""
    found: dict[str, float] = {}
    for shard, square in zip(step.counted_shards, step.counted_squares.tolist(), strict=True):
        found[shard.record.name] = found.get(shard.record.name, 0.0) + square / scale**2
    return found


def set_weights(step: TrainStep, weights: Mapping[str, torch.Tensor]) -> None:
    """Overwrite the main parameters of this rank's shards by their boxes of global weights, and publish them as a resume does."""
    for shard in step.optimizer.held:
        assert weights[shard.record.name].shape == shard.record.shape, shard.record.name
        for placed in shard.boxes(step.context):
            part = weights[shard.record.name][placed.box.index].reshape(-1)
            shard.main[placed.start : placed.start + placed.box.numel].copy_(part)
    step.optimizer.begin_averages()
    step.optimizer.publish()
    step.finish_publishing()
