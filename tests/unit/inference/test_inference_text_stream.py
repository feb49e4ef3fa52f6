"""Text as it comes: whole characters, and together what decoding all at once gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron.data.tokenizer import ByteTokenizer, NullTokenizer
from megatron_lab.inference.continuation import TextStream

TEXT = "Fünf 中文 \U0001f600 Ende."


def stream(decode: Callable[[Sequence[int]], str], before: Sequence[int], ids: Sequence[int]) -> list[str]:
    out = TextStream(decode, before)
    return [*(out.add(id) for id in ids), out.finish()]


def test_characters_of_several_bytes_come_whole() -> None:
    tokenizer = ByteTokenizer()
    pieces = stream(tokenizer.decode, tokenizer.encode("x"), tokenizer.encode(TEXT))
    assert "".join(pieces) == TEXT
    assert [piece for piece in pieces if piece] == list(TEXT)
    assert pieces[1:3] == ["", "ü"]


def test_a_cut_character_is_shown_at_the_end() -> None:
    tokenizer = ByteTokenizer()
    pieces = stream(tokenizer.decode, [], tokenizer.encode("a中")[:-1])
    assert pieces == ["a", "", "", "\ufffd"]


def test_bytes_that_never_become_a_character_do_not_hold_the_rest_back() -> None:
    pieces = stream(ByteTokenizer().decode, [], [0xFF] * 30 + list(b"after"))
    assert "".join(pieces) == "\ufffd" * 30 + "after"
    assert pieces[:8] == [""] * 7 + ["\ufffd" * 8]


def test_words_with_blanks_between() -> None:
    tokenizer = NullTokenizer(60)
    assert stream(tokenizer.decode, [4, 5], [6, 7]) == [" 6", " 7", ""]
    assert stream(tokenizer.decode, [], [6, 7]) == ["6", " 7", ""]


@pytest.mark.parametrize("length", [1, 3, 40])
def test_a_sentencepiece_model(tmp_path: Path, length: int) -> None:
    """Its first blank is dropped at the beginning of a text, and only there."""
    sentencepiece = pytest.importorskip("sentencepiece")
    from megatron.data.tokenizer import SentencePieceTokenizer

    words = [f"word{i} other{i}" for i in range(200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words), model_prefix=str(tmp_path / "m"), vocab_size=400, byte_fallback=True, minloglevel=2,
        normalization_rule_name="identity", model_type="bpe", hard_vocab_limit=False,
    )  # fmt: skip
    tokenizer = SentencePieceTokenizer(tmp_path / "m.model")
    ids = tokenizer.encode(f"word1 other2 {TEXT} " + "word3 other4 " * 20)
    before, after = ids[:length], ids[length:]
    assert tokenizer.decode(before) + "".join(stream(tokenizer.decode, before, after)) == tokenizer.decode(ids)
