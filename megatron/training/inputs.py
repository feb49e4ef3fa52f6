"""The data of a run on this rank: the tokenizer's facts, the datasets, and the steps made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.config.config import Config
from megatron.data.batches import SampleSource
from megatron.data.build import Datasets, build_datasets
from megatron.data.split import parse_split
from megatron.data.tokenizers.build import build_tokenizer
from megatron.model.inputs import ModelInputs
from megatron.parallel.context import ParallelContext
from megatron.pipeline_parallel.schedules.registry import placement
from megatron.training.batch_size import BatchSizePlan
from megatron.training.batches import BatchMaker, reads_tokens
from megatron.training.together import together

Batches = Iterator[list[ModelInputs]]


@dataclass(frozen=True)
class RunData:
    """What this rank reads, and how it becomes the inputs of a step."""

    vocab_size: int
    datasets: Datasets | None
    """None on a rank whose stage takes no tokens."""
    config: Config
    maker: BatchMaker
    has_validation: bool
    has_test: bool

    def training(self, plan: BatchSizePlan, consumed_samples: int) -> Batches:
        """Training steps from a number of consumed samples on."""
        return self.maker.training(
            self.datasets.train if self.datasets else None,
            global_batch_size_at=plan.global_batch_size,
            consumed_samples=consumed_samples,
            total_samples=plan.total_samples,
            num_workers=self.config.data.num_workers,
        )

    def validation(self, plan: BatchSizePlan) -> Callable[[], Batches] | None:
        """Evaluation batches, always the same; None if the run has no evaluation."""
        return self._held_out(self.datasets.valid if self.datasets else None, plan) if self.has_validation else None

    def test(self, plan: BatchSizePlan) -> Callable[[], Batches] | None:
        """Batches of the test split; None if it has no share of the data."""
        return self._held_out(self.datasets.test if self.datasets else None, plan) if self.has_test else None

    def describe(self, plan: BatchSizePlan) -> list[str]:
        """Lines of the start-up log (on a rank that reads data)."""
        if self.datasets is None:
            return []
        epochs = self.datasets.train.epochs_for(plan.total_samples)
        return [*self.datasets.describe(), f"the run takes {plan.total_samples:,} training samples, {epochs:.2f} epochs"]

    def _held_out(self, source: SampleSource | None, plan: BatchSizePlan) -> Callable[[], Batches]:
        batch, count = plan.final_global_batch_size, self.config.training.eval_iters
        return lambda: self.maker.evaluation(source, global_batch_size=batch, num_batches=count)


def open_data(config: Config, context: ParallelContext) -> RunData:
    """Open and check tokenizer and datasets on every rank that needs them; all ranks call it together.

    Raises:
        SetupError: something is missing or damaged on some rank.
    """
    training, evaluates = config.training, config.training.eval_iters > 0
    parallel = config.parallel
    chunks = parallel.chunks_per_stage(config.model.num_layers)
    stage_of_chunk = placement(parallel.schedule, parallel.pipeline_model_parallel_size, chunks)
    test_share = not config.data.mock_data and parse_split(config.data.split)[2] > 0

    def build() -> tuple[int, Datasets | None]:
        tokenizer = build_tokenizer(config.data)
        if not reads_tokens(context, stage_of_chunk):
            return tokenizer.vocab_size, None
        datasets = build_datasets(
            config.data,
            seed=training.seed,
            seq_length=config.model.seq_length,
            tokenizer=tokenizer,
            need_validation=evaluates,
            need_test=evaluates and test_share,
        )
        return tokenizer.vocab_size, datasets

    vocab_size, datasets = together(context, build)
    maker = BatchMaker(context, training.seed, config.model.seq_length, training.micro_batch_size)
    return RunData(vocab_size, datasets, config, maker, evaluates, evaluates and test_share)
