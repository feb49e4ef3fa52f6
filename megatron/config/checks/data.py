"""Rules about data and tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.config.checks.finding import Finding, Rule, change, switch_on
from megatron.config.config import Config

TOKENIZER_NEEDS: dict[str, tuple[str, ...]] = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
    "ByteTokenizer": (),
}
"""The settings that each kind of tokenizer is made from."""


def one_source(config: Config, world_size: int) -> Iterator[Finding]:
    """Tokens come from one indexed dataset or are made up."""
    data, fields = config.data, ("data_path", "mock_data")
    if data.mock_data and data.data_path:
        yield Finding(
            fields,
            "--mock-data and --data-path exclude each other.",
            "Each says where the tokens come from.",
            ((change(mock_data=False),),),
        )
    elif not data.mock_data and not data.data_path:
        yield Finding(
            fields,
            "--data-path is missing.",
            "It takes the prefix of an indexed dataset (PREFIX.bin and PREFIX.idx); --mock-data trains on made-up tokens.",
            (switch_on("mock_data"),),
        )
    if len(data.data_path) > 1:
        weighted = len(data.data_path) == 2 and _is_number(data.data_path[0])
        yield Finding(
            fields,
            f"--data-path {' '.join(data.data_path)} names more than one prefix.",
            "Blending datasets is not built yet; give one prefix, without a weight.",
            ((change(data_path=data.data_path[1:] if weighted else data.data_path[:1]),),),
        )


def split_has_shares(config: Config, world_size: int) -> Iterator[Finding]:
    """The split is up to three shares, and what the run reads is not empty."""
    text, fields = config.data.split, ("split",)
    shares = _shares(text)
    if shares is None:
        yield Finding(
            fields,
            f"--split {text!r} is not a list of shares.",
            "It takes the shares of training, validation and test: up to three numbers of 0 or more with commas between.",
            ((change(split="969,30,1"),),),
        )
    elif shares[0] == 0:
        yield Finding(fields, f"--split {text!r} gives training nothing.", "The first share is that of the training documents.")
    elif config.training.eval_iters > 0 and config.data.data_path and (len(shares) < 2 or shares[1] == 0):
        yield Finding(
            ("split", "eval_iters"),
            f"--split {text!r} gives validation nothing, but --eval-iters is {config.training.eval_iters}.",
            "An evaluation reads the validation documents, the second share; --eval-iters 0 switches it off.",
            ((change(eval_iters=0),),),
        )


def tokenizer_has_parts(config: Config, world_size: int) -> Iterator[Finding]:
    """A tokenizer is made from certain files or numbers."""
    kind = config.data.tokenizer_type
    missing = [field for field in TOKENIZER_NEEDS.get(kind or "", ()) if getattr(config.data, field) is None]
    if missing:
        needs = " and ".join(f"--{field.replace('_', '-')}" for field in missing)
        rule = "It is the number of token ids." if missing == ["vocab_size"] else "The tokenizer is read from these files."
        yield Finding(("tokenizer_type", *missing), f"--tokenizer-type {kind} needs {needs}.", rule)


def _shares(text: str) -> list[float] | None:
    """Numbers of a split, or None where it is not one."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 3 or not all(map(_is_number, parts)):
        return None
    shares = [float(part) for part in parts]
    return shares if all(math.isfinite(share) and share >= 0 for share in shares) and sum(shares) > 0 else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


RULES: tuple[Rule, ...] = (one_source, split_has_shares, tokenizer_has_parts)
