"""Commands for a user who gives a name on the Hugging Face Hub instead of a path. Only --hf-dataset downloads
anything.

The texts that the functions return are ends of error messages.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FILE_SUFFIXES = (
    ".json",
    ".jsonl",
    ".model",
    ".txt",
    ".bpe",
    ".tiktoken",
    ".csv",
    ".parquet",
    ".gz",
    ".zst",
    ".bin",
    ".idx",
    ".pt",
)
"""Suffixes of files, with which no names on the Hub end."""
_GPT2_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")
"""Names of models without an organization, which the Hub still accepts."""
_TOKENIZER_DOWNLOADS = {
    "HuggingFaceTokenizer": ("--include 'tokenizer*'", ""),
    "TikTokenizer": ("--include '*tokenizer.model'", "/original/tokenizer.model"),
    "GPT2BPETokenizer": ("vocab.json merges.txt", ""),
}
"""By tokenizer type: which files of a model to download, and the path of the tokenizer's file in the folder."""
_SENTENCEPIECE_DOWNLOAD = ("tokenizer.model", "/tokenizer.model")


def suggest_model_download(path: object, *, needs_import: bool = False) -> str:
    """Return the commands that download a model, if a path may be its name on the Hub. Otherwise return an empty text.

    Args:
        path: path that does not exist.
        needs_import: whether the program reads only a --save folder, to which a downloaded model must be converted.
    """
    if not may_be_hub_name(path):
        return ""
    folder = str(path).rpartition("/")[2]
    commands, argument = [format_download(str(path), "", folder)], folder
    if needs_import:
        commands.append(f"python tools/checkpoint.py import {folder} {folder}-imported")
        argument = f"--use-checkpoint-args --pretrained-checkpoint {folder}-imported"
    return format_advice(str(path), "download it", commands, f"Then give {argument}")


def suggest_tokenizer_download(path: str, flag: str, tokenizer_type: str) -> str:
    """Return the command that downloads a tokenizer, if a path may be the name of a model on the Hub. Otherwise return an empty
    text.

    Args:
        path: path that does not exist.
        flag: flag of the path: --tokenizer-model, --vocab-file or --merge-file.
        tokenizer_type: type of the tokenizer.
    """
    if not may_be_hub_name(path):
        return ""
    folder = path.rpartition("/")[2]
    files, file_path = _TOKENIZER_DOWNLOADS.get(tokenizer_type, _SENTENCEPIECE_DOWNLOAD)
    flags = f"{flag} {folder}{file_path}"
    if tokenizer_type == "GPT2BPETokenizer":
        flags = f"--vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt"
    return format_advice(path, "download its tokenizer", [format_download(path, files, folder)], f"Then give {flags}")


def suggest_texts_download(path: str) -> str:
    """Return the command that downloads the files of a dataset, if a path may be its name on the Hub. Otherwise return an empty
    text.

    Args:
        path: path of a file or folder of texts that does not exist.
    """
    if not may_be_hub_name(path):
        return ""
    folder = path.rpartition("/")[2]
    return format_advice(path, "download it", [format_download(path, "--repo-type dataset", folder)], f"Then give --input {folder}")


def may_be_hub_name(path: object) -> bool:
    """Return whether a path may be a name on the Hub. A path that exists, or whose folder exists, is none."""
    name = str(path)
    if os.path.lexists(name) or os.path.isdir(os.path.dirname(name)) or name.endswith(_FILE_SUFFIXES):
        return False
    return name in _GPT2_NAMES or _HUB_NAME.fullmatch(name) is not None


def format_download(name: str, selection: str, folder: str) -> str:
    """Return the command that downloads a model or a dataset.

    Args:
        name: name on the Hub.
        selection: arguments that select files or the type of the repository; may be empty.
        folder: folder for the files.
    """
    return " ".join(filter(None, ("hf download", name, selection, "--local-dir", folder)))


def format_advice(name: str, action: str, commands: Sequence[str], end: str) -> str:
    """Return the lines of an error message that propose commands.

    Args:
        name: path that may be a name on the Hub.
        action: what the commands do, such as "download it".
        commands: commands, one per line. The installation of the program `hf` is added if it is missing.
        end: sentence after the commands, without its final period.
    """
    if shutil.which("hf") is None:
        commands = ["pip install huggingface_hub", *commands]
    lines = "".join(f"\n    {command}" for command in commands)
    return f"\n  If {name} is a name on the Hugging Face Hub, {action}:{lines}\n  {end}."
