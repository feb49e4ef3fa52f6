"""Warnings about a run that is likely to fail, with the likely cause and a remedy. Each warning is given once.

There are warnings about a high learning rate at the start, about a loss that stays above its initial value, about a loss that
hardly falls, and about a validation loss far above the training loss. All of them except the first compare measured losses, and
allow for the noise of these losses.
"""

from __future__ import annotations

import math
import statistics
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
"""A learning rate is reported if it is above the usual rate by more than this factor."""
MIN_FITTED_FLOPS = 1e17
"""FLOPs of the smallest runs from which the rule for the usual rate was derived (DeepSeek LLM 2024, section 3.1). For a smaller run
the rule is an extrapolation, so its value is not recommended."""
START_MARGIN = 0.1
"""Difference in nats from which on a loss is above its start. Three times the standard deviation of the latest losses is added."""
MIN_FALL, MIN_FALL_STEPS = 0.1, 50
"""A loss hardly falls if it is less than this difference in nats below its start; and minimum number of steps before this is
reported. With a learning rate that suits the model, the loss falls by several times as much in these steps."""
VALIDATION_MARGIN = 0.5
"""Difference in nats from which on a validation loss is far above the training loss: 1.65 times its perplexity. Twice the standard
error of the training loss is added."""
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
    """Return a warning if the learning rate is more than ten times above the usual rate for a run of this size, else None.

    A low learning rate is not reported here: only the losses of the run show whether it is too low (`LossWarnings`).

    Args:
        learning_rate: value of --lr.
        flops: FLOPs of the complete run, without recomputation.
    """
    if learning_rate <= 0 or flops <= 0:
        return None
    usual_rate = get_usual_learning_rate(flops)
    if learning_rate <= usual_rate * MAX_RATE_RATIO:
        return None
    proposal = f"--lr {usual_rate:.0e}" if flops >= MIN_FITTED_FLOPS else "a lower --lr"
    return (
        f"--lr {learning_rate:g} is {learning_rate / usual_rate:.3g} times above the usual rate of AdamW for {flops:.1e} FLOPs "
        f"from random weights, {usual_rate:.1e} (0.3118 x FLOPs^-0.125, DeepSeek LLM 2024): a rate this high usually makes the "
        f"loss diverge. Unless this is intended, try {proposal}"
    )


class LossWarnings:
    """Checker of a run's losses that returns a warning if they indicate a failing run. Each warning is given once.

    Args:
        total_iterations: iterations of the complete run. The loss may be above its initial value for a twentieth of them (at least
            50, at most 500) before a warning is given.
        corpus: size of the training data, and how it is split.
        first_losses: losses of the first steps of the run, if this start resumes the run and they are known.
        uniform_loss: loss in nats of a model that gives all tokens of the vocabulary the same probability. Set for a run from
            random weights, which starts at about this loss. None for other runs: their loss may stay as it is.
        warmup_samples: samples until the end of the learning rate's warm-up, before which the loss may stay as it is.
    """

    def __init__(
        self,
        total_iterations: int,
        corpus: Corpus,
        first_losses: Sequence[float] = (),
        uniform_loss: float | None = None,
        warmup_samples: float = 0.0,
    ) -> None:
        self._patience, self._corpus = min(500, max(50, total_iterations // 20)), corpus
        self._uniform_loss, self._warmup_samples = uniform_loss, warmup_samples
        self._fall_steps = min(500, max(MIN_FALL_STEPS, total_iterations // 4))
        self._first_losses = list(first_losses)
        self._recent_losses: deque[float] = deque(maxlen=_NUM_RECENT_STEPS)
        self._num_above_start = self._num_after_warmup = 0
        self._issued: set[str] = set()

    def check_step(self, loss: float, samples: int = 0) -> str | None:
        """Check the training loss of a step that made an update. Return a warning if the loss stays above its initial value or
        hardly falls, else None.

        Args:
            loss: mean over the tokens of the step.
            samples: samples of all steps so far, including this one.
        """
        self._recent_losses.append(loss)
        self._num_after_warmup += samples >= self._warmup_samples
        if len(self._first_losses) < NUM_START_STEPS:
            self._first_losses.append(loss)
            return None
        mean, start = statistics.fmean(self._recent_losses), min(self._first_losses)
        is_above = mean > start + START_MARGIN + 3 * statistics.pstdev(self._recent_losses)
        self._num_above_start = self._num_above_start + 1 if is_above else 0
        if self._num_above_start >= self._patience and "start" not in self._issued:
            self._issued.add("start")
            return (
                f"the loss has been above its initial value for {self._num_above_start} iterations: "
                f"{start:.2f} at the start, {mean:.2f} now. "
                "Most likely the learning rate is too high: start again with a third of --lr, or a longer --lr-warmup-iters "
                "(--clip-grad 1.0 helps too). If the loss fell at first, inspect the data read since then "
                "(tools/inspect_data.py --run)"
            )
        return self._check_fall(mean)

    def _check_fall(self, mean: float) -> str | None:
        """Return a warning if a run from random weights still has the loss of its start, `_fall_steps` steps after the warm-up.

        Args:
            mean: mean of the latest losses.
        """
        if self._uniform_loss is None or self._num_after_warmup != self._fall_steps:
            return None
        start = max(self._first_losses)
        if not start - MIN_FALL < mean <= start + START_MARGIN:
            return None
        return (
            f"the loss has hardly fallen in {self._fall_steps} iterations: {start:.2f} at the start, {mean:.2f} now; "
            f"equal probabilities for all tokens of the vocabulary give {self._uniform_loss:.2f}. Most likely --lr is too low, or "
            "the tokens are random for the model, for example because the data was made with another tokenizer "
            "(tools/inspect_data.py shows its text). Compare a few values of --lr, each about three times the one before"
        )

    def check_evaluation(self, loss: float, tokens: int) -> str | None:
        """Check the validation loss. Return a warning if it is far above the training loss, else None. With fewer than ten training
        losses nothing is reported.

        Args:
            loss: loss of the validation split.
            tokens: tokens read for training so far.
        """
        if len(self._recent_losses) < _NUM_RECENT_STEPS or "validation" in self._issued:
            return None
        mean = statistics.fmean(self._recent_losses)
        standard_error = statistics.stdev(self._recent_losses) / math.sqrt(_NUM_RECENT_STEPS)
        rises = len(self._first_losses) == NUM_START_STEPS and mean > min(self._first_losses)
        if rises or not loss > mean + VALIDATION_MARGIN + 2 * standard_error:
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
                "--split takes documents in the order of the files. If this order is not random, or if the validation documents "
                "are few, they differ from the training data: write the data in a random order (tools/preprocess_data.py "
                "--shuffle-seed 1, with --cut-documents if documents are long), or give --valid-data-path"
            )
        else:
            advice = "The validation data differs from the training data. Is this intended?"
        return f"the validation loss, {loss:.2f}, is far above that of training, {mean:.2f}. {advice}"


class WarningCallback(Callback):
    """Callback that checks the losses of a run, and writes warnings to the log and to the history file of the run."""

    def __init__(self, warnings: LossWarnings, reporter: Reporter, seq_length: int) -> None:
        self._warnings, self._reporter, self._seq_length = warnings, reporter, seq_length

    def on_result(self, progress: Progress, result: StepResult | None, samples: int) -> None:
        """Check the training loss, if the step made an update. Log a warning if the loss is above its start or hardly falls."""
        if result is not None and not result.skipped:
            self._report_findings(progress, self._warnings.check_step(result.loss, progress.consumed_samples))

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
        config, resume_point = run.config, run.resume_point
        folder = get_run_folder(config.checkpoint, config.logging)
        first_losses: list[float] = []
        if resume_point.path is not None and folder is not None and run.context.rank == 0:
            first_losses = import_object("megatron.metrics.history:read_first_losses")(folder, NUM_START_STEPS)
        warnings = LossWarnings(
            run.plan.total_iterations,
            run.data.corpus,
            first_losses,
            uniform_loss=math.log(run.step.model.vocab_size) if resume_point.path is None else None,
            warmup_samples=resume_point.schedule.lengths.warmup_samples,
        )
        return [WarningCallback(warnings, run.reporter, config.model.seq_length)]
