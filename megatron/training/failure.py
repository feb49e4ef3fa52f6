"""How a run ends before its time: ranks that agree on a failure, numbers that are not finite, a rank that cannot go on.

In each case there is one clear message, an exit code that says how it went, and no rank left waiting for another.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, MismatchError, listed
from megatron.optimizer.grad_scaler import LossScaleError
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.training.signals import DIVERGED, LIFE_FILE, LOST_CONTACT, REFUSED, tell_end

# ---- What gloo, NCCL and torch's store say when another rank has gone or does not come, and the part of it that helps a reader.
#
# Such an error is a consequence: the rank that failed first says why. NCCL names its kind, and the cause behind "Last error".
# Faults of this rank's own device or settings (ncclUnhandledCudaError, ncclInvalidUsage) are none of these and need their
# traceback.

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


T = TypeVar("T")


class SetupError(ValueError):
    """Something that the user can fix was wrong on at least one rank.

    Args:
        final: every start with the same settings would find it.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


def together(context: ParallelContext, action: Callable[[], T]) -> T:
    """Run an action without collectives on every rank, and agree on whether it succeeded.

    Raises:
        SetupError: on every rank, if the action raised ValueError or OSError on any; names the ranks and gives each message once.
    """
    failure, result, misfit, of_files = None, None, False, False
    try:
        result = action()
    except (ValueError, OSError) as error:
        failure = str(error) or type(error).__name__
        misfit, of_files = isinstance(error, MismatchError), isinstance(error, OSError | DamagedCheckpointError)
    failures: dict[str, list[int]] = {}
    found = gather_objects((failure, misfit, of_files), context.world)
    for rank, (message, _, _) in enumerate(found):
        if message is not None:
            failures.setdefault(message, []).append(rank)
    if failures:
        everywhere = len(failures) == 1 and len(next(iter(failures.values()))) == context.world.size
        raise SetupError(
            "\n".join(message if everywhere else f"{ranks_in_words(ranks)}: {message}" for message, ranks in failures.items()),
            # What only some ranks meet may be their node's fault, and a file system may recover.
            final=any(one for _, one, _ in found) or (everywhere and not any(one for _, _, one in found)),
        )
    return result  # type: ignore[return-value]


def ranks_in_words(ranks: list[int]) -> str:
    return f"rank {listed([str(rank) for rank in ranks])}"


class SharedError(RuntimeError):
    """A failure of the run itself. Raised on every rank at once with the same words."""


class DivergedError(SharedError):
    """The losses of the run have gone where no further step helps."""


class AuditError(SharedError):
    """Replicas differ, or a gradient was not summed or counted as its record says. Raised on every rank with the same words."""


class NonFiniteError(DivergedError):
    """Loss or gradient is NaN or infinite in a precision without a loss scale."""


def raise_uncounted(iteration: int) -> NoReturn:
    """Raise an error because the loss mask of the whole global batch is zero, so there is no mean. All ranks call it.

    Raises:
        NonFiniteError: always.
    """
    raise NonFiniteError(
        f"iteration {iteration}: the loss mask is zero at every token of the global batch, so there is no loss to train on.\n"
        "  Look for documents without text in the dataset (--eod-mask-loss leaves the ends of documents out of the loss,\n"
        "  --data-loss-mask all that the data does not mark as to be learned),\n"
        f"  or leave the batch out with --iterations-to-skip {iteration}."
    )


_EXHAUSTED = ("out of memory", "can't allocate memory", "not enough memory", "cublas_status_alloc_failed", "failed to cuda calloc")
"""In the messages of torch's allocators, of CUDA, cuBLAS and NCCL."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the device or of the host is exhausted."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _EXHAUSTED)


# Raised on every rank with the same words, so one rank prints them.
_SHARED = (SetupError, LossScaleError, CheckpointError, SharedError)


@dataclass
class Explanations:
    """Words for errors that only the run itself can explain, and the exit code that they leave with."""

    known: list[tuple[Callable[[BaseException], bool], Callable[[BaseException], str]]] = field(default_factory=list)
    """Which errors these are, and the words for each."""
    lost: Callable[[str], str | None] = lambda reason: None
    """Which rank contact is lost with, if that is known, from what torch says."""
    code_asked_for: Callable[[], int] = lambda: 0
    """The exit code that somebody else has asked this rank to end with; 0 where nobody has. What fails then is a consequence."""

    def find(self, error: BaseException) -> str | None:
        """The words for an error, if any are known."""
        return next((words(error) for is_one, words in self.known if is_one(error)), None)


@contextmanager
def reported_failures() -> Iterator[Explanations]:
    """Turn an exception into a message for the user and leave at once: the launcher then ends the other ranks.

    The process does not wait for a collective or for the process group's own shutdown, in which it would hang.
    """
    explanations = Explanations()
    try:
        yield explanations
    except SystemExit:
        raise
    except KeyboardInterrupt:
        _leave(130, "interrupted")
    except BaseException as error:  # noqa: BLE001 - every way to fail ends here
        _leave(explanations.code_asked_for() or _code(error, explanations), _words(error, explanations))


def leave_well(code: int = 0) -> None:
    """End this rank of a parallel job at once, after it has succeeded, or has stopped as it was asked to.

    A thread of gloo that frees a tensor while Python shuts down aborts the process (seen in one of 30 runs), and the launcher
    would report a failed job.
    """
    if code or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        _leave(code, "")


def _code(error: BaseException, explanations: Explanations) -> int:
    if LIFE_FILE in os.environ:
        if isinstance(error, MismatchError) or (isinstance(error, SetupError) and error.final):
            return REFUSED
        if isinstance(error, (DivergedError, LossScaleError)):
            return DIVERGED
    known = explanations.find(error) is not None or isinstance(error, _SHARED) or not isinstance(error, RuntimeError)
    return LOST_CONTACT if LIFE_FILE in os.environ and not known and _parallel() and lost_contact(str(error)) else 1


def _words(error: BaseException, explanations: Explanations) -> str:
    rank = int(os.environ.get("RANK", 0))
    if (explained := explanations.find(error)) is not None:
        return f"rank {rank}: {explained}" if _parallel() else explained
    if isinstance(error, _SHARED):
        return str(error) if rank == 0 else ""
    if isinstance(error, (ValueError, OSError)) and _raised_by_us(error):
        return f"rank {rank}: {error}" if _parallel() else str(error)
    if isinstance(error, RuntimeError) and "Storage size calculation overflowed" in str(error):
        return f"a tensor of this model is larger than any memory ({error}): look at --hidden-size, --seq-length and the vocabulary"
    reason = lost_contact(str(error)) if isinstance(error, RuntimeError) else None  # so are torch's own, DistError
    if _parallel() and reason is not None:
        where = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in where if "megatron" in frame.filename] or list(where)
        call = f"{os.path.basename(ours[-1].filename)}:{ours[-1].lineno} in {ours[-1].name}"
        other = explanations.lost(reason) or "another rank"
        return f"rank {rank}: lost contact with {other}, at {call}: {reason.rstrip('.')}. The rank that failed first says why."
    return f"rank {rank}:\n{''.join(traceback.format_exception(error))}"


def _raised_by_us(error: BaseException) -> bool:
    """Whether the framework itself found the fault and its message says what to do. Any other error needs its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, OSError) or (bool(frames) and re.search(r"[/\\]megatron(_lab)?[/\\]", frames[-1].filename) is not None)


def _parallel() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _leave(code: int, message: str) -> None:
    with suppress(OSError, ValueError):  # nobody may read on, or the disk may be full
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        if message:
            sys.stderr.write(f"pretrain_gpt.py: {message}\n")
        sys.stderr.flush()
    tell_end(code)
    os._exit(code)
