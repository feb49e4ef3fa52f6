"""A model opened for use: the flags that name it and say how it is computed, and the model with its tokenizer."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.data import TOKENIZER_FILES, TOKENIZER_SETTINGS
from megatron.config.errors import ConfigError
from megatron.config.imports import import_modules
from megatron.config.parallel import ParallelConfig
from megatron_lab.checkpoints.tokenizer_choice import named_tokenizer
from megatron_lab.data_tools.tokenizer_flags import add_tokenizer_flags

if TYPE_CHECKING:
    import torch

    from megatron.data.tokenizer import Tokenizer
    from megatron.model.build import Model
    from megatron.parallel.context import ParallelContext
    from megatron_lab.foreign.source import WeightSource

SIZES = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_model_flags(flags: argparse.ArgumentParser) -> None:
    """The flags that name the weights."""
    flags.add_argument("--load", required=True, metavar="FOLDER", help="the model: see above")
    flags.add_argument("--ckpt-step", type=int, metavar="N", help="of a folder with several checkpoints, the iteration to take")
    flags.add_argument("--ema", action="store_true", help="take the moving average of the weights (of a run with --ema-decay)")


def add_computing_flags(flags: argparse.ArgumentParser) -> None:
    """The flags of precision, device and layout, and those of the tokenizer."""
    computing = flags.add_argument_group("computing")
    computing.add_argument("--dtype", choices=_DTYPES, help="of weights and products (as stored; not float16 on a CPU)")
    computing.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(CUDA if there is any)")
    computing.add_argument("--tensor-model-parallel-size", type=int, metavar="N", help="processes that share a layer (all)")
    computing.add_argument("--context-parallel-size", type=int, default=1, metavar="N", help="processes that share the prompts (1)")
    computing.add_argument(
        "--pipeline-model-parallel-size", type=int, default=1, metavar="N", help="processes that share the depth (1)"
    )
    flags.add_argument(
        "--imports",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="your own modules, if one has the model's activation",
    )
    add_tokenizer_flags(flags, required=False)
    flags.set_defaults(flags=flags)


def check_layout(flags: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Refuse sizes that cannot be, and tokenizer flags without effect; fills in the tensor size. Exits with status 2."""
    for name in SIZES:
        value = getattr(given, name)
        if value is not None and value < 1:
            flags.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if given.tokenizer_type is None:
        for name in TOKENIZER_SETTINGS:
            if name not in TOKENIZER_FILES and getattr(given, name) is not None:
                flags.error(f"--{name.replace('_', '-')} has no effect without --tokenizer-type: leave it out")
    started, context, pipeline = (
        int(os.environ.get("WORLD_SIZE", 1)),
        given.context_parallel_size,
        given.pipeline_model_parallel_size,
    )
    given.tensor_model_parallel_size = given.tensor_model_parallel_size or max(1, started // (context * pipeline))
    needed = math.prod(getattr(given, name) for name in SIZES)
    if needed != started:
        shared = f"context {context} x " if context > 1 else ""
        flags.error(
            f"tensor {given.tensor_model_parallel_size} x {shared}pipeline {pipeline} needs {needed} "
            f"processes, and {started} {'are' if started > 1 else 'is'} started (torchrun --nproc-per-node N starts N)"
        )


@dataclass(frozen=True)
class Opened:
    """A model on this rank, ready for use."""

    source: WeightSource
    model: Model
    context: ParallelContext
    tokenizer: Tokenizer | None


@contextmanager
def opened(
    given: argparse.Namespace,
    before: Callable[[ParallelContext, Tokenizer | None], None] = lambda context, tokenizer: None,
    *,
    needs_tokenizer: bool = True,
) -> Iterator[Opened]:
    """Join the ranks, read the model that the flags name, and leave them at the end.

    Args:
        before: called on all ranks before the weights are read, with what can be judged without them.
        needs_tokenizer: refuse a model of which none is known.

    Raises:
        ValueError: there is no such model, it cannot be split so, or its tokenizer is not known or not its own.
    """
    from megatron.data.tokenizer import build_tokenizer
    from megatron.parallel.context import connect, disconnect
    from megatron_lab.foreign.opening import open_source
    from megatron_lab.inference.model_from_source import model_from

    if problems := list(import_modules(given.imports)):
        raise ConfigError(problems)
    source = open_source(given.load, given.ckpt_step, average=given.ema)
    settings = named_tokenizer(given, source)
    if settings is None and needs_tokenizer:
        raise ValueError(f"no tokenizer is known of {given.load}: name it by --tokenizer-type and its files")
    tokenizer = None if settings is None else build_tokenizer(settings)
    if tokenizer is not None and tokenizer.vocab_size > source.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, but {given.load} only {source.vocab_size:,} rows in its embedding: "
            "this is not its tokenizer"
        )
    sizes = {name: getattr(given, name) for name in (*SIZES, "device")}
    context = connect(ParallelConfig(**sizes))
    try:
        before(context, tokenizer)
        started = time.perf_counter()
        model = model_from(source, context, _dtype(given, source, context))
        if context.rank == 0:
            tell(*source.notes, f"{given.load} read in {time.perf_counter() - started:.1f} s: {_described(model)}")
        yield Opened(source, model, context, tokenizer)
    finally:
        disconnect()


def _dtype(given: argparse.Namespace, source: WeightSource, context: ParallelContext) -> torch.dtype:
    """The one asked for, or that of the weights."""
    import torch

    from megatron_lab.inference.model_from_source import usual_dtype

    if given.dtype is None:
        return usual_dtype(source, context)
    asked: torch.dtype = getattr(torch, given.dtype)
    return asked


def _described(model: Model) -> str:
    config = model.config
    kind = str(model.dtype).removeprefix("torch.")
    return f"{config.num_layers} layers of {config.hidden_size}, vocabulary {model.vocab_size}, computed in {kind}"


def tell(*lines: str) -> None:
    """Say lines on stderr: stdout is for what was asked for."""
    for line in lines:
        print(line, file=sys.stderr)
