"""The whole program against the plain float64 model: what rank 0 logs at every layout is the true global loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.windows import split_document_ranges
from megatron_lab.verification.reference.model import Batch
from megatron_lab.verification.reference.shape import ReferenceShape
from tests.support.byte_dataset import FLAGS, write_bytes
from tests.support.equality import assert_equal_tensors, number_differences
from tests.support.model_styles import STYLES
from tests.support.reference_runs import ReferenceRun, gpt2_like, llama_like, mean_loss, train
from tests.support.runs import TINY, arguments, read_metrics, run, saved_tensors

STEPS, EVAL_ITERS = 2, 1
SEED, EOD, VOCABULARY = 1234, 256, 257

SHAPES: dict[str, ReferenceShape] = {
    "gpt2": gpt2_like(vocab=VOCABULARY, ffn=128),
    "llama": llama_like(vocab=VOCABULARY, ffn=64),
}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {"overlap_grad_reduce": True}),
    "tp2-pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}),
    "tp2-dp2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2-dp2": (4, {"pipeline_model_parallel_size": 2, "use_tp_pp_dp_mapping": True, "pipeline_schedule": "gpipe"}),
}


QUICK = {"gpt2": ("tp2-pp2",), "llama": ("pp2-dp2",)}
"""Each axis beside another and each kind of model; the other cases are for --full."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layout" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        cases = [(style, layout) for style in STYLES for layout in LAYOUTS if full or layout in QUICK[style]]
        metafunc.parametrize(("reference", "layout"), cases, indirect=["reference"], scope="module")


def _batches(prefix: str, split: int, count: int) -> list[Batch]:
    """Global batches of a split in the order of the run, with masks made here: nothing follows the end of a document."""
    dataset = IndexedDataset(prefix)
    documents = split_document_ranges(FLAGS["split"], dataset.num_documents)[split]
    samples = GPTDataset(dataset, documents, split=split, seed=SEED, seq_length=TINY["seq_length"], vocab_size=VOCABULARY)
    size, found = TINY["global_batch_size"], []
    for step in range(count):
        windows = torch.from_numpy(samples.get_samples(step * size, size))
        tokens, labels = windows[:, :-1], windows[:, 1:]
        found.append((tokens, labels, tokens != EOD))
    return found


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset of bytes."""
    return write_bytes(tmp_path_factory.mktemp("data") / "text")


def _settings(style: str, prefix: str) -> dict[str, Any]:
    return {
        **FLAGS,
        **STYLES[style],
        "data_path": prefix,
        "fp64": True,
        "clip_grad": 0.5,
        "weight_decay": 0.1,
        "eval_iters": EVAL_ITERS,
        "seed": SEED,
    }


@pytest.fixture(scope="module")
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, prefix: str
) -> tuple[str, ReferenceRun, float]:
    """The style, the reference's run, and its validation loss at the end."""
    style, folder = request.param, tmp_path_factory.mktemp("start")
    # The initial weights: of a run that leaves its only step out.
    run(arguments(**_settings(style, prefix), train_iters=1, iterations_to_skip=(1,), save=folder))
    shape = SHAPES[style]
    rates = [TINY["lr"] * (1 - step / STEPS) for step in range(STEPS)]  # linear decay to 0
    found = train(shape, saved_tensors(folder, 1), _batches(prefix, 0, STEPS), lr=rates, weight_decay=0.1, clip=0.5)
    tokens, labels, mask = (torch.cat(part) for part in zip(*_batches(prefix, 1, EVAL_ITERS), strict=True))
    return style, found, mean_loss(shape, found.weights_after, (tokens, labels, mask)).item()


def test_the_masks_are_unequal(prefix: str) -> None:
    """Else a mean of means would pass for the mean."""
    counts = {int(mask[i : i + 2].sum()) for _, _, mask in _batches(prefix, 0, STEPS) for i in range(0, len(mask), 2)}
    assert len(counts) > 3 and min(counts) <= 0.9 * max(counts)


def test_the_logged_loss_is_the_true_one(
    reference: tuple[str, ReferenceRun, float], tmp_path: Path, prefix: str, layout: str
) -> None:
    """Losses, norms, the weights at the end and the validation loss equal those of one plain process."""
    style, wanted, validation_loss = reference
    world_size, changes = LAYOUTS[layout]
    settings = {**_settings(style, prefix), **changes, "train_iters": STEPS, "log_layer_norms": True, "log_params_norm": True}
    run(arguments(**settings, save=tmp_path / "save", metrics_file=tmp_path / "metrics"), world_size)
    *steps, evaluation = read_metrics(tmp_path / "metrics")
    problems = number_differences("losses", [line["lm_loss"] for line in steps], wanted.losses, 1e-10)
    problems += number_differences("norms", [line["grad_norm"] for line in steps], wanted.grad_norms, 1e-10)
    problems += number_differences("validation", [evaluation["validation_loss"]], [validation_loss], 1e-10)
    problems += _norm_differences("grad-norm/", steps[0], wanted.first_gradients)
    problems += _norm_differences("weight-norm/", steps[-1], wanted.weights_after)
    whole = math.hypot(*(weight.norm().item() for weight in wanted.weights_after.values()))
    problems += number_differences("params_norm", [steps[-1]["params_norm"]], [whole], 1e-10)
    assert not problems, "\n".join(problems)
    assert_equal_tensors(saved_tensors(tmp_path / "save", STEPS), wanted.weights_after, what="weights")


def _norm_differences(prefix: str, line: dict[str, float], tensors: dict[str, torch.Tensor]) -> list[str]:
    """Where the logged norms of the parts of the model are not those of these tensors."""
    norms: dict[str, float] = {}
    for name, tensor in tensors.items():
        part = prefix + ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])
        norms[part] = math.hypot(norms.get(part, 0.0), tensor.norm().item())
    logged = {name for name in line if name.startswith(prefix)}
    if logged != norms.keys():
        return [f"{prefix}: logged {sorted(logged)}, the model has {sorted(norms)}"]
    return number_differences(prefix, [line[name] for name in norms], list(norms.values()), 1e-10)
