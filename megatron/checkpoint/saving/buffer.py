"""Host memory that training fills and the writing process reads."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch


class SharedBuffer:
    """Memory of a fixed size behind a file descriptor, which another process can map too. It has no name, so nothing of it is left
    when both have ended, however they ended.

    All of it is touched once when it is made: the first copy into fresh memory takes several times as long as later ones.

    Args:
        num_bytes: its size.
        pinned: for data of a CUDA device, so that copies run at the speed of the bus (where the system allows it).

    Raises:
        OSError: there is not so much memory.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        size = max(num_bytes, 1)
        self.fd = _anonymous_file()
        try:
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except OSError as error:
            os.close(self.fd)
            raise OSError(error.errno, f"no host memory for the copy of {size:,} bytes (--async-save): {error.strerror}") from error
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned = pinned and int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), size, 0)) == 0

    def close(self) -> None:
        """Give the memory back, as soon as no view of it is left."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self._pinned = False
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        del self.bytes, self._map


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("checkpoint", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
