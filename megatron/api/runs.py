"""What a program makes before it makes a trainer: settings, a dataset, the place of this process, a model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron.config.cli import LoadedConfig, load_values
from megatron.config.data import DataConfig
from megatron.config.errors import ConfigError
from megatron.config.launcher import launched
from megatron.config.rules import violations
from megatron.data.indexed_dataset import IndexedDataset, token_dtype
from megatron.data.indexed_writer import write_dataset as writing
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.model.build import Model, model_of
from megatron.parallel.context import ParallelContext
from megatron.parallel.context import connect as join
from megatron.training import startup, trainer
from megatron_lab.inference.language_model import LanguageModel

if TYPE_CHECKING:
    from megatron_lab.proofs.report import Proof
    from megatron_lab.verification.prove import ReferenceKind


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


# ---- A proof of a layout as a function.


def verify_layout(
    run: LoadedConfig,
    world_size: int,
    *,
    steps: int = 4,
    max_ranks: int = 8,
    reference: ReferenceKind = "plain",
    isolates: bool = False,
) -> list[Proof]:
    """Prove that a layout trains as one process does, as tools/verify_layout.py: the model is made small and trained in float64 on
    processes that are forked from this one, and compared loss by loss, gradient by gradient, weight by weight.

    Args:
        run: settings of the run, of any size (`settings(..., world_size=N)`).
        world_size: its ranks.
        steps: iterations that are compared.
        max_ranks: the most processes at once; larger layouts are reduced axis by axis.
        reference: `plain`, a model that shares no code with this one, or `self`, a run of the same code in one process, which is
            the one that knows parts of the user's own.
        isolates: look for the settings with which a difference comes and goes, for a minute at most.

    Returns:
        a proof for each small layout that stands for the given one: `equal`, and `findings` in the order of cause.

    Raises:
        ConfigError: the settings do not fit so many ranks.
        ValueError: the plain reference does not know a part of the model.
        RuntimeError: this process has used a GPU, after which it cannot fork.
    """
    from megatron_lab.proofs.verify import Effort, vocabulary_of
    from megatron_lab.proofs.verify import verify_layout as verify

    if problems := violations(run.config, world_size):
        raise ConfigError(problems)
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "this process has used a GPU, so that it cannot fork ranks: prove layouts before training, or in another"
        )
    effort = Effort(steps, max_ranks, isolates, reference)
    return verify(run.config, world_size, vocabulary_of(run.config.data), effort)


# ---- The trainer of programs and notebooks.


class Trainer(trainer.Trainer):
    __doc__ = trainer.Trainer.__doc__

    def language_model(self, tokenizer: Tokenizer | None = None) -> LanguageModel:
        """The model as it is now, for logits and texts. It has the trainer's weights, not a copy of them.

        Args:
            tokenizer: by default that of the settings.

        Raises:
            ValueError: this layout keeps no whole weights, or cuts sequences: save, and take `LanguageModel.load`.
        """
        self.steps.finish_publishing()
        parallel = self.config.parallel
        if parallel.sharding == "optim_grads_params" or self.model.sequence_parallel or self.context.topology.cp > 1:
            raise ValueError(
                "a model with --sequence-parallel, context ranks or optim_grads_params is made for whole sequences in training: "
                "save it, and take LanguageModel.load"
            )
        return LanguageModel(self.model, self.context, tokenizer or build_tokenizer(self.config.data))
