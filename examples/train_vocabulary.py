"""Train a sentencepiece vocabulary on the texts of a JSON-lines file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

_ENOUGH_BYTES = 4_000_000  # of lines; more makes a small vocabulary slower to train, hardly better


def lines(corpus: Path, enough_bytes: int = _ENOUGH_BYTES) -> Iterator[str]:
    """Lines of the texts, from the first on, until there are enough."""
    taken = 0
    with corpus.open(encoding="utf-8") as file:
        for document in file:
            for line in json.loads(document)["text"].splitlines():
                yield line
                taken += len(line)
            if taken >= enough_bytes:
                return


def train(corpus: Path, output: Path, vocab_size: int) -> None:
    """Write a byte-pair vocabulary that can spell any text and gives it back unchanged.

    Raises:
        RuntimeError: sentencepiece cannot make that many pieces from the corpus.
    """
    from sentencepiece import SentencePieceTrainer  # only after --help

    unfinished = output.with_name(output.name + ".unfinished")
    try:
        with unfinished.open("wb") as model:
            SentencePieceTrainer.train(
                sentence_iterator=lines(corpus),
                model_writer=model,
                model_type="bpe",
                vocab_size=vocab_size,
                byte_fallback=True,  # what no piece covers is spelled in bytes
                user_defined_symbols=["\n"],
                # Source code: blanks matter, so nothing is normalised, joined or put in front.
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                allow_whitespace_only_pieces=True,
                max_sentence_length=1 << 16,
                minloglevel=2,
            )
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    flags = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    flags.add_argument("--input", type=Path, required=True, metavar="FILE", help='JSON lines with the key "text"')
    flags.add_argument("--output", type=Path, required=True, metavar="FILE", help="model file to write")
    flags.add_argument("--vocab-size", type=int, default=4096, metavar="N", help="number of pieces (4096)")
    given = flags.parse_args(arguments)
    try:
        train(given.input, given.output, given.vocab_size)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"train_vocabulary.py: error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {given.output}: {given.vocab_size:,} pieces")
    return 0


if __name__ == "__main__":
    sys.exit(main())
