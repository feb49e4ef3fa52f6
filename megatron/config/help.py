"""The text of ``--help``, made by tyro from the dataclasses: grouped by topic, each flag with its docstring and default."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Annotated

import tyro

from megatron.config.config import Config
from megatron.config.requests import GPUS_PER_NODE, HELP

_DESCRIPTION = (
    "Pretrain a GPT- or Llama-style model with tensor, pipeline and data parallelism, by the same command on one CPU and on "
    "many GPUs. Flags have the names and defaults of Megatron-LM; those that cannot be had are refused with what to use instead."
)


@dataclass(frozen=True)
class _CommandLine(Config):
    """The settings, and the flags that are not settings of the run."""

    config: Annotated[str | None, tyro.conf.arg(help=HELP["config"])] = None
    print_config: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help=HELP["print-config"])] = False
    explain: Annotated[str | None, tyro.conf.arg(help=HELP["explain"])] = None
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help=HELP["dry-run"])] = False
    world_size: Annotated[int | None, tyro.conf.arg(help=HELP["world-size"])] = None
    gpus_per_node: Annotated[int, tyro.conf.arg(help=HELP["gpus-per-node"])] = GPUS_PER_NODE
    dry_run_json: Annotated[str | None, tyro.conf.arg(help=HELP["dry-run-json"])] = None


def help_text(program: str) -> str:
    """The help page, as wide as the terminal."""
    with io.StringIO() as page:
        with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
            tyro.cli(_CommandLine, args=["--help"], prog=program, description=_DESCRIPTION, config=(tyro.conf.OmitArgPrefixes,))
        return page.getvalue()
