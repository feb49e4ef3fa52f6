"""Optional parts of a run: which setting asks for each part, where its code is, and when it takes part.

Their code lies in `megatron_lab`. The table `FEATURES` names it by texts, so a part is imported only if the settings ask for it.
Rows without a flag are in every run: its account of time (goodput), warnings about losses, and the start-up log. Two rows are on by
default: `--hang-warn-s` if there are several ranks, and `--loss-picture` with `--report` if the run keeps a record.

To add a feature, write a `Feature` and its `Watcher` in `megatron_lab`, add a row here, and a setting in `megatron/config/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.config import Config
from megatron.config.imports import named
from megatron.config.outputs import run_folder
from megatron.metrics.measures import process_bytes
from megatron.parallel.context import ParallelContext
from megatron.training.failure import Explanations, is_out_of_memory
from megatron.training.inputs import RunData
from megatron.training.loop import Control
from megatron.training.progress import BatchSizePlan, Progress, Resumed
from megatron.training.reporter import Reporter
from megatron.training.step import TrainStep
from megatron.training.watch import Watcher

if TYPE_CHECKING:
    from megatron.attention.timing import KernelChoice


@dataclass(frozen=True)
class RunParts:
    """Holds the parts of a run on this rank, as a feature gets them before the first step. A rewind leaves the plan."""

    config: Config
    context: ParallelContext
    step: TrainStep
    progress: Progress
    reporter: Reporter
    plan: BatchSizePlan
    num_parameters: int
    """Parameters of the whole model."""
    kernel_choice: KernelChoice | None
    """Attention's kernel, if it was measured."""
    data: RunData
    resumed: Resumed
    """The place from which the run goes on."""
    started_at: float
    """When the job started, by time.monotonic()."""
    control: Control


class Feature:
    """An optional part of a run. All ranks create it, and call each of its methods together, in the order in which they stand here.

    It is created before the ranks connect and before CUDA is used. This is the only time at which a feature may fork.

    Args:
        config: the settings as they were given.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def begin(self) -> None:
        """Called after every feature is created. From now on CUDA may be used, so no process may be forked. Ranks are not connected
        yet."""

    def connected(self, context: ParallelContext, stack: ExitStack, explanations: Explanations) -> None:
        """Called when the ranks are connected.

        Args:
            stack: closed at the end of the run.
            explanations: takes explanations of errors that only this feature can give.
        """

    def adjust_config(self, config: Config, context: ParallelContext) -> Config:
        """Return the settings, changed where this feature decides one. Called before the model is built."""
        return config

    def start_up_lines(self, run: RunParts) -> list[str]:
        """Return lines for the start-up log."""
        return []

    def around_run(self, run: RunParts) -> AbstractContextManager[object]:
        """Return a context manager that is entered before the run opens its record, and left after the record is closed."""
        return nullcontext()

    def watchers(self, run: RunParts) -> Sequence[Watcher]:
        """Return what watches the steps. Called before the first step."""
        return ()


@dataclass(frozen=True)
class FeatureRow:
    """A row of the table of features: which flag asks for a feature, and where its class is.

    Args:
        flag: the flag that asks for it, for readers; empty for a feature of every run.
        class_path: its module and class: `package.module:Name`.
        wanted: whether a run of these settings on so many ranks has it.
    """

    flag: str
    class_path: str
    wanted: Callable[[Config, int], bool]

    def load(self) -> Callable[[Config], Feature]:
        """Import the class of the feature."""
        found: Callable[[Config], Feature] = named(self.class_path)
        return found


def _draws(config: Config) -> bool:
    return run_folder(config.checkpoint, config.logging) is not None and (config.logging.loss_picture or config.logging.report)


_LAB = "megatron_lab"
PICTURES = FeatureRow("--loss-picture", f"{_LAB}.monitoring.loss_picture:PictureFeature", lambda c, ranks: _draws(c))
FEATURES = (
    FeatureRow("", f"{_LAB}.monitoring.goodput:GoodputFeature", lambda c, ranks: True),
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
    FeatureRow("--save-trace", f"{_LAB}.audit.watchers:TraceFeature", lambda c, ranks: c.debug.save_trace is not None),
    FeatureRow(
        "--check-replicas-every", f"{_LAB}.audit.watchers:ChecksFeature", lambda c, ranks: c.debug.check_replicas_every is not None
    ),
    FeatureRow(
        "--log-memory", f"{_LAB}.monitoring.memory_report:MemoryFeature", lambda c, ranks: c.logging.memory_interval is not None
    ),
    FeatureRow("--plan-report", f"{_LAB}.monitoring.plan_report:PlanFeature", lambda c, ranks: c.logging.plan_report is not None),
    FeatureRow("", f"{_LAB}.monitoring.start_up_log:StartUpFeature", lambda c, ranks: True),
    FeatureRow("--hang-warn-s", f"{_LAB}.flight.feature:HangFeature", lambda c, ranks: ranks > 1 and c.parallel.hang_warn_s > 0),
    # The sentinel comes after the checks, which compute gradients of their own in the first step.
    FeatureRow(
        "--sentinel-interval", f"{_LAB}.audit.sentinel:SentinelFeature", lambda c, ranks: c.debug.sentinel_interval is not None
    ),
    FeatureRow("--compile", f"{_LAB}.monitoring.compilation:CompilationFeature", lambda c, ranks: c.speed.compile),
    FeatureRow("--profile", f"{_LAB}.monitoring.profiler:ProfileFeature", lambda c, ranks: c.logging.profile),
    FeatureRow(
        "--profile-pipeline", f"{_LAB}.monitoring.profiler:PipelineProfileFeature", lambda c, ranks: c.logging.profile_pipeline
    ),
    PICTURES,
)
"""All features. Their watchers are called in this order."""
_OUT_OF_MEMORY = "megatron_lab.monitoring.out_of_memory:words_for"


class Features:
    """The features that the settings of a run ask for. Create it before ranks connect and before CUDA is used.

    Args:
        world_size: ranks of the job.
        explanations: gets an explanation for errors of exhausted memory.
        without: features that the run does not have, whatever the settings say.
    """

    def __init__(self, config: Config, world_size: int, explanations: Explanations, without: Sequence[FeatureRow] = ()) -> None:
        self._config, self._explanations = config, explanations
        self._bytes_before, self._vocab_size = process_bytes(), 1
        self._step: TrainStep | None = None
        self._features: list[Feature] = []
        explanations.known.append((is_out_of_memory, self._words))
        for row in FEATURES:
            if row.wanted(config, world_size) and row not in without:
                self._features.append(row.load()(config))

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._features)

    def begin(self) -> None:
        """Tell every feature that all forks are over."""
        for feature in self:
            feature.begin()

    def connected(self, context: ParallelContext, stack: ExitStack) -> None:
        """Tell every feature that the ranks are connected."""
        for feature in self:
            feature.connected(context, stack, self._explanations)

    def adjust_config(self, config: Config, context: ParallelContext) -> Config:
        """Return the settings, changed where features decide some."""
        for feature in self:
            config = feature.adjust_config(config, context)
        return config

    def built(self, step: TrainStep, vocab_size: int) -> None:
        """Keep the built model for messages about exhausted memory."""
        self._step, self._vocab_size = step, vocab_size

    def start_up_lines(self, run: RunParts) -> list[str]:
        """Return the start-up lines of all features, in the order of the table."""
        return [line for feature in self for line in feature.start_up_lines(run)]

    def watchers(self, run: RunParts) -> list[Watcher]:
        """Return the watchers of all features, in the order of the table."""
        return [watcher for feature in self for watcher in feature.watchers(run)]

    def _words(self, error: BaseException) -> str:
        """Explain that memory is exhausted, as far as there is memory left to import and make the explanation."""
        try:
            words: str = named(_OUT_OF_MEMORY)(error, self._config, self, self._step, self._bytes_before, self._vocab_size)
        except Exception as other:  # noqa: BLE001 - the error itself is still worth more than nothing
            return f"out of memory: {error}\n  (more cannot be said: {type(other).__name__})"
        return words
