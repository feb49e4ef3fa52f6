"""Model card (README.md) of an export: the model, its training data, and its training settings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from megatron.config.config import Config
from megatron.config.precision import PrecisionConfig
from megatron.config.version import DISTRIBUTION
from megatron.metrics.history import read_history
from megatron.parallel.topology import Topology
from megatron.training.progress import Progress
from megatron_lab.checkpoints.export_result import Export
from megatron_lab.checkpoints.text import format_bytes
from megatron_lab.foreign.source import StoredCheckpoint, WeightSource

UNKNOWN = "unknown"
"""Content of the licence field if the user has not set a licence."""
_LOSS_NAMES = ("lm_loss", "validation_loss", "test_loss")
"""Losses in the history of a run that the model card shows."""


@dataclass(frozen=True)
class DatasetSummary:
    """Dataset that a training run has read, for the table of datasets in the model card."""

    name: str
    num_tokens: float
    """Number of tokens that the run has read from the dataset, estimated from the dataset's weight in each training blend."""
    num_documents: int
    """Number of documents in the dataset's training split."""
    fingerprint: str


@dataclass(frozen=True)
class TrainingSummary:
    """Facts about the training run for the model card, read from the checkpoint that the run wrote."""

    iteration: int
    num_tokens: int
    """Number of tokens read, including repeated passes over the data."""
    datasets: tuple[DatasetSummary, ...]
    """Datasets that the run has read since its start, in the order of their first use. Empty for mock data."""
    config: Config
    layout: str
    versions: Mapping[str, str]
    losses: Mapping[str, tuple[int, float]]
    """Iteration and value of the last loss of each type (training, validation and so on) up to `iteration`, from the run's
    history file. Empty if there is no history."""

    @classmethod
    def of(cls, source: WeightSource) -> TrainingSummary | None:
        """Build the summary of a training checkpoint. Returns None for folders of other programs and for imported weights."""
        if not isinstance(source, StoredCheckpoint) or "progress" not in source.state:
            return None
        progress, config = Progress.from_json(source.state["progress"]), source.settings
        ends = [*(phase.first_sample - phase.passed_over for phase in progress.phases[1:]), progress.consumed_samples]
        phase_tokens = [(end - phase.first_sample) * phase.seq_length for phase, end in zip(progress.phases, ends, strict=True)]
        datasets: dict[tuple[str, str], DatasetSummary] = {}
        for phase, tokens in zip(progress.phases, phase_tokens, strict=True):
            weights = sum(dataset.weight for dataset in phase.parts)
            for dataset in phase.parts:
                key = PurePath(dataset.prefix).name, dataset.fingerprint
                previous_tokens = datasets[key].num_tokens if key in datasets else 0.0
                datasets[key] = DatasetSummary(
                    key[0], previous_tokens + tokens * dataset.weight / weights, dataset.num_documents, dataset.fingerprint
                )
        total_tokens = sum(phase_tokens) if progress.phases else progress.consumed_samples * config.model.seq_length
        parallel = config.parallel
        topology = Topology(
            parallel.tensor_model_parallel_size, parallel.context_parallel_size, pp=parallel.pipeline_model_parallel_size
        )
        return cls(
            progress.iteration,
            total_tokens,
            tuple(datasets.values()),
            config,
            str(topology).removesuffix(" x data 1"),
            source.config.get("versions", {}),
            _read_losses(Path(source.name).parent, progress.iteration),
        )


def _read_losses(folder: Path, iteration: int) -> dict[str, tuple[int, float]]:
    """Return iteration and value of the last loss of each type (training, validation, test) up to `iteration`, from the history
    file of a run. Empty if the folder has no history file."""
    try:
        history = read_history(folder)
    except ValueError:
        return {}
    losses: dict[str, tuple[int, float]] = {}
    for entry in (*history.logs, *history.evaluations):
        entry_iteration = entry["iteration"]
        losses |= {
            name: (entry_iteration, entry[name])
            for name in _LOSS_NAMES
            if entry_iteration <= iteration and isinstance(entry.get(name), float)
        }
    return losses


def build_model_card(
    source: WeightSource, summary: TrainingSummary | None, result: Export, *, licence: str, has_tokenizer: bool
) -> str:
    """Return the text of the model card: README.md of an exported model.

    Args:
        source: source of the exported weights.
        summary: information about the training run. None if unknown.
        result: result of the export.
        licence: identifier of the licence on the Hugging Face Hub, such as apache-2.0.
        has_tokenizer: whether the folder contains a tokenizer, which the example code of the card then loads.
    """
    name = result.folder.name
    imports = "AutoModelForCausalLM, AutoTokenizer" if has_tokenizer else "AutoModelForCausalLM"
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n' if has_tokenizer else ""
    sections = [
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\nlicense: {licence}\n---\n",
        f"# {name}\n",
        f"A language model of {result.num_parameters:,} parameters in {result.dtype} ({format_bytes(result.num_bytes)}), "
        f"architecture `{result.family}`: {source.model.num_layers} layers of width {source.model.hidden_size:,}, sequences of "
        f"{source.model.seq_length:,} tokens, vocabulary {source.vocab_size:,}.\n",
        (result.verification or "The logits were not compared with those of the training framework (--verify was not given).")
        + "\n",
        f"```python\nfrom transformers import {imports}\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n{tokenizer}```\n',
        *(
            _format_run(summary)
            if summary is not None
            else ["## Data\n", "Not known: the weights come without the record of a run.\n"]
        ),
        "## Licence\n",
        f"`{licence}`\n"
        if licence != UNKNOWN
        else "Not chosen yet: the field `license` at the top of this file is to be filled in.\n",
    ]
    if result.notes:
        sections += ["## Notes\n", "".join(f"- {strip_folders(note)}\n" for note in result.notes)]
    return "\n".join(sections)


def _format_run(summary: TrainingSummary) -> Iterator[str]:
    """Yield the lines of the model card's sections on data, training and loss."""
    yield "## Data\n"
    yield f"The run read {summary.num_tokens:,} tokens in {summary.iteration:,} iterations" + (
        ":\n" if summary.datasets else " that were made up (--mock-data): the model has learned no language.\n"
    )
    if summary.datasets:
        rows = [
            (dataset.name, f"about {dataset.num_tokens:,.0f}", f"{dataset.num_documents:,}", dataset.fingerprint)
            for dataset in summary.datasets
        ]
        yield _format_table(("dataset", "tokens read", "documents", "fingerprint"), rows)
    yield "## Training\n"
    yield _format_table(("setting", "value"), [*_format_settings(summary)])
    yield "## Loss\n"
    if summary.losses:
        names = {"lm_loss": "training", "validation_loss": "validation", "test_loss": "test"}
        losses = [(names[name], f"{loss:.4f}", f"{iteration:,}") for name, (iteration, loss) in summary.losses.items()]
        yield _format_table(("loss (nats a token)", "value", "iteration"), losses)
    else:
        yield "Not known here: the run's record (history.jsonl) was not found. `tools/evaluate.py` measures it.\n"


def _format_settings(summary: TrainingSummary) -> Iterator[tuple[str, str]]:
    training, optimizer, model = summary.config.training, summary.config.optimizer, summary.config.model
    yield "sequence length", f"{model.seq_length:,}"
    if training.global_batch_size is not None:
        batch = training.global_batch_size
        yield "global batch", f"{batch:,} sequences, {batch * model.seq_length:,} tokens"
    yield (
        "optimizer",
        f"{optimizer.optimizer}, betas {optimizer.adam_beta1:g} and {optimizer.adam_beta2:g}, epsilon {optimizer.adam_eps:g}",
    )
    warmup = optimizer.lr_warmup_iters or optimizer.lr_warmup_samples or optimizer.lr_warmup_fraction
    unit = "iterations" if optimizer.lr_warmup_iters else "samples" if optimizer.lr_warmup_samples else "of the decay"
    if optimizer.lr is not None:
        yield (
            "learning rate",
            f"{optimizer.lr:g} to {optimizer.min_lr:g}, {optimizer.lr_decay_style}"
            + (f", warm-up {warmup:g} {unit}" if warmup else ""),
        )
    yield "weight decay, clipping", f"{optimizer.weight_decay:g}, {optimizer.clip_grad:g}"
    yield "dropout", f"attention {model.attention_dropout:g}, hidden {model.hidden_dropout:g}"
    yield "precision", _format_precision(summary.config.precision)
    yield "seed", str(training.seed)
    yield "layout", summary.layout
    if summary.versions:
        yield (
            "software",
            ", ".join(f"{name} {summary.versions[name]}" for name in (DISTRIBUTION, "torch") if name in summary.versions),
        )


def _format_precision(precision: PrecisionConfig) -> str:
    dtypes = {"bfloat16": precision.bf16, "float16": precision.fp16, "float64": precision.fp64}
    gemm_format = "" if precision.fp8_format is None else f", products in {precision.fp8_format}"
    return next((name for name, is_enabled in dtypes.items() if is_enabled), "float32") + gemm_format


def _format_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    table_rows = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in table_rows)


def strip_folders(text: str) -> str:
    """Replace each path in the text with its last component, to hide folders of the user: `/home/me/runs/a/iter_0000100` becomes
    `iter_0000100`."""
    return re.sub(r"(?<![\w/.~:])(?:~|\.{1,2})?/(?:[^\s/`'\"(),]+/)*(?=[^\s/])", "", text)


def format_next_steps(folder: Path, *, has_tokenizer: bool) -> list[str]:
    """Return commands that load, serve, upload and (with a tokenizer) convert an exported model, ready to paste into a shell."""
    path = shlex.quote(str(folder))
    statements = ["from transformers import AutoModelForCausalLM as M", f"print(M.from_pretrained({str(folder)!r}))"]
    if has_tokenizer:
        statements = [
            "from transformers import pipeline",
            f"model = pipeline('text-generation', {str(folder)!r})",
            "print(model('The', max_new_tokens=20))",
        ]
    steps = [
        ("transformers", format_python_command(statements)),
        ("vLLM", f"vllm serve {path}" + ("" if has_tokenizer else " --skip-tokenizer-init")),
        ("upload", f"hf upload {shlex.quote(folder.name)} {path}"),
    ]
    if has_tokenizer:  # a GGUF file contains the tokenizer
        steps.insert(2, ("GGUF, in llama.cpp", f"python convert_hf_to_gguf.py {path} --outfile {shlex.quote(f'{folder}.gguf')}"))
    return ["next:", *(_format_step(f"{name}:", command) for name, command in steps)]


def _format_step(label: str, command: str) -> str:
    return f"  {label}\n    {command}" if "\n" in command else f"  {label:<20}{command}"


def format_python_command(statements: Sequence[str]) -> str:
    """Format a command that runs Python statements, ready to paste into a shell. Each statement has its own line.

    The lines end with backslashes, which the shell removes together with the line break.
    """
    if any(mark in statement for statement in statements for mark in '"$`\\!'):  # special between double quotes
        return f"python -c {shlex.quote('; '.join(statements))}"
    return 'python -c "' + "; \\\n      ".join(statements) + '"'
