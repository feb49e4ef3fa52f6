"""Benchmarks of mixture-of-experts layers.

1. A layer compared with a plain loop over its experts.
2. Experts sharded over ranks compared with all experts on every rank.
3. A training step compared with a step of a dense model.

The two sides of each comparison run forward and backward alternately. Times are processor time summed over all ranks. Other
programs on the machine hardly change this time, and it excludes the time that ranks wait for the busiest rank. The router has its
initial weights, so it distributes tokens unevenly over the experts.

The *plain loop* is the usual implementation in a single process: for each expert, select its tokens, multiply them, and add the
results, with torch's autograd. The dense model has one MLP as wide as all experts of a token together. So a token takes the same
number of FLOPs in both models, except for the router.
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
from megatron.model.experts import MoELayer
from megatron.model.inputs import ModelInputs
from megatron.optimizer.grad_scaler import GradScaler
from megatron.parallel.accumulate import GradSink, get_grad_sink
from megatron.parallel.context import ParallelContext, make_context
from megatron.parallel.params import ParamTable, Scope, materialize
from megatron.parallel.topology import Topology
from megatron.spec.counts import count_flops_per_token
from megatron.spec.mlps import ExpertsSpec, build_experts_spec
from megatron.spec.weights import iter_weights
from megatron.training.step import TrainStep
from megatron_lab.benchmarks.peers import CLIP, LR, WEIGHT_DECAY
from megatron_lab.benchmarks.runner import Durations, print_comparison, run_pair_in_turns
from megatron_lab.benchmarks.shapes import Shape
from megatron_lab.verification.local_ranks import run_ranks

_CPU = torch.device("cpu")
_TIMEOUT = 3600.0


@dataclass(frozen=True)
class Settings:
    """Sizes of the models in the mixture-of-experts benchmarks, number of ranks, and number of repetitions."""

    shape: Shape
    """Shape of the model and of each rank's microbatch."""
    num_experts: int = 8
    top_k: int = 2
    num_ranks: int = 4
    pairs: int = 7

    @property
    def dense(self) -> ModelConfig:
        """Settings of the dense model, which has one MLP in each layer."""
        config = dataclasses.replace(self.shape.model, swiglu=True, disable_bias_linear=True)
        return dataclasses.replace(config, ffn_hidden_size=4 * self.shape.hidden)

    @property
    def mixture(self) -> ModelConfig:
        """Settings of the model with experts. The experts that a token uses are together as wide as the dense MLP."""
        expert_ffn_size = 4 * self.shape.hidden // self.top_k
        config = dataclasses.replace(self.dense, num_experts=self.num_experts, moe_router_topk=self.top_k)
        return dataclasses.replace(config, moe_ffn_hidden_size=expert_ffn_size, moe_aux_loss_coeff=1e-2)


def build_layer(settings: Settings, context: ParallelContext, dispatcher: TokenDispatcher) -> MoELayer:
    """Build this rank's part of a mixture-of-experts layer. Its random weights are the same however many ranks share the experts.

    Each backward overwrites the weight gradients of the previous backward.
    """
    model, table = settings.mixture, ParamTable()
    weights = {weight_spec.name: weight_spec for weight_spec in iter_weights(model, settings.shape.vocab)}
    scope = Scope(
        context, table, weights, torch.float32, sequence_parallel=False, uses_allgather_dispatch=dispatcher == "allgather"
    ).get_child("layers.0.mlp")
    layer = MoELayer(scope, build_experts_spec(model), 0)
    materialize(layer, table, _CPU)
    generator = torch.Generator().manual_seed(1)
    for entry in table:
        full_weight = torch.randn(entry.record.shape, generator=generator) * 0.02
        with torch.no_grad():
            entry.param.copy_(full_weight[entry.record.get_local_slice(context.axis_sizes, context.coordinates).index])
        grad = torch.empty_like(entry.param, requires_grad=False)
        entry.param.grad_sink = GradSink(torch.float32, lambda: None, lambda grad=grad: grad)  # type: ignore[attr-defined, misc]
    return layer


class ExpertLoop(nn.Module):
    """Mixture-of-experts layer in one process that computes one expert after another, with the weights of a given layer."""

    def __init__(self, layer: MoELayer, spec: ExpertsSpec) -> None:
        super().__init__()
        self.top_k = spec.router.top_k
        weights = layer.router.weight, layer.experts.up.weight, layer.experts.down.weight
        self.router, self.up, self.down = (nn.Parameter(weight.detach().clone()) for weight in weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map hidden states [s, b, h] (sequence, batch, hidden) to outputs of the same shape."""
        flat = x.flatten(0, 1)
        logits = F.linear(flat, self.router).float()
        top_logits, expert_ids = logits.topk(self.top_k)
        router_weights, y = top_logits.softmax(-1), torch.zeros_like(flat)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, k_index = torch.where(expert_ids == expert)
            rows = flat[token]
            intermediate = F.silu(F.linear(rows, up[0])) * F.linear(rows, up[1])
            y.index_add_(0, token, F.linear(intermediate, down) * router_weights[token, k_index, None].to(flat.dtype))
        return y.view_as(x)


def _run_pass(module: nn.Module, x: torch.Tensor) -> None:
    """Run a forward and a backward of a module on the input `x`. The gradients replace those of the previous backward."""
    for param in module.parameters():
        param.grad, sink = None, get_grad_sink(param)
        if sink is not None:
            sink.is_written = False
    leaf = x.detach().requires_grad_()
    module(leaf).backward(torch.ones_like(x))


def _create_input(settings: Settings, seed: int) -> torch.Tensor:
    shape = settings.shape
    return torch.randn(shape.seq, shape.batch, shape.hidden, generator=torch.Generator().manual_seed(seed))


def measure_layer(settings: Settings) -> tuple[Durations, Durations]:
    """Measure the processor time of a forward and backward of one mixture-of-experts layer on one rank.

    Returns:
        The seconds of the plain loop over experts, and the seconds of the framework's layer. Each list has one value per
        repetition.
    """

    def run_rank(rank: int) -> tuple[Durations, Durations]:
        layer, x = build_layer(settings, make_context(Topology(), rank, _CPU), "alltoall"), _create_input(settings, 0)
        expert_loop = ExpertLoop(layer, build_experts_spec(settings.mixture))
        _require_agreement(expert_loop(x), layer(x))
        return run_pair_in_turns(_make_cpu_timer(_run_pass, expert_loop, x), _make_cpu_timer(_run_pass, layer, x), settings.pairs)

    return run_ranks(1, run_rank, timeout=_TIMEOUT)[0]


def _require_agreement(first: torch.Tensor, second: torch.Tensor) -> None:
    """Check that the outputs of two implementations of the same layer agree.

    Raises:
        RuntimeError: the relative difference of the outputs is above 1e-5.
    """
    relative_error = (first - second).norm() / first.norm()
    if relative_error > 1e-5:
        raise RuntimeError(
            "internal error of the benchmark: the outputs of two implementations of the layer have a relative difference of "
            f"{relative_error:.1e}, more than 1e-5, so their times cannot be compared. Please report this"
        )


def _make_cpu_timer(action: Callable[..., object], *args: Any) -> Callable[[], float]:
    """Return a function that runs `action` and returns the processor time of the call in seconds, summed over all ranks."""

    def timer() -> float:
        start = time.process_time()
        action(*args)
        duration = torch.tensor(time.process_time() - start)
        if dist.is_initialized():
            dist.all_reduce(duration)
        return duration.item()

    return timer


def measure_dispatch(settings: Settings, dispatcher: TokenDispatcher) -> tuple[Durations, Durations]:
    """Measure the processor time of a forward and backward of one mixture-of-experts layer on several ranks, summed over the ranks.

    Returns:
        The seconds with all experts on each rank, and the seconds with experts sharded over the ranks. Each list has one value per
        repetition.
    """

    def run_rank(rank: int) -> tuple[Durations, Durations]:
        x = _create_input(settings, rank)
        contexts = [make_context(Topology(dp=settings.num_ranks, ep=ep), rank, _CPU) for ep in (1, settings.num_ranks)]
        replicated, sharded = (build_layer(settings, context, dispatcher) for context in contexts)
        _require_agreement(replicated(x), sharded(x))
        return run_pair_in_turns(_make_cpu_timer(_run_pass, replicated, x), _make_cpu_timer(_run_pass, sharded, x), settings.pairs)

    return run_ranks(settings.num_ranks, run_rank, timeout=_TIMEOUT)[0]


def measure_step(settings: Settings, num_ranks: int) -> tuple[Durations, Durations, float]:
    """Measure training steps of two microbatches, with experts sharded over min(num_ranks, num_experts) ranks.

    Returns:
        The processor times of a step of the dense model, and those of a step with experts, in seconds; and the largest number of
        tokens of one expert as a multiple of the mean over the experts.
    """

    def run_rank(rank: int) -> tuple[Durations, Durations, float]:
        context = make_context(Topology(dp=num_ranks, ep=min(num_ranks, settings.num_experts)), rank, _CPU)
        batch = [_build_inputs(settings.shape, seed=num_ranks * microbatch + rank) for microbatch in range(2)]
        busiest_ratio = 0.0

        def run_step(step: TrainStep) -> None:
            nonlocal busiest_ratio
            router_metrics = step.run(batch, iteration=1, learning_rate=LR, weight_decay=WEIGHT_DECAY).expert_balance
            busiest_ratio = busiest_ratio if router_metrics is None else router_metrics.max_busiest_expert

        dense, mixture = (_build_train_step(model, settings, context) for model in (settings.dense, settings.mixture))
        return *run_pair_in_turns(
            _make_cpu_timer(run_step, dense), _make_cpu_timer(run_step, mixture), settings.pairs
        ), busiest_ratio

    return run_ranks(num_ranks, run_rank, timeout=_TIMEOUT)[0]


def _build_inputs(shape: Shape, seed: int) -> ModelInputs:
    window = torch.randint(shape.vocab, (shape.seq + 1, shape.batch), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(shape.seq).unsqueeze(1).expand(-1, shape.batch)
    return ModelInputs(positions, window[:-1].contiguous(), window[1:].contiguous(), torch.ones(shape.seq, shape.batch))


def _build_train_step(config: ModelConfig, settings: Settings, context: ParallelContext) -> TrainStep:
    model_options: dict[str, Any] = {
        "dtype": torch.float32,
        "vocab_size": settings.shape.vocab,
        "seed": 0,
        "should_materialize": False,
    }
    return TrainStep(
        build_model(config, context, sequence_parallel=False, **model_options),
        context,
        GradScaler(1.0),
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(clip_grad=CLIP),
        micro_batch_size=settings.shape.batch,
        skip_overflow=False,
    )


def run(settings: Settings) -> bool:
    """Print the times and ratios of the three comparisons: layer with a plain loop over experts, sharded experts with all experts
    on each rank, and training step with that of a dense model. Return True, because there is no limit."""
    shape, vocab = settings.shape, settings.shape.vocab
    flops = [count_flops_per_token(model, vocab) for model in (settings.dense, settings.mixture)]
    print(
        f"{settings.num_experts} experts, of which a token uses {settings.top_k}, {shape}, {torch.float32}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads per rank, {os.cpu_count()} cores; "
        f"{flops[1] / flops[0]:.3f} x the FLOPs of the dense model; processor time of all ranks"
    )
    print_comparison("1 rank", ("plain loop over experts", "layer"), measure_layer(settings))
    larger = dataclasses.replace(settings, num_experts=8 * settings.num_experts, top_k=4 * settings.top_k)
    print_comparison(
        "1 rank",
        (f"plain loop over {larger.num_experts} experts, {larger.top_k} per token", "layer of as many experts"),
        measure_layer(larger),
    )
    ranks_text = f"{settings.num_ranks} ranks"
    for dispatcher in ("alltoall", "allgather"):
        print_comparison(ranks_text, ("all experts on each rank", dispatcher), measure_dispatch(settings, dispatcher))  # type: ignore[arg-type]
    for num_ranks in (1, settings.num_ranks):
        dense, mixture, busiest_ratio = measure_step(settings, num_ranks)
        print_comparison("1 rank" if num_ranks == 1 else ranks_text, ("dense step", "step with experts"), (dense, mixture))
        print(f"{'':12}the busiest expert had {busiest_ratio:.2f} x the mean number of tokens", flush=True)
    return True
