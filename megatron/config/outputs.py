"""What a run saves and loads, logs, and checks of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.setting import GIVEN, acts_with, idle_with, setting

_SAVE = acts_with(save=GIVEN)
_LOAD = acts_with(load=GIVEN)
_MUST_SAVE, _MUST_LOAD = acts_with(save=GIVEN, strict=True), acts_with(load=GIVEN, strict=True)
"""For what nobody should believe in wrongly: that state is kept, and what a run begins with."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and when to save, and what to load."""

    save: str | None = None
    """Folder to save checkpoints in, or a URL such as s3://bucket/run."""
    load: str | None = None
    """Folder or URL to resume from (its newest good checkpoint)."""
    pretrained_checkpoint: str | None = None
    """Weights to begin with, counting from iteration 0, as long as --load is left out or holds no checkpoint yet."""
    take_over: bool = setting(False, acts=_SAVE)
    """Save in a folder in which another run that is alive saves: that run ends within a minute."""
    save_interval: int | None = setting(None, at_least=1, unit="steps", acts=_SAVE)
    """Steps between saves; by default only at the end and at exits."""
    save_retain_interval: int | None = setting(None, at_least=1, unit="steps", acts=_SAVE)
    """Keep every checkpoint whose iteration is a multiple of this, beside the newest."""
    async_save: bool = setting(False, acts=_SAVE)
    """Write checkpoints in the background: training waits only for a copy into host memory."""
    memory_save_interval: int | None = setting(None, at_least=1, unit="steps", acts=_MUST_SAVE)
    """Steps between copies of the state into the memory of the nodes (/dev/shm), in the background. A restart by the same launcher
    goes on from there (with --load as --save); when the job ends without one, the newest is written to --save."""
    replicate_state: int = setting(0, at_least=0, unit="nodes", acts=acts_with(memory_save_interval=GIVEN, strict=True))
    """Other nodes that get a copy of what --memory-save-interval keeps of a node, so that it is there when the node is lost."""
    keep_last: int | None = setting(None, at_least=1, unit="checkpoints", acts=_SAVE)
    """Keep only this many newest checkpoints (and those of --save-retain-interval)."""
    ckpt_step: int | None = setting(None, at_least=0, unit="number of a step, from 1 on", acts=_MUST_LOAD)
    """Load this iteration instead of the newest."""
    save_optim: bool = setting(True, acts=_SAVE)
    """Save optimizer state too."""
    load_optim: bool = setting(True, acts=_LOAD)
    """Load optimizer state too."""
    finetune: bool = setting(False, acts=_MUST_LOAD)
    """Load weights only and start counting from iteration 0."""
    use_checkpoint_args: bool = setting(False, acts=acts_with(load=GIVEN, pretrained_checkpoint=GIVEN, strict=True))
    """Take the model's shape and the tokenizer from the checkpoint in --load, or of --pretrained-checkpoint."""
    exit_on_missing_checkpoint: bool = setting(False, acts=_MUST_LOAD)
    """Stop when --load holds no checkpoint instead of starting afresh."""


_PROFILES = acts_with(profile=True, profile_pipeline=True)
_CURVES = acts_with(tensorboard_dir=GIVEN, wandb_project=GIVEN)
_NO_TIMERS = idle_with("--timing-log-level 0 switches timers off", timing_log_level=0)


@dataclass(frozen=True)
class LoggingConfig:
    """Log line, metrics file, TensorBoard, Weights & Biases, timers and profiler."""

    log_interval: int = setting(100, at_least=1, unit="steps")
    """Steps between log lines."""
    log_format: Literal["auto", "short", "megatron"] = "auto"
    """The log line: short is for people, with tokens a second and the time left, on a terminal under a progress bar; megatron is
    that of Megatron-LM, byte for byte; auto takes short on a terminal and megatron anywhere else."""
    log_throughput: bool = False
    """Add TFLOP/s for each device to the log line."""
    log_params_norm: bool = False
    """Add the norm of all parameters to the log line."""
    log_num_zeros_in_grad: bool = False
    """Add the number of zeros in the gradient to the log line."""
    log_gradient_noise: bool = False
    """Add the gradient's noise scale to the log line: about the batch size, in sequences, beyond which larger ones gain little
    (McCandlish et al. 2018). It compares the step's first microbatch with the whole batch."""
    log_max_attention_logit: bool = False
    """Add the largest score of attention (scaled, before any cap) to the log line, over all layers, heads and samples. It costs one
    more product of queries and keys in each forward; with --qk-clip it is taken anyway."""
    log_layer_norms: bool = setting(False, acts=acts_with(metrics_file=GIVEN, tensorboard_dir=GIVEN, wandb_project=GIVEN))
    """Log gradient and weight norms of each layer (TensorBoard and metrics file)."""
    metrics_file: str | None = None
    """Write one JSON object a line for every logged iteration and evaluation, with full digits."""
    loss_picture: bool = True
    """Draw loss.png in the folder of --save, or else of --tensorboard-dir, once a minute and at the end: training loss, validation
    loss and learning rate of the run since its first start. A process of its own draws it; needs the matplotlib extra."""
    report: bool = True
    """Make report.html in that folder when the run ends: curves, where the time went, memory, events and settings in one page that
    opens without a network. tools/report.py makes it at any other time, and compares runs."""
    timing_log_level: int = setting(0, at_least=0, at_most=2, unit="level of detail")
    """Detail of the timers, 0 to 2."""
    timing_log_option: Literal["minmax", "max", "all"] = setting("minmax", idle=_NO_TIMERS)
    """How timers of several ranks are shown."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard."""
    tensorboard_log_interval: int = setting(1, at_least=1, unit="steps", acts=_CURVES)
    """Steps between TensorBoard points."""
    tensorboard_tags: Literal["groups", "megatron"] = setting("groups", acts=acts_with(tensorboard_dir=GIVEN))
    """Names of the curves: each number once, in the groups loss, optimizer, speed, memory, ...; or the tags of Megatron-LM, by
    iterations and by samples, for dashboards that read them."""
    log_timers_to_tensorboard: bool = setting(False, acts=_CURVES, idle=_NO_TIMERS)
    """Write timers to TensorBoard too."""
    log_memory_to_tensorboard: bool = setting(
        False, acts=_CURVES, idle=idle_with("only the memory of CUDA devices is measured", device="cpu")
    )
    """Write device memory to TensorBoard too."""
    log_memory: bool = False
    """Log, after the first step and every --log-memory-interval steps, what memory each rank takes for what, measured beside
    planned. Before the first step the job is planned as by --dry-run."""
    log_memory_interval: int | None = setting(None, at_least=1, unit="steps")
    """Steps between reports of memory, by default as many as between log lines. Given alone, it asks for them too."""
    plan_report: str | None = None
    """Foretell step time and memory before the run, compare them with the first ten steps, tell in the log which part is off, and
    write all into this JSON file. tools/check_cluster.py --calibrate makes a cluster file of such reports."""
    plan_cluster: str | None = setting(None, acts=acts_with(plan_report=GIVEN, strict=True))
    """The cluster that step times are foretold for, by --plan-report, --dry-run and --plan: a name, or the path of a cluster file;
    by default the one that is shipped for the device, and for a plan on a machine without GPUs one of H100."""
    wandb_project: str | None = None
    """Project at Weights & Biases (needs the wandb extra)."""
    wandb_exp_name: str | None = setting(None, acts=acts_with(wandb_project=GIVEN))
    """Name of the run at Weights & Biases."""
    wandb_entity: str | None = setting(None, acts=acts_with(wandb_project=GIVEN))
    """Team or user that the run belongs to at Weights & Biases."""
    wandb_save_dir: str | None = setting(None, acts=acts_with(wandb_project=GIVEN))
    """Folder for the files that Weights & Biases writes."""
    profile: bool = False
    """Record steps --profile-step-start to --profile-step-end with torch's profiler."""
    profile_pipeline: bool = False
    """Write the measured timeline of the pipeline in step --profile-step-start, beside the planned one, to --profile-dir."""
    profile_step_start: int = setting(10, at_least=1, unit="number of a step, from 1 on", acts=_PROFILES)
    """First step to record (the first iteration is 1)."""
    profile_step_end: int = setting(12, at_least=1, unit="number of a step, from 1 on", acts=acts_with(profile=True))
    """Step to stop recording before."""
    profile_ranks: tuple[int, ...] = setting((0,), at_least=0, unit="number of a rank, from 0 on", acts=acts_with(profile=True))
    """Ranks that record."""
    profile_dir: str = setting("profile", acts=_PROFILES)
    """Folder for the Chrome trace and the memory snapshot."""

    @property
    def memory_interval(self) -> int | None:
        """Steps between reports of memory; None without."""
        return self.log_memory_interval or (self.log_interval if self.log_memory else None)


@dataclass(frozen=True)
class DebugConfig:
    """Comparison of replicas, an audit of the first step, the sentinel, and the trace of a run."""

    check_replicas_every: int | None = setting(None, at_least=1, unit="steps")
    """Steps between comparisons of the parameters that must be equal on several tensor or data ranks; a difference in any bit ends
    the run. The first step that makes an update is audited too: every parameter has a gradient, summed over the right ranks and
    counted once in the norm."""
    sentinel_interval: int | None = setting(None, at_least=1, unit="steps")
    """Steps between checks for devices that compute wrong without a sign: before the update each data rank computes a microbatch of
    another one again and compares the gradients; a third says who is wrong. The optimizer's state is compared with what it was
    after the update before."""
    sentinel_action: Literal["stop", "warn"] = setting("stop", acts=acts_with(sentinel_interval=GIVEN))
    """What a difference does: stop ends the run before the update, warn goes on."""
    save_trace: str | None = None
    """Write a trace of the run to this file: for each step the loss, and of each parameter the norm and a signature of gradient and
    weight, the same at every layout. tools/verify_layout.py finds where two runs part."""
    trace_steps: int = setting(10, at_least=1, unit="steps", acts=acts_with(save_trace=GIVEN))
    """Steps that --save-trace records, from the first one of this start on."""


def run_folder(checkpoint: CheckpointConfig, logging: LoggingConfig) -> str | None:
    """The folder in which a run keeps its record and its picture: --save, or --tensorboard-dir where checkpoints go to an object
    store or nowhere; None without both."""
    places = (checkpoint.save, logging.tensorboard_dir)
    return next((place for place in places if place is not None and "://" not in place), None)
