"""Loading of the model that the flags of a command line select, with its dtype, parallel layout and tokenizer."""

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

from megatron.config.data import TOKENIZER_FILE_SETTINGS, TOKENIZER_SETTINGS
from megatron.config.errors import ConfigError
from megatron.config.imports import import_modules
from megatron.config.parallel import ParallelConfig
from megatron_lab.checkpoints.text import parse_step
from megatron_lab.checkpoints.tokenizer_choice import find_tokenizer
from megatron_lab.data_tools.tokenizer_flags import add_tokenizer_flags
from megatron_lab.tokenizers.embedding_rows import fit_tokenizer

if TYPE_CHECKING:
    import torch

    from megatron.config.data import DataConfig
    from megatron.data.tokenizer import Tokenizer
    from megatron.model.build import Model
    from megatron.parallel.context import ParallelContext
    from megatron_lab.foreign.source import WeightSource

PARALLEL_SIZES = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
"""Names of the settings whose product is the number of processes."""
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the weights: --load (folder), --ckpt-step (iteration) and --ema (moving average of the weights)."""
    parser.add_argument("--load", required=True, metavar="FOLDER", help="the model: see above")
    parser.add_argument(
        "--ckpt-step",
        type=parse_step,
        metavar="N|best",
        help="iteration to load from a folder with several checkpoints, or the best",
    )
    parser.add_argument("--ema", action="store_true", help="load the moving average of the weights (of a run with --ema-decay)")


def add_computing_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the dtype, the device, the parallel sizes and the tokenizer, and --imports (Python modules to import)."""
    group = parser.add_argument_group("computing")
    group.add_argument("--dtype", choices=_DTYPES, help="of weights and matrix products (as stored; not float16 on a CPU)")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(CUDA if there is any)")
    group.add_argument("--tensor-model-parallel-size", type=int, metavar="N", help="processes that split each layer (all)")
    group.add_argument("--context-parallel-size", type=int, default=1, metavar="N", help="processes that split each prompt (1)")
    group.add_argument(
        "--pipeline-model-parallel-size", type=int, default=1, metavar="N", help="processes that split the layers into stages (1)"
    )
    parser.add_argument(
        "--imports",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="modules to import, for example one that defines the model's activation",
    )
    add_tokenizer_flags(parser, required=False)
    parser.set_defaults(flags=parser)


def check_layout(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check the parallel sizes, and that each tokenizer flag has an effect. After an error, the program ends with status 2.

    If --tensor-model-parallel-size is not set, it becomes the number of started processes divided by the context-parallel and
    pipeline-parallel sizes.
    """
    for name in PARALLEL_SIZES:
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if args.tokenizer_type is None:
        for name in TOKENIZER_SETTINGS:
            if name not in (*TOKENIZER_FILE_SETTINGS, "add_bos") and getattr(args, name) is not None:
                parser.error(f"--{name.replace('_', '-')} has no effect without --tokenizer-type: leave it out")
    world_size, cp, pp = (
        int(os.environ.get("WORLD_SIZE", 1)),
        args.context_parallel_size,
        args.pipeline_model_parallel_size,
    )
    args.tensor_model_parallel_size = args.tensor_model_parallel_size or max(1, world_size // (cp * pp))
    num_ranks = math.prod(getattr(args, name) for name in PARALLEL_SIZES)
    if num_ranks != world_size:
        context_text = f"context {cp} x " if cp > 1 else ""
        parser.error(
            f"tensor {args.tensor_model_parallel_size} x {context_text}pipeline {pp} needs {num_ranks} "
            f"processes, and {world_size} {'are' if world_size > 1 else 'is'} started (torchrun --nproc-per-node N starts N)"
        )


@dataclass(frozen=True)
class OpenedModel:
    """Model that is loaded on this rank, with the source of its weights, the process groups (`context`), the tokenizer and its
    settings."""

    source: WeightSource
    model: Model
    context: ParallelContext
    tokenizer: Tokenizer | None
    tokenizer_config: DataConfig | None


@contextmanager
def open_model(
    args: argparse.Namespace,
    validate: Callable[[ParallelContext, Tokenizer | None], None] = lambda context, tokenizer: None,
    *,
    needs_tokenizer: bool = True,
    timeout_minutes: int | None = None,
) -> Iterator[OpenedModel]:
    """Context manager that loads the model that the flags select. It creates the process groups, and destroys them at its end.

    Args:
        args: parsed flags of `add_model_flags` and `add_computing_flags`.
        validate: called on all ranks before the weights are read, for checks that need only the parallel context and the tokenizer.
        needs_tokenizer: whether to raise an error if the tokenizer of the model is unknown.
        timeout_minutes: time after which a rank gives up waiting for another rank; None for the default.

    Raises:
        ValueError: the folder has no model, the layout cannot split the model, or the tokenizer is unknown or does not fit the
            model.
    """
    from megatron.parallel.context import connect, disconnect
    from megatron_lab.foreign.open_source import open_source
    from megatron_lab.inference.model_from_source import load_model

    if problems := list(import_modules(args.imports)):
        raise ConfigError(problems)
    source = open_source(args.load, args.ckpt_step, average=args.ema)
    tokenizer_config = find_tokenizer(args, source)
    if tokenizer_config is None and needs_tokenizer:
        raise ValueError(
            f"the tokenizer of {args.load} is unknown: set --tokenizer-type and the flag of its file, such as --tokenizer-model"
        )
    tokenizer = None
    if tokenizer_config is not None:
        tokenizer_config, tokenizer = fit_tokenizer(tokenizer_config, source.vocab_size, args.load)
    sizes = {name: getattr(args, name) for name in (*PARALLEL_SIZES, "device")}
    if timeout_minutes is not None:
        sizes["distributed_timeout_minutes"] = timeout_minutes
    context = connect(ParallelConfig(**sizes))
    try:
        validate(context, tokenizer)
        start = time.perf_counter()
        model = load_model(source, context, _select_dtype(args, source, context))
        if context.rank == 0:
            tokenizer_notes = () if tokenizer is None else (*tokenizer.notes, *tokenizer.text_notes)
            print_to_stderr(
                *source.notes,
                *tokenizer_notes,
                f"{args.load} read in {time.perf_counter() - start:.1f} s: {_describe_model(model)}",
            )
        yield OpenedModel(source, model, context, tokenizer, tokenizer_config)
    finally:
        disconnect()


def _select_dtype(args: argparse.Namespace, source: WeightSource, context: ParallelContext) -> torch.dtype:
    """Return the dtype in which the model computes: the value of --dtype.

    Without this flag, return the dtype of the stored weights, but float32 instead of float16 on a CPU.
    """
    import torch

    from megatron_lab.inference.model_from_source import select_default_dtype

    if args.dtype is None:
        return select_default_dtype(source, context)
    dtype: torch.dtype = getattr(torch, args.dtype)
    return dtype


def _describe_model(model: Model) -> str:
    config = model.config
    dtype_name = str(model.dtype).removeprefix("torch.")
    return f"{config.num_layers} layers of {config.hidden_size}, vocabulary {model.vocab_size}, computed in {dtype_name}"


def print_to_stderr(*messages: str) -> None:
    """Print messages to stderr, because stdout is reserved for the results that the user requested."""
    for message in messages:
        print(message, file=sys.stderr)
