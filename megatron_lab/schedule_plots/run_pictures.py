"""Pictures and a table of a run's pipeline timelines: the simulated and the measured one of a step (--profile-pipeline)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from megatron.pipeline_parallel.simulate import Timeline
from megatron_lab.schedule_plots.figure import require_matplotlib
from megatron_lab.schedule_plots.files import write_picture
from megatron_lab.schedule_plots.panel import Panel
from megatron_lab.schedule_plots.table import TimelineRow, format_table

logger = logging.getLogger(__name__)


class RunPictures:
    """Writer of a run's pipeline timelines as pictures, in all file formats that this machine supports.

    The constructor logs a warning if matplotlib is missing. So the user knows at the start of the run that no .svg file will be
    written.
    """

    def __init__(self) -> None:
        self._suffixes = [".txt", ".json"]
        try:
            require_matplotlib()
            self._suffixes.append(".svg")
        except ModuleNotFoundError as error:
            logger.warning("--profile-pipeline writes no .svg picture: %s", error)

    def draw(self, timelines: Sequence[tuple[str, Timeline]], path: Path) -> tuple[list[str], list[Path]]:
        """Draw timelines below each other, and write the picture in each file format.

        Args:
            timelines: (title, timeline) of each panel of the picture.
            path: path of the files without a suffix.

        Returns:
            The lines of a table that describes the timelines, and the paths of the files.
        """
        panels = [Panel(*timeline) for timeline in timelines]
        paths = [path.with_suffix(suffix) for suffix in self._suffixes]
        for picture_path in paths:
            write_picture(panels, picture_path)
        return format_table([TimelineRow(panel) for panel in panels]).splitlines(), paths
