"""The optimizer and the schedules of learning rate and weight decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or SGD. All schedules count the samples of the updates that were made."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """Update rule: adam is AdamW, sgd has momentum."""
    use_apex: bool = False
    """Take FusedAdam or FusedSGD of NVIDIA apex, if it is installed, instead of torch's."""
    lr: float | None = None
    """Highest learning rate. Required."""
    min_lr: float = 0.0
    """Lowest learning rate after decay."""
    lr_decay_style: DecayStyle = "linear"
    """Form of the decay from --lr to --min-lr."""
    lr_decay_iters: int | None = None
    """Steps over which the rate decays; by default the whole run."""
    lr_decay_samples: int | None = None
    """Samples over which the rate decays, instead of --lr-decay-iters."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""
    lr_warmup_samples: int = 0
    """Samples of linear warm-up, instead of --lr-warmup-iters."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a share of the decay length, instead of the two above."""
    lr_warmup_init: float = 0.0
    """Learning rate at which warm-up starts."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Form of the final decay of WSD."""
    lr_wsd_decay_iters: int | None = None
    """Steps of the final decay of WSD."""
    lr_wsd_decay_samples: int | None = None
    """Samples of the final decay of WSD, instead of --lr-wsd-decay-iters."""
    weight_decay: float = 0.01
    """Decoupled weight decay (not on biases and norms)."""
    start_weight_decay: float | None = None
    """Weight decay at the start, when it changes over the run."""
    end_weight_decay: float | None = None
    """Weight decay at the end, when it changes over the run."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay goes from start to end."""
    clip_grad: float = 1.0
    """Clip the global gradient norm to this; 0 switches clipping off."""
    adam_beta1: float = 0.9
    """Decay rate of Adam's first moment."""
    adam_beta2: float = 0.999
    """Decay rate of Adam's second moment."""
    adam_eps: float = 1e-8
    """Added to the root of Adam's second moment."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""
    optimizer_cpu_offload: bool = False
    """Keep main parameters and moments in host memory and update them there."""
    optimizer_offload_fraction: float = 1.0
    """Share of main parameters and moments that --optimizer-cpu-offload keeps in host memory, above 0 and up to 1; the rest stays
    on the device."""
    override_opt_param_scheduler: bool = False
    """On resume take the schedules from the command line although the checkpoint's differ."""
    use_checkpoint_opt_param_scheduler: bool = False
    """On resume take the schedules from the checkpoint."""
