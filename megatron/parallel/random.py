"""Random numbers without generator state. The seed of each draw is derived from its purpose (for example dropout in a layer and
step), so no state is saved or restored."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


def compute_stable_seed(*values: int | str) -> int:
    """Return a 63-bit seed that is a hash of the given values.

    The seed is the same in every process, on every machine and in every version of this project.
    """
    text = "\x1f".join(f"{type(value).__name__}:{value}" for value in values)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class DropoutKey:
    """Key of the dropout masks of one microbatch in one step on one context-parallel rank. The seeds of the masks are derived from
    it.

    A step is identified by the number of samples consumed before it, a microbatch by its first sample. So the masks do not depend
    on the data-parallel rank or the pipeline stage that computes them. Context-parallel ranks hold different tokens and use
    different masks.

    Args:
        seed: seed of the run.
        step: number of samples consumed before the step.
        first_sample: index of the first sample of the microbatch.
        context_rank: rank within the context-parallel group.
    """

    seed: int
    step: int
    first_sample: int
    context_rank: int = 0

    def get_site_seed(self, layer: int, site: str, coordinate: int = 0) -> int:
        """Return the seed for one use of dropout in the model.

        Args:
            layer: index of the layer.
            site: name of the use within the layer, such as "attention".
            coordinate: tensor-parallel rank, if the activation is sharded over the tensor-parallel ranks; otherwise 0.
        """
        context_key = [f"context rank {self.context_rank}"] * (self.context_rank > 0)
        return compute_stable_seed(self.seed, self.step, self.first_sample, layer, site, coordinate, *context_key)


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the default generator of a device, immediately before numbers are drawn. The previous state is discarded."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        torch.cuda.default_generators[index].manual_seed(seed)
    else:
        torch.random.default_generator.manual_seed(seed)
