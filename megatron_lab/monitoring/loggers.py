"""Outputs for the metrics of a run: the file of JSON lines, and the curves of `curve_sinks`, whose modules are imported only if a
flag enables them. All implement `MetricSink`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron.config.config import Config
from megatron.config.imports import import_object
from megatron.metrics.log_line import LineFile, MetricSink, RunEnd

_SINKS = "megatron_lab.monitoring.curve_sinks"


class MetricsFile:
    """File of metrics: one JSON object per line, with numbers in full precision. Each line is written to the file at once.

    JSON cannot represent NaN and infinity, and strict readers stop at them. These values are written as null, and the line then
    also contains "nonfinite": true.

    Args:
        path: path of the file. Its folder is created.
        append: append to an existing file (for a resumed run) instead of replacing it.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, path: str | Path, append: bool) -> None:
        self._file = LineFile("--metrics-file", path, append=append)

    def log_scalars(self, iteration: int, samples: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one iteration as one line.

        Args:
            iteration: number of the iteration.
            samples: samples that the run has consumed so far.
            values: metrics by name.
        """
        record: dict[str, Any] = {"iteration": iteration, "consumed_samples": samples}
        record |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        if not all(map(math.isfinite, values.values())):
            record["nonfinite"] = True
        self._file.write(json.dumps(record, allow_nan=False))

    def log_text(self, iteration: int, samples: int, name: str, text: str) -> None:
        """Do nothing: the file contains only numbers. Texts are in the history file of the run."""

    def rewind(self, iteration: int) -> None:
        """Do nothing: lines with an iteration that is not above that of an earlier line replace the earlier lines for readers."""

    def close(self, end: RunEnd = "finished") -> None:
        """Close the metrics file."""
        self._file.close()


def prepare_curve_sinks(config: Config) -> Callable[[int, Mapping[str, Any]], list[MetricSink]]:
    """Check the outputs of curves before the run starts. Returns `build_curve_sinks` for these settings.

    Raises:
        ValueError: --tensorboard-dir cannot be written.
    """
    if config.logging.tensorboard_dir is not None:
        import_object(f"{_SINKS}.tensorboard_sink:create_folder")(config.logging.tensorboard_dir)
    return partial(build_curve_sinks, config)


def build_curve_sinks(config: Config, iteration: int, run_facts: Mapping[str, Any]) -> list[MetricSink]:
    """Open the outputs of curves that the settings enable.

    Args:
        iteration: iteration from which the run starts; 0 for a new run.
        run_facts: facts about this start, such as settings, command line and layout (`collect_run_facts`).

    Raises:
        ValueError: an output cannot be opened.
    """
    sinks: list[MetricSink] = []
    logging = config.logging
    if logging.tensorboard_dir is not None:
        tensorboard = import_object(f"{_SINKS}.tensorboard_sink:TensorBoard")
        sinks.append(tensorboard(logging.tensorboard_dir, logging.tensorboard_tags, first_iteration=iteration + 1))
    projects = {"wandb_sink:WandB": logging.wandb_project, "mlflow_sink:MLflow": logging.mlflow_experiment}
    projects["trackio_sink:Trackio"] = logging.trackio_project
    enabled = [path for path, project in projects.items() if project is not None]
    if enabled:
        start = import_object(f"{_SINKS}.run_links:open_run_start")(config, iteration, run_facts)
        sinks += [import_object(f"{_SINKS}.{path}")(logging, start) for path in enabled]
    return sinks
