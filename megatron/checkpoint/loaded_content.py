"""Checks after a load that the ranks hold what was saved: by checksums, or by the content sums, which no layout changes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron.checkpoint.agreement import decide
from megatron.checkpoint.content_sums import NO_SUMS, Sums, content_sums
from megatron.checkpoint.errors import DamagedCheckpointError, listed, ranks_named
from megatron.checkpoint.global_tensor import GlobalTensor, bytes_of, torch_dtype
from megatron.checkpoint.manifest import Manifest, StoredTensor, tiles
from megatron.parallel.boxes import Box, flat_range_boxes
from megatron.parallel.context import Group

_AT_ONCE = 1 << 24
"""Elements that are converted, or copied to the host, at once."""


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
    something else (part of a box, another dtype, a copy on a device) are summed up over all ranks.

    Args:
        tensors: what this rank has loaded.
        cut: names of the tensors of which any rank holds something that was not read as whole boxes.
        manifest: the checkpoint's manifest.
        threads: how many to use.
        group: the ranks that loaded.
        doing: words for the error, e.g. "cannot load /runs/a/iter_0000100".

    Raises:
        DamagedCheckpointError: on every rank, if a tensor differs, or ranks that hold the same box differ.
    """
    return decide(
        group,
        doing,
        lambda: _content_here(tensors, cut, manifest, threads),
        lambda world: [_judge(world, cut, manifest)] * group.size,
    )


def exactly_comparable(stored: torch.dtype, here: torch.dtype) -> bool:
    """Whether the dtype here holds every stored value exactly, so that narrowing back gives the stored bits."""
    return torch.promote_types(stored, here) == here


def _content_here(tensors: list[GlobalTensor], cut: set[str], manifest: Manifest, threads: int) -> ContentHere:
    """Sums of the boxes of this rank that the checksums do not prove, taken from memory, in the stored dtype."""
    summed = [(tensor, manifest.tensors[tensor.name]) for tensor in tensors if tensor.name in cut]
    summed = [(tensor, stored) for tensor, stored in summed if stored.content is not None]
    narrowed = {tensor.name for tensor, stored in summed if not exactly_comparable(torch_dtype(stored.dtype), tensor.local.dtype)}
    tasks = {
        (tensor.name, placed.box): (placed.box, tensor.part(placed), stored)
        for tensor, stored in summed
        if tensor.name not in narrowed
        for placed in tensor.boxes
    }
    with ThreadPoolExecutor(threads) as pool:
        sums = pool.map(lambda task: _box_sums(*task), tasks.values())
        return ContentHere({tensor.name for tensor in tensors}, narrowed, dict(zip(tasks, sums, strict=True)))


def _box_sums(box: Box, part: torch.Tensor, stored: StoredTensor) -> Sums:
    kind = torch_dtype(stored.dtype)
    if part.dtype == kind and part.device.type == "cpu":
        return content_sums(bytes_of(part), stored.dtype, box, stored.shape)
    total = NO_SUMS
    for inner, some in _stretches(box, part):
        total = total.plus(content_sums(bytes_of(some.to(kind)), stored.dtype, inner, stored.shape))
    return total


def _stretches(box: Box, part: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """A box in parts that are small enough for a copy: (each part's box in the whole tensor, its elements)."""
    flat = part.reshape(-1)
    for start in range(0, box.numel, _AT_ONCE):
        at = start
        for inner in flat_range_boxes(box.sizes, start, min(start + _AT_ONCE, box.numel)):
            yield inner.inside(box), flat[at : at + inner.numel]
            at += inner.numel


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
