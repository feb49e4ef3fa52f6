"""Benchmark of options that save activation memory: predicted and measured peak memory, and step times.

The model is a Llama in one process on a CPU.
"""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron.config.cli import LoadedConfig, load
from megatron.config.parsed_flags import DryRun
from megatron.data.tokenizer import predict_embedding_rows
from megatron.spec.counts import count_flops_per_token, count_output_flops
from megatron_lab.benchmarks.runner import run_in_turns
from megatron_lab.benchmarks.shapes import Shape
from megatron_lab.memory_plots.measure import MeasuredStep, measure_ranks, prepare_step
from megatron_lab.planner.dry_run import Planner
from megatron_lab.verification.local_ranks import run_ranks

MAX_RELATIVE_ERROR = 0.005
"""Maximum relative difference between the measured and the predicted peak."""


@dataclass(frozen=True)
class MemoryOption:
    """Option that saves activation memory: its flags, and the limit on the step time with these flags."""

    flags: str
    max_ratio: float | None = None
    """Maximum allowed step time with this option, as a multiple of the step time without any of the options; None for no limit."""


BASELINE, FULL = "none", "full"
_LOSS_FLAG = "--loss-chunk-tokens"
MEMORY_OPTIONS = {
    BASELINE: MemoryOption(""),
    "selective": MemoryOption("--recompute-granularity selective --recompute-modules layernorm mlp_act", max_ratio=1.06),
    FULL: MemoryOption("--recompute-granularity full", max_ratio=1.30),
    "host": MemoryOption("--cpu-offload-activations"),
    "full, host": MemoryOption("--recompute-granularity full --cpu-offload-activations"),
    "chunked loss": MemoryOption(f"{_LOSS_FLAG} 128", max_ratio=1.10),
    "full, chunked": MemoryOption(f"--recompute-granularity full {_LOSS_FLAG} 128"),
}
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --attention-dropout 0
    --hidden-dropout 0 --untie-embeddings-and-output-weights --device cpu --mock-data --tokenizer-type NullTokenizer
    --make-vocab-size-divisible-by 1 --train-iters 1 --lr 1e-3 --eval-iters 0"""


@dataclass(frozen=True)
class OptionResult:
    """Predicted and measured peak memory, and step times, with one memory option."""

    name: str
    predicted: int
    """Predicted bytes of activations at their peak, without the inputs of the step."""
    measured: MeasuredStep
    step_times: tuple[float, ...]
    """Seconds of the step, one value per repetition of the measurement."""
    ratios: tuple[float, ...]
    """Step time with this option divided by the step time without any of the options, one value per repetition of the
    measurement."""
    cpu_ratio: float
    """Median over the repetitions of the processor time of a step, divided by that of a step without any of the options. Other
    programs hardly change processor time."""
    predicted_host: int = 0
    """Predicted bytes of the buffers in host memory for offloaded activations."""

    @property
    def relative_error(self) -> float:
        """Measured peak memory divided by predicted peak memory, minus 1."""
        return self.measured.peak_bytes / self.predicted - 1.0


def load_settings(shape: Shape, option: MemoryOption) -> LoadedConfig:
    """Load the settings of a run that trains a Llama of this shape, with the flags of a memory option."""
    # The tokenizer adds the end-of-document token to --vocab-size.
    size_flags = f"""--num-layers {shape.layers} --hidden-size {shape.hidden} --num-attention-heads {shape.heads}
        --seq-length {shape.seq} --micro-batch-size {shape.batch} --vocab-size {shape.vocab - 1}"""
    loss_flags = "" if _LOSS_FLAG in option.flags else f"{_LOSS_FLAG} 0"
    return load(shlex.split(f"{size_flags} {LLAMA} {loss_flags} {option.flags}"), 1)


def run(shape: Shape, turns: int) -> bool:
    """Print a line for each memory option, and compare the peak memory under full recomputation with its limit.

    Args:
        turns: number of repetitions. In each repetition every option runs one step.

    Returns:
        Whether all limits on memory and step times hold.
    """
    loaded = {name: load_settings(shape, option) for name, option in MEMORY_OPTIONS.items()}
    model = loaded[BASELINE].config.model
    head_share = count_output_flops(model, shape.vocab) / (count_flops_per_token(model, shape.vocab) / 3)
    print(
        f"memory: a Llama of {shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, "
        f"{shape.batch} x {shape.seq:,} tokens, vocabulary {shape.vocab:,} "
        f"(the output layer is {head_share:.0%} of the work), float32, "
        f"{torch.get_num_threads()} threads, "
        f"median (min to max) of {turns} turns"
    )
    predicted = dict(zip(loaded, _predict_peaks([*loaded.values()]), strict=True))
    measured = {name: measure_ranks(loaded_config.config, 1)[0] for name, loaded_config in loaded.items()}
    (one_layer,) = measure_ranks(load_settings(Shape(**{**vars(shape), "layers": 1}), MEMORY_OPTIONS[BASELINE]).config, 1)
    times = _time_in_turns({name: _build_step(loaded_config) for name, loaded_config in loaded.items()}, turns)
    results = [_build_result(name, *predicted[name], measured[name], times) for name in MEMORY_OPTIONS]
    print(
        f"{'':14}{'predicted MiB':>14}{'measured MiB':>14}{'error':>8}{'host MiB':>10}   "
        f"{'step ms':28}{f'/ {BASELINE}':24}CPU / {BASELINE}"
    )
    for result in results:
        print(_format_row(result))
    violations = find_violations(results)
    input_bytes = shape.layers * shape.seq * shape.batch * shape.hidden * torch.float32.itemsize
    one_layer_peak, full_peak, baseline_peak = (
        _compute_peak_in_layers(measured_run) for measured_run in (one_layer, measured[FULL], measured[BASELINE])
    )
    print(
        f"full, after the gradient reaches the last layer: {full_peak / 2**20:.2f} MiB at most; the limit is "
        f"layers x s b h x 4 bytes + one layer = {input_bytes / 2**20:.2f} + {one_layer_peak / 2**20:.2f} = "
        f"{(input_bytes + one_layer_peak) / 2**20:.2f} MiB "
        f"(without recomputation: {baseline_peak / 2**20:.2f} MiB)"
    )
    if full_peak > input_bytes + one_layer_peak:
        violations.append(f"full recomputation uses {full_peak - input_bytes - one_layer_peak:,} bytes more than its limit")
    print("\n".join(f"MISSED: {violation}" for violation in violations) if violations else "all bounds hold", flush=True)
    return not violations


def find_violations(results: Sequence[OptionResult]) -> list[str]:
    """Return a message for each peak memory, host buffer size or step time that exceeds its limit."""
    violations = [
        f"{result.name}: the measured peak differs by {result.relative_error:+.2%} from the predicted one; "
        f"the limit is {MAX_RELATIVE_ERROR:.1%}"
        for result in results
        if abs(result.relative_error) > MAX_RELATIVE_ERROR
    ]
    violations += [
        f"{result.name}: {result.measured.host_bytes:,} bytes of host memory are used; {result.predicted_host:,} were predicted"
        for result in results
        if result.measured.host_bytes != result.predicted_host
    ]
    for result in results:
        ratio, max_ratio = statistics.median(result.ratios), MEMORY_OPTIONS[result.name].max_ratio
        if max_ratio is not None and ratio > max_ratio:
            violations.append(f"{result.name}: a step takes {ratio:.2f} x as long as without it; the limit is {max_ratio:.2f}")
    return violations


def _build_result(
    name: str, predicted: int, predicted_host: int, measured: MeasuredStep, times: dict[str, list[tuple[float, float]]]
) -> OptionResult:
    option_times, baseline_times = (list(zip(*times[option_name], strict=True)) for option_name in (name, BASELINE))
    wall_ratios, cpu_ratios = (
        tuple(a / b for a, b in zip(*ratio_pair, strict=True)) for ratio_pair in zip(option_times, baseline_times, strict=True)
    )
    return OptionResult(
        name, predicted, measured, tuple(option_times[0]), wall_ratios, statistics.median(cpu_ratios), predicted_host
    )


def _predict_peaks(loaded_configs: Sequence[LoadedConfig]) -> list[tuple[int, int]]:
    """Return the predicted peak memory of each run: bytes of activations on the device, and bytes of buffers in host memory.

    All predictions are made in one separate process. A prediction connects its process to a simulated job, and a process can be a
    rank of only one job.
    """

    def run_planner(_: int) -> list[tuple[int, int]]:
        op_memory = [
            Planner(loaded_config.config, DryRun(1, 1, None), predict_embedding_rows(loaded_config.config.data))
            .plan_stage(0)
            .op_memory
            for loaded_config in loaded_configs
        ]
        return [(max(op.peak_bytes for op in ops), ops[-1].host_bytes) for ops in op_memory]

    (predictions,) = run_ranks(1, run_planner, init=False)
    return predictions


def _compute_peak_in_layers(measured: MeasuredStep) -> int:
    """Return the peak memory in bytes, in addition to the model's state, from the time at which backward reaches the last layer to
    the end of the step."""
    assert measured.last_layer_grad_ms is not None
    return measured.compute_max_allocated(measured.last_layer_grad_ms, measured.times[-1])


def _build_step(loaded: LoadedConfig) -> Callable[[], object]:
    step, batch = prepare_step(loaded.config)
    return lambda: step.run(batch, iteration=1, learning_rate=1e-3, weight_decay=0.0)


def _time_in_turns(actions: dict[str, Callable[[], object]], turns: int) -> dict[str, list[tuple[float, float]]]:
    """Time each action once per repetition.

    Args:
        actions: functions by name.
        turns: number of repetitions.

    Returns:
        (wall time, processor time) in seconds of each repetition, by the name of the action.
    """

    def time_action(action: Callable[[], object]) -> tuple[float, float]:
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        action()
        return time.perf_counter() - wall_start, time.process_time() - cpu_start

    return run_in_turns({name: partial(time_action, action) for name, action in actions.items()}, turns)


def _format_row(result: OptionResult) -> str:
    ms = [1e3 * step_time for step_time in result.step_times]
    time_text = f"{statistics.median(ms):.1f} ({min(ms):.1f} to {max(ms):.1f})"
    ratio = f"{statistics.median(result.ratios):.3f} ({min(result.ratios):.3f} to {max(result.ratios):.3f})"
    sizes = (
        f"{result.predicted / 2**20:14.2f}{result.measured.peak_bytes / 2**20:14.2f}{result.relative_error:+8.2%}"
        f"{result.measured.host_bytes / 2**20:10.2f}"
    )
    return f"{result.name:14}{sizes}   {time_text:28}{ratio:24}{result.cpu_ratio:10.3f}"
