"""Random numbers without generator state: every draw has a key that says what it is for, so there is nothing to save or to lose."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


def stable_seed(*parts: int | str) -> int:
    """A 63-bit seed made of `parts`; the same in every process, on every machine, in every version."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class DropoutKey:
    """What dropout masks depend on within a run: the step and the microbatch.

    The samples consumed before it identify the step, and its first sample the microbatch. So the masks do not depend on the data
    rank or the pipeline stage that computes them. Context ranks hold different tokens, and draw for them differently.
    """

    seed: int
    step: int
    first_sample: int
    context_rank: int = 0

    def site(self, layer: int, site: str, coordinate: int = 0) -> int:
        """Seed of one dropout site; `coordinate` is the tensor rank where the activation is split over the tensor group."""
        of_context = [f"context rank {self.context_rank}"] * (self.context_rank > 0)
        return stable_seed(self.seed, self.step, self.first_sample, layer, site, coordinate, *of_context)


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the default generator of one device, just before a draw. Its former state is of no interest."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        torch.cuda.default_generators[index].manual_seed(seed)
    else:
        torch.random.default_generator.manual_seed(seed)
