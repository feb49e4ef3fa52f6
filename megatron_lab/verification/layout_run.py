"""One rank's run at a layout. It is the run of pretrain_gpt.py, but for samples, masks, start weights and dtype."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import torch

from megatron.attention.backends import backend_in_use
from megatron.config.config import Config
from megatron.metrics.measures import Timers
from megatron.model.build import model_of
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import ParallelContext, connect
from megatron.parallel.random import DropoutKey
from megatron.training import startup
from megatron.training.inputs import BatchMaker, reads_samples
from megatron.training.loop import Loop, evaluate
from megatron.training.progress import BatchSizePlan, Progress
from megatron.training.reporter import Reporter
from megatron.training.saver import Saver
from megatron.training.step import TrainStep
from megatron_lab.verification.joined import AXES
from megatron_lab.verification.late import late_delivery
from megatron_lab.verification.observation import EVALUATED_BATCHES, MaskDrawn, ProofTask, RankObservation, TensorPart
from megatron_lab.verification.recording import StepRecorder, parts_of_shards, set_weights


def observe_rank(rank: int, task: ProofTask) -> RankObservation:
    """Train to the end of the run; evaluate before the first step and after each of the first ones; return what was observed. The
    process group must exist.

    What ranks send arrives only when it is waited for.
    """
    config = task.config
    with late_delivery() as overwritten:
        startup.set_numerics(config)
        context = connect(config.parallel)
        plan = BatchSizePlan(config.training, context.data_group.size, config.model.seq_length)
        config = startup.with_batch_size(config, plan)
        step = _build_step(task, config, context)
        initial = parts_of_shards(step, lambda shard: shard.main)
        set_weights(step, task.start)
        start = parts_of_shards(step, lambda shard: shard.main)
        step.prepare(plan.num_microbatches(0))

        feed = _Feed(task, context, plan, step)
        evaluations = [feed.evaluate()]
        recorder = StepRecorder(step, look=lambda: evaluations.append(feed.evaluate()), overwritten=overwritten)
        timers = Timers(level=0)
        Loop(
            config,
            context,
            step,
            plan,
            startup.make_learning_schedule(config.optimizer, config.training, plan),
            Saver(config.checkpoint, context, {}, task.vocab_size),
            Reporter(config.logging, step.model, context, timers, plan.total_iterations, speaks=False),
            timers,
            train_batches=feed.training,
            valid_batches=None,
            test_batches=None,
            started_at=time.monotonic(),
        ).run(Progress())
        model = config.model
        masks = feed.masks() if model.hidden_dropout or model.attention_dropout or model.moe_input_jitter_eps else []
    coordinates = {axis: context.coordinates[axis] for axis in AXES}
    return RankObservation(rank, coordinates, initial, start, recorder.steps, evaluations, recorder.activations, masks)


def gradients_of_microbatches(task: ProofTask) -> tuple[list[list[TensorPart]], list[float]]:
    """What each microbatch of the first step adds to the gradients on this rank, and how many of its tokens count; of a world of
    one."""
    context = connect(task.config.parallel)
    plan = BatchSizePlan(task.config.training, context.data_group.size, task.config.model.seq_length)
    step = _build_step(task, startup.with_batch_size(task.config, plan), context)
    set_weights(step, task.start)
    step.prepare(plan.num_microbatches(0))
    batch = next(_Feed(task, context, plan, step).training(0))
    step.gradients(batch)
    found = []
    for inputs in batch:
        step.gradients([inputs], again=True)
        found.append(parts_of_shards(step, lambda shard: shard.grad))
    return found, [float(inputs.loss_mask.sum()) for inputs in batch if inputs.loss_mask is not None]


def _build_step(task: ProofTask, config: Config, context: ParallelContext) -> TrainStep:
    model = model_of(config, context, task.vocab_size, torch.float64)
    return TrainStep.of(config, model, context)


@dataclasses.dataclass(frozen=True)
class _NotingKey(DropoutKey):
    """A key that notes what is drawn with it."""

    drawn: list[tuple[int, str, int]] = dataclasses.field(default_factory=list)
    """Layer, site and seed."""

    def site(self, layer: int, site: str, coordinate: int = 0) -> int:
        seed = super().site(layer, site, coordinate)
        self.drawn.append((layer, site, seed))
        return seed


class _Feed:
    """The batches of this rank."""

    def __init__(self, task: ProofTask, context: ParallelContext, plan: BatchSizePlan, step: TrainStep) -> None:
        self.task, self.plan, self.step = task, plan, step
        training, self.num_workers = task.config.training, task.config.data.num_workers
        self.maker = BatchMaker.for_model(task.config.model, context, training.seed, training.micro_batch_size, task.rules)
        self.reads = reads_samples(context, [chunk.stage for chunk in step.model.layer_table], task.rules)

    def training(self, consumed: int) -> Iterator[list[ModelInputs]]:
        """Steps from `consumed` samples on, without dropout."""
        steps = self.maker.steps(
            self.task.samples if self.reads else None,
            global_batch_size_at=self.plan.global_batch_size,
            consumed_samples=consumed,
            total_samples=self.plan.total_samples,
            num_workers=self.num_workers,
            dropout=False,
        )
        yield from steps

    def masks(self) -> list[MaskDrawn]:
        """The dropout masks of the first step, those that are drawn again in backward too. The step is made without an update."""
        batch = next(
            self.maker.steps(
                self.task.samples if self.reads else None,
                global_batch_size_at=self.plan.global_batch_size,
                consumed_samples=0,
                total_samples=self.plan.global_batch_size(0),
                num_workers=0,
            )
        )
        keys = [_NotingKey(*dataclasses.astuple(inputs.dropout_key)) for inputs in batch if inputs.dropout_key is not None]
        with backend_in_use("auto"):  # some kernels know no dropout, and with them a run has none
            self.step.gradients([dataclasses.replace(inputs, dropout_key=key) for inputs, key in zip(batch, keys, strict=True)])
        return [MaskDrawn(number, *drawn) for number, key in enumerate(keys) for drawn in key.drawn]

    def evaluate(self) -> float:
        """Mean loss over the held-out batches."""
        size, samples = self.plan.final_global_batch_size, self.task.held_out
        batches = self.maker.evaluation(samples if self.reads else None, global_batch_size=size, num_batches=EVALUATED_BATCHES)
        found = evaluate(self.step, batches)
        assert found is not None
        return found[0]
