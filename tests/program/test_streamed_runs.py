"""Runs that train on a Hugging Face dataset: the same at every layout and after every restart, and errors that end all ranks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_lab.commands import inspect_data
from megatron_lab.data_tools import streamed_texts, token_lane
from megatron_lab.data_tools.streamed_dataset import StreamedDataset
from megatron_lab.data_tools.streamed_texts import StreamedTexts
from tests.support.hugging_face_texts import EOD, FLAGS, build_texts, keep_cache_in, write_folder
from tests.support.runs import arguments, digest, launch, losses, report, run, timeless

SETTINGS: dict[str, Any] = {
    **FLAGS,
    "hf_shuffle_buffer": 60,
    "hf_valid_documents": 20,
    "fp64": True,
    "eval_iters": 1,
    "eval_interval": 3,
    "position_embedding_type": "rope",
    "reset_position_ids": True,
    "reset_attention_mask": True,
    "eod_mask_loss": True,
    "num_workers": 2,
}


@pytest.fixture(params=[True, False], ids=["streamed", "stored"])
def texts(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of a dataset of 160 texts. The first run writes the Arrow files of the stored dataset."""
    keep_cache_in(tmp_path / "arrow", monkeypatch)
    settings: dict[str, Any] = {"hf_dataset": write_folder(tmp_path / "texts")}
    return settings if request.param else {**settings, "no_hf_streaming": True}


def note_samples(folder: Path) -> Callable[[int], None]:
    """Return a `before` with which each rank writes the tokens of its training samples, by their index, into a file."""

    def before(rank: int) -> None:
        token_lane.POSITION_INTERVAL = 100
        get_samples = StreamedDataset.get_samples

        def note(source: StreamedDataset, first: int, count: int) -> Any:
            samples = get_samples(source, first, count)
            if source._data.split == 0:
                with (folder / f"{rank}.jsonl").open("a") as file:
                    file.writelines(json.dumps([first + row, samples[row].tolist()]) + "\n" for row in range(count))
            return samples

        StreamedDataset.get_samples = note  # type: ignore[method-assign,assignment]

    folder.mkdir()
    return before


def read_samples(folder: Path) -> dict[int, list[int]]:
    """Return the samples that all ranks noted, by index, and check that the ranks agree."""
    samples: dict[int, list[int]] = {}
    for file in folder.iterdir():
        for index, tokens in map(json.loads, file.read_text().splitlines()):
            assert samples.setdefault(index, tokens) == tokens
    return samples


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {"micro_batch_size": 1, "num_workers": 0}),
    "dp2-tp2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2-dp2": (4, {"pipeline_model_parallel_size": 2, "micro_batch_size": 4}),
}


def test_samples_are_the_same_at_every_layout_and_after_every_restart(tmp_path: Path, texts: dict[str, Any]) -> None:
    """Six steps on one rank; and two steps at each of three layouts, each resumed from the one before. Of the stored dataset, only
    one of the layouts."""
    settings = {**SETTINGS, **texts, "lr_decay_style": "constant"}
    one = tmp_path / "one"
    log = run(arguments(**settings, train_iters=6, metrics_file=tmp_path / "one.jsonl"), before=note_samples(one))
    assert ("streamed from 24 shards in 24 lanes" in log) == ("no_hf_streaming" not in texts)
    expected = read_samples(one)
    assert set(range(48)) <= set(expected)
    layouts = list(LAYOUTS.values()) if "no_hf_streaming" not in texts else [LAYOUTS["dp2"]]
    save, metrics = tmp_path / "save", tmp_path / "resumed.jsonl"
    for number, (world_size, layout) in enumerate(layouts, start=1):
        samples = tmp_path / f"samples-{number}"
        argv = arguments(**{**settings, **layout}, train_iters=2 * number, save=save, load=save, metrics_file=metrics)
        run(argv, world_size, before=note_samples(samples))
        read = read_samples(samples)
        needed = range(16 * (number - 1), 16 * number)
        assert set(needed) <= set(read) and all(read[index] == expected[index] for index in needed)
    assert losses(metrics) == pytest.approx(losses(tmp_path / "one.jsonl")[: 2 * len(layouts)], rel=1e-12)


@pytest.mark.parametrize("keep_positions", [True, False])
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path, keep_positions: bool) -> None:
    """Also if the positions are lost, on two ranks."""
    dataset = write_folder(tmp_path / "texts", "jsonl", texts=build_texts(40))
    settings = {**SETTINGS, "hf_dataset": dataset, "train_iters": 8, "seq_length": 32}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"

    def before(rank: int) -> None:
        token_lane.POSITION_INTERVAL = 100

    argv = arguments(**settings, save=whole, save_interval=4, metrics_file=tmp_path / "whole.jsonl")
    ended = launch(argv, 2, before=before)
    assert [rank.code for rank in ended] == [0, 0], report(ended)
    assert ended[0].stderr.count(f"training: {dataset} (train): epoch 2 starts") == 1
    positions = sorted(whole.glob("stream/positions_*/lane_*.txt"))
    assert len(positions) == 4, "by default they are in the folder of --save"
    if not keep_positions:
        for file in positions:
            file.unlink()
    changes = {"load": whole, "ckpt_step": 4, "save": resumed, "metrics_file": tmp_path / "resumed.jsonl"}
    run(arguments(**settings, **changes, data_cache_path=whole / "stream"), 2, before=before)
    assert timeless(tmp_path / "resumed.jsonl") == [line for line in timeless(tmp_path / "whole.jsonl") if line["iteration"] > 4]
    assert digest(resumed, 8) == digest(whole, 8)


def test_a_run_that_resumes_with_other_data_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write_folder(tmp_path / "a"), write_folder(tmp_path / "b", texts=["another text"] * 200)
    save = {"save": tmp_path / "save", "load": tmp_path / "save"}
    settings = {**FLAGS, **save, "lr_decay_style": "constant", "position_embedding_type": "rope"}
    run(arguments(**settings, hf_dataset=first, train_iters=2))
    log = run(arguments(**settings, hf_dataset=first, train_iters=3, seq_length=24))
    assert "the data settings changed at sample 16 (iteration 2)" in log
    assert f"{first} (train): continues after 16 samples of 16 tokens" in log
    moved = str(Path(first).rename(tmp_path / "moved"))
    assert "the data settings changed at sample 24" not in run(
        arguments(**settings, hf_dataset=moved, train_iters=4, seq_length=24)
    )
    log = run(arguments(**settings, hf_dataset=second, train_iters=5, seq_length=24))
    assert f"the data settings changed at sample 32 (iteration 4):\n    {second} (train): starts" in log
    assert inspect_data.main(["--run", str(tmp_path / "save"), "--step", "5"]) == 0
    assert f"{second} (train), shard" in capsys.readouterr().out
    assert inspect_data.main(["--run", str(tmp_path / "save"), "--step", "1"]) == 1
    assert "is not the dataset that the run read" in capsys.readouterr().err


def test_inspect_data_shows_what_a_step_has_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**FLAGS, "hf_dataset": write_folder(tmp_path / "texts"), "train_iters": 3, "save": tmp_path / "save"}
    run(arguments(**settings), before=note_samples(tmp_path / "samples"))
    samples = read_samples(tmp_path / "samples")
    capsys.readouterr()
    assert inspect_data.main(["--run", str(tmp_path / "save"), "--step", "3", "--json"]) == 0
    texts = build_texts(160)
    for line in capsys.readouterr().out.splitlines():
        sample, tokens = json.loads(line), []
        for piece in sample["pieces"]:
            file, row_group = divmod(int(piece["prefix"].rpartition("shard ")[2]), 6)
            text = texts[40 * file + 7 * row_group + piece["document"]]
            tokens += [*text.encode(), EOD][piece["first_token"] :][: piece["num_tokens"]]
        assert tokens == samples[sample["sample"]] and 16 <= sample["sample"] < 24


def test_a_read_that_fails_on_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    """After its last attempt. The message names the rank, the shard and the cause."""

    def before(rank: int) -> None:
        streamed_texts.time = type(sys)("time")  # type: ignore[attr-defined]
        streamed_texts.time.sleep = lambda seconds: None  # type: ignore[attr-defined]
        split_shard, calls = StreamedTexts._split_shard, [0]

        def fail(self: StreamedTexts, shard: int) -> list[Any]:
            calls[0] += 1
            if rank == 1 and calls[0] > 4:
                raise ConnectionError("the server has gone")
            return split_shard(self, shard)

        StreamedTexts._split_shard = fail  # type: ignore[method-assign]

    settings = {**FLAGS, "hf_dataset": write_folder(tmp_path / "texts"), "train_iters": 50}
    ended = launch(arguments(**settings), 2, before=before, gloo=True)
    assert all(rank.code != 0 for rank in ended), report(ended)
    message = ended[1].stderr
    assert re.search(r"rank 1: .*6 attempts to read failed at shard \d+ of 24 .*ConnectionError: the server has gone", message)
    assert "Traceback" not in message


def refuse(world_size: int = 1, before: Callable[[int], None] | None = None, **settings: Any) -> str:
    """Run with settings that are refused, and return the message of the first rank."""
    ended = launch(arguments(**{**FLAGS, "train_iters": 1, **settings}), world_size, before=before)
    assert all(rank.code != 0 for rank in ended), report(ended)
    assert "Traceback" not in ended[0].stderr
    return ended[0].stderr


def test_refused_settings_and_datasets(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "texts")
    assert "--hf-dataset is given without validation data, but --eval-iters is 2." in refuse(hf_dataset=path, eval_iters=2)
    assert "--data-path and --hf-dataset exclude each other" in refuse(hf_dataset=path, data_path="x")
    assert "--mock-data and --hf-dataset exclude each other" in refuse(hf_dataset=path, mock_data=True)
    for flag, setting in (("--data-order megatron", {"data_order": "megatron"}), ("--data-loss-mask", {"data_loss_mask": True})):
        assert f"{flag} cannot be used with --hf-dataset." in refuse(hf_dataset=path, **setting)
    assert "has no column words; its columns are id, text, title." in refuse(2, hf_dataset=path, hf_text_column="words")
    assert "there is no such file" in refuse(hf_dataset=f"{path}.jsonl")


def hide_datasets(rank: int) -> None:
    """Let the package `datasets` seem not to be installed."""
    sys.modules["datasets"] = None  # type: ignore[assignment]


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    message = refuse(before=hide_datasets, hf_dataset=write_folder(tmp_path / "texts"))
    assert "--hf-dataset needs the package datasets, which is not installed" in message and "[datasets]" in message


def test_a_dry_run_opens_no_dataset() -> None:
    argv = arguments(**FLAGS, hf_dataset="name/of-a-dataset", hf_subset="part", train_iters=1, dry_run=True)
    (ended,) = launch(argv, before=hide_datasets)
    assert ended.code == 0, ended.stderr


def test_indexed_validation_data(tmp_path: Path) -> None:
    from tests.support.byte_dataset import write_bytes

    settings = {**FLAGS, "hf_dataset": write_folder(tmp_path / "texts"), "valid_data_path": write_bytes(tmp_path / "valid")}
    log = run(arguments(**settings, train_iters=1, eval_iters=1, hf_valid_documents=20))
    assert "validation loss at iteration 1" in log and f"validation: {tmp_path / 'valid'}" in log
    assert "--hf-valid-documents" in log, "it has no effect"
