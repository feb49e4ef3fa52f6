"""Draw the order in which an indexed dataset is read: documents, the epoch in which they are laid end to end, the samples.

python tools/plot_data_order.py --output order.svg                      an example of seven documents
python tools/plot_data_order.py --output order.svg --data-path PREFIX --seq-length 512 --epochs 1
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from megatron.config.data import DataOrder
from megatron.config.extras import optional
from megatron_lab.commands.parser import ToolParser

if TYPE_CHECKING:
    from megatron.data.gpt_dataset import GPTDataset
    from megatron.data.indexed_dataset import IndexedDataset

_EXAMPLE_LENGTHS = (26, 9, 41, 14, 20, 6, 31)
_MOST_DOCUMENTS, _MOST_SAMPLES = 60, 400
_LABELLED, _WITH_RANGE = 0.012, 0.07  # shares of the axis
_COLOURS = ("#88aadd", "#ee8899", "#88cc88", "#ddcc66", "#88ddee", "#cc88bb", "#cccccc")


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = ToolParser(description=__doc__)
    flags.add_argument("--output", required=True, metavar="FILE", help="picture to write (.svg, .png or .pdf)")
    flags.add_argument("--data-path", metavar="PREFIX", help=f"dataset of at most {_MOST_DOCUMENTS} documents (an example)")
    flags.add_argument("--seq-length", type=int, default=16, metavar="N", help="tokens in a sample (16)")
    flags.add_argument("--seed", type=int, default=1234, metavar="N", help="of the order (1234)")
    flags.add_argument("--epochs", type=int, default=2, metavar="N", help="how many to draw (2)")
    flags.add_argument("--data-order", choices=get_args(DataOrder), default="epoch", help="as in training (epoch)")
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    flags = parser()
    given = flags.parse_args(arguments)
    for name in ("seq_length", "epochs"):
        if getattr(given, name) < 1:
            flags.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(given, name)}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            figure = draw(_open(given.data_path or _example(Path(folder))), given)
        _save(figure, Path(given.output))
    except (ValueError, OSError) as error:
        print(f"plot_data_order.py: error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {given.output}")
    return 0


def _save(figure: Any, path: Path) -> None:
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "order"}):  # text as text; the same picture, the same file
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _example(folder: Path) -> str:
    from megatron.data.indexed_writer import write_dataset

    with write_dataset(str(folder / "example"), "uint16") as writer:
        for length in _EXAMPLE_LENGTHS:
            writer.add_documents([0] * length)
    return str(folder / "example")


def _open(prefix: str) -> IndexedDataset:
    from megatron.data.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    if dataset.num_documents > _MOST_DOCUMENTS:
        raise ValueError(
            f"{prefix} has {dataset.num_documents:,} documents; a picture of more than {_MOST_DOCUMENTS} says nothing.\n"
            "  Take a smaller dataset, or ask tools/inspect_data.py --run FOLDER --step N what a step reads."
        )
    return dataset


def draw(dataset: IndexedDataset, given: argparse.Namespace) -> Any:
    """The figure: a strip of the documents as they lie in the file, and a strip of the samples of each epoch as they are read.

    Raises:
        ValueError: matplotlib is missing, or there are too many samples to see anything.
    """
    figures = optional("matplotlib.figure", "the picture needs matplotlib")
    from megatron.data.gpt_dataset import GPTDataset

    def open_samples(num_samples: int | None) -> GPTDataset:
        return GPTDataset(
            dataset,
            range(dataset.num_documents),
            split=0,
            seed=given.seed,
            seq_length=given.seq_length,
            vocab_size=2**31,
            order=given.data_order,
            num_samples=num_samples,
        )

    samples = open_samples(None)
    if given.data_order == "megatron":  # an order of as many samples as are asked for
        samples = open_samples(given.epochs * samples.samples_per_epoch)
    if samples.samples_per_epoch > _MOST_SAMPLES:
        raise ValueError(f"an epoch has {samples.samples_per_epoch:,} samples: draw one of at most {_MOST_SAMPLES} (--seq-length)")
    figure = figures.Figure(figsize=(10, 1.5 + 1.1 * (1 + given.epochs)), layout="constrained")
    axes = figure.subplots(1 + given.epochs, 1, sharex=True)
    _draw_file(axes[0], dataset)
    for epoch in range(given.epochs):
        _draw_epoch(axes[1 + epoch], samples, epoch)
    axes[-1].set_xlabel("tokens; a colour is a document, black lines are the ends of samples")
    return figure


def _draw_file(axes: Any, dataset: IndexedDataset) -> None:
    """The documents one after another."""
    at, total = 0, dataset.num_tokens(range(dataset.num_documents))
    for document in range(dataset.num_documents):
        length = dataset.num_tokens(range(document, document + 1))
        _box(axes, at, document, 0, length, total)
        at += length
    _finish(axes, f"in the file: documents 0 to {dataset.num_documents - 1}", at)


def _draw_epoch(axes: Any, samples: GPTDataset, epoch: int) -> None:
    """The samples of an epoch one after another, each of the pieces that it is made of. The token that follows each sample, which
    is only predicted, is left out."""
    count = samples.samples_per_epoch
    for place in range(count):
        at = place * samples.seq_length
        end = at + samples.seq_length
        for piece in samples.lineage(epoch * count + place):
            length = min(piece.num_tokens, end - at)
            if length:
                _box(axes, at, piece.document, piece.first_token, length, samples.selection.num_tokens)
            at += length
        axes.axvline(at, color="black", linewidth=1.6)
    _finish(
        axes,
        f"epoch {epoch}: {count} samples of {samples.seq_length} tokens, in the order in which they are read",
        count * samples.seq_length,
    )


def _box(axes: Any, at: int, document: int, first: int, length: int, total: int) -> None:
    """Tokens of a document, from `first` on."""
    axes.barh(0, length, left=at, color=_COLOURS[document % len(_COLOURS)], edgecolor="white", linewidth=0.6)
    if length >= _LABELLED * total:
        text = f"{document}" if length < _WITH_RANGE * total else f"document {document}\n{first} to {first + length - 1}"
        axes.text(at + length / 2, 0, text, ha="center", va="center", fontsize=7)


def _finish(axes: Any, title: str, end: int) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_yticks([])
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.axvline(0, color="black", linewidth=1.6)
    axes.axvline(end, color="black", linewidth=1.6)
