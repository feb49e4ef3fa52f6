"""Loss spikes in whole runs: warned of, skipped, and gone back from, the same at every layout and through a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.save_folder import read_config
from megatron.training.step import TrainStep
from megatron_lab.data_tools.run_lineage import RunLineage
from tests.support.byte_dataset import write_bytes
from tests.support.equality import assert_equal_tensors, number_differences
from tests.support.forked_modules import fork_modules
from tests.support.runs import (
    arguments,
    checkpoint,
    complete_checkpoints,
    digest,
    launch,
    losses,
    read_metrics,
    report,
    run,
    saved_state,
    saved_tensors,
    timeless,
)

BATCH = 8
JUDGED: dict[str, Any] = {
    "fp64": True,
    "spike_window": 4,
    "spike_threshold": 1000.0,
    "global_batch_size": BATCH,
    "micro_batch_size": BATCH,
}
"""Two steps are enough to judge the third. A batch is one microbatch, but of several ranks two."""
HALVES: dict[str, Any] = {"micro_batch_size": BATCH // 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {**HALVES, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {**HALVES, "pipeline_model_parallel_size": 2}),
    "dp2, optim": (2, {**HALVES, "use_distributed_optimizer": True}),
    "dp2, optim_grads_params": (2, {**HALVES, "data_parallel_sharding_strategy": "optim_grads_params"}),
}


SKIPS = ("pp2",)
"""Layouts of a skip, unless all are asked for. Of the rewind that is started by hand "optim" is among the settings."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("--full")
    if "layout" in metafunc.fixturenames:
        every = full or metafunc.function is test_a_rewind_is_the_same_at_every_layout
        metafunc.parametrize("layout", list(LAYOUTS)[1:] if every else SKIPS)
    if metafunc.function is test_a_rewind_is_the_run_that_is_started_by_hand:
        metafunc.parametrize("size", [1, 2] if full else [2])


def bad_batches(*consumed: int) -> Callable[[int], None]:
    """For `before`: the gradients of the batches that begin at these samples are a million times as large."""

    def before(rank: int) -> None:
        fork_modules()
        original = TrainStep._reduce_totals

        def spoiled(self: TrainStep, *args: Any, **named: Any) -> Any:
            sums, batch = original(self, *args, **named), args[-1]
            return sums._replace(grad_sq_sum=sums.grad_sq_sum * 1e12) if batch[0].dropout_key.step in consumed else sums

        TrainStep._reduce_totals = spoiled  # type: ignore[method-assign]

    return before


def test_a_spike_is_told_and_trained_on(tmp_path: Path) -> None:
    """warn: the run is the one without, and one line has the numbers."""
    for policy in ("none", "warn"):
        settings = {**JUDGED, "spike_policy": policy, "train_iters": 5}
        if policy == "none":
            settings |= {"spike_window": None, "spike_threshold": None}
        said = run(arguments(**settings, save=tmp_path / policy, metrics_file=tmp_path / f"{policy}.jsonl"), before=bad_batches(24))
        assert said.count("loss spike at iteration 4: loss ") == (policy == "warn")
        assert ("samples 24 to 31\n" in said) == (policy == "warn") and "no update" not in said
    none, warn = (saved_tensors(tmp_path / policy, 5) for policy in ("none", "warn"))
    assert_equal_tensors(warn, none, tolerance=0.0, what="model")
    found = timeless(tmp_path / "warn.jsonl")
    assert [line.pop("spikes") for line in found] == [0, 0, 0, 1, 0]
    assert found == timeless(tmp_path / "none.jsonl")


@pytest.fixture(scope="module")
def one_skips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process that skips."""
    return _skipping(tmp_path_factory.mktemp("skips"), "one")


def _skipping(folder: Path, layout: str) -> Path:
    size, flags = LAYOUTS[layout]
    settings = {**JUDGED, **flags, "spike_policy": "skip", "train_iters": 6, "save": folder, "save_interval": 3}
    run(arguments(**settings, metrics_file=folder / "metrics"), size, before=bad_batches(24))
    return folder


def test_a_spike_is_skipped_at_every_layout(tmp_path: Path, one_skips: Path, layout: str) -> None:
    """The step is counted as one that overflows is; the schedules stand still; the same at every layout."""
    folder = _skipping(tmp_path, layout)
    state = saved_state(folder, 6)["progress"]
    assert (state["iteration"], state["consumed_samples"], state["updated_samples"], state["skipped_iterations"]) == (6, 48, 40, 1)
    assert len(state["recent"]) == 4
    found, wanted = timeless(folder / "metrics"), timeless(one_skips / "metrics")
    for name in ("skipped", "spikes", "learning_rate"):
        assert [line[name] for line in found] == [line[name] for line in wanted]
    assert [line["skipped"] for line in found] == [0, 0, 0, 1, 0, 0]
    assert not number_differences("losses", losses(folder / "metrics"), losses(one_skips / "metrics"), 1e-10)
    assert_equal_tensors(saved_tensors(folder, 6), saved_tensors(one_skips, 6), what="model")


def test_a_resumed_run_judges_as_one_that_never_stopped(tmp_path: Path, one_skips: Path) -> None:
    """The step after the resume is the spike, and only the window of the checkpoint can tell."""
    settings = {**JUDGED, "spike_policy": "skip", "train_iters": 6, "load": one_skips, "ckpt_step": 3, "save": tmp_path}
    run(arguments(**settings, metrics_file=tmp_path / "metrics"), before=bad_batches(24))
    assert timeless(tmp_path / "metrics") == timeless(one_skips / "metrics")[3:]
    assert digest(tmp_path, 6) == digest(one_skips, 6)


# ---- rewind

REWINDS: dict[str, Any] = {
    **JUDGED,
    "spike_policy": "rewind",
    "spike_batches_beyond": 2,
    "save_interval": 2,
    "lr_decay_style": "constant",
}
BAD, STEPS = 40, 7
"""A save at iteration 4, and the spike of iteration 6 has samples 40 to 47: so samples 32 to 63 are passed over."""


@pytest.fixture(scope="module")
def one_rewinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process that goes back."""
    folder = tmp_path_factory.mktemp("rewinds")
    said = run(arguments(**REWINDS, train_iters=STEPS, save=folder, metrics_file=folder / "metrics"), before=bad_batches(BAD))
    assert f"rewound to {checkpoint(folder, 4)} (iteration 4); samples 32 to 63 are skipped" in said
    return folder


EVERYTHING: dict[str, Any] = {
    **HALVES,
    "fp64": None,
    "bf16": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,
    "ema_decay": 0.5,
    "hidden_dropout": 0.1,
    "async_save": True,
    "num_workers": 2,
    "check_replicas_every": 2,
}


def test_a_rewind_is_the_run_that_is_started_by_hand(tmp_path: Path, size: int) -> None:
    """From the checkpoint, with the batches left out one by one: the same weights, moments, losses and rates, bit for bit."""
    flags, folders = {**REWINDS, **(EVERYTHING if size == 2 else {})}, (tmp_path / "rewound", tmp_path / "hand")
    said = run(
        arguments(**flags, train_iters=STEPS, save=folders[0], metrics_file=folders[0] / "metrics"), size, before=bad_batches(BAD)
    )
    assert f"rewound to {checkpoint(folders[0], 4)} (iteration 4); samples 32 to 63 are skipped" in said
    hand = {
        **flags,
        "async_save": False,
        "iterations_to_skip": (5, 6, 7, 8),
        "train_iters": STEPS + 4,
        "load": folders[0],
        "ckpt_step": 4,
    }
    run(arguments(**hand, save=folders[1], metrics_file=folders[1] / "metrics"), size, before=bad_batches(BAD))
    for kind in ("model", "exp_avg", "exp_avg_sq", *(["ema"] if size == 2 else [])):
        rewound, by_hand = saved_tensors(folders[0], STEPS, kind), saved_tensors(folders[1], STEPS + 4, kind)
        assert_equal_tensors(rewound, by_hand, tolerance=0.0, what=kind)
    state, wanted = (saved_state(*place)["progress"] for place in ((folders[0], STEPS), (folders[1], STEPS + 4)))
    assert state["consumed_samples"] == wanted["consumed_samples"] == (STEPS + 4) * BATCH
    assert state["updated_samples"] == wanted["updated_samples"] == STEPS * BATCH
    assert (state["iteration"], state["skipped_iterations"]) == (STEPS, 0)
    assert state["recent"] == wanted["recent"]
    assert losses(folders[0] / "metrics")[-3:] == losses(folders[1] / "metrics")[-3:]


def test_a_run_resumes_through_a_rewind(tmp_path: Path, one_rewinds: Path) -> None:
    """From the checkpoint behind it, and from the one before, from where the same spike is met again: bit for bit. The account of
    the time goes on."""
    for step in (6, 4):
        folder = tmp_path / str(step)
        settings = {**REWINDS, "train_iters": STEPS, "load": one_rewinds, "ckpt_step": step, "save": folder}
        said = run(arguments(**settings, metrics_file=folder / "metrics"), before=bad_batches(BAD))
        assert ("rewound to" in said) == (step == 4)
        assert digest(folder, STEPS) == digest(one_rewinds, STEPS)
        assert timeless(folder / "metrics")[-1] == timeless(one_rewinds / "metrics")[-1]
        if step == 4:
            assert "goodput " in said and "between starts" not in said
            _assert_goodput_goes_on(one_rewinds, folder)


def _assert_goodput_goes_on(begun: Path, resumed: Path) -> None:
    """Each use of time has at least what it had at the checkpoint; what a rewind undid does not count. A start in another folder
    is a branch, which has lost nothing between the starts."""
    before, after = (read_config(checkpoint(*place))["goodput"]["seconds"] for place in ((begun, 4), (resumed, STEPS)))
    assert all(after[use] >= seconds for use, seconds in before.items())
    assert after["between starts"] == before["between starts"] == 0.0
    assert after["steps that do not count"] > before["steps that do not count"] == 0.0
    assert all(0.0 < line["goodput"] < 1.0 for line in read_metrics(resumed / "metrics"))


@pytest.mark.full("test_a_rewind_is_the_run_that_is_started_by_hand")
def test_a_rewind_is_the_same_at_every_layout(tmp_path: Path, one_rewinds: Path, layout: str, full: bool) -> None:
    """Begun at a layout, the run ends in one process as that of one process does; with `--full` also with saves in the background,
    which the rewind that is started by hand always has."""
    size, flags = LAYOUTS[layout]
    settings = {**REWINDS, "save": tmp_path, "metrics_file": tmp_path / "metrics"}
    begins = {**settings, **flags, "train_iters": 6, "async_save": full and layout != "pp2", "check_replicas_every": 2}
    run(arguments(**begins), size, before=bad_batches(BAD))
    run(arguments(**settings, train_iters=STEPS, load=tmp_path), before=bad_batches(BAD))
    assert not number_differences("losses", losses(tmp_path / "metrics"), losses(one_rewinds / "metrics"), 1e-10)
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        assert_equal_tensors(saved_tensors(tmp_path, STEPS, kind), saved_tensors(one_rewinds, STEPS, kind), what=kind)


def test_the_history_of_the_data_tells_what_a_step_has_read(tmp_path: Path) -> None:
    """Steps behind the rewind have the samples behind those passed over; those before have theirs."""
    data = {"mock_data": None, "data_path": write_bytes(tmp_path / "data"), "split": "1,0,0"}
    data |= {"tokenizer_type": "ByteTokenizer", "vocab_size": None}
    save = tmp_path / "run"
    run(arguments(**REWINDS, **data, train_iters=6, save=save), before=bad_batches(BAD))
    lineage = RunLineage.from_save_folder(save)
    assert [lineage.get_step_samples(step).start for step in range(1, 7)] == [0, 8, 16, 24, 64, 72]
    assert [sample for sample in range(80) if lineage.is_skipped(sample)] == list(range(32, 64))
    said = run(arguments(**REWINDS, **data, train_iters=STEPS, save=save, load=save))
    assert "samples 32 to 63 were skipped after a loss spike (after iteration 4)" in said
    assert RunLineage.from_save_folder(save).get_step_samples(7) == range(80, 88)


def test_without_a_checkpoint_the_step_is_left_out(tmp_path: Path) -> None:
    """And with one that lies there already, of another run, too."""
    run(arguments(fp64=True, train_iters=2, save=tmp_path))
    settings = {**REWINDS, "save_interval": 10, "train_iters": 4, "save": tmp_path}
    said = run(arguments(**settings), before=bad_batches(24))
    assert "no rewind, because this run has no checkpoint yet" in said and "rewound" not in said
    assert saved_state(tmp_path, 4)["progress"]["skipped_iterations"] == 1


def _damaging(*files: Path) -> Callable[[int], None]:
    """For `before`: the last byte of these files is another when the spike comes."""

    def before(rank: int) -> None:
        bad_batches(BAD)(rank)
        original = TrainStep.run

        def damages(self: TrainStep, batch: Any, **named: Any) -> Any:
            for file in files if batch[0].dropout_key.step == BAD else ():
                content = file.read_bytes()
                file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            return original(self, batch, **named)

        TrainStep.run = damages  # type: ignore[method-assign]

    return before


WEIGHTS = pytest.param("rank_00000.safetensors", marks=pytest.mark.full("the next test: where all weights are damaged"))


@pytest.mark.parametrize("name", ["state.json", WEIGHTS])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, name: str) -> None:
    """Also one that is found so when weights were filled from it. The one before is taken, and the iterations are saved again."""
    settings = {**REWINDS, "train_iters": 7, "save": tmp_path}
    said = run(arguments(**settings), before=_damaging(checkpoint(tmp_path, 4) / name))
    assert f"rewound to {checkpoint(tmp_path, 2)} (iteration 2); samples 16 to 63 are skipped" in said
    assert saved_state(tmp_path, 4)["progress"]["consumed_samples"] == 64 + 2 * BATCH
    assert saved_tensors(tmp_path, 4), "it has been replaced by a sound one"


def test_weights_of_damaged_checkpoints_are_not_trained_on(tmp_path: Path) -> None:
    """Where none is sound the weights in memory are no more, and the run ends."""
    files = [checkpoint(tmp_path, iteration) / "rank_00000.safetensors" for iteration in (2, 4)]
    ended = launch(arguments(**REWINDS, train_iters=7, save=tmp_path), before=_damaging(*files))
    assert ended[0].code == 1 and "every checkpoint to which the run could rewind is damaged" in ended[0].stderr, report(ended)


def test_spikes_wherever_it_goes_on_end_the_run(tmp_path: Path) -> None:
    """After --spike-max-rewinds to the same checkpoint, on every rank, with one message."""
    settings = {**REWINDS, **HALVES, "train_iters": 7, "save": tmp_path, "spike_max_rewinds": 1}
    ended = launch(arguments(**settings), 2, before=bad_batches(BAD, 72))
    assert [end.code for end in ended] == [1, 1], report(ended)
    assert "iteration 6: another loss spike after 1 rewinds" in ended[0].stderr and ended[1].stderr == ""
    assert complete_checkpoints(tmp_path) == ["iter_0000002", "iter_0000004"]
