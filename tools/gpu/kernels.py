"""Checks of single operations, and of when the host waits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import torch

from tools.gpu.place import LLAMA, TINY, Failure, Place, within, words
from tools.gpu.ranks import Job, alone, batch_of, device_of

_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (1, {}),
    "dropout": (1, {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "1f1b": (2, {"pipeline_model_parallel_size": 2}),
    "sharded, overlap": (2, {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}),
    "sequence": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "optim_grads_params": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "recompute": (1, {"recompute_granularity": "selective"}),
    "host memory": (1, {"num_layers": 4, "cpu_offload_activations": True}),
}
"""Ranks, and what differs from a small Llama in bfloat16."""
_WAITS = "called a synchronizing CUDA operation"
"""torch's words for a wait (c10/cuda/CUDAFunctions.cpp). Where the mode is set, it says once that it does not see them all."""


def _job(name: str) -> Job:
    ranks, flags = _CASES[name]
    line = words({**TINY, **LLAMA, "bf16": True, "device": "cuda", **flags})
    return Job.of(line, ranks).of_microbatches(4)


def products(place: Place) -> str:
    """Against float64, written and then added."""
    from megatron.parallel.products import weight_product, widens, writes_wide_products

    device, draws = device_of(place), torch.Generator().manual_seed(1)
    out, size, rows = (8192, 8192, 2048) if place.on_cuda else (64, 48, 96)
    grad, x = (torch.randn(rows, n, generator=draws).bfloat16().to(device) for n in (out, size))
    into = torch.empty(out, size, device=device)
    for add in (False, True):
        weight_product(grad, x, into, add=add)  # makes the libraries' workspaces
    before = torch.cuda.memory_allocated() if place.on_cuda else 0
    if place.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    weight_product(grad, x, into, add=False)
    weight_product(grad, x, into, add=True)
    beside = torch.cuda.max_memory_allocated() - before if place.on_cuda else 0
    exact = 2 * (grad.double().t() @ x.double())
    rounded = not place.on_cuda and not widens(x)  # some CPUs are fast in bfloat16, and give no wider product
    told = within(float((into - exact).norm() / exact.norm()), 2**-8 if rounded else 1e-5, "relative distance")
    if not place.on_cuda:
        return told
    if not writes_wide_products(device, x.dtype) or beside >= into.nbytes // 4:
        raise Failure(
            f"{told}, but {beside / 1e6:.0f} MB beside a result of {into.nbytes / 1e6:.0f} MB: torch has no out_dtype here"
        )
    return f"{told}, {beside / 1e6:.1f} MB beside the result"


def products_of_experts(place: Place) -> str:
    """In torch's kernel, beside one after the other; some experts have no rows."""
    from megatron.moe import grouped

    device, draws = device_of(place), torch.Generator().manual_seed(1)
    width, hidden, counts = (768, 2048, [300, 0, 1, 1700, 0, 47]) if place.on_cuda else (16, 24, [3, 0, 1, 12])
    weight = torch.randn(len(counts), width, hidden, generator=draws).bfloat16().to(device)
    furthest = 0.0
    for transposed, size in ((True, hidden), (False, width)):
        x = torch.randn(sum(counts), size, generator=draws).bfloat16().to(device)
        if place.on_cuda and not (grouped._has_kernel(device) and grouped._fits_kernel(x, weight)):
            return "not on this GPU"
        found = grouped.in_one_kernel(x, weight, counts, transposed=transposed).double()
        expected = grouped.each_product(x, weight, counts, transposed=transposed).double()
        furthest = max(furthest, float((found - expected).norm() / expected.norm()))
    return within(furthest, 1e-2, "relative distance")


def products_in_8_bits(place: Place) -> str:
    """The three products of a layer by each recipe that the device takes, beside the emulation on the host."""
    from megatron.config.precision import Fp8, Fp8Format, Fp8Recipe
    from megatron.parallel.context import Group
    from megatron.precision.device import why_not
    from megatron.precision.products import Fp8Products

    device, draws, found = device_of(place), torch.Generator().manual_seed(1), []
    x, weight, grad = (torch.randn(shape, generator=draws).bfloat16() for shape in ((384, 256), (512, 256), (384, 512)))

    def results(products: Fp8Products, device: torch.device) -> list[torch.Tensor]:
        here, into = [one.to(device) for one in (x, weight, grad)], torch.empty(weight.shape, device=device)
        products.weight_gradient(here[2], here[0], into, add=False)
        return [products.output(here[0], here[1]).cpu(), products.input_gradient(here[2], here[1]).cpu(), into.cpu()]

    for recipe in get_args(Fp8Recipe):
        for form in get_args(Fp8Format):
            fp8 = Fp8(form, recipe)
            if place.on_cuda and why_not(fp8, torch.cuda.get_device_capability(device), torch.version.cuda or "0.0"):
                found.append(f"{recipe} {form}: not on this GPU")
                continue
            products = Fp8Products(fp8, Group("tp", (0,), 0), "outputs")
            pairs = zip(results(products, device), results(products, torch.device("cpu")), strict=True)
            furthest = max(float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs)
            found.append(within(furthest, 1e-2, f"{recipe} {form}: relative distance"))
    return "; ".join(found)


def one_sync(place: Place) -> str:
    """As torch counts them (`set_sync_debug_mode`), in the third step."""
    found = {}
    for name in ("llama", "dropout", "recompute", "host memory"):
        job = _job(name)
        with alone(job, 0, place) as step:
            step.prepare(4)
            batch = batch_of(job, place)
            for iteration in range(1, 4):
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    torch.cuda.set_sync_debug_mode("warn" if iteration == 3 else "default")
                    step.run(batch, iteration=iteration, learning_rate=1e-3, weight_decay=0.1)
            torch.cuda.set_sync_debug_mode("default")
            found[name] = sum(_WAITS in str(one.message) for one in seen)
    told = ", ".join(f"{name} {count}" for name, count in found.items())
    if any(count != 1 for count in found.values()):
        raise Failure(f"waits of the host in a step: {told}")
    return f"waits of the host in a step: {told}"


def loop_sync(place: Place) -> str:
    """Any wait in a second step's gradients is an error of torch, which names the place."""
    for name in _CASES:
        job = _job(name)
        with alone(job, 0, place) as step:
            step.prepare(4)
            batch = batch_of(job, place)
            step.gradients(batch)
            torch.cuda.set_sync_debug_mode("error")
            try:
                step.gradients(batch)
            except RuntimeError as error:
                if _WAITS not in str(error):
                    raise
                raise Failure(f"{name}: {_place_of(error)}") from error
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return f"none in {len(_CASES)} cases: {', '.join(_CASES)}"


def _place_of(error: BaseException) -> str:
    """The innermost line of the project that an error came from."""
    trace, place = error.__traceback__, "?"
    while trace is not None:
        if "/megatron/" in (file := trace.tb_frame.f_code.co_filename):
            place = f"megatron/{file.rpartition('/megatron/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"the host waits in {place}"


def varlen(place: Place) -> str:
    """Outputs and gradients in bfloat16, for grouped queries: within documents, and within windows in them."""
    from megatron.attention.blocks import Call, Reach, block_attention
    from megatron.attention.documents import Documents, flash_attention, grouped_attention
    from megatron.spec.layers import ScoreSpec

    device, draws = device_of(place), torch.Generator().manual_seed(1)
    length, batch = 512, 2
    bounds = np.array([0, 100, 333, 512, 513, 900, 1024], dtype=np.int32)
    documents = Documents(bounds, torch.from_numpy(bounds).to(device), batch)
    start = [torch.randn(length, batch, n, 64, generator=draws).to(device, torch.bfloat16) for n in (8, 2, 2)]
    weights = torch.randn(length, batch, 8 * 64, generator=draws).to(device, torch.bfloat16)
    in_blocks = Call(ScoreSpec(window=50), Reach(50, documents))
    ways: list[Callable[..., torch.Tensor]] = [
        lambda q, k, v: flash_attention(q, k, v, documents.on_device, documents.longest),
        lambda q, k, v: grouped_attention(q, k, v, documents, 0.0),
        lambda q, k, v: flash_attention(q, k, v, documents.on_device, documents.longest, window=50),
        lambda q, k, v: block_attention(q.unflatten(2, (2, 4)), k, v, None, in_blocks),
    ]
    found = []
    for attend in ways:
        leaves = [one.clone().requires_grad_() for one in start]
        out = attend(*leaves)
        found.append([out.detach().float(), *(grad.float() for grad in torch.autograd.grad((out * weights).sum(), leaves))])
    pairs = [*zip(*found[:2], strict=True), *zip(*found[2:], strict=True)]
    far = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    return within(far, 2e-2, "relative distance of output and gradients")
