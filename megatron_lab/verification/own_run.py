"""A run of the same code in one process, which a layout may be compared with in place of the plain reference (--reference self).

It has the user's own parts, which the reference does not know. What is wrong in one process too it does not show.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megatron.config.config import Config
from megatron.config.memory import MemoryConfig
from megatron.config.parallel import ParallelConfig
from megatron.parallel.params import global_records
from megatron.parallel.random import stable_seed
from megatron_lab.verification.layout_run import gradients_of_microbatches, observe_rank
from megatron_lab.verification.observation import PlainRun, PlainStep, ProofTask, TensorPart

_APART = 0.1
"""Standard deviation of what sets the start weights apart from the initial ones."""


def run_own(task: ProofTask) -> PlainRun:
    """Train in this process alone, and observe it as the reference is observed. The environment must be that of a world of one."""
    data_size = task.data_size
    task = dataclasses.replace(task, config=alone(task.config, task.data_size), data_size=1)
    seen = observe_rank(0, task)
    micro = task.config.training.micro_batch_size
    steps = [
        PlainStep(
            iteration=step.iteration,
            num_samples=step.num_microbatches * micro,
            loss=step.loss,
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            weight_decay=step.weight_decay,
            loss_sum=step.loss_sum,
            token_count=step.token_count,
            gradients=whole(step.gradients),
            weights=whole(step.main_params),
        )
        for step in seen.steps
    ]
    parts, tokens = gradients_of_microbatches(task)
    each = [whole(one) for one in parts]
    contributions = {name: torch.stack([one[name] for one in each]) for name in task.start}
    places = [(number % data_size, number // data_size) for number in range(len(tokens))]
    return PlainRun(steps, seen.evaluations, whole(seen.activations), places, tokens, contributions)


def alone(config: Config, data_size: int) -> Config:
    """The settings of one process that makes the same steps.

    Args:
        data_size: data ranks of the layout, from which the default batch follows.
    """
    batch = config.training.final_batch_size(data_size)
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, global_batch_size=batch),
        parallel=dataclasses.replace(ParallelConfig(), device="cpu", distributed_backend="gloo"),
        memory=MemoryConfig(),
        speed=dataclasses.replace(config.speed, compile=False),
        optimizer=dataclasses.replace(config.optimizer, optimizer_cpu_offload=False),
    )


def whole(parts: Iterable[TensorPart]) -> dict[str, Tensor]:
    """The tensors that parts make up, by name."""
    found: dict[str, Tensor] = {}
    for part in parts:
        tensor = found.setdefault(part.name, torch.full(part.shape, math.nan, dtype=torch.float64))
        tensor[part.box.index] = part.values
    return found


def start_weights(config: Config, vocab_size: int, initial: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Weights to begin with, whatever the model is made of: those that it is made with, each moved a little at random, so that no
    bias is zero and no weight of a norm one."""
    found = {}
    for name, record in global_records(config.model, vocab_size).items():
        generator = torch.Generator().manual_seed(stable_seed(seed, name))
        found[name] = initial[name] + _APART * torch.randn(record.shape, generator=generator, dtype=torch.float64)
    return found
