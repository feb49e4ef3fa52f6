"""Files of an earlier version: indexed datasets, the indexes of their order, a run's history and a preprocessing job under way."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
import xxhash

from megatron.config.data import DataConfig
from megatron.data import indexed_writer
from megatron.data.history import Phase
from megatron.data.splits import open_datasets
from megatron.data.tokenizer import ByteTokenizer
from megatron_lab.data_tools.preprocess import storage
from megatron_lab.data_tools.preprocess.job import preprocess
from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob
from tests.support.cli import ROOT

ARCHIVE = ROOT / "tests/support/written_before/data.tar.gz"
"""`data_made_by.txt` beside it says how it was made."""


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the earlier version's files, in which the test runs. Small indexes are kept too, and paths relative."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and later have it
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(indexed_writer, "MIN_ENTRIES", 1)
    monkeypatch.setattr(storage, "normalize_path", lambda path: path)
    return tmp_path


def read_samples(cache: str) -> None:
    """Read what the earlier version read, with indexes in a folder, and compare the samples."""
    for name, case in json.loads(Path("samples.json").read_text()).items():
        settings: dict[str, Any] = case["settings"] | {"data_path": tuple(case["settings"]["data_path"])}
        config = DataConfig(mock_data=False, data_cache_path=cache, split="80,20", **settings)
        opened = open_datasets(config, seed=7, seq_length=16, tokenizer=ByteTokenizer(), need_validation=True, need_test=False)
        phases = [Phase.from_json(phase) for phase in case["history"]]
        assert [phase.to_json() for phase in phases] == [{**phase, "parts": tuple(phase["parts"])} for phase in case["history"]]
        if phases:
            assert phases[-1].parts == opened.train.blend_entries(), f"{name}: the datasets are known again"
        for split, count in ((opened.train, 700), (opened.valid[""], 150)):
            history = phases if split is opened.train else []
            first = history[-1].first_sample if history else 0
            samples = split.build_source(count, history).get_samples(first, count - first)
            assert xxhash.xxh3_128_hexdigest(samples.tobytes()) == case["samples"][str(split.split)], f"{name}, split {split.split}"


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files but the lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def test_indexes_of_the_order_are_those_of_today(before: Path) -> None:
    """But for the mark at their end, which did not have the name of the array. So they are made again, once."""
    earlier = contents(before / "cache")
    read_samples("cache")
    now = contents(before / "cache")
    assert now != earlier
    assert {name: data[:-32] for name, data in now.items()} == {name: data[:-32] for name, data in earlier.items()}
    read_samples("another")
    assert contents(before / "another") == contents(before / "cache"), "today's indexes are the same files"


def test_a_preprocessing_job_under_way_is_resumed(before: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version did not detect encodings, so the shard with an invalid record is converted again."""
    monkeypatch.chdir(before / "job")
    kept = len(list(Path("out.parts").glob("*_0.bin")))
    job = PreprocessJob(DataConfig(tokenizer_type="ByteTokenizer"), ("text", "title"), append_eod=True, skip_bad_records=True)
    notes: list[str] = []
    summary = preprocess(["input"], "out", job, start_mode="resume", log=notes.append)
    assert kept == 5 and summary.num_resumed_shards == 4 and "shards finished by an earlier run: 4 of 8" in notes, notes
    assert not Path("out.parts").exists()
    complete = sorted(path for path in os.listdir() if path.startswith("complete_"))
    assert len(complete) == 5
    for name in complete:
        now, earlier = Path(name.replace("complete", "out", 1)).read_bytes(), Path(name).read_bytes()
        if name.endswith("_bad_lines.txt"):  # the words of its reasons have changed
            now, earlier = (b" ".join(line.split()[0] for line in text.splitlines()) for text in (now, earlier))
        assert now == earlier, name
