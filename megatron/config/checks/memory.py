"""Rules about activation memory."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import Finding, at_most, change, divisors, rule, shown, try_values, without
from megatron.config.config import Config
from megatron.spec.attention_backends import AttentionCall, kernels_of
from megatron.spec.layers import context_ways, scores_of

AUTO = "auto"
_BY_STAGE = "recompute_layers_per_stage"

_MODULES = "recompute_modules"

groups_within_the_model = at_most("recompute_num_layers", "num_layers", "The model has no more layers to compute again.")
moved_within_the_model = at_most("cpu_offloading_num_layers", "num_layers", "The model has no more layers to move to host memory.")


@rule(_BY_STAGE, "pipeline_model_parallel_size", reads=("num_layers",))
def every_stage_has_its_number(config: Config, world_size: int) -> Iterator[Finding]:
    """One number of layers for each pipeline stage."""
    memory, stages, layers = config.memory, config.parallel.pipeline_model_parallel_size, config.model.num_layers
    numbers = memory.recomputed_by_stage
    if memory.recompute_layers_per_stage in (None, AUTO) or (
        numbers is not None and len(numbers) == stages and max(numbers) <= layers
    ):
        return
    kept = [min(number, layers) for number in numbers or ()][:stages]
    nearest = ",".join(map(str, [*kept, *(kept[-1:] or [1]) * (stages - len(kept))]))
    yield Finding(
        f"{shown(config, _BY_STAGE)} cannot be used.",
        [change(**{_BY_STAGE: nearest}), change(**{_BY_STAGE: AUTO}), change(**{_BY_STAGE: None})],
        f"It takes {AUTO}, or a number of layers, 0 to {layers}, for each of {stages} pipeline stage{'s' * (stages > 1)}.",
    )


@rule("recompute_activations", "recompute_granularity")
def one_granularity(config: Config, world_size: int) -> Iterator[Finding]:
    """--recompute-activations is selective recompute."""
    if config.memory.recompute_activations and config.memory.recompute_granularity == "full":
        message = f"--recompute-activations contradicts {shown(config, 'recompute_granularity')}."
        yield Finding(message, [without(config, "recompute_activations"), without(config, "recompute_granularity")])


@rule(_MODULES, reads=("recompute_granularity", "recompute_activations"))
def parts_are_told_once(config: Config, world_size: int) -> Iterator[Finding]:
    """Each part is computed again once: mlp takes its activation with it."""
    modules = config.memory.recompute_modules
    if config.memory.recompute != "selective":
        return
    if not modules:
        yield Finding("--recompute-modules names no part.", [without(config, _MODULES)], "Selective recompute takes at least one.")
    kept = tuple(dict.fromkeys(part for part in modules if part != "mlp_act" or "mlp" not in modules))
    if kept != modules:
        others = tuple(part for part in kept if part != "mlp")
        nearest = [change(recompute_modules=kept)] + [change(recompute_modules=(*others, "mlp_act"))] * ("mlp_act" in modules)
        yield Finding(f"{shown(config, _MODULES)} names a part twice.", nearest)


# ---- Rules about how a device computes: compiled layers, attention's kernel.

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
