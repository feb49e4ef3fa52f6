"""The process of one check: `python -m tools.gpu.child NAME DEVICE FOLDER`. Its last line is what it found."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from tools.gpu.checks import CHECKS
from tools.gpu.place import Failure, Place, Unfit

RESULT = "result: "


def main(name: str, device: str, folder: str) -> None:
    """Run the check."""
    check = next(one for one in CHECKS if one.name == name)
    module, _, function = check.body.partition(".")
    body = getattr(importlib.import_module(f"tools.gpu.{module}"), function)
    place = Place(device, Path(folder))
    try:
        figure, state = body(place, *[check.argument] if check.argument else []), "pass"
    except Failure as failure:
        figure, state = str(failure), "fail"
    except Unfit as unfit:
        figure, state = str(unfit), "does not fit"
    print(RESULT + json.dumps({"state": state, "figure": figure}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
