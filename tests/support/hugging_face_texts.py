"""Small local datasets that the library `datasets` reads, without network; and sample sources that read them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The library reads these when it is imported.
os.environ.setdefault("HF_HOME", os.path.join(tempfile.gettempdir(), "hugging-face-tests"))
os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1")

import datasets

from megatron.config.data import DataConfig
from megatron.data.tokenizer import ByteTokenizer, Tokenizer
from megatron_lab.data_tools.streamed_dataset import StreamedDataset, StreamedSplit, open_split
from tests.support.corpora import write_lines, write_parquet

EOD = 256
FLAGS: dict[str, Any] = {"mock_data": None, "tokenizer_type": "ByteTokenizer", "vocab_size": None}
"""What a run needs beside `hf_dataset` (see `tests.support.runs.arguments`)."""


def build_texts(count: int, label: str = "text") -> list[str]:
    """Return different texts of 8 to 60 bytes."""
    return [f"{label} {number:04d} " + "abcdefg " * (number * 7 % 6) for number in range(count)]


def write_folder(folder: Path, file_type: str = "parquet", files: int = 4, texts: Sequence[str] | None = None) -> str:
    """Write texts into equal files of a new folder, and return its path. Parquet files have row groups of 7 documents."""
    texts = build_texts(40 * files) if texts is None else texts
    folder.mkdir(parents=True)
    for file in range(files):
        part = texts[file * len(texts) // files : (file + 1) * len(texts) // files]
        write = write_parquet if file_type == "parquet" else write_lines
        write(folder / f"part-{file:02d}.{file_type}", part)
    return str(folder)


def keep_cache_in(folder: Path, monkeypatch: Any) -> None:
    """Let the library write its Arrow files into a folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)


def open_texts_of(
    path: str, *, split: int = 0, seed: int = 1234, seq_length: int = 32, tokenizer: Tokenizer | None = None, **settings: Any
) -> StreamedSplit:
    """Open a split of a dataset, tokenized as bytes."""
    config = DataConfig(hf_dataset=path, **{"tokenizer_type": "ByteTokenizer", "hf_shuffle_buffer": 30, **settings})
    return open_split(
        split, (), config, seed=seed, seq_length=seq_length, tokenizer=tokenizer or ByteTokenizer(), datasets_by_prefix={}
    )


def build_source(path: str, **settings: Any) -> StreamedDataset:
    """Build a source of the samples of a dataset."""
    source = open_texts_of(path, **settings).build_source(1)
    assert isinstance(source, StreamedDataset)
    return source


def read_epoch(data: StreamedSplit, epoch: int = 0) -> list[str]:
    """Return the texts that all lanes read in an epoch, lane by lane."""
    from megatron_lab.data_tools.streamed_texts import Spot

    lanes = range(data.texts.num_lanes)
    return [text or "" for lane in lanes for block in data.texts.iter_blocks(lane, epoch, Spot()) for text in block.texts]
