"""Best checkpoint of a save folder (--keep-best): the one with the lowest validation loss.

`best_checkpoint.json` in the save folder names it. A checkpoint records the evaluation of its iteration in its `config.json`. So
the best checkpoint can also be found without the file, and a run that is killed at any moment leaves a best checkpoint: first
the new checkpoint is complete, then the file names it, and then the earlier best checkpoint is removed.

Needs no torch, because the background writer (--async-save) imports this module.
"""

from __future__ import annotations

import json
import warnings
from typing import Any, NamedTuple, TypeGuard

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.manifest import Checksum
from megatron.checkpoint.save_folder import BEST, get_checkpoint_name, list_iterations, read_json, read_latest
from megatron.checkpoint.storage import CONFIG, MANIFEST, Storage
from megatron.config.regular_file import parse_json

EVALUATION = "evaluation"
"""Entry of a checkpoint's `config.json`: the last evaluation before the save, as `Evaluation.to_json` returns it."""
_MAX_LOSS = 1e300


def is_finite_loss(value: Any) -> TypeGuard[float]:
    """Return whether a value from a file is a number that can be a loss."""
    return type(value) in (int, float) and -_MAX_LOSS < value < _MAX_LOSS


class Evaluation(NamedTuple):
    """Validation loss of an iteration."""

    iteration: int
    loss: float
    is_extra: bool = False
    """Whether the checkpoint of the iteration is saved only because its loss is the lowest. It is removed as soon as another
    checkpoint is better, also if the run keeps all checkpoints."""

    def to_json(self) -> dict[str, Any]:
        """Return the evaluation as JSON values."""
        return {"iteration": self.iteration, "validation_loss": self.loss, "is_extra": self.is_extra}

    @classmethod
    def from_json(cls, content: Any) -> Evaluation | None:
        """Build an evaluation from the result of `to_json`. Return None for a value of another form."""
        if not isinstance(content, dict):
            return None
        iteration, loss = content.get("iteration"), content.get("validation_loss")
        if type(iteration) is not int or iteration < 0 or not is_finite_loss(loss):
            return None
        return cls(iteration, float(loss), content.get("is_extra") is True)


class _Marker(NamedTuple):
    """Content of `best_checkpoint.json`."""

    best: Evaluation
    manifest: str
    """Checksum of the manifest of the best checkpoint. If a run that went back saves the iteration again, the file no longer
    applies."""
    superseded: int | None
    """Iteration of the earlier best checkpoint, if it must still be removed."""

    def to_json(self) -> dict[str, Any]:
        return {**self.best.to_json(), "manifest": self.manifest, "superseded": self.superseded}


def find_best(save: Storage) -> Evaluation | None:
    """Return iteration and loss of the best complete checkpoint in a save folder, or None if no checkpoint records its
    evaluation."""
    marker = _read_marker(save)
    return _find_better(save, marker) or (None if marker is None else marker.best)


def require_best(save: Storage) -> Evaluation:
    """Return iteration and loss of the best complete checkpoint in a save folder (--ckpt-step best).

    Raises:
        CheckpointError: no checkpoint records its evaluation.
    """
    if (best := find_best(save)) is None:
        raise CheckpointError(
            f"{save.location} has no best checkpoint, because none of its checkpoints records a validation loss. "
            "Choose an iteration, or train with --keep-best"
        )
    return best


def update_best(save: Storage, last_evaluation: Evaluation | None = None, *, keeps_all: bool) -> None:
    """Mark the newest checkpoint of a save folder as the best one if its loss is the lowest, and remove the earlier best one if
    it was saved only for that. Called in one process, while no save is running. A failure is only reported.

    Args:
        last_evaluation: evaluation of the newest checkpoint, if it followed the save. Otherwise the checkpoint records it.
        keeps_all: whether the run keeps all checkpoints. If not, the retention rules remove the earlier best one.
    """
    try:
        marker = _remove_superseded(save)
        best = _find_better(save, marker, last_evaluation)
        manifest = None if best is None else _hash_manifest(save, best.iteration)
        if best is None or manifest is None:
            return
        superseded = marker.best.iteration if marker is not None and marker.best.is_extra and keeps_all else None
        _write_marker(save, _Marker(best, manifest, superseded))
        _remove_superseded(save)
    except (OSError, CheckpointError) as error:
        warnings.warn(
            f"{save.get_location(BEST)} could not be updated: {error}. The run tries again at the next save.", stacklevel=2
        )


def _find_better(save: Storage, marker: _Marker | None, last_evaluation: Evaluation | None = None) -> Evaluation | None:
    """Return the evaluation of the newest checkpoint if its loss is lower than that of the marked checkpoint, else None. Without
    a marked checkpoint, return the lowest of all.

    Args:
        last_evaluation: evaluation of the newest checkpoint, if it followed the save.
    """
    latest = read_latest(save)
    evaluation = None if latest is None else _read_evaluation(save, latest)
    if last_evaluation is not None and last_evaluation.iteration == latest:
        evaluation = last_evaluation
    if marker is None:
        return _find_lowest(save, evaluation)
    return evaluation if evaluation is not None and evaluation.loss < marker.best.loss else None


def _remove_superseded(save: Storage) -> _Marker | None:
    """Remove the earlier best checkpoint, if `best_checkpoint.json` says that it must still be removed. The newest checkpoint is
    never removed, because the run resumes from it. Returns the content of the file."""
    marker = _read_marker(save)
    if marker is None or marker.superseded is None:
        return marker
    is_needed = marker.superseded in (marker.best.iteration, read_latest(save))
    if not is_needed and _hash_manifest(save, marker.superseded) is not None:
        save.remove_checkpoint(get_checkpoint_name(marker.superseded))
    marker = marker._replace(superseded=None)
    _write_marker(save, marker)
    return marker


def _find_lowest(save: Storage, last_evaluation: Evaluation | None = None) -> Evaluation | None:
    """Return the evaluation with the lowest loss of all complete checkpoints; of equal ones the first.

    Args:
        last_evaluation: evaluation that followed the last save, which is not recorded in its checkpoint.
    """
    evaluations = [_read_evaluation(save, iteration) for iteration in list_iterations(save)]
    known = [evaluation for evaluation in (*evaluations, last_evaluation) if evaluation is not None]
    return min(known, key=lambda evaluation: (evaluation.loss, evaluation.iteration), default=None)


def _read_evaluation(save: Storage, iteration: int) -> Evaluation | None:
    """Return the evaluation that a complete checkpoint records, or None if its iteration was not evaluated."""
    if _hash_manifest(save, iteration) is None:
        return None
    try:
        content = read_json(save.get_child(get_checkpoint_name(iteration)), CONFIG)
    except CheckpointError:  # damaged: it cannot be loaded either
        return None
    evaluation = Evaluation.from_json(content.get(EVALUATION))
    return evaluation if evaluation is not None and evaluation.iteration == iteration else None


def _hash_manifest(save: Storage, iteration: int) -> str | None:
    """Return the checksum of a checkpoint's manifest, or None if the checkpoint is not complete."""
    try:
        return Checksum(save.read(f"{get_checkpoint_name(iteration)}/{MANIFEST}")).text
    except (FileNotFoundError, NotADirectoryError):
        return None


def _read_marker(save: Storage) -> _Marker | None:
    """Return the content of `best_checkpoint.json`, or None if the checkpoint that it describes does not exist."""
    try:
        content = parse_json(save.read(BEST))
    except (FileNotFoundError, IsADirectoryError, ValueError):
        return None
    best = Evaluation.from_json(content)
    if best is None or content.get("manifest") != _hash_manifest(save, best.iteration):
        return None
    superseded = content.get("superseded")
    return _Marker(best, content["manifest"], superseded if type(superseded) is int else None)


def _write_marker(save: Storage, marker: _Marker) -> None:
    save.write(BEST, (json.dumps(marker.to_json(), indent=1) + "\n").encode())
