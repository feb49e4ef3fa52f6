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
    sizes, part, of_expert = context.topology, context.get_fsdp_shard_group().size, context.get_fsdp_shard_group(("edp",)).size
    dp, cp = divmod(data, sizes.cp)
    rank = sizes.find_rank(tp=tensor, cp=cp, dp=dp, pp=stage)
    edp = sizes.all_coordinates(rank)["edp"]
    places = {
        ("tp",): tensor,
        ("cp",): cp,
        ("dp",): dp,
        ("pp",): stage,
        GRADIENT_AXES: data,
        ("tp", *GRADIENT_AXES): tensor + sizes.tp * data,
        ("fsdp_shard",): data % part,
        ("fsdp_replica",): data // part,
        ("edp",): edp,
        ("fsdp_shard", "edp"): edp % of_expert,
        ("fsdp_replica", "edp"): edp // of_expert,
    }
    groups = {key: replace(group, rank=places.get(key, group.rank)) for key, group in context._groups.items()}
    return replace(context, rank=rank, _groups=groups)
