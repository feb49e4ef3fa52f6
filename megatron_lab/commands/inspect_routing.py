"""Tell how evenly a model's routers spread text over its experts: the most and least used of each layer, and a picture.

    python tools/inspect_routing.py runs/a --data-path data/corpus_text_document
    python tools/inspect_routing.py model --data-path data/corpus_text_document --output routing.svg

The model is the --save folder of a run (its newest complete checkpoint), one checkpoint in it, or a Hugging Face folder. The
picture has a row for each layer with experts and a column for each expert: its tokens over the mean of its layer.
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
from megatron_lab.commands.parser import ToolParser

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from megatron.parallel.context import ParallelContext
    from megatron_lab.foreign.source import WeightSource

_SHOWN = 4
"""Experts that are named at either end."""
_AT_ONCE = 4
"""Samples of a forward."""
_SUFFIXES = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class LayerUse:
    """How often each expert of a layer was chosen."""

    layer: int
    counts: tuple[int, ...]

    @property
    def shares(self) -> list[float]:
        """Each count over the mean."""
        mean = sum(self.counts) / len(self.counts)
        return [count / mean for count in self.counts]

    def line(self) -> str:
        """The busiest and the idlest experts; of equal ones the lower number first."""
        shares = self.shares
        order = sorted(range(len(shares)), key=lambda expert: (-shares[expert], expert))
        some = min(_SHOWN, len(order) // 2)
        most, least = (", ".join(f"{expert} ({shares[expert]:.2f})" for expert in part) for part in (order[:some], order[-some:]))
        unused = sum(count == 0 for count in self.counts)
        return f"layer {self.layer:3d}  most used: {most}  least: {least}" + (f"  never: {unused}" if unused else "")


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = ToolParser(description=__doc__)
    flags.add_argument("model", metavar="MODEL", help="see above")
    flags.add_argument(
        "--data-path", required=True, nargs="+", metavar="PREFIX", help="indexed datasets: paths without .bin and .idx"
    )
    flags.add_argument("--ckpt-step", type=int, metavar="N", help="of a folder with several checkpoints, the iteration to take")
    flags.add_argument("--samples", type=int, default=64, metavar="N", help="samples of the model's sequence length to read (64)")
    flags.add_argument("--seq-length", type=int, metavar="N", help="tokens of a sample (those of the model's training)")
    flags.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(CUDA if there is any)")
    flags.add_argument("--output", type=Path, metavar="FILE", help=f"draw the picture: {', '.join(_SUFFIXES)} (needs matplotlib)")
    flags.add_argument("--json", action="store_true", help="print one JSON object: for each layer the counts of its experts")
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code: 0, 1 if it cannot be done, 2 for wrong flags."""
    flags = parser()
    given = flags.parse_args(arguments)
    for name in ("samples", "seq_length"):
        if (value := getattr(given, name)) is not None and value < 1:
            flags.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if given.output is not None and given.output.suffix.lower() not in _SUFFIXES:
        flags.error(f"--output {given.output}: a picture is a {', '.join(_SUFFIXES)} file")
    try:
        _run(given)
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"inspect_routing.py: error: {error}", file=sys.stderr)
        return 1


def _run(given: argparse.Namespace) -> None:
    from megatron.parallel.context import connect, disconnect
    from megatron_lab.foreign.opening import open_source
    from megatron_lab.schedule_plots.figure import require_matplotlib, save_figure

    if given.output is not None:
        require_matplotlib()
    source = open_source(given.model, given.ckpt_step)
    config = source.model
    if config.num_experts is None:
        raise ValueError(f"{given.model} has no layers with experts")
    if config.position_embedding_type == "learned_absolute" and (given.seq_length or 0) > config.num_positions:
        raise ValueError(
            f"--seq-length {given.seq_length} is more than the {config.num_positions} positions that the model has learned"
        )
    context = connect(ParallelConfig(device=given.device))
    try:
        uses, tokens = used(source, context, given.data_path, given.samples, given.seq_length or config.seq_length)
    finally:
        disconnect()
    if given.json:
        print(json.dumps({"tokens": tokens, "layers": {str(use.layer): use.counts for use in uses}}))
    else:
        chosen = config.moe_router_topk
        print(f"{tokens:,} tokens, each to {chosen} of {config.num_experts} experts; in brackets: tokens over the mean")
        for use in uses:
            print(use.line())
    if given.output is not None:
        save_figure(lambda: figure_of(uses), given.output)
        print(f"wrote {given.output}", file=sys.stderr)


def used(
    source: WeightSource, context: ParallelContext, prefixes: Sequence[str], samples: int, length: int
) -> tuple[list[LayerUse], int]:
    """The use of each layer's experts over some samples, or as many as the data has; and the number of tokens.

    Raises:
        ValueError: the data has ids that are not the model's, or less than a sample.
    """
    import torch

    from megatron.data.splits import open_datasets
    from megatron.data.tokenizer import build_tokenizer
    from megatron_lab.inference.forward import inputs_of, last_hidden_states
    from megatron_lab.inference.model_from_source import model_from

    ids_alone = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer", vocab_size=source.vocab_size - 1))
    data = DataConfig(data_path=tuple(prefixes), split="100,0,0")
    opened = open_datasets(
        data, seed=1, seq_length=length, tokenizer=ids_alone, need_validation=False, need_test=False
    ).train.source(num_samples=samples)
    model = model_from(source, context, _dtype(source, context))
    assert model.balance is not None, "it has experts"
    totals, tokens = torch.zeros(0), 0
    for first in range(0, samples, _AT_ONCE):
        ids = torch.from_numpy(opened.samples(first, min(_AT_ONCE, samples - first)))[:, :-1]
        if int(ids.max()) >= source.vocab_size:
            raise ValueError(
                f"the data has token {int(ids.max())}, but {source.name} has {source.vocab_size:,}: not its tokenizer's"
            )
        with torch.no_grad(), model.balance.watching(0.0):
            last_hidden_states(model, context, inputs_of(ids.to(context.device)))
            found = model.balance.found[model.balance.layers, :-3].cpu()
        totals, tokens = found if not len(totals) else totals + found, tokens + ids.numel()
    return [
        LayerUse(layer, tuple(int(count) for count in counts))
        for layer, counts in zip(model.balance.layers, totals.tolist(), strict=True)
    ], tokens


def _dtype(source: WeightSource, context: ParallelContext) -> torch.dtype:
    """That of the weights, but for one that a CPU cannot multiply fast."""
    import torch

    stored = source.weights["embedding.word.weight"].dtype
    return torch.float32 if stored == torch.float16 and context.device.type == "cpu" else stored


def figure_of(uses: Sequence[LayerUse]) -> Figure:
    """A heat map: a row for each layer, a column for each expert, in it its tokens over the mean."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    shares = [use.shares for use in uses]
    most = max(max(row) for row in shares)
    figure = Figure(figsize=(max(4.0, min(16.0, 1.5 + 0.12 * len(shares[0]))), 1.6 + 0.2 * len(uses)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, aspect="auto", cmap="RdBu_r", norm=TwoSlopeNorm(1.0, 0.0, max(most, 1.1)), interpolation="nearest")
    axes.set_yticks(range(len(uses)), [str(use.layer) for use in uses], fontsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    busiest = math.fsum(max(row) for row in shares) / len(shares)
    axes.set_title(
        f"tokens of each expert over the mean of its layer\n(of the busiest {busiest:.2f}, a mean over layers)", fontsize=9
    )
    figure.colorbar(image, ax=axes)
    return figure
