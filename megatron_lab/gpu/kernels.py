"""Checks of single operations with the arguments of the model's layers: results in low precision are compared with float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_lab.gpu.context import CheckContext, CheckFailed, Outcome, require_at_most
from megatron_lab.gpu.jobs import get_torch_device

_BF16_ERROR = 1e-2
"""Maximum relative error of sums of products of bfloat16 numbers, with the result rounded to bfloat16."""
_ERROR_WIDTH = 150
"""Maximum number of characters of an error message in a figure."""


def compute_relative_error(values: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ||values - reference|| / ||reference||, computed in float64. The result is NaN if any value is NaN."""
    values, reference = values.detach().double(), reference.detach().double().to(values.device)
    return float((values - reference).norm() / reference.norm())


def _create_random_bf16(*shape: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Return bfloat16 numbers from a normal distribution. They are drawn on the CPU, so that they do not depend on the device."""
    return torch.randn(shape, generator=generator).bfloat16().to(device)


def weight_gradients(context: CheckContext) -> Outcome:
    """Check the matrix product that computes a weight gradient from bfloat16 tensors, and writes or adds it to a float32 buffer.

    The product must not allocate a temporary tensor. On CUDA it is torch's `addmm` with `out_dtype`.
    """
    from megatron.parallel.matmul import compute_weight_product, has_float32_output, should_widen

    device, generator = get_torch_device(context.device), torch.Generator().manual_seed(1)
    outputs, inputs, rows = (8192, 8192, 2048) if context.on_cuda else (64, 48, 96)
    grad, x = (_create_random_bf16(rows, size, device=device, generator=generator) for size in (outputs, inputs))
    into = torch.full((outputs, inputs), torch.nan, device=device)
    for add in (False, True):
        compute_weight_product(grad, x, into, add=add)  # so that the libraries allocate their workspaces
    initial_memory = torch.cuda.memory_allocated() if context.on_cuda else 0
    if context.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    compute_weight_product(grad, x, into, add=False)
    compute_weight_product(grad, x, into, add=True)
    extra_bytes = torch.cuda.max_memory_allocated() - initial_memory if context.on_cuda else 0
    exact = 2 * (grad.double().t() @ x.double())
    # CPUs with fast bfloat16 products round the result to bfloat16.
    is_rounded = not context.on_cuda and not should_widen(x)
    figure = require_at_most(compute_relative_error(into, exact), 2**-8 if is_rounded else 1e-5, "relative error")
    if not context.on_cuda:
        return Outcome(figure)
    figure += f", {extra_bytes / 1e6:.1f} MB beside a result of {into.nbytes / 1e6:.0f} MB"
    if not has_float32_output(device, x.dtype) or extra_bytes >= into.nbytes // 4:
        raise CheckFailed(
            f"{figure}: this version of torch cannot write a bfloat16 product to a float32 tensor without a temporary tensor. Use "
            "torch 2.10 or a later version, built for CUDA"
        )
    return Outcome(figure)


_SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention(context: CheckContext) -> Outcome:
    """Check the output and the gradients of causal attention in bfloat16 for each of torch's attention kernels, against float64.

    The inputs have the same strides as in the model's layers.
    """
    from megatron.attention.core import core_attention

    device, generator = get_torch_device(context.device), torch.Generator().manual_seed(1)
    # (sequence, batch, key-value heads, query heads of each, channels). 192 % 128 = 64.
    cases = [(512, 2, 2, 1, 64), (192, 2, 2, 4, 128), (320, 1, 4, 1, 128)]
    figures, data, failures = [], dict[str, Any](), []
    backends = dict(_SDPA_BACKENDS) if context.on_cuda else {"math": SDPBackend.MATH}
    for name, backend in backends.items():
        max_error, refused, error_text = 0.0, [], ""
        for s, b, g, r, d in cases:
            inputs = [_create_random_bf16(s, b, *heads, d, device=device, generator=generator) for heads in ((g, r), (g,), (g,))]
            weights = _create_random_bf16(s, b, g * r * d, device=device, generator=generator)
            exact = _with_gradients(core_attention, [x.double() for x in inputs], weights.double())
            try:
                with sdpa_kernel(backend):
                    values = _with_gradients(core_attention, inputs, weights)
            except RuntimeError as error:
                if "No available kernel" not in str(error):
                    error_text = f"s={s} r={r} d={d}: {_format_error(error)}"
                refused.append(f"s={s} r={r} d={d}")
                continue
            max_error = max([max_error, *(compute_relative_error(a, e) for a, e in zip(values, exact, strict=True))], key=_nan_last)
        if error_text:
            figures.append(f"{name} failed at {error_text}")
            failures.append(name)
        elif len(refused) < len(cases):
            figures.append(f"{name} {max_error:.1e}" + (f" (takes no {', '.join(refused)})" if refused else ""))
            if not max_error <= 2 * _BF16_ERROR:
                failures.append(name)
        else:
            figures.append(f"{name} not available")
        data[name] = {"error": max_error, "refused": refused}
    figure = f"relative errors: {', '.join(figures)} (at most {2 * _BF16_ERROR:.0e})"
    if failures:
        raise CheckFailed(f"{figure}; wrong: {', '.join(failures)}")
    return Outcome(figure, data)


def _format_error(error: BaseException) -> str:
    """Return the type of an error and the start of its message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_ERROR_WIDTH]}"


def _nan_last(value: float) -> float:
    """Return a sort key for errors of kernels that orders NaN after every number, so that a maximum of errors is NaN if one of the
    errors is."""
    return float("inf") if value != value else value


def _with_gradients(
    function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], weights: torch.Tensor
) -> list[torch.Tensor]:
    """Return the output of a function, and the gradients of its inputs for the loss sum(output * weights)."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad((output.double() * weights.double()).sum(), leaves)]


def attention_speed(context: CheckContext) -> Outcome:
    """Time forward and backward of each attention kernel, with the tensor shapes of the speed checks. A training run times the
    kernels in this way at its start."""
    from megatron.attention.timing import choose_on_device

    device, data, figures = get_torch_device(context.device), dict[str, Any](), []
    # (sequence, batch, key-value heads, query heads of each, channels)
    for name, (s, b, g, r, d) in {"350m": (1024, 16, 16, 1, 64), "1.3b": (2048, 4, 16, 1, 128), "8b": (4096, 1, 8, 4, 128)}.items():
        q, k, v = (torch.empty(s, b, *heads, d, dtype=torch.bfloat16, device=device) for heads in ((g, r), (g,), (g,)))
        choice = choose_on_device(("flash", "cudnn", "efficient"), (q, k, v))
        data[name] = {"milliseconds": dict(choice.milliseconds), "failures": dict(choice.failures), "kernel": choice.kernel}
        figures.append(f"{name}: {choice}")
    return Outcome("; ".join(figures), data)


def flash_parts(context: CheckContext) -> Outcome:
    """Check flash attention with the keys in two halves, as context parallelism computes it.

    The results for the two halves are combined by their logsumexps and compared with attention in float64.
    """
    from megatron.attention import flash_range_pairs
    from megatron.attention.documents import Documents
    from megatron.spec.layers import DEFAULT_SCORES

    device, generator = get_torch_device(context.device), torch.Generator().manual_seed(1)
    length, batch, g, r, d = 384, 2, 2, 4, 64
    bounds = np.array([0, 384, 500, 768], dtype=np.int32)
    documents = Documents(bounds, torch.from_numpy(bounds).to(device), batch)
    first, second = (0, 192), (192, 384)
    q, k, v = (_create_random_bf16(length, batch, *heads, d, device=device, generator=generator) for heads in ((g, r), (g,), (g,)))
    grad = _create_random_bf16(192, batch, g, r, d, device=device, generator=generator)
    halves = [x.split(192) for x in (q, k, v)]
    second_keys = flash_range_pairs.flash_pair_forward(
        second, second, documents, DEFAULT_SCORES, halves[0][1], halves[1][1], halves[2][1]
    )
    first_keys = flash_range_pairs.flash_pair_forward(
        second, first, documents, DEFAULT_SCORES, halves[0][1], halves[1][0], halves[2][0]
    )
    logsumexp = torch.logaddexp(second_keys[1], first_keys[1])
    weights = [torch.exp(result[1] - logsumexp).unsqueeze(-1) for result in (second_keys, first_keys)]
    out = (second_keys[0] * weights[0] + first_keys[0] * weights[1]).bfloat16()
    query_args = (grad, halves[0][1])
    grads = [
        flash_range_pairs.flash_pair_backward(
            second, keys, documents, DEFAULT_SCORES, *query_args, halves[1][i], halves[2][i], out, logsumexp
        )
        for i, keys in ((1, second), (0, first))
    ]
    exact_out, exact_grads = _compute_attention_in_float64(q, k, v, bounds, grad, rows=slice(192, 384))
    pairs = [
        (out, exact_out),
        (grads[0][0] + grads[1][0], exact_grads[0][192:]),
        (torch.cat([grads[1][1], grads[0][1]]), exact_grads[1]),
        (torch.cat([grads[1][2], grads[0][2]]), exact_grads[2]),
    ]
    errors = [compute_relative_error(a, b) for a, b in pairs]
    return Outcome(require_at_most(max(errors, key=_nan_last), 3 * _BF16_ERROR, "relative error of output and gradients"))


def _compute_attention_in_float64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: np.ndarray, grad: torch.Tensor, rows: slice
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Compute causal attention within documents from its definition in float64, for some query rows of each sample.

    Args:
        q: [s, b, g, r, d] with s positions, b samples, g key-value heads, r query heads per key-value head and d channels.
        k: [s, b, g, d].
        v: [s, b, g, d].
        bounds: offsets at which documents start, and the offset of the end, with the samples of the batch concatenated.
        grad: gradient of the output of the query rows.
        rows: range of the query rows within each sample.

    Returns:
        the output of the query rows, and the gradients of q, k and v.
    """
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    s, b, d = q.shape[0], q.shape[1], q.shape[-1]
    scores = torch.einsum("sbgrd,tbgd->bgrst", leaves[0], leaves[1]) / d**0.5
    position = torch.arange(s * b, device=q.device).view(b, s)
    document = torch.bucketize(position, torch.from_numpy(bounds[1:].astype(np.int64)).to(q.device), right=True)
    mask = (document.unsqueeze(2) == document.unsqueeze(1)) & torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask.view(b, 1, 1, s, s), -torch.inf)
    output = torch.einsum("bgrst,tbgd->sbgrd", scores.softmax(-1), leaves[2])[rows]
    return output.detach(), torch.autograd.grad((output * grad.double()).sum(), leaves)


def varlen(context: CheckContext) -> Outcome:
    """Check that one call of flash attention (with `cu_seqlens`) restricts attention to documents, with and without a sliding
    window. The result is compared with float64."""
    from megatron.attention.blocks import BlockAttentionOptions, CausalMask, block_attention
    from megatron.attention.documents import Documents, flash_attention
    from megatron.spec.layers import ScoreSpec

    device, generator = get_torch_device(context.device), torch.Generator().manual_seed(1)
    length, batch = 512, 2
    bounds = np.array([0, 100, 333, 512, 513, 900, 1024], dtype=np.int32)
    documents = Documents(bounds, torch.from_numpy(bounds).to(device), batch)
    inputs = [_create_random_bf16(length, batch, heads, 64, device=device, generator=generator) for heads in (8, 2, 2)]
    weights = _create_random_bf16(length, batch, 8 * 64, device=device, generator=generator)
    errors = []
    for window in (None, 50):
        options = BlockAttentionOptions(ScoreSpec(window=window), CausalMask(window, documents))
        implementations: list[tuple[Callable[..., torch.Tensor], torch.dtype]] = [
            (
                lambda q, k, v, w=window: flash_attention(q, k, v, documents.cu_seqlens_device, documents.max_seqlen, window=w),
                torch.bfloat16,
            ),
            (lambda q, k, v, c=options: block_attention(q.unflatten(2, (2, 4)), k, v, None, c), torch.float64),
        ]
        values, exact = (
            _with_gradients(implementation, [x.to(dtype) for x in inputs], weights) for implementation, dtype in implementations
        )
        errors += [compute_relative_error(a, b) for a, b in zip(values, exact, strict=True)]
    return Outcome(require_at_most(max(errors, key=_nan_last), 2 * _BF16_ERROR, "relative error of output and gradients"))


def experts(context: CheckContext) -> Outcome:
    """Check the grouped matrix products of experts, which multiply each token with the matrix of its expert, forward and backward.
    Some experts have no tokens."""
    from torch import nn

    from megatron.moe.grouped import grouped_linear

    device, generator = get_torch_device(context.device), torch.Generator().manual_seed(1)
    cases = {"few": (768, 2048, [300, 0, 1, 1700, 0, 47]), "many": (256, 512, [40, 0, 24, 100] * 32)}
    if not context.on_cuda:
        cases = {"few": (16, 24, [3, 0, 1, 12])}
    errors = []
    for outputs, inputs, counts in cases.values():
        weight = _create_random_bf16(len(counts), outputs, inputs, device=device, generator=generator)
        x, grad = (_create_random_bf16(sum(counts), size, device=device, generator=generator) for size in (inputs, outputs))
        results = []
        for dtype in (torch.bfloat16, torch.float64):
            leaf, param = x.to(dtype, copy=True).requires_grad_(), nn.Parameter(weight.to(dtype))
            output = grouped_linear(leaf, param, counts)
            output.backward(grad.to(dtype))
            assert leaf.grad is not None and param.grad is not None
            results.append([output, leaf.grad, param.grad])
        errors += [compute_relative_error(a, b) for a, b in zip(*results, strict=True)]
    return Outcome(require_at_most(max(errors, key=_nan_last), _BF16_ERROR, "relative error of outputs and gradients"))


_EXPERT_SHAPES = ((128, 1536, 2048, 256), (8, 11264, 2048, 2048))
"""(experts, outputs, inputs, rows per expert) of Qwen3 30B-A3B and of the speed check."""


def experts_speed(context: CheckContext) -> Outcome:
    """Time two ways to compute the weight gradients of experts: grouped kernels, and a loop over experts.

    The times show whether the framework (function `compute_experts_per_kernel`) selects the faster way.
    """
    from megatron.moe.grouped import compute_experts_per_kernel, compute_weight_grads_grouped, compute_weight_grads_in_loop
    from megatron_lab.gpu.roofline import measure_median

    device, generator = get_torch_device(context.device), torch.Generator(context.device).manual_seed(1)
    figures, data = [], dict[str, Any]()
    for num_experts, outputs, inputs, rows in _EXPERT_SHAPES:
        grad, x = (
            torch.randn(num_experts * rows, size, device=device, generator=generator).bfloat16() for size in (outputs, inputs)
        )
        out, counts = torch.zeros(num_experts, outputs, inputs, device=device), [rows] * num_experts
        times = {
            "loop": measure_median(partial(compute_weight_grads_in_loop, grad, x, counts, out, add=True), device),
            "grouped": measure_median(
                partial(compute_weight_grads_grouped, grad, x, counts, out, min(num_experts, 16), add=True), device
            ),
        }
        selected = "grouped" if compute_experts_per_kernel(num_experts * rows, num_experts, outputs, inputs) else "loop"
        data[str(num_experts)] = {**{name: 1e3 * duration for name, duration in times.items()}, "chosen": selected}
        descriptions = [f"{name} {1e3 * duration:.2f} ms" for name, duration in times.items()]
        figures.append(f"{num_experts} experts: {', '.join(descriptions)} (chosen: {selected})")
    return Outcome("; ".join(figures), data)


def fp8_products(context: CheckContext) -> Outcome:
    """Check the three matrix products of a linear layer in 8 bits (output, input gradient, weight gradient), for each FP8 recipe
    that the GPU supports.

    The results are compared with those of an emulation on the CPU.
    """
    from megatron.config.precision import Fp8, Fp8Format, Fp8Recipe
    from megatron.parallel.context import Group
    from megatron.precision.fp8_gemms import Fp8Gemms
    from megatron.precision.gemms import find_fp8_problem

    device, generator = get_torch_device(context.device), torch.Generator().manual_seed(1)
    figures, failures = list[str](), list[str]()
    x, weight, grad = (torch.randn(shape, generator=generator).bfloat16() for shape in ((384, 256), (512, 256), (384, 512)))

    def run_gemms(gemms: Fp8Gemms, device: torch.device) -> list[torch.Tensor]:
        operands, into = [tensor.to(device) for tensor in (x, weight, grad)], torch.full(weight.shape, torch.nan, device=device)
        gemms.compute_weight_grad(operands[2], operands[0], into, add=False)
        return [
            gemms.compute_output(operands[0], operands[1]).cpu(),
            gemms.compute_input_grad(operands[2], operands[1]).cpu(),
            into.cpu(),
        ]

    for recipe in get_args(Fp8Recipe):
        for fp8_format in get_args(Fp8Format):
            fp8 = Fp8(fp8_format, recipe)
            if context.on_cuda and find_fp8_problem(fp8, torch.cuda.get_device_capability(device), torch.version.cuda or "0.0"):
                figures.append(f"{recipe} {fp8_format}: not on this GPU")
                continue
            gemms = Fp8Gemms(fp8, Group("tp", (0,), 0), "outputs")
            try:
                pairs = zip(run_gemms(gemms, device), run_gemms(gemms, torch.device("cpu")), strict=True)
                max_error = max((compute_relative_error(a, b) for a, b in pairs), key=_nan_last)
                figures.append(require_at_most(max_error, _BF16_ERROR, f"{recipe} {fp8_format}:"))
            except (CheckFailed, RuntimeError, ValueError) as error:  # torch's argument checks raise both types
                failures.append(str(error) if isinstance(error, CheckFailed) else f"{recipe} {fp8_format}: {_format_error(error)}")
    figure = "relative error to the emulation: " + "; ".join([*failures, *figures])
    if failures:
        raise CheckFailed(figure)
    return Outcome(figure)


def cross_entropy(context: CheckContext) -> Outcome:
    """Check the cross entropy loss and its gradient against float64. They are computed from bfloat16 logits whose vocabulary
    dimension is padded."""
    from megatron.parallel.context import Group
    from megatron.tensor_parallel.cross_entropy import VocabShard, compute_total_loss, vocab_parallel_cross_entropy

    device, generator = get_torch_device(context.device), torch.Generator().manual_seed(1)
    num_tokens, padded_vocab_size, vocab_size = (4096, 50304, 50257) if context.on_cuda else (64, 128, 101)
    logits = (4 * torch.randn(num_tokens, 1, padded_vocab_size, generator=generator)).bfloat16().to(device)
    labels = torch.randint(vocab_size, (num_tokens, 1), generator=generator).to(device)
    mask = (torch.rand(num_tokens, 1, generator=generator) < 0.9).float().to(device)
    leaf = logits.clone().requires_grad_()
    # `leaf * 1` is not a leaf, because the loss overwrites its logits in place.
    loss_sums = vocab_parallel_cross_entropy(leaf * 1, labels, mask, VocabShard(Group("tp", (0,), 0), 0, vocab_size))
    loss = compute_total_loss(loss_sums)
    (gradient,) = torch.autograd.grad(loss, leaf)
    exact_leaf = logits.double().requires_grad_()
    exact = (F.cross_entropy(exact_leaf[:, 0, :vocab_size], labels[:, 0], reduction="none") * mask[:, 0].double()).sum()
    (exact_gradient,) = torch.autograd.grad(exact, exact_leaf)
    figures = [
        require_at_most(abs(float(loss.detach()) / float(exact.detach()) - 1), 1e-5, "loss"),
        require_at_most(compute_relative_error(gradient, exact_gradient), _BF16_ERROR, "gradient"),
    ]
    return Outcome("relative errors: " + ", ".join(figures))


def deterministic_counts(context: CheckContext) -> Outcome:
    """Check two operations in deterministic mode. Counts of tokens per expert must be exact, and two runs must give equal gradients
    of an embedding.

    The counts use `scatter_add_` on two dimensions.
    """
    from megatron.parallel.matmul import add_rows

    device, generator = get_torch_device(context.device), torch.Generator().manual_seed(1)
    expert_ids = torch.randint(64, (8, 8192), generator=generator)
    ids, rows = torch.randint(500, (4096,), generator=generator), torch.randn(4096, 128, generator=generator)
    torch.use_deterministic_algorithms(True)
    try:
        counts, tables = [], []
        for _ in range(2):
            count = torch.zeros(8, 64, dtype=torch.float64, device=device)
            counts.append(count.scatter_add_(1, expert_ids.to(device), torch.ones(8, 8192, dtype=torch.float64, device=device)))
            table = torch.zeros(500, 128, device=device)
            add_rows(table, ids.to(device), rows.to(device))
            tables.append(table)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = torch.stack([torch.bincount(row, minlength=64) for row in expert_ids]).double()
    if not torch.equal(counts[0].cpu(), expected) or not torch.equal(counts[0], counts[1]):
        raise CheckFailed(
            "the counts of tokens per expert are wrong, or differ between two runs in deterministic mode. Please report this"
        )
    if not torch.equal(*tables):
        raise CheckFailed("the gradient of an embedding differs between two runs in deterministic mode. Please report this")
    exact = torch.zeros(500, 128, dtype=torch.float64).index_add_(0, ids, rows.double())
    return Outcome(
        f"counts exact; rows alike twice, {require_at_most(compute_relative_error(tables[0], exact), 1e-6, 'relative error')}"
    )
