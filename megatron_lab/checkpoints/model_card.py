"""The model card of an export, README.md: what the model is, what its run read, how it was trained."""

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
from megatron_lab.checkpoints.exported import Export
from megatron_lab.checkpoints.text import size
from megatron_lab.foreign.source import StoredCheckpoint, WeightSource

UNKNOWN = "unknown"
"""What stands in the licence field until somebody names a licence."""
_LOSSES = ("lm_loss", "validation_loss", "test_loss")
"""Numbers of the run's record that the card tells."""


@dataclass(frozen=True)
class Dataset:
    """What the run read of one dataset."""

    name: str
    tokens: float
    """Read of it, by its weights in the blends."""
    documents: int
    fingerprint: str


@dataclass(frozen=True)
class Trained:
    """What a checkpoint knows of the run that wrote it."""

    iteration: int
    tokens: int
    """Tokens read, over all passes."""
    datasets: tuple[Dataset, ...]
    """Of the whole run, in the order in which it took them up; empty for made-up data."""
    config: Config
    ranks: str
    versions: Mapping[str, str]
    losses: Mapping[str, tuple[int, float]]
    """The last of each kind up to that iteration, with its iteration; from the run's record, if it is there."""

    @classmethod
    def of(cls, source: WeightSource) -> Trained | None:
        """From a checkpoint of a run; None for a folder of another program, and for weights that were only imported."""
        if not isinstance(source, StoredCheckpoint) or "progress" not in source.state:
            return None
        progress, config = Progress.from_json(source.state["progress"]), source.settings
        ends = [*(phase.first_sample - phase.passed_over for phase in progress.phases[1:]), progress.consumed_samples]
        read = [(end - phase.first_sample) * phase.seq_length for phase, end in zip(progress.phases, ends, strict=True)]
        found: dict[tuple[str, str], Dataset] = {}
        for phase, tokens in zip(progress.phases, read, strict=True):
            weights = sum(part.weight for part in phase.parts)
            for part in phase.parts:
                key = PurePath(part.prefix).name, part.fingerprint
                before = found[key].tokens if key in found else 0.0
                found[key] = Dataset(key[0], before + tokens * part.weight / weights, part.num_documents, part.fingerprint)
        all_tokens = sum(read) if progress.phases else progress.consumed_samples * config.model.seq_length
        parallel = config.parallel
        ranks = Topology(
            parallel.tensor_model_parallel_size, parallel.context_parallel_size, pp=parallel.pipeline_model_parallel_size
        )
        return cls(
            progress.iteration,
            all_tokens,
            tuple(found.values()),
            config,
            str(ranks).removesuffix(" x data 1"),
            source.config.get("versions", {}),
            _losses(Path(source.name).parent, progress.iteration),
        )


def _losses(folder: Path, iteration: int) -> dict[str, tuple[int, float]]:
    """The last loss of each kind in the record of the run in a folder that is not of a later iteration."""
    try:
        history = read_history(folder)
    except ValueError:
        return {}
    found: dict[str, tuple[int, float]] = {}
    for line in (*history.logs, *history.evaluations):
        at = line["iteration"]
        found |= {name: (at, line[name]) for name in _LOSSES if at <= iteration and isinstance(line.get(name), float)}
    return found


def model_card(source: WeightSource, trained: Trained | None, written: Export, *, licence: str, has_tokenizer: bool) -> str:
    """The card.

    Args:
        source: the weights that were written.
        trained: what is known of the run.
        licence: an identifier of the Hub, such as apache-2.0.
    """
    name = written.folder.name
    imports = "AutoModelForCausalLM, AutoTokenizer" if has_tokenizer else "AutoModelForCausalLM"
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n' if has_tokenizer else ""
    parts = [
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\nlicense: {licence}\n---\n",
        f"# {name}\n",
        f"A language model of {written.num_parameters:,} parameters in {written.dtype} ({size(written.num_bytes)}), architecture "
        f"`{written.family}`: {source.model.num_layers} layers of width {source.model.hidden_size:,}, sequences of "
        f"{source.model.seq_length:,} tokens, vocabulary {source.vocab_size:,}.\n",
        (written.checked or "The logits were not compared with those of the training framework (--verify was not given).") + "\n",
        f"```python\nfrom transformers import {imports}\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n{tokenizer}```\n',
        *(
            _of_the_run(trained)
            if trained is not None
            else ["## Data\n", "Not known: the weights come without the record of a run.\n"]
        ),
        "## Licence\n",
        f"`{licence}`\n"
        if licence != UNKNOWN
        else "Not chosen yet: the field `license` at the top of this file is to be filled in.\n",
    ]
    if written.notes:
        parts += ["## Notes\n", "".join(f"- {without_folders(note)}\n" for note in written.notes)]
    return "\n".join(parts)


def _of_the_run(trained: Trained) -> Iterator[str]:
    """The sections on data, training and loss."""
    yield "## Data\n"
    yield f"The run read {trained.tokens:,} tokens in {trained.iteration:,} iterations" + (
        ":\n" if trained.datasets else " that were made up (--mock-data): the model has learned no language.\n"
    )
    if trained.datasets:
        rows = [(one.name, f"about {one.tokens:,.0f}", f"{one.documents:,}", one.fingerprint) for one in trained.datasets]
        yield _table(("dataset", "tokens read", "documents", "fingerprint"), rows)
    yield "## Training\n"
    yield _table(("setting", "value"), [*_settings(trained)])
    yield "## Loss\n"
    if trained.losses:
        names = {"lm_loss": "training", "validation_loss": "validation", "test_loss": "test"}
        losses = [(names[name], f"{loss:.4f}", f"{at:,}") for name, (at, loss) in trained.losses.items()]
        yield _table(("loss (nats a token)", "value", "iteration"), losses)
    else:
        yield "Not known here: the run's record (history.jsonl) was not found. `tools/evaluate.py` measures it.\n"


def _settings(trained: Trained) -> Iterator[tuple[str, str]]:
    training, optimizer, model = trained.config.training, trained.config.optimizer, trained.config.model
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
    yield "precision", _precision(trained.config.precision)
    yield "seed", str(training.seed)
    yield "layout", trained.ranks
    if trained.versions:
        yield (
            "software",
            ", ".join(f"{name} {trained.versions[name]}" for name in (DISTRIBUTION, "torch") if name in trained.versions),
        )


def _precision(precision: PrecisionConfig) -> str:
    plain = {"bfloat16": precision.bf16, "float16": precision.fp16, "float64": precision.fp64}
    products = "" if precision.fp8_format is None else f", products in {precision.fp8_format}"
    return next((name for name, chosen in plain.items() if chosen), "float32") + products


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def without_folders(text: str) -> str:
    """The text with the last part of each path in it: `/home/me/runs/a/iter_0000100` as `iter_0000100`."""
    return re.sub(r"(?<![\w/.~:])(?:~|\.{1,2})?/(?:[^\s/`'\"(),]+/)*(?=[^\s/])", "", text)


def next_steps(folder: Path, *, has_tokenizer: bool) -> list[str]:
    """Commands for what one does with an export, ready to be pasted."""
    place = shlex.quote(str(folder))
    open_it = f"from transformers import AutoModelForCausalLM as M; print(M.from_pretrained({str(folder)!r}))"
    if has_tokenizer:
        open_it = (
            f"from transformers import pipeline; print(pipeline('text-generation', {str(folder)!r})('The', max_new_tokens=20))"
        )
    steps = [
        ("transformers", f"python -c {shlex.quote(open_it)}"),
        ("vLLM", f"vllm serve {place}" + ("" if has_tokenizer else " --skip-tokenizer-init")),
        ("upload", f"hf upload {shlex.quote(folder.name)} {place}"),
    ]
    if has_tokenizer:  # a GGUF file holds its tokenizer
        steps.insert(2, ("GGUF, in llama.cpp", f"python convert_hf_to_gguf.py {place} --outfile {shlex.quote(f'{folder}.gguf')}"))
    return ["next:", *(f"  {name + ':':<20}{command}" for name, command in steps)]
