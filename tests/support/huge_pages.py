"""Keep the memory of a process that forks in huge pages.

A fork copies an entry of the page tables for every page of 4 KiB that the parent has touched, and gives them back as it ends: with
torch and all tests in memory that is a sixth of the processor time of a tiny run. Of pages of 2 MiB there are 512 times fewer.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_MADV_COLLAPSE = 25  # Linux 6.1 and newer; older ones refuse it, which changes nothing
_HUGE = 1 << 21
_GROWTH = 64 << 20
"""Bytes that have to be new before the pages are looked at again."""
_LIBC = ctypes.CDLL(None)
_resident = 0


def collapse_pages() -> None:
    """Move this process's memory into huge pages, unless it has hardly grown since the last call. Does nothing beside Linux."""
    global _resident
    if sys.platform != "linux" or _resident_bytes() < _resident + _GROWTH:
        return
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *_, name = [*line.split(None, 5), ""][:6]
        if access != "rw-p" or name not in ("", "[heap]"):
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        start, end = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
        if start < end:
            _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)
    _resident = _resident_bytes()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
