"""Whether all ranks compile alike.

Ranks of a node share the folder of the compiler's cache: torch writes a file under another name and renames it, so ranks that
compile the same graph at the same time do no harm. What a rank compiles depends on the settings, which are the same on all ranks,
and on the facts below. It depends on measured times too, where the compiler chooses between kernels (some reductions, and all modes
of max-autotune), but not with --deterministic-mode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata

import torch

_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR")
"""Variables that name folders, which may differ between nodes."""


def compiler_facts(device: torch.device) -> dict[str, str]:
    """Return what decides, beside the settings, which kernels this rank compiles: versions, its device, the environment."""
    versions = {name: version for name in ("torch", "triton") if (version := _version(name)) is not None}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("TORCHINDUCTOR_", "TORCH_COMPILE_", "TRITON_")) and name not in _FOLDERS
    }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {**versions, **environment, "device": name}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe_differences(facts: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a warning for each fact in which ranks differ.

    Args:
        facts: of each rank, `compiler_facts`.
    """
    for name in dict.fromkeys(name for rank_facts in facts for name in rank_facts):
        ranks: dict[str, list[int]] = {}
        for rank, rank_facts in enumerate(facts):
            ranks.setdefault(rank_facts.get(name, "not set"), []).append(rank)
        if len(ranks) > 1:
            values = "; ".join(f"{value} on {len(those)} ranks, such as {those[0]}" for value, those in ranks.items())
            yield f"WARNING: ranks may compile different kernels: {name} is {values}. Make it the same on all nodes."
