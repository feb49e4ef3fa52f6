"""Output of metrics to a run of MLflow.

MLflow appends: a step that is logged twice has two points, and its API removes no metrics. If a run goes back behind points that
MLflow already has, a new run therefore begins. It receives a copy of the points up to that iteration, so that its curves are
complete. A tag of the earlier run says from where on its points are abandoned.

A thread sends all requests in batches (https://mlflow.org/docs/latest/api_reference/rest-api.html#log-batch), so a slow server
delays no step.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shlex
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from megatron.config.optional_packages import import_optional
from megatron.config.outputs import LoggingConfig
from megatron.metrics.log_line import OutputStatus, RunEnd
from megatron_lab.monitoring.curve_sinks.run_links import RunStart, flatten_settings, warn

_MAX_METRICS, _MAX_PARAMS = 1000, 100
"""Maximum numbers of metrics and of parameters in one request, as the server demands."""
_MAX_KEY_CHARACTERS, _MAX_VALUE_CHARACTERS, _MAX_TAG_CHARACTERS = 250, 500, 5000
"""Lengths of names, parameter values and tags that every server accepts."""
_MAX_QUEUED = 200_000
"""Maximum number of unsent items. If the server does not answer for so long, the oldest are lost."""
_OPEN_S, _RETRY_S, _BATCH_S = 30.0, 10.0, 2.0
"""Seconds: maximum wait for the server at the start of the run; pause after a failed request; pause between batches."""
_CLOSE_S: Mapping[RunEnd, float] = {"finished": 60.0, "stopped": 15.0, "failed": 15.0}
"""Maximum seconds for sending the remaining data, by the end of the run."""
_STATUSES: Mapping[RunEnd, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_RUN_TAG, _ITERATION = "megatron.run", "iteration"
"""Tag with the identifier of the run, and metric that contains the iteration, from which a restart reads the last one."""

T = TypeVar("T")


class MLflow:
    """Output of metrics to a run of MLflow. Metrics have the same names as in the metrics file (--metrics-file).

    A restart continues the run whose identifier is in the save folder.

    Args:
        config: settings with the flags --mlflow-...
        start: start of the run.

    Raises:
        ValueError: the package mlflow is not installed, or it refuses the address or the experiment.
    """

    def __init__(self, config: LoggingConfig, start: RunStart) -> None:
        import_optional("mlflow", "--mlflow-experiment needs MLflow")
        self._config, self._start = config, start
        self._output = OutputStatus(f"--mlflow-experiment {config.mlflow_experiment}")
        target = {"experiment": config.mlflow_experiment, "tracking_uri": config.mlflow_tracking_uri}
        self._entry, _ = start.links.get_entry("mlflow", target)
        start.links.store("mlflow", self._entry)  # before the run exists, so that no start can lose it
        self._run_id = ""
        self._queue: deque[Any] = deque()  # metrics, and functions that send something else
        self._batch: list[Any] = []
        """Items of the queue that the next request sends. A failed request is repeated with the same items."""
        self._has_text_failed = False
        self._wake, self._opened, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._open_error: Exception | None = None
        self._last_iteration = start.iteration
        self._end: RunEnd = "finished"
        self._thread = threading.Thread(target=self._send_all, name="mlflow", daemon=True)
        self._thread.start()
        if not self._opened.wait(_OPEN_S):
            warn(f"MLflow has not answered within {_OPEN_S:.0f} s: training starts, and its metrics are sent later")
        elif self._open_error is not None:
            raise ValueError(
                f"--mlflow-experiment {config.mlflow_experiment} cannot be used: {self._open_error} (--mlflow-tracking-uri is the "
                "address of a server, such as http://host:5000; a local database needs the complete package: pip install mlflow)"
            )

    def log_scalars(self, iteration: int, samples: int, values: Mapping[str, float]) -> None:
        """Queue the metrics of one iteration for sending.

        Args:
            iteration: number of the iteration.
            samples: samples that the run has consumed so far.
            values: metrics by name.
        """
        self._last_iteration = max(self._last_iteration, iteration)
        milliseconds = int(1000 * time.time())
        for name, value in {**values, "consumed_samples": samples, _ITERATION: iteration}.items():
            self._queue.append((clean_name(name), float(value), milliseconds, iteration))
        while len(self._queue) > _MAX_QUEUED:
            self._queue.popleft()

    def log_text(self, iteration: int, samples: int, name: str, text: str) -> None:
        """Queue a text for sending. It becomes a file among the artifacts of the run."""
        path = f"{clean_name(name)}/{iteration:08d}.txt"
        self._queue.append(lambda client: self._send_text(client, text, path))

    def rewind(self, iteration: int) -> None:
        """Continue in a new run, with a copy of the points up to `iteration`."""
        if iteration < self._last_iteration:
            self._last_iteration = iteration
            self._queue.append(lambda client: self._go_back(client, iteration))

    def close(self, end: RunEnd = "finished") -> None:
        """Send the remaining metrics for a limited time, and set the state of the run."""
        self._end = end
        self._closing.set()
        self._wake.set()
        self._thread.join(_CLOSE_S[end])
        if self._thread.is_alive():
            warn(f"MLflow has not received {len(self._queue)} values within {_CLOSE_S[end]:.0f} s: they are lost")

    # ---- Methods of the sending thread.

    def _send_all(self) -> None:
        client = self._retry(self._open, is_start=True)
        if client is None:
            return
        while not (self._closing.is_set() and not self._queue):
            self._wake.wait(_BATCH_S)
            while self._queue:
                self._retry(lambda: self._send_next(client))
        self._retry(lambda: client.set_terminated(self._run_id, _STATUSES[self._end]))

    def _retry(self, action: Callable[[], T], *, is_start: bool = False) -> T | None:
        """Run an action until it succeeds. Returns None if the server or the package refuses the first action of the run."""
        while True:
            try:
                result = action()
            except Exception as error:  # noqa: BLE001 - whatever the package raises
                if is_start and not self._opened.is_set() and _is_refusal(error, unknown=not isinstance(error, OSError)):
                    self._open_error = error
                    self._opened.set()
                    return None
                self._opened.set()
                self._output.report_failure(error)
                if self._closing.wait(_RETRY_S):
                    time.sleep(1.0)  # the last attempts until `close` gives up
            else:
                self._opened.set()
                self._output.report_success()
                return result

    def _send_next(self, client: Any) -> None:
        """Send the first items of the queue in one request. Items that the server refuses are lost."""
        from mlflow.entities import Metric

        batch = self._batch
        while self._queue and len(batch) < _MAX_METRICS and not (batch and (callable(batch[0]) or callable(self._queue[0]))):
            batch.append(self._queue.popleft())
        try:
            if batch and callable(batch[0]):
                batch[0](client)
            else:
                client.log_batch(self._run_id, metrics=[Metric(*item) for item in batch])
        except Exception as error:
            if not _is_refusal(error):
                raise
            self._output.report_failure(error)
        batch.clear()

    def _send_text(self, client: Any, text: str, path: str) -> None:
        """Send a text as a file. A failure is reported once and never repeated: the storage of files may be another server."""
        try:
            client.log_text(self._run_id, text, path)
        except Exception as error:  # noqa: BLE001 - whatever the package or the storage raises
            if not self._has_text_failed:
                self._has_text_failed = True
                warn(f"MLflow cannot store texts as artifacts ({error}): metrics are still sent")

    def _open(self) -> Any:
        """Create or continue the run of this start. Returns the client of the server."""
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=self._config.mlflow_tracking_uri)
        experiment_name = str(self._config.mlflow_experiment)
        experiment = client.get_experiment_by_name(experiment_name)
        experiment_id = client.create_experiment(experiment_name) if experiment is None else experiment.experiment_id
        runs = client.search_runs([experiment_id], f"tags.`{_RUN_TAG}` = '{self._entry['id']}'", order_by=["start_time DESC"])
        self._experiment_id = experiment_id
        if not runs:
            self._create_run(client, {_RUN_TAG: self._entry["id"]})
        else:
            self._run_id = runs[0].info.run_id
            client.update_run(self._run_id, status="RUNNING", name=self._config.mlflow_run_name)
            if runs[0].data.metrics.get(_ITERATION, 0) > self._start.iteration:
                self._go_back(client, self._start.iteration)
        start_text = json.dumps({"config": self._start.settings, **self._start.facts}, indent=1, default=str)
        path = f"starts/{self._start.iteration:08d}.json"
        self._queue.appendleft(lambda client: self._send_text(client, start_text, path))
        return client

    def _create_run(self, client: Any, tags: Mapping[str, str]) -> None:
        """Create a run with the settings as parameters.

        Args:
            tags: tags of the run besides those about this start.
        """
        from mlflow.entities import Param

        facts, parent = self._start.facts, self._entry.get("parent")
        described = {"layout": facts.get("layout"), "versions": facts.get("versions"), "parent_run": parent}
        all_tags = {name: json.dumps(value) for name, value in described.items() if value}
        all_tags |= {"command": shlex.join(facts.get("command") or ()), "mlflow.source.git.commit": _read_git_commit()}
        run = client.create_run(
            self._experiment_id,
            run_name=self._config.mlflow_run_name or self._start.name,
            tags={name: value[:_MAX_TAG_CHARACTERS] for name, value in {**all_tags, **tags}.items() if value},
        )
        self._run_id = run.info.run_id
        params = [Param(name, value[:_MAX_VALUE_CHARACTERS]) for name, value in flatten_settings(self._start.settings)]
        for some in _split(params, _MAX_PARAMS):
            client.log_batch(self._run_id, params=some)

    def _go_back(self, client: Any, iteration: int) -> None:
        """Continue after `iteration` in a new run that has the earlier points."""
        old_id = self._run_id
        try:
            self._copy_run(client, old_id, iteration)
        except Exception:
            self._run_id = old_id  # so that a repetition copies the same run
            raise
        client.delete_tag(old_id, _RUN_TAG)
        client.set_tag(old_id, "abandoned_after", str(iteration))
        client.set_tag(old_id, "continued_by_run", self._run_id)
        client.set_terminated(old_id, "KILLED")

    def _copy_run(self, client: Any, old_id: str, iteration: int) -> None:
        self._create_run(client, {"continues_run": old_id, "continues_after": str(iteration)})
        names = client.get_run(old_id).data.metrics
        points = (point for name in names for point in client.get_metric_history(old_id, name) if point.step <= iteration)
        for some in _split(points, _MAX_METRICS):
            client.log_batch(self._run_id, metrics=some)
        client.set_tag(self._run_id, _RUN_TAG, self._entry["id"])  # only now, so that a repetition does not find half a copy


def clean_name(name: str) -> str:
    """Return a name that MLflow accepts for a metric or a file: other characters become underscores."""
    text = re.sub(r"[^/\w.\- ]", "_", name)
    return posixpath.normpath("/" + text).lstrip("/")[:_MAX_KEY_CHARACTERS] or "_"


def _is_refusal(error: Exception, *, unknown: bool = False) -> bool:
    """Return whether the server or the package refuses a request, so that sending it again would not help.

    Args:
        unknown: result for an error that MLflow has not raised.
    """
    get_status = getattr(error, "get_http_status_code", None)
    return unknown if get_status is None else 400 <= get_status() < 500 and get_status() not in (408, 429)


def _read_git_commit() -> str:
    """Return the commit of the checkout that runs, or an empty text without one."""
    arguments = ["git", "-C", os.path.dirname(__file__), "rev-parse", "HEAD"]
    try:
        return subprocess.run(arguments, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _split(values: Iterable[T], size: int) -> Iterator[Sequence[T]]:
    iterator = iter(values)
    while some := list(islice(iterator, size)):
        yield some
