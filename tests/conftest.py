"""Settings of every test run: one thread, no accelerator, repeatable examples, a share for each worker, and two options."""

from __future__ import annotations

import gc
import os
import signal
import sys

# Before torch is imported: thread pools that exist would be broken in the forked ranks, and a process
# that has touched CUDA cannot be forked at all. Set CUDA_VISIBLE_DEVICES to let tests see a GPU.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# Whatever the environment says: else each worker would rewrite and compile all test files anew in each run, which is half of their
# collection, and programs that tests start the framework's files.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What a shell starts in the background ignores Ctrl-C, and hands that on; tests send it to programs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Until all tests are collected: imports make objects that stay, and looking through them again and again finds nothing to free.
gc.disable()

from collections.abc import Generator  # noqa: E402 - after the environment
from pathlib import Path  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402

from tests.support import repeating  # noqa: E402
from tests.support.huge_pages import collapse_pages  # noqa: E402

hypothesis.settings.register_profile("quick", deadline=None, derandomize=True, print_blob=True, max_examples=20)
hypothesis.settings.register_profile("full", deadline=None, derandomize=True, print_blob=True, max_examples=500)


@pytest.fixture
def compiles_before_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test compile in this process, from which later tests fork ranks.

    Where a torch that is built with CUDA finds no GPU, the compiler's tensors without memory put a stand-in for one in place for
    good. Autograd starts a thread for it, and then no forked process can run a backward.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(FakeTensorMode, "avoid_device_init", False)


@pytest.fixture
def float32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute products of bfloat16 in float32 on every CPU.

    A CPU that multiplies bfloat16 itself uses up to 1.4 MB of scratch memory for a product, which no plan counts.
    """
    monkeypatch.setattr("megatron.parallel.matmul.has_fast_bfloat16", lambda: False)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --full and --piece."""
    parser.addoption("--full", action="store_true", help="run every case, not only a subset in which every pair of settings occurs")
    parser.addoption("--piece", metavar="K/N", help="run every N-th test, beginning with the K-th: N such runs are a whole one")


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """Start three processes for two cores with `-n auto`: where ranks wait for each other, another test has their core."""
    cores = yield
    return cores if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS") else (3 * cores + 1) // 2


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples property tests try."""
    hypothesis.settings.load_profile("full" if config.getoption("--full") else "quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose what runs, and in which order.

    Without --full, leave out what is marked so. Of the rest, take the piece that is asked for. Deal the files out to the workers,
    each of which begins with tests that follow one another, so that they begin with equal shares of each folder.
    """
    taken = [item for item in items if config.getoption("--full") or item.get_closest_marker("full") is None]
    if piece := config.getoption("--piece"):
        number, _, count = piece.partition("/")
        if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
            raise pytest.UsageError(f"--piece {piece}: give K/N, with K from 1 to N")
        taken = taken[int(number) - 1 :: int(count)]
    config.hook.pytest_deselected(items=[*{*items} - {*taken}])
    items[:] = taken
    places = {path: i for i, path in enumerate(dict.fromkeys(item.path for item in items))}
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    items.sort(key=lambda item: places[item.path] % workers)


def pytest_collection_finish() -> None:
    """From here on memory is looked through again, but for what is there now: neither tests nor forked ranks visit it."""
    gc.freeze()
    gc.enable()
    collapse_pages()


_files: list[Path] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Look after the memory that the tests before have added: this one may fork it, and need not look through it for garbage."""
    collapse_pages()
    if _files != [item.path]:
        _files[:] = [item.path]
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """Say last of all what failed, and how to repeat it. Workers say nothing."""
    yield
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    reports = [report for kind in ("failed", "error") for report in reporter.stats.get(kind, ())]
    if reports:
        failures = [(report.nodeid, report.longreprtext) for report in reports]
        for line in repeating.lines(failures, full=bool(config.getoption("--full"))):
            reporter.write_line(line)


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether every case runs."""
    return bool(request.config.getoption("--full"))
