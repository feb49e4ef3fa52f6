"""The output layer and its loss: masked cross entropy over a vocabulary that is split over the tensor group. No rank ever holds
the full logits.

The loss of a token is log Z - logit_target, with Z = sum_v exp(logit_v). Each rank reduces its own columns; three numbers a token
travel (maximum, sum of exponentials, target logit). Everything is computed in at least float32, in blocks of rows: on CPU such that
a block fits a cache, on a GPU as large as 512 MiB, so that there are few launches.

A rank takes the exponential of a logit once, in a softmax over its own columns: that is exp(logit - log_sum) with log_sum the log
of its sum of exponentials, which the largest logit and its probability give: logit - log(probability). The gradient is this softmax
times one factor a token, but at the target.

A z-loss may stand beside it: coefficient x (log Z)^2 for each token, which keeps log Z near 0 (Chowdhery et al. 2022, section 5).
Together their gradient is mask x (softmax x (1 + 2 x coefficient x log Z) - one-hot).

Label smoothing (Szegedy et al. 2016, section 7) takes, in place of the one-hot target, (1 - smoothing) of it, and smoothing
spread evenly over the vocabulary, padding excluded. The softmax's part of the gradient stays; the target is subtracted in every
column. The sums that are told are those of the plain cross entropy, so the value of a smoothed one is never computed.

Here the logits of a microbatch are there as a whole. `chunked_loss.py` makes the same of these parts, a chunk of tokens at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megatron.config.imports import named
from megatron.config.memory import MemoryConfig
from megatron.config.model import ModelConfig
from megatron.config.training import TrainingConfig
from megatron.parallel.collectives import all_gather, all_reduce
from megatron.parallel.context import Group
from megatron.parallel.params import Scope
from megatron.spec.weights import WORD_EMBEDDING
from megatron.tensor_parallel.linear import InputMode, parallel_linear

_BLOCK_ELEMENTS = 1 << 21
_GPU_BLOCK_ELEMENTS = 1 << 27
_HALF_HEADROOM = 32768.0
"""float16 has no number between 0 and 6e-8, where most of a softmax lies: there it is kept times this (exact: a power of two)."""


@dataclass(frozen=True)
class Columns:
    """The part of the vocabulary that a rank has, and what the loss is."""

    group: Group
    """The tensor group."""
    first: int
    """Id of the first column."""
    num_valid: int
    """Columns that are no padding (perhaps 0)."""
    z_coeff: float = 0.0
    """Coefficient of the z-loss; 0 for none."""
    smoothing: float = 0.0
    """Share of each target that is spread over the vocabulary; 0 for none."""
    vocab_size: int = 0
    """Columns of all ranks that are no padding (read where the target is smoothed)."""
    cap: float | None = None
    """A logit x counts as cap x tanh(x / cap)."""


class RowGradients(NamedTuple):
    """What a backward needs beside the softmax over the rank's columns, [t] each, to make of it the gradient of `minimised`."""

    factor: torch.Tensor
    """What the softmax is multiplied by."""
    local: torch.Tensor
    """A column: the label's, if it is here."""
    at_local: torch.Tensor
    """The gradient there."""
    spread: torch.Tensor | None
    """What is subtracted in every column that is no padding; None where no target is smoothed."""

    def times(self, grad: torch.Tensor) -> RowGradients:
        """Those of so many times what is minimised."""
        return RowGradients(
            self.factor * grad, self.local, self.at_local * grad, None if self.spread is None else self.spread * grad
        )

    def at(self, place: slice) -> RowGradients:
        """Those of some tokens."""
        return RowGradients(*(None if each is None else each[place] for each in self))  # type: ignore[arg-type]


class Targets:
    """Where the labels of some tokens lie among a rank's columns, and what is found there.

    Args:
        labels: ids [t] in the whole vocabulary.
        dtype: of the logits.
    """

    def __init__(self, labels: torch.Tensor, columns: Columns, dtype: torch.dtype) -> None:
        local = labels - columns.first
        self._columns, self.dtype = columns, torch.promote_types(dtype, torch.float32)
        self._local = local.clamp(0, max(0, columns.num_valid - 1))  # labels of other ranks stand for the nearest column
        self._elsewhere = self._local != local
        self._at_local = labels.new_empty(labels.shape, dtype=dtype)
        self._largest = labels.new_empty(labels.shape, dtype=self.dtype if labels.device.type == "cpu" else dtype)
        self._probability = torch.empty_like(self._largest, dtype=self.dtype)

    def reduce(self, logits: torch.Tensor, place: slice, *, keeps: bool = False) -> None:
        """Take what the loss needs from logits [t, v/n] of the tokens at `place`, and destroy them.

        Args:
            keeps: they become their softmax over the rank's columns (in float16 times `_HALF_HEADROOM`); with a cap they become
                what they are capped to, which the gradient needs too.
        """
        _cap(logits, self._columns)
        _lower_padding(logits, self._columns)
        torch.gather(logits, -1, self._local[place].unsqueeze(-1), out=self._at_local[place].unsqueeze(-1))
        keeps_logits, keeps = keeps and self._columns.cap is not None, keeps and self._columns.cap is None
        largest, probability, on_cpu = self._largest[place], self._probability[place], logits.device.type == "cpu"
        if not on_cpu:
            torch.amax(logits, -1, out=largest)
        for block in _blocks(logits):
            part = logits[block]
            if on_cpu:  # while the block is in a cache
                wide = part.to(self.dtype)
                torch.amax(wide, -1, out=largest[block])
            source = wide if on_cpu else part
            softmax = _softmax(source.clone() if keeps_logits and part.dtype == self.dtype else source, self.dtype)
            torch.amax(softmax, -1, out=probability[block])
            if keeps and part.dtype == torch.float16:
                softmax.mul_(_HALF_HEADROOM)
            if keeps and softmax is not part:
                part.copy_(softmax)

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """log(sum(exp)) over the rank's columns, and the label's logit or 0, [t] each, when all tokens have been reduced."""
        target = self._at_local.masked_fill(self._elsewhere, 0.0).to(self.dtype)
        return self._largest - self._probability.log(), target

    def for_gradient(self, log_sum: torch.Tensor, log_z: torch.Tensor, mask: torch.Tensor) -> RowGradients:
        """What a backward needs.

        Args:
            log_sum: that of the rank's own columns, [t], as the others.
        """
        z_coeff, smoothing = self._columns.z_coeff, self._columns.smoothing
        of_softmax = mask * (1.0 + 2.0 * z_coeff * log_z) if z_coeff else mask
        at_local = of_softmax * torch.exp(self._at_local - log_z)
        own, spread = mask.masked_fill(self._elsewhere, 0.0), None
        if smoothing:
            own = own * (1.0 - smoothing)
            # A rank that has only padding subtracts nothing, in the column either that stands for labels of others.
            spread = mask * (smoothing / self._columns.vocab_size if self._columns.num_valid else 0.0)
            own = own + spread
        factor = of_softmax if log_sum is log_z else of_softmax * torch.exp(log_sum - log_z)
        return RowGradients(factor, self._local, at_local - own, spread)


def write_gradient(logits: torch.Tensor, columns: Columns, of_rows: RowGradients, *, are_capped: bool = False) -> None:
    """Overwrite logits [t, v/n] by the gradient of the losses of these tokens, in their dtype.

    Args:
        of_rows: from `for_gradient`, times what a backward begins with.
        are_capped: the cap is in the logits.
    """
    if columns.cap is not None:
        if not are_capped:
            _cap(logits, columns)
        at_label = logits.gather(-1, of_rows.local.unsqueeze(-1)).squeeze(-1)
        of_rows = of_rows._replace(at_local=of_rows.at_local * _slope(at_label.to(of_rows.at_local.dtype), columns.cap))
    _lower_padding(logits, columns)
    for block in _blocks(logits):
        part, dtype = logits[block], of_rows.factor.dtype
        if columns.cap is None:
            _multiply(_softmax(part, dtype), of_rows.at(block), part)
        else:
            slope = _slope(part.to(dtype), columns.cap)  # 0 in the padding
            wide = _softmax(part, dtype)
            _multiply(wide, of_rows.at(block), wide)
            part.copy_(wide.mul_(slope))
    _write_targets(logits, columns, of_rows)


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Logits as they count: cap x tanh(logit / cap), computed in at least float32."""
    if cap is None:
        return logits
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / cap).tanh_().mul_(cap).to(logits.dtype)


def _cap(logits: torch.Tensor, columns: Columns) -> None:
    """The same in place."""
    if columns.cap is not None:
        for block in _blocks(logits):
            logits[block] = capped(logits[block], columns.cap)


def _slope(counted: torch.Tensor, cap: float) -> torch.Tensor:
    """Derivative of what logits count as, where they count so."""
    return 1.0 - (counted.clamp(-cap, cap) / cap).square()


def _scale(softmax: torch.Tensor, columns: Columns, of_rows: RowGradients) -> None:
    """The same where the softmax is kept, in its place."""
    if softmax.dtype == torch.float16:
        of_rows = of_rows._replace(factor=of_rows.factor / _HALF_HEADROOM)
    for block in _blocks(softmax) if softmax.device.type == "cpu" else [slice(None)]:
        _multiply(softmax[block], of_rows.at(block), softmax[block])
    _write_targets(softmax, columns, of_rows)


def _write_targets(gradient: torch.Tensor, columns: Columns, of_rows: RowGradients) -> None:
    """Write the gradient at the labels; where targets are smoothed, clear the padding, from which `_multiply` subtracted too."""
    local = of_rows.local
    # Not scatter_: that of the CPU passes over the whole of a 16-bit tensor.
    gradient.index_put_((torch.arange(len(local), device=local.device), local), of_rows.at_local.to(gradient.dtype))
    if of_rows.spread is not None and columns.num_valid < gradient.shape[-1]:
        gradient[:, columns.num_valid :] = 0.0


def _lower_padding(logits: torch.Tensor, columns: Columns) -> None:
    """Set padding so low that it counts as exactly nothing."""
    if columns.num_valid < logits.shape[-1]:
        logits[:, columns.num_valid :] = torch.finfo(logits.dtype).min  # exp() of it is exactly 0 beside any real logit


def _softmax(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Softmax of each row in this dtype; in place where the logits have it. (CUDA's kernel would widen float16 on the way, but not
    bfloat16: aten/src/ATen/native/cuda/SoftMax.cu, host_softmax.)"""
    wide = logits.to(dtype)
    return torch.softmax(wide, -1, out=wide)


def _multiply(rows: torch.Tensor, of_rows: RowGradients, out: torch.Tensor) -> None:
    """Write rows x factor - spread to `out`, in its dtype; computed in that of factor."""
    factor, spread = of_rows.factor.unsqueeze(-1), of_rows.spread
    if rows.device.type == "cpu":  # slow where dtypes meet in one operation
        product = rows.to(factor.dtype).mul_(factor)
        if spread is not None:
            product.sub_(spread.unsqueeze(-1))
        if product is not out:
            out.copy_(product)
    elif spread is None:
        torch.mul(rows, factor, out=out)
    else:  # one launch, and one rounding
        torch.addcmul(spread.neg().unsqueeze(-1), rows, factor, out=out)


def _blocks(rows: torch.Tensor) -> Iterator[slice]:
    elements = _BLOCK_ELEMENTS if rows.device.type == "cpu" else _GPU_BLOCK_ELEMENTS
    size = max(1, elements // rows.shape[-1])
    return (slice(start, start + size) for start in range(0, len(rows), size))


def joined(log_sum: torch.Tensor, target: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """log Z and the target's logit [t] over the whole vocabulary, from those of each rank's columns: one reduction by MAX, one by
    SUM."""
    if group.size == 1:
        return log_sum, target
    largest = all_reduce(log_sum.clone(), group, dist.ReduceOp.MAX)
    sums = all_reduce(torch.stack([torch.exp(log_sum - largest), target]), group)
    return largest + sums[0].log(), sums[1]


def loss_sums(log_z: torch.Tensor, target: torch.Tensor, mask: torch.Tensor, z_coeff: float) -> torch.Tensor:
    """Sum over tokens of mask x loss, a scalar; with a z-loss [2], that sum and the one of the z-loss."""
    cross_entropy = torch.dot(log_z - target, mask)
    if not z_coeff:
        return cross_entropy
    return torch.stack([cross_entropy, z_coeff * torch.dot(log_z.square(), mask)])


def minimised(sums: torch.Tensor) -> torch.Tensor:
    """What a backward begins with, a scalar, from `loss_sums`."""
    return sums.sum() if sums.dim() else sums


def one_factor(grad: torch.Tensor) -> torch.Tensor:
    """The gradient of `minimised`, a scalar, from that of `loss_sums`, all of whose elements have the same."""
    return grad[0] if grad.dim() else grad


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, columns: Columns
    ) -> torch.Tensor:
        rows = logits.view(-1, logits.shape[-1])
        targets = Targets(labels.reshape(-1), columns, logits.dtype)
        differentiates = ctx.needs_input_grad[0]  # not in evaluation
        targets.reduce(rows, slice(None), keeps=differentiates)
        log_sum, target = targets.sums()
        log_z, target = joined(log_sum, target, columns.group)
        mask = mask.reshape(-1).to(targets.dtype)
        if differentiates:
            ctx.save_for_backward(logits, *targets.for_gradient(log_sum, log_z, mask))
        ctx.columns = columns
        return loss_sums(log_z, target, mask, columns.z_coeff)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        softmax, *of_rows = ctx.saved_tensors
        # In place, since nobody else reads it: the logits were an intermediate result of ours.
        rows, found = softmax.view(-1, softmax.shape[-1]), RowGradients(*of_rows).times(one_factor(grad))
        if ctx.columns.cap is None:
            _scale(rows, ctx.columns, found)
        else:
            write_gradient(rows, ctx.columns, found, are_capped=True)
        return softmax, None, None, None


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, columns: Columns) -> torch.Tensor:
    """Sum over tokens of mask x loss. Forward writes the softmax over the logits, in their dtype, and backward the gradient over
    that, so no second tensor of that size exists.

    Args:
        logits: this rank's columns [s, b, v/n], contiguous; destroyed.
        labels: token ids [s, b] in the whole vocabulary.
        mask: weight of each token's loss [s, b].

    Returns:
        see `loss_sums`; in float32 or wider, the same on every rank of the group.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, mask, columns)


# ---- The output layer, the last part of the last chunk, and the form of its loss.

_MOST_LOGITS = 1 << 27
_MULTIPLE = 128


def chosen_chunk(tokens: int, columns: int) -> int:
    """Tokens of a chunk where the user leaves it to us; 0 for the whole loss.

    Logits of up to 2^27 elements (256 MiB in 16 bits) are made at once. Where a microbatch has more on a rank, chunks are as large
    as that allows: so large that a product with the weight takes the device longer than reading it. The size is a multiple of 128,
    which products like, unless the vocabulary is huge.

    Args:
        tokens: of a microbatch.
        columns: of the vocabulary on this rank.
    """
    if tokens * columns <= _MOST_LOGITS:
        return 0
    most = max(1, _MOST_LOGITS // columns)
    return most - most % _MULTIPLE if most > _MULTIPLE else most


@dataclass(frozen=True)
class LossForm:
    """Says how the loss is computed, and which losses are added to the cross entropy."""

    chunk_tokens: int | None = None
    """Tokens whose logits are there at once; 0: all of a microbatch; None: as `chosen_chunk` says."""
    z_coeff: float = 0.0
    """Coefficient of the z-loss."""
    smoothing: float = 0.0
    """Share of each target that is spread over the vocabulary."""
    mtp_factor: float = 0.0
    """Weight of the loss of multi-token prediction, a mean over its depths."""

    @classmethod
    def of(cls, memory: MemoryConfig, training: TrainingConfig) -> LossForm:
        """Make the form that the settings ask for."""
        return cls(memory.loss_chunk_tokens, training.z_loss_coeff, training.label_smoothing, training.mtp_loss_scaling_factor)

    def chunk(self, tokens: int, columns: int) -> int:
        """Tokens of a chunk, 0 for the whole loss.

        Args:
            tokens: of a microbatch.
            columns: of the vocabulary on a rank, padding included.
        """
        return chosen_chunk(tokens, columns) if self.chunk_tokens is None else self.chunk_tokens


class OutputLayer(nn.Module):
    """Computes the sum of the loss. The vocabulary is split over the tensor group; the weight may be the word embedding's.

    The weight's gradient is never deferred. It would keep the gradient of the logits, which may be larger than all that a
    zero-bubble schedule keeps of a stage's layers.
    """

    weight: nn.Parameter

    def __init__(self, scope: Scope, config: ModelConfig, form: LossForm) -> None:
        super().__init__()
        weight = scope.weights[WORD_EMBEDDING] if config.tied else scope.weight("weight")
        self.weight_name = weight.name
        if weight.name in scope.table:
            self.weight = scope.table.share(weight.name, self, "weight", scope.chunk)
        else:
            scope.parameter(self, "weight", weight)
        self.overlap = scope.overlap
        self.input_factor = config.output_multiplier / config.mup_width
        """Factor on the hidden states: that of the logits, and muP's multiplier of the output (Yang et al. 2022, table 8)."""
        self.gather, self.vocab_size, self.form = scope.sequence_parallel, weight.shape[0], form
        self.rows = len(self.weight)
        first = scope.tp.index * self.rows
        valid = max(0, min(self.rows, self.vocab_size - first))
        cap = config.final_logit_softcapping
        self.columns = Columns(scope.tp, first, valid, form.z_coeff, form.smoothing, self.vocab_size, cap)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, *, z_loss: bool = True) -> torch.Tensor:
        """Map hidden states [s, b, h] (or [s/n, b, h]), labels and mask [s, b] to the sum over tokens of mask x loss.

        With a z-loss there are two sums, [2]: that of the cross entropy and that of the z-loss.

        Args:
            z_loss: False leaves the z-loss out.
        """
        x, columns = self._scaled(x), self.columns if z_loss else replace(self.columns, z_coeff=0.0)
        if size := self.form.chunk(labels.numel(), self.rows):
            in_chunks = named("megatron.tensor_parallel.chunked_loss:chunked_loss")
            sums: torch.Tensor = in_chunks(x, self.weight, labels, mask, columns, gathers=self.gather, size=size)
            return sums
        return vocab_parallel_cross_entropy(self._logits(x), labels, mask, columns)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Map hidden states [s, b, h] (or [s/n, b, h]) to logits [s, b, v], without padding, whole on every tensor rank."""
        columns = capped(self._logits(self._scaled(x)), self.columns.cap).permute(2, 0, 1)  # the gather joins dimension 0
        return all_gather(columns, self.columns.group)[: self.vocab_size].permute(1, 2, 0)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.input_factor == 1.0 else x * self.input_factor

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's columns of the logits, padding included: [s, b, v/n]."""
        mode: InputMode = "gather" if self.gather else "copy"
        return parallel_linear(x, self.weight, None, self.columns.group, input_mode=mode, defers=False, overlap=self.overlap)
