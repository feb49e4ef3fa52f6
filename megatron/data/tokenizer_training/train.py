"""Train a vocabulary on texts, and write its files: all of them under their names, or none."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron.data.indexed_writer import unfinished
from megatron.data.tokenizers.bpe_files import END_OF_TEXT

Kind = Literal["sentencepiece-bpe", "sentencepiece-unigram", "byte-bpe"]

_LONGEST_LINE = 1 << 14  # characters; a line in UTF-8 has four times as many bytes at most


def output_files(kind: Kind, output: Path) -> list[Path]:
    """What is written: a model file, or files in a folder."""
    if kind == "byte-bpe":
        return [output / name for name in ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json")]
    return [output]


def train(kind: Kind, texts: Sequence[str], vocab_size: int, special_tokens: Sequence[str], output: Path) -> None:
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
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ValueError(
            '--kind byte-bpe needs the tokenizers library, which is not installed: pip install "megatron-3d[tokenizers]"'
        ) from error
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
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document["added_tokens"] = [{"id": vocabulary[token], "content": token, **flags, "special": True} for token in special]
    return {
        "vocab.json": _json(vocabulary),
        "merges.txt": "".join(["#version: 0.2\n", *(f"{left} {right}\n" for left, right in merges)]).encode(),
        "tokenizer.json": _json(document),
        "tokenizer_config.json": _json({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}),
    }


def _json(content: Any) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()


def _write(contents: Mapping[Path, bytes]) -> None:
    partial = {path: Path(unfinished(str(path))) for path in contents}
    try:
        for path, content in contents.items():
            partial[path].write_bytes(content)
        for path in contents:
            partial[path].replace(path)
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
