"""Python interface of the framework: start training runs from a program or a notebook, observe them with callbacks, and verify
parallel layouts. The command line uses the same classes.

docs/python.md has examples.
"""

from megatron.api.runs import Trainer, build_model, connect, settings, verify_layout, write_dataset
from megatron.config.cli import LoadedConfig
from megatron.config.errors import ConfigError, Violation
from megatron.model.mlp import register_activation
from megatron.optimizer.rule import StateSpec, Target, TensorLists, Update, UpdateRule, scaled
from megatron.optimizer.rules import register_optimizer
from megatron.parallel.context import ParallelContext, disconnect
from megatron.training.callbacks import Callback, register_metric
from megatron.training.failure import NonFiniteError, SetupError
from megatron.training.inputs import RunData, open_data
from megatron.training.progress import Progress
from megatron.training.step import StepResult, TrainStep
from megatron_lab.inference.generate import Sampling
from megatron_lab.inference.language_model import LanguageModel

KeptState, Lists = StateSpec, TensorLists
"""Former names of `StateSpec` and `TensorLists`."""

__all__ = [
    "Callback",
    "ConfigError",
    "KeptState",
    "LanguageModel",
    "Lists",
    "LoadedConfig",
    "NonFiniteError",
    "ParallelContext",
    "Progress",
    "RunData",
    "Sampling",
    "SetupError",
    "StateSpec",
    "StepResult",
    "Target",
    "TensorLists",
    "TrainStep",
    "Trainer",
    "Update",
    "UpdateRule",
    "Violation",
    "build_model",
    "connect",
    "disconnect",
    "open_data",
    "register_activation",
    "register_metric",
    "register_optimizer",
    "scaled",
    "settings",
    "verify_layout",
    "write_dataset",
]
