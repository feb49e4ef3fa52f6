"""What the planner says of a run when it starts."""

from __future__ import annotations

from megatron.config.config import Config
from megatron.config.given import this_job
from megatron.parallel.context import ParallelContext
from megatron.training.features import Feature
from megatron_lab.planner.advice import advice


class AdviceFeature(Feature):
    """Advice on the settings, in the start-up log of every run."""

    def advice(self, config: Config, context: ParallelContext, vocab_size: int) -> list[str]:
        """Return a line for each setting that wastes much."""
        found = advice(config, context.topology.world_size, this_job().gpus_per_node, vocab_size)
        return [f"advice: {line}" for line in found]
