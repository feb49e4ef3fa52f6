"""The forward pass of the reference model in plain tensor operations, also on samples of several documents.

Shapes: B sequences, s tokens in each, h hidden, n query heads, g key-value heads, d head size, f MLP width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lab.verification.reference.eight_bits import EightBits, product
from megatron_lab.verification.reference.experts import ExpertsShape, mixture
from megatron_lab.verification.reference.rotary import rotary_frequencies
from megatron_lab.verification.reference.shape import ReferenceShape, Weights

Seen = Callable[[str, Tensor], None]
"""Called with (name, output [B, s, h]) of the embedding, of each layer, and of its attention and MLP; of the projection and the
layer of each depth; with ("layers.3.scores", largest score of each head and query [B, n, s], before any cap); and with
("layers.3.balance", what the layer's experts add to what is minimised, as a mean over microbatches)."""


def by_nobody(name: str, values: Tensor) -> None:
    """A `Seen` that does nothing."""


class Added:
    """A `Seen` that adds up what experts add to what is minimised, and hands on the rest."""

    def __init__(self, seen: Seen = by_nobody) -> None:
        self._seen = seen
        self.total = torch.zeros((), dtype=torch.float64)

    def __call__(self, name: str, values: Tensor) -> None:
        if name.endswith(".balance"):
            self.total = self.total + values
        else:
            self._seen(name, values)

    @property
    def unreported(self) -> Tensor:
        """Zero, with the gradient of the sum."""
        return self.total - self.total.detach()


def token_losses(
    shape: ReferenceShape,
    weights: Weights,
    tokens: Tensor,
    labels: Tensor,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    seen: Seen = by_nobody,
    mask: Tensor | None = None,
) -> Tensor:
    """Cross entropy of every token [B, s], for tokens and labels [B, s]. Its gradient is that of all that is minimised: with
    smoothed labels, z-loss and the tokens beyond the next one.

    Args:
        positions: [B, s]; by default 0 to s - 1.
        documents: number of the document of each token [B, s]; attention stays within it. By default each sample is one.
        seen: called with the outputs of layers.
        mask: which of the losses the caller counts [B, s]; by default all. It bounds the chains of tokens beyond the next one.
    """
    x = hidden_states(shape, weights, tokens, positions, documents, seen)
    scores = scores_of(shape, weights, x)
    log_z = scores.logsumexp(dim=-1)
    cross_entropy = log_z - scores.gather(-1, labels[..., None])[..., 0]
    minimised = smoothed(shape, scores, labels) + shape.z_loss * log_z.square()
    if shape.mtp_depths:
        minimised = minimised + beyond_next(shape, weights, x, labels, positions, documents, mask, seen)
    return cross_entropy.detach() + (minimised - minimised.detach())  # the value of the one, the gradient of the other


def smoothed(shape: ReferenceShape, scores: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy [B, s] with labels of which a share is any token of the vocabulary, in equal parts."""
    each = scores.logsumexp(dim=-1)[..., None] - scores
    return (1 - shape.smoothing) * each.gather(-1, labels[..., None])[..., 0] + shape.smoothing * each.mean(dim=-1)


def beyond_next(
    shape: ReferenceShape,
    weights: Weights,
    x: Tensor,
    labels: Tensor,
    positions: Tensor | None,
    documents: Tensor | None,
    mask: Tensor | None,
    seen: Seen = by_nobody,
) -> Tensor:
    """What predicting tokens beyond the next one adds to the loss of each position [B, s] (DeepSeek-V3, section 2.2).

    At depth k the token at i + k is given and the one at i + k + 1 predicted, as long as the sample goes and each token on the way
    to it is one whose prediction counts. Beyond the sample token 0 is given, and nothing is predicted.

    Args:
        x: what the last layer gives, [B, s, h].
    """
    samples, seq = labels.shape
    added = torch.zeros(samples, seq, dtype=x.dtype)
    for k in range(1, shape.mtp_depths + 1):
        mine = {name.removeprefix(f"mtp.{k - 1}."): w for name, w in weights.items() if name.startswith(f"mtp.{k - 1}.")}
        inside = {name.removeprefix("layer."): w for name, w in mine.items()}
        given = torch.zeros_like(labels)
        given[:, : seq - k + 1] = labels[:, k - 1 :]
        embedded = weights["embedding.word.weight"][given]
        both = torch.cat([norm(shape, mine, "hidden_norm", x), norm(shape, mine, "embedding_norm", embedded)], dim=-1)
        last = shape.num_layers - 1
        x = both @ mine["projection.weight"].T
        seen(f"mtp.{k - 1}.projection", x)
        see = partial(_seen_of_depth, seen, f"mtp.{k - 1}.layer", seq - k + 1)
        x = layer(shape, last, inside, x, positions, documents, shape.eight_bits_of(last), see)
        seen(f"mtp.{k - 1}.layer", x)
        losses = smoothed(shape, scores_of(shape, weights, x)[:, : seq - k], labels[:, k:])
        counts = torch.ones(samples, seq - k, dtype=x.dtype)
        if mask is not None:
            for ahead in range(1, k + 1):
                counts = counts * mask[:, ahead : seq - k + ahead]
        added = added + torch.nn.functional.pad(losses * counts, (0, k))
    return shape.mtp_factor / shape.mtp_depths * added


def logits(
    shape: ReferenceShape,
    weights: Weights,
    tokens: Tensor,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    seen: Seen = by_nobody,
) -> Tensor:
    """Logits of the next token [B, s, V] for tokens [B, s]."""
    return scores_of(shape, weights, hidden_states(shape, weights, tokens, positions, documents, seen))


def scores_of(shape: ReferenceShape, weights: Weights, x: Tensor) -> Tensor:
    """Logits [B, s, V] of what a layer gives, [B, s, h]."""
    x = norm(shape, weights, "final_norm", x)
    scores = shape.output_multiplier * (x @ weights["embedding.word.weight" if shape.tied else "output.weight"].T) / shape.width
    return scores if shape.logit_cap is None else shape.logit_cap * torch.tanh(scores / shape.logit_cap)


def hidden_states(
    shape: ReferenceShape,
    weights: Weights,
    tokens: Tensor,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    seen: Seen = by_nobody,
) -> Tensor:
    """What the last layer gives [B, s, h] for tokens [B, s]."""
    x = shape.embedding_multiplier * weights["embedding.word.weight"][tokens]
    if shape.positions == "learned":
        table = weights["embedding.position.weight"]
        x = x + (table[: tokens.shape[1]] if positions is None else table[positions])
    if shape.embedding_norm:
        x = norm(shape, weights, "embedding.norm", x)
    seen("embedding", x)
    for i in range(shape.num_layers):
        own = {name.removeprefix(f"layers.{i}."): w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        x = layer(shape, i, own, x, positions, documents, shape.eight_bits_of(i), partial(_seen_within, seen, f"layers.{i}"))
        seen(f"layers.{i}", x)
    return x


def _seen_of_depth(seen: Seen, layer: str, given: int, part: str, values: Tensor) -> None:
    seen(f"{layer}.{part}", values[:, :, :given] if part == "scores" else values)  # scores of tokens that are there


def _seen_within(seen: Seen, layer: str, part: str, values: Tensor) -> None:
    seen(f"{layer}.{part}", values)


def layer(
    shape: ReferenceShape,
    number: int,
    own: Weights,
    x: Tensor,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    eight: EightBits | None = None,
    seen: Seen = by_nobody,
) -> Tensor:
    """A layer over [B, s, h].

    Args:
        number: of the layer whose kind it is.
        own: its weights.
        seen: called with what its attention and its MLP give.
    """
    before, behind = shape.norms != "post", shape.norms != "pre"
    start = x
    attend = attention if shape.latent is None else latent_attention
    attended = attend(shape, number, own, norm(shape, own, "attention_norm", x) if before else x, positions, documents, eight, seen)
    x = x + shape.residual_multiplier * (norm(shape, own, "attention_post_norm", attended) if behind else attended)
    source = start if shape.parallel else x
    source = norm(shape, own, "mlp_norm", source) if before else source
    if shape.experts is not None and shape.experts.layers[number]:
        fed = experts(shape, shape.experts, own, source, seen)
    else:
        fed = mlp(shape, own, source, eight)
    seen("attention", attended)
    seen("mlp", fed)
    return x + shape.residual_multiplier * (norm(shape, own, "mlp_post_norm", fed) if behind else fed)


def attention(
    shape: ReferenceShape,
    number: int,
    layer: Weights,
    x: Tensor,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    eight: EightBits | None = None,
    seen: Seen = by_nobody,
) -> Tensor:
    """Causal attention of a layer over [B, s, h], within documents and the layer's window."""
    batch, seq, _ = x.shape
    n, g, d = shape.heads, shape.kv_heads, shape.head_size
    groups = linear(shape, layer, "attention.qkv", x, eight).view(batch, seq, g, n // g + 2, d)
    q = groups[:, :, :, : n // g].reshape(batch, seq, n, d)
    k, v = groups[:, :, :, -2], groups[:, :, :, -1]
    if shape.qk_norm:
        if shape.qk_norm_all_heads:
            q, k = q.reshape(batch, seq, n * d), k.reshape(batch, seq, g * d)
        q, k = norm(shape, layer, "attention.q_norm", q), norm(shape, layer, "attention.k_norm", k)
        q, k = q.reshape(batch, seq, n, d), k.reshape(batch, seq, g, d)
    window = shape.window_of(number)
    if shape.is_rotated(number):
        local = window is not None and shape.local_base is not None
        q, k = rotate(shape, q, positions, local=local), rotate(shape, k, positions, local=local)
    # Every query head of a group uses the same key and value head.
    k, v = k.repeat_interleave(n // g, dim=2), v.repeat_interleave(n // g, dim=2)
    return mix(shape, number, layer, (q, k, v), documents, eight, seen)


def latent_attention(
    shape: ReferenceShape,
    number: int,
    layer: Weights,
    x: Tensor,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    eight: EightBits | None = None,
    seen: Seen = by_nobody,
) -> Tensor:
    """The same with keys and values made of a latent (DeepSeek-V2). Each head has its own plain key beside the same rotated one."""
    latent = shape.latent
    assert latent is not None

    def normed(name: str, values: Tensor) -> Tensor:
        return norm(shape, layer, f"attention.{name}", values) if shape.qk_norm else values

    if latent.query_rank is None:
        q = linear(shape, layer, "attention.q", x, eight)
    else:
        q = linear(
            shape, layer, "attention.q_up", normed("q_latent_norm", linear(shape, layer, "attention.q_down", x, eight)), eight
        )
    q = q.unflatten(-1, (shape.heads, -1))
    kv = linear(
        shape, layer, "attention.kv_up", normed("kv_latent_norm", linear(shape, layer, "attention.kv_down", x, eight)), eight
    )
    kv = kv.unflatten(-1, (shape.heads, -1))
    rotary = [q[..., latent.plain :], linear(shape, layer, "attention.k_rotary", x, eight)[:, :, None]]
    if shape.is_rotated(number):
        local = shape.window_of(number) is not None and shape.local_base is not None
        rotary = [rotate(shape, part, positions, local=local) for part in rotary]
    q = torch.cat([q[..., : latent.plain], rotary[0]], dim=-1)
    k = torch.cat([kv[..., : latent.plain], rotary[1].expand(-1, -1, shape.heads, -1)], dim=-1)
    return mix(shape, number, layer, (q, k, kv[..., latent.plain :]), documents, eight, seen)


def mix(
    shape: ReferenceShape,
    number: int,
    layer: Weights,
    heads: tuple[Tensor, Tensor, Tensor],
    documents: Tensor | None,
    eight: EightBits | None,
    seen: Seen = by_nobody,
) -> Tensor:
    """Mix values by scores, for queries, keys and values [B, s, n, ...] of as many heads, and multiply with the output matrix."""
    q, k, v = heads
    (batch, seq, n, d), window = q.shape, shape.window_of(number)
    scores = torch.einsum("bind,bjnd->bnij", q, k) * (1 / math.sqrt(d) if shape.score_scale is None else shape.score_scale)
    back = torch.arange(seq, device=q.device)[:, None] - torch.arange(seq, device=q.device)  # i - j
    hidden = back < 0 if window is None else (back < 0) | (back > window)
    if documents is not None:
        hidden = hidden | (documents[:, :, None] != documents[:, None, :])[:, None]
    seen("scores", scores.masked_fill(hidden, -math.inf).amax(dim=3))
    if shape.score_cap is not None:
        scores = shape.score_cap * torch.tanh(scores / shape.score_cap)
    scores = scores.masked_fill(hidden, -math.inf)
    if shape.sink != "none":  # one more column, of which nothing is mixed in
        sinks = layer["attention.sinks"] if shape.sink == "learned" else q.new_zeros(n)
        scores = torch.cat([scores, sinks.view(1, n, 1, 1).expand(batch, n, seq, 1)], dim=-1)
    probabilities = scores.softmax(dim=-1)[..., :seq]
    mixed = torch.einsum("bnij,bjnd->bind", probabilities, v)
    return linear(shape, layer, "attention.output", mixed.flatten(2), eight)


def rotate(shape: ReferenceShape, x: Tensor, positions: Tensor | None = None, *, local: bool = False) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of heads [B, s, heads, d] at positions [B, s], by default 0 to s - 1.

    The first rotary_percent of the channels are rotated; channel c and channel c + half of them are a pair, as in GPT-NeoX and
    Llama, or with rotary_interleaved each channel and its neighbour. `local` is by local_base, without stretching.
    """
    rotated = int(shape.head_size * shape.rotary_percent) if shape.latent is None else shape.latent.rotated
    base, stretch = (shape.local_base, None) if local else (shape.rotary_base, shape.stretch)
    assert base is not None
    found = rotary_frequencies(base, rotated, stretch, x.shape[1])
    frequencies = torch.tensor(found, dtype=x.dtype, device=x.device)
    positions = torch.arange(x.shape[1]).expand(x.shape[:2]) if positions is None else positions
    angles = (positions.to(x.dtype)[..., None] * frequencies)[:, :, None, :]  # [B, s, 1, rotated / 2]
    firsts, seconds = list(range(rotated // 2)), list(range(rotated // 2, rotated))
    if shape.rotary_interleaved:
        firsts, seconds = list(range(0, rotated, 2)), list(range(1, rotated, 2))
    first, second = x[..., firsts], x[..., seconds]
    enlarged = 1.0 if stretch is None else stretch.enlarged
    cos, sin = enlarged * angles.cos(), enlarged * angles.sin()
    turned = x.clone()
    turned[..., firsts] = first * cos - second * sin
    turned[..., seconds] = second * cos + first * sin
    return turned


def mlp(shape: ReferenceShape, layer: Weights, x: Tensor, eight: EightBits | None = None) -> Tensor:
    """The MLP over [B, s, h]."""
    up = linear(shape, layer, "mlp.up", x, eight)
    if len(layer["mlp.up.weight"].shape) == 2:
        return linear(shape, layer, "mlp.down", activated(shape.activation, up), eight)
    gate, up = up.chunk(2, dim=-1)
    if shape.clamp is not None:
        gate, up = torch.minimum(gate, torch.full_like(gate, shape.clamp)), up.clamp(-shape.clamp, shape.clamp)
    return linear(shape, layer, "mlp.down", activated(shape.activation, gate) * (up + shape.offset), eight)


def experts(shape: ReferenceShape, kind: ExpertsShape, layer: Weights, x: Tensor, seen: Seen = by_nobody) -> Tensor:
    """The experts over [B, s, h], with the shared one."""

    def one(number: int, rows: Tensor) -> Tensor:
        up, down = layer["mlp.experts.up.weight"][number], layer["mlp.experts.down.weight"][number]
        return mlp(shape, {"mlp.up.weight": up, "mlp.down.weight": down}, rows)

    y, added, _ = mixture(kind, layer, x, one)
    seen("balance", added)
    if kind.shared is None:
        return y
    shared = mlp(shape, {name.replace("mlp.shared.", "mlp."): w for name, w in layer.items() if "mlp.shared." in name}, x)
    if kind.gate:
        shared = shared / (1 + torch.exp(-(x @ layer["mlp.shared_gate.weight"].T)))
    return y + shared


def activated(name: str, x: Tensor) -> Tensor:
    """The activation function; of a gated one, that of the gate."""
    if name in ("gelu", "geglu"):
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name in ("gelu_exact", "geglu_exact"):
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if name in ("swiglu", "quick_geglu"):
        return x / (1 + torch.exp(-x * (1.0 if name == "swiglu" else 1.702)))
    return x.clamp(min=0) ** (1 if name == "relu" else 2)


def linear(shape: ReferenceShape, weights: Weights, name: str, x: Tensor, eight: EightBits | None = None) -> Tensor:
    """Apply a matrix [out, in] (or [halves, out, in], one half after the other) and perhaps a bias to x [..., in]. Where it has an
    adapter, the matrix is W + scale B A (Hu et al. 2021)."""
    weight = weights[f"{name}.weight"].flatten(0, -2)
    if f"{name}.lora_a.weight" in weights:
        weight = weight + shape.lora_scale * weights[f"{name}.lora_b.weight"].flatten(0, -2) @ weights[f"{name}.lora_a.weight"]
    y = x @ weight.T if eight is None else product(eight, x, weight)
    return y + weights[f"{name}.bias"].flatten() if f"{name}.bias" in weights else y


def norm(shape: ReferenceShape, weights: Weights, name: str, x: Tensor) -> Tensor:
    """LayerNorm or RMSNorm over the last dimension."""
    if shape.norm == "LayerNorm":
        x = x - x.mean(dim=-1, keepdim=True)
    y = x / (x.square().mean(dim=-1, keepdim=True) + shape.epsilon).sqrt()
    if f"{name}.weight" in weights:
        y = y * (1 + weights[f"{name}.weight"] if shape.zero_centred else weights[f"{name}.weight"])
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens, labels and loss mask of a global batch, each [B, s]."""


class Rules(NamedTuple):
    """What the end of a document does. It belongs to the document that it ends."""

    eod: int
    positions: bool = True
    """Positions start again at 0 after it."""
    attention: bool = True
    """No token after it attends to it or to a token before it."""
    loss: bool = True
    """What follows it need not be predicted."""


def spans(tokens: list[int], eod: int) -> list[tuple[int, int]]:
    """(first token, end) of each document of a sample."""
    found, start = [], 0
    for i, token in enumerate(tokens):
        if token == eod or i == len(tokens) - 1:
            found.append((start, i + 1))
            start = i + 1
    return found


def losses_with_rules(
    shape: ReferenceShape, weights: Weights, batch: Batch, rules: Rules, seen: Seen = by_nobody
) -> tuple[Tensor, Tensor]:
    """Cross entropy of every token of packed samples, and whether it counts: two tensors [B, s].

    Args:
        seen: called with the outputs of layers.
    """
    tokens, labels, mask = batch
    positions, documents = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for sample, row in enumerate(tokens.tolist()):
        for number, (start, end) in enumerate(spans(row, rules.eod)):
            positions[sample, start:end] = torch.arange(end - start)
            documents[sample, start:end] = number
    counted = mask * (tokens != rules.eod) if rules.loss else mask
    places, parts = positions if rules.positions else None, documents if rules.attention else None
    return token_losses(shape, weights, tokens, labels, places, parts, seen, counted), counted
