"""The configuration of a run: one frozen dataclass per topic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.config.data import DataConfig
from megatron.config.memory import MemoryConfig
from megatron.config.model import ModelConfig
from megatron.config.outputs import CheckpointConfig, DebugConfig, LoggingConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig, SpeedConfig
from megatron.config.training import OptimizerConfig, SpikeConfig, TrainingConfig


@dataclass(frozen=True)
class Config:
    """All settings of a run, by topic. A function should take only the topics that it needs, instead of the whole `Config`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the value of every setting by topic and name: ``to_dict()["model"]["num_layers"]``. (`dataclasses.asdict` would
        copy every value, which takes milliseconds.)"""
        return {topic: {**vars(topic_config)} for topic, topic_config in vars(self).items()}

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of each sequence on one context-parallel rank."""
        return self.model.seq_length // self.parallel.context_parallel_size
