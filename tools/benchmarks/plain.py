"""The plain PyTorch loop: a GPT-2 and its step as one writes them by hand, without parallelism."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tools.benchmarks.shapes import Shape

Step = Callable[[], float]
"""One training step; returns the loss."""

LR, WEIGHT_DECAY, CLIP = 3e-4, 0.01, 1.0


class PlainBlock(nn.Module):
    """A layer; [b, s, h] to [b, s, h]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h, self.heads = shape.hidden, shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(h, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """The model; tokens and labels [b, s] to the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(shape.vocab, shape.hidden), nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.head.weight = self.word.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.word(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


def plain_step(shape: Shape, dtype: torch.dtype, device: torch.device) -> Step:
    """A step with fused AdamW and clipping; where `dtype` is not float32, autocast over float32 parameters."""
    torch.manual_seed(0)
    model = PlainGPT(shape).to(device)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
    tokens, labels = random_tokens(shape, device)

    def step() -> float:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = model(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def random_tokens(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, [b, s] each, always the same."""
    window = torch.randint(shape.vocab, (shape.batch, shape.seq + 1), generator=torch.Generator().manual_seed(0))
    return window[:, :-1].to(device), window[:, 1:].to(device)
