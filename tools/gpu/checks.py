"""What must be true on a GPU, in order of value. Imports nothing that needs torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One thing that must be true."""

    name: str
    proves: str
    body: str
    """Its function: module in this folder, and name."""
    limit: float = 120.0
    """Seconds on a GPU."""
    argument: str = ""
    needs_cuda: bool = False


LAYOUTS = ("tensor", "sequence", "no_shard", "optim", "optim_grads", "optim_grads_params")
SCRIPTS = (
    "train_1gpu_gpt_125m",
    "train_1gpu_gpt_1_3b",
    "train_8gpu_llama_7b",
    "train_8gpu_qwen3_30b_a3b",
    "train_16nodes_llama_13b",
    "train_16nodes_llama_70b",
    "train_16nodes_long_llama_70b",
    "train_256gpu_deepseek_v3",
    "train_1024gpu_gpt_175b",
    "train_3072gpu_gpt_1t",
)

CHECKS = (
    Check("float64-gpt", "GPT in float64 computes what the CPU computes", "runs.same_as_cpu", argument="gpt"),
    Check(
        "float64-llama",
        "Llama with grouped queries in float64 computes what the CPU computes",
        "runs.same_as_cpu",
        argument="llama",
    ),
    Check("bf16", "the bfloat16 loss stays within its band around float64", "runs.bf16_band"),
    Check("products", "weight gradients of 16 bits are written into float32 memory without a second tensor", "kernels.products"),
    Check("experts", "products of experts in one kernel are those of each matrix", "kernels.products_of_experts"),
    Check("one-sync", "the host waits for the device once a step", "kernels.one_sync", needs_cuda=True),
    Check("loop-sync", "and nowhere in the loop over microbatches", "kernels.loop_sync", needs_cuda=True),
    Check("memory", "planned memory is what is measured (on CPU: of the model's state)", "runs.memory"),
    Check(
        "varlen",
        "attention within documents and windows: one call of flash attention equals grouped calls and products block by block",
        "kernels.varlen",
        needs_cuda=True,
    ),
    Check("deterministic", "a bfloat16 run with dropout and --deterministic-mode has the same losses twice", "runs.deterministic"),
    Check("fp16-overflow", "float16 skips the update after an overflow, lowers the scale and goes on", "runs.overflow"),
    Check("offload", "activations in host memory change nothing", "runs.offload"),
    Check("kill-resume", "a run that saves in the background and is killed resumes with the same losses", "runs.kill_resume"),
    Check("checkpoint-across", "a checkpoint of the CPU goes on here, and back", "runs.checkpoint_across"),
    Check("compile", "compiled layers compute what the others do", "runs.compiled", limit=240.0),
    Check(
        "fp8-products",
        "products of 8 bits are those of the emulation, by each recipe that the GPU takes",
        "kernels.products_in_8_bits",
        needs_cuda=True,
    ),
    Check("fp8", "the loss with products of 8 bits stays near that of bfloat16", "runs.fp8"),
    *(
        Check(
            f"two-ranks-{name}",
            f"two ranks on one device over gloo ({name}) compute what one does",
            "runs.two_ranks",
            argument=name,
        )
        for name in LAYOUTS
    ),
    Check("bench-350m", "speed beside the plain loop, 350M parameters; MFU", "figures.bench", limit=240.0, argument="350m"),
    *(
        Check(
            f"rank-{name.removeprefix('train_')}",
            f"one rank of {name}.sh: memory, and an upper bound of its MFU",
            "figures.rank",
            argument=name,
        )
        for name in SCRIPTS
    ),
    Check("bench-1.3b", "speed beside the plain loop, 1.3B parameters; MFU", "figures.bench", limit=240.0, argument="1.3b"),
)
