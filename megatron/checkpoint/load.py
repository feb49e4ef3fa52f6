"""Loading of a checkpoint into any layout. All ranks call `load_tensors` together.

A load has three steps. After each step either all ranks continue or all ranks raise an error:

1. Each rank reads the manifest and plans its reads: the stored slices that overlap its local slices. The first rank checks that all
ranks see the same checkpoint, and that the checkpoint and the run have the same tensors.
2. Each rank reads the planned slices, and verifies the checksum of every slice that it reads.
3. The loaded tensors are compared with the saved ones: by the checksums, or by the content hashes, which do not depend on the
layout.
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

from megatron.checkpoint.data_files import DataFileReader, SliceRead
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, format_list, format_ranks
from megatron.checkpoint.global_tensor import GlobalTensor, get_tensor_bytes, get_torch_dtype
from megatron.checkpoint.manifest import EMPTY_HASH, ContentHash, Manifest, StoredSlice, StoredTensor, hash_content, is_partition
from megatron.checkpoint.save_folder import load_manifest
from megatron.checkpoint.savers import coordinate
from megatron.checkpoint.storage import PathOrUrl, Storage
from megatron.checkpoint.storage_url import open_storage
from megatron.parallel.context import Group
from megatron.parallel.tensor_slice import BufferSlice, TensorSlice, cover_flat_range

_MAX_THREADS = 4

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class LoadResult:
    """Result of a load: the digest of the checkpoint, and how many of the loaded tensors were proven equal to the stored ones."""

    content_digest: str | None
    """Digest of all tensors of the checkpoint, the same at every layout. None in checkpoints of early versions, which have no
    content hashes."""
    num_equal: int
    """Number of tensors whose content in memory is proven equal to the stored content."""
    num_narrowed: int
    """Number of tensors that were rounded to a narrower dtype. Their content cannot be compared with the stored content."""
    num_unverified: int
    """Number of tensors that cannot be compared. Either not all elements were loaded, or the checkpoint is of an early version
    without content hashes."""


def load_tensors(
    path: PathOrUrl,
    tensors: list[GlobalTensor],
    group: Group,
    *,
    allow_unused: Callable[[str], bool] = lambda name: False,
) -> LoadResult:
    """Load a checkpoint of any layout into existing tensors.

    Call this function on every rank of the group. Each rank reads only the stored slices that overlap its local slices, and
    verifies their checksums. Floating-point dtypes are converted into each other; other dtypes must be equal. Finally the content
    of memory is compared with the saved content.

    Args:
        path: path or URL of the checkpoint's folder.
        tensors: local slices of global tensors. Every element of the slices is filled; padding does not change.
        group: ranks that load.
        allow_unused: returns whether the stored tensor of this name may be left unread. Only the first rank's result counts.

    Raises:
        CheckpointError: a requested tensor is not stored, no rank uses a stored tensor, or shapes differ. One message on every rank
            lists all cases, and no tensor has changed. Also raised if the format is newer than this program.
        DamagedCheckpointError: files are missing, truncated or altered, or the loaded content differs from the saved content.
            Raised on every rank. The tensors may be partially filled.
    """
    storage, action, num_threads = open_storage(path), f"cannot load {path}", count_read_threads()
    plans: list[tuple[Manifest, LoadPlan]] = []

    def plan() -> LoadRequest:
        manifest = load_manifest(storage)
        request, load_plan = plan_load(tensors, manifest)
        plans.append((manifest, load_plan))
        return request

    def check(requests: list[LoadRequest]) -> list[None]:
        check_requests(requests, plans[0][0], allow_unused)
        return [None] * len(requests)

    coordinate(group, action, plan, check)
    manifest, load_plan = plans[0]

    def read() -> set[str]:
        num_verified = read_slices(storage, manifest, load_plan, num_threads)
        return {
            tensor.name
            for tensor in tensors
            if num_verified[tensor.name] != sum(local_slice.slice.numel for local_slice in tensor.slices)
        }

    unverified = coordinate(group, action, read, lambda names: [set[str]().union(*names)] * len(names))
    return compare_content(tensors, unverified, manifest, num_threads, group, action)


def count_read_threads() -> int:
    """Return the number of threads with which a rank reads: the CPU cores of this process divided by the ranks of the node, at most
    `_MAX_THREADS`."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MAX_THREADS, num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


@dataclass
class LoadRequest:
    """Message of a rank to the first rank before a load: which slices the rank needs, and which of its tensors do not fit the
    checkpoint."""

    digest: str
    """Digest of the manifest that the rank has read. It must be the same on all ranks."""
    slices: dict[str, set[TensorSlice]] = field(default_factory=lambda: defaultdict(set))
    mismatches: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Descriptions of the tensors that do not fit the checkpoint, by category, for example "of another shape"."""


class ReadItem(NamedTuple):
    """Planned read of one region, from a stored slice into a local slice of this rank."""

    tensor: GlobalTensor
    local_slice: BufferSlice
    overlap: TensorSlice
    """Region in which the stored slice and the local slice overlap, with offsets in the global tensor."""

    def to_slice_read(self, stored_slice: StoredSlice) -> SliceRead:
        """Convert the item to a read request for the reader of the data file (`DataFileReader`).

        Returns:
            the region, relative to the start of the stored slice, and the view of the local tensor that receives the region.
        """
        target = self.tensor.get_local_view(self.local_slice)[self.overlap.relative_to(self.local_slice.slice).index]
        return SliceRead(self.overlap.relative_to(stored_slice.tensor_slice), target)


LoadPlan = dict[StoredSlice, list[ReadItem]]


def plan_load(tensors: list[GlobalTensor], manifest: Manifest) -> tuple[LoadRequest, LoadPlan]:
    """Plan which regions of which stored slices this rank reads.

    Args:
        tensors: local slices of the rank.
        manifest: manifest of the checkpoint.

    Returns:
        the message to the first rank, and the reads of this rank by stored slice.
    """
    request, load_plan = LoadRequest(manifest.digest), defaultdict[StoredSlice, list[ReadItem]](list)
    for tensor in tensors:
        request.slices[tensor.name].update(local_slice.slice for local_slice in tensor.slices)
        stored_tensor = manifest.tensors.get(tensor.name)
        if stored_tensor is None:
            request.mismatches[MISSING].add(tensor.name)
        elif mismatch := _describe_mismatch(tensor, stored_tensor):
            category, description = mismatch
            request.mismatches[category].add(description)
        else:
            for stored_slice, item in plan_reads(tensor, stored_tensor):
                load_plan[stored_slice].append(item)
    return request, dict(load_plan)


def plan_reads(tensor: GlobalTensor, stored_tensor: StoredTensor) -> list[tuple[StoredSlice, ReadItem]]:
    """Return the stored slices that overlap the local slices of a tensor, each with the region to read."""
    overlaps = (
        (stored_slice, local_slice, stored_slice.tensor_slice.intersect(local_slice.slice))
        for local_slice in tensor.slices
        for stored_slice in stored_tensor.slices
    )
    return [
        (stored_slice, ReadItem(tensor, local_slice, overlap))
        for stored_slice, local_slice, overlap in overlaps
        if overlap is not None
    ]


def read_slices(storage: Storage, manifest: Manifest, load_plan: LoadPlan, num_threads: int = 1) -> Counter[str]:
    """Read all slices of the plan, in the order of the data files, and verify their checksums.

    Returns:
        by tensor name, the number of elements that were read directly into their final memory. The checksum of the slice proves
        that these elements are correct in memory.

    Raises:
        DamagedCheckpointError: a file is missing or altered.
    """
    num_verified: Counter[str] = Counter()
    with DataFileReader(storage, manifest) as reader:
        jobs = []
        for stored_slice, items in load_plan.items():
            name = items[0].tensor.name
            dtype = manifest.tensors[name].dtype
            reads = [item.to_slice_read(stored_slice) for item in items]
            if len(reads) == 1 and reads[0].is_direct(stored_slice, dtype) and items[0].overlap == stored_slice.tensor_slice:
                num_verified[name] += stored_slice.tensor_slice.numel
            jobs.append((stored_slice.file, reader.get_data_offset(stored_slice, dtype), stored_slice, dtype, reads))
        jobs.sort(key=lambda job: job[:2])
        _run_in_threads(lambda job: reader.read(*job[2:]), jobs, num_threads)
    return num_verified


def _run_in_threads(function: Callable[[_Task], _Result], tasks: Sequence[_Task], num_threads: int) -> list[_Result]:
    """Apply a function to each task in a thread pool. Returns the results in the order of the tasks.

    With one thread no pool is used: handing a small slice to another thread takes longer than reading it.
    """
    if num_threads == 1:
        return [function(task) for task in tasks]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(function, tasks))


MISSING = "not in the checkpoint"
SHAPE = "of another shape"
DTYPE = "of a dtype that cannot be converted"
INCOMPLETE = "incomplete in the checkpoint"
UNUSED = "in the checkpoint, but not used"
PARTLY_USED = "in the checkpoint, but only partly used"
HINT = "Is it a checkpoint of another model, or of another kind of run? Compare the settings with its config.json."


def _describe_mismatch(tensor: GlobalTensor, stored_tensor: StoredTensor) -> tuple[str, str] | None:
    """Describe why a stored tensor does not fit the tensor of this run.

    Floating-point dtypes are converted into each other (rounded to nearest); all other dtypes and all shapes must be equal.

    Returns:
        (category of the mismatch, description), or None if the stored tensor fits.
    """
    if stored_tensor.shape != tensor.global_shape:
        return SHAPE, f"{tensor.name} (stored {list(stored_tensor.shape)}, in this run {list(tensor.global_shape)})"
    local_dtype, stored_dtype = tensor.local.dtype, get_torch_dtype(stored_tensor.dtype)
    if local_dtype != stored_dtype and not (local_dtype.is_floating_point and stored_dtype.is_floating_point):
        return DTYPE, f"{tensor.name} (stored {stored_dtype}, in this run {local_dtype})"
    if not is_partition(stored_tensor.shape, [stored_slice.tensor_slice for stored_slice in stored_tensor.slices]):
        return INCOMPLETE, tensor.name
    return None


def check_requests(requests: Sequence[LoadRequest], manifest: Manifest, allow_unused: Callable[[str], bool]) -> None:
    """Check that all ranks see the same checkpoint, and that checkpoint and run have the same tensors. Called on the first rank.

    Args:
        requests: messages of all ranks.
        manifest: manifest of the checkpoint.
        allow_unused: returns whether the stored tensor of this name may be left unread.

    Raises:
        CheckpointError: a check fails. The message lists every mismatch.
    """
    if ranks := [rank for rank, request in enumerate(requests) if request.digest != manifest.digest]:
        raise CheckpointError(
            f"{format_ranks(ranks)} {'sees' if len(ranks) == 1 else 'see'} another checkpoint under the path to load than rank 0: "
            "set --load to a folder on a file system that all nodes share"
        )
    slices: dict[str, set[TensorSlice]] = defaultdict(set)
    mismatches: dict[str, set[str]] = defaultdict(set)
    for request in requests:
        for name, rank_slices in request.slices.items():
            slices[name] |= rank_slices
        for category, descriptions in request.mismatches.items():
            mismatches[category] |= descriptions
    for name, stored_tensor in manifest.tensors.items():
        if allow_unused(name):
            continue
        if name not in slices:
            mismatches[UNUSED].add(name)
        elif (requested_numel := sum(tensor_slice.numel for tensor_slice in slices[name])) < (
            numel := TensorSlice.full(stored_tensor.shape).numel
        ):
            mismatches[PARTLY_USED].add(f"{name} ({requested_numel} of {numel} elements)")
    if mismatches:
        lines = [
            f"{category} ({len(descriptions)}): {format_list(sorted(descriptions))}"
            for category, descriptions in sorted(mismatches.items())
        ]
        raise CheckpointError("\n  ".join([*lines, HINT]))


# ---- Comparison of the loaded content with the saved content.

_HASH_NUMEL = 1 << 24
"""Maximum number of elements to convert, or to copy to the host, before they are hashed."""


class LocalContent(NamedTuple):
    """Message of a rank to the first rank after a load: content hashes of its loaded tensors, by which they are compared with the
    stored ones."""

    names: set[str]
    """Names of all tensors on the rank."""
    narrowed: set[str]
    """Names of the tensors that the rank has rounded to a narrower dtype. They cannot be compared with the stored content."""
    hashes: dict[tuple[str, TensorSlice], ContentHash]
    """Content hashes of the slices that can be compared, by (tensor name, slice)."""


def compare_content(
    tensors: list[GlobalTensor], unverified: set[str], manifest: Manifest, num_threads: int, group: Group, action: str
) -> LoadResult:
    """Compare the loaded tensors of all ranks with the saved ones. All ranks call this together.

    If a stored slice was read directly into the memory of its tensor, the checksum proves that the content of memory is correct.
    The tensors in `unverified` were read in another way on at least one rank: only a region of a stored slice, with another dtype,
    or through a copy to a device. For these tensors, each rank hashes its slices in memory. The sum of the hashes over the ranks
    must equal the stored content hash.

    Args:
        tensors: loaded tensors of this rank.
        unverified: names of the tensors whose checksums do not prove the content in memory.
        manifest: manifest of the checkpoint.
        num_threads: number of threads that compute hashes.
        group: ranks that load.
        action: start of the error message, such as "cannot load /runs/a/iter_0000100".

    Raises:
        DamagedCheckpointError: on every rank, if a tensor differs from the stored one, or if ranks hold different content for the
            same slice.
    """
    return coordinate(
        group,
        action,
        lambda: _hash_local_content(tensors, unverified, manifest, num_threads),
        lambda contents: [_check_content(contents, unverified, manifest)] * group.size,
    )


def _hash_local_content(tensors: list[GlobalTensor], unverified: set[str], manifest: Manifest, num_threads: int) -> LocalContent:
    """Compute the content hashes of this rank's slices of the unverified tensors, from memory. The hash is that of the elements in
    the stored dtype."""
    candidates = [(tensor, manifest.tensors[tensor.name]) for tensor in tensors if tensor.name in unverified]
    candidates = [(tensor, stored_tensor) for tensor, stored_tensor in candidates if stored_tensor.content is not None]
    dtypes = {tensor.name: (tensor.local.dtype, get_torch_dtype(stored_tensor.dtype)) for tensor, stored_tensor in candidates}
    # If the local dtype represents every stored value exactly, converting back to the stored dtype restores the stored bits.
    narrowed = {
        name
        for name, (local_dtype, stored_dtype) in dtypes.items()
        if torch.promote_types(local_dtype, stored_dtype) != local_dtype
    }
    tasks = {
        (tensor.name, local_slice.slice): (local_slice.slice, tensor.get_local_view(local_slice), stored_tensor)
        for tensor, stored_tensor in candidates
        if tensor.name not in narrowed
        for local_slice in tensor.slices
    }
    hashes = _run_in_threads(lambda task: _hash_slice(*task), [*tasks.values()], num_threads)
    return LocalContent({tensor.name for tensor in tensors}, narrowed, dict(zip(tasks, hashes, strict=True)))


def _hash_slice(tensor_slice: TensorSlice, data: torch.Tensor, stored_tensor: StoredTensor) -> ContentHash:
    """Return the content hash of a slice, converted to the stored dtype.

    Data that must be converted or copied to the host is hashed in blocks, so that the copy needs little memory.

    Args:
        tensor_slice: region of the global tensor.
        data: elements of this region.
    """
    stored_dtype, flat, content_hash = get_torch_dtype(stored_tensor.dtype), data.reshape(-1), EMPTY_HASH
    block_numel = tensor_slice.numel if data.dtype == stored_dtype and data.device.type == "cpu" else _HASH_NUMEL
    for start in range(0, tensor_slice.numel, block_numel):
        offset = start
        for block_slice in cover_flat_range(tensor_slice.sizes, start, min(start + block_numel, tensor_slice.numel)):
            block_bytes = get_tensor_bytes(flat[offset : offset + block_slice.numel].to(stored_dtype))
            content_hash = content_hash.combine(
                hash_content(block_bytes, stored_tensor.dtype, block_slice.offset_by(tensor_slice), stored_tensor.shape)
            )
            offset += block_slice.numel
    return content_hash


def _check_content(contents: list[LocalContent], unverified: set[str], manifest: Manifest) -> LoadResult:
    """Check that the content hashes of all ranks add up to the stored hashes. Called on the first rank.

    Args:
        contents: messages of all ranks.
        unverified: names of the tensors whose checksums do not prove the content in memory.

    Returns:
        how many tensors were verified.

    Raises:
        DamagedCheckpointError: a tensor differs from the stored one, or ranks hold different content for the same slice.
    """
    hashes: dict[str, dict[TensorSlice, ContentHash]] = defaultdict(dict)
    errors: dict[str, str] = {}
    for rank, content in enumerate(contents):
        for (name, tensor_slice), content_hash in content.hashes.items():
            if hashes[name].setdefault(tensor_slice, content_hash) != content_hash:
                errors[name] = f"{name} ({format_ranks([rank])} differs from lower ranks that hold the same slice)"
    names = set().union(*(content.names for content in contents))
    narrowed = set().union(*(content.narrowed for content in contents))
    not_comparable = {name for name in names & unverified if manifest.tensors[name].content is None}
    for name, slice_hashes in hashes.items():
        stored_tensor = manifest.tensors[name]
        if not is_partition(stored_tensor.shape, slice_hashes):
            not_comparable.add(name)
            continue
        total = functools.reduce(ContentHash.combine, slice_hashes.values(), EMPTY_HASH)
        if total.hex != stored_tensor.content:
            errors.setdefault(name, f"{name} (stored {stored_tensor.content}, loaded {total.hex})")
    if errors:
        messages = [errors[name] for name in sorted(errors)]
        raise DamagedCheckpointError(
            f"the loaded content of these tensors differs from the saved content, by the content hashes: "
            f"{format_list(messages)}. Copy the checkpoint again, or load another checkpoint (--ckpt-step)"
        )
    return LoadResult(manifest.content_digest, len(names - narrowed - not_comparable), len(narrowed), len(not_comparable))
