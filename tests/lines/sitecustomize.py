"""Record the lines of `megatron/` that this process and its forks run. On the path of a run of `python -m tests.lines`."""

import os
import sys

_folder, _root = os.environ.get("TEST_LINES_FOLDER"), os.environ.get("TEST_LINES_ROOT", "")


def _record(code, line):  # type: ignore[no-untyped-def]
    """Write a line once for each process that meets it first; forks inherit what is written already."""
    name = code.co_filename
    if name.startswith(_root):
        with open(f"{_folder}/{os.getpid()}", "a") as file:
            file.write(f"{name[len(_root) :]}:{line}\n")
    return sys.monitoring.DISABLE


if _folder and sys.version_info >= (3, 12):
    sys.monitoring.use_tool_id(sys.monitoring.COVERAGE_ID, "tests.lines")
    sys.monitoring.register_callback(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE, _record)
    sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE)
