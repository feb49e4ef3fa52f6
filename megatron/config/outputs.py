"""Settings of what a run writes and verifies: checkpoints, logs and consistency checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.setting import IS_SET, condition, idle_condition, setting
from megatron.config.training import WITHOUT_SKIP_TRAIN

DEFAULT_SAVE_MINUTES = 30
"""Minutes between checkpoints of a run without --save-interval."""
_SAVE = condition(save=IS_SET)
_LOAD = condition(load=IS_SET)
_REQUIRES_SAVE, _REQUIRES_LOAD = condition(save=IS_SET, strict=True), condition(load=IS_SET, strict=True)
"""Strict: without --save or --load the setting is refused. Otherwise a user might wrongly expect that state is saved or loaded."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: where and when to save them, and what to load."""

    save: str | None = setting(None, is_path=True, active_if=WITHOUT_SKIP_TRAIN)
    """Folder in which to save checkpoints, or a URL such as s3://bucket/run."""
    load: str | None = setting(None, is_path=True)
    """Folder or URL from which to resume: the newest valid checkpoint is loaded."""
    pretrained_checkpoint: str | None = setting(None, is_path=True)
    """Checkpoint whose weights are the initial weights; training starts at iteration 0. Ignored once --load holds a checkpoint."""
    take_over: bool = setting(False, active_if=_SAVE)
    """Save in a folder in which another running job saves. The other job ends within a minute."""
    save_interval: int | None = setting(None, min_value=1, unit="steps", active_if=_SAVE)
    """Steps between checkpoints; by default a run saves every 30 minutes, at the end and when it exits early. Of the checkpoints of
    every 30 minutes, only the newest is kept."""
    save_retain_interval: int | None = setting(None, min_value=1, unit="steps", active_if=_SAVE)
    """Keep every checkpoint whose iteration is a multiple of this, in addition to the newest."""
    async_save: bool = setting(False, active_if=_SAVE)
    """Write checkpoints in the background: training waits only for a copy into host memory."""
    memory_save_interval: int | None = setting(None, min_value=1, unit="steps", active_if=_REQUIRES_SAVE)
    """Steps between background copies of the training state into the memory of the nodes (/dev/shm). A restart by the same launcher
    resumes from the newest copy (if --load equals --save). If the job ends without a restart, the newest copy is written to --save.
    """
    replicate_state: int = setting(0, min_value=0, unit="nodes", active_if=condition(memory_save_interval=IS_SET, strict=True))
    """Number of other nodes that hold a replica of each node's --memory-save-interval copy, so that the copy survives the loss of
    the node."""
    keep_last: int | None = setting(None, min_value=1, unit="checkpoints", active_if=_SAVE)
    """Number of newest checkpoints to keep, in addition to those of --save-retain-interval; by default 1 with
    --save-retain-interval, else all of them."""
    keep_best: bool = setting(False, active_if=_REQUIRES_SAVE)
    """Also keep the checkpoint with the lowest validation loss. An evaluation (--eval-interval) with a new lowest loss saves
    one, which replaces the earlier best one. --ckpt-step best loads it."""
    ckpt_step: int | Literal["best"] | None = setting(None, min_value=0, unit="iteration, from 1 on", active_if=_REQUIRES_LOAD)
    """Load the checkpoint of this iteration instead of the newest; best: the one with the lowest validation loss (--keep-best)."""
    save_optim: bool = setting(True, active_if=_SAVE)
    """Save the optimizer state too."""
    load_optim: bool = setting(True, active_if=_LOAD)
    """Load the optimizer state too."""
    finetune: bool = setting(False, active_if=_REQUIRES_LOAD)
    """Load only the weights and start at iteration 0."""
    use_checkpoint_args: bool = setting(False, active_if=condition(load=IS_SET, pretrained_checkpoint=IS_SET, strict=True))
    """Take the model's shape and the tokenizer from the checkpoint in --load or --pretrained-checkpoint."""
    exit_on_missing_checkpoint: bool = setting(False, active_if=_REQUIRES_LOAD)
    """Exit if --load holds no checkpoint, instead of starting from random weights."""


_PROFILES = condition(profile=True, profile_pipeline=True)
_SAMPLES = condition(sample_interval=IS_SET)
_CURVES = condition(tensorboard_dir=IS_SET, wandb_project=IS_SET, mlflow_experiment=IS_SET, trackio_project=IS_SET)
_WANDB, _MLFLOW = condition(wandb_project=IS_SET), condition(mlflow_experiment=IS_SET)
_TRACKIO = condition(trackio_project=IS_SET)
_NO_TIMERS = idle_condition("--timing-log-level 0 switches timers off", timing_log_level=0)


@dataclass(frozen=True)
class LoggingConfig:
    """Log line, metrics file, TensorBoard, Weights & Biases, MLflow, trackio, timers and profiler."""

    log_interval: int = setting(100, min_value=1, unit="steps")
    """Steps between log lines."""
    log_format: Literal["auto", "short", "megatron"] = "auto"
    """Format of the log line: short for people, with tokens per second and remaining time, on a terminal under a progress bar;
    megatron for Megatron-LM's line, byte for byte; auto for short on a terminal and megatron otherwise."""
    verbose: bool = False
    """Show all details of the start of a run on a terminal: attention kernel, stages, parameter groups, memory, data order, advice.
    By default a terminal shows the model, the layout, the data and warnings, and the details are in start.log in the folder of
    --save. A file or a pipe always gets all details."""
    log_throughput: bool = False
    """Add TFLOP/s per device to the log line."""
    log_params_norm: bool = False
    """Add the norm of all parameters to the log line."""
    log_num_zeros_in_grad: bool = False
    """Add the number of zeros in the gradient to the log line."""
    log_gradient_noise: bool = False
    """Add the gradient noise scale to the log line: approximately the batch size, in sequences, beyond which larger batches gain
    little (McCandlish et al. 2018). It is estimated by comparing the step's first microbatch with the whole batch."""
    log_max_attention_logit: bool = False
    """Add the largest attention score (scaled, before any cap) over all layers, heads and samples to the log line. It requires one
    more product of queries and keys in each forward pass, unless --qk-clip computes it anyway."""
    log_layer_norms: bool = setting(False, active_if=condition(metrics_file=IS_SET, **_CURVES.values))
    """Write the gradient and weight norms of each layer to the curves (TensorBoard and other loggers) and the metrics file."""
    metrics_file: str | None = setting(None, is_path=True)
    """File to which every logged iteration and evaluation is written as one JSON object per line, with full digits."""
    loss_picture: bool = True
    """Draw loss.png in the folder of --save, or else of --tensorboard-dir, once a minute and at the end: training loss, validation
    loss and learning rate since the run's first start. A separate process draws it. Needs the matplotlib extra."""
    report: bool = True
    """Write report.html in the folder of --save, or else of --tensorboard-dir, when the run ends: curves, time breakdown, memory,
    events and settings in one page that needs no network. tools/report.py writes it at any other time, and compares runs."""
    sample_interval: int | None = setting(None, min_value=1, unit="steps", active_if=WITHOUT_SKIP_TRAIN)
    """Steps between samples: texts with which the model continues a few prompts. They are written to the log, TensorBoard, Weights
    & Biases, the history file and report.html, also at the end of the run. Samples do not change the training."""
    sample_prompts: str | None = setting(None, active_if=_SAMPLES, is_path=True)
    """File with the prompts of --sample-interval. Each line is a prompt, with \\n for a newline, or an object {"prompt": "..."} if
    the name of the file ends with .jsonl. By default, the run uses a few short prompts, and one of them is empty."""
    sample_tokens: int = setting(64, min_value=1, unit="tokens", active_if=_SAMPLES)
    """Maximum number of tokens of a sample, without its prompt. A sample also ends at --seq-length tokens with its prompt, and at
    the end-of-document token."""
    sample_temperature: float = setting(0.8, min_value=0, unit="factor", active_if=_SAMPLES)
    """Temperature of --sample-interval: the logits are divided by it. 0 always selects the most likely token. The random numbers of
    a prompt are the same at every iteration, so that its samples differ only because of the weights."""
    timing_log_level: int = setting(0, min_value=0, max_value=2, unit="level of detail")
    """Level of detail of the timers in the log, from 0 (no timers) to 2 (all timers)."""
    timing_log_option: Literal["minmax", "max", "all"] = setting("minmax", idle_if=_NO_TIMERS)
    """How the timers of several ranks are shown: minimum and maximum, maximum only, or all."""
    tensorboard_dir: str | None = setting(None, is_path=True)
    """Folder for TensorBoard logs."""
    tensorboard_log_interval: int = setting(1, min_value=1, unit="steps", active_if=_CURVES)
    """Steps between the points of the curves: TensorBoard, Weights & Biases, MLflow and trackio."""
    tensorboard_tags: Literal["groups", "megatron"] = setting("groups", active_if=condition(tensorboard_dir=IS_SET))
    """Names of the curves: groups writes each metric once, in groups such as loss, optimizer, speed and memory; megatron uses the
    tags of Megatron-LM, by iterations and by samples, for dashboards that read them."""
    log_timers_to_tensorboard: bool = setting(False, active_if=_CURVES, idle_if=_NO_TIMERS)
    """Write timers to TensorBoard too."""
    log_memory_to_tensorboard: bool = setting(
        False, active_if=_CURVES, idle_if=idle_condition("only the memory of CUDA devices is measured", device="cpu")
    )
    """Write device memory to TensorBoard too."""
    log_memory: bool = False
    """Log the memory of each rank by category, measured and planned, after the first step and every --log-memory-interval steps.
    The plan is made before the first step, as by --dry-run."""
    log_memory_interval: int | None = setting(None, min_value=1, unit="steps")
    """Steps between memory reports; by default --log-interval. Setting it switches the reports on, also without --log-memory."""
    plan_report: str | None = setting(None, is_path=True)
    """Predict step time and memory before the run, compare them with the first ten steps, log which component deviates, and write
    the comparison to this JSON file. tools/check_cluster.py --calibrate makes a cluster file of these reports."""
    plan_cluster: str | None = setting(None, active_if=condition(plan_report=IS_SET, strict=True), is_path=True)
    """Cluster for which --plan-report, --dry-run and --plan predict step times: a name, or the path of a cluster file. By default
    the cluster that is shipped for the device, and for a plan on a machine without GPUs an H100 cluster."""
    wandb_project: str | None = None
    """Project at Weights & Biases; needs the wandb extra. A restart with the same --save continues the same run there."""
    wandb_exp_name: str | None = setting(None, active_if=_WANDB)
    """Name of the run at Weights & Biases."""
    wandb_entity: str | None = setting(None, active_if=_WANDB)
    """Team or user that owns the run at Weights & Biases."""
    wandb_save_dir: str | None = setting(None, active_if=_WANDB, is_path=True)
    """Folder for the files that Weights & Biases writes."""
    mlflow_experiment: str | None = None
    """Experiment of MLflow to which the run belongs; created if it does not exist. Needs the mlflow extra. A restart with the same
    --save continues the same run there."""
    mlflow_tracking_uri: str | None = setting(None, active_if=_MLFLOW)
    """Address of the MLflow server, such as http://host:5000, or of a local store. By default the environment variable
    MLFLOW_TRACKING_URI, or else the default of MLflow."""
    mlflow_run_name: str | None = setting(None, active_if=_MLFLOW)
    """Name of the run in MLflow. By default the name of the folder of --save."""
    trackio_project: str | None = None
    """Project of trackio; needs the trackio extra. A restart with the same --save continues the same run there."""
    trackio_run_name: str | None = setting(None, active_if=_TRACKIO)
    """Name of the run in trackio, to which an identifier is added. By default the name of the folder of --save."""
    trackio_space_id: str | None = setting(None, active_if=_TRACKIO)
    """Space of Hugging Face to which trackio sends the run, such as user/space. By default trackio writes to this machine only."""
    profile: bool = False
    """Profile the steps from --profile-step-start up to, but without, --profile-step-end with torch's profiler."""
    profile_pipeline: bool = False
    """Write the measured and the planned timeline of the pipeline in step --profile-step-start to --profile-dir."""
    profile_step_start: int = setting(10, min_value=1, unit="iteration, from 1 on", active_if=_PROFILES)
    """First step to profile (the first iteration is 1)."""
    profile_step_end: int = setting(12, min_value=1, unit="iteration, from 1 on", active_if=condition(profile=True))
    """Step before which profiling stops."""
    profile_ranks: tuple[int, ...] = setting((0,), min_value=0, unit="rank, from 0 on", active_if=condition(profile=True))
    """Ranks to profile."""
    profile_dir: str = setting("profile", active_if=_PROFILES, is_path=True)
    """Folder for the Chrome trace and the memory snapshot."""

    @property
    def writes_curves(self) -> bool:
        """Whether the run writes curves to TensorBoard or another logger."""
        return any(getattr(self, name) is not None for name in _CURVES.values)

    @property
    def memory_interval(self) -> int | None:
        """Steps between memory reports; None without them."""
        return self.log_memory_interval or (self.log_interval if self.log_memory else None)


@dataclass(frozen=True)
class DebugConfig:
    """Consistency checks: comparison of replicas, audit of the first step, detection of faulty devices, and traces of a run."""

    check_replicas_every: int | None = setting(None, min_value=1, unit="steps")
    """Steps between comparisons of the parameters that must be equal on several tensor or data ranks; a difference in any bit ends
    the run. The first step that makes an update is also audited: every parameter must have a gradient, summed over the right ranks
    and counted once in the norm."""
    sentinel_interval: int | None = setting(None, min_value=1, unit="steps")
    """Steps between checks for devices that silently compute wrong results. Before the update, each data rank recomputes a
    microbatch of another rank and compares the gradients; a third rank decides which one is wrong. The optimizer state is compared
    with its state after the previous update."""
    sentinel_action: Literal["stop", "warn"] = setting("stop", active_if=condition(sentinel_interval=IS_SET))
    """Action after a difference: stop ends the run before the update, warn continues."""
    save_trace: str | None = setting(None, is_path=True)
    """File for a trace of the run: for each step the loss, and for each parameter the norm and a signature of its gradient and
    weight, equal for every layout. tools/verify_layout.py finds where two runs diverge."""
    trace_steps: int = setting(10, min_value=1, unit="steps", active_if=condition(save_trace=IS_SET))
    """Number of steps that --save-trace records, from the first step after the start."""


def get_run_folder(checkpoint: CheckpointConfig, logging: LoggingConfig) -> str | None:
    """Return the folder for the run's history file, loss picture and report.

    It is --save, or --tensorboard-dir if checkpoints are saved to an object store or not at all. None without both.
    """
    folders = (checkpoint.save, logging.tensorboard_dir)
    return next((folder for folder in folders if folder is not None and "://" not in folder), None)
