"""Training step of a single rank of a job in this process, without the other ranks.

The rank has real kernels and its own shard of the model. In place of communication there is a fake process group: each of its
collectives returns at once, without data.
"""

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
from megatron.data.samples import DocumentRules, DocumentSpan, read_microbatch
from megatron.data.tokenizer import predict_embedding_rows
from megatron.model.build import Model, build_model_from_config
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import connect_fake, disconnect
from megatron.parallel.params import materialize
from megatron.parallel.random import DropoutKey
from megatron.parallel.topology import Topology
from megatron.training.inputs import BatchBuilder
from megatron.training.startup import choose_attention_kernel, set_numerics
from megatron.training.step import TrainStep

_DOCUMENTS_PER_SAMPLE = 8


@dataclass(frozen=True)
class Job:
    """Training job of which only one rank is run: its settings and its world size."""

    config: Config
    world_size: int

    @classmethod
    def of(cls, argv: Sequence[str], world_size: int = 1) -> Job:
        """Parse the command line of a job. If it contains --dry-run, the world size of --dry-run replaces `world_size`."""
        loaded = load(argv, world_size)
        return cls(loaded.config, loaded.dry_run.world_size if loaded.dry_run else world_size)

    @property
    def topology(self) -> Topology:
        """Rank grid of the job: the number of ranks along each axis."""
        return Topology.of(self.config.parallel, self.world_size)

    @property
    def vocab_size(self) -> int:
        """Number of rows of the word embedding, without the padding for tensor parallelism."""
        return predict_embedding_rows(self.config.data)

    def with_microbatches(self, num_microbatches: int) -> Job:
        """Return this job with `num_microbatches` microbatches per data rank and step."""
        training = self.config.training
        batch = replace(
            training,
            global_batch_size=num_microbatches * self.topology.dp * training.micro_batch_size,
            rampup_batch_size=None,
            step_batch_size_schedule=(),
        )
        return replace(self, config=replace(self.config, training=batch))


def get_torch_device(device: str) -> torch.device:
    """Return the first device of a type, "cuda" or "cpu". On CUDA, also make it the current device."""
    if device != "cuda":
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@contextlib.contextmanager
def build_train_step(job: Job, rank: int, device: torch.device, *, init_on_device: bool = False) -> Iterator[TrainStep]:
    """Context manager that builds the training step of one rank of a job in this process, without the other ranks.

    Args:
        init_on_device: draw the initial weights on the device, which takes a second instead of many. The weights then depend on the
            layout, so use this for timing only.
    """
    restore_numerics, restore_kernels = set_numerics(job.config), lambda: None
    context = connect_fake(job.topology, rank, job.config.parallel.fsdp_shard_size, device)
    try:
        if job.world_size == 1:  # with several ranks the choice would need real communication
            _, restore_kernels = choose_attention_kernel(job.config, context)
        model = build_model_from_config(job.config, context, job.vocab_size)
        if init_on_device:
            _init_weights(model, device)
        step = TrainStep.of(job.config, model, context)
        step.finish_param_gather()
        yield step
    finally:
        disconnect()
        restore_kernels()
        restore_numerics()


def _init_weights(model: Model, device: torch.device) -> None:
    """Allocate all parameters on the device and draw random initial values with the standard deviations of the model."""
    for chunk in model.chunks.values():
        materialize(chunk, model.params, device)
    with torch.no_grad():
        for entry in model.params:
            init = entry.record.init
            if init.std:
                entry.param.normal_(std=init.std)
            else:
                nn.init.constant_(entry.param, init.constant)


def create_random_batch(job: Job, step: TrainStep) -> list[ModelInputs]:
    """Create the microbatches of one step on this rank, with random tokens.

    If the settings use document boundaries (such as --reset-attention-mask), each sample has about eight documents.
    """
    config, context = job.config, step.context
    assert config.training.global_batch_size is not None
    micro_batch_size, data = config.training.micro_batch_size, config.data
    document_rules = DocumentRules(job.vocab_size - 1, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
    batch_builder = BatchBuilder.for_model(config.model, context, config.training.seed, micro_batch_size, document_rules)
    source = _RandomSamples(config.model.seq_length, job.vocab_size, document_rules)
    uses_dropout = bool(config.model.hidden_dropout or config.model.attention_dropout)
    batch = []
    for microbatch in range(config.training.global_batch_size // (job.topology.dp * micro_batch_size)):
        inputs = batch_builder.build_inputs(
            read_microbatch(source, microbatch * micro_batch_size, micro_batch_size, document_rules)
        )
        batch.append(replace(inputs, dropout_key=DropoutKey(config.training.seed, 0, microbatch) if uses_dropout else None))
    return batch


class _RandomSamples:
    """Data source that returns random samples in place of a dataset. Tokens depend only on the index of the first requested sample,
    which is the random seed."""

    def __init__(self, seq_length: int, vocab_size: int, document_rules: DocumentRules) -> None:
        self.seq_length, self._vocab_size, self._document_rules = seq_length, vocab_size, document_rules

    def get_samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Return random tokens [count, s + 1] of `count` samples of sequence length s. `first` is the index of the first sample."""
        generator = np.random.default_rng(first)
        tokens = generator.integers(self._vocab_size - 1, size=(count, self.seq_length + 1))
        if self._document_rules.needed_by_all_stages:
            tokens[generator.random(tokens.shape) < _DOCUMENTS_PER_SAMPLE / self.seq_length] = self._document_rules.eod
        return tokens

    def get_marks(self, first: int, count: int) -> None:
        """Return None: the data has no marks (extra bytes for loss mask and document ends)."""

    def get_lineage(self, number: int) -> list[DocumentSpan]:
        """Return an empty list, because the sample comes from no document."""
        return []

    def describe(self, num_samples: int) -> list[str]:
        """Return an empty list: the start-up log gets no lines that describe random samples."""
        return []


def run_without_communication(step: TrainStep, batch: Sequence[ModelInputs]) -> None:
    """Compute the gradients of a step, and update the weights.

    The collectives of the fake process group leave their results uninitialized, so the values have no meaning.
    """
    loss, _ = step.compute_gradients(batch)
    assert math.prod(loss.shape) == 1
    step.optimizer.step(1e-5, 0.0, 1.0)
    step.finish_param_gather()
