"""Run of the framework in one process, which can replace the reference model in a comparison (--reference self).

It supports modules that a user has added, which the reference model does not know. It cannot find an error that also occurs in one
process.
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
from megatron.parallel.params import build_global_records
from megatron.parallel.random import compute_stable_seed
from megatron_lab.verification.layout_run import compute_microbatch_gradients, observe_rank
from megatron_lab.verification.observation import LocalTensor, ProofTask, ReferenceRun, ReferenceStep

_PERTURBATION_STD = 0.1
"""Standard deviation of the random offsets of the start weights from the initial weights."""


def run_single_process(task: ProofTask) -> ReferenceRun:
    """Train with the framework in this process only, and return the recorded values in the form of a reference run. The environment
    variables must be those of a job with a single rank."""
    data_size = task.dp_size
    task = dataclasses.replace(task, config=build_single_process_config(task.config, task.dp_size), dp_size=1)
    observation = observe_rank(0, task)
    micro = task.config.training.micro_batch_size
    steps = [
        ReferenceStep(
            iteration=step.iteration,
            num_samples=step.num_microbatches * micro,
            loss=step.loss,
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            weight_decay=step.weight_decay,
            loss_sum=step.loss_sum,
            token_count=step.token_count,
            gradients=assemble_tensors(step.gradients),
            weights=assemble_tensors(step.main_params),
        )
        for step in observation.steps
    ]
    microbatch_gradients, tokens = compute_microbatch_gradients(task)
    full_gradients = [assemble_tensors(gradients) for gradients in microbatch_gradients]
    contributions = {name: torch.stack([gradients[name] for gradients in full_gradients]) for name in task.start}
    microbatches = [(index % data_size, index // data_size) for index in range(len(tokens))]
    return ReferenceRun(
        steps, observation.evaluations, assemble_tensors(observation.activations), microbatches, tokens, contributions
    )


def build_single_process_config(config: Config, data_size: int) -> Config:
    """Build settings for one process that trains with the same batches as the parallel run.

    Args:
        config: settings of the parallel run.
        data_size: number of data-parallel ranks of the parallel run, which determines the default batch size.
    """
    batch = config.training.get_final_batch_size(data_size)
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, global_batch_size=batch),
        parallel=dataclasses.replace(ParallelConfig(), device="cpu", distributed_backend="gloo"),
        memory=MemoryConfig(),
        speed=dataclasses.replace(config.speed, compile=False),
        optimizer=dataclasses.replace(config.optimizer, optimizer_cpu_offload=False),
    )


def assemble_tensors(local_tensors: Iterable[LocalTensor]) -> dict[str, Tensor]:
    """Assemble full tensors from slices, and return them by name. Elements that no slice contains are NaN."""
    tensors: dict[str, Tensor] = {}
    for local in local_tensors:
        tensor = tensors.setdefault(local.name, torch.full(local.shape, math.nan, dtype=torch.float64))
        tensor[local.tensor_slice.index] = local.values
    return tensors


def perturb_weights(config: Config, vocab_size: int, initial: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Add random offsets to the initial weights, and return the sums as start weights of both runs. So no bias is zero and no norm
    weight is one, also in modules of the user.

    Args:
        initial: initial weights, by name.
        seed: seed of the offsets.
    """
    weights = {}
    for name, record in build_global_records(config.model, vocab_size).items():
        generator = torch.Generator().manual_seed(compute_stable_seed(seed, name))
        weights[name] = initial[name] + _PERTURBATION_STD * torch.randn(record.shape, generator=generator, dtype=torch.float64)
    return weights
