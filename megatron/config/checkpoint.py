"""Saving and resuming."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.setting import GIVEN, acts_with, setting

_SAVE = acts_with(save=GIVEN)
_LOAD = acts_with(load=GIVEN)


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and when to save, and what to load."""

    save: str | None = None
    """Folder to save checkpoints in, or a URL such as s3://bucket/run."""
    load: str | None = None
    """Folder or URL to resume from (its newest good checkpoint)."""
    pretrained_checkpoint: str | None = None
    """Weights to begin with, counting from iteration 0, as long as --load is left out or holds no checkpoint yet."""
    save_interval: int | None = setting(None, at_least=1, unit="steps", acts=_SAVE)
    """Steps between saves; by default only at the end and at exits."""
    save_retain_interval: int | None = setting(None, at_least=1, unit="steps", acts=_SAVE)
    """Keep every checkpoint whose iteration is a multiple of this, beside the newest."""
    async_save: bool = setting(False, acts=_SAVE)
    """Write checkpoints in the background: training waits only for a copy into host memory."""
    keep_last: int | None = setting(None, at_least=1, unit="checkpoints", acts=_SAVE)
    """Keep only this many newest checkpoints (and those of --save-retain-interval)."""
    ckpt_step: int | None = setting(None, at_least=0, unit="number of a step, from 1 on", acts=_LOAD)
    """Load this iteration instead of the newest."""
    save_optim: bool = setting(True, acts=_SAVE)
    """Save optimizer state too."""
    load_optim: bool = setting(True, acts=_LOAD)
    """Load optimizer state too."""
    finetune: bool = setting(False, acts=_LOAD)
    """Load weights only and start counting from iteration 0."""
    use_checkpoint_args: bool = setting(False, acts=acts_with(load=GIVEN, pretrained_checkpoint=GIVEN))
    """Take the model's shape and the tokenizer from the checkpoint in --load, or of --pretrained-checkpoint."""
    exit_on_missing_checkpoint: bool = setting(False, acts=_LOAD)
    """Stop when --load holds no checkpoint instead of starting afresh."""
