"""Single operations as the layers call them, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_lab.gpu.context import CheckContext, CheckFailed, Outcome, require_at_most
from megatron_lab.gpu.jobs import torch_device

_BF16_ERROR = 1e-2
"""Allowed relative error of sums of products of bfloat16 numbers whose result is rounded to bfloat16."""
_ERROR_WIDTH = 150
"""Characters of an error's message in a figure."""


def relative_error(values: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ||values - reference|| / ||reference|| in float64. NaN stays NaN, and no comparison accepts it."""
    values, reference = values.detach().double(), reference.detach().double().to(values.device)
    return float((values - reference).norm() / reference.norm())


def _normal(*size: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Return random bfloat16 numbers, drawn on the CPU."""
    return torch.randn(size, generator=generator).bfloat16().to(device)


def weight_gradients(context: CheckContext) -> Outcome:
    """Write and add a bfloat16 weight gradient to float32 memory: `addmm` with `out_dtype`."""
    from megatron.parallel.products import weight_product, widens, writes_wide_products

    device, generator = torch_device(context.device), torch.Generator().manual_seed(1)
    outputs, inputs, rows = (8192, 8192, 2048) if context.on_cuda else (64, 48, 96)
    grad, x = (_normal(rows, size, device=device, generator=generator) for size in (outputs, inputs))
    into = torch.full((outputs, inputs), torch.nan, device=device)
    for add in (False, True):
        weight_product(grad, x, into, add=add)  # creates the libraries' workspaces
    before = torch.cuda.memory_allocated() if context.on_cuda else 0
    if context.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    weight_product(grad, x, into, add=False)
    weight_product(grad, x, into, add=True)
    extra = torch.cuda.max_memory_allocated() - before if context.on_cuda else 0
    exact = 2 * (grad.double().t() @ x.double())
    is_rounded = not context.on_cuda and not widens(x)  # some CPUs are fast in bfloat16 and give no float32 product
    figure = require_at_most(relative_error(into, exact), 2**-8 if is_rounded else 1e-5, "relative error")
    if not context.on_cuda:
        return Outcome(figure)
    figure += f", {extra / 1e6:.1f} MB beside a result of {into.nbytes / 1e6:.0f} MB"
    if not writes_wide_products(device, x.dtype) or extra >= into.nbytes // 4:
        raise CheckFailed(f"{figure}: this torch has no products from bfloat16 into float32 memory")
    return Outcome(figure)


_SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention(context: CheckContext) -> Outcome:
    """Run causal attention by each of torch's kernels on the strides of the layers, with output and gradients against float64."""
    from megatron.attention.core import core_attention

    device, generator = torch_device(context.device), torch.Generator().manual_seed(1)
    # (sequence, batch, key-value heads, query heads of each, channels); 192 % 128 = 64.
    cases = [(512, 2, 2, 1, 64), (192, 2, 2, 4, 128), (320, 1, 4, 1, 128)]
    figures, data, failures = [], dict[str, Any](), []
    backends = dict(_SDPA_BACKENDS) if context.on_cuda else {"math": SDPBackend.MATH}
    for name, backend in backends.items():
        worst, refused, error_text = 0.0, [], ""
        for s, b, g, r, d in cases:
            start = [_normal(s, b, *heads, d, device=device, generator=generator) for heads in ((g, r), (g,), (g,))]
            weights = _normal(s, b, g * r * d, device=device, generator=generator)
            exact = _with_gradients(core_attention, [x.double() for x in start], weights.double())
            try:
                with sdpa_kernel(backend):
                    values = _with_gradients(core_attention, start, weights)
            except RuntimeError as error:
                if "No available kernel" not in str(error):
                    error_text = f"s={s} r={r} d={d}: {_short(error)}"
                refused.append(f"s={s} r={r} d={d}")
                continue
            worst = max([worst, *(relative_error(a, e) for a, e in zip(values, exact, strict=True))], key=_nan_last)
        if error_text:
            figures.append(f"{name} failed at {error_text}")
            failures.append(name)
        elif len(refused) < len(cases):
            figures.append(f"{name} {worst:.1e}" + (f" (takes no {', '.join(refused)})" if refused else ""))
            if not worst <= 2 * _BF16_ERROR:
                failures.append(name)
        else:
            figures.append(f"{name} not available")
        data[name] = {"error": worst, "refused": refused}
    figure = f"relative errors: {', '.join(figures)} (at most {2 * _BF16_ERROR:.0e})"
    if failures:
        raise CheckFailed(f"{figure}; wrong: {', '.join(failures)}")
    return Outcome(figure, data)


def _short(error: BaseException) -> str:
    """Return the kind of an error and the beginning of its message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_ERROR_WIDTH]}"


def _nan_last(value: float) -> float:
    """Order NaN above every number, so that the worst of several errors is NaN if any is."""
    return float("inf") if value != value else value


def _with_gradients(
    function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], weights: torch.Tensor
) -> list[torch.Tensor]:
    """Return the output and the gradients of the inputs for the loss sum(output x weights)."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad((output.double() * weights.double()).sum(), leaves)]


def attention_speed(context: CheckContext) -> Outcome:
    """Time forward and backward of each attention kernel on the shapes of the speed checks, as a run does before its first step."""
    from megatron.attention.timing import choose_on_device

    device, data, figures = torch_device(context.device), dict[str, Any](), []
    # (sequence, batch, key-value heads, query heads of each, channels)
    for name, (s, b, g, r, d) in {"350m": (1024, 16, 16, 1, 64), "1.3b": (2048, 4, 16, 1, 128), "8b": (4096, 1, 8, 4, 128)}.items():
        q, k, v = (torch.empty(s, b, *heads, d, dtype=torch.bfloat16, device=device) for heads in ((g, r), (g,), (g,)))
        choice = choose_on_device(("flash", "cudnn", "efficient"), (q, k, v))
        data[name] = {"milliseconds": dict(choice.milliseconds), "failures": dict(choice.failures), "kernel": choice.kernel}
        figures.append(f"{name}: {choice}")
    return Outcome("; ".join(figures), data)


def flash_parts(context: CheckContext) -> Outcome:
    """Run attention of two runs of a sequence by `_flash_attention_forward` and `_backward`, joined by their log-sums."""
    from megatron.attention import flash_parts as parts
    from megatron.attention.documents import Documents
    from megatron.spec.layers import PLAIN

    device, generator = torch_device(context.device), torch.Generator().manual_seed(1)
    length, batch, g, r, d = 384, 2, 2, 4, 64
    bounds = np.array([0, 384, 500, 768], dtype=np.int32)
    documents = Documents(bounds, torch.from_numpy(bounds).to(device), batch)
    first, second = (0, 192), (192, 384)
    q, k, v = (_normal(length, batch, *heads, d, device=device, generator=generator) for heads in ((g, r), (g,), (g,)))
    grad = _normal(192, batch, g, r, d, device=device, generator=generator)
    runs = [x.split(192) for x in (q, k, v)]
    own = parts.attend(second, second, documents, PLAIN, runs[0][1], runs[1][1], runs[2][1])
    earlier = parts.attend(second, first, documents, PLAIN, runs[0][1], runs[1][0], runs[2][0])
    log_sums = torch.logaddexp(own[1], earlier[1])
    shares = [torch.exp(part[1] - log_sums).unsqueeze(-1) for part in (own, earlier)]
    out = (own[0] * shares[0] + earlier[0] * shares[1]).bfloat16()
    whole = (grad, runs[0][1])
    grads = [
        parts.differentiate(second, keys, documents, PLAIN, *whole, runs[1][i], runs[2][i], out, log_sums)
        for i, keys in ((1, second), (0, first))
    ]
    exact_out, exact_grads = _attention_in_float64(q, k, v, bounds, grad, rows=slice(192, 384))
    pairs = [
        (out, exact_out),
        (grads[0][0] + grads[1][0], exact_grads[0][192:]),
        (torch.cat([grads[1][1], grads[0][1]]), exact_grads[1]),
        (torch.cat([grads[1][2], grads[0][2]]), exact_grads[2]),
    ]
    errors = [relative_error(a, b) for a, b in pairs]
    return Outcome(require_at_most(max(errors, key=_nan_last), 3 * _BF16_ERROR, "relative error of output and gradients"))


def _attention_in_float64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: np.ndarray, grad: torch.Tensor, rows: slice
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Compute causal attention within documents from its definition, for some rows of each sample.

    Args:
        q: [s, b, g, r, d]. k, v: [s, b, g, d].
        bounds: where documents begin, with the samples laid end to end.
        grad: gradient of the rows' output.
    """
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    s, b, d = q.shape[0], q.shape[1], q.shape[-1]
    scores = torch.einsum("sbgrd,tbgd->bgrst", leaves[0], leaves[1]) / d**0.5
    position = torch.arange(s * b, device=q.device).view(b, s)
    document = torch.bucketize(position, torch.from_numpy(bounds[1:].astype(np.int64)).to(q.device), right=True)
    seen = (document.unsqueeze(2) == document.unsqueeze(1)) & torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~seen.view(b, 1, 1, s, s), -torch.inf)
    output = torch.einsum("bgrst,tbgd->sbgrd", scores.softmax(-1), leaves[2])[rows]
    return output.detach(), torch.autograd.grad((output * grad.double()).sum(), leaves)


def varlen(context: CheckContext) -> Outcome:
    """Run attention within documents, and within windows in them, by one call of flash attention."""
    from megatron.attention.blocks import Call, Reach, block_attention
    from megatron.attention.documents import Documents, flash_attention
    from megatron.spec.layers import ScoreSpec

    device, generator = torch_device(context.device), torch.Generator().manual_seed(1)
    length, batch = 512, 2
    bounds = np.array([0, 100, 333, 512, 513, 900, 1024], dtype=np.int32)
    documents = Documents(bounds, torch.from_numpy(bounds).to(device), batch)
    start = [_normal(length, batch, heads, 64, device=device, generator=generator) for heads in (8, 2, 2)]
    weights = _normal(length, batch, 8 * 64, device=device, generator=generator)
    errors = []
    for window in (None, 50):
        call = Call(ScoreSpec(window=window), Reach(window, documents))
        ways: list[tuple[Callable[..., torch.Tensor], torch.dtype]] = [
            (lambda q, k, v, w=window: flash_attention(q, k, v, documents.on_device, documents.longest, window=w), torch.bfloat16),
            (lambda q, k, v, c=call: block_attention(q.unflatten(2, (2, 4)), k, v, None, c), torch.float64),
        ]
        values, exact = (_with_gradients(way, [x.to(dtype) for x in start], weights) for way, dtype in ways)
        errors += [relative_error(a, b) for a, b in zip(values, exact, strict=True)]
    return Outcome(require_at_most(max(errors, key=_nan_last), 2 * _BF16_ERROR, "relative error of output and gradients"))


def experts(context: CheckContext) -> Outcome:
    """Multiply rows with the matrices of their experts, forward and backward. Some experts have no rows."""
    from torch import nn

    from megatron.moe.grouped import grouped_linear

    device, generator = torch_device(context.device), torch.Generator().manual_seed(1)
    cases = {"few": (768, 2048, [300, 0, 1, 1700, 0, 47]), "many": (256, 512, [40, 0, 24, 100] * 32)}
    if not context.on_cuda:
        cases = {"few": (16, 24, [3, 0, 1, 12])}
    errors = []
    for outputs, inputs, counts in cases.values():
        weight = _normal(len(counts), outputs, inputs, device=device, generator=generator)
        x, grad = (_normal(sum(counts), size, device=device, generator=generator) for size in (inputs, outputs))
        results = []
        for dtype in (torch.bfloat16, torch.float64):
            leaf, param = x.to(dtype, copy=True).requires_grad_(), nn.Parameter(weight.to(dtype))
            output = grouped_linear(leaf, param, counts)
            output.backward(grad.to(dtype))
            assert leaf.grad is not None and param.grad is not None
            results.append([output, leaf.grad, param.grad])
        errors += [relative_error(a, b) for a, b in zip(*results, strict=True)]
    return Outcome(require_at_most(max(errors, key=_nan_last), _BF16_ERROR, "relative error of outputs and gradients"))


_EXPERT_SHAPES = ((128, 1536, 2048, 256), (8, 11264, 2048, 2048))
"""(experts, outputs, inputs, rows of each expert) of Qwen3 30B-A3B and of the speed check."""


def experts_speed(context: CheckContext) -> Outcome:
    """Time the weight gradients of experts in grouped kernels and one after the other, for `experts_per_kernel` to choose by."""
    from megatron.moe.grouped import each_weight_product, experts_per_kernel, grouped_weight_products
    from megatron_lab.gpu.roofline import median_seconds

    device, generator = torch_device(context.device), torch.Generator(context.device).manual_seed(1)
    figures, data = [], dict[str, Any]()
    for count, outputs, inputs, rows in _EXPERT_SHAPES:
        grad, x = (torch.randn(count * rows, size, device=device, generator=generator).bfloat16() for size in (outputs, inputs))
        into, counts = torch.zeros(count, outputs, inputs, device=device), [rows] * count
        times = {
            "loop": median_seconds(partial(each_weight_product, grad, x, counts, into, add=True), device),
            "grouped": median_seconds(partial(grouped_weight_products, grad, x, counts, into, min(count, 16), add=True), device),
        }
        chosen = "grouped" if experts_per_kernel(count * rows, count, outputs, inputs) else "loop"
        data[str(count)] = {**{name: 1e3 * seconds for name, seconds in times.items()}, "chosen": chosen}
        texts = [f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times.items()]
        figures.append(f"{count} experts: {', '.join(texts)} (chosen: {chosen})")
    return Outcome("; ".join(figures), data)


def fp8_products(context: CheckContext) -> Outcome:
    """Compute a layer's three products in 8 bits by each recipe of the device, against the emulation on the host."""
    from megatron.config.precision import Fp8, Fp8Format, Fp8Recipe
    from megatron.parallel.context import Group
    from megatron.precision.fp8_products import Fp8Products
    from megatron.precision.products import why_not

    device, generator = torch_device(context.device), torch.Generator().manual_seed(1)
    figures, failures = list[str](), list[str]()
    x, weight, grad = (torch.randn(shape, generator=generator).bfloat16() for shape in ((384, 256), (512, 256), (384, 512)))

    def results(products: Fp8Products, device: torch.device) -> list[torch.Tensor]:
        here, into = [one.to(device) for one in (x, weight, grad)], torch.full(weight.shape, torch.nan, device=device)
        products.weight_gradient(here[2], here[0], into, add=False)
        return [products.output(here[0], here[1]).cpu(), products.input_gradient(here[2], here[1]).cpu(), into.cpu()]

    for recipe in get_args(Fp8Recipe):
        for form in get_args(Fp8Format):
            fp8 = Fp8(form, recipe)
            if context.on_cuda and why_not(fp8, torch.cuda.get_device_capability(device), torch.version.cuda or "0.0"):
                figures.append(f"{recipe} {form}: not on this GPU")
                continue
            products = Fp8Products(fp8, Group("tp", (0,), 0), "outputs")
            try:
                pairs = zip(results(products, device), results(products, torch.device("cpu")), strict=True)
                worst = max((relative_error(a, b) for a, b in pairs), key=_nan_last)
                figures.append(require_at_most(worst, _BF16_ERROR, f"{recipe} {form}:"))
            except (CheckFailed, RuntimeError, ValueError) as error:  # torch's checks of arguments raise either
                failures.append(str(error) if isinstance(error, CheckFailed) else f"{recipe} {form}: {_short(error)}")
    figure = "relative error to the emulation: " + "; ".join([*failures, *figures])
    if failures:
        raise CheckFailed(figure)
    return Outcome(figure)


def cross_entropy(context: CheckContext) -> Outcome:
    """Compute the loss and its gradient from bfloat16 logits, with padded columns, against float64."""
    from megatron.parallel.context import Group
    from megatron.tensor_parallel.cross_entropy import Columns, minimised, vocab_parallel_cross_entropy

    device, generator = torch_device(context.device), torch.Generator().manual_seed(1)
    tokens, columns, valid = (4096, 50304, 50257) if context.on_cuda else (64, 128, 101)
    logits = (4 * torch.randn(tokens, 1, columns, generator=generator)).bfloat16().to(device)
    labels = torch.randint(valid, (tokens, 1), generator=generator).to(device)
    mask = (torch.rand(tokens, 1, generator=generator) < 0.9).float().to(device)
    leaf = logits.clone().requires_grad_()
    # The logits of a layer are not a leaf: the loss writes over them.
    sums = vocab_parallel_cross_entropy(leaf * 1, labels, mask, Columns(Group("tp", (0,), 0), 0, valid))
    loss = minimised(sums)
    (gradient,) = torch.autograd.grad(loss, leaf)
    exact_leaf = logits.double().requires_grad_()
    exact = (F.cross_entropy(exact_leaf[:, 0, :valid], labels[:, 0], reduction="none") * mask[:, 0].double()).sum()
    (exact_gradient,) = torch.autograd.grad(exact, exact_leaf)
    figures = [
        require_at_most(abs(float(loss.detach()) / float(exact.detach()) - 1), 1e-5, "loss"),
        require_at_most(relative_error(gradient, exact_gradient), _BF16_ERROR, "gradient"),
    ]
    return Outcome("relative errors: " + ", ".join(figures))


def deterministic_counts(context: CheckContext) -> Outcome:
    """Count the choices of experts by `scatter_add_` on two dimensions in deterministic mode, and add rows of an embedding."""
    from megatron.parallel.products import add_rows

    device, generator = torch_device(context.device), torch.Generator().manual_seed(1)
    chosen = torch.randint(64, (8, 8192), generator=generator)
    ids, rows = torch.randint(500, (4096,), generator=generator), torch.randn(4096, 128, generator=generator)
    torch.use_deterministic_algorithms(True)
    try:
        counts, tables = [], []
        for _ in range(2):
            count = torch.zeros(8, 64, dtype=torch.float64, device=device)
            counts.append(count.scatter_add_(1, chosen.to(device), torch.ones(8, 8192, dtype=torch.float64, device=device)))
            table = torch.zeros(500, 128, device=device)
            add_rows(table, ids.to(device), rows.to(device))
            tables.append(table)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = torch.stack([torch.bincount(row, minlength=64) for row in chosen]).double()
    if not torch.equal(counts[0].cpu(), expected) or not torch.equal(counts[0], counts[1]):
        raise CheckFailed("the counts of experts are wrong, or differ from run to run")
    if not torch.equal(*tables):
        raise CheckFailed("the rows of an embedding's gradient differ from run to run")
    exact = torch.zeros(500, 128, dtype=torch.float64).index_add_(0, ids, rows.double())
    return Outcome(f"counts exact; rows alike twice, {require_at_most(relative_error(tables[0], exact), 1e-6, 'relative error')}")
