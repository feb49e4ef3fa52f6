"""One rank's run at a layout. It is the run of pretrain_gpt.py, but for samples, masks, start weights and dtype."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import torch

from megatron.config.config import Config
from megatron.metrics.timers import Timers
from megatron.model.build import build_model
from megatron.model.gpt import ModelInputs
from megatron.optimizer.grad_scaler import make_grad_scaler
from megatron.parallel.context import ParallelContext, connect
from megatron.pipeline_parallel.partition import table_of
from megatron.training import startup
from megatron.training.inputs import BatchMaker, reads_samples
from megatron.training.loop import Loop, evaluate
from megatron.training.progress import BatchSizePlan, Progress
from megatron.training.reporter import Reporter
from megatron.training.saver import Saver
from megatron.training.step import TrainStep
from megatron.verification.late import late_delivery
from megatron.verification.observation import EVALUATED_BATCHES, ProofTask, RankObservation
from megatron.verification.random_samples import RandomSamples
from megatron.verification.recording import StepRecorder, parts_of_shards, set_weights


def observe_rank(rank: int, task: ProofTask) -> RankObservation:
    """Train to the end of the run; evaluate before the first step and after each of the first ones; return what was observed. The
    process group must exist.

    What ranks send arrives only when it is waited for.
    """
    with late_delivery() as overwritten:
        return _observe(rank, task, overwritten)


def _observe(rank: int, task: ProofTask, overwritten: list[str]) -> RankObservation:
    config = task.config
    startup.set_numerics(config.training.deterministic_mode)
    context = connect(config.parallel)
    plan = BatchSizePlan(config.training, context.data_group.size)
    config = startup.with_batch_size(config, plan)
    step = _build_step(task, config, context)
    initial = parts_of_shards(step, lambda shard: shard.main)
    set_weights(step, task.start)
    start = parts_of_shards(step, lambda shard: shard.main)
    step.prepare(plan.num_microbatches(0))

    feed = _Feed(task, context, plan, step)
    evaluations = [feed.evaluate()]
    recorder = StepRecorder(step, look=lambda: evaluations.append(feed.evaluate()), overwritten=overwritten)
    _loop(task, config, context, plan, step, feed).run(Progress())
    coordinates = {axis: context.coordinates[axis] for axis in ("tp", "cp", "dp", "pp")}
    return RankObservation(rank, coordinates, initial, start, recorder.steps, evaluations, recorder.activations)


def _build_step(task: ProofTask, config: Config, context: ParallelContext) -> TrainStep:
    model = build_model(
        config.model,
        context,
        dtype=torch.float64,
        vocab_size=task.vocab_size,
        sequence_parallel=config.parallel.sequence_parallel,
        seed=config.training.seed,
        table=table_of(config.model, config.parallel, task.vocab_size),
        materialized=False,
    )
    return TrainStep(
        model,
        context,
        make_grad_scaler(config.precision),
        parallel=config.parallel,
        optimizer=config.optimizer,
        micro_batch_size=config.training.micro_batch_size,
        skip_overflow=config.precision.fp16,
    )


class _Feed:
    """The batches of this rank, with loss masks that do not come from the rules of documents."""

    def __init__(self, task: ProofTask, context: ParallelContext, plan: BatchSizePlan, step: TrainStep) -> None:
        self.task, self.plan, self.step = task, plan, step
        training = task.config.training
        self.micro_batch_size, self.num_workers = training.micro_batch_size, task.config.data.num_workers
        self.data = context.data_group
        self.maker = BatchMaker(context, training.seed, task.config.model.seq_length, self.micro_batch_size, task.rules)
        self.reads = reads_samples(context, [chunk.stage for chunk in step.model.layer_table], task.rules)

    def first_samples(self, consumed: int) -> range:
        """First sample of each of this data rank's microbatches in the step that begins after `consumed` samples."""
        first = consumed + self.data.index * self.micro_batch_size
        return range(first, consumed + self.plan.global_batch_size(consumed), self.data.size * self.micro_batch_size)

    def training(self, consumed: int) -> Iterator[list[ModelInputs]]:
        """Steps from `consumed` samples on, without dropout."""
        steps = self.maker.steps(
            self.task.samples if self.reads else None,
            global_batch_size_at=self.plan.global_batch_size,
            consumed_samples=consumed,
            total_samples=self.plan.total_samples,
            num_workers=self.num_workers,
        )
        for batch in steps:
            masked = self._masked(batch, self.task.samples, self.first_samples(consumed))
            yield [dataclasses.replace(inputs, dropout_key=None) for inputs in masked]
            consumed += self.plan.global_batch_size(consumed)

    def evaluate(self) -> float:
        """Mean loss over the held-out batches."""
        size, count = self.plan.final_global_batch_size, EVALUATED_BATCHES
        batches = self.maker.evaluation(self.task.held_out if self.reads else None, global_batch_size=size, num_batches=count)
        own, step = self.data.index * self.micro_batch_size, self.data.size * self.micro_batch_size
        firsts = (range(first + own, first + size, step) for first in range(0, count * size, size))
        batches_with_masks = zip(batches, firsts, strict=True)
        return evaluate(self.step, (self._masked(batch, self.task.held_out, each) for batch, each in batches_with_masks))

    def _masked(self, batch: list[ModelInputs], samples: RandomSamples, firsts: range) -> list[ModelInputs]:
        found = []
        for inputs, first in zip(batch, firsts, strict=True):
            if inputs.loss_mask is not None:
                mask = torch.from_numpy(samples.masks(first, self.micro_batch_size)).t()
                inputs = dataclasses.replace(inputs, loss_mask=inputs.loss_mask * mask)
            found.append(inputs)
        return found


def _loop(task: ProofTask, config: Config, context: ParallelContext, plan: BatchSizePlan, step: TrainStep, feed: _Feed) -> Loop:
    """The training loop; it evaluates, saves and logs nothing."""
    timers = Timers(level=0)
    reporter = Reporter(config.logging, step.model, context, timers, plan.total_iterations, speaks=False)
    return Loop(
        config,
        context,
        step,
        plan,
        startup.make_learning_schedule(config.optimizer, config.training, plan),
        Saver(config.checkpoint, context, {}, task.vocab_size),
        reporter,
        timers,
        train_batches=feed.training,
        valid_batches=None,
        test_batches=None,
        started_at=time.monotonic(),
    )
