"""Number formats of the model, and the settings that change the speed of a device but not the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.setting import IS_SET, condition, idle_condition, setting
from megatron.spec.attention_backends import AttentionBackend

Fp32MatmulPrecision = Literal["highest", "high"]
Fp8Format = Literal["e4m3", "hybrid"]
Fp8Recipe = Literal["tensorwise", "rowwise", "blockwise"]


@dataclass(frozen=True)
class Fp8:
    """FP8 format and recipe for the matrix products of a layer's linear modules; see --fp8-format and --fp8-recipe."""

    format: Fp8Format
    recipe: Fp8Recipe

    @property
    def alignment(self) -> int:
        """Number of which every dimension of the matrix products on one rank must be a multiple. With the blockwise recipe it is
        the block size, so that no block of elements that share a scale is split between tensor ranks."""
        return 128 if self.recipe == "blockwise" else 16


MAX_LOSS_SCALE = 2.0**127  # the scale is a float32
_DYNAMIC = condition(
    "with --fp16 and without --loss-scale, when the scale is dynamic", require_all=True, fix={}, fp16=True, loss_scale=None
)


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtype of the model's parameters and activations (float32 by default) and loss scale of float16."""

    fp16: bool = False
    """Compute in float16, with float32 main parameters and a loss scale."""
    bf16: bool = False
    """Compute in bfloat16, with float32 main parameters."""
    fp64: bool = False
    """Compute in float64, for proofs that layouts compute the same."""
    fp32_matmul_precision: Fp32MatmulPrecision = setting(
        "highest",
        active_if=condition("in float32", require_all=True, fix={}, bf16=False, fp16=False, fp64=False),
        idle_if=idle_condition("a CPU multiplies float32 in float32", device="cpu"),
    )
    """Precision of float32 matrix products on a GPU, as in torch.set_float32_matmul_precision: highest uses float32; high uses
    TensorFloat32 (10 bits of mantissa, accumulated in float32), which is several times faster from compute capability 8.0 on.
    Products of 16-bit formats always accumulate in float32."""
    loss_scale: float | None = setting(
        None, above=0, max_value=MAX_LOSS_SCALE, unit="factor on the loss", active_if=condition(fp16=True)
    )
    """Constant loss scale; by default float16 uses a dynamic loss scale."""
    initial_loss_scale: float = setting(2.0**32, above=0, max_value=MAX_LOSS_SCALE, unit="factor on the loss", active_if=_DYNAMIC)
    """Initial dynamic loss scale."""
    min_loss_scale: float = setting(1.0, above=0, unit="factor on the loss", active_if=_DYNAMIC)
    """Smallest dynamic loss scale; an overflow at this scale stops the run."""
    loss_scale_window: int = setting(1000, min_value=1, unit="steps", active_if=_DYNAMIC)
    """Steps without overflow after which the dynamic loss scale doubles."""
    hysteresis: int = setting(2, min_value=1, unit="overflows", active_if=_DYNAMIC)
    """Overflows that are tolerated before the dynamic loss scale is halved."""
    fp8_format: Fp8Format | None = setting(None, active_if=condition(bf16=True, fp64=True, strict=True))
    """Format for FP8 matrix products in linear layers, except the output layer. e4m3: all operands have a mantissa of 3 bits;
    hybrid: gradients of outputs are e5m2, with a larger range. Weights stay bfloat16, with float32 main parameters. A GPU needs
    compute capability 8.9. A CPU emulates the formats; with --fp64 (for proofs) every device does."""
    fp8_recipe: Fp8Recipe = setting("tensorwise", active_if=condition(fp8_format=IS_SET, strict=True))
    """Granularity of FP8 scales. tensorwise: one per matrix; rowwise: one per row or column, along the summed dimension; blockwise:
    one per 1 x 128 elements of activations and gradients and per 128 x 128 elements of weights (DeepSeek-V3; a GPU needs compute
    capability 9.0)."""
    first_last_layers_bf16: bool = setting(False, active_if=condition(fp8_format=IS_SET))
    """Compute the first and the last layers in bfloat16 instead of FP8."""
    num_layers_at_start_in_bf16: int = setting(1, min_value=0, unit="layers", active_if=condition(first_last_layers_bf16=True))
    """Number of first layers that stay in bfloat16."""
    num_layers_at_end_in_bf16: int = setting(1, min_value=0, unit="layers", active_if=condition(first_last_layers_bf16=True))
    """Number of last layers that stay in bfloat16."""

    @property
    def num_layers_in_bf16(self) -> int:
        """Number of layers, the first and the last together, that are excluded from --fp8-format."""
        return (self.num_layers_at_start_in_bf16 + self.num_layers_at_end_in_bf16) * self.first_last_layers_bf16

    @property
    def itemsize(self) -> int:
        """Bytes of one element of an activation."""
        return 2 if self.fp16 or self.bf16 else 8 if self.fp64 else 4

    def get_fp8(self, layer: int, num_layers: int) -> Fp8 | None:
        """Return the FP8 format and recipe of a layer, or None if the layer does not compute in FP8.

        Args:
            layer: index of the layer. Layers of multi-token prediction have the indices from `num_layers` on and use the settings
                of the last layer.
        """
        layer = min(layer, num_layers - 1)
        if self.fp8_format is None:
            return None
        if self.first_last_layers_bf16 and not (
            self.num_layers_at_start_in_bf16 <= layer < num_layers - self.num_layers_at_end_in_bf16
        ):
            return None
        return Fp8(self.fp8_format, self.fp8_recipe)


# ---- Settings that change the speed of a device, but not the result.

CompileBackend = Literal["inductor", "aot_eager"]
CompileMode = Literal["default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune"]

_COMPILES = condition(compile=True)


@dataclass(frozen=True)
class SpeedConfig:
    """Compilation of layers, and the attention kernel."""

    compile: bool = False
    """Compile the layers with torch.compile: the operations between matrix products, attention and communication are fused into
    few kernels. Each type of layer is compiled once, in the first step; of a layer with experts, only the part before the
    experts is compiled. Kernels are cached in --compile-cache-dir. A CPU needs a C++ compiler. Evaluation is not compiled."""
    compile_backend: CompileBackend = setting("inductor", active_if=_COMPILES)
    """Backend of torch.compile. inductor: generate kernels. aot_eager: trace and differentiate as inductor does, then run torch's
    own kernels; it starts in seconds and is not faster, and shows whether a difference comes from tracing or from generated
    kernels."""
    compile_mode: CompileMode = setting("default", active_if=condition(require_all=True, compile=True, compile_backend="inductor"))
    """Mode of torch.compile. max-autotune-no-cudagraphs measures which kernels are fastest."""
    compile_cache_dir: str | None = setting(None, active_if=_COMPILES, is_path=True)
    """Folder on each node in which compiled kernels are cached between starts. By default the folder of TORCHINDUCTOR_CACHE_DIR, or
    one in the folder for temporary files. The ranks of a node share it, so each kernel is compiled once."""
    attention_backend: AttentionBackend = "auto"
    """Attention kernel. auto: the first of flash, efficient and math that supports the run's shapes; on a GPU cudnn instead of
    flash if it is clearly faster, as measured before the first step (not with --deterministic-mode or --reset-attention-mask).
    flash: flash attention. cudnn: cuDNN's attention, on GPUs. efficient: memory-efficient attention, on GPUs. math: plain matrix
    products, which store the attention probabilities. A kernel that does not support the run's shapes is refused. fused and unfused
    are Megatron-LM's names of cudnn and math."""
