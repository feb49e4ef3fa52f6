"""Training loops of the same model without this framework: a loop written by hand in plain torch, and GPT-2 of transformers.

All loops have the same sizes and tokens, no dropout, tied word embeddings, torch's fused AdamW, and clipping by the global gradient
norm. The vocabulary sizes of the shapes are multiples of 128, so no loop needs padding. In 16 bits these loops use autocast with
float32 parameters, as is usual. The framework instead has 16-bit parameters and float32 main parameters, to which it applies the
same update.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lab.benchmarks.plain_models import PlainGPT, PlainLlama, build_plain_model, compile_modules
from megatron_lab.benchmarks.shapes import Shape

Step = Callable[[], float]
"""Function that runs one training step and returns the loss."""

LR, WEIGHT_DECAY, CLIP = 3e-4, 0.01, 1.0


class _TransformersGPT2(nn.Module):
    """GPT-2 of transformers with torch's attention. It maps tokens and labels [b, s] (batch, sequence) to the mean loss."""

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
        # Not with `labels=`, because transformers would shift and pad the labels first.
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


def _build_step(
    build: Callable[[Shape], nn.Module],
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    pure: bool = False,
    compile_model: Callable[[nn.Module], None] = lambda model: None,
) -> Step:
    """Build a model on the device and return its training step, with fused AdamW and gradient clipping.

    If `dtype` is not float32, the step uses autocast with float32 parameters, unless `pure` is true.

    Args:
        build: function that builds the model from its shape.
        pure: keep parameters, gradients and moments in `dtype`, without float32 main parameters. This needs less work, but trains
            differently.
        compile_model: called with the model to compile it. The first step then waits for the compiler.
    """
    torch.manual_seed(0)
    with device:
        model = build(shape)
    if pure:
        model = model.to(dtype)
    compile_model(model)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    not_decayed = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": not_decayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
    tokens, labels = create_random_tokens(shape, device)
    # Training in float16 would need loss scaling. The peers are only timed, so they do without.
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


def build_plain_step(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, compiled: bool = False, backend: str = "inductor"
) -> Step:
    """Build the training step of the model that is written by hand in plain torch.

    Args:
        compiled: compile the layers and the output layer with torch.compile.
        backend: backend of torch.compile.
    """

    def compile_model(model: nn.Module) -> None:
        if compiled:
            compile_modules(cast(PlainGPT | PlainLlama, model), backend)

    return _build_step(build_plain_model, shape, dtype, device, compile_model=compile_model)


def build_pure_step(shape: Shape, dtype: torch.dtype, device: torch.device) -> Step:
    """Build the training step of the model that is written by hand, with parameters, gradients and moments all in `dtype`."""
    return _build_step(build_plain_model, shape, dtype, device, pure=True)


def build_transformers_step(shape: Shape, dtype: torch.dtype, device: torch.device) -> Step:
    """Build the training step of GPT-2 from the package transformers."""
    return _build_step(_TransformersGPT2, shape, dtype, device)


def get_peers(shape: Shape, dtype: torch.dtype) -> dict[str, Callable[..., Step]]:
    """Return functions that build the training steps of the peers (other training loops of the same model), by name.

    A peer is left out if its package is not installed, or if it does not support this shape or dtype.
    """
    steps: dict[str, Callable[..., Step]] = {"plain": build_plain_step}
    if shape.style == "gpt" and importlib.util.find_spec("transformers") is not None:
        steps["transformers"] = build_transformers_step
    if dtype != torch.float32:
        steps["pure"] = build_pure_step
    return steps


def create_random_tokens(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens and labels of shape [batch, sequence]. Every call returns the same values."""
    window = torch.randint(shape.vocab, (shape.batch, shape.seq + 1), generator=torch.Generator().manual_seed(0))
    return window[:, :-1].to(device), window[:, 1:].to(device)
