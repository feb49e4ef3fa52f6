"""One transformer layer: attention and MLP (or experts) with their norms, added to the residual stream.

Shapes: `s` sequence, `b` microbatch, `h` hidden size, `n` local query heads, `d` size of a value head, `tp` tensor ranks. Under
sequence parallelism hidden states are [s/tp, b, h].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config.imports import import_object
from megatron.config.memory import RecomputeModule
from megatron.config.model import ModelConfig
from megatron.memory.recompute import RegionFunction, run_with_recompute
from megatron.model.attention import Attention
from megatron.model.mlp import MLP
from megatron.parallel.handles import OUTSIDE_CUDA_GRAPHS, Handles
from megatron.parallel.params import Scope
from megatron.parallel.random import DropoutKey, seed_device
from megatron.spec.layers import LatentAttentionSpec, LayerSpec
from megatron.spec.mlps import ExpertsSpec, MLPSpec
from megatron.spec.segments import Segment
from megatron.tensor_parallel.layers import Norm
from megatron.tensor_parallel.linear import RecomputableInput

if TYPE_CHECKING:
    from megatron.attention.documents import Documents
    from megatron.model.experts import MoELayer
    from megatron.model.key_value_cache import KeyValueCache
    from megatron.model.latent_attention import LatentAttention


# ---- Dropout with one seed per mask, so that eager and compiled code draw the same masks.

Seeds = Sequence[int] | torch.Tensor
"""Seeds of several dropout masks. A compiled graph receives the handle of a `GraphSeeds` instead of the numbers, because the
numbers would become constants of the graph."""


class GraphSeeds:
    """Seeds of the dropout masks in one call of a compiled graph.

    A seed must be a Python number to seed a device's random generator. A Python number in a graph would be a constant, but seeds
    change with every call. So the graph receives `handle`, an int64 tensor by which the dropout operation finds this object and its
    seeds. The object is freed after the call.
    """

    def __init__(self, values: Sequence[int], device: torch.device) -> None:
        self.values = values
        self.handle = _GRAPH_SEEDS.create(self, device)


_GRAPH_SEEDS: Handles[GraphSeeds] = Handles("set of dropout seeds")


def dropout(x: torch.Tensor, probability: float, seeds: Seeds | None, seed_index: int = 0) -> torch.Tensor:
    """Set elements to zero with the given probability and scale the others by 1 / (1 - probability). Without seeds, return x.

    Args:
        seeds: seeds of several masks, or None (evaluation).
        seed_index: index of the seed of this mask in `seeds`.
    """
    if seeds is None or probability == 0.0:
        return x
    if isinstance(seeds, torch.Tensor):
        return _dropout_with_mask(x, probability, seeds, seed_index)[0]
    seed_device(x.device, seeds[seed_index])
    return F.dropout(x, probability)


@torch.library.custom_op("megatron::dropout", mutates_args=(), tags=OUTSIDE_CUDA_GRAPHS)
def _dropout_with_mask(
    x: torch.Tensor, probability: float, seeds: torch.Tensor, seed_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply dropout and return the result and the mask that backward needs.

    On CUDA the mask is boolean. On CPU it is multiplied by 1 / (1 - probability), as in torch's dropout.
    """
    seed_device(x.device, _GRAPH_SEEDS.find(seeds).values[seed_index])
    if x.is_cuda:
        return torch.native_dropout(x, probability, True)
    scaled_mask = torch.empty_like(x).bernoulli_(1.0 - probability).div_(1.0 - probability)
    return x * scaled_mask, scaled_mask


@_dropout_with_mask.register_fake
def _(x: torch.Tensor, probability: float, seeds: torch.Tensor, seed_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool if x.is_cuda else x.dtype)


def _save_mask(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.scale = 1.0 / (1.0 - inputs[1])


def _dropout_backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    (mask,) = ctx.saved_tensors
    if grad.is_cuda:
        return torch.ops.aten.native_dropout_backward(grad, mask, ctx.scale), None, None, None
    return grad * mask, None, None, None


_dropout_with_mask.register_autograd(_dropout_backward, setup_context=_save_mask)


_DROPOUT_SITES = ("attention_output", "mlp_output")


# ---- The transformer layer


class Block(nn.Module):
    """Transformer layer: attention, and an MLP or experts. The residual stream has the dtype of the model, or float32 with
    --fp32-residual-connection.

    Args:
        selective: modules whose activations are recomputed in backward instead of being stored (--recompute-modules).
    """

    def __init__(
        self, scope: Scope, config: ModelConfig, spec: LayerSpec, layer: int, selective: Collection[RecomputeModule] = ()
    ) -> None:
        super().__init__()
        self.layer, self.dropout_probability = layer, config.hidden_dropout
        self.recomputes_norms, self.recomputes_mlp = "layernorm" in selective, "mlp" in selective
        self.sequence_parallel_rank = scope.tp.rank if scope.sequence_parallel else 0
        self.has_parallel_residual, self.residual_multiplier, self.dtype = (
            spec.parallel_residual,
            spec.residual_multiplier,
            scope.dtype,
        )

        def build_norm(name: str) -> Norm | None:
            return Norm(scope.get_child(name), spec.norm, config.hidden_size) if name in spec.norm_names else None

        self.attention_norm = build_norm("attention_norm")
        self.attention = _build_attention(scope.get_child("attention"), config, spec, layer, selective)
        self.attention_post_norm = build_norm("attention_post_norm")
        self.mlp_norm = build_norm("mlp_norm")
        self.mlp = _build_mlp(scope.get_child("mlp"), spec.mlp, layer, recomputes_activation="mlp_act" in selective)
        self.has_experts = isinstance(spec.mlp, ExpertsSpec)
        self.mlp_post_norm = build_norm("mlp_post_norm")
        self.compiled: Callable[..., torch.Tensor] | None = None
        """Compiled version of the layer, used where gradients are enabled (`megatron.model.compiled`)."""

    def forward(
        self,
        x: torch.Tensor,
        rotary: torch.Tensor | None,
        key: DropoutKey | None,
        documents: Documents | None = None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Map hidden states [s, b, h] (or [s/tp, b, h] under sequence parallelism) to the same shape."""
        seeds = (
            None
            if key is None or self.dropout_probability == 0.0
            else [key.get_site_seed(self.layer, site, self.sequence_parallel_rank) for site in _DROPOUT_SITES]
        )
        if self.compiled is not None and torch.is_grad_enabled():
            return self.compiled(x, rotary, key, documents, seeds)
        attention_output = self.attention.attend_hidden_states(
            self._apply_norm(self.attention_norm, x), rotary, key, documents, cache
        )
        return self.apply_residual_and_mlp(
            x, attention_output, seeds, partial(self.mlp, documents=documents, key=key) if self.has_experts else self.mlp
        )

    def compute_qkv(self, x: torch.Tensor, rotary: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute queries, keys and values from the layer's input, with the norm before attention."""
        return self.attention.project_qkv(self._apply_norm(self.attention_norm, x), rotary)

    def apply_residual_and_mlp(
        self, x: torch.Tensor, attention_output: torch.Tensor, seeds: Seeds | None, mlp: Callable[..., torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Apply everything in the layer after attention: the output projection, the MLP, and both residual connections.

        Args:
            x: the layer's input.
            attention_output: outputs of the local attention heads, [s, b, heads * head size].
            seeds: seeds of the two dropout masks; None switches dropout off.
            mlp: called instead of the MLP of the layer, for example experts with further arguments bound.
        """
        mlp = mlp or self.mlp
        residual, mlp_source = self.add_attention(x, attention_output, seeds)
        if self.recomputes_mlp:
            mlp_output = run_with_recompute(partial(self._apply_norm_and_mlp, mlp), mlp_source, modules=[self.mlp])
        else:
            mlp_output = mlp(self.compute_mlp_input(mlp_source))
        return self.add_mlp(residual, mlp_output, seeds)

    def add_attention(
        self, x: torch.Tensor, attention_output: torch.Tensor, seeds: Seeds | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the projected attention output to the residual stream.

        Returns:
            the new residual stream, and the tensor from which the MLP computes its input; both of the shape of x. With a parallel
            residual the second tensor is x.
        """
        residual = self._add_to_residual(x, self.attention.output(attention_output), self.attention_post_norm, seeds, 0)
        return residual, x if self.has_parallel_residual else residual

    def compute_mlp_input(self, mlp_source: torch.Tensor) -> torch.Tensor | RecomputableInput:
        """Return the input of the MLP: `mlp_source` after the norm, or without a norm `mlp_source` in the dtype of the model."""
        return self._apply_norm(self.mlp_norm, mlp_source)

    def add_mlp(self, x: torch.Tensor, mlp_output: torch.Tensor, seeds: Seeds | None) -> torch.Tensor:
        """Add the MLP's output to the residual stream x, after norm and dropout."""
        return self._add_to_residual(x, mlp_output, self.mlp_post_norm, seeds, 1)

    def _apply_norm_and_mlp(self, mlp: Callable[..., torch.Tensor], x: torch.Tensor, *, is_recompute: bool) -> torch.Tensor:
        return mlp(x.to(self.dtype) if self.mlp_norm is None else self.mlp_norm(x))

    def _apply_norm(self, norm: Norm | None, x: torch.Tensor) -> torch.Tensor | RecomputableInput:
        if norm is None:
            return x.to(self.dtype)
        return norm.build_recomputable(x) if self.recomputes_norms else norm(x)

    def _add_to_residual(
        self, x: torch.Tensor, branch_output: torch.Tensor, norm: Norm | None, seeds: Seeds | None, seed_index: int
    ) -> torch.Tensor:
        """Add the output of attention or MLP to the residual stream x, after norm and dropout.

        Args:
            branch_output: output of attention or MLP, of the shape of x.
            norm: norm applied to `branch_output`; None for no norm.
            seed_index: index of the dropout mask's seed in `seeds`.
        """
        branch = dropout(branch_output if norm is None else norm(branch_output), self.dropout_probability, seeds, seed_index)
        return x + branch if self.residual_multiplier == 1.0 else torch.add(x, branch, alpha=self.residual_multiplier)


def _build_mlp(scope: Scope, spec: MLPSpec | ExpertsSpec, layer: int, *, recomputes_activation: bool) -> MLP | MoELayer:
    """Build the MLP of a layer, or its mixture of experts if `spec` describes experts."""
    if isinstance(spec, ExpertsSpec):
        experts: MoELayer = import_object("megatron.model.experts:MoELayer")(
            scope, spec, layer, recomputes_activation=recomputes_activation
        )
        return experts
    return MLP(scope, spec, recomputes_activation=recomputes_activation)


def _build_attention(
    scope: Scope, config: ModelConfig, spec: LayerSpec, layer: int, selective: Collection[RecomputeModule]
) -> Attention | LatentAttention:
    """Build the attention layer: multi-head latent attention, or attention with one fused QKV projection."""
    recomputes_core, dropout = "core_attn" in selective, config.attention_dropout
    if isinstance(spec.attention, LatentAttentionSpec):
        recomputes_norms = "layernorm" in selective
        latent: LatentAttention = import_object("megatron.model.latent_attention:LatentAttention")(
            scope, spec.attention, spec.norm, layer, dropout, recomputes_core=recomputes_core, recomputes_norms=recomputes_norms
        )
        return latent
    return Attention(scope, spec.attention, spec.norm, layer, dropout, recomputes_core=recomputes_core)


# ---- How the layers of a segment store their activations between forward and backward.


@dataclass(frozen=True)
class ActivationPolicy:
    """Policy for the activations of one segment (consecutive layers) between forward and backward: keep them on the device,
    recompute them, or offload them."""

    recomputes: bool
    """Whether backward recomputes the layers of the segment."""
    recomputes_ahead: bool
    """Whether the schedule may recompute the layers in a separate operation before the backward operation."""
    offloads: bool
    """Whether the saved tensors are moved to host memory until backward."""
    is_last_offloaded: bool
    """Whether this is the last segment of the model chunk whose saved tensors are offloaded."""

    def run(
        self,
        function: RegionFunction,
        *inputs: torch.Tensor,
        modules: Sequence[nn.Module] = (),
        shared: Iterable[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Run the layers of the segment under this policy.

        Args:
            function: computes the layers, from `inputs`.
            inputs: the hidden states, then all other tensors with a gradient that the function reads, except parameters.
            modules: modules whose parameters the function uses.
            shared: tensors that the function saves and that are kept anyway, so offloading them would free no memory.

        Returns:
            the hidden states after the segment.
        """
        forward = (
            partial(run_with_recompute, function, modules=modules, is_recomputed_ahead=self.recomputes_ahead)
            if self.recomputes
            else function
        )
        offloader = None
        if self.offloads:
            from megatron.memory.offload import create_offloader

            offloader = create_offloader(
                inputs[0], shared=shared, is_last=self.is_last_offloaded, is_recomputed_ahead=self.recomputes_ahead
            )
        return forward(*inputs) if offloader is None else offloader.run(forward, *inputs)


def build_activation_policies(segments: Sequence[Segment]) -> list[ActivationPolicy]:
    """Build the activation policy of each segment of a model chunk (consecutive layers that are kept, recomputed or offloaded
    together), in the order of the forward."""
    last_recomputed = max((index for index, segment in enumerate(segments) if segment.is_recomputed), default=None)
    last_offloaded = max((index for index, segment in enumerate(segments) if segment.is_offloaded), default=None)
    return [
        ActivationPolicy(segment.is_recomputed, index == last_recomputed, segment.is_offloaded, index == last_offloaded)
        for index, segment in enumerate(segments)
    ]
