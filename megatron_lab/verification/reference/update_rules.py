"""Update rules of whole parameters, written out in float64: each gives the new weights, and keeps what it needs.

A matrix is the last two dimensions of what is no norm and no bias. Several in one tensor are matrices of their own, and so are
several vectors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_lab.verification.reference.muon import MuonUpdate

Kept = dict[str, Tensor]
"""What is kept of one parameter; empty before the first update."""


@dataclass(frozen=True)
class Numbers:
    """What rules have of their own, beside Adam's betas and eps."""

    momentum: float = 0.0
    """The momentum of sgd."""
    block_size: int = 256
    """Elements of a row that share a scale in adam8bit."""
    lion_betas: tuple[float, float] = (0.9, 0.99)
    beta3: float = 0.9999
    alpha: float = 8.0
    slow_warmup: int = 0
    """These three are ademamix's."""
    decay_rate: float = 0.8
    clip_threshold: float = 1.0
    factor_eps: float = 1e-30
    factor_beta1: float = 0.0
    least_scale: float | None = None
    """For a relative step. This and the four before are adafactor's."""
    muon: MuonUpdate = field(default_factory=MuonUpdate)


@dataclass(frozen=True)
class One:
    """One parameter in one update."""

    weights: Tensor
    grad: Tensor
    """Clipped."""
    kept: Kept
    number: int
    """Number of the update, from 1."""
    rate: float
    decay: float
    betas: tuple[float, float]
    eps: float
    is_vector: bool
    name: str = ""

    def average(self, name: str, of: Tensor, beta: float) -> Tensor:
        """Take something into an average that begins at zero."""
        self.kept[name] = beta * self.kept.get(name, torch.zeros_like(of)) + (1 - beta) * of
        return self.kept[name]

    @property
    def unit(self) -> tuple[int, ...]:
        """Dimensions of a matrix or of a vector."""
        return (-1,) if self.is_vector else (-2, -1)


def updated(one: One, optimizer: str, numbers: Numbers) -> Tensor:
    """The weights after an update."""
    return _RULES[optimizer](one, numbers)


def _adams(one: One) -> Tensor:
    beta1, beta2 = one.betas
    m = one.average("m", one.grad, beta1) / (1 - beta1**one.number)
    v = one.average("v", one.grad.square(), beta2) / (1 - beta2**one.number)
    return m / (v.sqrt() + one.eps)


def adam(one: One, numbers: Numbers) -> Tensor:
    """Decoupled weight decay (Loshchilov and Hutter 2019)."""
    return one.weights * (1 - one.rate * one.decay) - one.rate * _adams(one)


def adam8bit(one: One, numbers: Numbers) -> Tensor:
    """Adam whose moments are rounded between updates, in blocks (Dettmers et al. 2022); vectors as by adam."""
    weights = adam(one, numbers)
    if not one.is_vector:
        one.kept["m"] = rounded(one.kept["m"], numbers.block_size, signed=True)
        one.kept["v"] = rounded(one.kept["v"], numbers.block_size, signed=False)
    return weights


def rounded(tensor: Tensor, block_size: int, *, signed: bool) -> Tensor:
    """Each element as the nearest of 256 values, times the largest absolute value of its block of a row.

    The values are 0, 1, and for each k from 0 to 6 the middles of 2^k parts (if unsigned 2^(k+1)) of [10^(k-7), 10^(k-6)]; if
    signed also their negatives.
    """
    values = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for k in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (k if signed else k + 1) + 1, dtype=torch.float64) * 10.0 ** (k - 6)
        middles = (edges[1:] + edges[:-1]) / 2
        values += [middles, -middles] if signed else [middles]
    table = torch.cat(values)
    assert len(table) == 256
    blocks = []
    for block in tensor.split(block_size, dim=-1):
        scale = block.abs().amax(-1, keepdim=True)
        nearest = (block / scale.clamp(min=1e-300)).unsqueeze(-1).sub(table).abs().argmin(-1)
        blocks.append(table[nearest] * scale)
    return torch.cat(blocks, -1)


def sgd(one: One, numbers: Numbers) -> Tensor:
    """The decay is added to the gradient."""
    before = one.kept.get("m", torch.zeros_like(one.grad))
    one.kept["m"] = numbers.momentum * before + one.grad + one.decay * one.weights
    return one.weights - one.rate * one.kept["m"]


def lion(one: One, numbers: Numbers) -> Tensor:
    """Chen et al. 2023, algorithm 2."""
    beta1, beta2 = numbers.lion_betas
    before = one.kept.get("m", torch.zeros_like(one.grad))
    step = (beta1 * before + (1 - beta1) * one.grad).sign()
    one.average("m", one.grad, beta2)
    return one.weights - one.rate * (step + one.decay * one.weights)


def ademamix(one: One, numbers: Numbers) -> Tensor:
    """Pagliardini et al. 2024, algorithm 1 with the schedules of its section 3."""
    beta1, beta2 = one.betas
    alpha, beta3 = numbers.alpha, numbers.beta3
    if one.number < numbers.slow_warmup:
        way = one.number / numbers.slow_warmup
        alpha = way * alpha
        half_life = way * math.log(0.5) / math.log(beta3) + ((1 - way) * math.log(0.5) / math.log(beta1) if beta1 else 0.0)
        beta3 = 0.5 ** (1 / half_life)
    slow = one.average("slow", one.grad, beta3)
    m = one.average("m", one.grad, beta1) / (1 - beta1**one.number)
    v = one.average("v", one.grad.square(), beta2) / (1 - beta2**one.number)
    return one.weights - one.rate * ((m + alpha * slow) / (v.sqrt() + one.eps) + one.decay * one.weights)


def adafactor(one: One, numbers: Numbers) -> Tensor:
    """Shazeer and Stern 2018, algorithm 4 (matrices) and 5 (vectors)."""
    beta2 = 1 - one.number**-numbers.decay_rate
    squares = one.grad.square() + numbers.factor_eps
    if one.is_vector:
        v = one.average("v", squares, beta2)
    else:
        rows = one.average("rows", squares.mean(-1), beta2)
        columns = one.average("columns", squares.mean(-2), beta2)
        v = rows[..., :, None] * columns[..., None, :] / rows.mean(-1)[..., None, None]
    u = one.grad / v.sqrt()
    u = u / (u.square().mean(one.unit, keepdim=True).sqrt() / numbers.clip_threshold).clamp(min=1.0)
    rate = torch.tensor(one.rate, dtype=torch.float64)
    if numbers.least_scale is not None:
        rate = rate * one.weights.square().mean(one.unit, keepdim=True).sqrt().clamp(min=numbers.least_scale)
    step = rate * u
    if numbers.factor_beta1:
        step = one.average("m", step, numbers.factor_beta1)
    return one.weights - rate * one.decay * one.weights - step


def lamb(one: One, numbers: Numbers) -> Tensor:
    """You et al. 2020, algorithm 2; vectors as by adam."""
    if one.is_vector:
        return adam(one, numbers)
    u = _adams(one) + one.decay * one.weights
    long, short = (x.square().sum(one.unit, keepdim=True).sqrt() for x in (one.weights, u))
    ratio = torch.where((long > 0) & (short > 0), long / short, torch.ones_like(long))
    return one.weights - one.rate * ratio * u


def muon(one: One, numbers: Numbers) -> Tensor:
    """The momentum of a layer's matrices is brought near to orthogonality; the rest is left to adam."""
    rule = numbers.muon
    if not rule.updates(one.name):
        return adam(one, numbers)
    m = one.average("m", one.grad, rule.momentum)
    u = rule.momentum * m + (1 - rule.momentum) * one.grad if rule.nesterov else m
    return one.weights * (1 - one.rate * one.decay) - one.rate * rule.direction(one.name, u)


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
