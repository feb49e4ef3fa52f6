"""Mixtures of experts: a layer against a plain loop over experts, its ways between ranks, a step against a dense one.

All in turns, forward and backward, in processor time of all ranks, which other work on the machine changes least, and which waiting
for the busiest rank does not enter. The routing is that of a fresh router, which is uneven. A *plain loop* is what a model of one
process is written as: for each expert the tokens that chose it are selected, multiplied and added up, by torch's autograd. A step's
dense model has one MLP as wide as all experts of a token together, so a token takes as many FLOPs, but for the router.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig, TokenDispatcher
from megatron.config.training import OptimizerConfig
from megatron.model.build import build_model
from megatron.model.experts import Experts
from megatron.model.inputs import ModelInputs
from megatron.optimizer.grad_scaler import GradScaler
from megatron.parallel.accumulate import GradSink, sink_of
from megatron.parallel.context import ParallelContext, make_context
from megatron.parallel.params import ParamTable, Scope, materialize
from megatron.parallel.topology import Topology
from megatron.spec.counts import flops_per_token
from megatron.spec.mlps import ExpertsSpec, experts_of
from megatron.spec.weights import model_weights
from megatron.training.step import TrainStep
from megatron_lab.benchmarks.peers import CLIP, LR, WEIGHT_DECAY
from megatron_lab.benchmarks.runner import Seconds, in_turns, show
from megatron_lab.benchmarks.shapes import Shape
from megatron_lab.verification.local_ranks import run_ranks

_CPU = torch.device("cpu")
_TIMEOUT = 3600.0


@dataclass(frozen=True)
class Settings:
    """What is run."""

    shape: Shape
    """Of each rank's microbatch."""
    experts: int = 8
    chosen: int = 2
    ranks: int = 4
    pairs: int = 7

    @property
    def dense(self) -> ModelConfig:
        """The model with one MLP in each layer."""
        plain = dataclasses.replace(self.shape.model, swiglu=True, disable_bias_linear=True)
        return dataclasses.replace(plain, ffn_hidden_size=4 * self.shape.hidden)

    @property
    def mixture(self) -> ModelConfig:
        """The model with experts, which together are as wide for a token."""
        width = 4 * self.shape.hidden // self.chosen
        found = dataclasses.replace(self.dense, num_experts=self.experts, moe_router_topk=self.chosen)
        return dataclasses.replace(found, moe_ffn_hidden_size=width, moe_aux_loss_coeff=1e-2)


def layer_of(settings: Settings, context: ParallelContext, dispatcher: TokenDispatcher) -> Experts:
    """A layer's experts as the model has them; each pass writes their gradients anew."""
    model, table = settings.mixture, ParamTable()
    weights = {one.name: one for one in model_weights(model, settings.shape.vocab)}
    scope = Scope(context, table, weights, torch.float32, sequence_parallel=False, gathers_tokens=dispatcher == "allgather").child(
        "layers.0.mlp"
    )
    layer = Experts(scope, experts_of(model), 0)
    materialize(layer, table, _CPU)
    generator = torch.Generator().manual_seed(1)
    for entry in table:
        whole = torch.randn(entry.record.shape, generator=generator) * 0.02
        with torch.no_grad():
            entry.param.copy_(whole[entry.record.held_box(context.axis_sizes, context.coordinates).index])
        gradient = torch.empty_like(entry.param, requires_grad=False)
        entry.param.grad_sink = GradSink(torch.float32, lambda: None, lambda gradient=gradient: gradient)  # type: ignore[attr-defined, misc]
    return layer


class PlainLoop(nn.Module):
    """The same of one process, one expert after the other."""

    def __init__(self, layer: Experts, spec: ExpertsSpec) -> None:
        super().__init__()
        self.chosen = spec.router.chosen
        weights = layer.router.weight, layer.experts.up.weight, layer.experts.down.weight
        self.router, self.up, self.down = (nn.Parameter(weight.detach().clone()) for weight in weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [s, b, h] to the same shape."""
        flat = x.flatten(0, 1)
        logits = F.linear(flat, self.router).float()
        best, numbers = logits.topk(self.chosen)
        weights, y = best.softmax(-1), torch.zeros_like(flat)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, place = torch.where(numbers == number)
            rows = flat[token]
            wide = F.silu(F.linear(rows, up[0])) * F.linear(rows, up[1])
            y.index_add_(0, token, F.linear(wide, down) * weights[token, place, None].to(flat.dtype))
        return y.view_as(x)


def _pass(module: nn.Module, x: torch.Tensor) -> None:
    """A forward and a backward, whose gradients take the place of the last ones."""
    for param in module.parameters():
        param.grad, sink = None, sink_of(param)
        if sink is not None:
            sink.written = False
    given = x.detach().requires_grad_()
    module(given).backward(torch.ones_like(x))


def _input(settings: Settings, seed: int) -> torch.Tensor:
    shape = settings.shape
    return torch.randn(shape.seq, shape.batch, shape.hidden, generator=torch.Generator().manual_seed(seed))


def measure_layer(settings: Settings) -> tuple[Seconds, Seconds]:
    """Seconds of a forward and a backward of a layer on one rank: the plain loop, and ours."""

    def live(rank: int) -> tuple[Seconds, Seconds]:
        layer, x = layer_of(settings, make_context(Topology(), rank, _CPU), "alltoall"), _input(settings, 0)
        plain = PlainLoop(layer, experts_of(settings.mixture))
        _agree(plain(x), layer(x))
        return in_turns(_seconds(_pass, plain, x), _seconds(_pass, layer, x), settings.pairs)

    return run_ranks(1, live, timeout=_TIMEOUT)[0]


def _agree(first: torch.Tensor, second: torch.Tensor) -> None:
    far = (first - second).norm() / first.norm()
    if far > 1e-5:
        raise RuntimeError(f"two ways to compute a layer differ by {far:.1e} of it")


def _seconds(action: Callable[..., object], *args: Any) -> Callable[[], float]:
    """Processor time of it, on all ranks together."""

    def timed() -> float:
        began = time.process_time()
        action(*args)
        took = torch.tensor(time.process_time() - began)
        if dist.is_initialized():
            dist.all_reduce(took)
        return took.item()

    return timed


def measure_ways(settings: Settings, dispatcher: TokenDispatcher) -> tuple[Seconds, Seconds]:
    """The same of several ranks: with all experts on each, and with the experts divided."""

    def live(rank: int) -> tuple[Seconds, Seconds]:
        x = _input(settings, rank)
        contexts = [make_context(Topology(dp=settings.ranks, ep=ep), rank, _CPU) for ep in (1, settings.ranks)]
        alone, divided = (layer_of(settings, context, dispatcher) for context in contexts)
        _agree(alone(x), divided(x))
        return in_turns(_seconds(_pass, alone, x), _seconds(_pass, divided, x), settings.pairs)

    return run_ranks(settings.ranks, live, timeout=_TIMEOUT)[0]


def measure_step(settings: Settings, ranks: int) -> tuple[Seconds, Seconds, float]:
    """Seconds of a step of two microbatches: the dense model, and experts on as many expert ranks; and the choices of the busiest
    expert over the mean."""

    def live(rank: int) -> tuple[Seconds, Seconds, float]:
        context = make_context(Topology(dp=ranks, ep=min(ranks, settings.experts)), rank, _CPU)
        batch = [_inputs(settings.shape, seed=ranks * number + rank) for number in range(2)]
        busiest = 0.0

        def once(step: TrainStep) -> None:
            nonlocal busiest
            balance = step.run(batch, iteration=1, learning_rate=LR, weight_decay=WEIGHT_DECAY).balance
            busiest = busiest if balance is None else balance.worst

        dense, mixture = (_train_step(model, settings, context) for model in (settings.dense, settings.mixture))
        return *in_turns(_seconds(once, dense), _seconds(once, mixture), settings.pairs), busiest

    return run_ranks(ranks, live, timeout=_TIMEOUT)[0]


def _inputs(shape: Shape, seed: int) -> ModelInputs:
    window = torch.randint(shape.vocab, (shape.seq + 1, shape.batch), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(shape.seq).unsqueeze(1).expand(-1, shape.batch)
    return ModelInputs(positions, window[:-1].contiguous(), window[1:].contiguous(), torch.ones(shape.seq, shape.batch))


def _train_step(config: ModelConfig, settings: Settings, context: ParallelContext) -> TrainStep:
    of_model: dict[str, Any] = {"dtype": torch.float32, "vocab_size": settings.shape.vocab, "seed": 0, "materialized": False}
    return TrainStep(
        build_model(config, context, sequence_parallel=False, **of_model),
        context,
        GradScaler(1.0),
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(clip_grad=CLIP),
        micro_batch_size=settings.shape.batch,
        skip_overflow=False,
    )


def run(settings: Settings) -> bool:
    """Print times and ratios; no bound is asked for."""
    shape, vocab = settings.shape, settings.shape.vocab
    flops = [flops_per_token(model, vocab) for model in (settings.dense, settings.mixture)]
    print(
        f"experts, {settings.experts} of which a token passes {settings.chosen}, {shape}, {torch.float32}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads a rank, {os.cpu_count()} cores; "
        f"{flops[1] / flops[0]:.3f} x the FLOPs of the dense model; processor time of all ranks"
    )
    show("1 rank", ("plain loop over experts", "layer"), measure_layer(settings))
    many = dataclasses.replace(settings, experts=8 * settings.experts, chosen=4 * settings.chosen)
    show("1 rank", (f"plain loop over {many.experts}, {many.chosen} of them", "layer of as many"), measure_layer(many))
    several = f"{settings.ranks} ranks"
    for dispatcher in ("alltoall", "allgather"):
        show(several, ("all experts on each rank", dispatcher), measure_ways(settings, dispatcher))  # type: ignore[arg-type]
    for ranks in (1, settings.ranks):
        dense, mixture, busiest = measure_step(settings, ranks)
        show("1 rank" if ranks == 1 else several, ("dense step", "step with experts"), (dense, mixture))
        print(f"{'':12}the busiest expert had {busiest:.2f} x the mean", flush=True)
    return True
