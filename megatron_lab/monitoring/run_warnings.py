"""Warnings about a run that likely goes wrong, each given once, with the likely cause and what to do.

They are about the learning rate, at the start; a loss that stays above its start; and a validation loss far above that of training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from megatron.config.imports import named
from megatron.config.outputs import run_folder
from megatron.training.features import Feature, RunParts
from megatron.training.inputs import Corpus
from megatron.training.progress import Progress
from megatron.training.reporter import Reporter
from megatron.training.step import StepResult
from megatron.training.watch import Watcher

FAR_OFF = 10.0
"""A learning rate is told that differs from the usual one by more than this factor. Published runs stay within it: GPT-3 175B and
MT-NLG 530B are the farthest, 6 times below the rule."""
ABOVE_START = 0.1
"""Nats by which a loss is above its start, more than the noise of a loss that does not move."""
FAR_ABOVE = 0.5
"""Nats by which a validation loss is far above training: 1.65 times its perplexity."""
MANY_EPOCHS = 4
"""Reading a corpus so often is about as good as new text; after that a model learns it by heart (Muennighoff et al. 2023)."""
STARTS, _LAST = 5, 10
"""Steps, the least of whose losses is the start, and whose mean loss is the present."""


def usual_rate(flops: float) -> float:
    """The learning rate that AdamW takes from random weights: 0.3118 x FLOPs^-0.125 (DeepSeek LLM, 2024, eq. 1).

    Args:
        flops: of the whole run, by the model itself.
    """
    return float(0.3118 * flops**-0.125)


def rate_far_off(rate: float, flops: float) -> str | None:
    """Return a warning about a learning rate that is far from what the size of a run suggests; None for any other."""
    if rate <= 0 or flops <= 0:
        return None
    usual = usual_rate(flops)
    if usual / FAR_OFF <= rate <= usual * FAR_OFF:
        return None
    what = "so high a rate mostly makes the loss diverge" if rate > usual else "at so low a rate the loss hardly falls"
    ratio = max(rate / usual, usual / rate)
    return (
        f"--lr {rate:g} is {ratio:.3g} times {'above' if rate > usual else 'below'} what AdamW usually takes for {flops:.1e} FLOPs "
        f"from random weights, {usual:.1e} (0.3118 x FLOPs^-0.125, DeepSeek LLM 2024): {what}. Unless it is meant so, try --lr "
        f"{usual:.0e}"
    )


class LossWarnings:
    """Looks at the losses of a run.

    Args:
        total_iterations: of the whole run. A loss is above its start for long if it is for a twentieth of them, at least 50 and at
            most 500.
        first: the losses with which the run began, where this start is not its first and they are known.
    """

    def __init__(self, total_iterations: int, corpus: Corpus, first: Sequence[float] = ()) -> None:
        self._patience, self._corpus = min(500, max(50, total_iterations // 20)), corpus
        self._first = list(first)
        self._recent: deque[float] = deque(maxlen=_LAST)
        self._above_for = 0
        self._told: set[str] = set()

    def step(self, iteration: int, loss: float) -> str | None:
        """Take the loss of a step with an update, and return a warning if it is time for one."""
        self._recent.append(loss)
        if len(self._first) < STARTS:
            self._first.append(loss)
            return None
        mean = sum(self._recent) / len(self._recent)
        start = min(self._first)
        self._above_for = self._above_for + 1 if mean > start + ABOVE_START else 0
        if self._above_for < self._patience or "start" in self._told:
            return None
        self._told.add("start")
        return (
            f"the loss has been above its start for {self._above_for} iterations: {start:.2f} at the start, {mean:.2f} now. "
            "Most likely the learning rate is too high: start again with a third of --lr, or a longer --lr-warmup-iters "
            "(--clip-grad 1.0 helps too). If it began well, look at the data read since (tools/inspect_data.py --run)"
        )

    def evaluation(self, loss: float, tokens: int) -> str | None:
        """Take the loss of the validation split, and return a warning if it is time for one.

        Args:
            tokens: read for training so far.
        """
        if not self._recent or "validation" in self._told:
            return None
        mean = sum(self._recent) / len(self._recent)
        rises = len(self._first) == STARTS and mean > min(self._first)
        if rises or not loss > mean + FAR_ABOVE:
            return None
        self._told.add("validation")
        epochs = tokens / self._corpus.tokens if self._corpus.tokens else 0.0
        if epochs > MANY_EPOCHS:
            why = (
                f"The training data has been read {epochs:.3g} times, so the model knows it by heart: take more text, fewer "
                "iterations (the checkpoint with the lowest validation loss is the best), a smaller model, or more --weight-decay"
            )
        elif self._corpus.split_in_order:
            why = (
                "--split takes documents in the order of the files, so the validation documents may be of another kind: write the "
                "data in a random order (tools/preprocess_data.py --shuffle-seed 1), or give --valid-data-path"
            )
        else:
            why = "The validation data is of another kind than the training data: is that meant?"
        return f"the validation loss, {loss:.2f}, is far above that of training, {mean:.2f}. {why}"


class WarningWatcher(Watcher):
    """Tells the warnings about losses, in the log and in the record of the run."""

    def __init__(self, warnings: LossWarnings, reporter: Reporter, seq_length: int) -> None:
        self._warnings, self._reporter, self._seq_length = warnings, reporter, seq_length

    def on_result(self, progress: Progress, result: StepResult | None, samples: int) -> None:
        """Look at the loss of a step that made an update."""
        if result is not None and not result.skipped:
            self._tell(progress, self._warnings.step(progress.iteration, result.loss))

    def on_evaluation(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Look at the loss of the validation split."""
        if "validation_loss" in values:
            self._tell(progress, self._warnings.evaluation(values["validation_loss"], progress.consumed_samples * self._seq_length))

    def _tell(self, progress: Progress, words: str | None) -> None:
        if words is not None:
            self._reporter.say(f"WARNING: {words}")
            self._reporter.event("warning", progress, words)


class WarningFeature(Feature):
    """The warnings about losses, in every run."""

    def watchers(self, run: RunParts) -> Sequence[Watcher]:
        """Look at all losses."""
        folder = run_folder(run.config.checkpoint, run.config.logging)
        first: list[float] = []
        if run.resumed.path is not None and folder is not None and run.context.rank == 0:
            first = named("megatron.metrics.history:first_losses")(folder, STARTS)
        warnings = LossWarnings(run.plan.total_iterations, run.data.corpus, first)
        return [WarningWatcher(warnings, run.reporter, run.config.model.seq_length)]
