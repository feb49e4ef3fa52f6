"""Every tokenizer: ids, round trips, and what it says of a wrong file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer

from megatron.config.data import DataConfig
from megatron.data.tokenizer import (
    ByteTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    build_tokenizer,
    compute_embedding_rows,
)
from megatron_lab.commands.train_tokenizer import main as train_tokenizer
from megatron_lab.tokenizers.byte_bpe import ByteBPETokenizer
from megatron_lab.tokenizers.vocabulary_files import read_gpt2_bpe
from tests.support.bpe_trainer import Bpe, encode_plainly, train_bpe, write_bpe
from tests.support.vocabularies import SOURCES, TEXT, any_text


@pytest.fixture(scope="module")
def bpe() -> Bpe:
    """A vocabulary of the text above."""
    return train_bpe(TEXT, 90)


def gpt2(bpe: Bpe, folder: Path) -> ByteBPETokenizer:
    """The tokenizer of these files."""
    return ByteBPETokenizer(read_gpt2_bpe(*write_bpe(bpe, folder)))


@pytest.fixture(scope="module")
def trained(bpe: Bpe, tmp_path_factory: pytest.TempPathFactory) -> ByteBPETokenizer:
    """The tokenizer of the vocabulary above."""
    return gpt2(bpe, tmp_path_factory.mktemp("bpe"))


def sentencepiece_model(folder: Path, **settings: Any) -> Path:
    """A small unigram model."""
    lines = iter(TEXT.splitlines() * 3)
    SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_prefix=str(folder / "model"),
        vocab_size=80,
        minloglevel=2,
        hard_vocab_limit=False,
        **settings,
    )
    return folder / "model.model"


@pytest.fixture(scope="module")
def exact(trained: ByteBPETokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Tokenizers that give back any text."""
    folder = tmp_path_factory.mktemp("exact")
    (folder / "corpus.txt").write_text("".join(SOURCES))
    made: dict[str, Tokenizer] = {"bytes": ByteTokenizer(), "GPT-2": trained}
    for kind in ("bpe", "unigram"):
        words = f"--kind sentencepiece-{kind} --vocab-size 400 --input {folder}/corpus.txt --output {folder}/{kind}.model"
        assert train_tokenizer(words.split()) == 0
        made[kind] = SentencePieceTokenizer(folder / f"{kind}.model")
    return made


@pytest.mark.parametrize("kind", ["bytes", "GPT-2", "bpe", "unigram"])
@given(text=any_text)
def test_any_text_comes_back(exact: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = exact[kind]
    if kind in ("bpe", "unigram"):
        text = text.replace("\u2581", "")  # sentencepiece's own sign for a blank
    ids = tokenizer.encode(text)
    assert tokenizer.encode_array(text).tolist() == ids
    assert all(0 <= id < tokenizer.vocab_size and id != tokenizer.eod for id in ids)
    assert tokenizer.decode([*ids, tokenizer.eod]) == text


@pytest.mark.parametrize("kind", ["bytes", "GPT-2", "bpe", "unigram"])
def test_long_blanks_come_back(exact: dict[str, Tokenizer], kind: str) -> None:
    """tiktoken alone gives up at a million blanks in a row."""
    count = 600_000 if kind == "GPT-2" else 60_000
    text = "a" + " " * count + "\n" * count + "b'll  c"
    assert exact[kind].decode(exact[kind].encode(text)) == text


@pytest.mark.parametrize("kind", ["bytes", "GPT-2", "bpe", "unigram"])
def test_half_a_surrogate_pair_is_refused(exact: dict[str, Tokenizer], kind: str) -> None:
    for encode in (exact[kind].encode, exact[kind].encode_array):
        with pytest.raises(ValueError, match="surrogates not allowed"):
            encode("a\ud800b")


def test_special_ids(exact: dict[str, Tokenizer]) -> None:
    seen = {kind: (tokenizer.eod, tokenizer.bos, tokenizer.pad) for kind, tokenizer in exact.items()}
    end = exact["GPT-2"].vocab_size - 1
    assert seen == {"bytes": (256, None, None), "GPT-2": (end, None, None), "bpe": (2, 1, None), "unigram": (2, 1, None)}


def test_bytes_are_their_own_ids() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(TEXT) == list(TEXT.encode())
    assert tokenizer.vocab_size == 257


def test_null_tokenizer_reads_numbers_below_its_size() -> None:
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer", vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.encode(" 0 99\n5") == tokenizer.encode_array(" 0 99\n5").tolist() == [0, 99, 5]
    assert tokenizer.decode([0, 99, 100, 5]) == "0 99 5"
    for text in ("100", "-1", "1.5", "x", "²", "٣"):
        with pytest.raises(ValueError, match="is not an id from 0 to 99"):
            tokenizer.encode(text)
    with pytest.raises(ValueError, match="--vocab-size must be at least 1"):
        NullTokenizer(0)
    assert (NullTokenizer(1).vocab_size, NullTokenizer(1).eod) == (2, 1)


@given(text=st.text() | st.text(alphabet="abtehcs' \n1ö東"))
def test_bpe_gives_the_ids_of_its_merges_and_round_trips(trained: ByteBPETokenizer, bpe: Bpe, text: str) -> None:
    ids = trained.encode(text)
    assert ids == encode_plainly(text, bpe)
    assert trained.decode([*ids, trained.eod]) == text


def test_bpe_of_its_own_text_is_short_and_ordinary(trained: ByteBPETokenizer, bpe: Bpe) -> None:
    ids = trained.encode(TEXT)
    assert ids == encode_plainly(TEXT, bpe)
    assert len(ids) < 0.6 * len(TEXT.encode())
    assert trained.eod == trained.vocab_size - 1 == len(bpe.vocabulary) - 1
    assert trained.eod not in trained.encode("a<|endoftext|>b")


@pytest.mark.parametrize("order", ["reversed", "as GPT-2"])
def test_bpe_ids_need_not_be_in_the_order_of_the_merges(tmp_path: Path, bpe: Bpe, order: str) -> None:
    tokens = [*bpe.vocabulary]
    # GPT-2 numbers the visible bytes first; then ranks are ids and nothing needs to be looked up.
    tokens = tokens[::-1] if order == "reversed" else sorted(tokens[:256], key=ord) + tokens[256:]
    renumbered = Bpe({token: number for number, token in enumerate(tokens)}, bpe.merges)
    tokenizer = gpt2(renumbered, tmp_path)
    assert tokenizer.encode(TEXT) == encode_plainly(TEXT, renumbered)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@given(text=st.text(alphabet="abc", max_size=30))
def test_bpe_follows_the_merges_where_bytes_alone_would_mislead(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """ "abc" is only made of ab and c, but b and c join first: whoever joins any two neighbours that make a token gets it wrong."""
    base = train_bpe("x", 0)
    merges = [("b", "c"), ("a", "b"), ("ab", "c"), ("c", "a"), ("a", "a"), ("aa", "a"), ("aa", "aa"), ("bc", "a"), ("b", "ca")]
    vocabulary = dict(base.vocabulary)
    for pair in merges:
        vocabulary.setdefault("".join(pair), len(vocabulary))
    hand_made = Bpe(vocabulary, merges)
    tokenizer = gpt2(hand_made, tmp_path_factory.mktemp("bpe"))
    assert tokenizer.encode(text) == encode_plainly(text, hand_made)


def test_long_blanks_are_merged_as_one_piece(trained: ByteBPETokenizer, bpe: Bpe) -> None:
    """Both in one call of tiktoken, and where that would fail."""
    for length in (400_001, 1_000_001):
        ids = trained.encode_array("x" + " " * length + "that").tolist()
        assert {*ids[1:-1]} == {bpe.vocabulary["ĠĠ"]}
        assert (len(ids), [ids[0], ids[-1]]) == (2 + (length - 1) // 2, trained.encode("x that"))


def test_merges_that_make_the_end_of_a_document_are_refused(tmp_path: Path) -> None:
    bpe = train_bpe("x", 0)
    end = "<|endoftext|>"
    merges = [(end[:length], end[length]) for length in range(1, len(end))]
    vocabulary = {**bpe.vocabulary, **{left + right: 300 + number for number, (left, right) in enumerate(merges)}}
    with pytest.raises(ValueError, match="ordinary text could be encoded to the id 311"):
        gpt2(Bpe(vocabulary, merges), tmp_path)


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ("{", None, "is not JSON"),
        ("[1]", None, "must be a JSON object"),
        ('{"a": "1"}', None, "must be a JSON object"),
        ('{"a": 1, "b": 1, "<|endoftext|>": 2}', None, "same id"),
        ('{"a": 1}', None, r"no token <\|endoftext\|>"),
        ('{"a": 1, "<|endoftext|>": 2}', None, "255 of the 256 bytes"),
        (None, "q z\n", "line 1: 'q z'.*not there: 'qz'"),
        (None, "#version: 0.2\nt h e\n", "line 2"),
        (None, "the\n", "line 1"),
        (None, "<|endoftext|>\n", "line 1"),
    ],
)
def test_wrong_bpe_files_are_named(tmp_path: Path, bpe: Bpe, vocab: str | None, merges: str | None, message: str) -> None:
    vocab_file, merge_file = write_bpe(bpe, tmp_path)
    if vocab is not None:
        vocab_file.write_text(vocab)
    if merges is not None:
        merge_file.write_text(merges)
    with pytest.raises(ValueError, match=message) as error:
        ByteBPETokenizer(read_gpt2_bpe(vocab_file, merge_file))
    assert (str(vocab_file) if merges is None else str(merge_file)) in str(error.value)


def test_sentencepiece_types(tmp_path: Path) -> None:
    model = str(sentencepiece_model(tmp_path))
    plain: Tokenizer = build_tokenizer(DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model))
    same = build_tokenizer(DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=model))
    llama = build_tokenizer(DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=model))
    text = "the cat sat on that mat"
    ids = plain.encode(text)
    assert (plain.eod, plain.vocab_size > 50) == (2, True)
    assert max(ids) < plain.vocab_size
    assert plain.eod not in ids
    assert same.encode(text) == ids
    assert llama.encode(text) == llama.encode_array(text).tolist() == [1, *ids]
    assert llama.encode("") == plain.encode("") == llama.encode_array("").tolist() == []
    for tokenizer in (plain, same, llama):
        assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eod]) == text


def test_the_word_embedding_may_have_more_rows_than_the_tokenizer_has_ids(tmp_path: Path) -> None:
    """As weights that come from elsewhere often have."""
    settings: dict[str, Any] = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(sentencepiece_model(tmp_path))}
    tokenizer = build_tokenizer(DataConfig(**settings))
    size = tokenizer.vocab_size
    assert compute_embedding_rows(tokenizer, DataConfig(**settings)) == size
    assert compute_embedding_rows(tokenizer, DataConfig(**settings, vocab_size=size + 4)) == size + 4
    with pytest.raises(ValueError, match=f"--vocab-size {size - 1} is less than the {size} ids of the tokenizer"):
        compute_embedding_rows(tokenizer, DataConfig(**settings, vocab_size=size - 1))
    null = DataConfig(tokenizer_type="NullTokenizer", vocab_size=10)
    assert compute_embedding_rows(build_tokenizer(null), null) == 11  # its size is that of its ids, the end of a document on top


def test_a_sentencepiece_model_without_the_ids_that_are_needed_is_refused(tmp_path: Path) -> None:
    path = sentencepiece_model(tmp_path, eos_id=-1, bos_id=-1)
    for kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        with pytest.raises(ValueError, match="has no eos id"):
            build_tokenizer(DataConfig(tokenizer_type=kind, tokenizer_model=str(path)))  # type: ignore[arg-type]
    path = sentencepiece_model(tmp_path, bos_id=-1)
    with pytest.raises(ValueError, match="has no bos id"):
        build_tokenizer(DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(path)))


@pytest.mark.parametrize("cut", [False, True])
def test_a_file_that_is_no_sentencepiece_model_is_named(tmp_path: Path, cut: bool) -> None:
    whole = sentencepiece_model(tmp_path).read_bytes() if cut else b"{}"
    (tmp_path / "model").write_bytes(whole[:-50] if cut else whole)
    with pytest.raises(ValueError, match="--tokenizer-model .* is not a sentencepiece model.*\n  The file is truncated"):
        build_tokenizer(DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(tmp_path / "model")))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(), "--tokenizer-type must be one of"),
        (DataConfig(tokenizer_type="NullTokenizer"), "needs --vocab-size"),
        (DataConfig(tokenizer_type="GPT2BPETokenizer"), "needs --vocab-file"),
        (DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=__file__), "needs --merge-file"),
        (
            DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file="/none/v.json"),
            "--vocab-file /none/v.json: there is no such file",
        ),
        (DataConfig(tokenizer_type="Llama2Tokenizer"), "needs --tokenizer-model"),
        (DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model="/none/m"), "--tokenizer-model /none/m: there is no such"),
    ],
)
def test_a_missing_flag_or_file_is_named(config: DataConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tokenizer(config)
