"""Huge pages: which memory is asked for, and that nothing is done where memory has not grown."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support import huge_pages

MAPS = """\
00400000-00a00000 r-xp 00000000 08:01 123                                /usr/bin/python
01100000-02f00000 rw-p 00000000 00:00 0                                  [heap]
7f0000000000-7f0000500000 rw-p 00000000 00:00 0
7f0001000000-7f0001100000 rw-p 00000000 00:00 0
7f0002000000-7f0002800000 rw-p 00000000 08:01 124                        /usr/lib/torch.so
7f0003000000-7f0003800000 rw-s 00000000 00:01 125                        /dev/shm/ranks
7ffd00000000-7ffd00800000 rw-p 00000000 00:00 0                          [stack]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such call")
def test_whole_huge_pages_of_private_memory_are_collapsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Mock()
    monkeypatch.setattr(huge_pages, "_LIBC", library)
    monkeypatch.setattr(huge_pages, "_resident", 0)
    monkeypatch.setattr(huge_pages, "_resident_bytes", lambda: 1 << 30)
    monkeypatch.setattr(Path, "read_text", lambda path: MAPS)
    huge_pages.collapse_pages()
    huge_pages.collapse_pages()
    asked = [(start.value, length.value) for (start, length, _), _ in library.madvise.call_args_list]
    assert asked == [(0x1200000, 0x1C00000), (0x7F0000000000, 0x400000)], "the heap from its first whole page on, and one other"
