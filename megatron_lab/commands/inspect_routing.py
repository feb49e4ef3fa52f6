"""Report how evenly a model's routers distribute tokens over experts: the most and least used experts of each layer, and a picture.

    python tools/inspect_routing.py runs/a --data-path data/corpus_text_document
    python tools/inspect_routing.py model --data-path data/corpus_text_document --output routing.svg

The model is the --save folder of a run (its newest complete checkpoint), one checkpoint in it, or a Hugging Face folder. The
picture has a row for each layer with experts and a column for each expert. A cell shows the number of tokens of the expert, divided
by the mean over the experts of its layer.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.data import DataConfig
from megatron.config.parallel import ParallelConfig
from megatron_lab.checkpoints.text import parse_step
from megatron_lab.commands.parser import ToolParser

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from megatron.parallel.context import ParallelContext
    from megatron_lab.foreign.source import WeightSource

_LISTED_EXPERTS = 4
"""Maximum number of most used, and of least used, experts in a line."""
_BATCH_SIZE = 4
"""Samples per forward."""
_SUFFIXES = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class LayerUsage:
    """Expert usage of one layer: the number of tokens that each expert received."""

    layer: int
    counts: tuple[int, ...]

    @property
    def relative_counts(self) -> list[float]:
        """Token count of each expert, divided by the mean over the experts of the layer."""
        mean = sum(self.counts) / len(self.counts)
        return [count / mean for count in self.counts]

    def format_line(self) -> str:
        """Format a line with the most and the least used experts of the layer, and the number of tokens of each as a multiple of
        the mean.

        Of experts with equal counts, the expert with the lower index comes first.
        """
        relative_counts = self.relative_counts
        order = sorted(range(len(relative_counts)), key=lambda expert: (-relative_counts[expert], expert))
        num_listed = min(_LISTED_EXPERTS, len(order) // 2)
        most_used, least_used = (
            ", ".join(f"{expert} ({relative_counts[expert]:.2f})" for expert in experts)
            for experts in (order[:num_listed], order[-num_listed:])
        )
        num_unused = sum(count == 0 for count in self.counts)
        return f"layer {self.layer:3d}  most used: {most_used}  least: {least_used}" + (
            f"  never: {num_unused}" if num_unused else ""
        )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="Model, as described above.")
    parser.add_argument(
        "--data-path", required=True, nargs="+", metavar="PREFIX", help="Read these indexed datasets (paths without .bin and .idx)."
    )
    parser.add_argument(
        "--ckpt-step", type=parse_step, metavar="N|best", help="Load the checkpoint of this iteration, if the folder has several."
    )
    parser.add_argument("--samples", type=int, default=64, metavar="N", help="Read N samples (default 64).")
    parser.add_argument(
        "--seq-length", type=int, metavar="N", help="Set the number of tokens of a sample (default: the model's sequence length)."
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="Run on this device (default auto: CUDA if available)."
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"Also write the picture to FILE: {', '.join(_SUFFIXES)} (needs matplotlib)."
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object with the token counts of each layer's experts.")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the tool and return the exit status: 0 for success, 1 for an error, 2 for invalid flags."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    for name in ("samples", "seq_length"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if args.output is not None and args.output.suffix.lower() not in _SUFFIXES:
        parser.error(f"--output {args.output}: a picture is a {', '.join(_SUFFIXES)} file")
    try:
        _run(args)
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"inspect_routing.py: error: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> None:
    from megatron.parallel.context import connect, disconnect
    from megatron_lab.foreign.open_source import open_source
    from megatron_lab.schedule_plots.figure import require_matplotlib, save_figure

    if args.output is not None:
        require_matplotlib()
    source = open_source(args.model, args.ckpt_step)
    config = source.model
    if config.num_experts is None:
        raise ValueError(f"{args.model} has no layers with experts, so there is no routing to inspect. Choose a model with experts")
    if config.position_embedding_type == "learned_absolute" and (args.seq_length or 0) > config.num_positions:
        raise ValueError(
            f"--seq-length {args.seq_length} is more than the {config.num_positions} positions that the model has learned: lower "
            "--seq-length"
        )
    context = connect(ParallelConfig(device=args.device))
    try:
        usages, num_tokens = count_tokens_per_expert(
            source, context, args.data_path, args.samples, args.seq_length or config.seq_length
        )
    finally:
        disconnect()
    if args.json:
        print(json.dumps({"tokens": num_tokens, "layers": {str(usage.layer): usage.counts for usage in usages}}))
    else:
        top_k = config.moe_router_topk
        print(f"{num_tokens:,} tokens, each to {top_k} of {config.num_experts} experts; in brackets: tokens over the mean")
        for usage in usages:
            print(usage.format_line())
    if args.output is not None:
        save_figure(lambda: plot_usage(usages), args.output)
        print(f"wrote {args.output}", file=sys.stderr)


def count_tokens_per_expert(
    source: WeightSource, context: ParallelContext, prefixes: Sequence[str], num_samples: int, seq_length: int
) -> tuple[list[LayerUsage], int]:
    """Run the model on samples and count the tokens that each layer's experts receive.

    Args:
        source: weights of the model.
        context: process groups and device of the run.
        prefixes: paths of indexed datasets, without .bin and .idx.
        num_samples: number of samples to read.
        seq_length: number of tokens of a sample.

    Returns:
        The usage of each layer with experts, and the number of tokens read.

    Raises:
        ValueError: the data has token ids outside the model's vocabulary, or has fewer tokens than one sample.
    """
    import torch

    from megatron.data.splits import open_datasets
    from megatron.data.tokenizer import build_tokenizer
    from megatron_lab.inference.forward import build_inputs, compute_last_hidden_states
    from megatron_lab.inference.model_from_source import load_model

    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer", vocab_size=source.vocab_size - 1))
    data = DataConfig(data_path=tuple(prefixes), split="100,0,0")
    dataset = open_datasets(
        data, seed=1, seq_length=seq_length, tokenizer=tokenizer, need_validation=False, need_test=False
    ).train.build_source(num_samples=num_samples)
    model = load_model(source, context, _select_dtype(source, context))
    assert model.router_tracker is not None, "it has experts"
    totals, num_tokens = torch.zeros(0), 0
    for first in range(0, num_samples, _BATCH_SIZE):
        ids = torch.from_numpy(dataset.get_samples(first, min(_BATCH_SIZE, num_samples - first)))[:, :-1]
        if int(ids.max()) >= source.vocab_size:
            raise ValueError(
                f"the data has the token id {int(ids.max()):,}, but the vocabulary of {source.name} has only {source.vocab_size:,} "
                "ids: the data was not made with the tokenizer of this model. Choose data that was made with this tokenizer"
            )
        with torch.no_grad(), model.router_tracker.recording(0.0):
            compute_last_hidden_states(model, context, build_inputs(ids.to(context.device)))
            batch_counts = model.router_tracker.totals[model.router_tracker.moe_layers, :-3].cpu()
        totals, num_tokens = batch_counts if not len(totals) else totals + batch_counts, num_tokens + ids.numel()
    return [
        LayerUsage(layer, tuple(int(count) for count in counts))
        for layer, counts in zip(model.router_tracker.moe_layers, totals.tolist(), strict=True)
    ], num_tokens


def _select_dtype(source: WeightSource, context: ParallelContext) -> torch.dtype:
    """Return the dtype in which the model computes: the dtype of the stored weights, but float32 instead of float16 on a CPU, which
    multiplies float16 slowly."""
    import torch

    stored_dtype = source.weights["embedding.word.weight"].dtype
    return torch.float32 if stored_dtype == torch.float16 and context.device.type == "cpu" else stored_dtype


def plot_usage(usages: Sequence[LayerUsage]) -> Figure:
    """Return a heat map of expert usage: a row for each layer, a column for each expert.

    A cell shows the number of tokens of the expert, divided by the mean over the experts of its layer.
    """
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    relative_counts = [usage.relative_counts for usage in usages]
    max_count = max(max(row) for row in relative_counts)
    fig = Figure(figsize=(max(4.0, min(16.0, 1.5 + 0.12 * len(relative_counts[0]))), 1.6 + 0.2 * len(usages)), layout="constrained")
    ax = fig.subplots()
    image = ax.imshow(
        relative_counts, aspect="auto", cmap="RdBu_r", norm=TwoSlopeNorm(1.0, 0.0, max(max_count, 1.1)), interpolation="nearest"
    )
    ax.set_yticks(range(len(usages)), [str(usage.layer) for usage in usages], fontsize=7)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("expert")
    ax.set_ylabel("layer")
    busiest = math.fsum(max(row) for row in relative_counts) / len(relative_counts)
    ax.set_title(
        f"tokens of each expert over the mean of its layer\n(of the busiest {busiest:.2f}, a mean over layers)", fontsize=9
    )
    fig.colorbar(image, ax=ax)
    return fig
