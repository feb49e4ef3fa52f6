"""What the run tells, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LoggingConfig:
    """Log line, metrics file, TensorBoard, Weights & Biases, timers and profiler."""

    log_interval: int = 100
    """Steps between log lines."""
    log_throughput: bool = False
    """Add TFLOP/s for each device to the log line."""
    log_params_norm: bool = False
    """Add the norm of all parameters to the log line."""
    log_num_zeros_in_grad: bool = False
    """Add the number of zeros in the gradient to the log line."""
    log_layer_norms: bool = False
    """Log gradient and weight norms of each layer (TensorBoard and metrics file)."""
    metrics_file: str | None = None
    """Write one JSON object a line for every logged iteration and evaluation, with full digits."""
    timing_log_level: int = 0
    """Detail of the timers, 0 to 2."""
    timing_log_option: Literal["minmax", "max", "all"] = "minmax"
    """How timers of several ranks are shown."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard."""
    tensorboard_log_interval: int = 1
    """Steps between TensorBoard points."""
    log_timers_to_tensorboard: bool = False
    """Write timers to TensorBoard too."""
    log_memory_to_tensorboard: bool = False
    """Write device memory to TensorBoard too."""
    wandb_project: str | None = None
    """Project at Weights & Biases (needs the wandb extra)."""
    wandb_exp_name: str | None = None
    """Name of the run at Weights & Biases."""
    profile: bool = False
    """Record steps --profile-step-start to --profile-step-end with torch's profiler."""
    profile_pipeline: bool = False
    """Write the measured timeline of the pipeline in step --profile-step-start, beside the planned one, to --profile-dir."""
    profile_step_start: int = 10
    """First step to record (the first iteration is 1)."""
    profile_step_end: int = 12
    """Step to stop recording before."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that record."""
    profile_dir: str = "profile"
    """Folder for the Chrome trace and the memory snapshot."""
