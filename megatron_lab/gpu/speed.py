"""Training speed of four models, beside a loop written by hand in plain torch that trains the same model.

Each model is alone in memory. A step is one microbatch with forward, backward, clipping and AdamW update.
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

from megatron.config.given import DryRun
from megatron.metrics.measures import mixed_peak_flops
from megatron.spec.counts import count_parameters, flops_in_8_bits, flops_per_step
from megatron_lab.benchmarks.peers import CLIP, LR, WEIGHT_DECAY, Step, plain_step
from megatron_lab.benchmarks.shapes import SHAPES, Shape, command_line
from megatron_lab.benchmarks.single import release_memory
from megatron_lab.gpu.context import CheckContext, CheckFailed, Outcome, require_at_most
from megatron_lab.gpu.jobs import Job, random_batch, torch_device, train_step_of
from megatron_lab.gpu.trace import attention_of, start_profiler
from megatron_lab.planner.dry_run import make_plan

MODELS = ("350m", "1.3b", "8b", "experts")
"""Names of the models, smallest first."""
_SHAPES = {"350m": "350m", "1.3b": "1.3b", "8b": "8b-layers", "experts": "experts"}
_CPU_SHAPES = {"350m": "tiny", "1.3b": "tiny", "8b": "tiny-llama", "experts": "tiny-experts"}
_MAX_LAYERS = {"8b": 12, "experts": 8}
"""Models of as many layers as fit, and the most layers, which bound the time."""
_SHARE_OF_MEMORY = 0.75
"""Of the device's memory that the plan of such a model may take: the plain loop has activations that a plan does not know."""
_FP8_FLAGS = {
    "fp8 rowwise": {"fp8_format": "e4m3", "fp8_recipe": "rowwise"},
    "fp8 tensorwise": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
}
_WARM_UP_STEPS = 3
_ERROR_WIDTH = 200
_MAX_STEPS, _SECONDS_OF_STEPS = 20, 3.0
"""A loop is timed for so many steps, or so many seconds if that is less, but for three steps at least."""


@dataclass(frozen=True)
class Row:
    """Speed of one loop."""

    model: str
    mode: str
    """eager, compiled, fp8 rowwise or fp8 tensorwise."""
    loop: str
    """ours or plain."""
    layers: int
    parameters: int
    milliseconds: float
    """Median of a step."""
    fastest: float
    slowest: float
    """Milliseconds of a step."""
    tokens_per_second: float
    tflops: float
    """Model TFLOP/s, without recomputation."""
    mfu: float | None
    """Model FLOPs utilisation against the dense peak of the datasheet (with 8 bits, the mixed peak). None for an unknown device."""
    peak_gb: float | None
    """Peak of allocated device memory in GB (10^9 bytes)."""
    planned_gb: float | None
    first_loss: float
    attention: str = "unknown"
    """The attention kernels that ran in one more step."""


def job_of(model: str, device: str, **flags: object) -> tuple[Job, Shape]:
    """Return the run that trains a model, one microbatch per step, and the shape with its number of layers."""
    shape = SHAPES[(_SHAPES if device == "cuda" else _CPU_SHAPES)[model]]
    if device == "cuda" and model in _MAX_LAYERS:
        shape = replace(shape, layers=_layers_that_fit(shape, _MAX_LAYERS[model]))
    return _job(shape, device, **flags), shape


def _job(shape: Shape, device: str, **flags: object) -> Job:
    run: dict[str, object] = {
        "micro_batch_size": shape.batch,
        "global_batch_size": shape.batch,
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": shape.vocab - 1,  # the tokenizer adds the end of a document
        "train_iters": 10,
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "clip_grad": CLIP,
        "bf16": True,
        "device": device,
    }
    job = Job.of(command_line({**shape.flags, **run, **flags}))
    assert job.vocab_size == shape.vocab
    return job


def planned_bytes(job: Job) -> int:
    """Return the planned peak of allocated device memory, without what CUDA takes for itself."""
    memory = make_plan(job.config, DryRun(1, 1, None), job.vocab_size).kinds[0].memory
    return int(memory.total.device - memory.cuda.device)


@functools.cache
def _layers_that_fit(shape: Shape, most: int) -> int:
    few, more = (planned_bytes(_job(replace(shape, layers=layers), "cuda")) for layers in (1, 2))
    total = torch.cuda.get_device_properties(0).total_memory
    return max(1, min(most, 1 + int((_SHARE_OF_MEMORY * total - few) / (more - few))))


@contextlib.contextmanager
def our_step_of(job: Job, device: torch.device) -> Iterator[Step]:
    """Build our training step of a job, ready to run on one random batch again and again."""
    with train_step_of(job, 0, device, drawn_on_device=True) as step:
        step.prepare(1)
        batch = random_batch(job, step)
        yield lambda: step.run(batch, iteration=1, learning_rate=LR, weight_decay=WEIGHT_DECAY).loss


def measure_ours(model: str, mode: str, device: torch.device) -> Iterator[Row]:
    """Time our step. The row comes twice, the second time with its attention kernels."""
    flags: dict[str, object] = dict(_FP8_FLAGS.get(mode, {}))
    if mode == "compiled":
        flags |= {"compile": True, "compile_backend": _compile_backend(device)}
    job, shape = job_of(model, device.type, **flags)
    planned = planned_bytes(job)
    _reset_peak(device)
    with our_step_of(job, device) as step:
        seconds, loss = _time(step, device)
        yield (row := _row(model, mode, "ours", shape, job, seconds, loss, device, planned))
        yield _with_attention(row, step, device)


def _compile_backend(device: torch.device) -> str:
    """Return the compiler to use: on a CPU only its tracing, because compiling C++ takes a minute."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def measure_plain(model: str, mode: str, device: torch.device) -> Iterator[Row]:
    """Time the plain loop, eager or compiled. The row comes twice, the second time with its attention kernels."""
    job, shape = job_of(model, device.type)
    _reset_peak(device)
    step = plain_step(shape, torch.bfloat16, device, compiled=mode == "compiled", backend=_compile_backend(device))
    seconds, loss = _time(step, device)
    yield (row := _row(model, mode, "plain", shape, job, seconds, loss, device, None))
    yield _with_attention(row, step, device)


def _with_attention(row: Row, step: Step, device: torch.device) -> Row:
    """Add the attention kernels of one more step to a row."""
    try:
        return replace(row, attention=attention_of(step, device))
    except RuntimeError as error:  # the figures stay if the profiler does not work here
        return replace(row, attention=f"unknown ({str(error).partition(chr(10))[0][:80]})")


def _time(step: Step, device: torch.device) -> tuple[list[float], float]:
    """Return seconds of each step after a warm-up, and the first loss."""
    first_loss = step()
    for _ in range(_WARM_UP_STEPS - 1):
        step()
    _synchronize(device)
    seconds: list[float] = []
    while len(seconds) < 3 or (len(seconds) < _MAX_STEPS and sum(seconds) < _SECONDS_OF_STEPS):
        began = time.perf_counter()
        step()
        _synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds, first_loss


def _row(
    model: str,
    mode: str,
    loop: str,
    shape: Shape,
    job: Job,
    seconds: list[float],
    loss: float,
    device: torch.device,
    planned: int | None,
) -> Row:
    median, config = statistics.median(seconds), job.config
    flops = flops_per_step(config.model, shape.vocab, shape.batch)
    peak = None
    if device.type == "cuda":
        share = flops_in_8_bits(config.model, config.precision) * config.model.seq_length * shape.batch / flops
        peak = mixed_peak_flops(torch.cuda.get_device_name(device), "bfloat16", share)
    return Row(
        model,
        mode,
        loop,
        shape.layers,
        count_parameters(config.model, shape.vocab),
        1e3 * median,
        1e3 * min(seconds),
        1e3 * max(seconds),
        shape.batch * shape.seq / median,
        flops / median / 1e12,
        None if peak is None else flops / median / peak,
        torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None,
        None if planned is None else planned / 1e9,
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
    """Time our eager step beside the eager plain loop."""
    return _compare(context, model, [("ours", "eager"), ("plain", "eager")])


def compiled(context: CheckContext, model: str) -> Outcome:
    """Time our compiled step beside the compiled plain loop."""
    return _compare(context, model, [("ours", "compiled"), ("plain", "compiled")])


def fp8(context: CheckContext, model: str) -> Outcome:
    """Time our step in 8 bits, eager. There is no plain loop in 8 bits; the report compares with the bfloat16 one."""
    if context.on_cuda and torch.cuda.get_device_capability() < (8, 9):
        return Outcome("this GPU has no products in 8 bits")
    return _compare(context, model, [("ours", mode) for mode in _FP8_FLAGS])


def _compare(context: CheckContext, model: str, loops: list[tuple[str, str]]) -> Outcome:
    """Time loops one after another, and report after each. A loop that fails does not take the others away."""
    device, rows, errors, failed = torch_device(context.device), dict[tuple[str, str], Row](), list[str](), False
    sees_kernels = context.data.get("profiler", {}).get("works", True)
    if device.type == "cuda" and sees_kernels:
        start_profiler(device)

    def outcome() -> Outcome:
        figures = [describe(row) for row in rows.values()] + errors
        data = {"rows": [asdict(row) for row in rows.values()], "errors": errors}
        return Outcome("; ".join([*_ratio(list(rows.values())), *figures]), data)

    for loop, mode in loops:
        try:
            for row in (measure_ours if loop == "ours" else measure_plain)(model, mode, device):
                rows[loop, mode] = row
                context.send_partial(outcome())
                if not sees_kernels:
                    break
        except torch.OutOfMemoryError:
            errors.append(f"{loop} {mode}: out of memory")
        except Exception as error:  # noqa: BLE001 - the other loop goes on
            failed = True
            traceback.print_exc()
            errors.append(f"{loop} {mode}: {type(error).__name__}: {' '.join(str(error).split())[:_ERROR_WIDTH]}")
        release_memory(device)
        context.send_partial(outcome())
    if failed or not any(loop == "ours" for loop, _ in rows):
        raise CheckFailed("; ".join(errors))
    return outcome()


def describe(row: Row) -> str:
    """Return a row on one line."""
    text = f"{row.loop} {row.mode} {row.milliseconds:.1f} ms ({row.fastest:.1f} to {row.slowest:.1f}), "
    text += f"{row.tokens_per_second:,.0f} tokens/s, {row.tflops:.4g} TFLOP/s"
    text += "" if row.mfu is None else f", MFU {row.mfu:.1%}"
    text += "" if row.peak_gb is None else f", peak {row.peak_gb:.2f} GB"
    text += "" if row.planned_gb is None or row.peak_gb is None else f" (planned {row.planned_gb:.2f})"
    return f"{text}, attention by {row.attention}"


def _ratio(rows: list[Row]) -> list[str]:
    """Return the speed of ours relative to the plain loop, if both are there."""
    times = {row.loop: row.milliseconds for row in rows}
    return [f"ours / plain {times['plain'] / times['ours']:.3f}"] if {"ours", "plain"} <= times.keys() else []


def memory(context: CheckContext) -> Outcome:
    """Compare the peaks that the speed checks measured with the plan. On a CPU, compare the bytes of a step's state instead."""
    if not context.on_cuda:
        return _state_on_cpu(context)
    rows = [Row(**row) for data in context.data.values() for row in data.get("rows", [])]
    ratios = {
        f"{row.model} {row.mode}": row.peak_gb / row.planned_gb
        for row in rows
        if row.loop == "ours" and row.peak_gb is not None and row.planned_gb
    }
    if not ratios:
        raise CheckFailed("no speed check has measured a peak")
    figures = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    # A compiled layer keeps as much or less than planned.
    errors = [max(ratio - 1, 0.0 if "compiled" in name else 1 - ratio) for name, ratio in ratios.items()]
    return Outcome(f"measured / planned: {figures}; {require_at_most(max(errors), 0.1, 'largest error')}", {"ratios": ratios})


_STATE = ("parameters", "gradients", "main_params", "moments", "averages")


def _state_on_cpu(context: CheckContext) -> Outcome:
    """The state of a small model, in a run of pretrain_gpt.py, to the byte."""
    from megatron.config.cli import load
    from megatron.data.tokenizer import planned_rows
    from megatron_lab.gpu.runs import TINY, losses, metrics

    flags = {"bf16": True, "train_iters": 2}
    losses(context, "metrics", log_memory_interval=2, **flags)
    measured = next(line for line in reversed(metrics(context, "metrics")) if "memory/parameters" in line)
    config = load(command_line({**TINY, "device": context.device, **flags}), 1).config
    parts = make_plan(config, DryRun(1, 1, None), planned_rows(config.data)).kinds[0].memory.parts
    actual = sum(measured.get(f"memory/{name.replace('_', '-')}", 0.0) for name in _STATE)
    planned = sum(parts[name].device for name in _STATE)
    figure = f"state: measured {actual / 1e6:,.1f} MB, planned {planned / 1e6:,.1f} MB"
    if actual != planned:
        raise CheckFailed(figure)
    return Outcome(figure)
