"""Texts in other encodings than UTF-8, and texts with invalid bytes: read as they should be, and never in silence."""

# ruff: noqa: RUF001 - letters of other alphabets are meant

from __future__ import annotations

import codecs
import dataclasses
import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import charset_normalizer
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from megatron.data.tokenizer import ByteTokenizer
from megatron_lab.data_tools.preprocess import storage
from megatron_lab.data_tools.preprocess.errors import UndecodableRecordError
from megatron_lab.data_tools.preprocess.job import preprocess
from megatron_lab.data_tools.preprocess.reports import Summary
from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob
from megatron_lab.data_tools.preprocess.text_encoding import (
    ERROR_HANDLINGS,
    MARK_INVALID,
    ErrorHandling,
    RecordDecoder,
    TextEncoding,
    detect_encoding,
    normalize_encoding,
)
from megatron_lab.data_tools.tokenizer_training import sample_texts
from megatron_lab.evaluation.texts import read_documents
from tests.support.corpora import EOD, JOB, SKIP, documents

GERMAN = "Die größten Bäume stehen südlich der Straße. Für die Ärzte wäre das eine schöne Überraschung, meinte Herr Müller."
RUSSIAN = "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему."
FRENCH = "Les élèves étaient très fatigués après la journée à l'école. Nous avons mangé du gâteau près de la forêt."
JAPANESE = (
    "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。人間は、理性と良心とを授けられている。"
)
CHINESE = "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。"
KOREAN = "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 인간은 천부적으로 이성과 양심을 부여받았다."
POLISH = "Zażółć gęślą jaźń. Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw."
GREEK = "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα."
ENCODED = [
    *((GERMAN, name) for name in ("latin-1", "cp1252", "cp850", "utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-8")),
    *((FRENCH, name) for name in ("latin-1", "mac_roman", "utf-16-be")),
    *((RUSSIAN, name) for name in ("cp1251", "koi8_r", "cp866", "utf-16-le", "utf-16-be")),
    *((JAPANESE, name) for name in ("shift_jis", "euc_jp", "utf-16")),
    *((POLISH, name) for name in ("iso8859_2", "cp1250")),
    (CHINESE, "gb18030"),
    (KOREAN, "cp949"),
    (GREEK, "cp1253"),
]


def texts(prefix: Path) -> list[str]:
    return [bytes(document[:-1]).decode() for document in documents(prefix) if document[-1] == EOD]


def job_of(name: str | None = None, errors: ErrorHandling = "strict", *, skips: bool = False) -> PreprocessJob:
    return dataclasses.replace(SKIP if skips else JOB, text_encoding=TextEncoding(name, errors))


def lines_of(summary: Summary, errors: ErrorHandling = "strict") -> str:
    """What the terminal shows of a job, without the folder."""
    return "\n".join(summary.encoding_notes.format_lines(errors, summary.encodings_file))


def encode_lines(lines: list[str], encoding: str) -> bytes:
    return "".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in lines).encode(encoding)


@pytest.mark.parametrize(("text", "encoding"), ENCODED)
def test_a_text_file_in_a_common_encoding_is_read_and_announced(tmp_path: Path, text: str, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    summary = preprocess([str(tmp_path / "a.txt")], str(tmp_path / "out"), JOB)
    assert texts(tmp_path / "out_text_document") == [text]
    announced = lines_of(summary)
    assert ("a.txt" in announced) == ("encoding: 1 file not plain UTF-8" in announced) == (not encoding.startswith("utf-8"))
    assert text.encode(encoding) == (tmp_path / "a.txt").read_bytes()


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-be", "shift_jis"])
def test_a_table_in_another_encoding(tmp_path: Path, encoding: str) -> None:
    text = JAPANESE if encoding == "shift_jis" else GERMAN
    (tmp_path / "a.csv").write_bytes(f'text,n\n"{text}",1\n"a\nb",2\n'.encode(encoding))
    summary = preprocess([str(tmp_path / "a.csv")], str(tmp_path / "out"), JOB)
    assert texts(tmp_path / "out_text_document") == [text, "a\nb"]
    assert "a.csv" in lines_of(summary)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be", "utf-8-sig"])
@pytest.mark.parametrize("buffer_bytes", [5, 16, 1 << 20])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_json_lines_in_utf_16_and_utf_32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, buffer_bytes: int, suffix: str
) -> None:
    """The bytes of U+0A0A and U+010A look like the end of a line. The size of a shard and of the buffer changes nothing."""
    lines = [GERMAN, "\u0a0a\u010a\u0a00", "", CHINESE, "plain", "two\nlines"]
    path = tmp_path / f"in{suffix}"
    content = encode_lines(lines, encoding)
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    monkeypatch.setattr(storage, "BUFFER_BYTES", max(buffer_bytes, 8))
    summary = preprocess([str(path)], str(tmp_path / "out"), JOB, shard_size=100)
    assert texts(tmp_path / "out_text_document") == [line for line in lines if line]
    shown = lines_of(summary)
    assert ("read as utf-" in shown) == (encoding != "utf-8-sig")
    assert shown.count(path.name) == (encoding != "utf-8-sig"), "a file is named once, though it may have several ranges"


def test_one_latin_1_byte_in_a_text_file(tmp_path: Path) -> None:
    """A text file is one record: it is refused with the line, skipped with a count, or kept with U+FFFD."""
    source = tmp_path / "a.txt"
    source.write_bytes("größer\nzwei\n".encode() + b"caf\xe9\n" + "schöner".encode())
    (tmp_path / "b.txt").write_text("other")
    inputs = [str(source), str(tmp_path / "b.txt")]
    with pytest.raises(ValueError, match=r"a\.txt: byte 0xe9 at offset 17 in line 3 is not valid UTF-8(.|\n)*--errors replace"):
        preprocess(inputs, str(tmp_path / "out"), JOB)
    summary = preprocess(inputs, str(tmp_path / "out"), SKIP)
    assert texts(tmp_path / "out_text_document") == ["other"]
    assert "invalid bytes: 1 text left out" in lines_of(summary) and "--errors replace" in lines_of(summary)
    results = {"replace": "caf\N{REPLACEMENT CHARACTER}", "ignore": "caf", "backslashreplace": "caf\\xe9"}
    for errors in ERROR_HANDLINGS[1:]:
        summary = preprocess(inputs, str(tmp_path / "out"), job_of(errors=errors))
        assert texts(tmp_path / "out_text_document") == [f"größer\nzwei\n{results[errors]}\nschöner", "other"]
        shown = lines_of(summary, errors)
        assert "invalid bytes: 1 in 1 text, " in shown and f"(--errors {errors})" in shown
        assert "a.txt: byte 0xe9 at offset 17 in line 3 is not valid UTF-8" in shown
        assert "a.txt: byte 0xe9" in (tmp_path / "out_encodings.txt").read_text()
    assert not preprocess([inputs[1]], str(tmp_path / "out"), JOB).encodings_file
    assert not (tmp_path / "out_encodings.txt").exists(), "the list of an earlier job is removed"


def test_one_latin_1_byte_in_json_lines(tmp_path: Path) -> None:
    """Only the record with the byte is affected, and the message has its line and its offset, in any shard."""
    source = tmp_path / "in.jsonl"
    start = encode_lines([GERMAN, "b"], "utf-8")
    source.write_bytes(start + b'{"text": "caf\xe9 \xe9"}\n' + encode_lines(["end"], "utf-8"))
    problem = rf"byte 0xe9 at offset {len(start) + 13:,} is not valid UTF-8 \(invalid bytes: 2\)"
    for shard_size in (10, 1000):
        with pytest.raises(ValueError, match=rf"in\.jsonl:3: {problem}"):
            preprocess([str(source)], str(tmp_path / "out"), JOB, shard_size=shard_size, start_mode="restart")
        summary = preprocess([str(source)], str(tmp_path / "out"), SKIP, shard_size=shard_size, start_mode="restart")
        assert texts(tmp_path / "out_text_document") == [GERMAN, "b", "end"]
        assert (summary.num_bad_records, summary.encoding_notes.num_undecodable) == (1, 1)
        summary = preprocess([str(source)], str(tmp_path / "out"), job_of(errors="replace"), shard_size=shard_size)
        assert texts(tmp_path / "out_text_document") == [GERMAN, "b", "caf\ufffd \ufffd", "end"]
        assert "invalid bytes: 2 in 1 text, replaced by U+FFFD" in lines_of(summary, "replace")
        assert f"in.jsonl:3: byte 0xe9 at offset {len(start) + 13:,} is not valid UTF-8, and 1 more" in lines_of(summary, "replace")


def test_json_lines_in_latin_1(tmp_path: Path) -> None:
    """JSON is UTF-8: another encoding is proposed, and read if it is set."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(encode_lines([GERMAN, FRENCH], "latin-1"))
    with pytest.raises(ValueError, match=r"in\.jsonl:1: (.|\n)*This text is probably cp1252\..* set --encoding cp1252\."):
        preprocess([str(source)], str(tmp_path / "out"), JOB)
    summary = preprocess([str(source)], str(tmp_path / "out"), job_of("cp1252"))
    assert texts(tmp_path / "out_text_document") == [GERMAN, FRENCH]
    assert not lines_of(summary)
    with pytest.raises(ValueError, match="This text is probably cp1252"):
        sample_texts([str(source)], ("text",), 10_000)


def test_an_encoding_that_cannot_be_right_is_told(tmp_path: Path) -> None:
    """UTF-8 that is read as Latin-1 gives no invalid byte, but wrong text."""
    (tmp_path / "a.txt").write_text(GERMAN, encoding="utf-8")
    (tmp_path / "b.jsonl").write_bytes(encode_lines(["plain", GERMAN, "x"], "utf-8"))
    (tmp_path / "c.txt").write_bytes(GERMAN.encode("latin-1"))
    (tmp_path / "d.txt").write_text("ascii")
    summary = preprocess([str(tmp_path)], str(tmp_path / "out"), job_of("iso8859-1"))
    shown = lines_of(summary)
    assert "2 read as iso8859-1 by --encoding, but is valid UTF-8: its text may be wrong" in shown
    assert [name for name in ("a.txt", "b.jsonl", "c.txt", "d.txt") if name in shown] == ["a.txt", "b.jsonl"]


@pytest.mark.parametrize("content", [b"\xff\xfa\x00", bytes(range(256)) * 3, b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\x01\xff"])
@pytest.mark.parametrize("errors", ERROR_HANDLINGS)
def test_binary_data_is_no_text(tmp_path: Path, content: bytes, errors: ErrorHandling) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.txt").write_text("b")
    summary = preprocess([str(tmp_path)], str(tmp_path / "out"), job_of(errors=errors, skips=True))
    assert texts(tmp_path / "out_text_document") == ["b"]
    assert "a.txt: the file looks like binary data, not text" in summary.bad_records[0]
    assert "invalid bytes: 1 text left out" in lines_of(summary, errors)


@given(content=st.binary(max_size=60), encoding=st.sampled_from(["utf-8", "cp932", "utf-16-le", "gb18030", "ascii", "cp1252"]))
@example(content=b"\xf0\x9f\x98 \xe2\x82", encoding="utf-8")
def test_invalid_bytes_are_treated_as_python_does(content: bytes, encoding: str) -> None:
    for errors in ERROR_HANDLINGS:
        decoder = RecordDecoder(TextEncoding(encoding, errors))
        try:
            expected: str | None = content.decode(encoding, errors).removeprefix("\ufeff")
        except UnicodeDecodeError:
            expected = None
        marked = content.decode(encoding, MARK_INVALID)
        if expected is None:
            with pytest.raises(UndecodableRecordError, match="is not valid") as caught:
                decoder.decode(content)
            with pytest.raises(UndecodableRecordError, match=re.escape(re.sub(r" in line \d+", "", str(caught.value)))):
                decoder.resolve(marked, re.search(r"offset \d+", str(caught.value))[0])  # type: ignore[index]
            continue
        assert decoder.decode(content) == expected
        replaced = decoder.take_replaced()
        try:
            content.decode(encoding)
            assert replaced is None
        except UnicodeDecodeError:
            assert replaced is not None
        assert decoder.resolve(marked, "").removeprefix("\ufeff") == expected
        marked_replaced = decoder.take_replaced()
        assert (replaced and replaced[0]) == (marked_replaced and marked_replaced[0])


@given(text=st.text(max_size=50), at=st.integers(0, 80), byte=st.integers(0x80, 0xFF))
@example(text="\N{GRINNING FACE}", at=17, byte=0xFF)
def test_text_with_one_bad_byte_stays_utf_8(text: str, at: int, byte: int) -> None:
    content = f"größte Bäume {text.replace(chr(0), '')} schöne Übung".encode()
    at = min(at, len(content))
    assert detect_encoding(content[:at] + bytes([byte]) + content[at:]) == ("utf-8", "")


def is_wide(content: bytes) -> bool:
    """Whether most bytes at every second position are zeros or control characters, as in UTF-16."""
    columns = (content[0::2], content[1::2])
    return any(sum(byte < 32 for byte in column) > 0.6 * len(column) for column in columns if column)


UTF_8_TEXTS = st.text(
    st.sampled_from("\0\0\0\1\4\x1b\b\r\n\t\x85\u2028\ufeff\ufffd abcdé中😀") | st.characters(codec="utf-8"), max_size=60
)


@given(text=UTF_8_TEXTS, repeat=st.sampled_from([1, 3, 40]), errors=st.sampled_from(ERROR_HANDLINGS))
@example(text="abc\0", repeat=500, errors="strict")
@example(text="abcde\0", repeat=300, errors="strict")
@example(text="ab\n\0", repeat=500, errors="strict")
@example(text="\0 中", repeat=500, errors="strict")
@example(text="ab\0\0", repeat=500, errors="strict")
@example(text="\0", repeat=500, errors="strict")
@example(text="a\ufeffb\r\nc\rd\u2028e\x85\0", repeat=20, errors="strict")
def test_valid_utf_8_is_read_as_it_is(text: str, repeat: int, errors: ErrorHandling) -> None:
    """Zeros between words are no UTF-16. Only text of which every second byte is a zero or a control character may be UTF-16."""
    content = (text * repeat).encode()
    assume(not is_wide(content) and not content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)))
    decoder = RecordDecoder(TextEncoding(errors=errors))
    decoder.set_encoding(content)
    assert decoder.decode(content) == content.decode("utf-8").removeprefix("\ufeff")
    assert decoder.note is None and decoder.take_replaced() is None
    line = b'{"text": "' + content.replace(b"\n", b"") + b'"}'
    decoder = RecordDecoder(TextEncoding(errors=errors))
    decoder.set_encoding_of_json(line[:4])
    assert decoder.decode(line) == line.decode("utf-8")


def test_zeros_in_files_stay_in_the_dataset(tmp_path: Path) -> None:
    """As before encodings were detected: the tokens are the bytes of the file. One bad byte does not make it UTF-16."""
    contents = [b"abc\0" * 500, b"abcde\0" * 300]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.txt").write_bytes(content)
    summary = preprocess([str(tmp_path)], str(tmp_path / "out"), JOB)
    assert [text.encode() for text in texts(tmp_path / "out_text_document")] == contents and not lines_of(summary)
    assert detect_encoding("a b c d".encode("utf-16-le")) == ("utf-8", ""), "too short for a decision"
    assert detect_encoding("一二三一".encode("utf-16-be") * 20)[0] != "utf-16-le"
    assert detect_encoding(contents[0] + b"\xff") == (None, "the file looks like binary data, not text")
    assert detect_encoding("schön\0".encode() * 500 + b"\xff") == ("utf-8", "")


def test_zeros_before_a_line_of_json_lines(tmp_path: Path) -> None:
    """A power failure may leave zeros. They affect the first line only, and are not taken for bytes of UTF-16 or UTF-32."""
    for zeros in (1, 2, 4):
        (tmp_path / "a.jsonl").write_bytes(b"\0" * zeros + encode_lines(["lost", GERMAN], "utf-8"))
        assert preprocess([str(tmp_path / "a.jsonl")], str(tmp_path / "out"), SKIP).num_bad_records == 1
        assert texts(tmp_path / "out_text_document") == [GERMAN]


@pytest.mark.parametrize(
    ("text", "encoding"),
    [(text, name) for text in ("plain text\n", RUSSIAN, GREEK) for name in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")]
    + [
        (f"{JAPANESE} 2.\n", "utf-16-le"),
        (f"一、{CHINESE} 2.\n", "utf-16-be"),
        (f"一、{CHINESE} 2.\n", "utf-16-le"),
        (f"{KOREAN}\n", "utf-32-le"),
    ],
)
@pytest.mark.parametrize("is_complete", [True, False])
def test_utf_16_and_utf_32_without_a_mark(text: str, encoding: str, is_complete: bool) -> None:
    content = (text * 20).encode(encoding)
    assert detect_encoding(content if is_complete else content[:-1], is_complete=is_complete) == (encoding, "detected")


@pytest.mark.parametrize("errors", ERROR_HANDLINGS)
@pytest.mark.parametrize("kind", ["binary", "unknown", "gb18030"])
def test_the_cost_of_large_files_is_bounded(kind: str, errors: ErrorHandling, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Python function is called for each invalid byte, and charset-normalizer gets a sample."""
    content = random.Random(1).randbytes(1 << 20)
    if kind == "unknown":
        content = bytes(byte | 0x80 for byte in content)
    elif kind == "gb18030":
        content = CHINESE.encode(kind) * 10_000
    num_marked, sample_sizes = 0, []
    mark, from_bytes = codecs.lookup_error(MARK_INVALID), charset_normalizer.from_bytes

    def count_marked(error: UnicodeError) -> tuple[str | bytes, int]:
        nonlocal num_marked
        num_marked += 1
        return mark(error)

    def record_size(sample: bytes, **settings: Any) -> Any:
        sample_sizes.append(len(sample))
        return from_bytes(sample, **settings)

    monkeypatch.setattr(charset_normalizer, "from_bytes", record_size)
    codecs.register_error(MARK_INVALID, count_marked)
    try:
        decoder = RecordDecoder(TextEncoding(errors=errors))
        decoder.set_encoding(content)
        if kind == "gb18030":
            assert decoder.decode(content).startswith(CHINESE)
        elif kind == "binary" or errors == "strict":
            with pytest.raises(UndecodableRecordError):
                decoder.decode(content)
        else:
            assert decoder.decode(content) == content.decode("utf-8", errors)
    finally:
        codecs.register_error(MARK_INVALID, mark)
    assert num_marked == 0
    assert len(sample_sizes) == (kind != "binary") and max(sample_sizes, default=0) < 200_000


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("latin-1", "iso8859-1"),
        ("UTF8", "utf-8"),
        ("utf-8-sig", "utf-8"),
        ("Windows-1252", "cp1252"),
        ("lattin1", "Did you mean latin1"),
        ("hex", "no text encoding"),
        ("unicode_escape", "no text encoding"),
        ("punycode", "no text encoding"),
        ("", "no text encoding"),
        ("a\0b", "no text encoding"),
    ],
)
def test_names_of_encodings(name: str, result: str) -> None:
    if " " not in result:
        assert normalize_encoding(name) == result
        return
    with pytest.raises(ValueError, match="no text encoding named") as caught:
        normalize_encoding(name)
    assert result in str(caught.value)


def test_the_sample_of_a_tokenizer_reports_what_it_reads(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(GERMAN.encode("latin-1"))
    (tmp_path / "b.txt").write_bytes(GERMAN.encode() + b"\xff")
    with pytest.raises(ValueError, match=r"b\.txt: byte 0xff at offset \d+ is not valid UTF-8"):
        sample_texts([str(tmp_path)], ("text",), 10_000)
    sample = sample_texts([str(tmp_path)], ("text",), 10_000, text_encoding=TextEncoding(errors="replace"))
    assert sorted([*sample.training_texts, *sample.held_out_texts]) == [GERMAN, f"{GERMAN}\ufffd"]
    shown = "\n".join(sample.encoding_notes.format_lines("replace"))
    assert "1 read as cp1252 (detected)" in shown and "invalid bytes: 1 in 1 text" in shown


EVALUATED: dict[str, tuple[Callable[[], bytes], str]] = {
    "a.txt": (lambda: GERMAN.encode("latin-1"), "a.txt: read as cp1252 (detected)"),
    "b.txt": (lambda: codecs.BOM_UTF16_LE + GERMAN.encode("utf-16-le"), "b.txt: read as utf-16-le (byte order mark)"),
    "c.jsonl": (lambda: encode_lines([GERMAN], "utf-16"), "c.jsonl: read as utf-16-le (byte order mark)"),
    "d.jsonl": (lambda: encode_lines([f"{GERMAN}\u2028\x85"], "utf-8"), ""),
    "e.txt": (lambda: b"\xff" + GERMAN.encode(), "e.txt: byte 0xff at offset 0 is not valid UTF-8"),
}


@pytest.mark.parametrize("name", EVALUATED)
def test_texts_of_an_evaluation(tmp_path: Path, name: str) -> None:
    content, message = EVALUATED[name]
    (tmp_path / name).write_bytes(content())
    shown: list[str] = []
    path = str(tmp_path / name)
    (document,) = read_documents(path, ByteTokenizer(), TextEncoding(errors="replace"), shown.append)
    assert GERMAN in bytes(document.ids).decode()
    assert message in "".join(shown)
    if name == "e.txt":
        with pytest.raises(ValueError, match=r"e\.txt: byte 0xff at offset 0 is not valid UTF-8"):
            list(read_documents(path, ByteTokenizer()))
