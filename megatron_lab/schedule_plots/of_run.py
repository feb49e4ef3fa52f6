"""The pipeline of a run as it was planned and measured (--profile-pipeline): pictures in files, and a table for the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from megatron.pipeline_parallel.simulate import Timeline
from megatron_lab.schedule_plots.figure import require_matplotlib
from megatron_lab.schedule_plots.files import write_picture
from megatron_lab.schedule_plots.panel import Panel
from megatron_lab.schedule_plots.table import TimelineRow, draw_table

logger = logging.getLogger(__name__)


class RunPictures:
    """Draws timelines in every form that can be written here. What is missing for one is logged at once, not when the run draws."""

    def __init__(self) -> None:
        self._suffixes = [".txt", ".json"]
        try:
            require_matplotlib()
            self._suffixes.append(".svg")
        except ModuleNotFoundError as error:
            logger.warning("--profile-pipeline writes no .svg picture: %s", error)

    def draw(self, timelines: Sequence[tuple[str, Timeline]], path: Path) -> tuple[list[str], list[Path]]:
        """Draw timelines with their titles, one above the other.

        Args:
            path: that of the files, without a suffix.

        Returns:
            lines of a table, and the files.
        """
        panels = [Panel(*titled) for titled in timelines]
        paths = [path.with_suffix(suffix) for suffix in self._suffixes]
        for one in paths:
            write_picture(panels, one)
        return draw_table([TimelineRow(panel) for panel in panels]).splitlines(), paths
