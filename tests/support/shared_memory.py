"""A process group of ranks on one machine that exchange tensors through shared memory: a backend of the tests.

For proofs on many ranks. On eight of them, on two cores, a sum of a few numbers through gloo costs each rank 3 ms of processor
time, most of it in the system, since its rings wake sleeping threads some 70 times; here it costs 0.1 ms. And it is stricter than a
library:

- A result is there only after `wait`: whoever reads before sees the old values, in every run.
- At `wait`, what was given to the collective must still be as it was: whoever writes into it too early is told.
- Ranks that call different collectives, or with other sizes, are told.

Sums are made in the order of the ranks, the same on every rank. Each rank has a box for each receiver of messages and one for
collectives. What it gives is copied into the box at once; readers say when they are through, so that memory is used again.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

SHARED_MEMORY = "shared_memory"
"""Name of the backend."""

_SLOTS = 1024
_WORD = 4
_RECORD = 16  # of a slot: offset, bytes, kind of the call
_DATA = 1 << 26
_FUTEX, _WAIT, _WAKE = 202, 0, 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_UNREAD = 16
"""Calls after which a box looks which of them everybody has read."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ARRAYS = {torch.float64: np.float64, torch.float32: np.float32, torch.int64: np.int64, torch.uint8: np.uint8, torch.bool: np.bool_}
"""Dtypes that arrays have, too. A view of an array costs a tenth of a tensor's view."""
_REDUCTIONS: dict[Any, Callable[..., torch.Tensor]] = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}


_ONE_SECOND = (ctypes.c_long * 2)(1, 0)
"""As a timespec: seconds and nanoseconds."""


class _Box:
    """What one rank gives to some readers, call after call.

    The file is sparse: slots and data that are never touched take no memory.
    """

    def __init__(self, memory: mmap.mmap, start: int, readers: int) -> None:
        self._memory, self._readers = memory, readers
        self._given = ctypes.c_int32.from_buffer(memory, start)
        self._address = ctypes.c_void_p(ctypes.addressof(self._given))
        start += mmap.PAGESIZE
        self._records = (ctypes.c_int32 * (_SLOTS * _RECORD // _WORD)).from_buffer(memory, start)
        start += _SLOTS * _RECORD
        self._taken = (ctypes.c_int32 * (_SLOTS * readers)).from_buffer(memory, start)
        self._data = start + _align(_SLOTS * readers * _WORD)
        self._kept: deque[tuple[int, int]] = deque()  # number and end of what somebody has still to read
        self._end = 0
        self._typed: dict[torch.dtype, np.ndarray[Any, Any]] = {}  # all data

    @staticmethod
    def size(readers: int) -> int:
        return mmap.PAGESIZE + _SLOTS * _RECORD + _align(_SLOTS * readers * _WORD) + _DATA

    def give(self, kind: int, tensor: torch.Tensor | None, timeout: float) -> torch.Tensor | None:
        """Put a tensor in; returns the copy, or None of nothing."""
        number = self._given.value
        count = 0 if tensor is None else tensor.nbytes
        begin = self._room(count, timeout)
        copy = None
        if tensor is not None and count:
            copy = self.part(begin, count, tensor)
            copy.copy_(tensor)
        record = number % _SLOTS * (_RECORD // _WORD)
        self._records[record], self._records[record + 1], self._records[record + 2] = begin, count, kind
        self._kept.append((number, begin + count))
        self._given.value = number + 1
        _LIBC.syscall(_FUTEX, self._address, _WAKE, 1 << 30, None, None, 0)
        return copy

    def has(self, number: int) -> bool:
        return self._given.value > number

    def look(self, number: int, timeout: float) -> tuple[int, _Given]:
        """Kind of a call and what was given, as soon as it is made."""
        deadline = None
        while (given := self._given.value) <= number:
            now = time.monotonic()
            deadline = deadline or now + timeout
            if now > deadline:
                raise RuntimeError(f"timed out after {timeout:g} s: a peer never came to call {number}")
            _LIBC.syscall(_FUTEX, self._address, _WAIT, ctypes.c_int32(given), ctypes.byref(_ONE_SECOND), None, 0)
        record = number % _SLOTS * (_RECORD // _WORD)
        return self._records[record + 2], _Given(self, self._records[record], self._records[record + 1])

    def take(self, number: int, reader: int) -> None:
        """Say that a reader has read the call of this number."""
        self._taken[number % _SLOTS * self._readers + reader] = number + 1

    def _room(self, count: int, timeout: float) -> int:
        """Where the next `count` bytes go: behind what is there, or from the start as soon as everything is read."""
        aligned, deadline = _align(count, 64), 0.0
        if len(self._kept) < _UNREAD and self._end + aligned <= _DATA:
            self._end += aligned
            return self._end - aligned
        while True:
            while self._kept and self._is_read(self._kept[0][0]):
                self._kept.popleft()
            if not self._kept:
                self._end = 0
            if len(self._kept) < _SLOTS and self._end + aligned <= _DATA:
                begin = self._end
                self._end += aligned
                return begin
            if not self._kept:
                raise RuntimeError(f"{count} bytes are more than a box of {_DATA} bytes holds")
            deadline = deadline or time.monotonic() + timeout
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(self._kept)} calls are under way, and some rank waits for none of them")
            time.sleep(0.001)

    def _is_read(self, number: int) -> bool:
        first = number % _SLOTS * self._readers
        return all(self._taken[first + reader] > number for reader in range(self._readers))

    def part(self, begin: int, count: int, like: torch.Tensor) -> torch.Tensor:
        """These bytes of the data, in the dtype and shape of a tensor, which they must fit."""
        dtype, size = like.dtype, like.element_size()
        assert count == like.nbytes, f"{count} bytes came for {like.numel()} elements of {size} bytes"
        if (data := self._typed.get(dtype)) is None:
            raw = np.frombuffer(self._memory, np.uint8, _DATA, self._data)
            self._typed[dtype] = data = raw.view(_ARRAYS.get(dtype) or f"i{size}")
        found = torch.from_numpy(data[begin // size : (begin + count) // size].reshape(like.shape))
        return found if dtype in _ARRAYS else found.view(dtype)


class _Given(NamedTuple):
    """What a rank has given to a call: bytes in its box."""

    box: _Box
    begin: int
    nbytes: int

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the dtype and shape of a tensor, which it must fit."""
        return self.box.part(self.begin, self.nbytes, tensor) if tensor.numel() else tensor

    def piece(self, size: int, rank: int) -> _Given:
        """One of `size` equal pieces."""
        each = self.nbytes // size
        return _Given(self.box, self.begin + rank * each, each)


class _Call(dist.Work):
    """A call under way. `wait` checks that what was given is unchanged, then brings the result."""

    def __init__(
        self, given: Sequence[tuple[torch.Tensor, torch.Tensor]], ready: Callable[[], bool], finish: Callable[[], None]
    ) -> None:
        super().__init__()
        self.given, self._ready, self._finish, self._done = given, ready, finish, False

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done or self._ready()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._done:
            for tensor, copy in self.given:
                assert _same(tensor, copy), "a tensor was changed before the collective that it was given to was done"
            self._finish()
            self._done = True
        return True


class GroupCall(NamedTuple):
    """A collective that this rank has begun, or a message that it has sent."""

    what: str
    ranks: tuple[int, ...]
    """Of the group."""
    elements: int
    """Of the whole tensor; of an all-to-all those for other ranks."""
    itemsize: int

    @property
    def sent(self) -> Fraction:
        """Elements that this rank sends, as in a ring: of n ranks (n - 1)/n of the whole, and twice that where all is reduced."""
        if self.what in ("send", "all-to-all"):
            return Fraction(self.elements)
        return Fraction(len(self.ranks) - 1, len(self.ranks)) * self.elements * (2 if self.what == "all-reduce" else 1)


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[GroupCall]]:
    """What this rank sends, whoever calls the group."""
    found: list[GroupCall] = []
    SharedMemoryGroup.calls = found
    try:
        yield found
    finally:
        SharedMemoryGroup.calls = None


class SharedMemoryGroup(dist.ProcessGroup):
    """The process group; see the head of this file. What it does not override, it does not have."""

    calls: ClassVar[list[GroupCall] | None] = None
    """Where calls are noted, if anywhere."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stubs do not know it
        self._rank, self._size, self._timeout = rank, size, timeout.total_seconds()
        to_all, to_one = _Box.size(size), _Box.size(1)
        memory = _shared(store, rank, size, size * (to_all + size * to_one))
        each = to_all + size * to_one
        self._to_all = [_Box(memory, source * each, size) for source in range(size)]
        self._to_one = [
            [_Box(memory, source * each + to_all + target * to_one, 1) for target in range(size)] for source in range(size)
        ]
        self._number = 0
        self._received = [0] * size

    def getBackendName(self) -> str:
        return SHARED_MEMORY

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return dist.distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        reduce = _reduction(opts)
        return self._call("all-reduce", tensor, lambda each: reduce(tensor, each))

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        return self._call("all-gather", input, lambda each: _copy(output.view(-1).chunk(self._size), each))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        (parts,), (tensor,) = outputs, inputs
        return self._call("all-gather of a list", tensor, lambda each: _copy(parts, each))

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """The output is this rank's part of the reduced inputs."""
        reduce = _reduction(opts)

        def finish(each: Sequence[_Given]) -> None:
            reduce(output, [given.piece(self._size, self._rank) for given in each])

        return self._call("reduce-scatter", input, finish)

    def all_to_all_single(self, output: Any, input: Any, came: Any, went: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """The output's parts are what each rank gives to this one: this rank's part of its input. Both are flat."""
        # torch's allocator does not see this copy, which is for this backend alone.
        given = torch.from_numpy(np.concatenate([_bytes(torch.tensor(went)).numpy(), _bytes(input).numpy()]))
        counts = torch.empty(self._size, dtype=torch.int64)
        each_size = input.element_size()

        def finish(each: Sequence[_Given]) -> None:
            for part, (box, begin, _) in zip(output.split(came), each, strict=True):
                sizes = box.part(begin, counts.nbytes, counts).tolist()
                mine = begin + counts.nbytes + sum(sizes[: self._rank]) * each_size
                part.copy_(_Given(box, mine, sizes[self._rank] * each_size).like(part))

        call = self._call("all-to-all", given, finish)
        if self.calls is not None:
            ranks = tuple(dist.get_process_group_ranks(self))
            self.calls[-1] = GroupCall("all-to-all", ranks, input.numel() - went[self._rank], each_size)
        ((_, copy),) = call.given
        call.given = [(_bytes(input), copy[counts.nbytes :])]
        return call

    # As torch before 2.13 calls them.
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        (tensor,), root = tensors, opts.rootRank
        given = tensor if root == self._rank else None
        return self._call("broadcast", given, lambda each: tensor.copy_(each[root].like(tensor)))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        (tensor,), root = inputs, opts.rootRank
        return self._call("gather", tensor, lambda each: _copy(outputs[0], each) if root == self._rank else None)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Every rank's output is its own of the root's inputs."""
        (output,), root = outputs, opts.rootRank
        given = torch.cat([_bytes(tensor) for tensor in inputs[0]]) if root == self._rank else None

        def finish(each: Sequence[_Given]) -> None:
            output.copy_(each[root].piece(self._size, self._rank).like(output))

        return self._call("scatter", given, finish)

    def barrier(self, opts: Any = None) -> dist.Work:  # type: ignore[override]
        return self._call("barrier", None, lambda _: None)

    def send(self, tensors: Any, target: int, tag: int) -> dist.Work:  # type: ignore[override]
        """Give a tensor to one rank. As with gloo, the sender keeps it until it waits."""
        (tensor,) = tensors
        self._note("send", tensor, 1)
        # What the box holds is written over as soon as the other has read it. torch's allocator does not see the copy.
        tensor = tensor.detach()
        copy = torch.from_numpy(_bytes(tensor).numpy().copy()).view(tensor.dtype).view(tensor.shape)
        self._to_one[self._rank][target].give(tag, tensor, self._timeout)
        return _Call([(tensor, copy)], lambda: False, lambda: None)

    def recv(self, tensors: Any, source: int, tag: int) -> dist.Work:  # type: ignore[override]
        """Take the next tensor of one rank."""
        (tensor,), box, number = tensors, self._to_one[source][self._rank], self._received[source]
        self._received[source] += 1

        def finish() -> None:
            kind, found = box.look(number, self._timeout)
            assert kind == tag, f"rank {source} of the group sent with tag {kind}, not {tag}"
            tensor.copy_(found.like(tensor))
            box.take(number, 0)

        return _Call([], lambda: box.has(number), finish)

    def _call(self, what: str, tensor: torch.Tensor | None, finish: Callable[[Sequence[_Given]], Any]) -> _Call:
        """A collective, in which this rank gives a tensor or nothing and gets what all have given, as bytes."""
        number, kind = self._number, _KINDS.index(what)
        self._number += 1
        self._note(what, tensor, self._size if what == "all-gather" else 1)
        tensor = tensor if tensor is None else tensor.detach()
        copy = self._to_all[self._rank].give(kind, tensor, self._timeout)

        def bring() -> None:
            found = [box.look(number, self._timeout) for box in self._to_all]
            other = {_KINDS[found_kind] for found_kind, _ in found} - {what}
            assert not other, f"call {number} is {what} here and {other} elsewhere"
            finish([given for _, given in found])
            for box in self._to_all:
                box.take(number, self._rank)

        given = [] if tensor is None or copy is None else [(tensor, copy)]
        return _Call(given, lambda: all(box.has(number) for box in self._to_all), bring)

    def _note(self, what: str, tensor: torch.Tensor | None, times: int) -> None:
        if self.calls is not None and tensor is not None:
            ranks = tuple(dist.get_process_group_ranks(self))
            self.calls.append(GroupCall(what, ranks, times * tensor.numel(), tensor.element_size()))


_KINDS = [
    "all-reduce",
    "all-gather",
    "all-gather of a list",
    "reduce-scatter",
    "all-to-all",
    "broadcast",
    "gather",
    "scatter",
    "barrier",
]


def _reduction(opts: Any) -> Callable[[torch.Tensor, Sequence[_Given]], None]:
    """Gives a tensor the reduction of what all ranks have given."""
    operation = _REDUCTIONS[dist.ReduceOp.SUM if opts is None else opts.reduceOp.op]

    def reduce(output: torch.Tensor, each: Sequence[_Given]) -> None:
        output.copy_(each[0].like(output))
        for given in each[1:]:
            operation(output, given.like(output), out=output)

    return reduce


def _copy(outputs: Sequence[torch.Tensor], each: Sequence[_Given]) -> None:
    for output, found in zip(outputs, each, strict=True):
        output.copy_(found.like(output))


def _same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether two tensors are equal, if not by value, then by bits: NaN is not the same value as itself."""
    bits = _BITS[tensor.element_size()]
    return torch.equal(tensor, copy) or torch.equal(tensor.view(bits), copy.view(bits))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _align(count: int, unit: int = mmap.PAGESIZE) -> int:
    return -(-count // unit) * unit


def _shared(store: dist.Store, rank: int, size: int, count: int) -> mmap.mmap:
    """Memory that all ranks of a group share. Its file has no name any more when all have it."""
    if rank == 0:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        path = Path(folder) / f"ranks-{secrets.token_hex(8)}"
        with path.open("xb") as file:
            file.truncate(count)
        store.set("file", str(path))
    else:
        path = Path(store.get("file").decode())
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), count)
    if store.add("mapped", 1) == size:
        path.unlink()
    return memory


dist.Backend.register_backend(SHARED_MEMORY, SharedMemoryGroup, devices=["cpu"])
