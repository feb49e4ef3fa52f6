"""Save folder of a run: names, small files, selection of the checkpoint to load, and the work that a single process does in the
folder.

That process checks at the start of a run that checkpoints can be written, commits a checkpoint when all ranks have written their
files, and removes old checkpoints. Needs no torch.

::

    <save>/iter_0000100/                        complete checkpoint
    <save>/latest_checkpointed_iteration.txt    iteration of the last completed save
    <save>/run.json                             settings and identity (random digits) of the last run that began to save here
    <save>/run.alive                            heartbeat of that run while it is alive (`heartbeat.py`)

During its save or removal, a checkpoint has another name (`local_storage.py`, `object_storage.py`).
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

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, format_list
from megatron.checkpoint.manifest import Checksum, Manifest, StoredFile, checksums_match, merge_tensors, parse_manifest
from megatron.checkpoint.storage import CONFIG, MANIFEST, PROGRESS_COUNTS, RECENT_STEPS, STATE, Draft, PathOrUrl, Storage
from megatron.checkpoint.storage_url import open_storage

LATEST = "latest_checkpointed_iteration.txt"
RUN = "run.json"


def checkpoint_name(iteration: int) -> str:
    """Return the folder name of a complete checkpoint."""
    return f"iter_{iteration:07d}"


def list_iterations(save: Storage) -> list[int]:
    """Return the iterations for which a save folder has a checkpoint folder, ascending. The checkpoints may be incomplete."""
    return sorted(iteration for name in save.list_names() if (iteration := parse_iteration(name)) is not None)


def read_latest(save: Storage) -> int | None:
    """Return the iteration in `latest_checkpointed_iteration.txt`, or None if the file is missing or holds no number."""
    try:
        text = save.read(LATEST).decode(errors="replace").strip()
    except (FileNotFoundError, IsADirectoryError):
        return None
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a local save folder by iteration, ascending. Empty if the folder does not exist."""
    return {iteration: folder / checkpoint_name(iteration) for iteration in list_iterations(open_storage(folder))}


def find_checkpoint(
    folder: PathOrUrl,
    step: int | None = None,
    *,
    warn: Callable[[str], None] = warnings.warn,
    damaged: Mapping[int, str] | None = None,
) -> PathOrUrl | None:
    """Return the checkpoint to resume from. One rank should call this and broadcast the result.

    Without `step`, return the checkpoint that the latest file (`latest_checkpointed_iteration.txt`) names. If this checkpoint is
    missing or incomplete, return the newest complete checkpoint. Checkpoints beyond the one that the latest file names are
    otherwise ignored: they were written before the run was resumed from an earlier step.

    Args:
        folder: path or URL of the save folder.
        step: iteration to load (`--ckpt-step`).
        warn: called with a message if the returned checkpoint is not the one that a user may expect.
        damaged: iterations that are known to be unreadable, with the reasons.

    Returns:
        path of the checkpoint's folder (a URL if the save folder is a URL), or None if the folder has never held a checkpoint.

    Raises:
        CheckpointError: checkpoint `step` does not exist, no checkpoint is complete, or `folder` is itself a checkpoint.
    """
    storage = open_storage(folder)
    if storage.file_size(MANIFEST) is not None:
        parent = storage.location.rstrip("/").rpartition("/")[0]
        raise CheckpointError(f"{folder} is a checkpoint itself: give --load {parent}, with --ckpt-step to choose one")
    iterations = list_iterations(storage)
    if step is not None:
        if step not in iterations:
            available = format_list([str(iteration) for iteration in reversed(iterations)]) or "none"
            raise CheckpointError(f"--ckpt-step {step}: {folder} has no checkpoint of this iteration; it has: {available}")
        if problem := find_problem(storage.child(checkpoint_name(step))):
            raise DamagedCheckpointError(f"--ckpt-step {step}: {problem}")
        return storage.child(checkpoint_name(step)).path_or_url
    latest = read_latest(storage)
    if latest is None and not iterations:
        return None
    problems = [f"{storage.location_of(LATEST)} is missing or unreadable"] if latest is None else []
    candidates = ([] if latest is None else [latest]) + [iteration for iteration in reversed(iterations) if iteration != latest]
    for iteration in candidates:
        checkpoint = storage.child(checkpoint_name(iteration))
        if problem := (damaged or {}).get(iteration) or find_problem(checkpoint):
            problems.append(problem)
            continue
        if problems:
            warn(f"taking {checkpoint.location}, because {'; '.join(problems)}")
        elif iteration != max(iterations):
            newest = storage.location_of(checkpoint_name(max(iterations)))
            warn(f"taking {checkpoint.location}, which {LATEST} names; {newest} is newer but was not saved last")
        return checkpoint.path_or_url
    raise DamagedCheckpointError(f"{folder} holds no complete checkpoint:\n  " + format_list(problems, "\n  "))


def parse_iteration(path: PathOrUrl) -> int | None:
    """Return the iteration in the name of a checkpoint's folder, or None if the folder has another name."""
    match = re.fullmatch(r"(?:.*/)?iter_(\d{7,})/?", str(path))
    return int(match[1]) if match else None


def record_damage(path: PathOrUrl, error: DamagedCheckpointError, damaged: dict[int, str], may_fall_back: bool) -> None:
    """Record that a checkpoint is damaged, so that the next selection skips it. Raise the error if no other checkpoint may be
    loaded.

    Args:
        path: path or URL of the checkpoint.
        error: the error that describes the damage.
        damaged: reasons by iteration, to which the checkpoint is added.
        may_fall_back: whether another checkpoint may be loaded instead.
    """
    iteration = parse_iteration(path)
    if not may_fall_back or iteration is None:
        raise error
    damaged[iteration] = str(error).replace("\n  ", " ")


def find_problem(checkpoint: Storage) -> str | None:
    """Return the reason why a checkpoint is incomplete, or None if it is complete. Checks only the manifest and the sizes of the
    files."""
    try:
        return next(find_file_problems(checkpoint, load_manifest(checkpoint)), None)
    except DamagedCheckpointError as error:
        return str(error)


def find_file_problems(checkpoint: Storage, manifest: Manifest) -> Iterator[str]:
    """Yield a message for each file of the manifest that is missing or has another size."""
    for name, file in manifest.files.items():
        size = checkpoint.file_size(name)
        if size is None:
            yield f"{checkpoint.location_of(name)} is missing"
        elif size != file.num_bytes:
            yield f"{checkpoint.location_of(name)} has {size} bytes, it was written with {file.num_bytes}"


def load_manifest(checkpoint: Storage) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        CheckpointError: the manifest has another format, or a newer version of this program wrote it.
        DamagedCheckpointError: the manifest is missing, unreadable or altered.
    """
    try:
        data = checkpoint.read(MANIFEST)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{checkpoint.location} is not a complete checkpoint: it has no {MANIFEST}") from error
    manifest = parse_manifest(data, checkpoint.location, MANIFEST)
    if missing := [name for name in (CONFIG, STATE) if name not in manifest.files]:
        raise DamagedCheckpointError(f"{checkpoint.location_of(MANIFEST)} is damaged: it does not list {missing[0]}")
    return manifest


def read_state(path: PathOrUrl) -> dict[str, Any]:
    """Return the training state of a checkpoint (`state.json`). Its checksum and its counters are verified."""
    return read_json(open_storage(path), STATE)


def read_config(path: PathOrUrl) -> dict[str, Any]:
    """Return the settings and other properties of the run that saved a checkpoint (`config.json`). The checksum is verified."""
    return read_json(open_storage(path), CONFIG)


def read_json(checkpoint: Storage, name: str, manifest: Manifest | None = None) -> dict[str, Any]:
    """Read one of the JSON files of a checkpoint and verify its checksum.

    Args:
        checkpoint: folder of the checkpoint.
        name: name of the file.
        manifest: manifest of the checkpoint, if it has already been read.

    Raises:
        CheckpointError: the checkpoint is incomplete, of an unknown version, or altered.
    """
    expected_checksum = (manifest or load_manifest(checkpoint)).files[name].checksum or ""
    try:
        data = checkpoint.read(name)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{checkpoint.location_of(name)} is missing") from error
    if not checksums_match(Checksum(data).text, expected_checksum):
        raise DamagedCheckpointError(f"{checkpoint.location_of(name)} was altered: its checksum does not match")
    try:
        content: dict[str, Any] = json.loads(data)
        if not isinstance(content, dict):
            raise ValueError("it does not contain a JSON object")
        if name == STATE:
            check_counts(content, parse_iteration(checkpoint.location))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{checkpoint.location_of(name)} does not have the content that a run writes: {error}"
        ) from error
    return content


_MAX_COUNT = 1 << 60
_MAX_RECENT = 1 << 12


def check_counts(state: Mapping[str, Any], iteration: int | None) -> None:
    """Check the counters of a training state, so that a forged or damaged file does not make a run start at a wrong step.

    Args:
        iteration: iteration in the name of the checkpoint's folder; None if the folder has another name.

    Raises:
        ValueError: a counter is not an integer in the allowed range, or counters contradict each other.
        KeyError: a counter is missing.
    """
    if "progress" not in state:  # a checkpoint with weights only
        return
    counts = {name: state["progress"][name] for name in PROGRESS_COUNTS} | {"optimizer_updates": state.get("optimizer_updates", 0)}
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
            raise ValueError(f"{name} is {str(value)[:40]}")
    if iteration is not None and counts["iteration"] != iteration:
        raise ValueError(f"iteration is {counts['iteration']}, but the folder is that of iteration {iteration}")
    recent = state["progress"].get(RECENT_STEPS, [])
    if not isinstance(recent, list) or len(recent) > _MAX_RECENT or not all(map(_is_pair_of_finite_values, recent)):
        raise ValueError(f"{RECENT_STEPS} is {str(recent)[:40]}")
    if counts["updated_samples"] > counts["consumed_samples"] or counts["skipped_iterations"] > counts["iteration"]:
        raise ValueError(
            f"the counters contradict each other (updated_samples > consumed_samples, or skipped_iterations > iteration): {counts}"
        )


def _is_pair_of_finite_values(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(type(value) in (int, float) and math.isfinite(value) for value in pair)


def encode_json_files(config: dict[str, Any], state: dict[str, Any]) -> dict[str, bytes]:
    """Return the contents of `config.json` and `state.json` by name.

    Raises:
        CheckpointError: config or state cannot be encoded as JSON.
    """
    contents = {}
    for name, content in ((CONFIG, config), (STATE, state)):
        try:
            contents[name] = json.dumps(content, indent=1).encode()
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{name} cannot be encoded as JSON: {error}") from error
    return contents


def claim_folder(save: Storage, record: dict[str, Any], token: str) -> None:
    """Make this run the owner of the save folder: write `run.json`.

    Args:
        save: save folder.
        record: settings, versions and command line of the run. Host and process are added to them.
        token: random hexadecimal digits that identify the run.
    """
    process_info = {"host": socket.gethostname(), "pid": os.getpid()}
    save.write(RUN, (json.dumps({**record, **process_info, "token": token}, indent=2) + "\n").encode())


def _check_still_owner(save: Storage, token: str) -> None:
    """Check that no other run has claimed the save folder since the run with this token did.

    A run that was considered dead (unreachable node, stopped process) must not overwrite the checkpoints of its successor.
    """
    try:
        owner = json.loads(save.read(RUN))["token"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return  # no run has claimed the folder
    if owner != token:
        raise CheckpointError(
            f"another run has taken over the folder {save.location} (see {RUN} there), so this run no longer saves in it"
        )


def commit(
    save: Storage,
    draft: Draft,
    iteration: int,
    rank_manifests: Sequence[Manifest],
    small_files: Mapping[str, bytes],
    token: str | None = None,
) -> Manifest:
    """Turn the files that all ranks have written into a complete checkpoint: write the manifest, give the checkpoint its final
    name, then update the latest file (`latest_checkpointed_iteration.txt`).

    Args:
        save: save folder.
        draft: draft of the checkpoint.
        iteration: iteration of the checkpoint.
        rank_manifests: results of `write_rank_files` on all ranks.
        small_files: result of `encode_json_files`.
        token: token of the run. If not None, check that no other run has claimed the folder (`claim_folder`).

    Returns:
        the manifest of the checkpoint.

    Raises:
        CheckpointError: the size of a data file differs from the size that its rank has written, or another run has claimed the
            folder.
        OSError: a file cannot be written.
    """
    manifest = merge_manifests(rank_manifests)
    for name, file in manifest.files.items():
        if (size := draft.storage.file_size(name)) != file.num_bytes:
            raise CheckpointError(
                f"{draft.storage.location_of(name)} was written with {file.num_bytes} bytes, but the first rank sees "
                f"{'no such file' if size is None else size}"
            )
    stored_files = {name: StoredFile(len(data), Checksum(data).text) for name, data in small_files.items()}
    manifest = Manifest(manifest.tensors, dict(sorted((manifest.files | stored_files).items())))
    if token is not None:
        _check_still_owner(save, token)
    draft.publish({**small_files, MANIFEST: manifest.to_json()})
    save.write(LATEST, f"{iteration}\n".encode())
    return manifest


def merge_manifests(rank_manifests: Sequence[Manifest]) -> Manifest:
    """Merge the manifests of all ranks' files into the manifest of the checkpoint."""
    stored_files = {name: file for rank_manifest in rank_manifests for name, file in rank_manifest.files.items()}
    return Manifest(merge_tensors(item for rank_manifest in rank_manifests for item in rank_manifest.tensors.items()), stored_files)


class Retention(NamedTuple):
    """Rules that select which checkpoints of a run are kept."""

    keep_last: int | None = None
    """Number of newest checkpoints to keep (`--keep-last`). None means 1 if `save_retain_interval` is set, and all otherwise."""
    save_retain_interval: int | None = None
    """Keep also the checkpoints whose iteration is a multiple of this number (`--save-retain-interval`)."""


def select_retained(iterations: list[int], latest: int | None, retention: Retention) -> set[int]:
    """Return the iterations whose checkpoints are kept.

    Args:
        iterations: iterations of all existing checkpoints.
        latest: iteration of the last save; None if unknown. A run that went back to an earlier step leaves checkpoints beyond
            `latest`. They do not count towards `keep_last`, and are kept until the run reaches their iteration again.
        retention: rules for keeping checkpoints.
    """
    keep_last, interval = retention
    if keep_last is None and interval is None:
        return set(iterations)
    reached = sorted(iteration for iteration in iterations if latest is None or iteration <= latest)
    beyond = [iteration for iteration in iterations if latest is not None and iteration > latest]
    multiples = [iteration for iteration in iterations if interval is not None and iteration % interval == 0]
    return {*reached[-max(keep_last or 1, 1) :], *multiples, *beyond}


def apply_retention(save: Storage, retention: Retention) -> None:
    """Remove the checkpoints of a save folder that the retention rules do not keep. Call this in one process, while no save is
    running.

    Folders without a manifest are neither counted nor removed: checkpoints of other programs may have the same folder names.
    """
    iterations = [
        candidate for candidate in list_iterations(save) if save.file_size(f"{checkpoint_name(candidate)}/{MANIFEST}") is not None
    ]
    retained = select_retained(iterations, read_latest(save), retention)
    for iteration in iterations:
        if iteration not in retained:
            save.remove_checkpoint(checkpoint_name(iteration))


def check_writable(save: Storage) -> None:
    """Check that the save folder can be created, and that a file can be written and removed in it.

    Raises:
        CheckpointError: one of these operations fails.
    """
    try:
        save.create_folder()
        save.write(".writable", b"x")
        save.remove(".writable")
    except OSError as error:
        raise CheckpointError(
            f"--save {save.location}: cannot write there ({error.strerror or error}). "
            f"Give a folder that this user can create and write"
        ) from error


def check_no_foreign_checkpoints(save: Storage) -> None:
    """Check that the save folder holds no checkpoints of other programs, whose folders may have the same names as those of this
    program.

    Raises:
        CheckpointError: a checkpoint of another program is in the folder.
    """
    foreign_names = []
    for name in map(checkpoint_name, list_iterations(save)):
        file_names = save.list_names(name)  # a damaged or unfinished checkpoint of this program may lack any file
        if file_names and not any(file in (CONFIG, MANIFEST, STATE) or file.startswith("rank_") for file in file_names):
            foreign_names.append(name)
    if foreign_names:
        raise CheckpointError(
            f"--save {save.location} holds checkpoints of another program: {format_list(foreign_names)}. "
            f"Give another folder (tools/checkpoint.py import converts a checkpoint of Megatron-LM)"
        )
