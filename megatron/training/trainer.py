"""A training run: `Trainer` builds the components of the run from the settings, and runs the steps.

`pretrain_gpt.py` creates a trainer and runs it to the end. User programs can also run single steps, observe them with callbacks,
and access the model between steps.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from megatron.checkpoint.storage import PathOrUrl
from megatron.config.checks.memory import check_attention_backend_on_device
from megatron.config.cli import LoadedConfig
from megatron.config.config import Config
from megatron.config.imports import import_object
from megatron.config.launcher import read_process_info
from megatron.config.outputs import CheckpointConfig
from megatron.config.save import run_record
from megatron.model.build import Model, build_model_from_config
from megatron.parallel.context import ParallelContext, connect, disconnect
from megatron.training import startup
from megatron.training.callbacks import Callback
from megatron.training.failure import Explanations
from megatron.training.features import PICTURE_FEATURE, Features, RunComponents
from megatron.training.inputs import Batches, RunData, open_data
from megatron.training.loop import Control, Loop, NoSaver, evaluate_sets
from megatron.training.progress import BatchSizePlan, Progress, ResumePoint
from megatron.training.signals import ExitSignals, create_exit_signals
from megatron.training.startup import choose_attention_kernel
from megatron.training.step import StepResult, TrainStep

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from megatron.training.saver import Saver


class Trainer:
    """Training run on this rank. All ranks create the trainer together, and call each of its methods together.

    The trainer is closed at the end of a `with` block or by `close`. After that another trainer can be created in the same process.

    Args:
        settings: resolved settings, as `megatron.api.settings` returns them.
        context: process groups of this rank. By default the trainer joins the job of the launcher, or runs in a single process.
        data: training and evaluation data. By default the data that the settings describe.
        model: model that `build_model_from_config` has just built. By default the model that the settings describe.
        callbacks: callbacks for every step of `fit` and `step`, on all ranks.
        quiet: print nothing. Metrics files and curves are still written.
        command: arguments of the command line, for the history file of the run.
        started_at: time at which the job started, by time.monotonic(). By default the current time.
        signals: handler of the signals that ask the run to exit. By default `fit` handles only Ctrl-C: it finishes the step, saves
            and returns, and a second Ctrl-C raises KeyboardInterrupt.
        explanations: registry in which components explain errors, for the message that the program prints after a failure.
        draw_record: plot the history of the run during training and write a report at its end, if the settings enable this.

    Raises:
        ValueError: a problem that the user can fix, for example with files, devices, a checkpoint that does not fit, or ranks that
            do not connect.
    """

    def __init__(
        self,
        settings: LoadedConfig,
        *,
        context: ParallelContext | None = None,
        data: RunData | None = None,
        model: Model | None = None,
        callbacks: Sequence[Callback] = (),
        quiet: bool = False,
        command: Sequence[str] = (),
        started_at: float | None = None,
        signals: ExitSignals | None = None,
        explanations: Explanations | None = None,
        draw_record: bool = False,
    ) -> None:
        self.callbacks = list(callbacks)
        self._stack, self._run_stack, self._owns_context = ExitStack(), ExitStack(), context is None
        self._manual_stack = ExitStack()
        """Watches steps that are made by hand; entered by the first of them."""
        self._has_started = self._is_stepping_manually = False
        self._manual_batches: tuple[int, Batches] | None = None
        try:
            self._build(
                settings,
                context,
                data,
                model,
                quiet=quiet,
                command=command,
                started_at=time.monotonic() if started_at is None else started_at,
                signals=create_exit_signals(settings.config) if signals is None else signals,
                explanations=Explanations() if explanations is None else explanations,
                draw_record=draw_record,
            )
        except BaseException as error:
            self._close(type(error), error, error.__traceback__)
            raise

    def _build(
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
        draw_record: bool,
    ) -> None:
        """Build the components of the run, in the order in which they depend on each other."""
        config = settings.config
        world_size = read_process_info().world_size if context is None else context.world.size
        features = Features(config, world_size, explanations, excluded=() if draw_record else (PICTURE_FEATURE,))
        self._features = features
        self._stack.callback(startup.set_numerics(config))
        startup.set_compiler_cache(config.speed)
        features.on_forks_done()  # initialises CUDA, so all forks must be done
        self.context = context = connect(config.parallel) if context is None else context
        features.on_connected(context, self._stack)
        check_attention_backend_on_device(config, on_cuda=context.device.type == "cuda")
        startup.set_logging(context.rank)
        plan = BatchSizePlan(config.training, context.data_group.size, config.model.seq_length)
        config = features.adjust_config(startup.resolve_batch_size(config, plan), context)
        self.data = open_data(config, context) if data is None else data
        if config.training.train_epochs is not None:
            config = import_object("megatron_lab.data_tools.epochs:resolve_epochs")(config, self.data, context)
            plan = BatchSizePlan(config.training, context.data_group.size, config.model.seq_length)
        self.config = config
        record = run_record(config, command)
        saver = self._build_saver(config.checkpoint, record)
        timers = startup.make_timers(config.logging, context)

        startup.check_precision(config.precision, context)
        kernel_choice, restore_kernels = choose_attention_kernel(config, context)
        self._stack.callback(restore_kernels)
        model = build_model_from_config(config, context, self.data.vocab_size) if model is None else model
        self.steps = TrainStep.of(config, model, context, count_zeros=config.logging.log_num_zeros_in_grad, timers=timers)
        features.on_built(self.steps, self.data.vocab_size)
        num_parameters = startup.count_parameters(config.model, model.vocab_size, self.steps.optimizer.checkpoint_shards, context)

        resume_point = self._resume(config, plan, in_memory=saver.saves_to_node_memory)
        self.progress = progress = resume_point.progress
        plan = plan.resume_at(progress.iteration, progress.consumed_samples)
        batches = self.data.create_batches(progress, plan, context)
        self.steps.prepare(plan.get_num_microbatches(progress.consumed_samples))
        reporter = startup.make_reporter(
            *(config, context, model, plan, timers),
            resumed=resume_point.path is not None,
            quiet=quiet,
        )
        control = Control(resume_point.checkpoint, has_exit_signal=lambda: signals.received is not None)
        self._components = RunComponents(
            *(config, context, self.steps, progress, reporter, plan, num_parameters, kernel_choice),
            data=self.data,
            resume_point=resume_point,
            started_at=started_at,
            control=control,
        )
        reporter.log_start(
            features.get_summary_lines(self._components),
            [*features.get_startup_lines(self._components), *batches.describe(progress.phases)],
            [*settings.notes, *startup.describe_outputs(config, draw_record=draw_record), *resume_point.notes],
        )
        if resume_point.path is not None:
            verb = "evaluating" if config.training.skip_train else "resuming from"
            reporter.log(f"{verb} {resume_point.path} at iteration {progress.iteration}")
        self._run_facts = startup.collect_run_facts(record, context, model, plan, num_parameters, kernel_choice)
        self._loop = Loop(
            config,
            context,
            self.steps,
            plan,
            resume_point.schedule,
            saver,
            reporter,
            timers,
            train_batches=batches.iter_training_batches,
            valid_batches=batches.validation_batches,
            test_batches=batches.test_batches,
            started_at=started_at,
            signals=signals,
            build_feature_callbacks=lambda: features.build_callbacks(self._components),
            control=control,
        )

    @property
    def model(self) -> Model:
        """Part of the model that this rank holds."""
        return self.steps.model

    @property
    def iteration(self) -> int:
        """Number of steps since the start of the run."""
        return self.progress.iteration

    def fit(self, iterations: int | None = None, *, callbacks: Sequence[Callback] = ()) -> bool:
        """Train to the end of the run, or for a number of steps. Evaluate and save checkpoints as often as the settings say.

        Args:
            iterations: number of steps; by default all remaining ones.
            callbacks: callbacks for these steps, in addition to those of the trainer.

        Returns:
            whether a signal ended the run.

        Raises:
            NonFiniteError: loss or gradient is not finite, in a run without --fp16.
        """
        stop_iteration = None if iterations is None else self.progress.iteration + iterations
        self._start_run()
        self._detach_callbacks()
        return self._loop.run(self.progress, stop_iteration=stop_iteration, callbacks=[*self.callbacks, *callbacks])

    def step(self, tokens: NDArray[np.int64] | torch.Tensor | None = None) -> StepResult | None:
        """Run one step, with the next batch of the run or with tokens from the caller. In both cases the step counts as a step of
        the run.

        Args:
            tokens: token ids [global batch size, --seq-length + 1], the same on all ranks. Each row is a separate sequence; its
                last token is only a label.

        Returns:
            the result, the same on every rank; None for an iteration that --iterations-to-skip skips.

        Raises:
            ValueError: the tokens have a wrong shape, an id is not in the vocabulary, or --skip-train is set.
        """
        if self.config.training.skip_train:
            raise ValueError("--skip-train evaluates only: leave it out of the settings to run steps")
        self._start_run()
        if not self._is_stepping_manually:
            self._manual_stack.enter_context(self._loop.attach_callbacks(self.callbacks))
            self._is_stepping_manually = True
        if tokens is not None:
            size = self._loop.plan.get_global_batch_size(self.progress.consumed_samples)
            batch = import_object("megatron_lab.data_tools.token_rows:build_batch")(self.data, tokens, size)
            return self._loop.run_step(self.progress, batch)
        consumed = self.progress.consumed_samples
        if self._manual_batches is None or self._manual_batches[0] != consumed:
            self._close_manual_batches()
            self._manual_batches = consumed, self._loop.train_batches(consumed)
        batches = self._manual_batches[1]
        result = self._loop.run_step(self.progress, next(batches))
        self._manual_batches = self.progress.consumed_samples, batches
        return result

    def evaluate(self) -> float:
        """Return the mean loss over the validation batches (--eval-iters). The batches are the same at every call. With several
        validation sets, this is the unweighted mean of their losses; `evaluate_sets` returns the losses.

        Raises:
            ValueError: the settings have no evaluation.
        """
        losses = self.evaluate_sets()
        return sum(losses.values()) / len(losses)

    def evaluate_sets(self) -> dict[str, float]:
        """Return the mean loss of each validation set by its name. A single set without a name has the name "".

        Raises:
            ValueError: the settings have no evaluation.
        """
        if not self._loop.valid_batches:
            raise ValueError("the settings have no evaluation: set --eval-iters above 0")
        losses = evaluate_sets(self.steps, self._loop.valid_batches)
        assert losses is not None, "only an exit signal interrupts an evaluation"
        return {name: loss for name, (loss, _) in losses.items()}

    def save(self, folder: PathOrUrl | None = None) -> str:
        """Write a checkpoint of the current iteration into a save folder. Returns the path or URL of the checkpoint.

        Args:
            folder: save folder; by default that of --save.

        Raises:
            ValueError: there is no save folder, or it is not writable.
        """
        checkpoint = self.config.checkpoint
        if folder is None and checkpoint.save is None:
            raise ValueError("there is no save folder: pass `folder`, or set --save")
        self.steps.finish_param_gather()
        self._start_run()
        loop, log = self._loop, self._loop.reporter.log
        saver, folder_claim = loop.saver, ExitStack()
        if folder is not None and os.fspath(folder) != checkpoint.save:
            saver = self._build_saver(dataclasses.replace(checkpoint, save=os.fspath(folder)), run_record(self.config, ()))
            folder_claim.enter_context(saver.claim_folder())
        with folder_claim:
            path = saver.save(
                self.progress, self.steps.optimizer, self.steps.scaler, loop.schedule, log, loop.get_checkpoint_extras()
            )
            saver.finish(log)
        return path or saver.build_checkpoint_path(self.progress.iteration)

    def load(self, folder: PathOrUrl, *, weights_only: bool = False) -> None:
        """Continue from the newest checkpoint in a save folder, like a run with --load.

        Args:
            weights_only: load only the weights, and count iterations from 0.

        Raises:
            CheckpointError: the folder has no checkpoint, or its model or optimizer differs.
        """
        checkpoint = dataclasses.replace(
            self.config.checkpoint, load=os.fspath(folder), finetune=weights_only, exit_on_missing_checkpoint=True, ckpt_step=None
        )
        self._close_manual_batches()
        self.steps.finish_param_gather()
        plan = BatchSizePlan(self.config.training, self.context.data_group.size, self.config.model.seq_length)
        resume_point = self._resume(dataclasses.replace(self.config, checkpoint=checkpoint), plan)
        self._loop.control.checkpoint = resume_point.checkpoint
        vars(self.progress).update(vars(resume_point.progress))
        self._loop.reporter.rewind(self.progress.iteration)
        plan = plan.resume_at(self.progress.iteration, self.progress.consumed_samples)
        batches = self.data.create_batches(self.progress, plan, self.context)
        self._loop.plan, self._loop.schedule, self._loop.train_batches = plan, resume_point.schedule, batches.iter_training_batches
        self._components = dataclasses.replace(self._components, resume_point=resume_point, plan=plan)

    def close(self) -> None:
        """Close all files, and leave the job if this trainer has joined it."""
        self._close(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(error_type, error, traceback)

    def _close(self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """End the run and close everything that the run has opened.

        After an error in a parallel job only the run is ended, and the process group stays open: the other ranks may be in a
        collective, and leaving the group could hang.
        """
        try:
            self._manual_stack.__exit__(error_type, error, traceback)
            if error is None and self._has_started:
                self._loop.close(self.callbacks if self._is_stepping_manually else ())
        except BaseException as close_error:
            self._run_stack.__exit__(type(close_error), close_error, close_error.__traceback__)
            raise
        self._run_stack.__exit__(error_type, error, traceback)
        if error is None or read_process_info().world_size == 1:
            self._close_manual_batches()
            self._stack.close()
            if self._owns_context:
                disconnect()

    def _detach_callbacks(self) -> None:
        """Exit the context managers of the callbacks that `step` has entered, so that the callbacks no longer observe steps."""
        self._manual_stack.close()
        self._is_stepping_manually = False

    def _close_manual_batches(self) -> None:
        if self._manual_batches is not None:
            self._manual_batches[1].close()  # type: ignore[attr-defined]
            self._manual_batches = None

    def _start_run(self) -> None:
        """Start the run if it has not started: claim the save folder and open the history file."""
        if not self._has_started:
            self._has_started = True
            self._run_stack.enter_context(self._loop.saver.claim_folder())
            for feature in self._features:
                self._run_stack.enter_context(feature.around_run(self._components))
            self._run_stack.enter_context(self._loop.reporter.record_run(self.progress, self._run_facts))

    def _build_saver(self, checkpoint: CheckpointConfig, record: dict[str, Any]) -> Saver | NoSaver:
        """Build the saver of checkpoints, or a stand-in that does nothing if there is no save folder. The modules of the saver are
        imported only if they are needed."""
        if checkpoint.save is None:
            return NoSaver()
        from megatron.training.saver import Saver

        build_entry = import_object("megatron_lab.tokenizers.fingerprint:build_config_entry")
        record = {**record, **build_entry(self.config.data, is_writer=self.context.rank == 0)}
        patience_s = (
            60 * self.config.parallel.distributed_timeout_minutes / 2
        )  # so that the writer fails before a collective of the other ranks times out
        return Saver(checkpoint, self.context, record, self.data.vocab_size, patience_s=patience_s)

    def _resume(self, config: Config, plan: BatchSizePlan, *, in_memory: bool = False) -> ResumePoint:
        """Load weights and state from the checkpoint that the settings name. Without a checkpoint, return the state at iteration 0.

        Args:
            in_memory: whether the nodes keep copies of the run's state in host memory. A copy is loaded if it is newer than the
                checkpoint.
        """
        schedule = startup.make_learning_schedule(config.optimizer, config.training, plan)
        optimizer, scaler = self.steps.optimizer, self.steps.scaler
        if config.checkpoint.load is None and config.checkpoint.pretrained_checkpoint is None:
            resume_point = ResumePoint(Progress(), schedule, None)
        else:
            from megatron.training.resume import resume

            resume_point = resume(
                config, self.context, optimizer, scaler, schedule, self.data.vocab_size, uses_node_memory=in_memory
            )
        self.steps.finish_param_gather()
        return resume_point
