"""Warnings about a run that is likely to fail, with the likely cause and a remedy. Each warning is given once.

There are warnings about the learning rate at the start, about a loss that stays above its initial value, and about a validation
loss far above the training loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from megatron.config.imports import import_object
from megatron.config.outputs import get_run_folder
from megatron.training.callbacks import Callback
from megatron.training.features import Feature, RunComponents
from megatron.training.inputs import Corpus
from megatron.training.progress import Progress
from megatron.training.reporter import Reporter
from megatron.training.step import StepResult

MAX_RATE_RATIO = 10.0
"""A learning rate is reported if it differs from the usual rate by more than this factor. Published runs stay within it: GPT-3
175B and MT-NLG 530B differ most, 6 times below the rule."""
START_MARGIN = 0.1
"""Difference in nats from which on a loss is above its start. It exceeds the noise of a loss that does not change."""
VALIDATION_MARGIN = 0.5
"""Difference in nats from which on a validation loss is far above the training loss: 1.65 times its perplexity."""
MAX_EPOCHS = 4
"""Up to this number of epochs, repeated text is about as useful as new text. After that a model memorizes it (Muennighoff et
al. 2023)."""
NUM_START_STEPS, _NUM_RECENT_STEPS = 5, 10
"""First steps, whose minimum loss is the start; and latest steps, whose mean loss is the current loss."""


def get_usual_learning_rate(flops: float) -> float:
    """Return the usual learning rate of AdamW for training from random weights: 0.3118 x FLOPs^-0.125 (DeepSeek LLM, 2024, eq. 1).

    Args:
        flops: FLOPs of the complete run, without recomputation.
    """
    return float(0.3118 * flops**-0.125)


def check_learning_rate(learning_rate: float, flops: float) -> str | None:
    """Return a warning if the learning rate differs more than tenfold from the usual rate for a run of this size, else None.

    Args:
        learning_rate: value of --lr.
        flops: FLOPs of the complete run, without recomputation.
    """
    if learning_rate <= 0 or flops <= 0:
        return None
    usual_rate = get_usual_learning_rate(flops)
    if usual_rate / MAX_RATE_RATIO <= learning_rate <= usual_rate * MAX_RATE_RATIO:
        return None
    consequence = (
        "a rate this high usually makes the loss diverge"
        if learning_rate > usual_rate
        else "at a rate this low the loss hardly falls"
    )
    ratio = max(learning_rate / usual_rate, usual_rate / learning_rate)
    return (
        f"--lr {learning_rate:g} is {ratio:.3g} times {'above' if learning_rate > usual_rate else 'below'} the usual rate "
        f"of AdamW for {flops:.1e} FLOPs from random weights, {usual_rate:.1e} (0.3118 x FLOPs^-0.125, DeepSeek LLM 2024): "
        f"{consequence}. Unless this is intended, try --lr {usual_rate:.0e}"
    )


class LossWarnings:
    """Checker of a run's losses that returns a warning if they indicate a failing run. Each warning is given once.

    Args:
        total_iterations: iterations of the complete run. The loss may be above its initial value for a twentieth of them (at least
            50, at most 500) before a warning is given.
        corpus: size of the training data, and how it is split.
        first_losses: losses of the first steps of the run, if this start resumes the run and they are known.
    """

    def __init__(self, total_iterations: int, corpus: Corpus, first_losses: Sequence[float] = ()) -> None:
        self._patience, self._corpus = min(500, max(50, total_iterations // 20)), corpus
        self._first_losses = list(first_losses)
        self._recent_losses: deque[float] = deque(maxlen=_NUM_RECENT_STEPS)
        self._num_above_start = 0
        self._issued: set[str] = set()

    def check_step(self, iteration: int, loss: float) -> str | None:
        """Check the training loss of a step that made an update. Return a warning if the loss stays above its initial value, else
        None."""
        self._recent_losses.append(loss)
        if len(self._first_losses) < NUM_START_STEPS:
            self._first_losses.append(loss)
            return None
        mean = sum(self._recent_losses) / len(self._recent_losses)
        start = min(self._first_losses)
        self._num_above_start = self._num_above_start + 1 if mean > start + START_MARGIN else 0
        if self._num_above_start < self._patience or "start" in self._issued:
            return None
        self._issued.add("start")
        return (
            f"the loss has been above its initial value for {self._num_above_start} iterations: "
            f"{start:.2f} at the start, {mean:.2f} now. "
            "Most likely the learning rate is too high: start again with a third of --lr, or a longer --lr-warmup-iters "
            "(--clip-grad 1.0 helps too). If the loss fell at first, inspect the data read since then (tools/inspect_data.py --run)"
        )

    def check_evaluation(self, loss: float, tokens: int) -> str | None:
        """Check the validation loss. Return a warning if it is far above the training loss, else None.

        Args:
            loss: loss of the validation split.
            tokens: tokens read for training so far.
        """
        if not self._recent_losses or "validation" in self._issued:
            return None
        mean = sum(self._recent_losses) / len(self._recent_losses)
        rises = len(self._first_losses) == NUM_START_STEPS and mean > min(self._first_losses)
        if rises or not loss > mean + VALIDATION_MARGIN:
            return None
        self._issued.add("validation")
        epochs = tokens / self._corpus.num_tokens if self._corpus.num_tokens else 0.0
        if epochs > MAX_EPOCHS:
            advice = (
                f"The training data has been read {epochs:.3g} times, so the model has memorized it: use more text, fewer "
                "iterations (the checkpoint with the lowest validation loss is the best), a smaller model, or more --weight-decay"
            )
        elif self._corpus.has_sequential_split:
            advice = (
                "--split takes documents in the order of the files, so the validation documents may differ from the training data: "
                "write the data in a random order (tools/preprocess_data.py --shuffle-seed 1), or give --valid-data-path"
            )
        else:
            advice = "The validation data differs from the training data. Is this intended?"
        return f"the validation loss, {loss:.2f}, is far above that of training, {mean:.2f}. {advice}"


class WarningCallback(Callback):
    """Callback that checks the losses of a run, and writes warnings to the log and to the history file of the run."""

    def __init__(self, warnings: LossWarnings, reporter: Reporter, seq_length: int) -> None:
        self._warnings, self._reporter, self._seq_length = warnings, reporter, seq_length

    def on_result(self, progress: Progress, result: StepResult | None, samples: int) -> None:
        """Check the training loss, if the step made an update. Log a warning if it stays above its initial value."""
        if result is not None and not result.skipped:
            self._report_findings(progress, self._warnings.check_step(progress.iteration, result.loss))

    def on_evaluation(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Check the validation loss. Log a warning if it is far above the training loss."""
        if "validation_loss" in values:
            self._report_findings(
                progress, self._warnings.check_evaluation(values["validation_loss"], progress.consumed_samples * self._seq_length)
            )

    def _report_findings(self, progress: Progress, warning: str | None) -> None:
        if warning is not None:
            self._reporter.log(f"WARNING: {warning}")
            self._reporter.record_event("warning", progress, warning)


class WarningFeature(Feature):
    """Feature that warns about losses that indicate a failing run. It is enabled in every run."""

    def build_callbacks(self, run: RunComponents) -> Sequence[Callback]:
        """Build the callback that checks the training and validation losses."""
        folder = get_run_folder(run.config.checkpoint, run.config.logging)
        first_losses: list[float] = []
        if run.resume_point.path is not None and folder is not None and run.context.rank == 0:
            first_losses = import_object("megatron.metrics.history:read_first_losses")(folder, NUM_START_STEPS)
        warnings = LossWarnings(run.plan.total_iterations, run.data.corpus, first_losses)
        return [WarningCallback(warnings, run.reporter, run.config.model.seq_length)]
