"""Run of one rank of the parallel run. It equals a run of pretrain_gpt.py, except for samples, loss masks, start weights and
dtype."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import torch

from megatron.attention.backends import backend_in_use
from megatron.config.config import Config
from megatron.metrics.measures import Timers
from megatron.model.build import build_model_from_config
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import ParallelContext, connect
from megatron.parallel.random import DropoutKey
from megatron.training import startup
from megatron.training.inputs import BatchBuilder, needs_samples
from megatron.training.loop import Loop, evaluate
from megatron.training.progress import BatchSizePlan, Progress
from megatron.training.reporter import Reporter
from megatron.training.saver import Saver
from megatron.training.step import TrainStep
from megatron_lab.verification.gathered_tensors import AXIS_NAMES
from megatron_lab.verification.late_collectives import late_delivery
from megatron_lab.verification.observation import EVALUATED_BATCHES, DropoutMask, LocalTensor, ProofTask, RankObservation
from megatron_lab.verification.recording import StepRecorder, record_shards, set_weights


def observe_rank(rank: int, task: ProofTask) -> RankObservation:
    """Train this rank to the end of the run, and return the values that it recorded.

    The model is evaluated before the first step and after each of the first `EVALUATED_STEPS` steps. The process group must exist.
    Results of communication appear only when they are waited for, so that a missing wait changes the values.
    """
    config = task.config
    with late_delivery() as overwritten:
        startup.set_numerics(config)
        context = connect(config.parallel)
        plan = BatchSizePlan(config.training, context.data_group.size, config.model.seq_length)
        config = startup.resolve_batch_size(config, plan)
        step = _build_step(task, config, context)
        initial = record_shards(step, lambda shard: shard.main_param)
        set_weights(step, task.start)
        start = record_shards(step, lambda shard: shard.main_param)
        step.prepare(plan.get_num_microbatches(0))

        batches = _RankBatches(task, context, plan, step)
        evaluations = [batches.evaluate()]
        recorder = StepRecorder(step, after_step=lambda: evaluations.append(batches.evaluate()), overwritten=overwritten)
        timers = Timers(level=0)
        Loop(
            config,
            context,
            step,
            plan,
            startup.make_learning_schedule(config.optimizer, config.training, plan),
            Saver(config.checkpoint, context, {}, task.vocab_size),
            Reporter(config.logging, step.model, context, timers, plan.total_iterations, is_output_rank=False),
            timers,
            train_batches=batches.iter_training_batches,
            valid_batches={},
            test_batches={},
            started_at=time.monotonic(),
        ).run(Progress())
        model = config.model
        masks = (
            batches.collect_dropout_masks() if model.hidden_dropout or model.attention_dropout or model.moe_input_jitter_eps else []
        )
    coordinates = {axis: context.coordinates[axis] for axis in AXIS_NAMES}
    return RankObservation(rank, coordinates, initial, start, recorder.steps, evaluations, recorder.activations, masks)


def compute_microbatch_gradients(task: ProofTask) -> tuple[list[list[LocalTensor]], list[float]]:
    """Compute the contribution of each microbatch of the first step to the gradients. The process group must have a single rank.

    Returns:
        For each microbatch, its contribution to the gradient of each parameter; and for each microbatch, its number of tokens that
        count in the loss.
    """
    context = connect(task.config.parallel)
    plan = BatchSizePlan(task.config.training, context.data_group.size, task.config.model.seq_length)
    step = _build_step(task, startup.resolve_batch_size(task.config, plan), context)
    set_weights(step, task.start)
    step.prepare(plan.get_num_microbatches(0))
    batch = next(_RankBatches(task, context, plan, step).iter_training_batches(0))
    step.compute_gradients(batch)
    gradients = []
    for inputs in batch:
        step.compute_gradients([inputs], reuse_token_count=True)
        gradients.append(record_shards(step, lambda shard: shard.grad))
    return gradients, [float(inputs.loss_mask.sum()) for inputs in batch if inputs.loss_mask is not None]


def _build_step(task: ProofTask, config: Config, context: ParallelContext) -> TrainStep:
    model = build_model_from_config(config, context, task.vocab_size, torch.float64)
    return TrainStep.of(config, model, context)


@dataclasses.dataclass(frozen=True)
class _RecordingKey(DropoutKey):
    """Dropout key (source of the seeds of dropout masks) that records which seeds the model requests, so that the masks of all
    ranks can be compared."""

    drawn: list[tuple[int, str, int]] = dataclasses.field(default_factory=list)
    """Layer, site (position in the layer at which dropout is applied) and seed of each mask."""

    def get_site_seed(self, layer: int, site: str, coordinate: int = 0) -> int:
        seed = super().get_site_seed(layer, site, coordinate)
        self.drawn.append((layer, site, seed))
        return seed


class _RankBatches:
    """Training and evaluation batches of this rank, and methods that run the evaluation and a step with dropout on them."""

    def __init__(self, task: ProofTask, context: ParallelContext, plan: BatchSizePlan, step: TrainStep) -> None:
        self.task, self.plan, self.step = task, plan, step
        training, self.num_workers = task.config.training, task.config.data.num_workers
        self.batch_builder = BatchBuilder.for_model(
            task.config.model, context, training.seed, training.micro_batch_size, task.document_rules
        )
        self.needs_samples = needs_samples(context, [chunk.stage for chunk in step.model.layer_table], task.document_rules)

    def iter_training_batches(self, consumed: int) -> Iterator[list[ModelInputs]]:
        """Yield the microbatches of each step that follows the first `consumed` samples. They have no dropout key, so dropout is
        off."""
        steps = self.batch_builder.iter_batches(
            self.task.samples if self.needs_samples else None,
            global_batch_size_at=self.plan.get_global_batch_size,
            consumed_samples=consumed,
            total_samples=self.plan.total_samples,
            num_workers=self.num_workers,
            has_dropout=False,
        )
        yield from steps

    def collect_dropout_masks(self) -> list[DropoutMask]:
        """Run the forward and backward of the first step with dropout, and return the masks that were drawn. They include the masks
        that the recomputation in backward draws again.

        The optimizer does not update the model.
        """
        batch = next(
            self.batch_builder.iter_batches(
                self.task.samples if self.needs_samples else None,
                global_batch_size_at=self.plan.get_global_batch_size,
                consumed_samples=0,
                total_samples=self.plan.get_global_batch_size(0),
                num_workers=0,
            )
        )
        keys = [_RecordingKey(*dataclasses.astuple(inputs.dropout_key)) for inputs in batch if inputs.dropout_key is not None]
        with backend_in_use("auto"):  # some attention kernels do not support dropout
            self.step.compute_gradients(
                [dataclasses.replace(inputs, dropout_key=key) for inputs, key in zip(batch, keys, strict=True)]
            )
        return [DropoutMask(microbatch, *drawn) for microbatch, key in enumerate(keys) for drawn in key.drawn]

    def evaluate(self) -> float:
        """Return the mean loss over the evaluation batches."""
        size, samples = self.plan.final_global_batch_size, self.task.eval_samples
        batches = self.batch_builder.iter_evaluation_batches(
            samples if self.needs_samples else None, global_batch_size=size, num_batches=EVALUATED_BATCHES
        )
        result = evaluate(self.step, batches)
        assert result is not None
        return result[0]
