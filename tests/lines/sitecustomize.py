"""Record the lines of the repository that this process and its forks run. On the path of a run of `python -m tests.lines`."""

import os
import sys

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_open, _write, _close, _getpid = os.open, os.write, os.close, os.getpid  # tests put others in their place
_folder, _root = os.environ.get("TEST_LINES_FOLDER"), os.environ.get("TEST_LINES_ROOT", "")


def _record(code, line):  # type: ignore[no-untyped-def]
    """Write a line once for each process that meets it first; forks inherit what is written already.

    A test may limit files, their sizes, memory or the depth of calls: what cannot be written is asked for again the next time.
    """
    name = code.co_filename
    if name.startswith(_root):
        text = f"\n{name[len(_root) :]}:{line};".encode()
        try:
            file = _open(f"{_folder}/{_getpid()}", _FLAGS, 0o644)
            try:
                whole = _write(file, text) == len(text)
            finally:
                _close(file)
        except (OSError, MemoryError, RecursionError):
            whole = False
        if not whole:
            return None
    return sys.monitoring.DISABLE


if _folder and sys.version_info >= (3, 12):
    sys.monitoring.use_tool_id(sys.monitoring.COVERAGE_ID, "tests.lines")
    sys.monitoring.register_callback(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE, _record)
    sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE)
