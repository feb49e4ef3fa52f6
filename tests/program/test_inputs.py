"""What users have as text: a folder of many kinds of files, some of which cannot be read; and flags as Megatron-LM has them."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pytest

from megatron.data.indexed_dataset import get_loss_mask_prefix
from megatron_lab.commands import preprocess_data, train_tokenizer
from megatron_lab.data_tools.preprocess import storage
from megatron_lab.data_tools.preprocess.job import preprocess
from megatron_lab.data_tools.preprocess.shard_work import split_text
from tests.support.corpora import EOD, JOB, documents, files_of, write_lines

TEXTS = ['hello "you", there', "a\nb", "Größe", "code", "json", "wide ü", "end"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Texts in six kinds of files, and seven things that cannot be read."""
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.csv").write_bytes(b'id;text;x\n1;"hello ""you"", there";0\n2;caf\xe9;0\n3\n\n4;"a\nb";0\n5;"a"b;0\n')
    (folder / "b.tsv").write_text("text\tn\nGröße\t1\n", encoding="utf-8-sig")
    (folder / "c.csv").write_text("body,text\ncode,x\n")
    (folder / "d.jsonl").write_text('{"text": "json"}\n{"other": 1}\n')
    (folder / "e.txt").write_bytes("wide ü".encode("utf-16"))
    (folder / "f.txt").write_bytes(b"\xff\xfa\x00")
    (folder / "g.csv").write_text("body,y\nq,1\n")
    (folder / "h.parquet").write_text("PAR1 no more")
    (folder / "i.csv").write_text('text\n"never closed\n')
    (folder / "j.png").touch()
    (folder / "k.csv").touch()
    (folder / "sub/z.py").write_text("end")
    return folder


def texts(prefix: Path) -> list[str]:
    return [bytes(document[:-1]).decode() for document in documents(prefix) if document[-1] == EOD]


def command(folder: Path, *words: str) -> list[str]:
    return ["--input", str(folder), "--output-prefix", f"{folder}-out", "--tokenizer-type", "ByteTokenizer", "--append-eod", *words]


def test_a_folder_of_everything(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What can be read is; the rest is counted, each with its reason."""
    out = Path(f"{folder}-out_text_document")
    assert preprocess_data.main(command(folder, "--on-error", "skip-files")) == 0
    said = capsys.readouterr().err
    assert texts(out) == [text if text != "code" else "x" for text in (TEXTS[0], "café", *TEXTS[1:])]
    for words in (
        "skipped, unknown format: 1 ending with .png",
        "empty files: 1, for example",
        "g.csv has no column 'text' (--json-keys, --column). The columns of the file are: 'body', 'y'",
        "h.parquet is not a parquet file",
        "1 read as cp1252 (detected)\n    {folder}/a.csv\n",
        "1 read as utf-16-le (byte order mark)\n    {folder}/e.txt\n",
        "a.csv: row 2: the value of key 'text' is not a string but null",
        "a.csv: row 4: the row is not valid",
        "d.jsonl:2: the line has no key 'text'",
        "f.txt: the file looks like binary data, not text. If it is text, name its encoding with --encoding",
        "i.csv: row 0: the rest of the file is skipped",
        "left out: 0 empty, 5 bad lines, 2 files that cannot be read",
    ):
        assert words.format(folder=folder) in said, said
    left_out = Path(f"{folder}-out_bad_lines.txt").read_text().splitlines()
    assert len(left_out) == 7
    assert len(Path(f"{folder}-out_encodings.txt").read_text().splitlines()) == 2
    model = folder.parent / "tokenizer.model"
    training = ["--input", str(folder), "--kind", "sentencepiece-bpe", "--vocab-size", "290", "--output", str(model)]
    assert train_tokenizer.main([*training, "--on-error", "skip-files"]) == 0, capsys.readouterr().err
    assert "left out: 7 bad records and files, the first: " in capsys.readouterr().err


def test_the_report_uses_the_singular_and_names_a_bad_byte_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("a.txt", b"ab\xff"), ("b.txt", b"cd")):
        (tmp_path / name).write_bytes(content)
    flags = ("--encoding", "utf-8", "--errors", "strict", "--on-error", "skip-files")
    assert preprocess_data.main(command(tmp_path, *flags)) == 0
    said = capsys.readouterr().err
    assert said.count("byte 0xff") == 1 and "invalid bytes" not in said, said
    assert "1 document, 3 tokens from" in said and "left out: 0 empty, 1 bad line\n" in said, said


@pytest.mark.parametrize("flags", [(), ("--on-error", "skip")])
def test_a_file_that_cannot_be_read_stops_the_job(folder: Path, flags: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Unless the user says that it may be left out; the vocabulary's tool has the same words for it."""
    for name in ("a.csv", "d.jsonl", "f.txt"):
        (folder / name).unlink()
    assert preprocess_data.main(command(folder, *flags)) == 1
    assert "g.csv has no column 'text'" in capsys.readouterr().err
    assert not list(folder.parent.glob("in-out*"))
    words = ["--kind", "sentencepiece-bpe", "--vocab-size", "300", "--output", str(folder.parent / "x"), *flags]
    assert train_tokenizer.main(["--input", str(folder), *words]) == 1
    assert "g.csv has no column 'text'" in capsys.readouterr().err


def test_a_column_of_another_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The dataset has the usual name, and plain texts are read beside it."""
    (folder / "d.jsonl").write_text('{"body": "of json"}\n')
    assert preprocess_data.main(command(folder, "--on-error", "skip-files", "--column", "body")) == 0
    assert texts(Path(f"{folder}-out_text_document")) == ["code", "of json", "wide ü", "q", "end"]
    with pytest.raises(SystemExit):
        preprocess_data.main(command(folder, "--column", "body", "--json-keys", "a", "b"))
    assert "--json-keys has 2 keys" in capsys.readouterr().err


def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def opened(path: str) -> BinaryIO:
        if path.endswith("d.jsonl"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return open(path, "rb")

    monkeypatch.setattr(storage, "open_binary", opened)
    assert preprocess_data.main(command(folder, "--on-error", "skip-files")) == 0
    assert "d.jsonl: Permission denied" in capsys.readouterr().err


def test_nothing_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.csv").write_text("x\n1\n")
    assert preprocess_data.main(command(tmp_path / "in", "--on-error", "skip-files")) == 1
    said = capsys.readouterr().err
    assert (
        "no document" in said
        and "1 invalid records and files were skipped, the first: " in said
        and "a.csv has no column 'text'" in said
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_documents_in_a_random_order(tmp_path: Path) -> None:
    """All of them, in an order that follows from the seed alone: not from the shards, nor from how the work is divided."""
    source = write_lines(tmp_path / "in.jsonl", [f"document {number}" for number in range(300)])

    def order(name: str, seed: int | None, size: int) -> list[str]:
        job = dataclasses.replace(JOB, shuffle_seed=seed)
        preprocess([source], str(tmp_path / name), job, shard_size=size)
        return texts(tmp_path / f"{name}_text_document")

    plain, mixed = order("plain", None, 1024), order("mixed", 1, 1024)
    assert sorted(mixed) == sorted(plain) and mixed != plain
    assert order("again", 1, 5000) == mixed and files_of(tmp_path / "again_text_document") == files_of(
        tmp_path / "mixed_text_document"
    )
    assert order("other", 2, 1024) != mixed
    last = {int(text.split()[1]) for text in mixed[-30:]}
    assert min(last) < 100 and max(last) > 200, "the last tenth, which --split takes for validation, is of everywhere"


def test_masks_are_in_the_order_of_their_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.support.chats import CHATS, MARKED, write_chats, write_tokenizer

    pytest.importorskip("tokenizers")
    write_chats(tmp_path / "in.jsonl", CHATS * 9)
    write_tokenizer(tmp_path / "tokenizer", MARKED)

    def pairs(name: str, *flags: str) -> list[tuple[list[int], list[int]]]:
        words = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / name), "--chat-template", *flags]
        words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / "tokenizer"), "--append-eod"]
        assert preprocess_data.main(words) == 0, capsys.readouterr().err
        prefix = str(tmp_path / f"{name}_messages_document")
        return list(zip(documents(Path(prefix)), documents(Path(get_loss_mask_prefix(prefix))), strict=True))

    plain, mixed = pairs("plain"), pairs("mixed", "--shuffle-seed", "7")
    assert mixed != plain and sorted(mixed) == sorted(plain)


def test_long_texts_are_cut_where_paragraphs_end(tmp_path: Path) -> None:
    text = "word one. " * 20 + "\n\n" + "word two. " * 30 + "\n" + "x" * 300 + "y"
    for most in (1, 7, 50, 250, 10_000):
        parts = list(split_text(text, most))
        assert "".join(parts) == text and max(map(len, parts)) <= most
    assert next(split_text(text, 250)).endswith("one. \n\n")
    (tmp_path / "book.txt").write_text(text)
    write_lines(tmp_path / "short.jsonl", ["short", ""])
    job = dataclasses.replace(JOB, cut_documents=250)
    summary = preprocess([str(tmp_path)], str(tmp_path / "out"), job)
    assert texts(tmp_path / "out_text_document") == [*split_text(text, 250), "short"] and summary.num_empty == 1


def test_flags_of_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each acts, is told to change nothing, or is refused with what to use."""
    source = tmp_path / "in.jsonl"
    write_lines(source, ["a\n\nb"])
    idle = ["--keep-newlines", "--partitions", "4", "--log-interval", "9", "--dataset-impl", "mmap", "--lang", "german"]
    assert preprocess_data.main(command(source, *idle, "--keep-sequential-samples", "--workers", "1", "--json-keys", "text")) == 0
    said = capsys.readouterr().err
    for flag in (*idle[::2][:1], "--partitions", "--log-interval", "--dataset-impl mmap", "--lang", "--keep-sequential-samples"):
        assert f"{flag} has no effect: " in said
    assert texts(Path(f"{source}-out_text_document")) == ["a\n\nb"]
    for words, told in (
        (["--split-sentences"], "--split-sentences is refused: it writes one sequence per sentence, for BERT"),
        (["--vocab", "x"], "--vocab is refused: use --vocab-file"),
        (["--dataset-impl", "lazy"], "--dataset-impl lazy is refused"),
        (["--keep-sequential-samples", "--shuffle-seed", "1"], "--keep-sequential-samples contradicts --shuffle-seed"),
        (["--shuffle-seed", "-1"], "--shuffle-seed must be 0 or more"),
        (["--cut-documents", "9", "--chat-template"], "HuggingFaceTokenizer"),
    ):
        with pytest.raises(SystemExit) as ended:
            preprocess_data.main(command(source, *words))
        assert ended.value.code == 2 and told in capsys.readouterr().err
