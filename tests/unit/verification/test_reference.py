"""The reference model against independent facts: torch's own functions, finite differences, and cases solved by hand."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megatron_lab.verification.reference
from megatron_lab.verification.reference.model import (
    EodRules,
    attention,
    compute_logits,
    compute_packed_losses,
    compute_token_losses,
    mlp,
    norm,
    rotate,
)
from megatron_lab.verification.reference.rotary import RotaryScaling, compute_rotary_frequencies
from megatron_lab.verification.reference.shape import ReferenceShape, build_random_weights, build_weight_shapes, has_weight_decay
from megatron_lab.verification.reference.training import ReferenceUpdateRule, State, update_weights
from megatron_lab.verification.reference.update_rules import RuleOptions
from tests.support.reference_runs import gpt2_like, llama_like, loss_and_gradients, mean_loss, random_batches, train

# Every option occurs in one of these.
SHAPES = {
    "gpt2": gpt2_like(),
    "llama": llama_like(),
    "llama-3.1": llama_like(rope_scaling=RotaryScaling("llama3", 8.0, 8192), rotary_base=500000.0),
    "half-rotary": llama_like(rotary_percent=0.5, qk_norm=True, qkv_bias=True, tied=True),
    "layer-norm-heads": gpt2_like(qk_norm=True, activation="squared_relu", tied=False, kv_heads=1, positions="none"),
    "gated-bias": gpt2_like(activation="swiglu", num_positions=24),
}


@pytest.fixture(params=list(SHAPES.values()), ids=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> ReferenceShape:
    """Each of the shapes."""
    return request.param


def randn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_gradient_is_that_of_z_loss_and_smoothed_labels_too_and_the_value_is_not(smoothing: float) -> None:
    shape = replace(gpt2_like(), z_loss=0.3, smoothing=smoothing)
    weights, (tokens, labels, mask) = build_random_weights(shape, seed=1), random_batches(shape, 1, 4, 1, seed=2)[0]

    def minimised(shape: ReferenceShape, weights: dict[str, Tensor], batch: object) -> Tensor:
        scores = compute_logits(shape, weights, tokens)
        each = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing)
        return ((each.view(labels.shape) + 0.3 * scores.exp().sum(-1).log() ** 2) * mask).sum() / mask.sum()

    value, found = loss_and_gradients(shape, weights, (tokens, labels, mask))
    _, expected = loss_and_gradients(shape, weights, (tokens, labels, mask), minimised)
    for name in expected:
        assert_close(found[name], expected[name])
    assert value == mean_loss(replace(shape, z_loss=0.0, smoothing=0.0), weights, (tokens, labels, mask)).item()


def test_shares_no_code_with_the_framework() -> None:
    files = list(Path(megatron_lab.verification.reference.__file__).parent.glob("*.py"))
    assert {path.stem for path in files} >= {"__init__", "eight_bits", "model", "rotary", "shape", "training"}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            ours = [module for module in modules if module.split(".")[0] == "megatron"]
            assert all(module.startswith("megatron_lab.verification.reference.") for module in ours), path


def test_model_solved_by_hand() -> None:
    """One layer, one head of one channel, whose second token attends to both with weights that are known."""
    shape = ReferenceShape(
        1, hidden=1, ffn=1, heads=1, kv_heads=1, head_size=1, vocab=2, seq=2, positions="none", norm="RMSNorm", epsilon=0.0,
        activation="squared_relu", bias=False, tied=False,
    )  # fmt: skip
    one = torch.ones(1, dtype=torch.float64)
    weights = {
        "embedding.word.weight": torch.tensor([[2.0], [-3.0]], dtype=torch.float64),
        "layers.0.attention_norm.weight": one,
        "layers.0.attention.qkv.weight": torch.tensor([[1.0], [math.log(3) / 2], [5.0]], dtype=torch.float64),  # q, k, v
        "layers.0.attention.output.weight": one[None],
        "layers.0.mlp_norm.weight": one,
        "layers.0.mlp.up.weight": 4 * one[None],
        "layers.0.mlp.down.weight": one[None] / 8,
        "final_norm.weight": 7 * one,
        "output.weight": torch.tensor([[0.0], [1.0]], dtype=torch.float64),
    }
    # The norm of one channel leaves the sign: tokens 0, 1 -> 1, -1; q = 1, -1; k = (1, -1) log(3) / 2; v = 5, -5.
    # Token 0 sees itself: 2 + 5 = 7. Token 1 has scores -+log(3) / 2, weights 1/4 and 3/4: -3 + (5 - 15) / 4 = -5.5.
    # MLP: relu(4)^2 / 8 = 2 for the positive one, 0 for the other: 9 and -5.5; the final norm times 7: 7 and -7.
    expected = torch.tensor([[[0.0, 7.0], [0.0, -7.0]]], dtype=torch.float64)
    tokens = torch.tensor([[0, 1]])
    assert_close(compute_logits(shape, weights, tokens), expected)
    losses = [math.log(1 + math.exp(7)) - 7, math.log(1 + math.exp(-7)) + 7]  # of label 1
    assert_close(compute_token_losses(shape, weights, tokens, torch.tensor([[1, 1]])), torch.tensor([losses], dtype=torch.float64))


def test_windows_caps_and_sinks_by_the_sums_of_their_definition() -> None:
    """Score by score, for each token and head: what is out of reach has no share, and a sink takes one without giving a value."""
    n, d, seq, window = 4, 3, 7, 2
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "hidden": n * d,
        "ffn": 8,
        "heads": n,
        "kv_heads": 2,
        "head_size": d,
        "vocab": 9,
        "seq": seq,
    }
    shape = ReferenceShape(**sizes, positions="none", windows=(None, window), score_cap=0.7, score_scale=0.4, sink="learned")
    layer = {name[9:]: w for name, w in build_random_weights(shape, 1, std=0.5).items() if name.startswith("layers.1.")}
    layer["attention.output.weight"], layer["attention.output.bias"] = torch.eye(n * d).double(), torch.zeros(n * d).double()
    x = randn(1, seq, n * d)
    heads = F.linear(x[0], layer["attention.qkv.weight"], layer["attention.qkv.bias"]).view(seq, 2, 4, d)
    for number, reach in ((0, seq), (1, window)):
        found = attention(shape, number, layer, x)[0].view(seq, n, d)
        for i in range(seq):
            for head in range(n):
                group = heads[:, head // 2]
                seen = range(max(0, i - reach), i + 1)
                scores = [0.7 * math.tanh(0.4 * float(group[i, head % 2] @ group[j, 2]) / 0.7) for j in seen]
                total = sum(map(math.exp, scores)) + math.exp(float(layer["attention.sinks"][head]))
                shares = torch.tensor([math.exp(score) / total for score in scores], dtype=torch.float64)
                assert_close(found[i, head], shares @ group[seen.start : seen.stop, 3])


def test_attention_is_that_of_torch(shape: ReferenceShape) -> None:
    n, g, d = shape.heads, shape.kv_heads, shape.head_size
    layer = {name[9:]: w for name, w in build_random_weights(shape, 1, std=0.5).items() if name.startswith("layers.0.")}
    x = randn(2, shape.seq, shape.hidden)
    product = F.linear(x, layer["attention.qkv.weight"], layer.get("attention.qkv.bias"))
    per_group = n // g + 2
    heads = list(product.split(d, dim=-1))  # group after group: its queries, its key, its value
    q = torch.stack([heads[i] for i in range(len(heads)) if i % per_group < n // g], dim=2)
    k = torch.stack(heads[per_group - 2 :: per_group], dim=2)
    v = torch.stack(heads[per_group - 1 :: per_group], dim=2)
    if shape.qk_norm:
        q, k = norm(shape, layer, "attention.q_norm", q), norm(shape, layer, "attention.k_norm", k)
    if shape.positions == "rope":
        q, k = rotate(shape, q), rotate(shape, k)
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    expected = F.linear(mixed.flatten(2), layer["attention.output.weight"], layer.get("attention.output.bias"))
    assert_close(attention(shape, 0, layer, x), expected)


def test_grouped_queries_equal_full_heads_with_repeated_keys_and_values() -> None:
    grouped = llama_like(heads=4, kv_heads=2)
    weights = build_random_weights(grouped, 2)
    repeated = dict(weights)
    d = grouped.head_size
    for i in range(grouped.num_layers):
        name = f"layers.{i}.attention.qkv.weight"
        q0, q1, k0, v0, q2, q3, k1, v1 = weights[name].split(d)
        repeated[name] = torch.cat([q0, k0, v0, q1, k0, v0, q2, k1, v1, q3, k1, v1])
    tokens = random_batches(grouped, 1, 2, 1, seed=3)[0][0]
    assert_close(compute_logits(grouped, weights, tokens), compute_logits(replace(grouped, kv_heads=4), repeated, tokens))


def test_causal(shape: ReferenceShape) -> None:
    weights = build_random_weights(shape, 1)
    tokens = torch.arange(shape.seq)[None]
    changed = tokens.clone()
    changed[0, 10] = 50
    before, after = compute_logits(shape, weights, tokens), compute_logits(shape, weights, changed)
    assert_close(before[:, :10], after[:, :10])
    assert ((before - after)[:, 10:].abs().amax(dim=-1) > 1e-6).all()


def test_norms_are_those_of_torch() -> None:
    x, weight, bias = randn(3, 5, 16), randn(16, seed=1), randn(16, seed=2)
    weights = {"n.weight": weight, "n.bias": bias}
    layer_norm = norm(gpt2_like(epsilon=1e-2), weights, "n", x)
    assert_close(layer_norm, F.layer_norm(x, (16,), weight, bias, 1e-2))
    weights = {"n.weight": weight}
    assert_close(norm(llama_like(epsilon=1e-2), weights, "n", x), F.rms_norm(x, (16,), weight, 1e-2))
    assert_close(norm(llama_like(epsilon=1e-2, zero_centred=True), weights, "n", x), F.rms_norm(x, (16,), 1 + weight, 1e-2))
    assert_close(norm(gpt2_like(epsilon=1e-2), {}, "n", x), F.layer_norm(x, (16,), None, None, 1e-2))


ACTIVATED: dict[str, Any] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_exact": F.gelu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "swiglu": F.silu,
    "geglu": lambda x: F.gelu(x, approximate="tanh"),
    "geglu_exact": F.gelu,
    "quick_geglu": lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.mark.parametrize("activation", ACTIVATED)
def test_mlps_are_those_of_torch(activation: str) -> None:
    shape = gpt2_like(activation=activation, offset=0.5 if activation == "quick_geglu" else 0.0)
    layer = {name[9:]: w for name, w in build_random_weights(shape, 1, std=0.5).items() if name.startswith("layers.0.")}
    x = randn(2, 3, shape.hidden)
    weight, bias = layer["mlp.up.weight"], layer["mlp.up.bias"]
    if weight.dim() == 3:
        inner = ACTIVATED[activation](F.linear(x, weight[0], bias[0])) * (F.linear(x, weight[1], bias[1]) + shape.offset)
    else:
        inner = ACTIVATED[activation](F.linear(x, weight, bias))
    assert_close(mlp(shape, layer, x), F.linear(inner, layer["mlp.down.weight"], layer["mlp.down.bias"]))


def test_losses_are_torchs_cross_entropy(shape: ReferenceShape) -> None:
    weights = build_random_weights(shape, 1)
    tokens, labels, mask = batch = random_batches(shape, 1, 4, 1, seed=2)[0]
    expected = F.cross_entropy(compute_logits(shape, weights, tokens).flatten(0, 1), labels.flatten(), reduction="none").view(
        labels.shape
    )
    assert_close(compute_token_losses(shape, weights, tokens, labels), expected)
    assert_close(mean_loss(shape, weights, batch), expected[mask.bool()].mean())


def test_rotation_of_one_head_by_hand() -> None:
    """Four channels: pairs (0, 2) and (1, 3) turn by position and by position / 100."""
    shape = llama_like(head_size=4, rotary_base=10000.0)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).expand(1, 3, 1, 4)
    a, b = 2.0, 0.02  # at position 2
    expected = [
        math.cos(a) - 3 * math.sin(a),
        2 * math.cos(b) - 4 * math.sin(b),
        3 * math.cos(a) + math.sin(a),
        4 * math.cos(b) + 2 * math.sin(b),
    ]
    turned = rotate(shape, x)
    assert_close(turned[0, 0, 0], x[0, 0, 0])
    assert_close(turned[0, 2, 0], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_rotated_products_depend_on_the_distance_only(percent: float) -> None:
    shape = llama_like(rotary_percent=percent)
    q, k = randn(8).expand(1, 16, 1, 8), randn(8, seed=1).expand(1, 16, 1, 8)
    scores = torch.einsum("bind,bjnd->ij", rotate(shape, q), rotate(shape, k))
    for distance in range(-15, 16):
        diagonal = scores.diagonal(distance)
        assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert (scores[0].diff().abs() > 1e-3).all()
    if percent == 0.5:
        assert_close(rotate(shape, q)[..., 4:], q[..., 4:])


def test_llama_3_frequencies() -> None:
    """Base 500,000 and 128 channels: short wavelengths stay, long ones are stretched, between them the published mix."""
    rotated = 128
    plain = compute_rotary_frequencies(500000.0, rotated, None, 1)
    scaled = compute_rotary_frequencies(500000.0, rotated, RotaryScaling("llama3", 8.0, 8192), 1)
    kinds = set()
    for before, after in zip(plain, scaled, strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            kind, expected = "short", before
        elif wavelength > 8192 / 1:
            kind, expected = "long", before / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            kind, expected = "between", (1 - smooth) * before / 8 + smooth * before
        kinds.add(kind)
        assert after == pytest.approx(expected, rel=1e-14)
    assert kinds == {"short", "between", "long"}


def test_interpolated_positions_are_positions_divided() -> None:
    """At position 12 with a factor of 4 a head is turned as at position 3."""
    plain, stretched = llama_like(), llama_like(rope_scaling=RotaryScaling("linear", 4.0))
    x = randn(1, 16, 2, 8)
    x[:, 12] = x[:, 3]
    assert_close(rotate(stretched, x)[:, 12], rotate(plain, x)[:, 3])
    assert not torch.allclose(rotate(plain, x)[:, 12], rotate(plain, x)[:, 3])


def test_what_layers_give_is_seen(shape: ReferenceShape) -> None:
    """The parts add up to the residual stream, and the last of it gives the logits."""
    weights = build_random_weights(shape, 1)
    tokens, labels, mask = random_batches(shape, 1, 2, 1, seed=2)[0]
    seen: dict[str, Tensor] = {}
    rules = EodRules(eod=0, resets_positions=False, resets_attention=False, masks_loss=False)
    losses, kept = compute_packed_losses(shape, weights, (tokens, labels, mask), rules, seen.__setitem__)
    parts = (".scores", ".attention", ".mlp", "")
    assert list(seen) == ["embedding", *(f"layers.{i}{part}" for i in range(2) for part in parts)]
    stream = seen["embedding"]
    for i in range(2):
        stream = stream + seen[f"layers.{i}.attention"] + seen[f"layers.{i}.mlp"]
        assert_close(stream, seen[f"layers.{i}"])
    scores = norm(shape, weights, "final_norm", stream) @ weights["embedding.word.weight" if shape.tied else "output.weight"].T
    assert_close(scores, compute_logits(shape, weights, tokens))
    assert_close(losses, compute_token_losses(shape, weights, tokens, labels))
    assert torch.equal(kept, mask)


def test_gradients_agree_with_finite_differences(shape: ReferenceShape) -> None:
    """Along a random direction of each weight, by central differences."""
    weights = build_random_weights(shape, 1, std=0.3)
    batch = random_batches(shape, 1, 2, 1, seed=2)[0]
    _, gradients = loss_and_gradients(shape, weights, batch)
    assert list(gradients) == list(build_weight_shapes(shape))
    for seed, (name, gradient) in enumerate(gradients.items()):
        direction = randn(*gradient.shape, seed=seed)
        step = 1e-5 * direction
        ahead = mean_loss(shape, {**weights, name: weights[name] + step}, batch).item()
        behind = mean_loss(shape, {**weights, name: weights[name] - step}, batch).item()
        assert (ahead - behind) / 2e-5 == pytest.approx((gradient * direction).sum().item(), rel=1e-6, abs=1e-8), name


def test_the_loss_weighs_every_token_equally_over_unequal_microbatches() -> None:
    shape = gpt2_like()
    weights = build_random_weights(shape, 1)
    tokens, labels, mask = random_batches(shape, 1, 8, 2, seed=2)[0]
    counts = sorted(mask.view(4, -1).sum(dim=1).tolist())
    assert counts == [0.0, 1.0, shape.seq, 2 * shape.seq]
    sums = [
        (compute_token_losses(shape, weights, tokens[i : i + 2], labels[i : i + 2]) * mask[i : i + 2]).sum() for i in range(0, 8, 2)
    ]
    assert_close(mean_loss(shape, weights, (tokens, labels, mask)), torch.stack(sums).sum() / sum(counts))


def test_key_bias_has_no_gradient() -> None:
    """A constant added to all keys shifts all scores of a query alike: the case for which equality has an absolute scale."""
    shape = gpt2_like(heads=1, kv_heads=1, head_size=32)
    _, gradients = loss_and_gradients(shape, build_random_weights(shape, 1), random_batches(shape, 1, 2, 1, seed=2)[0])
    query, key, value = gradients["layers.0.attention.qkv.bias"].split(32)
    assert key.norm() < 1e-12 * query.norm() < value.norm()


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("clip", [None, 0.1, 1e9])
def test_training_is_that_of_torch(optimizer: str, clip: float | None) -> None:
    """Five steps by torch.optim and clip_grad_norm_ on the same gradients."""
    shape = llama_like(qkv_bias=True, qk_norm=True)
    start = build_random_weights(shape, 1)
    batches, rates = random_batches(shape, 5, 4, 1, seed=2), [0.01, 0.02, 0.015, 0.01, 0.005]
    rule: dict[str, Any] = {"optimizer": optimizer, "betas": (0.8, 0.95), "eps": 1e-6, "numbers": RuleOptions(momentum=0.9)}
    run = train(shape, start, batches, lr=rates, weight_decay=0.1, clip=clip, **rule)

    params = {name: w.clone().requires_grad_() for name, w in start.items()}
    groups = [
        {"params": [p for name, p in params.items() if has_weight_decay(name)], "weight_decay": 0.1},
        {"params": [p for name, p in params.items() if not has_weight_decay(name)], "weight_decay": 0.0},
    ]
    if optimizer == "adam":
        theirs: torch.optim.Optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-6)
    else:
        theirs = torch.optim.SGD(groups, momentum=0.9)
    for step, (batch, rate) in enumerate(zip(batches, rates, strict=True)):
        theirs.zero_grad()
        loss = mean_loss(shape, params, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params.values(), clip or math.inf)
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
        assert run.losses[step] == pytest.approx(loss.item(), rel=1e-13)
        assert run.grad_norms[step] == pytest.approx(norm.item(), rel=1e-13)
    for name, p in params.items():
        assert (run.weights_after[name] - p).norm() <= 1e-12 * p.norm(), name
    assert run.losses[-1] < run.losses[0]
    assert (clip == 0.1) == (run.grad_norms[0] > (clip or math.inf)), "the case of 0.1 clips"


def test_first_gradients_are_before_clipping_and_start_weights_stay() -> None:
    shape = gpt2_like()
    start = build_random_weights(shape, 1)
    copies = {name: w.clone() for name, w in start.items()}
    batches = random_batches(shape, 2, 2, 1, seed=2)
    run = train(shape, start, batches, lr=0.01, clip=1e-3)
    _, gradients = loss_and_gradients(shape, start, batches[0])
    assert all(torch.equal(run.first_gradients[name], g) for name, g in gradients.items())
    assert all(torch.equal(start[name], w) for name, w in copies.items())
    assert set(run.weights_after) == set(start)


def test_decay_goes_to_matrices_and_embeddings_only() -> None:
    names = build_weight_shapes(replace(gpt2_like(), qk_norm=True, tied=False))
    matrices = {name for name, size in names.items() if len(size) > 1}
    assert {name for name in names if has_weight_decay(name)} == matrices
    gated = build_weight_shapes(gpt2_like(activation="swiglu"))
    assert gated["layers.0.mlp.up.bias"] == (2, 64) and not has_weight_decay("layers.0.mlp.up.bias")


def test_weight_names_and_shapes() -> None:
    assert build_weight_shapes(llama_like(num_layers=1, ffn=48)) == {
        "embedding.word.weight": (64, 32),
        "layers.0.attention_norm.weight": (32,),
        "layers.0.attention.qkv.weight": (64, 32),
        "layers.0.attention.output.weight": (32, 32),
        "layers.0.mlp_norm.weight": (32,),
        "layers.0.mlp.up.weight": (2, 48, 32),
        "layers.0.mlp.down.weight": (32, 48),
        "final_norm.weight": (32,),
        "output.weight": (64, 32),
    }
    gpt2 = build_weight_shapes(gpt2_like(num_layers=1, num_positions=20, qk_norm=True))
    assert gpt2["embedding.position.weight"] == (20, 32)
    assert gpt2["layers.0.attention.qkv.bias"] == (96,)
    assert gpt2["layers.0.attention.k_norm.bias"] == (8,)
    assert "output.weight" not in gpt2


def test_random_inputs_follow_from_the_seed() -> None:
    shape = gpt2_like()
    first, again, other = build_random_weights(shape, 1), build_random_weights(shape, 1), build_random_weights(shape, 2)
    assert all(torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name]) for name in first)
    batches, more = random_batches(shape, 2, 8, 2, seed=3), random_batches(shape, 2, 8, 2, seed=3)
    assert all(torch.equal(a, b) for one, two in zip(batches, more, strict=True) for a, b in zip(one, two, strict=True))
    assert not torch.equal(batches[0][0], batches[1][0])
    tokens, labels, _ = batches[0]
    assert torch.equal(tokens[:, 1:], labels[:, :-1]) and tokens.min() >= 0 and tokens.max() < shape.vocab


def test_an_expert_chosen_as_often_as_the_mean_is_not_moved() -> None:
    """What autograd adds up of fractions is 0 but for rounding; random lines found it."""
    name = "layers.0.mlp.router.bias"
    state = State({name: torch.zeros(4, dtype=torch.float64)})
    update_weights(
        state,
        {name: torch.tensor([-5.5e-17, 1e-16, 0.25, -1e-3], dtype=torch.float64)},
        ReferenceUpdateRule(bias_update_rate=0.5),
        1.0,
        0.0,
    )
    assert state.weights[name].tolist() == [0.0, 0.0, -0.5, 0.5]
