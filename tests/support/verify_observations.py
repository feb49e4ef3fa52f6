"""Observations of small runs, each made once, and copies of them in which something is changed."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.config.cli import load
from megatron.config.config import Config
from megatron_lab.verification.comparison import ProofFinding
from megatron_lab.verification.diagnosis import Diagnosis, diagnose
from megatron_lab.verification.observation import LocalTensor, Observation, RankObservation
from megatron_lab.verification.prove import prove
from tests.support.warm import pickled, run_warm_ranks

FLAGS = (
    "--num-layers 2 --hidden-size 8 --ffn-hidden-size 12 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --lr 1e-2 "
    "--global-batch-size 6 --train-iters 3 --eval-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 15 "
    "--make-vocab-size-divisible-by 1"
)
TENSOR = "--tensor-model-parallel-size 2"
STAGES = "--pipeline-model-parallel-size 2"
DATA = ""


def prove_warm(
    config: Config, world_size: int, *, steps: int | None = None, dropout: bool = True, timeout: float = 240.0
) -> Observation:
    """`prove`, on ranks that stay (so nothing may be patched for them) and with the reference in this process."""

    def run(world_size: int, function: Callable[..., Any], *args: Any, timeout: float, init: bool = True) -> list[Any]:
        return run_warm_ranks(world_size, function, *args, timeout=timeout) if init else [function(0, *args)]

    with patch("megatron_lab.verification.prove.run_ranks", run):
        return prove(config, world_size, steps=steps, dropout=dropout, timeout=timeout)


@functools.cache
def _observed(flags: str, world_size: int) -> bytes:
    """Pickled: of that a copy is made in a quarter of the time."""
    config = load([*FLAGS.split(), *flags.split()], world_size).config
    return pickled(prove_warm(config, world_size, steps=2))


def observed(flags: str = TENSOR) -> Observation:
    """A copy of what was seen of two ranks; whoever takes it may change it."""
    found: Observation = pickle.loads(_observed(flags, 2))
    return found


def first_finding(observation: Observation) -> ProofFinding:
    found: Diagnosis = diagnose(observation)
    assert not found.equal and found.worst.title
    return found.findings[0]


def parts(
    observation: Observation, of: Callable[[RankObservation], list[LocalTensor]], name: str
) -> Iterator[tuple[int, LocalTensor]]:
    """The parts of a tensor with their ranks."""
    for rank in observation.ranks:
        for part in of(rank):
            if part.name == name:
                yield rank.rank, part


def gradients(step: int = 0) -> Callable[[RankObservation], list[LocalTensor]]:
    return lambda rank: rank.steps[step].gradients


def scale_gradients(observation: Observation, factor: float) -> None:
    for rank in observation.ranks:
        for part in rank.steps[0].gradients:
            part.values.mul_(factor)


def random_like(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
