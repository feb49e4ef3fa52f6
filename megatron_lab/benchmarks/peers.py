"""Loops that train the same model without this framework: as one writes them by hand, and transformers' GPT-2.

All have the same sizes, the same tokens, no dropout, tied word embeddings, torch's fused AdamW and clipping of the whole
gradient. The vocabularies of the shapes are multiples of 128, so nobody pads. In 16 bits they autocast over float32 parameters, as
is usual; the framework has 16-bit parameters with float32 main ones, whose update is the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lab.benchmarks.plain_models import PlainGPT, PlainLlama, compile_parts, plain_model
from megatron_lab.benchmarks.shapes import Shape

Step = Callable[[], float]
"""One training step; returns the loss."""

LR, WEIGHT_DECAY, CLIP = 3e-4, 0.01, 1.0


class _TransformersGPT2(nn.Module):
    """transformers' GPT-2 with torch's attention; tokens and labels [b, s] to the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=shape.vocab,
            n_positions=shape.seq,
            n_embd=shape.hidden,
            n_layer=shape.layers,
            n_head=shape.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="sdpa",  # type: ignore[call-arg]  # not among the declared ones
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # The loss by hand: given labels, transformers shifts and pads them first.
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


def _loop(
    build: Callable[[Shape], nn.Module],
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    pure: bool = False,
    compile_model: Callable[[nn.Module], None] = lambda model: None,
) -> Step:
    """Build a model on the device and return its training step, with fused AdamW and clipping. Where `dtype` is not float32, it
    autocasts over float32 parameters.

    Args:
        pure: parameters, gradients and moments in `dtype` instead, without main parameters: less work, and not the same training.
        compile_model: called with the model; the first step waits for a compilation.
    """
    torch.manual_seed(0)
    with device:
        model = build(shape)
    if pure:
        model = model.to(dtype)
    compile_model(model)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
    tokens, labels = random_tokens(shape, device)
    # Gradients of float16 would need a scale of the loss; the peers are timed only.
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32 and not pure)

    def step() -> float:
        with autocast:
            loss = model(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return step


def plain_step(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, compiled: bool = False, backend: str = "inductor"
) -> Step:
    """The step of the model written by hand."""

    def compile_model(model: nn.Module) -> None:
        if compiled:
            compile_parts(cast(PlainGPT | PlainLlama, model), backend)

    return _loop(plain_model, shape, dtype, device, compile_model=compile_model)


def pure_step(shape: Shape, dtype: torch.dtype, device: torch.device) -> Step:
    """The same without main parameters: everything in `dtype`."""
    return _loop(plain_model, shape, dtype, device, pure=True)


def transformers_step(shape: Shape, dtype: torch.dtype, device: torch.device) -> Step:
    """The step of transformers' GPT-2."""
    return _loop(_TransformersGPT2, shape, dtype, device)


def peers(shape: Shape, dtype: torch.dtype) -> dict[str, Callable[..., Step]]:
    """Return the loops to compare with for a shape and dtype, by name: those whose packages are installed."""
    steps: dict[str, Callable[..., Step]] = {"plain": plain_step}
    if shape.style == "gpt" and importlib.util.find_spec("transformers") is not None:
        steps["transformers"] = transformers_step
    if dtype != torch.float32:
        steps["pure"] = pure_step
    return steps


def random_tokens(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, [b, s] each, always the same."""
    window = torch.randint(shape.vocab, (shape.batch, shape.seq + 1), generator=torch.Generator().manual_seed(0))
    return window[:, :-1].to(device), window[:, 1:].to(device)
