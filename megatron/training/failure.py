"""Handling of runs that fail: errors on some ranks, non-finite losses, ranks that lose contact with each other.

In each case the run prints one message, exits with a code that identifies the cause, and leaves no rank waiting for another.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, MismatchError, format_list
from megatron.config.launcher import end_with_consequence, end_with_message, write_error_file, write_message
from megatron.optimizer.grad_scaler import LossScaleError
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.training.signals import (
    EXIT_DIVERGED,
    EXIT_INTERRUPTED,
    EXIT_LOST_CONTACT,
    EXIT_REFUSED,
    PROGRESS_FILE_VARIABLE,
    write_exit_code,
)

# ---- Error messages of gloo, NCCL and torch's store about another rank that has died or does not connect.
#
# Such an error is a consequence: the rank that failed first prints the cause. NCCL messages contain the name of the error, and the
# cause after "Last error". Faults of this rank's own device or settings (ncclUnhandledCudaError, ncclInvalidUsage) are not lost
# contact, and the user needs their traceback.

_LOST_CONTACT_SIGNS = (
    # sockets of gloo, NCCL and the store
    "connection closed by",
    "connection reset",
    "connection refused",
    "connection timed out",
    "broken pipe",
    "socket closed",
    "socket timeout",
    "unexpected eof",
    "failed to recv, got 0 bytes",
    # timeouts
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
_LOCAL_FAULTS = ("ncclunhandledcudaerror", "ncclinvalidusage", "ncclinvalidargument")
_UNHELPFUL_TEXT = re.compile(
    r"(\. This is typically caused by|\. This may indicate a possible|\n?Exception raised from) .*", re.DOTALL
)
"""Parts of a library's error message that are left out: general advice and C++ stack traces."""
_NCCL_ERROR = re.compile(r"\bnccl[A-Z]\w*Error\b")
_LAST_ERROR = re.compile(r"Last error: *\n? *([^\n]+)")


def describe_lost_contact(message: str) -> str | None:
    """Return the line of a library's error message (such as NCCL's) that best explains why contact with another rank was lost.
    Return None if the message reports another error."""
    lowered = message.lower()
    if any(fault in lowered for fault in _LOCAL_FAULTS) or not any(sign in lowered for sign in _LOST_CONTACT_SIGNS):
        return None
    last_error = _LAST_ERROR.search(message)
    if last_error is not None:
        error_name = _NCCL_ERROR.search(message)
        return f"{error_name.group()}: {last_error.group(1).strip()}" if error_name else last_error.group(1).strip()
    lines = [line.strip() for line in _UNHELPFUL_TEXT.sub("", message).splitlines() if line.strip()]
    matching = [line for line in lines if any(sign in line.lower() for sign in _LOST_CONTACT_SIGNS)]
    return (matching or lines or [message.strip()])[0]


T = TypeVar("T")


class SetupError(ValueError):
    """Error in the setup of a run that the user can fix. It is raised on all ranks if it occurs on any of them.

    Args:
        is_permanent: True if a restart with the same settings would fail in the same way. A launcher then does not restart the job.
    """

    def __init__(self, message: str, *, is_permanent: bool = False) -> None:
        super().__init__(message)
        self.is_permanent = is_permanent


def run_on_all_ranks(context: ParallelContext, action: Callable[[], T]) -> T:
    """Run `action` on every rank, and raise an error on every rank if it fails on any of them.

    The action must not use collectives: a rank whose action fails would leave the others waiting.

    Returns:
        the result of the action on this rank.

    Raises:
        SetupError: on every rank, if `action` raises ValueError or OSError on any rank. The message contains each distinct error
            message once, with the ranks that raise it.
    """
    failure, result, is_mismatch, is_file_error = None, None, False, False
    try:
        result = action()
    except (ValueError, OSError) as error:
        failure = str(error) or type(error).__name__
        is_mismatch, is_file_error = isinstance(error, MismatchError), isinstance(error, OSError | DamagedCheckpointError)
    failures: dict[str, list[int]] = {}
    outcomes = gather_objects((failure, is_mismatch, is_file_error), context.world)
    for rank, (message, _, _) in enumerate(outcomes):
        if message is not None:
            failures.setdefault(message, []).append(rank)
    if failures:
        on_all_ranks = len(failures) == 1 and len(next(iter(failures.values()))) == context.world.size
        raise SetupError(
            "\n".join(message if on_all_ranks else f"{format_ranks(ranks)}: {message}" for message, ranks in failures.items()),
            # A failure on some ranks only may be a fault of their node, and a file system may recover.
            is_permanent=any(is_mismatch for _, is_mismatch, _ in outcomes)
            or (on_all_ranks and not any(is_file_error for _, _, is_file_error in outcomes)),
        )
    return result  # type: ignore[return-value]


def format_ranks(ranks: list[int]) -> str:
    return f"rank {format_list([str(rank) for rank in ranks])}"


class SharedError(RuntimeError):
    """Failure of the run that is raised on every rank at the same time, with the same message."""


class DivergedError(SharedError):
    """Error for a loss that has diverged, so that further steps are useless."""


class AuditError(SharedError):
    """Error that a consistency check of the run has found, raised on every rank with the same message.

    For example, the replicas of a parameter differ. Or the gradient of a parameter was not summed over all ranks that compute a
    part of it.
    """


class NonFiniteError(DivergedError):
    """Error for a loss or gradient that is NaN or infinite in a run without --fp16. (With --fp16, the loss scale is reduced
    instead.) Also raised if the loss mask excludes all tokens of a batch."""


def raise_empty_loss_mask(iteration: int) -> NoReturn:
    """Raise the error for a global batch whose loss mask is zero at every token, so that the mean loss is undefined. All ranks call
    this function.

    Raises:
        NonFiniteError: always.
    """
    raise NonFiniteError(
        f"iteration {iteration}: the loss mask is zero at every token of the global batch, so there is no loss to train on.\n"
        "  Look for documents without text in the dataset (--eod-mask-loss masks the ends of documents,\n"
        "  --data-loss-mask masks all tokens that the data does not mark for training),\n"
        f"  or skip the batch with --iterations-to-skip {iteration}."
    )


_OUT_OF_MEMORY_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cublas_status_alloc_failed",
    "failed to cuda calloc",
)
"""Phrases in the out-of-memory messages of PyTorch's allocators, CUDA, cuBLAS and NCCL."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error reports that device memory or host memory is exhausted."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _OUT_OF_MEMORY_SIGNS)


_SHARED_ERRORS = (KeyboardInterrupt, SetupError, LossScaleError, CheckpointError, SharedError)
"""Errors that are raised on every rank with the same message, so that one rank prints it."""


_MAX_ERROR_CHARS = 600
"""Maximum length of the text of an unexpected error in the error file. The log contains the complete text."""


@dataclass
class Explanations:
    """Registry of functions by which components of a run explain errors. A function returns a message for the user, the name of a
    lost rank, or an exit code."""

    explainers: list[tuple[Callable[[BaseException], bool], Callable[[BaseException], str]]] = field(default_factory=list)
    """Pairs of functions (matches, format_message). `matches` returns whether the pair can explain an error, and
    `format_message` returns the message for the user."""
    find_lost_rank: Callable[[str], str | None] = lambda reason: None
    """Function that takes a library's error message about lost contact with another rank. It returns the name of that rank, or
    None if it is not known."""
    requested_exit_code: Callable[[], int] = lambda: 0
    """Function that returns the exit code that another component (such as the hang watcher) requests for this rank, or 0. This
    code takes precedence, because the rank's error is then only a consequence."""

    def explain(self, error: BaseException) -> str | None:
        """Return the message of the first pair in `explainers` that can explain the error, or None."""
        return next((format_message(error) for matches, format_message in self.explainers if matches(error)), None)


@contextmanager
def report_failures() -> Iterator[Explanations]:
    """Print a message for an exception that leaves the `with` block, and end the process at once.

    The process neither waits for a collective nor shuts down the process group, because both could hang. The launcher then ends the
    other ranks.

    Yields:
        the registry in which components of the run add explanations of errors.
    """
    explanations = Explanations()
    try:
        yield explanations
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - all failures end here
        code = explanations.requested_exit_code() or _choose_exit_code(error, explanations)
        _flush_stdout()
        _report_error(error, explanations)
        _exit_process(code)


def exit_immediately(code: int = 0) -> None:
    """End this rank of a parallel job at once, without the normal shutdown of Python. Called after the rank has succeeded or has
    stopped on request.

    During the normal shutdown, a gloo thread that frees a tensor can abort the process (observed in one of 30 runs). The launcher
    would then report a failed job. A process that runs alone with code 0 returns normally.
    """
    if code or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        _flush_stdout()
        _exit_process(code)


def _choose_exit_code(error: BaseException, explanations: Explanations) -> int:
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if PROGRESS_FILE_VARIABLE in os.environ:
        if isinstance(error, MismatchError) or (isinstance(error, SetupError) and error.is_permanent):
            return EXIT_REFUSED
        if isinstance(error, (DivergedError, LossScaleError)):
            return EXIT_DIVERGED
    is_explained = (
        explanations.explain(error) is not None or isinstance(error, _SHARED_ERRORS) or not isinstance(error, RuntimeError)
    )
    return (
        EXIT_LOST_CONTACT
        if PROGRESS_FILE_VARIABLE in os.environ and not is_explained and _is_parallel() and describe_lost_contact(str(error))
        else 1
    )


def _report_error(error: BaseException, explanations: Explanations) -> None:
    """Print the message for an error that ends this rank, and write it to the error file of the launcher."""
    rank = f"rank {os.environ.get('RANK', 0)}: " if _is_parallel() else ""
    if (explanation := explanations.explain(error)) is not None:
        return _end_with_cause(f"{rank}{explanation}")
    if isinstance(error, _SHARED_ERRORS):
        return end_with_message("interrupted" if isinstance(error, KeyboardInterrupt) else str(error))
    if isinstance(error, (ValueError, OSError)) and _is_raised_by_framework(error):
        return _end_with_cause(f"{rank}{error}")
    if isinstance(error, RuntimeError) and "Storage size calculation overflowed" in str(error):
        return _end_with_cause(
            f"a tensor of this model is larger than any memory ({error}): look at --hidden-size, --seq-length and the vocabulary"
        )
    reason = (
        describe_lost_contact(str(error)) if isinstance(error, RuntimeError) else None
    )  # torch's DistError is a RuntimeError too
    if _is_parallel() and reason is not None:
        lost_rank = explanations.find_lost_rank(reason) or "another rank"
        return end_with_consequence(
            f"{rank}lost contact with {lost_rank}, at {_locate(error)}: {reason.rstrip('.')}. The rank that failed first says why."
        )
    write_message(f"rank {os.environ.get('RANK', 0)}:\n{''.join(traceback.format_exception(error))}")
    text = textwrap.shorten(str(error), _MAX_ERROR_CHARS, placeholder=" ...")
    write_error_file(f"{rank}{type(error).__name__} at {_locate(error)}: {text}\n  The log of the rank contains the traceback.")


def _end_with_cause(message: str) -> None:
    """Report an error of which this rank is the cause."""
    write_message(message)
    write_error_file(message)


def _locate(error: BaseException) -> str:
    """Return the place of an error as a text such as "loop.py:12 in run": the last call of the framework, or else the last call."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([frame for frame in frames if "megatron" in frame.filename] or list(frames))[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"


def _is_raised_by_framework(error: BaseException) -> bool:
    """Return whether the framework's code raised the error. The message then tells the user what to do, so no traceback is
    printed."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, OSError) or (bool(frames) and re.search(r"[/\\]megatron(_lab)?[/\\]", frames[-1].filename) is not None)


def _is_parallel() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _flush_stdout() -> None:
    with suppress(OSError, ValueError):  # the pipe may be closed or the disk full
        sys.stdout.flush()


def _exit_process(code: int) -> NoReturn:
    write_exit_code(code)
    os._exit(code)
