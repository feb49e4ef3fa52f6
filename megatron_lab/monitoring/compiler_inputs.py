"""Comparison of the properties of all ranks on which the kernels of torch.compile depend, with a warning if they differ.

The ranks of a node share the folder of the compiler's cache. Ranks that compile equal graphs at the same time do not disturb each
other, because torch writes a file under a temporary name and renames it.

The kernels that a rank compiles depend on the settings, which are equal on all ranks, and on the properties that
`collect_compiler_inputs` returns. If the compiler measures candidate kernels (some reductions, and all modes of max-autotune), they
also depend on the measured times, but not with --deterministic-mode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata

import torch

_FOLDER_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR")
"""Environment variables that name folders. They may differ between nodes."""


def collect_compiler_inputs(device: torch.device) -> dict[str, str]:
    """Return the properties of this rank on which the compiled kernels depend besides the settings: versions, device, and
    environment variables."""
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
    """Yield a warning for each property that differs between ranks.

    Args:
        rank_inputs: result of `collect_compiler_inputs` on each rank.
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
