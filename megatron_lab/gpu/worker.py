"""Process that runs checks, one after another: `python -m megatron_lab.gpu.worker DEVICE FOLDER RESULT_FD`.

The process reads requests from its standard input, one JSON line each, with the name of a check and the data of earlier checks. It
writes a JSON line to the file descriptor RESULT_FD for each partial result and for the end of each check. All checks share one
import of torch and one CUDA context. If an exception leaves the CUDA context unusable, the process ends, and `session.py` starts
another.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from megatron_lab.gpu.checks import CHECKS, Check
from megatron_lab.gpu.context import CheckContext, CheckFailed, DoesNotFit, Outcome

_LOG_LINES, _MESSAGE_LINES = 40, 5
"""Lines that the result of a crash includes: the last lines of the traceback, and the first lines of the error message."""


def main(device: str, folder: str, result_fd: str) -> None:
    """Run each check that is requested on the standard input, until the input ends. On SIGUSR1, print the stacks of all threads.

    Args:
        device: "cuda" or "cpu".
        folder: folder for the files of the checks.
        result_fd: number of the file descriptor for the results, as text.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    checks = {check.name: check for check in CHECKS}
    with os.fdopen(int(result_fd), "w", buffering=1) as results:

        def send(message: dict[str, Any]) -> None:
            results.write(json.dumps(message) + "\n")

        for request_line in sys.stdin:
            request = json.loads(request_line)
            check = checks[request["name"]]
            check_folder = Path(folder) / check.name
            check_folder.mkdir(exist_ok=True)
            context = CheckContext(
                device,
                check_folder,
                request["data"],
                lambda outcome: send({"partial": True, "figure": outcome.figure, "data": dict(outcome.data)}),
            )
            message = run_check(check, context)
            usable = clean_up(device)
            send({**message, "usable": usable})
            if not usable:
                return


def run_check(check: Check, context: CheckContext) -> dict[str, Any]:
    """Run one check. Return its state (such as "pass" or "fail"), measured values, error message and data as a dict of JSON
    types."""
    try:
        module, _, function = check.function.partition(".")
        check_function = getattr(importlib.import_module(f"megatron_lab.gpu.{module}"), function)
        outcome: Outcome = check_function(context, *[check.argument] if check.argument else [])
        return {"state": "pass", "figure": outcome.figure, "data": dict(outcome.data), "message": ""}
    except CheckFailed as failure:
        return {"state": "fail", "figure": str(failure), "message": "", "data": {}}
    except DoesNotFit as failure:
        return {"state": "does not fit", "figure": str(failure), "message": "", "data": {}}
    except Exception as error:  # noqa: BLE001 - the other checks go on
        traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        message = f"{text[:300]} ({_format_location(error)})"
        frames = "".join(traceback.format_tb(error.__traceback__)).splitlines()
        log = [*frames[-_LOG_LINES:], *str(error).splitlines()[:_MESSAGE_LINES]]
        return {"state": "crash", "figure": "", "message": message, "data": {"log": log}}


def _format_location(error: BaseException) -> str:
    """Return a text with the file and line of the innermost frame of the error's traceback that belongs to this project."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/site-packages/" not in frame.filename]
    return f"{'/'.join(Path(frames[-1].filename).parts[-3:])}:{frames[-1].lineno}" if frames else "no line of the project"


def clean_up(device: str) -> bool:
    """Free the memory that a check has left, and restore torch's global settings. Return whether the device is still usable."""
    import torch

    torch.use_deterministic_algorithms(False)
    gc.collect()
    if device != "cuda" or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
