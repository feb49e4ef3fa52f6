"""From text to training samples by the tool: every tokenizer, every form of text, progress, summary and flags."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from megatron.config.data import DataConfig
from megatron.data.tokenizer import ByteTokenizer
from megatron_lab.commands.preprocess_data import Screen, main
from megatron_lab.data_tools.preprocess.input_shards import InputShard
from megatron_lab.data_tools.preprocess.job import preprocess
from megatron_lab.data_tools.preprocess.part_files import ShardCounts, ShardReport
from megatron_lab.data_tools.preprocess.reports import ProgressMeter
from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob
from megatron_lab.data_tools.preprocess.text_records import InputRange
from megatron_lab.tokenizers.fingerprint import compute_fingerprint, read_dataset_fingerprint
from tests.support.bpe_trainer import encode_plainly, train_bpe, write_bpe
from tests.support.cli import ROOT, spawn_cli
from tests.support.corpora import BYTES, FORMS, JOB, TEXTS, documents, expected_of, files_of, json_lines, write_lines, written

TOOL = "tools/preprocess_data.py"
UNICODE = st.characters(exclude_categories=["Cs"])
"""What UTF-8 can write; found by its category, since to try every character takes seconds."""


def test_the_tool_writes_bytes_end_to_end(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ["ab", "", "ö"])
    argv = [TOOL, "--input", source, "--output-prefix", str(tmp_path / "out")]
    done = spawn_cli([*argv, "--tokenizer-type", "ByteTokenizer", "--append-eod", "--json-keys", "text", "title"], None)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out_text_document.bin").read_bytes() == struct.pack("<6H", 97, 98, 256, 195, 182, 256)
    assert len((tmp_path / "out_text_document.idx").read_bytes()) == 82
    assert documents(tmp_path / "out_title_document") == [[48, 256], [49, 256], [50, 256]]
    for part in ("5 documents, 12 tokens", "1 empty, 0 bad lines", f"wrote {tmp_path / 'out_text_document'}.bin"):
        assert part in done.stderr
    assert done.stdout == ""
    assert written(tmp_path) == {
        f"out_{key}_document.{suffix}" for key in ("text", "title") for suffix in ("bin", "idx", "tokenizer")
    }
    for key in ("text", "title"):
        assert f"and {tmp_path}/out_{key}_document.tokenizer" in done.stderr
        fingerprint = read_dataset_fingerprint(str(tmp_path / f"out_{key}_document"))
        assert fingerprint == compute_fingerprint(ByteTokenizer(), DataConfig(tokenizer_type="ByteTokenizer"))


def test_sentencepiece_end_to_end(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl")
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3),
        model_prefix=str(tmp_path / "vocab"),
        vocab_size=90,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    model = str(tmp_path / "vocab.model")
    argv = [TOOL, "--input", source, "--output-prefix", str(tmp_path / "out"), "--append-eod", "--workers", "2"]
    argv += ["--shard-size", "1K", "--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", model]
    done = spawn_cli([*argv, "--build-index", "--seq-length", "16"], None)
    assert done.returncode == 0, done.stderr
    processor = SentencePieceProcessor(model_file=model)
    assert documents(tmp_path / "out_text_document") == [[*processor.encode(text), 2] for text in TEXTS]
    assert str(tmp_path / "out_text_document") in done.stderr.splitlines()[-1]


def test_gpt2_bpe_end_to_end(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl")
    bpe = train_bpe(TEXTS[0], 30)
    vocab, merges = write_bpe(bpe, tmp_path)
    argv = [TOOL, "--input", source, "--output-prefix", str(tmp_path / "out"), "--append-eod"]
    done = spawn_cli([*argv, "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(vocab), "--merge-file", str(merges)], None)
    assert done.returncode == 0, done.stderr
    eod = bpe.vocabulary["<|endoftext|>"]
    assert documents(tmp_path / "out_text_document") == [[*encode_plainly(text, bpe), eod] for text in TEXTS]


@given(texts=st.lists(st.text(UNICODE), min_size=1, max_size=12), shard_size=st.sampled_from([40, 200, None]), eod=st.booleans())
def test_any_text_round_trips_at_any_shard_size(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], shard_size: int | None, eod: bool
) -> None:
    assume(any(texts))
    folder = tmp_path_factory.mktemp("texts")
    source = write_lines(folder / "in.jsonl", texts)
    summary = preprocess([source], str(folder / "out"), PreprocessJob(BYTES, ("text",), eod), shard_size=shard_size)
    full = [text for text in texts if text]
    assert documents(folder / "out_text_document") == [[*text.encode(), *([256] * eod)] for text in full]
    assert (summary.num_documents, summary.num_empty) == (len(full), len(texts) - len(full))
    assert summary.num_bytes == Path(source).stat().st_size


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_text_gives_the_same_bytes(tmp_path: Path, form: str) -> None:
    source = FORMS[form](tmp_path / form, TEXTS)
    summary = preprocess([source], str(tmp_path / "out"), JOB, shard_size=700)
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)
    size = sum(path.stat().st_size for path in [Path(source), *Path(source).rglob("*")] if path.is_file())
    assert summary.num_bytes == size or form == "in.parquet", "all but the footer of parquet"


def test_a_zstd_file_of_a_long_window(tmp_path: Path) -> None:
    """As `zstd --long=28` writes; the library refuses it unless told."""
    zstandard = pytest.importorskip("zstandard")
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    with (tmp_path / "in.jsonl.zst").open("wb") as file, compressor.stream_writer(file) as packed:
        packed.write(json_lines(TEXTS))
    preprocess([str(tmp_path / "in.jsonl.zst")], str(tmp_path / "out"), JOB)
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)


def test_several_keys_of_lines_and_columns(tmp_path: Path) -> None:
    sources = [FORMS[form](tmp_path / form, TEXTS[:3]) for form in ("in.jsonl", "in.parquet")]
    preprocess(sources, str(tmp_path / "out"), PreprocessJob(BYTES, ("title", "text"), False))
    assert documents(tmp_path / "out_title_document") == [[48], [49], [50]] * 2
    assert documents(tmp_path / "out_text_document") == [[*text.encode()] for text in TEXTS[:3]] * 2


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x"}\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfy")
    preprocess([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")], str(tmp_path / "out"), JOB)
    assert documents(tmp_path / "out_text_document") == [[*b"x", 256], [*b"y", 256]]


def test_a_large_vocabulary_is_written_as_int32(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "69999 1"}\n')
    job = PreprocessJob(DataConfig(tokenizer_type="NullTokenizer", vocab_size=70000), ("text",), True)
    preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), job)
    assert (tmp_path / "out_text_document.bin").read_bytes() == np.array([69999, 1, 70000], "<i4").tobytes()


# ---- progress


def test_the_line_of_progress() -> None:
    now, lines = 0.0, list[str]()
    shards = [
        InputShard((InputRange("p", "jsonl", "", n, n, size, 0),)) for n, size in enumerate((40_000_000, 10_000_000, 50_000_000))
    ]
    meter = ProgressMeter(shards, lines.append, interval=5.0, clock=lambda: now)
    meter.update(0, ShardReport([7, 7], 900, 0, 40_000_000, [7], 0, [], new=False))
    now = 4.0
    meter.update(1, ShardCounts(5_000_000, 30, 400))
    assert not lines
    now = 5.0
    meter.update(1, ShardCounts(6_000_000, 40, 500))
    # What an earlier run did counts in the share, but not in the speed.
    assert lines == [" 46.0%  1.2 MB/s  8 documents/s  1,400 tokens  time left 0:00:45"]
    now = 10.0
    meter.update(1, ShardReport([60], 800, 0, 10_000_000, [60], 0, []))
    assert lines[1:] == [" 50.0%  1.0 MB/s  6 documents/s  1,700 tokens  time left 0:00:50"]


class Terminal(StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        """It is."""
        return True


def test_progress_is_replaced_on_a_terminal_and_plain_lines_elsewhere() -> None:
    for stream, shown in ((Terminal(), "\r   \rtwo\r   \rnote\n"), (StringIO(), "\ntwo\nnote\n")):
        screen = Screen(stream)
        for line in ("one", "two"):
            screen.show_progress(line)
        screen.log("note")
        assert stream.getvalue() == f"one{shown}"


def test_lines_of_progress_reach_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgressMeter.__init__, "__defaults__", (0.0, *ProgressMeter.__init__.__defaults__[1:]))  # type: ignore[index]
    lines: list[str] = []
    preprocess([write_lines(tmp_path / "in.jsonl")], str(tmp_path / "out"), JOB, shard_size=1000, log_progress=lines.append)
    assert len(lines) == 4, "one after each shard"
    assert lines[-1].startswith("100.0%") and lines[-1].endswith("time left 0:00:00")


# ---- flags


def test_help_imports_neither_torch_nor_numpy() -> None:
    for tool in (TOOL, "tools/merge_data.py"):
        done = spawn_cli(["-X", "importtime", tool, "--help"], None)
        assert done.returncode == 0
        assert "--output-prefix" in done.stdout
        imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
        assert "argparse" in imported
        assert not imported & {"torch", "numpy", "tiktoken", "sentencepiece", "pyarrow", "ray", "fsspec"}


def test_preprocessing_loads_neither_torch_nor_what_it_does_not_need(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.argv = {['x', '--input', write_lines(tmp_path / 'in.jsonl'), '--output-prefix', str(tmp_path / 'out')]}\n"
        "from megatron_lab.commands.preprocess_data import main\n"
        "assert main([*sys.argv[1:], '--tokenizer-type', 'ByteTokenizer']) == 0\n"
        "assert not {'torch', 'pyarrow', 'zstandard', 'ray', 'fsspec', 'tokenizers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--workers", "0"], "must be a whole number from 1 on, not '0'"),
        (["--workers", "x"], "must be a whole number from 1 on, not 'x'"),
        (["--json-keys", "a", "a"], "--json-keys names a key twice"),
        (["--tokenizer-typ", "ByteTokenizer"], "--tokenizer-typ"),
        (["--vocab-size", "9"], "--vocab-size has no effect with --tokenizer-type ByteTokenizer"),
        (["--shard-size", "9X"], "must be a number of bytes such as 67108864 or 64M, not '9X'"),
        (["--shard-size", "100"], "must be at least 1K, not 100"),
        (["--resume", "--restart"], "not allowed with argument --resume"),
        (["--ray-address", "auto"], "--ray-address has no effect without --engine ray"),
        (["--seq-length", "9"], "--seq-length has no effect without --build-index"),
        (["--build-index"], "--build-index needs --seq-length"),
        (["--build-index", "p", "--seq-length", "9"], "--build-index takes no PREFIX beside --input"),
        (
            ["--build-index", "--seq-length", "9", "--train-samples", "9"],
            "--train-samples has no effect without --data-order megatron",
        ),
    ],
)
def test_wrong_flags_exit_with_2(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="^2$"):
        main(["--input", "x", "--output-prefix", "y", "--tokenizer-type", "ByteTokenizer", *argv])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "--input PATH ... is missing"),
        (["--input", "x", "--tokenizer-type", "ByteTokenizer"], "--output-prefix is missing"),
        (["--input", "x", "--output-prefix", "y"], "--tokenizer-type is missing"),
        (["--build-index", "p", "--seq-length", "9", "--append-eod"], "--append-eod has no effect without --input"),
    ],
)
def test_missing_flags_exit_with_2(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="^2$"):
        main(argv)
    assert told in capsys.readouterr().err


def test_an_index_is_built_for_a_dataset_that_exists(tmp_path: Path) -> None:
    preprocess([write_lines(tmp_path / "in.jsonl")], str(tmp_path / "out"), JOB)
    prefix = str(tmp_path / "out_text_document")
    done = spawn_cli([TOOL, "--build-index", prefix, "--seq-length", "8", "--split", "1", "--data-order", "megatron"], None)
    assert done.returncode == 0, done.stderr
    assert prefix in done.stderr
    done = spawn_cli([TOOL, "--build-index", str(tmp_path / "none"), "--seq-length", "8"], None)
    assert done.returncode == 1
    assert "error: dataset" in done.stderr and "does not exist" in done.stderr
    assert json.dumps(prefix)[1:-1] in done.stderr, "the nearest"


def test_the_tool_leaves_the_handlers_of_signals_as_they_were(tmp_path: Path) -> None:
    """It may be called by another program."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert main(["--input", "/none", "--output-prefix", str(tmp_path / "o"), "--tokenizer-type", "ByteTokenizer"]) == 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
