"""Checks of training steps in this process. Steps in float64 must give the results of the CPU, steps must be reproducible, and the
host must rarely wait for the device."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from megatron_lab.benchmarks.shapes import build_argv
from megatron_lab.gpu.context import CheckContext, CheckFailed, Outcome, require_at_most
from megatron_lab.gpu.jobs import Job, build_train_step, create_random_batch, get_torch_device
from megatron_lab.gpu.kernels import compute_relative_error
from megatron_lab.gpu.runs import DROPOUT, LLAMA, TINY

_LATENT: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
_MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": dict(LLAMA),
    "experts": {**LLAMA, "num_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 1e-2},
    "windows": {**LLAMA, "window_size": "8,0", "attn_logit_softcapping": 5.0},
    "latent": _LATENT,
}
_NUM_STEPS, _NUM_MICROBATCHES = 3, 2


def same_as_cpu(context: CheckContext, model: str) -> Outcome:
    """Check that three float64 steps on the device give the losses, gradient norms and weights of the same steps on the CPU."""
    job = Job.of(build_argv({**TINY, "adam_eps": 1e-6, "fp64": True, "device": context.device, **_MODELS[model]}))
    job = job.with_microbatches(_NUM_MICROBATCHES)
    results: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
    for device in (get_torch_device(context.device), torch.device("cpu")):
        with build_train_step(job, 0, device) as step:
            step.prepare(_NUM_MICROBATCHES)
            batch = create_random_batch(job, step)
            if device.type == context.device == "cpu" and results:
                batch = batch[::-1]  # with --device cpu, so that the two computations differ
            steps = [step.run(batch, iteration=i, learning_rate=1e-2, weight_decay=0.1) for i in range(1, _NUM_STEPS + 1)]
            losses_and_norms = torch.tensor([[result.loss, result.grad_norm] for result in steps], dtype=torch.float64)
            weights = {entry.record.name: entry.param.detach().cpu().clone() for entry in step.model.params}
            results.append((losses_and_norms, weights))
    (losses_and_norms, weights), (exact_losses_and_norms, exact_weights) = results
    errors = [compute_relative_error(losses_and_norms, exact_losses_and_norms)]
    errors += [compute_relative_error(weights[name], exact) for name, exact in exact_weights.items() if float(exact.norm()) > 0]
    figure = require_at_most(max(errors), 1e-9, f"relative error of {len(errors) - 1} weights, losses and norms")
    return Outcome(figure)


def same_twice(context: CheckContext) -> Outcome:
    """Train twice in bfloat16 with dropout and --deterministic-mode, and check that all losses of the two runs are bitwise
    equal."""
    job = Job.of(build_argv({**TINY, **LLAMA, **DROPOUT, "bf16": True, "deterministic_mode": True, "device": context.device}))
    job, device, curves = job.with_microbatches(2), get_torch_device(context.device), []
    for _ in range(2):
        with build_train_step(job, 0, device) as step:
            step.prepare(2)
            batch = create_random_batch(job, step)
            curves.append([step.run(batch, iteration=i, learning_rate=1e-2, weight_decay=0.1).loss for i in range(1, 9)])
    if curves[0] != curves[1]:
        raise CheckFailed(
            "the losses differ between two runs in deterministic mode, by up to "
            f"{max(abs(a - b) for a, b in zip(*curves, strict=True)):.1e}. Please report this"
        )
    return Outcome(f"{len(curves[0])} losses equal in all digits")


_WAIT_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (1, {}),
    "dropout": (1, dict(DROPOUT)),
    "1f1b": (2, {"pipeline_model_parallel_size": 2}),
    "sharded, overlap": (2, {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}),
    "sequence": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "optim_grads_params": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "recompute": (1, {"recompute_granularity": "selective"}),
    "host memory": (1, {"num_layers": 4, "cpu_offload_activations": True}),
}
"""World size, and flags that differ from a small Llama in bfloat16, for each case."""
_WAIT_MESSAGE = "called a synchronizing CUDA operation"
"""Text of torch's warning when the host waits for the device (c10/cuda/CUDAFunctions.cpp)."""


def _build_wait_job(name: str) -> Job:
    ranks, flags = _WAIT_CASES[name]
    return Job.of(build_argv({**TINY, **LLAMA, "bf16": True, "device": "cuda", **flags}), ranks).with_microbatches(4)


def waits_per_step(context: CheckContext) -> Outcome:
    """Check that the host waits for the device exactly once in a step.

    The waits of the third step are counted, by the warnings of torch's `set_sync_debug_mode`.
    """
    counts = {}
    for name in ("llama", "dropout", "recompute", "host memory"):
        job, device = _build_wait_job(name), get_torch_device(context.device)
        with build_train_step(job, 0, device) as step:
            step.prepare(4)
            batch = create_random_batch(job, step)
            for iteration in range(1, 4):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    torch.cuda.set_sync_debug_mode("warn" if iteration == 3 else "default")
                    step.run(batch, iteration=iteration, learning_rate=1e-3, weight_decay=0.1)
            torch.cuda.set_sync_debug_mode("default")
            counts[name] = sum(_WAIT_MESSAGE in str(warning.message) for warning in caught)
    figure = f"waits of the host in a step: {', '.join(f'{name} {count}' for name, count in counts.items())}"
    if any(count != 1 for count in counts.values()):
        raise CheckFailed(figure)
    return Outcome(figure, counts)


def waits_between_microbatches(context: CheckContext) -> Outcome:
    """Check that the host never waits for the device while a step computes its gradients.

    The failure message names the line that waits.
    """
    for name in _WAIT_CASES:
        job, device = _build_wait_job(name), get_torch_device(context.device)
        with build_train_step(job, 0, device) as step:
            step.prepare(4)
            batch = create_random_batch(job, step)
            step.compute_gradients(batch)
            torch.cuda.set_sync_debug_mode("error")
            try:
                step.compute_gradients(batch)
            except RuntimeError as error:
                if _WAIT_MESSAGE not in str(error):
                    raise
                raise CheckFailed(f"{name}: {_find_waiting_line(error)}") from error
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return Outcome(f"none in {len(_WAIT_CASES)} cases: {', '.join(_WAIT_CASES)}")


def _find_waiting_line(error: BaseException) -> str:
    """Return a text with the file and line in the package megatron at which the host waited: the innermost such frame of the
    error's traceback."""
    traceback, location = error.__traceback__, "an unknown line"
    while traceback is not None:
        if "/megatron/" in (file := traceback.tb_frame.f_code.co_filename):
            location = f"megatron/{file.rpartition('/megatron/')[2]}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return f"the host waits in {location}"
