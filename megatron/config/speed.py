"""How a device computes: settings that change its speed and not what is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.setting import acts_with, setting
from megatron.spec.attention_backends import AttentionBackend

CompileBackend = Literal["inductor", "aot_eager"]
CompileMode = Literal["default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune"]

_COMPILES = acts_with(compile=True)


@dataclass(frozen=True)
class SpeedConfig:
    """Compilation of layers, and attention's kernel."""

    compile: bool = False
    """Compile the layers: what lies between products, attention and communication is fused to few kernels. Each kind of layer is
    compiled once, in the first step, and a layer with experts up to these; the kernels are kept in --compile-cache-dir. On CPU
    this takes a C++ compiler. Evaluation runs as without."""
    compile_backend: CompileBackend = setting("inductor", acts=_COMPILES)
    """inductor: generate kernels. aot_eager: trace and differentiate as for that, then compute by torch's own kernels: starts in
    seconds and is no faster, to tell whether a difference comes from tracing or from generated kernels."""
    compile_mode: CompileMode = setting("default", acts=acts_with(every=True, compile=True, compile_backend="inductor"))
    """Mode of torch.compile. max-autotune-no-cudagraphs measures which kernels are fastest."""
    compile_cache_dir: str | None = setting(None, acts=_COMPILES)
    """Folder, on each node, in which compiled kernels are kept from one start to the next. By default that of
    TORCHINDUCTOR_CACHE_DIR, or one in the folder for temporary files. The ranks of a node share it: each kernel is compiled
    once."""
    attention_backend: AttentionBackend = "auto"
    """Kernel of attention. auto: the first of flash, efficient and math that takes the run's shapes; on a GPU cudnn in place of
    flash if it is clearly faster, as measured before the first step (not with --deterministic-mode or --reset-attention-mask);
    flash: flash attention; cudnn: that of cuDNN, on GPUs; efficient: memory-efficient attention, on GPUs; math: plain products,
    which keep the probabilities. One that cannot take the run's shapes is refused. fused and unfused are Megatron-LM's names of
    cudnn and math."""
