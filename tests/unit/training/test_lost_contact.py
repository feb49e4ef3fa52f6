"""Errors of gloo, NCCL and torch's store, as they are reported in public issues and made in torch's sources."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron.parallel.context import check_error_handling
from megatron.training import failure
from megatron.training.failure import Explanations, describe_lost_contact

STACK = """
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:632 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7fbeb989ef86 in libc10.so)
frame #1: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<std::chrono::duration<long>>) + 0x1d2"""
WATCHDOG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=13, OpType=ALLREDUCE, NumelIn=26214400, "
    "NumelOut=26214400, Timeout(ms)=600000) ran for 600089 milliseconds before timing out."
)
ABORTED = f"NCCL communicator was aborted on rank 1.  Original reason for failure was: {WATCHDOG}"
UNIQUE_ID = (
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', "
    "but store->get('0') got error: "
)
REMOTE = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a network error, "
    "NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
)
SYSTEM = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, unhandled system error (run with NCCL_DEBUG=INFO for "
    "details), NCCL version 2.21.5\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \nLast error:\n"
)
INFINIBAND = "NET/IB : Got completion from peer 10.5.0.34<33956> with error 5, opcode 0, len 1, vendor err 244"
TORN_DOWN = (
    "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations "
    "might run on corrupted/incomplete data."
)
GLOO_CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5123"
GLOO_LATE = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation"
LOST = {
    WATCHDOG + STACK: WATCHDOG,
    ABORTED + STACK: ABORTED,
    REMOTE + "Last error:\nsocketProgressOpt: Call to recv from 172.16.0.3<33759> failed : Connection reset by peer": (
        "ncclRemoteError: socketProgressOpt: Call to recv from 172.16.0.3<33759> failed : Connection reset by peer"
    ),
    REMOTE + f"Last error:\n{INFINIBAND}{STACK}": f"ncclRemoteError: {INFINIBAND}",
    REMOTE: "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, internal error, NCCL version 2.14.3\n"
    "ncclInternalError: Internal check failed.\nLast error:\nNet : Connection closed by remote peer node7<50260>": (
        "ncclInternalError: Net : Connection closed by remote peer node7<50260>"
    ),
    SYSTEM + "Call to connect returned Connection timed out": "ncclSystemError: Call to connect returned Connection timed out",
    TORN_DOWN: TORN_DOWN,
    UNIQUE_ID + "Connection reset by peer. This may indicate a possible application crash on rank 0 or a network set up issue.": (
        UNIQUE_ID + "Connection reset by peer"
    ),
    UNIQUE_ID + "wait timeout after 600000ms" + STACK: UNIQUE_ID + "wait timeout after 600000ms",
    f"{GLOO_CLOSED}. This is typically caused by a remote worker crashing.\nMore": GLOO_CLOSED,
    GLOO_LATE: GLOO_LATE,
}
OTHERS = [
    SYSTEM + "Error while creating shared memory segment /dev/shm/nccl-Xyz (size 9637888): No space left on device",
    "NCCL error in: ../c10d/NCCLUtils.hpp:268, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'uncorrectable ECC error encountered'",
    "NCCL error in: ../c10d/ProcessGroupNCCL.cpp:1287, invalid usage, NCCL version 2.17.1\nncclInvalidUsage: This usually reflects "
    "invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
    "CUDA error: an illegal memory access was encountered",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
]


@pytest.mark.parametrize("text", LOST, ids=lambda text: text[:40])
def test_a_lost_rank_is_recognised_and_told_in_one_line(text: str) -> None:
    assert describe_lost_contact(text) == LOST[text]


def test_what_is_no_lost_rank_keeps_its_traceback() -> None:
    assert [describe_lost_contact(text) for text in OTHERS] == [None] * len(OTHERS)


def test_a_rank_that_lost_contact_says_so_in_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As torch raises it in the main thread. The same text from a file system is no such thing."""
    monkeypatch.setattr(failure, "_is_parallel", lambda: True)
    monkeypatch.setenv("RANK", "3")
    capsys.readouterr()

    def words(kind: type[Exception], text: str, known: Explanations | None = None) -> str:
        try:
            raise kind(text)
        except kind as error:
            failure._report_error(error, known or Explanations())
            return capsys.readouterr().err.removeprefix("pretrain_gpt.py: ").removesuffix("\n")

    told = words(dist.DistBackendError, ABORTED + STACK)
    assert told.startswith("rank 3: lost contact with another rank, at test_lost_contact.py:") and "frame #" not in told
    assert told.endswith("before timing out. The rank that failed first says why.") and "\n" not in told
    known = Explanations(find_lost_rank=lambda reason: "rank 5 (node b)" if "timing out" in reason else None)
    assert "rank 3: lost contact with rank 5 (node b), at " in words(dist.DistBackendError, ABORTED + STACK, known)
    assert "Traceback" in words(dist.DistBackendError, OTHERS[1])
    assert "Traceback" in words(KeyError, "connection refused")


def test_nccl_must_be_allowed_to_end_a_rank() -> None:
    check_error_handling({})
    check_error_handling({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "NCCL_ASYNC_ERROR_HANDLING": "1"})
    with pytest.raises(
        ValueError, match="TORCH_NCCL_ASYNC_ERROR_HANDLING=0 in the environment: after a rank is lost, all other ranks wait"
    ):
        check_error_handling({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
    with pytest.raises(
        ValueError, match="NCCL_ASYNC_ERROR_HANDLING=2 in the environment: after an NCCL error, ranks compute with undefined data"
    ):
        check_error_handling({"NCCL_ASYNC_ERROR_HANDLING": "2"})
