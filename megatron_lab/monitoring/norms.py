"""Norms of gradients and weights of each layer (--log-layer-norms), and of all parameters (--log-params-norm)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron.optimizer.statistics import compute_squared_norms
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import Shard
from megatron.spec.weights import split_layer_name
from megatron.training.callbacks import Callback
from megatron.training.features import Feature, RunComponents
from megatron.training.step import StepResult, TrainStep


def get_module_name(name: str) -> str:
    """Return the part of the model to which a parameter belongs: "layers.17", "embedding", "final_norm", "output" or "mtp"."""
    layer, local_name = split_layer_name(name)
    return local_name.partition(".")[0] if layer is None else f"layers.{layer}"


def list_module_names(num_layers: int, has_tied_embeddings: bool, num_mtp_layers: int = 0) -> list[str]:
    """List the modules of the model for which norms are logged, from the embedding to the output. `get_module_name` returns these
    names."""
    return [
        "embedding",
        *(f"layers.{i}" for i in range(num_layers)),
        "final_norm",
        *([] if has_tied_embeddings else ["output"]),
        *(["mtp"] if num_mtp_layers else []),
    ]


def compute_module_norms(
    shards: Sequence[Shard], grad_sq_sums: torch.Tensor, loss_scale: float, module_names: Sequence[str], context: ParallelContext
) -> dict[str, float]:
    """Compute the gradient norm and the weight norm of each module (layer, embedding, ...) over all ranks.

    Args:
        shards: shards that this rank counts in norms, so that each element is counted by exactly one rank.
        grad_sq_sums: sum of squares of each shard's gradient: float64 [len(shards)].
        loss_scale: loss scale by which the gradients are still multiplied.
        module_names: result of `list_module_names`, identical on every rank.

    Returns:
        Norms by metric name: {"grad-norm/layers.0": ..., "weight-norm/layers.0": ...}.
    """
    module_indices = torch.tensor(
        [module_names.index(get_module_name(s.record.name)) for s in shards], dtype=torch.long, device=context.device
    )
    sq_sums = torch.zeros(2, len(module_names), dtype=torch.float64, device=context.device)
    sq_sums[0].index_add_(0, module_indices, grad_sq_sums)
    sq_sums[1].index_add_(0, module_indices, compute_squared_norms([s.norm_main_param for s in shards], context.device))
    norms = all_reduce(sq_sums, context.world).sqrt().tolist()
    return {
        **{f"grad-norm/{name}": norm / loss_scale for name, norm in zip(module_names, norms[0], strict=True)},
        **{f"weight-norm/{name}": norm for name, norm in zip(module_names, norms[1], strict=True)},
    }


def compute_params_norm(shards: Sequence[Shard], context: ParallelContext) -> float:
    """Compute the norm of all parameters of the model over all ranks.

    Args:
        shards: shards that this rank counts in norms, so that each element is counted by exactly one rank.
    """
    total = compute_squared_norms([s.norm_main_param for s in shards], context.device).sum()
    return float(all_reduce(total, context.world).sqrt())


class NormCallback(Callback):
    """Callback that computes norms of gradients and weights for log lines.

    Args:
        logs_params: compute the norm of all parameters (--log-params-norm).
        logs_modules: compute the gradient and weight norms of each module (--log-layer-norms).
    """

    def __init__(self, step: TrainStep, *, logs_params: bool, logs_modules: bool) -> None:
        model = step.model.config
        self._step, self._logs_params = step, logs_params
        self._module_names = (
            list_module_names(model.num_layers, model.has_tied_embeddings, model.mtp_num_layers) if logs_modules else None
        )

    def log_values(self, result: StepResult | None) -> Mapping[str, float]:
        """Return the norms after the step by metric name, for the log line that is due."""
        step, norms = self._step, {}
        if self._logs_params:
            norms["params_norm"] = compute_params_norm(step.norm_shards, step.context)
        if self._module_names is not None and result is not None:
            norms |= compute_module_norms(
                step.norm_shards, step.shard_squared_norms, result.loss_scale, self._module_names, step.context
            )
        return norms


class NormFeature(Feature):
    """Feature of --log-params-norm and --log-layer-norms: norms of weights and gradients in log lines."""

    def build_callbacks(self, run: RunComponents) -> Sequence[Callback]:
        """Build the callback that computes norms when a log line is due."""
        logging = run.config.logging
        return [NormCallback(run.step, logs_params=logging.log_params_norm, logs_modules=logging.log_layer_norms)]
