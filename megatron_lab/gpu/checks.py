"""List of all GPU checks, most valuable first. The module imports nothing that needs torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """Entry of the list of GPU checks: name, function and estimated duration of a check."""

    name: str
    proves: str
    """Description of the check for the user: the statement that holds if the check passes, or the quantity that it measures."""
    function: str
    """Function that runs the check, as "module.function" within this package.

    The function takes a `CheckContext` (device, folder, results of earlier checks). If `argument` is not empty, it is the
    second argument.
    """
    gpu_seconds: float
    """Estimated duration in seconds on a GPU of the Hopper generation."""
    cpu_seconds: float
    """Estimated duration in seconds with --device cpu, measured on two cores."""
    argument: str = ""
    needs_cuda: bool = False

    def estimate(self, device: str) -> float:
        """Return the estimated duration of the check in seconds on a device type, "cuda" or "cpu"."""
        return self.gpu_seconds if device == "cuda" else self.cpu_seconds


LAYOUTS = ("tensor", "sequence", "no_shard", "optim", "optim_grads", "optim_grads_params")
SCRIPTS = {
    # Estimated seconds on a GPU.
    "train_1gpu_gpt_125m": 12.0,
    "train_1gpu_gpt_1_3b": 15.0,
    "train_8gpu_llama_7b": 20.0,
    "train_8gpu_qwen3_30b_a3b": 25.0,
    "train_16nodes_llama_13b": 15.0,
    "train_16nodes_llama_70b": 20.0,
    "train_16nodes_long_llama_70b": 25.0,
    "train_256gpu_deepseek_v3": 40.0,
    "train_1024gpu_gpt_175b": 25.0,
    "train_3072gpu_gpt_1t": 35.0,
}

CHECKS = (
    # 1. The device and its limits.
    Check("device", "device, versions, and missing packages and build tools", "roofline.device_facts", 10, 6),
    Check("roofline", "rates of a large copy and a large matrix product", "roofline.roofline", 5, 3),
    # 2. Kernels against float64.
    Check(
        "weight-gradients",
        "16-bit weight gradients are written to float32 memory without a second tensor",
        "kernels.weight_gradients",
        2,
        2,
    ),
    Check("attention", "cuDNN, flash and efficient attention are right on the layers' strides", "kernels.attention", 4, 3),
    Check(
        "attention-speed", "time of each attention kernel, forward and backward", "kernels.attention_speed", 3, 1, needs_cuda=True
    ),
    Check("flash-parts", "attention of two halves of a sequence, combined, is right", "kernels.flash_parts", 2, 1, needs_cuda=True),
    Check("varlen", "attention within documents and windows is right", "kernels.varlen", 2, 1, needs_cuda=True),
    Check("experts", "grouped matrix products of experts and their gradients are right", "kernels.experts", 2, 2),
    Check(
        "experts-speed", "time of experts' weight gradients, grouped and in a loop", "kernels.experts_speed", 3, 1, needs_cuda=True
    ),
    Check("fp8-products", "8-bit matrix products of each recipe agree with the emulation", "kernels.fp8_products", 4, 3),
    Check("cross-entropy", "loss and gradient from bfloat16 logits are right", "kernels.cross_entropy", 2, 2),
    Check(
        "deterministic-counts",
        "expert counts and embedding gradients are reproducible in deterministic mode",
        "kernels.deterministic_counts",
        2,
        2,
    ),
    # 3. Speed, eager.
    Check("profiler", "torch's profiler sees the kernels of this device", "profiles.profiler_works", 3, 2),
    Check("speed-350m", "eager step compared with a plain loop, 350M parameters", "speed.eager", 14, 8, "350m"),
    Check("speed-8b", "eager step compared with a plain loop, layers of Llama 3 8B", "speed.eager", 18, 8, "8b"),
    Check("speed-1.3b", "eager step compared with a plain loop, 1.3B parameters", "speed.eager", 16, 8, "1.3b"),
    Check("speed-experts", "eager step compared with a plain loop, 8 experts of width 2,048", "speed.eager", 18, 8, "experts"),
    # 4. Profiles of the slowest models.
    Check("profile-1", "kernels of the model that is slowest relative to the plain loop", "profiles.profile", 12, 6, "1"),
    Check("profile-2", "kernels of the second slowest model", "profiles.profile", 12, 6, "2"),
    # 5. Speed, compiled and in 8 bits.
    Check(
        "compiled-8b", "compiled step compared with the compiled plain loop, layers of Llama 3 8B", "speed.compiled", 60, 30, "8b"
    ),
    Check(
        "compiled-1.3b", "compiled step compared with the compiled plain loop, 1.3B parameters", "speed.compiled", 60, 30, "1.3b"
    ),
    Check("fp8-8b", "step with 8-bit products, rowwise and tensorwise, layers of Llama 3 8B", "speed.fp8", 20, 8, "8b"),
    Check("fp8-1.3b", "step with 8-bit products, rowwise and tensorwise, 1.3B parameters", "speed.fp8", 20, 8, "1.3b"),
    # 6. Memory, host waits for the device, and equality with the CPU.
    Check("memory", "peak memory in the speed checks is within 10 % of the memory plan", "speed.memory", 1, 12),
    Check("waits-per-step", "the host waits for the device once per step", "steps.waits_per_step", 6, 1, needs_cuda=True),
    Check(
        "waits-between", "the host does not wait between microbatches", "steps.waits_between_microbatches", 8, 1, needs_cuda=True
    ),
    Check("float64-gpt", "steps in float64 agree with the CPU: GPT", "steps.same_as_cpu", 4, 3, "gpt"),
    Check("float64-llama", "steps in float64 agree with the CPU: Llama with grouped queries", "steps.same_as_cpu", 4, 3, "llama"),
    Check("float64-experts", "steps in float64 agree with the CPU: a mixture of experts", "steps.same_as_cpu", 4, 3, "experts"),
    Check(
        "float64-windows", "steps in float64 agree with the CPU: windows and capped scores", "steps.same_as_cpu", 4, 3, "windows"
    ),
    Check(
        "float64-latent", "steps in float64 agree with the CPU: multi-head latent attention", "steps.same_as_cpu", 4, 3, "latent"
    ),
    Check("same-twice", "--deterministic-mode gives the same losses twice", "steps.same_twice", 5, 4),
    # 7. Several processes.
    Check("two-ranks-tensor", "two tensor ranks on one device agree with one rank", "runs.two_ranks", 20, 25, "tensor"),
    Check("nccl", "collectives over NCCL with one rank; memory of a communicator", "runs.nccl_alone", 12, 1, needs_cuda=True),
    Check("kill-resume", "a killed run resumes with the same losses", "runs.kill_and_resume", 30, 30),
    # More checks of groups 5 and 7.
    Check(
        "compiled-experts", "compiled step compared with the compiled plain loop, 8 experts", "speed.compiled", 60, 30, "experts"
    ),
    Check(
        "compiled-350m", "compiled step compared with the compiled plain loop, 350M parameters", "speed.compiled", 50, 15, "350m"
    ),
    Check("fp8-350m", "step with 8-bit products, rowwise and tensorwise, 350M parameters", "speed.fp8", 16, 12, "350m"),
    *(
        Check(f"two-ranks-{name}", f"two ranks on one device agree with one rank, {name}", "runs.two_ranks", 20, 25, name)
        for name in LAYOUTS[1:]
    ),
    Check("bf16-band", "the bfloat16 loss stays within its band around float64", "runs.bf16_band", 25, 15),
    Check("fp8-band", "the loss with 8-bit products stays within its band", "runs.fp8_band", 35, 25),
    Check("fp16-overflow", "float16 skips updates after an overflow and lowers the scale", "runs.overflow", 15, 15),
    Check("offload", "offloading activations to host memory changes nothing", "runs.offload", 25, 25),
    Check("checkpoint-across", "a run continues from the CPU to the device and back", "runs.checkpoint_across", 45, 50),
    Check("compiled-float64", "compiled layers agree with eager layers in float64", "runs.compiled", 60, 40),
    # 8. One rank of each launch script.
    *(
        Check(
            f"rank-{name.removeprefix('train_')}",
            f"one rank of {name}.sh: memory, and an upper bound of MFU",
            "scripts.rank",
            seconds,
            15,
            name,
        )
        for name, seconds in SCRIPTS.items()
    ),
)
