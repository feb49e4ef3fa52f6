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
        """What is entered when the run begins to write its record, and left when all of that is closed."""
        return nullcontext()

    def watchers(self, run: Run) -> Sequence[Watcher]:
        """Return what watches the steps. Called before the first step."""
        return ()


@dataclass(frozen=True)
class Requested:
    """A feature, and what asks for it.

    Args:
        made_by: module and class, such as `package.module:Name`.
        wanted: whether a run of these settings on so many ranks has it.
    """

    made_by: str
    wanted: Callable[[Config, int], bool]

    def load(self) -> Callable[[Config], Feature]:
        """Import the class."""
        found: Callable[[Config], Feature] = named(self.made_by)
        return found


def _draws(config: Config) -> bool:
    return run_folder(config.checkpoint, config.logging) is not None and (config.logging.loss_picture or config.logging.report)


HANGS = Requested("megatron_lab.flight.feature:HangFeature", lambda config, ranks: ranks > 1 and config.parallel.hang_warn_s > 0)
PICTURES = Requested("megatron_lab.monitoring.loss_picture:PictureFeature", lambda config, ranks: _draws(config))
FEATURES = (
    Requested(
        "megatron_lab.monitoring.rehearsal:RecomputeFeature",
        lambda config, ranks: config.memory.recompute_layers_per_stage == "auto",
    ),
    Requested("megatron_lab.audit.watchers:TraceFeature", lambda config, ranks: config.debug.save_trace is not None),
    Requested("megatron_lab.audit.watchers:ChecksFeature", lambda config, ranks: config.debug.check_replicas_every is not None),
    Requested(
        "megatron_lab.monitoring.memory_report:MemoryFeature", lambda config, ranks: config.logging.memory_interval is not None
    ),
    Requested("megatron_lab.monitoring.plan_report:PlanFeature", lambda config, ranks: config.logging.plan_report is not None),
    Requested("megatron_lab.monitoring.start_up_log:StartUpFeature", lambda config, ranks: True),
    HANGS,
    # Behind the audit, whose own gradients are none of the step's.
    Requested("megatron_lab.audit.sentinel:SentinelFeature", lambda config, ranks: config.debug.sentinel_interval is not None),
    Requested("megatron_lab.monitoring.compilation:CompilationFeature", lambda config, ranks: config.speed.compile),
    Requested("megatron_lab.monitoring.profiler:ProfileFeature", lambda config, ranks: config.logging.profile),
    Requested("megatron_lab.monitoring.profiler:PipelineProfileFeature", lambda config, ranks: config.logging.profile_pipeline),
    PICTURES,
)
"""All of them. Those of a run watch it in this order."""
_OUT_OF_MEMORY = "megatron_lab.monitoring.out_of_memory:words_for"


class Features:
    """Those that the settings of a run ask for. It is made before ranks connect and before CUDA is used.

    Args:
        world_size: ranks of the job.
        explanations: gets the words for the end of memory.
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
        """See `Feature.begin`."""
        for feature in self:
            feature.begin()

    def connected(self, context: ParallelContext, stack: ExitStack) -> None:
        """See `Feature.connected`."""
        for feature in self:
            feature.connected(context, stack, self._explanations)

    def chosen(self, config: Config, context: ParallelContext) -> Config:
        """See `Feature.chosen`."""
        for feature in self:
            config = feature.chosen(config, context)
        return config

    def built(self, step: TrainStep, vocab_size: int) -> None:
        """Take the built model, for words on a failure."""
        self._step, self._vocab_size = step, vocab_size

    def lines(self, run: Run) -> list[str]:
        """See `Feature.lines`."""
        return [line for feature in self for line in feature.lines(run)]

    def watchers(self, run: Run) -> list[Watcher]:
        """See `Feature.watchers`."""
        return [watcher for feature in self for watcher in feature.watchers(run)]

    def _words(self, error: BaseException) -> str:
        """Explain that memory is exhausted."""
        words: str = named(_OUT_OF_MEMORY)(error, self._config, self, self._step, self._bytes_before, self._vocab_size)
        return words
