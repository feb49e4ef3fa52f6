"""Forward pass of the reference model in plain tensor operations. A sample may contain several documents.

Shapes: B sequences, s tokens in each, h hidden size, n query heads, g key-value heads, d head size, f FFN size, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lab.verification.reference.eight_bits import Fp8Spec, fp8_linear
from megatron_lab.verification.reference.experts import ExpertsShape, combine_experts, compute_count_term, mark_data
from megatron_lab.verification.reference.rotary import compute_rotary_frequencies
from megatron_lab.verification.reference.shape import ReferenceShape, Weights

OutputHook = Callable[[str, Tensor], None]
"""Callback (name, tensor) for intermediate results.

It gets the outputs [B, s, h] of the embedding, of each layer ("layers.3") and of its attention and MLP ("layers.3.attention",
"layers.3.mlp"), and of the projection and layer of each MTP depth. ("layers.3.scores", tensor) is the largest attention score
of each head and query [B, n, s], before any cap; minus infinity for padding. ("layers.3.balance", tensor) is the router loss of
the layer's experts, as a mean over the microbatches. ("layers.3.counts", tensor) is the result of `compute_count_term`.
"""


def no_hook(name: str, values: Tensor) -> None:
    """Do nothing. This is the default of arguments that take a callback for intermediate results."""


class RouterLossHook:
    """Callback for the outputs of modules. It sums the router losses of all layers and passes all other outputs to another
    callback, `hook`."""

    def __init__(self, hook: OutputHook = no_hook) -> None:
        self._hook = hook
        self.total = torch.zeros((), dtype=torch.float64)
        self.count_terms: dict[str, Tensor] = {}
        """Result of `compute_count_term` for each layer that has one, by name."""

    def __call__(self, name: str, values: Tensor) -> None:
        if name.endswith(".balance"):
            self.total = self.total + values
        elif name.endswith(".counts"):
            self.count_terms[name] = values
        else:
            self._hook(name, values)

    @property
    def gradient_only(self) -> Tensor:
        """Sum of the router losses minus the same value without gradient: zero, but with the gradient of the sum. Added to the
        loss, it changes only the gradients. It includes the terms for weights that are updated from expert counts, as for a global
        batch of which all samples were processed at once."""
        count_terms = [term / num_assignments.clamp(min=1) for term, num_assignments in self.count_terms.values()]
        return sum(count_terms, self.total - self.total.detach())


def compute_token_losses(
    shape: ReferenceShape,
    weights: Weights,
    tokens: Tensor,
    labels: Tensor,
    positions: Tensor | None = None,
    document_ids: Tensor | None = None,
    hook: OutputHook = no_hook,
    mask: Tensor | None = None,
    data_lengths: list[int] | None = None,
) -> Tensor:
    """Compute the cross entropy of each token [B, s], for tokens and labels [B, s].

    Its value is the plain cross entropy. Its gradient is that of the full training loss, which adds label smoothing, z-loss and
    multi-token prediction.

    Args:
        positions: position of each token [B, s]; by default 0 to s - 1.
        document_ids: index of each token's document [B, s]; tokens attend only within their document. By default each sample is one
            document.
        hook: called with the outputs of layers.
        mask: loss mask [B, s]; by default all tokens count. It limits which tokens multi-token prediction predicts.
        data_lengths: number of tokens of each sample before its padding, including the last label; None for no padding.
    """
    x = compute_hidden_states(shape, weights, tokens, positions, document_ids, hook, data_lengths)
    logits = project_to_vocab(shape, weights, x)
    log_z = logits.logsumexp(dim=-1)
    cross_entropy = log_z - logits.gather(-1, labels[..., None])[..., 0]
    objective = smoothed_cross_entropy(shape, logits, labels) + shape.z_loss * log_z.square()
    if shape.mtp_depths:
        objective = objective + compute_mtp_losses(shape, weights, x, labels, positions, document_ids, mask, hook, data_lengths)
    return cross_entropy.detach() + (
        objective - objective.detach()
    )  # the value of the cross entropy, the gradient of the objective


def smoothed_cross_entropy(shape: ReferenceShape, logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross entropy [B, s] with label smoothing: a share of each label's probability is spread evenly over the
    vocabulary.

    Args:
        logits: [B, s, V].
        labels: [B, s].
    """
    nll = logits.logsumexp(dim=-1)[..., None] - logits
    return (1 - shape.smoothing) * nll.gather(-1, labels[..., None])[..., 0] + shape.smoothing * nll.mean(dim=-1)


def compute_mtp_losses(
    shape: ReferenceShape,
    weights: Weights,
    x: Tensor,
    labels: Tensor,
    positions: Tensor | None,
    document_ids: Tensor | None,
    mask: Tensor | None,
    hook: OutputHook = no_hook,
    data_lengths: list[int] | None = None,
) -> Tensor:
    """Compute the multi-token-prediction (MTP) loss of each position [B, s], multiplied by its weight in the training loss
    (DeepSeek-V3, section 2.2).

    At depth k, counted from 1, the MTP layer at position i reads the token i + k and predicts the token i + k + 1. The prediction
    counts only if it lies within the sample and the loss mask includes all labels up to it. Beyond the end of the sample the layer
    reads token 0 and predicts nothing.

    Args:
        x: output of the last layer [B, s, h].
        labels: [B, s].
        data_lengths: number of tokens of each sample before its padding, including the last label; None for no padding.
    """
    samples, seq = labels.shape
    total = torch.zeros(samples, seq, dtype=x.dtype)
    for depth in range(1, shape.mtp_depths + 1):
        mtp_weights = {
            name.removeprefix(f"mtp.{depth - 1}."): w for name, w in weights.items() if name.startswith(f"mtp.{depth - 1}.")
        }
        layer_weights = {name.removeprefix("layer."): w for name, w in mtp_weights.items()}
        input_tokens = torch.zeros_like(labels)
        input_tokens[:, : seq - depth + 1] = labels[:, depth - 1 :]
        embeddings = weights["embedding.word.weight"][input_tokens]
        mtp_input = torch.cat(
            [norm(shape, mtp_weights, "hidden_norm", x), norm(shape, mtp_weights, "embedding_norm", embeddings)], dim=-1
        )
        last = shape.num_layers - 1
        x = mtp_input @ mtp_weights["projection.weight"].T
        hook(f"mtp.{depth - 1}.projection", x)
        layer_hook = partial(_call_mtp_hook, hook, f"mtp.{depth - 1}.layer", seq - depth + 1)
        is_data = None if data_lengths is None else mark_data(data_lengths, seq, depth)
        x = layer(shape, last, layer_weights, x, positions, document_ids, shape.get_fp8(last), layer_hook, is_data)
        hook(f"mtp.{depth - 1}.layer", x)
        losses = smoothed_cross_entropy(shape, project_to_vocab(shape, weights, x)[:, : seq - depth], labels[:, depth:])
        is_counted = torch.ones(samples, seq - depth, dtype=x.dtype)
        if mask is not None:
            for distance in range(1, depth + 1):
                is_counted = is_counted * mask[:, distance : seq - depth + distance]
        total = total + torch.nn.functional.pad(losses * is_counted, (0, depth))
    return shape.mtp_factor / shape.mtp_depths * total


def compute_logits(
    shape: ReferenceShape,
    weights: Weights,
    tokens: Tensor,
    positions: Tensor | None = None,
    document_ids: Tensor | None = None,
    hook: OutputHook = no_hook,
) -> Tensor:
    """Compute the logits [B, s, V] with which the model predicts, at each position, the token that follows.

    Args:
        tokens: [B, s].
    """
    return project_to_vocab(shape, weights, compute_hidden_states(shape, weights, tokens, positions, document_ids, hook))


def project_to_vocab(shape: ReferenceShape, weights: Weights, x: Tensor) -> Tensor:
    """Apply the final norm and the output projection: compute logits [B, s, V] from the output of the last layer [B, s, h]."""
    x = norm(shape, weights, "final_norm", x)
    logits = (
        shape.output_multiplier
        * (x @ weights["embedding.word.weight" if shape.tied else "output.weight"].T)
        / shape.width_multiplier
    )
    return logits if shape.logit_cap is None else shape.logit_cap * torch.tanh(logits / shape.logit_cap)


def compute_hidden_states(
    shape: ReferenceShape,
    weights: Weights,
    tokens: Tensor,
    positions: Tensor | None = None,
    document_ids: Tensor | None = None,
    hook: OutputHook = no_hook,
    data_lengths: list[int] | None = None,
) -> Tensor:
    """Apply the embedding and all layers to tokens [B, s], and return the output of the last layer [B, s, h]."""
    is_data = None if data_lengths is None else mark_data(data_lengths, tokens.shape[1])
    x = shape.embedding_multiplier * weights["embedding.word.weight"][tokens]
    if shape.positions == "learned":
        position_embeddings = weights["embedding.position.weight"]
        x = x + (position_embeddings[: tokens.shape[1]] if positions is None else position_embeddings[positions])
    if shape.embedding_norm:
        x = norm(shape, weights, "embedding.norm", x)
    hook("embedding", x)
    for layer_index in range(shape.num_layers):
        layer_weights = {
            name.removeprefix(f"layers.{layer_index}."): w
            for name, w in weights.items()
            if name.startswith(f"layers.{layer_index}.")
        }
        x = layer(
            shape,
            layer_index,
            layer_weights,
            x,
            positions,
            document_ids,
            shape.get_fp8(layer_index),
            partial(_call_layer_hook, hook, f"layers.{layer_index}"),
            is_data,
        )
        hook(f"layers.{layer_index}", x)
    return x


def _call_mtp_hook(hook: OutputHook, layer_name: str, num_tokens: int, output_name: str, values: Tensor) -> None:
    # Of the attention scores, keep only queries that read a token of the sample.
    hook(f"{layer_name}.{output_name}", values[:, :, :num_tokens] if output_name == "scores" else values)


def _mask_scores(hook: OutputHook, is_data: Tensor, output_name: str, values: Tensor) -> None:
    # Of the attention scores, keep only queries that are not padding.
    hook(output_name, values.masked_fill(~is_data[:, None], -math.inf) if output_name == "scores" else values)


def _call_layer_hook(hook: OutputHook, layer_name: str, output_name: str, values: Tensor) -> None:
    hook(f"{layer_name}.{output_name}", values)


def layer(
    shape: ReferenceShape,
    layer_index: int,
    weights: Weights,
    x: Tensor,
    positions: Tensor | None = None,
    document_ids: Tensor | None = None,
    fp8: Fp8Spec | None = None,
    hook: OutputHook = no_hook,
    is_data: Tensor | None = None,
) -> Tensor:
    """Apply a transformer layer to its input x [B, s, h].

    Args:
        layer_index: index of the layer, which determines its window, rotary positions and experts.
        weights: weights of the layer.
        hook: called with the outputs of attention and MLP.
        is_data: whether each token is data, not padding, bool [B, s]; None for no padding.
    """
    has_input_norm, has_output_norm = shape.norms != "post", shape.norms != "pre"
    layer_input = x
    attention_fn = attention if shape.latent is None else latent_attention
    attention_output = attention_fn(
        shape,
        layer_index,
        weights,
        norm(shape, weights, "attention_norm", x) if has_input_norm else x,
        positions,
        document_ids,
        fp8,
        hook if is_data is None else partial(_mask_scores, hook, is_data),
    )
    x = x + shape.residual_multiplier * (
        norm(shape, weights, "attention_post_norm", attention_output) if has_output_norm else attention_output
    )
    mlp_input = layer_input if shape.parallel else x
    mlp_input = norm(shape, weights, "mlp_norm", mlp_input) if has_input_norm else mlp_input
    if shape.experts is not None and shape.experts.layers[layer_index]:
        mlp_output = moe(shape, shape.experts, weights, mlp_input, hook, is_data)
    else:
        mlp_output = mlp(shape, weights, mlp_input, fp8)
    hook("attention", attention_output)
    hook("mlp", mlp_output)
    return x + shape.residual_multiplier * (norm(shape, weights, "mlp_post_norm", mlp_output) if has_output_norm else mlp_output)


def attention(
    shape: ReferenceShape,
    layer_index: int,
    weights: Weights,
    x: Tensor,
    positions: Tensor | None = None,
    document_ids: Tensor | None = None,
    fp8: Fp8Spec | None = None,
    hook: OutputHook = no_hook,
) -> Tensor:
    """Apply the causal attention of a layer to its input x [B, s, h]. Tokens attend only within their document and the layer's
    window."""
    batch, seq, _ = x.shape
    n, g, d = shape.heads, shape.kv_heads, shape.head_size
    qkv = linear(shape, weights, "attention.qkv", x, fp8).view(batch, seq, g, n // g + 2, d)
    q = qkv[:, :, :, : n // g].reshape(batch, seq, n, d)
    k, v = qkv[:, :, :, -2], qkv[:, :, :, -1]
    if shape.qk_norm:
        if shape.qk_norm_all_heads:
            q, k = q.reshape(batch, seq, n * d), k.reshape(batch, seq, g * d)
        q, k = norm(shape, weights, "attention.q_norm", q), norm(shape, weights, "attention.k_norm", k)
        q, k = q.reshape(batch, seq, n, d), k.reshape(batch, seq, g, d)
    window = shape.get_window(layer_index)
    if shape.is_rotated(layer_index):
        is_local = window is not None and shape.local_base is not None
        q, k = rotate(shape, q, positions, is_local=is_local), rotate(shape, k, positions, is_local=is_local)
    # All query heads of a group share a key and a value head.
    k, v = k.repeat_interleave(n // g, dim=2), v.repeat_interleave(n // g, dim=2)
    return dot_product_attention(shape, layer_index, weights, (q, k, v), document_ids, fp8, hook)


def latent_attention(
    shape: ReferenceShape,
    layer_index: int,
    weights: Weights,
    x: Tensor,
    positions: Tensor | None = None,
    document_ids: Tensor | None = None,
    fp8: Fp8Spec | None = None,
    hook: OutputHook = no_hook,
) -> Tensor:
    """Apply multi-head latent attention (DeepSeek-V2) to the input x [B, s, h] of a layer: keys and values are projections of a
    latent.

    Each head has its own key channels without rotary positions; the rotated key channels are shared by all heads.
    """
    latent_shape = shape.latent
    assert latent_shape is not None

    def apply_norm(name: str, values: Tensor) -> Tensor:
        return norm(shape, weights, f"attention.{name}", values) if shape.qk_norm else values

    if latent_shape.q_lora_rank is None:
        q = linear(shape, weights, "attention.q", x, fp8)
    else:
        q = linear(
            shape, weights, "attention.q_up", apply_norm("q_latent_norm", linear(shape, weights, "attention.q_down", x, fp8)), fp8
        )
    q = q.unflatten(-1, (shape.heads, -1))
    kv = linear(
        shape, weights, "attention.kv_up", apply_norm("kv_latent_norm", linear(shape, weights, "attention.kv_down", x, fp8)), fp8
    )
    kv = kv.unflatten(-1, (shape.heads, -1))
    rotary_parts = [q[..., latent_shape.qk_head_dim :], linear(shape, weights, "attention.k_rotary", x, fp8)[:, :, None]]
    if shape.is_rotated(layer_index):
        is_local = shape.get_window(layer_index) is not None and shape.local_base is not None
        rotary_parts = [rotate(shape, x_rotary, positions, is_local=is_local) for x_rotary in rotary_parts]
    q = torch.cat([q[..., : latent_shape.qk_head_dim], rotary_parts[0]], dim=-1)
    k = torch.cat([kv[..., : latent_shape.qk_head_dim], rotary_parts[1].expand(-1, -1, shape.heads, -1)], dim=-1)
    return dot_product_attention(shape, layer_index, weights, (q, k, kv[..., latent_shape.qk_head_dim :]), document_ids, fp8, hook)


def dot_product_attention(
    shape: ReferenceShape,
    layer_index: int,
    weights: Weights,
    heads: tuple[Tensor, Tensor, Tensor],
    document_ids: Tensor | None,
    fp8: Fp8Spec | None,
    hook: OutputHook = no_hook,
) -> Tensor:
    """Apply scaled dot-product attention, and then the output projection. Return [B, s, h].

    Args:
        heads: queries, keys and values [B, s, n, channels of a head].
    """
    q, k, v = heads
    (batch, seq, n, d), window = q.shape, shape.get_window(layer_index)
    scores = torch.einsum("bind,bjnd->bnij", q, k) * (1 / math.sqrt(d) if shape.score_scale is None else shape.score_scale)
    distance = torch.arange(seq, device=q.device)[:, None] - torch.arange(seq, device=q.device)  # i - j
    is_masked = distance < 0 if window is None else (distance < 0) | (distance > window)
    if document_ids is not None:
        is_masked = is_masked | (document_ids[:, :, None] != document_ids[:, None, :])[:, None]
    hook("scores", scores.masked_fill(is_masked, -math.inf).amax(dim=3))
    if shape.score_cap is not None:
        scores = shape.score_cap * torch.tanh(scores / shape.score_cap)
    scores = scores.masked_fill(is_masked, -math.inf)
    if shape.sink != "none":  # an additional column without a value
        sink_logits = weights["attention.sinks"] if shape.sink == "learned" else q.new_zeros(n)
        scores = torch.cat([scores, sink_logits.view(1, n, 1, 1).expand(batch, n, seq, 1)], dim=-1)
    probabilities = scores.softmax(dim=-1)[..., :seq]
    outputs = torch.einsum("bnij,bjnd->bind", probabilities, v)
    return linear(shape, weights, "attention.output", outputs.flatten(2), fp8)


def rotate(shape: ReferenceShape, x: Tensor, positions: Tensor | None = None, *, is_local: bool = False) -> Tensor:
    """Apply rotary position embedding (Su et al. 2021) to heads x [B, s, heads, d].

    The first `rotary_percent` of the channels are rotated. Channel c forms a pair with channel c + half of the number of rotated
    channels, as in GPT-NeoX and Llama; with `rotary_interleaved`, neighboring channels form a pair.

    Args:
        positions: position of each token [B, s]; by default 0 to s - 1.
        is_local: use the rotary base of layers with a window, `local_base`, and do not scale the frequencies.
    """
    num_rotary_channels = int(shape.head_size * shape.rotary_percent) if shape.latent is None else shape.latent.qk_pos_emb_head_dim
    base, rope_scaling = (shape.local_base, None) if is_local else (shape.rotary_base, shape.rope_scaling)
    assert base is not None
    frequency_list = compute_rotary_frequencies(base, num_rotary_channels, rope_scaling, x.shape[1])
    frequencies = torch.tensor(frequency_list, dtype=x.dtype, device=x.device)
    positions = torch.arange(x.shape[1]).expand(x.shape[:2]) if positions is None else positions
    angles = (positions.to(x.dtype)[..., None] * frequencies)[:, :, None, :]  # [B, s, 1, rotated / 2]
    first_channels, second_channels = (
        list(range(num_rotary_channels // 2)),
        list(range(num_rotary_channels // 2, num_rotary_channels)),
    )
    if shape.rotary_interleaved:
        first_channels, second_channels = list(range(0, num_rotary_channels, 2)), list(range(1, num_rotary_channels, 2))
    first, second = x[..., first_channels], x[..., second_channels]
    attention_factor = 1.0 if rope_scaling is None else rope_scaling.attention_factor
    cos, sin = attention_factor * angles.cos(), attention_factor * angles.sin()
    out = x.clone()
    out[..., first_channels] = first * cos - second * sin
    out[..., second_channels] = second * cos + first * sin
    return out


def mlp(shape: ReferenceShape, weights: Weights, x: Tensor, fp8: Fp8Spec | None = None) -> Tensor:
    """Apply the MLP to x [B, s, h]."""
    up = linear(shape, weights, "mlp.up", x, fp8)
    if len(weights["mlp.up.weight"].shape) == 2:
        return linear(shape, weights, "mlp.down", activate(shape.activation, up), fp8)
    gate, up = up.chunk(2, dim=-1)
    if shape.clamp is not None:
        gate, up = torch.minimum(gate, torch.full_like(gate, shape.clamp)), up.clamp(-shape.clamp, shape.clamp)
    return linear(shape, weights, "mlp.down", activate(shape.activation, gate) * (up + shape.offset), fp8)


def moe(
    shape: ReferenceShape,
    experts_shape: ExpertsShape,
    weights: Weights,
    x: Tensor,
    hook: OutputHook = no_hook,
    is_data: Tensor | None = None,
) -> Tensor:
    """Apply the experts of a mixture-of-experts layer, including the shared expert, to x [B, s, h]. Only the shared expert
    processes padding."""

    def apply_expert(expert_index: int, rows: Tensor) -> Tensor:
        up, down = weights["mlp.experts.up.weight"][expert_index], weights["mlp.experts.down.weight"][expert_index]
        return mlp(shape, {"mlp.up.weight": up, "mlp.down.weight": down}, rows)

    y, router_loss, expert_ids = combine_experts(experts_shape, weights, x, apply_expert, is_data)
    hook("balance", router_loss)
    if (count_term := compute_count_term(experts_shape, weights, expert_ids)) is not None:
        hook("counts", count_term)
    if experts_shape.shared_ffn_size is None:
        return y
    shared_output = mlp(shape, {name.replace("mlp.shared.", "mlp."): w for name, w in weights.items() if "mlp.shared." in name}, x)
    if experts_shape.has_shared_gate:
        shared_output = shared_output / (1 + torch.exp(-(x @ weights["mlp.shared_gate.weight"].T)))
    return y + shared_output


def activate(name: str, x: Tensor) -> Tensor:
    """Apply the activation function with this name to x. In a gated MLP, x is the gate."""
    if name in ("gelu", "geglu"):
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name in ("gelu_exact", "geglu_exact"):
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if name in ("swiglu", "quick_geglu"):
        return x / (1 + torch.exp(-x * (1.0 if name == "swiglu" else 1.702)))
    return x.clamp(min=0) ** (1 if name == "relu" else 2)


def linear(shape: ReferenceShape, weights: Weights, name: str, x: Tensor, fp8: Fp8Spec | None = None) -> Tensor:
    """Apply a linear layer to x [..., in] and return [..., out]; `in` and `out` are the numbers of input and output features. The
    bias is added if there is one.

    The weight W is [out, in]. In a gated MLP, it is [2, out/2, in], gate and up projection, which are concatenated. With a LoRA
    adapter, W + scale x B x A replaces W (Hu et al. 2021).

    Args:
        name: name of the layer in `weights`, such as "mlp.up".
    """
    weight = weights[f"{name}.weight"].flatten(0, -2)
    if f"{name}.lora_a.weight" in weights:
        weight = weight + shape.lora_scale * weights[f"{name}.lora_b.weight"].flatten(0, -2) @ weights[f"{name}.lora_a.weight"]
    y = x @ weight.T if fp8 is None else fp8_linear(fp8, x, weight)
    return y + weights[f"{name}.bias"].flatten() if f"{name}.bias" in weights else y


def norm(shape: ReferenceShape, weights: Weights, name: str, x: Tensor) -> Tensor:
    """Apply LayerNorm or RMSNorm over the last dimension of x. `name` is the name of the norm in `weights`, such as "mlp_norm"."""
    if shape.norm == "LayerNorm":
        x = x - x.mean(dim=-1, keepdim=True)
    y = x / (x.square().mean(dim=-1, keepdim=True) + shape.epsilon).sqrt()
    if f"{name}.weight" in weights:
        y = y * (1 + weights[f"{name}.weight"] if shape.zero_centred else weights[f"{name}.weight"])
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens, labels and loss mask of some samples, each [B, s]."""


class EodRules(NamedTuple):
    """Effects of an end-of-document token (EOD) on positions, attention and loss. The EOD token belongs to the document that it
    ends."""

    eod: int
    resets_positions: bool = True
    """Restart positions at 0 after the EOD token."""
    resets_attention: bool = True
    """Prevent later tokens from attending to the EOD token and to tokens before it."""
    masks_loss: bool = True
    """Exclude from the loss the prediction that is made at the EOD token: the first token of the next document."""


def split_documents(tokens: list[int], eod: int) -> list[tuple[int, int]]:
    """Return the token range (start, end) of each document of a sample; `eod` is the id of the token that ends a document."""
    documents, start = [], 0
    for i, token in enumerate(tokens):
        if token == eod or i == len(tokens) - 1:
            documents.append((start, i + 1))
            start = i + 1
    return documents


def compute_packed_losses(
    shape: ReferenceShape,
    weights: Weights,
    batch: Batch,
    eod_rules: EodRules,
    hook: OutputHook = no_hook,
    data_lengths: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the cross entropy of each token of samples that contain several documents. Return the cross entropy and the mask of
    the tokens that count in the loss, both [B, s].

    Args:
        batch: tokens, labels and loss mask.
        eod_rules: effects of an end-of-document token on positions, attention and loss.
        hook: called with the outputs of layers.
        data_lengths: number of tokens of each sample before its padding, including the last label; None for no padding. The padding
            of a sample is one more document.
    """
    tokens, labels, mask = batch
    positions, document_ids = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for sample, row in enumerate(tokens.tolist()):
        length = len(row) if data_lengths is None else min(data_lengths[sample], len(row))
        documents = split_documents(row[:length], eod_rules.eod)
        for document_index, (start, end) in enumerate([*documents, (length, len(row))]):
            positions[sample, start:end] = torch.arange(end - start)
            document_ids[sample, start:end] = document_index
    counted_mask = mask * (tokens != eod_rules.eod) if eod_rules.masks_loss else mask
    used_positions, used_document_ids = (
        positions if eod_rules.resets_positions else None,
        document_ids if eod_rules.resets_attention else None,
    )
    losses = compute_token_losses(
        shape, weights, tokens, labels, used_positions, used_document_ids, hook, counted_mask, data_lengths
    )
    return losses, counted_mask
