"""Save folder of a run: its file names, small files and owner, and the selection of the checkpoint to load.

A single process does the work in the folder. It checks at the start of a run that checkpoints can be written, commits a checkpoint
when all ranks have written their files, and removes old checkpoints. Needs no torch.

::

    <save>/iter_0000100/                        complete checkpoint
    <save>/latest_checkpointed_iteration.txt    iteration of the last completed save
    <save>/best_checkpoint.json                 checkpoint with the lowest validation loss, in a run with --keep-best
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
from typing import Any, Literal, NamedTuple, TypedDict

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, format_list
from megatron.checkpoint.manifest import (
    Checksum,
    Manifest,
    StoredFile,
    checksums_match,
    merge_tensors,
    parse_manifest,
)
from megatron.checkpoint.storage import CONFIG, MANIFEST, PROGRESS_COUNTS, RECENT_STEPS, STATE, Draft, PathOrUrl, Storage
from megatron.checkpoint.storage_url import open_storage
from megatron.config.imports import import_object
from megatron.config.regular_file import parse_json
from megatron.config.save import check_json_type

LATEST = "latest_checkpointed_iteration.txt"
BEST = "best_checkpoint.json"
RUN = "run.json"


def get_checkpoint_name(iteration: int) -> str:
    """Return the folder name of a complete checkpoint, such as `iter_0000100`."""
    return f"iter_{iteration:07d}"


def list_iterations(save: Storage) -> list[int]:
    """Return the iterations whose checkpoint folders (`iter_0000100`) exist in a save folder, ascending. The checkpoints may be
    incomplete."""
    return sorted(iteration for name in save.list_names() if (iteration := parse_iteration(name)) is not None)


def read_latest(save: Storage) -> int | None:
    """Return the iteration in `latest_checkpointed_iteration.txt`, or None if the file is missing or holds no number."""
    try:
        text = save.read(LATEST).decode(errors="replace").strip()
    except (FileNotFoundError, IsADirectoryError):
        return None
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def read_best(save: Storage) -> int | None:
    """Return the iteration in `best_checkpoint.json`, or None if the file is missing or damaged. Its checkpoint may be missing."""
    try:
        iteration = parse_json(save.read(BEST))["iteration"]
    except (FileNotFoundError, IsADirectoryError, ValueError, KeyError, TypeError):
        return None
    return iteration if type(iteration) is int else None


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the folders of the checkpoints in a local save folder by iteration, ascending. Empty if the save folder does not
    exist. The checkpoints may be incomplete."""
    return {iteration: folder / get_checkpoint_name(iteration) for iteration in list_iterations(open_storage(folder))}


def find_checkpoint(
    folder: PathOrUrl,
    step: int | Literal["best"] | None = None,
    *,
    warn: Callable[[str], None] = warnings.warn,
    damaged: Mapping[int, str] | None = None,
) -> PathOrUrl | None:
    """Return the checkpoint to resume from. One rank should call this and broadcast the result.

    Without `step`, return the checkpoint that `latest_checkpointed_iteration.txt` names, even if there are newer ones: the run
    wrote those before it was resumed from an earlier step. If the named checkpoint is missing or incomplete, return the newest
    complete one.

    Args:
        folder: path or URL of the save folder.
        step: iteration to load (`--ckpt-step`); "best" for the checkpoint with the lowest validation loss (--keep-best).
        warn: called with a message if the returned checkpoint is not the one that a user may expect.
        damaged: iterations that are known to be unreadable, with the reasons.

    Returns:
        path of the checkpoint's folder (a URL if the save folder is a URL), or None if the folder has never held a checkpoint.

    Raises:
        CheckpointError: checkpoint `step` does not exist, no checkpoint is complete, or `folder` is itself a checkpoint.
    """
    storage = open_storage(folder)
    if storage.get_file_size(MANIFEST) is not None:
        parent = storage.location.rstrip("/").rpartition("/")[0]
        raise CheckpointError(f"{folder} is a checkpoint itself: give --load {parent}, with --ckpt-step to choose the iteration")
    iterations = list_iterations(storage)
    if step == "best":
        step = import_object("megatron_lab.checkpoints.best_checkpoint:require_best")(storage).iteration
    if step is not None:
        if step not in iterations:
            available = format_list([str(iteration) for iteration in reversed(iterations)]) or "none"
            raise CheckpointError(
                f"--ckpt-step {step}: {folder} has no checkpoint of this iteration. "
                f"Choose an iteration with a checkpoint: {available}"
            )
        if problem := find_problem(storage.get_child(get_checkpoint_name(step))):
            raise DamagedCheckpointError(f"--ckpt-step {step}: {problem}, or choose another iteration")
        return storage.get_child(get_checkpoint_name(step)).path_or_url
    latest = read_latest(storage)
    if latest is None and not iterations:
        return None
    problems = [f"{storage.get_location(LATEST)} is missing or unreadable"] if latest is None else []
    candidates = ([] if latest is None else [latest]) + [iteration for iteration in reversed(iterations) if iteration != latest]
    for iteration in candidates:
        checkpoint = storage.get_child(get_checkpoint_name(iteration))
        if problem := (damaged or {}).get(iteration) or find_problem(checkpoint):
            problems.append(problem)
            continue
        if problems:
            warn(f"taking {checkpoint.location}, because {'; '.join(problems)}")
        elif iteration != max(iterations):
            newest = storage.get_location(get_checkpoint_name(max(iterations)))
            warn(f"taking {checkpoint.location}, which {LATEST} names; {newest} is newer but was not saved last")
        return checkpoint.path_or_url
    raise DamagedCheckpointError(
        f"{folder} holds no complete checkpoint, so nothing can be loaded from this folder. Copy its files again, or give another "
        "folder. Problems:\n  " + format_list(problems, "\n  ")
    )


def parse_iteration(path: PathOrUrl) -> int | None:
    """Return the iteration in the path of a checkpoint's folder (100 for `.../iter_0000100`), or None if the folder has another
    name."""
    match = re.fullmatch(r"(?:.*/)?iter_(\d{7,})/?", str(path))
    return int(match[1]) if match else None


def record_damage(path: PathOrUrl, error: DamagedCheckpointError, damaged: dict[int, str], may_fall_back: bool) -> None:
    """Record that a checkpoint is damaged, so that the next `find_checkpoint` skips it. If no other checkpoint may be loaded
    instead, raise the error.

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
    """Return why a checkpoint is incomplete, as a message, or None if it is complete. Only the manifest and the sizes of the files
    are checked, not the checksums of the data."""
    try:
        return next(find_file_problems(checkpoint, load_manifest(checkpoint)), None)
    except DamagedCheckpointError as error:
        return str(error)


def find_file_problems(checkpoint: Storage, manifest: Manifest) -> Iterator[str]:
    """Yield a message for each file that the manifest lists and that is missing or has another size."""
    for name, file in manifest.files.items():
        size = checkpoint.get_file_size(name)
        if size is None:
            yield f"{checkpoint.get_location(name)} is missing; copy the file again"
        elif size != file.num_bytes:
            yield (
                f"{checkpoint.get_location(name)} has {size} bytes, but was written with {file.num_bytes} bytes; "
                "copy the file again"
            )


def load_manifest(checkpoint: Storage) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        CheckpointError: the manifest has another format, or a newer version of this program wrote it.
        DamagedCheckpointError: the manifest is missing, unreadable or altered.
    """
    try:
        data = checkpoint.read(MANIFEST)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(
            f"{checkpoint.location} is not a complete checkpoint: it has no {MANIFEST}; copy the checkpoint again"
        ) from error
    manifest = parse_manifest(data, checkpoint.location, MANIFEST)
    if missing := [name for name in _CONTENT_TYPES if name not in manifest.files or manifest.files[name].checksum is None]:
        raise DamagedCheckpointError(
            f"{checkpoint.get_location(MANIFEST)} is damaged: it does not list {missing[0]} with its checksum; copy the file again"
        )
    return manifest


class _ScalerContent(TypedDict, total=False):
    """Loss scaler in `state.json`."""

    kind: str
    scale: float
    clean_steps: int
    hysteresis_left: int


class _StateContent(TypedDict, total=False):
    """Top level of `state.json`. `Progress.from_json` and `fill_missing_fields` in `megatron/training/progress.py` check what
    `progress` and `schedule` contain."""

    progress: dict
    optimizer_updates: int
    scaler: _ScalerContent
    schedule: dict
    has_optimizer: bool
    ema_decay: float | None


class _ConfigContent(TypedDict, total=False):
    """Top level of `config.json`. `from_dict` in `megatron/config/save.py` checks the settings."""

    config: dict[str, dict]
    vocab_size: int
    command: list[str]
    versions: dict[str, Any]
    goodput: dict


_CONTENT_TYPES = {STATE: _StateContent, CONFIG: _ConfigContent}


def read_state(path: PathOrUrl) -> dict[str, Any]:
    """Return the training state of a checkpoint (`state.json`). Its checksum, and the ranges of its counters such as
    `consumed_samples`, are verified."""
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
    expected_checksum = (manifest or load_manifest(checkpoint)).files[name].checksum
    assert expected_checksum is not None, "load_manifest checks that there is one"
    try:
        data = checkpoint.read(name)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{checkpoint.get_location(name)} is missing; copy the file again") from error
    if not checksums_match(Checksum(data).text, expected_checksum):
        raise DamagedCheckpointError(
            f"{checkpoint.get_location(name)} was altered: its checksum does not match the manifest; copy the file again"
        )
    try:
        content: dict[str, Any] = parse_json(data)
        check_json_type(content, _CONTENT_TYPES[name], "", is_open=True)
        if name == STATE:
            check_counts(content, parse_iteration(checkpoint.location))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{checkpoint.get_location(name)} does not have the content that a run writes ({error}); copy the file again"
        ) from error
    return content


_MAX_COUNT = 1 << 60
_MAX_RECENT = 1 << 12


def check_counts(state: Mapping[str, Any], iteration: int | None) -> None:
    """Check the counters of a training state, such as `iteration` and `consumed_samples`. A forged or damaged file must not make a
    run start at a wrong step.

    Args:
        state: content of `state.json`.
        iteration: iteration in the name of the checkpoint's folder; None if the folder has another name.

    Raises:
        ValueError: a counter is not an integer in the allowed range, or counters contradict each other. `read_json` adds to the
            message which file it is, and that it must be copied again.
        KeyError: a counter is missing.
    """
    if "progress" not in state:  # a checkpoint with weights only
        return
    counts = {name: state["progress"][name] for name in PROGRESS_COUNTS} | {"optimizer_updates": state.get("optimizer_updates", 0)}
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
            raise ValueError(f"the checkpoint's counter {name} is {str(value)[:40]}, but must be an integer from 0 to 2^60")
    if iteration is not None and counts["iteration"] != iteration:
        raise ValueError(
            f"the checkpoint says that it is of iteration {counts['iteration']}, but its folder has the name of iteration "
            f"{iteration}"
        )
    recent = state["progress"].get(RECENT_STEPS, [])
    if not isinstance(recent, list) or len(recent) > _MAX_RECENT or not all(map(_is_pair_of_finite_values, recent)):
        raise ValueError(
            f"{RECENT_STEPS} in the checkpoint's training progress is {str(recent)[:40]}, but must be a list of pairs of finite "
            "numbers"
        )
    if counts["updated_samples"] > counts["consumed_samples"] or counts["skipped_iterations"] > counts["iteration"]:
        raise ValueError(
            "the counters of the checkpoint's training progress contradict each other (updated_samples > consumed_samples, or "
            f"skipped_iterations > iteration): {counts}"
        )


def _is_pair_of_finite_values(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(type(value) in (int, float) and math.isfinite(value) for value in pair)


def encode_json_files(config: dict[str, Any], state: dict[str, Any]) -> dict[str, bytes]:
    """Encode the settings and the training state of a checkpoint. Returns the contents of `config.json` and `state.json` by file
    name.

    Raises:
        CheckpointError: config or state cannot be encoded as JSON.
    """
    contents = {}
    for name, content in ((CONFIG, config), (STATE, state)):
        try:
            contents[name] = json.dumps(content, indent=1).encode()
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's {name} cannot be encoded as JSON ({error}): store only numbers, texts, lists and mappings in it"
            ) from error
    return contents


def claim_folder(save: Storage, record: dict[str, Any], token: str) -> None:
    """Make this run the owner of the save folder: write `run.json`. Runs that find another owner there stop saving.

    Args:
        save: save folder.
        record: settings, versions and command line of the run. Host and process are added to the file.
        token: random hexadecimal digits that identify the run.
    """
    process_info = {"host": socket.gethostname(), "pid": os.getpid()}
    save.write(RUN, (json.dumps({**record, **process_info, "token": token}, indent=2) + "\n").encode())


def check_still_owner(save: Storage, token: str) -> None:
    """Check that no other run has claimed the save folder after this run.

    This run may have been considered dead (unreachable node, stopped process). Then it must not overwrite the checkpoints of its
    successor.

    Args:
        token: hexadecimal digits that identify this run.

    Raises:
        CheckpointError: `run.json` has the token of another run.
    """
    try:
        owner = parse_json(save.read(RUN))["token"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return  # no run has claimed the folder
    if owner != token:
        raise CheckpointError(
            f"another run has taken over the folder {save.location} (see {RUN} there), so this run no longer saves in it. "
            "End one of the two runs, or start this run again with another --save folder"
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
    name, then update `latest_checkpointed_iteration.txt`.

    Args:
        save: save folder.
        draft: the unfinished checkpoint.
        iteration: iteration of the checkpoint.
        rank_manifests: results of `write_rank_files` on all ranks.
        small_files: result of `encode_json_files`.
        token: hexadecimal digits that identify the run. If not None, check that no other run has claimed the folder
            (`claim_folder`).

    Returns:
        the manifest of the checkpoint.

    Raises:
        CheckpointError: the size of a data file differs from the size that its rank has written, or another run has claimed the
            folder.
        OSError: a file cannot be written.
    """
    manifest = merge_manifests(rank_manifests)
    for name, file in manifest.files.items():
        if (size := draft.storage.get_file_size(name)) != file.num_bytes:
            raise CheckpointError(
                f"{draft.storage.get_location(name)} was written with {file.num_bytes} bytes, but the first rank sees "
                f"{'no such file' if size is None else f'{size} bytes'}: "
                "set --save to a folder on a file system that all nodes share"
            )
    stored_files = {name: StoredFile(len(data), Checksum(data).text) for name, data in small_files.items()}
    manifest = Manifest(manifest.tensors, dict(sorted((manifest.files | stored_files).items())))
    if token is not None:
        check_still_owner(save, token)
    draft.publish({**small_files, MANIFEST: manifest.to_json()})
    save.write(LATEST, f"{iteration}\n".encode())
    return manifest


def merge_manifests(rank_manifests: Sequence[Manifest]) -> Manifest:
    """Merge the manifests that all ranks have written for their files into the manifest of the checkpoint."""
    stored_files = {name: file for rank_manifest in rank_manifests for name, file in rank_manifest.files.items()}
    return Manifest(merge_tensors(item for rank_manifest in rank_manifests for item in rank_manifest.tensors.items()), stored_files)


class Retention(NamedTuple):
    """Rules that select which checkpoints of a run are kept."""

    keep_last: int | None = None
    """Number of newest checkpoints to keep (`--keep-last`). None means 1 if `save_retain_interval` is set, and all otherwise."""
    save_retain_interval: int | None = None
    """Checkpoints whose iteration is a multiple of this number are also kept (`--save-retain-interval`). None for no such
    checkpoints."""
    keeps_best: bool = False
    """Whether the checkpoint with the lowest validation loss is marked, and an earlier one is removed (`--keep-best`)."""

    @property
    def keeps_all(self) -> bool:
        """Whether no rule removes checkpoints only because newer ones exist."""
        return self.keep_last is None and self.save_retain_interval is None


def select_retained(iterations: list[int], latest: int | None, retention: Retention) -> set[int]:
    """Return the iterations whose checkpoints are kept.

    Args:
        iterations: iterations of all existing checkpoints.
        latest: iteration of the last save; None if unknown. A run that went back to an earlier step leaves checkpoints beyond
            `latest`. They do not count towards `keep_last`, and are kept until the run reaches their iteration again.
        retention: rules for keeping checkpoints.
    """
    keep_last, interval = retention.keep_last, retention.save_retain_interval
    if retention.keeps_all:
        return set(iterations)
    reached = sorted(iteration for iteration in iterations if latest is None or iteration <= latest)
    beyond = [iteration for iteration in iterations if latest is not None and iteration > latest]
    multiples = [iteration for iteration in iterations if interval is not None and iteration % interval == 0]
    return {*reached[-max(keep_last or 1, 1) :], *multiples, *beyond}


def apply_retention(save: Storage, retention: Retention) -> None:
    """Remove the checkpoints of a save folder that the retention rules do not keep. Call this in one process, while no save is
    running.

    Folders without a manifest are neither counted nor removed, because they may be checkpoints of other programs. The checkpoint
    that `best_checkpoint.json` names is never removed.
    """
    if retention.keeps_best:
        import_object("megatron_lab.checkpoints.best_checkpoint:update_best")(save, keeps_all=retention.keeps_all)
    iterations = [
        candidate
        for candidate in list_iterations(save)
        if save.get_file_size(f"{get_checkpoint_name(candidate)}/{MANIFEST}") is not None
    ]
    retained = {*select_retained(iterations, read_latest(save), retention), read_best(save)}
    for iteration in iterations:
        if iteration not in retained:
            save.remove_checkpoint(get_checkpoint_name(iteration))


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
            f"Set --save to a folder that this user can create and write"
        ) from error


def check_no_foreign_checkpoints(save: Storage) -> None:
    """Check that the save folder holds no checkpoints of other programs. Their folders may have the same names as those of this
    program, such as `iter_0000100`.

    Raises:
        CheckpointError: a checkpoint of another program is in the folder.
    """
    foreign_names = []
    for name in map(get_checkpoint_name, list_iterations(save)):
        file_names = save.list_names(name)  # a damaged or unfinished checkpoint of this program may lack any file
        if file_names and not any(file in (CONFIG, MANIFEST, STATE) or file.startswith("rank_") for file in file_names):
            foreign_names.append(name)
    if foreign_names:
        raise CheckpointError(
            f"--save {save.location} holds checkpoints of another program: {format_list(foreign_names)}. "
            f"Set --save to another folder (tools/checkpoint.py import converts a checkpoint of Megatron-LM)"
        )
