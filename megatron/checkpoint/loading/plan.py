"""Who reads what: the stored boxes that overlap those a rank asks for. And whether checkpoint and run fit each other exactly."""

from __future__ import annotations

import dataclasses
import io
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from megatron.checkpoint.errors import CheckpointError, listed
from megatron.checkpoint.format.tiling import tiles
from megatron.checkpoint.global_tensor import GlobalTensor, relative, slices
from megatron.parallel.boxes import Box

TENSORS = "tensors"
"""Key of the list of global tensors in the state dict that is handed to torch.distributed.checkpoint."""


@dataclass
class Asked:
    """What a rank asks for, and what it finds wrong."""

    boxes: dict[str, set[Box]] = field(default_factory=lambda: defaultdict(set))
    problems: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Kind of problem -> the tensors that have it."""

    def add(self, other: Asked) -> None:
        """Take in what another rank asks for."""
        for name, boxes in other.boxes.items():
            self.boxes[name] |= boxes
        for kind, texts in other.problems.items():
            self.problems[kind] |= texts


class BoxLoadPlanner(LoadPlanner):
    """Plans a load of `{TENSORS: [GlobalTensor, ...]}` in place.

    Args:
        allow_unused: whether a stored tensor of this name may be left unread by the whole world.
    """

    def __init__(self, allow_unused: Callable[[str], bool]) -> None:
        self._allow_unused = allow_unused

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the tensors of this rank, and what is stored."""
        assert metadata is not None
        self._tensors: list[GlobalTensor] = state_dict[TENSORS]
        self._metadata = metadata
        self._items: list[ReadItem] = []
        self._targets: list[torch.Tensor] = []

    def create_local_plan(self) -> LoadPlan:
        """Plan this rank's reads. They need nobody else, so they stay here; the plan carries what is asked for."""
        asked = Asked()
        for tensor in self._tensors:
            asked.boxes[tensor.name].update(placed.box for placed in tensor.boxes)
            stored = self._metadata.state_dict_metadata.get(tensor.name)
            assert stored is None or isinstance(stored, TensorStorageMetadata)
            if problem := _misfit(tensor, stored):
                kind, text = problem
                asked.problems[kind].add(text)
            elif stored is not None:
                self._plan_reads(tensor, stored_boxes(stored))
        return LoadPlan([], planner_data=asked)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: check that the world fills all that it asks for and uses all that is stored.

        Raises:
            CheckpointError: it does not; the message lists every misfit.
        """
        world = Asked()
        for plan in global_plan:
            world.add(plan.planner_data)
        for name, stored in self._metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            if self._allow_unused(name):
                continue
            if name not in world.boxes:
                world.problems[UNUSED].add(name)
            elif (wanted := sum(box.numel for box in world.boxes[name])) < stored.size.numel():
                world.problems[PARTLY_USED].add(f"{name} ({wanted} of {stored.size.numel()} elements)")
        problems = {kind: sorted(texts) for kind, texts in sorted(world.problems.items()) if texts}
        if problems:
            lines = [f"{kind} ({len(texts)}): {listed(texts)}" for kind, texts in problems.items()]
            raise CheckpointError("\n  ".join([*lines, HINT]))
        return [dataclasses.replace(plan, planner_data=None) for plan in global_plan]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The reads that were planned here."""
        return dataclasses.replace(central_plan, items=self._items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Checkpoints hold tensors only."""
        raise AssertionError(f"not a tensor: {read_item}")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The elements to fill, as a view."""
        assert read_item.dest_index.index is not None
        target = self._targets[read_item.dest_index.index]
        return target[slices(tuple(read_item.dest_offsets), tuple(read_item.lengths))]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: the view was filled."""

    def _plan_reads(self, tensor: GlobalTensor, stored: list[Box]) -> None:
        for placed in tensor.boxes:
            target = placed.box
            index = MetadataIndex(tensor.name, torch.Size(target.offsets), len(self._targets))
            self._targets.append(tensor.part(placed))
            for source in stored:
                common = source.intersect(target)
                if common is None:
                    continue
                self._items.append(
                    ReadItem(
                        LoadItemType.TENSOR,
                        dest_index=index,
                        dest_offsets=torch.Size(relative(common, target).offsets),
                        storage_index=MetadataIndex(tensor.name, torch.Size(source.offsets)),
                        storage_offsets=torch.Size(relative(common, source).offsets),
                        lengths=torch.Size(common.sizes),
                    )
                )


MISSING = "not in the checkpoint"
SHAPE = "of another shape"
DTYPE = "of a dtype that cannot be converted"
INCOMPLETE = "incomplete in the checkpoint"
UNUSED = "in the checkpoint, but not used"
PARTLY_USED = "in the checkpoint, but only partly used"
HINT = "Is it a checkpoint of another model, or of another kind of run? Compare the settings with its config.json."


def _misfit(tensor: GlobalTensor, stored: TensorStorageMetadata | None) -> tuple[str, str] | None:
    """Why a stored tensor cannot fill a tensor asked for: kind and text, or None if it can.

    Floating-point dtypes are converted into each other (rounded to nearest); everything else must be equal.
    """
    if stored is None:
        return MISSING, tensor.name
    if tuple(stored.size) != tensor.global_shape:
        return SHAPE, f"{tensor.name} (stored {list(stored.size)}, here {list(tensor.global_shape)})"
    here, there = tensor.local.dtype, stored.properties.dtype
    if here != there and not (here.is_floating_point and there.is_floating_point):
        return DTYPE, f"{tensor.name} (stored {there}, here {here})"
    if not tiles(tensor.global_shape, stored_boxes(stored)):
        return INCOMPLETE, tensor.name
    return None


def stored_boxes(stored: TensorStorageMetadata) -> list[Box]:
    """The boxes in which a tensor is stored."""
    return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]
