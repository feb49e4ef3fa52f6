"""What a step keeps between forward and backward, and what it computes again or moves to host memory instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron.config.setting import GIVEN, Beside, acts_with, idle_with, setting

RecomputeGranularity = Literal["full", "selective"]
RecomputeMethod = Literal["uniform", "block"]
RecomputeModule = Literal["core_attn", "mlp", "layernorm", "mlp_act"]


def _flash_keeps_none(**others: Any) -> tuple[Beside, ...]:
    """Where selective recompute takes attention alone, and flash attention computes it."""
    why = (
        "flash attention, which a GPU runs in 16 bits and a CPU without dropout, keeps none; --recompute-modules names other parts"
    )
    effect = "frees nothing where attention's kernel keeps no probabilities"
    alone = {
        **others,
        "recompute_modules": (("core_attn",),),
        "attention_backend": ("auto", "flash", "cudnn", "efficient", "fused"),
    }
    gpu = {"device": ("auto", "cuda")}
    where: tuple[dict[str, Any], ...] = ({"bf16": True, **gpu}, {"fp16": True, **gpu}, {"device": "cpu", "attention_dropout": 0.0})
    return tuple(idle_with(why, every=True, effect=effect, **alone, **one) for one in where)


_NO_NORM_BEFORE = idle_with(
    "no norm stands before attention and MLP; --recompute-modules names other parts",
    effect="frees nothing",
    norm_placement="post",
    recompute_modules=(("layernorm",),),
    every=True,
)
_EXPERTS_KEEP = tuple(
    idle_with(
        "experts keep the results of their norm and activation; --recompute-modules mlp makes them again",
        effect="frees less in layers with experts",
        num_experts=GIVEN,
        recompute_modules=parts,
        every=True,
    )
    for parts in ((("layernorm",),), (("mlp_act",),), (("layernorm", "mlp_act"),))
)
_ONE_MEMORY = idle_with("--device cpu has everything in host memory", effect="saves no memory", device="cpu")


@dataclass(frozen=True)
class MemoryConfig:
    """Recompute and offload of activations, and the loss in pieces."""

    recompute_granularity: RecomputeGranularity | None = setting(None, idle=_flash_keeps_none(recompute_granularity="selective"))
    """What is computed again in backward instead of being kept. full: whole layers, of which only the input is kept; selective:
    the parts that --recompute-modules names."""
    recompute_activations: bool = setting(
        False, idle=(idle_with("--recompute-granularity says the same", recompute_granularity="selective"), *_flash_keeps_none())
    )
    """The same as --recompute-granularity selective."""
    recompute_method: RecomputeMethod = setting("uniform", acts=acts_with(recompute_granularity="full"))
    """Which layers full recompute takes. uniform: all, in groups of --recompute-num-layers, of which each keeps its input; block:
    the first --recompute-num-layers of each chunk, each by itself. Depths of --mtp-num-layers are run again, each by itself, where
    the last layer of their chunk is; offload and the parts of selective recompute take them as that layer too."""
    recompute_num_layers: int = setting(
        1,
        at_least=1,
        unit="layers",
        acts=acts_with(recompute_granularity="full"),
        idle=idle_with("--recompute-layers-per-stage says how many", recompute_layers_per_stage=GIVEN),
    )
    """Layers of a group (uniform), or layers of each chunk that are computed again (block)."""
    recompute_layers_per_stage: str | None = setting(None, acts=acts_with(recompute_method="block"))
    """Layers that each pipeline stage computes again, the first ones in the order of the depth, as in 4,3,2,0 for four stages:
    later stages of 1f1b keep fewer microbatches and need less. auto chooses, for each stage, the fewest that fit into
    --device-memory-gb. In place of --recompute-num-layers."""
    recompute_modules: tuple[RecomputeModule, ...] = setting(
        ("core_attn",),
        acts=acts_with(recompute_granularity="selective", recompute_activations=True),
        idle=(_NO_NORM_BEFORE, *_EXPERTS_KEEP),
    )
    """Parts of each layer that selective recompute takes. core_attn: the probabilities of attention, where its kernel keeps them
    (on CPU with dropout; on a GPU in 32 and 64 bits, by head
    size; with --attention-backend math always); layernorm: the results of the norms before attention and MLP,
    made again from the residual stream; mlp_act: the result of the MLP's activation, made again from its input; mlp: the whole MLP
    with the norm before it, but for its last product. layernorm and mlp_act cost almost no time."""
    device_memory_gb: float | None = setting(None, above=0, unit="GB of 10^9 bytes")
    """Memory of a device, for what is planned: a dry run of a job that needs more says what to change, and so does a run that
    reports its memory or has none left. By default that of this machine's GPU, if it has one."""

    loss_chunk_tokens: int | None = setting(None, at_least=0, unit="tokens")
    """Compute output layer and loss in chunks of so many tokens, each again in backward: logits are there for one chunk at a time.
    0: all tokens of a microbatch at once. By default at once if a rank's part of the logits has at most 2^27 elements, else in
    chunks that have no more."""

    cpu_offload_activations: bool = setting(False, idle=_ONE_MEMORY)
    """Move what layers save for backward to (pinned) host memory, and back one operation ahead of need. Of layers that run again
    the input is moved."""
    cpu_offloading: bool = setting(
        False, idle=(idle_with("--cpu-offload-activations says the same", cpu_offload_activations=True), _ONE_MEMORY)
    )
    """The same as --cpu-offload-activations."""
    cpu_offloading_num_layers: int = setting(0, at_least=0, unit="layers, 0 for all", idle=_ONE_MEMORY)
    """Move those of the first so many layers of each chunk only. More than 0 asks for --cpu-offload-activations."""

    @property
    def offloads(self) -> bool:
        """Whether saved tensors of some layers are moved to host memory."""
        return bool(self.cpu_offload_activations or self.cpu_offloading or self.cpu_offloading_num_layers)

    def offloaded(self, layers: range) -> range:
        """Those layers of a chunk whose saved tensors are moved to host memory."""
        return layers[: self.cpu_offloading_num_layers or len(layers)] if self.offloads else layers[:0]

    @property
    def recomputed_by_stage(self) -> tuple[int, ...] | None:
        """The numbers of --recompute-layers-per-stage; None where there are none, or it says something else."""
        text = self.recompute_layers_per_stage
        numbers = [] if text is None else text.replace(",", " ").split()
        return tuple(map(int, numbers)) if numbers and all(number.isdecimal() for number in numbers) else None

    @property
    def recompute(self) -> RecomputeGranularity | None:
        """The granularity that both flags ask for."""
        return self.recompute_granularity or ("selective" if self.recompute_activations else None)
