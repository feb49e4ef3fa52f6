"""What the compiler did, for the log: when it compiled, for how long, and what it had from its cache."""

from __future__ import annotations

from torch._dynamo.utils import calculate_time_spent, counters

from megatron.config.precision import SpeedConfig
from megatron.training.features import Feature, RunParts
from megatron.training.progress import Progress
from megatron.training.reporter import Reporter
from megatron.training.step import StepResult
from megatron.training.watch import Watcher


def cache_folder() -> str:
    """Where the compiler keeps kernels."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


class CompilationReports(Watcher):
    """Says after a step in which something was compiled, how long that took: the step's time contains it."""

    def __init__(self, speed: SpeedConfig, reporter: Reporter) -> None:
        self._generates, self._reporter = speed.compile_backend == "inductor", reporter
        self._graphs, self._seconds, self._found = self._now()

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """See `Watcher`. Looks at one number where nothing was compiled."""
        if counters["stats"]["unique_graphs"] == self._graphs:
            return
        graphs, seconds, found = self._now()
        new, took, cached = graphs - self._graphs, seconds - self._seconds, found - self._found
        self._graphs, self._seconds, self._found = graphs, seconds, found
        where = f", {cached} of them from the cache in {cache_folder()}" if self._generates else ""
        self._reporter.say(
            f"  compiled {new} graph{'s' * (new > 1)} of layers in {took:.1f} s{where}: "
            f"iteration {progress.iteration} took that much longer"
        )
        self._reporter.measured(progress, {"compile_seconds": took})

    @staticmethod
    def _now() -> tuple[int, float, int]:
        """Numbers of graphs so far, seconds spent on them, and graphs that were found in the cache."""
        spent = calculate_time_spent()
        seconds = spent.get("entire_frame_compile", 0.0) + spent.get("entire_backward_compile", 0.0)
        return counters["stats"]["unique_graphs"], seconds, counters["aot_autograd"]["autograd_cache_hit"]


class CompilationFeature(Feature):
    """Reports of what --compile does."""

    def watchers(self, run: RunParts) -> list[Watcher]:
        """Report after each step in which something was compiled."""
        return [CompilationReports(run.config.speed, run.reporter)]
