"""From the parts of all ranks to a checkpoint: one process does it, when all have been written. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.format.content import Sums
from megatron.checkpoint.format.digest import checksum
from megatron.checkpoint.format.folder import LATEST, RUN, checkpoint_name, iterations_in
from megatron.checkpoint.format.manifest import CONFIG, MANIFEST, STATE, Manifest, StoredBox, StoredFile, StoredTensor
from megatron.checkpoint.storage.protocol import Draft, Storage


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


def sweep(save: Storage, token: str) -> None:
    """Remove what other runs left of saves and removals that were killed. Call it when no other run saves there.

    Args:
        save: the save folder.
        token: of this run, whose saves stay.
    """
    save.sweep([checkpoint_name(iteration) for iteration in iterations_in(save)], keep=token)


def take_over(save: Storage, record: dict[str, Any], token: str) -> None:
    """Write `run.json`: this run is the one that saves here from now on.

    Args:
        save: the save folder.
        record: settings, versions and command line of the run.
        token: of this run.
    """
    save.write(RUN, (json.dumps({**record, "token": token}, indent=2) + "\n").encode())


def _check_not_taken_over(save: Storage, token: str) -> None:
    """A run that was thought dead (a node that nobody could reach, a process that was stopped) must not set its successor back."""
    try:
        owner = json.loads(save.read(RUN))["token"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return  # nobody has said so
    if owner != token:
        raise CheckpointError(
            f"another run has begun to save in {save.location} since this one did ({RUN}): this one saves there no more"
        )


def commit(
    save: Storage, draft: Draft, iteration: int, parts: Iterable[Manifest], files: Mapping[str, bytes], run: str | None = None
) -> Manifest:
    """Make a checkpoint of what all ranks have written: manifest, final name, latest file, in this order.

    Args:
        save: the save folder.
        draft: the checkpoint that is being written.
        iteration: its number.
        parts: what `write_part` returned on each rank.
        files: what `encoded` returned.
        run: token of the run that saves, which no other may have taken over (see `take_over`).

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
    small = {name: StoredFile(len(data), checksum(data)) for name, data in files.items()}
    manifest = Manifest(manifest.tensors, dict(sorted((manifest.files | small).items())))
    if run is not None:
        _check_not_taken_over(save, run)
    draft.publish({**files, MANIFEST: manifest.to_json()})
    save.write(LATEST, f"{iteration}\n".encode())
    return manifest


def merged(parts: Iterable[Manifest]) -> Manifest:
    """One manifest of the parts of all ranks: boxes together, content sums added up."""
    boxes: dict[str, list[StoredBox]] = {}
    heads: dict[str, StoredTensor] = {}
    files: dict[str, StoredFile] = {}
    for part in parts:
        files |= part.files
        for name, tensor in part.tensors.items():
            boxes.setdefault(name, []).extend(tensor.boxes)
            before = heads.get(name)
            assert tensor.content is not None, "a part that was just written has sums"
            if before is not None and before.content is not None:
                total = Sums.from_hex(before.content).plus(Sums.from_hex(tensor.content))
                tensor = StoredTensor(tensor.shape, tensor.dtype, (), total.hex)
            heads[name] = tensor
    tensors = {name: StoredTensor(head.shape, head.dtype, tuple(boxes[name]), head.content) for name, head in heads.items()}
    return Manifest(tensors, files)
