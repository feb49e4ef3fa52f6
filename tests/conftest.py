"""Settings of every test run: one thread, no accelerator, repeatable examples, and the option --full."""

from __future__ import annotations

import os

# Before torch is imported: thread pools that exist would be broken in the forked ranks, and a process
# that has touched CUDA cannot be forked at all. Set CUDA_VISIBLE_DEVICES to let tests see a GPU.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

hypothesis.settings.register_profile("quick", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.register_profile("full", deadline=None, derandomize=True, max_examples=500)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --full: every case of the large products instead of a subset in which every pair of settings occurs."""
    parser.addoption("--full", action="store_true", help="run every case, not only the covering subset")


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples property tests try."""
    hypothesis.settings.load_profile("full" if config.getoption("--full") else "quick")


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether every case runs."""
    return bool(request.config.getoption("--full"))
