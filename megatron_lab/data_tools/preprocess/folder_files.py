"""Selection of the data files among the files of an input folder.

Folders that the package `datasets` wrote, and downloads from the Hugging Face Hub, also contain files that describe the dataset.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_lab.data_tools.hub_snapshots import is_dataset_download
from megatron_lab.data_tools.preprocess import storage

_SPLITS_FILE, _STATE_FILE, _INFO_FILE = "dataset_dict.json", "state.json", "dataset_info.json"
"""Files of `DatasetDict.save_to_disk`, which names the splits, and of `Dataset.save_to_disk`."""
_DESCRIPTIONS = ("readme.md", "license.md", "license.txt", "dataset_infos.json", _INFO_FILE)
"""Lower-case names of files of a repository on the Hub that describe its data."""
_MAX_LISTED_FILES = 3
_MAX_DESCRIPTION_BYTES = 1 << 26


class FileSelection:
    """Selection of the data files of all arguments of --input.

    Args:
        split: split to read of each folder that contains several (--input-split).
    """

    def __init__(self, split: str | None) -> None:
        self._split = split
        self._has_splits = False
        self._skipped: list[str] = []
        self.hidden: list[str] = []
        """Files and folders whose names start with a dot, which are never read."""

    def select(self, paths: Iterable[str], argument: str) -> Iterator[str]:
        """Yield the data files among the files of an argument of --input, in their order.

        Args:
            paths: files of the argument.
            argument: normalized path or pattern. A file that it names is always a data file.

        Raises:
            ValueError: a folder contains several splits and `split` names none of them, or a file of a saved dataset is missing.
        """
        files = list(paths)
        if files == [argument]:
            yield argument
            return
        names_of_folder: dict[str, set[str]] = {}
        for path in files:
            folder, _, name = path.rpartition("/")
            names_of_folder.setdefault(folder, set()).add(name)
        descriptions = {f"{folder}/{name}" for folder, name in _iter_descriptions(names_of_folder)}
        excluded: list[str] = []
        for folder, names in names_of_folder.items():
            if _SPLITS_FILE in names:
                excluded += self._exclude_splits(folder)
            elif {_STATE_FILE, _INFO_FILE} <= names:
                _check_completeness(folder, names)
        self._skipped += [path for path in files if path in descriptions]
        prefixes = tuple(f"{folder}/" for folder in excluded)
        yield from (path for path in files if path not in descriptions and not path.startswith(prefixes or ("\0",)))

    def _exclude_splits(self, folder: str) -> list[str]:
        """Return the folders of the splits that are not read."""
        self._has_splits = True
        splits = list(map(str, _read_json(f"{folder}/{_SPLITS_FILE}").get("splits", ())))
        selected = splits[0] if self._split is None and len(splits) == 1 else self._split
        if selected not in splits:
            problem = "contains several splits" if selected is None else f"has no split {selected}"
            raise ValueError(
                f"--input {folder} {problem}: it has {', '.join(splits) or 'none'}.\n"
                "  Select one with --input-split NAME, or give the folders of several splits."
            )
        return [f"{folder}/{name}" for name in splits if name != selected]

    def finish(self) -> list[str]:
        """Return messages about the files that were skipped.

        Raises:
            ValueError: a split was selected, but no input consists of splits.
        """
        if self._split is not None and not self._has_splits:
            raise ValueError(
                f"--input-split {self._split}: no folder of --input contains splits of DatasetDict.save_to_disk ({_SPLITS_FILE}).\n"
                "  Leave the flag out, and give the files of the split."
            )
        paths_by_reason = {"hidden": self.hidden, "description of a dataset": self._skipped}
        return [
            f"skipped, {reason}: {len(paths):,}: {', '.join(paths[:_MAX_LISTED_FILES])}{' ...' * (len(paths) > _MAX_LISTED_FILES)}"
            for reason, paths in paths_by_reason.items()
            if paths
        ]


def _iter_descriptions(names_of_folder: Mapping[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Yield folder and name of each file that describes a dataset.

    Args:
        names_of_folder: names of the files in each folder.
    """
    for folder, names in names_of_folder.items():
        if _SPLITS_FILE in names:
            yield folder, _SPLITS_FILE
        if {_STATE_FILE, _INFO_FILE} <= names:
            yield from ((folder, name) for name in (_STATE_FILE, _INFO_FILE))
        elif not storage.is_url(folder) and is_dataset_download(folder):
            yield from ((folder, name) for name in names if name.lower() in _DESCRIPTIONS)


def _check_completeness(folder: str, names: set[str]) -> None:
    """Check that a folder contains all data files of a dataset that `Dataset.save_to_disk` wrote there."""
    files = [str(file.get("filename")) for file in _read_json(f"{folder}/{_STATE_FILE}").get("_data_files", ())]
    if missing := [name for name in files if name not in names]:
        raise ValueError(
            f"{folder} lacks {len(missing):,} of the {len(files):,} files that its {_STATE_FILE} lists, such as {missing[0]}.\n"
            "  Copy the folder again."
        )


def _read_json(path: str) -> dict[str, Any]:
    """Return the JSON object in a small file.

    Raises:
        ValueError: the file is not a JSON object.
    """
    try:
        content = json.loads(storage.read_start(path, _MAX_DESCRIPTION_BYTES))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.\n  Copy the folder again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object.\n  Copy the folder again.")
    return content
