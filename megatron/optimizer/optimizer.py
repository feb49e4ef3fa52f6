"""One optimizer over shards, in two forms: FP32Optimizer updates the parameters themselves, Float16Optimizer float32 main copies.

The update rules are torch's (fused where the device has it) or NVIDIA apex's on request. Unscaling and clipping are one factor on
the gradient, which torch's fused kernels apply while they update, so it costs no pass over memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.parallel.shards import Shard

_MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class ShardedOptimizer:
    """Updates the `main` of each shard from its `grad`."""

    def __init__(self, shards: Sequence[Shard], config: OptimizerConfig) -> None:
        self.shards = list(shards)
        self._config = config
        self.num_updates = 0
        for shard in self.shards:
            shard.main.grad = shard.grad
        decayed = [shard.main for shard in self.shards if shard.record.decay]
        others = [shard.main for shard in self.shards if not shard.record.decay]
        groups = [{"params": decayed, "decays": True}, {"params": others, "decays": False}]
        self._torch = _make_torch_optimizer([group for group in groups if group["params"]], config)
        self._moments = () if config.optimizer == "sgd" and config.sgd_momentum == 0.0 else _MOMENTS[config.optimizer]
        self._steps: list[torch.Tensor] = []
        self._allocate_state()

    def step(self, learning_rate: float, weight_decay: float, factor: float) -> None:
        """One update.

        Args:
            factor: multiplies every gradient: clip coefficient / loss scale.
        """
        for group in self._torch.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        self._scale_gradients(factor)
        self._torch.step()
        self.num_updates += 1
        self.publish()

    def publish(self) -> None:
        """Carry updated mains to the compute parameters; nothing where they are the same tensor."""

    def moments(self, shard: Shard) -> dict[str, torch.Tensor]:
        """The optimizer state of a shard, by name, each of the shard's size."""
        return {name: self._torch.state[shard.main][name] for name in self._moments}

    def set_num_updates(self, count: int) -> None:
        """Continue after this many updates (the moments are loaded in place)."""
        self.num_updates = count
        for step in self._steps:
            step.fill_(float(count))
        if self._config.use_apex:  # which counts in the group
            for group in self._torch.param_groups:
                group["step"] = count

    def _allocate_state(self) -> None:
        # Eagerly, so that a checkpoint can be loaded into it before the first step.
        for shard in self.shards:
            state = self._torch.state[shard.main]
            for name in self._moments:
                state[name] = torch.zeros_like(shard.main)
            if self._config.optimizer == "adam" and not self._config.use_apex:
                device = shard.main.device if shard.main.device.type != "meta" else None
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                self._steps.append(state["step"])

    def _scale_gradients(self, factor: float) -> None:
        if factor == 1.0:
            self._torch.grad_scale = None  # type: ignore[attr-defined]
            return
        mains = self.shards
        if self._config.use_apex or any(shard.main.dtype == torch.float64 for shard in mains):
            # The fused kernels take the factor in float32, too coarse for float64.
            torch._foreach_mul_([shard.grad for shard in mains], factor)
            self._torch.grad_scale = None  # type: ignore[attr-defined]
        else:
            device = mains[0].main.device
            self._torch.grad_scale = torch.full((), 1.0 / factor, dtype=torch.float32, device=device)  # type: ignore[attr-defined]
            self._torch.found_inf = torch.zeros((), dtype=torch.float32, device=device)  # type: ignore[attr-defined]


class FP32Optimizer(ShardedOptimizer):
    """The parameters are their own mains (float32, or float64 in proofs)."""


class Float16Optimizer(ShardedOptimizer):
    """float32 main parameters beside 16-bit model parameters."""

    def publish(self) -> None:
        """Round the mains to the model's dtype."""
        torch._foreach_copy_([_part(shard) for shard in self.shards], [shard.main for shard in self.shards])


def _part(shard: Shard) -> torch.Tensor:
    return shard.param.detach().view(-1)[shard.piece.start : shard.piece.stop]


def make_optimizer(shards: Sequence[Shard], config: OptimizerConfig) -> ShardedOptimizer:
    """Float16Optimizer where mains are apart from the parameters, else FP32Optimizer."""
    apart = any(shard.main.dtype != shard.param.dtype for shard in shards)
    return (Float16Optimizer if apart else FP32Optimizer)(shards, config)


def _make_torch_optimizer(groups: list[dict], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The update rule.

    Raises:
        ValueError: apex is asked for and not installed.
    """
    adam = {"lr": 0.0, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
    sgd = {"lr": 0.0, "momentum": config.sgd_momentum}
    if config.use_apex:
        try:
            from apex.optimizers import FusedAdam, FusedSGD
        except ImportError as error:
            raise ValueError(
                "--use-apex, but NVIDIA apex is not installed (the package named apex on the Python index is another project). "
                "Leave the flag out: torch's fused optimizers do the same."
            ) from error
        return FusedAdam(groups, adam_w_mode=True, **adam) if config.optimizer == "adam" else FusedSGD(groups, **sgd)
    if config.optimizer == "adam":
        return torch.optim.AdamW(groups, fused=True, **adam)  # type: ignore[arg-type]
    return torch.optim.SGD(groups, fused=True, **sgd)  # type: ignore[arg-type]
