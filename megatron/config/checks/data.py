"""Rules about data and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import Finding, change, rule, without
from megatron.config.config import Config
from megatron.config.data import PATH_FIELDS, SPLIT_FIELDS, TOKENIZER_NEEDS, parse_data_words, parse_split, path_flags
from megatron.config.setting import typed

_ONE_SOURCE = "Each says where the tokens come from."


@rule(reads=("mock_data", *PATH_FIELDS))
def one_source(config: Config, world_size: int) -> Iterator[Finding]:
    """Tokens come from indexed datasets, named in one way, or are made up."""
    data = config.data
    given = path_flags(data)
    ways = list(dict.fromkeys("train_data_path" if field in SPLIT_FIELDS else field for field in given))
    if data.mock_data and given:
        message = f"--mock-data and {typed(given[0])} exclude each other."
        yield Finding(message, [change(mock_data=False)], _ONE_SOURCE, (*given, "mock_data"))
    elif not data.mock_data and not given:
        why = "It takes the prefix of an indexed dataset (PREFIX.bin and PREFIX.idx); --mock-data trains on made-up tokens."
        yield Finding("--data-path is missing.", [change(mock_data=True)], why, ("data_path", "mock_data"))
    elif len(ways) > 1:
        stay = [without(config, *(field for field in given if field != kept)) for kept in ways if kept != "train_data_path"]
        yield Finding(f"{' and '.join(map(typed, ways))} exclude each other.", [stay], _ONE_SOURCE, tuple(given))


@rule(reads=("mock_data", *SPLIT_FIELDS, "eval_iters"))
def own_splits_are_whole(config: Config, world_size: int) -> Iterator[Finding]:
    """Where the splits have datasets of their own, those that are read are there."""
    data, eval_iters = config.data, config.training.eval_iters
    given = tuple(field for field in SPLIT_FIELDS if getattr(data, field))
    if not given or data.mock_data:
        return
    if not data.train_data_path:
        message = f"{typed(given[0])} is given, but --train-data-path is not."
        yield Finding(message, why="Training needs data.", fields=(*given, "train_data_path"))
    elif eval_iters > 0 and not data.valid_data_path:
        yield Finding(
            f"--train-data-path is given without --valid-data-path, but --eval-iters is {eval_iters}.",
            [change(eval_iters=0)],
            "An evaluation reads validation data; --eval-iters 0 switches it off.",
            ("train_data_path", "valid_data_path", "eval_iters"),
        )


@rule("whole_documents", "data_order", reads=("mock_data",))
def whole_documents_have_one_order(config: Config, world_size: int) -> Iterator[Finding]:
    """Megatron-LM's order is one of windows over documents laid end to end; samples of made-up tokens have no documents."""
    data = config.data
    if data.whole_documents and data.data_order != "epoch":
        yield Finding("--whole-documents cannot be used with --data-order megatron.", [change(data_order="epoch")])
    elif data.whole_documents and data.mock_data:
        yield Finding(
            "--whole-documents cannot be used with --mock-data.",
            [change(whole_documents=False)],
            fields=("whole_documents", "mock_data"),
        )


@rule(reads=("data_path", *SPLIT_FIELDS))
def blends_can_be_read(config: Config, world_size: int) -> Iterator[Finding]:
    """The words of a data path are prefixes, or weights and prefixes in turn."""
    for field in ("data_path", *SPLIT_FIELDS):
        words = getattr(config.data, field)
        try:
            if words:
                parse_data_words(words, typed(field))
        except ValueError as error:
            message, why = str(error).split("\n  ")
            yield Finding(message, why=why, fields=(field,))


@rule("split")
def split_has_shares(config: Config, world_size: int) -> Iterator[Finding]:
    """The split is up to three shares, and that of training is not empty."""
    text = config.data.split
    try:
        shares = parse_split(text)
    except ValueError:
        yield Finding(
            f"--split {text!r} is not a list of shares.",
            [change(split="969,30,1")],
            "It takes the shares of training, validation and test: up to three numbers of 0 or more with commas between.",
        )
        return
    if shares[0] == 0:
        yield Finding(f"--split {text!r} gives training nothing.", why="The first share is that of the training documents.")


@rule(reads=("tokenizer_type", *dict.fromkeys(field for needs in TOKENIZER_NEEDS.values() for field in needs)))
def tokenizer_has_parts(config: Config, world_size: int) -> Iterator[Finding]:
    """A tokenizer is made from certain files or numbers."""
    kind = config.data.tokenizer_type
    missing = [field for field in TOKENIZER_NEEDS.get(kind or "", ()) if getattr(config.data, field) is None]
    if missing:
        needs = " and ".join(map(typed, missing))
        why = "It is the number of token ids." if missing == ["vocab_size"] else "The tokenizer is read from these files."
        yield Finding(f"--tokenizer-type {kind} needs {needs}.", why=why, fields=("tokenizer_type", *missing))
