"""Checks that are runs of pretrain_gpt.py, compared."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.config.cli import load
from megatron.config.given import DryRun
from tools.gpu.place import LLAMA, TINY, Failure, Place, distance, last_words, said, within, words

_DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_STATE = ("parameters", "gradients", "main_params", "moments", "averages")
_CURVE: dict[str, Any] = {
    "train_iters": 50,
    "lr_warmup_iters": 5,
    "lr_decay_style": "cosine",
    "hidden_size": 32,
    "seq_length": 16,
    "micro_batch_size": 4,
    **LLAMA,
}
"""The run for which tests/program/test_run_curves.py has bands around the float64 curve."""
_LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    **{name: {"data_parallel_sharding_strategy": name} for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")},
}


def _compared(trace: Path, reference: Path) -> str:
    from megatron.proofs.traces import compare_files

    found = compare_files(str(trace), str(reference))
    if found.parts or found.largest is None:
        raise Failure("; ".join(part.line() for part in found.first[:2]) or "nothing could be compared")
    return f"largest difference {found.largest.relative:.1e} (allowed {found.largest.allowed:.0e}) in steps 1 to {found.steps[-1]}"


def same_as_cpu(place: Place, model: str) -> str:
    """The reference has other microbatches, so that on a CPU too the two are not one computation."""
    flags: dict[str, Any] = {**(LLAMA if model == "llama" else {}), "adam_eps": 1e-6}
    reference = replace(place, device="cpu").trace("cpu", micro_batch_size=4, **flags)
    return _compared(place.trace("here", **flags), reference)


def bf16_band(place: Place) -> str:
    """Of 50 steps."""
    exact = place.losses("float64", fp64=True, **_CURVE)
    return within(distance(place.losses("bf16", bf16=True, **_CURVE), exact), 5e-3, "greatest distance of the loss")


def memory(place: Place) -> str:
    """Of one process. On a GPU all that was allocated at the peak within 10 %; on a CPU the state, to the byte."""
    from megatron.data.tokenizers.tokenizer import planned_rows
    from megatron.planner.dry_run import make_plan

    size: dict[str, Any] = {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "seq_length": 1024,
        "num_layers": 4,
        "vocab_size": 50000,
    }
    flags: dict[str, Any] = {**(size if place.on_cuda else {}), "bf16": True, "train_iters": 2}
    place.losses("metrics", log_memory_interval=2, **flags)
    measured = next(one for one in reversed(place.metrics("metrics")) if "memory/parameters" in one)
    config = load(words({**TINY, "device": place.device, **flags}), 1).config
    planned = make_plan(config, DryRun(1, 1, None), planned_rows(config.data)).kinds[0].memory
    if place.on_cuda:
        there, aimed = measured["memory/allocated-at-the-peak"], planned.total.device - planned.cuda.device
    else:
        parts = {name: planned.parts[name].device for name in _STATE}
        there = sum(measured.get(f"memory/{name.replace('_', '-')}", 0.0) for name in parts)
        aimed = sum(parts.values())
    told = f"measured {there / 1e6:,.1f} MB, planned {aimed / 1e6:,.1f} MB, ratio {there / aimed:.3f}"
    if abs(there / aimed - 1) > (0.1 if place.on_cuda else 0):
        raise Failure(told)
    return told


def deterministic(place: Place) -> str:
    """In full digits."""
    curves = [place.losses(f"run{i}", bf16=True, deterministic_mode=True, **_DROPOUT) for i in range(2)]
    if curves[0] != curves[1]:
        raise Failure(f"losses differ by {distance(*curves):.1e}")
    return f"{len(curves[0])} losses equal in all digits"


def overflow(place: Place) -> str:
    """A scale that no gradient survives."""
    place.pretrain(metrics_file=place.folder / "metrics", fp16=True, initial_loss_scale=2.0**40, hysteresis=1, train_iters=30)
    steps = [one for one in place.metrics("metrics") if "loss_scale" in one]
    skipped, scales = [one["skipped"] for one in steps], [one["loss_scale"] for one in steps]
    told = f"{sum(skipped):.0f} of {len(steps)} steps skipped, scale {scales[0]:.0e} to {scales[-1]:.0e}"
    if not skipped[0] or skipped[-1] or scales[-1] >= scales[0]:
        raise Failure(told)
    return told


def offload(place: Place) -> str:
    """Copies beside computation against none."""
    flags: dict[str, Any] = {"num_layers": 4, **LLAMA}
    return _compared(place.trace("moved", cpu_offload_activations=True, **flags), place.trace("kept", **flags))


def kill_resume(place: Place) -> str:
    """Killed after the second of three saves is complete."""
    flags: dict[str, Any] = {"fp64": True, "train_iters": 12, **_DROPOUT}
    whole = place.losses("whole", **flags)
    saves: dict[str, Any] = {"save": place.folder / "saves", "load": place.folder / "saves", "save_interval": 4, "async_save": True}
    (process,) = place.start(**flags, **saves, exit_interval=10)
    latest = place.folder / "saves/latest_checkpointed_iteration.txt"
    while process.poll() is None and not (latest.exists() and latest.read_text().strip() not in ("", "0")):
        time.sleep(0.02)
    process.kill()
    process.wait()
    if not latest.exists():
        raise Failure(f"it ended before a checkpoint was complete: {last_words(said(process))}")
    begun = int(latest.read_text())
    rest = place.losses("rest", **flags, **saves)
    return within(distance(rest, whole[begun:]), 0.0, f"killed, resumed at {begun} of 12; difference of losses")


def checkpoint_across(place: Place) -> str:
    """Two steps on the CPU, two here, two on the CPU, against six on the CPU."""
    cpu, saves = replace(place, device="cpu"), place.folder / "saves"
    flags: dict[str, Any] = {"fp64": True, "train_iters": 6, **LLAMA}
    whole, parts = cpu.losses("whole", **flags), []
    for number, there in enumerate((cpu, place, cpu)):
        parts += there.losses(f"part{number}", **flags, save=saves, load=saves, exit_interval=2)
    return within(distance(parts, whole), 1e-10, "greatest distance of the loss")


def compiled(place: Place) -> str:
    """By the compiler's kernels on a GPU; on a CPU traced and differentiated, by torch's kernels."""
    backend = "inductor" if place.on_cuda else "aot_eager"
    cache: dict[str, Any] = {"compile_cache_dir": place.folder / "cache"} if place.on_cuda else {}
    trace = place.trace("compiled", compile=True, compile_backend=backend, **cache, **LLAMA)
    return f"{backend}: {_compared(trace, place.trace('eager', **LLAMA))}"


def fp8(place: Place) -> str:
    """With each recipe that needs no blocks."""
    exact, found = place.losses("float64", fp64=True, **_CURVE), []
    for recipe, form, band in (("tensorwise", "hybrid", 2.4e-2), ("rowwise", "e4m3", 2.8e-2)):
        curve = place.losses(recipe, **_CURVE, bf16=True, fp8_format=form, fp8_recipe=recipe)
        found.append(within(distance(curve, exact), band, f"{recipe}: greatest distance of the loss"))
    return "; ".join(found)


def two_ranks(place: Place, name: str) -> str:
    """Over gloo, which takes tensors of a GPU by way of the host."""
    return _compared(place.trace("two", 2, **LLAMA, **_LAYOUTS[name]), place.trace("one", **LLAMA))
