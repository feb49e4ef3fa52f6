"""What a job does with every record, and the settings by which a later run knows its shards again."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from megatron.config.data import TOKENIZER_FILES, DataConfig, tokenizer_settings
from megatron.data.indexed_dataset import token_dtype
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.protocol import Tokenizer

FORMAT = 1
"""Of part files and reports; those of another format are not taken up again."""


@dataclass(frozen=True)
class Job:
    """What to do with each record; every worker has a copy."""

    tokenizer: DataConfig
    """Only its tokenizer settings are read."""
    keys: tuple[str, ...]
    append_eod: bool
    skip_bad_lines: bool = False
    """Leave out records that cannot be used, instead of stopping at the first."""


def tokenizer_of(job: Job) -> tuple[Tokenizer, type[np.integer]]:
    """The tokenizer and the type in which its ids are written; made once in a process, and inherited by forked ones."""
    return _make(job.tokenizer, file_digests(job.tokenizer))


@functools.lru_cache(maxsize=1)
def _make(config: DataConfig, digests: tuple[tuple[str, str], ...]) -> tuple[Tokenizer, type[np.integer]]:
    tokenizer = build_tokenizer(config)
    tokenizer.encode_array("")  # some encoders are made at their first use
    return tokenizer, token_dtype(tokenizer.vocab_size)


@functools.lru_cache(maxsize=1)
def file_digests(config: DataConfig) -> tuple[tuple[str, str], ...]:
    """Name and content of each setting that is a file of the tokenizer; looked at again after `file_digests.cache_clear()`."""
    given = ((name, getattr(config, name)) for name in TOKENIZER_FILES)
    return tuple((name, digest(path)) for name, path in given if path is not None and Path(path).exists())


def settings(job: Job) -> dict[str, object]:
    """All that decides what a shard becomes, its inputs apart; files by their content.

    How bad lines are met is not among them: a shard without any is the same either way.
    """
    tokenizer, dtype = tokenizer_of(job)
    kind = job.tokenizer.tokenizer_type or ""
    contents = dict(file_digests(job.tokenizer))
    return {
        "format": FORMAT,
        "json keys": list(job.keys),
        "append eod": job.append_eod,
        "tokenizer type": kind,
        **{name.replace("_", " "): contents.get(name, getattr(job.tokenizer, name)) for name in tokenizer_settings(kind)},
        "number of token ids": tokenizer.vocab_size,
        "eod id": tokenizer.eod,
        "token type": np.dtype(dtype).name,
    }


def digest(path: str | Path) -> str:
    """xxh3 of a file's content, or of all files of a folder with their names."""
    if Path(path).is_dir():
        files = sorted(file for file in Path(path).iterdir() if file.is_file())
        return xxhash.xxh3_128_hexdigest("".join(f"{file.name}\0{digest(file)}\0" for file in files).encode())
    state = xxhash.xxh3_128()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()
