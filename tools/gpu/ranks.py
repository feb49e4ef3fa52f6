"""One rank of a job, alone on a device: real kernels, its own part of the model, and messages that return at once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from megatron.config.cli import load
from megatron.config.config import Config
from megatron.data.tokenizers.tokenizer import planned_rows
from megatron.model.build import model_of
from megatron.model.gpt import ModelInputs
from megatron.parallel.context import connect_fake, disconnect
from megatron.parallel.random import DropoutKey
from megatron.parallel.topology import Topology
from megatron.training.startup import set_numerics
from megatron.training.step import TrainStep
from tools.gpu.place import Place


@dataclass(frozen=True)
class Job:
    """Settings, and the job's number of ranks."""

    config: Config
    world_size: int

    @classmethod
    def of(cls, line: Sequence[str], world_size: int = 1) -> Job:
        """From a command line; one with --dry-run names its world size itself."""
        loaded = load(line, world_size)
        return cls(loaded.config, loaded.dry_run.world_size if loaded.dry_run else world_size)

    @property
    def topology(self) -> Topology:
        """Its grid."""
        parallel = self.config.parallel
        return Topology.of(parallel, self.world_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the word embedding."""
        return planned_rows(self.config.data)

    def of_microbatches(self, count: int) -> Job:
        """The same job with so many microbatches in a step."""
        training = self.config.training
        data_ranks = self.topology.dp
        batch = replace(
            training,
            global_batch_size=count * data_ranks * training.micro_batch_size,
            rampup_batch_size=None,
            step_batch_size_schedule=(),
        )
        return replace(self, config=replace(self.config, training=batch))


def device_of(place: Place) -> torch.device:
    """The device, made the current one on CUDA."""
    if not place.on_cuda:
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@contextlib.contextmanager
def alone(job: Job, rank: int, place: Place) -> Iterator[TrainStep]:
    """A rank's training step, ready."""
    set_numerics(job.config)
    context = connect_fake(job.topology, rank, job.config.parallel.fsdp_shard_size, device_of(place))
    try:
        step = TrainStep.of(job.config, model_of(job.config, context, job.vocab_size), context)
        step.finish_publishing()
        yield step
    finally:
        disconnect()


def batch_of(job: Job, place: Place) -> list[ModelInputs]:
    """A data rank's microbatches of one step: tokens drawn at random, each sample one document."""
    training, model = job.config.training, job.config.model
    assert training.global_batch_size is not None
    device, size = device_of(place), (model.seq_length, training.micro_batch_size)
    draws = torch.Generator().manual_seed(1)
    positions = torch.arange(size[0]).unsqueeze(1).expand(*size).contiguous().to(device)
    mask, drops = torch.ones(size, device=device), bool(model.hidden_dropout or model.attention_dropout)
    batch = []
    for number in range(training.global_batch_size // (job.topology.dp * training.micro_batch_size)):
        tokens, labels = (torch.randint(job.vocab_size, size, generator=draws).to(device) for _ in range(2))
        batch.append(ModelInputs(positions, tokens, labels, mask, DropoutKey(1, 0, number) if drops else None))
    return batch


def whole_step(step: TrainStep, batch: Sequence[ModelInputs]) -> None:
    """Gradients and update. What the fake messages brought is not looked at."""
    loss, _ = step.gradients(batch)
    assert math.prod(loss.shape) == 1
    step.optimizer.step(1e-5, 0.0, 1.0)
    step.finish_publishing()
