"""From JSON lines to training samples: every tokenizer, any number of workers, and nothing left of a failure."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from megatron.config.data import DataConfig
from megatron.data import preprocess as preprocess_module
from megatron.data.build import build_datasets
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.preprocess import Job, Summary, preprocess
from megatron.data.tokenizers.build import build_tokenizer
from tests.bpe_trainer import encode_plainly, train_bpe, write_bpe
from tests.cli import spawn_cli

BYTES = DataConfig(tokenizer_type="ByteTokenizer")
TEXTS = [f"Document {number}: the größte 東京 of {number * number}\n\ttabs \u2028 and lines" for number in range(40)]


def write_lines(path: Path, texts: list[str]) -> str:
    """A JSON-lines file; the escapes of json and raw UTF-8 alternate."""
    lines = [json.dumps({"text": text, "title": str(n)}, ensure_ascii=bool(n % 2)) for n, text in enumerate(texts)]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")
    return str(path)


def documents(prefix: str) -> list[list[int]]:
    """What an indexed dataset holds."""
    dataset = IndexedDataset(prefix)
    return [dataset.document(number).tolist() for number in range(dataset.num_documents)]


def only_inputs(folder: Path) -> bool:
    """Nothing was written beside the inputs."""
    return all(path.suffix in (".jsonl", ".model", ".vocab", ".json") or path.name == "merges.txt" for path in folder.iterdir())


def test_the_tool_writes_bytes_end_to_end(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ["ab", "", "ö"])
    argv = ["tools/preprocess_data.py", "--input", source, "--output-prefix", str(tmp_path / "out")]
    done = spawn_cli([*argv, "--tokenizer-type", "ByteTokenizer", "--append-eod", "--json-keys", "text", "title"], None)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out_text_document.bin").read_bytes() == struct.pack("<6H", 97, 98, 256, 195, 182, 256)
    assert len((tmp_path / "out_text_document.idx").read_bytes()) == 82
    assert documents(str(tmp_path / "out_title_document")) == [[48, 256], [49, 256], [50, 256]]
    for part in ("5 documents, 12 tokens", "1 empty, 0 bad lines", f"wrote {tmp_path / 'out_text_document'}.bin"):
        assert part in done.stderr
    assert done.stdout == ""


def test_sentencepiece_end_to_end_feeds_training(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3),
        model_prefix=str(tmp_path / "vocab"),
        vocab_size=90,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    model = str(tmp_path / "vocab.model")
    argv = ["tools/preprocess_data.py", "--input", source, "--output-prefix", str(tmp_path / "out"), "--append-eod"]
    done = spawn_cli([*argv, "--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", model, "--workers", "2"], None)
    assert done.returncode == 0, done.stderr
    processor = SentencePieceProcessor(model_file=model)
    prefix = str(tmp_path / "out_text_document")
    assert documents(prefix) == [[*processor.encode(text), 2] for text in TEXTS]

    config = DataConfig(data_path=(prefix,), split="8,2", tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=model)
    tokenizer = build_tokenizer(config)
    sets = build_datasets(config, seed=1, seq_length=32, tokenizer=tokenizer, need_validation=True, need_test=False)
    assert sets.train.sample(0).shape == (33,)
    assert sets.train.sample(0).max() < tokenizer.vocab_size


def test_gpt2_bpe_end_to_end(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    bpe = train_bpe(TEXTS[0], 30)
    vocab, merges = write_bpe(bpe, tmp_path)
    argv = ["tools/preprocess_data.py", "--input", source, "--output-prefix", str(tmp_path / "out"), "--append-eod"]
    done = spawn_cli([*argv, "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(vocab), "--merge-file", str(merges)], None)
    assert done.returncode == 0, done.stderr
    eod = bpe.vocabulary["<|endoftext|>"]
    assert documents(str(tmp_path / "out_text_document")) == [[*encode_plainly(text, bpe), eod] for text in TEXTS]


@given(texts=st.lists(st.text(), min_size=1, max_size=20), chunk=st.sampled_from([1, 7, 50, 1 << 20]), eod=st.booleans())
def test_any_text_round_trips_at_any_chunk_size(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], chunk: int, eod: bool
) -> None:
    assume(any(texts))
    folder = tmp_path_factory.mktemp("texts")
    source = write_lines(folder / "in.jsonl", texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocess_module, "_CHUNK_BYTES", chunk)
        summary = preprocess([source], str(folder / "out"), Job(BYTES, ("text",), eod))
    full = [text for text in texts if text]
    assert documents(str(folder / "out_text_document")) == [[*text.encode(), *([256] * eod)] for text in full]
    assert summary.num_documents == len(full)
    assert summary.num_empty == len(texts) - len(full)
    assert summary.num_bytes == Path(source).stat().st_size


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess_module, "_CHUNK_BYTES", 300)
    sources = [write_lines(tmp_path / "a.jsonl", TEXTS), write_lines(tmp_path / "b.jsonl", TEXTS[:7])]
    (tmp_path / "b.jsonl").write_bytes((tmp_path / "b.jsonl").read_bytes() + b"{}\n")
    reports = []
    for workers in (1, 3):
        summary = preprocess(
            sources, str(tmp_path / f"w{workers}"), Job(BYTES, ("text",), True), num_workers=workers, skip_bad_lines=True
        )
        reports.append((summary.num_documents, summary.num_tokens, summary.num_empty, summary.bad_lines))
    assert reports[0] == reports[1]
    assert reports[0][0] == 47
    assert len(reports[0][3]) == 1
    for suffix in ("bin", "idx"):
        first, second = (tmp_path / f"w{workers}_text_document.{suffix}" for workers in (1, 3))
        assert first.read_bytes() == second.read_bytes()


BAD_LINES = {
    b'{"text": "x"': "not JSON: .* at column",
    b"[1]": "not a JSON object",
    b'{"title": "x"}': r"no key 'text' \(--json-keys\); the line has: 'title'",
    b'{"text": 5}': "not a string but 5",
    b'{"text": "\xff"}': "not UTF-8: byte 0xff at column 11",
    b'{"text": "\\ud800"}': "surrogate",
    b"[" * 100_000: "recursion",
    b'{"text": ' + b"9" * 5000 + b"}": "digit",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path: Path, bad: bytes) -> None:
    good = json.dumps({"text": "fine"}).encode()
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([good, b"", bad, good]))
    where = rf"in\.jsonl:3: .*{BAD_LINES[bad]}"
    job = Job(BYTES, ("text",), False)
    with pytest.raises(ValueError, match=where):
        preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), job)
    assert only_inputs(tmp_path)
    summary = preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), job, skip_bad_lines=True)
    assert documents(str(tmp_path / "out_text_document")) == [[*b"fine"]] * 2
    assert len(summary.bad_lines) == 1
    assert summary.bad_lines[0].startswith(f"{tmp_path / 'in.jsonl'}:3: ")


def test_all_bad_lines_are_counted_and_the_first_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess_module, "_KEPT_BAD_LINES", 3)
    monkeypatch.setattr(preprocess_module, "_CHUNK_BYTES", 5)
    (tmp_path / "in.jsonl").write_text('{}\n{}\n{"text": "x"}\n{}\n{}\n{}\n')
    summary = preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), Job(BYTES, ("text",), False), skip_bad_lines=True)
    assert summary.num_bad_lines == 5
    assert [line.split(":")[1] for line in summary.bad_lines] == ["1", "2", "4"]


def test_a_line_bad_for_one_key_gives_no_document_for_any(tmp_path: Path) -> None:
    lines = [{"a": "x", "b": "y"}, {"a": "z"}, {"a": "u", "b": ""}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    summary = preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), Job(BYTES, ("a", "b"), False), skip_bad_lines=True)
    assert documents(str(tmp_path / "out_a_document")) == [[*b"x"], [*b"u"]]
    assert documents(str(tmp_path / "out_b_document")) == [[*b"y"]]
    assert (summary.num_documents, summary.num_empty, len(summary.bad_lines)) == (3, 1, 1)


@pytest.mark.parametrize("workers", ["1", "3"])
def test_the_tool_fails_with_file_and_line(tmp_path: Path, workers: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    with Path(source).open("ab") as file:
        file.write(b'{"text": oops}\n')
    argv = ["tools/preprocess_data.py", "--input", source, "--output-prefix", str(tmp_path / "out"), "--workers", workers]
    done = spawn_cli([*argv, "--tokenizer-type", "ByteTokenizer"], None)
    assert done.returncode == 1
    assert f"error: {source}:41: not JSON" in done.stderr
    assert "--on-error skip" in done.stderr
    assert "Traceback" not in done.stderr
    assert only_inputs(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": ["/none.jsonl"]}, "--input /none.jsonl: there is no such file"),
        ({"output_prefix": "/none/out"}, "the folder /none does not exist"),
        ({"job": Job(DataConfig(tokenizer_type="NullTokenizer"), ("text",), False)}, "needs --vocab-size"),
        ({"job": Job(DataConfig(tokenizer_type="NullTokenizer", vocab_size=9), ("text",), False)}, "in.jsonl:1: 'ab' is not an id"),
        ({"job": Job(BYTES, ("empty",), True)}, "no document with a token"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path: Path, change: dict[str, object], message: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "ab", "empty": ""}\n')
    settings = {"inputs": [str(tmp_path / "in.jsonl")], "output_prefix": str(tmp_path / "out"), "job": Job(BYTES, ("text",), False)}
    with pytest.raises(ValueError, match=message):
        preprocess(**{**settings, **change})  # type: ignore[arg-type]
    assert only_inputs(tmp_path)


def die(*_: object) -> None:
    """End a worker as the kernel would for want of memory."""
    os._exit(9)


def test_a_worker_that_dies_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    monkeypatch.setattr(preprocess_module, "_encode_in_worker", die)
    with pytest.raises(ValueError, match="a worker process ended"):
        preprocess([source], str(tmp_path / "out"), Job(BYTES, ("text",), False), num_workers=2)
    assert only_inputs(tmp_path)


def test_few_chunks_are_under_way_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So memory does not grow with the input: the reader stays a few chunks before the writer."""
    monkeypatch.setattr(preprocess_module, "_CHUNK_BYTES", 1)
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    chunks, taken, lead = preprocess_module._chunks, 0, []

    def counted(inputs: list[str]) -> object:
        nonlocal taken
        for chunk in chunks(inputs):
            taken += 1
            yield chunk

    def progress(summary: Summary) -> None:
        lead.append(taken - summary.num_documents)

    monkeypatch.setattr(preprocess_module, "_chunks", counted)
    preprocess([source], str(tmp_path / "out"), Job(BYTES, ("text",), False), num_workers=2, progress=progress)
    assert len(lead) == len(TEXTS)
    assert max(lead) <= 4


def test_help_imports_neither_torch_nor_numpy() -> None:
    done = spawn_cli(["-X", "importtime", "tools/preprocess_data.py", "--help"], None)
    assert done.returncode == 0
    assert "--append-eod" in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported & {"torch", "numpy", "tiktoken", "sentencepiece"}


@pytest.mark.parametrize(
    "argv", [["--workers", "0"], ["--json-keys", "a", "a"], ["--tokenizer-typ", "ByteTokenizer"], ["--vocab-size", "9"]]
)
def test_wrong_flags_exit_with_2(argv: list[str]) -> None:
    base = ["tools/preprocess_data.py", "--input", "x", "--output-prefix", "y", "--tokenizer-type", "ByteTokenizer"]
    done = spawn_cli([*base, *argv], None)
    assert done.returncode == 2
    assert argv[0] in done.stderr


def test_a_large_vocabulary_is_written_as_int32(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "69999 1"}\n')
    job = Job(DataConfig(tokenizer_type="NullTokenizer", vocab_size=70000), ("text",), True)
    preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), job)
    assert (tmp_path / "out_text_document.bin").read_bytes() == np.array([69999, 1, 70000], "<i4").tobytes()
