"""Whole runs: which stages open the data, packed samples at several layouts, and waiting for data in the log."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.data.samples import DocumentRules, MockDataset
from megatron.parallel.topology import Topology
from megatron.spec.schedules import assign_chunks
from megatron.training.inputs import needs_samples
from megatron.training.step import StepResult, TrainStep
from tests.support.lone_rank import lone_rank
from tests.support.runs import arguments, losses, run

RESETS: dict[str, Any] = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


@pytest.mark.parametrize(
    "flags, expected",
    [
        ([], {"1f1b": [0, 3], "zb-v": [0]}),
        (["eod_mask_loss"], {"1f1b": [0, 3], "zb-v": [0]}),
        (["reset_position_ids"], {"1f1b": [0, 1, 2, 3], "zb-v": [0, 1, 2, 3]}),
        (["reset_attention_mask"], {"1f1b": [0, 1, 2, 3], "zb-v": [0, 1, 2, 3]}),
    ],
)
def test_which_stages_read_samples(flags: list[str], expected: dict[str, list[int]]) -> None:
    """The stages of the first and the last chunk, unless layers in the middle need to know the documents."""
    rules = DocumentRules(0, **dict.fromkeys(flags, True))
    for schedule, chunks in (("1f1b", 1), ("zb-v", 2)):
        stages = assign_chunks(schedule, 4, chunks)
        found = [stage for stage in range(4) if needs_samples(lone_rank(Topology(pp=4), stage), stages, rules)]
        assert found == expected[schedule]


def test_a_stage_that_needs_no_samples_opens_no_data(packed: bool, tmp_path: Path) -> None:
    def before(rank: int) -> None:
        make = MockDataset.__init__

        def noting(self: MockDataset, **settings: Any) -> None:
            (tmp_path / f"opened-{rank}").touch()
            make(self, **settings)

        MockDataset.__init__ = noting  # type: ignore[method-assign]

    flags = RESETS if packed else {}
    run(arguments(train_iters=1, num_layers=3, pipeline_model_parallel_size=3, **flags), 3, before=before)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"opened-{rank}" for rank in ((0, 1, 2) if packed else (0, 2))]


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2-pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("--full")
    if metafunc.function is test_a_stage_that_needs_no_samples_opens_no_data:
        metafunc.parametrize("packed", [False, True] if full else [False])
    if metafunc.function is test_throughput_counts_the_attention_of_documents:
        few = [("one", False), ("dp2", True)]  # packed at one rank and at four: test_packed_runs_are_the_same_at_every_layout
        metafunc.parametrize(("layout", "packed"), [*itertools.product(LAYOUTS, (False, True))] if full else few)


def notes_attention(folder: Path) -> Callable[[int], None]:
    """Return a `before` with which each rank writes into the folder how many sequences of full attention its last step equals."""

    def before(rank: int) -> None:
        plain = TrainStep.run

        def noting(self: TrainStep, *args: Any, **settings: Any) -> StepResult:
            result = plain(self, *args, **settings)
            (folder / str(rank)).write_text(json.dumps(result.attention_samples))
            return result

        TrainStep.run = noting  # type: ignore[method-assign]

    return before


def assert_attention(folder: Path, world_size: int, expected: float | None) -> None:
    found = [json.loads((folder / str(rank)).read_text()) for rank in range(world_size)]
    assert found == ([None] * world_size if expected is None else pytest.approx([expected] * world_size, rel=1e-12))


def expected_attention(step: int) -> float:
    """Compute it from the documents of a step's samples."""
    source = MockDataset(split=0, seed=1234, seq_length=16, vocab_size=61, eod=60)
    expected = 0.0
    for tokens in source.get_samples(8 * step, 8)[:, :-1].tolist():
        lengths, start = [], 0
        for at, token in enumerate(tokens, start=1):
            if token == 60 or at == 16:
                lengths.append(at - start)
                start = at
        expected += sum(length**2 for length in lengths) / 16**2
    return expected


def test_packed_runs_are_the_same_at_every_layout(tmp_path: Path, full: bool) -> None:
    """Made-up data ends a document at every tenth token. Workers change no bit, layouts (in the normal run with workers) only the
    last ones."""
    settings: dict[str, Any] = {**RESETS, "fp64": True, "train_iters": 2, "eval_iters": 0, "position_embedding_type": "rope"}

    def curve(name: str, layout: str = "one", **changes: Any) -> list[float]:
        world_size, flags = LAYOUTS[layout]
        folder = tmp_path / name
        folder.mkdir()
        argv = arguments(**{**settings, **flags, **changes}, metrics_file=folder / "metrics")
        run(argv, world_size, before=notes_attention(folder))
        assert_attention(folder, world_size, expected_attention(1) if name != "not packed" else None)
        return losses(folder / "metrics")

    one = curve("one")
    assert len(one) == 2
    assert curve("split", "tp2-pp2", num_workers=2) == pytest.approx(one, rel=1e-12)
    if full:
        assert curve("workers", num_workers=4) == one
    assert curve("not packed", "one", **dict.fromkeys(RESETS, False)) != pytest.approx(one, rel=1e-3)


def test_waiting_for_data_is_a_line_of_the_timers() -> None:
    """It holds at least the time that reading took, where nobody reads ahead."""

    def before(rank: int) -> None:
        read = MockDataset.get_samples

        def slow(self: MockDataset, first: int, count: int) -> Any:
            time.sleep(0.05)
            return read(self, first, count)

        MockDataset.get_samples = slow  # type: ignore[method-assign]

    said = run(arguments(train_iters=2, timing_log_level=1, global_batch_size=4), before=before)
    waits = [float(ms) for ms in re.findall(r"batch-generator \.+: \(([\d.]+),", said)]
    assert len(waits) == 2 and min(waits) >= 100, "two microbatches a step, each read in 50 ms"
    assert "batch-generator" not in run(arguments(train_iters=1))


def test_throughput_counts_the_attention_of_documents(layout: str, packed: bool, tmp_path: Path) -> None:
    """The work of a step is that of its documents, at every layout."""
    world_size, flags = LAYOUTS[layout]
    resets = {"reset_attention_mask": True} if packed else {}
    run(arguments(train_iters=1, **flags, **resets), world_size, before=notes_attention(tmp_path))
    assert_attention(tmp_path, world_size, expected_attention(0) if packed else None)
