"""Loads a checkpoint into any layout, by the same call on every rank.

There are three rounds. In each of them all ranks continue or all fail:

1. Each rank reads the manifest, and plans: the stored boxes that overlap its own. The first one checks that all see one checkpoint,
   and that checkpoint and run fit each other exactly.
2. Each rank reads what it has planned, with the checksum of every box that it touches.
3. The content of memory is compared with what was saved: by checksums, or by the content sums, which no layout changes.
"""

from __future__ import annotations

import functools
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from megatron.checkpoint.data_files import BoxRead, DataFiles
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, listed, ranks_named
from megatron.checkpoint.global_tensor import GlobalTensor, bytes_of, torch_dtype
from megatron.checkpoint.manifest import NO_SUMS, Manifest, StoredBox, StoredTensor, Sums, content_sums, tiles
from megatron.checkpoint.save_folder import manifest_in
from megatron.checkpoint.savers import decide
from megatron.checkpoint.storage import Place, Storage
from megatron.checkpoint.storage_kinds import open_storage
from megatron.parallel.boxes import Box, PlacedBox, flat_range_boxes
from megatron.parallel.context import Group

_MOST_THREADS = 4

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Loaded:
    """The result of a load, compared with what was saved; in numbers of tensors."""

    digest: str | None
    """Digest of all content of the checkpoint, the same at every layout; None in older ones."""
    equal: int
    """Tensors whose content in memory equals the stored one."""
    narrowed: int
    """Tensors that were rounded to a narrower dtype, so that they cannot be compared."""
    unknown: int
    """Tensors without content sums in the manifest (an older checkpoint), or not loaded as a whole."""


def load_tensors(
    path: Place,
    tensors: list[GlobalTensor],
    group: Group,
    *,
    allow_unused: Callable[[str], bool] = lambda name: False,
) -> Loaded:
    """Fill tensors in place from the checkpoint in folder `path`, whatever layout it was saved at.

    Call it on every rank of the group. Each rank reads only the stored boxes that overlap its own, and checks them. Floating-point
    dtypes are converted into each other; other dtypes must be equal. The content of memory is compared with what was saved.

    Args:
        path: folder of the checkpoint, or its URL.
        tensors: what this rank holds; every element of their boxes is filled. Padding is left as it is.
        group: the ranks that load.
        allow_unused: whether the stored tensor of this name may be left unread; only the first rank's answer counts.

    Raises:
        CheckpointError: something asked for is not stored, something stored is not used by any rank, or shapes differ: all
            cases in one message, on every rank; nothing was changed. Or the format is newer than this program.
        DamagedCheckpointError: files are missing, truncated or altered, or what was loaded is not what was saved; on every rank.
            The tensors may be filled in part.
    """
    storage, doing, threads = open_storage(path), f"cannot load {path}", reading_threads()
    found: list[tuple[Manifest, Reads]] = []

    def plan() -> LoadRequest:
        manifest = manifest_in(storage)
        request, reads = plan_load(tensors, manifest)
        found.append((manifest, reads))
        return request

    def check(requests: list[LoadRequest]) -> list[None]:
        check_requests(requests, found[0][0], allow_unused)
        return [None] * len(requests)

    decide(group, doing, plan, check)
    manifest, reads = found[0]

    def read() -> set[str]:
        straight = read_boxes(storage, manifest, reads, threads)
        return {tensor.name for tensor in tensors if straight[tensor.name] != sum(placed.box.numel for placed in tensor.boxes)}

    cut = decide(group, doing, read, lambda names: [set[str]().union(*names)] * len(names))
    return compare_content(tensors, cut, manifest, threads, group, doing)


def reading_threads() -> int:
    """Number of threads with which a rank reads: its share of the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_THREADS, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


@dataclass
class LoadRequest:
    """What a rank asks for, and what it finds wrong."""

    digest: str
    """Digest of the manifest that it sees."""
    boxes: dict[str, set[Box]] = field(default_factory=lambda: defaultdict(set))
    problems: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The tensors with each kind of problem."""


class PlannedRead(NamedTuple):
    """Elements of a stored box that go into a box of this rank."""

    tensor: GlobalTensor
    placed: PlacedBox
    common: Box
    """The box of these elements in the whole tensor."""

    def of(self, stored: StoredBox) -> BoxRead:
        """Their box relative to the stored box, and their target."""
        target = self.tensor.part(self.placed)[self.common.relative_to(self.placed.box).index]
        return BoxRead(self.common.relative_to(stored.box), target)


Reads = dict[StoredBox, list[PlannedRead]]


def plan_load(tensors: list[GlobalTensor], manifest: Manifest) -> tuple[LoadRequest, Reads]:
    """The request of a rank that holds these tensors, and its own reads."""
    request, reads = LoadRequest(manifest.digest), defaultdict[StoredBox, list[PlannedRead]](list)
    for tensor in tensors:
        request.boxes[tensor.name].update(placed.box for placed in tensor.boxes)
        stored = manifest.tensors.get(tensor.name)
        if stored is None:
            request.problems[MISSING].add(tensor.name)
        elif misfit := _misfit(tensor, stored):
            kind, text = misfit
            request.problems[kind].add(text)
        else:
            for box, read in planned_reads(tensor, stored):
                reads[box].append(read)
    return request, dict(reads)


def planned_reads(tensor: GlobalTensor, stored: StoredTensor) -> list[tuple[StoredBox, PlannedRead]]:
    """The stored boxes that overlap those of a tensor, and the elements to read of each."""
    overlaps = ((source, placed, source.box.intersect(placed.box)) for placed in tensor.boxes for source in stored.boxes)
    return [(source, PlannedRead(tensor, placed, common)) for source, placed, common in overlaps if common is not None]


def read_boxes(storage: Storage, manifest: Manifest, reads: Reads, threads: int = 1) -> Counter[str]:
    """Check every box that is needed, and copy what overlaps, in the order of the files.

    Returns:
        by tensor, the number of elements that were read as whole boxes, straight into their place, and checked there.

    Raises:
        DamagedCheckpointError: a file is missing or altered.
    """
    straight: Counter[str] = Counter()
    with DataFiles(storage, manifest) as files:
        jobs = []
        for stored, planned in reads.items():
            name = planned[0].tensor.name
            dtype = manifest.tensors[name].dtype
            parts = [read.of(stored) for read in planned]
            if len(parts) == 1 and parts[0].goes_straight(stored, dtype) and planned[0].common == stored.box:
                straight[name] += stored.box.numel
            jobs.append((stored.file, files.start(stored, dtype), stored, dtype, parts))
        jobs.sort(key=lambda job: job[:2])
        _each(lambda job: files.read(*job[2:]), jobs, threads)
    return straight


def _each(work: Callable[[_Task], _Result], tasks: Sequence[_Task], threads: int) -> list[_Result]:
    """Call a function with each task and return the results in the order of the tasks.

    With one thread the calling thread does the work: handing a small box to another takes longer than reading it.
    """
    if threads == 1:
        return [work(task) for task in tasks]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, tasks))


MISSING = "not in the checkpoint"
SHAPE = "of another shape"
DTYPE = "of a dtype that cannot be converted"
INCOMPLETE = "incomplete in the checkpoint"
UNUSED = "in the checkpoint, but not used"
PARTLY_USED = "in the checkpoint, but only partly used"
HINT = "Is it a checkpoint of another model, or of another kind of run? Compare the settings with its config.json."


def _misfit(tensor: GlobalTensor, stored: StoredTensor) -> tuple[str, str] | None:
    """Why a stored tensor cannot fill a tensor asked for: (kind, text), or None if it can.

    Floating-point dtypes are converted into each other (rounded to nearest); everything else must be equal.
    """
    if stored.shape != tensor.global_shape:
        return SHAPE, f"{tensor.name} (stored {list(stored.shape)}, here {list(tensor.global_shape)})"
    here, there = tensor.local.dtype, torch_dtype(stored.dtype)
    if here != there and not (here.is_floating_point and there.is_floating_point):
        return DTYPE, f"{tensor.name} (stored {there}, here {here})"
    if not tiles(stored.shape, [box.box for box in stored.boxes]):
        return INCOMPLETE, tensor.name
    return None


def check_requests(requests: Sequence[LoadRequest], manifest: Manifest, allow_unused: Callable[[str], bool]) -> None:
    """On the first rank: check that the world sees one checkpoint, fills all that it asks for and uses all that is stored.

    Args:
        requests: those of every rank.
        manifest: the checkpoint's manifest.
        allow_unused: whether a stored tensor of this name may be left unread.

    Raises:
        CheckpointError: it does not; the message lists every misfit.
    """
    if other := [rank for rank, request in enumerate(requests) if request.digest != manifest.digest]:
        raise CheckpointError(
            f"{ranks_named(other)} found another checkpoint under this name than rank 0: "
            f"--load must be a folder on a file system that all nodes share"
        )
    boxes: dict[str, set[Box]] = defaultdict(set)
    problems: dict[str, set[str]] = defaultdict(set)
    for request in requests:
        for name, held in request.boxes.items():
            boxes[name] |= held
        for kind, texts in request.problems.items():
            problems[kind] |= texts
    for name, stored in manifest.tensors.items():
        if allow_unused(name):
            continue
        if name not in boxes:
            problems[UNUSED].add(name)
        elif (wanted := sum(box.numel for box in boxes[name])) < (numel := Box.whole(stored.shape).numel):
            problems[PARTLY_USED].add(f"{name} ({wanted} of {numel} elements)")
    if problems:
        lines = [f"{kind} ({len(texts)}): {listed(sorted(texts))}" for kind, texts in sorted(problems.items())]
        raise CheckpointError("\n  ".join([*lines, HINT]))


# ---- whether memory holds what was saved

_AT_ONCE = 1 << 24
"""Elements that are converted, or copied to the host, at once."""


class ContentHere(NamedTuple):
    """What one rank reports of its content."""

    names: set[str]
    """All tensors of which it holds anything."""
    narrowed: set[str]
    """Those that it has rounded."""
    sums: dict[tuple[str, Box], Sums]
    """Sums of each box that can be compared, by (name, box)."""


def compare_content(
    tensors: list[GlobalTensor], cut: set[str], manifest: Manifest, threads: int, group: Group, doing: str
) -> Loaded:
    """Compare what all ranks hold in memory with what was saved. All ranks call it together.

    If a box was read whole into its place, its checksum was taken there, which is the proof. Tensors of which any rank holds
    something else (part of a box, another dtype, a copy on a device) are summed up over all ranks: `cut` names them.

    Raises:
        DamagedCheckpointError: on every rank, if a tensor differs, or ranks that hold the same box differ.
    """
    return decide(
        group,
        doing,
        lambda: _content_here(tensors, cut, manifest, threads),
        lambda world: [_judge(world, cut, manifest)] * group.size,
    )


def _content_here(tensors: list[GlobalTensor], cut: set[str], manifest: Manifest, threads: int) -> ContentHere:
    """Sums of the boxes of this rank that the checksums do not prove, taken from memory, in the stored dtype."""
    summed = [(tensor, manifest.tensors[tensor.name]) for tensor in tensors if tensor.name in cut]
    summed = [(tensor, stored) for tensor, stored in summed if stored.content is not None]
    dtypes = {tensor.name: (tensor.local.dtype, torch_dtype(stored.dtype)) for tensor, stored in summed}
    # A dtype that holds every stored value exactly gives the stored bits when it is narrowed back.
    narrowed = {name for name, (here, there) in dtypes.items() if torch.promote_types(here, there) != here}
    tasks = {
        (tensor.name, placed.box): (placed.box, tensor.part(placed), stored)
        for tensor, stored in summed
        if tensor.name not in narrowed
        for placed in tensor.boxes
    }
    sums = _each(lambda task: _box_sums(*task), [*tasks.values()], threads)
    return ContentHere({tensor.name for tensor in tensors}, narrowed, dict(zip(tasks, sums, strict=True)))


def _box_sums(box: Box, part: torch.Tensor, stored: StoredTensor) -> Sums:
    """Sums of a box. What must be converted or copied to the host is taken in parts that are small enough for a copy."""
    kind, flat, total = torch_dtype(stored.dtype), part.reshape(-1), NO_SUMS
    at_once = box.numel if part.dtype == kind and part.device.type == "cpu" else _AT_ONCE
    for start in range(0, box.numel, at_once):
        at = start
        for inner in flat_range_boxes(box.sizes, start, min(start + at_once, box.numel)):
            data = bytes_of(flat[at : at + inner.numel].to(kind))
            total = total.plus(content_sums(data, stored.dtype, inner.inside(box), stored.shape))
            at += inner.numel
    return total


def _judge(everybody: list[ContentHere], cut: set[str], manifest: Manifest) -> Loaded:
    """Whether the boxes of all ranks add up to what is stored.

    Raises:
        DamagedCheckpointError: they do not.
    """
    boxes_of: dict[str, dict[Box, Sums]] = defaultdict(dict)
    wrong: dict[str, str] = {}
    for rank, held in enumerate(everybody):
        for (name, box), sums in held.sums.items():
            if boxes_of[name].setdefault(box, sums) != sums:
                wrong[name] = f"{name} ({ranks_named([rank])} does not hold the same as the ranks before it)"
    names = set().union(*(held.names for held in everybody))
    narrowed = set().union(*(held.narrowed for held in everybody))
    unknown = {name for name in names & cut if manifest.tensors[name].content is None}
    for name, boxes in boxes_of.items():
        stored = manifest.tensors[name]
        if not tiles(stored.shape, boxes):
            unknown.add(name)
            continue
        total = functools.reduce(Sums.plus, boxes.values(), NO_SUMS)
        if total.hex != stored.content:
            wrong.setdefault(name, f"{name} (stored {stored.content}, loaded {total.hex})")
    if wrong:
        texts = [wrong[name] for name in sorted(wrong)]
        raise DamagedCheckpointError(f"what was loaded is not what was saved, by its content sums ({len(texts)}): {listed(texts)}")
    return Loaded(manifest.content_digest, len(names - narrowed - unknown), len(narrowed), len(unknown))
