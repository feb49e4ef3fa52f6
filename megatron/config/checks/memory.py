"""Rules about activation memory."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import Finding, at_most, change, rule, shown, without
from megatron.config.config import Config

AUTO = "auto"
_BY_STAGE = "recompute_layers_per_stage"

_MODULES = "recompute_modules"

groups_within_the_model = at_most("recompute_num_layers", "num_layers", "The model has no more layers to compute again.")
moved_within_the_model = at_most("cpu_offloading_num_layers", "num_layers", "The model has no more layers to move to host memory.")


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


@rule("recompute_activations", "recompute_granularity")
def one_granularity(config: Config, world_size: int) -> Iterator[Finding]:
    """--recompute-activations is selective recompute."""
    if config.memory.recompute_activations and config.memory.recompute_granularity == "full":
        message = f"--recompute-activations contradicts {shown(config, 'recompute_granularity')}."
        yield Finding(message, [without(config, "recompute_activations"), without(config, "recompute_granularity")])


@rule(_MODULES, reads=("recompute_granularity", "recompute_activations"))
def parts_are_told_once(config: Config, world_size: int) -> Iterator[Finding]:
    """Each part is computed again once: mlp takes its activation with it."""
    modules = config.memory.recompute_modules
    if config.memory.recompute != "selective":
        return
    if not modules:
        yield Finding("--recompute-modules names no part.", [without(config, _MODULES)], "Selective recompute takes at least one.")
    kept = tuple(dict.fromkeys(part for part in modules if part != "mlp_act" or "mlp" not in modules))
    if kept != modules:
        others = tuple(part for part in kept if part != "mlp")
        nearest = [change(recompute_modules=kept)] + [change(recompute_modules=(*others, "mlp_act"))] * ("mlp_act" in modules)
        yield Finding(f"{shown(config, _MODULES)} names a part twice.", nearest)
