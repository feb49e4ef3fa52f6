"""How a rank ends that cannot go on: one clear message, an exit code that is not 0, and no rank left hanging."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron.audit.replicas import AuditError
from megatron.checkpoint.errors import CheckpointError
from megatron.optimizer.grad_scaler import LossScaleError
from megatron.training.nonfinite import NonFiniteError
from megatron.training.together import SetupError

# Raised on every rank with the same words, so one rank's voice is enough.
_SHARED = (SetupError, NonFiniteError, LossScaleError, CheckpointError, AuditError)
_LOST_CONTACT = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "timed out waiting",
    "socket closed",
    "unexpected eof",
)


@contextmanager
def reported_failures() -> Iterator[None]:
    """Turn an exception into words for the user and leave at once: the launcher then ends the other ranks.

    The process does not wait for a collective or for the process group's own shutdown, in which it would hang.
    """
    try:
        yield
    except SystemExit:
        raise
    except KeyboardInterrupt:
        _leave(130, "interrupted")
    except BaseException as error:  # noqa: BLE001 - every way to fail ends here
        _leave(1, _words(error))


def leave_well() -> None:
    """End a rank of a parallel job that is done, at once.

    A thread of gloo that lets go of a tensor while Python shuts down aborts the process (seen in one of 30 runs), and the launcher
    would report a failed job.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        _leave(0, "")


def _words(error: BaseException) -> str:
    rank = int(os.environ.get("RANK", 0))
    if isinstance(error, _SHARED):
        return str(error) if rank == 0 else ""
    if isinstance(error, (ValueError, OSError)) and _raised_by_us(error):
        return f"rank {rank}: {error}" if _parallel() else str(error)
    text = str(error).lower()
    if _parallel() and any(sign in text for sign in _LOST_CONTACT):
        where = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in where if "megatron" in frame.filename] or list(where)
        call = f"{os.path.basename(ours[-1].filename)}:{ours[-1].lineno} in {ours[-1].name}"
        first_line = str(error).splitlines()[0].split(". This is typically caused by")[0]  # what gloo advises is no help here
        return f"rank {rank}: lost contact with another rank at {call}: {first_line}. The rank that failed first says why."
    return f"rank {rank}:\n{''.join(traceback.format_exception(error))}"


def _raised_by_us(error: BaseException) -> bool:
    """Whether the framework itself found the fault and says what to do; any other error needs its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, OSError) or (bool(frames) and f"{os.sep}megatron{os.sep}" in frames[-1].filename)


def _parallel() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _leave(code: int, message: str) -> None:
    sys.stdout.flush()
    if message:
        sys.stderr.write(f"pretrain_gpt.py: {message}\n")
    sys.stderr.flush()
    os._exit(code)
