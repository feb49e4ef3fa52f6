"""The two files of a GPT-2 BPE tokenizer.

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
    check_ids,
    read_json,
    token_bytes,
)
from megatron.data.tokenizers.byte_bpe import ByteBPETokenizer

END_OF_TEXT = "<|endoftext|>"


def read_bpe_files(vocab_file: Path, merge_file: Path) -> ByteVocabulary:
    """Read and check vocab.json and merges.txt.

    Raises:
        ValueError: a file is not what it should be, or the two do not belong together.
    """
    source = f"--vocab-file {vocab_file}"
    vocabulary = check_ids(source, read_json(vocab_file, source, "a vocabulary like GPT-2's vocab.json"))
    if END_OF_TEXT not in vocabulary:
        raise ValueError(f"{source} has no token {END_OF_TEXT}, which ends a document.\n  Add it with an id of its own.")
    ids = byte_ids(source, vocabulary)
    to_byte = byte_characters()
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


def byte_ids(source: str, vocabulary: dict[str, int]) -> dict[bytes, int]:
    """Ids of the 256 bytes.

    Raises:
        ValueError: some have none.
    """
    to_byte = byte_characters()
    missing = [byte for character, byte in to_byte.items() if character not in vocabulary]
    if missing:
        raise ValueError(
            f"{source} has no token for {len(missing)} of the 256 bytes "
            f"({', '.join(f'{b:#04x}' for b in missing[:8])}), so not every text could be encoded.\n"
            "  Take a byte-level vocabulary like GPT-2's."
        )
    return {bytes([byte]): vocabulary[character] for character, byte in to_byte.items()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--merge-file {path} is not a text in UTF-8: {error}\n  It should be like GPT-2's merges.txt.") from error


class GPT2BPETokenizer(ByteBPETokenizer):
    """Byte-level BPE with GPT-2's splitting into pieces; the end of a document is ``<|endoftext|>``.

    Args:
        vocab_file: vocab.json (or encoder.json).
        merge_file: merges.txt (or vocab.bpe).

    Raises:
        ValueError: a file is not what it should be, or the two do not belong together.
    """

    def __init__(self, vocab_file: Path, merge_file: Path) -> None:
        super().__init__(read_bpe_files(vocab_file, merge_file))
