"""Whole runs of pretrain_gpt.py, from the command line to the exit code, in processes forked from the test's.

A forked rank has torch imported already, so that a run of a tiny model on several ranks takes about a second. Each rank calls
`pretrain_gpt.main` and ends as a rank started by torchrun does; the test keeps the store that torchrun's agent would keep.
Ranks talk through shared memory, which takes a third less of the processor than gloo.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it: once here, not in every forked rank
import torch.distributed as dist

import pretrain_gpt
from megatron.checkpoint.global_tensor import get_torch_dtype
from megatron.checkpoint.save_folder import read_state
from megatron.config.flags import get_flags
from megatron.config.save import _read_versions
from megatron.parallel import context
from megatron.parallel.accumulate import GradSink, get_grad_sink
from megatron.parallel.context import get_world_backend
from megatron.training.step import TrainStep
from megatron_lab.monitoring import start_up_log
from megatron_lab.verification.local_ranks import kill_process_group
from tests.support.checkpoint_worlds import load_tensors, read_manifest, whole
from tests.support.cli import ROOT, command_words, fork_program
from tests.support.shared_memory import SHARED_MEMORY

# What a run imports late and works out once: here, not in every forked rank.
_LATE = ("audit", "flight", "monitoring", "node_memory", "planner", "tokenizers")
for _folder in (ROOT / "megatron", *(ROOT / "megatron_lab" / _name for _name in _LATE)):
    for _file in sorted(_folder.glob("*/*.py" if _folder.name == "megatron" else "*.py")):
        _module = ".".join(_file.relative_to(ROOT).with_suffix("").parts)
        if not _module.endswith(("__init__", "_child", ".writer_main", ".keeper", ".watcher")):
            importlib.import_module(_module)
get_flags()
_read_versions()

TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "lr": 1e-2,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 60,
    "num_workers": 0,
    "eval_iters": 0,
    "log_interval": 1,
    "hang_warn_s": 0,
    "no_loss_picture": True,
    "no_report": True,
}
"""Settings of a run that takes about 10 ms for a microbatch. The vocabulary (61 with the end of document) divides by nothing."""

_TIMES = ("elapsed_ms", "tokens_per_s", "tflops_per_device", "goodput")


def arguments(**settings: Any) -> list[str]:
    """The command line of `TINY` with changes: flags by the names of their fields; None and False are left out."""
    return command_words({name: value for name, value in {**TINY, **settings}.items() if value is not False})


@dataclass(frozen=True)
class Ended:
    """How one rank ended: its exit code (negative for a signal) and what it said."""

    code: int
    stdout: str
    stderr: str


def launch(
    argv: Sequence[str],
    world_size: int = 1,
    *,
    before: Callable[[int], None] | None = None,
    gloo: bool = False,
    timeout: float = 60.0,
) -> list[Ended]:
    """Run pretrain_gpt.py on every rank of a job and wait until all have ended by themselves.

    Args:
        before: called in each rank with its number before the run begins; may change what the run will call.
        gloo: ranks talk through gloo, which notices when one ends before the others; by default through shared memory.

    Raises:
        AssertionError: a rank had not ended after `timeout` seconds; with where each of them was.
    """

    def prepare(rank: int) -> None:
        start_up_log.build_advice = lambda *_: []  # which takes a third of the start of a run with pipeline stages
        if not gloo:
            context.get_world_backend = lambda backend: SHARED_MEMORY if backend == "gloo" else get_world_backend(backend)
        if before is not None:
            before(rank)

    with tempfile.TemporaryDirectory(prefix="run-") as name:
        files = [(Path(name) / f"{rank}.out", Path(name) / f"{rank}.err") for rank in range(world_size)]
        read_end, write_end = os.pipe()
        pids: dict[int, int] = {}
        codes: dict[int, int] = {}
        try:
            for rank in range(world_size):
                pids[rank] = fork_program(partial(_rank, rank, world_size, argv, prepare, read_end), *files[rank])
            # After the forks, since the store has a thread.
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if world_size > 1 else None
            os.write(write_end, f"{store.port if store else 0:5d}".encode() * world_size)
            _wait(pids, codes, timeout)
            late = [rank for rank in pids if rank not in codes]
            for rank in late:
                os.kill(pids[rank], signal.SIGQUIT)
            if late:
                time.sleep(0.3)  # for the stacks to be written
            ended = [Ended(codes.get(rank, 0), *(file.read_text() for file in files[rank])) for rank in pids]
            assert not late, f"ranks {late} had not ended after {timeout:g} s\n{report(ended)}"
            return ended
        finally:
            for rank, pid in pids.items():
                if rank not in codes:
                    kill_process_group(pid)
                    os.waitpid(pid, 0)
            os.close(read_end)
            os.close(write_end)


def run(argv: Sequence[str], world_size: int = 1, **options: Any) -> str:
    """`launch` for a run in which every rank must end with exit code 0. Returns what rank 0 printed."""
    ended = launch(argv, world_size, **options)
    assert all(end.code == 0 for end in ended), report(ended)
    return ended[0].stdout


def report(ended: Sequence[Ended]) -> str:
    """How every rank ended, for the message of a failed assertion."""
    return "\n".join(
        f"--- rank {rank} ended with {end.code}\n{end.stdout[-3000:]}{end.stderr[-3000:]}" for rank, end in enumerate(ended)
    )


def _rank(rank: int, world_size: int, argv: Sequence[str], prepare: Callable[[int], None], port: int) -> None:
    faulthandler.register(signal.SIGQUIT, file=sys.stderr, all_threads=True)
    found = os.read(port, 5).decode().strip()
    if world_size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": found,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else ""),
        }
    prepare(rank)
    pretrain_gpt.main(list(argv))


def _wait(pids: Mapping[int, int], codes: dict[int, int], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    # Of a process that has ended there is something to read. Elsewhere they are looked at again and again.
    ends = {rank: os.pidfd_open(pid) for rank, pid in pids.items()} if sys.platform == "linux" else {}
    try:
        while len(codes) < len(pids) and (left := deadline - time.monotonic()) > 0:
            if ends:
                wait([end for rank, end in ends.items() if rank not in codes], left)
            else:
                time.sleep(0.005)
            for rank, pid in pids.items():
                if rank not in codes:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        codes[rank] = os.waitstatus_to_exitcode(status)
    finally:
        for end in ends.values():
            os.close(end)


def at_iteration(iteration: int | None, action: Callable[[TrainStep], None]) -> None:
    """In this process, call `action` just before the step of an iteration is made; None for each."""
    original = TrainStep.run

    def changed(self: TrainStep, *args: Any, **named: Any) -> Any:
        if iteration in (None, named["iteration"]):
            action(self)
        return original(self, *args, **named)

    TrainStep.run = changed  # type: ignore[method-assign]


def spoil(value: float, name: str | None = None) -> Callable[[TrainStep], None]:
    """For `at_iteration`: write a value into this rank's own gradient, once, before gradients are summed over ranks.

    Args:
        name: of the parameter; by default the first that gets a gradient.
    """

    def action(step: TrainStep) -> None:
        wrote = GradSink._finish_write

        def spoiled(self: GradSink) -> None:
            if name is None or get_grad_sink(step.model.params[name].param) is self:
                GradSink._finish_write = wrote  # type: ignore[method-assign]
                assert self.main_grad is not None
                self.main_grad.view(-1)[0] = value
            wrote(self)

        GradSink._finish_write = spoiled  # type: ignore[method-assign]

    return action


def on_rank(chosen: int, iteration: int, action: Callable[[TrainStep], None]) -> Callable[[int], None]:
    """For `before`: `at_iteration` on one rank only."""
    return lambda rank: at_iteration(iteration, action) if rank == chosen else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file without what depends on the clock: equal for equal runs, in full digits."""
    return [{name: value for name, value in line.items() if name not in _TIMES} for line in read_metrics(path)]


def losses(path: Path) -> list[float]:
    return [line["lm_loss"] for line in read_metrics(path) if "lm_loss" in line]


def checkpoint(folder: Path, iteration: int) -> Path:
    return folder / f"iter_{iteration:07d}"


def digest(folder: Path, iteration: int) -> str:
    """Digest of everything that a checkpoint holds: weights, moments, scaler and counts, bit for bit."""
    return read_manifest(checkpoint(folder, iteration)).digest


def saved_state(folder: Path, iteration: int) -> dict[str, Any]:
    return read_state(checkpoint(folder, iteration))


def saved_tensors(folder: Path, iteration: int, kind: str = "model") -> dict[str, torch.Tensor]:
    """Whole tensors of a checkpoint, whatever its layout: weights, or moments such as exp_avg; all, by their full names, for ''."""
    path, prefix = checkpoint(folder, iteration), f"{kind}." if kind else ""
    stored = {name: tensor for name, tensor in read_manifest(path).tensors.items() if name.startswith(prefix)}
    found = {name: torch.full(tensor.shape, torch.nan, dtype=get_torch_dtype(tensor.dtype)) for name, tensor in stored.items()}
    load_tensors(path, [whole(name, tensor) for name, tensor in found.items()], allow_unused=lambda _: True)
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def complete_checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("iter_*"))
