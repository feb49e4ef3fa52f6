"""Read every byte of checkpoints and compare it with the checksums and content sums in their manifests.

The exit status is 1 if anything is wrong, and all of it is named. Peak memory: one box (what one rank held of one tensor).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.checkpoint.storage import Storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("source", metavar="SOURCE", help="one checkpoint, or a --save folder: then every checkpoint in it")
    parser.add_argument("--step", type=int, metavar="N", help="only this iteration of the folder")


def run(args: argparse.Namespace) -> int:
    """Check; one line for each checkpoint, and one for each fault."""
    from megatron_lab.checkpoints.text import size
    from megatron_lab.checkpoints.verified import verify

    faults = 0
    for place in _places(args.source, args.step):
        if isinstance(place, str):
            print(place)
            faults += 1
            continue
        found = verify(place, _progress)
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        faults += len(found.faults)
        if found.faults:
            print("\n  ".join([f"{place.location} is damaged:", *found.faults]))
        else:
            digest = f"content digest {found.digest}" if found.digest else "no content sums to compare with (older format)"
            print(f"{place.location} is sound: {found.tensors} tensors, {size(found.num_bytes)}, {digest}")
    return 1 if faults else 0


def _places(source: str, step: int | None) -> Iterator[Storage | str]:
    """The checkpoints to read, and what is wrong with the folder."""
    from megatron.checkpoint.errors import CheckpointError
    from megatron.checkpoint.save_folder import LATEST, checkpoint_name, iterations_in, latest_in
    from megatron.checkpoint.storage import MANIFEST
    from megatron.checkpoint.storage_kinds import open_storage

    folder = open_storage(source)
    if folder.size(MANIFEST) is not None:
        if step is not None:
            raise CheckpointError(f"{source} is one checkpoint: there is no iteration {step} to choose")
        yield folder
        return
    iterations = iterations_in(folder)
    if not iterations or (step is not None and step not in iterations):
        raise CheckpointError(f"{source} holds no checkpoint" + ("" if step is None else f" of iteration {step}"))
    latest = latest_in(folder)
    if step is None and latest not in iterations:
        yield f"{folder.at(LATEST)} " + ("is missing or unreadable" if latest is None else f"names {latest}, which is not there")
    yield from (folder.child(checkpoint_name(iteration)) for iteration in iterations if step in (None, iteration))


def _progress(name: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{name}", end="", file=sys.stderr, flush=True)
