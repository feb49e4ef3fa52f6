"""How long to train, on how much at once, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingConfig:
    """Batch sizes, length of the run, evaluation and exits."""

    micro_batch_size: int = 0
    """Sequences in one forward pass of one data rank. Required."""
    global_batch_size: int | None = None
    """Sequences in one step over all data ranks; by default micro-batch x DP."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """START INCREMENT SAMPLES: begin with START sequences and grow by INCREMENT to the global batch size over SAMPLES."""
    train_iters: int | None = None
    """Steps to train. This or --train-samples is required."""
    train_samples: int | None = None
    """Sequences to train on, instead of --train-iters."""
    eval_interval: int | None = None
    """Steps between evaluations; by default only one at the end."""
    eval_iters: int = 100
    """Batches in an evaluation; 0 switches evaluation off."""
    seed: int = 1234
    """Seed of the initial weights, of dropout and of the order of data."""
    iterations_to_skip: tuple[int, ...] = ()
    """Iterations whose data is consumed without an update."""
    exit_interval: int | None = None
    """Save and exit when the iteration is a multiple of this."""
    exit_duration_in_mins: float | None = None
    """Save and exit after this many minutes."""
    deterministic_mode: bool = False
    """Use only deterministic kernels (slower on GPUs)."""
    manual_gc: bool = False
    """Switch Python's garbage collector off and collect at set steps, on all ranks together."""
    manual_gc_interval: int = 0
    """Steps between collections with --manual-gc; 0 collects only at evaluations and saves."""
