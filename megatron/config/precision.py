"""In which number formats the model computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.setting import GIVEN, acts_with, idle_with, setting
from megatron.spec.attention_backends import AttentionBackend

Fp32MatmulPrecision = Literal["highest", "high"]
Fp8Format = Literal["e4m3", "hybrid"]
Fp8Recipe = Literal["tensorwise", "rowwise", "blockwise"]


@dataclass(frozen=True)
class Fp8:
    """How the products of a layer's linear parts are made in 8 bits; see --fp8-format and --fp8-recipe."""

    format: Fp8Format
    recipe: Fp8Recipe

    @property
    def multiple(self) -> int:
        """What every dimension of a product is a multiple of: on one rank, so that scales in blocks are those of one process."""
        return 128 if self.recipe == "blockwise" else 16


LARGEST_LOSS_SCALE = 2.0**127  # the scale is a float32
_DYNAMIC = acts_with(
    "with --fp16 and without --loss-scale, when the scale is dynamic", every=True, fix={}, fp16=True, loss_scale=None
)


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtype of the model's parameters and activations (float32 by default) and the scale of the loss in float16."""

    fp16: bool = False
    """Compute in float16 with float32 main parameters and a loss scale."""
    bf16: bool = False
    """Compute in bfloat16 with float32 main parameters."""
    fp64: bool = False
    """Compute in float64 (for proofs)."""
    fp32_matmul_precision: Fp32MatmulPrecision = setting(
        "highest",
        acts=acts_with("in float32", every=True, fix={}, bf16=False, fp16=False, fp64=False),
        idle=idle_with("a CPU multiplies float32 in float32", device="cpu"),
    )
    """How a GPU multiplies float32, as torch names it. highest: in float32; high: in TensorFloat32 (10 bits of mantissa, summed in
    float32), several times as fast from compute capability 8.0 on. Products of 16-bit formats are summed in float32 in any case."""
    loss_scale: float | None = setting(
        None, above=0, at_most=LARGEST_LOSS_SCALE, unit="factor on the loss", acts=acts_with(fp16=True)
    )
    """Constant loss scale; by default float16 uses a dynamic one."""
    initial_loss_scale: float = setting(2.0**32, above=0, at_most=LARGEST_LOSS_SCALE, unit="factor on the loss", acts=_DYNAMIC)
    """First dynamic loss scale."""
    min_loss_scale: float = setting(1.0, above=0, unit="factor on the loss", acts=_DYNAMIC)
    """Smallest dynamic loss scale; an overflow at this scale stops the run."""
    loss_scale_window: int = setting(1000, at_least=1, unit="steps", acts=_DYNAMIC)
    """Steps without overflow after which the dynamic scale doubles."""
    hysteresis: int = setting(2, at_least=1, unit="overflows", acts=_DYNAMIC)
    """Overflows that are tolerated before the dynamic scale halves."""
    fp8_format: Fp8Format | None = setting(None, acts=acts_with(bf16=True, fp64=True, strict=True))
    """Compute the products of linear layers in 8 bits, but for the output layer. e4m3: all factors have a mantissa of 3 bits;
    hybrid: gradients of outputs are e5m2, with a larger range. Weights stay bfloat16, their main parameters float32. A GPU needs
    compute capability 8.9. A CPU emulates the formats; with --fp64 (for proofs) every device does."""
    fp8_recipe: Fp8Recipe = setting("tensorwise", acts=acts_with(fp8_format=GIVEN, strict=True))
    """Which numbers share a scale. tensorwise: a whole matrix; rowwise: what a product sums up, a row or a column; blockwise: 1 x
    128 of activations and gradients, 128 x 128 of weights (DeepSeek-V3; a GPU needs compute capability 9.0)."""
    first_last_layers_bf16: bool = setting(False, acts=acts_with(fp8_format=GIVEN))
    """Leave the first and the last layers in bfloat16."""
    num_layers_at_start_in_bf16: int = setting(1, at_least=0, unit="layers", acts=acts_with(first_last_layers_bf16=True))
    """How many of the first layers."""
    num_layers_at_end_in_bf16: int = setting(1, at_least=0, unit="layers", acts=acts_with(first_last_layers_bf16=True))
    """How many of the last layers."""

    @property
    def num_layers_in_bf16(self) -> int:
        """Layers at both ends that are left out of --fp8-format."""
        return (self.num_layers_at_start_in_bf16 + self.num_layers_at_end_in_bf16) * self.first_last_layers_bf16

    @property
    def itemsize(self) -> int:
        """Bytes of an activation."""
        return 2 if self.fp16 or self.bf16 else 8 if self.fp64 else 4

    def fp8_of(self, layer: int, num_layers: int) -> Fp8 | None:
        """How layer number `layer` of so many computes in 8 bits; None where it does not. Depths of multi-token prediction, counted
        on from these, are as the last layer."""
        layer = min(layer, num_layers - 1)
        if self.fp8_format is None:
            return None
        if self.first_last_layers_bf16 and not (
            self.num_layers_at_start_in_bf16 <= layer < num_layers - self.num_layers_at_end_in_bf16
        ):
            return None
        return Fp8(self.fp8_format, self.fp8_recipe)


# ---- How a device computes: settings that change its speed and not what is computed.

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
