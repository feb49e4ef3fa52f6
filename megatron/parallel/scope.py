"""A scope: what a module needs to declare its parameters. It carries their names, the spec's weights, dtype and table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron.config.parallel import ContextWay
from megatron.config.precision import Fp8
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.params import ParamRecord, ParamTable
from megatron.spec.weights import Weight

if TYPE_CHECKING:
    from megatron.parallel.overlap import Overlap


@dataclass(frozen=True)
class Scope:
    """Passed to every module that holds parameters. `child` goes one name deeper."""

    context: ParallelContext
    table: ParamTable
    weights: Mapping[str, Weight]
    """The weights of the whole model in the spec, by global name."""
    dtype: torch.dtype
    sequence_parallel: bool = False
    overlap: Overlap | None = None
    """How products overlap with the collectives along the sequence; None: they take turns."""
    fp8: Fp8 | None = None
    """How linear layers compute in 8 bits; None: in the dtype."""
    context_ways: tuple[ContextWay, ...] = ()
    """How context ranks share keys and values in each layer, where there are several."""
    gathers_tokens: bool = False
    """Whether experts get their tokens by allgather, and not by alltoall."""
    lora_scale: float = 1.0
    """Factor of what adapters give."""
    prefix: str = ""
    chunk: int = 0
    num_chunks: int = 1

    def child(self, name: str) -> Scope:
        """The scope of a submodule."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    @property
    def tp(self) -> Group:
        """The tensor group."""
        return self.context.group("tp")

    def weight(self, attribute: str) -> Weight:
        """The spec's entry for a parameter of this module."""
        return self.weights[f"{self.prefix}{attribute}"]

    def has(self, attribute: str) -> bool:
        """Whether the spec has a parameter of this module."""
        return f"{self.prefix}{attribute}" in self.weights

    def parameter(self, module: nn.Module, attribute: str, weight: Weight | None = None) -> None:
        """Declare a parameter: enter its record in the table and register the local part on the module, on the meta device.

        Args:
            weight: its entry in the spec; by default the one of this name.
        """
        weight = weight or self.weight(attribute)
        ends = (0, self.num_chunks - 1) if self.num_chunks > 1 else (0,)
        record = ParamRecord.of(
            weight,
            tensor_size=self.tp.size,
            sequence_parallel=self.sequence_parallel,
            chunks=ends if weight.tied else (self.chunk,),
        )
        # Steps of a bias are much smaller than the bias, so 16 bits would lose them.
        dtype = self.dtype if record.by_counts is None else torch.promote_types(self.dtype, torch.float32)
        local = torch.empty(record.local_shape(self.context.axis_sizes), dtype=dtype, device="meta")
        module.register_parameter(attribute, nn.Parameter(local, requires_grad=not record.frozen))
        self.table.add(record, module, attribute, self.chunk)

    def optional(self, module: nn.Module, attribute: str) -> None:
        """Declare a parameter if the spec has it; else the attribute is None."""
        if self.has(attribute):
            self.parameter(module, attribute)
        else:
            module.register_parameter(attribute, None)
