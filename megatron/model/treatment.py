"""What happens to the tensors of neighbouring layers between forward and backward, as their segment says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from megatron.memory.recompute import RegionFunction, recomputed
from megatron.spec.segments import Segment


@dataclass(frozen=True)
class Treatment:
    """That of one segment."""

    recomputed: bool
    ahead: bool
    """Whether the schedule runs the layers again before backward."""
    offloaded: bool
    """Whether what they save is moved to host memory until backward."""
    last_offloaded: bool
    """Whether they are the last of the chunk of which that is so."""

    def run(
        self,
        function: RegionFunction,
        *inputs: torch.Tensor,
        modules: Sequence[nn.Module] = (),
        shared: Iterable[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Run the layers.

        Args:
            function: computes them; see `recomputed`.
            inputs: all tensors with a gradient that it reads, but for parameters; first the hidden states.
            modules: those whose parameters it uses.
            shared: tensors that it saves and that others hold as long.
        """
        forward = partial(recomputed, function, modules=modules, ahead=self.ahead) if self.recomputed else function
        on_host = None
        if self.offloaded:
            from megatron.memory.offload import chosen_layer

            on_host = chosen_layer(inputs[0], shared=shared, last=self.last_offloaded, remade_ahead=self.ahead)
        return forward(*inputs) if on_host is None else on_host.run(forward, *inputs)


def treatments(segments: Sequence[Segment]) -> list[Treatment]:
    """Those of a chunk's segments, in the order of the forward."""
    last = max((place for place, segment in enumerate(segments) if segment.recomputed), default=None)
    last_offloaded = max((place for place, segment in enumerate(segments) if segment.offloaded), default=None)
    return [
        Treatment(segment.recomputed, place == last, segment.offloaded, place == last_offloaded)
        for place, segment in enumerate(segments)
    ]
