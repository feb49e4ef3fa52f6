"""What a cluster's devices and links do: figures of makers, and the share of each that long work reaches. One file each (YAML).

Figures come with their source in the files. The shares are fitted to published runs (docs/planning.md), or measured on the machine
itself by `tools/check_cluster.py --measure`.
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
from megatron.config.extras import optional
from megatron.config.regular_file import read_text
from megatron.metrics.measures import peak_flops

_FOLDER = "clusters"
DEFAULT = "h100"
"""The cluster of plans where none is named."""
_SIZES = ("ranks", "tensor", "pipeline", "context", "expert")
_SCALARS = {float: (int, float), int: (int,), str: (str,)}


@dataclass(frozen=True)
class Reached:
    """The share of a maker's figure that long work reaches; 1 is all of it."""

    products: Mapping[str, float]
    """Large matrix products, of the peak of their dtype (bfloat16, float8)."""
    attention: float
    """Attention's forward, of the peak of the model's dtype."""
    attention_backward: float
    """Its backward; the scores that it makes again are not counted as work."""
    memory: float
    """Kernels that go through the memory, of its bandwidth."""
    state: float = 0.0
    """The same by the optimizer's step; 0: as other kernels. (A CPU keeps a layer's tensors in caches, but not the state.)"""
    node: float = 0.8
    """Collectives, of a link inside a node."""
    network: float = 0.8
    """Collectives, of a link between nodes."""


@dataclass(frozen=True)
class Cluster:
    """A kind of device, its memory, and the links between many of them. GB are 10^9 bytes; links count one direction."""

    name: str
    device: str
    """As torch names it; peaks that are not given are looked up by it."""
    memory_gb: float
    memory_gb_s: float
    """Bandwidth of a device's memory."""
    gpus_per_node: int
    """Devices that reach each other by the fast links."""
    node_gb_s: float
    """What one device sends to the others of its node."""
    network_gb_s: float
    """What one device sends to other nodes."""
    reached: Reached
    peak_tflops: Mapping[str, float] = field(default_factory=dict)
    """Dense peaks by dtype, where the table of devices does not know them or they are measured."""
    node_us: float = 4.0
    """Latency of a step of a collective inside a node."""
    network_us: float = 12.0
    """Latency of one between nodes."""
    operations: Mapping[str, float] = field(default_factory=dict)
    """Rates of kinds of collectives (all-gather, reduce-scatter, all-to-all, send) over an all-reduce's, where they differ."""
    host_gb_s: float = 25.0
    """Between a device and its host's memory."""
    fresh_gb_s: float = 0.0
    """Rate at which an operation takes memory beside what there was: a term that is fitted, to forwards on CPUs. 0: no time."""
    kernel_us: float = 3.0
    """What each kernel takes beside its work: from the end of one to the begin of the next."""
    host_us: float = 9.0
    """What the host takes to launch a kernel, with Python's part. A device that is faster waits."""
    product_us: float = 5.0
    """What a product takes until all of the device works on it."""
    hidden: float = 0.85
    """The share of what is sent beside computing that this hides."""
    step_ms: float = 5.0
    """What a step takes beside its operations: waiting for the slowest rank, the numbers that all agree on."""
    spread: float = 0.1
    """Standard deviation of the logarithm of measured over predicted time, where such layouts were calibrated."""
    calibrated: Mapping[str, float] = field(default_factory=dict)
    """The most ranks, and tensor, pipeline, context and expert ranks, of the runs that the shares were fitted to. Empty: it is not
    told."""
    shared_by: int = 0
    """Devices of a node that compute at once; ranks beyond them share. 0: all (a machine's CPUs have one device a core)."""

    def peak(self, dtype: str) -> float:
        """Dense peak in FLOP/s.

        Raises:
            ConfigError: it is known neither here nor in the table of devices.
        """
        found = self._peak(dtype)
        if found is None:
            raise ConfigError(
                [
                    Violation(
                        (), f"the peak of {self.device} in {dtype} is not known.", f"Write peak_tflops: {{{dtype}: ...}} in it."
                    )
                ]
            )
        return found

    def knows(self, dtype: str) -> bool:
        """Whether the peak is known."""
        return self._peak(dtype) is not None

    def _peak(self, dtype: str) -> float | None:
        return self.peak_tflops[dtype] * 1e12 if dtype in self.peak_tflops else peak_flops(self.device, dtype)

    def yaml(self) -> str:
        """As a file."""
        text: str = optional("yaml", "a file of a cluster needs PyYAML").safe_dump(asdict(self), sort_keys=False)
        return text


def cluster_names() -> list[str]:
    """Names of the clusters that are shipped."""
    folder = resources.files("megatron_lab.planner") / _FOLDER
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def shipped_name(device: str) -> str | None:
    """Return the name of the shipped cluster file for a device, given torch's name of the device. None if no file is for it."""
    return next((name for name in cluster_names() if load_cluster(name).device == device), None)


def shipped_for(device: str) -> Cluster | None:
    """The shipped cluster of a device, by torch's name of it; None if there is none."""
    name = shipped_name(device)
    return None if name is None else load_cluster(name)


def load_cluster(name: str) -> Cluster:
    """A cluster by its name among those that are shipped, or by the path of a file.

    Raises:
        ConfigError: there is none, or the file does not describe one.
    """
    if name in cluster_names():
        text = (resources.files("megatron_lab.planner") / _FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    elif os.path.isfile(name):
        text = read_text(Path(name), most=1_000_000)
    else:
        near = difflib.get_close_matches(name, cluster_names(), n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            [Violation((), f"there is no cluster {name}.", f"Known: {', '.join(cluster_names())}; or a file.{meant}")]
        )
    yaml = optional("yaml", f"the file of the cluster {name} needs PyYAML")
    try:
        return _read(Cluster, yaml.safe_load(text), name)
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ConfigError(
            [Violation((), f"{name} does not describe a cluster: {error}", "tools/check_cluster.py --measure writes one.")]
        ) from None


def _read(kind: type[Any], given: object, where: str) -> Any:
    """A dataclass of what a file says.

    Raises:
        ValueError: a field is missing, unknown, or not a number that it can be.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} is not a table of fields.")
    known = {one.name: one for one in fields(kind)}
    types = get_type_hints(kind)
    if unknown := sorted(set(map(str, given)) - set(known)):
        near = difflib.get_close_matches(unknown[0], known, n=1)
        raise ValueError(f"{where} has no field {unknown[0]}{f' (is {near[0]} meant?)' if near else ''}.")
    if missing := [n for n, one in known.items() if n not in given and one.default is MISSING and one.default_factory is MISSING]:
        raise ValueError(f"{where} lacks {', '.join(missing)}.")
    return kind(**{name: _value(types[name], value, f"{where}: {name}") for name, value in given.items()})


def _value(kind: Any, value: object, where: str) -> object:
    if kind is Reached:
        return _read(Reached, value, where)
    if kind not in _SCALARS:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} is not a table of numbers by dtype.")
        if where.endswith(": calibrated") and (unknown := set(value) - set(_SIZES)):
            raise ValueError(f"{where} has {', '.join(map(str, unknown))}; it may have {', '.join(_SIZES)}.")
        return {str(key): _value(float, number, f"{where}.{key}") for key, number in value.items()}
    if not isinstance(value, _SCALARS[kind]) or isinstance(value, bool):
        raise ValueError(f"{where} is {value!r}, which is no {kind.__name__}.")
    if not isinstance(value, str) and not 0 <= float(value) < 1e9:
        raise ValueError(f"{where} is {value}, which is out of range.")
    return value
