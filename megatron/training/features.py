"""Optional parts of a run (features): the setting that enables each feature, its class, and the points at which the run calls its
methods.

Features are implemented in `megatron_lab`. The table `FEATURES` names their classes as strings, so a feature is imported only if
the settings enable it. Rows without a flag are part of every run: time accounting (goodput), warnings about losses, and the
start-up log. Two features are enabled by default: `--hang-warn-s` if there are several ranks, and `--loss-picture` with `--report`
if the run has a run folder.

To add a feature, write subclasses of `Feature` and `Callback` in `megatron_lab`, add a row to `FEATURES`, and add a setting in
`megatron/config/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.config import Config
from megatron.config.imports import import_object
from megatron.config.outputs import get_run_folder
from megatron.metrics.measures import get_peak_host_bytes
from megatron.parallel.context import ParallelContext
from megatron.training.callbacks import Callback
from megatron.training.failure import Explanations, is_out_of_memory
from megatron.training.inputs import RunData
from megatron.training.loop import Control
from megatron.training.progress import BatchSizePlan, Progress, ResumePoint
from megatron.training.reporter import Reporter
from megatron.training.step import TrainStep

if TYPE_CHECKING:
    from megatron.attention.timing import KernelChoice


@dataclass(frozen=True)
class RunComponents:
    """Components of a run on this rank, which the optional parts of the run (features) receive before the first step.

    If the run later goes back to a checkpoint (a rewind), `plan`, the plan of batch sizes, is not updated.
    """

    config: Config
    context: ParallelContext
    step: TrainStep
    progress: Progress
    reporter: Reporter
    plan: BatchSizePlan
    num_parameters: int
    """Number of parameters of the full model, over all ranks."""
    kernel_choice: KernelChoice | None
    """Attention kernel that was chosen by measurement; None if nothing was measured."""
    data: RunData
    resume_point: ResumePoint
    """State from which the run starts: its progress, its learning-rate schedule, and the loaded checkpoint."""
    started_at: float
    """Time at which the job started, by time.monotonic()."""
    control: Control


class Feature:
    """Base class of the optional parts of a run. All ranks create a feature and call each of its methods, in the order in which
    this class defines them.

    A feature is created before the ranks connect and before CUDA is initialised. Only its constructor may fork processes.

    Args:
        config: settings as the user gave them, before any feature adjusts them.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def on_forks_done(self) -> None:
        """Called when all features are created, but the ranks are not connected yet. From now on CUDA may be used, and no process
        may be forked."""

    def on_connected(self, context: ParallelContext, stack: ExitStack, explanations: Explanations) -> None:
        """Called after the ranks are connected.

        Args:
            stack: exit stack that is closed at the end of the run.
            explanations: registry to which the feature adds explanations of its errors.
        """

    def adjust_config(self, config: Config, context: ParallelContext) -> Config:
        """Return the settings, with the changes that this feature requires. Called before the model is built."""
        return config

    def get_summary_lines(self, run: RunComponents) -> list[str]:
        """Return the lines with which the start-up log of the run begins. A terminal shows them also without --verbose."""
        return []

    def get_startup_lines(self, run: RunComponents) -> list[str]:
        """Return the lines that this feature adds to the start-up log of the run. A terminal shows them only with --verbose, except
        lines that start with "WARNING:"."""
        return []

    def around_run(self, run: RunComponents) -> AbstractContextManager[object]:
        """Return a context manager that is active during the run. It is entered before the run opens its history file
        (`megatron/metrics/history.py`), and left after this file is closed."""
        return nullcontext()

    def build_callbacks(self, run: RunComponents) -> Sequence[Callback]:
        """Return the callbacks by which this feature observes the run. Called before the first step."""
        return ()


@dataclass(frozen=True)
class FeatureRow:
    """Row of the table `FEATURES`: the class of a feature (optional part of a run), and the condition that enables it.

    Args:
        flag: command-line flag that enables the feature, for readers of the table; empty for a feature of every run.
        class_path: module and class of the feature, as `package.module:Name`.
        is_enabled: function that returns whether a run with the given settings and number of ranks has the feature.
    """

    flag: str
    class_path: str
    is_enabled: Callable[[Config, int], bool]

    def load(self) -> Callable[[Config], Feature]:
        """Import and return the class of the feature."""
        feature_class: Callable[[Config], Feature] = import_object(self.class_path)
        return feature_class


def _draws_record(config: Config) -> bool:
    return get_run_folder(config.checkpoint, config.logging) is not None and (config.logging.loss_picture or config.logging.report)


_LAB = "megatron_lab"
PICTURE_FEATURE = FeatureRow("--loss-picture", f"{_LAB}.monitoring.loss_picture:PictureFeature", lambda c, ranks: _draws_record(c))
FEATURES = (
    FeatureRow("", f"{_LAB}.monitoring.goodput:GoodputFeature", lambda c, ranks: not c.training.skip_train),
    FeatureRow("--spike-policy", f"{_LAB}.resilience.spikes:SpikeFeature", lambda c, ranks: c.spikes.spike_policy != "none"),
    FeatureRow("", f"{_LAB}.monitoring.run_warnings:WarningFeature", lambda c, ranks: True),
    FeatureRow(
        "--log-params-norm",
        f"{_LAB}.monitoring.norms:NormFeature",
        lambda c, ranks: c.logging.log_params_norm or c.logging.log_layer_norms,
    ),
    FeatureRow(
        "--recompute-layers-per-stage",
        f"{_LAB}.monitoring.rehearsal:RecomputeFeature",
        lambda c, ranks: c.memory.recompute_layers_per_stage == "auto",
    ),
    FeatureRow("--save-trace", f"{_LAB}.audit.callbacks:TraceFeature", lambda c, ranks: c.debug.save_trace is not None),
    FeatureRow(
        "--check-replicas-every", f"{_LAB}.audit.callbacks:ChecksFeature", lambda c, ranks: c.debug.check_replicas_every is not None
    ),
    FeatureRow(
        "--log-memory", f"{_LAB}.monitoring.memory_report:MemoryFeature", lambda c, ranks: c.logging.memory_interval is not None
    ),
    FeatureRow("--plan-report", f"{_LAB}.monitoring.plan_report:PlanFeature", lambda c, ranks: c.logging.plan_report is not None),
    FeatureRow("", f"{_LAB}.monitoring.start_up_log:StartUpFeature", lambda c, ranks: True),
    FeatureRow("--train-epochs", f"{_LAB}.data_tools.epochs:EpochFeature", lambda c, ranks: c.training.train_epochs is not None),
    FeatureRow("--keep-best", f"{_LAB}.monitoring.keep_best:KeepBestFeature", lambda c, ranks: c.checkpoint.keep_best),
    FeatureRow(
        "--early-stopping-patience",
        f"{_LAB}.monitoring.early_stopping:EarlyStoppingFeature",
        lambda c, ranks: c.training.early_stopping_patience is not None,
    ),
    FeatureRow("--hang-warn-s", f"{_LAB}.flight.feature:HangFeature", lambda c, ranks: ranks > 1 and c.parallel.hang_warn_s > 0),
    # The sentinel follows the checks, because these compute additional gradients in the first step.
    FeatureRow(
        "--sentinel-interval", f"{_LAB}.audit.sentinel:SentinelFeature", lambda c, ranks: c.debug.sentinel_interval is not None
    ),
    FeatureRow("--compile", f"{_LAB}.monitoring.compilation:CompilationFeature", lambda c, ranks: c.speed.compile),
    FeatureRow(
        "--sample-interval", f"{_LAB}.monitoring.text_samples:SampleFeature", lambda c, ranks: c.logging.sample_interval is not None
    ),
    FeatureRow("--profile", f"{_LAB}.monitoring.profiler:ProfileFeature", lambda c, ranks: c.logging.profile),
    FeatureRow(
        "--profile-pipeline", f"{_LAB}.monitoring.profiler:PipelineProfileFeature", lambda c, ranks: c.logging.profile_pipeline
    ),
    PICTURE_FEATURE,
)
"""All features. Their callbacks are called in this order."""
_OUT_OF_MEMORY_EXPLAINER = "megatron_lab.monitoring.out_of_memory:explain_out_of_memory"


class Features:
    """All features (optional parts of a run) that the settings enable. Created before the ranks connect and before CUDA is
    initialised.

    Args:
        world_size: number of ranks of the job.
        explanations: registry to which an explanation of out-of-memory errors is added.
        excluded: rows of features to leave out even if the settings enable them.
    """

    def __init__(self, config: Config, world_size: int, explanations: Explanations, excluded: Sequence[FeatureRow] = ()) -> None:
        self._config, self._explanations = config, explanations
        self._initial_host_bytes, self._vocab_size = get_peak_host_bytes(), 1
        self._step: TrainStep | None = None
        self._features: list[Feature] = []
        explanations.explainers.append((is_out_of_memory, self._explain_out_of_memory))
        for row in FEATURES:
            if row.is_enabled(config, world_size) and row not in excluded:
                self._features.append(row.load()(config))

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._features)

    def on_forks_done(self) -> None:
        """Call `Feature.on_forks_done` of every feature: from now on no process may be forked."""
        for feature in self:
            feature.on_forks_done()

    def on_connected(self, context: ParallelContext, stack: ExitStack) -> None:
        """Call `Feature.on_connected` of every feature, after the ranks are connected."""
        for feature in self:
            feature.on_connected(context, stack, self._explanations)

    def adjust_config(self, config: Config, context: ParallelContext) -> Config:
        """Let each feature adjust the settings, in the order of the table `FEATURES`, and return the adjusted settings."""
        for feature in self:
            config = feature.adjust_config(config, context)
        return config

    def on_built(self, step: TrainStep, vocab_size: int) -> None:
        """Store the training step and the vocabulary size, which the message about an out-of-memory error needs."""
        self._step, self._vocab_size = step, vocab_size

    def get_summary_lines(self, run: RunComponents) -> list[str]:
        """Return the lines with which the start-up log begins, in the order of the table `FEATURES`."""
        return [line for feature in self for line in feature.get_summary_lines(run)]

    def get_startup_lines(self, run: RunComponents) -> list[str]:
        """Return the lines that the features add to the start-up log, in the order of the table `FEATURES`."""
        return [line for feature in self for line in feature.get_startup_lines(run)]

    def build_callbacks(self, run: RunComponents) -> list[Callback]:
        """Return the callbacks of all features, in the order of the table `FEATURES`."""
        return [callback for feature in self for callback in feature.build_callbacks(run)]

    def _explain_out_of_memory(self, error: BaseException) -> str:
        """Return a message for the user that explains an out-of-memory error. If building the message itself fails, for example for
        lack of memory, return the text of the error."""
        try:
            message: str = import_object(_OUT_OF_MEMORY_EXPLAINER)(
                error, self._config, self, self._step, self._initial_host_bytes, self._vocab_size
            )
        except Exception as explanation_error:  # noqa: BLE001 - the text of the original error is still useful
            return f"out of memory: {error}\n  (no further explanation: {type(explanation_error).__name__})"
        return message
