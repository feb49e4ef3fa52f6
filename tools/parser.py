"""The command line that all tools have in common."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.config.version import version_line


class ToolParser(argparse.ArgumentParser):
    """A parser with --version. Its description stays as it is written, and flags are spelled out."""

    def __init__(self, *words: Any, **settings: Any) -> None:
        settings = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **settings}
        super().__init__(*words, **settings)
        self.add_argument(
            "--version", action="version", version=version_line().replace("%", "%%"), help="say which version this is"
        )
