"""A run of training: what its settings make, in the order in which it is made, and its place in the run.

`pretrain_gpt.py` makes one and lets it go on to its end. A program of the user's own may make its steps by hand, watch them, and
look at the model between them.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.checkpoint.storage import Place
from megatron.config.checks.memory import check_backend
from megatron.config.cli import LoadedConfig
from megatron.config.config import Config
from megatron.config.launcher import launched
from megatron.config.outputs import CheckpointConfig
from megatron.config.save import run_record
from megatron.data.samples import SamplePiece, SampleSource
from megatron.model.build import Model, model_of
from megatron.parallel.context import ParallelContext, connect, disconnect
from megatron.training import startup
from megatron.training.failure import Explanations
from megatron.training.features import PICTURES, Features, RunParts
from megatron.training.inputs import Batches, RunData, open_data
from megatron.training.loop import Control, Loop, NoSaver, evaluate
from megatron.training.progress import BatchSizePlan, Progress, Resumed
from megatron.training.signals import ExitSignals
from megatron.training.startup import choose_attention
from megatron.training.step import StepResult, TrainStep
from megatron.training.watch import Watcher

if TYPE_CHECKING:
    from megatron.training.saver import Saver


class Trainer:
    """A run on this rank. All ranks make it together, and call each of its methods together.

    It is closed at the end of a `with` block, or by `close`. Another one may then be made in the same process.

    Args:
        settings: such as `load` gives them.
        context: the place of this rank; by default it joins the job that the launcher describes, or is a world of one.
        data: what to train on; by default what the settings name.
        model: fresh from `model_of`; by default the one that the settings describe.
        callbacks: watch every step of `fit` and `step`, on all ranks.
        quiet: say nothing in the log. Metrics files and curves are written all the same.
        command: the words of the command line, for the record of the run.
        started_at: when the job started, by time.monotonic().
        signals: those that ask the run to exit.
        explanations: gets the words for errors that only the run can explain.
        draws: have the record of the run drawn while it goes on, and a report made of it at the end, as the settings say.

    Raises:
        ValueError: something that the user can fix: files, devices, a checkpoint that does not fit, ranks that do not meet.
    """

    def __init__(
        self,
        settings: LoadedConfig,
        *,
        context: ParallelContext | None = None,
        data: RunData | None = None,
        model: Model | None = None,
        callbacks: Sequence[Watcher] = (),
        quiet: bool = False,
        command: Sequence[str] = (),
        started_at: float | None = None,
        signals: ExitSignals | None = None,
        explanations: Explanations | None = None,
        draws: bool = False,
    ) -> None:
        self.callbacks = list(callbacks)
        self._stack, self._running, self._joins = ExitStack(), ExitStack(), context is None
        self._by_hand_stack = ExitStack()
        """Watches steps that are made by hand; entered by the first of them."""
        self._begun = self._steps_by_hand = False
        self._by_hand: tuple[int, Batches] | None = None
        try:
            self._make(
                settings,
                context,
                data,
                model,
                quiet=quiet,
                command=command,
                started_at=time.monotonic() if started_at is None else started_at,
                signals=ExitSignals(settings.config.training.exit_signal_code) if signals is None else signals,
                explanations=Explanations() if explanations is None else explanations,
                draws=draws,
            )
        except BaseException as error:
            self._leave(type(error), error, error.__traceback__)
            raise

    def _make(
        self,
        settings: LoadedConfig,
        context: ParallelContext | None,
        data: RunData | None,
        model: Model | None,
        *,
        quiet: bool,
        command: Sequence[str],
        started_at: float,
        signals: ExitSignals,
        explanations: Explanations,
        draws: bool,
    ) -> None:
        """The parts of a run, each made of those before."""
        config = settings.config
        world_size = launched().world_size if context is None else context.world.size
        features = Features(config, world_size, explanations, without=() if draws else (PICTURES,))
        self._features = features
        self._stack.callback(startup.set_numerics(config))
        startup.set_compiler_cache(config.speed)
        features.begin()  # all have forked by now: this asks CUDA, which forks do not survive
        self.context = context = connect(config.parallel) if context is None else context
        features.connected(context, self._stack)
        check_backend(config, on_cuda=context.device.type == "cuda")
        startup.set_logging(context.rank)
        plan = BatchSizePlan(config.training, context.data_group.size, config.model.seq_length)
        self.config = config = features.adjust_config(startup.with_batch_size(config, plan), context)
        self.data = open_data(config, context) if data is None else data
        record = run_record(config, command)
        saver = self._saver(config.checkpoint, record)
        timers = startup.make_timers(config.logging, context)

        startup.check_precision(config.precision, context)
        kernel_choice, previous_kernels = choose_attention(config, context)
        self._stack.callback(previous_kernels)
        model = model_of(config, context, self.data.vocab_size) if model is None else model
        self.steps = TrainStep.of(config, model, context, count_zeros=config.logging.log_num_zeros_in_grad, timers=timers)
        features.built(self.steps, self.data.vocab_size)
        num_parameters = startup.check_parameter_count(config.model, model.vocab_size, self.steps.optimizer.held, context)

        resumed = self._resume(config, plan, in_memory=saver.keeps_in_memory)
        self.progress = progress = resumed.progress
        plan = plan.resumed_at(progress.iteration, progress.consumed_samples)
        batches = self.data.at(progress, plan, context)
        self.steps.prepare(plan.num_microbatches(progress.consumed_samples))
        reporter = startup.make_reporter(
            *(config, context, model, plan, timers),
            resumed=resumed.path is not None,
            quiet=quiet,
        )
        control = Control(resumed.checkpoint)
        self._parts = RunParts(
            *(config, context, self.steps, progress, reporter, plan, num_parameters, kernel_choice),
            data=self.data,
            resumed=resumed,
            started_at=started_at,
            control=control,
        )
        for line in [
            *settings.notes,
            *features.start_up_lines(self._parts),
            *batches.describe(progress.phases),
            *startup.describe_outputs(config, draws=draws),
            *resumed.notes,
        ]:
            reporter.say(f"  {line}")
        if resumed.path is not None:
            reporter.say(f"resuming from {resumed.path} at iteration {progress.iteration}")
        self._facts = startup.facts(record, context, model, plan, num_parameters, kernel_choice)
        self._loop = Loop(
            config,
            context,
            self.steps,
            plan,
            resumed.schedule,
            saver,
            reporter,
            timers,
            train_batches=batches.training,
            valid_batches=batches.validation,
            test_batches=batches.test,
            started_at=started_at,
            signals=signals,
            feature_watchers=lambda: features.watchers(self._parts),
            control=control,
        )

    @property
    def model(self) -> Model:
        """This rank's part of the model."""
        return self.steps.model

    @property
    def iteration(self) -> int:
        """Steps made since the start of the run."""
        return self.progress.iteration

    def fit(self, iterations: int | None = None, *, callbacks: Sequence[Watcher] = ()) -> bool:
        """Train to the end of the run, or for so many steps; evaluate and save as the settings say.

        Args:
            callbacks: watch these steps, beside those of the trainer.

        Returns:
            whether a signal ended it.

        Raises:
            NonFiniteError: loss or gradient is not finite, in a precision without a loss scale.
        """
        until = None if iterations is None else self.progress.iteration + iterations
        self._begin()
        self._stop_watching()
        return self._loop.run(self.progress, until=until, callbacks=[*self.callbacks, *callbacks])

    def step(self, tokens: NDArray[np.int64] | torch.Tensor | None = None) -> StepResult | None:
        """Make one step: the next of the run, or over tokens of the user's own; it counts as a step of the run in both cases.

        Args:
            tokens: ids [global batch, s + 1], the same on all ranks; each row is predicted from its own beginning.

        Returns:
            the results, the same on every rank; None for an iteration that the settings skip.

        Raises:
            ValueError: the tokens do not make a step.
        """
        self._begin()
        if not self._steps_by_hand:
            self._by_hand_stack.enter_context(self._loop.watching(self.callbacks))
            self._steps_by_hand = True
        if tokens is not None:
            return self._loop.advance(self.progress, next(self._batches_of(tokens)))
        consumed = self.progress.consumed_samples
        if self._by_hand is None or self._by_hand[0] != consumed:
            self._end_by_hand()
            self._by_hand = consumed, self._loop.train_batches(consumed)
        batches = self._by_hand[1]
        result = self._loop.advance(self.progress, next(batches))
        self._by_hand = self.progress.consumed_samples, batches
        return result

    def evaluate(self) -> float:
        """The mean loss over the validation batches of the settings, always the same ones.

        Raises:
            ValueError: the settings have none.
        """
        if self._loop.valid_batches is None:
            raise ValueError("there is no evaluation in these settings: give --eval-iters above 0")
        found = evaluate(self.steps, self._loop.valid_batches())
        assert found is not None, "nobody asks to exit"
        return found[0]

    def save(self, folder: Place | None = None) -> str:
        """Write a checkpoint of this iteration into a save folder; returns where it lies.

        Args:
            folder: by default that of --save.

        Raises:
            ValueError: no folder is named, or it cannot be written to.
        """
        checkpoint = self.config.checkpoint
        if folder is None and checkpoint.save is None:
            raise ValueError("there is no folder to save in: name one, or give --save in the settings")
        self.steps.finish_publishing()
        self._begin()
        loop, say = self._loop, self._loop.reporter.say
        saver, owns = loop.saver, ExitStack()
        if folder is not None and os.fspath(folder) != checkpoint.save:
            saver = self._saver(dataclasses.replace(checkpoint, save=os.fspath(folder)), run_record(self.config, ()))
            owns.enter_context(saver.owning())
        with owns:
            place = saver.save(self.progress, self.steps.optimizer, self.steps.scaler, loop.schedule, say, loop.checkpoint_extras())
            saver.finish(say)
        return place or saver.place(self.progress.iteration)

    def load(self, folder: Place, *, weights_only: bool = False) -> None:
        """Go on from the newest checkpoint in a save folder, as a run with --load does.

        Args:
            weights_only: take the weights alone, and begin to count anew.

        Raises:
            CheckpointError: there is none, or it is of another model or optimizer.
        """
        checkpoint = dataclasses.replace(
            self.config.checkpoint, load=os.fspath(folder), finetune=weights_only, exit_on_missing_checkpoint=True, ckpt_step=None
        )
        self._end_by_hand()
        self.steps.finish_publishing()
        plan = BatchSizePlan(self.config.training, self.context.data_group.size, self.config.model.seq_length)
        resumed = self._resume(dataclasses.replace(self.config, checkpoint=checkpoint), plan)
        self._loop.control.checkpoint = resumed.checkpoint
        vars(self.progress).update(vars(resumed.progress))
        plan = plan.resumed_at(self.progress.iteration, self.progress.consumed_samples)
        batches = self.data.at(self.progress, plan, self.context)
        self._loop.plan, self._loop.schedule, self._loop.train_batches = plan, resumed.schedule, batches.training
        self._parts = dataclasses.replace(self._parts, resumed=resumed, plan=plan)

    def close(self) -> None:
        """Close files, and leave the job if this trainer has joined it."""
        self._leave(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave(kind, error, trace)

    def _leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the run, and close what it has opened; where this rank has failed and others may be in a collective, only the run: to
        leave them might hang."""
        try:
            self._by_hand_stack.__exit__(kind, error, trace)
            if error is None and self._begun:
                self._loop.close(self.callbacks if self._steps_by_hand else ())
        except BaseException as fault:
            self._running.__exit__(type(fault), fault, fault.__traceback__)
            raise
        self._running.__exit__(kind, error, trace)
        if error is None or launched().world_size == 1:
            self._end_by_hand()
            self._stack.close()
            if self._joins:
                disconnect()

    def _stop_watching(self) -> None:
        """Leave the watching of steps that are made by hand."""
        self._by_hand_stack.close()
        self._steps_by_hand = False

    def _end_by_hand(self) -> None:
        if self._by_hand is not None:
            self._by_hand[1].close()  # type: ignore[attr-defined]
            self._by_hand = None

    def _begin(self) -> None:
        """Begin the run, unless it is under way: from here on it owns its save folder, and keeps its record."""
        if not self._begun:
            self._begun = True
            self._running.enter_context(self._loop.saver.owning())
            for feature in self._features:
                self._running.enter_context(feature.around_run(self._parts))
            self._running.enter_context(self._loop.reporter.running(self.progress, self._facts))

    def _saver(self, checkpoint: CheckpointConfig, record: dict[str, Any]) -> Saver | NoSaver:
        """What saves the run; its modules are imported where there is something to save."""
        if checkpoint.save is None:
            return NoSaver()
        from megatron.training.saver import Saver

        patience_s = 60 * self.config.parallel.distributed_timeout_minutes / 2  # before a collective of the other ranks gives up
        return Saver(checkpoint, self.context, record, self.data.vocab_size, patience_s=patience_s)

    def _resume(self, config: Config, plan: BatchSizePlan, *, in_memory: bool = False) -> Resumed:
        """Fill weights and state from a checkpoint, if the settings name one."""
        schedule = startup.make_learning_schedule(config.optimizer, config.training, plan)
        optimizer, scaler = self.steps.optimizer, self.steps.scaler
        if config.checkpoint.load is None and config.checkpoint.pretrained_checkpoint is None:
            found = Resumed(Progress(), schedule, None)
        else:
            from megatron.training.resume import resume

            found = resume(config, self.context, optimizer, scaler, schedule, self.data.vocab_size, in_memory=in_memory)
        self.steps.finish_publishing()
        return found

    def _batches_of(self, tokens: NDArray[np.int64] | torch.Tensor) -> Batches:
        """The one step over these tokens."""
        rows = torch.as_tensor(tokens).cpu().numpy().astype(np.int64)
        length = self.config.model.seq_length
        size = self._loop.plan.global_batch_size(self.progress.consumed_samples)
        if rows.shape != (size, length + 1):
            raise ValueError(
                f"tokens of shape {list(rows.shape)} make no step, which takes [{size}, {length + 1}]: the global batch size, and "
                "--seq-length and one more"
            )
        if rows.min() < 0 or rows.max() >= self.data.vocab_size:
            raise ValueError(f"ids from {rows.min()} to {rows.max()}, but the vocabulary has {self.data.vocab_size}")
        source = _GivenSamples(rows) if self.data.datasets is not None else None
        return self.data.maker.steps(
            source, global_batch_size_at=lambda _: len(rows), consumed_samples=0, total_samples=len(rows), num_workers=0
        )


class _GivenSamples(SampleSource):
    """Samples that are given as they are, [count, s + 1]."""

    def __init__(self, rows: NDArray[np.int64]) -> None:
        self.seq_length = rows.shape[1] - 1
        self._rows = rows

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        return self._rows[first : first + count]

    def lineage(self, number: int) -> list[SamplePiece]:
        return []

    def describe(self, num_samples: int) -> list[str]:
        return []
