"""Whole runs with several validation sets, complete evaluations (--full-validation), and evaluation alone (--skip-train)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config.cli import load
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import write_dataset
from megatron.data.splits import DataSplit
from megatron.data.tokenizer import ByteTokenizer
from megatron.metrics.history import HISTORY_FILE
from megatron.training.callbacks import Callback
from megatron.training.progress import Progress
from megatron.training.trainer import Trainer
from megatron_lab.data_tools.complete_sets import CompleteSet
from megatron_lab.resilience.resume_check import find_resume_problem
from tests.support.byte_dataset import FLAGS
from tests.support.equality import number_differences
from tests.support.reference_runs import gpt2_like, mean_loss
from tests.support.runs import TINY, arguments, complete_checkpoints, launch, read_metrics, report, run, saved_tensors

EOD, VOCABULARY, LENGTH = 256, 257, TINY["seq_length"]
SIZES = {"books": 11, "code": 7, "more": 6, "test": 5, "train": 40}
"""Samples of each dataset. None of them, and no sum, is a multiple of the batch."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Prefixes of datasets of bytes, by their names, whose texts differ much."""
    folder, tokenizer, random = tmp_path_factory.mktemp("data"), ByteTokenizer(), np.random.default_rng(7)
    for place, (name, count) in enumerate(SIZES.items()):
        with write_dataset(str(folder / name), np.uint16) as writer:
            remaining = count * LENGTH + 5
            while remaining > 0:
                length = min(int(random.integers(2, 40)), remaining)
                letters = random.integers(97 + 3 * place, 105 + 3 * place, length - 1).tolist()
                writer.add_documents([*letters, tokenizer.eod])
                remaining -= length
    return {name: str(folder / name) for name in SIZES}


def settings(data: dict[str, str], **changes: Any) -> dict[str, Any]:
    """A run on these datasets with two validation sets, of which one is a blend."""
    sets = [f"books={data['books']}", "code=0.3", data["code"], "0.7", data["more"]]
    flags = {**FLAGS, "split": None, "train_data_path": [data["train"]], "valid_data_path": sets, "fp64": True}
    return {**flags, "eval_iters": None, **changes}


def windows(prefix: str, split: int) -> torch.Tensor:
    """All samples of one epoch of a dataset, [samples, length + 1]."""
    dataset = IndexedDataset(prefix)
    documents = range(dataset.num_documents)
    source = GPTDataset(dataset, documents, split=split, seed=1234, seq_length=LENGTH, vocab_size=VOCABULARY)
    return torch.from_numpy(source.get_samples(0, SIZES[Path(prefix).name]))


@pytest.fixture(scope="module")
def start(data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A folder with initial weights (of a run that leaves its only step out), and the losses that the reference computes with
    them over all samples of each set, each once."""
    folder = tmp_path_factory.mktemp("start")
    run(arguments(**settings(data, eval_iters=0), train_iters=1, iterations_to_skip=(1,), save=folder, no_save_optim=True))
    weights, shape = saved_tensors(folder, 1), gpt2_like(vocab=VOCABULARY, ffn=128)
    losses = {}
    sets = {"validation_loss/books": ["books"], "validation_loss/code": ["code", "more"], "test_loss": ["test"]}
    for name, parts in sets.items():
        rows = torch.cat([windows(data[part], 2 if name == "test_loss" else 1) for part in parts])
        tokens, labels = rows[:, :-1], rows[:, 1:]
        losses[name] = mean_loss(shape, weights, (tokens, labels, tokens != EOD)).item()
    losses["validation_loss"] = (losses["validation_loss/books"] + losses["validation_loss/code"]) / 2
    return folder, losses


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "one, a batch above the set": (1, {"micro_batch_size": 3, "global_batch_size": 33}),
    "dp2": (2, {"global_batch_size": 4}),
    "tp2-pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}),
    "cp2-dp2": (4, {"context_parallel_size": 2}),
    "pp2-dp2": (4, {"pipeline_model_parallel_size": 2, "use_tp_pp_dp_mapping": True, "pipeline_schedule": "gpipe"}),
    "fsdp2": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
}
QUICK = ("one, a batch above the set", "tp2-pp2", "cp2-dp2")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layout" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        metafunc.parametrize("layout", [name for name in LAYOUTS if full or name in QUICK])


def test_every_sample_of_a_set_counts_once(
    data: dict[str, str], start: tuple[Path, dict[str, float]], tmp_path: Path, layout: str
) -> None:
    """The losses of the sets equal those of the reference over all samples, though no batch divides their numbers."""
    folder, expected = start
    world_size, changes = LAYOUTS[layout]
    flags = settings(data, full_validation=True, skip_train=True, lr=None, train_iters=None, test_data_path=[data["test"]])
    run(arguments(**flags, **changes, load=folder, metrics_file=tmp_path / "metrics"), world_size)
    validation, test = read_metrics(tmp_path / "metrics")
    found = {name: value for name, value in {**validation, **test}.items() if "_loss" in name}
    assert found.keys() == expected.keys()
    problems = [line for name in expected for line in number_differences(name, [found[name]], [expected[name]], 1e-10)]
    assert not problems, "\n".join(problems)


def test_a_set_has_the_loss_of_a_run_that_has_only_it(data: dict[str, str], tmp_path: Path) -> None:
    """In full digits, with --eval-iters, multi-token prediction and a training in between, in the log, the metrics, the history
    and TensorBoard; also after a restart in the middle. The mean is named so."""
    flags: dict[str, Any] = {"train_iters": 4, "eval_interval": 2, "eval_iters": 2, "mtp_num_layers": 1, "fp64": None}

    def evaluations(name: str, sets: list[str], **changes: Any) -> tuple[list[dict[str, float]], str]:
        argv = arguments(**settings(data, **{**flags, **changes}, valid_data_path=sets), metrics_file=tmp_path / name)
        said = run(argv)
        return [line for line in read_metrics(tmp_path / name) if "validation_loss" in line], said

    alone = {name: evaluations(name, [data[name]])[0] for name in ("books", "code")}
    board, save = tmp_path / "board", tmp_path / "save"
    both = [data["books"], data["code"]]
    together: dict[str, Any] = {"multiple_validation_sets": True, "save": save, "tensorboard_tags": "megatron"}
    found, said = evaluations("both", both, **together, tensorboard_dir=board)
    for key in ("loss", "mtp_loss"):
        for name, lines in alone.items():
            assert [line[f"validation_{key}/{name}"] for line in found] == [line[f"validation_{key}"] for line in lines]
        means = [(line[f"validation_{key}/books"] + line[f"validation_{key}/code"]) / 2 for line in found]
        assert [line[f"validation_{key}"] for line in found] == means
    for name in ("books", "code"):
        value = f"{found[-1][f'validation_loss/{name}']:.6E}"
        assert f"\n validation-{name} loss at iteration 4 | lm loss value: {value} | lm loss PPL: " in said
    mean = f"{found[-1]['validation_loss']:.6E}"
    assert re.search(rf"\n validation loss at iteration 4 \| lm loss value: {re.escape(mean)} \|.*\| mean of sets: 2 \| \n", said)
    assert found[-1]["validation_loss/books"] != found[-1]["validation_loss/code"]

    names = [f"validation_{key}{name}" for name in ("", "/books", "/code") for key in ("loss", "mtp_loss")]
    recorded = [line for line in read_metrics(save / HISTORY_FILE) if line["kind"] == "evaluation"]
    assert [{name: line[name] for name in names} for line in recorded] == [{name: line[name] for name in names} for line in found]

    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(board)).Reload()
    for name in ("books", "code"):
        curve = [event.value for event in events.Scalars(f"lm loss validation-{name}")]
        assert curve == pytest.approx([line[f"validation_loss/{name}"] for line in found], rel=1e-6)
        assert f"lm loss validation-{name} ppl vs samples" in events.Tags()["scalars"]

    evaluations("first", both, multiple_validation_sets=True, save=tmp_path / "again", exit_interval=2)
    resumed, _ = evaluations("second", both, multiple_validation_sets=True, load=tmp_path / "again")
    assert [{name: line[name] for name in names} for line in resumed] == [
        {name: line[name] for name in names} for line in found[1:]
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"data_order": "megatron", "eval_interval": 1},
        {"whole_documents": True, "reset_attention_mask": True, "reset_position_ids": True},
    ],
)
def test_a_complete_evaluation_does_not_depend_on_the_batch(data: dict[str, str], tmp_path: Path, changes: dict[str, Any]) -> None:
    """Batches that leave a remainder of 1 to 5 samples, at one and at two ranks, in other orders of the samples."""
    losses = []
    for world_size, size in ((1, 1), (1, 12), (2, 8)):
        flags = settings(data, **changes, full_validation=True, skip_train=True, micro_batch_size=size // 2 or 1)
        argv = arguments(**{**flags, "global_batch_size": size}, metrics_file=tmp_path / f"{world_size}-{size}")
        if world_size == 2:
            argv += ["--micro-batch-size", "2"]
        run(argv, world_size)
        (line,) = read_metrics(tmp_path / f"{world_size}-{size}")
        losses.append([line[f"validation_loss{name}"] for name in ("", "/books", "/code")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12) and losses[0] == pytest.approx(losses[2], rel=1e-12)


def test_each_dataset_of_a_split_blend_is_a_set(data: dict[str, str], tmp_path: Path) -> None:
    """With --data-path, a set has the validation documents of its dataset, and weights have no effect on it."""
    flags = {**settings(data), "train_data_path": None, "valid_data_path": None, "split": "50,50,0", "eval_iters": 1}
    for name in ("books", "code"):
        argv = arguments(**flags, skip_train=True, data_path=[data[name]], metrics_file=tmp_path / name)
        run(argv)
    blend = ["0.9", data["books"], "0.1", data["code"]]
    said = run(arguments(**flags, skip_train=True, data_path=blend, multiple_validation_sets=True, metrics_file=tmp_path / "both"))
    (both,) = read_metrics(tmp_path / "both")
    for name in ("books", "code"):
        assert both[f"validation_loss/{name}"] == read_metrics(tmp_path / name)[0]["validation_loss"]
    assert "the weights have no effect, because each dataset is a set (--multiple-validation-sets)" in said


def test_skip_train_writes_nothing(data: dict[str, str], tmp_path: Path) -> None:
    """It prints the losses of the run that saved the checkpoint, beside which it leaves all files as they are."""
    save, folder = tmp_path / "save", {"save": tmp_path / "save", "load": tmp_path / "save"}
    flags = settings(data, eval_iters=1, test_data_path=[data["test"]], tensorboard_dir=tmp_path / "board")
    trained = run(arguments(**flags, **folder, train_iters=2))
    before = {path: path.read_bytes() for path in sorted(save.rglob("*")) if path.is_file()}
    said = run(arguments(**flags, **folder, train_iters=2, save_interval=1, memory_save_interval=1, skip_train=True))
    assert {path: path.read_bytes() for path in sorted(save.rglob("*")) if path.is_file()} == before
    lines = [line for line in trained.splitlines() if "loss at iteration 2" in line]
    assert len(lines) == 4 and lines == [line for line in said.splitlines() if "loss at iteration" in line]
    assert "evaluated after 2 iterations" in said and "--save-interval 1" in said
    assert complete_checkpoints(save) == ["iter_0000002"] and not (tmp_path / "board" / HISTORY_FILE).exists()
    missing, message = arguments(**flags, load=tmp_path / "nothing", skip_train=True), "but --skip-train requires a checkpoint"
    (ended,) = launch(missing)
    assert ended.code == 1 and message in ended.stderr
    assert message in (find_resume_problem(load(missing, 1).config, 1) or ""), "the launcher says the same before it starts ranks"


def test_a_program_gets_the_losses_of_the_sets(data: dict[str, str], start: tuple[Path, dict[str, float]]) -> None:
    """`evaluate` returns their mean. With --skip-train, `fit` evaluates, and a single step is refused."""
    folder, expected = start
    evaluations: list[dict[str, float]] = []

    class Recorder(Callback):
        """Keeps the losses of evaluations."""

        def on_evaluation(self, progress: Progress, values: Mapping[str, float]) -> None:
            evaluations.append(dict(values))

    flags = settings(data, full_validation=True, skip_train=True, lr=None, load=folder, train_iters=None, train_epochs=2)
    with Trainer(load(arguments(**flags), 1), quiet=True, callbacks=[Recorder()]) as trainer:
        losses = trainer.evaluate_sets()
        assert losses == pytest.approx({name: expected[f"validation_loss/{name}"] for name in ("books", "code")}, rel=1e-10)
        assert trainer.evaluate() == (losses["books"] + losses["code"]) / 2
        with pytest.raises(ValueError, match="--skip-train"):
            trainer.step()
        trainer.fit()
    assert evaluations == [
        {"validation_loss": sum(losses.values()) / 2, **{f"validation_loss/{name}": losses[name] for name in losses}}
    ]


def test_ranks_with_different_files_are_refused(data: dict[str, str]) -> None:
    """On all ranks, instead of one that waits for a batch that the other does not have."""

    def before(rank: int) -> None:
        plain = CompleteSet.__init__

        def shortened(self: CompleteSet, split: DataSplit) -> None:
            plain(self, split)
            self.num_samples -= rank

        CompleteSet.__init__ = shortened  # type: ignore[method-assign,assignment]

    ended = launch(arguments(**settings(data, full_validation=True, skip_train=True)), 2, before=before)
    assert [end.code for end in ended] == [1, 1], report(ended)
    assert "the validation or test data of rank 1 has another number of samples than that of rank 0" in ended[0].stderr
