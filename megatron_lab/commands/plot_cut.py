"""Draw which context rank holds which tokens of a sequence, and how much attention each computes.

python tools/plot_cut.py --output cut.svg                                        4 ranks: a whole sample, and one of documents
python tools/plot_cut.py --output cut.svg --ranks 8 --documents 30000 2000 ...   with documents of these lengths
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config.extras import optional
from megatron_lab.commands.parser import ToolParser

_EXAMPLE = (300, 28, 60, 12, 500, 40, 84)
_COLOURS = ("#88aadd", "#ee8899", "#88cc88", "#ddcc66", "#88ddee", "#cc88bb", "#cccccc", "#ddaa88")
_LABELLED, _WITH_WORD = 0.015, 0.045
"""The least share of the sample of a piece that has room for its rank, and for the word "rank" too."""


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    flags = ToolParser(description=__doc__)
    flags.add_argument("--output", required=True, metavar="FILE", help="picture to write (.svg, .png or .pdf)")
    flags.add_argument("--ranks", type=int, default=4, metavar="N", help="context ranks (4)")
    flags.add_argument("--documents", type=int, nargs="+", default=_EXAMPLE, metavar="N", help="lengths of documents (an example)")
    given = flags.parse_args(arguments)
    if given.ranks < 2 or min(given.documents) < 1:
        flags.error("--ranks must be at least 2, and each document has at least 1 token")
    try:
        _save(draw(given.ranks, given.documents), Path(given.output))
    except (ValueError, OSError) as error:
        print(f"plot_cut.py: error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {given.output}")
    return 0


def _save(figure: Any, path: Path) -> None:
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "cut"}):  # text as text; the same picture, the same file
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw(ranks: int, documents: Sequence[int]) -> Any:
    """The figure: for a whole sample, and for one of several documents, a strip of who holds which tokens.

    Raises:
        ValueError: matplotlib is missing, or the documents together do not divide among the ranks.
    """
    figures = optional("matplotlib.figure", "the picture needs matplotlib")
    import numpy as np

    from megatron.parallel.cut import balanced, mirrored, token_costs

    length = sum(documents)
    bounds = np.array([0, *itertools.accumulate(documents)], dtype=np.int32)
    whole, within = token_costs(length, {None: 1.0}), token_costs(length, {None: 1.0}, bounds)
    strips = [
        ("a sample of one document", mirrored(length, ranks).weighed(whole), None),
        ("the same cut, where attention stays within documents", mirrored(length, ranks).weighed(within), bounds),
        ("pieces weighed by their attention", balanced(within, ranks), bounds),
    ]
    figure = figures.Figure(figsize=(10, 4.2), layout="constrained")
    for axes, (title, cut, ends) in zip(figure.subplots(len(strips), 1, sharex=True), strips, strict=True):
        for rank in range(ranks):
            for first, end in cut.runs(rank):
                axes.barh(0, end - first, left=first, color=_COLOURS[rank % len(_COLOURS)], edgecolor="white", linewidth=0.6)
                if end - first >= _LABELLED * length:
                    label = f"rank {rank}" if end - first >= _WITH_WORD * length else f"{rank}"
                    axes.text((first + end) / 2, 0, label, ha="center", va="center", fontsize=7)
        for end in () if ends is None else ends.tolist():
            axes.plot([end, end], [-0.55, 0.55], color="black", linewidth=1.2)
        axes.set_title(f"{title}: the busiest rank computes {cut.imbalance:.2f} x the mean", fontsize=9, loc="left")
        axes.set_yticks([])
        for side in ("left", "right", "top"):
            axes.spines[side].set_visible(False)
    axes.set_xlabel("tokens; a colour is a context rank, black lines are the ends of documents")
    return figure
