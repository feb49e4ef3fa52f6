"""Rules about activation memory, compilation and attention kernels."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import (
    Finding,
    create_change,
    find_divisors,
    format_setting,
    require_not_above,
    reset,
    rule,
    try_values,
)
from megatron.config.config import Config
from megatron.spec.attention_backends import AttentionCall, get_kernels
from megatron.spec.layers import build_score_spec, resolve_cp_comm_types

AUTO = "auto"
_PER_STAGE = "recompute_layers_per_stage"

_MODULES = "recompute_modules"

check_recompute_num_layers = require_not_above("recompute_num_layers", "num_layers", "The model has no more layers to recompute.")
check_offload_num_layers = require_not_above("cpu_offloading_num_layers", "num_layers", "The model has no more layers to offload.")


@rule(_PER_STAGE, "pipeline_model_parallel_size", depends_on=("num_layers",))
def check_recompute_layers_per_stage(config: Config, world_size: int) -> Iterator[Finding]:
    """--recompute-layers-per-stage must list exactly one number of layers for each pipeline stage, unless it is auto."""
    memory, num_stages, max_layers = config.memory, config.parallel.pipeline_model_parallel_size, config.model.num_layers
    layers_per_stage = memory.recompute_counts
    if memory.recompute_layers_per_stage in (None, AUTO) or (
        layers_per_stage is not None and len(layers_per_stage) == num_stages and max(layers_per_stage) <= max_layers
    ):
        return
    valid = [min(num_layers, max_layers) for num_layers in layers_per_stage or ()][:num_stages]
    nearest = ",".join(map(str, [*valid, *(valid[-1:] or [1]) * (num_stages - len(valid))]))
    yield Finding(
        f"{format_setting(config, _PER_STAGE)} cannot be used.",
        [create_change(**{_PER_STAGE: nearest}), create_change(**{_PER_STAGE: AUTO}), create_change(**{_PER_STAGE: None})],
        f"It takes {AUTO}, or a number of layers, 0 to {max_layers}, for each of {num_stages} pipeline "
        f"stage{'s' * (num_stages > 1)}.",
    )


@rule("recompute_activations", "recompute_granularity")
def check_recompute_granularity(config: Config, world_size: int) -> Iterator[Finding]:
    """--recompute-activations requests selective recomputation, so it contradicts --recompute-granularity full."""
    if config.memory.recompute_activations and config.memory.recompute_granularity == "full":
        message = f"--recompute-activations contradicts {format_setting(config, 'recompute_granularity')}."
        yield Finding(message, [reset(config, "recompute_activations"), reset(config, "recompute_granularity")])


@rule(_MODULES, depends_on=("recompute_granularity", "recompute_activations"))
def check_recompute_modules(config: Config, world_size: int) -> Iterator[Finding]:
    """--recompute-modules must name at least one module, and each module only once. mlp includes mlp_act, so naming both counts as
    naming a module twice."""
    modules = config.memory.recompute_modules
    if config.memory.effective_granularity != "selective":
        return
    if not modules:
        yield Finding(
            "--recompute-modules names no module.", [reset(config, _MODULES)], "Selective recompute needs at least one module."
        )
    distinct = tuple(dict.fromkeys(module for module in modules if module != "mlp_act" or "mlp" not in modules))
    if distinct != modules:
        without_mlp = tuple(module for module in distinct if module != "mlp")
        nearest = [create_change(recompute_modules=distinct)] + [create_change(recompute_modules=(*without_mlp, "mlp_act"))] * (
            "mlp_act" in modules
        )
        yield Finding(f"{format_setting(config, _MODULES)} names a module twice.", nearest)


# ---- Rules about compilation and the attention kernel.

_BACKEND = "attention_backend"
_HEAD_SETTINGS = ("group_query_attention", "num_query_groups", "num_attention_heads", "multi_latent_attention")
_COMPILED_MODULES = ("layernorm", "mlp_act", "mlp")


@rule("compile_mode", depends_on=("compile", "compile_backend"))
def check_compile_mode(config: Config, world_size: int) -> Iterator[Finding]:
    """--compile-mode reduce-overhead and max-autotune cannot be used, because they record CUDA graphs and replay them without
    Python. But Python code within a layer passes gradients to their buffers, seeds dropout masks and starts communication."""
    if config.speed.compile_mode in ("reduce-overhead", "max-autotune"):
        nearest = [create_change(compile_mode="max-autotune-no-cudagraphs"), reset(config, "compile_mode")]
        yield Finding(f"{format_setting(config, 'compile_mode')} cannot be used.", [nearest])


@rule("compile", "tensor_model_parallel_size", depends_on=_HEAD_SETTINGS)
def check_no_shared_kv_heads_with_compile(config: Config, world_size: int) -> Iterator[Finding]:
    """With --compile, --tensor-model-parallel-size must not be above the number of key-value heads. Otherwise tensor ranks share a
    key-value head and exchange the head inside a layer, which a compiled graph does not support."""
    num_kv_heads, tp = config.model.num_key_value_heads, config.parallel.tensor_model_parallel_size
    if config.speed.compile and 0 < num_kv_heads < tp and not config.model.multi_latent_attention:
        yield Finding(
            f"--compile cannot be used with {format_setting(config, 'tensor_model_parallel_size')}: tensor ranks "
            f"share the {num_kv_heads} key-value heads.",
            [try_values("tensor_model_parallel_size", tp, find_divisors(num_kv_heads)), create_change(compile=False)],
        )


@rule("compile", "recompute_modules", depends_on=("recompute_granularity", "recompute_activations"))
def check_recompute_with_compile(config: Config, world_size: int) -> Iterator[Finding]:
    """With --compile, --recompute-modules must not name layernorm, mlp_act or mlp. The compiler decides which tensors of a compiled
    layer, including norms and activations, are stored and which are recomputed. Only attention (core_attn) is not compiled."""
    modules = config.memory.recompute_modules
    if (
        config.speed.compile
        and config.memory.effective_granularity == "selective"
        and any(module in modules for module in _COMPILED_MODULES)
    ):
        yield Finding(
            f"--compile cannot be used with {format_setting(config, 'recompute_modules')}.",
            [create_change(recompute_modules=("core_attn",)), create_change(compile=False)],
        )


def build_attention_call(config: Config, *, on_cuda: bool) -> AttentionCall:
    """Return the properties of the run's attention (bits per element, head size, dropout and so on) that decide which attention
    kernels can be used.

    Args:
        on_cuda: whether attention runs on a GPU.
    """
    model, precision = config.model, config.precision
    scores = [build_score_spec(model, has_window=window) for window in (False, True)]
    return AttentionCall(
        16 if precision.fp16 or precision.bf16 else 64 if precision.fp64 else 32,
        model.head_size,
        model.num_key_value_heads != model.num_attention_heads,
        on_cuda,
        model.attention_dropout,
        config.training.deterministic_mode,
        config.data.reset_attention_mask,
        has_window=any(score.get_effective_window(model.seq_length) is not None for score in scores),
        value_head_size=model.value_size,
        is_context_parallel=config.parallel.context_parallel_size > 1
        and any(comm_type != "a2a" for comm_type in resolve_cp_comm_types(model, config.parallel.cp_comm_type)),
        has_softcap_or_sinks=any(score.softcap is not None or score.softmax != "vanilla" for score in scores),
    )


def check_attention_backend_on_device(config: Config, *, on_cuda: bool) -> None:
    """Check that the kernel of --attention-backend supports the device of this process and the run's shapes. With --device auto,
    the device is unknown until the process has started.

    Args:
        on_cuda: whether the device is a GPU.

    Raises:
        ValueError: the kernel does not support them. The message gives the reason.
    """
    if (problem := _describe_backend_problem(config, on_cuda=on_cuda)) is not None:
        device = "a GPU" if on_cuda else "a CPU"
        raise ValueError(f"{format_setting(config, _BACKEND)} cannot be used on {device}: {problem} Use --attention-backend auto.")


def _describe_backend_problem(config: Config, *, on_cuda: bool) -> str | None:
    """Return a sentence that says why the kernel of --attention-backend cannot be used on a GPU (`on_cuda`) or a CPU; None if it
    can."""
    backend = config.speed.attention_backend
    if backend == "auto":
        return None
    (kernel,) = get_kernels(backend)
    obstacle = build_attention_call(config, on_cuda=on_cuda).find_obstacle(kernel)
    name = backend if backend == kernel else f"{backend} ({kernel})"
    return obstacle and f"{name} {obstacle}."


@rule(
    _BACKEND,
    depends_on=(
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
def check_attention_backend(config: Config, world_size: int) -> Iterator[Finding]:
    """The kernel of --attention-backend must support the device and the shapes of the run. Only the value auto falls back to
    another kernel."""
    device = config.parallel.device
    problems = [
        _describe_backend_problem(config, on_cuda=on_cuda)
        for on_cuda in ((True, False) if device == "auto" else (device == "cuda",))
    ]
    if all(problems):
        alternatives = [create_change(attention_backend=backend) for backend in ("flash", "math")]
        yield Finding(
            f"{format_setting(config, _BACKEND)} cannot be used: {problems[0]}",
            [create_change(attention_backend="auto"), alternatives],
        )
