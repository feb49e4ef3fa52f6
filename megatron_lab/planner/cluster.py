"""Descriptions of clusters, one YAML file each: peak rates of devices and links, and the fraction of each rate that long-running
work achieves.

The files name the source of each rate. The fractions are fitted to published runs (docs/planning.md), or measured on the machine by
`tools/check_cluster.py --measure`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from megatron.config.errors import ConfigError, Violation
from megatron.config.optional_packages import import_optional
from megatron.config.regular_file import read_text
from megatron.metrics.measures import get_peak_flops

_FOLDER = "clusters"
DEFAULT_CLUSTER = "h100"
"""Cluster for which a plan predicts times if neither the settings nor this machine's GPU select one."""
_CALIBRATED_SIZES = ("ranks", "tensor", "pipeline", "context", "expert")
_SCALARS = {float: (int, float), int: (int,), str: (str,)}


@dataclass(frozen=True)
class Efficiency:
    """Fractions of the manufacturer's rates that long-running work achieves; 1 is the full rate."""

    products: Mapping[str, float]
    """Fraction of the peak FLOP/s that large matrix products reach, by their dtype ("bfloat16", "float8"). The peak is that of the
    dtype."""
    attention: float
    """Fraction of the peak FLOP/s, in the model's dtype, that the forward of attention kernels reaches."""
    attention_backward: float
    """Fraction of the peak FLOP/s that the backward of attention kernels reaches. The FLOPs that recompute the attention scores are
    not counted."""
    memory: float
    """Fraction of the memory bandwidth that memory-bound kernels reach."""
    state: float = 0.0
    """Fraction of the memory bandwidth that the optimizer step reaches; 0 means the same fraction as `memory`. The fractions
    differ on
    CPUs, whose caches hold a layer's tensors but not the optimizer state."""
    node: float = 0.8
    """Fraction of the bandwidth between the devices of a node that collectives inside the node reach."""
    network: float = 0.8
    """Fraction of the network's bandwidth that collectives between nodes reach."""


@dataclass(frozen=True)
class Cluster:
    """Hardware for which times are predicted: the device type, its memory and rates, and the links between devices.

    A GB is 10^9 bytes. Link rates count one direction.
    """

    name: str
    device: str
    """Name of the device in torch. If `peak_tflops` lacks a dtype, its peak rate is looked up by this name in the built-in
    table of devices (`get_peak_flops`)."""
    memory_gb: float
    memory_gb_s: float
    """Memory bandwidth of a device in GB/s."""
    gpus_per_node: int
    """Number of devices of a node, which are connected by the fast links."""
    node_gb_s: float
    """Rate in GB/s at which one device sends to other devices of its node."""
    network_gb_s: float
    """Rate in GB/s at which one device sends to other nodes."""
    reached: Efficiency
    peak_tflops: Mapping[str, float] = field(default_factory=dict)
    """Peak rates in TFLOP/s by dtype, without sparsity: measured rates, and rates that the built-in table of devices lacks."""
    node_us: float = 4.0
    """Latency in microseconds of one step of a collective inside a node."""
    network_us: float = 12.0
    """Latency in microseconds of one step of a collective between nodes."""
    operations: Mapping[str, float] = field(default_factory=dict)
    """Rate of a communication type ("all-gather", "reduce-scatter", "all-to-all", "send") as a multiple of the rate of
    all-reduce. Types that are missing have the rate of all-reduce."""
    host_gb_s: float = 25.0
    """Bandwidth in GB/s between a device and host memory."""
    fresh_gb_s: float = 0.0
    """Rate in GB/s at which an operation allocates memory that was not in use before. The time of the allocation is added to that
    of the operation; the rate is fitted to measured forwards on CPUs. 0: allocation takes no time."""
    kernel_us: float = 3.0
    """Time in microseconds from the end of one kernel to the start of the next. It is added to the time of each kernel."""
    host_us: float = 9.0
    """Time in microseconds in which the host launches a kernel, including the Python code. A device that finishes the previous
    kernel earlier waits."""
    product_us: float = 5.0
    """Time in microseconds until a matrix product occupies the full device. It is added to the time of each product."""
    hidden: float = 0.85
    """Fraction of the computation's time during which overlapped communication costs no extra time. For messages between pipeline
    stages: fraction of the messages' own time that costs no extra time."""
    step_ms: float = 5.0
    """Time per step, in milliseconds, in addition to its operations: waiting for the slowest rank, and reductions of scalars
    over all ranks."""
    spread: float = 0.1
    """Standard deviation of log(measured time / predicted time) over the runs to which the constants of this cluster were fitted.
    The range of a predicted step time follows from it."""
    calibrated: Mapping[str, float] = field(default_factory=dict)
    """Largest number of ranks, and of tensor, pipeline, context and expert ranks, in the runs to which the fractions in
    `Efficiency` were fitted. A plan lists the sizes of a layout that exceed these. Empty if not known."""
    shared_by: int = 0
    """Number of devices of a node that can compute at the same time, if the node has more ranks than that and they share the
    devices. 0: each rank has its own device. (The CPUs of a machine count as one device per core.)"""

    def get_peak_flops(self, dtype: str) -> float:
        """Return the peak rate of a dtype in FLOP/s, without sparsity.

        Raises:
            ConfigError: neither this cluster nor the built-in table of devices has a peak rate for this dtype.
        """
        peak = self._find_peak(dtype)
        if peak is None:
            raise ConfigError(
                [
                    Violation(
                        (),
                        f"the peak rate of {self.device} in {dtype} is not known.",
                        f"Write peak_tflops: {{{dtype}: ...}} into the cluster file.",
                    )
                ]
            )
        return peak

    def has_peak(self, dtype: str) -> bool:
        """Return whether this cluster or the built-in table of devices has a peak rate for this dtype."""
        return self._find_peak(dtype) is not None

    def _find_peak(self, dtype: str) -> float | None:
        return self.peak_tflops[dtype] * 1e12 if dtype in self.peak_tflops else get_peak_flops(self.device, dtype)

    def to_yaml(self) -> str:
        """Return the text of a cluster file (YAML) with the values of this cluster."""
        text: str = import_optional("yaml", "a file of a cluster needs PyYAML").safe_dump(asdict(self), sort_keys=False)
        return text


def list_cluster_names() -> list[str]:
    """Return the names of the clusters that are shipped with this package."""
    folder = resources.files("megatron_lab.planner") / _FOLDER
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def find_shipped_name(device: str) -> str | None:
    """Return the name of the cluster that is shipped with this package and whose devices torch calls `device`. Returns None if
    there is no such cluster."""
    return next((name for name in list_cluster_names() if load_cluster(name).device == device), None)


def load_shipped_cluster(device: str) -> Cluster | None:
    """Load the cluster that is shipped with this package and whose devices torch calls `device`. Returns None if there is no such
    cluster."""
    name = find_shipped_name(device)
    return None if name is None else load_cluster(name)


def load_cluster(name: str) -> Cluster:
    """Load the description of a cluster.

    Args:
        name: name of a cluster that is shipped with this package, or path of a cluster file.

    Raises:
        ConfigError: no such cluster exists, or the file does not describe a cluster.
    """
    if name in list_cluster_names():
        text = (resources.files("megatron_lab.planner") / _FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    elif os.path.isfile(name):
        try:
            text = read_text(Path(name), max_bytes=1_000_000)
        except (OSError, UnicodeDecodeError) as error:
            reason = "it is not text in UTF-8" if isinstance(error, ValueError) else error.strerror
            raise ConfigError(
                [Violation((), f"the cluster file {name} cannot be read: {reason}.", "Give the path of a cluster file.")]
            ) from error
    else:
        matches = difflib.get_close_matches(name, list_cluster_names(), n=1)
        hint = f" Did you mean {matches[0]}?" if matches else ""
        raise ConfigError(
            [
                Violation(
                    (),
                    f"there is no cluster {name}.",
                    f"Give one of {', '.join(list_cluster_names())}, or the path of a cluster file.{hint}",
                )
            ]
        )
    yaml = import_optional("yaml", f"the file of the cluster {name} needs PyYAML")
    try:
        return _parse_dataclass(Cluster, yaml.safe_load(text), name)
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ConfigError(
            [
                Violation(
                    (),
                    f"the cluster file {name} is not valid YAML: {error}. Correct it."
                    if isinstance(error, yaml.YAMLError)
                    else f"the cluster file is not valid: {error}",
                    "Or write a new cluster file with tools/check_cluster.py --measure.",
                )
            ]
        ) from None


def _parse_dataclass(dataclass_type: type[Any], data: object, path: str) -> Any:
    """Build a `Cluster` or `Efficiency` from parsed YAML.

    Args:
        path: file and key from which `data` was read, for error messages.

    Raises:
        ValueError: a field is missing, unknown, or has an invalid value.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{path} must be a table. Write lines of the form key: value.")
    known_fields = {f.name: f for f in fields(dataclass_type)}
    types = get_type_hints(dataclass_type)
    if unknown := sorted(set(map(str, data)) - set(known_fields)):
        matches = difflib.get_close_matches(unknown[0], known_fields, n=1)
        raise ValueError(
            f"{path} has no field {unknown[0]}{f' (is {matches[0]} meant?)' if matches else ''}. Remove it or correct its name."
        )
    if missing := [n for n, f in known_fields.items() if n not in data and f.default is MISSING and f.default_factory is MISSING]:
        raise ValueError(f"{path} lacks {', '.join(missing)}. Add these fields.")
    return dataclass_type(**{name: _parse_value(types[name], value, f"{path}: {name}") for name, value in data.items()})


def _parse_value(value_type: Any, value: object, path: str) -> object:
    if value_type is Efficiency:
        return _parse_dataclass(Efficiency, value, path)
    if value_type not in _SCALARS:
        if not isinstance(value, Mapping):
            raise ValueError(f"{path} must be a table of numbers. Write it as in {{bfloat16: 0.7}}.")
        if path.endswith(": calibrated") and (unknown := set(value) - set(_CALIBRATED_SIZES)):
            raise ValueError(
                f"{path} has unknown keys {', '.join(map(str, unknown))}. Remove them; allowed keys: "
                f"{', '.join(_CALIBRATED_SIZES)}."
            )
        return {str(key): _parse_value(float, item, f"{path}.{key}") for key, item in value.items()}
    if not isinstance(value, _SCALARS[value_type]) or isinstance(value, bool):
        raise ValueError(
            f"{path} is {value!r}, but must be "
            f"{'text' if value_type is str else 'an integer' if value_type is int else 'a number'}. Correct this entry."
        )
    if not isinstance(value, str) and not 0 <= float(value) < 1e9:
        raise ValueError(f"{path} is {value}, but must be at least 0 and below 1e9. Correct this entry.")
    return value
