"""Saving and resuming."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and when to save, and what to load."""

    save: str | None = None
    """Folder to save checkpoints in."""
    load: str | None = None
    """Folder to resume from (its newest complete checkpoint)."""
    save_interval: int | None = None
    """Steps between saves; by default only at the end and at exits."""
    save_retain_interval: int | None = None
    """Keep every checkpoint whose iteration is a multiple of this, beside the newest."""
    keep_last: int | None = None
    """Keep only this many newest checkpoints (and those of --save-retain-interval)."""
    ckpt_step: int | None = None
    """Load this iteration instead of the newest."""
    save_optim: bool = True
    """Save optimizer state too."""
    load_optim: bool = True
    """Load optimizer state too."""
    finetune: bool = False
    """Load weights only and start counting from iteration 0."""
    use_checkpoint_args: bool = False
    """Take the model's shape and the tokenizer from the checkpoint in --load."""
    exit_on_missing_checkpoint: bool = False
    """Stop when --load holds no checkpoint instead of starting afresh."""
