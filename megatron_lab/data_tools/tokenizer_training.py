"""A sample of texts, bounded in memory and always the same for the same input, and a vocabulary trained on it.

All of its files are written under their names, or none.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.config.extras import optional
from megatron.data.indexed_writer import appearing
from megatron_lab.data_tools.preprocess.errors import DamagedFileError
from megatron_lab.data_tools.preprocess.input_shards import cut, find_sources
from megatron_lab.data_tools.preprocess.text_records import PARSERS, InputPiece, Kind, parse_values, records
from megatron_lab.data_tools.sentencepiece_json import added_token
from megatron_lab.tokenizers.vocabulary_files import END_OF_TEXT

VocabularyKind = Literal["sentencepiece-bpe", "sentencepiece-unigram", "byte-bpe"]
OnError = Literal["stop", "skip", "skip-files"]

_LONGEST_LINE = 1 << 14  # characters; a line in UTF-8 has four times as many bytes at most


def output_files(kind: VocabularyKind, output: Path) -> list[Path]:
    """What is written: a model file, or files in a folder."""
    if kind == "byte-bpe":
        return [output / name for name in ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json")]
    return [output]


def train(kind: VocabularyKind, texts: Sequence[str], vocab_size: int, special_tokens: Sequence[str], output: Path) -> None:
    """Train and write; the same texts give the same files.

    Args:
        kind: Library and model.
        texts: Documents.
        vocab_size: All ids, special ones included.
        special_tokens: Tokens that no text gives, beside the end of a document, which is always there.
        output: A file, or for byte-bpe a folder (made if it is not there).

    Raises:
        ValueError: so many tokens cannot be made of the texts, or a library is missing.
        OSError: the files cannot be written.
    """
    if kind == "byte-bpe":
        contents = _train_bytes(texts, vocab_size, special_tokens)
        output.mkdir(parents=True, exist_ok=True)
    else:
        contents = {"": _train_sentencepiece(kind.removeprefix("sentencepiece-"), texts, vocab_size, special_tokens)}
    _write({output / name if name else output: content for name, content in contents.items()})


def _train_sentencepiece(model_type: str, texts: Sequence[str], vocab_size: int, special_tokens: Sequence[str]) -> bytes:
    """A model that can spell any text and gives it back unchanged; a document ends with its ``</s>``."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            byte_fallback=True,  # what no piece covers is spelled in bytes, as line ends are
            control_symbols=list(special_tokens),
            # Blanks matter, of source code above all, so nothing is normalised, joined or put in front.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=4 * _LONGEST_LINE,
            num_threads=16,  # the last bits of a unigram model depend on it
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise ValueError(f"--vocab-size {vocab_size}: sentencepiece cannot make that of the texts: {error}") from error
    return model.getvalue()


def _lines(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            for at in range(0, len(line), _LONGEST_LINE):
                yield line[at : at + _LONGEST_LINE]


def _train_bytes(texts: Sequence[str], vocab_size: int, special_tokens: Sequence[str]) -> dict[str, bytes]:
    """The files of a vocabulary like GPT-2's: bytes, merges in their order, then the special tokens."""
    optional("tokenizers", "--kind byte-bpe needs the tokenizers library")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = [END_OF_TEXT, *special_tokens]
    wanted = vocab_size - len(special)
    if wanted < 256:
        raise ValueError(f"--vocab-size {vocab_size} is too small: 256 bytes and {len(special)} special tokens are always there.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        iter(texts), trainers.BpeTrainer(vocab_size=wanted, initial_alphabet=alphabet, show_progress=False)
    )
    document = json.loads(tokenizer.to_str())
    vocabulary, merges = document["model"]["vocab"], [tuple(merge) for merge in document["model"]["merges"]]
    if len(vocabulary) < wanted:
        raise ValueError(
            f"--vocab-size {vocab_size}: the texts have words for {len(vocabulary) + len(special):,} tokens only.\n"
            "  Give that, or more text."
        )
    for token in special:
        if token in vocabulary:
            raise ValueError(f"--special-tokens {token}: the texts gave a token of this name. Choose another.")
        vocabulary[token] = len(vocabulary)
    document["added_tokens"] = [added_token(vocabulary[token], token, special=True) for token in special]
    return {
        "vocab.json": _json(vocabulary),
        "merges.txt": "".join(["#version: 0.2\n", *(f"{left} {right}\n" for left, right in merges)]).encode(),
        "tokenizer.json": _json(document),
        "tokenizer_config.json": _json({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}),
    }


def _json(content: Any) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()


def _write(contents: Mapping[Path, bytes]) -> None:
    with appearing(*map(str, contents), sync=False) as files:
        for file, content in zip(files, contents.values(), strict=True):
            file.write(content)


_LONGEST = 1 << 20  # characters of a document that are taken
_FIBONACCI = 0x9E3779B97F4A7C15  # multiples of it, modulo 2**64, are spread evenly (Knuth, The Art of Computer Programming, 6.4)
_HELD_OUT = 20


@dataclass(frozen=True)
class TextSample:
    """Texts of some of the documents."""

    training: list[str]
    held_out: list[str]
    """Every 20th text of the sample; none if there is only one."""
    num_documents: int
    """That were read."""
    num_left_out: int = 0
    """Records of the sample that could not be used, and files."""
    first_left_out: str = ""
    """Where the first of them is, and what is wrong with it."""

    @property
    def num_bytes(self) -> int:
        """Size of the training texts."""
        return sum(len(text.encode()) for text in self.training)


def take_sample(
    inputs: Sequence[str], keys: Sequence[str], max_bytes: int, *, kind: Kind | None = None, on_error: OnError = "stop"
) -> TextSample:
    """Read all documents and keep some, spread evenly over all: the share is halved each time there are too many bytes.

    Args:
        inputs: Files and folders of any kind that tools/preprocess_data.py reads.
        keys: Of the texts in JSON lines, or their columns in tables.
        max_bytes: Of texts in memory (at least one text is kept). Of a document the first million characters count.
        kind: That of all files; None: as their names say.
        on_error: As that tool's --on-error. Only records of the sample are looked at.

    Raises:
        ValueError: an input that is missing or damaged, a bad record, or no text at all.
    """
    kept: list[tuple[int, int, str]] = []
    left_out: list[str] = []
    size = least = num_documents = 0
    for number, (source, at, record) in enumerate(
        _records(inputs, keys, kind, left_out.append if on_error == "skip-files" else None)
    ):
        height = 64 - (number * _FIBONACCI % 2**64).bit_length()  # reaches k for one number in 2**k
        num_documents += 1
        if height < least:
            continue
        try:
            text = "\n".join(PARSERS[source.kind](record, keys, parse_values) or [])[:_LONGEST]
        except (ValueError, RecursionError) as error:
            if on_error == "stop":
                raise ValueError(
                    f"{source.place(at)}: {error}\n  Mend it, or leave such records out with --on-error skip."
                ) from error
            left_out.append(f"{source.place(at)}: {error}")
            continue
        if not text:
            continue
        kept.append((height, len(text.encode()), text))
        size += kept[-1][1]
        while size > max_bytes and len(kept) > 1 and least < 64:
            least += 1
            kept = [entry for entry in kept if entry[0] >= least]
            size = sum(entry[1] for entry in kept)
    texts = [text for _, _, text in kept]
    if not texts:
        first = f"\n  {len(left_out):,} bad records and files were left out, the first: {left_out[0]}" if left_out else ""
        raise ValueError(f"--input {' '.join(inputs)}: there is no text in it.{first}")
    training = [text for number, text in enumerate(texts) if number % _HELD_OUT != _HELD_OUT - 1]
    held_out = texts[_HELD_OUT - 1 :: _HELD_OUT]
    if not held_out and len(training) > 1:
        held_out = [training.pop()]
    return TextSample(training, held_out, num_documents, len(left_out), left_out[0] if left_out else "")


def _records(
    inputs: Sequence[str], keys: Sequence[str], kind: Kind | None, pass_over: Callable[[str], None] | None
) -> Iterator[tuple[InputPiece, int, Any]]:
    """A file, the number of the record in it, the record."""
    sources, _ = find_sources(inputs, kind)
    for source in sources:
        number = 0
        for shard in cut([source], sys.maxsize, ("text",), fields=keys, pass_over=pass_over):
            for piece in shard.pieces:
                try:
                    with closing(records(piece, keys, lambda _: None)) as found:
                        for record in found:
                            yield source, number, record
                            number += 1
                except DamagedFileError as error:
                    if pass_over is None:
                        raise
                    pass_over(str(error))
