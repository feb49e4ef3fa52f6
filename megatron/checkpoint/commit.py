"""What one process does in a save folder: it checks at the start that checkpoints can be written, makes a checkpoint of the parts
of all ranks, and removes what killed runs left and what need not be kept. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.checkpoint.content_sums import Checksum
from megatron.checkpoint.errors import CheckpointError, listed
from megatron.checkpoint.manifest import CONFIG, MANIFEST, STATE, Manifest, StoredFile, joined
from megatron.checkpoint.save_folder import LATEST, RUN, checkpoint_name, iterations_in, latest_in
from megatron.checkpoint.storage import Draft, Storage


def encoded(config: dict[str, Any], state: dict[str, Any]) -> dict[str, bytes]:
    """The contents of `config.json` and `state.json`.

    Raises:
        CheckpointError: one of them does not fit into JSON.
    """
    files = {}
    for name, content in ((CONFIG, config), (STATE, state)):
        try:
            files[name] = json.dumps(content, indent=1).encode()
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{name} would hold what JSON cannot: {error}") from error
    return files


def take_over(save: Storage, record: dict[str, Any], token: str) -> None:
    """Write `run.json`: this run is the one that saves here from now on.

    Args:
        save: the save folder.
        record: settings, versions and command line of the run.
        token: that of this run.
    """
    save.write(RUN, (json.dumps({**record, "token": token}, indent=2) + "\n").encode())


def _check_not_taken_over(save: Storage, token: str) -> None:
    """A run that was thought dead (node out of reach, process stopped) must not overwrite its successor's checkpoints."""
    try:
        owner = json.loads(save.read(RUN))["token"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return  # nobody has said so
    if owner != token:
        raise CheckpointError(
            f"another run has begun to save in {save.location} since this one did ({RUN}): this one saves there no more"
        )


def commit(
    save: Storage, draft: Draft, iteration: int, parts: Sequence[Manifest], files: Mapping[str, bytes], run: str | None = None
) -> Manifest:
    """Make a checkpoint of what all ranks have written: manifest, final name, latest file, in this order.

    Args:
        save: the save folder.
        draft: the checkpoint that is being written.
        iteration: its number.
        parts: what `write_part` returned on each rank.
        files: what `encoded` returned.
        run: token of the run that saves; no other run may have taken over the folder (see `take_over`).

    Returns:
        the manifest.

    Raises:
        CheckpointError: a data file has another size here than where it was written, or another run saves here now.
        OSError: a file cannot be written.
    """
    manifest = merged(parts)
    for name, file in manifest.files.items():
        if (found := draft.storage.size(name)) != file.num_bytes:
            raise CheckpointError(
                f"{draft.storage.at(name)} was written with {file.num_bytes} bytes, the first rank sees "
                f"{'no such file' if found is None else found}"
            )
    small = {name: StoredFile(len(data), Checksum(data).text) for name, data in files.items()}
    manifest = Manifest(manifest.tensors, dict(sorted((manifest.files | small).items())))
    if run is not None:
        _check_not_taken_over(save, run)
    draft.publish({**files, MANIFEST: manifest.to_json()})
    save.write(LATEST, f"{iteration}\n".encode())
    return manifest


def merged(parts: Sequence[Manifest]) -> Manifest:
    """One manifest made of the parts of all ranks."""
    files = {name: file for part in parts for name, file in part.files.items()}
    return Manifest(joined(item for part in parts for item in part.tensors.items()), files)


class Retention(NamedTuple):
    """Which checkpoints of a run are kept."""

    keep_last: int | None = None
    """The number of newest ones (`--keep-last`). None means one if there is a retain interval, and all otherwise."""
    save_retain_interval: int | None = None
    """Those whose iteration is a multiple of it are kept too (`--save-retain-interval`)."""


def kept(iterations: list[int], latest: int | None, retention: Retention) -> set[int]:
    """Iterations whose checkpoints are kept.

    Args:
        iterations: those that exist.
        latest: the one that was saved last; None if that is not known. Those beyond it, of a run that went back to an earlier step,
            do not count as its newest, and are kept until it has come so far again.
        retention: which are kept.
    """
    keep_last, interval = retention
    if keep_last is None and interval is None:
        return set(iterations)
    reached = sorted(it for it in iterations if latest is None or it <= latest)
    beyond = [it for it in iterations if latest is not None and it > latest]
    multiples = [it for it in iterations if interval is not None and it % interval == 0]
    return {*reached[-max(keep_last or 1, 1) :], *multiples, *beyond}


def retain(save: Storage, retention: Retention) -> list[str]:
    """Remove the checkpoints in a save folder that need not be kept. Call it in one process, when no save is going on.

    Only a folder with a manifest counts and is removed: a folder of another program's checkpoint may have the same name.

    Returns:
        the names of those that were removed.
    """
    found = [number for number in iterations_in(save) if save.size(f"{checkpoint_name(number)}/{MANIFEST}") is not None]
    stay = kept(found, latest_in(save), retention)
    removed = [checkpoint_name(iteration) for iteration in found if iteration not in stay]
    for name in removed:
        save.retire(name)
    return removed


def check_writable(save: Storage) -> None:
    """Make the save folder, and write and remove a file in it.

    Raises:
        CheckpointError: one of these is not possible.
    """
    try:
        save.make()
        save.write(".writable", b"x")
        save.remove(".writable")
    except OSError as error:
        raise CheckpointError(
            f"--save {save.location}: cannot write there ({error.strerror or error}). "
            f"Give a folder that can be made and written by this user"
        ) from error


def check_for_strangers(save: Storage) -> None:
    """Refuse a folder with another program's checkpoints, which may have the names of ours: never write among them.

    Raises:
        CheckpointError: there are such.
    """
    names = [checkpoint_name(iteration) for iteration in iterations_in(save)]
    if strangers := [name for name in names if _is_strange(save.names(name))]:
        raise CheckpointError(
            f"--save {save.location} holds what is no checkpoint of this program: {listed(strangers)}. "
            f"Give another folder (tools/checkpoint.py import makes a checkpoint of a legacy one)"
        )


def _is_strange(files: list[str]) -> bool:
    ours = any(name in (CONFIG, MANIFEST, STATE) or name.startswith("rank_") for name in files)
    return bool(files) and not ours  # a damaged or killed one may lack any of them
