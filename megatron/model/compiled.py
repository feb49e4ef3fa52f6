"""Layers through torch's compiler: their operations beside products, attention and communication fused to few kernels.

Compiled is a layer without its hooks. Where attention is one kernel of torch, the whole layer is one graph. Attention with dropout,
within documents, with a window, a cap or sinks, or whose largest scores are asked for stays as it is, between two graphs: what lies
before it, and what lies after. So do experts, which get as many tokens as chosen: what lies before them is one graph, and what is
done with what they give another, if that is more than to add it.

Equal layers share one compilation: parameters are inputs, linear layers and seeds of dropout masks enter by handles
(`megatron/parallel/handles.py`). In evaluation and generation, without a backward, layers run as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.attention.backends import kernels_in_use
from megatron.attention.core import one_kernel
from megatron.attention.documents import Documents
from megatron.config.precision import CompileBackend, SpeedConfig
from megatron.model.block import Block, GraphSeeds
from megatron.parallel.random import DropoutKey
from megatron.parallel.torch_private import compiler_mode_options, configure_compiler
from megatron.tensor_parallel.layers import LinearLayer, entered, vector_users

_MOST_COMPILATIONS = 64
"""Compilations of one function: for layers, lengths and settings that differ. torch would stop at 8."""


_Rest = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""What a layer gives; or where it has experts the residual stream, and what these get."""


def _whole(block: Block, x: torch.Tensor, rotary: torch.Tensor | None, seeds: torch.Tensor | None) -> _Rest:
    return _after(block, x, block.attention.attend(*block.before(x, rotary), None, None, None), seeds)


def _before(block: Block, x: torch.Tensor, rotary: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Each by itself, so that attention does not keep what they are parts of.
    q, k, v = (part.contiguous() for part in block.before(x, rotary))
    return q, k, v


def _after(block: Block, x: torch.Tensor, attended: torch.Tensor, seeds: torch.Tensor | None) -> _Rest:
    if not block.has_experts:
        return block.after(x, attended, seeds)
    with_attention, source = block.until_mlp(x, attended, seeds)
    fed = block.mlp_input(source)
    assert isinstance(fed, torch.Tensor), "the compiler remakes norms by itself"
    return with_attention, fed


def _added(block: Block, x: torch.Tensor, fed: torch.Tensor, seeds: torch.Tensor | None) -> torch.Tensor:
    return block.with_mlp(x, fed, seeds)


def cache_tag() -> str:
    """Return a tag for the keys of cached graphs that names the kernels which attention may use.

    A graph contains the kernel that torch chose when the graph was traced, but torch's key lacks the switches of this choice.
    Without the tag a run would get the kernel of an earlier run from the cache, and ranks with and without a hit would compute
    differently.
    """
    return "/".join([os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", ""), *kernels_in_use()])


def separate_graphs() -> None:
    """Take no graph with other kernels of attention, from the cache or from memory. Call it when they have been chosen.

    No guard of a graph in memory checks the kernels: a second model in a process, or one that was built before the choice, would
    run with those of the first.
    """
    if torch.compiler.config.cache_key_tag != (tag := cache_tag()):
        torch.compiler.reset()
        torch.compiler.config.cache_key_tag = tag


@dataclass(frozen=True)
class BlockCompiler:
    """How layers are compiled."""

    backend: CompileBackend = "inductor"
    mode: str = "default"
    defers: bool = False
    """Whether the schedule puts weight gradients off."""

    @classmethod
    def of(cls, speed: SpeedConfig, *, defers: bool) -> BlockCompiler | None:
        """As the settings say; None to compile nothing."""
        return cls(speed.compile_backend, speed.compile_mode, defers) if speed.compile else None

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of a layer, compiled at its first call."""
        options: dict[str, Any] = {}
        if self.backend == "inductor":
            # A variable of the environment (TORCHINDUCTOR_CUDAGRAPHS) could ask for CUDA graphs in any mode. They replay no Python,
            # and what a deferred weight gradient waits with would be overwritten by the next replay.
            options = {**compiler_mode_options(self.mode), "triton.cudagraphs": False}
            if torch.are_deterministic_algorithms_enabled():
                # Choose no reduction by its measured time: ranks, and later starts, could choose another order of its sum.
                options["deterministic"] = True
            if self.defers:
                # What a weight gradient waits with must not become the memory of something else: the compiler sees its last use in
                # the operation that puts it off.
                options |= {"allow_buffer_reuse": False, "inplace_buffers": False}
        return torch.compile(function, backend=self.backend, options=options or None, fullgraph=True, dynamic=False)

    def compile(self, blocks: Sequence[Block], device: torch.device) -> None:
        """Let layers run compiled.

        Args:
            device: that of the parameters in training; they may still be on the meta device.
        """
        separate_graphs()
        configure_compiler(max_recompilations=_MOST_COMPILATIONS, max_recompilations_of_all=4 * _MOST_COMPILATIONS)
        functions = tuple(self.compiled(function) for function in (_whole, _before, _after, _added))
        for block in blocks:
            for module in block.modules():
                if isinstance(module, LinearLayer):
                    module.create_handle(device)
            block.compiled = CompiledBlock(block, *functions)


class CompiledBlock:
    """A layer that runs compiled."""

    def __init__(
        self,
        block: Block,
        whole: Callable[..., _Rest],
        before: Callable[..., Any],
        after: Callable[..., _Rest],
        added: Callable[..., torch.Tensor],
    ) -> None:
        self._block, of_experts = block, [*block.mlp.modules()] if block.has_experts else []
        self._users = [user for user in vector_users(block) if user not in of_experts]
        self._whole, self._before, self._after, self._added = whole, before, after, added

    def __call__(
        self,
        x: torch.Tensor,
        rotary: torch.Tensor | None,
        key: DropoutKey | None,
        documents: Documents | None,
        seeds: Sequence[int] | None,
    ) -> torch.Tensor:
        """See `Block.forward`; `seeds` of its dropout masks."""
        block = self._block
        graph_seeds = None if seeds is None else GraphSeeds(seeds, x.device)
        masks = None if graph_seeds is None else graph_seeds.handle
        attention = block.attention
        one = one_kernel(attention.scores, len(x) * attention.sequence_ranks)
        one = one and attention.largest is None
        if one and documents is None and not attention.recomputes_core and (key is None or attention.dropout == 0.0):
            with entered(self._users):
                found = self._whole(block, x, rotary, masks)
        else:
            with entered(self._users):
                q, k, v = self._before(block, x, rotary)
            attended = attention.attend(q, k, v, key, documents, None)
            with entered(self._users):
                found = self._after(block, x, attended, masks)
        if isinstance(found, torch.Tensor):
            return found
        with_attention, source = found
        fed = block.mlp(source, documents, key)
        if masks is None and block.mlp_post_norm is None:
            return block.with_mlp(with_attention, fed, None)
        with entered(self._users):
            return self._added(block, with_attention, fed, masks)
