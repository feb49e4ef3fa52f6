"""Pictures as files: the suffix says which kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.pipeline_parallel.pictures.figure import require_matplotlib, write_figure
from megatron.pipeline_parallel.pictures.panel import Panel
from megatron.pipeline_parallel.pictures.text import draw_text
from megatron.pipeline_parallel.pictures.trace import write_trace

_TEXT_WIDTH = 200


def _write_text(panels: Sequence[Panel], path: Path) -> None:
    path.write_text(draw_text(panels, width=_TEXT_WIDTH) + "\n", encoding="utf-8")


WRITERS: dict[str, Callable[[Sequence[Panel], Path], None]] = {
    ".svg": write_figure,
    ".png": write_figure,
    ".json": write_trace,
    ".txt": _write_text,
}
"""By the suffix of the file."""


def check_output(path: Path) -> None:
    """Whether a picture can be written there; ask before the work that it shows.

    Raises:
        ValueError: the suffix stands for no kind of picture, or there is no such folder.
        ModuleNotFoundError: the picture needs matplotlib, which is not installed.
    """
    if path.suffix.lower() not in WRITERS:
        raise ValueError(f"{path}: a picture is a {', '.join(WRITERS)} file, not {path.suffix or 'one without a suffix'}")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    if WRITERS[path.suffix.lower()] is write_figure:
        require_matplotlib()


def write_picture(panels: Sequence[Panel], path: Path) -> None:
    """Write the panels in the form that the suffix says: .svg and .png a figure, .json a Chrome trace, .txt text of 200 columns.

    Raises:
        ValueError, ModuleNotFoundError: as `check_output` says; or nothing in the panels takes any time.
        OSError: the file cannot be written.
    """
    check_output(path)
    WRITERS[path.suffix.lower()](panels, path)
