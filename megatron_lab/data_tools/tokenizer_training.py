"""Training of a tokenizer on a sample of the input texts. The sample has a limited size and depends only on the input.

The output files get their final names only after all of them are written, so no partial tokenizer appears.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron.config.optional_packages import import_optional
from megatron.data.indexed_writer import write_atomically
from megatron_lab.data_tools.preprocess.errors import DamagedFileError, UndecodableRecordError
from megatron_lab.data_tools.preprocess.file_formats import FileFormat
from megatron_lab.data_tools.preprocess.input_shards import find_sources, split_into_shards
from megatron_lab.data_tools.preprocess.text_encoding import EncodingNotes, RecordDecoder, TextEncoding
from megatron_lab.data_tools.preprocess.text_records import InputRange, get_parser, parse_values, read_records
from megatron_lab.data_tools.sentencepiece_json import build_added_token
from megatron_lab.tokenizers.vocabulary_files import GPT2_EOD_TOKEN

VocabType = Literal["sentencepiece-bpe", "sentencepiece-unigram", "byte-bpe"]
"""Library and model type of the trained vocabulary."""
OnError = Literal["stop", "skip", "skip-files"]
"""Treatment of unusable records and files: stop, skip records, or skip records and files."""

_MAX_LINE_CHARACTERS = 1 << 14  # a line in UTF-8 has at most four times as many bytes


def list_output_files(vocab_type: VocabType, output: Path) -> list[Path]:
    """Return the paths of the files that `train_tokenizer` writes.

    Args:
        output: path of the model file for sentencepiece, or of the folder of several files for byte-bpe.
    """
    if vocab_type == "byte-bpe":
        return [output / name for name in ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json")]
    return [output]


def train_tokenizer(
    vocab_type: VocabType, texts: Sequence[str], vocab_size: int, special_tokens: Sequence[str], output: Path
) -> None:
    """Train a tokenizer's vocabulary and write its files. The same texts always give the same files.

    Args:
        vocab_type: library (sentencepiece, or tokenizers for byte-bpe) and algorithm (BPE or unigram).
        texts: documents to train on.
        vocab_size: number of ids, including special tokens.
        special_tokens: tokens that the encoding of a text never produces. The end-of-document token is always added to them.
        output: path of the model file; for byte-bpe, path of a folder, which is created if it does not exist.

    Raises:
        ValueError: the texts do not suffice for this vocabulary size, or a library is missing.
        OSError: the files cannot be written.
    """
    if vocab_type == "byte-bpe":
        contents = _train_byte_bpe(texts, vocab_size, special_tokens)
        output.mkdir(parents=True, exist_ok=True)
    else:
        contents = {"": _train_sentencepiece(vocab_type.removeprefix("sentencepiece-"), texts, vocab_size, special_tokens)}
    _write_files({output / name if name else output: content for name, content in contents.items()})


def _train_sentencepiece(model_type: str, texts: Sequence[str], vocab_size: int, special_tokens: Sequence[str]) -> bytes:
    """Train a sentencepiece model and return the content of its file. Any text is encoded without loss: decoding gives the same
    text.

    The end-of-document token is ``</s>``.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_split_lines(texts),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            byte_fallback=True,  # characters without a token, such as line ends, are encoded as bytes
            control_symbols=list(special_tokens),
            # Spaces matter, especially in source code, so the text is not normalized and no space is removed or added.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=4 * _MAX_LINE_CHARACTERS,
            num_threads=16,  # a fixed number, because the last bits of a unigram model depend on it
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"--vocab-size {vocab_size}: sentencepiece cannot build a vocabulary of this size from the texts: {error}.\n"
            "  Choose another --vocab-size, or use more text."
        ) from error
    return model.getvalue()


def _split_lines(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), _MAX_LINE_CHARACTERS):
                yield line[start : start + _MAX_LINE_CHARACTERS]


def _train_byte_bpe(texts: Sequence[str], vocab_size: int, special_tokens: Sequence[str]) -> dict[str, bytes]:
    """Train a byte-level BPE vocabulary like that of GPT-2. Return the contents of its files by file name.

    The lowest ids belong to the bytes, then come the merged tokens in the order of the merges, then the special tokens.
    """
    import_optional("tokenizers", "--kind byte-bpe needs the tokenizers library")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    all_special_tokens = [GPT2_EOD_TOKEN, *special_tokens]
    bpe_vocab_size = vocab_size - len(all_special_tokens)
    if bpe_vocab_size < 256:
        raise ValueError(
            f"--vocab-size {vocab_size} is too small: 256 bytes and {len(all_special_tokens)} special tokens are always included. "
            "Raise --vocab-size."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        iter(texts), trainers.BpeTrainer(vocab_size=bpe_vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer_json = json.loads(tokenizer.to_str())
    vocab, merges = tokenizer_json["model"]["vocab"], [tuple(merge) for merge in tokenizer_json["model"]["merges"]]
    if len(vocab) < bpe_vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size}: the texts suffice for only {len(vocab) + len(all_special_tokens):,} tokens.\n"
            "  Set --vocab-size to this number, or use more text."
        )
    for token in all_special_tokens:
        if token in vocab:
            raise ValueError(
                f"--special-tokens {token}: the trained vocabulary has an ordinary token with this text. Choose another name."
            )
        vocab[token] = len(vocab)
    tokenizer_json["added_tokens"] = [build_added_token(vocab[token], token, special=True) for token in all_special_tokens]
    return {
        "vocab.json": _encode_json(vocab),
        "merges.txt": "".join(["#version: 0.2\n", *(f"{left} {right}\n" for left, right in merges)]).encode(),
        "tokenizer.json": _encode_json(tokenizer_json),
        "tokenizer_config.json": _encode_json({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": GPT2_EOD_TOKEN}),
    }


def _encode_json(content: Any) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()


def _write_files(contents: Mapping[Path, bytes]) -> None:
    with write_atomically(*map(str, contents), sync=False) as files:
        for file, content in zip(files, contents.values(), strict=True):
            file.write(content)


_MAX_DOCUMENT_CHARACTERS = 1 << 20  # longer documents are truncated in the sample
_FIBONACCI_MULTIPLIER = 0x9E3779B97F4A7C15  # multiples modulo 2**64 are spread evenly (Knuth, The Art of Computer Programming, 6.4)
_HELD_OUT_INTERVAL = 20
"""One text in this number of texts is held out."""


@dataclass(frozen=True)
class TextSample:
    """Sample of the input texts for training a tokenizer. Held-out texts serve to measure the trained tokenizer."""

    training_texts: list[str]
    held_out_texts: list[str]
    """Every 20th text of the sample, not used for training; empty if the sample has only one text."""
    num_documents: int
    """Number of documents of the input, in the sample or not."""
    num_skipped: int = 0
    """Number of invalid records and unreadable files that were skipped. Only records that belong to the sample are checked."""
    first_skipped: str = ""
    """Location and problem of the first skipped record or file; empty if nothing was skipped."""
    encoding_notes: EncodingNotes = field(default_factory=EncodingNotes)
    """Files that are not UTF-8, and records with invalid bytes. Only records that belong to the sample are checked."""

    @property
    def num_bytes(self) -> int:
        """Number of UTF-8 bytes of the training texts."""
        return sum(len(text.encode()) for text in self.training_texts)


def sample_texts(
    inputs: Sequence[str],
    keys: Sequence[str],
    max_bytes: int,
    *,
    file_format: FileFormat | None = None,
    split: str | None = None,
    on_error: OnError = "stop",
    text_encoding: TextEncoding = TextEncoding(),  # noqa: B008 - a constant
) -> TextSample:
    """Read all documents and return a sample that is spread evenly over them.

    The sample starts with all documents. Each time its size exceeds `max_bytes`, half of the documents, evenly spread, are
    excluded.

    Args:
        inputs: files and folders of any format that tools/preprocess_data.py reads.
        keys: names of the texts in JSON lines, or of the columns in tables.
        max_bytes: maximum size of the sampled texts in UTF-8 bytes. At least one text is sampled. Of each document, only the first
            million characters are used.
        file_format: format of all files; None to detect it from their names.
        split: split to read of each folder that `DatasetDict.save_to_disk` wrote.
        on_error: treatment of invalid records and unreadable files, as --on-error of tools/preprocess_data.py. Only records that
            belong to the sample are checked.
        text_encoding: encoding of the files, and treatment of invalid bytes.

    Raises:
        ValueError: an input is missing or damaged, a record is invalid, or no input has a text.
    """
    sampled: list[tuple[int, int, str]] = []
    skipped: list[str] = []
    notes = EncodingNotes()
    num_bytes = min_level = num_documents = 0
    for document_index, (source, record_index, record, decoder) in enumerate(
        _iter_records(inputs, keys, file_format, split, text_encoding, skipped.append if on_error == "skip-files" else None)
    ):
        level = 64 - (document_index * _FIBONACCI_MULTIPLIER % 2**64).bit_length()  # one document in 2**k has level k or more
        num_documents += 1
        if level < min_level:
            continue
        try:
            text = "\n".join(get_parser(source.file_format)(record, keys, parse_values, decoder) or [])[:_MAX_DOCUMENT_CHARACTERS]
        except (ValueError, RecursionError) as error:
            decoder.take_replaced()
            notes.num_undecodable += isinstance(error, UndecodableRecordError)
            if on_error == "stop":
                raise ValueError(
                    f"{source.format_location(record_index)}: {error}{decoder.suggest_encoding(record)}\n"
                    "  To skip such records instead, set --on-error skip."
                ) from error
            skipped.append(f"{source.format_location(record_index)}: {error}")
            continue
        if decoder.note is not None:
            notes.add_file(source.path, decoder.note)
        if (replaced := decoder.take_replaced()) is not None:
            notes.add_replaced(source.format_location(record_index), *replaced)
        if not text:
            continue
        sampled.append((level, len(text.encode()), text))
        num_bytes += sampled[-1][1]
        while num_bytes > max_bytes and len(sampled) > 1 and min_level < 64:
            min_level += 1
            sampled = [entry for entry in sampled if entry[0] >= min_level]
            num_bytes = sum(entry[1] for entry in sampled)
    texts = [text for _, _, text in sampled]
    if not texts:
        first_skipped = f"\n  {len(skipped):,} invalid records and files were skipped, the first: {skipped[0]}" if skipped else ""
        raise ValueError(f"--input {' '.join(inputs)}: the input contains no text. Choose other files.{first_skipped}")
    training_texts = [text for i, text in enumerate(texts) if i % _HELD_OUT_INTERVAL != _HELD_OUT_INTERVAL - 1]
    held_out_texts = texts[_HELD_OUT_INTERVAL - 1 :: _HELD_OUT_INTERVAL]
    if not held_out_texts and len(training_texts) > 1:
        held_out_texts = [training_texts.pop()]
    return TextSample(training_texts, held_out_texts, num_documents, len(skipped), skipped[0] if skipped else "", notes)


def _iter_records(
    inputs: Sequence[str],
    keys: Sequence[str],
    file_format: FileFormat | None,
    split: str | None,
    text_encoding: TextEncoding,
    on_skipped_file: Callable[[str], None] | None,
) -> Iterator[tuple[InputRange, int, Any, RecordDecoder]]:
    """Read all records of the inputs.

    Args:
        split: split to read of each folder that `DatasetDict.save_to_disk` wrote.
        text_encoding: encoding of the files, and treatment of invalid bytes.
        on_skipped_file: called with the problem of each unusable file, which is skipped; None to raise the error.

    Yields:
        The file, the index of the record within the file, the record, and the decoder for it.
    """
    sources, messages = find_sources(inputs, file_format, split=split)
    for message in messages:  # about skipped and empty files
        print(message, file=sys.stderr)
    for source in sources:
        record_index = 0
        for shard in split_into_shards(
            [source], sys.maxsize, ("text",), columns=keys, text_encoding=text_encoding, on_skipped_file=on_skipped_file
        ):
            for input_range in shard.ranges:
                decoder = RecordDecoder(text_encoding)
                try:
                    with closing(read_records(input_range, keys, lambda _: None, decoder)) as range_records:
                        for record in range_records:
                            yield input_range, record_index, record, decoder
                            record_index += 1
                except DamagedFileError as error:
                    if on_skipped_file is None:
                        raise
                    on_skipped_file(str(error))
