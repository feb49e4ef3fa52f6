"""The text of ``--help``, made by tyro from the dataclasses: grouped by topic, each flag with its docstring and default."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Annotated

import tyro

from megatron.config.config import Config

_DESCRIPTION = (
    "Pretrain a GPT- or Llama-style model with tensor, pipeline and data parallelism, by the same command on one CPU and on "
    "many GPUs. Flags have the names and defaults of Megatron-LM; those that cannot be had are refused with what to use instead."
)


@dataclass(frozen=True)
class _CommandLine(Config):
    """The settings, and the flags that are not settings of the run."""

    config: str | None = None
    """YAML file of settings below the flags given here: flag names, flat or under the topics of this help. May be repeated."""
    print_config: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the resolved settings as YAML, which --config reads back, and stop."""


def help_text(program: str) -> str:
    """The help page, as wide as the terminal."""
    with io.StringIO() as page:
        with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
            tyro.cli(_CommandLine, args=["--help"], prog=program, description=_DESCRIPTION, config=(tyro.conf.OmitArgPrefixes,))
        return page.getvalue()
