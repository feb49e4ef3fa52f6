"""A scope: what a module needs to declare its parameters. It carries the global name, the place and dtype, and the table."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.params import Init, ParamRecord, ParamTable, Split
from megatron.parallel.topology import GRADIENT_AXES


@dataclass(frozen=True)
class Scope:
    """Passed to every module that holds parameters; `child` goes one name deeper."""

    context: ParallelContext
    table: ParamTable
    dtype: torch.dtype
    sequence_parallel: bool = False
    prefix: str = ""
    chunk: int = 0

    def child(self, name: str) -> Scope:
        """The scope of a submodule."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    @property
    def tp(self) -> Group:
        """The tensor group."""
        return self.context.group("tp")

    def parameter(
        self,
        module: nn.Module,
        attribute: str,
        shape: tuple[int, ...],
        *,
        split: Split | None = None,
        init: Init = Init(),
        decay: bool = True,
        partial_over_tp: bool = False,
        chunks: tuple[int, ...] | None = None,
    ) -> nn.Parameter:
        """Declare a parameter: enter its record in the table and register the local part on the module, on the meta device.

        Args:
            shape: global shape without padding.
            split: the dimension that the tensor group divides, if any.
            decay: weight decay applies, and it is a matrix (its last two dimensions); else a vector (biases, norms) or several.
            partial_over_tp: each tensor rank sees only part of what the (replicated) parameter acts on, so its gradient is a
                partial sum over the tensor group: everything replicated under sequence parallelism, and what acts on a rank's own
                heads.
            chunks: pipeline chunks that hold it, if not only this one.
        """
        record = ParamRecord(
            name=f"{self.prefix}{attribute}",
            shape=shape,
            splits=() if split is None else (split,),
            partial_over=("tp", *GRADIENT_AXES) if partial_over_tp else GRADIENT_AXES,
            chunks=chunks or (self.chunk,),
            init=init,
            decay=decay,
            fsdp_dim=len(shape) - 2 if decay else len(shape) - 1,
            matrix_dims=(len(shape) - 2, len(shape) - 1) if decay else None,
        )
        local = torch.empty(record.local_shape(self.context.axis_sizes), dtype=self.dtype, device="meta")
        module.register_parameter(attribute, nn.Parameter(local))
        self.table.add(record, module, attribute, self.chunk)
        return self.table[record.name].param
