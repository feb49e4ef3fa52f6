"""Measured times of a model's layers, embedding and loss, as --profile-pipeline writes them and --layer-costs reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.config.regular_file import read_text

_FORM = '{"layers": [ms, ...], "embedding": ms, "loss": ms}'


@dataclass(frozen=True)
class LayerCosts:
    """Milliseconds of one microbatch, forward and backward."""

    layers: tuple[float, ...]
    """Those of each layer, in the order of the depth."""
    embedding: float
    """What is before the first layer."""
    loss: float
    """What is behind the last: norm, output layer and loss, and the depths of multi-token prediction."""

    def of_kinds(self, kinds: Sequence[Hashable]) -> tuple[float, ...]:
        """The cost of each layer, where layers of one kind cost the same: their mean. So noise does not move the split."""
        found: dict[Hashable, list[float]] = {}
        for kind, cost in zip(kinds, self.layers, strict=True):
            found.setdefault(kind, []).append(cost)
        return tuple(math.fsum(found[kind]) / len(found[kind]) for kind in kinds)

    def write(self, path: Path) -> None:
        """As JSON.

        Raises:
            OSError: it cannot be written.
        """
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def read_layer_costs(path: str) -> LayerCosts:
    """The costs in a file.

    Raises:
        ValueError: it cannot be read, or holds something else.
    """
    flag = f"--layer-costs {path}"
    try:
        found = json.loads(read_text(Path(path)))
    except OSError as error:
        raise ValueError(f"{flag} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag} is no JSON: {error}.") from error
    if not isinstance(found, dict) or set(found) != {"layers", "embedding", "loss"} or not isinstance(found["layers"], list):
        raise ValueError(f"{flag} does not hold {_FORM}.")
    numbers = [*found["layers"], found["embedding"], found["loss"]]
    if not all(isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one) and one >= 0 for one in numbers):
        raise ValueError(f"{flag} has a time that is no number from 0 on.")
    if not sum(found["layers"]):
        raise ValueError(f"{flag} has no layer that takes time.")
    return LayerCosts(tuple(map(float, found["layers"])), float(found["embedding"]), float(found["loss"]))
