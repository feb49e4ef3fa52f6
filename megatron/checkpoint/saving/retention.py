"""Which checkpoints stay."""

from __future__ import annotations

from megatron.checkpoint.format.folder import checkpoint_name, iterations_in, latest_in
from megatron.checkpoint.format.manifest import MANIFEST
from megatron.checkpoint.storage.protocol import Storage


def kept(iterations: list[int], latest: int | None, keep_last: int | None, save_retain_interval: int | None) -> set[int]:
    """Iterations whose checkpoints stay.

    Args:
        iterations: those that exist.
        latest: the one that was saved last; None if that is not known. Those beyond it, of a run that went back to an earlier step,
            do not count as its newest, and stay until it has come so far again.
        keep_last: how many of the newest stay; None means one with a retain interval, and all without.
        save_retain_interval: multiples of it stay.
    """
    if keep_last is None and save_retain_interval is None:
        return set(iterations)
    reached = sorted(it for it in iterations if latest is None or it <= latest)
    beyond = [it for it in iterations if latest is not None and it > latest]
    multiples = [it for it in iterations if save_retain_interval is not None and it % save_retain_interval == 0]
    return {*reached[-max(keep_last or 1, 1) :], *multiples, *beyond}


def retain(save: Storage, keep_last: int | None, save_retain_interval: int | None) -> list[str]:
    """Remove the checkpoints in a save folder that need not stay. Call it in one process, when no save is going on.

    Only what has a manifest counts and is removed: a folder of another program's checkpoint may have the same name.

    Args:
        save: the save folder.
        keep_last: how many of the newest stay (`--keep-last`).
        save_retain_interval: checkpoints whose iteration is a multiple of it stay too (`--save-retain-interval`).

    Returns:
        the names of those that were removed.
    """
    found = [number for number in iterations_in(save) if save.size(f"{checkpoint_name(number)}/{MANIFEST}") is not None]
    stay = kept(found, latest_in(save), keep_last, save_retain_interval)
    removed = [checkpoint_name(iteration) for iteration in found if iteration not in stay]
    for name in removed:
        save.retire(name)
    return removed
