"""Rules about activation memory."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import Finding, at_most, change, rule, shown
from megatron.config.config import Config

AUTO = "auto"
_BY_STAGE = "recompute_layers_per_stage"

groups_within_the_model = at_most("recompute_num_layers", "num_layers", "The model has no more layers to compute again.")


@rule(_BY_STAGE, "pipeline_model_parallel_size", reads=("num_layers",))
def every_stage_has_its_number(config: Config, world_size: int) -> Iterator[Finding]:
    """One number of layers for each pipeline stage."""
    memory, stages, layers = config.memory, config.parallel.pipeline_model_parallel_size, config.model.num_layers
    numbers = memory.recomputed_by_stage
    if memory.recompute_layers_per_stage in (None, AUTO) or (
        numbers is not None and len(numbers) == stages and max(numbers) <= layers
    ):
        return
    kept = [min(number, layers) for number in numbers or ()][:stages]
    nearest = ",".join(map(str, [*kept, *(kept[-1:] or [1]) * (stages - len(kept))]))
    yield Finding(
        f"{shown(config, _BY_STAGE)} cannot be used.",
        [change(**{_BY_STAGE: nearest}), change(**{_BY_STAGE: AUTO}), change(**{_BY_STAGE: None})],
        f"It takes {AUTO}, or a number of layers, 0 to {layers}, for each of {stages} pipeline stage{'s' * (stages > 1)}.",
    )
