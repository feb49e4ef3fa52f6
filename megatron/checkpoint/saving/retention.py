"""Which checkpoints stay."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron.checkpoint.format.folder import checkpoints, latest_iteration, remove_leftovers, set_aside


def kept(iterations: list[int], latest: int | None, keep_last: int | None, save_retain_interval: int | None) -> set[int]:
    """Iterations whose checkpoints stay.

    Args:
        iterations: those that exist.
        latest: the one that was saved last (not the newest, after going back to an earlier step); it always stays.
        keep_last: how many of the newest stay; None means one with a retain interval, and all without.
        save_retain_interval: multiples of it stay.
    """
    if keep_last is None and save_retain_interval is None:
        return set(iterations)
    newest = sorted(iterations)[-max(keep_last or 1, 1) :]
    multiples = [it for it in iterations if save_retain_interval is not None and it % save_retain_interval == 0]
    return {*newest, *multiples, *([] if latest is None else [latest])}


def retain(folder: Path, keep_last: int | None, save_retain_interval: int | None) -> list[Path]:
    """Remove the checkpoints in a save folder that need not stay. Call it on one rank, when no save is going on.

    Args:
        folder: the save folder.
        keep_last: how many of the newest stay (`--keep-last`).
        save_retain_interval: checkpoints whose iteration is a multiple of it stay too (`--save-retain-interval`).

    Returns:
        the folders that were removed.
    """
    remove_leftovers(folder)
    found = checkpoints(folder)
    stay = kept(list(found), latest_iteration(folder), keep_last, save_retain_interval)
    removed = [path for iteration, path in found.items() if iteration not in stay]
    for path in removed:
        shutil.rmtree(set_aside(path))
    return removed
