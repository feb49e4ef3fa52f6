"""Error messages about a --data-path that is not an indexed dataset, but a text or a name on the Hugging Face Hub."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from megatron.config.data import DataConfig, get_tokenizer_settings
from megatron_lab.data_tools.hub_names import format_advice, format_download, may_be_hub_name
from megatron_lab.data_tools.preprocess.file_formats import detect_format, split_suffix
from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob


def explain_missing_dataset(prefix: str, tokenizer: DataConfig) -> str | None:
    """Return the error message for a path that is no indexed dataset, but a text or a name on the Hub; None for other paths.

    Args:
        prefix: path of --data-path.
        tokenizer: settings of the run with its tokenizer flags.
    """
    path = Path(prefix)
    if path.is_dir() and (prefixes := sorted(str(index.with_suffix("")) for index in path.glob("*.idx"))):
        return f"dataset {prefix}: this is a folder. Give a dataset in it, without .bin and .idx: {', '.join(prefixes[:3])}"
    if not path.exists():
        if not may_be_hub_name(prefix) or prefix.endswith("_document"):
            return None
        folder = prefix.rpartition("/")[2]
        commands = [
            format_download(prefix, "--repo-type dataset", folder),
            _format_preprocessing(folder, folder, tokenizer),
        ]
        end = f"Then give {_get_dataset_prefix(folder, tokenizer)}. Or train on it without conversion: --hf-dataset {prefix}"
        advice = format_advice(prefix, "download and convert it", commands, end)
        return f"dataset {prefix}: there are no files {prefix}.bin and {prefix}.idx.{advice}"
    if not _contains_text(path):
        return None
    output, _ = split_suffix(prefix.rstrip("/"))
    subject = "a folder of texts" if path.is_dir() else "a text"
    return (
        f"dataset {prefix}: this is {subject}, but a run reads token ids.\n  Convert it:\n"
        f"    {_format_preprocessing(prefix, output, tokenizer)}\n"
        f"  Then give {_get_dataset_prefix(output, tokenizer)} instead of {prefix}.\n"
        f"  Or train on it without conversion: --hf-dataset {prefix}, in place of --data-path."
    )


def _format_preprocessing(text: str, output: str, tokenizer: DataConfig) -> str:
    """Return the command that converts a text to a dataset."""
    flags = ["--input", text, "--output-prefix", output, "--append-eod", *_iter_tokenizer_flags(tokenizer)]
    return f"python tools/preprocess_data.py {shlex.join(flags)}"


def _get_dataset_prefix(output: str, tokenizer: DataConfig) -> str:
    """Return the path of the dataset that preprocessing writes for this --output-prefix."""
    return output + PreprocessJob(tokenizer, ("text",), append_eod=True).dataset_suffixes[0]


def _iter_tokenizer_flags(config: DataConfig) -> Iterator[str]:
    """Yield the flags of the tokenizer settings that differ from their defaults, and their values."""
    if config.tokenizer_type is None:
        return
    yield from ("--tokenizer-type", config.tokenizer_type)
    defaults = {setting.name: setting.default for setting in dataclasses.fields(DataConfig)}
    for name in get_tokenizer_settings(config.tokenizer_type):
        if (value := getattr(config, name)) != defaults[name]:
            yield f"--{name.replace('_', '-')}"
            yield from map(str, value) if isinstance(value, tuple) else (str(value),)


def _contains_text(path: Path) -> bool:
    """Return whether a file, or a file in a folder, has a format that preprocessing reads."""
    files = (file for _, _, names in os.walk(path) for file in names) if path.is_dir() else (path.name,)
    return any(detect_format(file) is not None for file in files)
