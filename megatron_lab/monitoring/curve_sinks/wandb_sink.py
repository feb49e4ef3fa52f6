"""Output of metrics to a run at Weights & Biases.

Step of each point is the iteration. The service drops points whose step is below the last one, so going back needs its own path:

- If the service has later points than the iteration from which the run starts, the run there is rewound (`resume_from` of
  wandb.init), which removes them. https://docs.wandb.ai/models/runs/rewind calls this a preview, which not every server has.
- Without it a new run begins, with a copy of the earlier points. Its configuration names the earlier run, and a tag of the earlier
  run says from where on its points are abandoned.
- Offline a new run begins too, unless the previous process ended regularly at this iteration. It has only the later points, because
  the package cannot read what it has written.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.config.optional_packages import import_optional
from megatron.config.outputs import LoggingConfig
from megatron.metrics.log_line import OutputStatus, RunEnd
from megatron_lab.monitoring.curve_sinks.run_links import Entry, RunStart, call_with_timeout, create_id, warn

_INIT_S, _COPY_S, _FINISH_S, _INTERRUPTED_S = 60.0, 120.0, 60.0, 15.0
"""Maximum seconds for the start of a run at the service, for copying the points of an earlier run, for the end of the run, and for
its end after a signal or an error."""


class WandB:
    """Output of metrics to a run at Weights & Biases. Metrics have the same names as in the metrics file (--metrics-file).

    A restart continues the run whose identifier is in the save folder. If the service cannot be reached, the package writes to its
    local folder, and `wandb sync` uploads later.

    Args:
        config: settings with the flags --wandb-...
        start: start of the run.

    Raises:
        ValueError: the package wandb is not installed, or the user is not logged in.
    """

    def __init__(self, config: LoggingConfig, start: RunStart) -> None:
        self._wandb: Any = import_optional("wandb", "--wandb-project needs the package wandb")
        self._config, self._start = config, start
        self._output = OutputStatus(f"--wandb-project {config.wandb_project}")
        self._last_iteration = start.iteration
        if config.wandb_save_dir is not None:
            Path(config.wandb_save_dir).mkdir(parents=True, exist_ok=True)  # the package does not make it
        self._check_login()
        target = {"project": config.wandb_project, "entity": config.wandb_entity}
        self._entry, is_continued = start.links.get_entry("wandb", target)
        ended_at = self._entry.pop("ended_at", None)
        start.links.store("wandb", self._entry)  # before the run exists, so that no start can lose it
        self._run = self._open(may_have_later_points=is_continued and ended_at != start.iteration)
        if is_continued and not self._is_offline and self._run.starting_step > start.iteration + 1:
            self._go_back(start.iteration)

    def log_scalars(self, iteration: int, samples: int, values: Mapping[str, float]) -> None:
        """Send the metrics of one iteration.

        Args:
            iteration: number of the iteration.
            samples: samples that the run has consumed so far.
            values: metrics by name.
        """
        self._log(iteration, {**values, "consumed_samples": samples})

    def log_text(self, iteration: int, samples: int, name: str, text: str) -> None:
        """Send a text. The service shows it in a panel with a slider over the iterations."""
        try:
            panel = self._wandb.Html(f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre>")
        except Exception as error:  # noqa: BLE001 - whatever the package raises
            self._output.report_failure(error)
        else:
            self._log(iteration, {name: panel})

    def rewind(self, iteration: int) -> None:
        """Remove the points of later iterations, or continue in a new run."""
        if iteration >= self._last_iteration:
            return
        self._last_iteration = iteration
        try:
            self._go_back(iteration)
        except Exception as error:  # noqa: BLE001 - whatever the package raises
            self._output.report_failure(error)

    def close(self, end: RunEnd = "finished") -> None:
        """Send metrics that are still in memory, and end the run at Weights & Biases. If this takes too long, the remaining data
        stays in the local folder of the package."""
        if end != "failed":
            self._start.links.store("wandb", self._entry | {"ended_at": self._last_iteration})
        if end == "stopped":  # shown as preempted, together with an exit code other than 0
            with suppress(Exception):
                self._run.mark_preempting()
        seconds = _FINISH_S if end == "finished" else _INTERRUPTED_S
        error = call_with_timeout(lambda: self._run.finish(exit_code=int(end != "finished")), seconds)
        if error is not None:
            warn(f"the run at Weights & Biases is not completely sent ({error}): `wandb sync {self._sync_folder}` sends it")

    @property
    def _is_offline(self) -> bool:
        return bool(self._run.offline)

    @property
    def _sync_folder(self) -> str:
        return os.path.dirname(self._run.dir)

    def _log(self, iteration: int, values: Mapping[str, Any]) -> None:
        self._last_iteration = max(self._last_iteration, iteration)
        try:
            # A resumed run accepts no step before the one after its last. An evaluation at the start of a run would be dropped.
            self._run.log(dict(values), step=max(iteration, self._run.starting_step))
        except Exception as error:  # noqa: BLE001 - whatever the package raises
            self._output.report_failure(error)
        else:
            self._output.report_success()

    def _check_login(self) -> None:
        """Refuse a run that is not logged in. The package would wait for an answer on a terminal."""
        if self._wandb.setup().settings.mode not in ("online", "run"):
            return
        try:
            is_logged_in = self._wandb.login(prompt=False, verify=False)
        except TypeError:  # an older package, which refuses only without a terminal
            return
        except Exception as error:
            raise self._explain(error) from error
        if not is_logged_in:
            raise self._explain("no API key is configured")

    def _explain(self, reason: object) -> ValueError:
        return ValueError(
            f"--wandb-project {self._config.wandb_project}: Weights & Biases refuses the run ({reason}). Run `wandb login` or set "
            "WANDB_API_KEY; or set WANDB_MODE=offline to write to a local folder, which `wandb sync` sends later."
        )

    def _open(self, *, may_have_later_points: bool = False) -> Any:
        """Start or continue the run at the service, or in a local folder if the package is offline or the service does not answer.

        Args:
            may_have_later_points: whether the run may have points after the iteration at which this process starts. Offline, where
                the package does not know them, a new run begins.
        """
        if self._wandb.setup().settings.mode in ("offline", "dryrun"):
            return self._open_offline(may_have_later_points)
        try:
            return self._init(id=self._entry["id"], resume="allow")
        except self._wandb.errors.UsageError as error:
            raise self._explain(error) from error
        except Exception as error:  # noqa: BLE001 - whatever the package raises
            reason = str(error) or type(error).__name__
        if "deleted" in reason:  # the service accepts the identifier of a deleted run never again
            self._replace_entry(None, "it was deleted at the service")
            with suppress(Exception):
                return self._init(id=self._entry["id"], resume="allow")
        self._wandb.teardown()  # else the package refuses the identifier, which the failed attempt uses
        run = self._open_offline(may_have_later_points)
        folder = os.path.dirname(run.dir)
        warn(f"Weights & Biases cannot be reached ({reason}): the run is written to {folder}, `wandb sync {folder}` sends it")
        return run

    def _open_offline(self, may_have_later_points: bool) -> Any:
        if may_have_later_points:
            self._replace_entry(self._start.iteration, "offline")
        return self._init(id=self._entry["id"], resume="allow", mode="offline")

    def _go_back(self, iteration: int) -> None:
        """Continue after `iteration` without the points of later iterations."""
        is_offline, old_id = self._is_offline, self._entry["id"]
        error = call_with_timeout(self._run.finish, _FINISH_S + _INTERRUPTED_S)  # longer than the package's own limit
        if not is_offline and error is None:
            try:
                self._run = self._init(id=old_id, resume_from=f"{old_id}?_step={iteration}")
                return
            except Exception as failure:  # noqa: BLE001 - whatever the package raises
                error = failure
        path = "/".join(filter(None, (self._config.wandb_entity, self._config.wandb_project, old_id)))
        self._replace_entry(iteration, "offline" if is_offline else f"the service cannot remove later points: {error}")
        self._run = self._open()
        if self._is_offline:
            return
        error = call_with_timeout(lambda: self._copy_points(path, iteration), _COPY_S)
        if error is not None:
            warn(f"Weights & Biases: the points before are only in the run {old_id}, because they cannot be copied ({error})")

    def _copy_points(self, path: str, iteration: int) -> None:
        """Copy the points of an earlier run up to `iteration` into the current run, and mark the earlier run.

        Args:
            path: the earlier run as `entity/project/id`, or `project/id` for the user's default entity.
        """
        old_run = self._wandb.Api().run(path)
        old_run.tags = [*old_run.tags, f"abandoned after {iteration}"]
        old_run.update()
        new_run = self._run
        for row in old_run.scan_history(max_step=iteration + 1):
            step, names = row["_step"], [name for name in row if not name.startswith("_")]
            # Numbers that JSON does not have are returned as texts; the value of a panel is a dictionary.
            values = {name: float(row[name]) for name in names if isinstance(row[name], int | float | str)}
            if step <= iteration:
                new_run.log(values, step=step)

    def _replace_entry(self, iteration: int | None, reason: str) -> None:
        """Replace the identifier of the run by that of a new run.

        Args:
            iteration: iteration after which the new run continues the earlier run; None if the earlier run is lost.
            reason: why the earlier run cannot continue, for the log.
        """
        old: Entry = self._entry
        link = {name: old[name] for name in ("id", "project", "entity")}
        self._entry = {**old, "id": create_id(), "parent": link | ({} if iteration is None else {"iteration": iteration})}
        self._start.links.store("wandb", self._entry)
        after = "" if iteration is None else f" after iteration {iteration}"
        warn(f"Weights & Biases: a new run {self._entry['id']} continues the run {old['id']}{after} ({reason})")

    def _init(self, **arguments: Any) -> Any:
        config, links = self._config, {"parent_run": self._entry["parent"]} if "parent" in self._entry else {}
        limits = {"init_timeout": _INIT_S, "finish_timeout": _FINISH_S}
        known = getattr(self._wandb.Settings, "model_fields", {})
        return self._wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity,
            dir=config.wandb_save_dir,
            config={**self._start.settings, **links},
            settings=self._wandb.Settings(**{name: value for name, value in limits.items() if name in known}),
            **arguments,
        )
