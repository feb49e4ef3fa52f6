"""What a program makes before it makes a trainer: settings, a dataset, the place of this process, a model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.cli import LoadedConfig, load_values
from megatron.config.data import DataConfig
from megatron.config.launcher import launched
from megatron.data.indexed_dataset import IndexedDataset, token_dtype
from megatron.data.indexed_writer import write_dataset as writing
from megatron.data.tokenizers.tokenizer import build_tokenizer
from megatron.model.build import Model, model_of
from megatron.parallel.context import ParallelContext
from megatron.parallel.context import connect as join
from megatron.training import startup


def settings(
    values: Mapping[str, Any] | str | os.PathLike[str] | None = None, *, world_size: int | None = None, **more: Any
) -> LoadedConfig:
    """Settings that can be run, by the names of the command line: `--num-layers 2` is `num_layers=2`, a switch is True or False.

    Args:
        values: a mapping, flat or under topics as `--print-config` prints them, or a YAML file as --config reads it.
        world_size: ranks of the run; by default those that the launcher gives, or one.
        more: further settings, which count before `values`. `model="llama3-8b"` takes those of a model that --model knows, and
            `config=[...]` those of files, below all others.

    Raises:
        ConfigError: with all problems together; `violations` has them one by one.
    """
    given: Mapping[str, Any] = {"config": values} if isinstance(values, str | os.PathLike) else values or {}
    return load_values(given, launched().world_size if world_size is None else world_size, more)


def write_dataset(prefix: str | os.PathLike[str], texts: str | Iterable[str], **tokenizer: Any) -> str:
    """Make a dataset of texts, each of them a document with its end, and give its prefix, which `data_path` takes.

    It is that of tools/preprocess_data.py, which is for more text than memory holds. One process writes it: under a launcher, the
    first rank, before others read it.

    Args:
        prefix: path of the files without .bin and .idx; folders are made. Files that are there already must hold the same.
        texts: one document, or several.
        tokenizer: settings that name it, such as `tokenizer_type="ByteTokenizer"`.

    Raises:
        ValueError: other data lies there, or the tokenizer cannot be made.
    """
    made = build_tokenizer(DataConfig(**tokenizer))
    documents = [np.append(made.encode_array(text), made.eod) for text in ([texts] if isinstance(texts, str) else texts)]
    where = os.fspath(prefix)
    if Path(f"{where}.idx").exists() or Path(f"{where}.bin").exists():
        there = IndexedDataset(where)
        same = there.num_documents == len(documents) and all(
            np.array_equal(there.document(number), document) for number, document in enumerate(documents)
        )
        if not same:
            raise ValueError(f"{where}.bin and {where}.idx hold other data, which stays as it is: name another prefix")
        return where
    Path(where).parent.mkdir(parents=True, exist_ok=True)
    with writing(where, token_dtype(made.vocab_size)) as file:
        for document in documents:
            file.add_documents(document)
    return where


def connect(run: LoadedConfig) -> ParallelContext:
    """The place of this process in the job that the launcher describes, or a world of one. A trainer joins by itself; this is for
    those who make its parts one by one, and who call `disconnect` at the end.

    Raises:
        ValueError: there is no such device, or the ranks do not find each other.
    """
    startup.set_numerics(run.config)
    return join(run.config.parallel)


def build_model(run: LoadedConfig, context: ParallelContext, vocab_size: int) -> Model:
    """This rank's part of the model, on the meta device: a trainer gives it memory and initial values.

    Args:
        vocab_size: rows of the word embedding, as `open_data` finds them.

    Raises:
        ValueError: the layers cannot be placed on the stages.
    """
    return model_of(run.config, context, vocab_size)
