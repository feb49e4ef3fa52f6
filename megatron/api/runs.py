"""Functions that prepare a run from Python: settings, dataset, process groups and model. Also the verification of a layout, and a
trainer that can generate text."""

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
from megatron.config.launcher import read_process_info
from megatron.config.rules import find_violations
from megatron.data.indexed_dataset import IndexedDataset, get_token_dtype
from megatron.data.indexed_writer import write_dataset as writing
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.model.build import Model, build_model_from_config
from megatron.parallel.context import ParallelContext
from megatron.parallel.context import connect as join
from megatron.training import startup, trainer
from megatron_lab.inference.language_model import LanguageModel
from megatron_lab.tokenizers.fingerprint import get_fingerprint, write_dataset_fingerprint

if TYPE_CHECKING:
    from megatron_lab.proofs.report import Proof
    from megatron_lab.verification.prove import ReferenceType


def settings(
    values: Mapping[str, Any] | str | os.PathLike[str] | None = None, *, world_size: int | None = None, **overrides: Any
) -> LoadedConfig:
    """Resolve and check the settings of a run. Names are those of the command line: `--num-layers 2` is `num_layers=2`, a switch is
    True or False.

    Args:
        values: settings as a mapping, or the path of a YAML or TOML file (as for --config). A mapping may be flat, or nested by
            topic as `--print-config` prints it.
        world_size: number of ranks of the run; by default that of the launcher, or one.
        overrides: additional settings, which take precedence over `values`. `model="llama3-8b"` loads the settings of a model that
            --model knows, `recipe="llama2-7b"` those of a recipe that --recipe knows. `config=[...]` loads settings from files.
            Each of these three overrides the previous ones, and all other settings override them.

    Raises:
        ConfigError: settings are invalid or contradict each other. The error's attribute `violations` lists all problems.
    """
    source_values: Mapping[str, Any] = {"config": values} if isinstance(values, str | os.PathLike) else values or {}
    return load_values(source_values, read_process_info().world_size if world_size is None else world_size, overrides)


def write_dataset(prefix: str | os.PathLike[str], texts: str | Iterable[str], **tokenizer: Any) -> str:
    """Write texts to an indexed dataset. Each text becomes a document that ends with an end-of-document token. Returns the prefix
    of the dataset's files, which is the value for the setting `data_path`.

    The dataset equals that of tools/preprocess_data.py, which is meant for texts that do not fit in memory. Only one process may
    write: under a launcher, the first rank, before the other ranks read the dataset.

    Args:
        prefix: path of the files without .bin and .idx. Missing folders are created. Existing files must have the same content.
        texts: one document or several documents.
        tokenizer: settings of the tokenizer, such as `tokenizer_type="ByteTokenizer"`.

    Raises:
        ValueError: the files exist with other content, or the tokenizer cannot be built.
    """
    config = DataConfig(**tokenizer)
    built_tokenizer = build_tokenizer(config)
    documents = [
        np.append(built_tokenizer.encode_array(text), built_tokenizer.get_document_end())
        for text in ([texts] if isinstance(texts, str) else texts)
    ]
    path = os.fspath(prefix)
    if Path(f"{path}.idx").exists() or Path(f"{path}.bin").exists():
        existing = IndexedDataset(path)
        is_same = existing.num_documents == len(documents) and all(
            np.array_equal(existing.get_document(document_index), document) for document_index, document in enumerate(documents)
        )
        if not is_same:
            raise ValueError(f"{path}.bin and {path}.idx contain other data, which is not overwritten: use another prefix")
        return path
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with writing(path, get_token_dtype(built_tokenizer.vocab_size)) as file:
        for document in documents:
            file.add_documents(document)
    write_dataset_fingerprint(path, get_fingerprint(config, built_tokenizer))
    return path


def connect(run: LoadedConfig) -> ParallelContext:
    """Connect this process with the other ranks of the launcher's job, or create a world of one process. Returns the process groups
    of this rank.

    PyTorch's attention kernels, float32 precision and deterministic mode are also set as the settings require.

    A trainer does this itself. This function is for programs that build the components of a run one by one; they call `disconnect`
    at the end.

    Raises:
        ValueError: the device does not exist, or the ranks cannot connect.
    """
    startup.set_numerics(run.config)
    return join(run.config.parallel)


def build_model(run: LoadedConfig, context: ParallelContext, vocab_size: int) -> Model:
    """Build this rank's part of the model on the meta device, without memory for the parameters. A trainer allocates and
    initialises them.

    Args:
        vocab_size: number of rows of the word embedding: `open_data(...).vocab_size`.

    Raises:
        ValueError: the layers cannot be distributed over the pipeline stages.
    """
    return build_model_from_config(run.config, context, vocab_size)


# ---- Verification of a layout.


def verify_layout(
    run: LoadedConfig,
    world_size: int,
    *,
    steps: int = 4,
    max_ranks: int = 8,
    reference: ReferenceType = "plain",
    isolate_settings: bool = False,
) -> list[Proof]:
    """Prove that a parallel layout trains like a single process, as tools/verify_layout.py does.

    The model is scaled down and trained in float64 on forked processes. Losses, gradients and weights are compared with those of a
    reference run.

    Args:
        run: settings of the run, of any size (`settings(..., world_size=N)`).
        world_size: number of ranks of the run.
        steps: number of iterations to compare.
        max_ranks: maximum number of processes at a time. A layout with more ranks is replaced by smaller layouts that together
            contain every pair of its axes.
        reference: "plain" for a model that shares no code with the framework, or "self" for a run of the same code in one process.
            Only "self" supports user-defined components.
        isolate_settings: search for the settings that cause a difference, for at most one minute.

    Returns:
        one proof for each of the smaller layouts. Its attribute `equal` says whether training is the same. `findings` lists the
        differences, causes before their consequences.

    Raises:
        ConfigError: the settings do not fit the number of ranks.
        ValueError: the plain reference does not support a component of the model.
        RuntimeError: this process has used a GPU and therefore cannot fork.
    """
    from megatron_lab.proofs.verify import Effort, get_vocab_size
    from megatron_lab.proofs.verify import verify_layout as verify

    if rule_violations := find_violations(run.config, world_size):
        raise ConfigError(rule_violations)
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "this process has used a GPU, so it cannot fork ranks: verify layouts before training, or in another process"
        )
    effort = Effort(steps, max_ranks, isolate_settings, reference)
    return verify(run.config, world_size, get_vocab_size(run.config.data), effort)


# ---- Trainer for programs and notebooks.


class Trainer(trainer.Trainer):
    __doc__ = trainer.Trainer.__doc__

    def language_model(self, tokenizer: Tokenizer | None = None) -> LanguageModel:
        """Return a language model with the current weights of the trainer, for logits and text generation. The weights are shared,
        not copied.

        Args:
            tokenizer: by default the tokenizer of the settings.

        Raises:
            ValueError: the layout shards the weights or splits sequences. Save a checkpoint and use `LanguageModel.load` instead.
        """
        self.steps.finish_param_gather()
        parallel = self.config.parallel
        if parallel.sharding == "optim_grads_params" or self.model.sequence_parallel or self.context.topology.cp > 1:
            raise ValueError(
                "a trainer with --sequence-parallel, --context-parallel-size above 1, or --data-parallel-sharding-strategy "
                "optim_grads_params cannot generate text: save a checkpoint, and load it with LanguageModel.load"
            )
        return LanguageModel(self.model, self.context, tokenizer or build_tokenizer(self.config.data))
