"""`tools/inspect_data.py`: what it says of a dataset, and that it names exactly what a run's steps read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import write_dataset
from megatron.model.inputs import ModelInputs
from megatron.training.inputs import Batches, RunBatches
from megatron_lab.commands import inspect_data
from tests.support.runs import arguments, run

TEXTS = ["one fish", "two fish", "red\nfish", "", "blue fish" * 20]
EOD = 256


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Texts as bytes, each with an end of document but the empty one."""
    made = str(tmp_path_factory.mktemp("inspect") / "fish")
    with write_dataset(made, np.uint16) as writer:
        for text in TEXTS:
            writer.add_documents([*text.encode(), EOD] if text else [])
    return made


def inspect(*words: object) -> int:
    """Run the tool in this process."""
    return inspect_data.main([str(word) for word in words])


def test_sizes_and_lengths(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(prefix) == 0
    shown = capsys.readouterr().out
    assert "5 documents" in shown and f"{sum(len(text) + bool(text) for text in TEXTS):,} tokens of uint16" in shown
    rows = re.findall(r"^ *([\d,]+(?: to [\d,]+)?) +([\d,]+) +([\d,]+)", shown, re.MULTILINE)
    assert ("0", "1", "0") in rows
    assert ("8 to 15", "3", "27") in rows
    assert ("128 to 255", "1", "181") in rows
    assert sum(int(row[1]) for row in rows) == 5


def test_the_histogram_is_drawn(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert inspect(prefix, "--histogram", tmp_path / "lengths.svg") == 0
    assert "tokens in a document" in (tmp_path / "lengths.svg").read_text() or (tmp_path / "lengths.svg").stat().st_size > 5000
    assert inspect(prefix, "--histogram", tmp_path / "lengths.foo") == 1
    assert "foo" in capsys.readouterr().err


def test_documents_with_their_text(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(prefix, "--document", "0", "2", "--tokenizer-type", "ByteTokenizer") == 0
    shown = capsys.readouterr().out
    assert "document 0: 9 tokens" in shown and f"ids: {' '.join(map(str, [*b'one fish', EOD]))}" in shown
    assert "text: one fish\n" in shown and "[end of document 256]" in shown
    assert "text: red\n        fish" in shown
    assert inspect(prefix, "--document", "4", "--max-tokens", "10") == 0
    shown = capsys.readouterr().out
    assert "and 171 more" in shown and "text:" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--document", "5"], "documents 0 to 4"),
        (["--document", "-1"], "documents 0 to 4"),
    ],
)
def test_a_document_that_is_not_there(prefix: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(prefix, *words) == 1
    assert message in capsys.readouterr().err


def test_verify_finds_ids_beyond_the_vocabulary(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(prefix, "--verify", "--tokenizer-type", "ByteTokenizer") == 0
    assert "sound" in capsys.readouterr().out
    assert inspect(prefix, "--verify") == 0
    assert "give the tokenizer's flags" in capsys.readouterr().out
    assert inspect(prefix, "--verify", "--tokenizer-type", "NullTokenizer", "--vocab-size", "110") == 1
    shown = capsys.readouterr().out
    assert re.search(r"document 0 has token id 111 at token 0", shown) and "should be written again" in shown
    for suffix in (".bin", ".idx"):
        (tmp_path / f"cut{suffix}").write_bytes(Path(prefix + suffix).read_bytes())
    with (tmp_path / "cut.bin").open("r+b") as file:
        file.truncate(100)
    assert inspect(tmp_path / "cut", "--verify") == 1
    assert "truncated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "either PREFIX or --run"),
        (["p", "--run", "r"], "either PREFIX or --run"),
        (["p", "--step", "3"], "--step can only be used with --run"),
        (["--run", "r", "--verify"], "--verify can only be used with PREFIX"),
        (["--run", "r", "--histogram", "h.svg"], "--histogram can only be used with PREFIX"),
        (["--run", "r"], "needs --step N or --sample N"),
        (["--run", "r", "--step", "1", "--tokenizer-type", "ByteTokenizer"], "leave out --tokenizer-type"),
        (["p", "--max-tokens", "-1"], "0 or more"),
        (["p", "--vocab-size", "7"], "--vocab-size has no effect"),
    ],
)
def test_flags_that_do_not_go_together(words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        inspect(*words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two datasets in which no two tokens of a document are the same."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, seed in (("a", 0), ("b", 1)):
        random = np.random.default_rng(seed)
        with write_dataset(str(folder / name), np.uint16) as writer:
            for length in random.integers(5, 90, 40):
                writer.add_documents(random.permutation(4000)[:length])
    return [str(folder / "a"), str(folder / "b")]


def reported(out: str) -> Iterator[tuple[int, list[dict]]]:
    """Sample number and pieces of each line of --json."""
    for line in out.splitlines():
        found = json.loads(line)
        yield found["sample"], found["pieces"]


def tokens_of(pieces: list[dict]) -> list[int]:
    """The tokens that the pieces name, read from the files."""
    tokens: list[int] = []
    for piece in pieces:
        document = IndexedDataset(piece["prefix"]).get_document(piece["document"])
        tokens += document[piece["first_token"] : piece["first_token"] + piece["num_tokens"]].tolist()
    return tokens


def windows(inputs: ModelInputs) -> list[list[int]]:
    """All tokens of each sample of a microbatch, [b][s + 1]."""
    assert inputs.tokens is not None and inputs.labels is not None
    whole: list[list[int]] = torch.cat([inputs.tokens[:1], inputs.labels]).T.tolist()
    return whole


def test_a_step_is_traced_to_its_documents_across_changes_of_the_run(
    corpora: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three starts: other weights and no ramp-up, then another sequence length and layout. What the training loop got of each step,
    written down as it comes, is what the tool names afterwards."""
    a, b = corpora
    seen = tmp_path / "seen.jsonl"
    save = tmp_path / "run"

    def before(rank: int) -> None:
        if rank:
            return
        plain = RunBatches.iter_training_batches

        def training(self: RunBatches, consumed_samples: int) -> Batches:
            for step in plain(self, consumed_samples):
                with seen.open("a") as file:
                    file.write(json.dumps([window for inputs in step for window in windows(inputs)]) + "\n")
                yield step

        RunBatches.iter_training_batches = training  # type: ignore[method-assign]

    common = {"mock_data": None, "vocab_size": 4000, "save": save, "num_workers": 0, "lr_decay_style": "constant"}
    starts = [
        {"train_data_path": (0.5, a, 0.5, b), "train_iters": 3, "rampup_batch_size": (4, 4, 8)},
        {"train_data_path": (0.8, a, 0.2, b), "train_iters": 5, "global_batch_size": 4},
        {"train_data_path": (0.8, a, 0.2, b), "train_iters": 7, "global_batch_size": 4, "seq_length": 24},
    ]
    for number, settings in enumerate(starts):
        load = {"load": save, "override_opt_param_scheduler": True} if number else {}
        layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2} if number == 2 else {}
        words = arguments(**{**common, "position_embedding_type": "rope", **settings, **load, **layout})
        out = run(words, 4 if layout else 1, before=before)
    assert "the data settings changed at sample" in out
    assert re.search(rf"{a}: continues after [\d,]+ samples of 16 tokens", out)

    steps = [json.loads(line) for line in seen.read_text().splitlines()]
    assert len(steps) == 7
    capsys.readouterr()
    for number, read in enumerate(steps, start=1):
        assert inspect("--run", save, "--step", number, "--json") == 0
        named = [tokens_of(pieces) for _, pieces in reported(capsys.readouterr().out)]
        assert named == read, f"step {number}"
    assert len({sample for read in steps for sample in map(tuple, read)}) == sum(map(len, steps)), "nothing comes twice"

    assert inspect("--run", save, "--step", 8) == 1
    assert "has 7 steps" in capsys.readouterr().err
    for sample in (-1, sum(map(len, steps))):
        assert inspect("--run", save, "--sample", sample) == 1
        assert f"the run reads samples 0 to {sum(map(len, steps)) - 1}" in capsys.readouterr().err
    assert inspect("--run", save, "--sample", "3") == 0
    assert "sample 3\n" in capsys.readouterr().out


def test_a_run_without_a_checkpoint_is_traced_by_its_settings(
    corpora: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"mock_data": None, "vocab_size": 4000, "train_data_path": corpora, "train_iters": 1}
    run(arguments(**settings, save=tmp_path / "run"))
    with_checkpoint = inspect("--run", tmp_path / "run", "--step", "1", "--json"), capsys.readouterr().out
    for path in (tmp_path / "run").glob("iter_*"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    assert (inspect("--run", tmp_path / "run", "--step", "1", "--json"), capsys.readouterr().out) == with_checkpoint
    assert inspect("--run", tmp_path, "--step", "1") == 1
    assert "neither a checkpoint nor a readable run.json" in capsys.readouterr().err


def test_other_data_than_the_run_read_is_refused(corpora: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = str(tmp_path / "c")
    for suffix in (".bin", ".idx"):
        Path(prefix + suffix).write_bytes(Path(corpora[0] + suffix).read_bytes())
    run(arguments(mock_data=None, vocab_size=4000, train_data_path=[prefix], train_iters=1, save=tmp_path / "run"))
    with write_dataset(prefix, np.uint16) as writer:
        writer.add_documents(np.arange(500))
    assert inspect("--run", tmp_path / "run", "--step", "1") == 1
    assert "is not the dataset that the run read" in capsys.readouterr().err


def test_the_histogram_names_no_folder_and_begins_at_the_shortest_document(tmp_path: Path) -> None:
    """Read from the text of the picture."""
    matplotlib = pytest.importorskip("matplotlib")
    with write_dataset(str(tmp_path / "long"), np.uint8) as writer:
        writer.add_documents(np.zeros(1400, np.uint8), [100, 300, 1000])
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert inspect(tmp_path / "long", "--histogram", tmp_path / "lengths.svg") == 0
    drawn = (tmp_path / "lengths.svg").read_text()
    told = re.findall(r">([^<>]+)</text>", drawn)
    assert [text for text in told if " to " in text] == ["64 to 127", "128 to 255", "256 to 511", "512 to 1,023"]
    assert "long: 3 documents, 1,400 tokens" in told and str(tmp_path) not in drawn and {"documents", "tokens"} <= set(told)
