"""Where a run begins: at the last sound checkpoint, with the weights of another run, or not at all."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.data_files import DataFileReader
from megatron.checkpoint.local_storage import LocalStorage
from megatron_lab.checkpoints.stream import write_checkpoint
from megatron_lab.foreign.source import StoredCheckpoint
from tests.support.checkpoint_worlds import read_manifest
from tests.support.equality import assert_equal_tensors
from tests.support.runs import arguments, checkpoint, digest, launch, report, run, saved_state, saved_tensors

LAYOUTS: dict[int, dict[str, Any]] = {1: {}, 2: {"tensor_model_parallel_size": 2, "sequence_parallel": True}}


FOREIGN = {
    "face": "Hugging Face",
    "legacy": "Megatron-LM",
    "release": "Megatron-LM",
    "dist": "torch_dist",
    "file": "is a file",
}
"""Words for each of what other programs leave."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("--full")
    if "world_size" in metafunc.fixturenames:
        metafunc.parametrize("world_size", LAYOUTS if full else [1])  # tests/program/test_run_damage.py has two ranks
    if "program" in metafunc.fixturenames:
        cases = [(program, flag) for program in FOREIGN for flag in ("load", "pretrained_checkpoint")]
        # By turns: who finds no checkpoint asks the same question at both flags.
        metafunc.parametrize(("program", "flag"), cases if full else [*cases[::4], *cases[3::4], ("file", "pretrained_checkpoint")])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 1, 2 and 3 of a run of 3."""
    folder = tmp_path_factory.mktemp("original") / "run"
    run(arguments(train_iters=3, save=folder, save_interval=1, lr_decay_style="cosine"))
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def flip_a_weight(path: Path) -> None:
    manifest = read_manifest(path)
    (box,) = manifest.tensors["model.layers.0.mlp.up.weight"].slices
    with DataFileReader(LocalStorage(path), manifest) as files:
        at = files.get_data_offset(box, "float32")
    flip(path / box.file, at + 5)


def refused(argv: list[str], *words: str, world_size: int = 1) -> None:
    ended = launch(argv, world_size)
    assert all(end.code == 1 for end in ended), report(ended)
    for word in words:
        assert word in ended[0].stderr, report(ended)


def test_damage_that_only_a_full_read_finds(saved: Path, tmp_path: Path, world_size: int) -> None:
    """Two in a row: the last good one is taken on all ranks, and the log says what is wrong with which file."""
    flip_a_weight(checkpoint(saved, 3))
    flip(checkpoint(saved, 2) / "state.json")
    settings = {"train_iters": 3, "lr_decay_style": "cosine", **LAYOUTS[world_size]}
    said = run(arguments(**settings, load=saved, save=tmp_path / "on"), world_size)
    assert f"resuming from {checkpoint(saved, 1)} at iteration 1" in said
    (told,) = [line for line in said.splitlines() if "WARNING: taking" in line]
    assert f"taking {checkpoint(saved, 1)}, because" in told
    assert "rank_00000.safetensors: the data of" in said and f"{checkpoint(saved, 2) / 'state.json'} was altered" in said
    if world_size == 1:
        assert digest(tmp_path / "on", 3) == digest(saved, 3)  # trained again, to the same bits


@pytest.mark.parametrize("single", [pytest.param(False, marks=pytest.mark.full("the next test takes a folder")), True])
def test_weights_of_another_run(saved: Path, tmp_path: Path, single: bool) -> None:
    """A new run at another layout, without the old one's counts and moments; of a folder or of one checkpoint in it."""
    base = checkpoint(saved, 2) if single else saved
    new = arguments(train_iters=1, iterations_to_skip=(1,), lr=0.5, pretrained_checkpoint=base, save=tmp_path / "new", **LAYOUTS[2])
    said = run(new, 2)
    taken = checkpoint(saved, 2 if single else 3)
    assert f"weights of {taken}; counting starts from iteration 0 (--pretrained-checkpoint)" in said
    assert f"(content digest of the checkpoint: {read_manifest(taken).content_digest[:16]})" in said  # type: ignore[index]
    wanted = saved_tensors(saved, 2 if single else 3)
    assert_equal_tensors(saved_tensors(tmp_path / "new", 1), wanted, tolerance=0.0, what="weights")
    assert not any(tensor.any() for tensor in saved_tensors(tmp_path / "new", 1, "exp_avg").values())
    assert saved_state(tmp_path / "new", 1)["progress"]["consumed_samples"] == 8


def test_a_run_that_began_with_other_weights_goes_on_from_its_own(saved: Path, tmp_path: Path) -> None:
    """The same command again: --load holds a checkpoint now. A base that is damaged is passed over, or an error."""
    argv = arguments(train_iters=2, load=tmp_path / "new", save=tmp_path / "new", pretrained_checkpoint=saved, exit_interval=1)
    flip_a_weight(checkpoint(saved, 3))
    first, second = run(argv), run(argv)
    assert f"weights of {checkpoint(saved, 2)}" in first and "was altered: its checksum does not match" in first
    assert f"resuming from {checkpoint(tmp_path / 'new', 1)} at iteration 1" in second and "weights of" not in second
    refused(
        arguments(train_iters=1, pretrained_checkpoint=checkpoint(saved, 3)),
        "the data of",
        "was altered: its checksum does not match",
    )
    refused(arguments(train_iters=1, pretrained_checkpoint=tmp_path / "none"), "--pretrained-checkpoint", "holds no checkpoint")
    refused(arguments(train_iters=1, pretrained_checkpoint="org/name"), "hf download org/name --local-dir name")


def test_a_checkpoint_of_weights_alone(saved: Path, tmp_path: Path) -> None:
    """As an import writes it: with --finetune, not as the state of a run."""
    source = StoredCheckpoint(checkpoint(saved, 3))
    weights = {name: tensor for name, tensor in source.tensors.items() if name.startswith("model.")}
    write_checkpoint(tmp_path / "weights", 0, weights, source.read_stored, source.config, {"has_optimizer": False})
    settings = {"train_iters": 1, "load": tmp_path / "weights"}
    refused(arguments(**settings), "only weights", "--finetune", "--pretrained-checkpoint")
    write_checkpoint(tmp_path / "other", 0, source.tensors, source.read_stored, source.config, {**source.state, "progress": {}})
    refused(
        arguments(train_iters=1, load=tmp_path / "other"), "state.json does not have the content that a run writes", "iteration"
    )
    said = run(arguments(**settings, finetune=True))
    assert "counting starts from iteration 0 (--finetune)" in said


@pytest.mark.parametrize("flag", ["finetune", "no_load_optim", "exit_on_missing_checkpoint"])
def test_who_wants_a_part_of_a_checkpoint_does_not_want_none(tmp_path: Path, flag: str) -> None:
    refused(arguments(train_iters=1, load=tmp_path / "typo", **{flag: True}), "holds no checkpoint", f"--{flag.replace('_', '-')}")


def test_a_missing_checkpoint_is_told(tmp_path: Path) -> None:
    """Loudly, unless it is the first start of a command that restarts itself."""
    settings = {"train_iters": 1, "save": tmp_path / "run"}
    said = run(arguments(**settings, load=tmp_path / "typo"))
    assert re.search(r"WARNING: --load .*typo holds no checkpoint: the run begins at iteration 0", said)
    said = run(arguments(**settings, load="org/name"))
    assert re.search(r"WARNING: --load org/name holds no checkpoint(.|\n)*hf download org/name --local-dir name", said)
    said = run(arguments(**{**settings, "save": tmp_path / "other"}, load=tmp_path / "other"))
    assert "holds no checkpoint: the run begins at iteration 0" in said and "WARNING: --load" not in said


def _of_another_program(folder: Path, program: str) -> Path:
    place = folder / program
    if program == "face":
        place.mkdir()
        (place / "config.json").write_text('{"model_type": "llama"}')
    elif program in ("legacy", "release"):
        inner = "release" if program == "release" else "iter_0000100"
        (place / inner / "mp_rank_00").mkdir(parents=True)
        (place / inner / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"x")
        (place / "latest_checkpointed_iteration.txt").write_text(inner.removeprefix("iter_0000"))
    elif program == "dist":
        (place / "iter_0000100").mkdir(parents=True)
        for name in ("metadata.json", "common.pt", ".metadata"):
            (place / "iter_0000100" / name).write_text("x")
    else:
        place.write_text("x")
    return place


def test_folders_of_other_programs_are_no_checkpoints(tmp_path: Path, program: str, flag: str) -> None:
    place = _of_another_program(tmp_path, program)
    refused(arguments(train_iters=1, **{flag: place}), str(place), FOREIGN[program])


def test_a_run_goes_on_with_fewer_depths(tmp_path: Path) -> None:
    """Of multi-token prediction: what is left out is told; the rest has its weights and moments, at another layout."""
    run(arguments(train_iters=2, mtp_num_layers=2, save=tmp_path / "run"))
    settings = {"train_iters": 3, "iterations_to_skip": (3,), "load": tmp_path / "run", "override_opt_param_scheduler": True}
    said = run(arguments(**settings, mtp_num_layers=1, save=tmp_path / "one", **LAYOUTS[2]), 2)
    assert re.search(
        r"WARNING: 1 of 2 depths of multi-token prediction .* left out, with their moments: 17 tensors of [\d,]+ ", said
    )
    said = run(arguments(**settings, use_checkpoint_args=True, mtp_num_layers=0, save=tmp_path / "none"))
    assert "WARNING: 2 of 2 depths of multi-token prediction in the checkpoint are left out" in said
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        before = saved_tensors(tmp_path / "run", 2, kind)
        for folder, left in (("one", "mtp.1."), ("none", "mtp.")):
            wanted = {name: tensor for name, tensor in before.items() if not name.startswith(left)}
            assert len(wanted) < len(before)
            assert_equal_tensors(saved_tensors(tmp_path / folder, 3, kind), wanted, tolerance=0.0, what=f"{kind} of {folder}")
    refused(arguments(**{**settings, "load": tmp_path / "none"}, mtp_num_layers=1), "--mtp-num-layers 0 there, 1 here")


def test_what_differs_and_may_is_listed(saved: Path, tmp_path: Path) -> None:
    settings = {"lr_decay_style": "cosine", "train_iters": 4, "override_opt_param_scheduler": True}
    changes = {"clip_grad": 0.5, "seq_length": 8, "max_position_embeddings": 16, "adam_beta2": 0.9, "bf16": True, "seed": 5}
    said = run(arguments(**settings, **changes, load=saved, **LAYOUTS[2]), 2)
    told = [line.partition("differs from the checkpoint: ")[2] for line in said.splitlines() if "differs from" in line]
    assert {
        "--clip-grad 1.0 there, 0.5 here",
        "--seq-length 16 there, 8 here",
        "--adam-beta2 0.999 there, 0.9 here",
        "--bf16 False there, True here",
        "--seed 1234 there, 5 here",
        "--tensor-model-parallel-size 1 there, 2 here",
        "--sequence-parallel False there, True here",
        "--train-iters 3 there, 4 here",
    } == set(told)
    refused(
        arguments(**settings, load=saved, hidden_size=16, ffn_hidden_size=8, swiglu=True),
        "holds another model",
        "--hidden-size 32 there, 16 here",
        "--swiglu False there, True here",
    )
