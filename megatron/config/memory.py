"""Settings of activation memory: what is stored between forward and backward, recomputed, or offloaded to host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron.config.setting import IS_SET, Condition, condition, idle_condition, setting

RecomputeGranularity = Literal["full", "selective"]
RecomputeMethod = Literal["uniform", "block"]
RecomputeModule = Literal["core_attn", "mlp", "layernorm", "mlp_act"]


def _build_flash_attention_idle_conditions(**values: Any) -> tuple[Condition, ...]:
    """Return the conditions under which selective recompute of attention saves no memory, because flash attention runs.

    Flash attention runs on a GPU in 16 bits, and on a CPU without dropout. It stores no attention probabilities.

    Args:
        values: further settings, by name, and the values that they must have in every condition.
    """
    reason = (
        "flash attention, which runs on a GPU in 16 bits and on a CPU without dropout, stores none; --recompute-modules can name "
        "other modules"
    )
    effect = "frees nothing if the attention kernel stores no probabilities"
    attention_only = {
        **values,
        "recompute_modules": (("core_attn",),),
        "attention_backend": ("auto", "flash", "cudnn", "efficient", "fused"),
    }
    gpu = {"device": ("auto", "cuda")}
    flash_devices: tuple[dict[str, Any], ...] = (
        {"bf16": True, **gpu},
        {"fp16": True, **gpu},
        {"device": "cpu", "attention_dropout": 0.0},
    )
    return tuple(
        idle_condition(reason, require_all=True, effect=effect, **attention_only, **device_values)
        for device_values in flash_devices
    )


_WITH_POST_NORM = idle_condition(
    "there is no norm before attention and MLP; --recompute-modules can name other modules",
    effect="frees nothing",
    norm_placement="post",
    recompute_modules=(("layernorm",),),
    require_all=True,
)
_WITH_EXPERTS = tuple(
    idle_condition(
        "experts store the outputs of their norm and activation; --recompute-modules mlp recomputes them",
        effect="frees less in layers with experts",
        num_experts=IS_SET,
        recompute_modules=parts,
        require_all=True,
    )
    for parts in ((("layernorm",),), (("mlp_act",),), (("layernorm", "mlp_act"),))
)
_ON_CPU = idle_condition("--device cpu has everything in host memory", effect="saves no memory", device="cpu")


@dataclass(frozen=True)
class MemoryConfig:
    """Recompute and offload of activations, and the loss in chunks."""

    recompute_granularity: RecomputeGranularity | None = setting(
        None, idle_if=_build_flash_attention_idle_conditions(recompute_granularity="selective")
    )
    """Activations to recompute in the backward pass instead of storing them. full: whole layers, of which only the input is stored;
    selective: the modules that --recompute-modules names."""
    recompute_activations: bool = setting(
        False,
        idle_if=(
            idle_condition("--recompute-granularity selective already requests it", recompute_granularity="selective"),
            *_build_flash_attention_idle_conditions(),
        ),
    )
    """Equivalent to --recompute-granularity selective."""
    recompute_method: RecomputeMethod = setting("uniform", active_if=condition(recompute_granularity="full"))
    """Layers that full recompute covers. uniform: all layers, in groups of --recompute-num-layers, each of which stores only
    the input of its first layer; block: the first --recompute-num-layers layers of each chunk, each separately. The layers of
    --mtp-num-layers are recomputed, each separately, if the last layer of their chunk is; selective recompute and offload also
    treat them like this last layer."""
    recompute_num_layers: int = setting(
        1,
        min_value=1,
        unit="layers",
        active_if=condition(recompute_granularity="full"),
        idle_if=idle_condition("--recompute-layers-per-stage sets the number of layers", recompute_layers_per_stage=IS_SET),
    )
    """With --recompute-method uniform: number of layers in each recompute group. With block: number of recomputed layers of each
    chunk."""
    recompute_layers_per_stage: str | None = setting(None, active_if=condition(recompute_method="block"))
    """Number of recomputed layers of each pipeline stage, starting at its first layer, such as 4,3,2,0 for four stages: later
    stages of 1f1b store fewer microbatches and need less recompute. auto chooses the smallest numbers with which each stage
    fits into --device-memory-gb. Replaces --recompute-num-layers."""
    recompute_modules: tuple[RecomputeModule, ...] = setting(
        ("core_attn",),
        active_if=condition(recompute_granularity="selective", recompute_activations=True),
        idle_if=(_WITH_POST_NORM, *_WITH_EXPERTS),
    )
    """Modules of each layer that selective recompute covers. core_attn: the attention probabilities, if the attention kernel stores
    them (on CPU with dropout; on a GPU in 32 and 64 bits, by head size; with --attention-backend math always). layernorm: the
    outputs of the norms before attention and MLP, recomputed from the residual stream. mlp_act: the output of the MLP's activation,
    recomputed from its input. mlp: the whole MLP with the norm before it, except its last matrix product. layernorm and mlp_act
    cost almost no time."""
    device_memory_gb: float | None = setting(None, above=0, unit="GB of 10^9 bytes")
    """Memory of a device, for planning: if the job needs more, a dry run says what to change, and so does a run that reports its
    memory or runs out of memory. By default the memory of this machine's GPU, if it has one."""

    loss_chunk_tokens: int | None = setting(None, min_value=0, unit="tokens")
    """Compute the output layer and the loss in chunks of this many tokens, and recompute each chunk in the backward pass, so that
    the logits of only one chunk are in memory at a time. 0: all tokens of a microbatch at once. By default all at once if a rank's
    share of the logits has at most 2^27 elements, otherwise in chunks of at most that size."""

    cpu_offload_activations: bool = setting(False, idle_if=_ON_CPU)
    """Offload the tensors that layers save for the backward pass to pinned host memory, and prefetch them one operation before they
    are needed. Of recomputed layers only the input is offloaded."""
    cpu_offloading: bool = setting(
        False, idle_if=(idle_condition("--cpu-offload-activations already requests it", cpu_offload_activations=True), _ON_CPU)
    )
    """Equivalent to --cpu-offload-activations."""
    cpu_offloading_num_layers: int = setting(0, min_value=0, unit="layers, 0 for all", idle_if=_ON_CPU)
    """Number of layers at the start of each chunk whose activations are offloaded. A value above 0 implies
    --cpu-offload-activations."""

    @property
    def has_offload(self) -> bool:
        """Whether activations of any layers are offloaded to host memory between forward and backward."""
        return bool(self.cpu_offload_activations or self.cpu_offloading or self.cpu_offloading_num_layers)

    def select_offloaded(self, layers: range) -> range:
        """Return the layers of a chunk whose activations are offloaded to host memory between forward and backward.

        Args:
            layers: indices of the chunk's layers.
        """
        return layers[: self.cpu_offloading_num_layers or len(layers)] if self.has_offload else layers[:0]

    @property
    def recompute_counts(self) -> tuple[int, ...] | None:
        """Number of recomputed layers of each pipeline stage, parsed from --recompute-layers-per-stage. None without the flag, or
        if its value is not a list of numbers (such as auto)."""
        text = self.recompute_layers_per_stage
        counts = [] if text is None else text.replace(",", " ").split()
        return tuple(map(int, counts)) if counts and all(count.isdecimal() for count in counts) else None

    @property
    def effective_granularity(self) -> RecomputeGranularity | None:
        """Granularity of recompute after both flags are applied: --recompute-granularity, else selective with
        --recompute-activations, else None (no recompute)."""
        return self.recompute_granularity or ("selective" if self.recompute_activations else None)
