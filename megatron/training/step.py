"""Training step. It computes the gradients of a global batch, reduces the scalars of the step once over all ranks, and updates the
parameters unless the step is skipped."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megatron.config.config import Config
from megatron.config.imports import import_object
from megatron.config.parallel import ParallelConfig
from megatron.config.training import OptimizerConfig
from megatron.data_parallel.provider import GradInspector
from megatron.data_parallel.traffic import StepTotals
from megatron.metrics.measures import Timers
from megatron.model.build import Model
from megatron.model.inputs import ModelInputs
from megatron.optimizer.grad_scaler import GradScaler, make_grad_scaler
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.optimizer.statistics import compute_squared_norms, count_zeros
from megatron.parallel.collectives import Pending, all_reduce, start_all_reduce
from megatron.parallel.context import ParallelContext
from megatron.pipeline_parallel.executor import Executor
from megatron.pipeline_parallel.p2p import Tensors
from megatron.pipeline_parallel.partition import find_recomputed_chunks
from megatron.spec.counts import compute_window_shares
from megatron.spec.groups import LearningRateBounds
from megatron.spec.operations import Schedule, extract_forwards
from megatron.spec.schedules import build_schedule
from megatron.tensor_parallel.cross_entropy import compute_total_loss
from megatron.training.failure import raise_empty_loss_mask
from megatron.training.providers import make_providers

if TYPE_CHECKING:
    from megatron.moe.balance import RouterMetrics
    from megatron.training.gradient_noise import GradientNoiseMeter, NoiseEstimate


@dataclass(frozen=True)
class Spike:
    """Loss spike: a step whose loss or gradient norm is far above the median of the previous steps."""

    loss: float
    grad_norm: float
    median_loss: float
    median_norm: float
    skips_update: bool
    """Whether the run skips the update of the step because of the spike (--spike-policy)."""


class StepVotes(NamedTuple):
    """Votes of a rank, or of any rank, on what the run does after a step. They are reduced with the scalars of the step, without
    additional communication."""

    exit_signal: bool = False
    """Whether the rank has received an exit signal."""
    time_limit: bool = False
    """Whether the rank has exceeded --exit-duration-in-mins."""
    timed_save: bool = False
    """Whether a checkpoint is due because of the time since the last one."""


NO_VOTES = StepVotes()


@dataclass(frozen=True)
class StepResult:
    """Result of a training step, the same on every rank."""

    loss: float
    """Mean loss: sum of loss mask * loss over all tokens of the global batch, divided by the sum of the loss mask."""
    num_tokens: float
    """Sum of the loss mask over the global batch: the number of tokens that are trained on."""
    grad_norm: float
    """Global norm of the gradient before clipping, without the loss scale."""
    num_zeros: float | None
    """Number of zeros in the gradient; None without --log-num-zeros-in-grad."""
    skipped: bool
    """Whether the update was skipped, because the gradient overflowed or the step is a loss spike."""
    loss_scale: float
    """Loss scale of this step."""
    z_loss: float | None = None
    """Z-loss per token, which `loss` does not include; None without z-loss."""
    gradient_noise: NoiseEstimate | None = None
    """Estimate of the gradient noise from this step; None if it is not measured (--log-gradient-noise)."""
    mtp_loss: float | None = None
    """Cross entropy of multi-token prediction, averaged over its prediction layers and divided by `num_tokens`; None without
    multi-token prediction."""
    max_attention_logit: float | None = None
    """Largest attention score over all layers and heads in this step; None if it is not recorded."""
    attention_samples: float | None = None
    """Number of single-document samples whose attention would need as much computation as that of the step, counted in pairs of
    query and key. None if attention crosses document boundaries."""
    context_imbalance: float | None = None
    """Attention computation of the most loaded context-parallel rank, divided by the mean over the context-parallel ranks.
    Averaged over the microbatches. None without context parallelism."""
    expert_balance: RouterMetrics | None = None
    """Load of the experts, and the auxiliary losses of the routers; None without experts."""
    spike: Spike | None = None
    """The loss spike, if this step is a loss spike; else None."""
    votes: StepVotes = NO_VOTES
    """Whether any rank has voted for each action."""


class EvaluationSums(NamedTuple):
    """Sums of an evaluation over all tokens and ranks, the same on every rank."""

    loss_sum: float
    """Sum of loss mask * loss over all tokens."""
    mask_sum: float
    """Sum of the loss mask over all tokens."""
    mtp_loss_sum: float = 0.0
    """Sum of loss mask * multi-token-prediction loss over all tokens, averaged over the prediction layers; 0 without
    multi-token prediction."""
    num_exit_requests: float = 0.0
    """Number of ranks that have received an exit signal."""

    def __add__(self, addend: EvaluationSums) -> EvaluationSums:  # type: ignore[override]
        return EvaluationSums(*map(operator.add, self, addend))


class TrainStep:
    """Training step of this rank: computes gradients, reduces them over the ranks, and updates the parameters. It also runs
    evaluation steps.

    It owns the sharded state of the model, the optimizer and the pipeline executor.
    """

    def __init__(
        self,
        model: Model,
        context: ParallelContext,
        scaler: GradScaler,
        *,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        micro_batch_size: int,
        skip_overflow: bool,
        count_zeros: bool = False,
        gradient_noise: bool = False,
        timers: Timers | None = None,
    ) -> None:
        """Shard the model's state over the data-parallel ranks. This allocates gradients, main parameters, optimizer state, and the
        parameters that have no memory yet.

        Args:
            skip_overflow: skip the update if the gradient is not finite (float16); otherwise raise an error.
            count_zeros: count the zeros of the gradient in every step.
            gradient_noise: measure the gradient noise in every step.
            timers: timers of the parts of a step (--timing-log-level); None to measure nothing.
        """
        self.model, self.context, self.scaler = model, context, scaler
        self._micro_batch_size = micro_batch_size
        self._schedule_settings, self._clip_grad = parallel.schedule, optimizer.clip_grad
        self.overlaps_param_gather = parallel.overlap_param_gather
        """Whether the all-gather of updated parameters may still be running when `run` returns."""
        self._skip_overflow, self._count_zeros = skip_overflow, count_zeros
        self._loss_dtype = torch.promote_types(model.dtype, torch.float32)
        self._timer = nullcontext if timers is None else timers.select_level(1)
        """Function that returns a context manager that measures a named phase of a step."""
        self._counts_loss = model.computes_loss and context.group("tp").rank == 0
        """Whether this rank counts loss and tokens: the first tensor rank of the stage with the last chunk."""
        self._auxiliary_loss_sums: torch.Tensor
        self._pending_token_count: tuple[Pending, int]
        """Pending all-reduce of the latest step's token count, and its number of microbatches per data rank."""
        self.before_update_hooks: list[Callable[[StepResult], None]] = []
        """Functions that are called before each update, when the shard gradients are reduced, but not yet unscaled or clipped."""
        self.on_loss: Callable[[int, torch.Tensor], None] = lambda microbatch, loss: None
        """Function that receives the index of each microbatch and its loss, on the last stage."""
        self.detect_spike: Callable[[float, float], Spike | None] | None = None
        """Function that decides from loss and gradient norm whether a step is a loss spike, before the update. The decision must be
        the same on every rank."""
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._window_shares = compute_window_shares(model.config)
        self.providers = make_providers(model, context, parallel)
        groups = [group for provider in self.providers for group in provider.groups]
        max_logits = None if model.logit_tracker is None else model.logit_tracker.max_logits
        frozen_shards = [shard for provider in self.providers for shard in provider.frozen]
        self.optimizer = ShardedOptimizer(groups, optimizer, context, max_logits=max_logits, frozen_shards=frozen_shards)
        self.executor = Executor(
            context,
            model.get_stage_boundary(micro_batch_size, context.topology),
            overlap=parallel.overlap_p2p_communication,
            before_backward=[provider.before_backward for provider in self.providers if provider.uses_before_backward],
            before_recompute=self._before_recompute,
            uses_activation_store=any(segment.saves_memory for chunk in model.layer_table for segment in chunk.segments),
        )
        self._balance_shards = [shard for shard in self.optimizer.shards if shard.record.count_update is not None]
        self.norm_shards = [shard for shard in self.optimizer.shards if shard.norm_range and shard.record.count_update is None]
        self.shard_squared_norms = torch.zeros(len(self.norm_shards), dtype=torch.float64, device=context.device)
        """Squared norms of the gradients of `norm_shards` in the latest step, not unscaled."""
        self._norm_grads = [shard.norm_grad for shard in self.norm_shards]
        self._duplicate_grads = [shard.duplicate_grad for shard in self.optimizer.shards if shard.duplicate_range]
        self._noise_meter: GradientNoiseMeter | None = None
        if gradient_noise:
            self._noise_meter = import_object("megatron.training.gradient_noise:GradientNoiseMeter")(
                self.providers, self.norm_shards, context
            )
        self._num_padding = sum(
            len(s.norm_range) - sum(param_slice.slice.numel for param_slice in s.get_norm_slices(context)) for s in self.norm_shards
        )

    @classmethod
    def of(
        cls, config: Config, model: Model, context: ParallelContext, *, count_zeros: bool = False, timers: Timers | None = None
    ) -> TrainStep:
        """Build the training step of a run from its settings."""
        return cls(
            model,
            context,
            make_grad_scaler(config.precision),
            parallel=config.parallel,
            optimizer=config.optimizer,
            micro_batch_size=config.training.micro_batch_size,
            skip_overflow=config.precision.fp16,
            count_zeros=count_zeros,
            gradient_noise=config.logging.log_gradient_noise,
            timers=timers,
        )

    def run(
        self,
        batch: Sequence[ModelInputs],
        *,
        iteration: int,
        learning_rate: float,
        weight_decay: float,
        group_rates: Mapping[LearningRateBounds, float] = MappingProxyType({}),
        votes: StepVotes = NO_VOTES,
    ) -> StepResult:
        """Train on one global batch.

        Args:
            batch: microbatches of this data-parallel rank.
            iteration: number of the step, counted from 1, for error messages.
            learning_rate: learning rate of this step's update.
            weight_decay: weight decay of this step's update.
            group_rates: learning rates of the parameter groups that have separate minimum or maximum rates, by these bounds
                (`optimizer.custom_lr_bounds`).
            votes: votes of this rank on what the run does after the step.

        Raises:
            NonFiniteError: loss or gradient is not finite and overflows are not skipped, or the loss mask is zero at every token.
        """
        loss_sum, count = self.compute_gradients(batch)
        with self._timer("grad-norm"):
            totals = self._reduce_totals(loss_sum, count, votes, batch)
        if not totals.mask_sum:
            raise_empty_loss_mask(iteration)
        loss_scale = self.scaler.scale
        loss, grad_norm = totals.loss / totals.mask_sum, math.sqrt(totals.grad_sq_sum) / loss_scale
        overflow = not math.isfinite(grad_norm)
        if not self._skip_overflow and (overflow or not math.isfinite(loss)):
            import_object("megatron_lab.audit.nonfinite:raise_nonfinite")(self, batch, iteration, float(loss_sum))
        spike = None if overflow or self.detect_spike is None else self.detect_spike(loss, grad_norm)
        skipped = overflow or (spike is not None and spike.skips_update)
        result = StepResult(
            loss,
            totals.mask_sum,
            grad_norm,
            num_zeros=totals.num_zero_grads if self._count_zeros else None,
            z_loss=totals.z_loss / totals.mask_sum if self.model.loss.z_coeff else None,
            mtp_loss=totals.mtp_loss / totals.mask_sum / self.model.loss.mtp_factor if self.model.config.mtp_num_layers else None,
            skipped=skipped,
            loss_scale=loss_scale,
            gradient_noise=self._estimate_noise(totals, batch, loss_scale),
            max_attention_logit=totals.max_logit if self.model.logit_tracker is not None else None,
            attention_samples=totals.attention_samples if batch[0].documents is not None else None,
            context_imbalance=totals.context_imbalance / (len(batch) * self.context.data_group.size) or None,
            expert_balance=None
            if self.model.router_tracker is None
            else self.model.router_tracker.to_metrics(totals.expert_balance),
            spike=spike,
            votes=StepVotes(totals.num_exit_requests > 0, totals.num_out_of_time > 0, totals.num_save_requests > 0),
        )
        if not skipped:
            for hook in self.before_update_hooks:
                hook(result)
            clip_factor = min(1.0, self._clip_grad / (grad_norm + 1e-6)) if self._clip_grad > 0.0 else 1.0
            with self._timer("optimizer"):
                self.optimizer.step(learning_rate, weight_decay, clip_factor / loss_scale, group_rates)
                if not self.overlaps_param_gather:
                    self.finish_param_gather()
        if self._skip_overflow:
            self.scaler.update(overflow)
        return result

    def _estimate_noise(self, totals: StepTotals, batch: Sequence[ModelInputs], scale: float) -> NoiseEstimate | None:
        """Estimate the gradient noise from this step.

        Return None if the noise is not measured, or if the batch has only one microbatch. Also return None if the first microbatch
        has no unmasked token, or if the gradient overflowed.

        Args:
            totals: sums of the step over all ranks.
            batch: microbatches of this data-parallel rank.
            scale: loss scale of the step.
        """
        first_samples = self._micro_batch_size
        num_samples = len(batch) * self.context.data_group.size * first_samples
        if (
            self._noise_meter is None
            or num_samples == first_samples
            or not totals.first_mask_sum
            or not math.isfinite(totals.grad_sq_sum)
        ):
            return None
        from megatron.training.gradient_noise import NoiseEstimate

        rescale = (totals.mask_sum / totals.first_mask_sum) ** 2  # the first gradient was divided by the tokens of the full batch
        return NoiseEstimate.of(
            totals.first_grad_sq_sum * rescale / scale**2, totals.full_grad_sq_sum / scale**2, first_samples, num_samples
        )

    def _reduce_totals(
        self, loss_sum: torch.Tensor, count: torch.Tensor, votes: StepVotes, batch: Sequence[ModelInputs]
    ) -> StepTotals:
        """Sum the scalars of this step over all ranks, such as loss, token count and squared gradient norm.

        This is the only point at which the host waits for the device in a step. Only the token count in `compute_gradients` is
        reduced separately from these scalars.

        Args:
            loss_sum: this rank's part of the sum of the loss.
            count: this rank's part of the sum of the loss mask.
            votes: votes of this rank on what the run does after the step.
            batch: microbatches of this data-parallel rank.
        """
        device = self.context.device
        sq_sums = compute_squared_norms([*self._norm_grads, *self._duplicate_grads], device)
        self.shard_squared_norms, duplicate_sq_sums = sq_sums.split([len(self._norm_grads), len(self._duplicate_grads)])
        grad_sq_sum = self.shard_squared_norms.sum()
        if self._duplicate_grads:  # adds NaN or infinity if duplicates are not finite, else 0
            grad_sq_sum += torch.where(duplicate_sq_sums.isfinite(), 0.0, duplicate_sq_sums).sum()
        num_zeros = torch.zeros_like(grad_sq_sum)
        if self._count_zeros:  # exclude padding, whose amount depends on the layout
            num_zeros = count_zeros(self._norm_grads, device) - self._num_padding
        # Created on the device, to avoid copies from the host.
        scalars = [torch.full_like(grad_sq_sum, value) for value in (*votes, *self._compute_document_values(batch))]
        noise_values = [torch.zeros_like(grad_sq_sum)] * 3
        if self._noise_meter is not None:
            noise_values = [
                *self._noise_meter.compute_local_squared_norms(self.shard_squared_norms),
                self._sum_loss_mask(batch[:1] if self._noise_meter.has_first_microbatch else ()),
            ]
        max_logit = self._find_max_logit() if self.model.logit_tracker is not None else torch.zeros_like(grad_sq_sum)
        local_totals = torch.stack(
            [loss_sum, *self._auxiliary_loss_sums, count, grad_sq_sum, num_zeros, *scalars, *noise_values, max_logit]
        )
        if self.model.router_tracker is not None:
            balance_totals = self.model.router_tracker.reduce(self.context.world, len(batch) * self.context.data_group.size)
            for shard in self._balance_shards:
                shard.grad.copy_(self.model.router_tracker.compute_excess_load(shard.record))
            local_totals = torch.cat(
                [local_totals, balance_totals if self.context.world.rank == 0 else torch.zeros_like(balance_totals)]
            )
        num_fields = len(StepTotals._fields) - 1
        totals = all_reduce(local_totals, self.context.world).tolist()
        return StepTotals._make([*totals[:num_fields], tuple(totals[num_fields:])])

    def _find_max_logit(self) -> torch.Tensor:
        """Return the largest attention score of the step over all heads and ranks on global rank 0, and zero on other ranks
        (float64 scalar). The sum over ranks that follows at the end of the step is then the maximum."""
        assert self.model.logit_tracker is not None
        max_logit = all_reduce(self.model.logit_tracker.max_logits, self.context.world, dist.ReduceOp.MAX).amax().double()
        return max_logit if self.context.world.rank == 0 else torch.zeros_like(max_logit)

    def _compute_document_values(self, batch: Sequence[ModelInputs]) -> tuple[float, float]:
        """Return what this rank adds to two sums over all ranks: to the step's `attention_samples`, and to the sum of the context
        imbalances of the microbatches (see `StepResult`). Of the ranks that share samples, only one returns values other than 0."""
        if not self._counts_loss or self.context.context_group.rank > 0:
            return 0.0, 0.0
        documents = [inputs.documents for inputs in batch if inputs.documents is not None]
        attention_samples = sum(document.count_equivalent_samples(self._window_shares) for document in documents)
        return attention_samples, sum(
            document.sequence_split.imbalance for document in documents if document.sequence_split is not None
        )

    def compute_gradients(
        self, batch: Sequence[ModelInputs], *, inspect: GradInspector | None = None, reuse_token_count: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the gradients of (loss scale) * (mean loss) and reduce them over all ranks. They are written to the gradient
        buffers of the parameter shards.

        Args:
            batch: microbatches of this data-parallel rank.
            inspect: function that receives this rank's local gradients when they are written. The gradients are then not reduced,
                and those of the shards do not change.
            reuse_token_count: use the token count of the previous step, because `batch` is a part of that step's batch.

        Returns:
            what this rank adds to the global sums of the loss and of the loss mask: float64 scalars, zero on ranks that do not
            count the loss.
        """
        local_token_count = self._sum_loss_mask(batch)
        # The first backward needs the token count, and with 1F1B it runs before later forwards. So reduce the count up front,
        # and wait for it at the first loss.
        if not reuse_token_count:
            self._pending_token_count = start_all_reduce(local_token_count.clone(), self.context.world), len(batch)
        pending_count, num_microbatches = self._pending_token_count
        scale: list[torch.Tensor] = []

        def scale_loss(loss: torch.Tensor) -> torch.Tensor:
            if not scale:
                scale.append((self.scaler.scale / pending_count.wait().clamp(min=1.0)).to(self._loss_dtype))
            return compute_total_loss(loss) * scale[0]

        if self._noise_meter is not None:
            self._noise_meter.start(enabled=inspect is None)
        for provider in self.providers:
            provider.start_step(len(batch), inspect=inspect)
        with self._timer("forward-backward"), self._record_layer_outputs(num_microbatches):
            loss_sum, self._auxiliary_loss_sums = self._run(batch, scale_loss)
        pending_count.wait()
        if inspect is None:
            with self._timer("grads-reduce"):
                for provider in self.providers:
                    provider.finish_gradients()
        return loss_sum, local_token_count

    @contextmanager
    def _record_layer_outputs(self, num_microbatches: int) -> Iterator[None]:
        """Record the layers' attention scores and router statistics while the block is active, if the run uses them.

        Args:
            num_microbatches: number of microbatches of the step on each data-parallel rank.
        """
        with ExitStack() as stack:
            if self.model.logit_tracker is not None:
                stack.enter_context(self.model.logit_tracker.recording())
            if self.model.router_tracker is not None:
                total_microbatches = num_microbatches * self.context.data_group.size
                stack.enter_context(self.model.router_tracker.recording(self.scaler.scale / total_microbatches))
            yield

    def finish_param_gather(self) -> None:
        """Wait for the all-gather of updated parameters, if it is still running."""
        for provider in self.providers:
            provider.finish_param_gather()

    def _before_recompute(self, modules: Sequence[nn.Module]) -> None:
        for provider in self.providers:
            provider.before_recompute(modules)

    def evaluate(self, batch: Sequence[ModelInputs], *, exit_vote: bool = False) -> EvaluationSums:
        """Compute the losses of one global batch, without gradients.

        Args:
            batch: microbatches of this data-parallel rank.
            exit_vote: whether this rank has received an exit signal. The vote is reduced with the sums.
        """
        loss_sum, (_, mtp_sum) = self._run(batch, lambda loss: loss, training=False)
        for provider in self.providers:
            provider.finish_evaluation()
        if self.model.config.mtp_num_layers:
            mtp_sum = mtp_sum / self.model.loss.mtp_factor
        local_sums = torch.stack([loss_sum, self._sum_loss_mask(batch), mtp_sum, torch.full_like(loss_sum, exit_vote)])
        return EvaluationSums(*all_reduce(local_sums, self.context.world).tolist())

    def _run(
        self, batch: Sequence[ModelInputs], scale_loss: Callable[[torch.Tensor], torch.Tensor], *, training: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the pipeline schedule over a batch.

        Args:
            batch: microbatches of this data-parallel rank.
            scale_loss: function that takes the losses of a microbatch, summed over its tokens. It returns the scalar from which
                backward starts.
            training: whether to run forward and backward; otherwise only forward.

        Returns:
            this rank's sum of the cross entropy, and a tensor [2] with the sums of z-loss and multi-token-prediction loss. All are
            float64, and zero on ranks that do not count the loss.
        """
        totals = torch.zeros(3, dtype=torch.float64, device=self.context.device)
        last_chunk = len(self.model.layer_table) - 1

        def forward(chunk: int, microbatch: int, received: Tensors) -> Tensors:
            out = self.model.chunks[chunk](batch[microbatch], received.get("hidden"))
            if chunk < last_chunk:
                return {"hidden": out}
            self.on_loss(microbatch, out)
            if self._counts_loss:
                totals[: out.numel()].add_(out.detach())
            return {"loss": scale_loss(out)}

        self.executor.run(self.get_schedule(len(batch), training=training), forward)
        return totals[0], totals[1:]

    def prepare(self, num_microbatches: int) -> None:
        """Check the pipeline schedules of training and evaluation, and connect the pipeline stages. All ranks call this function
        before the first step.

        Args:
            num_microbatches: number of microbatches of a step on each data-parallel rank.

        Raises:
            ValueError: a schedule is incomplete or would deadlock.
        """
        for training in (True, False):
            self.executor.prepare(self.get_schedule(num_microbatches, training=training))

    def get_schedule(self, num_microbatches: int, *, training: bool = True) -> Schedule:
        """Return the pipeline schedule of a step. If `training` is False, the schedule contains only forwards.

        Args:
            num_microbatches: number of microbatches of the step on each data-parallel rank.
        """
        key = (num_microbatches, training)
        if key not in self._schedules:
            num_stages = self.context.topology.pp
            layer_table = self.model.layer_table
            recomputed = find_recomputed_chunks(layer_table)
            schedule = build_schedule(
                self._schedule_settings, num_stages, num_microbatches, len(layer_table) // num_stages, recomputed_chunks=recomputed
            )
            self._schedules[key] = schedule if training else extract_forwards(schedule)
        return self._schedules[key]

    def _sum_loss_mask(self, batch: Sequence[ModelInputs]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.context.device)
        for inputs in batch:
            if inputs.loss_mask is not None and self._counts_loss:
                total += inputs.loss_mask.sum()
        return total
