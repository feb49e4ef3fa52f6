"""How long to train, on how much at once, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.setting import acts_with, idle_with, setting


@dataclass(frozen=True)
class TrainingConfig:
    """Batch sizes, length of the run, evaluation and exits."""

    micro_batch_size: int = setting(0, at_least=1, unit="sequences", required=True)
    """Sequences in one forward pass of one data rank. Required."""
    global_batch_size: int | None = setting(None, at_least=1, unit="sequences")
    """Sequences in one step over all data ranks; by default micro-batch x DP."""
    rampup_batch_size: tuple[int, int, int] | None = setting(None, at_least=1, unit="sequences")
    """START INCREMENT SAMPLES: begin with START sequences and grow by INCREMENT to the global batch size over SAMPLES."""
    train_iters: int | None = setting(None, at_least=1, unit="steps")
    """Steps to train. This or --train-samples is required."""
    train_samples: int | None = setting(None, at_least=1, unit="sequences")
    """Sequences to train on, instead of --train-iters."""
    eval_interval: int | None = setting(
        None, at_least=1, unit="steps", idle=idle_with("--eval-iters 0 switches evaluation off", eval_iters=0)
    )
    """Steps between evaluations; by default only one at the end."""
    eval_iters: int = setting(100, at_least=0, unit="global batches")
    """Batches in an evaluation; 0 switches evaluation off."""
    seed: int = setting(1234, at_least=0, at_most=2**32 - 1, unit="plain number")
    """Seed of the initial weights, of dropout and of the order of data."""
    iterations_to_skip: tuple[int, ...] = setting((), at_least=1, unit="number of a step, from 1 on")
    """Iterations whose data is consumed without an update."""
    exit_interval: int | None = setting(None, at_least=1, unit="steps")
    """Save and exit when the iteration is a multiple of this."""
    exit_duration_in_mins: float | None = setting(None, above=0, unit="minutes")
    """Save and exit after this many minutes."""
    deterministic_mode: bool = False
    """Use only deterministic kernels (slower on GPUs)."""
    manual_gc: bool = False
    """Switch Python's garbage collector off and collect at set steps, on all ranks together."""
    manual_gc_interval: int = setting(0, at_least=0, unit="steps", acts=acts_with(manual_gc=True))
    """Steps between collections with --manual-gc; 0 collects only at evaluations and saves."""
