"""What a start of the run has made so far, for a launcher that starts ranks again. Needs no torch.

The launcher names a file in the environment. The first rank of the node writes two numbers into it: the iteration of the state from
which the start began, and the last iteration that it finished. Any rank may add a third (`tell_end`).
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress

from megatron.config.launcher import launched

LIFE_FILE = "MEGATRON_LIFE_FILE"
"""Variable of the environment with its path."""
LOST_CONTACT = 87
"""Exit code with which a rank tells such a launcher that it only lost contact with another; any other launcher gets 1."""
REFUSED, DIVERGED = 2, 88
"""Exit codes of ranks that another start would end in the same way: for settings that are wrong or do not go with the checkpoint;
for numbers that are not finite, or loss spikes that come again. Any other launcher gets 1 for all but wrong settings."""
_FORM, _END = struct.Struct("<qq"), struct.Struct("<q")


class LifeNote:
    """Writes the file, where there is one.

    Args:
        began: the iteration from which the run goes on.
    """

    def __init__(self, began: int) -> None:
        path = os.environ.get(LIFE_FILE) if launched().local_rank == 0 else None
        self._began = began
        self._file = None if path is None else os.open(path, os.O_WRONLY)
        self.finished(began)

    def finished(self, iteration: int) -> None:
        """An iteration is finished."""
        if self._file is not None:
            os.pwrite(self._file, _FORM.pack(self._began, iteration), 0)


def tell_end(code: int) -> None:
    """A rank ends with a code that every other start would end with: a third number, for launchers that see no codes of ranks."""
    path = os.environ.get(LIFE_FILE)
    if path is not None and code in (REFUSED, DIVERGED):
        with suppress(OSError):
            file = os.open(path, os.O_WRONLY)
            os.pwrite(file, _END.pack(code), _FORM.size)
            os.close(file)


def read_life(path: str) -> tuple[int, int] | None:
    """Both numbers; None if training has not begun."""
    with open(path, "rb") as file:
        found = file.read(_FORM.size)
    return None if len(found) < _FORM.size else _FORM.unpack(found)  # type: ignore[return-value]
