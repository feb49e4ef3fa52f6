"""A job that is ended by any means goes on where it was, and the bytes are those of a job that was not."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import pytest

from megatron.config.data import DataConfig
from megatron_lab.data_tools.preprocess import engines, shard_work
from megatron_lab.data_tools.preprocess.engines import Engine, ShardCallback
from megatron_lab.data_tools.preprocess.input_shards import InputShard, find_sources, split_into_shards
from megatron_lab.data_tools.preprocess.job import preprocess
from megatron_lab.data_tools.preprocess.part_files import ShardCounts, ShardReport
from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob
from megatron_lab.data_tools.preprocess.text_encoding import TextEncoding
from megatron_lab.tokenizers.fingerprint import read_dataset_fingerprint
from tests.support.bpe_trainer import train_bpe, write_bpe
from tests.support.cli import ROOT
from tests.support.corpora import BYTES, JOB, SKIP, TEXTS, documents, expected_of, files_of, write_gz, write_lines, written
from tests.support.vocabularies import tokenizer_json, write_json

OTHERS = ["other", "texts"]


def run_and_exit(source: list[str], prefix: str, before: Callable[[], None]) -> int:
    """The exit code of a forked process that does a job."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            before()
            preprocess(source, prefix, JOB, shard_size=2000, start_mode="resume")
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_killed_at_every_change_of_a_name(tmp_path: Path) -> None:
    """Each file gets its final name by a change of its name; nothing else makes one visible."""
    source = [write_lines(tmp_path / "in.jsonl")]
    prefix = str(tmp_path / "out")

    def end_at(number: int) -> Callable[[], None]:
        count = 0

        def change_of(original: Callable[..., Any]) -> Callable[..., Any]:
            def change(*args: object, **kwargs: object) -> object:
                nonlocal count
                count += 1
                if count == number:
                    os._exit(9)
                return original(*args, **kwargs)

            return change

        def patch() -> None:
            Path.replace = change_of(Path.replace)  # type: ignore[method-assign]
            Path.unlink = change_of(Path.unlink)  # type: ignore[method-assign]
            os.rename = change_of(os.rename)  # type: ignore[assignment]

        return patch

    for number in range(1, 100):
        dataset = tmp_path / "out_text_document"
        for suffix, content in zip((".bin", ".idx"), expected_of(OTHERS), strict=True):
            dataset.with_suffix(suffix).write_bytes(content)
        dataset.with_suffix(".tokenizer").write_text("old")
        code = run_and_exit(source, prefix, end_at(number))
        if dataset.with_suffix(".idx").exists():
            assert files_of(dataset) in (expected_of(OTHERS), expected_of(TEXTS)), "the old one or the new one, never a mixture"
            if dataset.with_suffix(".tokenizer").exists():
                is_old = dataset.with_suffix(".tokenizer").read_text() == "old"
                assert is_old == (files_of(dataset) == expected_of(OTHERS)), "no dataset beside the fingerprint of another"
        if not code:
            break
        assert code == 9
        if (tmp_path / "out.parts").exists():  # it is not where only its removal was cut short
            preprocess(source, prefix, JOB, start_mode="resume")
            assert written(tmp_path) == {f"out_text_document.{suffix}" for suffix in ("bin", "idx", "tokenizer")}, "and no rubbish"
            fingerprint = read_dataset_fingerprint(str(dataset))
            assert fingerprint is not None and fingerprint.tokenizer_type == JOB.tokenizer.tokenizer_type
        assert files_of(dataset) == expected_of(TEXTS)
    assert 15 < number < 99


def test_killed_at_random_and_resumed(tmp_path: Path, full: bool) -> None:
    """The tool with two workers; they end with it. Once, or with --full three times."""
    texts = [f"{number} {text}" for number in range(150) for text in TEXTS]
    argv = [sys.executable, "tools/preprocess_data.py", "--input", write_lines(tmp_path / "a.jsonl", texts)]
    argv += [write_gz(tmp_path / "b.jsonl.gz", texts), "--output-prefix", str(tmp_path / "out"), "--append-eod"]
    argv += ["--tokenizer-type", "ByteTokenizer", "--shard-size", "8K", "--workers", "2", "--resume"]
    times, kept = random.Random(5), [1]  # job.json is no report
    for _ in range(3 if full else 1):
        process = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.DEVNULL)
        folder = tmp_path / "out.parts"
        while process.poll() is None and len(list(folder.glob("*.json"))) <= kept[-1]:
            time.sleep(0.002)
        time.sleep(times.uniform(0, 0.02))
        process.kill()
        process.wait()
        kept.append(len(list(folder.glob("*.json"))))
        time.sleep(0.1)
        assert len(list(folder.glob("*.json"))) == kept[-1], "its workers have ended too"
        assert not list(tmp_path.glob("out_text_document.*"))
    assert all(a < b for a, b in itertools.pairwise(kept))
    done = subprocess.run(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"shards finished by an earlier run: {kept[-1] - 1} of " in done.stderr, "all but job.json are reports of shards"
    assert files_of(tmp_path / "out_text_document") == expected_of([*texts, *texts])


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.full("SIGTERM")), (signal.SIGTERM, 143)]
)
def test_a_signal_stops_it_in_order(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """It goes to all processes, as that of a terminal or a cluster does."""
    texts = TEXTS * 100
    argv = [sys.executable, "tools/preprocess_data.py", "--input", write_lines(tmp_path / "in.jsonl", texts), "--output-prefix"]
    argv += [str(tmp_path / "out"), "--tokenizer-type", "ByteTokenizer", "--shard-size", "4K", "--workers", "2"]
    process = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while process.poll() is None and len(list((tmp_path / "out.parts").glob("*.json"))) < 4:
        time.sleep(0.002)
    os.killpg(process.pid, number)
    told = process.communicate()[1]
    assert process.returncode == code, told
    assert told.splitlines()[-1].endswith("finished shards are kept: go on with --resume.")
    assert "Traceback" not in told
    assert not list(tmp_path.rglob("*.partial-*"))
    assert written(tmp_path) == {"out.parts"}


def test_a_signal_that_python_drops_comes_again(tmp_path: Path) -> None:
    """In a destructor exceptions are printed and forgotten."""
    code = (
        "import os, signal, sys\n"
        "from megatron_lab.data_tools.preprocess import shard_work\n"
        "from megatron_lab.commands import preprocess_data\n"
        "preprocess_data._SECONDS_TO_STOP = 0.2\n"
        "class Deaf:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        for _ in range(100): pass\n"
        "def add(self, number, piece):\n"
        "    Deaf()\n"
        "    while True: pass\n"
        "shard_work._ShardBuilder.add = add\n"
        "sys.exit(preprocess_data.main(sys.argv[1:]))\n"
    )
    argv = ["--input", write_lines(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out"), "--tokenizer-type"]
    done = subprocess.run(
        [sys.executable, "-c", code, *argv, "ByteTokenizer"], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert "Exception ignored in" in done.stderr, "it was dropped"
    assert done.returncode == 143
    assert "preprocess_data.py: stopped by SIGTERM. No dataset is written" in done.stderr
    assert not written(tmp_path)


def stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: Sequence[str], job: PreprocessJob = JOB, shards: int = 3
) -> None:
    """A job at PREFIX out that was ended after some shards."""

    def run(self: Engine, job: PreprocessJob, shards_: list[InputShard], folder: str, listen: ShardCallback) -> None:
        for number, shard in enumerate(shards_[:shards]):
            listen(number, shard_work.run_shard(job, shard, folder))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Engine, "run", run)
        preprocess(sources, str(tmp_path / "out"), job, shard_size=600)


def test_what_was_half_written_goes_before_the_work_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a disk that was full stays full."""
    sources = [write_lines(tmp_path / "in.jsonl")]
    stopped(tmp_path, monkeypatch, sources)
    half = tmp_path / "out.parts" / "ab_0.bin.partial-host-1"
    half.touch()
    run = Engine.run

    def and_look(self: Engine, *args: Any) -> None:
        assert not half.exists()
        run(self, *args)

    monkeypatch.setattr(Engine, "run", and_look)
    preprocess(sources, str(tmp_path / "out"), JOB, start_mode="resume")


def made_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Will hold the files of each shard that is made."""
    made: list[str] = []
    add = shard_work._ShardBuilder.add

    def note(self: shard_work._ShardBuilder, number: int, piece: Any) -> None:
        made.append(f"{Path(piece.path).name}@{piece.start}")
        add(self, number, piece)

    monkeypatch.setattr(shard_work._ShardBuilder, "add", note)
    return made


def test_an_earlier_job_is_neither_overwritten_nor_taken_up_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [write_lines(tmp_path / "in.jsonl")]
    stopped(tmp_path, monkeypatch, sources)
    with pytest.raises(ValueError, match=r"out\.parts exists: .*\n.*--resume.*--restart"):
        preprocess(sources, str(tmp_path / "out"), JOB)
    assert preprocess(sources, str(tmp_path / "out"), JOB, start_mode="resume").num_resumed_shards == 3
    stopped(tmp_path, monkeypatch, sources)
    assert preprocess(sources, str(tmp_path / "out"), JOB, start_mode="restart").num_resumed_shards == 0
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)
    assert preprocess(sources, str(tmp_path / "out"), JOB, start_mode="resume").num_resumed_shards == 0, (
        "nothing to go on with: a new job"
    )


def test_only_shards_of_changed_files_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [write_lines(tmp_path / f"{name}.jsonl", texts) for name, texts in zip("abc", (TEXTS, OTHERS, TEXTS), strict=True)]
    stopped(tmp_path, monkeypatch, sources, shards=99)
    made = made_by(monkeypatch)
    write_lines(tmp_path / "b.jsonl", [*OTHERS, "new"])
    summary = preprocess(sources, str(tmp_path / "out"), JOB, start_mode="resume")
    assert made == ["b.jsonl@0"]
    assert summary.num_documents == 2 * len(TEXTS) + 3
    assert files_of(tmp_path / "out_text_document") == expected_of([*TEXTS, *OTHERS, "new", *TEXTS])


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "report"])
def test_a_damaged_part_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    sources = [write_lines(tmp_path / "in.jsonl")]
    stopped(tmp_path, monkeypatch, sources)
    path = sorted((tmp_path / "out.parts").glob("*_0.bin"))[1]
    if damage == "gone":
        path.unlink()
    elif damage == "report":
        path.with_name(path.name.replace("_0.bin", ".json")).write_text('{"num_documents": [1]}')
    else:
        content = bytearray(path.read_bytes())
        content[20] ^= 1
        path.write_bytes(content[:-2] if damage == "cut" else content)
    assert preprocess(sources, str(tmp_path / "out"), JOB, start_mode="resume").num_resumed_shards == 2
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)


def test_files_next_to_a_tokenizer_json_belong_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that add tokens, also if only tokenizer.json is named; not the weights of a model and other files of the folder."""
    sources = [write_lines(tmp_path / "in.jsonl")]
    file = write_json(tmp_path / "model", tokenizer_json(train_bpe(TEXTS[0], 30), "gpt2"))
    write_json(file.parent, {"eos_token": "<|endoftext|>"}, "tokenizer_config.json")
    jobs = [
        PreprocessJob(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path)), ("text",), True)
        for path in (file, file.parent)
    ]
    stopped(tmp_path, monkeypatch, sources, jobs[0])
    write_json(
        file.parent, {"<new>": 1 + max(token["id"] for token in json.loads(file.read_text())["added_tokens"])}, "added_tokens.json"
    )
    for job in jobs:
        with pytest.raises(ValueError, match="tokenizer model was .*number of token ids was"):
            preprocess(sources, str(tmp_path / "out"), job, start_mode="resume")
    (file.parent / "added_tokens.json").unlink()
    (file.parent / "model.safetensors").write_bytes(b"weights")
    assert preprocess(sources, str(tmp_path / "out"), jobs[1], start_mode="resume").num_resumed_shards == 3


def test_other_settings_are_refused_with_the_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [write_lines(tmp_path / "in.jsonl")]
    bpe = train_bpe(TEXTS[0], 30)
    vocab, merges = write_bpe(bpe, tmp_path)
    config = DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges))
    stopped(tmp_path, monkeypatch, sources, PreprocessJob(config, ("text",), True))

    def refusal(job: PreprocessJob, shard_size: int | None = None) -> str:
        with pytest.raises(ValueError, match=r"--resume: .* belongs to a job with other settings") as caught:
            preprocess(sources, str(tmp_path / "out"), job, shard_size=shard_size, start_mode="resume")
        return str(caught.value)

    assert "json keys was ['text'], now ['title']" in refusal(PreprocessJob(config, ("title",), True))
    assert "append eod was True, now False" in refusal(PreprocessJob(config, ("text",), False))
    assert "tokenizer type was 'GPT2BPETokenizer', now 'ByteTokenizer'" in refusal(JOB)
    assert "shard size was 600, now 601" in refusal(PreprocessJob(config, ("text",), True), 601)
    ids = json.loads(vocab.read_text())
    swap = {ids["1"]: ids["2"], ids["2"]: ids["1"]}
    ids = {token: swap.get(id, id) for token, id in ids.items()}
    (tmp_path / "other.json").write_text(json.dumps(ids))
    other = dataclasses.replace(config, vocab_file=str(tmp_path / "other.json"))
    assert "vocab file was " in refusal(PreprocessJob(other, ("text",), True))
    original = vocab.read_text()
    vocab.write_text(json.dumps(ids))
    preprocess(sources, str(tmp_path / "swapped"), PreprocessJob(config, ("text",), True))
    vocab.write_text(original)
    preprocess(sources, str(tmp_path / "own"), PreprocessJob(config, ("text",), True))
    swapped = [[swap.get(id, id) for id in document] for document in documents(tmp_path / "swapped_text_document")]
    assert documents(tmp_path / "own_text_document") == swapped != documents(tmp_path / "swapped_text_document"), (
        "the tokenizer is that of the files as they are now"
    )
    vocab.rename(tmp_path / "moved.json")
    moved = dataclasses.replace(config, vocab_file=str(tmp_path / "moved.json"))
    assert (
        preprocess(sources, str(tmp_path / "out"), PreprocessJob(moved, ("text",), True), start_mode="resume").num_resumed_shards
        == 3
    )


def test_other_treatment_of_invalid_bytes_keeps_the_shards_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the message about an invalid byte advises: the same command with --errors replace --resume. Other settings of the encoding
    are refused."""
    source = write_lines(tmp_path / "in.jsonl")
    lines = Path(source).read_bytes().splitlines(keepends=True)
    lines[2] = b'{"text": "caf\xe9", "title": "2"}\n'  # in the first shard
    lines[20] = b'{"text": "\xff", "title": "20"}\n'
    Path(source).write_bytes(b"".join(lines))
    replacing = dataclasses.replace(JOB, text_encoding=TextEncoding(errors="replace"))
    stopped(tmp_path, monkeypatch, [source], SKIP)
    with pytest.raises(ValueError, match="encoding was not set, now 'cp1252'"):
        preprocess(
            [source], str(tmp_path / "out"), dataclasses.replace(SKIP, text_encoding=TextEncoding("cp1252")), start_mode="resume"
        )
    summary = preprocess([source], str(tmp_path / "out"), replacing, start_mode="resume")
    assert summary.num_resumed_shards == 2
    assert summary.encoding_notes.num_replaced_records == 2
    texts = [{2: "caf\ufffd", 20: "\ufffd"}.get(index, text) for index, text in enumerate(TEXTS)]
    assert files_of(tmp_path / "out_text_document") == expected_of(texts)
    stopped(tmp_path, monkeypatch, [source], replacing)
    assert preprocess([source], str(tmp_path / "out"), SKIP, start_mode="resume").num_resumed_shards == 2
    assert files_of(tmp_path / "out_text_document") == expected_of([text for text in texts if "\ufffd" not in text])


@pytest.mark.parametrize("names", [["b.txt", "c.csv", "d.jsonl"], ["d.jsonl"]])
def test_a_job_of_a_version_that_did_not_detect_encodings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    """The dataset is that of a new job: text files, tables and shards with invalid records are converted again, with a message.
    Valid JSON lines are kept."""
    sources = [write_lines(tmp_path / "a.jsonl"), *(str(tmp_path / name) for name in names)]
    num_kept = len(split_into_shards(find_sources(sources[:1])[0], 600, ("text",)))
    text = "Die größten Bäume stehen südlich der Straße. Für die Ärzte wäre das eine schöne Überraschung, meinte Herr Müller."
    contents = {
        "b.txt": text.encode("latin-1"),
        "c.csv": f'text\n"{text}"\n'.encode("latin-1"),
        "d.jsonl": json.dumps({"text": text}, ensure_ascii=False).encode("utf-16"),
    }
    for name in names:
        (tmp_path / name).write_bytes(contents[name])
    # The earlier version read everything as UTF-8, and its reports lack the new fields.
    stopped(tmp_path, monkeypatch, sources, dataclasses.replace(SKIP, text_encoding=TextEncoding("utf-8")), shards=1000)
    new_fields = re.compile("encoding|undecodable|replaced|errors")
    for json_file in (tmp_path / "out.parts").glob("*.json"):
        report = {name: value for name, value in json.loads(json_file.read_text()).items() if not new_fields.search(name)}
        assert (report.get("num_bad", 0) > 0) == (json_file.name != "job.json" and sum(report["num_documents"]) == 0)
        json_file.write_text(json.dumps(report))
    messages: list[str] = []
    assert preprocess(sources, str(tmp_path / "out"), SKIP, start_mode="resume", log=messages.append).num_resumed_shards == num_kept
    assert any("earlier version" in message and "converted again" in message for message in messages)
    assert files_of(tmp_path / "out_text_document") == expected_of([*TEXTS, *[text] * len(names)])
    stopped(tmp_path, monkeypatch, sources, SKIP)
    preprocess(sources, str(tmp_path / "out"), SKIP, start_mode="resume", log=messages.append)
    assert sum("earlier version" in message for message in messages) == 1, "not for a job of this version"


@pytest.mark.parametrize("content", [None, "", "[]"])
def test_a_folder_that_does_not_say_what_it_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    """As after a loss of power."""
    sources = [write_lines(tmp_path / "in.jsonl")]
    stopped(tmp_path, monkeypatch, sources)
    settings = tmp_path / "out.parts" / "job.json"
    settings.unlink() if content is None else settings.write_text(content)
    with pytest.raises(ValueError, match="has no readable settings of its job.*\n.*--restart"):
        preprocess(sources, str(tmp_path / "out"), JOB, start_mode="resume")
    for path in (tmp_path / "out.parts").glob("*_0.*"):
        path.unlink()
    for path in (tmp_path / "out.parts").glob("*.json"):
        path.unlink()
    assert preprocess(sources, str(tmp_path / "out"), JOB, start_mode="resume").num_resumed_shards == 0


def test_bad_lines_that_were_skipped_stop_a_job_that_stops_at_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [write_lines(tmp_path / "in.jsonl"), str(tmp_path / "bad.jsonl")]
    Path(sources[1]).write_text("{}\n")
    stopped(tmp_path, monkeypatch, sources, SKIP, shards=99)
    with pytest.raises(ValueError, match=r"bad\.jsonl:1: the line has no key 'text'"):
        preprocess(sources, str(tmp_path / "out"), JOB, start_mode="resume")
    assert (
        preprocess(sources, str(tmp_path / "out"), SKIP, start_mode="resume")
        .bad_records[0]
        .startswith(f"{sources[1]}:1: the line has no key 'text'")
    )


@pytest.mark.parametrize("start", ["resume", "restart"])
def test_two_runs_of_one_job_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Literal["resume", "restart"]
) -> None:
    sources = [write_lines(tmp_path / "in.jsonl")]

    def second(self: Engine, job: PreprocessJob, shards: list[InputShard], folder: str, listen: ShardCallback) -> NoReturn:
        with pytest.raises(ValueError, match=r"out\.parts: another run is working on this job"):
            preprocess(sources, str(tmp_path / "out"), JOB, start_mode=start)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "run", second)
    with pytest.raises(KeyboardInterrupt):
        preprocess(sources, str(tmp_path / "out"), JOB)


# ---- workers that fail


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL, probably because the system ran out of memory"),
        (lambda: os._exit(7), "ended with status 7"),
    ],
)
def test_a_worker_that_dies_is_told_and_the_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[], None], told: str
) -> None:
    sources = [write_lines(tmp_path / "in.jsonl"), write_lines(tmp_path / "deadly.jsonl", OTHERS)]

    def run_shard(job: PreprocessJob, shard: InputShard, *args: Any) -> ShardReport:
        if "deadly" in shard.ranges[0].path:
            time.sleep(0.1)
            end()
        return shard_work.run_shard(job, shard, *args)

    with monkeypatch.context() as patch:
        patch.setattr(engines, "run_shard", run_shard)
        with pytest.raises(ValueError, match=rf"a worker process {told} .*\n.*--resume, and with fewer workers than 2"):
            preprocess(sources, str(tmp_path / "out"), JOB, engine=Engine(num_workers=2), shard_size=1000)
    summary = preprocess(sources, str(tmp_path / "out"), JOB, start_mode="resume")
    assert summary.num_resumed_shards == 4
    assert files_of(tmp_path / "out_text_document") == expected_of([*TEXTS, *OTHERS])


def test_a_fault_of_ours_in_a_worker_shows_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_shard(*args: object) -> NoReturn:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(engines, "run_shard", run_shard)
    with pytest.raises(RuntimeError, match=r"(?s)internal error in a worker process:\nTraceback.*ZeroDivisionError: ours"):
        preprocess([write_lines(tmp_path / "in.jsonl")], str(tmp_path / "out"), JOB, engine=Engine(num_workers=2))


def test_counts_of_a_shard_under_way_reach_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed file is one shard, and may take hours."""
    monkeypatch.setattr(shard_work, "_PROGRESS_INTERVAL_S", 0.0)
    monkeypatch.setattr(shard_work, "_MAX_BUFFERED_TOKENS", 100)
    heard: list[ShardCounts] = []
    engine, job = Engine(num_workers=2), PreprocessJob(BYTES, ("text",), True)
    run = Engine.run

    def listening(self: Engine, job: PreprocessJob, shards: list[InputShard], folder: str, listen: ShardCallback) -> None:
        def both(number: int, found: ShardCounts | ShardReport) -> None:
            if isinstance(found, ShardCounts):
                heard.append(found)
            listen(number, found)

        run(self, job, shards, folder, both)

    monkeypatch.setattr(Engine, "run", listening)
    preprocess([write_lines(tmp_path / "in.jsonl")], str(tmp_path / "out"), job, engine=engine)
    assert len(heard) > 10
    for before, after in itertools.pairwise(heard):
        assert before.num_bytes <= after.num_bytes and before.num_tokens <= after.num_tokens
    assert heard[-1].num_bytes == (tmp_path / "in.jsonl").stat().st_size
