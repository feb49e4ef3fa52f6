"""Training steps in this process: against the CPU in float64, twice the same, and when the host waits for the device."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from megatron_lab.benchmarks.shapes import command_line
from megatron_lab.gpu.context import CheckContext, CheckFailed, Outcome, require_at_most
from megatron_lab.gpu.jobs import Job, random_batch, torch_device, train_step_of
from megatron_lab.gpu.kernels import relative_error
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
    """Compare three float64 steps with the CPU: losses, gradient norms, and all weights after them."""
    job = Job.of(command_line({**TINY, "adam_eps": 1e-6, "fp64": True, "device": context.device, **_MODELS[model]}))
    job = job.of_microbatches(_NUM_MICROBATCHES)
    results: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
    for device in (torch_device(context.device), torch.device("cpu")):
        with train_step_of(job, 0, device) as step:
            step.prepare(_NUM_MICROBATCHES)
            batch = random_batch(job, step)
            if device.type == context.device == "cpu" and results:
                batch = batch[::-1]  # on a CPU, so that the two are not one computation
            steps = [step.run(batch, iteration=i, learning_rate=1e-2, weight_decay=0.1) for i in range(1, _NUM_STEPS + 1)]
            numbers = torch.tensor([[one.loss, one.grad_norm] for one in steps], dtype=torch.float64)
            weights = {entry.record.name: entry.param.detach().cpu().clone() for entry in step.model.params}
            results.append((numbers, weights))
    (numbers, weights), (exact_numbers, exact_weights) = results
    errors = [relative_error(numbers, exact_numbers)]
    errors += [relative_error(weights[name], exact) for name, exact in exact_weights.items() if float(exact.norm()) > 0]
    figure = require_at_most(max(errors), 1e-9, f"relative error of {len(errors) - 1} weights, losses and norms")
    return Outcome(figure)


def same_twice(context: CheckContext) -> Outcome:
    """Train bfloat16 with dropout in --deterministic-mode twice, and compare the losses in all digits."""
    job = Job.of(command_line({**TINY, **LLAMA, **DROPOUT, "bf16": True, "deterministic_mode": True, "device": context.device}))
    job, device, curves = job.of_microbatches(2), torch_device(context.device), []
    for _ in range(2):
        with train_step_of(job, 0, device) as step:
            step.prepare(2)
            batch = random_batch(job, step)
            curves.append([step.run(batch, iteration=i, learning_rate=1e-2, weight_decay=0.1).loss for i in range(1, 9)])
    if curves[0] != curves[1]:
        raise CheckFailed(f"losses differ by {max(abs(a - b) for a, b in zip(*curves, strict=True)):.1e}")
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
"""Number of ranks, and what differs from a small Llama in bfloat16."""
_WAIT_MESSAGE = "called a synchronizing CUDA operation"
"""torch's words for a wait of the host (c10/cuda/CUDAFunctions.cpp)."""


def _wait_job(name: str) -> Job:
    ranks, flags = _WAIT_CASES[name]
    return Job.of(command_line({**TINY, **LLAMA, "bf16": True, "device": "cuda", **flags}), ranks).of_microbatches(4)


def waits_per_step(context: CheckContext) -> Outcome:
    """Count how often the host waits in the third step, as torch sees it (`set_sync_debug_mode`)."""
    counts = {}
    for name in ("llama", "dropout", "recompute", "host memory"):
        job, device = _wait_job(name), torch_device(context.device)
        with train_step_of(job, 0, device) as step:
            step.prepare(4)
            batch = random_batch(job, step)
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
    """Let torch raise an error, with its line, where the host waits in a second step's gradients."""
    for name in _WAIT_CASES:
        job, device = _wait_job(name), torch_device(context.device)
        with train_step_of(job, 0, device) as step:
            step.prepare(4)
            batch = random_batch(job, step)
            step.gradients(batch)
            torch.cuda.set_sync_debug_mode("error")
            try:
                step.gradients(batch)
            except RuntimeError as error:
                if _WAIT_MESSAGE not in str(error):
                    raise
                raise CheckFailed(f"{name}: {_waiting_line(error)}") from error
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return Outcome(f"none in {len(_WAIT_CASES)} cases: {', '.join(_WAIT_CASES)}")


def _waiting_line(error: BaseException) -> str:
    """Return the innermost line of the project that an error came from."""
    traceback, line = error.__traceback__, "an unknown line"
    while traceback is not None:
        if "/megatron/" in (file := traceback.tb_frame.f_code.co_filename):
            line = f"megatron/{file.rpartition('/megatron/')[2]}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return f"the host waits in {line}"
