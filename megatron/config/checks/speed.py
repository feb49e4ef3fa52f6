"""Rules about compiled layers."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import Finding, change, rule, shown, without
from megatron.config.config import Config

_REMADE = ("layernorm", "mlp_act", "mlp")


@rule("compile_mode", reads=("compile", "compile_backend"))
def no_graph_is_replayed(config: Config, world_size: int) -> Iterator[Finding]:
    """The mode records CUDA graphs and replays them without Python. But gradients are handed to their buffers, masks seeded and
    communication started by Python within a layer."""
    if config.speed.compile_mode in ("reduce-overhead", "max-autotune"):
        nearest = [change(compile_mode="max-autotune-no-cudagraphs"), without(config, "compile_mode")]
        yield Finding(f"{shown(config, 'compile_mode')} cannot be used.", [nearest])


@rule("compile", "recompute_modules", reads=("recompute_granularity", "recompute_activations"))
def the_compiler_remakes_itself(config: Config, world_size: int) -> Iterator[Finding]:
    """A compiled layer chooses by itself what it keeps and what it makes again: norms and activations among it. Only attention is
    not a part of it."""
    modules = config.memory.recompute_modules
    if config.speed.compile and config.memory.recompute == "selective" and any(part in modules for part in _REMADE):
        yield Finding(
            f"--compile contradicts {shown(config, 'recompute_modules')}.",
            [change(recompute_modules=("core_attn",)), change(compile=False)],
        )
