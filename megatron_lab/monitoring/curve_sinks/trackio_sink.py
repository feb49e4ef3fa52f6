"""Output of metrics to a run of trackio.

trackio appends: a step that is logged twice has two points, and its API removes no points. If a run goes back behind points that
trackio already has, a new run therefore begins. On this machine it receives a copy of the points up to that iteration, so that its
curves are complete, and the earlier run is renamed. A Space of Hugging Face cannot be read back: the new run there has only the
later points. https://huggingface.co/docs/trackio describes the package.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from typing import Any

from megatron.config.optional_packages import import_optional
from megatron.config.outputs import LoggingConfig
from megatron.metrics.log_line import OutputStatus, RunEnd
from megatron_lab.monitoring.curve_sinks.run_links import RunStart, call_with_timeout, create_id, flatten_settings, warn

_FINISH_S: Mapping[RunEnd, float] = {"finished": 60.0, "stopped": 15.0, "failed": 15.0}
"""Maximum seconds for sending the remaining data, by the end of the run."""


class Trackio:
    """Output of metrics to a run of trackio. Metrics have the same names as in the metrics file (--metrics-file).

    A restart continues the run whose identifier is in the save folder. The identifier is the end of the run's name, because trackio
    finds runs by their names.

    Args:
        config: settings with the flags --trackio-...
        start: start of the run.

    Raises:
        ValueError: the package trackio is not installed, or it refuses the project or the Space.
    """

    def __init__(self, config: LoggingConfig, start: RunStart) -> None:
        self._trackio: Any = import_optional("trackio", "--trackio-project needs trackio")
        self._config, self._start = config, start
        self._output = OutputStatus(f"--trackio-project {config.trackio_project}")
        self._last_iteration = start.iteration
        target = {"project": config.trackio_project, "space_id": config.trackio_space_id}
        self._entry, is_continued = start.links.get_entry("trackio", target)
        ended_at = self._entry.pop("ended_at", None)
        self._entry.setdefault("name", f"{config.trackio_run_name or start.name}-{self._entry['id']}")
        start.links.store("trackio", self._entry)  # before the run exists, so that no start can lose it
        try:
            self._run = self._init()
        except Exception as error:
            raise ValueError(f"--trackio-project {config.trackio_project} cannot be used: {error}") from error
        if is_continued and ended_at != start.iteration:
            self.rewind(start.iteration, is_start=True)

    def log_scalars(self, iteration: int, samples: int, values: Mapping[str, float]) -> None:
        """Send the metrics of one iteration.

        Args:
            iteration: number of the iteration.
            samples: samples that the run has consumed so far.
            values: metrics by name.
        """
        self._log(iteration, {**values, "consumed_samples": samples})

    def log_text(self, iteration: int, samples: int, name: str, text: str) -> None:
        """Send a text, which trackio shows as a report."""
        fence = "```"
        while fence in text:
            fence += "`"
        self._log(iteration, {name: self._trackio.Markdown(f"{fence}\n{text}\n{fence}")})

    def rewind(self, iteration: int, *, is_start: bool = False) -> None:
        """Continue in a new run, with a copy of the points up to `iteration`, if trackio has later points.

        Args:
            is_start: the run starts, and trackio may have later points of an earlier process.
        """
        if iteration >= self._last_iteration and not is_start:
            return
        self._last_iteration = iteration
        try:
            with redirect_stdout(sys.stderr):
                self._go_back(iteration)
        except Exception as error:  # noqa: BLE001 - whatever the package raises
            self._output.report_failure(error)

    def close(self, end: RunEnd = "finished") -> None:
        """Send metrics that are still in memory, for a limited time. trackio shows no state of a run."""
        if end != "failed":
            self._start.links.store("trackio", self._entry | {"ended_at": self._last_iteration})
        with redirect_stdout(sys.stderr):
            error = call_with_timeout(self._run.finish, _FINISH_S[end])
        with suppress(Exception):  # else the package finishes the run a second time when the process exits
            self._trackio.context_vars.current_run.set(None)
        if error is not None:
            warn(f"the run of trackio is not completely sent: {error}")

    def _log(self, iteration: int, values: Mapping[str, Any]) -> None:
        self._last_iteration = max(self._last_iteration, iteration)
        try:
            self._run.log(dict(values), step=iteration)
        except Exception as error:  # noqa: BLE001 - whatever the package raises
            self._output.report_failure(error)
        else:
            self._output.report_success()

    def _go_back(self, iteration: int) -> None:
        is_local = self._config.trackio_space_id is None
        self._run.finish()
        rows = self._read_rows() if is_local else []
        if is_local and all(row["step"] <= iteration for row in rows):
            self._run = self._init()
            return
        old_name = self._entry["name"]
        link = {name: value for name, value in self._entry.items() if name in ("id", "project", "space_id")}
        new_id = create_id()
        name = f"{old_name.removesuffix(self._entry['id'])}{new_id}"
        self._entry = {**self._entry, "id": new_id, "name": name, "parent": link | {"iteration": iteration}}
        self._start.links.store("trackio", self._entry)
        self._run = self._init()
        for row in rows:
            if row["step"] <= iteration:
                self._run.log({key: value for key, value in row.items() if key not in ("step", "timestamp")}, step=row["step"])
        if is_local:
            with suppress(Exception):
                old_runs = [run for run in self._trackio.Api().runs(self._config.trackio_project) if run.name == old_name]
                old_runs[0].rename(f"{old_name} (abandoned after {iteration})")
        warn(f"trackio: a new run {name} continues the run {old_name} after iteration {iteration}")

    def _read_rows(self) -> list[dict[str, Any]]:
        """Return the points of the run that this machine has: a dictionary for each logged step, with `step` and `timestamp`."""
        from trackio.sqlite_storage import SQLiteStorage

        rows: list[dict[str, Any]] = SQLiteStorage.get_logs(
            str(self._config.trackio_project), self._entry["name"], run_id=self._run.id
        )
        return rows

    def _init(self) -> Any:
        links = {"parent_run": self._entry["parent"]} if "parent" in self._entry else {}
        with redirect_stdout(sys.stderr):  # the package prints hints to stdout, where programs read the log
            return self._trackio.init(
                project=self._config.trackio_project,
                name=self._entry["name"],
                space_id=self._config.trackio_space_id,
                config={**dict(flatten_settings(self._start.settings)), **links},
                resume="allow",
                embed=False,
            )
