"""Optional parts of a run: what asks for each, where it is, and when it takes part.

They lie outside of the core, which knows them by the names in `FEATURES` alone. One that nothing asks for is not imported.
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
from megatron.training.progress import BatchSizePlan, Progress
from megatron.training.reporter import Reporter
from megatron.training.step import TrainStep
from megatron.training.watch import Watcher

if TYPE_CHECKING:
    from megatron.attention.timing import KernelChoice


@dataclass(frozen=True)
class Run:
    """The parts of a run on this rank, when its first step is about to begin."""

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


class Feature:
    """An optional part of a run. All ranks make it, and call each of its methods together, in the order in which they stand here.

    It is made before ranks connect and before CUDA is used. Only then may it fork.

    Args:
        config: the settings as they were given.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def begin(self) -> None:
        """Called when all forks are over: CUDA may be used from now on. Ranks are not connected yet."""

    def connected(self, context: ParallelContext, stack: ExitStack, explanations: Explanations) -> None:
        """Called when the ranks are connected.

        Args:
            stack: closed at the end of the run.
            explanations: takes words for errors.
        """

    def chosen(self, config: Config, context: ParallelContext) -> Config:
        """Return the settings with what the feature chooses. Called before the model is built."""
        return config

    def lines(self, run: Run) -> list[str]:
        """Return lines for the start-up log."""
        return []

    def around_run(self, run: Run) -> AbstractContextManager[object]:
        """Return a context manager that is entered before the run opens its record, and left after the record is closed."""
        return nullcontext()

    def watchers(self, run: Run) -> Sequence[Watcher]:
        """Return what watches the steps. Called before the first step."""
        return ()


@dataclass(frozen=True)
class Requested:
    """A row of the table of features: what asks for a feature, and where it is.

    Args:
        flag: the flag that asks for it, for readers; empty for a feature of every run.
        made_by: its module and class, such as `package.module:Name`.
        wanted: whether a run of these settings on so many ranks has it.
    """

    flag: str
    made_by: str
    wanted: Callable[[Config, int], bool]

    def load(self) -> Callable[[Config], Feature]:
        """Import the class of the feature."""
        found: Callable[[Config], Feature] = named(self.made_by)
        return found


def _draws(config: Config) -> bool:
    return run_folder(config.checkpoint, config.logging) is not None and (config.logging.loss_picture or config.logging.report)


_LAB = "megatron_lab"
PICTURES = Requested("--loss-picture", f"{_LAB}.monitoring.loss_picture:PictureFeature", lambda c, ranks: _draws(c))
FEATURES = (
    Requested(
        "--recompute-layers-per-stage",
        f"{_LAB}.monitoring.rehearsal:RecomputeFeature",
        lambda c, ranks: c.memory.recompute_layers_per_stage == "auto",
    ),
    Requested("--save-trace", f"{_LAB}.audit.watchers:TraceFeature", lambda c, ranks: c.debug.save_trace is not None),
    Requested(
        "--check-replicas-every", f"{_LAB}.audit.watchers:ChecksFeature", lambda c, ranks: c.debug.check_replicas_every is not None
    ),
    Requested(
        "--log-memory", f"{_LAB}.monitoring.memory_report:MemoryFeature", lambda c, ranks: c.logging.memory_interval is not None
    ),
    Requested("--plan-report", f"{_LAB}.monitoring.plan_report:PlanFeature", lambda c, ranks: c.logging.plan_report is not None),
    Requested("", f"{_LAB}.monitoring.start_up_log:StartUpFeature", lambda c, ranks: True),
    Requested("--hang-warn-s", f"{_LAB}.flight.feature:HangFeature", lambda c, ranks: ranks > 1 and c.parallel.hang_warn_s > 0),
    # The sentinel comes after the checks, which compute gradients of their own in the first step.
    Requested(
        "--sentinel-interval", f"{_LAB}.audit.sentinel:SentinelFeature", lambda c, ranks: c.debug.sentinel_interval is not None
    ),
    Requested("--compile", f"{_LAB}.monitoring.compilation:CompilationFeature", lambda c, ranks: c.speed.compile),
    Requested("--profile", f"{_LAB}.monitoring.profiler:ProfileFeature", lambda c, ranks: c.logging.profile),
    Requested(
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

    def __init__(self, config: Config, world_size: int, explanations: Explanations, without: Sequence[Requested] = ()) -> None:
        self._config, self._explanations = config, explanations
        self._bytes_before, self._vocab_size = process_bytes(), 1
        self._step: TrainStep | None = None
        explanations.known.append((is_out_of_memory, self._words))
        wanted = [one for one in FEATURES if one.wanted(config, world_size) and one not in without]
        self._features = [one.load()(config) for one in wanted]

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

    def chosen(self, config: Config, context: ParallelContext) -> Config:
        """Return the settings with what each feature chooses."""
        for feature in self:
            config = feature.chosen(config, context)
        return config

    def built(self, step: TrainStep, vocab_size: int) -> None:
        """Take the built model, for words on a failure."""
        self._step, self._vocab_size = step, vocab_size

    def lines(self, run: Run) -> list[str]:
        """Return the start-up lines of all features, in the order of the table."""
        return [line for feature in self for line in feature.lines(run)]

    def watchers(self, run: Run) -> list[Watcher]:
        """Return the watchers of all features, in the order of the table."""
        return [watcher for feature in self for watcher in feature.watchers(run)]

    def _words(self, error: BaseException) -> str:
        """Explain that memory is exhausted."""
        words: str = named(_OUT_OF_MEMORY)(error, self._config, self, self._step, self._bytes_before, self._vocab_size)
        return words
