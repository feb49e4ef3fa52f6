"""Warning if ranks differ in properties on which the kernels of torch.compile depend, such as versions and environment variables.

The ranks of a node share the folder of the compiler's cache. Ranks that compile equal graphs at the same time do not disturb each
other, because torch writes a file under a temporary name and renames it.

The kernels that a rank compiles depend on the settings, which are equal on all ranks, and on the properties that
`collect_compiler_inputs` returns. The compiler may also choose kernels by measured times: for some reductions, and in all modes of
max-autotune. Then the kernels depend on these times too, except with --deterministic-mode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata

import torch

_FOLDER_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR")
"""Environment variables that name folders. They may differ between nodes."""


def collect_compiler_inputs(device: torch.device) -> dict[str, str]:
    """Return the properties of this rank on which compiled kernels depend in addition to the settings, by name.

    They are the versions of torch and triton, environment variables of the compiler, and the name of the device.
    """
    versions = {name: version for name in ("torch", "triton") if (version := _get_version(name)) is not None}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("TORCHINDUCTOR_", "TORCH_COMPILE_", "TRITON_")) and name not in _FOLDER_VARIABLES
    }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {**versions, **environment, "device": name}


def _get_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe_differences(rank_inputs: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a warning for each compiler property that differs between ranks.

    Args:
        rank_inputs: for each rank, the result of `collect_compiler_inputs`.
    """
    for name in dict.fromkeys(name for inputs in rank_inputs for name in inputs):
        ranks: dict[str, list[int]] = {}
        for rank, inputs in enumerate(rank_inputs):
            ranks.setdefault(inputs.get(name, "not set"), []).append(rank)
        if len(ranks) > 1:
            values = "; ".join(
                f"{value} on {len(value_ranks)} ranks, such as {value_ranks[0]}" for value, value_ranks in ranks.items()
            )
            yield f"WARNING: ranks may compile different kernels: {name} is {values}. Make it the same on all nodes."
