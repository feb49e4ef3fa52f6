"""Saving and loading without a process group."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_without_group(no_dist: bool) -> Iterator[None]:
    """Keep torch from warning that there is no process group where that is meant."""
    with warnings.catch_warnings():
        if no_dist:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
