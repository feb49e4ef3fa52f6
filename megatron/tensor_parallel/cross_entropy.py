"""Output layer and masked cross entropy over a vocabulary that is split over the tensor group. No rank holds the full logits.

The loss of a token is log Z - logit_target, with Z = sum_v exp(logit_v). Each rank reduces its own columns. Ranks exchange three
values per token: maximum, sum of exponentials and target logit. All values are computed in at least float32, in blocks of rows. On
CPU a block fits a cache; on a GPU a block has up to 512 MiB, so that there are few kernel launches.

A rank computes the exponential of each logit once, as the softmax over its local columns: exp(logit - log_sum), where log_sum is
the log of the local sum of exponentials. The largest local logit and its probability give log_sum = max_logit -
log(max_probability). The gradient of the logits is this softmax times one factor per token, except at the target.

An optional z-loss adds coefficient x (log Z)^2 per token, which keeps log Z near 0 (Chowdhery et al. 2022, section 5). The gradient
of both losses together is mask x (softmax x (1 + 2 x coefficient x log Z) - one-hot).

Label smoothing (Szegedy et al. 2016, section 7) replaces the one-hot target by (1 - smoothing) x one-hot plus smoothing spread
evenly over the vocabulary without padding. The softmax term of the gradient stays the same, and the smoothed target is subtracted
in every column. The reported sums are those of the cross entropy without smoothing, so the value of the smoothed loss is never
computed.

This module computes the logits of a whole microbatch at once. `chunked_loss.py` uses the same functions for one chunk of tokens at
a time.

Shapes: `s` sequence, `b` microbatch, `h` hidden size, `v` padded vocabulary, `tp` tensor ranks, `t` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megatron.config.imports import import_object
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
_HALF_SOFTMAX_SCALE = 32768.0
"""Factor of a softmax that is stored in float16. Most probabilities are below 6e-8, the smallest positive float16. A power of two
scales exactly."""


@dataclass(frozen=True)
class VocabShard:
    """Columns of the logits that this rank computes, as a range of token ids, and the options of the loss."""

    group: Group
    """Tensor-parallel group, over which the vocabulary is split."""
    first_id: int
    """Token id of this rank's first column of the logits."""
    num_valid: int
    """Number of this rank's columns that are not padding of the vocabulary; may be 0."""
    z_coeff: float = 0.0
    """Coefficient of the z-loss; 0 for none."""
    label_smoothing: float = 0.0
    """Share of the target probability that is taken from the label and spread evenly over the vocabulary; 0 for no label
    smoothing."""
    vocab_size: int = 0
    """Number of columns of the logits over all ranks, without padding. Used only with label smoothing."""
    softcap: float | None = None
    """Cap of the logits: x is replaced by softcap x tanh(x / softcap). None for no cap."""


class LogitGradTerms(NamedTuple):
    """Per-token terms, [t] each for t tokens, that turn the softmax over this rank's columns into the gradient of
    `compute_total_loss` with respect to the logits."""

    softmax_factor: torch.Tensor
    """Number by which a token's softmax over the local columns is multiplied."""
    target_column: torch.Tensor
    """Column of the label among this rank's columns. If another rank has the label's column, the nearest column of this
    rank."""
    target_grad: torch.Tensor
    """Gradient of the logit in `target_column`, which replaces the value computed from the softmax."""
    smoothing_grad: torch.Tensor | None
    """Number to subtract from the gradient in every column that is not padding; None without label smoothing."""

    def scale(self, grad: torch.Tensor) -> LogitGradTerms:
        """Return the terms for the gradient of the total loss multiplied by `grad`."""
        return LogitGradTerms(
            self.softmax_factor * grad,
            self.target_column,
            self.target_grad * grad,
            None if self.smoothing_grad is None else self.smoothing_grad * grad,
        )

    def select(self, tokens: slice) -> LogitGradTerms:
        """Return the terms for only these tokens, such as the tokens of a chunk."""
        return LogitGradTerms(*(None if term is None else term[tokens] for term in self))  # type: ignore[arg-type]


class LogitStatistics:
    """Collects what the loss needs from the logits of this rank's columns, for each token: the largest logit, its softmax
    probability, and the logit of the label.

    Args:
        labels: token ids [t] in the full vocabulary.
        dtype: dtype of the logits.
    """

    def __init__(self, labels: torch.Tensor, shard: VocabShard, dtype: torch.dtype) -> None:
        column = labels - shard.first_id
        self._shard, self.dtype = shard, torch.promote_types(dtype, torch.float32)
        self._target_column = column.clamp(0, max(0, shard.num_valid - 1))  # a label of another rank maps to the nearest column
        self._is_remote = self._target_column != column
        self._target_logit = labels.new_empty(labels.shape, dtype=dtype)
        self._max_logit = labels.new_empty(labels.shape, dtype=self.dtype if labels.device.type == "cpu" else dtype)
        self._max_probability = torch.empty_like(self._max_logit, dtype=self.dtype)

    def consume_logits(self, logits: torch.Tensor, tokens: slice, *, keep_softmax: bool = False) -> None:
        """Compute the statistics of some tokens from their logits, and overwrite the logits.

        Args:
            logits: logits of these tokens in this rank's columns, [tokens, v/tp].
            tokens: range of the tokens.
            keep_softmax: leave the softmax over this rank's columns in `logits`, times `_HALF_SOFTMAX_SCALE` in float16. With a
                softcap, leave the capped logits instead, which the gradient needs too.
        """
        _apply_softcap_(logits, self._shard)
        _mask_padding(logits, self._shard)
        torch.gather(logits, -1, self._target_column[tokens].unsqueeze(-1), out=self._target_logit[tokens].unsqueeze(-1))
        keep_logits, keep_softmax = (
            keep_softmax and self._shard.softcap is not None,
            keep_softmax and self._shard.softcap is None,
        )
        max_logit, max_probability, on_cpu = self._max_logit[tokens], self._max_probability[tokens], logits.device.type == "cpu"
        if not on_cpu:
            torch.amax(logits, -1, out=max_logit)
        for block in _iter_blocks(logits):
            block_logits = logits[block]
            if on_cpu:  # while the block is in a CPU cache
                upcast = block_logits.to(self.dtype)
                torch.amax(upcast, -1, out=max_logit[block])
            source = upcast if on_cpu else block_logits
            softmax = _softmax(source.clone() if keep_logits and block_logits.dtype == self.dtype else source, self.dtype)
            torch.amax(softmax, -1, out=max_probability[block])
            if keep_softmax and block_logits.dtype == torch.float16:
                softmax.mul_(_HALF_SOFTMAX_SCALE)
            if keep_softmax and softmax is not block_logits:
                block_logits.copy_(softmax)

    def log_sum_and_target(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for each of t tokens the log of the sum of exponentials over this rank's columns, and the label's logit (0 if
        another rank holds it): [t] each.

        All tokens must have been passed to `consume_logits`.
        """
        target_logit = self._target_logit.masked_fill(self._is_remote, 0.0).to(self.dtype)
        return self._max_logit - self._max_probability.log(), target_logit

    def compute_grad_terms(self, log_sum: torch.Tensor, log_z: torch.Tensor, mask: torch.Tensor) -> LogitGradTerms:
        """Return the terms with which backward computes the gradient of the logits.

        Args:
            log_sum: log of the sum of exponentials over this rank's columns, [t] for t tokens.
            log_z: log of the sum of exponentials over the full vocabulary [t].
            mask: weight of each token's loss [t].
        """
        z_coeff, smoothing = self._shard.z_coeff, self._shard.label_smoothing
        softmax_weight = mask * (1.0 + 2.0 * z_coeff * log_z) if z_coeff else mask
        target_softmax = softmax_weight * torch.exp(self._target_logit - log_z)
        target_weight, smoothing_grad = mask.masked_fill(self._is_remote, 0.0), None
        if smoothing:
            target_weight = target_weight * (1.0 - smoothing)
            # A rank with only padding subtracts nothing, not even in column 0, to which the labels of other ranks map.
            smoothing_grad = mask * (smoothing / self._shard.vocab_size if self._shard.num_valid else 0.0)
            target_weight = target_weight + smoothing_grad
        softmax_factor = softmax_weight if log_sum is log_z else softmax_weight * torch.exp(log_sum - log_z)
        return LogitGradTerms(softmax_factor, self._target_column, target_softmax - target_weight, smoothing_grad)


def write_logit_grads(logits: torch.Tensor, shard: VocabShard, grad_terms: LogitGradTerms, *, are_capped: bool = False) -> None:
    """Overwrite logits with the gradient of the loss of these tokens, in the dtype of the logits.

    Args:
        logits: logits in this rank's columns, [t, v/tp] for t tokens.
        grad_terms: terms from `LogitStatistics.compute_grad_terms` for these tokens, scaled by the upstream gradient.
        are_capped: whether the softcap has been applied to the logits already.
    """
    if shard.softcap is not None:
        if not are_capped:
            _apply_softcap_(logits, shard)
        target_logits = logits.gather(-1, grad_terms.target_column.unsqueeze(-1)).squeeze(-1)
        grad_terms = grad_terms._replace(
            target_grad=grad_terms.target_grad
            * _compute_softcap_derivative(target_logits.to(grad_terms.target_grad.dtype), shard.softcap)
        )
    _mask_padding(logits, shard)
    for block in _iter_blocks(logits):
        block_logits, dtype = logits[block], grad_terms.softmax_factor.dtype
        if shard.softcap is None:
            _scale_and_smooth(_softmax(block_logits, dtype), grad_terms.select(block), block_logits)
        else:
            derivative = _compute_softcap_derivative(block_logits.to(dtype), shard.softcap)  # 0 in the padding
            block_grad = _softmax(block_logits, dtype)
            _scale_and_smooth(block_grad, grad_terms.select(block), block_grad)
            block_logits.copy_(block_grad.mul_(derivative))
    _write_target_grads(logits, shard, grad_terms)


def apply_softcap(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return cap x tanh(logits / cap), computed in at least float32. If `cap` is None, return the logits unchanged."""
    if cap is None:
        return logits
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / cap).tanh_().mul_(cap).to(logits.dtype)


def _apply_softcap_(logits: torch.Tensor, shard: VocabShard) -> None:
    """Apply the model's softcap to the logits in place, one block of rows at a time; do nothing without a softcap."""
    if shard.softcap is not None:
        for block in _iter_blocks(logits):
            logits[block] = apply_softcap(logits[block], shard.softcap)


def _compute_softcap_derivative(capped_logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Return the derivative of `apply_softcap`, given its output."""
    return 1.0 - (capped_logits.clamp(-cap, cap) / cap).square()


def _softmax_to_grads(softmax: torch.Tensor, shard: VocabShard, grad_terms: LogitGradTerms) -> None:
    """Overwrite the softmax over this rank's columns, which forward has written into the memory of the logits, with the gradient of
    the logits."""
    if softmax.dtype == torch.float16:
        grad_terms = grad_terms._replace(softmax_factor=grad_terms.softmax_factor / _HALF_SOFTMAX_SCALE)
    for block in _iter_blocks(softmax) if softmax.device.type == "cpu" else [slice(None)]:
        _scale_and_smooth(softmax[block], grad_terms.select(block), softmax[block])
    _write_target_grads(softmax, shard, grad_terms)


def _write_target_grads(logit_grads: torch.Tensor, shard: VocabShard, grad_terms: LogitGradTerms) -> None:
    """Write the gradient in each token's label column. With label smoothing, also set the gradient of padding columns to 0, because
    `_scale_and_smooth` subtracted a value there."""
    target_column = grad_terms.target_column
    # Not scatter_: on CPU it traverses the whole tensor when the dtype has 16 bits.
    logit_grads.index_put_(
        (torch.arange(len(target_column), device=target_column.device), target_column), grad_terms.target_grad.to(logit_grads.dtype)
    )
    if grad_terms.smoothing_grad is not None and shard.num_valid < logit_grads.shape[-1]:
        logit_grads[:, shard.num_valid :] = 0.0


def _mask_padding(logits: torch.Tensor, shard: VocabShard) -> None:
    """Set the logits of padding columns to the lowest finite number, so that they contribute exactly 0 to the softmax."""
    if shard.num_valid < logits.shape[-1]:
        logits[:, shard.num_valid :] = torch.finfo(logits.dtype).min  # its exp() is exactly 0 relative to any real logit


def _softmax(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the softmax of each row in `dtype`; in place if the logits have this dtype.

    The logits are converted first because CUDA's kernel would convert float16 by itself but not bfloat16
    (aten/src/ATen/native/cuda/SoftMax.cu, host_softmax).
    """
    upcast = logits.to(dtype)
    return torch.softmax(upcast, -1, out=upcast)


def _scale_and_smooth(softmax: torch.Tensor, grad_terms: LogitGradTerms, out: torch.Tensor) -> None:
    """Write softmax x softmax_factor - smoothing_grad to `out`, in its dtype. Compute in the dtype of `softmax_factor`."""
    factor, smoothing_grad = grad_terms.softmax_factor.unsqueeze(-1), grad_terms.smoothing_grad
    if softmax.device.type == "cpu":  # operations on mixed dtypes are slow on CPU
        product = softmax.to(factor.dtype).mul_(factor)
        if smoothing_grad is not None:
            product.sub_(smoothing_grad.unsqueeze(-1))
        if product is not out:
            out.copy_(product)
    elif smoothing_grad is None:
        torch.mul(softmax, factor, out=out)
    else:  # a single kernel launch, and a single rounding
        torch.addcmul(smoothing_grad.neg().unsqueeze(-1), softmax, factor, out=out)


def _iter_blocks(matrix: torch.Tensor) -> Iterator[slice]:
    block_elements = _BLOCK_ELEMENTS if matrix.device.type == "cpu" else _GPU_BLOCK_ELEMENTS
    block_rows = max(1, block_elements // matrix.shape[-1])
    return (slice(start, start + block_rows) for start in range(0, len(matrix), block_rows))


def combine_over_vocab(log_sum: torch.Tensor, target_logit: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine values per token of all tensor ranks: the logs of the sums of exponentials, and the logits of the labels.

    Needs two all-reduces: a maximum and a sum.

    Args:
        log_sum: log of the sum of exponentials over this rank's columns, [t] for t tokens.
        target_logit: logit of the label [t]; 0 if another rank has the label's column.

    Returns:
        log Z, the log of the sum over the full vocabulary, and the logit of the label: [t] each.
    """
    if group.size == 1:
        return log_sum, target_logit
    max_log_sum = all_reduce(log_sum.clone(), group, dist.ReduceOp.MAX)
    totals = all_reduce(torch.stack([torch.exp(log_sum - max_log_sum), target_logit]), group)
    return max_log_sum + totals[0].log(), totals[1]


def sum_losses(log_z: torch.Tensor, target_logit: torch.Tensor, mask: torch.Tensor, z_coeff: float) -> torch.Tensor:
    """Return the sum over tokens of mask x cross entropy, a scalar. With a z-loss, return [2]: the sums of the cross entropy and of
    the z-loss.

    Args:
        log_z: log of the sum of exponentials over the full vocabulary, [t] for t tokens.
        target_logit: logit of the label [t].
        mask: weight of each token's loss [t].
        z_coeff: coefficient of the z-loss; 0 for none.
    """
    cross_entropy = torch.dot(log_z - target_logit, mask)
    if not z_coeff:
        return cross_entropy
    return torch.stack([cross_entropy, z_coeff * torch.dot(log_z.square(), mask)])


def compute_total_loss(losses: torch.Tensor) -> torch.Tensor:
    """Return the scalar that backward starts from: the sum of the cross entropy and the z-loss that `sum_losses` returns."""
    return losses.sum() if losses.dim() else losses


def compute_total_loss_grad(grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the scalar `compute_total_loss`, given the gradient of the losses that `sum_losses` returns. All of
    these losses have the same gradient."""
    return grad[0] if grad.dim() else grad


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Autograd function of `vocab_parallel_cross_entropy`. Saves the softmax, which takes the memory of the logits."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, shard: VocabShard
    ) -> torch.Tensor:
        flat_logits = logits.view(-1, logits.shape[-1])
        statistics = LogitStatistics(labels.reshape(-1), shard, logits.dtype)
        needs_grad = ctx.needs_input_grad[0]  # not in evaluation
        statistics.consume_logits(flat_logits, slice(None), keep_softmax=needs_grad)
        log_sum, target_logit = statistics.log_sum_and_target()
        log_z, target_logit = combine_over_vocab(log_sum, target_logit, shard.group)
        mask = mask.reshape(-1).to(statistics.dtype)
        if needs_grad:
            ctx.save_for_backward(logits, *statistics.compute_grad_terms(log_sum, log_z, mask))
        ctx.shard = shard
        return sum_losses(log_z, target_logit, mask, shard.z_coeff)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        softmax, *saved_terms = ctx.saved_tensors
        # In place: `_compute_local_logits` allocated the logits, and only this function reads them.
        flat_softmax, grad_terms = (
            softmax.view(-1, softmax.shape[-1]),
            LogitGradTerms(*saved_terms).scale(compute_total_loss_grad(grad)),
        )
        if ctx.shard.softcap is None:
            _softmax_to_grads(flat_softmax, ctx.shard, grad_terms)
        else:
            write_logit_grads(flat_softmax, ctx.shard, grad_terms, are_capped=True)
        return softmax, None, None, None


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Compute the sum over tokens of mask x loss.

    Forward overwrites the logits with their softmax, in the same dtype, and backward overwrites the softmax with the gradient. So
    no second tensor of that size exists.

    Args:
        logits: logits in this rank's columns, [s, b, v/tp], contiguous; overwritten.
        labels: token ids [s, b] in the full vocabulary.
        mask: weight of each token's loss [s, b].
        shard: this rank's columns of the logits, and the options of the loss.

    Returns:
        the sum of the cross entropy, a scalar; with a z-loss [2], the sums of the cross entropy and of the z-loss. In float32 or
        wider and equal on every rank of the tensor group.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, mask, shard)


# ---- The output layer, which ends the last chunk, and the options of its loss.

_MAX_LOGITS = 1 << 27
_CHUNK_MULTIPLE = 128


def get_default_chunk_tokens(num_tokens: int, num_columns: int) -> int:
    """Return the default number of tokens per chunk of the loss; 0 to compute the loss of a microbatch at once.

    Up to 2^27 logits (256 MiB in 16 bits) are computed at once. If a microbatch has more logits on a rank, chunks are as large as
    this limit allows. At that size, multiplying with the weight takes the device longer than reading it. The number of tokens is a
    multiple of 128, which suits matrix products, unless the vocabulary is huge.

    Args:
        num_tokens: tokens of a microbatch.
        num_columns: columns of the vocabulary on this rank.
    """
    if num_tokens * num_columns <= _MAX_LOGITS:
        return 0
    max_tokens = max(1, _MAX_LOGITS // num_columns)
    return max_tokens - max_tokens % _CHUNK_MULTIPLE if max_tokens > _CHUNK_MULTIPLE else max_tokens


@dataclass(frozen=True)
class LossOptions:
    """Options of the loss: how many tokens are computed at a time, and which losses are added to the cross entropy."""

    chunk_tokens: int | None = None
    """Number of tokens whose logits exist at a time; 0 for all tokens of a microbatch; None for the number of
    `get_default_chunk_tokens`."""
    z_coeff: float = 0.0
    """Coefficient of the z-loss."""
    label_smoothing: float = 0.0
    """Share of the target probability that is taken from the label and spread evenly over the vocabulary; 0 for no label
    smoothing."""
    mtp_factor: float = 0.0
    """Weight of the multi-token prediction loss, which is the mean over the depths of multi-token prediction."""

    @classmethod
    def from_config(cls, memory: MemoryConfig, training: TrainingConfig) -> LossOptions:
        """Build the options from the settings of a run."""
        return cls(memory.loss_chunk_tokens, training.z_loss_coeff, training.label_smoothing, training.mtp_loss_scaling_factor)

    def resolve_chunk_tokens(self, num_tokens: int, num_columns: int) -> int:
        """Return the number of tokens per chunk, or 0 if the loss is not chunked.

        Args:
            num_tokens: tokens of a microbatch.
            num_columns: columns of the vocabulary on a rank, padding included.
        """
        return get_default_chunk_tokens(num_tokens, num_columns) if self.chunk_tokens is None else self.chunk_tokens


class OutputLayer(nn.Module):
    """Output layer with the loss, split over the tensor group along the vocabulary. The weight may be that of the word embedding.

    The weight gradient is never deferred. To defer it, the gradient of the logits would have to be kept, which may be larger than
    all that a zero-bubble schedule keeps for the layers of a stage.
    """

    weight: nn.Parameter

    def __init__(self, scope: Scope, config: ModelConfig, options: LossOptions) -> None:
        super().__init__()
        weight = scope.weights[WORD_EMBEDDING] if config.has_tied_embeddings else scope.get_weight("weight")
        self.weight_name = weight.name
        if weight.name in scope.table:
            self.weight = scope.table.share(weight.name, self, "weight", scope.chunk)
        else:
            scope.register_param(self, "weight", weight)
        self.overlap = scope.overlap
        self.input_factor = config.output_multiplier / config.width_multiplier
        """Factor on the hidden states: the multiplier of the logits, over muP's width multiplier (Yang et al. 2022, table 8)."""
        self.sequence_parallel, self.vocab_size, self.options = scope.sequence_parallel, weight.shape[0], options
        self.num_columns = len(self.weight)
        first_id = scope.tp.rank * self.num_columns
        num_valid = max(0, min(self.num_columns, self.vocab_size - first_id))
        softcap = config.final_logit_softcapping
        self.shard = VocabShard(scope.tp, first_id, num_valid, options.z_coeff, options.label_smoothing, self.vocab_size, softcap)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, *, z_loss: bool = True) -> torch.Tensor:
        """Return the sum over tokens of mask x loss; with a z-loss [2], the sums of the cross entropy and of the z-loss.

        Args:
            x: hidden states [s, b, h], or [s/tp, b, h] under sequence parallelism.
            labels: token ids [s, b].
            mask: weight of each token's loss [s, b].
            z_loss: False leaves the z-loss out.
        """
        x, shard = self._scale_input(x), self.shard if z_loss else replace(self.shard, z_coeff=0.0)
        if chunk_size := self.options.resolve_chunk_tokens(labels.numel(), self.num_columns):
            chunked_loss = import_object("megatron.tensor_parallel.chunked_loss:chunked_loss")
            losses: torch.Tensor = chunked_loss(
                x, self.weight, labels, mask, shard, sequence_parallel=self.sequence_parallel, chunk_size=chunk_size
            )
            return losses
        return vocab_parallel_cross_entropy(self._compute_local_logits(x), labels, mask, shard)

    def compute_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the full logits [s, b, v], without padding, on every tensor rank.

        Args:
            x: hidden states [s, b, h], or [s/tp, b, h] under sequence parallelism.
        """
        local_logits = apply_softcap(self._compute_local_logits(self._scale_input(x)), self.shard.softcap).permute(
            2, 0, 1
        )  # all_gather concatenates along dimension 0
        return all_gather(local_logits, self.shard.group)[: self.vocab_size].permute(1, 2, 0)

    def _scale_input(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.input_factor == 1.0 else x * self.input_factor

    def _compute_local_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of this rank's columns, padding included: [s, b, v/tp]."""
        input_mode: InputMode = "gather" if self.sequence_parallel else "copy"
        return parallel_linear(
            x, self.weight, None, self.shard.group, input_mode=input_mode, can_defer_weight_grad=False, overlap=self.overlap
        )
