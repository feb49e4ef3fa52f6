"""How to train: on how much at once and how long, with which optimizer and schedules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Literal, NamedTuple

from megatron.config.setting import GIVEN, OtherThan, acts_with, idle_with, setting

# ---- --step-batch-size-schedule: the batch size of each stretch of the run, as Megatron-LM writes it.
#
# `0:768 250B:1536 500B:3072` is a batch of 768 sequences from the start, of 1,536 from 250 billion tokens on, and so forth. K, M, B
# and T stand for powers of a thousand. Entries are apart by spaces or commas, in one word or several.

_POWERS = {"": 0, "K": 1, "M": 2, "B": 3, "T": 4}
_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([KMBT]?)", re.IGNORECASE)


class BatchStep(NamedTuple):
    """A batch size, and from where on it holds."""

    tokens: int
    """Tokens that the run has read before."""
    batch_size: int
    """Sequences."""

    def __str__(self) -> str:
        return f"{_short(self.tokens)}:{self.batch_size}"


def batch_steps(words: Iterable[str]) -> list[BatchStep]:
    """The entries of a schedule in order, which is empty for no words.

    Raises:
        ValueError: an entry cannot be read, the first does not begin with the run, or one does not go beyond the one before it.
    """
    steps = sorted(_entry(text) for word in words for text in word.replace(",", " ").split())
    if steps and steps[0].tokens:
        raise ValueError(f"says nothing of the time before {steps[0]}. The first entry begins at 0, as in 0:{steps[0].batch_size}")
    for before, after in pairwise(steps):
        if after.tokens == before.tokens:
            raise ValueError(f"has two batch sizes from the same place on, {before} and {after}")
        if after.batch_size < before.batch_size:
            raise ValueError(f"shrinks from {before} to {after}. A batch only grows: a run is laid out for the last one")
    return steps


def readable_steps(words: Iterable[str]) -> list[BatchStep]:
    """The same, but empty where a rule says what is wrong."""
    try:
        return batch_steps(words)
    except ValueError:
        return []


def as_words(steps: Sequence[BatchStep]) -> tuple[str, ...]:
    """A schedule as the setting holds it."""
    return (" ".join(map(str, steps)),)


def _entry(text: str) -> BatchStep:
    found = [_NUMBER.fullmatch(part) for part in text.split(":")]
    if len(found) != 2 or None in found:
        raise ValueError(f"has {text!r}, which is no TOKENS:BATCH, such as 250B:1536")
    tokens, batch_size = (Fraction(match[1]) * 1000 ** _POWERS[match[2].upper()] for match in found if match is not None)
    if batch_size < 1 or batch_size.denominator > 1:
        raise ValueError(f"has {text!r}, whose batch size is no whole number of sequences from 1 on")
    return BatchStep(int(tokens), int(batch_size))


def _short(number: int) -> str:
    """A number with the largest suffix that leaves it whole."""
    for suffix, power in reversed(_POWERS.items()):
        if number and number % 1000**power == 0:
            return f"{number // 1000**power}{suffix}"
    return str(number)


@dataclass(frozen=True)
class TrainingConfig:
    """Batch sizes, length of the run, evaluation and exits."""

    micro_batch_size: int = setting(0, at_least=1, unit="sequences", required=True)
    """Sequences in one forward pass of one data rank. Required."""
    global_batch_size: int | None = setting(None, at_least=1, unit="sequences")
    """Sequences in one step over all data ranks; by default micro-batch x DP."""
    rampup_batch_size: tuple[int, int, int] | None = setting(None, at_least=1, unit="sequences")
    """START INCREMENT SAMPLES: begin with START sequences and grow by INCREMENT to the global batch size over SAMPLES."""
    step_batch_size_schedule: tuple[str, ...] = ()
    """Global batch sizes by the tokens read so far, in place of --global-batch-size: "0:768 250B:1536 500B:3072" (K, M, B and T
    stand for powers of a thousand)."""
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
    z_loss_coeff: float = setting(0.0, at_least=0, unit="factor on the square of log Z")
    """Minimise, beside the cross entropy, this x (log Z)^2 of each token, with Z the sum of the exponentials of its logits (PaLM's
    z-loss; PaLM took 1e-4). "lm loss" and evaluations are without it; it is logged as "z loss"."""
    label_smoothing: float = setting(0.0, at_least=0, below=1, unit="share of each target")
    """Spread this share of each target evenly over the vocabulary (Szegedy et al. 2016 took 0.1). "lm loss" and evaluations stay
    the cross entropy with the label alone."""
    mtp_loss_scaling_factor: float = setting(0.1, above=0, unit="factor", acts=acts_with(mtp_num_layers=OtherThan(0)))
    """Minimise, beside the cross entropy, this x the mean over --mtp-num-layers of theirs (logged as "mtp loss")."""
    imports: tuple[str, ...] = ()
    """Modules of your own, or .py files, to import on every rank before anything else. They may register optimizers, activations
    and metrics (docs/python.md)."""
    seed: int = setting(1234, at_least=0, at_most=2**32 - 1, unit="plain number")
    """Seed of the initial weights, of dropout and of the order of data."""
    iterations_to_skip: tuple[int, ...] = setting((), at_least=1, unit="number of a step, from 1 on")
    """Iterations whose data is consumed without an update."""
    exit_interval: int | None = setting(None, at_least=1, unit="steps")
    """Save and exit when the iteration is a multiple of this."""
    exit_duration_in_mins: float | None = setting(None, above=0, unit="minutes")
    """Save and exit after this many minutes."""
    exit_signal_code: int = setting(85, at_least=0, at_most=255, unit="exit code")
    """Exit code of a run that SIGTERM or SIGUSR1 ended before its time, after it saved. With 0 a launcher takes it for a run
    that is done, and does not start it again."""
    deterministic_mode: bool = False
    """Use only deterministic kernels: on GPUs two runs are the same bit for bit only so (attention's backward is slower)."""
    manual_gc: bool = False
    """Switch Python's garbage collector off and collect at set steps, on all ranks together."""
    manual_gc_interval: int = setting(0, at_least=0, unit="steps", acts=acts_with(manual_gc=True))
    """Steps between collections with --manual-gc; 0 collects only at evaluations and saves."""

    def final_batch_size(self, data_size: int) -> int:
        """Sequences in a step on so many data ranks, after any growth: by default one microbatch on each."""
        steps = readable_steps(self.step_batch_size_schedule)
        return steps[-1].batch_size if steps else self.global_batch_size or self.micro_batch_size * data_size

    def batch_sizes(self, data_size: int, seq_length: int) -> list[tuple[int, int]]:
        """(samples, batch size) in ascending order: the step that begins after so many samples, or more, has so many sequences.
        Where two begin at once, the last counts.

        A ramp-up is START + floor(samples / (SAMPLES / increments)) * INCREMENT, at most the global batch size, where increments =
        (global batch size - START) / INCREMENT (the formula of Megatron-Core's RampupBatchsizeNumMicroBatchesCalculator, here in
        whole numbers, without its rounding). Tokens of a schedule count as whole samples, rounded down, as in its
        StepBatchsizeNumMicroBatchesCalculator.
        """
        final = self.final_batch_size(data_size)
        if steps := readable_steps(self.step_batch_size_schedule):
            return [(step.tokens // seq_length, step.batch_size) for step in steps]
        if self.rampup_batch_size is None:
            return [(0, final)]
        start, increment, samples = self.rampup_batch_size
        increments = (final - start) // increment
        return [(0, start), *((-(-n * samples // increments), start + n * increment) for n in range(1, increments + 1))]

    def first_batch_size(self, data_size: int) -> int:
        """Sequences in the first step."""
        if steps := readable_steps(self.step_batch_size_schedule):
            return steps[0].batch_size
        return self.rampup_batch_size[0] if self.rampup_batch_size else self.final_batch_size(data_size)


_SPIKES = acts_with(spike_policy=("warn", "skip", "rewind"))
_REWINDS = acts_with(spike_policy="rewind")


@dataclass(frozen=True)
class SpikeConfig:
    """What becomes of steps whose loss or gradient norm stands far above those before."""

    spike_policy: Literal["none", "warn", "skip", "rewind"] = "none"
    """On a loss spike: warn tells it in the log, skip also makes no update, rewind goes back to the newest checkpoint of this run
    and passes over the data from there to behind the spike. docs/spikes.md defines each."""
    spike_window: int = setting(128, at_least=4, at_most=4096, unit="steps", acts=_SPIKES)
    """Steps before, with whose medians a step is compared; none is judged before half of them are there (128 in OLMo-core's
    SkipStepOptimizer)."""
    spike_threshold: float = setting(6.0, above=0, unit="robust standard deviations", acts=_SPIKES)
    """A step is a spike whose loss or gradient norm is so many robust standard deviations (1.4826 x the median absolute deviation)
    above the median (6 in OLMo-core's SkipStepOptimizer, of plain ones above the mean)."""
    spike_batches_beyond: int = setting(100, at_least=0, unit="global batches", acts=_REWINDS)
    """Batches behind that of the spike that a rewind passes over too (PaLM: 200 to 500 in all, from about 100 before it)."""
    spike_max_rewinds: int = setting(3, at_least=1, unit="rewinds in a row", acts=_REWINDS)
    """Rewinds to the same checkpoint, after which the next spike ends the run."""


DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]

_SHARE_OF_WEIGHT = "share of a weight taken off in an update, in units of the rate"
_SHARE_KEPT = "share that is kept from one update to the next"
ADAM_LIKE = ("adam", "ademamix", "lamb", "adam8bit")
"""Optimizers with Adam's two moments and eps."""
_ADAM = acts_with(optimizer=(*ADAM_LIKE, "muon"))
_EIGHT_BITS = acts_with(optimizer="adam8bit", param_groups=GIVEN)
_LION = acts_with(optimizer="lion", param_groups=GIVEN)
_ADEMAMIX = acts_with(optimizer="ademamix", param_groups=GIVEN)
_ADAFACTOR = acts_with(optimizer="adafactor", param_groups=GIVEN)
_RELATIVE = acts_with(adafactor_relative_step=True)
_MUON = acts_with(optimizer="muon", param_groups=GIVEN)
_NO_FUSED_HEADS = idle_with("latent attention's products are a matrix each", multi_latent_attention=True)
_WSD = acts_with(lr_decay_style="WSD")
_HAS_DECAY = acts_with(
    "with a --lr-decay-style other than constant, or with --lr-warmup-fraction",
    lr_decay_style=OtherThan("constant"),
    lr_warmup_fraction=GIVEN,
)
_CHANGES = acts_with(weight_decay_incr_style=("linear", "cosine"))
_STAYS = acts_with(
    "with --weight-decay-incr-style constant; otherwise --start-weight-decay and --end-weight-decay do",
    fix={},
    weight_decay_incr_style="constant",
)
_LOADS = acts_with(load=GIVEN)


@dataclass(frozen=True)
class OptimizerConfig:
    """Rule of update, its numbers, and schedules. All schedules count the samples of the updates that were made."""

    optimizer: Literal["adam", "sgd", "lion", "ademamix", "adafactor", "lamb", "adam8bit", "muon"] = setting("adam", opens=True)
    """Update rule: adam is AdamW, sgd has momentum, muon orthogonalises the updates of the layers' matrices and leaves the rest to
    adam. docs/optimizers.md compares them. Modules of --imports may register more."""
    use_apex: bool = setting(False, acts=acts_with(optimizer=("adam", "sgd", "muon")))
    """Take FusedAdam or FusedSGD of NVIDIA apex, if it is installed, instead of torch's."""
    lr: float | None = setting(None, above=0, unit="step length of the update", required=True)
    """Highest learning rate. Required."""
    min_lr: float = setting(0.0, at_least=0, unit="step length of the update", acts=acts_with(lr_decay_style=OtherThan("constant")))
    """Lowest learning rate after decay."""
    decoupled_lr: float | None = setting(None, above=0, unit="step length of the update")
    """Highest learning rate of word embedding and output layer, in place of --lr."""
    decoupled_min_lr: float | None = setting(None, at_least=0, unit="step length of the update", acts=acts_with(decoupled_lr=GIVEN))
    """Lowest learning rate of word embedding and output layer; by default --min-lr."""
    lr_decay_style: DecayStyle = "linear"
    """Form of the decay from --lr to --min-lr."""
    lr_decay_iters: int | None = setting(None, at_least=1, unit="steps", acts=_HAS_DECAY)
    """Steps over which the rate decays; by default the whole run."""
    lr_decay_samples: int | None = setting(None, at_least=1, unit="sequences", acts=_HAS_DECAY)
    """Samples over which the rate decays, instead of --lr-decay-iters."""
    lr_warmup_iters: int = setting(0, at_least=0, unit="steps")
    """Steps of linear warm-up."""
    lr_warmup_samples: int = setting(0, at_least=0, unit="sequences")
    """Samples of linear warm-up, instead of --lr-warmup-iters."""
    lr_warmup_fraction: float | None = setting(None, at_least=0, below=1, unit="share, 1 for all")
    """Warm-up as a share of the decay length, instead of the two above."""
    lr_warmup_init: float = setting(
        0.0,
        at_least=0,
        unit="step length of the update",
        acts=acts_with(lr_warmup_iters=GIVEN, lr_warmup_samples=GIVEN, lr_warmup_fraction=GIVEN),
    )
    """Learning rate at which warm-up starts."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = setting("exponential", acts=_WSD)
    """Form of the final decay of WSD."""
    lr_wsd_decay_iters: int | None = setting(None, at_least=1, unit="steps", acts=_WSD)
    """Steps of the final decay of WSD."""
    lr_wsd_decay_samples: int | None = setting(None, at_least=1, unit="sequences", acts=_WSD)
    """Samples of the final decay of WSD, instead of --lr-wsd-decay-iters."""
    lr_rewarm_start_iters: int | None = setting(None, at_least=1, unit="steps")
    """Where the learning rate begins a second course: it rises from what it then is, linearly over --lr-rewarm-iters, and decays
    again to the end of the run. The first course goes on to there as without; give its length by --lr-decay-iters."""
    lr_rewarm_start_samples: int | None = setting(None, at_least=1, unit="sequences")
    """The same place in samples, instead of --lr-rewarm-start-iters."""
    lr_rewarm_iters: int = setting(0, at_least=0, unit="steps", acts=acts_with(lr_rewarm_start_iters=GIVEN))
    """Steps over which the learning rate rises again."""
    lr_rewarm_samples: int = setting(0, at_least=0, unit="sequences", acts=acts_with(lr_rewarm_start_samples=GIVEN))
    """Samples over which the learning rate rises again, instead of --lr-rewarm-iters."""
    lr_rewarm_factor: float = setting(
        1.0, above=0, unit="factor", acts=acts_with(lr_rewarm_start_iters=GIVEN, lr_rewarm_start_samples=GIVEN)
    )
    """Highest rate of the second course, in units of --lr."""
    weight_decay: float = setting(0.01, at_least=0, unit=_SHARE_OF_WEIGHT, acts=_STAYS)
    """Decoupled weight decay (not on biases and norms)."""
    start_weight_decay: float | None = setting(None, at_least=0, unit=_SHARE_OF_WEIGHT, acts=_CHANGES)
    """Weight decay at the start, when it changes over the run."""
    end_weight_decay: float | None = setting(None, at_least=0, unit=_SHARE_OF_WEIGHT, acts=_CHANGES)
    """Weight decay at the end, when it changes over the run."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay goes from start to end."""
    decay_embeddings: bool = True
    """Whether the weight decay acts on embeddings too, the tied one included."""
    param_groups: tuple[str, ...] = ()
    """What some parameters have of their own: a YAML file of patterns of names, each with a mapping of optimizer, lr-mult, lr,
    min-lr, wd-mult, adam-beta1, adam-beta2, adam-eps; or entries such as 'embedding.* lr-mult=0.1'. Later entries win."""
    clip_grad: float = setting(1.0, at_least=0, unit="norm of the whole gradient")
    """Clip the global gradient norm to this; 0 switches clipping off."""
    adam_beta1: float = setting(0.9, at_least=0, below=1, unit=_SHARE_KEPT, acts=_ADAM)
    """Decay rate of Adam's first moment."""
    adam_beta2: float = setting(0.999, at_least=0, below=1, unit=_SHARE_KEPT, acts=_ADAM)
    """Decay rate of Adam's second moment."""
    adam_eps: float = setting(1e-8, above=0, at_most=1, unit="plain number", acts=_ADAM)
    """Added to the root of Adam's second moment."""
    sgd_momentum: float = setting(0.9, at_least=0, below=1, unit=_SHARE_KEPT, acts=acts_with(optimizer="sgd"))
    """Momentum of SGD."""
    adam_8bit_block_size: int = setting(256, at_least=1, unit="elements of a row", acts=_EIGHT_BITS)
    """Elements that share a scale, with --optimizer adam8bit."""
    lion_beta1: float = setting(0.9, at_least=0, below=1, unit=_SHARE_KEPT, acts=_LION)
    """Share of the momentum in Lion's update; the rest is the gradient's."""
    lion_beta2: float = setting(0.99, at_least=0, below=1, unit=_SHARE_KEPT, acts=_LION)
    """Decay rate of Lion's momentum."""
    ademamix_beta3: float = setting(0.9999, above=0, below=1, unit=_SHARE_KEPT, acts=_ADEMAMIX)
    """Decay rate of AdEMAMix's slow average of gradients, after its warm-up."""
    ademamix_alpha: float = setting(8.0, at_least=0, unit="factor", acts=_ADEMAMIX)
    """Weight of the slow average in an update, after its warm-up; the other average has weight 1."""
    ademamix_warmup_iters: int | None = setting(None, at_least=0, unit="updates", acts=_ADEMAMIX)
    """Updates over which weight and decay rate of the slow average grow. Required with --optimizer ademamix; its authors take the
    length of the run."""
    adafactor_decay_rate: float = setting(0.8, above=0, unit="exponent", acts=_ADAFACTOR)
    """In update t the second moments keep a share of 1 - t^-this."""
    adafactor_clip_threshold: float = setting(1.0, above=0, unit="root mean square of an update", acts=_ADAFACTOR)
    """An update of a matrix, before the learning rate, is scaled down to this root mean square."""
    adafactor_eps: float = setting(1e-30, above=0, unit="square of a gradient", acts=_ADAFACTOR)
    """Added to the squares of the gradient."""
    adafactor_beta1: float = setting(0.0, at_least=0, below=1, unit=_SHARE_KEPT, acts=_ADAFACTOR)
    """Decay rate of a first moment, a number for each element; 0 keeps none."""
    adafactor_relative_step: bool = setting(False, acts=_ADAFACTOR)
    """Multiply the learning rate by the root mean square of the matrix that is updated."""
    adafactor_least_scale: float = setting(1e-3, above=0, unit="root mean square of a matrix", acts=_RELATIVE)
    """Least factor of --adafactor-relative-step, so that what is zero can grow."""
    muon_momentum: float = setting(0.95, at_least=0, below=1, unit=_SHARE_KEPT, acts=_MUON)
    """Momentum of Muon."""
    muon_use_nesterov: bool = setting(False, acts=_MUON)
    """Look ahead by Nesterov's momentum, as Jordan et al. 2024 do."""
    muon_num_ns_steps: int = setting(5, at_least=1, unit="steps of Newton and Schulz", acts=_MUON)
    """Steps in which a matrix is orthogonalised."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = setting("spectral", acts=_MUON)
    """Factor on an orthogonalised [m, n]: sqrt(max(m, n)), sqrt(m / n), or the latter but at least 1."""
    muon_extra_scale_factor: float = setting(1.0, above=0, unit="plain number", acts=_MUON)
    """One more factor: 0.2 with spectral makes updates about as large as AdamW's, so that its --lr fits (Liu et al. 2025)."""
    muon_no_split_qkv: bool = setting(
        False,
        acts=_MUON,
        idle=(_NO_FUSED_HEADS, idle_with("--muon-split-heads has each head by itself", muon_split_heads=True)),
    )
    """Orthogonalise queries, keys and values as the one matrix as which they are stored; by default they are a matrix each."""
    muon_split_heads: bool = setting(False, acts=_MUON, idle=_NO_FUSED_HEADS)
    """Orthogonalise each head of queries, keys and values by itself."""
    muon_dtype: Literal["bf16", "fp32"] = setting("bf16", acts=_MUON, idle=idle_with("--fp64 has all in float64", fp64=True))
    """In which format matrices travel between ranks and are orthogonalised."""
    qk_clip: bool = False
    """After each update scale down the query and key weights of heads whose largest score in the step was above
    --qk-clip-threshold (MuonClip, Kimi K2)."""
    qk_clip_threshold: float = setting(
        100.0, above=0, unit="score of attention, scaled, before any cap", acts=acts_with(qk_clip=True)
    )
    """Largest score that --qk-clip leaves alone."""
    qk_clip_alpha: float = setting(0.5, above=0, below=1, unit="exponent", acts=acts_with(qk_clip=True))
    """Share of queries in that scaling, as an exponent of the factor; the rest is the keys'."""
    ema_decay: float | None = setting(None, above=0, below=1, unit="share that is kept from one update to the next")
    """Keep, beside the weights, their exponential moving average with this decay, often 0.999 or 0.9999. It begins at the first
    weights and is saved; tools take it with --ema."""
    optimizer_cpu_offload: bool = setting(
        False,
        acts=acts_with(
            "with an --optimizer-offload-fraction above 0",
            fix={"optimizer_offload_fraction": 1.0},
            optimizer_offload_fraction=OtherThan(0),
        ),
        idle=idle_with("--device cpu has everything in host memory", effect="saves no memory", device="cpu"),
    )
    """Keep main parameters and moments in host memory and update them there."""
    optimizer_offload_fraction: float = setting(
        1.0, at_least=0, at_most=1, unit="share, 1 for all", acts=acts_with(optimizer_cpu_offload=True)
    )
    """Share of main parameters and moments that --optimizer-cpu-offload keeps in host memory, above 0 and up to 1; the rest stays
    on the device."""
    override_opt_param_scheduler: bool = setting(False, acts=_LOADS)
    """On resume take the schedules from the command line although the checkpoint's differ."""
    use_checkpoint_opt_param_scheduler: bool = setting(False, acts=_LOADS)
    """On resume take the schedules from the checkpoint."""
    resume_schedule: Literal["new", "saved"] | None = setting(None, acts=_LOADS)
    """Which schedules of learning rate and weight decay count on resume where they differ, as they do in a run that is made longer:
    new, those of this command line (as --override-opt-param-scheduler), or saved, those of the checkpoint (as
    --use-checkpoint-opt-param-scheduler)."""

    @property
    def takes_schedules(self) -> Literal["new", "saved"] | None:
        """Which schedules count on resume; None: they must be the same."""
        if self.override_opt_param_scheduler:
            return "new"
        return "saved" if self.use_checkpoint_opt_param_scheduler else self.resume_schedule
