"""Imports that forked ranks would otherwise each make for themselves, a second or more every time."""

from __future__ import annotations


def import_before_fork() -> None:
    """Import what only some runs need, and only when they need it."""
    import torch._dynamo  # noqa: F401  # fully_shard imports it

    import megatron.data_parallel.fsdp  # noqa: F401
