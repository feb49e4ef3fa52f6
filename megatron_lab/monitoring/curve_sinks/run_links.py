"""Identity of a run at logging services (Weights & Biases, MLflow, trackio) over its restarts.

The save folder contains the file `loggers.json` with an entry for each service:

    {"folder": "/data/run1", "wandb": {"id": "h2k9x0qd", "project": "llama", "entity": null}, "mlflow": {...}}

`folder` is the folder for which the file was written. If the file is in another folder and the original still has it too, the
folder was copied. The copy then is a new run, with a link to the original run.
"""

from __future__ import annotations

import json
import os
import secrets
import string
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.storage import is_url
from megatron.checkpoint.storage_url import open_storage
from megatron.config.config import Config

LOGGERS_FILE = "loggers.json"
"""File in the save folder with the identity of the run at each logging service."""

Entry = dict[str, Any]
"""Entry of the file for one service: `id` (identifier that this project has chosen), the target of the run such as its project,
and `ended_at`, the last logged iteration of a run that ended regularly."""


def create_id() -> str:
    """Return a new random identifier of a run: eight lower-case letters and digits, as Weights & Biases chooses them."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


def warn(message: str) -> None:
    """Print a warning about a logger to stderr."""
    sys.stderr.write(f"WARNING: {message}\n")
    sys.stderr.flush()


class RunLinks:
    """The file `loggers.json` of a save folder. A file that cannot be read or written never ends the run: a warning says so.

    Args:
        save: save folder, a path or URL; None if the run saves nothing. Then a restart begins new runs.
        parent: folder of the checkpoint with which a new run starts, if it is the save folder of another run.
        is_restart: whether the run continues the run of the save folder.
    """

    def __init__(self, save: str | None, parent: str | None, *, is_restart: bool) -> None:
        self._save = save
        content = {} if save is None else _read(save)
        is_copy = save is not None and _is_copy(save, content)
        self._entries = content if is_restart and not is_copy else {}
        self._parents = content if is_copy else {} if parent is None or parent == save else _read(parent)

    def get_entry(self, service: str, target: Mapping[str, str | None]) -> tuple[Entry, bool]:
        """Return the entry of a service, and whether it belongs to a run that this start continues.

        Args:
            service: name of the service.
            target: where the run is at the service, such as its project. If a stored entry has another target, a new run begins.
        """
        stored = self._entries.get(service, {})
        if stored and all(stored.get(name) == value for name, value in target.items()):
            return dict(stored), True
        parent = self._entries.get(service) or self._parents.get(service)
        link = {} if parent is None else {"parent": {name: value for name, value in parent.items() if name in ("id", *target)}}
        return {"id": create_id(), **target, **link}, False

    def store(self, service: str, entry: Entry) -> None:
        """Write the entry of a service to the file."""
        self._entries[service] = entry
        if self._save is None:
            return
        content = {"folder": _normalize(self._save), **{name: self._entries[name] for name in sorted(self._entries)}}
        try:
            storage = open_storage(self._save)
            storage.create_folder()
            storage.write(LOGGERS_FILE, json.dumps(content, indent=1).encode())
        except (OSError, ValueError) as error:
            warn(f"{LOGGERS_FILE} in {self._save} cannot be written ({error}): a restart begins new runs at the loggers")


@dataclass(frozen=True)
class RunStart:
    """Start of a run, for the outputs at logging services."""

    iteration: int
    """Iteration from which the run starts."""
    links: RunLinks
    name: str
    """Name of the run if no flag sets one: the name of its save folder."""
    settings: Mapping[str, Any]
    """Settings by topic and name."""
    facts: Mapping[str, Any]
    """Further facts about this start, such as the layout and the command line, in JSON types."""


def open_run_start(config: Config, iteration: int, run_facts: Mapping[str, Any]) -> RunStart:
    """Read the file `loggers.json` of the run, and collect what its outputs at logging services need.

    Args:
        iteration: iteration from which the run starts.
        run_facts: facts about this start (`collect_run_facts`).
    """
    checkpoint = config.checkpoint
    parent = checkpoint.load or checkpoint.pretrained_checkpoint
    is_restart = iteration > 0 or (checkpoint.load is not None and not checkpoint.finetune)
    name = os.path.basename(_normalize(checkpoint.save or "").rstrip("/")) if checkpoint.save else "run"
    facts = {name: value for name, value in run_facts.items() if name != "config"}
    links = RunLinks(checkpoint.save, parent, is_restart=is_restart)
    return RunStart(iteration, links, name or "run", run_facts.get("config", {}), facts)


def flatten_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each setting that is not None, as text, without the topics."""
    for topic in settings.values():
        for name, value in topic.items() if isinstance(topic, Mapping) else ():
            if value is not None:
                yield name, value if isinstance(value, str) else json.dumps(value)


def call_with_timeout(action: Callable[[], object], seconds: float) -> BaseException | None:
    """Run an action in another thread, and wait for it for a limited time. After that time the thread is left to itself.

    Returns:
        the error of the action, TimeoutError if it has not ended in time, or None.
    """
    import threading

    errors: list[BaseException | None] = []

    def run() -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever the library raises
            errors.append(error)
        else:
            errors.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return errors[0] if errors else TimeoutError(f"not done after {seconds:.0f} s")


def _normalize(folder: str) -> str:
    return folder.rstrip("/") if is_url(folder) else os.path.realpath(folder.removeprefix("file://"))


def _read(folder: str) -> dict[str, Any]:
    """Return the content of the file in a folder, or nothing if there is no valid file."""
    try:
        content = json.loads(open_storage(folder).read(LOGGERS_FILE))
        entries = {name: entry for name, entry in content.items() if isinstance(entry, dict) and isinstance(entry.get("id"), str)}
        return {"folder": content.get("folder"), **entries}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        warn(f"{LOGGERS_FILE} in {folder} cannot be read ({error}): new runs begin at the loggers")
        return {}


def _is_copy(folder: str, content: dict[str, Any]) -> bool:
    """Return whether the file was written in another folder that still has it. Removes the key `folder` of the content."""
    original = content.pop("folder", None)
    if not content or not isinstance(original, str) or original == _normalize(folder):
        return False
    original_content = _read(original)
    return any(original_content.get(name, {}).get("id") == entry["id"] for name, entry in content.items())
