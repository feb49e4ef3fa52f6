"""Samples during training (--sample-interval): texts with which the model continues a few prompts, to see what it has learned."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.parallel.collectives import broadcast_object
from megatron.parallel.context import ParallelContext
from megatron.training.callbacks import Callback
from megatron.training.failure import Explanations, run_on_all_ranks
from megatron.training.features import Feature, RunComponents
from megatron.training.progress import Progress
from megatron.training.step import StepResult
from megatron_lab.data_tools.sample_prompts import SamplePrompt, load_prompts
from megatron_lab.inference.continuation import TextStream
from megatron_lab.inference.generate import Sampling
from megatron_lab.inference.training_samples import TrainingPrompt, TrainingSampler

_MAX_PROMPT_CHARS = 60
"""Maximum number of characters of a prompt in the log, which shows the end of a longer prompt."""
_EMPTY_PROMPT = "(empty prompt)"


@dataclass(frozen=True)
class Sample:
    """Text with which the model continues a prompt."""

    prompt: str
    text: str
    """Generated text, without the prompt."""

    def format_log_line(self) -> str:
        """Return the line of the log: prompt and text in quotes, with escapes instead of newlines and control characters."""
        prompt = self.prompt if len(self.prompt) <= _MAX_PROMPT_CHARS else f"...{self.prompt[-_MAX_PROMPT_CHARS:]}"
        return f'    "{escape_text(prompt)}" -> "{escape_text(self.text)}"'

    def format_lines(self) -> str:
        """Return prompt and text with their newlines, for outputs that show several lines."""
        return _escape_unprintable(f"{self.prompt or _EMPTY_PROMPT}\n-----\n{self.text}", keep="\n\t")


def escape_text(text: str) -> str:
    """Return a text as a single printable line, with the escapes of JSON for newlines, quotes and backslashes."""
    for char, escaped in (("\\", "\\\\"), ("\n", "\\n"), ("\t", "\\t"), ("\r", "\\r"), ('"', '\\"')):
        text = text.replace(char, escaped)
    return _escape_unprintable(text)


def _escape_unprintable(text: str, keep: str = "") -> str:
    """Escape the characters that could move the cursor or change the direction of the text, because a model can generate any
    character.

    Args:
        keep: characters that are not escaped.
    """
    return "".join(char if char.isprintable() or char in keep else f"\\u{ord(char):04x}" for char in text)


def _decode(tokenizer: Tokenizer, prompt: SamplePrompt, ids: Sequence[int]) -> str:
    """Return the text of the ids after a prompt."""
    stream = TextStream(tokenizer.decode, prompt.ids)
    return "".join([*(stream.add(id) for id in ids), stream.finish()])


class SampleCallback(Callback):
    """Callback that generates and writes samples at the interval, and after the last step of the run.

    Args:
        prompts: prompts to continue, the same on all ranks.
    """

    def __init__(self, run: RunComponents, tokenizer: Tokenizer, prompts: Sequence[SamplePrompt]) -> None:
        logging, seq_length = run.config.logging, run.config.model.seq_length
        self._interval, self._run, self._tokenizer, self._prompts = logging.sample_interval, run, tokenizer, prompts
        self._sampling = Sampling(logging.sample_temperature, seed=run.config.training.seed)
        self._sampler = TrainingSampler(run.config, run.step, tokenizer)
        self._requests = [
            TrainingPrompt(prompt.ids, min(logging.sample_tokens, seq_length - len(prompt.ids))) for prompt in prompts
        ]
        self._last_iteration = run.progress.iteration
        """Iteration after which samples were generated last, or at which the run started."""

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """Generate and write the samples, if they are due. After a step that the run discards by going back to a checkpoint, do
        nothing."""
        if progress.is_multiple_of(self._interval) and self._run.control.rewind is None:
            self._write_samples(progress)

    def after_rewind(self, progress: Progress) -> None:
        """Forget samples after the iteration to which the run has gone back."""
        self._last_iteration = min(self._last_iteration, progress.iteration)

    def on_end(self) -> None:
        """Generate and write the samples of a complete run, if its last step was not a multiple of the interval."""
        progress, control = self._run.progress, self._run.control
        is_complete = progress.iteration == self._run.plan.total_iterations or control.end_reason is not None
        if is_complete and progress.iteration != self._last_iteration:
            self._write_samples(progress)

    def _write_samples(self, progress: Progress) -> None:
        self._last_iteration, reporter, control = progress.iteration, self._run.reporter, self._run.control
        control.notify_phase("sampling")
        with reporter.pause("generating samples", progress):
            ids = self._sampler.generate(self._requests, self._sampling, control.has_exit_signal)
            if ids is None:
                reporter.log(f"  the samples at iteration {progress.iteration} are given up on a signal")
            else:
                samples = [
                    Sample(prompt.text, _decode(self._tokenizer, prompt, new_ids))
                    for prompt, new_ids in zip(self._prompts, ids, strict=True)
                ]
                reporter.log(f"  samples at iteration {progress.iteration}:")
                for sample in samples:
                    reporter.log(sample.format_log_line())
                for number, sample in enumerate(samples, 1):
                    reporter.log_text(progress, f"samples/prompt {number}", sample.format_lines())
                reporter.record_samples(progress, [vars(sample) for sample in samples])
        control.notify_phase("between steps")


class SampleFeature(Feature):
    """Feature of --sample-interval: samples of generated text during training."""

    def on_connected(self, context: ParallelContext, stack: ExitStack, explanations: Explanations) -> None:
        """Read the prompts. Every rank checks the file, so that a run with a bad file ends before it trains. All ranks use the
        prompts of the first rank.

        Raises:
            SetupError: the prompts cannot be used, or the tokenizer is not known.
        """
        self._tokenizer, prompts = run_on_all_ranks(context, self._load)
        self._prompts: list[SamplePrompt] = broadcast_object(prompts, context.world)

    def get_startup_lines(self, run: RunComponents) -> list[str]:
        """Return the line that says how many samples are generated, and when."""
        logging, num_prompts = self.config.logging, len(self._prompts)
        source = "default prompts" if logging.sample_prompts is None else f"prompts of {logging.sample_prompts}"
        mode = "greedy" if logging.sample_temperature == 0 else f"temperature {logging.sample_temperature:g}"
        return [
            f"samples every {logging.sample_interval} steps and at the end: {num_prompts} {source}, up to "
            f"{logging.sample_tokens} tokens each, {mode}"
        ]

    def build_callbacks(self, run: RunComponents) -> Sequence[Callback]:
        """Build the callback that generates the samples.

        Raises:
            ValueError: a prompt has an id that the model does not have.
        """
        max_id = max(max(prompt.ids) for prompt in self._prompts)
        if max_id >= run.step.model.vocab_size:
            raise ValueError(
                f"--sample-interval: the prompts have token ids up to {max_id}, but the model has only ids below "
                f"{run.step.model.vocab_size}. Set --tokenizer-type and its files to the tokenizer of the data."
            )
        return [SampleCallback(run, self._tokenizer, self._prompts)]

    def _load(self) -> tuple[Tokenizer, list[SamplePrompt]]:
        if self.config.data.tokenizer_type is None:
            raise ValueError(
                "--sample-interval needs the tokenizer of the data, to write text: set --tokenizer-type and its files."
            )
        tokenizer = build_tokenizer(self.config.data)
        return tokenizer, load_prompts(self.config, tokenizer)
