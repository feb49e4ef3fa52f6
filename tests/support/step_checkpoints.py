"""A training step into a checkpoint and out of one, as a run does it."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.save_folder import read_state
from megatron.training.saver import build_global_tensors
from megatron.training.step import TrainStep
from tests.support.checkpoint_worlds import load_tensors, save_checkpoint
from tests.support.runs import checkpoint


def save(step: TrainStep, folder: Path, iteration: int) -> None:
    """Weights, moments and the count of updates."""
    step.finish_param_gather()
    tensors = build_global_tensors(step.optimizer, step.context)
    save_checkpoint(folder, iteration, tensors, {}, {"optimizer_updates": step.optimizer.num_steps})


def load(step: TrainStep, folder: Path, iteration: int) -> None:
    path = checkpoint(folder, iteration)
    load_tensors(path, build_global_tensors(step.optimizer, step.context))
    step.optimizer.copy_main_to_model_params()
    step.optimizer.num_steps = read_state(path)["optimizer_updates"]
    step.finish_param_gather()
