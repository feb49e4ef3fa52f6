"""Read every byte of checkpoints and compare it with the checksums and content hashes in their manifests.

All problems are listed. The exit status is 1 if there are any. Peak memory: one slice (of one tensor on one rank).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_lab.checkpoints.text import Step, format_bytes, parse_step

if TYPE_CHECKING:
    from megatron.checkpoint.storage import Storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand `verify` to its parser."""
    parser.add_argument("source", metavar="SOURCE", help="one checkpoint, or a --save folder: then every checkpoint in it")
    parser.add_argument("--step", type=parse_step, metavar="N|best", help="only this iteration of the folder")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand `verify`: print one line per checkpoint, and one line per problem. Returns the exit status: 1 if there is
    a problem, otherwise 0."""
    from megatron_lab.checkpoints.verification import verify_checkpoint

    num_problems = 0
    for checkpoint in _find_checkpoints(args.source, args.step):
        if isinstance(checkpoint, str):
            print(checkpoint)
            num_problems += 1
            continue
        result = verify_checkpoint(checkpoint, _show_progress)
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        num_problems += len(result.problems)
        if result.problems:
            print("\n  ".join([f"{checkpoint.location} is damaged:", *result.problems]))
        else:
            digest = (
                f"content digest {result.content_digest}"
                if result.content_digest
                else "no content hashes to compare with (older format)"
            )
            print(f"{checkpoint.location} is sound: {result.num_tensors} tensors, {format_bytes(result.num_bytes)}, {digest}")
    return 1 if num_problems else 0


def _find_checkpoints(source: str, step: Step | None) -> Iterator[Storage | str]:
    """Yield the checkpoints to verify. If the latest file of a save folder is missing or names a missing checkpoint, first yield a
    message about it.

    Args:
        source: a save folder, or one checkpoint in it.
        step: only verify the checkpoint of this iteration. None for all.
    """
    from megatron.checkpoint.errors import CheckpointError
    from megatron.checkpoint.save_folder import LATEST, get_checkpoint_name, list_iterations, read_latest
    from megatron.checkpoint.storage import MANIFEST
    from megatron.checkpoint.storage_url import open_storage

    folder = open_storage(source)
    if folder.get_file_size(MANIFEST) is not None:
        if step is not None:
            raise CheckpointError(f"{source} is one checkpoint, so --step {step} cannot select an iteration. Remove --step")
        yield folder
        return
    if step == "best":
        from megatron_lab.checkpoints.best_checkpoint import require_best

        step = require_best(folder).iteration
    iterations = list_iterations(folder)
    if not iterations or (step is not None and step not in iterations):
        raise CheckpointError(
            f"{source} holds no checkpoint{'' if step is None else f' of iteration {step}'}. Choose the --save folder of a run"
        )
    latest = read_latest(folder)
    if step is None and latest not in iterations:
        yield f"{folder.get_location(LATEST)} " + (
            "is missing or unreadable" if latest is None else f"names {latest}, which is not there"
        )
    yield from (folder.get_child(get_checkpoint_name(iteration)) for iteration in iterations if step in (None, iteration))


def _show_progress(name: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{name}", end="", file=sys.stderr, flush=True)
