"""The context of a rank at another place of the grid, by arithmetic."""

from __future__ import annotations

from dataclasses import replace

from megatron.parallel.context import ParallelContext
from megatron.parallel.topology import GRADIENT_AXES


def elsewhere(context: ParallelContext, *, tensor: int, data: int, stage: int) -> ParallelContext:
    """The context of the rank at another place. Its groups have only sizes and places.

    Args:
        tensor: place on the tensor axis.
        data: place in the gradient group.
        stage: place on the pipeline axis.
    """
    sizes, part = context.topology, context.fsdp_shard.size
    dp, cp = divmod(data, sizes.cp)
    places = {
        ("tp",): tensor,
        ("cp",): cp,
        ("dp",): dp,
        ("pp",): stage,
        GRADIENT_AXES: data,
        ("tp", *GRADIENT_AXES): tensor + sizes.tp * data,
        ("fsdp_shard",): data % part,
        ("fsdp_replica",): data // part,
    }
    groups = {key: replace(group, index=places.get(key, group.index)) for key, group in context._groups.items()}
    return replace(context, rank=sizes.rank(tp=tensor, cp=cp, dp=dp, pp=stage), _groups=groups)
