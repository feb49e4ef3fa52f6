"""Opens the Hugging Face dataset of a run (--hf-dataset), and computes the hash by which a resumed run recognizes it."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config.data import TOKENIZER_FILE_SETTINGS, DataConfig, get_tokenizer_settings
from megatron.config.optional_packages import import_optional
from megatron.data.indexed_dataset import DatasetError
from megatron.data.tokenizer import require_tokenizer_json
from megatron_lab.data_tools.hub_snapshots import resolve_snapshot
from megatron_lab.data_tools.streamed_texts import MAX_RESHARDED_FILES, format_missing_column
from megatron_lab.tokenizers.file_names import SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG
from megatron_lab.tokenizers.text_frame import read_text_frame
from megatron_lab.tokenizers.tokenizer_json import read_tokenizer_json

_BUILDERS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
    ".arrow": "arrow",
}
"""Builder of `datasets` for each suffix of a data file."""
_COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
_MAX_HASHED_FILES = 256
_HASHED_BYTES = 2**16
_TOKENIZER_FOLDER_FILES = ("tokenizer.json", TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP)


class OpenedTexts(NamedTuple):
    """Split of a Hugging Face dataset that is open for reading."""

    dataset: Any
    """`datasets.IterableDataset`, or `datasets.Dataset` with random access, whose rows are Arrow tables."""
    name: str
    """Name for messages and for the data history: dataset, subset and split."""
    content_hash: str
    """Hash of the data files, or of their addresses with the revision if they are on the Hub."""
    has_random_access: bool
    has_one_document_per_shard: bool = False
    """Whether each shard of a stream is one document: a text file."""


def open_texts(config: DataConfig, split: str) -> OpenedTexts:
    """Open one split of the dataset that --hf-dataset names.

    Args:
        split: name of the split in the dataset, such as "train".

    Raises:
        DatasetError: there is no such dataset, subset, split or column, or it cannot be reached.
        ConfigError: the package `datasets` is not installed.
    """
    library = import_optional("datasets", "--hf-dataset needs the package datasets")
    library.disable_progress_bars()
    path = config.hf_dataset
    assert path is not None
    details = ", ".join(filter(None, (config.hf_subset, split)))
    name = f"{path} ({details})"
    try:
        if _is_saved_dataset(path):
            return _open_saved(library, config, name, split)
        builder = _create_builder(library, config)
        _check_split(config, split, builder.config.data_files)
        if config.hf_streaming:
            dataset = _open_stream(builder, config, name, split)
        else:
            builder.download_and_prepare()
            dataset = builder.as_dataset(split)
            _check_column(config, name, dataset)
            dataset = dataset.select_columns([config.hf_text_column])
        files = [str(file) for file in builder.config.data_files[split]]
        is_text = getattr(builder.config, "sample_by", None) == "document"
        return OpenedTexts(dataset.with_format("arrow"), name, _hash_files(files), not config.hf_streaming, is_text)
    except DatasetError:
        raise
    except Exception as error:  # the library and its stores raise exceptions of many classes
        raise DatasetError(_explain(config, error)) from error


def _create_builder(library: Any, config: DataConfig) -> Any:
    """Return the `datasets` builder of a dataset on the Hub, of a folder, or of data files (a path with a known suffix, or a
    pattern of such paths)."""
    path = str(config.hf_dataset)
    settings: dict[str, Any] = {"revision": config.hf_revision}
    stem = next((path[: -len(suffix)] for suffix in _COMPRESSIONS if path.endswith(suffix)), path)
    builder_name = _BUILDERS.get(os.path.splitext(stem)[1])
    if builder_name is not None:
        if "://" not in path and not glob.glob(path, recursive=True):
            raise DatasetError(f"--hf-dataset {path}: there is no such file.\n  Check the path.")
        path, settings = builder_name, {"data_files": {config.hf_split: path}}
    elif os.path.isdir(path):
        path = os.path.abspath(resolve_snapshot(path))  # not the builder of the library that has the folder's name, such as text
    builder = library.load_dataset_builder(path, config.hf_subset, **settings)
    if hasattr(builder.config, "sample_by"):  # of text files, each is a document, as for tools/preprocess_data.py
        builder = library.load_dataset_builder(path, config.hf_subset, **settings, sample_by="document")
    return builder


def _open_stream(builder: Any, config: DataConfig, name: str, split: str) -> Any:
    """Return the streamed split, divided into enough shards if its format allows it. Of parquet files, only the text column is
    read."""
    dataset = builder.as_streaming_dataset(split)
    _check_column(config, name, dataset)
    if dataset.features is not None and hasattr(builder.config, "columns"):
        builder.config.columns = [config.hf_text_column]
        dataset = builder.as_streaming_dataset(split)
    return dataset.reshard() if dataset.num_shards < MAX_RESHARDED_FILES else dataset


def _is_saved_dataset(path: str) -> bool:
    """Return whether a folder was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return any(os.path.isfile(os.path.join(path, file)) for file in ("state.json", "dataset_dict.json"))


def _open_saved(library: Any, config: DataConfig, name: str, split: str) -> OpenedTexts:
    dataset = library.load_from_disk(config.hf_dataset)
    if isinstance(dataset, dict):
        _check_split(config, split, dataset)
        dataset = dataset[split]
    _check_column(config, name, dataset)
    files = [file["filename"] for file in dataset.cache_files]
    return OpenedTexts(dataset.select_columns([config.hf_text_column]).with_format("arrow"), name, _hash_files(files), True)


def _check_split(config: DataConfig, split: str, splits: Iterable[str]) -> None:
    if split not in (names := list(map(str, splits))):
        flag = "--hf-split" if split == config.hf_split else "--hf-valid-split"
        raise DatasetError(
            f"--hf-dataset {config.hf_dataset} has no split {split}; its splits are {', '.join(names)}.\n"
            f"  Give one of them with {flag}."
        )


def _check_column(config: DataConfig, name: str, dataset: Any) -> None:
    """Check that a dataset has the text column. (If its columns are not known before it is read, the first read checks this.)"""
    if dataset.features is not None and config.hf_text_column not in dataset.features:
        raise DatasetError(format_missing_column(name, config.hf_text_column, list(dataset.features)))


def _hash_files(files: Sequence[str]) -> str:
    """Return a hash of data files: of the addresses of remote files (those on the Hub contain the revision), and of the name, the
    size, the start and the end of local files. Of many files, 256 evenly spaced ones are read."""
    from xxhash import xxh3_128

    state = xxh3_128(f"{len(files)}".encode())
    for file in files:
        state.update((file if "://" in file else os.path.basename(file)).encode())
    step = -(-len(files) // _MAX_HASHED_FILES) or 1
    for file in files[::step]:
        if "://" in file:
            continue
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            state.update(f" {size} ".encode() + stream.read(_HASHED_BYTES))
            stream.seek(max(0, size - _HASHED_BYTES))
            state.update(stream.read())
    digest: str = state.hexdigest()
    return digest


def hash_tokenizer(config: DataConfig) -> str:
    """Return a hash of the settings and files of the tokenizer, on which the tokens of a text depend."""
    from xxhash import xxh3_128

    assert config.tokenizer_type is not None
    state = xxh3_128(config.tokenizer_type.encode())
    if config.add_bos is not None:
        state.update(f" add_bos={config.add_bos}".encode())
    if config.tokenizer_type == "HuggingFaceTokenizer":
        content = read_tokenizer_json(require_tokenizer_json(config.tokenizer_model, config.tokenizer_type))
        added_ids = {token["content"]: token["id"] for token in content.added} if content.is_completed else {}
        frame = read_text_frame(content)
        state.update(f" {added_ids} {frame}".encode() if added_ids or any(frame) else b"")
    for field in get_tokenizer_settings(config.tokenizer_type):
        value = getattr(config, field)
        if field == "add_bos":
            continue
        if field not in TOKENIZER_FILE_SETTINGS or value is None:
            state.update(f" {field}={value}".encode())
            continue
        path = Path(value)
        for file in [path / name for name in _TOKENIZER_FOLDER_FILES] if path.is_dir() else [path]:
            if file.is_file():
                state.update(f" {file.name} ".encode() + file.read_bytes())
    digest: str = state.hexdigest()
    return digest


_NETWORK_ADVICE = (
    "Check the network, the name and the token (HF_TOKEN) of a private dataset. A node without network can read a folder or files: "
    "fetch them with `hf download {name} --repo-type dataset --local-dir FOLDER` elsewhere, then give --hf-dataset FOLDER."
)


def _explain(config: DataConfig, error: Exception) -> str:
    """Return the message for an error of the library when it opens a dataset."""
    if isinstance(error.__cause__, Exception) and type(error).__name__ == "DatasetGenerationError":
        error = error.__cause__  # the error of the library says only that there is one
    path, problem = config.hf_dataset, str(error).strip().rstrip(".")
    if isinstance(error, ValueError) and ("BuilderConfig" in problem or "Config name is missing" in problem):
        return f"--hf-dataset {path}: {problem}.\n  Give one of the names with --hf-subset."
    if glob.glob(str(path)):
        advice = "A file is damaged, or has a format that the package datasets does not read."
    elif str(path).startswith((".", "/", "~")) or str(path).count("/") > 1:
        advice = "Check the path."
    else:
        advice = _NETWORK_ADVICE.format(name=path)
    error_type = "" if isinstance(error, OSError) and problem else f"{type(error).__name__}: "
    return f"--hf-dataset {path} cannot be opened: {error_type}{problem}.\n  {advice}"
