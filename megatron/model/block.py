"""One transformer layer: attention and MLP with their norms, added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config.imports import named
from megatron.config.memory import RecomputeModule
from megatron.config.model import ModelConfig
from megatron.memory.recompute import RegionFunction, recomputed
from megatron.model.attention import Attention
from megatron.model.mlp import MLP
from megatron.parallel.handles import OUTSIDE_CUDA_GRAPHS, Handles
from megatron.parallel.params import Scope
from megatron.parallel.random import DropoutKey, seed_device
from megatron.spec.layers import LatentAttentionSpec, LayerSpec
from megatron.spec.mlps import ExpertsSpec, MLPSpec
from megatron.spec.segments import Segment
from megatron.tensor_parallel.layers import Norm
from megatron.tensor_parallel.linear import Remade

if TYPE_CHECKING:
    from megatron.attention.documents import Documents
    from megatron.model.experts import Experts
    from megatron.model.key_value_cache import KeyValueCache
    from megatron.model.latent_attention import LatentAttention


# ---- Dropout whose mask follows from a seed of its own, the same in eager and in compiled code.

Seeds = Sequence[int] | torch.Tensor
"""Seeds of several masks. A compiled graph gets the handle of a `GraphSeeds`, so that they are not a part of it."""


class GraphSeeds:
    """The seeds of the dropout masks in one call of a compiled graph. They live as long as that call.

    The host needs their values, to seed the device with. So they stay in Python, and the graph gets a handle.
    """

    def __init__(self, values: Sequence[int], device: torch.device) -> None:
        self.values = values
        self.handle = _GRAPH_SEEDS.create(self, device)


_GRAPH_SEEDS: Handles[GraphSeeds] = Handles("set of dropout seeds")


def dropout(x: torch.Tensor, probability: float, seeds: Seeds | None, number: int = 0) -> torch.Tensor:
    """Zero elements with a probability and scale up the rest; without seeds, do nothing.

    Args:
        number: that of the seed which the mask follows from.
    """
    if seeds is None or probability == 0.0:
        return x
    if isinstance(seeds, torch.Tensor):
        return _dropout(x, probability, seeds, number)[0]
    seed_device(x.device, seeds[number])
    return F.dropout(x, probability)


@torch.library.custom_op("megatron::dropout", mutates_args=(), tags=OUTSIDE_CUDA_GRAPHS)
def _dropout(x: torch.Tensor, probability: float, seeds: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and what its backward needs: the kept elements, on CPU with their scale, as torch's dropout does there."""
    seed_device(x.device, _GRAPH_SEEDS.find(seeds).values[number])
    if x.is_cuda:
        return torch.native_dropout(x, probability, True)
    kept = torch.empty_like(x).bernoulli_(1.0 - probability).div_(1.0 - probability)
    return x * kept, kept


@_dropout.register_fake
def _(x: torch.Tensor, probability: float, seeds: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool if x.is_cuda else x.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.scale = 1.0 / (1.0 - inputs[1])


def _differentiate(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    (kept,) = ctx.saved_tensors
    if grad.is_cuda:
        return torch.ops.aten.native_dropout_backward(grad, kept, ctx.scale), None, None, None
    return grad * kept, None, None, None


_dropout.register_autograd(_differentiate, setup_context=_save)


_SITES = ("attention_output", "mlp_output")


# ---- The layer


class Block(nn.Module):
    """A layer as its spec says. The residual stream keeps its dtype: the model's, or float32 with --fp32-residual-connection.

    Args:
        selective: parts that are computed again in backward instead of being kept.
    """

    def __init__(
        self, scope: Scope, config: ModelConfig, spec: LayerSpec, layer: int, selective: Collection[RecomputeModule] = ()
    ) -> None:
        super().__init__()
        self.layer, self.probability = layer, config.hidden_dropout
        self.remakes_norms, self.recomputes_mlp = "layernorm" in selective, "mlp" in selective
        self.coordinate = scope.tp.index if scope.sequence_parallel else 0
        self.parallel, self.multiplier, self.dtype = spec.parallel, spec.residual_multiplier, scope.dtype

        def norm(name: str) -> Norm | None:
            return Norm(scope.child(name), spec.norm, config.hidden_size) if name in spec.norms else None

        self.attention_norm = norm("attention_norm")
        self.attention = _attention_of(scope.child("attention"), config, spec, layer, selective)
        self.attention_post_norm = norm("attention_post_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp = _mlp_of(scope.child("mlp"), spec.mlp, layer, remakes_activation="mlp_act" in selective)
        self.has_experts = isinstance(spec.mlp, ExpertsSpec)
        self.mlp_post_norm = norm("mlp_post_norm")
        self.compiled: Callable[..., torch.Tensor] | None = None
        """Runs the layer in its place, where there is a backward (`megatron.model.compiled`)."""

    def forward(
        self,
        x: torch.Tensor,
        rotary: torch.Tensor | None,
        key: DropoutKey | None,
        documents: Documents | None = None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Map hidden states [s, b, h] (or [s/n, b, h] under sequence parallelism) to the same shape."""
        seeds = None if key is None or self.probability == 0.0 else [key.site(self.layer, site, self.coordinate) for site in _SITES]
        if self.compiled is not None and torch.is_grad_enabled():
            return self.compiled(x, rotary, key, documents, seeds)
        attended = self.attention.mixed(self._normed(self.attention_norm, x), rotary, key, documents, cache)
        return self.after(x, attended, seeds, partial(self.mlp, documents=documents, key=key) if self.has_experts else self.mlp)

    def before(self, x: torch.Tensor, rotary: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What comes before attention: its queries, keys and values."""
        return self.attention.split(self._normed(self.attention_norm, x), rotary)

    def after(
        self, x: torch.Tensor, attended: torch.Tensor, seeds: Seeds | None, mlp: Callable[..., torch.Tensor] | None = None
    ) -> torch.Tensor:
        """What comes after attention.

        Args:
            x: the layer's input.
            attended: [s, b, n * d].
            seeds: of the two dropout masks; None switches dropout off.
            mlp: the layer's, with what experts are told besides.
        """
        mlp = mlp or self.mlp
        with_attention, source = self.until_mlp(x, attended, seeds)
        if self.recomputes_mlp:
            fed = recomputed(partial(self._norm_and_mlp, mlp), source, modules=[self.mlp])
        else:
            fed = mlp(self.mlp_input(source))
        return self.with_mlp(with_attention, fed, seeds)

    def until_mlp(self, x: torch.Tensor, attended: torch.Tensor, seeds: Seeds | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream with what attention gives, and the stream that the MLP is fed from; both of the shape of x."""
        with_attention = self._added(x, self.attention.output(attended), self.attention_post_norm, seeds, 0)
        return with_attention, x if self.parallel else with_attention

    def mlp_input(self, source: torch.Tensor) -> torch.Tensor | Remade:
        """What the MLP gets of the stream that it is fed from."""
        return self._normed(self.mlp_norm, source)

    def with_mlp(self, x: torch.Tensor, fed: torch.Tensor, seeds: Seeds | None) -> torch.Tensor:
        """The residual stream with what the MLP gives."""
        return self._added(x, fed, self.mlp_post_norm, seeds, 1)

    def _norm_and_mlp(self, mlp: Callable[..., torch.Tensor], x: torch.Tensor, *, again: bool) -> torch.Tensor:
        return mlp(x.to(self.dtype) if self.mlp_norm is None else self.mlp_norm(x))

    def _normed(self, norm: Norm | None, x: torch.Tensor) -> torch.Tensor | Remade:
        if norm is None:
            return x.to(self.dtype)
        return norm.remade(x) if self.remakes_norms else norm(x)

    def _added(self, x: torch.Tensor, given: torch.Tensor, norm: Norm | None, seeds: Seeds | None, number: int) -> torch.Tensor:
        """The residual stream with what attention or MLP gives."""
        dropped = dropout(given if norm is None else norm(given), self.probability, seeds, number)
        return x + dropped if self.multiplier == 1.0 else torch.add(x, dropped, alpha=self.multiplier)


def _mlp_of(scope: Scope, spec: MLPSpec | ExpertsSpec, layer: int, *, remakes_activation: bool) -> MLP | Experts:
    """An MLP, or experts."""
    if isinstance(spec, ExpertsSpec):
        experts: Experts = named("megatron.model.experts:Experts")(scope, spec, layer, remakes_activation=remakes_activation)
        return experts
    return MLP(scope, spec, remakes_activation=remakes_activation)


def _attention_of(
    scope: Scope, config: ModelConfig, spec: LayerSpec, layer: int, selective: Collection[RecomputeModule]
) -> Attention | LatentAttention:
    """The kind of attention that the spec says."""
    core, dropout = "core_attn" in selective, config.attention_dropout
    if isinstance(spec.attention, LatentAttentionSpec):
        remakes = "layernorm" in selective
        latent: LatentAttention = named("megatron.model.latent_attention:LatentAttention")(
            scope, spec.attention, spec.norm, layer, dropout, recomputes_core=core, remakes_norms=remakes
        )
        return latent
    return Attention(scope, spec.attention, spec.norm, layer, dropout, recomputes_core=core)


# ---- What happens to the tensors of neighbouring layers between forward and backward, as their segment says.


@dataclass(frozen=True)
class Treatment:
    """Says how the tensors of one segment are treated between forward and backward."""

    recomputed: bool
    ahead: bool
    """Whether the schedule runs the layers again before backward."""
    offloaded: bool
    """Whether what they save is moved to host memory until backward."""
    last_offloaded: bool
    """Whether they are the last of the chunk of which that is so."""

    def run(
        self,
        function: RegionFunction,
        *inputs: torch.Tensor,
        modules: Sequence[nn.Module] = (),
        shared: Iterable[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Run the layers.

        Args:
            function: computes them; see `recomputed`.
            inputs: all tensors with a gradient that it reads, but for parameters; first the hidden states.
            modules: those whose parameters it uses.
            shared: tensors that it saves and that others hold as long.
        """
        forward = partial(recomputed, function, modules=modules, ahead=self.ahead) if self.recomputed else function
        on_host = None
        if self.offloaded:
            from megatron.memory.offload import chosen_layer

            on_host = chosen_layer(inputs[0], shared=shared, last=self.last_offloaded, remade_ahead=self.ahead)
        return forward(*inputs) if on_host is None else on_host.run(forward, *inputs)


def treatments(segments: Sequence[Segment]) -> list[Treatment]:
    """Return the treatments of a chunk's segments, in the order of the forward."""
    last = max((place for place, segment in enumerate(segments) if segment.recomputed), default=None)
    last_offloaded = max((place for place, segment in enumerate(segments) if segment.offloaded), default=None)
    return [
        Treatment(segment.recomputed, place == last, segment.offloaded, place == last_offloaded)
        for place, segment in enumerate(segments)
    ]
