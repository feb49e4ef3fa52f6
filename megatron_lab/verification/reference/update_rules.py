"""Update rules in float64 on full parameters. Each rule returns the new weights and updates the optimizer state of the parameter.

A norm weight, bias or attention sink is a vector; all other parameters are matrices. The last two dimensions of a matrix parameter
are the matrix. A parameter with more dimensions holds several matrices, and a vector parameter with two dimensions several vectors;
rules treat each of them separately.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_lab.verification.reference.muon import MuonRule

ParamState = dict[str, Tensor]
"""Optimizer state of one parameter by name; empty before the first update."""


@dataclass(frozen=True)
class RuleOptions:
    """Options of the update rules, except Adam's betas and epsilon. The docstring of an option starts with the name of the rule
    that uses it."""

    momentum: float = 0.0
    """sgd: factor by which the old momentum is multiplied before the gradient is added."""
    block_size: int = 256
    """adam8bit: number of consecutive elements of a row of a quantized moment that share a scale."""
    lion_betas: tuple[float, float] = (0.9, 0.99)
    """lion: decay rates of the momentum, for the update direction and for the stored momentum."""
    beta3: float = 0.9999
    """ademamix: decay rate of the slow average of the gradients."""
    alpha: float = 8.0
    """ademamix: number by which the slow average is multiplied in the update."""
    slow_warmup: int = 0
    """ademamix: number of updates during which alpha and beta3 rise to their final values."""
    beta2_decay: float = 0.8
    """adafactor: exponent x in the decay rate 1 - step^-x of the average of squared gradients."""
    clip_threshold: float = 1.0
    """adafactor: maximum root mean square of the update direction (gradient / square root of the second moment) of a
    parameter."""
    factored_eps: float = 1e-30
    """adafactor: constant that is added to the squared gradients before they are averaged."""
    adafactor_beta1: float = 0.0
    """adafactor: decay rate of the average of the updates (momentum); 0 for no momentum."""
    min_scale: float | None = None
    """adafactor: the learning rate is multiplied by the root mean square of the weights (relative step), but at least by this
    number. None for an absolute step."""
    muon: MuonRule = field(default_factory=MuonRule)


@dataclass(frozen=True)
class ParamStep:
    """Inputs of one update of one parameter: weights, gradient, optimizer state, learning rate, weight decay and Adam's options."""

    weights: Tensor
    grad: Tensor
    """Gradient after clipping."""
    state: ParamState
    step: int
    """Index of the update, counted from 1."""
    rate: float
    decay: float
    betas: tuple[float, float]
    eps: float
    is_vector: bool
    name: str = ""

    def update_average(self, name: str, value: Tensor, beta: float) -> Tensor:
        """Update an exponential moving average in the optimizer state, and return the new average. An average starts at zero.

        Args:
            name: name of the average in the optimizer state.
            value: new value, which enters the average with the weight 1 - beta.
            beta: weight of the old average.
        """
        self.state[name] = beta * self.state.get(name, torch.zeros_like(value)) + (1 - beta) * value
        return self.state[name]

    @property
    def dims(self) -> tuple[int, ...]:
        """Dimensions over which a rule sums to get one number (such as a norm) per matrix or vector: the last two for a matrix, the
        last for a vector."""
        return (-1,) if self.is_vector else (-2, -1)


def apply_rule(param: ParamStep, optimizer: str, options: RuleOptions) -> Tensor:
    """Apply the update rule named `optimizer` to a parameter, and return the new weights."""
    return _RULES[optimizer](param, options)


def _compute_adam_direction(param: ParamStep) -> Tensor:
    beta1, beta2 = param.betas
    m = param.update_average("m", param.grad, beta1) / (1 - beta1**param.step)
    v = param.update_average("v", param.grad.square(), beta2) / (1 - beta2**param.step)
    return m / (v.sqrt() + param.eps)


def adam(param: ParamStep, options: RuleOptions) -> Tensor:
    """Return the weights after an update by AdamW, with decoupled weight decay (Loshchilov and Hutter 2019)."""
    return param.weights * (1 - param.rate * param.decay) - param.rate * _compute_adam_direction(param)


def adam8bit(param: ParamStep, options: RuleOptions) -> Tensor:
    """Return the weights after an update by Adam, whose moments are quantized in blocks between updates (Dettmers et al. 2022). The
    moments of vectors (norm weights, biases) are not quantized."""
    weights = adam(param, options)
    if not param.is_vector:
        param.state["m"] = quantize_moment(param.state["m"], options.block_size, signed=True)
        param.state["v"] = quantize_moment(param.state["v"], options.block_size, signed=False)
    return weights


def quantize_moment(tensor: Tensor, block_size: int, *, signed: bool) -> Tensor:
    """Quantize a moment of Adam to 8 bits: round each element to the nearest of 256 levels times the largest absolute value of its
    block. A block is `block_size` consecutive elements of a row.

    The levels are 0 and 1, and for each k from 0 to 6 the midpoints of equal intervals of [10^(k-7), 10^(k-6)]. There are 2^k
    intervals if `signed`, otherwise 2^(k+1). If `signed`, the negatives of the midpoints are levels too.
    """
    level_groups = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for k in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (k if signed else k + 1) + 1, dtype=torch.float64) * 10.0 ** (k - 6)
        middles = (edges[1:] + edges[:-1]) / 2
        level_groups += [middles, -middles] if signed else [middles]
    levels = torch.cat(level_groups)
    assert len(levels) == 256
    blocks = []
    for block in tensor.split(block_size, dim=-1):
        scale = block.abs().amax(-1, keepdim=True)
        nearest = (block / scale.clamp(min=1e-300)).unsqueeze(-1).sub(levels).abs().argmin(-1)
        blocks.append(levels[nearest] * scale)
    return torch.cat(blocks, -1)


def sgd(param: ParamStep, options: RuleOptions) -> Tensor:
    """Return the weights after an update by SGD with momentum. Weight decay x weights is added to the gradient."""
    momentum = param.state.get("m", torch.zeros_like(param.grad))
    param.state["m"] = options.momentum * momentum + param.grad + param.decay * param.weights
    return param.weights - param.rate * param.state["m"]


def lion(param: ParamStep, options: RuleOptions) -> Tensor:
    """Return the weights after an update by Lion (Chen et al. 2023, algorithm 2)."""
    beta1, beta2 = options.lion_betas
    momentum = param.state.get("m", torch.zeros_like(param.grad))
    direction = (beta1 * momentum + (1 - beta1) * param.grad).sign()
    param.update_average("m", param.grad, beta2)
    return param.weights - param.rate * (direction + param.decay * param.weights)


def ademamix(param: ParamStep, options: RuleOptions) -> Tensor:
    """Return the weights after an update by AdEMAMix (Pagliardini et al. 2024, algorithm 1 with the schedules of section 3)."""
    beta1, beta2 = param.betas
    alpha, beta3 = options.alpha, options.beta3
    if param.step < options.slow_warmup:
        warmup_progress = param.step / options.slow_warmup
        alpha = warmup_progress * alpha
        half_life = warmup_progress * math.log(0.5) / math.log(beta3) + (
            (1 - warmup_progress) * math.log(0.5) / math.log(beta1) if beta1 else 0.0
        )
        beta3 = 0.5 ** (1 / half_life)
    slow = param.update_average("slow", param.grad, beta3)
    m = param.update_average("m", param.grad, beta1) / (1 - beta1**param.step)
    v = param.update_average("v", param.grad.square(), beta2) / (1 - beta2**param.step)
    return param.weights - param.rate * ((m + alpha * slow) / (v.sqrt() + param.eps) + param.decay * param.weights)


def adafactor(param: ParamStep, options: RuleOptions) -> Tensor:
    """Return the weights after an update by Adafactor (Shazeer and Stern 2018, algorithm 4 for matrices and 5 for vectors)."""
    beta2 = 1 - param.step**-options.beta2_decay
    grad_squared = param.grad.square() + options.factored_eps
    if param.is_vector:
        v = param.update_average("v", grad_squared, beta2)
    else:
        rows = param.update_average("rows", grad_squared.mean(-1), beta2)
        columns = param.update_average("columns", grad_squared.mean(-2), beta2)
        v = rows[..., :, None] * columns[..., None, :] / rows.mean(-1)[..., None, None]
    direction = param.grad / v.sqrt()
    direction = direction / (direction.square().mean(param.dims, keepdim=True).sqrt() / options.clip_threshold).clamp(min=1.0)
    rate = torch.tensor(param.rate, dtype=torch.float64)
    if options.min_scale is not None:
        rate = rate * param.weights.square().mean(param.dims, keepdim=True).sqrt().clamp(min=options.min_scale)
    step = rate * direction
    if options.adafactor_beta1:
        step = param.update_average("m", step, options.adafactor_beta1)
    return param.weights - rate * param.decay * param.weights - step


def lamb(param: ParamStep, options: RuleOptions) -> Tensor:
    """Return the weights after an update by LAMB (You et al. 2020, algorithm 2). Vectors (norm weights, biases) are updated by
    Adam."""
    if param.is_vector:
        return adam(param, options)
    direction = _compute_adam_direction(param) + param.decay * param.weights
    weight_norm, direction_norm = (x.square().sum(param.dims, keepdim=True).sqrt() for x in (param.weights, direction))
    trust_ratio = torch.where((weight_norm > 0) & (direction_norm > 0), weight_norm / direction_norm, torch.ones_like(weight_norm))
    return param.weights - param.rate * trust_ratio * direction


def muon(param: ParamStep, options: RuleOptions) -> Tensor:
    """Return the weights after an update by Muon, which orthogonalizes the momentum of the matrices in the layers. Other parameters
    are updated by Adam."""
    muon_rule = options.muon
    if not muon_rule.applies_to(param.name):
        return adam(param, options)
    m = param.update_average("m", param.grad, muon_rule.momentum)
    momentum = muon_rule.momentum * m + (1 - muon_rule.momentum) * param.grad if muon_rule.nesterov else m
    return param.weights * (1 - param.rate * param.decay) - param.rate * muon_rule.compute_direction(param.name, momentum)


_RULES = {
    "adam": adam,
    "sgd": sgd,
    "lion": lion,
    "ademamix": ademamix,
    "adafactor": adafactor,
    "adam8bit": adam8bit,
    "lamb": lamb,
    "muon": muon,
}
