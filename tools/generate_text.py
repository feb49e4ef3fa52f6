"""Let a model go on with a text.

    python tools/generate_text.py --load runs/a --prompt 'def main('             from the newest checkpoint of a run
    python tools/generate_text.py --load model --temperature 0 < beginning.txt   the likeliest token always; prompt from stdin
    python tools/generate_text.py --load runs/a --prompt A B --num-samples 3     several, one after another, each with a heading

--load names a --save folder (its newest complete checkpoint), one checkpoint in it, a Hugging Face folder, or a checkpoint of
Megatron-LM, whatever layout it was saved at. The tokenizer is the one that the checkpoint names; flags name another, or where its
files are now. One text is printed as it is made; of several, each when the group that it is made in is done.

A model that does not fit one device runs on several:

    torchrun --nproc-per-node 8 tools/generate_text.py --load runs/a --prompt 'def main(' --pipeline-model-parallel-size 2
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron.config.data import TOKENIZER_FILES, TOKENIZER_SETTINGS
from megatron.config.parallel import ParallelConfig
from tools.checkpoints.tokenizer_choice import named_tokenizer
from tools.data.tokenizer_flags import add_tokenizer_flags
from tools.parser import ToolParser

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint.source import WeightSource
    from megatron.data.tokenizers.simple_tokenizers import Tokenizer
    from megatron.inference.generate import Sampling
    from megatron.model.build import Model
    from megatron.parallel.context import ParallelContext
    from tools.generation.continuation import Continuation

_SIZES = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_DRAWING = ("top_k", "top_p", "seed")
_NEW_TOKENS = 256


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = ToolParser(description=__doc__)
    flags.add_argument("--load", required=True, metavar="FOLDER", help="the model: see above")
    flags.add_argument("--ckpt-step", type=int, metavar="N", help="of a folder with several checkpoints, the iteration to take")
    flags.add_argument("--ema", action="store_true", help="take the moving average of the weights (of a run with --ema-decay)")
    beginning = flags.add_mutually_exclusive_group()
    beginning.add_argument("--prompt", nargs="+", metavar="TEXT", help="beginnings of texts; '' begins a document")
    beginning.add_argument(
        "--prompt-file", metavar="FILE", help="file with one beginning, without the newline at its end; by default stdin is read so"
    )
    flags.add_argument("--add-bos", action="store_true", help="put the tokenizer's bos before each prompt, for models trained so")
    flags.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"most tokens to make ({_NEW_TOKENS}, or what there are positions for)",
    )
    flags.add_argument("--ignore-eod", action="store_true", help="go on behind the end of a document")
    flags.add_argument("--num-samples", type=int, default=1, metavar="N", help="texts for each prompt (1)")
    flags.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts in a group that is worked off at once (8)")
    flags.add_argument(
        "--json", action="store_true", help="print an object a line for each text: prompt, sample, text, tokens, ended"
    )
    choice = flags.add_argument_group("choice of the next token")
    choice.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="scores are divided by it (1); 0: the likeliest token always"
    )
    choice.add_argument("--top-k", type=int, metavar="K", help="choose among the K likeliest tokens")
    choice.add_argument("--top-p", type=float, metavar="P", help="choose among the likeliest tokens that make up this probability")
    choice.add_argument("--seed", type=int, metavar="N", help="of the random choices (1234): the same seed, the same text")
    computing = flags.add_argument_group("computing")
    computing.add_argument("--dtype", choices=_DTYPES, help="of weights and products (as stored; not float16 on a CPU)")
    computing.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(CUDA if there is any)")
    computing.add_argument("--tensor-model-parallel-size", type=int, metavar="N", help="processes that share a layer (all)")
    computing.add_argument("--context-parallel-size", type=int, default=1, metavar="N", help="processes that share the prompts (1)")
    computing.add_argument(
        "--pipeline-model-parallel-size", type=int, default=1, metavar="N", help="processes that share the depth (1)"
    )
    add_tokenizer_flags(flags, required=False)
    flags.set_defaults(flags=flags)
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code: 0, 1 if it cannot be done, 2 for wrong flags."""
    flags = parser()
    given = flags.parse_args(arguments)
    _check(flags, given)
    try:
        _run(given)
        return 0
    except BrokenPipeError:  # whoever reads has seen enough, as in | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        _tell(f"generate_text: {error}")
        return 1


def _check(flags: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Refuse flags without effect and sizes that cannot be; exits with status 2."""
    for name in ("max_new_tokens", "num_samples", "batch_size", *_SIZES):
        value = getattr(given, name)
        if value is not None and value < 1:
            flags.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if given.tokenizer_type is None:
        for name in TOKENIZER_SETTINGS:
            if name not in TOKENIZER_FILES and getattr(given, name) is not None:
                flags.error(f"--{name.replace('_', '-')} has no effect without --tokenizer-type: leave it out")
    if given.temperature == 0:
        for name in _DRAWING:
            if getattr(given, name) is not None:
                flags.error(f"--{name.replace('_', '-')} has no effect with --temperature 0, which draws nothing: leave it out")
        if given.num_samples > 1:
            flags.error("with --temperature 0 all samples of a prompt are the same: leave --num-samples out")
    started, context, pipeline = (
        int(os.environ.get("WORLD_SIZE", 1)),
        given.context_parallel_size,
        given.pipeline_model_parallel_size,
    )
    given.tensor_model_parallel_size = given.tensor_model_parallel_size or max(1, started // (context * pipeline))
    needed = math.prod(getattr(given, name) for name in _SIZES)
    if needed != started:
        shared = f"context {context} x " if context > 1 else ""
        flags.error(
            f"tensor {given.tensor_model_parallel_size} x {shared}pipeline {pipeline} needs {needed} "
            f"processes, and {started} {'are' if started > 1 else 'is'} started (torchrun --nproc-per-node N starts N)"
        )


def _run(given: argparse.Namespace) -> None:
    prompts = _read_prompts(given) if int(os.environ.get("RANK", 0)) == 0 else None
    from megatron.checkpoint.source import open_source
    from megatron.data.tokenizers.tokenizer import build_tokenizer
    from megatron.inference.generate import Sampling
    from megatron.inference.model_from_source import model_from
    from megatron.parallel.collectives import broadcast_object
    from megatron.parallel.context import connect, disconnect

    sampling = Sampling(given.temperature, **{name: getattr(given, name) for name in _DRAWING if getattr(given, name) is not None})
    source = open_source(given.load, given.ckpt_step, average=given.ema)
    settings = named_tokenizer(given, source)
    if settings is None:
        raise ValueError(f"no tokenizer is known of {given.load}: name it by --tokenizer-type and its files")
    tokenizer = build_tokenizer(settings)
    if tokenizer.vocab_size > source.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, but {given.load} only {source.vocab_size:,} rows in its embedding: "
            "this is not its tokenizer"
        )
    sizes = {name: getattr(given, name) for name in (*_SIZES, "device")}
    context = connect(ParallelConfig(**sizes))
    try:
        texts: list[str] = broadcast_object(prompts, context.world)
        ids = [_prompt_ids(given, tokenizer, text) for text in texts]
        started = time.perf_counter()
        model = model_from(source, context, _dtype(given, source, context))
        if context.rank == 0:
            _tell(*source.notes, f"{given.load} read in {time.perf_counter() - started:.1f} s: {_described(model)}")
        _generate(given, model, context, tokenizer, sampling, texts, ids)
    finally:
        disconnect()


def _read_prompts(given: argparse.Namespace) -> list[str]:
    """The beginnings, from where the flags say."""
    if given.prompt is not None:
        texts: list[str] = given.prompt
        return texts
    if given.prompt_file is None and sys.stdin.isatty():
        _tell("The beginning of the text (Ctrl-D ends it):")
    content = sys.stdin.buffer.read() if given.prompt_file is None else Path(given.prompt_file).read_bytes()
    try:
        return [content.decode("utf-8").removesuffix("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{given.prompt_file or 'stdin'} is not UTF-8: {error}") from error


def _prompt_ids(given: argparse.Namespace, tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a beginning; where there are none, what begins a document."""
    ids = tokenizer.encode(text)
    if given.add_bos:
        if tokenizer.bos is None:
            raise ValueError("--add-bos: this tokenizer has no bos")
        ids = [tokenizer.bos, *ids]
    return ids or [tokenizer.eod if tokenizer.bos is None else tokenizer.bos]


def _dtype(given: argparse.Namespace, source: WeightSource, context: ParallelContext) -> torch.dtype:
    """The one asked for, or that of the weights."""
    import torch

    if given.dtype is not None:
        asked: torch.dtype = getattr(torch, given.dtype)
        return asked
    stored = source.weights["embedding.word.weight"].dtype
    return torch.float32 if stored == torch.float16 and context.device.type == "cpu" else stored


def _generate(
    given: argparse.Namespace,
    model: Model,
    context: ParallelContext,
    tokenizer: Tokenizer,
    sampling: Sampling,
    texts: Sequence[str],
    ids: Sequence[list[int]],
) -> None:
    """Make the texts, group by group; rank 0 prints them."""
    from megatron.inference.generate import GenerationRequest, check_request
    from tools.generation.continuation import continuations

    groups = {first: ids[first : first + given.batch_size] for first in range(0, len(ids), given.batch_size)}
    requests = [
        GenerationRequest(
            group,
            _most_new_tokens(given, model, group),
            sampling,
            num_samples=given.num_samples,
            eod=None if given.ignore_eod else tokenizer.eod,
            num_ids=tokenizer.vocab_size,
            first_prompt=first,
        )
        for first, group in groups.items()
    ]
    for request in requests:  # all, before any work
        check_request(model, request)
    alone = len(texts) * given.num_samples == 1 and not given.json
    started, made = time.perf_counter(), 0
    if alone and context.rank == 0:
        _write(texts[0])
    for request in requests:
        found = continuations(model, context, tokenizer, request, _write if alone and context.rank == 0 else None)
        made += sum(len(one.tokens) for one in found)
        if context.rank == 0 and not alone:
            for one in found:
                _print(given, texts[one.prompt], one)
    if context.rank == 0:
        if alone:
            _write("\n")
        seconds = time.perf_counter() - started
        _tell(f"{made} tokens in {seconds:.2f} s, {made / seconds:.1f} a second")


def _most_new_tokens(given: argparse.Namespace, model: Model, prompts: Sequence[list[int]]) -> int:
    if given.max_new_tokens is not None:
        asked: int = given.max_new_tokens
        return asked
    if model.config.position_embedding_type != "learned_absolute":
        return _NEW_TOKENS
    return max(1, min(_NEW_TOKENS, model.config.num_positions - max(map(len, prompts))))


def _print(given: argparse.Namespace, prompt: str, one: Continuation) -> None:
    """One of several texts, with a heading; or as an object."""
    if given.json:
        fields = {"prompt": prompt, "sample": one.sample, "text": one.text, "tokens": one.tokens, "ended": one.ended}
        _write(json.dumps(fields, ensure_ascii=False) + "\n")
    else:
        _write(f"== prompt {one.prompt + 1}, sample {one.sample + 1}\n{prompt}{one.text}\n\n")


def _write(text: str) -> None:
    """Print a piece at once. On a terminal, characters that would steer it are shown as U+FFFD."""
    if sys.stdout.isatty():
        text = "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
    sys.stdout.write(text)
    sys.stdout.flush()


def _described(model: Model) -> str:
    config = model.config
    kind = str(model.dtype).removeprefix("torch.")
    return f"{config.num_layers} layers of {config.hidden_size}, vocabulary {model.vocab_size}, computed in {kind}"


def _tell(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
