"""Train twice in float64 with the same settings: as a parallel run on local processes, and with the reference model. Record the
values of both runs for the comparison."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from megatron.config.config import Config
from megatron.config.outputs import CheckpointConfig, DebugConfig, LoggingConfig
from megatron.config.param_groups import parse_entry
from megatron.config.training import SpikeConfig
from megatron.data.samples import DocumentRules
from megatron.data.tokenizer import build_tokenizer, compute_embedding_rows
from megatron.model.build import build_model, overlaps_tp_communication
from megatron.parallel.context import choose_device, make_context
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.partition import build_layer_table
from megatron.spec.activations import get_added_choices, get_choice_settings
from megatron.spec.attention_backends import get_kernels
from megatron_lab.verification.layout_run import observe_rank
from megatron_lab.verification.local_ranks import run_ranks
from megatron_lab.verification.observation import EVALUATED_BATCHES, Observation, ProofTask
from megatron_lab.verification.random_samples import RandomSamples
from megatron_lab.verification.reference.shape import build_random_weights
from megatron_lab.verification.reference_run import build_reference_shape, run_reference
from megatron_lab.verification.single_process_run import perturb_weights, run_single_process

_START_SEED, _SAMPLES_SEED, _EVAL_SEED = 1, 2, 3
DROPOUT = 0.1
"""Dropout probability of a run whose settings have none."""
MIN_EPS = 1e-6
"""Minimum epsilon of Adam in a proof.

The true gradient of some parameters is zero (a key bias without rotary positions). Adam divides the rounding error of the
computed gradient by at least epsilon, so a tiny epsilon would turn rounding errors into updates.
"""


ReferenceType = Literal["plain", "self"]
"""Run with which a layout is compared: "plain" for a reference model that shares no code with the framework, "self" for a run
of the framework in one process."""


def prove(
    config: Config,
    world_size: int,
    *,
    steps: int | None = None,
    dropout: bool = True,
    timeout: float = 240.0,
    reference: ReferenceType = "plain",
) -> Observation:
    """Train with the given settings in parallel on local processes, and once more as a reference run with the same samples and
    start weights. Return the recorded values of both runs.

    Args:
        config: settings that are valid for `world_size` ranks, small enough to run on this machine.
        steps: maximum number of iterations; None to train as long as the settings say.
        dropout: keep the dropout probabilities of the model, or set them to 0.1 if they are zero. Training and evaluation have
            dropout turned off, so a difference shows where it is applied by mistake. The seeds of dropout masks are recorded in a
            separate step. With False, the probabilities are set to zero.
        timeout: seconds after which a run is aborted.
        reference: run with which the parallel run is compared: "plain" for the reference model, "self" for the framework in one
            process.

    Raises:
        RanksError: a rank raised, died, or did not finish in time.
        ValueError: the tokenizer of the settings cannot be built, or the reference model does not support a module of the model.
    """
    if reference == "plain":
        check_reference_support(config)
    import_before_fork()
    config, replaced = _build_proof_config(config, steps, dropout)
    parallel, data = config.parallel, config.data
    tokenizer = build_tokenizer(data)
    document_rules = DocumentRules(tokenizer.eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
    vocab_size = compute_embedding_rows(tokenizer, data)
    data_size = Topology.of(parallel, world_size).dp
    micro = config.training.micro_batch_size
    has_many_microbatches = config.training.get_first_batch_size(data_size) > micro
    samples = RandomSamples(
        _SAMPLES_SEED,
        config.model.seq_length,
        vocab_size,
        tokenizer.eod,
        micro,
        allows_empty_masks=has_many_microbatches,
        has_padding=data.whole_documents,
    )
    eval_samples = dataclasses.replace(samples, seed=_EVAL_SEED)
    initial = _build_initial_weights(config, vocab_size)
    if reference == "self":
        start = perturb_weights(config, vocab_size, initial, _START_SEED)
        replaced.append("reference: the same code in one process. What is wrong there too is not found")
    else:
        start = build_random_weights(build_reference_shape(config.model, vocab_size), _START_SEED)

    task = ProofTask(config, vocab_size, document_rules, start, samples, eval_samples, data_size, steps)
    ranks = run_ranks(world_size, observe_rank, task, timeout=timeout)
    table = build_layer_table(config.model, parallel, vocab_size)
    # In a separate process: with a GPU, a process that has run a backward cannot fork the ranks of another run.
    run = run_single_process if reference == "self" else run_reference
    reference_run = run_ranks(1, lambda rank: run(task), timeout=timeout, init=False)[0]
    return Observation(config, vocab_size, table, ranks, reference_run, initial, start, replaced)


def check_reference_support(config: Config) -> None:
    """Check that the reference model supports the optimizers and the activation function in the settings.

    Raises:
        ValueError: an optimizer or activation function comes from a module of the user.
    """
    optimizers = [config.optimizer.optimizer, *(parse_entry(text).optimizer for text in config.optimizer.param_groups)]
    unsupported = [f"--optimizer {name}" for name in optimizers if name in get_added_choices("optimizer")]
    unsupported += [f"--activation {config.model.activation}"] if config.model.activation is not None else []
    if unsupported:
        raise ValueError(
            f"{' and '.join(dict.fromkeys(unsupported))}: the reference model supports only built-in choices, not those "
            "that your modules add.\n"
            "  Set --reference self, which compares with a run of the same code in one process."
        )


def _build_proof_config(config: Config, steps: int | None, dropout: bool) -> tuple[Config, list[str]]:
    """Return the settings of the two runs that the proof compares (the parallel run and the reference run), and a line of text for
    each setting of the user that the proof replaces.

    Args:
        config: settings of the user.
        steps: maximum number of iterations; None to train as long as the settings say.
        dropout: True for nonzero dropout probabilities, False for probabilities of zero.
    """
    replaced = [
        "dtype: everything is float64. Not tested: 16-bit storage, and the copy of main parameters to the weights",
        "kernels: those of float64 on a CPU. Not tested: fused updates, flash attention",
        "dropout: off in training"
        + (
            "; its probability is not changed, so that evaluation must turn it off, and seeds of masks are compared"
            if dropout
            else " and in evaluation"
        ),
        "data: random tokens with ends of documents, and random loss masks in addition to those of the flags",
        "network: results of communication arrive only when they are waited for",
        "checkpoints, logs, profiler and exits: none",
    ]
    model, training, optimizer = config.model, config.training, config.optimizer
    if config.precision.fp16:
        replaced.append(
            "--fp16: no gradient overflows in float64. Not tested: steps skipped after an overflow, and changes of the loss scale"
        )
    if config.precision.fp8_format is not None:
        replaced.append(
            "--fp8-format: the formats are emulated, with scales and sums in float64. Not tested: matrix products of a GPU"
        )
    if config.speed.compile and config.speed.compile_backend == "inductor":
        replaced.append(
            "--compile: layers are traced and differentiated as in the run, and computed by torch's own kernels. Not tested: "
            "generated kernels"
        )
    if optimizer.optimizer_cpu_offload:
        replaced.append("--optimizer-cpu-offload: a CPU has only host memory. Not tested: copies between host and device")
    if config.memory.has_offload:
        replaced.append(
            "activations in host memory: copies are synchronous. Not tested: copies on streams that overlap with computation"
        )
    if overlaps_tp_communication(config.parallel) and config.parallel.device != "cpu":
        replaced.append("--tp-comm-overlap: shards are passed around a ring. Not tested: symmetric memory")
    if optimizer.use_apex:
        replaced.append("--use-apex: torch's optimizer, which computes equal updates on a CPU")
    if _divides_by_eps(optimizer.optimizer) and optimizer.adam_eps < MIN_EPS:
        replaced.append(f"--adam-eps: {MIN_EPS:g}, so that rounding errors of gradients that are truly zero cause no update")
    if config.debug.check_replicas_every is not None:
        replaced.append("--check-replicas-every: not set, because a proof compares all parameters in every step")
    if config.spikes.spike_policy != "none":
        replaced.append("--spike-policy: none, because every step is compared")
    if config.debug.sentinel_interval is not None:
        replaced.append("--sentinel-interval: not set, because it does not change the results of a correct device")
    if training.skip_train:
        replaced.append("--skip-train: not set, because a proof trains some steps (with SGD)")
    if training.full_validation:
        replaced.append(f"--full-validation: evaluations of {EVALUATED_BATCHES} batches")
    speed = config.speed
    if not set(get_kernels(speed.attention_backend)) & {"flash", "math"}:
        replaced.append(f"--attention-backend {speed.attention_backend}: auto, because that kernel runs on GPUs only")
        speed = dataclasses.replace(speed, attention_backend="auto")
    proof_config = dataclasses.replace(
        config,
        model=dataclasses.replace(
            model,
            hidden_dropout=(model.hidden_dropout or DROPOUT) * dropout,
            attention_dropout=(model.attention_dropout or DROPOUT) * dropout,
        ),
        training=dataclasses.replace(
            training, exit_interval=steps, exit_duration_in_mins=None, skip_train=False, full_validation=False
        ),
        spikes=SpikeConfig(),
        parallel=dataclasses.replace(config.parallel, device="cpu", distributed_backend="gloo"),
        speed=dataclasses.replace(speed, compile_backend="aot_eager", compile_mode="default"),
        optimizer=dataclasses.replace(optimizer, use_apex=False, adam_eps=max(optimizer.adam_eps, MIN_EPS)),
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(),
        debug=DebugConfig(),
    )
    return proof_config, replaced


def _build_initial_weights(config: Config, vocab_size: int) -> dict[str, Tensor]:
    """Return the weights with which the framework initializes the model in one process, by name and without padding. The initial
    weights of the parallel run are compared with them."""
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
    """Check whether an optimizer uses --adam-eps, so that its update may divide by a number as small as epsilon. A proof then
    raises a small epsilon, so that rounding errors of gradients that are truly zero cause no update."""
    return optimizer in ("adam", "muon") or "adam_eps" in get_choice_settings("optimizer", optimizer)


def import_before_fork() -> None:
    """Import modules that only some runs need, so that forked ranks inherit them and need not import them one by one."""
    import numpy.ma  # noqa: F401  # np.unique imports it
    import torch._dynamo  # noqa: F401  # fully_shard imports it

    import megatron.data_parallel.fsdp  # noqa: F401
