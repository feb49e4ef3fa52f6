"""Whether the disk will hold the whole job, known long before it is full."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from megatron.data.preprocess import storage
from megatron.data.preprocess.parts import ShardReport

_SHARE_TO_JUDGE_BY = 0.01


class Room:
    """Says once if there will not be enough: the parts and the joined files lie there together for a while.

    Args:
        folder: Of the parts.
        num_bytes: Of the whole input.
        warn: Given the line.
    """

    def __init__(self, folder: str, num_bytes: int, warn: Callable[[str], None]) -> None:
        self._folder, self._total, self._warn = folder, num_bytes, warn
        self._read = self._written = 0
        self._told = storage.is_url(folder)

    def listen(self, report: ShardReport) -> None:
        """Take in what a shard became."""
        self._read += report.num_bytes
        self._written += sum(int(str(size)) for size, _ in report.files.values())
        if self._told or self._read < _SHARE_TO_JUDGE_BY * self._total:
            return
        whole = self._written * self._total / max(self._read, 1)
        needed, free = 2 * whole - self._written, shutil.disk_usage(self._folder).free
        if free < needed:
            self._told = True
            self._warn(
                f"WARNING: {self._folder}: the disk has {free / 1e6:,.1f} MB free, but about {needed / 1e6:,.1f} MB more are "
                "needed (the parts, and beside them the joined files). Make room; finished shards are kept for --resume."
            )
