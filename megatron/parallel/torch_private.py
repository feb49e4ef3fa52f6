"""Private functions of torch that the project uses. Each one is looked up once, in this module.

Torch may rename or remove a private name in any version. All other modules import these functions from here. If the installed torch
lacks a name, importing still works: the replacement function raises `MissingTorchName` when it is called, and `list_missing`
includes the name for the log. Private modules are imported where they are used, because their classes are subclassed or their
import is slow. They are listed in `PRIVATE_MODULES`, and this module only checks that their files exist.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

Function = Callable[..., Any]

PRIVATE_MODULES = {
    "torch._dynamo": "--compile",
    "torch._dynamo.utils": "the report of compile times under --compile",
    "torch._functorch": "--compile",
    "torch._inductor": "--compile with the backend inductor",
    "torch._inductor.runtime.cache_dir_utils": "the folder of the compiler's cache in the log",
    "torch._prims_common": "plans of memory and step time",
    "torch._subclasses.fake_tensor": "plans of memory and step time",
    "torch.distributed._symmetric_memory": "--tp-comm-overlap by symmetric memory (a ring of messages is used instead)",
    "torch.testing._internal.distributed.fake_pg": "plans and --rank without the other processes",
    "torch.utils._python_dispatch": "plans of memory and step time",
    "torch.utils._pytree": "plans of memory and step time",
}
"""Private modules of torch that the project imports, each with the features that are unavailable without it."""

_missing: list[tuple[str, str]] = []


class MissingTorchName(AttributeError):
    """Raised when a private function of torch is called that the installed torch does not have."""


def list_missing() -> list[tuple[str, str]]:
    """Return (name, unavailable) of the private names that the installed torch lacks; `unavailable` says which features of this
    project do not work without the name."""
    return list(_missing)


def format_missing_note() -> list[str]:
    """Return a list with the start-up log line about private functions that the installed torch lacks, or an empty list if it lacks
    none."""
    if not _missing:
        return []
    uses = "; ".join(f"{unavailable} ({name})" for name, unavailable in _missing)
    return [f"torch {torch.__version__} lacks private names. Unavailable: {uses}"]


def find_function(path: str, unavailable: str) -> Function:
    """Return the function with the dotted name `path`, such as "torch._scaled_mm".

    If torch lacks it, record the name for `list_missing` and return a function that raises `MissingTorchName`.

    Args:
        unavailable: features of this project that do not work without the function.
    """
    try:
        owner: Any = torch
        for name in path.split(".")[1:]:
            owner = getattr(owner, name)
    except AttributeError:
        _missing.append((path, unavailable))
        return functools.partial(_raise_missing, path, unavailable)
    function: Function = owner
    return function


def _raise_missing(path: str, unavailable: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise MissingTorchName(
        f"torch {torch.__version__} has no {path}, so this is unavailable: {unavailable}.\n"
        "  Use a version of torch that pyproject.toml allows, or leave out the setting that needs this function."
    )


def find_module(name: str, unavailable: str) -> None:
    """Check that the file of a private torch module exists, without importing the module. If it does not, record the module for
    `list_missing`.

    Args:
        name: dotted name of the module.
        unavailable: features of this project that do not work without the module.
    """
    path = Path(torch.__file__).parent.joinpath(*name.split(".")[1:])
    if not (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()):
        _missing.append((name, unavailable))


for _name, _unavailable in PRIVATE_MODULES.items():
    find_module(_name, _unavailable)

_CLIPPING = "clipping and scaling of gradients"
_OPTIMIZERS = "the optimizers Lion, AdEMAMix and Muon"
foreach_add_ = find_function("torch._foreach_add_", _OPTIMIZERS)
foreach_addcdiv_ = find_function("torch._foreach_addcdiv_", _OPTIMIZERS)
foreach_addcmul_ = find_function("torch._foreach_addcmul_", _OPTIMIZERS)
foreach_copy_ = find_function("torch._foreach_copy_", "parameters in another dtype than the optimizer's, FSDP, AdEMAMix")
foreach_div = find_function("torch._foreach_div", _OPTIMIZERS)
foreach_div_ = find_function("torch._foreach_div_", _OPTIMIZERS)
foreach_lerp = find_function("torch._foreach_lerp", _OPTIMIZERS)
foreach_lerp_ = find_function("torch._foreach_lerp_", f"{_OPTIMIZERS}, averages of parameters")
foreach_mul_ = find_function("torch._foreach_mul_", f"{_CLIPPING}, {_OPTIMIZERS}")
foreach_norm = find_function("torch._foreach_norm", _CLIPPING)
foreach_sign_ = find_function("torch._foreach_sign_", _OPTIMIZERS)
foreach_sqrt_ = find_function("torch._foreach_sqrt_", _OPTIMIZERS)
fused_adamw_ = find_function("torch._fused_adamw_", "the optimizer AdamW")
fused_sgd_ = find_function("torch._fused_sgd_", "the optimizer SGD")

fused_sdp_choice = find_function("torch._fused_sdp_choice", "the name of the attention kernel in the log")
flash_attention_forward = find_function("torch.ops.aten._flash_attention_forward", "flash attention of documents and windows")
flash_attention_backward = find_function("torch.ops.aten._flash_attention_backward", "flash attention of documents and windows")
scaled_mm = find_function("torch._scaled_mm", "fp8 on GPUs with one scale a tensor or a row")
index_put_impl_ = find_function("torch.ops.aten._index_put_impl_", "gradients of embeddings on GPUs")
unsafe_view = find_function("torch.ops.aten._unsafe_view", "--tp-comm-overlap by symmetric memory")

_CPU_MATMULS = "matrix products in bfloat16 on CPUs"
is_amx_tile_supported = find_function("torch.cpu._is_amx_tile_supported", _CPU_MATMULS)
is_avx512_bf16_supported = find_function("torch.cpu._is_avx512_bf16_supported", _CPU_MATMULS)

_PLANS = "plans of memory and step time for GPUs"
softmax_backward_data = find_function("torch.ops.aten._softmax_backward_data.default", _PLANS)
sdp_flash_attention = find_function("torch.ops.aten._scaled_dot_product_flash_attention", _PLANS)
sdp_cudnn_attention = find_function("torch.ops.aten._scaled_dot_product_cudnn_attention", _PLANS)
sdp_efficient_attention = find_function("torch.ops.aten._scaled_dot_product_efficient_attention", _PLANS)
sdp_attention_math = find_function("torch.ops.aten._scaled_dot_product_attention_math", _PLANS)

_MEMORY_HISTORY = "the memory snapshot of --profile"
record_memory_history = find_function("torch.cuda.memory._record_memory_history", _MEMORY_HISTORY)
dump_snapshot = find_function("torch.cuda.memory._dump_snapshot", _MEMORY_HISTORY)

get_default_store = find_function("torch.distributed.distributed_c10d._get_default_store", "the watcher of hung ranks")
resolve_process_group = find_function(
    "torch.distributed.distributed_c10d._resolve_process_group", "a norm over all heads of queries and keys, plans"
)


find_function("torch.cuda._is_in_bad_fork", "the check for CUDA in forked processes")


def is_in_bad_fork() -> bool:
    """Return whether this process was forked from a process that had already called the CUDA runtime."""
    return bool(torch.cuda._is_in_bad_fork())


@functools.cache
def find_flight_recorder_dumps() -> tuple[Function, ...]:
    """Return the functions that dump the traces of torch's flight recorders as JSON: for NCCL, and for gloo on the CPU.

    A torch without NCCL has only the second function, and some versions have neither.
    """
    recorders = getattr(torch._C, "_distributed_c10d", None)
    dumps = (getattr(recorders, f"_dump_{name}_trace_json", None) for name in ("nccl", "fr"))
    return tuple(dump for dump in dumps if dump is not None)


if not find_flight_recorder_dumps():
    _missing.append(("torch._C._distributed_c10d._dump_fr_trace_json", "the last collective calls of a hung rank"))


@functools.cache
def find_symmetric_memory_op(name: str) -> Function:
    """Return an operation of torch's symmetric memory (direct access to the memory of other GPUs), such as
    "fused_all_gather_matmul".

    Raises:
        ImportError: torch has no symmetric memory.
        MissingTorchName: when the returned function is called, if symmetric memory lacks the operation.
    """
    import torch.distributed._symmetric_memory  # defines the operations

    path, unavailable = f"torch.ops.symm_mem.{name}", PRIVATE_MODULES["torch.distributed._symmetric_memory"]
    op: Function | None = getattr(torch.ops.symm_mem, name, None)
    return functools.partial(_raise_missing, path, unavailable) if op is None else op


def get_compiler_mode_options(mode: str) -> dict[str, Any]:
    """Return the compiler options, by name, that a mode of `torch.compile` such as "max-autotune" stands for."""
    return dict(torch._inductor.list_mode_options(mode))


def configure_compiler(*, max_recompilations: int, max_recompilations_of_all: int) -> None:
    """Limit how often `torch.compile` recompiles, and keep it from reusing the memory of backward's inputs.

    The compiler must not reuse this memory, because host copies and deferred weight gradients read these inputs after the backward.

    Args:
        max_recompilations: torch's setting `recompile_limit`.
        max_recompilations_of_all: torch's setting `accumulated_recompile_limit`.
    """
    torch._dynamo.config.recompile_limit = max_recompilations
    torch._dynamo.config.accumulated_recompile_limit = max_recompilations_of_all
    torch._functorch.config.donated_buffer = False
