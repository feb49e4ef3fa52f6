"""tools/train_tokenizer.py: the vocabulary, the sample that it is trained on, and what is never done to files."""

from __future__ import annotations

import gzip
import json
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest

from megatron.config.data import DataConfig
from megatron.data.tokenizer import SentencePieceTokenizer, build_tokenizer
from megatron_lab.commands import train_tokenizer
from megatron_lab.commands.train_tokenizer import build_parser, main
from megatron_lab.data_tools.tokenizer_flags import add_tokenizer_flags, build_tokenizer_config
from megatron_lab.data_tools.tokenizer_training import VocabType, list_output_files, sample_texts
from megatron_lab.tokenizers.byte_bpe import ByteBPETokenizer
from megatron_lab.tokenizers.vocabulary_files import read_gpt2_bpe
from tests.support.vocabularies import SOURCES, TEXT

KINDS = get_args(VocabType)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """40 texts as JSON lines, and two without a text."""
    path = tmp_path / "corpus.jsonl"
    text = "".join(SOURCES)
    lines = [json.dumps({"text": text[at : at + 1000]}) for at in range(0, 40_000, 1000)]
    path.write_text("\n".join(lines) + "\n\n" + json.dumps({"text": ""}) + "\n")
    return path


def run(corpus: Path, output: Path, kind: str, *more: str, size: int = 500) -> int:
    return main(["--input", str(corpus), "--output", str(output), "--kind", kind, "--vocab-size", str(size), *more])


def contents(output: Path) -> list[bytes]:
    return [path.read_bytes() for path in (sorted(output.iterdir()) if output.is_dir() else [output])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_of_each_kind(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: VocabType) -> None:
    if kind == "byte-bpe":
        pytest.importorskip("tokenizers")
    assert run(corpus, tmp_path / "a", kind, "--special-tokens", "<pad>", "<x>") == 0
    said = capsys.readouterr()
    assert "training on 38 of 42 documents" in said.err
    assert "2 more are held out" in said.err
    assert "bytes per token on 0.00 MB of texts held out" in said.out
    # The flags that it prints make the tokenizer.
    for line in said.out.splitlines()[2:]:
        words = shlex.split(line.partition(": ")[2])
        flags = train_tokenizer.argparse.ArgumentParser()
        add_tokenizer_flags(flags)
        tokenizer = build_tokenizer(build_tokenizer_config(flags.parse_args(words), flags))
        assert tokenizer.vocab_size == 500
        text = TEXT + " \x00 <pad><x>\t\r\n <|endoftext|></s> \U0001f600  "
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode("\nreturn")[1:] == tokenizer.encode("return")  # nothing is put in front
        assert len(tokenizer.encode(SOURCES[0])) < 0.6 * len(SOURCES[0].encode())
        special = {tokenizer.eod, tokenizer.bos, tokenizer.pad}
        assert not special & {*ids}
    assert run(corpus, tmp_path / "b", kind, "--special-tokens", "<pad>", "<x>") == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.jsonl", "a", "b"}


def test_the_files_of_bytes_are_one_tokenizer(corpus: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    output = tmp_path / "bytes"
    assert run(corpus, output, "byte-bpe", "--special-tokens", "<pad>") == 0
    ours = ByteBPETokenizer(read_gpt2_bpe(output / "vocab.json", output / "merges.txt"))
    same = build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(output)))
    theirs = tokenizers.Tokenizer.from_file(str(output / "tokenizer.json"))
    assert ours.encode(TEXT) == same.encode(TEXT) == theirs.encode(TEXT).ids
    assert ours.eod == same.eod == theirs.token_to_id("<|endoftext|>") == 498
    assert theirs.encode("a<pad>").ids[-1] == 499


def test_special_tokens_of_sentencepiece_are_never_in_a_text(corpus: Path, tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    assert run(corpus, tmp_path / "m", "sentencepiece-bpe", "--special-tokens", "<pad>") == 0
    model = SentencePieceProcessor(model_file=str(tmp_path / "m"))
    pad = model.piece_to_id("<pad>")
    assert model.is_control(pad)
    assert pad not in SentencePieceTokenizer(tmp_path / "m").encode("a <pad> b")


# ---- the sample


def test_the_sample_is_bounded_and_spread(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number:06d}" + "x" * 94}) + "\n" for number in range(5000)))
    sample = sample_texts([str(path)], ["text"], 20_000)
    numbers = sorted(int(text[:6]) for text in sample.training_texts + sample.held_out_texts)
    assert sample.num_documents == 5000
    assert 80 <= len(numbers) <= 200
    thirds = [sum(part * 1000 <= number < (part + 1) * 1000 for number in numbers) for part in range(5)]
    assert max(thirds) <= min(thirds) + 2
    assert len(sample.held_out_texts) == len(numbers) // 20
    assert not {*sample.training_texts} & {*sample.held_out_texts}
    assert sample_texts([str(path)], ["text"], 20_000) == sample
    assert len(sample_texts([str(path)], ["text"], 10**9).training_texts) == 4750


def test_all_kinds_of_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n\n{"body": "two"}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"body": "three"}\n'))
    (tmp_path / "c.txt").write_text("four\nlines")
    sample = sample_texts([str(tmp_path)], ["body"], 1000)
    assert (sample.training_texts, sample.held_out_texts) == (["one", "two", "three"], ["four\nlines"])


def test_a_long_document_is_cut(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 3_000_000)
    sample = sample_texts([str(tmp_path / "long.txt")], ["text"], 1000)
    assert [len(text) for text in sample.training_texts] == [1 << 20]
    assert sample.held_out_texts == []


# ---- refusals


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_replaced_only_when_asked(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: VocabType
) -> None:
    output = tmp_path / "out"
    there = output / "merges.txt" if kind == "byte-bpe" else output
    there.parent.mkdir(exist_ok=True)
    there.write_text("mine")
    assert run(corpus, output, kind) == 1
    assert f"would overwrite {there}" in capsys.readouterr().err
    assert there.read_text() == "mine"
    if kind == "sentencepiece-bpe":
        assert run(corpus, output, kind, "--overwrite") == 0
        assert SentencePieceTokenizer(output).vocab_size == 500


def test_nothing_is_left_where_writing_fails(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")

    output = tmp_path / "out"
    output.mkdir()
    opened = Path.open

    def full(path: Path, *mode: Any) -> Any:
        return opened(Path("/dev/full") if "tokenizer.json" in path.name else path, *mode)

    monkeypatch.setattr(Path, "open", full)
    assert run(corpus, output, "byte-bpe") == 1
    assert list(output.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_more_tokens_than_the_text_has(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: VocabType) -> None:
    if kind == "byte-bpe":
        pytest.importorskip("tokenizers")
    assert run(corpus, tmp_path / "out", kind, size=30_000) == 1
    assert "train_tokenizer.py: error: --vocab-size 30000" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.jsonl"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 1}', "corpus.jsonl:43: .* is not a string"),
        ('{"text": ', "corpus.jsonl:43: the line is not JSON"),
        ('{"body": "x"}', "corpus.jsonl:43: the line has no key 'text'"),
    ],
)
def test_a_bad_line_is_named(corpus: Path, line: str, message: str) -> None:
    with corpus.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message):
        sample_texts([str(corpus)], ["text"], 10**6)


def test_without_text_or_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    assert run(tmp_path / "empty.jsonl", tmp_path / "m", "sentencepiece-bpe") == 1
    assert "the input contains no text" in capsys.readouterr().err
    assert run(tmp_path / "empty.jsonl", tmp_path / "none/m", "sentencepiece-bpe") == 1
    assert f"the folder {tmp_path / 'none'} does not exist" in capsys.readouterr().err
    assert run(tmp_path / "none.jsonl", tmp_path / "m", "sentencepiece-bpe") == 1
    assert "there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--vocab-size 0", "--vocab-size 9 --max-bytes 0", "--vocab-size 9 --special-tokens a a"])
def test_wrong_flags(tmp_path: Path, words: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--input", "x", "--output", str(tmp_path / "m"), "--kind", "sentencepiece-bpe", *words.split()])
    assert stopped.value.code == 2


def test_the_kinds_of_the_flag() -> None:
    flag = next(action for action in build_parser()._actions if action.dest == "kind")
    assert tuple(flag.choices or ()) == KINDS
    assert list_output_files("byte-bpe", Path("x"))[0] == Path("x/vocab.json")
