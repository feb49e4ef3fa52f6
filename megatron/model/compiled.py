"""Compilation of transformer layers by torch.compile, which fuses the operations around matrix products, attention and
communication.

A layer is compiled without its hooks. If attention is one fused kernel of torch, the whole layer is one graph. Otherwise attention
runs eagerly between two graphs, one of the operations before it and one of the operations after it. Attention runs eagerly with
dropout, within documents, with a window, a softcap or sinks, with recomputation, or with recorded logits. Experts always run
eagerly, because the number of their tokens varies. The operations before them are one graph. The operations after them are another
graph, unless they are a plain addition.

Layers of the same structure share one compilation: parameters are inputs of the graph, and linear layers and dropout seeds are
passed as handles (`megatron/parallel/handles.py`). Without gradients, in evaluation and generation, layers run eagerly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.attention.backends import get_enabled_kernels
from megatron.attention.core import has_fused_kernel
from megatron.attention.documents import Documents
from megatron.config.precision import CompileBackend, SpeedConfig
from megatron.model.block import Block, GraphSeeds
from megatron.parallel.random import DropoutKey
from megatron.parallel.torch_private import configure_compiler, get_compiler_mode_options
from megatron.tensor_parallel.layers import LinearLayer, find_vector_modules, vectors_as_graph_inputs

_MAX_COMPILATIONS = 64
"""Limit of compilations per function, for layers, lengths and settings that differ. The limit of torch is 8."""


_LayerOutput = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Output of a layer; or, for a layer with experts, the residual stream and the input of the experts."""


def _run_layer(block: Block, x: torch.Tensor, rotary: torch.Tensor | None, seeds: torch.Tensor | None) -> _LayerOutput:
    return _run_after_attention(block, x, block.attention.attend(*block.compute_qkv(x, rotary), None, None, None), seeds)


def _run_before_attention(
    block: Block, x: torch.Tensor, rotary: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Separate tensors: as views, they would keep the output of the fused projection alive.
    q, k, v = (heads.contiguous() for heads in block.compute_qkv(x, rotary))
    return q, k, v


def _run_after_attention(block: Block, x: torch.Tensor, attention_output: torch.Tensor, seeds: torch.Tensor | None) -> _LayerOutput:
    if not block.has_experts:
        return block.apply_residual_and_mlp(x, attention_output, seeds)
    residual, mlp_source = block.add_attention(x, attention_output, seeds)
    mlp_input = block.compute_mlp_input(mlp_source)
    assert isinstance(mlp_input, torch.Tensor), "torch.compile decides itself whether to recompute norms"
    return residual, mlp_input


def _run_after_experts(block: Block, x: torch.Tensor, mlp_output: torch.Tensor, seeds: torch.Tensor | None) -> torch.Tensor:
    return block.add_mlp(x, mlp_output, seeds)


def compute_cache_tag() -> str:
    """Return a tag with the names of the enabled attention kernels, for the keys of torch's cache of compiled graphs.

    A graph contains the attention kernel that torch chose when it traced the graph. But torch's key does not contain the switches
    that determine this choice. Without the tag, a run could load a graph with the kernel of an earlier run. Ranks that find a graph
    in the cache and ranks that compile would then compute different values.
    """
    return "/".join([os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", ""), *get_enabled_kernels()])


def discard_stale_graphs() -> None:
    """Discard compiled graphs that were traced when other attention kernels were enabled. Call it after the kernels are chosen.

    Torch does not check the kernels before it uses a graph in memory. Without this call, a second model in the process would run
    with the kernels of the first model. So would a model that was compiled before the choice.
    """
    if torch.compiler.config.cache_key_tag != (tag := compute_cache_tag()):
        torch.compiler.reset()
        torch.compiler.config.cache_key_tag = tag


@dataclass(frozen=True)
class BlockCompiler:
    """Compiles transformer layers by torch.compile, with the settings of a run (backend and mode)."""

    backend: CompileBackend = "inductor"
    mode: str = "default"
    defers_weight_grads: bool = False
    """Whether the schedule computes weight gradients in separate operations, after the backward pass."""

    @classmethod
    def of(cls, speed: SpeedConfig, *, defers_weight_grads: bool) -> BlockCompiler | None:
        """Build the compiler from the settings, or return None if --compile is not set."""
        return cls(speed.compile_backend, speed.compile_mode, defers_weight_grads) if speed.compile else None

    def compile_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of a layer with torch.compile. The function is compiled at its first call."""
        options: dict[str, Any] = {}
        if self.backend == "inductor":
            # The environment variable TORCHINDUCTOR_CUDAGRAPHS could switch CUDA graphs on in any mode. They replay no Python code,
            # and the next replay would overwrite the inputs of a deferred weight gradient.
            options = {**get_compiler_mode_options(self.mode), "triton.cudagraphs": False}
            if torch.are_deterministic_algorithms_enabled():
                # Do not choose reduction kernels by measured time: other ranks or later runs could sum in another order.
                options["deterministic"] = True
            if self.defers_weight_grads:
                # The memory of the inputs of a deferred weight gradient must not be reused: the compiler sees their last use in the
                # operation that defers it.
                options |= {"allow_buffer_reuse": False, "inplace_buffers": False}
        return torch.compile(function, backend=self.backend, options=options or None, fullgraph=True, dynamic=False)

    def compile_blocks(self, blocks: Sequence[Block], device: torch.device) -> None:
        """Compile layers: their forward then runs in compiled graphs.

        Args:
            device: device of the parameters in training. They may still be on the meta device now.
        """
        discard_stale_graphs()
        configure_compiler(max_recompilations=_MAX_COMPILATIONS, max_recompilations_of_all=4 * _MAX_COMPILATIONS)
        compiled_functions = tuple(
            self.compile_function(function)
            for function in (_run_layer, _run_before_attention, _run_after_attention, _run_after_experts)
        )
        for block in blocks:
            for module in block.modules():
                if isinstance(module, LinearLayer):
                    module.create_handle(device)
            block.compiled = CompiledBlock(block, *compiled_functions)


class CompiledBlock:
    """Callable that runs the forward of one transformer layer in compiled graphs."""

    def __init__(
        self,
        block: Block,
        run_layer: Callable[..., _LayerOutput],
        run_before_attention: Callable[..., Any],
        run_after_attention: Callable[..., _LayerOutput],
        run_after_experts: Callable[..., torch.Tensor],
    ) -> None:
        self._block, expert_modules = block, [*block.mlp.modules()] if block.has_experts else []
        self._vector_users = [user for user in find_vector_modules(block) if user not in expert_modules]
        self._run_layer, self._run_before_attention, self._run_after_attention, self._run_after_experts = (
            run_layer,
            run_before_attention,
            run_after_attention,
            run_after_experts,
        )

    def __call__(
        self,
        x: torch.Tensor,
        rotary: torch.Tensor | None,
        key: DropoutKey | None,
        documents: Documents | None,
        seeds: Sequence[int] | None,
    ) -> torch.Tensor:
        """Compute the forward of the layer in compiled graphs, with the same result as `Block.forward`.

        Args:
            seeds: seeds of the layer's dropout masks; None for no dropout.
        """
        block = self._block
        graph_seeds = None if seeds is None else GraphSeeds(seeds, x.device)
        seed_handle = None if graph_seeds is None else graph_seeds.handle
        attention = block.attention
        has_kernel = has_fused_kernel(attention.score_spec, len(x) * attention.num_sequence_ranks)
        has_kernel = has_kernel and attention.logit_tracker is None
        if has_kernel and documents is None and not attention.recomputes_core and (key is None or attention.dropout == 0.0):
            with vectors_as_graph_inputs(self._vector_users):
                output = self._run_layer(block, x, rotary, seed_handle)
        else:
            with vectors_as_graph_inputs(self._vector_users):
                q, k, v = self._run_before_attention(block, x, rotary)
            attention_output = attention.attend(q, k, v, key, documents, None)
            with vectors_as_graph_inputs(self._vector_users):
                output = self._run_after_attention(block, x, attention_output, seed_handle)
        if isinstance(output, torch.Tensor):
            return output
        residual, mlp_input = output
        mlp_output = block.mlp(mlp_input, documents, key)
        if seed_handle is None and block.mlp_post_norm is None:
            return block.add_mlp(residual, mlp_output, None)
        with vectors_as_graph_inputs(self._vector_users):
            return self._run_after_experts(block, residual, mlp_output, seed_handle)
