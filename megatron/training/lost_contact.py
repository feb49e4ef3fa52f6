"""What gloo, NCCL and torch's store say when another rank has gone or does not come, and the part of it that helps a reader.

Such an error is a consequence: the rank that failed first says why. NCCL names its kind, and the cause behind "Last error".
Faults of this rank's own device or settings (ncclUnhandledCudaError, ncclInvalidUsage) are none of these and need their traceback.
"""

from __future__ import annotations

import re

_SIGNS = (
    # sockets, of gloo, of NCCL and of the store
    "connection closed by",
    "connection reset",
    "connection refused",
    "connection timed out",
    "broken pipe",
    "socket closed",
    "socket timeout",
    "unexpected eof",
    "failed to recv, got 0 bytes",
    # waits that took too long
    "timed out waiting",
    "wait timeout after",
    "watchdog caught collective operation timeout",
    # NCCL
    "ncclremoteerror",
    "nccl communicator was aborted",
    "nccl operations have failed or timed out",
    "got completion from peer",
    "is setting up nccl communicator and retrieving nccluniqueid",
)
_OWN_FAULTS = ("ncclunhandledcudaerror", "ncclinvalidusage", "ncclinvalidargument")
_NOISE = re.compile(r"(\. This is typically caused by|\. This may indicate a possible|\n?Exception raised from) .*", re.DOTALL)
"""Advice that is no help here, and stacks of C++."""
_KIND = re.compile(r"\bnccl[A-Z]\w*Error\b")
_LAST_ERROR = re.compile(r"Last error: *\n? *([^\n]+)")


def lost_contact(text: str) -> str | None:
    """The line to show of an error that says that contact with another rank is lost; None if it says something else."""
    said = text.lower()
    if any(fault in said for fault in _OWN_FAULTS) or not any(sign in said for sign in _SIGNS):
        return None
    found = _LAST_ERROR.search(text)
    if found is not None:
        kind = _KIND.search(text)
        return f"{kind.group()}: {found.group(1).strip()}" if kind else found.group(1).strip()
    lines = [line.strip() for line in _NOISE.sub("", text).splitlines() if line.strip()]
    telling = [line for line in lines if any(sign in line.lower() for sign in _SIGNS)]
    return (telling or lines or [text.strip()])[0]
