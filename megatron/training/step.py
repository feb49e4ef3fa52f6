"""One training step: gradients of a global batch, one scalar reduction over the world, one update or none."""

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
from megatron.config.imports import named
from megatron.config.parallel import ParallelConfig
from megatron.config.training import OptimizerConfig
from megatron.data_parallel.provider import Inspect
from megatron.data_parallel.traffic import StepSums
from megatron.metrics.measures import Timers
from megatron.model.build import Model
from megatron.model.inputs import ModelInputs
from megatron.optimizer.grad_scaler import GradScaler, make_grad_scaler
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.optimizer.statistics import count_zeros, square_sums
from megatron.parallel.collectives import Pending, all_reduce, start_all_reduce
from megatron.parallel.context import ParallelContext
from megatron.pipeline_parallel.executor import Executor
from megatron.pipeline_parallel.p2p import Tensors
from megatron.pipeline_parallel.partition import recomputed_chunks
from megatron.spec.counts import attention_shares
from megatron.spec.groups import RateEnds
from megatron.spec.operations import Schedule, forward_only
from megatron.spec.schedules import make_schedule
from megatron.tensor_parallel.cross_entropy import minimised
from megatron.training.failure import raise_uncounted
from megatron.training.providers import make_providers

if TYPE_CHECKING:
    from megatron.moe.balance import BalanceResult
    from megatron.training.gradient_noise import GradientNoise, NoiseEstimate


@dataclass(frozen=True)
class Spike:
    """A step that stands out, and what it stands out from."""

    loss: float
    grad_norm: float
    median_loss: float
    median_norm: float
    skips: bool
    """Whether its update is not made."""


@dataclass(frozen=True)
class StepResult:
    """The results of a step, the same on every rank."""

    loss: float
    """Sum over all tokens of the global batch of mask x loss, divided by the sum of the mask."""
    num_tokens: float
    """The sum of the mask."""
    grad_norm: float
    """Global norm of the unscaled gradient, before clipping."""
    num_zeros: float | None
    skipped: bool
    """Whether the update was skipped, because the gradient overflowed or the step is a loss spike."""
    loss_scale: float
    """The scale that this step used."""
    z_loss: float | None = None
    """The z-loss, where there is one: a mean over tokens as `loss`, which is without it."""
    noise: NoiseEstimate | None = None
    """What the step says of the noise of the gradient, where it is measured."""
    mtp_loss: float | None = None
    """The cross entropy of multi-token prediction, a mean over its depths, divided by the same number of tokens as `loss`."""
    max_attention_logit: float | None = None
    """The largest score of attention over all layers and heads, where it is asked for."""
    attended_sequences: float | None = None
    """How many samples of one document each need as much attention, where attention stays within documents."""
    context_imbalance: float | None = None
    """What the busiest context rank attends to in a microbatch, as a multiple of the mean over these; a mean over microbatches."""
    balance: BalanceResult | None = None
    """How evenly experts were chosen, where there are some."""
    spike: Spike | None = None
    """What the step stands out from, if it is a loss spike."""
    exit_votes: tuple[bool, bool] = (False, False)
    """Whether any rank was asked to exit by a signal, and whether any rank's time is up."""


class Evaluated(NamedTuple):
    """The global sums of an evaluation, the same on every rank."""

    loss: float
    """The sum of mask x loss."""
    mask: float
    mtp_loss: float = 0.0
    """The same of multi-token prediction: a mean over its depths; 0 without it."""
    asked_to_exit: float = 0.0
    """Ranks that a signal asked to exit."""

    def __add__(self, other: Evaluated) -> Evaluated:  # type: ignore[override]
        return Evaluated(*map(operator.add, self, other))


class TrainStep:
    """Makes training steps, and holds everything that they need."""

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
        """Divide the model's state over the data ranks, and allocate missing parameters, gradients, main parameters, moments.

        Args:
            skip_overflow: a gradient that is not finite skips the update (float16); else it is an error.
            count_zeros: count the zeros of the gradient in every step.
            gradient_noise: measure the noise of the gradient in every step.
            timers: for the parts of a step.
        """
        self.model, self.context, self.scaler = model, context, scaler
        self._micro_batch_size = micro_batch_size
        self._pipeline, self._clip = parallel.schedule, optimizer.clip_grad
        self.overlaps_publishing = parallel.overlap_param_gather
        """Whether the new values of parameters may still be on their way when `run` returns."""
        self._skip_overflow, self._count_zeros = skip_overflow, count_zeros
        self._wide = torch.promote_types(model.dtype, torch.float32)
        self._timed = nullcontext if timers is None else timers.of_level(1)
        """Makes what is entered around a part of a step, by its name."""
        self._counts_loss = model.computes_loss and context.group("tp").index == 0
        """Whether this rank counts losses and tokens: of the tensor ranks with the last chunk, the first."""
        self._sums_beside: torch.Tensor
        self._whole: tuple[Pending, int]
        """The last step's tokens, and microbatches of a data rank."""
        self.before_update: list[Callable[[StepResult], None]] = []
        """Called before each update, when the gradients of the shards are complete but neither unscaled nor clipped."""
        self.look_at_loss: Callable[[int, torch.Tensor], None] = lambda microbatch, loss: None
        """Receives the number of each microbatch, from 0 on, and its loss, on the last stage."""
        self.judge: Callable[[float, float], Spike | None] | None = None
        """Says of loss and gradient norm whether the step is a spike, before its update. It must say the same on every rank."""
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._attention_shares = attention_shares(model.config)
        self.providers = make_providers(model, context, parallel)
        groups = [group for provider in self.providers for group in provider.groups]
        largest = None if model.largest is None else model.largest.found
        frozen = [shard for provider in self.providers for shard in provider.frozen]
        self.optimizer = ShardedOptimizer(groups, optimizer, context, largest=largest, frozen=frozen)
        self.executor = Executor(
            context,
            model.boundary(micro_batch_size, context.topology),
            overlap=parallel.overlap_p2p_communication,
            before_backward=[provider.before_backward for provider in self.providers if provider.follows_backward],
            before_remake=self._before_remake,
            keeps=any(segment.treated for chunk in model.layer_table for segment in chunk.segments),
        )
        self._by_counts = [shard for shard in self.optimizer.shards if shard.record.by_counts is not None]
        self.counted_shards = [shard for shard in self.optimizer.shards if shard.counted and shard.record.by_counts is None]
        self.counted_squares = torch.zeros(len(self.counted_shards), dtype=torch.float64, device=context.device)
        """Sums of squares of the (scaled) gradients of `counted_shards` in the last step."""
        self._counted_grads = [shard.counted_grad for shard in self.counted_shards]
        self._copied_grads = [shard.copied_grad for shard in self.optimizer.shards if shard.copied]
        self._noise: GradientNoise | None = None
        if gradient_noise:
            self._noise = named("megatron.training.gradient_noise:GradientNoise")(self.providers, self.counted_shards, context)
        self._num_padding = sum(
            len(s.counted) - sum(placed.box.numel for placed in s.counted_boxes(context)) for s in self.counted_shards
        )

    @classmethod
    def of(
        cls, config: Config, model: Model, context: ParallelContext, *, count_zeros: bool = False, timers: Timers | None = None
    ) -> TrainStep:
        """The training step of a run."""
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
        own_rates: Mapping[RateEnds, float] = MappingProxyType({}),
        exit_votes: tuple[bool, bool] = (False, False),
    ) -> StepResult:
        """Train on one global batch.

        Args:
            batch: this data rank's microbatches.
            iteration: counted from 1, for error messages.
            own_rates: the learning rates of groups whose course ends elsewhere (`optimizer.own_ends`).
            exit_votes: this rank's; they travel with the step's sums, so agreeing costs nothing.

        Raises:
            NonFiniteError: loss or gradient is not finite and no overflow is to be skipped, or no token counts in the loss.
        """
        loss_sum, count = self.gradients(batch)
        with self._timed("grad-norm"):
            sums = self._sums(loss_sum, count, exit_votes, batch)
        if not sums.mask:
            raise_uncounted(iteration)
        scale = self.scaler.scale
        loss, norm = sums.loss / sums.mask, math.sqrt(sums.squares) / scale
        overflow = not math.isfinite(norm)
        if not self._skip_overflow and (overflow or not math.isfinite(loss)):
            named("megatron_lab.audit.nonfinite:raise_nonfinite")(self, batch, iteration, float(loss_sum))
        spike = None if overflow or self.judge is None else self.judge(loss, norm)
        skipped = overflow or (spike is not None and spike.skips)
        result = StepResult(
            loss,
            sums.mask,
            norm,
            num_zeros=sums.zeros if self._count_zeros else None,
            z_loss=sums.z_loss / sums.mask if self.model.loss.z_coeff else None,
            mtp_loss=sums.mtp_loss / sums.mask / self.model.loss.mtp_factor if self.model.config.mtp_num_layers else None,
            skipped=skipped,
            loss_scale=scale,
            noise=self._noise_of(sums, batch, scale),
            max_attention_logit=sums.max_logit if self.model.largest is not None else None,
            attended_sequences=sums.attended if batch[0].documents is not None else None,
            context_imbalance=sums.context_imbalance / (len(batch) * self.context.data_group.size) or None,
            balance=None if self.model.balance is None else self.model.balance.result(sums.of_experts),
            spike=spike,
            exit_votes=(sums.asked_to_exit > 0, sums.out_of_time > 0),
        )
        if not skipped:
            for look in self.before_update:
                look(result)
            clip = min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0.0 else 1.0
            with self._timed("optimizer"):
                self.optimizer.step(learning_rate, weight_decay, clip / scale, own_rates)
                if not self.overlaps_publishing:
                    self.finish_publishing()
        if self._skip_overflow:
            self.scaler.update(overflow)
        return result

    def _noise_of(self, sums: StepSums, batch: Sequence[ModelInputs], scale: float) -> NoiseEstimate | None:
        """What a step says of the noise; None where its first microbatch is all of it, or counts no token, or it overflowed."""
        small = self._micro_batch_size
        big = len(batch) * self.context.data_group.size * small
        if self._noise is None or big == small or not sums.first_mask or not math.isfinite(sums.squares):
            return None
        from megatron.training.gradient_noise import NoiseEstimate

        alone = (sums.mask / sums.first_mask) ** 2  # its gradient was divided by the tokens of the whole batch
        return NoiseEstimate.of(sums.first_squares * alone / scale**2, sums.whole_squares / scale**2, small, big)

    def _sums(
        self, loss_sum: torch.Tensor, count: torch.Tensor, exit_votes: tuple[bool, bool], batch: Sequence[ModelInputs]
    ) -> StepSums:
        """Sum the results of this rank over the world. It is the step's only host synchronisation and, but for the count of tokens
        in `gradients`, its only reduction of scalars."""
        device = self.context.device
        found = square_sums([*self._counted_grads, *self._copied_grads], device)
        self.counted_squares, copied = found.split([len(self._counted_grads), len(self._copied_grads)])
        squares = self.counted_squares.sum()
        if self._copied_grads:  # this adds nothing as long as they are finite
            squares += torch.where(copied.isfinite(), 0.0, copied).sum()
        zeros = torch.zeros_like(squares)
        if self._count_zeros:  # the gradient of padding is always zero, and how much padding there is depends on the layout
            zeros = count_zeros(self._counted_grads, device) - self._num_padding
        # Made on the device, so nothing waits.
        numbers = [torch.full_like(squares, number) for number in (*exit_votes, *self._of_documents(batch))]
        noise = [torch.zeros_like(squares)] * 3
        if self._noise is not None:
            noise = [*self._noise.sums(self.counted_squares), self._mask_sum(batch[:1] if self._noise.has_first else ())]
        logit = self._max_logit() if self.model.largest is not None else torch.zeros_like(squares)
        sums = torch.stack([loss_sum, *self._sums_beside, count, squares, zeros, *numbers, *noise, logit])
        if self.model.balance is not None:
            found = self.model.balance.summed(self.context.world, len(batch) * self.context.data_group.size)
            for shard in self._by_counts:
                shard.grad.copy_(self.model.balance.gradient(shard.record))
            sums = torch.cat([sums, found if self.context.world.index == 0 else torch.zeros_like(found)])
        known = len(StepSums._fields) - 1
        found_numbers = all_reduce(sums, self.context.world).tolist()
        return StepSums._make([*found_numbers[:known], tuple(found_numbers[known:])])

    def _max_logit(self) -> torch.Tensor:
        """Find the largest score of each head over the whole batch, and give this rank's share of the sum that is the largest of
        all: float64."""
        assert self.model.largest is not None
        found = all_reduce(self.model.largest.found, self.context.world, dist.ReduceOp.MAX).amax().double()
        return found if self.context.world.index == 0 else torch.zeros_like(found)

    def _of_documents(self, batch: Sequence[ModelInputs]) -> tuple[float, float]:
        """This rank's share of a step's attended sequences and of the imbalances of its microbatches: of the ranks with the same
        samples, one counts them, others have 0."""
        if not self._counts_loss or self.context.context_group.index > 0:
            return 0.0, 0.0
        documents = [inputs.documents for inputs in batch if inputs.documents is not None]
        attended = sum(one.attended_sequences(self._attention_shares) for one in documents)
        return attended, sum(one.cut.imbalance for one in documents if one.cut is not None)

    def gradients(
        self, batch: Sequence[ModelInputs], *, inspect: Inspect | None = None, again: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill the shards' gradients with (loss scale) x the gradient of the mean loss, summed over all ranks.

        Args:
            batch: this data rank's microbatches.
            inspect: receives this rank's own gradients as they are written. They are then not summed; the shards keep theirs.
            again: these are some of the microbatches of the step before, so they have that step's count of tokens.

        Returns:
            this rank's share of the global sums of the loss and of the loss mask: float64 scalars, zero where another rank counts.
        """
        local_count = self._mask_sum(batch)
        # 1F1B starts backward before later masks are seen, so the count is summed first. Started here, awaited at the first loss.
        if not again:
            self._whole = start_all_reduce(local_count.clone(), self.context.world), len(batch)
        pending, num_microbatches = self._whole
        scale: list[torch.Tensor] = []

        def scaled(loss: torch.Tensor) -> torch.Tensor:
            if not scale:
                scale.append((self.scaler.scale / pending.wait().clamp(min=1.0)).to(self._wide))
            return minimised(loss) * scale[0]

        if self._noise is not None:
            self._noise.start(measures=inspect is None)
        for provider in self.providers:
            provider.start_step(len(batch), inspect=inspect)
        with self._timed("forward-backward"), self._watching(num_microbatches):
            loss_sum, self._sums_beside = self._run(batch, scaled)
        pending.wait()
        if inspect is None:
            with self._timed("grads-reduce"):
                for provider in self.providers:
                    provider.finish_gradients()
        return loss_sum, local_count

    @contextmanager
    def _watching(self, microbatches: int) -> Iterator[None]:
        """Let layers tell what is asked of them beside their outputs, over a step of so many microbatches of a data rank."""
        with ExitStack() as stack:
            if self.model.largest is not None:
                stack.enter_context(self.model.largest.watching())
            if self.model.balance is not None:
                everywhere = microbatches * self.context.data_group.size
                stack.enter_context(self.model.balance.watching(self.scaler.scale / everywhere))
            yield

    def finish_publishing(self) -> None:
        """Wait until every parameter of this rank holds its new values, if they are still on their way."""
        for provider in self.providers:
            provider.finish_publishing()

    def _before_remake(self, modules: Sequence[nn.Module]) -> None:
        for provider in self.providers:
            provider.before_remake(modules)

    def evaluate(self, batch: Sequence[ModelInputs], *, exit_vote: bool = False) -> Evaluated:
        """Evaluate one global batch, without gradients.

        Args:
            exit_vote: whether a signal asked this rank to exit; it travels with the sums.
        """
        loss_sum, (_, mtp_sum) = self._run(batch, lambda loss: loss, training=False)
        for provider in self.providers:
            provider.finish_evaluation()
        if self.model.config.mtp_num_layers:
            mtp_sum = mtp_sum / self.model.loss.mtp_factor
        sums = torch.stack([loss_sum, self._mask_sum(batch), mtp_sum, torch.full_like(loss_sum, exit_vote)])
        return Evaluated(*all_reduce(sums, self.context.world).tolist())

    def _run(
        self, batch: Sequence[ModelInputs], scaled: Callable[[torch.Tensor], torch.Tensor], *, training: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's sum of the cross entropy, and those of z-loss and multi-token prediction [2]: float64, zero where another
        rank counts."""
        totals = torch.zeros(3, dtype=torch.float64, device=self.context.device)
        last = len(self.model.layer_table) - 1

        def forward(chunk: int, microbatch: int, received: Tensors) -> Tensors:
            out = self.model.chunks[chunk](batch[microbatch], received.get("hidden"))
            if chunk < last:
                return {"hidden": out}
            self.look_at_loss(microbatch, out)
            if self._counts_loss:
                totals[: out.numel()].add_(out.detach())
            return {"loss": scaled(out)}

        self.executor.run(self.schedule(len(batch), training=training), forward)
        return totals[0], totals[1:]

    def prepare(self, num_microbatches: int) -> None:
        """Prove the schedules of training and evaluation, and connect the stages, before the first step. All ranks call it.

        Raises:
            ValueError: a schedule is incomplete or would deadlock.
        """
        for training in (True, False):
            self.executor.prepare(self.schedule(num_microbatches, training=training))

    def schedule(self, num_microbatches: int, *, training: bool = True) -> Schedule:
        """The operations of a step with so many microbatches, or of its forwards alone."""
        key = (num_microbatches, training)
        if key not in self._schedules:
            stages = self.context.topology.pp
            table = self.model.layer_table
            again = recomputed_chunks(table)
            made = make_schedule(self._pipeline, stages, num_microbatches, len(table) // stages, recomputed=again)
            self._schedules[key] = made if training else forward_only(made)
        return self._schedules[key]

    def _mask_sum(self, batch: Sequence[ModelInputs]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.context.device)
        for inputs in batch:
            if inputs.loss_mask is not None and self._counts_loss:
                total += inputs.loss_mask.sum()
        return total
