"""Generate text with a model.

    python tools/generate_text.py --load runs/a --prompt 'def main('             from the newest checkpoint of a run
    python tools/generate_text.py --load model --temperature 0 < prompt.txt      always the likeliest token; prompt from stdin
    python tools/generate_text.py --load runs/a --prompt A B --num-samples 3     several texts, each with a heading
    python tools/generate_text.py --load answers --chat                          a conversation in the terminal
    python tools/generate_text.py --load runs/a --interactive                    continue one text after another

--load names a --save folder (its newest complete checkpoint), one checkpoint in it, a Hugging Face folder, or a checkpoint of
Megatron-LM. The layout at which it was saved does not matter. The tokenizer is that of the checkpoint; flags can select another
one, or give a new path of its files. A single text is printed token by token. Several texts are printed when the generation of
their group is complete.

--chat formats a conversation by the chat template of the tokenizer. Answers appear word by word. Ctrl-C stops an answer, and what
was written stays in the conversation. /help lists the commands, such as /regenerate and /save; Ctrl-D or two Ctrl-C leave. If stdin
is not a terminal, each of its lines is one message; answers go to stdout, everything else to stderr. If the context is full, the
model no longer sees the oldest messages. --interactive has the same keys, but no template: the model continues each entry, and
after an empty line its last text.

A model that does not fit on one device runs on several:

    torchrun --nproc-per-node 8 tools/generate_text.py --load runs/a --prompt 'def main(' --pipeline-model-parallel-size 2
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.config.regular_file import read_regular_or_pipe
from megatron_lab.commands.parser import ToolParser
from megatron_lab.evaluation.open_model import (
    OpenedModel,
    add_computing_flags,
    add_model_flags,
    check_layout,
    open_model,
    print_to_stderr,
)

if TYPE_CHECKING:
    from megatron.data.tokenizer import Tokenizer
    from megatron.parallel.context import ParallelContext
    from megatron_lab.inference.chat_format import ChatFormat
    from megatron_lab.inference.continuation import Continuation
    from megatron_lab.inference.dialogue import Dialogue
    from megatron_lab.inference.generate import Sampling

_SAMPLING_FLAGS = ("top_k", "top_p", "seed")
_DEFAULT_NEW_TOKENS, _DEFAULT_ANSWER_TOKENS = 256, 1024  # copies of constants in continuation.py, which imports torch
_DIALOGUE_TIMEOUT_MINUTES = 7 * 24 * 60  # the other ranks wait while the user thinks
_REFUSED_IN_DIALOGUE = {
    "num_samples": "an entry gets one answer, and /regenerate writes another one",
    "batch_size": "an entry gets one answer",
    "json": "/save FILE writes the dialogue as JSON",
}
_REFUSED_IN_CHAT = {
    "add_bos": "the template writes the bos token if the model needs it",
    "ignore_eod": "the template ends an answer by a token",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = ToolParser(description=__doc__)
    add_model_flags(parser)
    dialogue = parser.add_mutually_exclusive_group()
    dialogue.add_argument("--chat", action="store_true", help="Hold a conversation, in the chat template of the tokenizer.")
    dialogue.add_argument("--interactive", action="store_true", help="Continue each text that is entered, without a template.")
    parser.add_argument("--system", metavar="TEXT", help="With --chat: start the conversation with this system message.")
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="With --chat: use this chat template (jinja), or the built-in one chatml, instead of the tokenizer's.",
    )
    parser.add_argument(
        "--chat-template-kwargs",
        type=_parse_template_kwargs,
        metavar="JSON",
        help="With --chat: pass these variables to the chat template, such as '{\"enable_thinking\": false}', as the key "
        "chat_template_kwargs of a record does in tools/preprocess_data.py.",
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt",
        nargs="+",
        metavar="TEXT",
        help="Continue these texts; '' starts a new document. In a dialogue: the first entries.",
    )
    prompts.add_argument(
        "--prompt-file", metavar="FILE", help="Read one prompt from this file, without the newline at its end (default: stdin)."
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"Generate at most N tokens (default {_DEFAULT_NEW_TOKENS}, with --chat {_DEFAULT_ANSWER_TOKENS}, or as many as the "
        "model has positions for).",
    )
    parser.add_argument("--ignore-eod", action="store_true", help="Continue after a token that ends a text.")
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="Generate N texts for each prompt (default 1).")
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="Generate the texts of N prompts at once (default 8)."
    )
    parser.add_argument(
        "--json", action="store_true", help="Print a JSON object per line for each text: prompt, sample, text, tokens, ended."
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="Divide the logits by T (default 1); 0 always selects the likeliest token.",
    )
    sampling.add_argument("--top-k", type=int, metavar="K", help="Sample from the K likeliest tokens.")
    sampling.add_argument(
        "--top-p", type=float, metavar="P", help="Sample from the likeliest tokens whose probabilities add up to P."
    )
    sampling.add_argument(
        "--seed", type=int, metavar="N", help="Set the seed of sampling (default 1234); equal seeds give equal texts."
    )
    add_computing_flags(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the tool and return the exit status: 0 for success, 1 for an error, 2 for invalid flags."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    _check_args(parser, args)
    try:
        _run(args)
        return 0
    except BrokenPipeError:  # the reader has closed the pipe, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print_to_stderr(f"generate_text: {error}")
        return 1


def _check_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check that all flags have an effect and all sizes are valid. Otherwise the program ends with a message and status 2."""
    for name in ("max_new_tokens", "num_samples", "batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if args.temperature == 0:
        for name in _SAMPLING_FLAGS:
            if getattr(args, name) is not None:
                parser.error(f"--{name.replace('_', '-')} has no effect with --temperature 0, which draws nothing: leave it out")
        if args.num_samples > 1:
            parser.error("with --temperature 0 all samples of a prompt are the same: leave --num-samples out")
    _check_dialogue_args(parser, args)
    check_layout(parser, args)


def _check_dialogue_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check the flags that apply only to a dialogue, or only without one."""
    for name in () if args.chat else ("system", "chat_template", "chat_template_kwargs"):
        if getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')} has no effect without --chat: leave it out, or add --chat")
    if not (args.chat or args.interactive):
        return
    mode, refused = ("--chat", _REFUSED_IN_DIALOGUE | _REFUSED_IN_CHAT) if args.chat else ("--interactive", _REFUSED_IN_DIALOGUE)
    for name, reason in refused.items():
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} does not apply with {mode}: {reason}. Leave it out")


def _run(args: argparse.Namespace) -> None:
    """Load the model and generate the texts. Rank 0 reads the prompts and sends them to the other ranks."""
    if args.chat or args.interactive:
        _run_dialogue(args)
        return
    prompts = _read_prompts(args) if int(os.environ.get("RANK", 0)) == 0 else None
    from megatron.parallel.collectives import broadcast_object
    from megatron_lab.inference.continuation import encode_prompt

    sampling = _build_sampling(args)
    all_prompts: list[str] = []
    prompt_token_ids: list[list[int]] = []

    def broadcast_prompts(context: ParallelContext, tokenizer: Tokenizer | None) -> None:
        assert tokenizer is not None
        all_prompts.extend(broadcast_object(prompts, context.world))
        prompt_token_ids.extend(encode_prompt(tokenizer, text) for text in all_prompts)

    with open_model(args, broadcast_prompts) as loaded:
        _generate(args, loaded, sampling, all_prompts, prompt_token_ids)


def _parse_template_kwargs(text: str) -> dict[str, Any]:
    from megatron_lab.data_tools.preprocess.chat_records import read_template_kwargs

    try:
        return read_template_kwargs(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _build_sampling(args: argparse.Namespace) -> Sampling:
    from megatron_lab.inference.generate import Sampling

    return Sampling(args.temperature, **{name: getattr(args, name) for name in _SAMPLING_FLAGS if getattr(args, name) is not None})


def _run_dialogue(args: argparse.Namespace) -> None:
    """Load the model and hold a dialogue (--chat or --interactive). Rank 0 reads and prints; the other ranks follow it."""
    from megatron_lab.inference.chat_loop import DialogueLoop, DialogueSettings, follow_dialogue
    from megatron_lab.inference.dialogue import Completion, Conversation
    from megatron_lab.inference.session import GenerationSession

    settings = DialogueSettings(
        _build_sampling(args), args.max_new_tokens or (_DEFAULT_ANSWER_TOKENS if args.chat else _DEFAULT_NEW_TOKENS)
    )
    has_first_entries = args.prompt is not None or args.prompt_file is not None
    first_entries = _read_prompts(args) if has_first_entries and int(os.environ.get("RANK", 0)) == 0 else []
    chat_formats: list[ChatFormat] = []

    def check_template(context: ParallelContext, tokenizer: Tokenizer | None) -> None:
        assert tokenizer is not None
        if args.chat:
            from megatron_lab.inference.chat_format import ChatFormat

            chat_formats.append(ChatFormat(tokenizer, args.chat_template, args.chat_template_kwargs))
            chat_formats[0].check_system(args.system)

    with open_model(args, check_template, timeout_minutes=_DIALOGUE_TIMEOUT_MINUTES) as loaded:
        session = GenerationSession(loaded.model, loaded.context)
        if loaded.context.rank != 0:
            follow_dialogue(session, loaded.context)
            return
        assert loaded.tokenizer is not None
        loaded.tokenizer.decode([])  # reads its files, which takes a while, before the first entry
        if args.chat:
            dialogue: Dialogue = Conversation(chat_formats[0], session.num_positions, args.system)
            print_to_stderr(f"chat template: {chat_formats[0].origin}")
        else:
            stop_ids = _find_stop_ids(args, loaded.tokenizer)
            dialogue = Completion(loaded.tokenizer, session.num_positions, stop_ids)
        print_to_stderr(f"context {session.num_positions:,} tokens. /help lists the commands, Ctrl-D leaves")
        DialogueLoop(dialogue, session, loaded.context, loaded.tokenizer, settings, first_entries).run()


def _find_stop_ids(args: argparse.Namespace, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a text without a chat template; none with --ignore-eod."""
    from megatron_lab.tokenizers.stop_ids import find_stop_ids

    return frozenset() if args.ignore_eod else find_stop_ids(tokenizer)


def _read_prompts(args: argparse.Namespace) -> list[str]:
    """Read the prompts from --prompt, --prompt-file or stdin. All of stdin, or all of a file, is one prompt."""
    if args.prompt is not None:
        prompts: list[str] = args.prompt
        return prompts
    if args.prompt_file is None and sys.stdin.isatty():
        print_to_stderr("The beginning of the text (Ctrl-D ends it):")
    try:
        content = sys.stdin.buffer.read() if args.prompt_file is None else read_regular_or_pipe(args.prompt_file)
    except OSError as error:
        raise ValueError(f"--prompt-file {args.prompt_file} cannot be read: {error.strerror}. Check the path") from error
    if not content and args.prompt_file is not None:
        print_to_stderr(f"--prompt-file {args.prompt_file} is empty: the text is generated without a prompt")
    try:
        return [content.decode("utf-8").removesuffix("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{args.prompt_file or 'stdin'} is not UTF-8: {error}. Convert the prompts to UTF-8") from error


def _generate(
    args: argparse.Namespace, loaded: OpenedModel, sampling: Sampling, prompts: Sequence[str], prompt_ids: Sequence[list[int]]
) -> None:
    """Generate the texts, one batch of prompts after another. Rank 0 prints them: a single text token by token, several texts batch
    by batch."""
    from megatron_lab.inference.continuation import generate_texts, select_max_new_tokens
    from megatron_lab.inference.generate import GenerationRequest, check_request

    model, context, tokenizer = loaded.model, loaded.context, loaded.tokenizer
    assert tokenizer is not None
    groups = {first: prompt_ids[first : first + args.batch_size] for first in range(0, len(prompt_ids), args.batch_size)}
    requests = [
        GenerationRequest(
            group,
            args.max_new_tokens or select_max_new_tokens(model.config, group),
            sampling,
            num_samples=args.num_samples,
            stop_ids=_find_stop_ids(args, tokenizer),
            num_ids=tokenizer.vocab_size,
            first_prompt=first,
        )
        for first, group in groups.items()
    ]
    for request in requests:  # check all requests before the first generation
        check_request(model, request)
    streams = len(prompts) * args.num_samples == 1 and not args.json
    start, num_tokens = time.perf_counter(), 0
    if streams and context.rank == 0:
        _write(prompts[0])
    for request in requests:
        outputs = generate_texts(model, context, tokenizer, request, _write if streams and context.rank == 0 else None)
        num_tokens += sum(len(output.tokens) for output in outputs)
        if context.rank == 0 and not streams:
            for output in outputs:
                _print_output(args, prompts[output.prompt_index], output)
    if context.rank == 0:
        if streams:
            _write("\n")
        elapsed = time.perf_counter() - start
        print_to_stderr(f"{num_tokens} tokens in {elapsed:.2f} s, {num_tokens / elapsed:.1f} a second")


def _print_output(args: argparse.Namespace, prompt: str, output: Continuation) -> None:
    """Print one of several generated texts, with a heading or as a JSON object."""
    if args.json:
        fields = {
            "prompt": prompt,
            "sample": output.sample_index,
            "text": output.text,
            "tokens": output.tokens,
            "ended": output.has_ended,
        }
        _write(json.dumps(fields, ensure_ascii=False) + "\n")
    else:
        _write(f"== prompt {output.prompt_index + 1}, sample {output.sample_index + 1}\n{prompt}{output.text}\n\n")


def _write(text: str) -> None:
    """Print a text immediately. On a terminal, control characters are replaced by U+FFFD."""
    if sys.stdout.isatty():
        from megatron_lab.inference.chat_terminal import replace_control_characters

        text = replace_control_characters(text)
    sys.stdout.write(text)
    sys.stdout.flush()
