"""Runs settings twice in float64: at their layout on local processes, and as the plain reference."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from megatron.config.config import Config
from megatron.config.outputs import CheckpointConfig, DebugConfig, LoggingConfig
from megatron.config.param_groups import entry_of
from megatron.config.training import SpikeConfig
from megatron.data.samples import DocumentRules
from megatron.data.tokenizer import build_tokenizer, embedding_rows
from megatron.model.build import build_model, overlaps
from megatron.parallel.context import choose_device, make_context
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.partition import table_of
from megatron.spec.activations import added, read_with
from megatron.spec.attention_backends import kernels_of
from megatron_lab.verification.layout_run import observe_rank
from megatron_lab.verification.local_ranks import run_ranks
from megatron_lab.verification.observation import Observation, ProofTask
from megatron_lab.verification.own_run import run_own, start_weights
from megatron_lab.verification.plain_run import reference_shape, run_plain
from megatron_lab.verification.random_samples import RandomSamples
from megatron_lab.verification.reference.shape import random_weights

_START_SEED, _SAMPLES_SEED, _HELD_OUT_SEED = 1, 2, 3
DROPOUT = 0.1
"""Probability of dropout where the settings have none."""
LEAST_EPS = 1e-6
"""The least epsilon of Adam. The true gradient of some parameters is zero (a key bias without rotary positions), and Adam divides
the rounding error in its place by no less than this."""


ReferenceKind = Literal["plain", "self"]
"""What a layout is compared with: a plain model that shares no code with it, or a run of the same code in one process."""


def prove(
    config: Config,
    world_size: int,
    *,
    steps: int | None = None,
    dropout: bool = True,
    timeout: float = 240.0,
    reference: ReferenceKind = "plain",
) -> Observation:
    """Observe a run at its layout, and the reference on the same samples and start weights.

    Args:
        config: settings that are valid for `world_size` ranks, of a size that can be run here.
        steps: the most iterations; by default the whole run.
        dropout: leave the model its probabilities of dropout, or add some where it has none: they must not act where it is off.
        timeout: seconds after which a run is given up.

    Raises:
        RanksError: a rank raised, died, or did not finish in time.
        ValueError: the tokenizer of the settings cannot be made, or the plain reference does not know a part of the model.
    """
    if reference == "plain":
        refuse_unknown_parts(config)
    import_before_fork()
    config, replaced = _as_run(config, steps, dropout)
    parallel, data = config.parallel, config.data
    tokenizer = build_tokenizer(data)
    rules = DocumentRules(tokenizer.eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
    vocab_size = embedding_rows(tokenizer, data)
    data_size = Topology.of(parallel, world_size).dp
    micro = config.training.micro_batch_size
    several = config.training.first_batch_size(data_size) > micro
    samples = RandomSamples(_SAMPLES_SEED, config.model.seq_length, vocab_size, tokenizer.eod, micro, empty_masks=several)
    held_out = dataclasses.replace(samples, seed=_HELD_OUT_SEED)
    initial = _initial_weights(config, vocab_size)
    if reference == "self":
        start = start_weights(config, vocab_size, initial, _START_SEED)
        replaced.append("reference: the same code in one process. What is wrong there too is not found")
    else:
        start = random_weights(reference_shape(config.model, vocab_size), _START_SEED)

    task = ProofTask(config, vocab_size, rules, start, samples, held_out, data_size, steps)
    ranks = run_ranks(world_size, observe_rank, task, timeout=timeout)
    table = table_of(config.model, parallel, vocab_size)
    # In a process of its own: where there is a GPU, a process that has run a backward can fork no ranks for another run.
    run = run_own if reference == "self" else run_plain
    plain = run_ranks(1, lambda rank: run(task), timeout=timeout, init=False)[0]
    return Observation(config, vocab_size, table, ranks, plain, initial, start, replaced)


def refuse_unknown_parts(config: Config) -> None:
    """Check that the plain reference knows all parts of a model.

    Raises:
        ValueError: one is registered by a module of the user's own.
    """
    own = [config.optimizer.optimizer, *(entry_of(text).optimizer for text in config.optimizer.param_groups)]
    found = [f"--optimizer {name}" for name in own if name in added("optimizer")]
    found += [f"--activation {config.model.activation}"] if config.model.activation is not None else []
    if found:
        raise ValueError(
            f"{' and '.join(dict.fromkeys(found))}: the plain reference does not know what your own modules register.\n"
            "  --reference self compares with a run of the same code in one process."
        )


def _as_run(config: Config, steps: int | None, dropout: bool) -> tuple[Config, list[str]]:
    """The settings of both runs, and lines on what was replaced in them."""
    replaced = [
        "dtype: everything is float64. Not run: 16-bit storage, and main parameters apart from the weights with their copy back",
        "kernels: those of float64 on a CPU. Not run: fused updates, flash attention",
        "dropout: off in training"
        + (
            "; its probability stays: evaluation must be without, and seeds of masks are compared"
            if dropout
            else " and in evaluation"
        ),
        "data: random tokens with ends of documents, and random loss masks beside those of the flags",
        "network: what is sent arrives when it is waited for, and not before",
        "checkpoints, logs, profiler and exits: none",
    ]
    model, training, optimizer = config.model, config.training, config.optimizer
    if config.precision.fp16:
        replaced.append(
            "--fp16: no gradient overflows in float64. Not run: steps that are skipped for that, and a scale that changes"
        )
    if config.precision.fp8_format is not None:
        replaced.append("--fp8-format: the formats are emulated, with scales and sums in float64. Not run: a GPU's products")
    if config.speed.compile and config.speed.compile_backend == "inductor":
        replaced.append(
            "--compile: layers are traced and differentiated as in the run, and computed by torch's own kernels. Not run: "
            "generated kernels"
        )
    if optimizer.optimizer_cpu_offload:
        replaced.append("--optimizer-cpu-offload: on a CPU there is one memory. Not run: what moves between host and device")
    if config.memory.offloads:
        replaced.append(
            "activations in host memory: copies are made, and run at once. Not run: streams that run beside computation"
        )
    if overlaps(config.parallel) and config.parallel.device != "cpu":
        replaced.append("--tp-comm-overlap: pieces go round a ring. Not run: symmetric memory")
    if optimizer.use_apex:
        replaced.append("--use-apex: torch's optimizer, which does the same on a CPU")
    if _divides_by_eps(optimizer.optimizer) and optimizer.adam_eps < LEAST_EPS:
        replaced.append(f"--adam-eps: {LEAST_EPS:g}, so that rounding of gradients that are truly zero makes no update")
    if config.debug.check_replicas_every is not None:
        replaced.append("--check-replicas-every: not set, as everything is compared here, and to the end")
    if config.spikes.spike_policy != "none":
        replaced.append("--spike-policy: none, as every step is compared")
    if config.debug.sentinel_interval is not None:
        replaced.append("--sentinel-interval: not set, as it changes nothing in a run whose devices compute right")
    speed = config.speed
    if not set(kernels_of(speed.attention_backend)) & {"flash", "math"}:
        replaced.append(f"--attention-backend {speed.attention_backend}: auto, as that kernel runs on GPUs only")
        speed = dataclasses.replace(speed, attention_backend="auto")
    changed = dataclasses.replace(
        config,
        model=dataclasses.replace(
            model,
            hidden_dropout=(model.hidden_dropout or DROPOUT) * dropout,
            attention_dropout=(model.attention_dropout or DROPOUT) * dropout,
        ),
        training=dataclasses.replace(training, exit_interval=steps, exit_duration_in_mins=None),
        spikes=SpikeConfig(),
        parallel=dataclasses.replace(config.parallel, device="cpu", distributed_backend="gloo"),
        speed=dataclasses.replace(speed, compile_backend="aot_eager", compile_mode="default"),
        optimizer=dataclasses.replace(optimizer, use_apex=False, adam_eps=max(optimizer.adam_eps, LEAST_EPS)),
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(),
        debug=DebugConfig(),
    )
    return changed, replaced


def _initial_weights(config: Config, vocab_size: int) -> dict[str, Tensor]:
    """Weights as one process initialises them, without padding."""
    model = build_model(
        config.model,
        make_context(Topology(), 0, choose_device("cpu", 0)),
        dtype=torch.float64,
        vocab_size=vocab_size,
        sequence_parallel=False,
        seed=config.training.seed,
    )
    return {entry.record.name: entry.param.detach()[tuple(slice(n) for n in entry.record.shape)].clone() for entry in model.params}


def _divides_by_eps(optimizer: str) -> bool:
    """Whether an optimizer divides by as little as --adam-eps."""
    return optimizer in ("adam", "muon") or "adam_eps" in read_with("optimizer", optimizer)


def import_before_fork() -> None:
    """Import what only some runs need, so that forked ranks need not do it one by one."""
    import numpy.ma  # noqa: F401  # np.unique imports it
    import torch._dynamo  # noqa: F401  # fully_shard imports it

    import megatron.data_parallel.fsdp  # noqa: F401
