"""Writes the numbers of a run to a file of JSON lines, TensorBoard, Weights & Biases, all through one small interface."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megatron.config.extras import optional
from megatron.config.outputs import LoggingConfig
from megatron.config.version import how_to_install
from megatron.metrics.log_line import LineFile, Output, Sink, perplexity


class MetricsFile:
    """A file with one JSON object a line, with full digits, flushed at each line.

    JSON has no NaN and no infinity, and strict readers stop at them. Such a value is written as null, and the line then also has
    "nonfinite": true.

    Args:
        path: The file; its folder is made.
        append: Keep what is there (a resumed run) instead of beginning a new file.

    Raises:
        ValueError: The file cannot be written.
    """

    def __init__(self, path: str | Path, append: bool) -> None:
        self._file = LineFile("--metrics-file", path, append=append)

    def scalars(self, iteration: int, samples: int, values: Mapping[str, float]) -> None:
        """Write one line."""
        record: dict[str, Any] = {"iteration": iteration, "consumed_samples": samples}
        record |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        if not all(map(math.isfinite, values.values())):
            record["nonfinite"] = True
        self._file.write(json.dumps(record, allow_nan=False))

    def close(self) -> None:
        """Close the file."""
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
"""Megatron's TensorBoard tags. Other names are used as they are, by iteration only."""


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
"""Names of the curves by groups, of which TensorBoard shows the first in the alphabet first: the loss."""
_GROUPS = {"memory": "memory", "busiest_expert": "moe", "grad-norm": "norms", "weight-norm": "norms"}
"""The groups of names with a part of the model behind a stroke. What else there is stands under `other`, times under `times`."""


def grouped_tag(name: str) -> str:
    """The curve of a name, with its group."""
    if name in _GROUPED_TAGS:
        return _GROUPED_TAGS[name]
    head, stroke, part = name.partition("/")
    if stroke:
        group = _GROUPS.get(head, "other")
        return f"{group}/{part}" if head == group else f"{group}/{head}, {part}"
    return f"times/{name.removesuffix('-time')}" if name.endswith("-time") else f"other/{name}"


class TensorBoard:
    """Curves by iteration: each number once, in groups (`grouped_tag`); or with Megatron's tags, there also by samples
    (' vs samples'). Times of iterations are in seconds.

    Args:
        folder: Where the event files go.
        tags: Of --tensorboard-tags.

    Raises:
        ValueError: The package tensorboard is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: str, tags: Literal["groups", "megatron"] = "groups") -> None:
        self._tags = tags
        optional("tensorboard", "--tensorboard-dir needs the package tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._make = lambda: SummaryWriter(folder)
        self._output = Output(f"--tensorboard-dir {folder}")
        try:
            self._writer: Any = self._make()
        except OSError as error:
            raise ValueError(f"--tensorboard-dir {folder} cannot be written ({error.strerror}).") from error

    def scalars(self, iteration: int, samples: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        try:
            # A writer whose thread failed raises from then on. A new one begins another file in the folder.
            self._writer = self._writer or self._make()
            for name, value in values.items():
                self._add(name, value, iteration, samples)
        except OSError as error:
            self._output.failed(error)
            self._writer = None
        else:
            self._output.works()

    def close(self) -> None:
        """Write what is still in memory."""
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._output.failed(error)

    def _add(self, name: str, value: float, iteration: int, samples: int) -> None:
        value = value / 1000.0 if name == "elapsed_ms" else value
        if self._tags == "groups" or name not in _MEGATRON_TAGS:
            self._writer.add_scalar(grouped_tag(name) if self._tags == "groups" else name, value, iteration)
            return
        tag_of_name = _MEGATRON_TAGS[name]
        curves = {tag_of_name: value}
        if name in ("validation_loss", "test_loss"):
            curves[f"{tag_of_name} ppl"] = perplexity(value)
        for tag, number in curves.items():
            self._writer.add_scalar(tag, number, iteration)
            self._writer.add_scalar(f"{tag} vs samples", number, samples)


class WandB:
    """A run at Weights & Biases, with the names of the metrics file.

    Args:
        project: Project of the run.
        name: Name of the run; by default Weights & Biases invents one.
        settings: The run's configuration, shown beside its curves.
        entity: Team or user that the run belongs to.
        folder: Where the package writes files.

    Raises:
        ValueError: The package wandb is not installed.
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
            raise ValueError(f"--wandb-project needs the package wandb: {how_to_install('wandb')}") from error
        self._output = Output(f"--wandb-project {project}")
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)  # the package does not make it
        self._run = wandb.init(project=project, name=name, config=dict(settings or {}), entity=entity, dir=folder)

    def scalars(self, iteration: int, samples: int, values: Mapping[str, float]) -> None:
        """Send the values of one iteration."""
        try:
            self._run.log({**values, "consumed_samples": samples}, step=iteration)
        except Exception as error:  # noqa: BLE001 - whatever the package raises
            self._output.failed(error)
        else:
            self._output.works()

    def close(self) -> None:
        """Send what is still in memory and end the run."""
        self._run.finish()


def curve_sinks(config: LoggingConfig, settings: Mapping[str, Any] | None = None) -> list[Sink]:
    """TensorBoard and Weights & Biases, where the settings ask for them. `settings` is the run's configuration."""
    sinks: list[Sink] = []
    if config.tensorboard_dir is not None:
        sinks.append(TensorBoard(config.tensorboard_dir, config.tensorboard_tags))
    if config.wandb_project is not None:
        sinks.append(WandB(config.wandb_project, config.wandb_exp_name, settings, config.wandb_entity, config.wandb_save_dir))
    return sinks
