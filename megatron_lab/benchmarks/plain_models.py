"""GPT and Llama models written by hand in plain torch, as a baseline for the framework's speed.

Shapes: `b` batch, `s` sequence, `h` hidden, `n` query heads, `g` key-value heads, `d` head size, `t = b * s` tokens, `E` experts,
`r` rows (one per assignment of a token to an expert).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lab.benchmarks.shapes import EXPERTS_PER_TOKEN, Shape

_INIT_STD = 0.02


def build_plain_model(shape: Shape) -> PlainGPT | PlainLlama:
    """Build the GPT or Llama of a shape, written by hand in plain torch. Its forward maps tokens and labels [b, s] to the mean
    loss."""
    return PlainGPT(shape) if shape.style == "gpt" else PlainLlama(shape)


def compile_modules(model: PlainGPT | PlainLlama, backend: str) -> None:
    """Compile a model with torch.compile: each layer separately, and the output layer together with the loss.

    Equal layers share one compilation, so the compile time does not grow with the number of layers.
    """
    for module in (*model.blocks, model.output):
        module.compile(backend=backend)


class _Output(nn.Module):
    """Final norm, output matrix and mean cross entropy. The module maps hidden states [b, s, h] and labels [b, s] to a scalar."""

    def __init__(self, norm: nn.Module, shape: Shape) -> None:
        super().__init__()
        self.norm, self.head = norm, nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


class _GPTAttention(nn.Module):
    """Causal self-attention without rotary positions. The module maps [b, s, h] to [b, s, h]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv, self.out = nn.Linear(shape.hidden, 3 * shape.hidden), nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(h, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(b, s, h))


class _GPTBlock(nn.Module):
    """GPT layer: attention and MLP. The module maps [b, s, h] to [b, s, h]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h = shape.hidden
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(h), _GPTAttention(shape), nn.LayerNorm(h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 written by hand in plain torch. It maps tokens and labels [b, s] to the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(shape.vocab, shape.hidden), nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(_GPTBlock(shape) for _ in range(shape.layers))
        self.output = _Output(nn.LayerNorm(shape.hidden), shape)
        self.output.head.weight = self.word.weight
        _init_weights(self, shape)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.word(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.output(x, labels)


class _LlamaAttention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries. The module maps [b, s, h] to [b, s, h]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h, self.head_size = shape.hidden, shape.hidden // shape.heads
        kv_size = (shape.kv_heads or shape.heads) * self.head_size
        self.q, self.k, self.v = (nn.Linear(h, size, bias=False) for size in (h, kv_size, kv_size))
        self.out = nn.Linear(h, h, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(2, (-1, self.head_size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = (_rotate(t, cos, sin) for t in (q, k))  # [b, n or g, s, d]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(y.transpose(1, 2).flatten(2))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embeddings to queries or keys (Su et al. 2021), in float32.

    Args:
        x: heads [..., s, d].
        cos, sin: cosine and sine of the angles [s, d / 2]. Element i of a head is rotated together with element i + d / 2.
    """
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class _GatedMLP(nn.Module):
    """SwiGLU MLP (Shazeer 2020). The module maps [b, s, h] to [b, s, h]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h, f = shape.hidden, shape.ffn or 4 * shape.hidden
        self.gate, self.up, self.down = nn.Linear(h, f, bias=False), nn.Linear(h, f, bias=False), nn.Linear(f, h, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Experts(nn.Module):
    """Mixture of SwiGLU experts that maps [b, s, h] to [b, s, h].

    A softmax router selects two experts per token. No tokens are dropped.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h, f = shape.hidden, shape.ffn or 4 * shape.hidden
        self.router = nn.Linear(h, shape.experts, bias=False)
        self.gate_up, self.down = nn.Parameter(torch.empty(shape.experts, h, 2 * f)), nn.Parameter(torch.empty(shape.experts, f, h))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)  # [t, h]
        router_weights, expert_ids = self.router(tokens).float().topk(EXPERTS_PER_TOKEN)
        router_weights = router_weights.softmax(-1).flatten()
        flat_expert_ids = expert_ids.flatten()
        order = flat_expert_ids.argsort(stable=True)
        rows_per_expert = torch.zeros(len(self.down), dtype=torch.int64, device=x.device).scatter_add_(
            0, flat_expert_ids, torch.ones_like(flat_expert_ids)
        )
        ends = rows_per_expert.cumsum(0, dtype=torch.int32)
        rows = tokens[order // EXPERTS_PER_TOKEN]
        gate, up = _grouped_matmul(rows, self.gate_up, ends).chunk(2, -1)
        y = _grouped_matmul(F.silu(gate) * up, self.down, ends) * router_weights[order].unsqueeze(1).to(x.dtype)
        return torch.zeros_like(tokens).index_add(0, order // EXPERTS_PER_TOKEN, y.to(x.dtype)).view_as(x)


def _grouped_matmul(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each row of `rows` with the matrix of its expert. Return [r, out].

    In bfloat16 the function uses torch's grouped matrix product, otherwise one product per expert.

    Args:
        rows: [r, in], sorted by expert.
        matrices: one matrix per expert, [E, in, out].
        ends: index of the row after the last row of each expert, [E].
    """
    if torch.is_autocast_enabled(rows.device.type):
        rows, matrices = (t.to(torch.get_autocast_dtype(rows.device.type)) for t in (rows, matrices))
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, matrices, offs=ends)
    return torch.cat(
        [expert_rows @ matrix for expert_rows, matrix in zip(rows.tensor_split(ends[:-1].long().cpu()), matrices, strict=True)]
    )


class _LlamaBlock(nn.Module):
    """Llama layer with a dense MLP or with experts. The module maps [b, s, h] to [b, s, h]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(shape.hidden, eps=1e-5) for _ in range(2))
        self.attention, self.mlp = _LlamaAttention(shape), (_Experts if shape.experts else _GatedMLP)(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class PlainLlama(nn.Module):
    """Llama written by hand in plain torch, dense or with experts. It maps tokens and labels [b, s] to the mean loss."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(_LlamaBlock(shape) for _ in range(shape.layers))
        self.output = _Output(nn.RMSNorm(shape.hidden, eps=1e-5), shape)
        d = shape.hidden // shape.heads
        angles = torch.outer(torch.arange(shape.seq).double(), 10000.0 ** -(torch.arange(0, d, 2).double() / d))
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        _init_weights(self, shape)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.word(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.output(x, labels)


def _init_weights(model: nn.Module, shape: Shape) -> None:
    """Draw random initial weights as in GPT-2: the last matrix of each residual branch has a smaller standard deviation."""
    for name, p in model.named_parameters():
        if p.dim() > 1:
            ends_branch = name.endswith(("out.weight", "down.weight", "down"))
            nn.init.normal_(p, std=_INIT_STD / (math.sqrt(2 * shape.layers) if ends_branch else 1))
