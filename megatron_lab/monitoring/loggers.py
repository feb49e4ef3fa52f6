"""Outputs for the metrics of a run: a file of JSON lines, TensorBoard, and Weights & Biases. All implement `MetricSink`."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megatron.config.optional_packages import import_optional
from megatron.config.outputs import LoggingConfig
from megatron.config.version import get_extra_install_command
from megatron.metrics.log_line import LineFile, MetricSink, OutputStatus, compute_perplexity


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

    def close(self) -> None:
        """Close the metrics file."""
        self._file.close()


_MEGATRON_TAGS = {
    "lm_loss": "lm loss",
    "z_loss": "z loss",
    "mtp_loss": "mtp loss",
    "moe_z_loss": "router z loss",
    "busiest_expert": "busiest expert",
    "dropped_share": "share of choices dropped",
    "learning_rate": "learning-rate",
    "global_batch_size": "batch-size",
    "loss_scale": "loss-scale",
    "grad_norm": "grad-norm",
    "num_zeros": "num-zeros",
    "params_norm": "params-norm",
    "elapsed_ms": "iteration-time",
    "tflops_per_device": "throughput",
    "validation_loss": "lm loss validation",
    "validation_mtp_loss": "mtp loss validation",
    "test_loss": "lm loss test",
    "test_mtp_loss": "mtp loss test",
}
"""Megatron's TensorBoard tags by metric name. Other metrics keep their names, and are written by iteration only."""


_GROUPED_TAGS = {
    "lm_loss": "loss/training",
    "validation_loss": "loss/validation",
    "test_loss": "loss/test",
    "z_loss": "loss/z loss",
    "mtp_loss": "loss/training, multi-token",
    "validation_mtp_loss": "loss/validation, multi-token",
    "test_mtp_loss": "loss/test, multi-token",
    "spikes": "loss/spikes",
    "learning_rate": "optimizer/learning rate",
    "global_batch_size": "optimizer/batch size",
    "loss_scale": "optimizer/loss scale",
    "grad_norm": "optimizer/gradient norm",
    "num_zeros": "optimizer/zeros in the gradient",
    "params_norm": "optimizer/norm of the weights",
    "gradient_noise": "optimizer/noise scale of the gradient",
    "max_attention_logit": "optimizer/largest attention logit",
    "elapsed_ms": "speed/seconds a step",
    "tokens_per_s": "speed/tokens per second",
    "tflops_per_device": "speed/TFLOPs per second and device",
    "mfu": "speed/MFU",
    "goodput": "speed/goodput",
    "context_imbalance": "speed/context imbalance",
    "memory_bytes": "memory/most bytes of rank 0",
    "host_bytes": "memory/most bytes of its process",
    "mem-allocated-bytes": "memory/allocated bytes",
    "mem-max-allocated-bytes": "memory/most allocated bytes",
    "load_balancing_loss": "moe/load balancing loss",
    "moe_z_loss": "moe/router z loss",
    "busiest_expert": "moe/busiest expert",
    "dropped_share": "moe/share of choices dropped",
}
"""TensorBoard tags with groups, by metric name. TensorBoard shows the groups in alphabetical order, so the group `loss` comes
first."""
_GROUPS = {"memory": "memory", "busiest_expert": "moe", "grad-norm": "norms", "weight-norm": "norms"}
"""Groups of metrics that are named `prefix/module`. Other names go into the group `other`, and times into `times`."""


def get_grouped_tag(name: str) -> str:
    """Return the TensorBoard tag of a metric in the form `group/name`. TensorBoard shows the curves of a group together."""
    if name in _GROUPED_TAGS:
        return _GROUPED_TAGS[name]
    prefix, slash, suffix = name.partition("/")
    if slash:
        group = _GROUPS.get(prefix, "other")
        return f"{group}/{suffix}" if prefix == group else f"{group}/{prefix}, {suffix}"
    return f"times/{name.removesuffix('-time')}" if name.endswith("-time") else f"other/{name}"


class TensorBoard:
    """Output of metrics as TensorBoard curves.

    With --tensorboard-tags groups, each metric is one curve over iterations, under a tag `group/name` (`get_grouped_tag`). With
    --tensorboard-tags megatron, metrics have Megatron's tags. Each of these metrics is also written as a curve over samples (tag
    with the suffix ' vs samples'). Iteration times are in seconds.

    Args:
        folder: folder of the event files.
        tags: value of --tensorboard-tags.

    Raises:
        ValueError: the package tensorboard is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: str, tags: Literal["groups", "megatron"] = "groups") -> None:
        self._tags = tags
        import_optional("tensorboard", "--tensorboard-dir needs the package tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._create_writer = lambda: SummaryWriter(folder)
        self._output = OutputStatus(f"--tensorboard-dir {folder}")
        try:
            if "://" not in folder:
                os.makedirs(folder, exist_ok=True)
                if not os.access(folder, os.W_OK | os.X_OK):  # the thread of a writer would print a traceback
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
            self._writer: Any = self._create_writer()
        except OSError as error:
            raise ValueError(f"--tensorboard-dir {folder} cannot be written ({error.strerror}). Choose another folder.") from error

    def log_scalars(self, iteration: int, samples: int, values: Mapping[str, float]) -> None:
        """Add a point to the curve of each metric in `values`.

        Args:
            iteration: number of the iteration.
            samples: samples that the run has consumed so far.
            values: metrics by name.
        """
        try:
            # A writer whose thread failed raises from then on. A new one begins another file in the folder.
            self._writer = self._writer or self._create_writer()
            for name, value in values.items():
                self._add(name, value, iteration, samples)
        except OSError as error:
            self._output.report_failure(error)
            self._writer = None
        else:
            self._output.report_success()

    def close(self) -> None:
        """Write points that are still in memory to the event file, and close the file."""
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._output.report_failure(error)

    def _add(self, name: str, value: float, iteration: int, samples: int) -> None:
        value = value / 1000.0 if name == "elapsed_ms" else value
        if self._tags == "groups" or name not in _MEGATRON_TAGS:
            self._writer.add_scalar(get_grouped_tag(name) if self._tags == "groups" else name, value, iteration)
            return
        tag_of_name = _MEGATRON_TAGS[name]
        curves = {tag_of_name: value}
        if name in ("validation_loss", "test_loss"):
            curves[f"{tag_of_name} ppl"] = compute_perplexity(value)
        for tag, tag_value in curves.items():
            self._writer.add_scalar(tag, tag_value, iteration)
            self._writer.add_scalar(f"{tag} vs samples", tag_value, samples)


class WandB:
    """Output of metrics to a run at Weights & Biases. Metrics have the same names as in the metrics file (--metrics-file).

    Args:
        project: project of the run.
        name: name of the run. By default Weights & Biases generates a name.
        settings: configuration of the run, shown beside its curves.
        entity: team or user that owns the run.
        folder: folder for the local files of the package wandb.

    Raises:
        ValueError: the package wandb is not installed.
    """

    def __init__(
        self,
        project: str,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        entity: str | None = None,
        folder: str | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(f"--wandb-project needs the package wandb: {get_extra_install_command('wandb')}") from error
        self._output = OutputStatus(f"--wandb-project {project}")
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)  # the package does not make it
        self._run = wandb.init(project=project, name=name, config=dict(settings or {}), entity=entity, dir=folder)

    def log_scalars(self, iteration: int, samples: int, values: Mapping[str, float]) -> None:
        """Send the metrics of one iteration.

        Args:
            iteration: number of the iteration.
            samples: samples that the run has consumed so far.
            values: metrics by name.
        """
        try:
            self._run.log({**values, "consumed_samples": samples}, step=iteration)
        except Exception as error:  # noqa: BLE001 - whatever the package raises
            self._output.report_failure(error)
        else:
            self._output.report_success()

    def close(self) -> None:
        """Send metrics that are still in memory, and end the run at Weights & Biases."""
        self._run.finish()


def build_curve_sinks(config: LoggingConfig, settings: Mapping[str, Any] | None = None) -> list[MetricSink]:
    """Build the TensorBoard and Weights & Biases outputs that the settings enable.

    Args:
        settings: configuration of the run, shown by Weights & Biases.
    """
    sinks: list[MetricSink] = []
    if config.tensorboard_dir is not None:
        sinks.append(TensorBoard(config.tensorboard_dir, config.tensorboard_tags))
    if config.wandb_project is not None:
        sinks.append(WandB(config.wandb_project, config.wandb_exp_name, settings, config.wandb_entity, config.wandb_save_dir))
    return sinks
