"""Draw the order in which an indexed dataset is read: its documents, and the samples of each epoch.

    python tools/plot_data_order.py --output order.svg                      an example of seven documents
    python tools/plot_data_order.py --output order.svg --data-path PREFIX --seq-length 512 --epochs 1

In the picture, each document has a colour, and black lines are the ends of samples.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from megatron.config.data import DataOrder
from megatron.config.optional_packages import import_optional
from megatron_lab.commands.parser import ToolParser

if TYPE_CHECKING:
    from megatron.data.gpt_dataset import GPTDataset
    from megatron.data.indexed_dataset import IndexedDataset

_EXAMPLE_LENGTHS = (26, 9, 41, 14, 20, 6, 31)
_MAX_DOCUMENTS, _MAX_SAMPLES = 60, 400
_MIN_LABELLED_SHARE, _MIN_RANGE_LABEL_SHARE = 0.012, 0.07  # fractions of the axis
_COLOURS = ("#88aadd", "#ee8899", "#88cc88", "#ddcc66", "#88ddee", "#cc88bb", "#cccccc")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--output", required=True, metavar="FILE", help="Write the picture to FILE (.svg, .png or .pdf).")
    parser.add_argument(
        "--data-path", metavar="PREFIX", help=f"Draw this dataset of at most {_MAX_DOCUMENTS} documents (default: an example)."
    )
    parser.add_argument(
        "--seq-length", type=int, default=16, metavar="N", help="Set the number of tokens of a sample (default 16)."
    )
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="Set the seed of the order (default 1234).")
    parser.add_argument("--epochs", type=int, default=2, metavar="N", help="Draw N epochs (default 2).")
    parser.add_argument(
        "--data-order",
        choices=get_args(DataOrder),
        default="epoch",
        help="Set the order, as the flag of training does (default epoch).",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Write the picture of the order in which a dataset is read. Return the exit status: 0, or 1 if the picture cannot be drawn or
    written."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    for name in ("seq_length", "epochs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            fig = plot_data_order(_open_dataset(args.data_path or _write_example_dataset(Path(folder))), args)
        _save_figure(fig, Path(args.output))
    except (ValueError, OSError) as error:
        print(f"plot_data_order.py: error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.output}")
    return 0


def _save_figure(fig: Any, path: Path) -> None:
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "order"}):  # text as text, and reproducible bytes
        fig.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _write_example_dataset(folder: Path) -> str:
    from megatron.data.indexed_writer import write_dataset

    with write_dataset(str(folder / "example"), "uint16") as writer:
        for length in _EXAMPLE_LENGTHS:
            writer.add_documents([0] * length)
    return str(folder / "example")


def _open_dataset(prefix: str) -> IndexedDataset:
    from megatron.data.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    if dataset.num_documents > _MAX_DOCUMENTS:
        raise ValueError(
            f"{prefix} has {dataset.num_documents:,} documents; a picture can show at most {_MAX_DOCUMENTS} documents.\n"
            "  Choose a smaller dataset, or show the samples of one step with tools/inspect_data.py --run FOLDER --step N."
        )
    return dataset


def plot_data_order(dataset: IndexedDataset, args: argparse.Namespace) -> Any:
    """Return a figure of the order in which a dataset is read.

    The first strip shows the documents in file order; each further strip shows the samples of an epoch.

    Args:
        args: parsed command line, with the order of the samples, the seed, the sequence length and the number of epochs.

    Raises:
        ValueError: matplotlib is missing, or an epoch has too many samples to be visible.
    """
    matplotlib_figure = import_optional("matplotlib.figure", "the picture needs matplotlib")
    from megatron.data.gpt_dataset import GPTDataset

    def open_samples(num_samples: int | None) -> GPTDataset:
        return GPTDataset(
            dataset,
            range(dataset.num_documents),
            split=0,
            seed=args.seed,
            seq_length=args.seq_length,
            vocab_size=2**31,
            order=args.data_order,
            num_samples=num_samples,
        )

    samples = open_samples(None)
    if args.data_order == "megatron":  # this order depends on the number of samples
        samples = open_samples(args.epochs * samples.samples_per_epoch)
    if samples.samples_per_epoch > _MAX_SAMPLES:
        raise ValueError(
            f"an epoch has {samples.samples_per_epoch:,} samples: a picture can show an epoch of at most {_MAX_SAMPLES} samples. "
            "Raise --seq-length, or use less data"
        )
    fig = matplotlib_figure.Figure(figsize=(10, 1.5 + 1.1 * (1 + args.epochs)), layout="constrained")
    axs = fig.subplots(1 + args.epochs, 1, sharex=True)
    _plot_documents(axs[0], dataset)
    for epoch in range(args.epochs):
        _plot_epoch(axs[1 + epoch], samples, epoch)
    axs[-1].set_xlabel("tokens; a colour is a document, black lines are the ends of samples")
    return fig


def _plot_documents(ax: Any, dataset: IndexedDataset) -> None:
    """Plot the first strip of the figure: one coloured bar per document, in the order in which the dataset's file stores the
    documents.

    Args:
        ax: matplotlib axes of the strip.
    """
    offset, total_tokens = 0, dataset.count_tokens(range(dataset.num_documents))
    for document in range(dataset.num_documents):
        length = dataset.count_tokens(range(document, document + 1))
        _plot_span(ax, offset, document, 0, length, total_tokens)
        offset += length
    _format_axes(ax, f"in the file: documents 0 to {dataset.num_documents - 1}", offset)


def _plot_epoch(ax: Any, samples: GPTDataset, epoch: int) -> None:
    """Plot a strip with the samples of an epoch in the order of reading. Each sample is divided into the ranges of documents that
    it contains.

    The additional token of each sample, which is only a label, is not shown.
    """
    num_samples = samples.samples_per_epoch
    for position in range(num_samples):
        offset = position * samples.seq_length
        end = offset + samples.seq_length
        for span in samples.get_lineage(epoch * num_samples + position):
            length = min(span.num_tokens, end - offset)
            if length:
                _plot_span(ax, offset, span.document, span.first_token, length, samples.selection.num_tokens)
            offset += length
        ax.axvline(offset, color="black", linewidth=1.6)
    _format_axes(
        ax,
        f"epoch {epoch}: {num_samples} samples of {samples.seq_length} tokens, in the order in which they are read",
        num_samples * samples.seq_length,
    )


def _plot_span(ax: Any, offset: int, document: int, first_token: int, num_tokens: int, total_tokens: int) -> None:
    """Plot consecutive tokens of a document as a bar in a strip.

    Args:
        offset: position of the bar in the strip, in tokens.
        document: index of the document, which selects the colour.
        first_token: index in the document of the first token to plot.
        num_tokens: number of tokens to plot.
        total_tokens: length of the strip. A bar that is too short in relation to it gets no label.
    """
    ax.barh(0, num_tokens, left=offset, color=_COLOURS[document % len(_COLOURS)], edgecolor="white", linewidth=0.6)
    if num_tokens >= _MIN_LABELLED_SHARE * total_tokens:
        text = (
            f"{document}"
            if num_tokens < _MIN_RANGE_LABEL_SHARE * total_tokens
            else f"document {document}\n{first_token} to {first_token + num_tokens - 1}"
        )
        ax.text(offset + num_tokens / 2, 0, text, ha="center", va="center", fontsize=7)


def _format_axes(ax: Any, title: str, end: int) -> None:
    ax.set_title(title, fontsize=9, loc="left")
    ax.set_yticks([])
    for side in ("left", "right", "top"):
        ax.spines[side].set_visible(False)
    ax.axvline(0, color="black", linewidth=1.6)
    ax.axvline(end, color="black", linewidth=1.6)
