"""Output of metrics as TensorBoard curves."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from megatron.config.optional_packages import import_optional
from megatron.metrics.log_line import OutputStatus, RunEnd, compute_perplexity

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
_LOSSES_OF_SETS = ("validation_loss", "validation_mtp_loss", "test_loss", "test_mtp_loss")
"""Losses that are named `loss/set` if there are several sets."""
_GROUPS = {"memory": "memory", "busiest_expert": "moe", "grad-norm": "norms", "weight-norm": "norms"}
"""Groups of metrics that are named `prefix/module`. Other names go into the group `other`, and times into `times`."""


def get_grouped_tag(name: str) -> str:
    """Return the TensorBoard tag of a metric in the form `group/name`. TensorBoard shows the curves of a group together."""
    if name in _GROUPED_TAGS:
        return _GROUPED_TAGS[name]
    prefix, slash, suffix = name.partition("/")
    if slash:
        if prefix in _LOSSES_OF_SETS:
            return f"{_GROUPED_TAGS[prefix]}, {suffix}"
        group = _GROUPS.get(prefix, "other")
        return f"{group}/{suffix}" if prefix == group else f"{group}/{prefix}, {suffix}"
    return f"times/{name.removesuffix('-time')}" if name.endswith("-time") else f"other/{name}"


def create_folder(folder: str) -> None:
    """Create the folder of the event files, unless it is a URL.

    Raises:
        ValueError: the folder cannot be written.
    """
    if "://" in folder:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):  # the thread of a writer would print a traceback
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
    except OSError as error:
        raise _explain(folder, error) from error


def _explain(folder: str, error: OSError) -> ValueError:
    return ValueError(f"--tensorboard-dir {folder} cannot be written ({error.strerror}). Choose another folder.")


class TensorBoard:
    """Output of metrics as TensorBoard curves.

    With --tensorboard-tags groups, each metric is one curve over iterations, under a tag `group/name` (`get_grouped_tag`). With
    --tensorboard-tags megatron, metrics have Megatron's tags. Each of these metrics is also written as a curve over samples (tag
    with the suffix ' vs samples'). Iteration times are in seconds.

    Points that the folder already has for later iterations belong to steps that the run has abandoned, and they disappear. With the
    tags `groups`, an event at the start of the file removes them (`purge_step` of torch's SummaryWriter). With Megatron's tags this
    event would also remove curves over samples. There, TensorBoard itself removes the points of a curve from the iteration on at
    which the curve goes back.

    Args:
        folder: folder of the event files.
        tags: value of --tensorboard-tags.
        first_iteration: iteration of the run's first step.

    Raises:
        ValueError: the package tensorboard is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: str, tags: Literal["groups", "megatron"] = "groups", *, first_iteration: int = 1) -> None:
        self._tags = tags
        import_optional("tensorboard", "--tensorboard-dir needs the package tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer_class = SummaryWriter
        self._folder = folder
        self._output = OutputStatus(f"--tensorboard-dir {folder}")
        create_folder(folder)
        try:
            self._writer: Any = self._create_writer(first_iteration)
        except OSError as error:
            raise _explain(folder, error) from error

    def log_scalars(self, iteration: int, samples: int, values: Mapping[str, float]) -> None:
        """Add a point to the curve of each metric in `values`.

        Args:
            iteration: number of the iteration.
            samples: samples that the run has consumed so far.
            values: metrics by name.
        """
        curves = [curve for name, value in values.items() for curve in self._get_curves(name, value, iteration, samples)]
        self._write(lambda writer: [writer.add_scalar(*curve) for curve in curves])

    def log_text(self, iteration: int, samples: int, name: str, text: str) -> None:
        """Add a text to the texts with this name. Its lines are shown as they are, without Markdown."""
        lines = "".join(f"    {line}\n" for line in text.splitlines()) or text
        self._write(lambda writer: writer.add_text(name, lines, iteration))

    def rewind(self, iteration: int) -> None:
        """Continue in a new file, which removes the points of later iterations."""
        self.close()
        try:
            self._writer = self._create_writer(iteration + 1)
        except OSError as error:
            self._output.report_failure(error)
            self._writer = None

    def close(self, end: RunEnd = "finished") -> None:
        """Write points that are still in memory to the event file, and close the file."""
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._output.report_failure(error)

    def _get_curves(self, name: str, value: float, iteration: int, samples: int) -> list[tuple[str, float, int]]:
        """Return the points (tag, value, step) for a metric."""
        value = value / 1000.0 if name == "elapsed_ms" else value
        loss, _, data_set = name.partition("/")
        tag = _MEGATRON_TAGS.get(name) or (f"{_MEGATRON_TAGS[loss]}-{data_set}" if loss in _LOSSES_OF_SETS else None)
        if self._tags == "groups" or tag is None:
            return [(get_grouped_tag(name) if self._tags == "groups" else name, value, iteration)]
        curves = {tag: value}
        if loss in ("validation_loss", "test_loss"):
            curves[f"{tag} ppl"] = compute_perplexity(value)
        points = [((tag, value, iteration), (f"{tag} vs samples", value, samples)) for tag, value in curves.items()]
        return [point for pair in points for point in pair]

    def _create_writer(self, first_iteration: int | None = None) -> Any:
        """Open a new event file.

        Args:
            first_iteration: iteration from which on earlier files have no valid points; None to keep all their points.
        """
        return self._writer_class(self._folder, purge_step=first_iteration if self._tags == "groups" else None)

    def _write(self, add: Callable[[Any], object]) -> None:
        try:
            # A writer whose thread failed raises from then on. A new one begins another file in the folder.
            self._writer = self._writer or self._create_writer()
            add(self._writer)
        except OSError as error:
            self._output.report_failure(error)
            self._writer = None
        else:
            self._output.report_success()
