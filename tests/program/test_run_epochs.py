"""Runs whose length is a number of passes over the training data (--train-epochs)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.checkpoint.save_folder import read_config
from megatron.config.cli import load
from megatron.config.config import Config
from megatron.data.datasets import SplitData
from megatron.data.indexed_writer import write_dataset
from megatron.data.samples import SampleSource
from megatron.data.splits import open_datasets
from megatron.data.tokenizer import build_tokenizer
from megatron.training import inputs
from megatron_lab.data_tools.epochs import assume_run_length, describe_planned_epochs, resolve_epochs_from_files, set_run_length
from megatron_lab.proofs.shrink import shrink
from megatron_lab.resilience.resume_check import check_resume
from tests.support.byte_dataset import FLAGS, write_bytes
from tests.support.runs import arguments, checkpoint, launch, read_metrics, run, saved_state

SMALL: dict[str, Any] = {**FLAGS, "num_layers": 1, "eod_mask_loss": None}
LENGTH = 16


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Prefixes of two datasets: documents of 5 to 40 tokens, 3,000 and 1,300 tokens in all. Every token of the first is even,
    and of the second odd."""
    folder, found = tmp_path_factory.mktemp("datasets"), []
    for number, total in enumerate((3000, 1300)):
        draw = np.random.default_rng(number)
        prefix = str(folder / f"data{number}")
        with write_dataset(prefix, np.uint16) as writer:
            left = total
            while left:
                size = min(left, int(draw.integers(5, 41)))
                writer.add_documents([int(token) for token in 2 * draw.integers(0, 100, size) + number])
                left -= size
        found.append(prefix)
    return found[0], found[1]


def settings_of(data_path: Any, **flags: Any) -> Config:
    return load(arguments(**{**SMALL, "split": "100,0,0", "data_path": data_path, "train_epochs": 1, **flags}), 1).config


def open_train(config: Config) -> SplitData:
    data = open_datasets(
        config.data,
        seed=config.training.seed,
        seq_length=config.model.seq_length,
        tokenizer=build_tokenizer(config.data),
        need_validation=False,
        need_test=False,
    )
    assert isinstance(data.train, SplitData)
    return data.train


def read_spans(source: SampleSource, count: int) -> list[tuple[str, int, int]]:
    """The tokens that are labels in the first samples, each as dataset, document and offset. A sample's first token is no label."""
    found = []
    for sample in range(count):
        spans = [(s.prefix, s.document, s.first_token + i) for s in source.get_lineage(sample) for i in range(s.num_tokens)]
        found += spans[1:]
    return found


@pytest.mark.parametrize("order", ["epoch", "megatron"])
@pytest.mark.parametrize("num_datasets", [1, 2])
def test_an_epoch_reads_each_sample_once(datasets: tuple[str, str], order: str, num_datasets: int) -> None:
    """Counted without the code that counts: no token is a label twice, and fewer than a sample of each dataset are left out."""
    config = settings_of(datasets[:num_datasets], data_order=order)
    split = open_train(config)
    count = split.count_epoch_samples()
    sizes = [(total - 1) // LENGTH for total in (3000, 1300)[:num_datasets]]
    assert count == sum(sizes)
    labels = read_spans(split.build_source(count), count)
    assert len(labels) == len(set(labels)) == LENGTH * count
    for prefix, size in zip(datasets, sizes, strict=False):
        assert sum(label[0] == prefix for label in labels) == LENGTH * size


def test_an_epoch_of_whole_documents_reads_each_document_once(datasets: tuple[str, str]) -> None:
    config = settings_of(datasets[:1], whole_documents=True, reset_attention_mask=True)
    split = open_train(config)
    count = split.count_epoch_samples()
    source = split.build_source(count)
    parts = [(span.document, span.first_token) for sample in range(count) for span in source.get_lineage(sample)]
    assert len(parts) == len(set(parts)) and {document for document, _ in parts} == set(range(len(split.components[0].documents)))


@pytest.mark.parametrize("weights", [("1", "1"), ("0.9", "0.1"), ("1", "0")])
def test_weights_do_not_change_the_length_of_an_epoch(datasets: tuple[str, str], weights: tuple[str, str]) -> None:
    blend = [weights[0], datasets[0], weights[1], datasets[1]]
    expected = 2999 // LENGTH + (1299 // LENGTH if weights[1] != "0" else 0)
    assert open_train(settings_of(blend)).count_epoch_samples() == expected


@pytest.mark.parametrize(
    "epochs, flags, samples, iterations",
    [
        (1, {}, 187, 23),
        (2.5, {}, 468, 58),
        (0.1, {}, 19, 2),
        (1, {"global_batch_size": 2, "rampup_batch_size": None}, 187, 93),
        (1, {"rampup_batch_size": ("2", "2", "60")}, 187, 34),
        (3, {"lr_warmup_iters": 5}, None, 70),
        (3, {"lr_warmup_samples": 50}, 561, 70),
        (3, {"lr_warmup_fraction": 0.1}, 561, 70),
    ],
)
def test_the_number_of_samples_and_steps(
    datasets: tuple[str, str], epochs: float, flags: dict[str, Any], samples: int | None, iterations: int
) -> None:
    config = resolve_epochs_from_files(settings_of(datasets[:1], train_epochs=epochs, **flags), 1, 1)
    assert config.training.train_samples == samples and config.training.train_epochs == epochs
    assert config.training.train_iters == (iterations if samples is None else None)
    given = replace(config, training=replace(config.training, train_iters=None, train_samples=None))
    [line] = describe_planned_epochs(given, 1)
    assert f"= {iterations} iterations" in line and line.startswith(f"{epochs:g} epoch")


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"train_epochs": 0.01}, "less than a step of 8 sequences"),
        ({"lr_warmup_iters": 23, "lr_decay_style": "linear"}, "is not below the 23 iters"),
        ({"iterations_to_skip": (24,), "lr_warmup_iters": 1}, "the run ends at --train-iters 23"),
    ],
)
def test_settings_that_do_not_fit_the_number_of_steps(datasets: tuple[str, str], flags: dict[str, Any], words: str) -> None:
    [ended] = launch(arguments(**{**SMALL, "split": "100,0,0", "data_path": datasets[0], "train_epochs": 1, **flags}))
    assert ended.code in (1, 2) and words in ended.stderr + ended.stdout and "--train-epochs" in ended.stderr + ended.stdout


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "data": (2, {"use_distributed_optimizer": True}),
    "stages": (3, {"num_layers": 3, "pipeline_model_parallel_size": 3}),
}
"""Of three stages, the middle one does not open the data."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_of_one_epoch(tmp_path: Path, datasets: tuple[str, str], layout: str) -> None:
    """It reads 264 of the 268 samples, 33 full batches. Each is read once, at any layout."""
    ranks, flags = LAYOUTS[layout]
    settings = {**SMALL, **flags, "split": "100,0,0", "data_path": datasets, "train_epochs": 1, "save": tmp_path / "run"}
    read = tmp_path / "read"

    def before(rank: int) -> None:
        original = inputs.StepLoader

        class Noting(original):  # type: ignore[valid-type, misc]
            def __init__(self, source: SampleSource, *args: Any, **named: Any) -> None:
                get = source.get_samples

                def noted(first: int, count: int) -> Any:
                    with read.open("a") as file:
                        file.write("".join(f"{rank} {sample}\n" for sample in range(first, first + count)))
                    return get(first, count)

                source.get_samples = noted  # type: ignore[method-assign]
                super().__init__(source, *args, **named)

        inputs.StepLoader = Noting  # type: ignore[assignment, misc]

    said = run(arguments(**settings), ranks, before=before)
    assert "1 epoch = 268 samples = 33 iterations (the last 4 samples do not fill a batch)" in said
    lines = [line.split() for line in read.read_text().splitlines()]
    by_rank = {rank: sorted(int(sample) for r, sample in lines if r == rank) for rank, _ in lines}
    everyone = sorted(sample for samples in by_rank.values() for sample in samples)
    assert everyone == sorted([*range(264)] * (2 if layout == "stages" else 1))
    saved = read_config(checkpoint(tmp_path / "run", 33))["config"]["training"]
    assert (saved["train_epochs"], saved["train_samples"], saved["train_iters"]) == (1.0, 268, None)
    assert saved_state(tmp_path / "run", 33)["schedule"]["lengths"]["total_samples"] == 268


def test_a_longer_run_continues_a_shorter_one(tmp_path: Path, datasets: tuple[str, str]) -> None:
    save = tmp_path / "run"
    settings = {**SMALL, "split": "100,0,0", "data_path": datasets[0], "save": save, "load": save, "metrics_file": tmp_path / "m"}
    settings |= {"lr_decay_style": "linear"}
    run(arguments(**settings, train_epochs=1))
    [ended] = launch(arguments(**settings, train_epochs=2))
    assert ended.code != 0 and "--train-epochs 1.0 in the checkpoint, 2.0 here" in ended.stderr + ended.stdout
    argv = arguments(**settings, train_epochs=2, resume_schedule="new")
    check_resume(load(argv, 1).config, 1)
    with pytest.raises(ValueError, match=r"--train-epochs 1\.0 in the checkpoint, 2\.0 here"):
        check_resume(load(arguments(**settings, train_epochs=2), 1).config, 1)
    run(argv)
    steps = [line["iteration"] for line in read_metrics(tmp_path / "m") if "lm_loss" in line]
    assert steps == list(range(1, 2 * 187 // 8 + 1))
    assert "done after 46 iterations" in run(argv)


def test_a_plan_says_the_length(tmp_path: Path, datasets: tuple[str, str]) -> None:
    settings = {**SMALL, "split": "100,0,0", "train_epochs": 2, "dry_run": True}
    assert "2 epochs = 374 samples = 46 iterations" in run(arguments(**settings, data_path=datasets[0]))
    said = run(arguments(**settings, data_path=tmp_path / "missing"))
    assert "the length of --train-epochs 2 is unknown here: " in said


def test_a_run_on_generated_tokens_has_no_epochs() -> None:
    [ended] = launch(arguments(train_epochs=1))
    assert ended.code == 2 and "--train-epochs cannot be used with --mock-data" in ended.stderr


def test_a_proof_assumes_a_length(datasets: tuple[str, str]) -> None:
    """It reads no data."""
    for flags in ({"lr_warmup_iters": 5}, {"lr_warmup_samples": 500}, {"lr_decay_samples": 1000, "lr_decay_style": "cosine"}):
        config = load(arguments(**{**SMALL, "data_path": "missing", "train_epochs": 1, **flags}), 1).config
        [small] = shrink(config, 1, 257)
        assert small.config.training.train_epochs is None
        assert (small.config.training.train_iters is None) == ("lr_warmup_iters" not in flags)
    assert assume_run_length(config).training.train_samples == 1000


def test_the_length_is_set_for_each_rank_alike(datasets: tuple[str, str]) -> None:
    config = settings_of(datasets[:1], micro_batch_size=2, global_batch_size=16)
    assert set_run_length(config, 160, 2, 2).training.train_samples == 160


def test_a_blend_with_weights_says_how_often_each_dataset_is_read(tmp_path: Path, datasets: tuple[str, str]) -> None:
    settings = {**SMALL, "split": "100,0,0", "data_path": ("3", datasets[0], "1", datasets[1]), "train_epochs": 2}
    said = run(arguments(**settings, save=tmp_path, eval_iters=0))
    assert "2 epochs = 536 samples = 67 iterations" in said
    assert f"{datasets[0]}: " in said and "epochs 0.00 to 2.15" in said and "epochs 0.00 to 1.65" in said
    assert json.loads((tmp_path / "run.json").read_text())["config"]["training"]["train_epochs"] == 2.0


def test_fine_tuning_for_epochs(tmp_path: Path) -> None:
    data = {**SMALL, "data_path": write_bytes(tmp_path / "text")}
    run(arguments(**data, train_iters=2, save=tmp_path / "base"))
    said = run(
        arguments(**data, train_epochs=0.2, lr_warmup_fraction=0.1, pretrained_checkpoint=tmp_path / "base", save=tmp_path / "new")
    )
    assert "0.2 epochs = " in said and "weights of" in said
