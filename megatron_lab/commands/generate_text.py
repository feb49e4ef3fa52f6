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
import os
import sys
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lab.commands.parser import ToolParser
from megatron_lab.evaluation.opened import Opened, add_computing_flags, add_model_flags, check_layout, opened, tell

if TYPE_CHECKING:
    from megatron.data.tokenizer import Tokenizer
    from megatron.parallel.context import ParallelContext
    from megatron_lab.inference.continuation import Continuation
    from megatron_lab.inference.generate import Sampling

_DRAWING = ("top_k", "top_p", "seed")
_NEW_TOKENS = 256  # of continuation.py, which imports torch


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = ToolParser(description=__doc__)
    add_model_flags(flags)
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
    add_computing_flags(flags)
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
        tell(f"generate_text: {error}")
        return 1


def _check(flags: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Refuse flags without effect and sizes that cannot be; exits with status 2."""
    for name in ("max_new_tokens", "num_samples", "batch_size"):
        value = getattr(given, name)
        if value is not None and value < 1:
            flags.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if given.temperature == 0:
        for name in _DRAWING:
            if getattr(given, name) is not None:
                flags.error(f"--{name.replace('_', '-')} has no effect with --temperature 0, which draws nothing: leave it out")
        if given.num_samples > 1:
            flags.error("with --temperature 0 all samples of a prompt are the same: leave --num-samples out")
    check_layout(flags, given)


def _run(given: argparse.Namespace) -> None:
    prompts = _read_prompts(given) if int(os.environ.get("RANK", 0)) == 0 else None
    from megatron.parallel.collectives import broadcast_object
    from megatron_lab.inference.continuation import prompt_ids
    from megatron_lab.inference.generate import Sampling

    sampling = Sampling(given.temperature, **{name: getattr(given, name) for name in _DRAWING if getattr(given, name) is not None})
    texts: list[str] = []
    ids: list[list[int]] = []

    def share(context: ParallelContext, tokenizer: Tokenizer | None) -> None:
        assert tokenizer is not None
        texts.extend(broadcast_object(prompts, context.world))
        ids.extend(prompt_ids(tokenizer, text, add_bos=given.add_bos) for text in texts)

    with opened(given, share) as found:
        _generate(given, found, sampling, texts, ids)


def _read_prompts(given: argparse.Namespace) -> list[str]:
    """The beginnings, from where the flags say."""
    if given.prompt is not None:
        texts: list[str] = given.prompt
        return texts
    if given.prompt_file is None and sys.stdin.isatty():
        tell("The beginning of the text (Ctrl-D ends it):")
    content = sys.stdin.buffer.read() if given.prompt_file is None else Path(given.prompt_file).read_bytes()
    try:
        return [content.decode("utf-8").removesuffix("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{given.prompt_file or 'stdin'} is not UTF-8: {error}") from error


def _generate(given: argparse.Namespace, found: Opened, sampling: Sampling, texts: Sequence[str], ids: Sequence[list[int]]) -> None:
    """Make the texts, group by group; rank 0 prints them."""
    from megatron_lab.inference.continuation import continuations, most_new_tokens
    from megatron_lab.inference.generate import GenerationRequest, check_request

    model, context, tokenizer = found.model, found.context, found.tokenizer
    assert tokenizer is not None
    groups = {first: ids[first : first + given.batch_size] for first in range(0, len(ids), given.batch_size)}
    requests = [
        GenerationRequest(
            group,
            given.max_new_tokens or most_new_tokens(model.config, group),
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
        made_here = continuations(model, context, tokenizer, request, _write if alone and context.rank == 0 else None)
        made += sum(len(one.tokens) for one in made_here)
        if context.rank == 0 and not alone:
            for one in made_here:
                _print(given, texts[one.prompt], one)
    if context.rank == 0:
        if alone:
            _write("\n")
        seconds = time.perf_counter() - started
        tell(f"{made} tokens in {seconds:.2f} s, {made / seconds:.1f} a second")


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
