"""A save folder: names in it, which checkpoint to take, its small files; and what one process does there. It checks at the start
that checkpoints can be written, makes a checkpoint of the parts of all ranks, and removes what need not be kept. Needs no torch.

::

    <save>/iter_0000100/                        a complete checkpoint
    <save>/latest_checkpointed_iteration.txt    the number of the checkpoint that was finished last
    <save>/run.json                             settings and token of the run that began to save here last
    <save>/run.alive                            the beats of that run, while it lives; see `owner.py`

What is being written or removed has other names; see `local_storage.py` and `object_storage.py`.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, listed
from megatron.checkpoint.manifest import Checksum, Manifest, StoredFile, joined, matches, part_from_json
from megatron.checkpoint.storage import CONFIG, COUNTS, MANIFEST, RECENT, STATE, Draft, Place, Storage
from megatron.checkpoint.storage_kinds import open_storage

LATEST = "latest_checkpointed_iteration.txt"
RUN = "run.json"


def checkpoint_name(iteration: int) -> str:
    """Folder name of a complete checkpoint."""
    return f"iter_{iteration:07d}"


def iterations_in(save: Storage) -> list[int]:
    """Iterations that have a folder in a save folder, ascending, complete or not."""
    return sorted(iteration for name in save.names() if (iteration := iteration_of(name)) is not None)


def latest_in(save: Storage) -> int | None:
    """The iteration in the latest file of a save folder; None if there is none or it holds no number."""
    try:
        text = save.read(LATEST).decode(errors="replace").strip()
    except (FileNotFoundError, IsADirectoryError):
        return None
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def checkpoints(folder: Path) -> dict[int, Path]:
    """Checkpoints in a local save folder by iteration, ascending; empty if there is no such folder."""
    return {iteration: folder / checkpoint_name(iteration) for iteration in iterations_in(open_storage(folder))}


def find_checkpoint(
    folder: Place,
    step: int | None = None,
    *,
    tell: Callable[[str], None] = warnings.warn,
    damaged: Mapping[int, str] | None = None,
) -> Place | None:
    """The checkpoint to resume from. Let one rank call it and tell the others.

    Without `step` it is the one that was finished last, by the latest file; if that one is missing or incomplete, the newest
    complete one. (A folder may hold newer iterations than the latest file says, left by a run that was resumed from an earlier
    step: they are not taken while the latest is sound.)

    Args:
        folder: the save folder.
        step: the iteration to take (`--ckpt-step`).
        tell: called with a message where the checkpoint is not the one that a user may expect.
        damaged: iterations that are known to be unreadable, with the reasons.

    Returns:
        the folder of the checkpoint (a path, or a URL if the save folder is one), or None if there has never been one.

    Raises:
        CheckpointError: `step` is not there, or no checkpoint there is complete, or `folder` is a checkpoint itself.
    """
    storage = open_storage(folder)
    if storage.size(MANIFEST) is not None:
        parent = storage.location.rstrip("/").rpartition("/")[0]
        raise CheckpointError(f"{folder} is a checkpoint itself: give --load {parent}, with --ckpt-step to choose one")
    found = iterations_in(storage)
    if step is not None:
        if step not in found:
            there = listed([str(iteration) for iteration in reversed(found)]) or "none"
            raise CheckpointError(f"--ckpt-step {step}: {folder} has no such checkpoint; it has: {there}")
        if fault := fault_of(storage.child(checkpoint_name(step))):
            raise DamagedCheckpointError(f"--ckpt-step {step}: {fault}")
        return storage.child(checkpoint_name(step)).place
    latest = latest_in(storage)
    if latest is None and not found:
        return None
    faults = [f"{storage.at(LATEST)} is missing or unreadable"] if latest is None else []
    order = ([] if latest is None else [latest]) + [iteration for iteration in reversed(found) if iteration != latest]
    for iteration in order:
        inside = storage.child(checkpoint_name(iteration))
        if fault := (damaged or {}).get(iteration) or fault_of(inside):
            faults.append(fault)
            continue
        if faults:
            tell(f"taking {inside.location}, because {'; '.join(faults)}")
        elif iteration != max(found):
            newest = storage.at(checkpoint_name(max(found)))
            tell(f"taking {inside.location}, which {LATEST} names; {newest} is newer but was not saved last")
        return inside.place
    raise DamagedCheckpointError(f"{folder} holds no complete checkpoint:\n  " + listed(faults, "\n  "))


def iteration_of(path: Place) -> int | None:
    """The iteration that a checkpoint's folder is named after; None if it is named otherwise."""
    match = re.fullmatch(r"(?:.*/)?iter_(\d{7,})/?", str(path))
    return int(match[1]) if match else None


def note_damaged(path: Place, error: DamagedCheckpointError, damaged: dict[int, str], may_fall_back: bool) -> None:
    """Note that a checkpoint is damaged, so that another is taken; raise the error if there is no other."""
    iteration = iteration_of(path)
    if not may_fall_back or iteration is None:
        raise error
    damaged[iteration] = str(error).replace("\n  ", " ")


def fault_of(inside: Storage) -> str | None:
    """Why a checkpoint is not complete, or None if it is. Looks at the manifest and the sizes of the files."""
    try:
        return next(faults_of_files(inside, manifest_in(inside)), None)
    except DamagedCheckpointError as error:
        return str(error)


def faults_of_files(inside: Storage, manifest: Manifest) -> Iterator[str]:
    """Messages about files that are missing or of another size."""
    for name, file in manifest.files.items():
        found = inside.size(name)
        if found is None:
            yield f"{inside.at(name)} is missing"
        elif found != file.num_bytes:
            yield f"{inside.at(name)} has {found} bytes, it was written with {file.num_bytes}"


def manifest_in(inside: Storage) -> Manifest:
    """The manifest of the checkpoint in a folder.

    Raises:
        CheckpointError: it is of another format, or written by a newer version.
        DamagedCheckpointError: it is missing, unreadable or altered.
    """
    try:
        data = inside.read(MANIFEST)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{inside.location} is not a complete checkpoint: it has no {MANIFEST}") from error
    manifest = part_from_json(data, inside.location, MANIFEST)
    if missing := [name for name in (CONFIG, STATE) if name not in manifest.files]:
        raise DamagedCheckpointError(f"{inside.at(MANIFEST)} is not readable (it does not list {missing[0]})")
    return manifest


def read_state(path: Place) -> dict[str, Any]:
    """The training state of the checkpoint in a folder; see `read_json`."""
    return read_json(open_storage(path), STATE)


def read_config(path: Place) -> dict[str, Any]:
    """The record of the run that saved the checkpoint in a folder; see `read_json`."""
    return read_json(open_storage(path), CONFIG)


def read_json(inside: Storage, name: str, manifest: Manifest | None = None) -> dict[str, Any]:
    """Read one of the small files of a checkpoint, and check it.

    Args:
        inside: the folder of the checkpoint.
        name: the file.
        manifest: the checkpoint's manifest, if it was read already.

    Raises:
        CheckpointError: not a complete checkpoint of a known version, or altered.
    """
    expected = (manifest or manifest_in(inside)).files[name].checksum or ""
    try:
        data = inside.read(name)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{inside.at(name)} is missing") from error
    if not matches(Checksum(data).text, expected):
        raise DamagedCheckpointError(f"{inside.at(name)} was altered (checksum)")
    try:
        content: dict[str, Any] = json.loads(data)
        if not isinstance(content, dict):
            raise ValueError("no table of values")
        if name == STATE:
            check_counts(content, iteration_of(inside.location))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedCheckpointError(f"{inside.at(name)} is not as a run writes it: {error}") from error
    return content


_MOST = 1 << 60
_MOST_RECENT = 1 << 12


def check_counts(state: Mapping[str, Any], iteration: int | None) -> None:
    """Check the counts of a training state: a forged or odd file must not make a run begin anywhere, or be done.

    Args:
        iteration: what the folder of the checkpoint is named after, if it is.

    Raises:
        ValueError: one is no whole number that it can be.
        KeyError: one is missing.
    """
    if "progress" not in state:  # weights alone
        return
    found = {name: state["progress"][name] for name in COUNTS} | {"optimizer_updates": state.get("optimizer_updates", 0)}
    for name, value in found.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
            raise ValueError(f"{name} is {str(value)[:40]}")
    if iteration is not None and found["iteration"] != iteration:
        raise ValueError(f"iteration is {found['iteration']}, in the checkpoint of iteration {iteration}")
    recent = state["progress"].get(RECENT, [])
    if not isinstance(recent, list) or len(recent) > _MOST_RECENT or not all(map(_are_two_numbers, recent)):
        raise ValueError(f"{RECENT} is {str(recent)[:40]}")
    if found["updated_samples"] > found["consumed_samples"] or found["skipped_iterations"] > found["iteration"]:
        raise ValueError("more samples updated than consumed, or more iterations skipped than done")


def _are_two_numbers(step: object) -> bool:
    return isinstance(step, list) and len(step) == 2 and all(type(each) in (int, float) and math.isfinite(each) for each in step)


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
    """Write `run.json`, the record of a run with its token and this process: it is the one that saves here from now on."""
    process = {"host": socket.gethostname(), "pid": os.getpid()}
    save.write(RUN, (json.dumps({**record, **process, "token": token}, indent=2) + "\n").encode())


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


def retain(save: Storage, retention: Retention) -> None:
    """Remove the checkpoints in a save folder that need not be kept. Call it in one process, when no save is going on.

    Only a folder with a manifest counts and is removed: a folder of another program's checkpoint may have the same name.
    """
    found = [number for number in iterations_in(save) if save.size(f"{checkpoint_name(number)}/{MANIFEST}") is not None]
    stay = kept(found, latest_in(save), retention)
    for iteration in found:
        if iteration not in stay:
            save.retire(checkpoint_name(iteration))


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
    strangers = []
    for name in map(checkpoint_name, iterations_in(save)):
        files = save.names(name)  # a damaged or killed checkpoint of ours may lack any of its own
        if files and not any(file in (CONFIG, MANIFEST, STATE) or file.startswith("rank_") for file in files):
            strangers.append(name)
    if strangers:
        raise CheckpointError(
            f"--save {save.location} holds what is no checkpoint of this program: {listed(strangers)}. "
            f"Give another folder (tools/checkpoint.py import makes a checkpoint of a legacy one)"
        )
