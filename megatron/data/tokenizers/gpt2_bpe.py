"""Reads the two files of a GPT-2 BPE tokenizer.

vocab.json gives each token its id; merges.txt lists pairs of tokens, the first to be merged first. Tokens are written with one
printable character a byte (`byte_characters`).
"""

from __future__ import annotations

from pathlib import Path

from megatron.data.tokenizers.bpe_rules import (
    GPT2_PATTERN,
    ByteVocabulary,
    MergeRules,
    Pair,
    byte_characters,
    bytes_without,
    check_ids,
    read_json,
    token_bytes,
)

END_OF_TEXT = "<|endoftext|>"


def read_gpt2_bpe(vocab_file: Path, merge_file: Path) -> ByteVocabulary:
    """Read and check vocab.json (or encoder.json) and merges.txt (or vocab.bpe); a document ends with ``<|endoftext|>``.

    Raises:
        ValueError: a file is not what it should be, or the two do not belong together.
    """
    source = f"--vocab-file {vocab_file}"
    vocabulary = check_ids(source, read_json(vocab_file, source, "a vocabulary like GPT-2's vocab.json"))
    if END_OF_TEXT not in vocabulary:
        raise ValueError(f"{source} has no token {END_OF_TEXT}, which ends a document.\n  Add it with an id of its own.")
    to_byte = byte_characters()
    ids = {bytes([byte]): vocabulary[character] for character, byte in to_byte.items() if character in vocabulary}
    if (told := bytes_without(source, ids)) is not None:
        raise ValueError(f"{told}\n  Take a byte-level vocabulary like GPT-2's.")
    ranks: dict[Pair, int] = {}
    for number, line in enumerate(_lines(merge_file), start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        unknown = [part for part in (*parts, "".join(parts)) if part not in vocabulary]
        pair = tuple(token for part in parts if (token := token_bytes(part, to_byte)) is not None)
        if len(parts) != 2 or len(pair) != 2 or unknown:
            raise ValueError(
                f"--merge-file {merge_file}, line {number}: {line!r} must be two tokens and together make a third, all "
                f"in {vocab_file}{f' (not there: {unknown[-1]!r})' if unknown else ''}.\n  The two files must be of the same "
                "tokenizer."
            )
        ids[pair[0] + pair[1]] = vocabulary["".join(parts)]
        ranks.setdefault(pair, len(ranks))
    return ByteVocabulary(
        source=f"--merge-file {merge_file}",
        pattern=GPT2_PATTERN,
        rules=MergeRules(ranks),
        ids=ids,
        num_ids=max(vocabulary.values()) + 1,
        eod=vocabulary[END_OF_TEXT],
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--merge-file {path} is not a text in UTF-8: {error}\n  It should be like GPT-2's merges.txt.") from error
