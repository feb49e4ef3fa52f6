"""Samples of a Hugging Face dataset: the same for every order of reading, rank and restart, and each document once in an epoch."""

from __future__ import annotations

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.data.history import BlendEntry, Phase
from megatron.data.indexed_dataset import DatasetError
from megatron.data.loader import StepLoader
from megatron.data.samples import DocumentRules
from megatron.data.tokenizer import ByteTokenizer, NullTokenizer
from megatron_lab.data_tools import streamed_dataset, streamed_texts, token_lane
from megatron_lab.data_tools.streamed_dataset import StreamedDataset
from megatron_lab.data_tools.streamed_texts import StreamedTexts, choose_num_lanes
from tests.support.corpora import write_parquet
from tests.support.hugging_face_texts import EOD, build_source, build_texts, keep_cache_in, open_texts_of, read_epoch, write_folder

STREAMS: dict[str, dict[str, Any]] = {
    "parquet": {"file_type": "parquet"},
    "jsonl": {"file_type": "jsonl", "files": 5},
    "stored": {"file_type": "jsonl", "hf_streaming": False, "files": 8},
}


@pytest.fixture(params=STREAMS)
def stream(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    """Path of a dataset, and the settings with which it is read."""
    keep_cache_in(tmp_path / "arrow", monkeypatch)
    settings = dict(STREAMS[request.param])
    files = settings.pop("files", 4)
    return write_folder(tmp_path / "texts", settings.pop("file_type"), files), settings


def test_a_sample_does_not_depend_on_the_order_of_reading(
    stream: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, settings = stream
    expected = build_source(path, **settings).get_samples(0, 400)
    assert expected.shape == (400, 33) and expected.dtype == np.int64
    monkeypatch.setattr(streamed_dataset, "_MAX_KEPT_TOKENS", 64)  # so that lanes forget what they have read, and start again
    source, indices = build_source(path, **settings), list(range(400))
    random.Random(0).shuffle(indices)
    for index in indices[:60]:
        assert (source.get_samples(index, 1)[0] == expected[index]).all()
    with ThreadPoolExecutor(4) as pool:
        samples = list(pool.map(lambda first: source.get_samples(first, 4), range(0, 400, 4)))
    assert (np.concatenate(samples) == expected).all()


def test_each_document_is_read_once_in_an_epoch(stream: tuple[str, dict[str, Any]]) -> None:
    path, settings = stream
    data = open_texts_of(path, **settings)
    assert data.texts.num_lanes > 1
    first, second = read_epoch(data), read_epoch(data, 1)
    texts = build_texts(40 * len(list(Path(path).iterdir())))
    assert sorted(first) == sorted(second) == texts
    assert first != second, "each epoch has another shuffle"
    assert first != read_epoch(open_texts_of(path, **settings, seed=7)), "--seed determines the order"
    assert first == read_epoch(open_texts_of(path, **settings))


def test_a_lane_is_cut_into_windows_of_tokens(tmp_path: Path) -> None:
    """The documents of a lane, each with its end, epoch after epoch; neighbouring windows overlap by one token."""
    source = build_source(write_folder(tmp_path / "texts"))
    lanes, lane = len(source.lanes), 3
    samples = source.get_samples(0, 18 * lanes)[lane::lanes]
    assert (samples[1:, 0] == samples[:-1, -1]).all()
    tokens = np.concatenate([samples[:, :-1].ravel(), samples[-1, -1:]]).tolist()
    texts, expected = source._data.texts, []
    for epoch in range(3):
        for block in texts.iter_blocks(lane, epoch, streamed_texts.Spot()):
            for text in block.texts:
                expected += [*(text or "").encode(), EOD]
    assert len(expected) > len(tokens) > len(expected) * 2 // 3, "the samples reach the third epoch"
    assert tokens == expected[: len(tokens)]


def test_data_ranks_read_only_their_lanes(tmp_path: Path) -> None:
    """Together, the ranks of each layout read the same samples, and no rank opens lanes of other ranks."""
    path = write_folder(tmp_path / "texts", files=8)
    num_lanes = len(build_source(path).lanes)
    assert num_lanes == 48
    expected = build_source(path).get_samples(0, 96)
    for data_size, micro_batch_size in ((1, 2), (2, 4), (4, 2), (8, 1), (48, 1), (5, 1)):
        batch = data_size * micro_batch_size
        rows: dict[int, Any] = {}
        for rank in range(data_size):
            source = build_source(path)
            loader = StepLoader(
                source,
                DocumentRules(EOD),
                lambda microbatch: microbatch,
                micro_batch_size=micro_batch_size,
                data_rank=rank,
                data_size=data_size,
                global_batch_size_at=lambda consumed, size=batch: size,  # type: ignore[misc]
                consumed_samples=0,
                total_samples=96 - 96 % batch,
                num_workers=2,
            )
            for step in loader:
                for microbatch in step:
                    for row in range(micro_batch_size):
                        rows[microbatch.first_sample + row] = microbatch.tokens[row]
            if num_lanes % batch == 0:
                assert sum(lane.is_open for lane in source.lanes) == num_lanes // data_size
        assert sorted(rows) == list(range(96 - 96 % batch))
        assert all((rows[index] == expected[index, :-1]).all() for index in rows)


class CountingTokenizer(ByteTokenizer):
    """Tokenizer that counts the texts that it encodes."""

    num_texts = 0

    def encode_array(self, text: str) -> Any:
        self.num_texts += 1
        return super().encode_array(text)


def test_stored_positions_save_tokenizing_and_change_nothing(
    stream: tuple[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that continues after 800 samples reads the same without positions, with positions, and with damaged ones."""
    monkeypatch.setattr(token_lane, "POSITION_INTERVAL", 100)
    path, settings = stream
    cache = tmp_path / "cache"
    expected = build_source(path, **settings, data_cache_path=str(cache)).get_samples(0, 840)[800:]
    files = sorted(cache.rglob("lane_*.txt"))
    assert len(files) > 1

    def count_texts(**changes: Any) -> int:
        tokenizer = CountingTokenizer()
        source = build_source(path, **{**settings, "tokenizer": tokenizer, **changes})
        tokenizer.num_texts = 0
        assert (source.get_samples(800, 40) == expected).all()
        return tokenizer.num_texts

    with_positions, without = count_texts(data_cache_path=str(cache)), count_texts()
    assert 4 * with_positions < without
    for file in files:  # a line of another file, a digit too many, an incomplete line
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join([b"7" + line for line in lines]) + b"12 0 0 0 0")
    assert count_texts(data_cache_path=str(cache)) == without
    shutil.rmtree(cache)
    cache.write_text("a file, so that nothing can be stored")
    assert count_texts(data_cache_path=str(cache)) == without


@pytest.mark.parametrize(
    "changes",
    [{"seed": 7}, {"hf_shuffle_buffer": 60}, {"hf_text_column": "title"}, {"hf_valid_documents": 5}, {"tokenizer": 300}],
    ids=lambda changes: next(iter(changes)),
)
def test_positions_of_another_order_are_not_used(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write_folder(tmp_path / "texts", texts=[str(number % 300) for number in range(1000)])
    cache: dict[str, Any] = {"data_cache_path": str(tmp_path / "cache")}
    tokenizer: dict[str, Any] = {"tokenizer_type": "NullTokenizer", "vocab_size": 300, "tokenizer": NullTokenizer(300)}
    data = open_texts_of(path, **cache, **tokenizer, seq_length=8)
    if "tokenizer" in changes:
        changes = {"vocab_size": 301, "tokenizer": NullTokenizer(301)}
    other = open_texts_of(path, **{**cache, **tokenizer, "seq_length": 8, **changes})
    assert data.get_position_folder() != other.get_position_folder() is not None
    same = open_texts_of(path, **cache, **tokenizer, seq_length=16)
    assert data.get_position_folder() == same.get_position_folder(), "positions count tokens, not samples"


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    path = Path(write_folder(tmp_path / "texts"))
    fingerprint = open_texts_of(str(path)).fingerprint
    moved = path.rename(tmp_path / "moved")
    assert open_texts_of(str(moved)).fingerprint == fingerprint
    write_parquet(moved / "part-02.parquet", [*build_texts(160)[80:119], "text 0119 another"])
    assert open_texts_of(str(moved)).fingerprint != fingerprint


def _phase(entry: BlendEntry, first_sample: int, seq_length: int) -> Phase:
    return Phase(first_sample // 8, first_sample, "epoch", 1234, seq_length, 8, None, (entry,))


def test_another_sequence_length_continues_where_the_lanes_are(tmp_path: Path) -> None:
    """After 100 samples of 32 tokens, each lane continues with its next token."""
    path = write_folder(tmp_path / "texts")
    before, after = open_texts_of(path), open_texts_of(path, seq_length=20)
    (entry,) = before.blend_entries()
    phases = [_phase(entry, 0, 32), _phase(entry, 100, 20)]
    earlier, source = before.build_source(1), after.build_source(1, phases)
    assert isinstance(earlier, StreamedDataset) and isinstance(source, StreamedDataset)
    lanes = len(source.lanes)
    tokens: dict[int, list[int]] = {lane: [] for lane in range(lanes)}
    for index in range(100):
        tokens[index % lanes] += earlier.get_samples(index, 1)[0, :-1].tolist()
    for index in range(100, 200):
        tokens[index % lanes] += source.get_samples(index, 1)[0, :-1].tolist()
    for lane in range(lanes):
        assert tokens[lane] == source.lanes[lane].read(0, len(tokens[lane])).tolist()


def test_a_phase_with_another_dataset_starts_at_its_first_sample(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "texts")
    data = open_texts_of(path)
    (entry,) = data.blend_entries()
    other = BlendEntry("another", "hash", 0, 0, 1.0)
    source = data.build_source(1, [_phase(other, 0, 32), _phase(entry, 100, 32)])
    assert (source.get_samples(100, 8) == data.build_source(1).get_samples(0, 8)).all()


@pytest.mark.parametrize("count", [1, 10, 100])
def test_reserved_documents_are_only_for_validation(stream: tuple[str, dict[str, Any]], count: int) -> None:
    path, settings = stream
    splits = [read_epoch(open_texts_of(path, split=split, **settings, hf_valid_documents=count, seq_length=5)) for split in (0, 1)]
    assert sorted(splits[0] + splits[1]) == build_texts(40 * len(list(Path(path).iterdir())))
    # Of a stream, each of up to 16 shards reserves equally many documents, as far as its first part has them.
    assert count <= len(splits[1]) < count + 16 or (count == 100 and "hf_streaming" not in settings)


def test_each_text_file_can_be_reserved(tmp_path: Path) -> None:
    """A text file is one document, so 16 files are not enough for 30 documents."""
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(build_texts(80)):
        (tmp_path / f"texts/{number:02d}.txt").write_text(text)
    settings: dict[str, Any] = {"hf_valid_documents": 30, "seq_length": 5}
    train, valid = (read_epoch(open_texts_of(str(tmp_path / "texts"), split=split, **settings)) for split in (0, 1))
    assert len(valid) == 30 and sorted(train + valid) == build_texts(80)


def test_a_split_of_the_dataset_is_the_validation_data(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("train", "validation"):
        write_parquet(tmp_path / f"texts/{name}.parquet", build_texts(50, name))
    settings: dict[str, Any] = {"hf_valid_split": "validation", "hf_valid_documents": 10}
    train, valid = (read_epoch(open_texts_of(str(tmp_path / "texts"), split=split, **settings)) for split in (0, 1))
    assert sorted(train) == build_texts(50, "train") and sorted(valid) == build_texts(50, "validation")


@pytest.mark.parametrize("name", ["texts.jsonl", "texts.jsonl.gz", "*.parquet", "document.txt", "saved"])
def test_files_patterns_and_saved_datasets(tmp_path: Path, name: str) -> None:
    import gzip

    import datasets

    lines = "".join(json.dumps({"text": text}) + "\n" for text in build_texts(30))
    (tmp_path / "texts.jsonl").write_text(lines)
    (tmp_path / "texts.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "document.txt").write_text(lines)
    write_parquet(tmp_path / "a.parquet", build_texts(30)[:20])
    write_parquet(tmp_path / "b.parquet", build_texts(30)[20:])
    datasets.Dataset.from_dict({"text": build_texts(30)}).save_to_disk(tmp_path / "saved")
    expected = [lines] if name == "document.txt" else build_texts(30)
    assert sorted(read_epoch(open_texts_of(str(tmp_path / name)))) == expected


def test_a_folder_with_the_name_of_a_file_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library has builders of these names."""
    monkeypatch.chdir(tmp_path)
    for name in ("text", "json"):
        assert sorted(read_epoch(open_texts_of(write_folder(Path(name))))) == build_texts(160)


@pytest.mark.parametrize("num_failures", [1, 5, 6])
def test_a_failed_read_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
    """After a pause that grows. Six failures in a row end the run, with the shard and the cause."""
    path = write_folder(tmp_path / "texts")
    data = open_texts_of(path)
    expected = read_epoch(data)
    pauses: list[float] = []
    monkeypatch.setattr(streamed_texts, "time", SimpleNamespace(sleep=pauses.append))
    split_shard, failures = StreamedTexts._split_shard, [0]

    def fail(self: StreamedTexts, shard: int) -> list[Any]:
        if shard == 9 and failures[0] < num_failures:
            failures[0] += 1
            raise ConnectionError("the server has gone")
        return split_shard(self, shard)

    monkeypatch.setattr(StreamedTexts, "_split_shard", fail)
    if num_failures < 6:
        assert read_epoch(data) == expected
    else:
        with pytest.raises(
            DatasetError, match=r"6 attempts to read failed at shard 9 of 24 .*ConnectionError: the server has gone"
        ):
            read_epoch(data)
    assert pauses == [1, 2, 4, 8, 16][:num_failures]


def test_a_read_that_fails_in_the_middle_continues_after_the_last_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_texts_of(write_folder(tmp_path / "texts", "jsonl"))
    expected = read_epoch(data)
    monkeypatch.setattr(streamed_texts, "time", SimpleNamespace(sleep=lambda seconds: None))
    get_texts, calls = StreamedTexts._get_texts, [0]

    def fail(self: StreamedTexts, table: Any) -> Any:
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise OSError("timed out")
        return get_texts(self, table)

    monkeypatch.setattr(StreamedTexts, "_get_texts", fail)
    assert read_epoch(data) == expected and calls[0] > 20


def test_a_lane_can_be_read_again_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = build_source(write_folder(tmp_path / "texts"))
    expected = build_source(str(tmp_path / "texts")).get_samples(0, 200)
    tokenize = token_lane.TokenLane._tokenize
    monkeypatch.setattr(token_lane.TokenLane, "_tokenize", lambda *_: (_ for _ in ()).throw(DatasetError("broken")))
    with pytest.raises(DatasetError, match="broken"):
        source.get_samples(0, 200)
    monkeypatch.setattr(token_lane.TokenLane, "_tokenize", tokenize)
    assert (source.get_samples(0, 200) == expected).all()


def _explain(path: object, **settings: Any) -> str:
    with pytest.raises(DatasetError) as error:
        open_texts_of(str(path), **settings)
    return str(error.value)


@pytest.mark.parametrize("hf_streaming", [True, False])
def test_errors_name_what_is_wrong_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf_streaming: bool) -> None:
    keep_cache_in(tmp_path / "arrow", monkeypatch)
    path, kind = write_folder(tmp_path / "texts"), {"hf_streaming": hf_streaming}
    assert "has no column body; its columns are id, text, title." in _explain(path, hf_text_column="body", **kind)
    assert "--hf-text-column" in _explain(path, hf_text_column="body", **kind)
    assert "the column id contains values of type int, not texts" in _explain(path, hf_text_column="id", **kind)
    assert "has no split test; its splits are train.\n  Give one of them with --hf-split." in _explain(
        path, hf_split="test", **kind
    )
    assert "with --hf-valid-split." in _explain(path, hf_valid_split="test", split=1, **kind)
    assert "'x' not found" in (message := _explain(path, hf_subset="x", **kind)) and "with --hf-subset" in message
    assert "there is no such file" in _explain(tmp_path / "none.jsonl", **kind)
    assert "cannot be opened" in (message := _explain(tmp_path / "none", **kind)) and "Check the path." in message
    assert "HF_TOKEN" in (message := _explain("name/of-a-dataset", **kind)) and "hf download name/of-a-dataset" in message
    assert "texts of" in (message := _explain(path, seq_length=10**6, **kind)) and "one sample needs 1,000,001 tokens" in message
    lines = write_folder(tmp_path / "lines", "jsonl")
    assert "--hf-valid-documents" in _explain(lines, hf_valid_documents=10**6, **kind)
    (tmp_path / "empty").mkdir()
    assert "--hf-dataset" in _explain(tmp_path / "empty", **kind)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/a.parquet").write_bytes(b"PAR1 and no more")
    assert "A file is damaged" in _explain(tmp_path / "damaged", **kind)
    for file in (tmp_path / "lines").iterdir():
        file.write_text('{"text": "no end\n')
    assert "JSON" in _explain(tmp_path / "lines", **kind), "the cause, not only that there is an error"


def test_documents_without_text_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    write_parquet(tmp_path / "texts/a.parquet", [None, "", "one two", None] * 20)
    samples = build_source(str(tmp_path / "texts")).get_samples(0, 20)
    text = bytes(token if token != EOD else 10 for token in samples[:, :-1].ravel().tolist())
    assert set(text.split(b"\n")[1:-1]) == {b"one two"}
    write_parquet(tmp_path / "texts/a.parquet", [None, ""] * 20)
    assert "have 0 tokens in the column text" in _explain(tmp_path / "texts")


def test_a_damaged_line_ends_the_run_after_a_second_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_texts, "time", SimpleNamespace(sleep=lambda seconds: None))
    path = Path(write_folder(tmp_path / "texts", "jsonl"))
    with (path / "part-03.jsonl").open("a") as file:
        file.write('{"text": "cut')
    with pytest.raises(DatasetError, match=r"2 attempts to read failed at shard 3 of 4 .*JSON parse error"):
        read_epoch(open_texts_of(str(path)))


def test_an_empty_file_is_passed_over(tmp_path: Path) -> None:
    path = Path(write_folder(tmp_path / "texts", "jsonl"))
    (path / "part-03.jsonl").write_text("")
    assert build_source(str(path)).get_samples(0, 400).shape == (400, 33)


def test_a_text_that_cannot_be_encoded_is_named(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    write_parquet(tmp_path / "texts/a.parquet", ["1 2 3"] * 20 + ["1 x"], rows=100)
    settings: dict[str, Any] = {"tokenizer_type": "NullTokenizer", "vocab_size": 5, "tokenizer": NullTokenizer(5)}
    assert "row 20: the text cannot be encoded: 'x' is not an id" in _explain(tmp_path / "texts", seq_length=100, **settings)


def test_lineage_names_the_documents_of_a_sample(stream: tuple[str, dict[str, Any]]) -> None:
    path, settings = stream
    source = build_source(path, **settings)
    for index in (0, 77):
        spans = source.get_lineage(index)
        assert sum(span.num_tokens for span in spans) == 33
        assert all(span.prefix.startswith(path) for span in spans)
    if not settings:
        return
    texts, tokens = build_texts(320), []
    for span in spans:  # with random access, the document is the row of the dataset
        tokens += [*texts[span.document].encode(), EOD][span.first_token :][: span.num_tokens]
    assert tokens == source.get_samples(77, 1)[0].tolist()


@pytest.mark.parametrize(
    "num_units, expected", [(1, 1), (2, 2), (3, 3), (5, 3), (14, 8), (47, 24), (48, 48), (100, 24), (2410, 48)]
)
def test_the_number_of_lanes_depends_on_the_number_of_shards(num_units: int, expected: int) -> None:
    assert choose_num_lanes(num_units) == expected
