"""TikTokenizer: ids of Megatron-LM's list and of tiktoken's lines, special tokens, and what is said of bad files."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import regex
import tiktoken
from hypothesis import given

from megatron.config.data import DataConfig
from megatron.data.tokenizer import build_tokenizer
from megatron_lab.tokenizers import vocabulary_files
from megatron_lab.tokenizers.vocabulary_files import PATTERNS, PublishedFile
from tests.support.vocabularies import BPE, LLAMA3_PATTERN, TEXT, any_text, rank_lines, rank_list, ranked_tokens

TOKENS = ranked_tokens(BPE)
SPECIAL = 10


def build(path: Path, **settings: Any) -> Any:
    return build_tokenizer(DataConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(path), **settings))


def as_list(folder: Path, tokens: list[bytes] = TOKENS) -> Path:
    (folder / "vocabulary.json").write_text(json.dumps(rank_list(tokens)))
    return folder / "vocabulary.json"


def as_lines(folder: Path, tokens: list[bytes] = TOKENS) -> Path:
    (folder / "tokenizer.model").write_text(rank_lines(tokens))
    return folder / "tokenizer.model"


def join_plainly(text: str, pattern: str, tokens: list[bytes]) -> list[int]:
    """Ranks by tiktoken's rule: a piece that is a token, or the neighbours of lowest rank joined over and over."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    found: list[int] = []
    for piece in regex.findall(pattern, text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while piece.encode() not in ranks and len(parts) > 1:
            joined = [ranks.get(left + right, len(tokens)) for left, right in itertools.pairwise(parts)]
            if min(joined) == len(tokens):
                break
            at = joined.index(min(joined))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        found += [ranks[piece.encode()]] if piece.encode() in ranks else [ranks[part] for part in parts]
    return found


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tokenizer of the list for each pattern."""
    path = as_list(tmp_path_factory.mktemp("list"))
    return {pattern: build(path, tiktoken_pattern=pattern, tiktoken_num_special_tokens=SPECIAL) for pattern in PATTERNS}


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=any_text)
def test_special_tokens_come_first_then_the_ranks(megatron: dict[str, Any], pattern: str, text: str) -> None:
    tokenizer = megatron[pattern]
    ids = tokenizer.encode(text)
    assert ids == [SPECIAL + rank for rank in join_plainly(text, PATTERNS[pattern], TOKENS)]
    assert tokenizer.encode_array(text).tolist() == ids
    assert tokenizer.decode([*ids, tokenizer.eod]) == text


def test_patterns_are_those_of_megatron() -> None:
    """Words with capitals inside are one piece in v1 and two in v2; a sign keeps the slashes after it only in v2."""
    assert regex.findall(PATTERNS["v1"], "HTTPServer 12 ://a\n\n b") == ["HTTPServer", " ", "1", "2", " ://", "a", "\n\n", " b"]
    assert regex.findall(PATTERNS["v2"], "camelCase 12 :\n/a\n\n b") == ["camel", "Case", " ", "1", "2", " :\n/", "a", "\n\n", " b"]


def test_the_sizes_of_megatron(tmp_path: Path) -> None:
    """1,000 special tokens, of which <unk>, <s> and </s> are the first; 131,072 ids at most without --vocab-size."""
    path = as_list(tmp_path)
    tokenizer = build(path)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod, tokenizer.pad) == (1000 + len(TOKENS), 1, 2, None)
    assert min(tokenizer.encode(TEXT)) >= 1000
    names = ("<unk>", "<s>", "</s>", "<mask>", "<pad>")
    named = build(path, tiktoken_special_tokens=names, tiktoken_num_special_tokens=5)
    assert (named.bos, named.eod, named.pad) == (1, 2, 4)
    assert named.encode(TEXT) == [id - 995 for id in tokenizer.encode(TEXT)]
    many = TOKENS + [b"\0" + str(number).encode() for number in range(131_000 - len(TOKENS))]
    assert build(as_list(tmp_path, many)).vocab_size == 2**17


def test_a_vocabulary_is_cut_to_its_size(tmp_path: Path) -> None:
    path = as_list(tmp_path)
    cut = build(path, vocab_size=1300)
    assert cut.vocab_size == 1300
    assert cut.encode(TEXT) == [1000 + rank for rank in join_plainly(TEXT, PATTERNS["v2"], TOKENS[:300])]
    assert max(build(path).encode(TEXT)) >= 1300
    for size in (1255, 1001 + len(TOKENS)):
        with pytest.raises(ValueError, match=f"--vocab-size {size:,} does not fit .* from 1,256 to {1000 + len(TOKENS):,}"):
            build(path, vocab_size=size)


def test_lines_have_their_ranks_as_ids(tmp_path: Path) -> None:
    path = as_lines(tmp_path)
    size = len(TOKENS)
    tokenizer = build(path, tiktoken_pattern="v1", tiktoken_num_special_tokens=SPECIAL)
    assert tokenizer.encode(TEXT) == join_plainly(TEXT, PATTERNS["v1"], TOKENS)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (size + SPECIAL, size + 1, size + 2)
    assert tokenizer.decode([*tokenizer.encode(TEXT), tokenizer.eod]) == TEXT
    assert build(path, vocab_size=size + 1000).vocab_size == size + 1000
    with pytest.raises(ValueError, match="--vocab-size 300 does not fit .*\n.*out"):
        build(path, vocab_size=300)


def test_a_known_file_brings_its_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_lines(tmp_path)
    known = PublishedFile("a test", LLAMA3_PATTERN, 500, eod=401, bos=400)
    monkeypatch.setitem(vocabulary_files.PUBLISHED_FILES, len(TOKENS), known)
    tokenizer = build(path)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (500, 400, 401)
    assert tokenizer.encode(TEXT) == join_plainly(TEXT, LLAMA3_PATTERN, TOKENS)
    with pytest.raises(ValueError, match="--vocab-size 501 does not fit .* the vocabulary of a test"):
        build(path, vocab_size=501)
    assert build(path, tiktoken_pattern="v1").vocab_size == len(TOKENS) + 1000  # settings given decide
    assert build(as_list(tmp_path)).eod == 2


def test_known_files_split_as_their_owners_do() -> None:
    """Llama 3's pattern as it stands in transformers' files; cl100k_base's as it stands in tiktoken."""
    source = Path(tiktoken.__file__).parent.with_name("tiktoken_ext") / "openai_public.py"
    theirs = regex.search(r'"name": "cl100k_base",\s+"pat_str": r"""(.*?)""",', source.read_text())
    assert theirs is not None
    for text in (TEXT, TEXT.upper(), "a\n\n  b \r\n \n", "  \n  x\t\n", "1234567 's 'LL x'", "é\u0301 \u3000東京!!\n\n\nx  "):
        pieces = regex.findall(LLAMA3_PATTERN, text)
        assert regex.findall(theirs[1], text) == pieces
        for known in vocabulary_files.PUBLISHED_FILES.values():
            assert regex.findall(known.pattern, text) == pieces
    assert vocabulary_files.PUBLISHED_FILES[128_000].vocab_size == 128_256


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tiktoken_special_tokens": ("<s>", "</s>", "<s>")}, "names a token twice"),
        ({"tiktoken_special_tokens": ("<s>",)}, "must include </s>"),
        ({"tiktoken_num_special_tokens": 2}, "has 3 tokens, more than --tiktoken-num-special-tokens 2"),
    ],
)
def test_wrong_settings(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(as_list(tmp_path), **settings)


def coded(token: bytes) -> str:
    return base64.b64encode(token).decode()


GOOD = rank_lines(TOKENS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(rank_list(TOKENS))[:5000], "is not JSON.*\n.*copy it again"),
        ('{"model": {}}', "must be a JSON list .*\n.*HuggingFaceTokenizer"),
        (json.dumps(rank_list(TOKENS)[1:]), "entry 0: .* should have the token rank .* 0"),
        (json.dumps([*rank_list(TOKENS), {"rank": len(TOKENS)}]), f"entry {len(TOKENS)}: .* and token_bytes"),
        (json.dumps(rank_list([*TOKENS, b"a"])), f"entry {len(TOKENS)}: the token b'a' is a duplicate"),
        (json.dumps([{"rank": 0, "token_bytes": "!!"}]), "entry 0: '!!' is not base64"),
        (json.dumps(rank_list(TOKENS[:255])), r"no token for 1 of the 256 bytes \(0xff\)"),
        (GOOD[: GOOD.index(" 255")], "line 256: .* should be a token in base64"),
        (GOOD + f"{coded(b'new')} 7\n", "the token rank .merge priority. 7 occurs a second time"),
        (GOOD + f"{coded(b'a')} 9999\n", "the token b'a' is a duplicate"),
        (GOOD + " 9999\n", "should be a token in base64"),
        (GOOD + "= 9999\n", "is not base64"),
        ("\n<unk>\x0e\x02\n", "line 2: .*\n.*for sentencepiece models use"),
        ("", "no token for 256 of the 256 bytes"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        build(path)
    assert str(path) in str(error.value)
