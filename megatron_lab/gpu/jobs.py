"""One rank of a job, alone on a device: real kernels, its own part of the model, and messages that return at once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from megatron.config.cli import load
from megatron.config.config import Config
from megatron.data.samples import DocumentRules, SamplePiece, read_microbatch
from megatron.data.tokenizer import planned_rows
from megatron.model.build import Model, model_of
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import connect_fake, disconnect
from megatron.parallel.params import materialize
from megatron.parallel.random import DropoutKey
from megatron.parallel.topology import Topology
from megatron.training.inputs import BatchMaker
from megatron.training.startup import choose_attention, set_numerics
from megatron.training.step import TrainStep

_DOCUMENTS_PER_SAMPLE = 8


@dataclass(frozen=True)
class Job:
    """Settings of a run and its number of ranks."""

    config: Config
    world_size: int

    @classmethod
    def of(cls, line: Sequence[str], world_size: int = 1) -> Job:
        """Read a command line. One with --dry-run names its world size itself."""
        loaded = load(line, world_size)
        return cls(loaded.config, loaded.dry_run.world_size if loaded.dry_run else world_size)

    @property
    def topology(self) -> Topology:
        """The grid of ranks."""
        return Topology.of(self.config.parallel, self.world_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the word embedding, without padding."""
        return planned_rows(self.config.data)

    def of_microbatches(self, count: int) -> Job:
        """Return the same job with `count` microbatches per data rank and step."""
        training = self.config.training
        batch = replace(
            training,
            global_batch_size=count * self.topology.dp * training.micro_batch_size,
            rampup_batch_size=None,
            step_batch_size_schedule=(),
        )
        return replace(self, config=replace(self.config, training=batch))


def torch_device(device: str) -> torch.device:
    """Return the first device of a kind, made the current one on CUDA."""
    if device != "cuda":
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@contextlib.contextmanager
def train_step_of(job: Job, rank: int, device: torch.device, *, drawn_on_device: bool = False) -> Iterator[TrainStep]:
    """Build the training step of one rank, without the other ranks.

    Args:
        drawn_on_device: draw the initial weights on the device, in a second instead of many. They depend on the layout then, so
            this is for timing only.
    """
    restore_numerics, restore_kernels = set_numerics(job.config), lambda: None
    context = connect_fake(job.topology, rank, job.config.parallel.fsdp_shard_size, device)
    try:
        if job.world_size == 1:  # all ranks of a real run choose together
            _, restore_kernels = choose_attention(job.config, context)
        model = model_of(job.config, context, job.vocab_size)
        if drawn_on_device:
            _draw_weights(model, device)
        step = TrainStep.of(job.config, model, context)
        step.finish_publishing()
        yield step
    finally:
        disconnect()
        restore_kernels()
        restore_numerics()


def _draw_weights(model: Model, device: torch.device) -> None:
    """Give all parameters memory and random initial values of the right scale."""
    for chunk in model.chunks.values():
        materialize(chunk, model.params, device)
    with torch.no_grad():
        for entry in model.params:
            init = entry.record.init
            if init.std:
                entry.param.normal_(std=init.std)
            else:
                nn.init.constant_(entry.param, init.constant)


def random_batch(job: Job, step: TrainStep) -> list[ModelInputs]:
    """Return one step's microbatches of a rank: random tokens, and about eight documents per sample where the settings use them."""
    config, context = job.config, step.context
    assert config.training.global_batch_size is not None
    size, data = config.training.micro_batch_size, config.data
    rules = DocumentRules(job.vocab_size - 1, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
    maker = BatchMaker.for_model(config.model, context, config.training.seed, size, rules)
    source = _RandomSamples(config.model.seq_length, job.vocab_size, rules)
    drops = bool(config.model.hidden_dropout or config.model.attention_dropout)
    batch = []
    for number in range(config.training.global_batch_size // (job.topology.dp * size)):
        inputs = maker.inputs_of(read_microbatch(source, number * size, size, rules))
        batch.append(replace(inputs, dropout_key=DropoutKey(config.training.seed, 0, number) if drops else None))
    return batch


class _RandomSamples:
    """Random samples. The index of a sample seeds its tokens."""

    def __init__(self, seq_length: int, vocab_size: int, rules: DocumentRules) -> None:
        self.seq_length, self._vocab_size, self._rules = seq_length, vocab_size, rules

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Return tokens [count, s + 1]."""
        generator = np.random.default_rng(first)
        tokens = generator.integers(self._vocab_size - 1, size=(count, self.seq_length + 1))
        if self._rules.every_stage_reads:
            tokens[generator.random(tokens.shape) < _DOCUMENTS_PER_SAMPLE / self.seq_length] = self._rules.eod
        return tokens

    def marks(self, first: int, count: int) -> None:
        """Return None: no token has marks."""

    def lineage(self, number: int) -> list[SamplePiece]:
        """Return an empty list: no sample comes from a document."""
        return []

    def describe(self, num_samples: int) -> list[str]:
        """Return no lines for a start-up log."""
        return []


def run_without_messages(step: TrainStep, batch: Sequence[ModelInputs]) -> None:
    """Compute gradients and update. The values that fake messages would have brought are whatever the memory held."""
    loss, _ = step.gradients(batch)
    assert math.prod(loss.shape) == 1
    step.optimizer.step(1e-5, 0.0, 1.0)
    step.finish_publishing()
