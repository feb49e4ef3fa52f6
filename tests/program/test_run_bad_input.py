"""What cannot work ends with one clear message, an exit code that is not 0, nothing half-written and no rank left waiting."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megatron.checkpoint.savers as save_module
from megatron.data.indexed_writer import write_dataset
from megatron.training.step import TrainStep
from tests.support.byte_dataset import FLAGS, write_bytes
from tests.support.runs import (
    Ended,
    arguments,
    checkpoint,
    complete_checkpoints,
    digest,
    launch,
    on_rank,
    report,
    run,
    saved_tensors,
)

TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}


def _refused(argv: list[str], world_size: int, *words: str, code: int = 1) -> str:
    """Run what must fail: every rank ends with `code`, rank 0 alone says why, without a traceback. Returns what it says."""
    ended = launch(argv, world_size)
    assert [end.code for end in ended] == [code] * world_size, report(ended)
    said = ended[0].stderr
    assert said.startswith("pretrain_gpt.py: ") and "Traceback" not in said, report(ended)
    assert all(word in said for word in words), report(ended)
    assert all(end.stderr == "" for end in ended[1:]), report(ended)
    return said


def test_an_unknown_flag() -> None:
    """The nearest name is told."""
    _refused([*arguments(train_iters=1), "--hiden-size", "64"], 2, "--hiden-size", "--hidden-size", code=2)


def test_an_impossible_layout(tmp_path: Path) -> None:
    """All violations together, with what would be valid."""
    shape = {"num_attention_heads": 3, "hidden_size": 33, "seq_length": 15, "sequence_parallel": True}
    argv = arguments(**TP2, **shape, train_iters=1, save=tmp_path / "save")
    said = _refused(argv, 2, "2 problems in the settings", "--num-attention-heads 3", "--seq-length 15", code=2)
    assert said.count("--tensor-model-parallel-size 2") == 2 and said.count("Nearest valid") == 2
    assert not (tmp_path / "save").exists()


@pytest.mark.parametrize(("world_size", "settings"), [(1, TP2), (2, {**TP2, **PP2})])
def test_a_world_of_another_size(world_size: int, settings: dict[str, Any]) -> None:
    """Fewer ranks than the model-parallel sizes need."""
    product = 2 * world_size
    words = [
        f"world size {world_size} is not divisible",
        "Nearest valid: ",
        f"world size {product}",
        "--tensor-model-parallel-size 1",
    ]
    _refused(arguments(train_iters=1, **settings), world_size, *words, code=2)


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A dataset of bytes."""
    return write_bytes(tmp_path / "text")


@pytest.mark.parametrize("damage", ["missing", "truncated .bin", "truncated .idx", "not an index"])
def test_a_bad_data_file(tmp_path: Path, text: str, damage: str) -> None:
    """Found before anything is made, --save included."""
    tokens, index = Path(f"{text}.bin"), Path(f"{text}.idx")
    word = {
        "missing": "does not exist",
        "truncated .bin": "truncated",
        "truncated .idx": "truncated",
        "not an index": "does not start with",
    }
    if damage == "missing":
        index.unlink()
    elif damage == "not an index":
        index.write_bytes(tokens.read_bytes())
    else:
        path = tokens if damage == "truncated .bin" else index
        os.truncate(path, path.stat().st_size - 100)
    layout, ranks = (PP2, 2) if damage == "truncated .bin" else ({}, 1)
    argv = arguments(**FLAGS, **layout, train_iters=1, data_path=text, save=tmp_path / "save")
    _refused(argv, ranks, word[damage], text)
    assert not (tmp_path / "save").exists()


def test_an_empty_split(tmp_path: Path, text: str) -> None:
    """Without documents for validation there is no evaluation, and the log says so; training needs some."""
    argv = arguments(**{**FLAGS, "split": "100,0,0", "eval_iters": 1}, train_iters=1, data_path=text)
    said = run(argv)
    assert said.count("leaves no documents for validation, so there is no evaluation") == 1 and "validation loss" not in said
    argv = arguments(**{**FLAGS, "split": "0,100,0", "eval_iters": 1}, train_iters=1, data_path=text)
    _refused(argv, 2, "leaves no documents for training", code=2)


def test_a_split_that_is_too_short(tmp_path: Path, text: str) -> None:
    """It has documents, but not the tokens of one sample."""
    argv = arguments(**{**FLAGS, "split": "9999,1,0", "eval_iters": 1}, train_iters=1, data_path=text)
    _refused(argv, 2, "the validation split of", "one sample needs 17", "--split")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Settings in a few of their combinations, unless all are asked for."""
    full = metafunc.config.getoption("--full")
    if metafunc.function is test_a_token_beyond_the_vocabulary:
        metafunc.parametrize("settings", [{}, PP2, {"num_workers": 2}] if full else [{**PP2, "num_workers": 2}])
    if metafunc.function is test_a_rank_that_dies:
        # Ranks that talk to the one that died and ranks that do not; the first and the last.
        cases = [*itertools.product(LAYOUTS, (0, -1))] if full else [("tp2-pp2", -1)]
        metafunc.parametrize(("layout", "victim"), cases)
    if metafunc.function is test_special_files_are_refused_by_every_flag:
        metafunc.parametrize(("words", "kind"), _special(full))


def test_a_token_beyond_the_vocabulary(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Only the ranks that read it notice; the others end too."""
    prefix = tmp_path / "ids"
    with write_dataset(str(prefix), np.uint16) as writer:
        for document in range(10):
            writer.add_documents(np.arange(33) if document != 7 else np.full(33, 99))
    data = {"mock_data": None, "data_path": prefix, "split": "1,0,0"}
    ended = launch(arguments(**{**data, **settings}, train_iters=5, save=tmp_path / "save", save_interval=1), 2, gloo=True)
    assert all(end.code == 1 for end in ended), report(ended)
    assert any("token id 99" in end.stderr and "61 ids" in end.stderr for end in ended), report(ended)
    assert all("token id 99" in end.stderr or "lost contact" in end.stderr for end in ended), report(ended)
    assert not any("Traceback" in end.stderr for end in ended), report(ended)
    assert not list((tmp_path / "save").glob(".iter*"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of iterations 1 and 2. Not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    run(arguments(train_iters=2, save=folder, save_interval=1))
    return folder


def test_a_checkpoint_of_another_model(saved: Path) -> None:
    """Each setting that differs is named."""
    settings = {"hidden_size": 64, "num_layers": 4, "swiglu": True, "vocab_size": 61, "seq_length": 8}
    words = [
        "--hidden-size 32 there, 64 here",
        "--num-layers 2 there, 4 here",
        "--swiglu False there, True here",
        "vocabulary 61 there, 62 here",
        "--untie-embeddings-and-output-weights False there, True here",
        "--max-position-embeddings 16 there, 8 here",  # as many as the sequence is long, by default
    ]
    argv = arguments(**settings, untie_embeddings_and_output_weights=True, train_iters=3, load=saved)
    _refused(argv, 2, "holds another model", "--use-checkpoint-args", *words)


def test_another_schedule(saved: Path, tmp_path: Path) -> None:
    """Of learning rate or weight decay: one must say which counts."""
    settings = {"load": saved, "train_iters": 4, "lr": 5e-3, "lr_decay_iters": 4}
    _refused(arguments(**settings), 1, "lr: 0.01 there, 0.005 here", "--override-opt-param-scheduler", "--use-checkpoint-opt-param")


def test_another_optimizer(saved: Path, tmp_path: Path) -> None:
    """Its state cannot be taken over, its weights can."""
    again = arguments(load=saved, train_iters=3, optimizer="sgd", override_opt_param_scheduler=True)
    _refused(again, 1, "--optimizer adam", "--no-load-optim")
    assert "moments start from zero" in run([*again, "--no-load-optim"])


def test_a_longer_run_changes_a_schedule_that_follows_its_length(saved: Path, tmp_path: Path) -> None:
    """A rate that decays over the whole run does, and a growing weight decay; a constant rate does not (test_run_flags.py)."""
    said = _refused(arguments(load=saved, train_iters=4), 1, "decay_samples: 16 there, 32 here")
    assert "\n  --train-iters 2 in the checkpoint, 4 here\n" in said
    (rehearsed,) = launch([*arguments(load=saved, train_iters=4), "--dry-run"], 1)
    assert rehearsed.code == 2 and "device memory" in rehearsed.stdout and said == rehearsed.stderr, report([rehearsed])
    rates = dict(re.findall(r"--resume-schedule (new|saved) .* continues with (\S+)", said))
    assert {word: float(rate) for word, rate in rates.items()} == {"new": 0.005, "saved": 0.0}
    for word, rate in rates.items():
        longer = arguments(load=saved, train_iters=4, resume_schedule=word, log_interval=1)
        assert "iteration        3/       4" in (told := run(longer)) and f"learning rate: {float(rate):.6E}" in told
    growing = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.1}
    growing |= {"lr_decay_style": "constant", "save": tmp_path, "load": tmp_path}
    run(arguments(**growing, train_iters=1))
    _refused(arguments(**growing, train_iters=2), 1, "total_samples: 8 there, 16 here")


@pytest.mark.parametrize("flag", ["save", "metrics_file", "tensorboard_dir", "profile_dir"])
def test_a_place_that_cannot_be_written(tmp_path: Path, flag: str) -> None:
    """A folder inside a file, which not even the superuser can make: told before training."""
    (tmp_path / "file").write_text("in the way")
    profile = {"profile": True, "profile_step_start": 1} if flag == "profile_dir" else {}
    argv = arguments(train_iters=1, **profile, **{flag: tmp_path / "file" / "folder"})
    ranks = 2 if flag in ("save", "metrics_file") else 1
    ended = launch(argv, ranks)
    assert [end.code for end in ended] == [1] * ranks and all(end.stderr == "" for end in ended[1:]), report(ended)
    assert f"--{flag.replace('_', '-')}" in ended[0].stderr and "Traceback" not in ended[0].stderr, report(ended)
    assert "] iteration" not in ended[0].stdout


def test_a_flipped_byte_in_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    """In the tensors, in the state and in the manifest: never loaded in silence."""
    for name, position in (("rank_00000.safetensors", -1), ("state.json", 30), ("manifest.json", 200)):
        folder = tmp_path / name
        shutil.copytree(saved, folder)
        path = checkpoint(folder, 2) / name
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)
        # A manifest is read when a checkpoint is looked for, so that with --ckpt-step there is no other to fall back to.
        _refused(arguments(load=folder, ckpt_step=2, train_iters=4, lr_decay_iters=2), 1, str(checkpoint(folder, 2)))


def test_a_step_that_is_not_there(saved: Path) -> None:
    """Named with those that are."""
    _refused(arguments(load=saved, ckpt_step=7, train_iters=1), 1, "--ckpt-step 7", "2, 1")


def test_a_checkpoint_without_optimizer_state(tmp_path: Path) -> None:
    """A checkpoint of --no-save-optim has weights only. By default it is refused; --no-load-optim takes weights and counts."""
    run([*arguments(train_iters=2, save=tmp_path, exit_interval=1), "--no-save-optim"])
    assert saved_tensors(tmp_path, 1) and not saved_tensors(tmp_path, 1, "exp_avg")
    again = arguments(train_iters=2, load=tmp_path, save=tmp_path)
    _refused(again, 1, "without optimizer state", "--no-load-optim", "--finetune")
    assert "moments start from zero" in run([*again, "--no-load-optim"])


LAYOUTS = {"tp2": (2, TP2), "pp2": (2, PP2), "dp2": (2, {}), "tp2-pp2": (4, {**TP2, **PP2})}


def test_a_rank_that_dies(tmp_path: Path, layout: str, victim: int) -> None:
    """Killed without a word in the middle of the run: the other ranks end by themselves and say with whom they lost contact."""
    world_size, settings = LAYOUTS[layout]
    victim %= world_size
    ended = launch(
        arguments(**settings, train_iters=1000, save=tmp_path, save_interval=2, hang_warn_s=60, global_batch_size=4),
        world_size,
        before=on_rank(victim, 3, lambda _: os.kill(os.getpid(), signal.SIGKILL)),
        gloo=True,
    )
    _assert_survivors_say_so(ended, victim, named=True)
    assert complete_checkpoints(tmp_path) == ["iter_0000002"]


def _assert_survivors_say_so(ended: list[Ended], victim: int, *, named: bool = False) -> None:
    other = f"rank {victim} (node {socket.gethostname()})" if named else "another rank"
    assert ended[victim].code == -signal.SIGKILL, report(ended)
    for rank, end in enumerate(ended):
        if rank != victim:
            assert end.code == 1, report(ended)
            assert f"rank {rank}: lost contact with {other}" in end.stderr and "Traceback" not in end.stderr, report(ended)


def _dies_in(owner: Any, method: str, victim: int) -> Callable[[int], None]:
    def before(rank: int) -> None:
        if rank == victim:
            setattr(owner, method, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))

    return before


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.full("the other rank")), 1])
def test_a_rank_that_dies_while_saving(saved: Path, tmp_path: Path, victim: int) -> None:
    """The checkpoint of before stays what is resumed from; what the dead save left is in nobody's way."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    again = arguments(load=tmp_path, ckpt_step=1, save=tmp_path, train_iters=3, lr_decay_iters=2)
    ended = launch([*again, "--save-interval", "3"], 2, before=_dies_in(save_module, "write_rank_files", victim), gloo=True)
    _assert_survivors_say_so(ended, victim)
    assert complete_checkpoints(tmp_path) == ["iter_0000001", "iter_0000002"]
    assert digest(tmp_path, 2) == digest(saved, 2)
    said = run(arguments(load=tmp_path, save=tmp_path, train_iters=3, lr_decay_iters=2))
    assert f"resuming from {checkpoint(tmp_path, 2)}" in said
    assert complete_checkpoints(tmp_path)[-1] == "iter_0000003" and not list(tmp_path.glob(".iter*"))


def test_a_rank_that_dies_in_an_evaluation(tmp_path: Path) -> None:
    """Forward passes only: a stage waits for the one before it."""
    argv = arguments(**PP2, train_iters=2, eval_iters=1, eval_interval=1, global_batch_size=4, save=tmp_path)
    ended = launch(argv, 2, before=_dies_in(TrainStep, "evaluate", 0), gloo=True)
    _assert_survivors_say_so(ended, 0)
    assert complete_checkpoints(tmp_path) == []


SPECIAL = [
    "--config {}",
    "--data-path {} --no-mock-data",
    "--data-args-path {} --no-mock-data",
    "--per-split-data-args-path {} --no-mock-data",
    "--tokenizer-type GPT2BPETokenizer --vocab-file {} --merge-file {}",
    "--tokenizer-type TikTokenizer --tokenizer-model {}",
    "--tokenizer-type Llama2Tokenizer --tokenizer-model {}",
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {}",
    "--load {}",
    "--pretrained-checkpoint {}",
    "--save {}",
    "--pipeline-split balanced --layer-costs {} --pipeline-model-parallel-size 1",
    "--plan-report {folder}/report --plan-cluster {}",
]


KINDS = ("pipe", "device", "loop")
FEW_SPECIAL = [
    ("--config {}", "device"),
    ("--config {}", "loop"),
    ("--data-path {} --no-mock-data", "device"),
    ("--tokenizer-type TikTokenizer --tokenizer-model {}", "device"),
    ("--load {}", "loop"),
]
"""Beside every flag with a pipe."""


def _special(full: bool) -> list[tuple[str, str]]:
    cases = [case for case in itertools.product(SPECIAL, KINDS) if case != ("--config {}", "pipe")]
    return [case for case in cases if full or case[1] == "pipe" or case in FEW_SPECIAL]


def test_special_files_are_refused_by_every_flag(words: str, kind: str, tmp_path: Path) -> None:
    """At once: a pipe that nobody writes to, a device that has no end, a link to itself. (--config reads pipes: of a shell.)"""
    place = tmp_path / "special"
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("/dev/zero" if kind == "device" else place)
    given = words.format(place, place, folder=tmp_path).split()
    settings = {"train_iters": 1, **({"tokenizer_type": None} if "--tokenizer-type" in words else {})}
    (ended,) = launch([*arguments(**settings), *given], timeout=20)
    assert ended.code in (1, 2), report([ended])
    assert "Traceback" not in ended.stderr, ended.stderr
    assert str(place) in ended.stderr, ended.stderr


def test_a_tensor_that_no_memory_holds() -> None:
    for more in ([], ["--dry-run"]):
        (ended,) = launch([*arguments(train_iters=1, hidden_size=10**9, num_attention_heads=1), *more])
        assert ended.code == 1 and "is larger than any memory" in ended.stderr and "Traceback" not in ended.stderr, report([ended])
