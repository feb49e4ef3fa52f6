"""Log of torch.compile: in which step graphs were compiled, how long that took, and how many graphs came from the cache."""

from __future__ import annotations

from torch._dynamo.utils import calculate_time_spent, counters

from megatron.config.precision import SpeedConfig
from megatron.training.callbacks import Callback
from megatron.training.features import Feature, RunComponents
from megatron.training.progress import Progress
from megatron.training.reporter import Reporter
from megatron.training.step import StepResult


def get_cache_folder() -> str:
    """Return the folder in which torch.compile caches compiled kernels."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


class CompilationCallback(Callback):
    """Callback that logs how long torch.compile took, after each step in which it has compiled graphs.

    The time of these steps includes the compilation.
    """

    def __init__(self, speed: SpeedConfig, reporter: Reporter) -> None:
        self._uses_inductor, self._reporter = speed.compile_backend == "inductor", reporter
        self._num_graphs, self._compile_s, self._num_cache_hits = self._read_counters()

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """Log the compilation time if graphs were compiled in this step. If no graph was compiled, the method only reads one
        counter."""
        if counters["stats"]["unique_graphs"] == self._num_graphs:
            return
        num_graphs, seconds, num_cache_hits = self._read_counters()
        num_new, compile_s, num_cached = (
            num_graphs - self._num_graphs,
            seconds - self._compile_s,
            num_cache_hits - self._num_cache_hits,
        )
        self._num_graphs, self._compile_s, self._num_cache_hits = num_graphs, seconds, num_cache_hits
        cache_text = f", {num_cached} of them from the cache in {get_cache_folder()}" if self._uses_inductor else ""
        self._reporter.log(
            f"  compiled {num_new} graph{'s' * (num_new > 1)} of layers in {compile_s:.1f} s{cache_text}: "
            f"iteration {progress.iteration} took that much longer"
        )
        self._reporter.log_measurements(progress, {"compile_seconds": compile_s})

    @staticmethod
    def _read_counters() -> tuple[int, float, int]:
        """Return the number of graphs compiled so far in this process, the seconds spent on them, and the number of cache hits."""
        times = calculate_time_spent()
        seconds = times.get("entire_frame_compile", 0.0) + times.get("entire_backward_compile", 0.0)
        return counters["stats"]["unique_graphs"], seconds, counters["aot_autograd"]["autograd_cache_hit"]


class CompilationFeature(Feature):
    """Feature of --compile that logs when torch.compile compiles graphs, and how long that takes."""

    def build_callbacks(self, run: RunComponents) -> list[Callback]:
        """Build the callback that logs compilations of torch.compile."""
        return [CompilationCallback(run.config.speed, run.reporter)]
