"""Rules about how a device computes: compiled layers, attention's kernel."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import Finding, change, divisors, rule, shown, try_values, without
from megatron.config.config import Config
from megatron.spec.attention_backends import AttentionCall, kernels_of
from megatron.spec.layers import context_ways, scores_of

_BACKEND = "attention_backend"
_HEADS = ("group_query_attention", "num_query_groups", "num_attention_heads", "multi_latent_attention")
_REMADE = ("layernorm", "mlp_act", "mlp")


@rule("compile_mode", reads=("compile", "compile_backend"))
def no_graph_is_replayed(config: Config, world_size: int) -> Iterator[Finding]:
    """The mode records CUDA graphs and replays them without Python. But gradients are handed to their buffers, masks seeded and
    communication started by Python within a layer."""
    if config.speed.compile_mode in ("reduce-overhead", "max-autotune"):
        nearest = [change(compile_mode="max-autotune-no-cudagraphs"), without(config, "compile_mode")]
        yield Finding(f"{shown(config, 'compile_mode')} cannot be used.", [nearest])


@rule("compile", "tensor_model_parallel_size", reads=_HEADS)
def compiled_layers_have_own_heads(config: Config, world_size: int) -> Iterator[Finding]:
    """Tensor ranks that share a key-value head exchange it in the midst of a layer, which is not in a compiled graph."""
    heads, tp = config.model.num_key_value_heads, config.parallel.tensor_model_parallel_size
    if config.speed.compile and 0 < heads < tp and not config.model.multi_latent_attention:
        yield Finding(
            f"--compile contradicts {shown(config, 'tensor_model_parallel_size')}: ranks share the {heads} key-value heads.",
            [try_values("tensor_model_parallel_size", tp, divisors(heads)), change(compile=False)],
        )


@rule("compile", "recompute_modules", reads=("recompute_granularity", "recompute_activations"))
def the_compiler_remakes_itself(config: Config, world_size: int) -> Iterator[Finding]:
    """A compiled layer chooses by itself what it keeps and what it makes again: norms and activations among it. Only attention is
    not a part of it."""
    modules = config.memory.recompute_modules
    if config.speed.compile and config.memory.recompute == "selective" and any(part in modules for part in _REMADE):
        yield Finding(
            f"--compile contradicts {shown(config, 'recompute_modules')}.",
            [change(recompute_modules=("core_attn",)), change(compile=False)],
        )


def attention_call(config: Config, *, on_cuda: bool) -> AttentionCall:
    """The attention of a run on a device."""
    model, precision = config.model, config.precision
    scores = [scores_of(model, window=window) for window in (False, True)]
    return AttentionCall(
        16 if precision.fp16 or precision.bf16 else 64 if precision.fp64 else 32,
        model.head_size,
        model.num_key_value_heads != model.num_attention_heads,
        on_cuda,
        model.attention_dropout,
        config.training.deterministic_mode,
        config.data.reset_attention_mask,
        window=any(each.reach(model.seq_length) is not None for each in scores),
        value_size=model.value_size,
        in_parts=config.parallel.context_parallel_size > 1
        and any(way != "a2a" for way in context_ways(model, config.parallel.cp_comm_type)),
        shaped=any(each.softcap is not None or each.softmax != "vanilla" for each in scores),
    )


def check_backend(config: Config, *, on_cuda: bool) -> None:
    """Refuse a kernel of attention that this device cannot run, where --device left the device open.

    Raises:
        ValueError: it cannot; says why.
    """
    if (refused := _refused(config, on_cuda=on_cuda)) is not None:
        device = "a GPU" if on_cuda else "a CPU"
        raise ValueError(f"{shown(config, _BACKEND)} cannot be used on {device}: {refused} Use auto.")


def _refused(config: Config, *, on_cuda: bool) -> str | None:
    """Why --attention-backend cannot be used on a device, as a sentence."""
    backend = config.speed.attention_backend
    if backend == "auto":
        return None
    (kernel,) = kernels_of(backend)
    obstacle = attention_call(config, on_cuda=on_cuda).obstacle(kernel)
    name = backend if backend == kernel else f"{backend} ({kernel})"
    return obstacle and f"{name} {obstacle}."


@rule(
    _BACKEND,
    reads=(
        *("device", "fp16", "bf16", "fp64", "deterministic_mode", "reset_attention_mask", "attention_dropout"),
        *("hidden_size", "num_attention_heads", "kv_channels", "group_query_attention", "num_query_groups"),
        *(
            "seq_length",
            "window_size",
            "softmax_type",
            "softmax_scale",
            "mup_base_kv_channels",
            "attn_logit_softcapping",
            "multi_latent_attention",
        ),
        *("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "context_parallel_size", "cp_comm_type", "num_layers"),
    ),
)
def a_kernel_takes_the_shapes(config: Config, world_size: int) -> Iterator[Finding]:
    """Only auto changes to another kernel."""
    device = config.parallel.device
    refused = [_refused(config, on_cuda=on_cuda) for on_cuda in ((True, False) if device == "auto" else (device == "cuda",))]
    if all(refused):
        others = [change(attention_backend=other) for other in ("flash", "math")]
        yield Finding(f"{shown(config, _BACKEND)} cannot be used: {refused[0]}", [change(attention_backend="auto"), others])
