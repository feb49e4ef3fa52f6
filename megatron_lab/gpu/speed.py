"""Checks of the training speed of four models, compared with a plain loop: the same model written by hand in plain torch.

Only one model is in memory at a time. A step is one microbatch with forward, backward, clipping and AdamW update.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch

from megatron.config.parsed_flags import DryRun
from megatron.metrics.measures import get_mixed_peak_flops
from megatron.spec.counts import count_flops_per_step, count_fp8_flops, count_parameters
from megatron_lab.benchmarks.peers import CLIP, LR, WEIGHT_DECAY, Step, build_plain_step
from megatron_lab.benchmarks.shapes import SHAPES, Shape, build_argv
from megatron_lab.benchmarks.single import release_memory
from megatron_lab.gpu.context import CheckContext, CheckFailed, Outcome, require_at_most
from megatron_lab.gpu.jobs import Job, build_train_step, create_random_batch, get_torch_device
from megatron_lab.gpu.trace import detect_attention_kernels, start_profiler
from megatron_lab.planner.dry_run import build_plan

MODELS = ("350m", "1.3b", "8b", "experts")
"""Names of the models, smallest first."""
_SHAPES = {"350m": "350m", "1.3b": "1.3b", "8b": "8b-layers", "experts": "experts"}
_CPU_SHAPES = {"350m": "tiny", "1.3b": "tiny", "8b": "tiny-llama", "experts": "tiny-experts"}
_MAX_LAYERS = {"8b": 12, "experts": 8}
"""Maximum number of layers of the models that get as many layers as fit into memory. The maximum bounds the time."""
_MAX_MEMORY_SHARE = 0.75
"""Maximum share of the device memory that the memory plan of such a model may use.

The rest is for the plain loop, whose activations the plan does not cover.
"""
_FP8_FLAGS = {
    "fp8 rowwise": {"fp8_format": "e4m3", "fp8_recipe": "rowwise"},
    "fp8 tensorwise": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
}
_WARM_UP_STEPS = 3
_ERROR_WIDTH = 200
_MAX_STEPS, _MAX_TIMED_S = 20, 3.0
"""Limits of a timed loop. It ends at the limit that it reaches first, but runs at least three steps."""


@dataclass(frozen=True)
class Row:
    """Measured speed and memory of one training loop (the framework's or a plain torch loop): a row of the speed table. Field names
    are keys of the JSON report."""

    model: str
    mode: str
    """Mode in which the model runs:  "eager", "compiled", "fp8 rowwise" or "fp8 tensorwise"."""
    loop: str
    """Training loop: "ours" for the framework, or "plain" for the same model written by hand in plain torch."""
    layers: int
    parameters: int
    milliseconds: float
    """Median time of a step in milliseconds."""
    fastest: float
    """Time of the fastest step in milliseconds."""
    slowest: float
    """Time of the slowest step in milliseconds."""
    tokens_per_second: float
    tflops: float
    """Speed in TFLOP/s. Only the FLOPs of the model count, not those of recomputation."""
    mfu: float | None
    """Model FLOPs utilisation, relative to the dense peak of the GPU's datasheet; None for an unknown device.

    With 8-bit products, the peak is a mix of the peaks of both precisions.
    """
    peak_gb: float | None
    """Peak of allocated device memory in GB (10^9 bytes); None on a CPU."""
    planned_gb: float | None
    """Peak that the memory plan predicts, in GB; None for the plain loop."""
    first_loss: float
    attention: str = "unknown"
    """Names of the attention kernels that ran, recorded in one more step under the profiler."""


def build_job(model: str, device: str, **flags: object) -> tuple[Job, Shape]:
    """Build a job that trains a model on one rank with one microbatch per step.

    Of a large model, only as many layers are kept as fit into the GPU's memory.

    Args:
        model: name of the model, one of `MODELS`.
        device: "cuda" or "cpu". On a CPU the model is tiny.
        flags: additional flags, by field name.

    Returns:
        the job, and the shape of the model with its actual number of layers.
    """
    shape = SHAPES[(_SHAPES if device == "cuda" else _CPU_SHAPES)[model]]
    if device == "cuda" and model in _MAX_LAYERS:
        shape = replace(shape, layers=_count_fitting_layers(shape, _MAX_LAYERS[model]))
    return _build_job(shape, device, **flags), shape


def _build_job(shape: Shape, device: str, **flags: object) -> Job:
    run: dict[str, object] = {
        "micro_batch_size": shape.batch,
        "global_batch_size": shape.batch,
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": shape.vocab - 1,  # the tokenizer adds the end-of-document token
        "train_iters": 10,
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "clip_grad": CLIP,
        "bf16": True,
        "device": device,
    }
    job = Job.of(build_argv({**shape.flags, **run, **flags}))
    assert job.vocab_size == shape.vocab
    return job


def predict_bytes(job: Job) -> int:
    """Return the peak of allocated device memory in bytes that the memory plan predicts, without the memory of CUDA itself."""
    memory = build_plan(job.config, DryRun(1, 1, None), job.vocab_size).profiles[0].memory
    return int(memory.total.device - memory.cuda.device)


@functools.cache
def _count_fitting_layers(shape: Shape, max_layers: int) -> int:
    """Return the number of layers with which the predicted memory of the model fits into `_MAX_MEMORY_SHARE` of the device memory,
    at most `max_layers`."""
    one_layer_bytes, two_layer_bytes = (predict_bytes(_build_job(replace(shape, layers=layers), "cuda")) for layers in (1, 2))
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    return max(
        1, min(max_layers, 1 + int((_MAX_MEMORY_SHARE * total_bytes - one_layer_bytes) / (two_layer_bytes - one_layer_bytes)))
    )


@contextlib.contextmanager
def build_framework_step(job: Job, device: torch.device) -> Iterator[Step]:
    """Context manager that builds the framework's training step of a job, as a function without arguments.

    Every call of this function trains on the same random batch.
    """
    with build_train_step(job, 0, device, init_on_device=True) as step:
        step.prepare(1)
        batch = create_random_batch(job, step)
        yield lambda: step.run(batch, iteration=1, learning_rate=LR, weight_decay=WEIGHT_DECAY).loss


def measure_framework(model: str, mode: str, device: torch.device) -> Iterator[Row]:
    """Time the framework's training step. Yield the measured row, and then the row again with the names of the attention kernels
    added.

    The caller can report the first row even if the profiler, which reads the kernel names, ends the process.

    Args:
        model: name of the model.
        mode: "eager", "compiled", "fp8 rowwise" or "fp8 tensorwise".
    """
    flags: dict[str, object] = dict(_FP8_FLAGS.get(mode, {}))
    if mode == "compiled":
        flags |= {"compile": True, "compile_backend": _get_compile_backend(device)}
    job, shape = build_job(model, device.type, **flags)
    predicted_bytes = predict_bytes(job)
    _reset_peak(device)
    with build_framework_step(job, device) as step:
        step_times, loss = _time_steps(step, device)
        yield (row := _build_row(model, mode, "ours", shape, job, step_times, loss, device, predicted_bytes))
        yield _add_attention(row, step, device)


def _get_compile_backend(device: torch.device) -> str:
    """Return the backend of torch.compile. On a CPU this backend only traces, because compiling C++ takes a minute."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def measure_plain(model: str, mode: str, device: torch.device) -> Iterator[Row]:
    """Time the step of the plain loop (the same model in plain torch). Yield the measured row, and then the row again with the
    names of the attention kernels added.

    The caller can report the first row even if the profiler, which reads the kernel names, ends the process.

    Args:
        model: name of the model.
        mode: "eager" or "compiled".
    """
    job, shape = build_job(model, device.type)
    _reset_peak(device)
    step = build_plain_step(shape, torch.bfloat16, device, compiled=mode == "compiled", backend=_get_compile_backend(device))
    step_times, loss = _time_steps(step, device)
    yield (row := _build_row(model, mode, "plain", shape, job, step_times, loss, device, None))
    yield _add_attention(row, step, device)


def _add_attention(row: Row, step: Step, device: torch.device) -> Row:
    """Run one more step under the profiler, and return the row with the names of the attention kernels of that step."""
    try:
        return replace(row, attention=detect_attention_kernels(step, device))
    except RuntimeError as error:  # a failing profiler must not discard the times
        return replace(row, attention=f"unknown ({str(error).partition(chr(10))[0][:80]})")


def _time_steps(step: Step, device: torch.device) -> tuple[list[float], float]:
    """Run warm-up steps, and then time further steps one by one.

    Returns:
        the seconds of each timed step, and the loss of the first warm-up step.
    """
    first_loss = step()
    for _ in range(_WARM_UP_STEPS - 1):
        step()
    _synchronize(device)
    step_times: list[float] = []
    while len(step_times) < 3 or (len(step_times) < _MAX_STEPS and sum(step_times) < _MAX_TIMED_S):
        start = time.perf_counter()
        step()
        _synchronize(device)
        step_times.append(time.perf_counter() - start)
    return step_times, first_loss


def _build_row(
    model: str,
    mode: str,
    loop: str,
    shape: Shape,
    job: Job,
    step_times: list[float],
    loss: float,
    device: torch.device,
    predicted_bytes: int | None,
) -> Row:
    median, config = statistics.median(step_times), job.config
    flops = count_flops_per_step(config.model, shape.vocab, shape.batch)
    peak_flops = None
    if device.type == "cuda":
        fp8_share = count_fp8_flops(config.model, config.precision) * config.model.seq_length * shape.batch / flops
        peak_flops = get_mixed_peak_flops(torch.cuda.get_device_name(device), "bfloat16", fp8_share)
    return Row(
        model,
        mode,
        loop,
        shape.layers,
        count_parameters(config.model, shape.vocab),
        1e3 * median,
        1e3 * min(step_times),
        1e3 * max(step_times),
        shape.batch * shape.seq / median,
        flops / median / 1e12,
        None if peak_flops is None else flops / median / peak_flops,
        torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None,
        None if predicted_bytes is None else predicted_bytes / 1e9,
        loss,
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    release_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def eager(context: CheckContext, model: str) -> Outcome:
    """Compare the speed of the framework's eager step with that of the eager plain loop (the same model in plain torch)."""
    return _compare(context, model, [("ours", "eager"), ("plain", "eager")])


def compiled(context: CheckContext, model: str) -> Outcome:
    """Compare the speed of the framework's compiled step with that of the compiled plain loop (the same model in plain torch)."""
    return _compare(context, model, [("ours", "compiled"), ("plain", "compiled")])


def fp8(context: CheckContext, model: str) -> Outcome:
    """Time the framework's eager step with 8-bit matrix products, for the rowwise and the tensorwise recipe.

    The plain torch loop does not run in 8 bits, so the report compares with its bfloat16 times.
    """
    if context.on_cuda and torch.cuda.get_device_capability() < (8, 9):
        return Outcome("this GPU has no products in 8 bits")
    return _compare(context, model, [("ours", mode) for mode in _FP8_FLAGS])


def _compare(context: CheckContext, model: str, loops: list[tuple[str, str]]) -> Outcome:
    """Time training loops one after another, and send a partial result after each loop.

    If one loop fails, the remaining loops still run.

    Args:
        model: name of the model.
        loops: ("ours" for the framework or "plain" for plain torch, mode) of each loop.
    """
    device, rows, errors, has_failed = get_torch_device(context.device), dict[tuple[str, str], Row](), list[str](), False
    profiler_works = context.data.get("profiler", {}).get("works", True)
    if device.type == "cuda" and profiler_works:
        start_profiler(device)

    def build_outcome() -> Outcome:
        figures = [format_row(row) for row in rows.values()] + errors
        data = {"rows": [asdict(row) for row in rows.values()], "errors": errors}
        return Outcome("; ".join([*_format_ratio(list(rows.values())), *figures]), data)

    for loop, mode in loops:
        try:
            for row in (measure_framework if loop == "ours" else measure_plain)(model, mode, device):
                rows[loop, mode] = row
                context.send_partial(build_outcome())
                if not profiler_works:
                    break
        except torch.OutOfMemoryError:
            errors.append(f"{loop} {mode}: out of memory")
        except Exception as error:  # noqa: BLE001 - the other loop goes on
            has_failed = True
            traceback.print_exc()
            errors.append(f"{loop} {mode}: {type(error).__name__}: {' '.join(str(error).split())[:_ERROR_WIDTH]}")
        release_memory(device)
        context.send_partial(build_outcome())
    if has_failed or not any(loop == "ours" for loop, _ in rows):
        raise CheckFailed("; ".join(errors))
    return build_outcome()


def format_row(row: Row) -> str:
    """Format the measured speed and memory of a training loop as one line of text."""
    text = f"{row.loop} {row.mode} {row.milliseconds:.1f} ms ({row.fastest:.1f} to {row.slowest:.1f}), "
    text += f"{row.tokens_per_second:,.0f} tokens/s, {row.tflops:.4g} TFLOP/s"
    text += "" if row.mfu is None else f", MFU {row.mfu:.1%}"
    text += "" if row.peak_gb is None else f", peak {row.peak_gb:.2f} GB"
    text += "" if row.planned_gb is None or row.peak_gb is None else f" (planned {row.planned_gb:.2f})"
    return f"{text}, attention by {row.attention}"


def _format_ratio(rows: list[Row]) -> list[str]:
    """Format the framework's speed relative to the plain torch loop. Return a list with this text, or an empty list if the row of
    either loop is missing."""
    times = {row.loop: row.milliseconds for row in rows}
    return [f"ours / plain {times['plain'] / times['ours']:.3f}"] if {"ours", "plain"} <= times.keys() else []


def memory(context: CheckContext) -> Outcome:
    """Check that the memory plan predicts the memory peaks that the speed checks measured, to within 10 %.

    On a CPU, which has no such peaks, check instead the predicted bytes of the training state (parameters, gradients and optimizer
    state).
    """
    if not context.on_cuda:
        return _check_state_on_cpu(context)
    rows = [Row(**row) for data in context.data.values() for row in data.get("rows", [])]
    ratios = {
        f"{row.model} {row.mode}": row.peak_gb / row.planned_gb
        for row in rows
        if row.loop == "ours" and row.peak_gb is not None and row.planned_gb
    }
    if not ratios:
        raise CheckFailed("no speed check has measured a memory peak to compare with the plan. Run the speed checks first")
    figures = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    # A compiled layer may need less memory than predicted, but not more.
    errors = [max(ratio - 1, 0.0 if "compiled" in name else 1 - ratio) for name, ratio in ratios.items()]
    return Outcome(f"measured / planned: {figures}; {require_at_most(max(errors), 0.1, 'largest error')}", {"ratios": ratios})


_STATE_PARTS = ("parameters", "gradients", "main_params", "moments", "averages")


def _check_state_on_cpu(context: CheckContext) -> Outcome:
    """Check that the training state (parameters, gradients, optimizer state) of a small run has exactly as many bytes as the memory
    plan predicts."""
    from megatron.config.cli import load
    from megatron.data.tokenizer import predict_embedding_rows
    from megatron_lab.gpu.runs import TINY, read_metrics, run_and_read_losses

    flags = {"bf16": True, "train_iters": 2}
    run_and_read_losses(context, "metrics", log_memory_interval=2, **flags)
    record = next(row for row in reversed(read_metrics(context, "metrics")) if "memory/parameters" in row)
    config = load(build_argv({**TINY, "device": context.device, **flags}), 1).config
    memory_parts = build_plan(config, DryRun(1, 1, None), predict_embedding_rows(config.data)).profiles[0].memory.by_purpose
    actual = sum(record.get(f"memory/{name.replace('_', '-')}", 0.0) for name in _STATE_PARTS)
    predicted = sum(memory_parts[name].device for name in _STATE_PARTS)
    figure = f"state: measured {actual / 1e6:,.1f} MB, planned {predicted / 1e6:,.1f} MB"
    if actual != predicted:
        raise CheckFailed(figure)
    return Outcome(figure)
