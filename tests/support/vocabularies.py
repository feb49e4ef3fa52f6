"""Texts, and small vocabularies of every kind in the files that tokenizers are made from."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, Literal

from hypothesis import strategies as st

from megatron_lab.commands.train_tokenizer import main as train_tokenizer
from tests.support.bpe_trainer import Bpe, train_bpe, visible

TEXT = """The cat sat on the mat; the cats' hats weren't that fat. aaaa aaa aa abababab
    def that(cat, hat=17):\n        return "that's" + cat  # größer, größte, 東京都、京都\n\n\n
The hatter's cat that sat there isn't the mother's, she'll say they've 1234 or 12 of them.
"""

BPE = train_bpe(TEXT, 90)
SOURCES = [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))]
"""Longer texts."""

Style = Literal["gpt2", "llama3", "qwen2"]
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")

_PIECES = ["  ", "\n", "\r\n", "\t", "\0", "\x85", "'LL", "'\u017f", "e\u0301", "\U0001f600\u200d", "123456", "ab", "that", "</s>"]
any_text = st.lists(
    st.sampled_from([*_PIECES, "<|endoftext|>", "<s>", "<think>", "<0x41>"]) | st.text(max_size=20), max_size=12
).map("".join)
"""Any Unicode, with more of what tokenizers treat apart."""


def sentencepiece(corpus: Path, model: Path, vocab_size: int) -> None:
    words = ["--input", str(corpus), "--output", str(model), "--kind", "sentencepiece-bpe", "--vocab-size", str(vocab_size)]
    assert train_tokenizer(words) == 0


def tokenizer_json(bpe: Bpe, style: Style, *, pairs: bool = False) -> dict[str, Any]:
    """A tokenizer.json of this vocabulary, whose <|endoftext|> is a special token; <think> is one that is not special.

    Args:
        bpe: The vocabulary.
        style: Whose file it is like.
        pairs: Write merges as pairs, not as strings.
    """
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": style == "gpt2"}
    pattern = LLAMA3_PATTERN if style == "llama3" else QWEN2_PATTERN
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    end = bpe.vocabulary["<|endoftext|>"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": end, "content": "<|endoftext|>", **flags, "special": True},
            {"id": end + 1, "content": "<think>", **flags, "special": False},
        ],
        "normalizer": {"type": "NFC"} if style == "qwen2" else None,
        "pre_tokenizer": level if style == "gpt2" else {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": style == "llama3",
            "vocab": {token: id for token, id in bpe.vocabulary.items() if token != "<|endoftext|>"},
            "merges": [[*pair] if pairs else " ".join(pair) for pair in bpe.merges],
        },
    }


def write_json(folder: Path, content: Any, name: str = "tokenizer.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder / name


def ranked_tokens(bpe: Bpe) -> list[bytes]:
    """The bytes in their order, then what the merges make."""
    tokens = {visible(bytes([byte])): bytes([byte]) for byte in range(256)}
    for left, right in bpe.merges:
        tokens.setdefault(left + right, tokens[left] + tokens[right])
    return [*tokens.values()]


def rank_list(tokens: list[bytes]) -> list[dict[str, Any]]:
    coded = [base64.b64encode(token).decode() for token in tokens]
    return [{"rank": rank, "token_bytes": token, "token_str": None} for rank, token in enumerate(coded)]


def rank_lines(tokens: list[bytes]) -> str:
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
