"""Ranks that cost little: they talk through shared memory, and stay for the whole test process where they run no closure."""

from __future__ import annotations

import atexit
import functools
import io
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_lab.verification.local_ranks import LocalRank, LocalWorld, collect_results, fork_rank, kill_ranks, run_ranks
from tests.support.shared_memory import SHARED_MEMORY

_CALLS_OF_A_RANK = 400
"""Then it ends, and another is forked: torch keeps something of every group that there was, and with it the memory that its ranks
shared. After some thousands a call takes several times as long."""


class RankPool:
    """Ranks that stay from call to call, so that a call costs neither forks nor a first step in a cold process.

    Each call forms a process group of its own. A rank keeps everything else (caches, patched modules), so a
    function must change nothing but its own objects. After a failure the next call forks anew.
    """

    def __init__(self) -> None:
        self._ranks: list[LocalRank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._calls = 0
        atexit.register(self.close)  # before multiprocessing waits for its processes

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0, backend: str = SHARED_MEMORY
    ) -> list[Any]:
        """`run_ranks` for a function that can be pickled with its arguments.

        Its module must have been imported before the ranks were forked, or be on their path.

        Raises:
            RanksError: as in `run_ranks`.
        """
        self._calls += 1
        if self._calls % _CALLS_OF_A_RANK == 0:
            self.close()
        folder = Path(self._folder.name)
        world = LocalWorld(world_size, folder / f"store-{self._calls}", timeout, backend)
        job = pickled((function, args))
        try:
            for number in range(len(self._ranks), world_size):
                self._ranks.append(fork_rank(number, folder, lambda connection: iter(connection.recv, None)))
            ranks = self._ranks[:world_size]
            for rank in ranks:
                rank.connection.send((world, _PickledCall(job)))
            return collect_results(ranks, timeout, folder)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks; a later call forks new ones."""
        kill_ranks(self._ranks)
        self._ranks = []


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays: torch takes a tenth of a millisecond for each of hundreds of small ones, in every rank."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.dtype in _ARRAYS and obj.device.type == "cpu" and not obj.requires_grad:
            return torch.from_numpy, (obj.numpy(),)
        return NotImplemented


_ARRAYS = (torch.float64, torch.float32, torch.int64, torch.bool)


def pickled(value: Any) -> bytes:
    """The bytes of which `pickle.loads` makes a value. Tensors that share memory are apart in it."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


@dataclass(frozen=True)
class _PickledCall:
    """A function and its arguments. They are unpickled where they are called, so that an error in this is reported as any other."""

    job: bytes

    def __call__(self, rank: int) -> Any:
        function, args = pickle.loads(self.job)
        return function(rank, *args)


run_warm_ranks = RankPool().run
run_forked_ranks = functools.partial(run_ranks, backend=SHARED_MEMORY)
"""`run_ranks` over shared memory, for closures."""
