"""Checkpoints in the memory of the nodes, as a run uses them: start the processes that keep them, and check for a newer checkpoint
in memory."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import NamedTuple

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.save_folder import find_checkpoint, parse_iteration, read_latest
from megatron.checkpoint.storage import Storage
from megatron.checkpoint.storage_url import NODE_MEMORY_URL
from megatron.parallel.collectives import broadcast_object, gather_objects
from megatron.parallel.context import ParallelContext
from megatron.parallel.rendezvous import get_node_address
from megatron.training.failure import run_on_all_ranks
from megatron_lab.node_memory.keeper import end_keeper, start_or_find
from megatron_lab.node_memory.node_storage import FOLDER_VARIABLE, Nodes


class NodeMemory(NamedTuple):
    """Access of a rank to the keeper of its node, the process that keeps checkpoints in memory."""

    folder: Path
    is_leader: bool
    """Whether this rank is the first rank of its node. Only this rank communicates with the keeper."""

    def end(self) -> None:
        """End the keeper without saving its checkpoint, because the run has finished and written its last checkpoint. Only the
        first rank of each node does anything."""
        if self.is_leader:
            end_keeper(self.folder)


def start_keepers(save: str, num_copies: int, context: ParallelContext) -> NodeMemory:
    """Start the keepers (the process of each node that keeps checkpoints in memory), or find the running ones. All ranks call this
    together.

    Each keeper gets the addresses of all others.

    Args:
        save: path or URL of the save folder.
        num_copies: number of other nodes that receive a copy of each file (--replicate-state).

    Raises:
        ValueError: a keeper cannot be started, or there are not enough nodes for the copies. The error is raised on every rank.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", context.rank))
    has_several_nodes = int(os.environ.get("LOCAL_WORLD_SIZE", context.world.size)) < context.world.size
    local_keeper: list[tuple[str, str, int]] = []

    def start() -> None:
        if local_rank == 0:
            folder, port = start_or_find(save, get_launcher_pid(), reachable=has_several_nodes, log=_log)
            local_keeper.append((str(folder), get_node_address() if has_several_nodes else "", port))

    run_on_all_ranks(context, start)
    keepers = {
        rank: keeper
        for rank, (keeper,) in enumerate(gather_objects([*local_keeper, None][:1], context.world))
        if keeper is not None
    }
    first_ranks = [*keepers]
    if num_copies >= len(keepers):
        raise ValueError(
            f"--replicate-state {num_copies} copies the state to {num_copies} other nodes, but this job has {len(keepers)} nodes "
            f"in all: set --replicate-state {len(keepers) - 1}"
        )
    index = first_ranks.index(context.rank - local_rank)
    folder = Path(keepers[context.rank - local_rank][0])
    token = broadcast_object(secrets.token_hex(16), context.world)
    addresses = [(host, port) for _, host, port in keepers.values()] if has_several_nodes else []

    def write_nodes() -> None:
        if local_rank == 0:
            Nodes(addresses, index, num_copies, token).write(folder)

    run_on_all_ranks(context, write_nodes)
    os.environ[FOLDER_VARIABLE] = str(folder)
    return NodeMemory(folder, is_leader=local_rank == 0)


def is_memory_newer(save: Storage, damaged: dict[int, str]) -> bool:
    """Return whether the newest complete checkpoint in the memory of the nodes is newer than the latest checkpoint in the save
    folder.

    Only one rank calls this.

    Args:
        save: save folder.
        damaged: reasons why checkpoints cannot be used, by iteration. These checkpoints are ignored.
    """
    try:
        path = find_checkpoint(NODE_MEMORY_URL, warn=lambda _: None, damaged=damaged)
    except DamagedCheckpointError as error:
        _log(f"the checkpoints in the memory of the nodes are incomplete: {error}")
        return False
    iteration = None if path is None else parse_iteration(path)
    return iteration is not None and iteration > (read_latest(save) or 0)


def get_launcher_pid() -> int:
    """Return the PID of the launcher. When the launcher ends, the process that keeps checkpoints in memory ends too.

    The launcher is torchrun or another program that restarts ranks. Without a launcher, return the PID of this process.
    """
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()


def _log(text: str) -> None:
    sys.stderr.write(f"pretrain_gpt.py: {text}\n")
    sys.stderr.flush()
