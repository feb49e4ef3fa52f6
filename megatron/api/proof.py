"""A proof of a layout as a function."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron.config.cli import LoadedConfig
from megatron.config.errors import ConfigError
from megatron.config.rules import violations

if TYPE_CHECKING:
    from megatron_lab.proofs.report import Proof
    from megatron_lab.verification.prove import ReferenceKind


def verify_layout(
    run: LoadedConfig,
    world_size: int,
    *,
    steps: int = 4,
    max_ranks: int = 8,
    reference: ReferenceKind = "plain",
    isolates: bool = False,
) -> list[Proof]:
    """Prove that a layout trains as one process does, as tools/verify_layout.py: the model is made small and trained in float64 on
    processes that are forked from this one, and compared loss by loss, gradient by gradient, weight by weight.

    Args:
        run: settings of the run, of any size (`settings(..., world_size=N)`).
        world_size: its ranks.
        steps: iterations that are compared.
        max_ranks: the most processes at once; larger layouts are reduced axis by axis.
        reference: `plain`, a model that shares no code with this one, or `self`, a run of the same code in one process, which is
            the one that knows parts of the user's own.
        isolates: look for the settings with which a difference comes and goes, for a minute at most.

    Returns:
        a proof for each small layout that stands for the given one: `equal`, and `findings` in the order of cause.

    Raises:
        ConfigError: the settings do not fit so many ranks.
        ValueError: the plain reference does not know a part of the model.
        RuntimeError: this process has used a GPU, after which it cannot fork.
    """
    from megatron_lab.proofs.verify import Effort, vocabulary_of
    from megatron_lab.proofs.verify import verify_layout as verify

    if problems := violations(run.config, world_size):
        raise ConfigError(problems)
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "this process has used a GPU, so that it cannot fork ranks: prove layouts before training, or in another"
        )
    effort = Effort(steps, max_ranks, isolates, reference)
    return verify(run.config, world_size, vocabulary_of(run.config.data), effort)
