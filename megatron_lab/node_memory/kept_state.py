"""The state of a run in the memory of its nodes: which processes keep it, and whether to go on from there."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import NamedTuple

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.save_folder import find_checkpoint, iteration_of, latest_in
from megatron.checkpoint.storage import Storage
from megatron.checkpoint.storage_kinds import LOCATION
from megatron.parallel.collectives import broadcast_object, gather_objects
from megatron.parallel.context import ParallelContext
from megatron.parallel.meeting import own_address
from megatron.training.failure import together
from megatron_lab.node_memory.keeper import end_keeper, start_or_find
from megatron_lab.node_memory.node_storage import FOLDER_VARIABLE, Nodes


class NodeMemory(NamedTuple):
    """Where this node's keeper has its files."""

    folder: Path
    leads: bool
    """Whether this rank is the one that speaks with the keeper."""

    def end(self) -> None:
        """The run has ended as it should, and its last checkpoint is on the storage."""
        if self.leads:
            end_keeper(self.folder)


def keep_state(save: str, copies: int, context: ParallelContext) -> NodeMemory:
    """Find or start the keepers of all nodes, and tell each where the others are. All ranks call it together.

    Args:
        save: location of the save folder.
        copies: number of other nodes that get a copy of what a node's ranks write.

    Raises:
        ValueError: on every rank, if a keeper cannot be started, or there are not so many nodes.
    """
    local = int(os.environ.get("LOCAL_RANK", context.rank))
    several = int(os.environ.get("LOCAL_WORLD_SIZE", context.world.size)) < context.world.size
    found: list[tuple[str, str, int]] = []

    def start() -> None:
        if local == 0:
            folder, port = start_or_find(save, launcher(), reachable=several, tell=_say)
            found.append((str(folder), own_address() if several else "", port))

    together(context, start)
    keepers = {
        rank: keeper for rank, (keeper,) in enumerate(gather_objects([*found, None][:1], context.world)) if keeper is not None
    }
    first_ranks = [*keepers]
    if copies >= len(keepers):
        raise ValueError(
            f"--replicate-state {copies} wants copies on as many other nodes, and this job has {len(keepers)}: "
            f"give --replicate-state {len(keepers) - 1}"
        )
    index = first_ranks.index(context.rank - local)
    folder = Path(keepers[context.rank - local][0])
    token = broadcast_object(secrets.token_hex(16), context.world)
    addresses = [(host, port) for _, host, port in keepers.values()] if several else []

    def tell() -> None:
        if local == 0:
            Nodes(addresses, index, copies, token).write(folder)

    together(context, tell)
    os.environ[FOLDER_VARIABLE] = str(folder)
    return NodeMemory(folder, leads=local == 0)


def newer_in_memory(folder: Storage, damaged: dict[int, str]) -> bool:
    """Whether the memory of the nodes holds a whole checkpoint that is newer than those of the save folder. One rank asks.

    Args:
        folder: the save folder.
        damaged: iterations that cannot be read.
    """
    try:
        found = find_checkpoint(LOCATION, tell=lambda _: None, damaged=damaged)
    except DamagedCheckpointError as error:
        _say(f"the state in the memory of the nodes is not whole: {error}")
        return False
    iteration = None if found is None else iteration_of(found)
    return iteration is not None and iteration > (latest_in(folder) or 0)


def launcher() -> int:
    """The process with which the state in memory lives: torchrun or its like, which starts ranks again; else this rank's own."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()


def _say(text: str) -> None:
    sys.stderr.write(f"pretrain_gpt.py: {text}\n")
    sys.stderr.flush()
