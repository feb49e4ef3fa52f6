"""Settings of training: batch sizes, length of the run, loss spikes, optimizer and schedules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Literal, NamedTuple

from megatron.config.setting import IS_SET, NotEqual, condition, idle_condition, setting

WITHOUT_SKIP_TRAIN = condition("without --skip-train, which trains and saves nothing", fix={}, skip_train=False)

ExitSignalName = Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGQUIT", "SIGCONT"]

# ---- Parser of --step-batch-size-schedule, in the syntax of Megatron-LM.
#
# `0:768 250B:1536 500B:3072` is a batch of 768 sequences from the start, of 1,536 from 250 billion tokens on, and so forth. K, M, B
# and T are powers of a thousand. Entries are separated by spaces or commas, in one or several arguments.

_POWERS = {"": 0, "K": 1, "M": 2, "B": 3, "T": 4}
_COUNT = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([KMBT]?)", re.IGNORECASE)


class BatchStep(NamedTuple):
    """Entry of --step-batch-size-schedule: a batch size, and the number of tokens after which it starts."""

    tokens: int
    """Tokens that the run has read when this batch size starts."""
    batch_size: int
    """Global batch size in sequences."""

    def __str__(self) -> str:
        return f"{_format_count(self.tokens)}:{self.batch_size}"


def parse_batch_schedule(texts: Iterable[str]) -> list[BatchStep]:
    """Parse the entries of --step-batch-size-schedule and sort them by tokens. Returns an empty list if there are no entries.

    Raises:
        ValueError: an entry cannot be parsed, the first one does not start at 0, two start at the same token, or the batch size
            shrinks.
    """
    steps = sorted(_parse_entry(text) for word in texts for text in word.replace(",", " ").split())
    if steps and steps[0].tokens:
        raise ValueError(
            f"--step-batch-size-schedule does not define the batch size before {steps[0]}. The first entry must start at 0, such "
            "as "
            f"0:{steps[0].batch_size}"
        )
    for previous, current in pairwise(steps):
        if current.tokens == previous.tokens:
            raise ValueError(
                f"--step-batch-size-schedule has two batch sizes that start at the same token, {previous} and {current}. "
                "Remove one of these entries"
            )
        if current.batch_size < previous.batch_size:
            raise ValueError(
                f"--step-batch-size-schedule lowers the batch size from {previous} to {current}. Raise or remove one of these "
                "entries: "
                "the batch size may only grow, because the run is planned for the last one"
            )
    return steps


def parse_batch_schedule_or_empty(texts: Iterable[str]) -> list[BatchStep]:
    """Parse the entries of --step-batch-size-schedule, or return an empty list if they are invalid. A rule reports invalid
    entries."""
    try:
        return parse_batch_schedule(texts)
    except ValueError:
        return []


def format_batch_schedule(steps: Sequence[BatchStep]) -> tuple[str, ...]:
    """Format a batch size schedule as the value of --step-batch-size-schedule, such as "0:768 250B:1536"."""
    return (" ".join(map(str, steps)),)


def _parse_entry(text: str) -> BatchStep:
    matches = [_COUNT.fullmatch(part) for part in text.split(":")]
    if len(matches) != 2 or None in matches:
        raise ValueError(
            f"--step-batch-size-schedule has the entry {text!r}, which is not of the form TOKENS:BATCH. Write it like 250B:1536"
        )
    tokens, batch_size = (Fraction(match[1]) * 1000 ** _POWERS[match[2].upper()] for match in matches if match is not None)
    if batch_size < 1 or batch_size.denominator > 1:
        raise ValueError(
            f"--step-batch-size-schedule has the entry {text!r}, whose batch size is not a whole number of at least 1. "
            "Correct the number after the colon"
        )
    return BatchStep(int(tokens), int(batch_size))


def _format_count(count: int) -> str:
    """Format a count with the largest suffix of K, M, B and T (powers of 1000) that leaves an integer: 250B."""
    for suffix, power in reversed(_POWERS.items()):
        if count and count % 1000**power == 0:
            return f"{count // 1000**power}{suffix}"
    return str(count)


@dataclass(frozen=True)
class TrainingConfig:
    """Batch sizes, length of the run, evaluation and exits."""

    micro_batch_size: int = setting(0, min_value=1, unit="sequences", required=True)
    """Sequences in one forward pass of one data rank. Required."""
    global_batch_size: int | None = setting(None, min_value=1, unit="sequences")
    """Sequences in one step over all data ranks; by default micro batch size x DP."""
    rampup_batch_size: tuple[int, int, int] | None = setting(None, min_value=1, unit="sequences")
    """Batch size ramp-up START INCREMENT SAMPLES: start with START sequences and grow in steps of INCREMENT to the global batch
    size, over SAMPLES samples."""
    step_batch_size_schedule: tuple[str, ...] = ()
    """Schedule of global batch sizes by the tokens read so far, such as "0:768 250B:1536 500B:3072" (K, M, B and T are powers of a
    thousand). Replaces --global-batch-size."""
    train_iters: int | None = setting(None, min_value=1, unit="steps")
    """Number of steps to train. Either this, --train-samples or --train-epochs is required."""
    train_samples: int | None = setting(None, min_value=1, unit="sequences")
    """Number of sequences to train on, instead of --train-iters."""
    train_epochs: float | None = setting(None, above=0, max_value=1e6, unit="passes over the training data")
    """Number of passes over the training data, instead of --train-iters; may be fractional. An epoch is as many sequences as the
    training data contains: the sum over its datasets, whatever their weights in a blend. The log says how many steps this is."""
    eval_interval: int | None = setting(
        None, min_value=1, unit="steps", idle_if=idle_condition("--eval-iters 0 switches evaluation off", eval_iters=0)
    )
    """Steps between evaluations; by default only one evaluation at the end."""
    eval_iters: int = setting(
        100,
        min_value=0,
        unit="global batches",
        active_if=condition("without --full-validation, which reads each set completely", fix={}, full_validation=False),
    )
    """Number of global batches in an evaluation; 0 switches evaluation off."""
    full_validation: bool = False
    """Read all samples of each validation set once in every evaluation, and all of the test set at the end, instead of --eval-iters
    batches. The weights of a blend then have no effect."""
    skip_train: bool = False
    """Evaluate the weights of --load (without it, the initial weights) on the validation and test data, and exit without training.
    Settings of the optimizer, --train-iters and training data are not needed, and nothing is saved."""
    early_stopping_patience: int | None = setting(None, min_value=1, unit="evaluations", active_if=WITHOUT_SKIP_TRAIN)
    """End the run after this many evaluations in a row (see --eval-interval) without a new lowest validation loss. A loss that
    is not finite is no improvement. --keep-best keeps the checkpoint of the lowest loss."""
    early_stopping_min_delta: float = setting(
        0.0, min_value=0, unit="validation loss", active_if=condition(early_stopping_patience=IS_SET)
    )
    """Smallest decrease of the validation loss that counts as an improvement for --early-stopping-patience."""
    z_loss_coeff: float = setting(0.0, min_value=0, unit="factor on the square of log Z")
    """Coefficient of the z-loss, (log Z)^2 of each token, with Z the sum of the exponentials of its logits (PaLM used 1e-4). It is
    minimized together with the cross entropy and logged as "z loss"; "lm loss" and evaluations do not contain it."""
    label_smoothing: float = setting(0.0, min_value=0, below=1, unit="fraction of each target")
    """Fraction of each target to spread evenly over the vocabulary (Szegedy et al. 2016 used 0.1). "lm loss" and evaluations remain
    the cross entropy with the label only."""
    mtp_loss_scaling_factor: float = setting(0.1, above=0, unit="factor", active_if=condition(mtp_num_layers=NotEqual(0)))
    """Coefficient of the multi-token prediction loss, the mean cross entropy over --mtp-num-layers. It is minimized together with
    the cross entropy and logged as "mtp loss"."""
    imports: tuple[str, ...] = ()
    """Your own Python modules, or .py files, to import on every rank before anything else. They can register optimizers,
    activations and metrics (docs/python.md)."""
    seed: int = setting(1234, min_value=0, max_value=2**32 - 1, unit="dimensionless")
    """Random seed of the initial weights, dropout and the data order."""
    iterations_to_skip: tuple[int, ...] = setting((), min_value=1, unit="iteration, from 1 on")
    """Iterations that read their data but make no update."""
    exit_interval: int | None = setting(None, min_value=1, unit="steps")
    """Save and exit when the iteration is a multiple of this."""
    exit_duration_in_mins: float | None = setting(None, above=0, unit="minutes")
    """Save and exit after this many minutes."""
    exit_signal: ExitSignalName | None = None
    """Additional signal on which the run saves and exits. SIGTERM, SIGINT (Ctrl-C), SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU always
    have this effect."""
    exit_signal_code: int = setting(85, min_value=0, max_value=255, unit="exit code")
    """Exit code after a signal ended the run early; the run saves before it exits. With 0 a launcher considers the run complete and
    does not restart it."""
    deterministic_mode: bool = False
    """Use only deterministic kernels. On GPUs this is necessary for two runs to be bitwise equal (the backward pass of attention is
    slower)."""
    manual_gc: bool = False
    """Disable Python's garbage collector and collect at fixed steps, on all ranks at the same time."""
    manual_gc_interval: int = setting(0, min_value=0, unit="steps", active_if=condition(manual_gc=True))
    """Steps between garbage collections with --manual-gc; 0 collects only at evaluations and checkpoints."""

    def get_final_batch_size(self, data_size: int) -> int:
        """Return the global batch size, in sequences, at the end of any ramp-up or schedule. Without --global-batch-size it is one
        microbatch on each data rank.

        Args:
            data_size: data-parallel size.
        """
        steps = parse_batch_schedule_or_empty(self.step_batch_size_schedule)
        return steps[-1].batch_size if steps else self.global_batch_size or self.micro_batch_size * data_size

    def compute_batch_sizes(self, data_size: int, seq_length: int) -> list[tuple[int, int]]:
        """Return the batch sizes of the run as pairs (samples, batch size) in ascending order.

        A step that starts after at least `samples` samples has this batch size. If two pairs have the same number of samples, the
        last one counts.

        A ramp-up is START + floor(samples / (SAMPLES / increments)) * INCREMENT, at most the global batch size, where increments =
        (global batch size - START) / INCREMENT (the formula of Megatron-Core's RampupBatchsizeNumMicroBatchesCalculator, here in
        integers, without its rounding). Tokens of a schedule are converted to complete samples, rounded down, as in Megatron-Core's
        StepBatchsizeNumMicroBatchesCalculator.

        Args:
            data_size: data-parallel size.
            seq_length: tokens in a sequence (sample).
        """
        final = self.get_final_batch_size(data_size)
        if steps := parse_batch_schedule_or_empty(self.step_batch_size_schedule):
            return [(step.tokens // seq_length, step.batch_size) for step in steps]
        if self.rampup_batch_size is None:
            return [(0, final)]
        start, increment, samples = self.rampup_batch_size
        increments = (final - start) // increment
        return [(0, start), *((-(-n * samples // increments), start + n * increment) for n in range(1, increments + 1))]

    def get_first_batch_size(self, data_size: int) -> int:
        """Return the number of sequences in the first step."""
        if steps := parse_batch_schedule_or_empty(self.step_batch_size_schedule):
            return steps[0].batch_size
        return self.rampup_batch_size[0] if self.rampup_batch_size else self.get_final_batch_size(data_size)


_SPIKES = condition(spike_policy=("warn", "skip", "rewind"))
_REWINDS = condition(spike_policy="rewind")


@dataclass(frozen=True)
class SpikeConfig:
    """Handling of loss spikes: steps whose loss or gradient norm is far above the previous ones."""

    spike_policy: Literal["none", "warn", "skip", "rewind"] = "none"
    """Action on a loss spike: warn logs it; skip also makes no update; rewind loads the newest checkpoint of this run and skips the
    data from there to behind the spike. docs/spikes.md defines each."""
    spike_window: int = setting(128, min_value=4, max_value=4096, unit="steps", active_if=_SPIKES)
    """Number of previous steps whose medians a step is compared with. No step is judged until half of them are available (128 in
    OLMo-core's SkipStepOptimizer)."""
    spike_threshold: float = setting(6.0, above=0, unit="robust standard deviations", active_if=_SPIKES)
    """Threshold of a spike: a loss or gradient norm that is this many robust standard deviations (1.4826 x the median absolute
    deviation) above the median (OLMo-core's SkipStepOptimizer uses 6 plain standard deviations above the mean)."""
    spike_batches_beyond: int = setting(100, min_value=0, unit="global batches", active_if=_REWINDS)
    """Number of batches after the spike that a rewind also skips (PaLM: 200 to 500 in all, from about 100 before the spike)."""
    spike_max_rewinds: int = setting(3, min_value=1, unit="rewinds in a row", active_if=_REWINDS)
    """Number of rewinds to the same checkpoint, after which the next spike ends the run."""


DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]

_WEIGHT_DECAY_UNIT = "fraction of a weight that an update subtracts, as a multiple of the learning rate"
_EMA_UNIT = "fraction that is kept from one update to the next"
ADAM_LIKE = ("adam", "ademamix", "lamb", "adam8bit")
"""Optimizers with Adam's two moments and epsilon."""
_ADAM = condition(optimizer=(*ADAM_LIKE, "muon"))
_ADAM_8BIT = condition(optimizer="adam8bit", param_groups=IS_SET)
_LION = condition(optimizer="lion", param_groups=IS_SET)
_ADEMAMIX = condition(optimizer="ademamix", param_groups=IS_SET)
_ADAFACTOR = condition(optimizer="adafactor", param_groups=IS_SET)
_RELATIVE = condition(adafactor_relative_step=True)
_MUON = condition(optimizer="muon", param_groups=IS_SET)
_NO_FUSED_HEADS = idle_condition("latent attention has a separate matrix for each projection", multi_latent_attention=True)
_WSD = condition(lr_decay_style="WSD")
_HAS_DECAY = condition(
    "with a --lr-decay-style other than constant, or with --lr-warmup-fraction",
    lr_decay_style=NotEqual("constant"),
    lr_warmup_fraction=IS_SET,
)
_CHANGING_WEIGHT_DECAY = condition(weight_decay_incr_style=("linear", "cosine"))
_CONSTANT_WEIGHT_DECAY = condition(
    "with --weight-decay-incr-style constant; otherwise --start-weight-decay and --end-weight-decay do",
    fix={},
    weight_decay_incr_style="constant",
)
_LOADS = condition(load=IS_SET)


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, its hyperparameters, and the schedules of learning rate and weight decay. All schedules advance by the samples of
    each update; skipped updates do not count."""

    optimizer: Literal["adam", "sgd", "lion", "ademamix", "adafactor", "lamb", "adam8bit", "muon"] = setting(
        "adam", is_extensible=True
    )
    """Optimizer: adam is AdamW, sgd has momentum, muon orthogonalizes the updates of the layers' matrices and uses adam for the
    other parameters. docs/optimizers.md compares them. Modules of --imports can register more."""
    use_apex: bool = setting(False, active_if=condition(optimizer=("adam", "sgd", "muon")))
    """Use FusedAdam or FusedSGD of NVIDIA apex, if it is installed, instead of torch's optimizers."""
    lr: float | None = setting(None, above=0, unit="step size of an update", required=True)
    """Maximum learning rate. Required."""
    min_lr: float = setting(
        0.0, min_value=0, unit="step size of an update", active_if=condition(lr_decay_style=NotEqual("constant"))
    )
    """Minimum learning rate after decay."""
    decoupled_lr: float | None = setting(None, above=0, unit="step size of an update")
    """Maximum learning rate of the word embedding and the output layer, in place of --lr."""
    decoupled_min_lr: float | None = setting(
        None, min_value=0, unit="step size of an update", active_if=condition(decoupled_lr=IS_SET)
    )
    """Minimum learning rate of the word embedding and the output layer; by default --min-lr."""
    lr_decay_style: DecayStyle = "linear"
    """Shape of the learning rate decay from --lr to --min-lr."""
    lr_decay_iters: int | None = setting(None, min_value=1, unit="steps", active_if=_HAS_DECAY)
    """Number of steps over which the learning rate decays; by default the whole run."""
    lr_decay_samples: int | None = setting(None, min_value=1, unit="sequences", active_if=_HAS_DECAY)
    """Number of samples over which the learning rate decays, instead of --lr-decay-iters."""
    lr_warmup_iters: int = setting(0, min_value=0, unit="steps")
    """Number of steps of linear learning rate warm-up."""
    lr_warmup_samples: int = setting(0, min_value=0, unit="sequences")
    """Number of samples of linear learning rate warm-up, instead of --lr-warmup-iters."""
    lr_warmup_fraction: float | None = setting(None, min_value=0, below=1, unit="fraction, 1 for all")
    """Warm-up as a fraction of the decay length, instead of --lr-warmup-iters and --lr-warmup-samples."""
    lr_warmup_init: float = setting(
        0.0,
        min_value=0,
        unit="step size of an update",
        active_if=condition(lr_warmup_iters=IS_SET, lr_warmup_samples=IS_SET, lr_warmup_fraction=IS_SET),
    )
    """Initial learning rate of the warm-up."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = setting("exponential", active_if=_WSD)
    """Shape of the final decay of the WSD schedule."""
    lr_wsd_decay_iters: int | None = setting(None, min_value=1, unit="steps", active_if=_WSD)
    """Number of steps of the final decay of the WSD schedule."""
    lr_wsd_decay_samples: int | None = setting(None, min_value=1, unit="sequences", active_if=_WSD)
    """Number of samples of the final decay of the WSD schedule, instead of --lr-wsd-decay-iters."""
    lr_rewarm_start_iters: int | None = setting(None, min_value=1, unit="steps")
    """Step at which the learning rate is warmed up again: it rises from its current value, linearly over --lr-rewarm-iters, and
    then decays to the end of the run. The first schedule is unchanged before this step; set its length by --lr-decay-iters."""
    lr_rewarm_start_samples: int | None = setting(None, min_value=1, unit="sequences")
    """Number of samples after which the learning rate is warmed up again, instead of --lr-rewarm-start-iters."""
    lr_rewarm_iters: int = setting(0, min_value=0, unit="steps", active_if=condition(lr_rewarm_start_iters=IS_SET))
    """Number of steps of the second warm-up of the learning rate."""
    lr_rewarm_samples: int = setting(0, min_value=0, unit="sequences", active_if=condition(lr_rewarm_start_samples=IS_SET))
    """Number of samples of the second warm-up of the learning rate, instead of --lr-rewarm-iters."""
    lr_rewarm_factor: float = setting(
        1.0, above=0, unit="factor", active_if=condition(lr_rewarm_start_iters=IS_SET, lr_rewarm_start_samples=IS_SET)
    )
    """Maximum learning rate after the second warm-up, as a multiple of --lr."""
    weight_decay: float = setting(0.01, min_value=0, unit=_WEIGHT_DECAY_UNIT, active_if=_CONSTANT_WEIGHT_DECAY)
    """Coefficient of decoupled weight decay (not applied to biases and norms)."""
    start_weight_decay: float | None = setting(None, min_value=0, unit=_WEIGHT_DECAY_UNIT, active_if=_CHANGING_WEIGHT_DECAY)
    """Weight decay at the start of the run, if it changes over the run."""
    end_weight_decay: float | None = setting(None, min_value=0, unit=_WEIGHT_DECAY_UNIT, active_if=_CHANGING_WEIGHT_DECAY)
    """Weight decay at the end of the run, if it changes over the run."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the weight decay schedule from start to end."""
    decay_embeddings: bool = True
    """Apply weight decay to the embeddings too, including an embedding that is tied to the output layer."""
    param_groups: tuple[str, ...] = ()
    """Optimizer settings of individual parameters: a YAML file of name patterns, each with a mapping of optimizer, lr-mult, lr,
    min-lr, wd-mult, adam-beta1, adam-beta2, adam-eps; or entries such as 'embedding.* lr-mult=0.1'. Later entries take precedence.
    """
    clip_grad: float = setting(1.0, min_value=0, unit="global gradient norm")
    """Clip the global gradient norm to this value; 0 switches clipping off."""
    adam_beta1: float = setting(0.9, min_value=0, below=1, unit=_EMA_UNIT, active_if=_ADAM)
    """Decay rate of Adam's first moment."""
    adam_beta2: float = setting(0.999, min_value=0, below=1, unit=_EMA_UNIT, active_if=_ADAM)
    """Decay rate of Adam's second moment."""
    adam_eps: float = setting(1e-8, above=0, max_value=1, unit="dimensionless", active_if=_ADAM)
    """Constant added to the square root of Adam's second moment."""
    sgd_momentum: float = setting(0.9, min_value=0, below=1, unit=_EMA_UNIT, active_if=condition(optimizer="sgd"))
    """Momentum of SGD."""
    adam_8bit_block_size: int = setting(256, min_value=1, unit="elements of a row", active_if=_ADAM_8BIT)
    """Number of elements that share a scale, with --optimizer adam8bit."""
    lion_beta1: float = setting(0.9, min_value=0, below=1, unit=_EMA_UNIT, active_if=_LION)
    """Weight of the momentum in Lion's update; the gradient has the remaining weight."""
    lion_beta2: float = setting(0.99, min_value=0, below=1, unit=_EMA_UNIT, active_if=_LION)
    """Decay rate of Lion's momentum."""
    ademamix_beta3: float = setting(0.9999, above=0, below=1, unit=_EMA_UNIT, active_if=_ADEMAMIX)
    """Decay rate of AdEMAMix's slow moving average of gradients, after its warm-up."""
    ademamix_alpha: float = setting(8.0, min_value=0, unit="factor", active_if=_ADEMAMIX)
    """Weight of AdEMAMix's slow moving average in an update, after its warm-up; the fast average has weight 1."""
    ademamix_warmup_iters: int | None = setting(None, min_value=0, unit="updates", active_if=_ADEMAMIX)
    """Number of updates over which the weight and the decay rate of AdEMAMix's slow average increase. Required with --optimizer
    ademamix; its authors use the length of the run."""
    adafactor_decay_rate: float = setting(0.8, above=0, unit="exponent", active_if=_ADAFACTOR)
    """Exponent d of Adafactor's second-moment decay: in update t the decay rate is 1 - t^-d."""
    adafactor_clip_threshold: float = setting(1.0, above=0, unit="root mean square of an update", active_if=_ADAFACTOR)
    """Root mean square to which Adafactor scales down a larger update of a matrix, before the learning rate is applied."""
    adafactor_eps: float = setting(1e-30, above=0, unit="square of a gradient", active_if=_ADAFACTOR)
    """Constant that Adafactor adds to the squares of the gradient."""
    adafactor_beta1: float = setting(0.0, min_value=0, below=1, unit=_EMA_UNIT, active_if=_ADAFACTOR)
    """Decay rate of Adafactor's first moment, stored for each element; 0 disables the first moment."""
    adafactor_relative_step: bool = setting(False, active_if=_ADAFACTOR)
    """Multiply Adafactor's learning rate by the root mean square of the matrix that is updated."""
    adafactor_least_scale: float = setting(1e-3, above=0, unit="root mean square of a matrix", active_if=_RELATIVE)
    """Minimum factor of --adafactor-relative-step, so that matrices of zeros can grow."""
    muon_momentum: float = setting(0.95, min_value=0, below=1, unit=_EMA_UNIT, active_if=_MUON)
    """Momentum of Muon."""
    muon_use_nesterov: bool = setting(False, active_if=_MUON)
    """Use Nesterov momentum in Muon, as Jordan et al. 2024 do."""
    muon_num_ns_steps: int = setting(5, min_value=1, unit="Newton-Schulz iterations", active_if=_MUON)
    """Number of Newton-Schulz iterations by which Muon orthogonalizes a matrix."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = setting("spectral", active_if=_MUON)
    """Factor of Muon's orthogonalized update [m, n]: sqrt(max(m, n)) (spectral), sqrt(m / n) (unit_rms_norm), or the latter but at
    least 1 (shape_scaling)."""
    muon_extra_scale_factor: float = setting(1.0, above=0, unit="dimensionless", active_if=_MUON)
    """Additional factor of Muon's updates: 0.2 with spectral makes updates about as large as AdamW's, so that AdamW's --lr can be
    used (Liu et al. 2025)."""
    muon_no_split_qkv: bool = setting(
        False,
        active_if=_MUON,
        idle_if=(_NO_FUSED_HEADS, idle_condition("--muon-split-heads orthogonalizes each head separately", muon_split_heads=True)),
    )
    """Orthogonalize the query-key-value weight as one matrix, as it is stored; by default queries, keys and values are
    orthogonalized separately."""
    muon_split_heads: bool = setting(False, active_if=_MUON, idle_if=_NO_FUSED_HEADS)
    """Orthogonalize each head of queries, keys and values separately."""
    muon_dtype: Literal["bf16", "fp32"] = setting(
        "bf16", active_if=_MUON, idle_if=idle_condition("--fp64 uses float64 everywhere", fp64=True)
    )
    """Dtype in which matrices are sent between ranks and orthogonalized."""
    qk_clip: bool = False
    """Scale down, after each update, the query and key weights of heads whose largest attention score in the step was above
    --qk-clip-threshold (MuonClip, Kimi K2)."""
    qk_clip_threshold: float = setting(
        100.0, above=0, unit="attention score, scaled, before any cap", active_if=condition(qk_clip=True)
    )
    """Largest attention score that --qk-clip does not scale down."""
    qk_clip_alpha: float = setting(0.5, above=0, below=1, unit="exponent", active_if=condition(qk_clip=True))
    """Exponent of the factor of --qk-clip that is applied to the query weights; the key weights get the exponent 1 - alpha."""
    ema_decay: float | None = setting(None, above=0, below=1, unit="fraction that is kept from one update to the next")
    """Decay of an exponential moving average of the weights, often 0.999 or 0.9999. The average starts at the initial weights and
    is saved in checkpoints; tools use it with --ema. By default there is no average."""
    optimizer_cpu_offload: bool = setting(
        False,
        active_if=condition(
            "with an --optimizer-offload-fraction above 0",
            fix={"optimizer_offload_fraction": 1.0},
            optimizer_offload_fraction=NotEqual(0),
        ),
        idle_if=idle_condition("--device cpu has everything in host memory", effect="saves no memory", device="cpu"),
    )
    """Keep main parameters and optimizer moments in host memory and update them there."""
    optimizer_offload_fraction: float = setting(
        1.0, min_value=0, max_value=1, unit="fraction, 1 for all", active_if=condition(optimizer_cpu_offload=True)
    )
    """Fraction of main parameters and optimizer moments that --optimizer-cpu-offload keeps in host memory, above 0 and up to 1; the
    remaining ones stay on the device."""
    override_opt_param_scheduler: bool = setting(False, active_if=_LOADS)
    """Use the schedules of the command line on resume, even if those of the checkpoint differ."""
    use_checkpoint_opt_param_scheduler: bool = setting(False, active_if=_LOADS)
    """Use the schedules of the checkpoint on resume."""
    resume_schedule: Literal["new", "saved"] | None = setting(None, active_if=_LOADS)
    """Schedules of learning rate and weight decay to use on resume if they differ from the checkpoint's, for example because
    the run was extended: new for those of the command line (as --override-opt-param-scheduler), saved for those of the
    checkpoint (as --use-checkpoint-opt-param-scheduler)."""

    @property
    def schedule_source(self) -> Literal["new", "saved"] | None:
        """Schedules to use on resume: "new" from the command line, "saved" from the checkpoint; None if the schedules of the two
        must be equal."""
        if self.override_opt_param_scheduler:
            return "new"
        return "saved" if self.use_checkpoint_opt_param_scheduler else self.resume_schedule
