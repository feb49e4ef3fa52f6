"""Norms of gradient and weights for each layer (--log-layer-norms), and of all parameters (--log-params-norm)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron.optimizer.statistics import square_sums
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import Shard
from megatron.spec.weights import in_layer
from megatron.training.features import Feature, RunParts
from megatron.training.step import StepResult, TrainStep
from megatron.training.watch import Watcher


def place_of(name: str) -> str:
    """The part of the model that a parameter belongs to: "layers.17", "embedding", "final_norm", "output" or "mtp"."""
    layer, part = in_layer(name)
    return part.partition(".")[0] if layer is None else f"layers.{layer}"


def places(num_layers: int, tied: bool, depths: int = 0) -> list[str]:
    """Every part of the model, in the order of the depth."""
    return [
        "embedding",
        *(f"layers.{i}" for i in range(num_layers)),
        "final_norm",
        *([] if tied else ["output"]),
        *(["mtp"] if depths else []),
    ]


def layer_norms(
    shards: Sequence[Shard], gradient_squares: torch.Tensor, loss_scale: float, parts: Sequence[str], context: ParallelContext
) -> dict[str, float]:
    """Gradient and weight norm of each part over all ranks: {"grad-norm/layers.0": ..., "weight-norm/layers.0": ...}.

    Args:
        shards: those that this rank counts.
        gradient_squares: sums of squares of their gradients, float64 [len(shards)].
        loss_scale: the gradients are multiplied by it.
        parts: see `places`; the same on every rank.
    """
    index = torch.tensor([parts.index(place_of(s.record.name)) for s in shards], dtype=torch.long, device=context.device)
    sums = torch.zeros(2, len(parts), dtype=torch.float64, device=context.device)
    sums[0].index_add_(0, index, gradient_squares)
    sums[1].index_add_(0, index, square_sums([s.counted_main for s in shards], context.device))
    norms = all_reduce(sums, context.world).sqrt().tolist()
    return {
        **{f"grad-norm/{part}": norm / loss_scale for part, norm in zip(parts, norms[0], strict=True)},
        **{f"weight-norm/{part}": norm for part, norm in zip(parts, norms[1], strict=True)},
    }


def params_norm(shards: Sequence[Shard], context: ParallelContext) -> float:
    """Norm of all parameters, with each element counted once.

    Args:
        shards: those that this rank counts.
    """
    total = square_sums([s.counted_main for s in shards], context.device).sum()
    return float(all_reduce(total, context.world).sqrt())


class NormWatcher(Watcher):
    """Computes the norms that a line of the log has.

    Args:
        whole: compute the norm of all parameters.
        layers: compute the norms of each layer.
    """

    def __init__(self, step: TrainStep, *, whole: bool, layers: bool) -> None:
        model = step.model.config
        self._step, self._whole = step, whole
        self._parts = places(model.num_layers, model.tied, model.mtp_num_layers) if layers else None

    def log_values(self, result: StepResult | None) -> Mapping[str, float]:
        """The norms after the step."""
        step, found = self._step, {}
        if self._whole:
            found["params_norm"] = params_norm(step.counted_shards, step.context)
        if self._parts is not None and result is not None:
            found |= layer_norms(step.counted_shards, step.counted_squares, result.loss_scale, self._parts, step.context)
        return found


class NormFeature(Feature):
    """--log-params-norm and --log-layer-norms."""

    def watchers(self, run: RunParts) -> Sequence[Watcher]:
        """Compute the norms when a line of the log is due."""
        logging = run.config.logging
        return [NormWatcher(run.step, whole=logging.log_params_norm, layers=logging.log_layer_norms)]
