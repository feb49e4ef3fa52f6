"""Checksums of boxes, and one digest of a whole checkpoint."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable

from megatron.checkpoint.errors import CheckpointError

_KIND = "crc32:"


def checksum(data: memoryview | bytes) -> str:
    """Checksum of raw bytes, with its kind: `crc32:` and eight hexadecimal digits (zlib's CRC-32, as in gzip)."""
    return f"{_KIND}{zlib.crc32(data):08x}"


def matches(data: memoryview | bytes, expected: str) -> bool:
    """Whether raw bytes have the checksum that was stored for them.

    Raises:
        CheckpointError: the stored checksum is of a kind that this program does not know.
    """
    if not expected.startswith(_KIND):
        raise CheckpointError(f"checksum {expected!r} is of an unknown kind: update the program that loads")
    return checksum(data) == expected


def content_digest(entries: Iterable[str]) -> str:
    """Digest of what a checkpoint holds: the SHA-256 of its entries, sorted, each ended by a newline.

    It does not depend on which rank wrote what into which file. Equal content in other boxes (another layout) has another
    digest.
    """
    total = hashlib.sha256()
    for entry in sorted(entries):
        total.update(entry.encode())
        total.update(b"\n")
    return total.hexdigest()
