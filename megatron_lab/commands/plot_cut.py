"""Draw which context rank has which tokens of a sequence, and how much attention each rank computes.

    python tools/plot_cut.py --output cut.svg                                        4 ranks, an example of seven documents
    python tools/plot_cut.py --output cut.svg --ranks 8 --documents 30000 2000 ...   documents of these lengths

The picture shows the split of a sample with one document, and two splits of a sample with several documents.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config.optional_packages import import_optional
from megatron_lab.commands.parser import ToolParser

_EXAMPLE_LENGTHS = (300, 28, 60, 12, 500, 40, 84)
_COLOURS = ("#88aadd", "#ee8899", "#88cc88", "#ddcc66", "#88ddee", "#cc88bb", "#cccccc", "#ddaa88")
_MIN_LABELLED_SHARE, _MIN_FULL_LABEL_SHARE = 0.015, 0.045
"""Minimum length of a segment, as a fraction of the sample, for a label with its rank number, and for one with the word "rank"."""


def main(arguments: list[str] | None = None) -> int:
    """Write the picture of how a sample's tokens are split over the context-parallel ranks to the file of --output.

    Return the exit status: 0, or 1 if the picture cannot be drawn or written.
    """
    parser = ToolParser(description=__doc__)
    parser.add_argument("--output", required=True, metavar="FILE", help="Write the picture to FILE (.svg, .png or .pdf).")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="Set the number of context ranks (default 4).")
    parser.add_argument(
        "--documents",
        type=int,
        nargs="+",
        default=_EXAMPLE_LENGTHS,
        metavar="N",
        help="Set the lengths of the documents (default: an example).",
    )
    args = parser.parse_args(arguments)
    if args.ranks < 2 or min(args.documents) < 1:
        parser.error("--ranks must be at least 2, and each document has at least 1 token")
    try:
        _save_figure(plot_split(args.ranks, args.documents), Path(args.output))
    except (ValueError, OSError) as error:
        print(f"plot_cut.py: error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.output}")
    return 0


def _save_figure(fig: Any, path: Path) -> None:
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "cut"}):  # text as text, and reproducible bytes
        fig.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def plot_split(num_ranks: int, document_lengths: Sequence[int]) -> Any:
    """Return a figure that shows in three strips which context-parallel rank has each token of a sequence.

    The strips are the zigzag split of a sample with one document, the zigzag split of a sample with several documents, and the
    split that balances the attention of several documents.

    Args:
        num_ranks: number of context-parallel ranks.
        document_lengths: number of tokens of each document.

    Raises:
        ValueError: matplotlib is missing, or the total length is not divisible among the ranks.
    """
    matplotlib_figure = import_optional("matplotlib.figure", "the picture needs matplotlib")
    import numpy as np

    from megatron.parallel.sequence_split import compute_token_costs, split_balanced, split_zigzag

    seq_length = sum(document_lengths)
    cu_seqlens = np.array([0, *itertools.accumulate(document_lengths)], dtype=np.int32)
    full_costs, document_costs = (
        compute_token_costs(seq_length, {None: 1.0}),
        compute_token_costs(seq_length, {None: 1.0}, cu_seqlens),
    )
    strips = [
        ("a sample of one document", split_zigzag(seq_length, num_ranks).with_imbalance(full_costs), None),
        (
            "the same cut, where attention stays within documents",
            split_zigzag(seq_length, num_ranks).with_imbalance(document_costs),
            cu_seqlens,
        ),
        ("pieces weighed by their attention", split_balanced(document_costs, num_ranks), cu_seqlens),
    ]
    fig = matplotlib_figure.Figure(figsize=(10, 4.2), layout="constrained")
    for ax, (title, split, document_ends) in zip(fig.subplots(len(strips), 1, sharex=True), strips, strict=True):
        for rank in range(num_ranks):
            for start, end in split.get_token_ranges(rank):
                ax.barh(0, end - start, left=start, color=_COLOURS[rank % len(_COLOURS)], edgecolor="white", linewidth=0.6)
                if end - start >= _MIN_LABELLED_SHARE * seq_length:
                    label = f"rank {rank}" if end - start >= _MIN_FULL_LABEL_SHARE * seq_length else f"{rank}"
                    ax.text((start + end) / 2, 0, label, ha="center", va="center", fontsize=7)
        for end in () if document_ends is None else document_ends.tolist():
            ax.plot([end, end], [-0.55, 0.55], color="black", linewidth=1.2)
        ax.set_title(f"{title}: the busiest rank computes {split.imbalance:.2f} x the mean", fontsize=9, loc="left")
        ax.set_yticks([])
        for side in ("left", "right", "top"):
            ax.spines[side].set_visible(False)
    ax.set_xlabel("tokens; a colour is a context rank, black lines are the ends of documents")
    return fig
